"""What the proof of the rigorous mode needs of its records, its labels and its keys."""

import dataclasses
import json
from unittest import mock

import jax
import numpy as np
import pytest

from dpjax import auditing, data, relevance
from dpjax.auditing.scores import Scores
from dpjax.experiments.kinds.relevance import audit as relevance_audit
from dpjax.experiments.kinds.relevance import config as relevance_config
from dpjax.experiments.kinds.relevance import table
from dpjax.experiments.kinds.relevance.config import RelevanceAudit, RelevanceConfig
from dpjax.experiments.kinds.relevance.methods import RadpRigorous, TrainedOnPublic
from dpjax.experiments.plots import redraw
from dpjax.experiments.run import guarantee
from dpjax.relevance import feature_shares, gradient_methods, lrp, record_noise, rigorous
from dpjax.relevance.inputs import Inputs, Outcome
from dpjax.relevance.privacy import Privacy
from dpjax.relevance.settings import FEATURES, Rigorous, Training
from dpjax.zoo import networks
from tests.refuses import refuses

_SHAPE = (4, 4, 1)
_LINEAR = relevance.Nets(*[networks.build("linear", num_classes=3)] * 4)
_LOCAL = Rigorous(shuffle=False, model1="none", pool=2, delta=1e-6)


class _Records:
  """A data set that checks nothing: the library may be handed anything."""

  name, num_classes, vocab_size = "mine", 3, None

  def __init__(self, x, y):
    self.x, self.y = x, y

  def __len__(self):
    return len(self.y)

  def subset(self, ids):
    return _Records(self.x[ids], self.y[ids])


def _records(n=30, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.random((n, *_SHAPE)).astype(np.float32)
  return data.from_arrays(x, np.arange(n) % 3, num_classes=3)


def _job(epsilon=4.0, how=_LOCAL, **fields):
  keys = relevance.Keys(jax.random.key(0), jax.random.key(1), 0, 7)
  standard = {"train": _records(), "test": _records(9, 1), "nets": _LINEAR}
  standard |= {"keys": keys, "training": Training(num_epochs=1, batch_size=10)}
  return relevance.Inputs(epsilon=epsilon, rigorous=how, **{**standard, **fields})


def _noisy(monkeypatch, *jobs):
  """The noise of each job's features, in units of its scale."""
  seen, real = [], record_noise.noisy_records

  def spy(key, ids, x, scales, **options):
    out = real(key, ids, x, scales, **{**options, "grid": None})
    seen.append((out - x) / record_noise.by_feature(scales, x.shape[1:]))
    return out

  monkeypatch.setattr(record_noise, "noisy_records", spy)
  last = []
  for job in jobs:
    relevance.run("radp_rigorous", job)
    last.append(seen[-1])
  return last


# --- records


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(
  "change",
  [
    lambda x: 3 * x,
    lambda x: x - 0.5,
    lambda x: np.where(x > 0.9, np.nan, x).astype(np.float32),
    lambda x: np.where(x > 0.9, np.inf, x).astype(np.float32),
    lambda x: (255 * x).astype(np.uint8),
    lambda x: x.astype(np.float64),
  ],
)
def test_records_outside_the_unit_interval_are_refused(features, change):
  how, good = dataclasses.replace(_LOCAL, features=features), _records()
  bad = _Records(change(good.x), good.y)
  for part in ("train", "test"):
    with refuses(f"{part}.x") as caught:
      relevance.run("radp_rigorous", _job(how=how, **{part: bad}))
    assert "\n" not in str(caught.value)
  with refuses("x"):
    rigorous.clip_records(bad.x, np.full(16, 1 / 16), how)


@pytest.mark.long
def test_too_few_records_for_both_parts_are_one_line():
  how = dataclasses.replace(_LOCAL, model1="untrained", split=True)
  with refuses("train"):
    relevance.run("radp_rigorous", _job(how=how, train=_records(1)))
  one = relevance.run("radp_rigorous", _job(train=_records(1)))  # nothing to split
  assert one.privacy.epsilon == pytest.approx(4.0)


# --- labels


def test_public_labels_behind_a_shuffler_are_refused():
  for features in ("laplace", "laplace_clipped"):
    with refuses("rigorous.shuffle") as caught:
      Rigorous(labels="public", shuffle=True, features=features)
    assert "\n" not in str(caught.value)
  with refuses("rigorous.shuffle"):
    dataclasses.replace(_LOCAL, labels="public", shuffle=True)


@pytest.mark.long
def test_why_a_class_of_its_own_hides_nobody():
  """One record of class 0 among 999 of class 1: reports carry their labels, so its own report
  stands alone, and an attacker gets the whole LOCAL budget, whatever was shuffled."""
  central, n, trials = 0.5, 1000, 4000
  local = rigorous.local_epsilon_for(central, n, 1e-5)
  rng = np.random.default_rng(0)
  of_class_0 = [value + rng.laplace(0, 1 / local, trials) for value in (0.0, 1.0)]
  scores = Scores(inside=of_class_0[1], outside=of_class_0[0])
  assert auditing.clopper_pearson(scores, delta=1e-5) > 1.8 * central


@pytest.mark.long
def test_public_labels_are_named_wherever_the_epsilon_is_printed():
  how = dataclasses.replace(_LOCAL, labels="public")
  outcome = relevance.run("radp_rigorous", _job(how=how))
  stated = outcome.privacy.to_json()
  assert "features only, label public" in stated["neighboring_relation"]
  assert stated["unit"] == "example's features"
  result = {
    **json.loads(json.dumps(stated)), "dataset": "d", "curve": "radp", "test_accuracy": 0.5,
    "epsilon_target": 4.0,
  }  # fmt: skip
  line = guarantee.summary(result)
  assert "features only, label public" in line and "per example's features" in line
  assert "features only, label public" in table.markdown(table.rows_of([result]))
  row = result | {"epoch": 1.0, "test_loss": 1.0, "epsilon_kind": "proved"}
  figure = redraw.draw([row], table.recipe(""))
  assert "replace one example's features (features only, label public)" in (
    figure.axes[0].get_title(loc="left")
  )
  private = relevance.run("radp_rigorous", _job()).privacy.to_json()
  assert (private["neighboring_relation"], private["unit"]) == ("replace_one", "example")


@pytest.mark.long
def test_an_audit_changes_no_label_that_is_public():
  how = dataclasses.replace(_LOCAL, labels="public")
  job = _job(how=how)
  outcome = relevance.run("radp_rigorous", job)
  audit = RelevanceAudit(num_trials=40, num_canaries=20)
  config = RelevanceConfig(method=RadpRigorous(), audit=audit)
  found = relevance_audit.facts(config, job, outcome)["audit"]
  assert set(found["bounds"]) == {"U1", "U4"} and not found["refuted"]
  mixed, canaries = auditing.insert_canaries(
    job.train, num_canaries=20, seed=0, kind="random", neighboring_relation="replace_one",
    keep_labels=True,
  )  # fmt: skip
  np.testing.assert_array_equal(mixed.y, job.train.y)
  assert canaries.included.any() and (mixed.x != job.train.x).any()
  with refuses("kind"):
    auditing.insert_canaries(job.train, num_canaries=20, seed=0, keep_labels=True)


@pytest.mark.parametrize("kind", ["proved", "claimed"])
def test_a_claim_about_features_is_tested_with_public_labels_as_a_proof_is(kind):
  # Of a claim, such as a run with a noise_seed, canaries had random labels, which nothing hides.
  privacy = Privacy(
    kind, 1.0, 1e-5, rigorous.FEATURES_ONLY, failed_assumptions=("noise: known",) * 2
  )
  outcome = Outcome(None, None, None, privacy, 1, None)
  config = RelevanceConfig(method=RadpRigorous(), audit=RelevanceAudit(num_canaries=20))
  put = mock.patch.object(auditing, "insert_canaries", side_effect=KeyError)
  with put as asked_for, pytest.raises(KeyError):
    relevance_audit._canaries(config, _job(), outcome, "U4", 0.95)
  asked = asked_for.call_args.kwargs
  assert asked["keep_labels"] and asked["neighboring_relation"] == "replace_one"


# --- keys


@pytest.mark.long
def test_one_key_gives_no_noise_twice(monkeypatch):
  """With one noise at two scales, or on two data sets, the records could be solved for."""
  base = _job()
  jobs = [
    base,
    dataclasses.replace(base, epsilon=5.0),
    dataclasses.replace(base, train=_records(30, seed=5)),
    dataclasses.replace(base, rigorous=dataclasses.replace(_LOCAL, label_share=0.3)),
    _job(),  # the first once more: the same release, which tells nothing new
  ]
  noise = _noisy(monkeypatch, *jobs)
  np.testing.assert_allclose(noise[0], noise[-1], atol=1e-5)
  for index, one in enumerate(noise[:-1]):
    for other in noise[:index]:
      assert np.abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.4
      assert np.median(np.abs(one - other)) > 0.1


def test_private_records_are_not_public():
  how = dataclasses.replace(_LOCAL, model1="public", split=False, epsilon_b=0.2)
  train = _records()
  mixed = np.concatenate([_records(10, 3).x, train.x[:2]])
  public = data.from_arrays(mixed, np.zeros(12, int), num_classes=3, name="elsewhere")
  for other in (train, train.subset(slice(0, 5)), public):
    with refuses("public"):
      relevance.run("radp_rigorous", _job(how=how, train=train, public=other))
  twice = np.repeat(train.x, 2, axis=1)
  for x, classes in ((twice, 3), (_records(10, 3).x, 5)):
    other = data.from_arrays(x, np.zeros(len(x), int), num_classes=classes, name="other")
    with refuses("public", value="other"):
      relevance.run("radp_rigorous", _job(how=how, train=train, public=other))
  with refuses("method.model1.public_data", value="mnist"):
    config = RelevanceConfig(
      method=RadpRigorous(model1=TrainedOnPublic(public_data="mnist"))
    )
    config.data.name = "mnist"
    relevance_config.check(config)


@pytest.mark.parametrize("method", ["radp_rigorous", "dpsgd", "radp_dpsgd", "ilm", "no_dp"])
@pytest.mark.parametrize("name", ["relevance_records", "public"])
def test_what_a_method_would_leave_unread_is_refused(method, name):
  job = _job()
  value = 10 if name == "relevance_records" else job.test
  with refuses(name):
    relevance.run(method, dataclasses.replace(job, **{name: value}))


def test_more_records_than_there_are_is_told_before_the_first_training(monkeypatch):
  monkeypatch.setattr(Inputs, "model_1", None)
  job = dataclasses.replace(_job(), relevance_records=10**7)
  with refuses("relevance_records", value=10000000):
    relevance.run("adlm", job)


@pytest.mark.parametrize("method", ["radp_rigorous", "dpsgd", "radp_dpsgd", "adlm"])
def test_empty_records_are_refused(method):
  job = _job()
  present = np.arange(len(job.train)) > 0
  train = dataclasses.replace(job.train, present=present)
  with refuses("train"):
    relevance.run(method, dataclasses.replace(job, train=train))


def test_a_local_release_that_breaks_its_promise_is_refuted_under_the_shuffler():
  result = {
    "epsilon": 1.0, "epsilon_kind": "proved", "epsilon_audited_lower": 0.0,
    "audit": {"refuted": True},
  }  # fmt: skip
  assert table.verdict([result]) == "PROOF REFUTED"


@pytest.mark.parametrize("method", ["dpsgd", "radp_dpsgd"])
def test_a_number_of_records_that_the_relation_hides_must_be_declared(method):
  # Undeclared, 2 and 3 records had 1 and 2 steps of batches of 2, and noise of two scales.
  with refuses("train.nominal_size", value=None):
    relevance.run(method, _job())
  plans = [
    gradient_methods.make_plan(job, job.size, 1.0)
    for job in (_job(train=_records(n).declared(30)) for n in (29, 30))
  ]
  assert plans[0] == plans[1]


@pytest.mark.slow
def test_a_record_more_moves_the_share_of_no_other_record():
  net = networks.build("mlp", num_classes=3, features=(32,))
  rows = _records(8)
  params = net.init(jax.random.key(0), rows.x[:1])
  share = lambda part: feature_shares.mean_shares(net.apply, params, part, lrp.Lrp())
  before, alone, after = (share(rows.subset(part)) for part in (slice(7), [7], slice(8)))
  np.testing.assert_allclose(8 * after - 7 * before, alone, rtol=0, atol=1e-13)

"""Every method from data to outcome, on 200 digits and a net of eight hidden units."""

import dataclasses
import math

import dp_accounting
import jax
import numpy as np
import optax
import pytest

from dpjax import accounting, data, relevance, trees
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.relevance import adlm, gradient_methods, train
from dpjax.relevance.settings import AdLM, Paper, Private, Rigorous, Training
from dpjax.zoo import networks
from tests.refuses import refuses

_TRAIN, _TEST = data.load("digits")
_SMALL = _TRAIN.subset(slice(0, 200)).declared(200)
_FEW = _TEST.subset(slice(0, 40))


def _mlp(width, activation="tanh"):
  return networks.build("mlp", num_classes=width, features=(8,), activation=activation)


_NETS = relevance.Nets(_mlp(10, "relu"), _mlp(10), _mlp(30), _mlp(10, "tempered_sigmoid"))
_LINEAR = relevance.Nets(*[networks.build("linear", num_classes=10)] * 4)
_KEYS = relevance.Keys(jax.random.key(0), jax.random.key(1), 0, 2**200 + 1)
_LOCAL = Rigorous(
  model1="untrained", split=False, shuffle=False, epsilon_b=0.5, budget_share_1=0.1, pool=2
)


def _job(epsilon=8.0, **fields):
  standard = dict(
    nets=_NETS, training=Training(num_epochs=2, batch_size=50), rigorous=_LOCAL
  )
  standard |= {"train": _SMALL, "test": _FEW, "keys": _KEYS}
  return relevance.Inputs(epsilon=epsilon, **{**standard, **fields})


@pytest.mark.cases(slow=["no_dp"], long=...)
@pytest.mark.parametrize("method", ["adlm", "no_dp", "radp"])
def test_what_is_not_proved_has_no_proved_epsilon(method):
  scores = []
  outcome = relevance.run(method, _job(on_epoch=lambda e, s: scores.append((e, s))))
  assert outcome.privacy.proved_epsilon is None
  assert outcome.privacy.kind == ("none" if method == "no_dp" else "claimed")
  assert [epoch for epoch, _ in scores] == [1, 2]
  assert set(scores[0][1]) == {"accuracy", "loss"}
  assert outcome.num_steps == 8
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outcome.params))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adlm", "ilm"])
def test_a_loss_without_noise_is_named_and_learns_otherwise(method, monkeypatch):
  drawn, draw = [], adlm.loss_noise
  seen = lambda *args, **fields: drawn.append(draw(*args, **fields)) or drawn[-1]
  monkeypatch.setattr(adlm, "loss_noise", seen)
  once = {"training": Training(num_epochs=1, batch_size=50), "memo": {}}
  with_noise = relevance.run(method, _job(**once))
  without = relevance.run(method, _job(**once, adlm=AdLM(loss_noise=False)))
  failed = [set(each.privacy.failed_assumptions) for each in (with_noise, without)]
  assert [text.split(":")[0] for text in failed[1] - failed[0]] == ["AdLM-5"]
  assert failed[0] < failed[1] and not np.any(drawn[1])
  # The noise pulls each weight of the head its own way.
  moved = np.asarray(with_noise.params["head"] - without.params["head"])
  assert np.corrcoef(np.sign(drawn[0]).ravel(), moved.ravel())[0, 1] > 0.5


@pytest.mark.long
def test_jobs_with_one_memo_train_model_1_once_and_change_nothing(monkeypatch):
  fits, fit = [], train.fit
  monkeypatch.setattr(train, "fit", lambda *a, **k: fits.append(k["seed"]) or fit(*a, **k))
  ways = [("radp", Paper(preset="P3")), ("radp", Paper(preset="P5")), ("adlm", Paper())]
  apart = [relevance.run(m, _job(paper=p)) for m, p in ways]
  assert len(fits) == 6
  memo = {}
  shared = [relevance.run(m, _job(paper=p, memo=memo)) for m, p in ways]
  assert len(fits) == 6 + 4
  digests = [[trees.sha256(o.params) for o in outcomes] for outcomes in (apart, shared)]
  assert digests[0] == digests[1]
  others = [
    {"keys": _KEYS._replace(init=jax.random.key(3))},
    {"keys": _KEYS._replace(order=1)},
    {"training": Training(num_epochs=1, batch_size=50)},
    {"train": _TRAIN.subset(slice(0, 200))},
  ]
  for changed in others:
    relevance.run("radp", _job(**changed, memo=memo))
  assert len(fits) == 10 + 2 * len(others)


@pytest.mark.slow
def test_the_parts_of_a_batch_give_the_gradient_of_the_whole():
  x, y = jax.numpy.asarray(_SMALL.x[:192]), jax.numpy.asarray(_SMALL.y[:192])
  net = _NETS.second
  loss, params = train.cross_entropy(net.apply), net.init(jax.random.key(4), x)
  assert train.num_parts(192, "cpu") == 3
  parts, nothing = train._in_parts(loss, 3)(params, x, y)
  whole = jax.grad(loss)(params, x, y)
  assert nothing is None
  for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 600, 1000, 1009, 4096, 4097])
def test_a_batch_is_cut_into_equal_parts_or_not_at_all(size):
  count = train.num_parts(size, "cpu")
  assert size % count == 0 and (count == 1 or size // count <= 64)
  assert train.num_parts(size, "gpu") == 1


@pytest.mark.cases(long=["P5"], slow=...)
@pytest.mark.parametrize("preset", ["P1", "P5"])
def test_the_presets_of_radp_are_functions_of_their_streams(preset):
  job = _job(paper=Paper(preset=preset))
  other = dataclasses.replace(job, keys=_KEYS._replace(noise=jax.random.key(9)))
  one, same, different = (relevance.run("radp", each) for each in (job, job, other))
  assert trees.sha256(one.params) == trees.sha256(same.params)
  assert trees.sha256(one.params) != trees.sha256(different.params)
  assert one.privacy.details["draw"] == {"P1": "record_once", "P5": "run"}[preset]


def test_fresh_noise_each_epoch_differs_from_noise_drawn_once():
  memo = {}  # of model 1, which is the same
  once, fresh = (
    relevance.run("radp", _job(paper=Paper(preset="custom", draw=draw), memo=memo))
    for draw in ("record_once", "record_fresh")
  )
  assert trees.sha256(once.params) != trees.sha256(fresh.params)


# --- gradient methods


@pytest.mark.long
@pytest.mark.parametrize(
  ("method", "relation"),
  [("dpsgd", "replace_one"), ("radp_dpsgd", "add_or_remove_one")],
)
def test_gradient_methods_are_calibrated_to_their_target(method, relation):
  job = _job(epsilon=2.0, private=Private(neighboring_relation=relation), nets=_LINEAR)
  found = relevance.run(method, job).privacy
  assert found.kind == "proved" and found.neighboring_relation == relation
  assert 1.99 < found.epsilon <= 2.0 and found.claimed_epsilon == found.epsilon
  assert math.fsum(c.epsilon for c in found.ledger) >= found.epsilon * (1 - 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_the_relevance_of_radp_dpsgd_is_paid_for_with_noise(relation):
  job = _job(private=Private(neighboring_relation=relation))
  alone, beside = (
    gradient_methods.make_plan(job, 200, 2.0, before) for before in (0.0, 0.5)
  )
  assert beside.noise_multiplier > alone.noise_multiplier
  event = dp_accounting.ComposedDpEvent([pure_dp_event(0.5), beside.event()])
  spent = accounting.epsilon(
    event, delta=beside.accounted_delta(1e-5), neighboring_relation=relation,
    accountant=beside.accountant,
  )  # fmt: skip
  assert 1.99 < spent <= 2.0


@pytest.mark.cases(long=["0.0-shape1-4"])
@pytest.mark.parametrize(("shape", "pool"), [((8, 8, 3), 4), ((9, 10, 1), 4), ((6,), 4)])
@pytest.mark.parametrize("kappa", [0.0, 0.25, 1.0])
def test_weights_of_inputs_are_smooth_and_of_unit_square(shape, pool, kappa):
  blocks = (shape[0] // pool) * (shape[1] // pool) if len(shape) == 3 else shape[0]
  beta = np.arange(1.0, blocks + 1) / np.arange(1.0, blocks + 1).sum()
  weights = gradient_methods.input_weights(beta, kappa, shape, pool)
  assert weights.shape == ((*shape[:2], 1) if len(shape) == 3 else shape)
  low, high = ((blocks * b) ** kappa for b in (beta.min(), beta.max()))
  scale = math.sqrt(np.sum(beta * (blocks * beta) ** (2 * kappa)))
  assert low / scale * 0.999 <= weights.min() <= weights.max() <= high / scale * 1.001
  if len(shape) == 1:
    np.testing.assert_allclose(np.sum(beta * weights**2), 1, rtol=1e-6)
  if kappa == 0:
    np.testing.assert_allclose(weights, 1, rtol=1e-6)


def test_blocks_of_relevance_larger_than_the_image_are_one_line():
  job = _job(private=Private(relevance_pool=9), nets=_LINEAR)
  with refuses("private.relevance_pool", value=9):
    relevance.run("radp_dpsgd", job)


@pytest.mark.long
def test_dpdligdo_is_the_gradient_of_dp_sgd_behind_another_optimizer():
  outcome = relevance.run(
    "dpdligdo", _job(private=Private(iterative="adagrad"), nets=_LINEAR)
  )
  plan = gradient_methods.make_plan(_job(), 200, 8.0)
  assert outcome.privacy.details["noise_multiplier"] == plan.noise_multiplier
  assert outcome.privacy.kind == "proved"


@pytest.mark.long
def test_pairs_claim_less_than_they_cost():
  found = relevance.run(
    "dpdligdo", _job(2.0, private=Private(legacy_microbatch=2), nets=_LINEAR)
  ).privacy
  assert found.kind == "claimed" and found.proved_epsilon is None
  assert found.details["corrected_epsilon"] > 1.8 * found.claimed_epsilon
  assert found.failed_assumptions[0].startswith("G1")


def test_the_loss_of_a_pair_is_the_mean_of_its_two():
  from dpjax.types import Example

  loss_fn = lambda params, e: params * e.x.sum() + e.y
  pair = Example(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([0, 1]))
  assert gradient_methods.pair_loss(loss_fn)(2.0, pair) == (6 + 0 + 14 + 1) / 2


@pytest.mark.long
def test_dp_sgld_is_dp_sgd_without_momentum(monkeypatch):
  monkeypatch.setattr(relevance.Inputs, "bound", lambda job, *how: job)  # one noise
  job = _job(epsilon=2.0, private=Private(momentum=0.0), nets=_LINEAR)
  sgld, sgd = (relevance.run(m, job) for m in ("dp_sgld", "dpsgd"))
  for a, b in zip(jax.tree.leaves(sgld.params), jax.tree.leaves(sgd.params)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# --- rigorous mode


@pytest.mark.long
def test_the_ledger_of_rigorous_mode_is_the_target():
  outcome = relevance.run("radp_rigorous", _job())
  assert [c.stage for c in outcome.privacy.ledger] == ["A", "B", "C", "L"]
  assert outcome.privacy.epsilon == pytest.approx(8.0)
  assert outcome.privacy.neighboring_relation == "replace_one"
  assert outcome.privacy.delta == 0
  assert set(outcome.maps) == {"beta"}  # nothing that is not private


@pytest.mark.long
def test_t17_split_data_pays_the_larger_of_both():
  how = dataclasses.replace(_LOCAL, split=True, split_share=0.5, epsilon_b=3.0)
  outcome = relevance.run("radp_rigorous", _job(rigorous=how))
  spent = {c.records: 0.0 for c in outcome.privacy.ledger}
  for c in outcome.privacy.ledger:
    spent[c.records] += c.epsilon
  assert spent == pytest.approx({"D1": 3.0, "D2": 8.0})
  assert outcome.privacy.epsilon == pytest.approx(8.0)


@pytest.mark.long
def test_t17_fresh_noise_costs_every_epoch():
  how = dataclasses.replace(_LOCAL, draw="record_fresh", compose_fresh=True)
  job = _job(rigorous=how)
  fresh, once = (
    relevance.run("radp_rigorous", j).privacy
    for j in (job, dataclasses.replace(job, rigorous=_LOCAL))
  )
  assert fresh.epsilon == pytest.approx(once.epsilon)
  ratio = fresh.details["mean_noise_scale"] / once.details["mean_noise_scale"]
  assert ratio == pytest.approx(2)  # epochs: each copy has half of the budget


@pytest.mark.long
def test_a_private_model_1_is_charged_to_the_records_that_it_saw():
  how = dataclasses.replace(
    _LOCAL, model1="dp_sgd", split=True, split_share=0.5, epsilon_b=1.0
  )
  outcome = relevance.run("radp_rigorous", _job(rigorous=how, nets=_LINEAR))
  stages = {c.stage: c for c in outcome.privacy.ledger}
  assert stages["A"].records == "D1" and 6.9 < stages["A"].epsilon <= 7.0
  assert outcome.privacy.epsilon == pytest.approx(8.0, rel=2e-3)
  assert 0 < outcome.privacy.delta <= 1e-5


@pytest.mark.long
def test_a_public_model_1_costs_nothing():
  how = dataclasses.replace(_LOCAL, model1="public")
  job = _job(rigorous=how, nets=_LINEAR, public=_FEW)
  found = relevance.run("radp_rigorous", job).privacy
  charges = found.ledger
  assert charges[0].epsilon == 0 and "public data (digits)" in charges[0].what
  # that no private record is known to them cannot be checked: copies differ in a bit
  assert found.kind == "claimed" and found.proved_epsilon is None
  assert found.failed_assumptions == (
    "no private record is known to the public data digits",
  )
  named = dataclasses.replace(job, public=dataclasses.replace(_FEW, name="random_process"))
  assert relevance.run("radp_rigorous", named).privacy.kind == "claimed"


@pytest.mark.slow
def test_public_labels_are_said_to_be_public():
  how = dataclasses.replace(_LOCAL, labels="public", features="gaussian", delta=1e-6)
  found = relevance.run("radp_rigorous", _job(rigorous=how)).privacy
  assert any("WITHOUT labels" in note for note in found.notes)
  assert [c.stage for c in found.ledger] == ["A", "B", "C"]
  assert 0 < found.delta <= 1e-6


@pytest.mark.slow
def test_a_shuffler_buys_local_budget():
  how = dataclasses.replace(_LOCAL, shuffle=True, model1="none", delta=1e-2)
  found = relevance.run("radp_rigorous", _job(1.0, rigorous=how)).privacy
  assert found.details["epsilon_local"] > 1.5 and found.epsilon == 1.0
  assert found.delta == 1e-2 and found.ledger[-1].stage == "C+L+S"


@pytest.mark.long
def test_with_a_huge_budget_rigorous_mode_learns():
  """Not private, but it shows that what remains without noise is the task."""
  how = dataclasses.replace(_LOCAL, pool=1, features="laplace", epsilon_b=100.0)
  nets = _NETS._replace(second=networks.build("linear", num_classes=10))
  scores = []
  job = dataclasses.replace(
    _job(20_000.0, rigorous=how, on_epoch=lambda e, s: scores.append(s["accuracy"])),
    train=_TRAIN, test=_TEST, nets=nets, training=Training(15, 50, 0.05),
  )  # fmt: skip
  relevance.run("radp_rigorous", job)
  assert scores[-1] > 0.85


def test_budgets_that_do_not_fit_are_refused():
  with refuses("rigorous.epsilon_b", value=0.5):
    relevance.run("radp_rigorous", _job(epsilon=0.5))
  split = dataclasses.replace(_LOCAL, split=True, split_share=1e-6)
  with refuses("train"):
    relevance.run("radp_rigorous", _job(rigorous=split))
  public = dataclasses.replace(_LOCAL, model1="public")
  with refuses("rigorous.model1"):
    relevance.run("radp_rigorous", _job(rigorous=public))
  with refuses("method", value="rapd"):
    relevance.run("rapd", _job())


@pytest.mark.slow
def test_the_plan_of_a_gradient_method_is_the_accountants():
  job = _job(epsilon=2.0)
  plan = gradient_methods.make_plan(job, 200, 2.0)
  assert plan.num_steps == 8 and plan.sampler.sampling_prob == 0.25
  spent = accounting.epsilon(plan.event(), delta=plan.accounted_delta(1e-5))
  assert 1.99 < spent <= 2.0
  plan.check_capacity(200)


# --- weight decay


def _one_step(weight_decay):
  """(parameters before, after) one step of plain training."""
  net, x = _mlp(10), np.asarray(_SMALL.x[:20])
  before = net.init(jax.random.key(4), x[:1])
  steps = train.fit(
    train.cross_entropy(net.apply),
    before,
    lambda epoch: (x, np.asarray(_SMALL.y[:20])),
    Training(num_epochs=1, batch_size=20, learning_rate=0.02),
    num_records=20,
    seed=0,
    weight_decay=weight_decay,
  )
  return before, train.in_one_go(steps)


def test_weight_decay_takes_its_share_of_every_parameter():
  """Decoupled (Loshchilov and Hutter 2019): a step is shorter by rate * decay * w."""
  before, plain = _one_step(0.0)
  _, decayed = _one_step(0.5)
  for w, without, with_decay in zip(*map(jax.tree.leaves, (before, plain, decayed))):
    np.testing.assert_allclose(without - with_decay, 0.02 * 0.5 * w, rtol=1e-3, atol=1e-6)
  assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(before)) > 0.1


@pytest.mark.slow
def test_weight_decay_reaches_model_2_of_the_rigorous_mode():
  nets = _LINEAR
  how = lambda decay: Training(num_epochs=2, batch_size=50, weight_decay=decay)
  norms = []
  for decay in (0.0, 30.0):
    outcome = relevance.run("radp_rigorous", _job(nets=nets, training=how(decay)))
    norms.append(float(optax.global_norm(outcome.params)))
  assert norms[1] < 0.9 * norms[0], norms


@pytest.mark.cases(quick=["radp"], long=...)
@pytest.mark.parametrize("method", ["radp", "adlm", "dpsgd", "no_dp"])
def test_weight_decay_that_a_method_does_not_use_is_refused(method):
  job = _job(training=Training(num_epochs=1, weight_decay=0.5))
  with refuses("weight_decay", value=0.5):
    relevance.run(method, job)

"""Private selection: random and secret number of runs, both epsilons, nothing else out."""

import dataclasses
import functools
import itertools
import json
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dpjax import accounting, noise, sampling
from dpjax.accounting.event_kinds.kind import event_from_json
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import finished, loop
from dpjax.experiments.sweeps import tuning
from dpjax.experiments.sweeps.sweep import Selection
from dpjax.validate import UserError
from tests import plans
from tests.refuses import refuses
from tests.sweeps.grids import Grid

_GRID = {"optimizer.learning_rate": [0.1, 0.2, 0.4, 0.8]}


def _sweep(**changes):
  selection = changes.pop("law", {})
  options: dict[str, Any] = {"grid": _GRID}
  options["selection"] = Selection(**({"mean_trials": 6.0} | selection))
  return Grid(**(options | changes))


def _plan(config, data):
  del data
  return plans.of(
    200,
    prob=0.05,
    noise_multiplier=config.privacy.noise_multiplier or 2.0,
    normalize_by=50,
    num_steps=30,
  )


def _promised(plan_fn):
  """What a plan rests on beside it, as `tuning.plan_of` returns them."""

  def of(config, data):
    plan = plan_fn(config, data)
    return plan, plan.assumptions

  return of


def _select(runs, folder, train, load, plan_of):
  """A selection whose runs, data and plans are of these functions."""
  of_runs = mock.patch.multiple(loop, train=train, load=load)
  with of_runs, mock.patch.object(tuning, "plan_of", plan_of):
    return tuning.run_selection(runs, folder)


class _Train:
  """Writes a model; the score is the learning rate, and each call is remembered."""

  def __init__(self):
    self.configs, self.folders = [], []

  def __call__(self, config, workdir, *, data):
    self.configs.append(config)
    self.folders.append(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    np.savez(workdir / "params.npz", w=np.array([config.optimizer.learning_rate]))
    (workdir / "result.json").write_text(json.dumps({"seed": config.seed}))
    return {"test_accuracy": config.optimizer.learning_rate, "train_loss": 0.0}


def _run(folder, sweep=None, train=None):
  train = train or _Train()
  found = _select(
    (sweep or _sweep()).runs(), folder, train, lambda _: "data", _promised(_plan)
  )
  return found, train


def test_p40_both_epsilons_are_printed_and_the_choice_is_charged(tmp_path, capsys):
  found, _ = _run(tmp_path)
  shown = capsys.readouterr().out
  one, event = _plan(TrainConfig(), None), _plan(TrainConfig(), None).event()
  assert found["epsilon_of_one_run"] == pytest.approx(one.epsilon())
  event_of_choice = repeat_and_select_event(event, mean_trials=6.0)
  expected = accounting.epsilon(
    event_of_choice, delta=one.accounted_delta(1e-5), accountant="rdp"
  )
  assert found["epsilon"] == pytest.approx(expected)
  assert found["epsilon"] > 1.5 * found["epsilon_of_one_run"]
  assert event_from_json(found["event"]) == event_of_choice
  for name in ("epsilon_of_one_run", "epsilon"):
    assert f"epsilon = {accounting.upper(found[name])}," in shown


class _OwnPoisson(sampling.PoissonSampler):
  """Of nobody that dpjax knows: its event is its author's word."""


def test_p40_a_choice_among_claims_is_a_claim(tmp_path, capsys):
  def plan_of(config, data):
    own = _OwnPoisson(sampling_prob=0.05, capacity=200)
    return dataclasses.replace(_plan(config, data), sampler=own)

  found = _select(_sweep().runs(), tmp_path, _Train(), lambda _: "data", _promised(plan_of))
  assert found["epsilon_kind"] == "claimed" and found["failed_assumptions"]
  assert "kind: claimed" in found["privacy_statement"]
  shown = capsys.readouterr().out
  assert (
    "CLAIMED; nothing is proved; fails or is assumed:" in shown and "(proved" not in shown
  )


def test_p40_a_choice_among_runs_from_unknown_weights_is_a_claim(tmp_path):
  """What a run's guarantee rests on is not in its plan alone."""
  known = "no record of this run is known to a.npz"
  rests = iter([(), (known,), (known,), ()])  # of the four settings
  plan_of = lambda config, data: (_plan(config, data), next(rests))
  found = _select(_sweep().runs(), tmp_path, _Train(), lambda _: "data", plan_of)
  assert found["epsilon_kind"] == "claimed" and found["failed_assumptions"] == [known]
  assert "kind: claimed" in found["privacy_statement"]


def test_p40_the_budget_is_that_of_the_choice(tmp_path):
  sweep, cost = _sweep(), _run(tmp_path / "free")[0]
  assert cost["epsilon_of_one_run"] < cost["epsilon"]
  for budget in (cost["epsilon_of_one_run"], cost["epsilon"]):
    sweep.base.privacy.epsilon_budget = budget
    if budget == cost["epsilon"]:
      assert _run(tmp_path / "paid", sweep)[0]["epsilon"] == budget
      continue
    with refuses("privacy.epsilon_budget"):
      _run(tmp_path / "refused", sweep)
  varied = _sweep(grid={"privacy.epsilon_budget": [None, cost["epsilon_of_one_run"]]})
  with refuses("privacy.epsilon_budget"):
    _run(tmp_path / "varied", varied)


def test_each_setting_gets_the_features_of_its_own_model(tmp_path):
  seen = []

  class Train(_Train):
    def __call__(self, config, workdir, *, data):
      seen.append((config.model.name, data))
      return super().__call__(config, workdir, data=data)

  grid = {"model.name": ["linear", "scatter_linear"]}
  sweep = _sweep(grid=grid, law={"mean_trials": 40.0})
  _select(sweep.runs(), tmp_path, Train(), lambda c: c.model.name, _promised(_plan))
  assert seen and all(model == data for model, data in seen)


def test_p40_a_batch_above_capacity_is_paid_for_once_per_run(tmp_path):
  """delta' + (1 + e^eps) E[K] B, with (1 + e^eps_run) B what one run set aside."""
  found, _ = _run(tmp_path)
  one = _plan(TrainConfig(), None)
  overflow = (1e-5 - one.accounted_delta(1e-5)) / (1 + math.exp(one.epsilon()))
  expected = one.accounted_delta(1e-5) + (1 + math.exp(found["epsilon"])) * 6.0 * overflow
  assert found["delta"] == pytest.approx(expected)
  assert found["delta"] > 1e-5


def test_the_best_alone_is_released_without_seed_or_number_of_runs(tmp_path):
  found, train = _run(tmp_path)
  best = max(config.optimizer.learning_rate for config in train.configs)
  assert found["score"] == best
  assert found["setting"] == f"learning_rate={best}"
  released = {path.name for path in (tmp_path / "best").iterdir()}
  assert released == {"params.npz", "selection.json"}
  text = (tmp_path / "best" / "selection.json").read_text()
  assert not any(str(config.seed) in text for config in train.configs if config.seed > 999)
  assert "trial" not in json.loads(text)
  assert np.load(tmp_path / "best" / "params.npz")["w"][0] == best


def test_other_users_of_the_machine_cannot_count_the_trials(tmp_path):
  _run(tmp_path)
  assert (tmp_path / "trials").stat().st_mode & 0o777 == 0o700
  assert (tmp_path / finished.TRIALS_FILE).stat().st_mode & 0o777 == 0o600


def test_p17_every_run_has_a_seed_of_its_own(tmp_path):
  _, train = _run(tmp_path, _sweep(law={"mean_trials": 40.0}))
  seeds = [config.seed for config in train.configs]
  assert len(set(seeds)) == len(seeds) and 0 not in seeds
  assert set(np.diff(seeds)) != {1}


def test_p16_a_second_start_repeats_the_same_trials_and_another_folder_draws_others(
  tmp_path,
):
  sweep = _sweep(law={"mean_trials": 30.0})
  _, first = _run(tmp_path / "a", sweep)
  _, again = _run(tmp_path / "a", sweep)
  assert [c.seed for c in first.configs] == [c.seed for c in again.configs]
  _, other = _run(tmp_path / "b", sweep)
  assert [c.seed for c in first.configs] != [c.seed for c in other.configs]
  with pytest.raises(UserError, match="trials of another config"):
    _run(tmp_path / "a", _sweep(law={"mean_trials": 31.0}))


@pytest.mark.slow
def test_the_number_of_runs_is_random_with_the_stated_mean(tmp_path, monkeypatch):
  fixed = itertools.count()  # in place of the operating system's entropy
  monkeypatch.setattr(tuning.secrets, "randbits", lambda bits: next(fixed))
  numbers = []
  for index in range(60):
    _, train = _run(tmp_path / str(index))
    numbers.append(len(train.configs))
  assert min(numbers) >= 1 and len(set(numbers)) > 5
  assert 6 - 4 * 5.5 / math.sqrt(60) < np.mean(numbers) < 6 + 4 * 5.5 / math.sqrt(60)


def test_smaller_may_be_better(tmp_path):
  sweep = _sweep(law={"better": "min"}, y="test_accuracy")
  found, train = _run(tmp_path, sweep)
  assert found["score"] == min(c.optimizer.learning_rate for c in train.configs)


def test_a_score_that_is_missing_is_said_after_the_first_run(tmp_path):
  train = _Train()
  with refuses("test_recall", value=None):
    _run(tmp_path, _sweep(y="test_recall", law={"mean_trials": 99.0}), train)
  assert len(train.configs) == 1


@pytest.mark.cases(long=["None"])
@pytest.mark.parametrize("lost", [math.nan, math.inf, None, "-inf"])
def test_a_run_that_diverged_is_never_chosen(tmp_path, lost, monkeypatch):
  monkeypatch.setattr(tuning.secrets, "randbits", lambda bits: 5)  # many trials

  class Train(_Train):
    def __call__(self, config, workdir, *, data):
      result = super().__call__(config, workdir, data=data)
      rate = config.optimizer.learning_rate
      return result | {"test_loss": 1.0 if rate < 0.2 else lost}

  for better in ("min", "max"):
    sweep = _sweep(y="test_loss", law={"better": better, "mean_trials": 60.0})
    assert _run(tmp_path / better, sweep, Train())[0]["score"] == 1.0


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"y": "train_loss"}, "y"),
    ({"y": "not_private/loss"}, "y"),
    ({"seeds": [0, 1]}, "seeds"),
    ({"base": FedConfig(), "grid": {"num_rounds": [1, 2]}}, "selection"),
    ({"law": {"mean_trials": 0.5}}, "selection.mean_trials"),
    ({"law": {"shape": -1.0}}, "selection.shape"),
    ({"law": {"better": "best"}}, "selection.better"),
    ({"grid": {"audit": ["canaries"]}}, "audit"),
    # Every trial's rows left the folder: a release of all, charged as that of the best.
    ({"grid": {"writer": ["operator:eq"]}}, "writer"),
    (
      {"grid": {"privacy.noise_multiplier": [2.0, 1.0], "privacy.epsilon": [None]}},
      "get_configs",
    ),
    ({"grid": {"data.name": ["mnist", "digits"]}}, "get_configs"),
  ],
)
def test_what_has_no_proof_is_refused_before_anything_runs(tmp_path, changes, field):
  train = _Train()
  with refuses(field) as caught:
    _run(tmp_path, _sweep(**changes), train)
  assert not train.configs and "\n" not in str(caught.value)
  assert not (tmp_path / finished.TRIALS_FILE).exists()


def test_samplers_without_rdp_or_without_proof_are_refused(tmp_path):
  def cut(config, data):
    sampler = sampling.TruncatedPoissonSampler(
      sampling_prob=0.05, capacity=60, num_examples=1000
    )
    return dataclasses.replace(
      _plan(config, data), sampler=sampler, neighboring_relation=""
    )

  def shuffled(config, data):
    sampler = sampling.ShuffledSampler(batch_size=50)
    return dataclasses.replace(_plan(config, data), sampler=sampler)

  for plan_fn, match in ((cut, "event"), (shuffled, "get_configs")):
    with refuses(match):
      _select(_sweep().runs(), tmp_path, _Train(), lambda _: None, _promised(plan_fn))


def test_p40_one_setting_may_overflow_where_another_of_the_same_event_cannot(tmp_path):
  """Whatever the order of the grid: what is set aside for it would be read of the first."""

  def plan_of(config, data, order):
    del data
    bins = sampling.BallsInBinsSampler(num_bins=4, capacity=600)
    cyclic = sampling.CyclicSampler(steps_per_pass=4, num_examples=1000)
    first = config.optimizer.learning_rate == order[0]
    return plans.of(
      sampler=bins if first else cyclic,
      noise_multiplier=2.0,
      normalize_by=250,
      num_steps=8,
      neighboring_relation="replace_special",
      noise_shape=noise.NoiseShape(correlation=noise.correlated.Independent()),
    )

  for order in ([0.1, 0.2], [0.2, 0.1]):
    of = _promised(functools.partial(plan_of, order=order))
    sweep = _sweep(grid={"optimizer.learning_rate": [0.1, 0.2]})
    with refuses("get_configs"):
      _select(sweep.runs(), tmp_path, _Train(), lambda _: None, of)


@pytest.mark.parametrize("order", [["pld", "rdp"], ["rdp", "pld"]])
def test_p40_settings_have_one_accountant(tmp_path, order):
  """By its epsilon a capacity is chosen, and so how often a batch may be above it."""
  plan_of = lambda config, data: dataclasses.replace(
    _plan(config, data), accountant=config.privacy.accountant
  )
  with refuses("get_configs"):
    sweep = _sweep(grid={"privacy.accountant": order})
    _select(sweep.runs(), tmp_path, _Train(), lambda _: None, _promised(plan_of))


@pytest.mark.cases(quick=[2], long=...)
@pytest.mark.parametrize(
  ("noise_multiplier", "law", "field"),
  [
    (0.01, {}, "selection.mean_trials"),
    (0.05, {}, "selection.mean_trials"),
    (1e-8, {}, "get_configs"),
    (2.0, {"shape": 1e6}, "selection.mean_trials"),
  ],
)
def test_p40_a_choice_that_costs_all_of_delta_is_refused(
  tmp_path, noise_multiplier, law, field
):
  def plan_of(config, data):
    return dataclasses.replace(_plan(config, data), noise_multiplier=noise_multiplier)

  with refuses(field) as caught:
    _select(_sweep(law=law).runs(), tmp_path, _Train(), lambda _: None, _promised(plan_of))
  assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())

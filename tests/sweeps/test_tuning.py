"""Private selection: random and secret number of runs, both epsilons, nothing else out."""

import dataclasses
import errno
import functools
import itertools
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dpjax import accounting, data, noise, sampling
from dpjax.accounting import Ledger
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from dpjax.experiments.board import report
from dpjax.experiments.checks import several_runs
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.finished import attack_on
from dpjax.experiments.kinds.central.config import DpSgd, ModelConfig, TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import guarantee, loop, saved, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.folder import STARTS
from dpjax.experiments.sweeps import cost, tuning
from dpjax.experiments.sweeps import sweep as sweeps
from dpjax.experiments.sweeps.sweep import Selection
from dpjax.serving.predictor import Predictor
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
  of_runs = mock.patch.multiple(loop, run=train, load=load)
  unknown = {"plan_of": plan_of, "check_score": lambda *of: None}
  with of_runs, mock.patch.multiple(tuning, **unknown):
    return tuning.run_selection(runs, folder)


class _Train:
  """Writes a model and what a run's result must have; the score is the learning rate, and each
  trial is remembered."""

  def __init__(self):
    self.trials, self.folders = [], []

  @property
  def configs(self):
    return [trial.config for trial in self.trials]

  def __call__(self, trial, workdir, *, data):
    self.trials.append(trial)
    self.folders.append(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    rate = trial.config.optimizer.learning_rate
    np.savez(workdir / "params.npz", w=np.array([rate]))
    (workdir / "metrics.jsonl").write_text("{}\n")
    promised = trial.chosen.guarantee
    ledger = promised.charge(Ledger(), range(30), noise_key_id="key")
    result = {
      **dict.fromkeys(writers.RESULT_KEYS),
      **promised.facts(ledger, promised.curve(30)),
      "ledger": ledger.to_json(),
      "privacy_statement": promised.statement(30),
      "test_accuracy": rate,
      "train_loss": 0.0,
      "not_private/left_out": 3,
      "seed": trial.config.seed,
      # The first trial compiles for all; each but the first was stopped once.
      "wall_seconds": 3.0 if len(self.trials) == 1 else 0.5,
      STARTS: [{"modules": {}}] * min(len(self.trials), 2),
    }
    return result | {owner.FILES: owner.digests(workdir)}


def _run(folder, sweep=None, train=None):
  train = train or _Train()
  found = _select(
    (sweep or _sweep()).runs(), folder, train, lambda _: "data", _promised(_plan)
  )
  return found, train


def test_a_folder_of_something_else_is_refused_before_any_trial(tmp_path):
  _run(tmp_path)
  (tmp_path / "trials.json").unlink()
  train = _Train()
  (tmp_path / "lock").unlink()
  before = sorted(tmp_path.rglob("*"))
  for folder in (tmp_path, tmp_path / "best"):
    with refuses("workdir"):
      _run(folder, train=train)
  assert not train.trials and sorted(tmp_path.rglob("*")) == before


def test_p40_the_best_does_not_tell_whether_it_was_the_first(tmp_path):
  """Its time would: of one trial, the winner is always the first, which compiles for all."""
  winners = {}
  for place in range(50):
    found, train = _run(tmp_path / str(place))
    first = train.configs[0].seed == found["seed"]
    winners[first] = {name: found[name] for name in ("wall_seconds", STARTS)}
    if len(winners) == 2:
      break
  assert (
    winners[True] == winners[False] == {"wall_seconds": None, STARTS: [{"modules": {}}]}
  )


def test_p40_both_epsilons_are_printed_and_the_choice_is_charged(tmp_path, capsys):
  found, _ = _run(tmp_path)
  shown = capsys.readouterr().out
  one, event = _plan(TrainConfig(), None), _plan(TrainConfig(), None).event()
  one_run = found["selection"]["epsilon_of_one_run"]
  assert one_run == pytest.approx(one.epsilon())
  event_of_choice = repeat_and_select_event(event, mean_trials=6.0)
  expected = accounting.epsilon(
    event_of_choice, delta=one.accounted_delta(1e-5), accountant="rdp"
  )
  assert found["epsilon"] == pytest.approx(expected)
  assert found["epsilon"] > 1.5 * one_run
  ledger = Ledger.from_json(found["ledger"])
  assert ledger.charges[0].event == event_of_choice and ledger.num_steps == 30
  assert ledger.epsilon(found["accounted_delta"], accountant="rdp") == found["epsilon"]
  for epsilon in (one_run, found["epsilon"]):
    assert f"epsilon = {accounting.upper(epsilon)}," in shown


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


def test_a_run_of_the_choice_charges_its_own_clip_norm_and_says_what_it_rests_on():
  plan = _plan(TrainConfig(), None)
  chosen = tuning.selection_cost(plan, _sweep().runs(), ())
  longer = dataclasses.replace(plan, l2_clip_norm=7.0)
  alone = guarantee.of_plan(longer, 1000)
  alone = guarantee.add_note(alone, "First parameters. From a file.")
  stated = chosen.of_run(alone)
  ledger = stated.charge(Ledger(), range(30), noise_key_id="key")
  assert {charge.l2_clip_norm for charge in ledger.charges} == {7.0}
  assert stated.curve(1) == stated.curve(30) == stated.epsilon_of(ledger)
  assert stated.statement(30).startswith(chosen.guarantee.statement(30))
  assert "First parameters. From a file." in stated.statement(30)


def test_p40_the_budget_is_that_of_the_choice(tmp_path):
  sweep, cost = _sweep(), _run(tmp_path / "free")[0]
  one_run = cost["selection"]["epsilon_of_one_run"]
  assert one_run < cost["epsilon"]
  for budget in (one_run, cost["epsilon"]):
    sweep.base.privacy.epsilon_budget = budget
    if budget == cost["epsilon"]:
      assert _run(tmp_path / "paid", sweep)[0]["epsilon"] == budget
      continue
    with refuses("privacy.epsilon_budget"):
      _run(tmp_path / "refused", sweep)
  varied = _sweep(grid={"privacy.epsilon_budget": [None, one_run]})
  with refuses("privacy.epsilon_budget"):
    _run(tmp_path / "varied", varied)


def test_each_setting_gets_the_features_of_its_own_model(tmp_path):
  seen = []

  class Train(_Train):
    def __call__(self, trial, workdir, *, data):
      seen.append((trial.config.model.name, data))
      return super().__call__(trial, workdir, data=data)

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


def test_the_best_alone_is_released_and_nothing_says_how_many_there_were(tmp_path):
  found, train = _run(tmp_path, _sweep(law={"mean_trials": 40.0, "shape": 5.0}))
  best = max(config.optimizer.learning_rate for config in train.configs)
  assert found["selection"]["score"] == best
  assert found["selection"]["setting"] == f"learning_rate={best}"
  released = {path.name for path in (tmp_path / "best").iterdir()}
  assert released == {"config.json", "params.npz", "result.json"}
  assert np.load(tmp_path / "best" / "params.npz")["w"][0] == best
  assert not [name for name in found if name.startswith("not_private/")]
  # In no file of the whole folder: other trials, their seeds, or their number.
  files = [path for path in tmp_path.rglob("*") if path.is_file()]
  assert {path.parent.name for path in files} == {tmp_path.name, "best"}
  others = [config.seed for config in train.configs if config.seed != found["seed"]]
  text = "".join(path.read_text(errors="replace") for path in files)
  assert others and not any(str(seed) in text for seed in others if seed > 9999)
  assert writers.read_json(tmp_path / tuning._TRIALS_FILE)["trials"] is None


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("content", [b"[]", b"{}", b"3", b'{"trials": 5}', b"\xff", None])
def test_a_damaged_list_of_trials_is_one_line(tmp_path, content, whole, monkeypatch):
  """Of 15 damaged lists 11 ended in a traceback, and a changed number was another trial."""
  if not whole:
    killed = mock.Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
      during.setattr(tuning, "_best", killed)
      _run(tmp_path)
  else:
    _run(tmp_path)
  path = tmp_path / tuning._TRIALS_FILE
  text = path.read_bytes()
  path.write_bytes(text.replace(b"0.4", b"0.5", 1) if content is None else content)
  train = _Train()
  with refuses(str(path)):
    _run(tmp_path, train=train)
  assert not train.trials
  path.write_bytes(text)
  _run(tmp_path)


def test_other_users_of_the_machine_cannot_count_the_trials(tmp_path):
  modes = []

  class Train(_Train):
    def __call__(self, trial, workdir, *, data):
      trials = (workdir.parent, workdir.parent.with_suffix(".json"))
      modes.extend(path.stat().st_mode & 0o777 for path in trials)
      return super().__call__(trial, workdir, data=data)

  _run(tmp_path, train=Train())
  assert modes[:2] == [0o700, 0o600]


class _Killed(Exception):
  pass


@pytest.mark.parametrize(
  "at", ["claim", "write_result", "_forget_trials", "trial 2", "shutil.rmtree"]
)
def test_p16_a_choice_that_was_killed_is_made_again_among_the_same_trials(
  tmp_path, monkeypatch, at
):
  monkeypatch.setattr(tuning.secrets, "randbits", lambda bits: 5)  # several trials
  whole, uncut = _run(tmp_path / "whole")
  assert len(uncut.trials) > 3

  class Train(_Train):
    def __call__(self, trial, workdir, *, data):
      if at == "trial 2" and len(self.trials) == 2:
        raise _Killed
      return super().__call__(trial, workdir, data=data)

  def killed(*args, **options):
    raise _Killed

  cut = Train()
  with monkeypatch.context() as during, pytest.raises(_Killed):
    if at != "trial 2":
      of = tuning.owner if hasattr(tuning.owner, at) else tuning
      during.setattr(f"{of.__name__}.{at}", killed)
    _run(tmp_path / "cut", train=cut)
  found, later = _run(tmp_path / "cut")
  assert found == whole
  # The choice is not made anew where it was made.
  made = at == "shutil.rmtree"
  assert [config.seed for config in later.configs] == (
    [] if made else [config.seed for config in uncut.configs]
  )


@pytest.mark.parametrize("at", ["copyfile", "rmtree"])
def test_a_disk_that_refuses_is_one_line_and_the_choice_goes_on(tmp_path, monkeypatch, at):
  def refused(*args):
    raise PermissionError(errno.EACCES, "no", str(args[-1]))

  with monkeypatch.context() as during, refuses("workdir"):
    during.setattr(tuning.shutil, at, refused)
    _run(tmp_path)
  _run(tmp_path)
  assert {path.name for path in tmp_path.iterdir()} == {"best", "trials.json", "lock"}


def test_p17_every_run_has_a_seed_of_its_own(tmp_path):
  _, train = _run(tmp_path, _sweep(law={"mean_trials": 40.0}))
  seeds = [config.seed for config in train.configs]
  assert len(set(seeds)) == len(seeds) and 0 not in seeds
  assert set(np.diff(seeds)) != {1}


def test_p16_a_second_start_draws_nothing_and_another_folder_draws_others(tmp_path):
  sweep = _sweep(law={"mean_trials": 30.0})
  found, first = _run(tmp_path / "a", sweep)
  again, none = _run(tmp_path / "a", sweep)
  assert again == found and not none.trials
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
  assert found["selection"]["score"] == min(
    c.optimizer.learning_rate for c in train.configs
  )


@pytest.mark.slow
def test_a_score_that_no_run_has_is_refused_before_a_trial_is_drawn(tmp_path):
  """The trials of another `y` are others: those that had run were lost."""
  base = TrainConfig(num_steps=2, model=ModelConfig(name="linear"))
  sweep = sweeps.Sweep(y="test_recall", selection=Selection())
  with refuses("y", value="test_recall"):
    tuning.run_selection(sweeps.Runs([("one", base)], sweep), tmp_path)
  assert not list(tmp_path.iterdir())


@pytest.mark.cases(long=["None"])
@pytest.mark.parametrize("lost", [math.nan, math.inf, None, "-inf"])
def test_a_run_that_diverged_is_never_chosen(tmp_path, lost, monkeypatch):
  monkeypatch.setattr(tuning.secrets, "randbits", lambda bits: 5)  # many trials

  class Train(_Train):
    def __call__(self, trial, workdir, *, data):
      result = super().__call__(trial, workdir, data=data)
      rate = trial.config.optimizer.learning_rate
      return result | {"test_loss": 1.0 if rate < 0.2 else lost}

  for better in ("min", "max"):
    sweep = _sweep(y="test_loss", law={"better": better, "mean_trials": 60.0})
    assert _run(tmp_path / better, sweep, Train())[0]["selection"]["score"] == 1.0


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
  assert not (tmp_path / tuning._TRIALS_FILE).exists()


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


@pytest.mark.slow
@pytest.mark.parametrize("release", [False, True])
def test_p40_the_best_is_a_run_like_any_other_and_states_the_cost_of_the_choice(
  tmp_path, release
):
  """Whatever reads a finished run reads it: none of them has a door of its own for a choice."""
  base = TrainConfig(
    num_steps=2,
    eval_every=1,
    model=ModelConfig(name="linear"),
    privacy=DpSgd(sampling_prob=0.05, epsilon=1.0),
    release=release,
  )
  rates = (
    (f"rate {r}", fields.replace(base, "optimizer.learning_rate", r)) for r in (1, 2)
  )
  runs = sweeps.Runs(rates, sweeps.Sweep(selection=Selection(mean_trials=1.0)))
  found = tuning.run_selection(runs, tmp_path)
  best = tmp_path / "best"
  one_run = found["selection"]["epsilon_of_one_run"]
  assert found["epsilon"] > 1.2 * one_run and found["epsilon_kind"] == "proved"
  # No number of what is released is of one run alone, but for those that say so.
  assert found["privacy_statement"].index("the best of a random") < found[
    "privacy_statement"
  ].index("Each run of the choice, by itself")
  assert found["tpr_at_fpr_0.01"] > 1.2 * 0.01
  alphas, betas = np.loadtxt(best / "trade_off.csv", delimiter=",", skiprows=1).T
  allowed = 1 - np.interp(0.01, alphas, betas)
  assert allowed == pytest.approx(found["tpr_at_fpr_0.01"], rel=0.02)
  # Numbers of raw records, keys, times of a release: nowhere in what may be released.
  names = {path.name for path in best.iterdir()}
  assert names == {
    *("config.json", "result.json", "params.npz", "inputs.json", "trade_off.csv")
  }
  assert "not_private" not in (best / "result.json").read_text()
  assert found["release"] is release and found["wall_seconds"] is None
  # The doors of every finished run.
  predictor = Predictor.load(best)
  assert predictor.result["epsilon"] == found["epsilon"]
  assert predictor(np.zeros((3, 8, 8, 1), np.float32)).shape == (3, 10)
  text = report.of(best).markdown()
  assert f"| epsilon | {accounting.upper(found['epsilon'])} (proved)" in text
  assert "the best of several by test" in text and "it was chosen by its score" in text
  (read,) = several_runs.read([str(best)])
  assert read.epsilon == found["epsilon"] and read.event is not None
  assert cost.together([read]).epsilon == pytest.approx(found["epsilon"])
  assert attack_on(best).attack.target == str(best / "params.npz")
  with pytest.raises(UserError):
    saved.pretrained_on(str(best / "params.npz"), "digits", data.load("digits")[0])
  config = fields.from_dict(TrainConfig, writers.read_json(best / "config.json"))
  assert loop.train(config, best) == found

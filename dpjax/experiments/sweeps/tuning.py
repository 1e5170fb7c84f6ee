"""Private choice of hyper-parameters: the best of a random number of runs, accounted.

An ordinary sweep costs the sum of its runs (`cost.charge`). Here the number of runs is random and
secret, each run draws its setting from the grid at random, and only the best run is released. The
cost does not depend on the size of the grid. It is often two to three times the cost of one run,
and grows with the mean number of runs (Papernot and Steinke 2022, arXiv:2110.03620;
`accounting.tuning`).

Runs are compared by a score on the TEST data, which are treated as public. The score is then
post-processing of the released parameters and costs nothing more. A score on training data
would be a further query on the training data, so such a `y` is refused. If the test data are
private, too, the guarantee does NOT cover them.

Every setting of the grid must have the same privacy event, so that the cost holds for any run that
wins. Learning rates may differ, but the noise may not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import secrets
import shutil
from typing import Any, NamedTuple

import numpy as np
from dp_accounting import NoOpDpEvent

from dpjax import accounting, validate
from dpjax.accounting import tuning as trials
from dpjax.accounting import upper
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from dpjax.accounting.ledger import BudgetExceeded
from dpjax.accounting.text import paragraph
from dpjax.experiments.config import choices, common, fields
from dpjax.experiments.config.naming import naming
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import finished, guarantee, loop, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.experiment import Story, single
from dpjax.experiments.run.folder import STARTS
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.experiments.sweeps import curve, curves
from dpjax.experiments.sweeps.engine import LastData, Point
from dpjax.experiments.sweeps.sweep import Runs, Selection, Sweep
from dpjax.plan import Plan
from dpjax.validate import UserError

# Folder of the best run, which may be released.
BEST = "best"
# Folder of the trials, and file that lists them until the choice is made. Both are secret.
_TRIALS = "trials"
_TRIALS_FILE = "trials.json"


class Chosen(NamedTuple):
  """What a choice among runs costs.

  Attributes:
    guarantee: guarantee of the released run, with the choice.
    epsilon_of_one_run: epsilon of one run without the choice, at the delta of its plan.
    line: both epsilons in one line.
  """

  guarantee: Guarantee
  epsilon_of_one_run: float
  line: str

  def of_run(self, alone: Guarantee) -> Guarantee:
    """Returns the guarantee of the choice, as one of its runs states it.

    Args:
      alone: guarantee of the run without the choice. Its statement says what the run rests on, such
        as its first parameters, and stands after that of the choice.
    """
    note = paragraph("Each run of the choice, by itself, without the cost of the choice:")
    words = self.guarantee.words
    return dataclasses.replace(
      self.guarantee,
      num_records=alone.num_records,
      l2_bound=alone.l2_bound,
      words=lambda steps, kind: (
        f"{words(steps, kind)}\n\n{note}\n\n{alone.statement(steps)}"
      ),
    )


class Trial(build.Central):
  """One run of a choice: whatever it says of privacy is the cost of the choice."""

  def __init__(self, config: TrainConfig, chosen: Chosen):
    super().__init__(config)
    self.chosen = chosen

  def train(self, data: Any, keys: RunKeys) -> Story:
    run = build.assemble_loaded(self.config, data, keys)
    run = run._replace(guarantee=self.chosen.of_run(run.guarantee))
    return single(build.phase(self.config, run))


def run_selection(runs: Runs, workdir: str | os.PathLike) -> dict[str, Any]:
  """Draws runs (trials), carries out the remaining ones, and writes the best to `workdir`/best.

  Args:
    runs: runs of a `Sweep` with a `selection`: the settings, one run each.
    workdir: folder. While runs are left, `trials.json` and `trials/` in it are secret. At the end
      the runs are removed, and `best/` may be released.

  Returns:
    Content of best/result.json: that of the winning run, whose guarantee accounts for the choice.
    Its entry `selection` has the name of the winning setting, its score, and the epsilon of one
    run.

  Raises:
    UserError: settings with different privacy events; a score that is not on test data, or that no
      run has; a run without a finite epsilon, or a sampler without an RDP analysis; a folder of
      something else; another process at work in it; a full disk, or a file there that cannot be
      written or removed.
  """
  validate.folder(workdir=workdir)
  workdir = pathlib.Path(workdir)
  load = LastData(loop.load)
  settings, chosen = plan_selection(runs, load)  # before anything runs
  _recall(workdir, runs)  # a folder of something else gets no lock
  workdir.mkdir(parents=True, exist_ok=True)
  saved = lambda: "runs that have ended are kept"
  # The folder is locked, because two processes at once would draw two numbers of trials.
  with writers.space_on_disk(workdir, saved), writers.alone_in(workdir):
    drawn = _trials(workdir, runs)
    if drawn is not None:
      writers.secret_folder(workdir / _TRIALS)
      # Each trial has its own seed, so that a setting that is drawn twice gets different noise.
      configs = [
        fields.replace(settings[choice].config, "seed", seed, name="seeds")
        for choice, seed in drawn
      ]
      results = []
      for index, trial in enumerate(configs):
        at = _folder(workdir, index)
        results.append(loop.run(Trial(trial, chosen), at, data=load(trial)))
      winner = _best(results, runs)
      _publish(
        _folder(workdir, winner),
        workdir / BEST,
        configs[winner],
        results[winner],
        {
          "setting": settings[drawn[winner][0]].label,
          "y": runs.config.y,
          "score": results[winner][runs.config.y],
          "epsilon_of_one_run": chosen.epsilon_of_one_run,
        },
      )
      _forget_trials(workdir)
    if (workdir / _TRIALS).exists():
      shutil.rmtree(workdir / _TRIALS)
    result = finished.read(workdir / BEST, "workdir").result
  print(chosen.line, flush=True)
  return result


def _best(results: list[dict[str, Any]], runs: Runs) -> int:
  """Returns the number of the best trial; of several, the first."""
  sign = 1.0 if selection_of(runs).better == "max" else -1.0
  scores = [sign * curve.numeric(result, runs.config.y) for result in results]
  # A diverged run does not end a selection, and wins only if all runs have diverged.
  return int(np.argmax([s if math.isfinite(s) else -math.inf for s in scores]))


def _publish(
  trial: pathlib.Path,
  best: pathlib.Path,
  config: TrainConfig,
  result: dict[str, Any],
  chosen: dict[str, Any],
) -> None:
  """Makes `best` the folder of a finished run: that of the trial, without what holds secrets or
  numbers of raw records. Its result is written last, so a kill leaves no half of it."""
  owner.claim(best, config)
  for name in result[owner.FILES]:
    if name != writers.METRICS:
      shutil.copyfile(trial / name, best / name)
  shown = {
    name: value for name, value in result.items() if not name.startswith("not_private/")
  }
  # The first trial compiles for all, and a stop falls into one of them: a duration, and the number
  # of starts, would say something of how many trials there were.
  untimed = {"wall_seconds": None, STARTS: result[STARTS][-1:]}
  released = {**shown, **untimed, "selection": chosen, owner.FILES: owner.digests(best)}
  owner.write_result(best, config, released)


def plan_selection(runs: Runs, load: LastData) -> tuple[list[Point], Chosen]:
  """Returns (the settings to choose among, the cost of the choice).

  Raises:
    UserError: the errors of `run_selection` that are known before any run.
    BudgetExceeded: the choice would exceed a setting's `privacy.epsilon_budget`.
  """
  _check(runs)
  settings = runs.points
  plan, assumptions = _common_plan(settings, load)
  first = settings[0].config
  # Trials are drawn for one `y`: under a mistyped one they would be lost.
  check_score(runs.config, first, load(first))
  chosen = selection_cost(plan, runs, assumptions)
  budgets = [getattr(point.config.privacy, "epsilon_budget", None) for point in settings]
  least = min((budget for budget in budgets if budget is not None), default=math.inf)
  epsilon = chosen.guarantee.curve(1)
  if epsilon > least:
    raise BudgetExceeded(
      f"the choice among runs costs epsilon={upper(epsilon)}, one of them "
      f"{upper(chosen.epsilon_of_one_run)}",
      field="privacy.epsilon_budget",
      value=least,
    )
  return settings, chosen


def check_score(sweep: Any, config: TrainConfig, data: Any) -> None:
  """Raises UserError unless `y` of a selection is a score of its runs."""
  curves.Curves(sweep).check_data(config, data)


def _folder(workdir: pathlib.Path, trial: int) -> pathlib.Path:
  return workdir / _TRIALS / f"{trial:04d}"


def selection_of(runs: Runs) -> Selection:
  """Returns the selection of a sweep that has one."""
  if not isinstance(runs.config, Sweep) or runs.config.selection is None:
    raise UserError("must be 'best'", field="selection", value="none")
  return runs.config.selection


def selection_cost(plan: Plan, runs: Runs, assumptions: tuple[str, ...]) -> Chosen:
  """Returns what the choice costs.

  Args:
    plan: plan that all runs share.
    runs: runs of the sweep, for its selection.
    assumptions: assumptions of the runs that nobody can check. If there is one, epsilon is a claim.

  A run that draws a batch above its capacity aborts, and so does the selection. Let B be the
  probability that one run aborts, and K the random number of runs. By a union bound over the runs,
  the selection aborts with probability at most E[K] B. That adds (1 + e^epsilon) E[K] B to delta.
  One run sets aside (1 + e^epsilon_run) B.
  """
  selection = selection_of(runs)
  event = repeat_and_select_event(
    plan.event(), mean_trials=selection.mean_trials, shape=selection.shape
  )
  options = {"neighboring_relation": plan.neighboring_relation, "accountant": "rdp"}
  left = plan.accounted_delta(plan.delta)
  epsilon = accounting.epsilon(event, delta=left, **options)
  one_run = plan.epsilon()
  if not math.isfinite(one_run):
    raise UserError(
      "a run of its settings has no finite epsilon, nor has the choice",
      field="get_configs",
    )
  growth = np.logaddexp(0, epsilon) - np.logaddexp(0, one_run)
  # `exp` would overflow for larger numbers. With exp(700), any delta that is set aside already
  # exceeds 1, and is refused below.
  growth = math.exp(min(growth, 700.0))
  mean = trials.mean_of(selection.mean_trials, selection.shape)
  delta = left + (plan.delta - left) * mean * growth
  if not (math.isfinite(epsilon) and delta < 1):
    raise UserError(
      f"must be less, or the noise more: the choice costs epsilon={upper(epsilon)}, "
      f"one run {upper(one_run)}, and all of delta",
      field="selection.mean_trials",
      value=selection.mean_trials,
    )

  def words(kind: str) -> str:
    return accounting.privacy_statement(
      event,
      delta=delta,
      neighboring_relation=plan.neighboring_relation,
      unit=plan.unit,
      accountants=("rdp",),
      delta_set_aside=delta - left,
      epsilon_kind=kind,
    )

  # A run releases nothing before the choice, so the first step of its ledger holds the whole cost.
  chosen = Guarantee(
    kind="claimed" if assumptions else "proved",
    delta=delta,
    relation=plan.neighboring_relation,
    unit=plan.unit,
    accountant="rdp",
    step_event=lambda step: NoOpDpEvent() if step else event,
    remaining_event=lambda start: NoOpDpEvent() if start else event,
    curve=lambda steps: epsilon,
    words=lambda steps, kind: words(kind),
    accounted_delta=left,
    l2_bound=plan.l2_bound,
    failed_assumptions=assumptions,
  )
  line = _line(plan, one_run, epsilon, delta, assumptions)
  return Chosen(chosen, one_run, line)


def _line(
  plan: Plan, one_run: float, epsilon: float, delta: float, assumptions: tuple[str, ...]
) -> str:
  fails = guarantee.names_of(assumptions)
  kind = f"CLAIMED; nothing is proved; fails or is assumed: {fails}" if fails else "proved"
  return (
    f"One run is (epsilon = {upper(one_run)}, delta = {upper(plan.delta)})"
    "-private. The choice of the best of a random number of runs is charged: what is in "
    f"{BEST}/ is (epsilon = {upper(epsilon)}, delta = {upper(delta)})-private "
    f"({kind}, {plan.neighboring_relation}), if the test data that it was chosen on are "
    "public, and nothing of the other runs is released, not even how many there were."
  )


def _check(runs: Runs) -> None:
  selection_of(runs)
  sweep = runs.config
  common.read_if(
    sweep,
    False,
    "a sweep that draws a curve",
    "x",
    "series",
    "picture",
    "title",
    "references",
  )
  common.read_if(sweep, False, "a sweep; a selection draws its seeds", "seeds")
  if not all(isinstance(point.config, TrainConfig) for point in runs.points):
    raise UserError(
      "must be among runs of launch.train; among others it is not accounted here",
      field="selection",
      value="best",
    )
  if not sweep.y.startswith("test_"):
    raise UserError(
      "must be a score on test data (test_...) for a private selection; one on "
      "training data would be a further query on them",
      field="y",
      value=sweep.y,
    )


def plan_of(config: TrainConfig, data: Any) -> tuple[Plan, tuple[str, ...]]:
  """Returns (plan of a run, assumptions of its guarantee that cannot be checked)."""
  with naming(config):
    run = build.assemble(config, data)
  return run.plan, run.guarantee.failed_assumptions


def _common_plan(settings: list[Point], load: LastData) -> tuple[Plan, tuple[str, ...]]:
  """Returns (the plan of the first setting, the assumptions of all settings). Raises UserError if
  the settings might have different costs, or if one has an audit, a writer or no guarantee."""
  for point in settings:
    if point.config.data != settings[0].config.data:
      raise UserError("must not vary the data in a private selection", field="get_configs")
    if point.config.audit is not None:
      raise UserError(
        "must be false in a private selection, which keeps no verdict on a trial",
        field="audit",
        value=True,
      )
    if point.config.writer is not None:
      raise UserError(
        "must be none in a private selection: it would be given the rows of every trial, and the "
        "cost is that of the best alone",
        field="writer",
        value=point.config.writer,
      )
  plans_and_assumptions = [plan_of(point.config, load(point.config)) for point in settings]
  plans, assumed = zip(*plans_and_assumptions)
  for point, plan in zip(settings, plans):
    if not plan.is_private:
      raise UserError(
        f"{point.name} has no proved epsilon, so the choice has none", field="get_configs"
      )
    if _facts(plan) != _facts(plans[0]):
      raise UserError(
        f"{point.name} does not cost the same event as {settings[0].name}; in a "
        "private selection all settings must (same noise_multiplier, sampler, "
        "steps, delta, accountant)",
        field="get_configs",
      )
  return plans[0], tuple(dict.fromkeys(text for texts in assumed for text in texts))


def _facts(plan: Plan) -> tuple[Any, ...]:
  """Returns everything that `selection_cost` reads from a plan. Two plans with the same event may
  differ in the share of delta for overflow, and in the accountant that finds epsilon."""
  return (
    plan.event(),
    plan.delta,
    plan.accounted_delta(plan.delta),
    plan.neighboring_relation,
    plan.unit,
    plan.accountant,
  )


def _identity(runs: Runs) -> Any:
  """Returns JSON data that are equal for equal selections."""
  held = {
    "sweep": choices.to_dict(runs.config),
    "settings": [[point.label, choices.to_dict(point.config)] for point in runs.points],
  }
  return json.loads(json.dumps(writers.plain(held), default=str))


def _recall(workdir: pathlib.Path, runs: Runs) -> dict[str, Any] | None:
  """Returns what the selection stored of its trials in the folder; None: it has not begun.

  Raises:
    UserError: the folder holds another selection, or something else.
  """
  path = workdir / _TRIALS_FILE
  if path.exists():
    saved = writers.read_digested(path)
    if saved["config"] != _identity(runs):
      raise UserError(
        "holds the trials of another config; use a new workdir", field=str(path)
      )
    return saved
  # What lies there may be a run, or the choice of a selection whose trials nobody knows any more.
  owner.check_own(workdir, _TRIALS_FILE)
  return None


def _trials(workdir: pathlib.Path, runs: Runs) -> list[tuple[int, int]] | None:
  """Returns (number of the setting, seed) of each run; None if the choice is made. They are drawn
  once, from the operating system's entropy, and stored until then.

  The seeds are random, not consecutive, so that the winner's seed does not reveal how many runs
  there were.
  """
  saved = _recall(workdir, runs)
  if saved is not None:
    drawn = saved["trials"]
    return None if drawn is None else [(choice, seed) for choice, seed in drawn]
  # The number of trials must be unknown, so no seed of a config may determine it.
  rng = np.random.default_rng(secrets.randbits(256))
  selection = selection_of(runs)
  number = trials.draw_trials(rng, mean_trials=selection.mean_trials, shape=selection.shape)
  settings = rng.integers(len(runs.points), size=number).tolist()
  drawn = list(zip(settings, rng.integers(2**31, size=number).tolist()))
  stored = {"config": _identity(runs), "trials": drawn}
  writers.write_digested(workdir / _TRIALS_FILE, stored)
  return drawn


def _forget_trials(workdir: pathlib.Path) -> None:
  """Notes that the choice is made. Its list of trials, which says how many there were, is gone."""
  path = workdir / _TRIALS_FILE
  held = writers.read_digested(path)
  writers.write_digested(path, {**held, "trials": None})

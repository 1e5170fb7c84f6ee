"""`--dry_run`: the guarantee, time and memory of a run, without the run.

Everything is built and checked as in the run itself. Then a few steps are timed on zeros of the
data's shape. Clients get equal sizes, and batches differ from those of the run. So the output
reveals only the number and shape of the data. Nothing is written, and no key is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from dpjax import trees
from dpjax.accounting import Ledger
from dpjax.accounting.text import by_name
from dpjax.columns import Columns
from dpjax.data import Dataset, Federation
from dpjax.data.rows import Rows
from dpjax.experiments.run import (
  checkpoint,
  experiment,
  guarantee,
  provenance,
  saved,
  writers,
)
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.experiment import Experiment, Phase
from dpjax.experiments.run.folder import Folder
from dpjax.experiments.run.kind import experiment_of
from dpjax.parallel import made_for
from dpjax.validate import UserError
from dpjax.zoo.networks import registry

if TYPE_CHECKING:
  from dpjax.parallel.targets import Machine

# Largest number of timed steps after the first step, which compiles.
TIMED_STEPS = 5
TIMED_SECONDS = 10.0  # no step is timed after the timed steps took this many seconds
FINISHED = "holds this run, finished; it would not run again"
_TIMED_FEATURES = 256  # number of examples whose features are timed


class Timing(NamedTuple):
  """Measured seconds of the first steps of a phase, on zeros."""

  start: float  # until the end of the first step, with `Phase.init` and compilation
  steps: tuple[float, ...]  # of each later step
  evaluation: float  # of one evaluation; 0 if the phase has none
  num_parameters: int

  def whole(self, phase: Phase) -> float:
    """Estimates the seconds of the whole phase, except for writing to disk."""
    rows = sum(phase.row_at(step + 1) is not None for step in range(phase.num_steps))
    return self.start + (phase.num_steps - 1) * self.step + rows * self.evaluation

  @property
  def step(self) -> float:
    """Returns the median seconds of a step; 0 if no step after the first one was timed."""
    return statistics.median(self.steps) if self.steps else 0.0


class Planned(NamedTuple):
  """What a run would promise and take."""

  facts: dict[str, Any]  # the privacy part of the result that it would have
  seconds: float
  num_steps: int


class Rehearsal(NamedTuple):
  """A run on zeros: its first phase, and measured seconds."""

  phase: Phase
  timing: Timing
  before: float  # seconds until the phase begins

  @property
  def seconds(self) -> float:
    """Estimates the seconds of the whole run."""
    return self.before + self.timing.whole(self.phase)

  def facts(self) -> dict[str, Any]:
    """Returns the privacy part of the result.json that the run will write."""
    return privacy_fields(self.phase)


def privacy_fields(phase: Phase) -> dict[str, Any]:
  """Returns the privacy part of the result.json that a run of this phase will write."""
  stated = phase.guarantee or guarantee.NONE
  return stated.facts(Ledger(), stated.curve(phase.num_steps))


def report(
  run: Experiment[Any],
  workdir: pathlib.Path | str,
  target: Machine | None = None,
) -> str:
  """Returns the plan of a run as text, one line for each fact.

  Args:
    target: machine that is not here, for which the run's step is compiled. None: steps are timed
      on this machine.

  Raises:
    UserError: the run would be refused before its first step, with the same message; or there are
      several processes.
  """
  if jax.process_count() > 1:
    raise UserError(
      f"must be of one process, not {jax.process_count()}: what it times is one's",
      field="dry_run",
    )
  folder = pathlib.Path(workdir)
  if not run.plans:
    raise experiment.no_plan()
  with made_for.compiling_for(target):
    run.check()
  config = run.config
  # The folder is checked before the data are read, as in a run.
  owner.recall_for(folder, run.config)
  loaded = run.data()
  with made_for.compiling_for(target):
    state = state_of(run, loaded, folder)
  # Without a declared number of examples, the true number is public: a guarantee under
  # add_or_remove_one would have been refused. For a federation it is not shown, since a guarantee
  # for users also hides how many examples they have.
  data = loaded[0]
  held = data.dataset if isinstance(data, Federation) else data
  count = f"{held.nominal_size or len(held)} x "
  if held.nominal_size is None and isinstance(data, Federation):
    count = ""
  lines = {"data": repr(held).replace(f": {len(held)} x ", f": {count}", 1)}
  if target is not None:
    # Imported here, because only plans for a target need this module.
    from dpjax.experiments.run import for_target

    plan = for_target.compile_step(lambda c: first_phase(c, loaded)[0], config, target)
    phase = plan.phase
    size = plan.program.num_parameters
    ends = for_target.lines(plan)
    facts = privacy_fields(phase)
  else:
    rehearsal = rehearse(config, loaded)
    phase = rehearsal.phase
    size = rehearsal.timing.num_parameters
    ends = {"time": _minutes(rehearsal), "memory": memory()}
    facts = rehearsal.facts()
  if phase.guarantee is not None:
    phase.guarantee.warn()
  by = facts["accountant"]
  lines |= {
    **{name: _show(name, value) for name, value in phase.planned().items()},
    "num_parameters": f"{size:,}",
    "privacy": guarantee.summary(facts) + (f", by {by}" if by else ""),
    phase.name: f"{phase.num_steps} {phase.steps_are}",
    **ends,
    "workdir": f"{workdir}: {state}",
  }
  return align(lines)


def align(lines: dict[str, str]) -> str:
  """Formats a plan as text: a head line, then each name with its description."""
  width = max(map(len, lines))
  head = "Plan only: nothing is trained, nothing is written."
  return "\n".join([head, *(f"{name:<{width}}  {line}" for name, line in lines.items())])


def rehearse(config: Any, loaded: tuple[Any, Any]) -> Rehearsal:
  """Times the first phase of a run on zeros of the data's shape. Returns the phase and its seconds.

  Args:
    loaded: result of `Experiment.data`.

  Raises:
    UserError: the run would be refused before its first step.
  """
  phase, before = first_phase(config, loaded)
  return Rehearsal(phase, time_steps(phase)[0], before)


def first_phase(config: Any, loaded: tuple[Any, Any]) -> tuple[Phase, float]:
  """Returns (the first phase of a run on zeros, seconds until it begins); see `rehearse`."""
  began = time.monotonic()
  pretrained = getattr(config, "pretrained", None)
  # The real data are checked: zeros would pass even if the parameters were trained on these data.
  if pretrained is not None:
    saved.pretrained_on(pretrained, config.data.name, loaded[0])
  zeros, features = _blank(config, loaded)
  run = experiment_of(config)
  run.check()
  _, phase = experiment.begin_story(run, zeros, run.new_keys())
  return phase, time.monotonic() - began + features


def state_of(run: Experiment[Any], data: Any, path: pathlib.Path) -> str:
  """Describes the state that the run would find in its folder. Raises UserError if the run would be
  refused there."""
  folder = Folder(run, path)
  if folder.secrets is not None and (path / checkpoint.FOLDER / writers.LOCK).exists():
    with writers.alone_in(path, checkpoint.FOLDER):
      pass
  folder.admit(experiment.digest_of(run, data), run.weights())
  if folder.result is not None:
    return FINISHED
  step = checkpoint.newest(path)
  return "new" if step is None else f"would go on from step {step}"


def _blank(config: Any, loaded: tuple[Any, Any]) -> tuple[tuple[Any, Any], float]:
  """Returns ((train, test), seconds): zeros in the shape of the model's inputs, and the estimated
  time to compute the features of all data."""
  train, test = loaded
  held = train.dataset if isinstance(train, Federation) else train
  seconds = 0.0
  shape = held.x.shape[1:]
  dtype = held.x.dtype
  in_file = [not part.in_memory for part in (held, test)]
  if registry.entry(config.model.name).features:
    # Imported here, since few models take features.
    from dpjax.experiments.kinds.central.features import add_features, stay_in_file

    rows = blank(held.subset(slice(0, _TIMED_FEATURES)), shape).read()
    # The first iteration compiles, so the second iteration is timed.
    for _ in range(2):
      began = time.monotonic()
      features = add_features(config.model, rows).x
      seconds = (time.monotonic() - began) / len(rows) * (len(held) + len(test))
    shape = features.shape[1:]
    # Texts are integers, but their features are floats.
    dtype = features.dtype
    # Where the run would have them, so that time and memory are those of the run. A federated run
    # has its data in memory.
    resident = getattr(config, "resident", True)
    in_file = [stay_in_file((len(part), *shape), resident) for part in (held, test)]
  zeros: Any = blank(held, shape, dtype, in_file[0])
  if isinstance(train, Federation):
    # Clients get equal sizes, or their declared ones, because their true sizes are private.
    ends: Any = train.num_clients
    if train.nominal_sizes is not None:
      ends = np.cumsum(train.nominal_sizes)[:-1]
    rows = np.array_split(np.arange(len(train)), ends)
    zeros = dataclasses.replace(train, dataset=zeros, indices=rows)
  return (zeros, blank(test, shape, dtype, in_file[1])), seconds


def blank(
  dataset: Dataset,
  shape: tuple[int, ...],
  dtype: Any = None,
  in_file: bool | None = None,
) -> Dataset:
  """Returns a data set of the same size, whose inputs are zeros of a shape and type, and whose
  targets are 0. Inputs in columns keep the shapes of `dataset`.

  Args:
    in_file: whether the inputs are `Rows`; None: if those of `dataset` are.
  """
  dtype = dataset.x.dtype if dtype is None else dtype
  in_file = not dataset.in_memory if in_file is None else in_file
  y = np.zeros_like(dataset.y)
  if dataset.in_columns:
    x = Columns(jax.tree.map(np.zeros_like, dataset.x.tree), "x")
  elif not in_file:
    x = np.zeros((len(dataset), *shape), dtype)
  else:
    x = Rows(_Zeros(len(dataset), shape, dtype), shape, dtype)
  return dataclasses.replace(dataset, x=x, y=y)


@dataclasses.dataclass(frozen=True)
class _Zeros:
  """A source of rows of zeros, in place of data that lie in files."""

  count: int
  shape: tuple[int, ...]
  dtype: np.dtype

  def __len__(self) -> int:
    return self.count

  def read(self, places: np.ndarray) -> np.ndarray:
    return np.zeros((len(places), *self.shape), self.dtype)


def time_steps(phase: Phase) -> tuple[Timing, Any]:
  """Times the first steps and an evaluation. Returns (`Timing`, the state after the steps)."""

  def steps() -> Iterator[float]:
    nonlocal state
    began = time.monotonic()
    for draw in itertools.islice(phase.draws(0), 1 + TIMED_STEPS):
      # JAX returns before a step is computed, so the clock must wait for the result.
      state, _ = jax.block_until_ready(phase.step(state, draw))
      yield time.monotonic() - began
      began = time.monotonic()

  began = time.monotonic()
  state = phase.init()
  size = trees.size(phase.released(state))
  started = time.monotonic() - began
  spent: list[float] = []
  for seconds in steps():
    spent.append(seconds)
    # The first step is left out, since compiling it may take minutes.
    if sum(spent[1:]) > TIMED_SECONDS:
      break
  seconds = _evaluate(phase, state)
  return Timing(started + spent[0], tuple(spent[1:]), seconds, size), state


def _evaluate(phase: Phase, state: Any) -> float:
  seconds = 0.0
  # The first iteration compiles, so the second iteration is timed.
  for _ in range(0 if phase.evaluate is None else 2):
    began = time.monotonic()
    phase.evaluate(state)  # type: ignore[misc]
    seconds = time.monotonic() - began
  return seconds


def _minutes(rehearsal: Rehearsal) -> str:
  timing = rehearsal.timing
  begun = rehearsal.before + rehearsal.timing.start
  return (
    f"about {rehearsal.seconds / 60:.2g} minutes (estimate: {begun:.2g} s until the first step "
    f"is done, then {1e3 * timing.step:.3g} ms a step, the median of {len(timing.steps)} on "
    f"zeros, and {timing.evaluation:.2g} s an evaluation)"
  )


def memory() -> str:
  """Describes the peak memory of this process, which held the data and ran steps on zeros."""
  peak = provenance.peak_rss()
  line = f"about {peak / 1e9:.2g} GB at most (estimate: what this dry run took)"
  stats = jax.local_devices()[0].memory_stats() or {}
  device = stats.get("peak_bytes_in_use")
  return line if device is None else f"{line}, {device / 1e9:.2g} GB of the device's"


def _show(name: str, value: Any) -> str:
  return by_name(name, value) if isinstance(value, float) else str(value)

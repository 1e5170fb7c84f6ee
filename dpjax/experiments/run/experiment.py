"""What a kind of run is: an `Experiment`, whose story yields phases; checks of what it gives.

A user may write one. What it returns is checked at once, if possible before the first step. An
error is one line that names the field.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from dpjax import trees, validate
from dpjax.accounting import Ledger
from dpjax.data import digest
from dpjax.experiments.config import choices, common
from dpjax.experiments.run import guarantee as guarantees
from dpjax.experiments.run import run_keys, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.guarantee import NONE, Guarantee
from dpjax.experiments.run.left_out import Arrivals, Tally
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.types import ArrayTree
from dpjax.validate import UserError, Verbatim

if TYPE_CHECKING:
  from dpjax.experiments.run.dry_run import Planned
  from dpjax.parallel.client_states import Memory
  from dpjax.parallel.step_program import StepProgram
  from dpjax.parallel.targets import Machine

Scores = dict[str, float]
Result = dict[str, Any]
# Key in result.json of the name of the run's steps, an axis label in the report. A run without this
# key has no report.
STEPS_ARE = "steps_are"
_DIGEST_BYTES = 32
# Keys of result.json whose values a job of one phase must state before its first step.
_PLANNED = ("task", "dataset", "method")


@dataclasses.dataclass(frozen=True)
class Phase:
  """A training, described by the number of its steps and by functions that the loop calls.

  Raises:
    UserError: a field is malformed; the error names it.
  """

  num_steps: int
  init: Callable[[], Any]  # -> state, a tree of arrays and keys
  step: Callable[[Any, Any], tuple[Any, Any]]  # (state, draw) -> (state, info)
  # Function from a step t to the draws of step t and later steps. Each draw depends only on the
  # keys and on its step.
  draws: Callable[[int], Iterable[Any]]
  released: Callable[[Any], Any]  # state -> parameters that may be published
  # Function from a state to scores on public data, by name, with "accuracy" if there is one. None:
  # the phase writes no rows.
  evaluate: Callable[[Any], Scores] | None
  # Function (folder, last state) that writes files beside params.npz.
  write: Callable[[pathlib.Path, Any], None] = lambda folder, state: None
  # Guarantee, with the event of each step. None: the loop accounts for no step of this phase.
  guarantee: Guarantee | None = None
  row_at: Callable[[int], int | None] = lambda step: (
    step
  )  # number of a step's row; None: no row
  # Function (state, info, step) -> values of a row besides scores and epsilon.
  observe: Callable[[Any, Any, int], Scores] = lambda state, info, step: {}
  # Function from the info of a step to its `Arrivals`, which depend on raw data. None: they are not
  # counted, as in a release.
  arrivals: Callable[[Any], Arrivals] | None = None
  unit: str = "examples"  # what `arrivals` counts
  enough: Callable[[Scores], bool] = lambda row: False  # whether the phase ends after a row
  save_every: int | None = None  # steps between checkpoints; None: by the clock
  # Function (folder of checkpoints, first state) -> what stores the `ClientStates` of a state, such
  # as `client_states.Memory`. None: a state holds arrays and keys alone.
  memory: Callable[[pathlib.Path, Any], Memory] | None = None
  # Tree of arrays released before the first step. A resumed run must compute the same arrays.
  before_steps: Any = None
  name: str = "train"  # name on the progress bar
  subfolder: str = ""  # folder of the checkpoints, for a run of several phases
  steps_are: str = "optimizer steps"  # name of the steps in the picture
  # Function that returns the program of a step, for the devices of
  # `parallel.made_for.compiling_for`. None: this job cannot be planned for another machine.
  program: Callable[[], StepProgram] | None = None
  # Function that returns the parts of result.json that are known before the first step. For a phase
  # that is `single` these include task, dataset and method.
  planned: Callable[[], Result] = dict
  # Function from (state, facts of the guarantee, rows of metrics) to other parts of result.json.
  describe: Callable[[Any, Result, list[Result]], Result] = lambda state, facts, rows: {}

  def __post_init__(self) -> None:
    validate.integer_at_least(0, **{"Phase.num_steps": self.num_steps})
    if self.save_every is not None:
      validate.integer_at_least(1, **{"Phase.save_every": self.save_every})
    for field in dataclasses.fields(self):
      value, hint = getattr(self, field.name), str(field.type)
      absent = value is None and hint.endswith("| None")
      if hint.startswith("Callable") and not (callable(value) or absent):
        _refuse(f"Phase.{field.name}", "be a function", value)
    if not isinstance(self.guarantee, Guarantee | None):
      wanted = "be a dpjax.experiments.run.guarantee.Guarantee, or None"
      _refuse("Phase.guarantee", wanted, self.guarantee)


class Outcome(NamedTuple):
  """The parameters of a finished training, and functions that write its result."""

  params: Any
  # Function from a folder to the part of result.json that this kind of run determines.
  result: Callable[[pathlib.Path], Result]
  # Function that writes other files, before result.json.
  write: Callable[[pathlib.Path], None] = lambda folder: None
  saved_as: str = owner.PARAMS  # name of the file of `params` in the folder


class Trained(NamedTuple):
  """A phase after its last step."""

  phase: Phase
  state: Any
  step: int
  ledger: Ledger
  epsilon: float  # of all steps; infinity without a guarantee
  tally: Tally
  row: Scores | None  # scores of the state, if they were computed


# A run as a generator: it yields each phase, which comes back trained, and returns the outcome.
Story = Generator[Phase, Trained, Outcome]
C = TypeVar("C", bound=Any)  # type of the config of a kind of run


class Experiment(Generic[C]):
  """One run of a config: what its kind knows of it. `loop.run` does the rest.

  A kind of run derives from this class. It defines `data` and `train`, and what is not as here.
  """

  over_processes = False  # whether several processes may share the steps
  plans = False  # whether `rehearse` says what a run would promise and take
  step_is = "step"  # what a step is, in words

  def __init__(self, config: C):
    self.config = config

  def check(self) -> None:
    """Raises UserError if the config is wrong; loads no data.

    Here by the types and ranges in its annotations. A kind that checks more calls this, too.
    """
    common.check_types(self.config)

  def data(self) -> Any:
    """Loads the data. Several runs may share what this function returns."""
    raise NotImplementedError

  def with_features(self, data: Any) -> Any:
    """Returns data with all that `train` needs of them. It is called after the check that a run may
    begin or go on, and not for data that runs share, which have all."""
    return data

  def data_key(self) -> Any:
    """Returns plain data that decide what `data` and `with_features` return: runs of this kind may
    share it if they are equal. Here the whole config, which no other run has."""
    return choices.to_dict(self.config)

  def check_data(self, data: Any) -> None:
    """Raises UserError if nothing can be trained on these data, loaded or given."""

  def train(self, data: Any, keys: RunKeys) -> Story:
    """Yields the phases of the run, each of which comes back trained, and returns its outcome.

    All that comes before the first phase is checked before the run's folder is claimed.
    """
    raise NotImplementedError

  def same(self) -> dict[str, str]:
    """Returns values that must be equal in all processes of a run; see `parallel.runtime.start`."""
    return {"config": owner.config_digest(self.config)}

  def plan(self, workdir: str, target: Machine | None = None) -> str:
    """Returns the plan of the run as text, for a launcher's --dry_run.

    Args:
      target: machine that is not here, for which the step is compiled; None: this one.
    """
    # Imported here, because most runs are not dry runs.
    from dpjax.experiments.run import dry_run

    return dry_run.report(self, workdir, target)

  def rehearse(self, data: Any) -> Planned:
    """Returns what the run would promise and take, from a few steps on zeros of the data's shape.

    Raises:
      UserError: the run would be refused before its first step.
    """
    # Imported here, because most runs are not dry runs.
    from dpjax.experiments.run import dry_run

    run = dry_run.rehearse(self.config, data)
    return dry_run.Planned(run.facts(), run.seconds, run.phase.num_steps)

  def end(self, folder: pathlib.Path) -> None:
    """Writes what is made from result.json, and removes what is needed no more. It is called after
    the result was written, and each time that a finished run is found: a run may be killed between
    the two."""

  def alarm(self, result: Result) -> str:
    """Returns one line about a promise that an attack has refuted; "" if there is none."""
    audit = result.get("audit")
    return f"audit: {audit['verdict']}" if audit and audit["refuted"] else ""

  def line(self, result: Result) -> str:
    """Returns one line about a finished run: its scores, its guarantee and its time."""
    return (
      f"{result['dataset']} {result['method']}: {writers.headline(result)}, "
      f"{guarantees.summary(result)}{writers.took(result)}"
    )

  def digest(self, data: Any) -> bytes:
    """Returns 32 bytes that identify what is trained on: `dpjax.data.digest`, or a SHA-256."""
    return digest(data[0])

  def weights(self) -> dict[str, str]:
    """Returns the SHA-256 of each file of weights that the config names, by field."""
    return {}

  @property
  def is_private(self) -> bool:
    """Returns whether the run has a guarantee. Then its keys are secret: they come from the
    operating system."""
    return getattr(self.config, "is_private", True)

  @property
  def keeps_memory(self) -> bool:
    """Returns whether the process should keep the memory that it frees (`parallel.allocator`)."""
    return False

  @property
  def release(self) -> bool:
    """Returns whether the model is to be published; see docs/release.md."""
    return getattr(self.config, "release", False)

  def new_keys(self) -> RunKeys:
    """Returns the keys of a run that begins now. A config may have a `noise_seed`: the seed of
    noise and sampling, in place of secret keys."""
    return run_keys.draw(
      self.config.seed,
      private=self.is_private,
      noise_seed=getattr(self.config, "noise_seed", None),
      release=self.release,
    )


def no_plan() -> UserError:
  """Returns the error about a kind of run that --dry_run cannot rehearse."""
  return UserError(
    "would be ignored, it needs runs of many steps: those of launch.train, launch.federate or "
    "launch.relevance",
    field="dry_run",
    value=True,
  )


def every(count: int, num_steps: int, step: int) -> int | None:
  """Returns `step` if it is a multiple of `count` or the last step, else None (for `row_at`).

  >>> [every(2, 5, step) for step in range(1, 6)]
  [None, 2, None, 4, 5]
  """
  return step if step % count == 0 or step == num_steps else None


def single(phase: Phase) -> Story:
  """Returns the story of a run with one phase, or the end of a story.

  Raises:
    UserError: the phase would exceed its budget, or lacks a required part of its result. The error
      comes before the phase. So a run that may not begin claims no folder.
  """
  planned = phase.planned()
  missing = [name for name in _PLANNED if name not in planned]
  if missing:
    raise UserError(
      f"must return {', '.join(missing)}, too; got {planned!r}", field="Phase.planned"
    )
  if phase.guarantee is not None:
    phase.guarantee.check_budget(Ledger())
  trained = yield phase

  def write(folder: pathlib.Path) -> None:
    guarantee = trained.phase.guarantee or NONE
    # The curve beside the result holds only rates: it could not state that a bound is claimed, or
    # that it holds for a larger deployment.
    if guarantee.kind == "proved" and guarantee.delta:
      # Imported here: only the end of a run with a proof writes a curve.
      from dpjax.accounting import pairs_of, trade_off_files

      profile = guarantee.profile(trained.ledger, trained.epsilon)
      if profile is not None:
        pairs = pairs_of(profile, guarantee.delta)
        trade_off_files.write_curve(pairs, folder / trade_off_files.CURVE)
    phase.write(folder, trained.state)

  result = functools.partial(_result, trained, planned)
  return Outcome(phase.released(trained.state), result, write)


def _result(trained: Trained, planned: Result, folder: pathlib.Path) -> Result:
  phase = trained.phase
  guarantee = phase.guarantee or NONE
  facts = guarantee.facts(trained.ledger, trained.epsilon)
  facts["privacy_statement"] = guarantee.statement(trained.step)
  return {
    **facts,
    "test_accuracy": None,
    **(score(phase, trained.state) if trained.row is None else trained.row),
    "num_steps": trained.step,
    "ledger": trained.ledger.to_json(),
    **({} if phase.evaluate is None else {STEPS_ARE: phase.steps_are}),
    **trained.tally.facts(),
    **planned,
    **phase.describe(trained.state, facts, writers.read_metrics(folder)),
  }


# --- checks of user-defined parts


def _refuse(field: str, wanted: str, got: object) -> None:
  raise UserError(f"must {wanted}, not {got!r:.60}", field=field)


def check(experiment: Experiment[Any]) -> None:
  """Raises UserError, which names the field, if an experiment is malformed, its config is wrong, or
  it supports only one process, and there are several."""
  if not isinstance(experiment, Experiment):
    _refuse("experiment", "be a dpjax.experiments.run.experiment.Experiment", experiment)
  config: Any = experiment.config
  if not dataclasses.is_dataclass(config) or isinstance(config, type):
    _refuse("Experiment.config", "be a dataclass", config)
  experiment.check()
  # Of first parameters and public orders; without privacy, of everything.
  validate.integer_at_least(0, seed=experiment.config.seed)
  noise_seed = getattr(config, "noise_seed", None)
  if noise_seed is not None:
    validate.integer_at_least(0, noise_seed=noise_seed)
  count = jax.process_count()
  if count > 1 and experiment.release:
    raise UserError(
      f"must be run by one process, not {count}: its keys leave no machine",
      field="release",
      value=True,
    )
  if count > 1 and not experiment.over_processes:
    raise UserError(
      f"must be run by one process, not {count}: nothing of such a run is shared between them",
      field="config",
      value=Verbatim(type(config).__name__),
    )


def digest_of(experiment: Experiment[Any], data: Any) -> bytes:
  """Checks the data of a run, and returns their digest."""
  experiment.check_data(data)
  digest = experiment.digest(data)
  # The digest follows from the data, so a message may show its type and size, not its content.
  if not isinstance(digest, bytes) or len(digest) != _DIGEST_BYTES:
    size = f" of {len(digest)}" if isinstance(digest, bytes | str) else ""
    raise UserError(  # secret
      "must return 32 bytes of all that is trained on (dpjax.data.digest, or a SHA-256), not "
      f"{type(digest).__name__}{size}",
      field="Experiment.digest",
    )
  return digest


def begin_story(
  experiment: Experiment[Any], data: Any, keys: RunKeys
) -> tuple[Story, Phase]:
  """Returns the story of a run, and its first phase.

  Raises:
    UserError: the run is refused, or `Experiment.train` gives no phase.
  """
  story = experiment.train(data, keys)
  if not isinstance(story, Generator):
    _refuse("Experiment.train", "return what single(Phase(...)) makes", story)
  try:
    return story, phase_of(next(story), experiment)
  except StopIteration:
    raise UserError("must yield a phase", field="Experiment.train") from None


def phase_of(yielded: Any, experiment: Experiment[Any]) -> Phase:
  """Returns what the story of an experiment yielded. Its guarantee is a claim if the config has a
  `noise_seed`. Raises UserError if it is no phase."""
  if not isinstance(yielded, Phase):
    _refuse("Experiment.train", "yield a dpjax.experiments.run.experiment.Phase", yielded)
  noise_seed = getattr(experiment.config, "noise_seed", None)
  if noise_seed is None or yielded.guarantee is None:
    return yielded
  # Stated here, so that no kind of run can forget it.
  claim = guarantees.as_repeatable(yielded.guarantee, noise_seed)
  return dataclasses.replace(yielded, guarantee=claim)


def begin(phase: Phase) -> ArrayTree:
  """Returns the first state of a phase. Raises UserError if it is no tree of arrays and keys."""
  state = phase.init()
  wanted = "return an array, or a tree of arrays and keys"
  leaves = jax.tree.leaves(state)
  if phase.memory is not None:
    from dpjax.parallel.client_states import ClientStates  # most states have none

    leaves = [leaf for leaf in leaves if not isinstance(leaf, ClientStates)]
  for leaf in leaves:
    if not _is_array(leaf):
      _refuse("Phase.init", wanted, leaf)
  if not jax.tree.leaves(state):
    _refuse("Phase.init", wanted, state)
  return state


def step_result(returned: Any, before: Any) -> tuple[Any, Any]:
  """Returns what a step returned, as (the next state, info). Raises UserError if it is no pair, or
  changes the structure `before` of the state."""
  # A state of another structure would make JAX compile the step again, and no checkpoint could
  # restore it.
  if not isinstance(returned, tuple) or len(returned) != 2:
    _refuse("Phase.step", "return (state, info)", jax.tree.structure(returned))
  after = jax.tree.structure(returned[0])
  if after != before:
    _refuse("Phase.step", f"return a state like that of init, {before!s:.60}", after)
  return returned


def score(phase: Phase, state: ArrayTree) -> Scores:
  """Returns the scores of a state, as {"test_NAME": score}; {} without `evaluate`."""
  if phase.evaluate is None:
    return {}
  scores = phase.evaluate(state)
  are_numbers = isinstance(scores, Mapping) and all(
    np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf"
    for value in scores.values()
  )
  if not are_numbers:
    _refuse("Phase.evaluate", "return numbers by their names", scores)
  return {f"test_{name}": value for name, value in scores.items()}


def _is_array(leaf: Any) -> bool:
  # A checkpoint can save a NumPy scalar, but cannot restore it.
  if isinstance(leaf, np.generic):
    return False
  dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
  return trees.is_key(leaf) or dtype.kind in "biufcV"  # V: bfloat16 and its kin

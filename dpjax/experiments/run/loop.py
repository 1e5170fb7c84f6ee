"""The training loop of every kind of run, from the start to result.json.

A kind of run is `build(config) -> Job`. This module does the rest: resume, ledger, budget,
signals, lock, progress, metrics, checkpoints, release keys, a full disk, several processes.

The following order prevents lost steps and double privacy costs. The run's keys and the data's
digest are on disk before the first computation. Metrics of step k are written before the checkpoint
of step k, which holds the ledger of k steps. A resumed run repeats later steps with the same
batches and the same noise. So it releases what the interrupted run would have released.

With several processes (`dpjax.parallel`), all processes make the same calls. Only process 0 uses
files.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import pathlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from dpjax import noise, trees
from dpjax import parallel as processes
from dpjax.accounting import Ledger
from dpjax.experiments.config import fields
from dpjax.experiments.run import (
  checkpoint,
  config_names,
  kind,
  provenance,
  run_keys,
  writers,
)
from dpjax.experiments.run import experiment as experiments
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.experiment import Job as Job
from dpjax.experiments.run.experiment import Phase as Phase
from dpjax.experiments.run.experiment import Result, Scores
from dpjax.experiments.run.experiment import RunOutcome as RunOutcome
from dpjax.experiments.run.experiment import Schedule as Schedule
from dpjax.experiments.run.experiment import TrainPhase as TrainPhase
from dpjax.experiments.run.experiment import every as every
from dpjax.experiments.run.experiment import single as single
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.left_out import Tally
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.types import Config
from dpjax.validate import UserError, Verbatim, first_line

if TYPE_CHECKING:
  from dpjax.experiments.run import row_hooks

STOPPING = tuple(
  getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
# Key of result.json and of the secrets: what `provenance.start` returned at each start.
STARTS = "starts"
# Seconds between two checkpoints of a phase without `save_every`.
SAVE_SECONDS = 10.0


class Interrupted(Exception):
  """Raised when a signal stopped the run, after its state was saved."""

  def __init__(self, signum: int, step: int):
    super().__init__(f"stopped at step {step} and saved; run the same command to go on")
    self.signum = signum


# --- a run


def job_of(config: Config, data: object = None) -> Job:
  """Returns the job of a config: the result of `build(config, data)`.

  The function is in the module `build` beside the module that defines the config's type.

  Args:
    data: data that the function `load_data` of the same module returned. Several runs may share
      them. None: the function `build` loads the data.
  """
  experiment = kind.experiment_of(config)
  if experiment is not None:
    return experiments.job_of(experiment, data)
  package, _, _ = type(config).__module__.rpartition(".")
  try:
    build_module = importlib.import_module(f"{package}.build" if package else "build")
  except ModuleNotFoundError as error:
    # If build.py exists, but cannot import another module, the error about that module is raised.
    if error.name != f"{package}.build".lstrip("."):
      raise
    raise UserError(
      "must be of a module beside which a build.py lies, whose build(config) "
      f"returns a Job; there is no {error.name!r}",
      field="config",
      value=Verbatim(type(config).__name__),
    ) from None
  arguments = () if data is None else (data,)
  return experiments.checked(build_module.build(config, *arguments))


def train(config: Config, workdir: pathlib.Path | str, *, data: object = None) -> Result:
  """Runs the job of a config of any kind. Returns the content of result.json."""
  return run(job_of(config, data), workdir)


def run(
  job: Job,
  workdir: pathlib.Path | str,
  *,
  on_save: Callable[[int], None] = lambda step: None,
) -> Result:
  """Carries out a job, or its remaining steps, and returns the content of result.json.

  Args:
    job: job to run. A private run draws its keys when its folder is made, so two runs of one config
      differ. With a `noise_seed`, or without privacy, equal configs and data give equal
      parameters, bit for bit, on the same machine with the same software and devices.
    workdir: folder that is new, empty, or of an earlier (unfinished or finished) run of the same
      config on the same data.
    on_save: function that is called with the number of each saved step, and with the number of the
      step from which a run resumes.

  Returns:
    Content of result.json. The run also writes config.json, metrics.jsonl, TensorBoard events
    (not in a release), report.png and .csv, params.npz (the model to release), and checkpoints
    (secret: they hold the noise key).

  Raises:
    UserError: a wrong config, missing data, a workdir of another config or of other data, a
      workdir in which another process runs, an overspent budget, a full disk, or processes whose
      data differ; in each case nothing is overwritten.
    Interrupted: SIGINT, SIGTERM or SIGHUP arrived before the last step, in one of the processes;
      the state is saved.
    PeerLost: another process of this run has ended.
  """
  with fields.own_names(experiments.checked(job).config):
    return _run(job, pathlib.Path(workdir), on_save)


def _run(job: Job, folder: pathlib.Path, on_save: Callable[[int], None]) -> Result:
  _check_processes(job)
  meta = processes.on_first(lambda: owner.known(folder, job.config))
  # A finished run only returns its result, so it must make no random draw.
  done = processes.on_first(lambda: _finished(job, folder, meta))
  if done is not None:
    return done
  # The libraries are checked now, so that a missing plotting library does not fail the run at its
  # end.
  from dpjax import optional

  optional.check("runs")
  admission = admitted(job, folder, meta)
  random = admission.random
  schedule = experiments.started(job, random)
  # The modules that the config names are imported by now.
  starts = [*(meta or {}).get(STARTS, []), provenance.start()]

  def taken(held: contextlib.ExitStack) -> None:
    held.enter_context(writers.alone_in(folder, checkpoint.FOLDER))
    begun = (folder / owner.CONFIG).exists()
    # A release keeps its first keys: its folder is never emptied, even before the first step.
    fresh = not (begun or job.release or jax.process_count() > 1)
    owner.claim(folder, job.config)
    held.enter_context(owner.released_if_refused(folder, fresh=fresh))
    secrets = run_keys.to_meta(
      admission.data, random, weights=admission.weights, run=admission.run_id
    )
    # Keys are on disk before any computation uses them, so a run that is killed later repeats the
    # same noise.
    wanted = {**secrets, STARTS: starts} if meta is None else meta
    owner.remember(folder, wanted, before=meta)

  def goes_on() -> None:
    # A run that was refused until here has changed nothing.
    if meta is not None:
      owner.remember(folder, {**meta, STARTS: starts}, before=meta)

  with contextlib.ExitStack() as held:
    held.enter_context(writers.space_on_disk(folder, lambda: checkpoint.newest(folder)))
    processes.on_first(lambda: taken(held))
    hook = None
    # Configs without the field `writer` have no hook.
    if processes.is_first() and getattr(job.config, "writer", None) is not None:
      # Imported here: few runs have a hook.
      from dpjax.experiments.run import row_hooks

      hook = row_hooks.of_run(job.config, folder)
      if hook is not None:
        held.callback(hook.close)
    trainer = _Trainer(
      folder,
      admission.run_id,
      noise.key_id(random.noise),
      on_save,
      goes_on,
      release=job.release,
      hook=hook,
    )
    return _carried_out(job, folder, schedule, trainer, starts)


def _check_processes(job: Job) -> None:
  """Raises UserError if there are several processes and the run supports only one process."""
  count = jax.process_count()
  if count == 1:
    return
  if job.release:
    raise UserError(
      f"must be run by one process, not {count}: its keys leave no machine",
      field="release",
      value=True,
    )
  if not job.over_processes:
    raise UserError(
      f"must be run by one process, not {count}: nothing of such a run is "
      "shared between them",
      field="config",
      value=Verbatim(type(job.config).__name__),
    )


class Admission(NamedTuple):
  """What a run needs to begin or go on in its folder."""

  data: bytes  # digest of the data
  weights: dict[str, str]  # SHA-256 of each file of weights, by field
  random: RunKeys
  run_id: str


def admitted(job: Job, folder: pathlib.Path, meta: Result | None) -> Admission:
  """Returns the keys and the identity of a run. Raises UserError if `meta`, the record that the
  folder holds of its run, belongs to another run."""
  data = experiments.data_of(job)
  weights = job.weights()
  # The processes compare a value derived from the digest. No message shows the digest.
  processes.same(data=data.hex(), weights=str(weights))

  def keys() -> tuple[dict[str, Any], str]:
    run_keys.check_data(meta, data, name=job.data_name, workdir=folder)
    run_keys.check_weights(meta, weights, workdir=folder)
    random = job.new_keys() if meta is None else run_keys.from_meta(job.seed, meta)
    run_id = run_keys.run_id(config_names.digest(job.config), data, random)
    run_keys.check_run(meta, run_id, workdir=folder)
    return run_keys.to_json(random), run_id

  # The first process draws, and the others get its keys.
  random, run_id = processes.on_first(keys)
  return Admission(data, weights, run_keys.from_json(job.seed, random), run_id)


def _finished(job: Job, folder: pathlib.Path, meta: Result | None) -> Result | None:
  """Returns the result of a finished run; None: the run has not finished."""
  done = owner.finished(folder, job.config)
  # If `meta` is empty, the checkpoints were removed, and nothing tells which data were used.
  if done is not None and meta:
    data = experiments.data_of(job)
    run_keys.check_data(meta, data, name=job.data_name, workdir=folder)
    run_keys.check_weights(meta, job.weights(), workdir=folder)
  if done is not None and isinstance(done.get(experiments.STEPS_ARE), str):
    # Imported here: only the end of a run needs the plotting library.
    from dpjax.experiments.run import report

    report.redraw(folder, done[experiments.STEPS_ARE])
  return done


def _carried_out(
  job: Job,
  folder: pathlib.Path,
  schedule: Schedule,
  trainer: _Trainer,
  starts: list[dict[str, Any]],
) -> Result:
  outcome = schedule(trainer)

  def written() -> Result:
    result = {
      "device": provenance.device(),
      **outcome.result(folder),
      "release": job.release,
      "seed": job.seed,
      "num_parameters": trees.size(outcome.params),
      "params_sha256": trees.sha256(outcome.params),
      # A release has no duration: the time of a step depends on the private size of its batch.
      "wall_seconds": None if job.release else round(trainer.seconds(), 3),
      "versions": starts[-1]["versions"],
      STARTS: starts,
    }
    # Parameters are written first, so that every result has its model beside it.
    owner.save_params(folder / outcome.saved_as, outcome.params)
    outcome.write(folder)
    result[owner.FILES] = owner.digests(folder)
    result = owner.write_result(folder, job.config, result)
    outcome.finish(folder)
    return result

  return processes.on_first(written)


# --- the steps


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
  """Collects SIGINT, SIGTERM and SIGHUP in a list, which it yields. So the run does not end in the
  middle of a step.

  An ignored SIGHUP stays ignored: under `nohup` a run outlives its terminal. A signal during the
  last step stops nothing in the block. It is raised again after the block if more than this
  training should stop, for example the other runs of a sweep.
  """
  received: list[int] = []
  previous = {}
  for signum in STOPPING:
    if (
      signum == getattr(signal, "SIGHUP", None)
      and signal.getsignal(signum) == signal.SIG_IGN
    ):
      continue
    try:
      previous[signum] = signal.signal(signum, lambda s, _: received.append(s))
    # `signal.signal` raises ValueError outside of the main thread. The code of the main thread then
    # handles the signals.
    except ValueError:
      continue
  try:
    yield received
  finally:
    for signum, handler in previous.items():
      signal.signal(signum, handler)
  for signum in received[:1]:
    if _stops_more(previous[signum]):
      signal.raise_signal(signum)


def _stops_more(handler: Any) -> bool:
  """Returns whether a signal during the last step should stop more than this training.

  Args:
    handler: handler of the signal outside of the training.
  """
  # The other processes of the run did not get the signal, and would wait for this process.
  if jax.process_count() > 1:
    return False
  # This process belongs to a sweep: one signal must end the process, not only this training.
  if multiprocessing.parent_process() is not None:
    return True
  # The default handlers of Python and of the system would end the process, and lose a complete
  # result.
  return handler not in (signal.SIG_DFL, signal.default_int_handler)


@contextlib.contextmanager
def _ended(draws: Iterable[object]) -> Iterator[Iterable[object]]:
  """Closes the iterator of draws at the end of the block, so that its reading thread ends, too."""
  try:
    yield draws
  finally:
    getattr(draws, "close", lambda: None)()


class _Trainer:
  """Carries out each phase that the schedule of a run passes to it."""

  def __init__(
    self,
    folder: pathlib.Path,
    run_id: str,
    key_name: str,
    on_save: Callable[[int], None],
    goes_on: Callable[[], None],
    *,
    release: bool,
    hook: row_hooks.RowHook | None = None,
  ):
    self.hook = hook
    self.folder = folder
    self.run_id = run_id
    self.release = release
    self.key_name = key_name
    self.on_save = on_save
    self.goes_on: Callable[[], None] | None = goes_on
    self.started = time.monotonic()
    self.before = 0.0
    self.late: list[int] = []  # the signal of a last step, which stops the next phase

  def seconds(self) -> float:
    """Returns the seconds that the run took, including those before a resume."""
    return self.before + time.monotonic() - self.started

  def __call__(self, phase: Phase) -> Running:
    """Carries out a phase to its end, from its newest checkpoint if there is one. Returns the ended
    phase. A signal during its last step stops the next phase after a step."""
    running = Running(phase, self)
    if self.goes_on is not None:
      processes.on_first(self.goes_on)
      self.goes_on = None
    with contextlib.closing(running), signals() as received:
      received.extend(self.late)
      running.go(received)
      self.late = received[:1]
    running.tally.check(running.step)
    return running


def _alike(first: Any, other: Any) -> bool:
  """Returns whether JSON data are equal except for the last digits of floats, which calibration on
  another machine may round differently."""
  if isinstance(first, float) and isinstance(other, float):
    return math.isclose(first, other, rel_tol=1e-9) or first == other
  if isinstance(first, dict) and isinstance(other, dict):
    return first.keys() == other.keys() and all(_alike(first[k], other[k]) for k in first)
  if isinstance(first, list) and isinstance(other, list):
    return len(first) == len(other) and all(map(_alike, first, other))
  return type(first) is type(other) and first == other


class Running:
  """A running phase: its state, ledger, step, metrics and checkpoints."""

  def __init__(self, phase: Phase, trainer: _Trainer):
    self.phase = experiments.checked_phase(phase)
    self.trainer = trainer
    self.metrics = None
    self.state = experiments.begun(phase)
    self.ledger = Ledger()
    self.step = 0
    self.scored: tuple[int, Scores] | None = None  # a step, and the scores of its state
    self.reached = False  # whether `phase.enough` ended the phase
    self.saved_at = time.monotonic()
    self.rows: dict[str, Any] | None = None  # result of `MetricsWriter.durable`
    self.tally = Tally(phase.arrivals, phase.unit)
    self.checkpoints = checkpoint.Checkpoints(
      trainer.folder, phase.subfolder, rows_on_disk=phase.rows_on_disk
    )
    self.state = self.checkpoints.begun(self.state)
    if self.checkpoints.latest_step() is None:
      self.save()
    else:
      self._resume()
    self.final_epsilon = float("inf")
    guarantee = phase.guarantee
    if guarantee is not None:
      guarantee.check_budget(self.ledger)
      # Epsilon is computed now, so that a run that cannot be accounted for is refused at the start.
      self.final_epsilon = processes.on_first(lambda: guarantee.curve(phase.num_steps))
      processes.on_first(guarantee.warn)
    if phase.evaluate is not None and processes.is_first():
      self.metrics = writers.MetricsWriter(
        trainer.folder,
        resume_step=self._last_row(),
        tensorboard=not trainer.release,
        held=self.rows,
        hook=trainer.hook,
      )

  def _resume(self) -> None:
    self.state, meta = self.checkpoints.restore(self.state)
    if meta.get("run") != self._name():
      raise UserError(
        "is of another run; bring its own back, or choose another directory, "
        "nothing was changed",
        field="checkpoint",
        value=self.checkpoints.directory,
      )
    if meta.get("before_steps") != self._before_steps():
      raise UserError(
        "what was released before the first step is not what this machine and "
        "these versions compute from the same data and noise; go on where it was "
        "begun, or choose another directory, nothing was changed",
        field="checkpoint",
        value=self.checkpoints.directory,
      )
    self.step = int(self.checkpoints.latest_step() or 0)
    try:
      self.ledger = Ledger.from_json(meta["ledger"])
      self.reached = bool(meta["reached"])
      self.trainer.before = max(self.trainer.before, float(meta["seconds"]))
      self.rows = meta.get("rows")
      self.tally.resume(meta["arrivals"])
    except (KeyError, TypeError, ValueError) as error:
      reason = first_line(error, with_type=True)
      raise UserError(
        f"what it remembers is damaged ({reason}); remove it to go on from an "
        "earlier step, nothing was changed",
        field="checkpoint",
        value=self.step,
      ) from error
    if self.phase.guarantee is not None:
      self._check_ledger(self.phase.guarantee)
    self.trainer.on_save(self.step)

  def _check_ledger(self, guarantee: Guarantee) -> None:
    """Raises UserError unless the ledger holds the events of this run's steps so far, up to
    the last digits of floats."""
    wanted = self._charges(guarantee)
    if not _alike(self.ledger.to_json(), wanted.to_json()):
      raise UserError(
        f"its ledger holds {self.ledger.num_steps} steps that are not those of "
        "this run; it cannot be trusted, remove it to go on from an earlier step",
        field="checkpoint",
        value=self.step,
      )

  def _charges(self, guarantee: Guarantee) -> Ledger:
    """Returns the ledger that the steps so far must have, by the guarantee."""
    ledger = Ledger()
    start = 0
    while start < self.step:
      event = guarantee.step_event(start)
      end = start + 1
      # Consecutive equal steps form one entry, as in the ledger of a run.
      while end < self.step and guarantee.step_event(end) == event:
        end += 1
      ledger = ledger.charge(
        event,
        num_steps=end - start,
        l2_clip_norm=guarantee.l2_bound,
        neighboring_relation=guarantee.relation,
        noise_key_id=self.trainer.key_name,
        first_step=start,
      )
      start = end
    return ledger

  def _name(self) -> str:
    return f"{self.trainer.run_id} {self.phase.subfolder}".rstrip()

  def _before_steps(self) -> str:
    """Returns a SHA-256 of what was released before the first step. A second, different release
    with the same noise would reveal the difference of the exact values."""
    return trees.sha256(self.phase.before_steps)

  def _last_row(self) -> int | None:
    """Returns the number of the newest row up to the current step; None: there is no row."""
    rows = map(self.phase.row_at, range(self.step, 0, -1))
    return next((row for row in rows if row is not None), None)

  def charge(self) -> None:
    """Counts one more step, and records it in the ledger if the phase has a guarantee. A step
    with an empty batch counts, too: its noise was released."""
    guarantee = self.phase.guarantee
    if guarantee is not None:
      self.ledger = self.ledger.charge(
        guarantee.step_event(self.step),
        l2_clip_norm=guarantee.l2_bound,
        neighboring_relation=guarantee.relation,
        noise_key_id=self.trainer.key_name,
        first_step=self.step,
      )
    self.step += 1

  def scores(self) -> Scores:
    """Returns the scores of the state. They are computed once for a step."""
    if self.scored is None or self.scored[0] != self.step:
      self.scored = self.step, experiments.scored(self.phase, self.state)
    return dict(self.scored[1])

  def _measured(self) -> Scores:
    """Returns the scores, and epsilon of the steps so far unless there is no guarantee. Epsilon
    takes as long to compute as for a whole run."""
    phase = self.phase
    row = self.scores()
    if phase.guarantee is None or phase.guarantee.kind == "none":
      return row
    last = self.step == phase.num_steps
    return row | {
      "epsilon": self.final_epsilon if last else phase.guarantee.curve(self.step)
    }

  def record(self, row_number: int, info: object) -> Scores:
    """Writes a row, and returns the values for the progress bar."""
    row = processes.on_first(self._measured)
    row |= self.phase.observe(self.state, info, self.step)
    self.tally.settle()
    if self.metrics is not None:
      self.metrics.write(row_number, row)
    self.reached = self.phase.enough(row)
    names = {"accuracy": "test_accuracy", "rmse": "test_rmse", "epsilon": "epsilon"}
    return {name: row[key] for name, key in names.items() if key in row}

  def save(self) -> None:
    meta = {
      "run": self._name(),
      "ledger": self.ledger.to_json(),
      "before_steps": self._before_steps(),
      "seconds": self.trainer.seconds(),
      "reached": self.reached,
      "arrivals": self.tally.to_meta(),
    }
    if self.metrics is not None:
      # Metrics are flushed before the checkpoint that refers to them.
      meta["rows"] = self.metrics.durable()
    self.checkpoints.save(self.step, self.state, meta)
    self.saved_at = time.monotonic()
    self.trainer.on_save(self.step)

  def _is_due(self) -> bool:
    if self.phase.save_every is not None:
      return self.step % self.phase.save_every == 0
    return time.monotonic() - self.saved_at >= SAVE_SECONDS

  def go(self, received: list[int]) -> None:
    """Runs the remaining steps. A signal before the last step raises Interrupted, after a save."""
    phase = self.phase
    # A run killed after its last step, but before its result, has nothing left to train.
    if self.step == phase.num_steps or self.reached:
      return
    with self._bar() as bar, _ended(phase.draws(self.step)) as draws:
      for draw in draws:
        self.state, info = experiments.stepped(phase, self.state, draw)
        # The step is charged before the row and the checkpoint, so that no shown or saved epsilon
        # lacks it.
        self.charge()
        self.tally.add(self.step, info)
        row = None if phase.evaluate is None else phase.row_at(self.step)
        shown = {} if row is None else self.record(row, info)
        # A signal reaches one process, but all processes must stop at the same step.
        stop = processes.largest(received[0] if received else 0)
        last = self.step == phase.num_steps or self.reached
        if last or stop or self._is_due():
          self.save()
        if bar is not None:
          bar.update(1, **shown)
        if last:
          return
        if stop:
          raise Interrupted(stop, self.step)
    raise UserError(
      f"must yield a draw for each step; it ended after {self.step} of "
      f"num_steps={phase.num_steps}",
      field="Phase.draws",
    )

  def _bar(self) -> contextlib.AbstractContextManager[writers.Progress | None]:
    if not processes.is_first():
      return contextlib.nullcontext()
    return writers.progress(self.phase.num_steps, self.step, self.phase.name)

  def close(self) -> None:
    try:
      if self.metrics is not None:
        self.metrics.close()
    finally:
      self.checkpoints.close()

"""The training loop of every kind of run, from the start to result.json.

A kind of run is an `Experiment`. This module does the rest with its `Folder`: resume, ledger,
budget, signals, lock, progress, metrics, checkpoints, release keys, a full disk, several processes.

The following order prevents lost steps and double privacy costs. The run's keys and the data's
digest are on disk before the first computation. Metrics of step k are written before the checkpoint
of step k, which holds the ledger of k steps. A resumed run repeats later steps with the same
batches and the same noise. So it releases what the interrupted run would have released.

With several processes (`dpjax.parallel`), all processes make the same calls. Only process 0 uses
files.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pathlib
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from dpjax import optional, trees
from dpjax.accounting import Ledger
from dpjax.experiments.config.naming import naming
from dpjax.experiments.run import checkpoint, kind, writers
from dpjax.experiments.run.experiment import (
  Experiment,
  Phase,
  Result,
  Scores,
  Trained,
  begin,
  begin_story,
  check,
  digest_of,
  phase_of,
  score,
  step_result,
)
from dpjax.experiments.run.folder import Folder
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.left_out import Tally
from dpjax.parallel.exchanges import is_first, largest, on_first
from dpjax.types import Config
from dpjax.validate import UserError, first_line

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds between two checkpoints of a phase without `save_every`.
SAVE_SECONDS = 10.0


class Interrupted(Exception):
  """Raised when a signal stopped the run, after its state was saved."""

  def __init__(self, signum: int, step: int):
    super().__init__(f"stopped at step {step} and saved; run the same command to go on")
    self.signum = signum


# --- a run


def train(config: Config, workdir: pathlib.Path | str, *, data: object = None) -> Result:
  """Carries out one run of a config of any kind; see `run`."""
  return run(kind.experiment_of(config), workdir, data=data)


def load(config: Config) -> Any:
  """Loads the data of a run, with features, so that several runs of `train` may share them."""
  experiment = kind.experiment_of(config)
  with naming(config):
    return experiment.with_features(experiment.data())


def run(
  experiment: Experiment[Any],
  workdir: pathlib.Path | str,
  *,
  data: Any = None,
) -> Result:
  """Carries out a run, or its remaining steps, and returns the content of result.json.

  Args:
    experiment: run to carry out. A private run draws its keys when its folder is made, so two runs
      of one config differ. With a `noise_seed`, or without privacy, equal configs and data give
      equal parameters, bit for bit, on the same machine with the same software and devices.
    workdir: folder that is new, empty, or of an earlier (unfinished or finished) run of the same
      config on the same data.
    data: data that runs share, with features; None: the experiment loads its own.

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
  with naming(getattr(experiment, "config", None)):
    check(experiment)
    folder = Folder(experiment, pathlib.Path(workdir))
    if folder.result is None:
      # The libraries are checked now, so that a missing plotting library does not fail the run at
      # its end.
      optional.check("runs")
    elif not folder.secrets:
      # The checkpoints were removed, and nothing tells which data were used.
      return folder.result_if_finished()
    loaded = experiment.data() if data is None else data
    digest = digest_of(experiment, loaded)
    keys = folder.admit(digest, experiment.weights())
    if keys is None:
      return folder.result_if_finished()
    # A run that is refused before its first phase claims no folder.
    loaded = experiment.with_features(loaded) if data is None else loaded
    story, phase = begin_story(experiment, loaded, keys)
    # What the story reads no more, such as the inputs behind features, may leave the memory.
    del loaded
    with folder.take():
      while True:
        try:
          phase = story.send(steps(phase, folder))
        except StopIteration as end:
          return folder.finish(end.value)


def steps(phase: Phase, folder: Folder) -> Trained:
  """Carries out a phase to its end, from its newest checkpoint if there is one.

  A signal before the last step raises Interrupted, after a save. A signal during the last step
  stops the next phase after a step.
  """
  now = Running(phase, folder)
  with contextlib.closing(now), signals() as received:
    received.extend(folder.late)
    # A run killed after its last step, but before its result, has nothing left to train.
    if not now.is_over:
      bar = writers.Progress(phase.num_steps, now.step, phase.name, shown=is_first())
      with bar, _closing(phase.draws(now.step)) as draws:
        for draw in draws:
          now.state, info = step_result(phase.step(now.state, draw), now.structure)
          # The step is charged before the row and the checkpoint, so that no shown or saved epsilon
          # lacks it.
          now.charge()
          now.tally.add(now.step, info)
          shown = now.record(info)
          # A signal reaches one process, but all processes must stop at the same step.
          stop = largest(received[0] if received else 0)
          if now.is_over or stop or now.is_due():
            now.save()
          bar.update(1, **shown)
          if now.is_over:
            break
          if stop:
            raise Interrupted(stop, now.step)
        else:
          raise UserError(
            f"must yield a draw for each step; it ended after {now.step} of "
            f"num_steps={phase.num_steps}",
            field="Phase.draws",
          )
    folder.late = received[:1]
  now.tally.check(now.step)
  row = now.scored[1] if now.scored and now.scored[0] == now.step else None
  return Trained(
    now.phase, now.state, now.step, now.ledger, now.final_epsilon, now.tally, row
  )


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
    if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
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
def _closing(draws: Iterable[object]) -> Iterator[Iterable[object]]:
  """Closes the iterator of draws at the end of the block, so that its reading thread ends, too."""
  try:
    yield draws
  finally:
    getattr(draws, "close", lambda: None)()


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

  def __init__(self, phase: Phase, folder: Folder):
    self.phase = phase = phase_of(phase, folder.experiment)
    self.folder = folder
    self.metrics = None
    self.state = begin(phase)
    self.structure = jax.tree.structure(self.state)
    # What every checkpoint of the phase holds. A second, different release before the first step
    # with the same noise would reveal the difference of the exact values.
    self._same = {
      "run": f"{folder.run_id} {phase.subfolder}".rstrip(),
      "before_steps": trees.sha256(phase.before_steps),
      # The digest of the data does not cover it, and a plan may follow from it.
      "num_records": None if phase.guarantee is None else phase.guarantee.num_records,
    }
    self.ledger = Ledger()
    self.step = 0
    self.scored: tuple[int, Scores] | None = None  # a step, and the scores of its state
    self.reached = False  # whether `phase.enough` ended the phase
    self.saved_at = time.monotonic()
    self.rows: dict[str, Any] | None = None  # result of `MetricsWriter.durable`
    self.tally = Tally(phase.arrivals, phase.unit)
    self.checkpoints = checkpoint.Checkpoints(
      folder.path, phase.subfolder, memory=phase.memory
    )
    self.state = self.checkpoints.begin(self.state)
    if self.checkpoints.latest is None:
      self.save()
    else:
      self._resume()
    self.final_epsilon = float("inf")
    guarantee = phase.guarantee
    if guarantee is not None:
      guarantee.check_budget(self.ledger)
      # Epsilon is computed now, so that a run that cannot be accounted for is refused at the start.
      self.final_epsilon = on_first(guarantee.curve, phase.num_steps)
      on_first(guarantee.warn)
    if phase.evaluate is not None and is_first():
      self.metrics = writers.MetricsWriter(
        folder.path,
        self.rows,
        tensorboard=not folder.experiment.release,
        hook=folder.hook,
      )

  def _resume(self) -> None:
    self.state, meta = self.checkpoints.restore(self.state)
    if meta.get("run") != self._same["run"]:
      raise UserError(
        "is of another run; bring its own back, or choose another directory, "
        "nothing was changed",
        field="checkpoint",
        value=self.checkpoints.directory,
      )
    if meta.get("before_steps") != self._same["before_steps"]:
      raise UserError(
        "what was released before the first step is not what this machine and "
        "these versions compute from the same data and noise; go on where it was "
        "begun, or choose another directory, nothing was changed",
        field="checkpoint",
        value=self.checkpoints.directory,
      )
    if meta.get("num_records", -1) != self._same["num_records"]:
      raise UserError(
        f"is of a run on data that declare another number of records than "
        f"{self._same['num_records']}; declare that of before, or choose another directory, "
        "nothing was changed",
        field="checkpoint",
        value=self.checkpoints.directory,
      )
    self.step = int(self.checkpoints.latest or 0)
    try:
      self.ledger = Ledger.from_json(meta["ledger"])
      self.reached = bool(meta["reached"])
      self.folder.resume(meta)
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

  def _check_ledger(self, guarantee: Guarantee) -> None:
    """Raises UserError unless the ledger holds the events of this run's steps so far, up to
    the last digits of floats."""
    wanted = guarantee.charge(Ledger(), range(self.step), noise_key_id=self.folder.key_name)
    if not _alike(self.ledger.to_json(), wanted.to_json()):
      raise UserError(
        f"its ledger holds {self.ledger.num_steps} steps that are not those of "
        "this run; it cannot be trusted, remove it to go on from an earlier step",
        field="checkpoint",
        value=self.step,
      )

  @property
  def is_over(self) -> bool:
    """Whether no step is left."""
    return self.step == self.phase.num_steps or self.reached

  def charge(self) -> None:
    """Counts one more step, and records it in the ledger if the phase has a guarantee. A step
    with an empty batch counts, too: its noise was released."""
    guarantee = self.phase.guarantee
    if guarantee is not None:
      now = range(self.step, self.step + 1)
      self.ledger = guarantee.charge(self.ledger, now, noise_key_id=self.folder.key_name)
    self.step += 1

  def _measure(self) -> Scores:
    """Returns the scores, and epsilon of the steps so far unless there is no guarantee. Epsilon
    takes as long to compute as for a whole run."""
    phase = self.phase
    row = score(phase, self.state)
    self.scored = self.step, dict(row)
    if phase.guarantee is None or phase.guarantee.kind == "none":
      return row
    last = self.step == phase.num_steps
    return row | {
      "epsilon": self.final_epsilon if last else phase.guarantee.curve(self.step)
    }

  def record(self, info: object) -> Scores:
    """Writes a row if one is due, and returns the values for the progress bar."""
    row_number = None if self.phase.evaluate is None else self.phase.row_at(self.step)
    if row_number is None:
      return {}
    row = on_first(self._measure)
    row |= self.phase.observe(self.state, info, self.step)
    self.tally.settle()
    if self.metrics is not None:
      self.metrics.write(row_number, row)
    self.reached = self.phase.enough(row)
    names = {"accuracy": "test_accuracy", "rmse": "test_rmse", "epsilon": "epsilon"}
    return {name: row[key] for name, key in names.items() if key in row}

  def save(self) -> None:
    on_first(self.folder.check_there)
    meta = {
      **self._same,
      "ledger": self.ledger.to_json(),
      **self.folder.past,
      "reached": self.reached,
      "arrivals": self.tally.to_meta(),
    }
    if self.metrics is not None:
      # Metrics are flushed before the checkpoint that refers to them.
      meta["rows"] = self.metrics.durable()
    self.checkpoints.save(self.step, self.state, meta)
    self.saved_at = time.monotonic()

  def is_due(self) -> bool:
    if self.phase.save_every is not None:
      return self.step % self.phase.save_every == 0
    return time.monotonic() - self.saved_at >= SAVE_SECONDS

  def close(self) -> None:
    if self.metrics is not None:
      self.metrics.close()

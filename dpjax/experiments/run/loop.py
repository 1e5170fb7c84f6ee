"""The only loop: a run of any kind, from start to result.json.

A kind of run is `build(config) -> Job`. All else is here, once: resume, ledger, budget,
signals, lock, progress, metrics, checkpoints, release keys, a full disk, several processes.

Order of things, so that nothing is lost or spent twice: keys and data are remembered before
anything is computed with them; metrics of step k are written before the checkpoint of step k;
the checkpoint holds the ledger of the k steps that it contains; a resumed run repeats later
steps with the same batches and the same noise, so it releases what the interrupted one would
have released.

On several processes (`dpjax.parallel`) all make the same calls: process 0 alone
evaluates and holds the files.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import pathlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from dpjax import names, noise, run_code, trees
from dpjax import parallel as processes
from dpjax.accounting import Ledger
from dpjax.experiments.config import fields
from dpjax.experiments.run import (
  checkpoint,
  config_names,
  provenance,
  report,
  streams,
  writers,
)
from dpjax.experiments.run import job as job_lib
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.job import Ended as Ended
from dpjax.experiments.run.job import Fit as Fit
from dpjax.experiments.run.job import Job as Job
from dpjax.experiments.run.job import Play as Play
from dpjax.experiments.run.job import Result, Scores
from dpjax.experiments.run.job import Work as Work
from dpjax.experiments.run.job import every as every
from dpjax.experiments.run.job import single as single
from dpjax.experiments.run.promise import Promise
from dpjax.experiments.run.streams import Streams
from dpjax.types import Config
from dpjax.validate import UserError, Verbatim

STOPPING = tuple(
  getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
# Between two checkpoints of a work that does not say when.
SAVE_SECONDS = 10.0


class Interrupted(Exception):
  """The run was asked to stop; its state is saved."""

  def __init__(self, signum: int, step: int):
    super().__init__(f"stopped at step {step} and saved; run the same command to go on")
    self.signum = signum


# --- a run


def job_of(config: Config, data: object = None) -> Job:
  """The job of a config: by `build(config, data)` of the module `build` that lies beside the
  module of its type.

  Args:
    data: as the `load_data` of that module returns them, to share them between runs.
  """
  room, _, _ = type(config).__module__.rpartition(".")
  try:
    made_by = importlib.import_module(f"{room}.build" if room else "build")
  except ModuleNotFoundError as error:
    # A build.py that fails to import something of its own must say so itself.
    if error.name != f"{room}.build".lstrip("."):
      raise
    raise UserError(
      "must be of a module beside which a build.py lies, whose build(config) "
      f"returns a Job; there is no {error.name!r}",
      field="config",
      value=Verbatim(type(config).__name__),
    ) from None
  given = () if data is None else (data,)
  return job_lib.checked(made_by.build(config, *given))


def train(config: Config, workdir: pathlib.Path | str, *, data: object = None) -> Result:
  """`run` of the job of a config, of whichever kind."""
  return run(job_of(config, data), workdir)


def run(
  job: Job,
  workdir: pathlib.Path | str,
  *,
  on_save: Callable[[int], None] = lambda step: None,
) -> Result:
  """Carries out a job, or what is left of it, and returns the content of result.json.

  Args:
    job: equal configs and data give equal parameters, bit for bit, on the same machine,
      software and execution.
    workdir: new, empty, or of an earlier (unfinished or finished) run of the same config on
      the same data.
    on_save: told each step that is saved, or resumed from.

  Returns:
    result.json's content. Also written: config.json, metrics.jsonl, TensorBoard events,
    report.png and .csv, params.npz (the model to release), checkpoints (secret: they hold
    the noise key).

  Raises:
    UserError: a wrong config, missing data, a workdir of another config or of other data,
      one where another process is at work, an overspent budget, a full disk, processes whose
      data differ; in each case nothing is overwritten.
    Interrupted: SIGINT, SIGTERM or SIGHUP arrived, in any of the processes; the state is saved.
    PeerLost: another process of this run is gone.
  """
  folder = pathlib.Path(workdir)
  _check_processes(job_lib.checked(job))
  meta = processes.on_first(lambda: owner.known(folder, job.config))
  # Before anything is drawn: a finished run is only looked at.
  done = processes.on_first(lambda: _finished(job, folder, meta))
  if done is not None:
    return done
  data, random, run_id, code = admitted(job, folder, meta)
  look = functools.partial(streams.code_of, job.config)
  with run_code.watched(code, look):
    play = job_lib.started(job, random)

  def taken(held: contextlib.ExitStack) -> None:
    held.enter_context(writers.alone_in(folder, checkpoint.FOLDER))
    begun = (folder / owner.CONFIG).exists()
    # Release keys are never drawn twice for one folder, so it is not given back.
    fresh = not (begun or job.release or jax.process_count() > 1)
    owner.claim(folder, job.config)
    held.enter_context(owner.given_back(folder, fresh=fresh))
    kept = random if job.release else None
    secrets = streams.to_meta(data, kept, _own_code(job), run_id, code)
    # Keys are on disk before anything is computed with them: a run killed later repeats its
    # noise.
    owner.remember(folder, secrets, before=meta)

  with contextlib.ExitStack() as held:
    held.enter_context(writers.room_on_disk(folder, lambda: checkpoint.newest(folder)))
    processes.on_first(lambda: taken(held))
    # What the ledger calls the noise key: nothing that follows from the data.
    name = noise.key_id(random.noise) if job.release else streams.ledger_name(_digest(job))
    fit = _Fit(folder, run_id, name, on_save, (code, look), release=job.release)
    return _played(job, folder, play, fit, code)


def _check_processes(job: Job) -> None:
  """Raises UserError where several processes are there for a run of one."""
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


def admitted(job: Job, folder: pathlib.Path, meta: Result | None) -> tuple:
  """(digest of data, streams, name of the run, its code), or UserError: `meta` is not of such a
  run."""
  data = job_lib.data_of(job)
  code = streams.code_of(job.config)
  bound = streams.bound_data(data, code)
  # Compared by what follows from it, and never shown.
  processes.same(data=bound.hex())
  processes.on_first(lambda: _check_same(job, folder, meta, data))
  random = _streams(job, bound, meta)
  run_id = streams.run_id(_digest(job), bound, random)
  processes.on_first(lambda: streams.check_run(meta, run_id, workdir=folder))
  return data, random, run_id, code


def _finished(job: Job, folder: pathlib.Path, meta: Result | None) -> Result | None:
  """The result of a run that is done."""
  done = owner.finished(folder, job.config)
  # Otherwise its checkpoints were taken away, and what they remembered with them.
  if done is not None and meta:
    _check_same(job, folder, meta, job_lib.data_of(job), done=True)
  if done is not None and isinstance(done.get(job_lib.STEPS_ARE), str):
    report.redraw(folder, done[job_lib.STEPS_ARE])
  return done


def _check_same(
  job: Job,
  folder: pathlib.Path,
  meta: Result | None,
  data: bytes,
  *,
  done: bool = False,
) -> None:
  """Raises UserError unless data and code are those of the run in the folder."""
  streams.check_data(meta, data, name=job.data_name, workdir=folder)
  code = streams.code_of(job.config)
  streams.check_code(meta, _own_code(job), code, workdir=folder, done=done)


def _digest(job: Job) -> bytes:
  return streams.digest_of(job.config, job.digest)


def _own_code(job: Job) -> dict[str, dict[str, str]]:
  return names.sources(fields.to_dict(job.config))


def _streams(job: Job, data: bytes, meta: Result | None) -> Streams:
  if not job.release:
    return streams.derived(job.seed, _digest(job), data)
  return streams.fresh(job.seed) if meta is None else streams.from_meta(job.seed, meta)


def _played(
  job: Job, folder: pathlib.Path, play: Play, fit: _Fit, code: run_code.Code
) -> Result:
  ended = play(fit)
  fit.check_code()

  def written() -> Result:
    result = {
      "device": provenance.device(),
      **ended.result(folder),
      "release": job.release,
      "seed": job.seed,
      "num_parameters": trees.size(ended.params),
      "params_sha256": trees.sha256(ended.params),
      # Of a release it would tell: how long steps took follows the sizes of their batches.
      "wall_seconds": None if job.release else round(fit.seconds(), 3),
      "versions": provenance.versions(),
      "digest_version": config_names.VERSION,
      "user_code": _own_code(job),
      streams.CODE: code.to_json(),
    }
    # The parameters first: where a result stands, its model stands beside it.
    owner.save_params(folder / ended.saved_as, ended.params)
    ended.write(folder)
    result[owner.FILES] = owner.digests(folder)
    result = owner.write_result(folder, job.config, result)
    ended.finish(folder)
    return result

  return processes.on_first(written)


# --- the steps


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
  """Collects SIGINT, SIGTERM and SIGHUP instead of dying in the middle of a step. SIGHUP that is
  ignored stays so: under `nohup` a run outlives its terminal."""
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
    # Not in the main thread: the owner of that thread handles them.
    except ValueError:
      continue
  try:
    yield received
  finally:
    for signum, handler in previous.items():
      signal.signal(signum, handler)


@contextlib.contextmanager
def _ended(draws: Iterable[object]) -> Iterator[Iterable[object]]:
  """Closes them however the steps end, so that what reads them ahead ends, too."""
  try:
    yield draws
  finally:
    getattr(draws, "close", lambda: None)()


class _Fit:
  """Carries out the works of one run."""

  def __init__(
    self,
    folder: pathlib.Path,
    run_id: str,
    key_name: str,
    on_save: Callable[[int], None],
    code: tuple[run_code.Code, Callable[[], run_code.Code]],
    *,
    release: bool,
  ):
    self.folder = folder
    self.run_id = run_id
    self.release = release
    self.key_name = key_name
    self.on_save = on_save
    self.code = code
    self.changes = run_code.number_of_changes()
    self.started = time.monotonic()
    self.before = 0.0

  def seconds(self) -> float:
    """Returns the seconds of all starts together."""
    return self.before + time.monotonic() - self.started

  def check_code(self) -> None:
    """Raises UserError where the last step loaded code or data that its noise does not follow."""
    changes = run_code.number_of_changes()
    if changes != self.changes:
      self.changes = changes
      if self.code[0].modules:
        run_code.check_still(*self.code)

  def __call__(self, work: Work) -> Running:
    """A `Fit`: from the newest checkpoint of that work, if it has one."""
    running = Running(work, self)
    with contextlib.closing(running), signals() as received:
      running.go(received)
    return running


def _alike(one: Any, other: Any) -> bool:
  """Whether JSON data are equal but for the last digits of floats, which another machine's
  calibration may round otherwise."""
  if isinstance(one, float) and isinstance(other, float):
    return math.isclose(one, other, rel_tol=1e-9) or one == other
  if isinstance(one, dict) and isinstance(other, dict):
    return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
  if isinstance(one, list) and isinstance(other, list):
    return len(one) == len(other) and all(map(_alike, one, other))
  return type(one) is type(other) and one == other


class Running:
  """The state of a running work; one object so that each phase stays a short method."""

  def __init__(self, work: Work, fit: _Fit):
    self.work = job_lib.checked_work(work)
    self.fit = fit
    self.metrics = None
    self.state = job_lib.begun(work)
    self.ledger = Ledger()
    self.step = 0
    self.reached = False  # work.enough; by the clock
    self.saved_at = time.monotonic()
    self.rows: dict[str, Any] | None = None  # what the checkpoint knows of metrics.jsonl
    self.checkpoints = checkpoint.Checkpoints(
      fit.folder, work.phase, rows_on_disk=work.rows_on_disk
    )
    self.state = self.checkpoints.begun(self.state)
    if self.checkpoints.latest_step() is None:
      self.save()
    else:
      self._resume()
    self.final_epsilon = float("inf")
    promise = work.promise
    if promise is not None:
      promise.check_budget(self.ledger)
      # Now, so that what cannot be accounted at the end is refused at the beginning.
      self.final_epsilon = processes.on_first(lambda: promise.curve(work.num_steps))
      processes.on_first(promise.warn)
    if work.evaluate is not None and processes.is_first():
      self.metrics = writers.MetricsWriter(
        fit.folder,
        resume_step=self._last_row(),
        tensorboard=not fit.release,
        held=self.rows,
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
    if meta.get("before_steps", self._before_steps()) != self._before_steps():
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
      self.fit.before = max(self.fit.before, float(meta["seconds"]))
      self.rows = meta.get("rows")
    except (KeyError, TypeError, ValueError) as error:
      reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
      raise UserError(
        f"what it remembers is damaged ({reason}); remove it to go on from an "
        "earlier step, nothing was changed",
        field="checkpoint",
        value=self.step,
      ) from error
    if self.work.promise is not None:
      self._check_ledger(self.work.promise)
    self.fit.on_save(self.step)

  def _check_ledger(self, promise: Promise) -> None:
    """UserError unless the ledger holds what this run's steps so far cost, by its promise."""
    wanted = self._charges(promise)
    if not _alike(self.ledger.to_json(), wanted.to_json()):
      raise UserError(
        f"its ledger holds {self.ledger.num_steps} steps that are not those of "
        "this run; it cannot be trusted, remove it to go on from an earlier step",
        field="checkpoint",
        value=self.step,
      )

  def _charges(self, promise: Promise) -> Ledger:
    """The ledger of the steps so far. Steps alike are charged at once: it costs what they cost."""
    ledger = Ledger()
    start = 0
    while start < self.step:
      event = promise.step_event(start)
      end = start + 1
      # Equal steps in a row are one charge, as they were when the run made them.
      while end < self.step and promise.step_event(end) == event:
        end += 1
      ledger = ledger.charge(
        event,
        num_steps=end - start,
        l2_clip_norm=promise.l2_bound,
        neighboring_relation=promise.relation,
        noise_key_id=self.fit.key_name,
        first_step=start,
      )
      start = end
    return ledger

  def _name(self) -> str:
    return f"{self.fit.run_id} {self.work.phase}".rstrip()

  def _before_steps(self) -> str:
    """A second release of it with the same noise would tell how the two differ."""
    return trees.sha256(self.work.before_steps)

  def _last_row(self) -> int | None:
    """Number of the newest row that the checkpoint knows of."""
    rows = map(self.work.row_at, range(self.step, 0, -1))
    return next((row for row in rows if row is not None), None)

  def charge(self) -> None:
    """Charges one more step, also where nobody took part: its noise was released."""
    promise = self.work.promise
    if promise is not None:
      self.ledger = self.ledger.charge(
        promise.step_event(self.step),
        l2_clip_norm=promise.l2_bound,
        neighboring_relation=promise.relation,
        noise_key_id=self.fit.key_name,
        first_step=self.step,
      )
    self.step += 1

  def _measured(self) -> Scores:
    """Scores, and epsilon of the steps so far: a point of its curve costs as much as the
    accounting of a whole run."""
    work = self.work
    row = job_lib.scored(work, self.state)
    if work.promise is None or work.promise.kind == "none":
      return row
    last = self.step == work.num_steps
    return row | {"epsilon": self.final_epsilon if last else work.promise.curve(self.step)}

  def record(self, row_number: int, info: object) -> Scores:
    """Writes a row, and says what of it the bar shows."""
    row = processes.on_first(self._measured)
    row |= self.work.observe(self.state, info, self.step)
    if self.metrics is not None:
      self.metrics.write(row_number, row)
    self.reached = self.work.enough(row)
    names = {"accuracy": "test_accuracy", "rmse": "test_rmse", "epsilon": "epsilon"}
    return {name: row[key] for name, key in names.items() if key in row}

  def save(self) -> None:
    meta = {
      "run": self._name(),
      "ledger": self.ledger.to_json(),
      "before_steps": self._before_steps(),
      "seconds": self.fit.seconds(),
      "reached": self.reached,
    }
    if self.metrics is not None:
      # Before the checkpoint that counts on them.
      meta["rows"] = self.metrics.durable()
    self.checkpoints.save(self.step, self.state, meta)
    self.saved_at = time.monotonic()
    self.fit.on_save(self.step)

  def _is_due(self) -> bool:
    if self.work.save_every is not None:
      return self.step % self.work.save_every == 0
    return time.monotonic() - self.saved_at >= SAVE_SECONDS

  def go(self, received: list[int]) -> None:
    """Does the steps that are left."""
    work = self.work
    # Killed before its result was written.
    if self.step == work.num_steps or self.reached:
      return
    # Code that is loaded while JAX traces the first step must be of the run's digest, too.
    first = True
    with self._bar() as bar, _ended(work.draws(self.step)) as draws:
      for draw in draws:
        if first:
          # Before anything of the step is written: what it called while JAX traced it.
          with run_code.watched(*self.fit.code):
            self.state, info = job_lib.stepped(work, self.state, draw)
          first = False
        else:
          self.state, info = job_lib.stepped(work, self.state, draw)
          self.fit.check_code()
        # Before the row and the checkpoint, so that no epsilon is shown or saved without
        # this step.
        self.charge()
        row = None if work.evaluate is None else work.row_at(self.step)
        shown = {} if row is None else self.record(row, info)
        # A signal reaches one process, and all must stop at the same step.
        stop = processes.largest(received[0] if received else 0)
        last = self.step == work.num_steps or self.reached
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
      f"num_steps={work.num_steps}",
      field="Work.draws",
    )

  def _bar(self) -> contextlib.AbstractContextManager[writers.Progress | None]:
    if not processes.is_first():
      return contextlib.nullcontext()
    return writers.progress(self.work.num_steps, self.step, self.work.name)

  def close(self) -> None:
    try:
      if self.metrics is not None:
        self.metrics.close()
    finally:
      self.checkpoints.close()

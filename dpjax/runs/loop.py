"""The only loop: a run of any kind, from start to result.json.

A kind of run is `build(config) -> Job`. All else is here, once: resume, ledger, budget,
signals, lock, progress, metrics, checkpoints, release keys, a full disk, several processes.

Order of things, so that nothing is lost or spent twice: keys and data are remembered before
anything is computed with them; metrics of step k are written before the checkpoint of step k;
the checkpoint holds the ledger of the k steps that it contains; a resumed run repeats later
steps with the same batches and the same noise, so it releases what the interrupted one would
have released.

On several processes (`federated.processes`) all make the same calls: process 0 alone
evaluates and holds the files.
"""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from dpjax import names, noise, trees
from dpjax.accounting import Ledger
from dpjax.federated import processes
from dpjax.runs import checkpoint, provenance, report, streams, writers
from dpjax.runs import workdir as owner
from dpjax.runs.promise import Promise
from dpjax.runs.streams import Streams
from dpjax.schema import fields
from dpjax.types import Config
from dpjax.validate import UserError

SAVE_SECONDS = 10.0  # between two checkpoints of a work that does not say when
Scores = dict[str, float]
Result = dict[str, Any]


class Interrupted(Exception):
  """The run was asked to stop; its state is saved."""

  def __init__(self, signum: int, step: int):
    super().__init__(f"stopped at step {step} and saved; run the same command to go on")
    self.signum = signum


class Work(NamedTuple):
  """A training as data: what the loop does, step by step, from any step on."""

  num_steps: int
  init: Callable[[], Any]  # -> state, a tree of arrays and keys
  step: Callable[[Any, Any], tuple[Any, Any]]  # (state, draw) -> (state, info)
  draws: Callable[[int], Iterable[Any]]  # from step t on, each a function of (stream, t)
  released: Callable[[Any], Any]  # of a state: what may leave
  evaluate: Callable[[Any], Scores] | None  # of a state, on public data; None: no rows
  promise: Promise | None = None  # what each step is charged; None: it is charged elsewhere
  row_at: Callable[[int], int | None] = lambda step: step  # number of its row, if any
  observe: Callable[[Any, Any, int], Scores] = lambda state, info, step: {}  # more of a row
  enough: Callable[[Scores], bool] = lambda row: False  # whether a row ends it early
  save_every: int | None = None  # steps; None: by the clock
  name: str = "train"  # on the progress bar
  phase: str = ""  # folder of its checkpoints, where a run has several works
  steps_are: str = "optimizer steps"  # in the picture
  planned: Callable[[], Result] = dict  # of result.json what is known before the first step
  # What it says besides: (state, the promise's facts, rows of metrics).
  describe: Callable[[Any, Result, list[Result]], Result] = lambda state, facts, rows: {}


class Ended(NamedTuple):
  """What a run leaves."""

  params: Any
  result: Callable[[pathlib.Path], Result]  # all that is not the same for every kind
  write: Callable[[pathlib.Path], None] = lambda folder: None  # more, before result.json
  finish: Callable[[pathlib.Path], None] = lambda folder: None  # and what needs it
  saved_as: str = owner.PARAMS  # what `params` is called in the folder


Fit = Callable[[Work], "Running"]  # does a work, or what is left of it
Play = Callable[[Fit], Ended]  # does the works of a run, in a row


class Job(NamedTuple):
  """One run before anything of it is computed: made by the `build` of its kind."""

  config: Config  # what config.json holds, and whose the folder is
  digest: bytes  # `streams.config_digest` of all in it that decides what is computed
  seed: int
  data_name: str  # for messages
  data: Callable[[], bytes]  # reads them; `dpjax.data.digest` of all that is trained on
  start: Callable[[Streams], Play]  # builds the parts; UserError: the run is refused
  release: bool = False  # its streams come from the operating system


def every(count: int, step: int, num_steps: int) -> int | None:
  """A `row_at`: each `count` steps, and the last.

  >>> [every(2, step, 5) for step in range(1, 6)]
  [None, 2, None, 4, 5]
  """
  return step if step % count == 0 or step == num_steps else None


def single(work: Work) -> Play:
  """A run of one work. Refused here, before its folder is claimed, if it would overspend."""
  if work.promise is not None:
    work.promise.check_budget(Ledger())

  def play(fit: Fit) -> Ended:
    fitted = fit(work)
    finish = lambda folder: report.train_report(folder, steps=work.steps_are)
    result = lambda folder: _result(work, fitted, folder)
    return Ended(work.released(fitted.state), result, finish=finish)

  return play


def _result(work: Work, fitted: Running, folder: pathlib.Path) -> Result:
  facts: Result = {"epsilon": None, "epsilon_kind": "none"}
  if work.promise is not None:
    facts = work.promise.facts(fitted.ledger, fitted.final_epsilon)
    facts["privacy_statement"] = work.promise.statement(fitted.ledger.num_steps)
  scores = {} if work.evaluate is None else work.evaluate(fitted.state)
  return {
    **facts,
    **{f"test_{name}": value for name, value in scores.items()},
    "num_steps": fitted.ledger.num_steps,
    "ledger": fitted.ledger.to_json(),
    **work.planned(),
    **work.describe(fitted.state, facts, writers.read_metrics(folder)),
  }


# --- a run


def job_of(config: Config, data: object = None) -> Job:
  """The job of a config: by `build(config, data)` of the module `build` that lies beside the
  module of its type.

  Args:
    data: as the `load_data` of that module returns them, to share them between runs.
  """
  room, _, _ = type(config).__module__.rpartition(".")
  return importlib.import_module(f"{room}.build").build(config, data)


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
    Interrupted: SIGINT or SIGTERM arrived, in any of the processes; the state is saved.
    PeerLost: another process of this run is gone.
  """
  folder = pathlib.Path(workdir)
  if job.release and jax.process_count() > 1:
    raise UserError(
      f"release=True: must be run by one process, not {jax.process_count()}: its keys leave "
      "no machine"
    )
  meta = processes.on_first(lambda: owner.known(folder, job.config))
  done = processes.on_first(lambda: _finished(job, folder, meta))
  if done is not None:
    return done
  data, random, run_id = admitted(job, folder, meta)
  play = job.start(random)

  def taken(held: contextlib.ExitStack) -> None:
    held.enter_context(writers.alone_in(folder, checkpoint.FOLDER))
    begun = (folder / owner.CONFIG).exists()
    fresh = not (begun or job.release or jax.process_count() > 1)
    owner.claim(folder, job.config)
    held.enter_context(owner.given_back(folder, fresh=fresh))
    kept = random if job.release else None
    secrets = streams.to_meta(data, kept, _own_code(job), run_id)
    owner.remember(folder, secrets, before=meta)

  with contextlib.ExitStack() as held:
    held.enter_context(writers.room_on_disk(folder, lambda: checkpoint.newest(folder)))
    processes.on_first(lambda: taken(held))
    # What the ledger calls the noise key: nothing that follows from the data.
    name = noise.key_id(random.noise) if job.release else streams.ledger_name(job.digest)
    return _played(job, folder, play, _Fit(folder, run_id, name, on_save))


def admitted(job: Job, folder: pathlib.Path, meta: Result | None) -> tuple:
  """(digest of data, streams, name of the run), or UserError: `meta` is not of such a run."""
  data = job.data()
  processes.same(data=data.hex())  # compared by what follows from it, and never shown
  processes.on_first(lambda: _check_same(job, folder, meta, data))
  random = _streams(job, data, meta)
  run_id = streams.run_id(job.digest, data, random)
  processes.on_first(lambda: streams.check_run(meta, run_id, workdir=folder))
  return data, random, run_id


def _finished(job: Job, folder: pathlib.Path, meta: Result | None) -> Result | None:
  """The result of a run that is done."""
  done = owner.finished(folder, job.config)
  if done is not None and meta:  # else its checkpoints were taken away
    _check_same(job, folder, meta, job.data())
  return done


def _check_same(job: Job, folder: pathlib.Path, meta: Result | None, data: bytes) -> None:
  """Raises UserError unless data and code are those of the run in the folder."""
  streams.check_data(meta, data, name=job.data_name, workdir=folder)
  streams.check_code(meta, _own_code(job), workdir=folder)


def _own_code(job: Job) -> dict[str, dict[str, str]]:
  return names.sources(fields.to_dict(job.config))


def _streams(job: Job, data: bytes, meta: Result | None) -> Streams:
  if not job.release:
    return streams.derived(job.seed, job.digest, data)
  return streams.fresh(job.seed) if meta is None else streams.from_meta(job.seed, meta)


def _played(job: Job, folder: pathlib.Path, play: Play, fit: _Fit) -> Result:
  ended = play(fit)

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
      "user_code": _own_code(job),
    }
    owner.save_params(folder / ended.saved_as, ended.params)
    ended.write(folder)
    result = owner.write_result(folder, job.config, result)
    ended.finish(folder)
    return result

  return processes.on_first(written)


# --- the steps


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
  """Collects SIGINT and SIGTERM instead of dying in the middle of a step."""
  received: list[int] = []
  previous = {}
  for signum in (signal.SIGINT, signal.SIGTERM):
    try:
      previous[signum] = signal.signal(signum, lambda s, _: received.append(s))
    except ValueError:  # not in the main thread: the owner of that thread handles them
      continue
  try:
    yield received
  finally:
    for signum, handler in previous.items():
      signal.signal(signum, handler)


class _Fit:
  """Carries out the works of one run."""

  def __init__(
    self,
    folder: pathlib.Path,
    run_id: str,
    key_name: str,
    on_save: Callable[[int], None],
  ):
    self.folder, self.run_id = folder, run_id
    self.key_name, self.on_save = key_name, on_save
    self.started, self.before = time.monotonic(), 0.0

  def seconds(self) -> float:
    """Of all starts together."""
    return self.before + time.monotonic() - self.started

  def __call__(self, work: Work) -> Running:
    """A `Fit`: from the newest checkpoint of that work, if it has one."""
    running = Running(work, self)
    with contextlib.closing(running), signals() as received:
      running.go(received)
    return running


class Running:
  """The state of a running work; one object so that each phase stays a short method."""

  def __init__(self, work: Work, fit: _Fit):
    self.work, self.fit, self.metrics = work, fit, None
    self.state, self.ledger, self.step = work.init(), Ledger(), 0
    self.reached, self.saved_at = False, time.monotonic()  # work.enough; by the clock
    self.checkpoints = checkpoint.Checkpoints(fit.folder, work.phase)
    if self.checkpoints.latest_step() is None:
      self.save()
    else:
      self._resume()
    self.final_epsilon, promise = float("inf"), work.promise
    if promise is not None:
      promise.check_budget(self.ledger)
      # Now, so that what cannot be accounted at the end is refused at the beginning.
      self.final_epsilon = processes.on_first(lambda: promise.curve(work.num_steps))
      processes.on_first(promise.warn)
    if work.evaluate is not None and processes.is_first():
      self.metrics = writers.MetricsWriter(fit.folder, resume_step=self._last_row())

  def _resume(self) -> None:
    self.state, meta = self.checkpoints.restore(self.state)
    if meta.get("run") != self._name():
      raise UserError(
        f"checkpoint={self.checkpoints.directory}: is of another run; bring its own back, or "
        "choose another directory, nothing was changed"
      )
    self.ledger, self.reached = Ledger.from_json(meta["ledger"]), meta["reached"]
    self.fit.before = max(self.fit.before, meta["seconds"])
    self.step = int(self.checkpoints.latest_step() or 0)
    if self.work.promise is not None and self.ledger.num_steps != self.step:
      raise UserError(
        f"checkpoint={self.step}: its ledger holds {self.ledger.num_steps} steps; it cannot "
        "be trusted"
      )
    self.fit.on_save(self.step)

  def _name(self) -> str:
    return f"{self.fit.run_id} {self.work.phase}".rstrip()

  def _last_row(self) -> int | None:
    """Number of the newest row that the checkpoint knows of."""
    rows = map(self.work.row_at, range(self.step, 0, -1))
    return next((row for row in rows if row is not None), None)

  def charge(self) -> None:
    """One step more, charged also where nobody took part: its noise was released."""
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
    assert work.evaluate is not None
    row = {f"test_{name}": v for name, v in work.evaluate(self.state).items()}
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
    names = {"accuracy": "test_accuracy", "epsilon": "epsilon"}
    return {name: row[key] for name, key in names.items() if key in row}

  def save(self) -> None:
    meta = {
      "run": self._name(),
      "ledger": self.ledger.to_json(),
      "seconds": self.fit.seconds(),
      "reached": self.reached,
    }
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
    if self.step == work.num_steps or self.reached:  # killed before its result was written
      return
    with self._bar() as bar:
      for draw in work.draws(self.step):
        self.state, info = work.step(self.state, draw)
        self.charge()
        row = None if work.evaluate is None else work.row_at(self.step)
        shown = {} if row is None else self.record(row, info)
        stop = processes.largest(received[0] if received else 0)  # whoever was told
        last = self.step == work.num_steps or self.reached
        if last or stop or self._is_due():
          self.save()
        if bar is not None:
          bar.update(1, **shown)
        if last:
          return
        if stop:
          raise Interrupted(stop, self.step)

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

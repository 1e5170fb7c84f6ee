"""Files that a run writes (metrics.jsonl, TensorBoard scalars, result.json), and its progress.

JSON is strict, without NaN and infinity: NaN is written as null, infinity as "inf" or "-inf". Files
other than metrics and events are replaced atomically: after a kill, either the old file or the new
file is complete.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import pathlib
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

from dpjax import files, validate
from dpjax.accounting.text import by_name
from dpjax.validate import UserError, Verbatim

METRICS = "metrics.jsonl"
EVENTS = "tensorboard"
LOCK = "lock"
RESULT = "result.json"
# Names of the files that `report` writes: a run's picture and its table.
REPORT = ("report.png", "report.csv")
RESULT_KEYS = (
  "task",
  "dataset",
  "method",
  "epsilon",  # None, or infinite, without a guarantee
  "delta",
  "neighboring_relation",
  "unit",  # what one record is: example | user
  "epsilon_kind",  # proved | claimed | simulated (of a larger deployment) | none
  "test_accuracy",
  "num_steps",
  "seed",
  "params_sha256",
  "wall_seconds",
  "versions",
)
EPSILON_KINDS = ("proved", "claimed", "simulated", "none")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOTHING = "nothing was saved"
_SELF = "sha256"  # key of the digest of a file's other entries (`write_digested`)
# Seconds between two progress lines where stderr is no terminal.
_LINE_SECONDS = 5.0
_SILENT = ContextVar("silent", default=False)


class Unwritable(UserError, OSError):
  """Raised when a file system refuses a write, because it is full, read-only or damaged.

  The launcher prints one line and exits with code 1, since no setting of the run is wrong.
  """


def secret_folder(path: pathlib.Path) -> None:
  """Makes a folder for data as secret as the training data: only its owner may enter it. An
  existing folder is closed to others; if that fails, a warning is printed."""
  files.make_folder(path.parent)
  if not path.is_dir():
    path.mkdir(mode=0o700)
    files.sync(path.parent)
  if stat.S_IMODE(path.stat().st_mode) & 0o077:
    try:
      path.chmod(0o700)
    # `chmod` fails if the folder has another owner, or if the file system has no modes.
    except OSError:
      warn(f"{path}: is open to other users, who can read what is as secret as the data")


# Values of errno for errors of a file system, not of a program.
_REFUSALS = (
  errno.ENOSPC,
  errno.EDQUOT,
  errno.EFBIG,
  errno.EIO,
  errno.EROFS,
  errno.EACCES,
  errno.EPERM,
  errno.EMFILE,
  errno.ENFILE,
  errno.ESTALE,
)


def refusal(error: BaseException | None) -> int | None:
  """Returns the errno with which a file system refused a write, from an error or its causes; None
  for other errors.

  >>> refusal(OSError(errno.EIO, "")), refusal(FileNotFoundError(errno.ENOENT, ""))
  (5, None)
  """
  if error is None:
    return None
  code = getattr(error, "errno", None)
  return code if code in _REFUSALS else refusal(error.__cause__ or error.__context__)


@contextmanager
def space_on_disk(workdir: pathlib.Path, saved: Callable[[], str]) -> Iterator[None]:
  """Turns an error of the block into one line if the disk is full, or refused a write.

  Args:
    workdir: folder of the run, or of the sweep.
    saved: function that returns what is on the disk, in words for the message.

  Raises:
    Unwritable: the disk is full or damaged, or writing is not allowed.
  """
  try:
    yield
  except Exception as error:
    code = refusal(error)
    # A UserError about a file is already one line, and so is that of a run inside a sweep.
    said = isinstance(error, UserError) and not isinstance(error, Unwritable)
    if code is None or said or getattr(error, "field", "") == "workdir":
      raise
    try:
      kept = saved()
    # On a damaged disk, even reading the folder may fail.
    except OSError:
      kept = _NOTHING
    full = code in _FULL
    reason = "no space left on the device" if full else os.strerror(code).lower()
    at = getattr(error, "filename", None)
    reason += f" ({str(at)[-80:]})" if at and not full else ""
    mend = "make room" if full else "mend that"
    raise Unwritable(
      f"{reason}; {kept}; {mend}, then run the same command",
      field="workdir",
      value=Verbatim(str(workdir)[-120:]),
    ) from None


def newest_step(step: int | None) -> str:
  """Returns what is on the disk of a run whose newest checkpoint is that of `step`; None: none."""
  return _NOTHING if step is None else f"step {step} is saved"


class Busy(UserError):
  """Another process holds the lock of a folder."""


class Gone(UserError):
  """The folder of a run was removed, moved or replaced while the run was at work."""


def is_held(path: pathlib.Path, descriptor: int) -> bool:
  """Returns whether a path is the file that is open as `descriptor`; a file that was deleted or
  moved since it was opened has another file, or none, in its place."""
  try:
    return os.path.samestat(os.fstat(descriptor), path.stat())
  except (FileNotFoundError, NotADirectoryError):
    return False


@contextmanager
def alone_in(
  workdir: pathlib.Path, subfolder: str = "", *, name: str = LOCK, kept: bool = True
) -> Iterator[int]:
  """Locks the file `workdir`/`subfolder`/`name`, so that no other process enters the same block.

  Yields the lock's file descriptor. The operating system releases the lock when this process, and
  all processes that inherited the descriptor, have closed it or ended. Two runs in one folder would
  overwrite each other's checkpoints and account for noise twice. The lock has its own file: a file
  that is replaced, such as config.json, could be locked by two processes.

  Args:
    kept: whether the file stays after the block.

  Raises:
    Busy: another process holds the lock.
    UserError: the file system has no locks, or the path is no regular file.
  """
  path = workdir / subfolder / name
  files.make_folder(workdir)
  if subfolder:
    secret_folder(path.parent)  # it holds the state of a run
  private = lambda name, flags: os.open(name, flags, 0o600)
  # Opening a pipe without a reader would never return, and locking a device would lock it
  # for all runs.
  validate.no_pipe(path, str(path))
  # The file is opened for writing, since network file systems lock only such files.
  with open(path, "ab", opener=private) as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      # A lock on a file that was deleted since it was opened excludes nobody.
      held = is_held(path, file.fileno())
    except OSError as error:
      if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
        raise UserError(
          f"is on a file system without locks ({error.strerror}); choose another",
          field="workdir",
          value=workdir,
        ) from None
      held = False
    if not held:
      raise Busy(
        "another process is at work there; wait for it, or stop it",
        field="workdir",
        value=workdir,
      )
    try:
      yield file.fileno()
    finally:
      if not kept:
        # Who opened the file before this line sees that it is gone, and holds no lock.
        path.unlink(missing_ok=True)


def plain(value: object) -> Any:
  """Converts a value to strict JSON data. NaN becomes None, and infinity becomes "inf" or "-inf".

  >>> plain({"epsilon": float("inf"), "loss": float("nan"), "sizes": (1, 2)})
  {'epsilon': 'inf', 'loss': None, 'sizes': [1, 2]}
  """
  if isinstance(value, dict):
    return {str(key): plain(entry) for key, entry in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(entry) for entry in value]
  item = getattr(value, "item", None)
  # Scalars of NumPy and JAX have the method `item`.
  value = item() if callable(item) else value
  if isinstance(value, float) and not math.isfinite(value):
    return None if math.isnan(value) else str(value)
  # A dataclass inside a list or a dict, such as a value among a user's options.
  return repr(value) if dataclasses.is_dataclass(value) else value


def number(value: float | str | None) -> float:
  """Inverts `plain` for a float: None becomes NaN, and "inf" becomes infinity.

  >>> number(None), number("inf"), number(0.5)
  (nan, inf, 0.5)
  """
  return math.nan if value is None else float(value)


def digest(data: object) -> str:
  """Returns the SHA-256 of JSON data, which does not depend on the order of keys.

  It is that of the data that `read_json` reads where `write_json` has written these.
  """
  text = json.dumps(plain(data), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def write_json(path: str | os.PathLike, data: object, *, secret: bool = False) -> None:
  """Writes strict JSON atomically, with keys in the given order. With `secret`, only the owner may
  read the file."""
  text = json.dumps(plain(data), indent=2, allow_nan=False, ensure_ascii=False)
  files.replace_file(path, f"{text}\n".encode(), secret=secret)


def read_json(path: str | os.PathLike) -> Any:
  """Reads the JSON data of a file. Non-finite numbers stay as `write_json` wrote them.

  Raises:
    UserError: the file is missing or is not JSON; one line.
  """
  path = pathlib.Path(path)
  validate.no_pipe(path, str(path))
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (FileNotFoundError, NotADirectoryError):
    raise UserError("no such file", field=str(path)) from None
  # The file is not UTF-8 or not JSON, or it is too large or too deeply nested to be read.
  except (ValueError, RecursionError, MemoryError) as error:
    reason = str(error)[:100] or type(error).__name__
    raise UserError(f"is not valid JSON ({reason})", field=str(path)) from None


def write_digested(path: str | os.PathLike, held: Mapping[str, Any]) -> None:
  """Writes a dict as JSON for its owner alone, with a digest of its entries."""
  write_json(path, {**held, _SELF: digest(held)}, secret=True)


def read_digested(path: str | os.PathLike) -> dict[str, Any]:
  """Returns the JSON data that `write_digested` wrote. Raises UserError if they were changed since,
  which a digest without a key shows of accidents alone."""
  held = read_json(path)
  if isinstance(held, dict) and held.pop(_SELF, None) == digest(held):
    return held
  raise UserError(
    "is not what was written there; bring that back, or choose another directory, nothing was "
    "changed",
    field=str(path)[-160:],
  )


class MetricsWriter(AbstractContextManager):
  """Appends metrics to `workdir`/metrics.jsonl, one JSON line for each call, and to TensorBoard.

  Lines contain no time of day, so that the file of a resumed run equals, byte for byte, the file of
  an uninterrupted run. For that, write the metrics of step k before the checkpoint of step k, which
  holds the result of `durable`, and resume from it.

  Args:
    workdir: folder of the run; created if missing.
    held: result of `durable`: the file must begin with these lines, which are kept. Later lines are
      dropped. None: the file starts empty. Where no line is kept, earlier event files are removed.
      If they stayed, the scores of a start with other noise would be released beside the scores of
      this run.
    tensorboard: whether to write event files to `workdir`/tensorboard, too. They contain the time
      of every row and the name of the machine.
    hook: function that is called with the step and the values of every line after it is written.

  Raises:
    UserError: the file does not begin as `held` says.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as workdir:
  ...   with MetricsWriter(workdir, tensorboard=False) as metrics:
  ...     metrics.write(1, {"test_accuracy": 0.5})
  ...   read_metrics(workdir)
  [{'step': 1, 'test_accuracy': 0.5}]
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    held: Mapping[str, Any] | None = None,
    *,
    tensorboard: bool = True,
    hook: Callable[[int, dict[str, Any]], None] | None = None,
  ):
    self._hook = hook
    workdir = pathlib.Path(workdir)
    content = b"" if held is None else _beginning(workdir / METRICS, held)
    files.replace_file(workdir / METRICS, content)
    self._size = len(content)
    self._digest = hashlib.sha256(content)
    self._file = (workdir / METRICS).open("a", encoding="utf-8")
    if not content or not tensorboard:
      shutil.rmtree(workdir / EVENTS, ignore_errors=True)
    last = json.loads(content.splitlines()[-1])["step"] if content else -1
    self._events = _Events(workdir / EVENTS, last + 1) if tensorboard else None

  def write(self, step: int, values: dict[str, Any]) -> None:
    """Appends one line {"step": step, **values}; values are scalars."""
    scalars = {name: float(value) for name, value in values.items()}
    line = json.dumps(plain({"step": int(step), **scalars}), allow_nan=False) + "\n"
    self._file.write(line)
    self._file.flush()
    self._size += len(line.encode())
    self._digest.update(line.encode())
    if self._events is not None:
      self._events.write(int(step), scalars)
    if self._hook is not None:
      self._hook(int(step), scalars)

  def durable(self) -> dict[str, Any]:
    """Flushes all lines so far to disk, so that they survive a loss of power. Returns their length
    in bytes and their SHA-256."""
    # The checkpoint refers to these bytes. If power were lost while only the checkpoint is durable,
    # a resume would be refused.
    os.fsync(self._file.fileno())
    return {"bytes": self._size, "sha256": self._digest.hexdigest()}

  def close(self) -> None:
    """Closes the files; a second call does nothing."""
    events = self._events
    self._events = None
    try:
      self._file.close()
    finally:
      if events is not None:
        events.close()

  def __exit__(self, *error: object) -> None:
    self.close()


def _beginning(path: pathlib.Path, held: Mapping[str, Any]) -> bytes:
  """Returns the first bytes of a file, which `held` describes. Raises UserError if their digest
  differs."""
  validate.no_pipe(path, str(path))
  try:
    with path.open("rb") as file:
      content = file.read(held["bytes"])
  except FileNotFoundError:
    content = b""
  if hashlib.sha256(content).hexdigest() != held["sha256"]:
    raise UserError(
      f"its rows are not those that the newest checkpoint knows of "
      f"({held['bytes']} bytes); bring them back, or choose another directory, nothing was changed",
      field=str(path)[-120:],
    )
  return content


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads the lines of `workdir`/metrics.jsonl; `step` is an int, all other values are
  floats.

  A last line that was cut off is left out; a missing file has no lines. Raises UserError if a line
  before the last one is damaged.
  """
  path = pathlib.Path(workdir) / METRICS
  if not path.exists():
    return []
  validate.no_pipe(path, str(path))
  lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
  rows = []
  for index, line in enumerate(lines):
    try:
      # A line without a line end was cut off, even if it happens to be JSON.
      entry = json.loads(line) if line.endswith("\n") else None
    except ValueError:
      entry = None
    if isinstance(entry, dict) and isinstance(entry.get("step"), int):
      step = entry.pop("step")
      rows.append({"step": step} | {name: number(entry[name]) for name in entry})
    elif index + 1 < len(lines):
      raise UserError(f"line {index + 1} is not a JSON object with a step", field=str(path))
  return rows


class _Events:
  """Event file for TensorBoard, written in this thread, so a full disk raises an error here."""

  def __init__(self, folder: pathlib.Path, purge_step: int):
    from dpjax import optional

    with optional.require_extra():
      from tensorboardX import event_file_writer, summary
      from tensorboardX.proto import event_pb2

    # `event_pb2` creates its names at run time, so type checkers do not see them.
    proto: Any = event_pb2

    folder.mkdir(parents=True, exist_ok=True)
    self._scalar = summary.scalar
    self._event = proto.Event
    self._file = event_file_writer.EventsWriter(str(folder / "events"))
    start = proto.SessionLog(status=proto.SessionLog.START)
    # TensorBoard then ignores what earlier event files hold for `purge_step` and later steps.
    self._file.write_event(
      self._event(wall_time=time.time(), step=purge_step, session_log=start)
    )

  def write(self, step: int, scalars: dict[str, float]) -> None:
    for name, value in scalars.items():
      # TensorBoard draws no point for NaN and infinity, and tensorboardX would print a warning.
      if math.isfinite(value):
        point = self._scalar(name, value)
        self._file.write_event(self._event(wall_time=time.time(), step=step, summary=point))
    self._file.flush()

  def close(self) -> None:
    self._file.close()


def write_result(workdir: str | os.PathLike, result: dict[str, Any]) -> None:
  """Writes `workdir`/result.json, after a check that the result states what its epsilon means.

  Raises:
    ValueError: a key of RESULT_KEYS is missing, or epsilon_kind contradicts epsilon. Under kind
      "none", epsilon must be None or infinite. Under every other kind it must be finite, with
      delta, relation and unit.
  """
  missing = [key for key in RESULT_KEYS if key not in result]
  if missing:
    raise ValueError(f"result lacks {', '.join(missing)}")
  validate.one_of(EPSILON_KINDS, epsilon_kind=result["epsilon_kind"])
  epsilon, kind = result["epsilon"], result["epsilon_kind"]
  if kind == "none":
    if epsilon is not None and number(epsilon) != math.inf:
      raise ValueError(f"epsilon={epsilon!r}: epsilon_kind 'none' has no finite epsilon")
  else:
    validate.non_negative(epsilon=epsilon, delta=result["delta"])
    if result["delta"] >= 1:
      raise ValueError(f"delta={result['delta']!r}: promises nothing; must be below 1")
    if not (result["neighboring_relation"] and result["unit"]):
      raise ValueError(f"a {kind} epsilon needs its neighboring_relation and its unit")
  write_json(pathlib.Path(workdir) / RESULT, result)


def headline(result: Mapping[str, Any]) -> str:
  """Returns the score of a run as text: its accuracy, RMSE and R^2 of a regression, or none.

  >>> headline({"test_accuracy": 0.93891, "test_loss": 0.2})
  'test_accuracy=0.9389'
  >>> headline({"test_accuracy": None, "test_rmse": 54.3, "test_r2": None})
  'test_rmse=54.3, test_r2=nan'
  >>> headline({"test_accuracy": None})
  'no scores'
  """
  if "test_rmse" not in result:
    accuracy = result["test_accuracy"]
    return "no scores" if accuracy is None else f"test_accuracy={accuracy:.4f}"
  rmse = number(result["test_rmse"])
  return f"test_rmse={rmse:.5g}, test_r2={number(result['test_r2']):.4f}"


def took(result: Mapping[str, Any]) -> str:
  """Returns the duration of a run as text; "" if its result has no duration.

  >>> took({"wall_seconds": 12.3}), took({"wall_seconds": None})
  (' in 12 s', '')
  """
  seconds = result["wall_seconds"]
  return "" if seconds is None else f" in {seconds:.0f} s"


def warn(message: str) -> None:
  """Prints one line "warning: ..." on stderr."""
  print(f"warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def note(message: str) -> None:
  """Prints one line "note: ..." on stderr."""
  print(f"note: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def say(line: str) -> None:
  """Prints a line on stdout, above the progress bar if there is one."""
  tqdm.write(line, file=sys.stdout)
  sys.stdout.flush()


@contextmanager
def silent() -> Iterator[None]:
  """Suppresses progress reports in the block. Reports of several runs at once would overwrite each
  other."""
  before = _SILENT.set(True)
  try:
    yield
  finally:
    _SILENT.reset(before)


def begins(what: str) -> None:
  """Prints the name of a part of a long command as it begins, on a terminal alone."""
  if _on_terminal():
    tqdm.write(f"{what} ...", file=sys.stderr)
    sys.stderr.flush()


def _on_terminal() -> bool:
  # If the process has no stderr (`2>&-`), `sys.stderr` is None.
  return not _SILENT.get() and sys.stderr is not None and sys.stderr.isatty()


class Progress(AbstractContextManager):
  """Counts to a total and shows it on stderr, as a context manager: a bar on a terminal, a line
  every five seconds elsewhere. In a block of `silent`, it shows nothing.

  Args:
    total, initial: the last count, and the first one.
    desc: what is counted; "" for none.
    lines: whether it shows lines where stderr is no terminal; False for a command that then prints
      a table.
    shown: whether it shows anything.
  """

  def __init__(
    self,
    total: int,
    initial: int = 0,
    desc: str = "",
    *,
    lines: bool = True,
    shown: bool = True,
  ):
    is_bar = shown and _on_terminal()
    self._bar: Any = None
    if is_bar:
      self._bar = tqdm(total=total, initial=initial, desc=desc, dynamic_ncols=True)
      # A terminal without a size, as of `docker run -t` in a job, would show nothing.
      # A bar that TQDM_DISABLE switched off has no size of its own.
      if not self._bar.disable and {-1, 0} & {self._bar.ncols, self._bar.nrows}:
        self._bar.dynamic_ncols = None
        self._bar.ncols, self._bar.nrows = 80, 24
        self._bar.refresh()
    self._speaks = shown and lines and not _SILENT.get() and sys.stderr is not None
    self._total = total
    self._count = initial
    self._desc = desc
    self._initial = initial
    self._start = time.monotonic()
    self._next = self._start + _LINE_SECONDS
    self._shown: dict[str, str] = {}  # values, by name
    # The count that was last reported. It begins at `initial`, so that `close` reports nothing if
    # no step was made.
    self._said = initial

  def update(self, n: int = 1, **shown: Any) -> None:
    """Adds n to the count. With n=0, it only updates the shown values.

    Args:
      shown: values to show, by name. A new value replaces the old value of the same name.
    """
    self._count += n
    for name, value in shown.items():
      self._shown[name] = by_name(name, value) if isinstance(value, float) else str(value)
    if self._bar is None:
      if self._speaks and time.monotonic() >= self._next:
        self._say()
      return
    if shown:
      self._bar.set_postfix(self._shown, refresh=False)
    if n:
      self._bar.update(n)
    else:  # an update by nothing would count as a step that took no time
      self._bar.refresh()

  def close(self) -> None:
    """Ends the bar, or reports the final count, unless the last line did."""
    if self._bar is not None:
      self._bar.close()
    elif self._speaks and self._said != self._count:
      self._say()

  def _say(self) -> None:
    now = time.monotonic()
    self._next = now + _LINE_SECONDS
    self._said = self._count
    # The speed leaves out steps from before a resume, which took none of this process's time.
    speed = (self._count - self._initial) / max(now - self._start, 1e-9)
    words = [f"{self._desc}:"] if self._desc else []
    words += [f"{self._count}/{self._total}", f"{speed:.3g}/s"]
    words += map("=".join, self._shown.items())
    print(" ".join(words), file=sys.stderr, flush=True)

  def __exit__(self, *error: object) -> None:
    self.close()

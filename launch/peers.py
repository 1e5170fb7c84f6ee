"""`--coordinator --num_processes --process_id`: one launcher as several processes, on one
machine or many. Their commands differ in --process_id, and if need be in --local_devices."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from dpjax import parallel as processes
from dpjax.experiments.run import checkpoint
from dpjax.parallel.exchanges import MOST_PROCESSES, PeerLost
from dpjax.validate import UserError
from launch import app, native_words

# The flags are no key flags of this module, so that --help lists them with their launcher.
flags.disclaim_key_flags()

_NAMES = ("coordinator", "num_processes", "process_id")
_THEN = "the same command on all machines goes on from there"
# Seconds to wait before this process ends, so that the others first report the error themselves.
_MOMENT = 0.5


class Options(NamedTuple):
  """Settings of one process of a run on many processes; timeouts are in seconds."""

  coordinator: str
  num_processes: int
  process_id: int
  timeout: float
  peer_timeout: float
  local_devices: list[int] | None


def define() -> None:
  """Defines --coordinator and the other flags of a run on many processes; call it at import
  time."""
  flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0, reachable by all: run on many processes."
  )
  most = MOST_PROCESSES
  flags.DEFINE_integer(
    "num_processes",
    None,
    "How many processes there are.",
    lower_bound=1,
    upper_bound=most,
  )
  flags.DEFINE_integer(
    "process_id",
    None,
    "Which one this is: 0 to num_processes - 1.",
    lower_bound=0,
    upper_bound=most - 1,
  )
  flags.DEFINE_list(
    "local_devices",
    None,
    "Ids of this process's accelerators, as 0,1 (default: all of the machine).",
  )
  flags.DEFINE_float("connect_timeout", 60.0, "Seconds to wait for the other processes.")
  flags.DEFINE_float(
    "peer_timeout",
    30.0,
    "Seconds without a sign of life after which a process is given up.",
  )


def options() -> Options | None:
  """Returns the options of the flags; None for a run of one process.

  Raises:
    UserError: some of the flags without the others, or --local_devices that are no ids.
  """
  values: dict[str, Any] = {name: flags.FLAGS[name].value for name in _NAMES}
  present = [name for name, value in values.items() if value is not None]
  if not present:
    app.refuse_given(("local_devices", "connect_timeout", "peer_timeout"), "--coordinator")
    return None
  for name in _NAMES:
    if name not in present:
      raise UserError(f"--{name}: must be given with --{present[0]}={values[present[0]]}")
  texts = flags.FLAGS.local_devices
  if texts is not None and not (texts and all(text.strip().isdigit() for text in texts)):
    raise UserError(f"--local_devices={','.join(texts)!r}: must be ids as 0,1")
  return Options(
    *values.values(),
    timeout=flags.FLAGS.connect_timeout,
    peer_timeout=flags.FLAGS.peer_timeout,
    local_devices=None if texts is None else [int(text) for text in texts],
  )


def _own_stdout() -> None:
  """Gives Python a copy of stdout, and drops what native code prints: gloo prints a greeting for
  each peer."""
  sys.stdout.flush()
  # Native code writes to file number 1, which leads nowhere from here on. Python writes to a copy.
  kept = os.dup(1)
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 1)
  os.close(nowhere)
  sys.stdout = os.fdopen(kept, "w", buffering=1)


def _own_stderr(me: str) -> None:
  """Gives Python a copy of stderr, and sends messages of native code through `native_words`.

  `me`: name of this process, for its last line."""
  sys.stderr.flush()
  line = f"error: {me}: lost another process, most likely process 0; {_THEN}"
  command = [sys.executable, "-S", native_words.__file__, line]
  words = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
  assert words.stdin is not None
  kept = os.dup(2)
  os.dup2(words.stdin.fileno(), 2)
  words.stdin.close()
  sys.stderr = os.fdopen(kept, "w", buffering=1)


class _Ending:
  """Ends a process when the run cannot continue: prints the reason, and waits at no barrier.

  An ordinary exit would wait for the dead peer and then print a stack trace.
  """

  def __init__(self, options: Options, saved: Callable[[], str]):
    self._number = options.process_id
    self._me = f"process {options.process_id} of {options.num_processes}"
    self._saved = saved
    # This lock is never released: only the first thread that takes it ends the process.
    self._once = threading.Lock()

  def lost(self, meeting: processes.meeting.Meeting, who: int, why: str) -> None:
    """Ends the process when a peer is gone or hangs, or when the others have given up this
    process."""
    self._end(meeting, f"lost process {who}: {why}", who, why)

  def broken(self, meeting: processes.meeting.Meeting, error: Exception) -> None:
    """Ends the process after a failed exchange. It waits first, since `lost` knows the cause
    and may still be called."""
    time.sleep(_MOMENT)
    self._end(meeting, f"lost another process ({error})", None, "has ended")

  def _end(
    self, meeting: processes.meeting.Meeting, text: str, who: int | None, why: str
  ) -> None:
    self._once.acquire()
    if who == self._number:
      text = f"given up by the other processes: {why}"
    self._say(f"{text}; {self._saved()}; {_THEN}")
    self._exit(meeting, 1, who, why)

  def error(self, meeting: processes.meeting.Meeting, error: Exception, code: int) -> None:
    """Ends the process on an error that is no bug. It waits before the end, since the others most
    likely find the same error, and report it themselves."""
    self._once.acquire()
    self._say(str(error))
    time.sleep(_MOMENT)
    self._exit(meeting, code)

  def bug(self, meeting: processes.meeting.Meeting) -> None:
    """Ends the process on a bug, with its traceback."""
    self._once.acquire()
    traceback.print_exc()
    os.write(2, native_words.SAID)
    self._exit(meeting, 1)

  def _say(self, text: str) -> None:
    print(f"error: {self._me}: {' '.join(text.split())}", file=sys.stderr, flush=True)
    # This tells `native_words` that a reason was printed, so that it prints none.
    os.write(2, native_words.SAID)

  def _exit(
    self,
    meeting: processes.meeting.Meeting,
    code: int,
    who: int | None = None,
    why: str = "has ended",
  ) -> None:
    # The others get the reason before this process is gone.
    meeting.abandon(who, why)
    sys.stdout.flush()
    sys.stderr.flush()
    # An ordinary exit would wait at JAX's barrier for the lost peer.
    os._exit(code)


def saved(workdir: str, unit: str, heard: Sequence[int], *, owner: bool) -> str:
  """Returns words about the newest checkpoint, for the error when a peer is lost.

  Args:
    heard: steps of the checkpoints that were reported to this process.
    owner: whether this is process 0, which writes the checkpoints.
  """
  # Process 0 looks at the disk. The other processes know only the last report.
  newest = checkpoint.newest(pathlib.Path(workdir)) if owner else (None, *heard)[-1]
  if newest is None:
    return "nothing is saved"
  return f"{unit} {newest} is saved in {workdir} of process 0"


def run(
  work: Callable[[], None],
  options: Options,
  *,
  same: Mapping[str, str],
  saved: Callable[[], str],
) -> None:
  """Runs `work()` on JAX's multi-process runtime.

  Args:
    same: values that must be equal in all processes; see `meeting.meet`.
    saved: function that describes the saved state. It is called when a peer is lost.

  A UserError ends the process with one line and exit code 2, an OSError with one line and exit code
  1. If a process dies, each of the others ends with one line and exit code 1.
  """
  _own_stdout()
  _own_stderr(f"process {options.process_id} of {options.num_processes}")
  # gloo may write to peers that are gone, which would end this process by SIGPIPE.
  if hasattr(signal, "SIGPIPE"):
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
  where: dict[str, Any] = options._asdict()
  devices = where.pop("local_devices")
  ending = _Ending(options, saved)
  note = lambda line: print(f"note: {line}", file=sys.stderr, flush=True)
  met = processes.meeting.meet(same=same, report=note, **where)
  met.watch(ending.lost)
  try:
    processes.meeting.start(**where, local_devices=devices)
    work()
  except PeerLost as error:
    ending.broken(met, error)
  # OSError comes before UserError: a refused write is both, and must end with exit code 1.
  except OSError as error:
    ending.error(met, error, 1)
  except UserError as error:
    ending.error(met, error, 2)
  except Exception:
    broken = app.without_device()
    if broken is not None:
      ending.error(met, UserError(broken), 2)
    ending.bug(met)
  finally:
    met.leave(options.peer_timeout)

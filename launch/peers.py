"""`--coordinator --num_processes --process_id`: one launcher as several processes, on one
machine or many. Their commands differ in --process_id, and if need be in --local_devices."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
from absl import flags

from dpjax.experiments.run import checkpoint
from dpjax.parallel import runtime
from dpjax.parallel.exchanges import PeerLost
from dpjax.validate import UserError
from launch import app

_NAMES = ("coordinator", "num_processes", "process_id")
_THEN = "the same command on all machines goes on from there"
# Seconds before this process ends, in which the others report the error themselves.
_MOMENT = 0.5


class Options(NamedTuple):
  """Settings of one process of a run on many processes; timeouts are in seconds."""

  coordinator: str
  num_processes: int
  process_id: int
  timeout: float
  peer_timeout: float
  local_devices: list[int] | None


def options() -> Options | None:
  """Returns the options of the flags (`launch.main` defines them); None for a run of one process.

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
      raise UserError(
        f"must be given with --{present[0]}={values[present[0]]}", field=name, value=None
      )
  texts = flags.FLAGS.local_devices
  if texts is not None and not (texts and all(text.strip().isdigit() for text in texts)):
    raise UserError("must be ids as 0,1", field="local_devices", value=",".join(texts))
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


class _LastWords:
  """A line for the end of a process that JAX's runtime aborts, which lets Python say nothing.

  A child process waits for the end of this one, and prints the line unless `silence` was called.

  Args:
    line: function that returns the line; the child calls it at the end.
  """

  def __init__(self, line: Callable[[], str]):
    sys.stdout.flush()
    sys.stderr.flush()
    reads, self._writes = os.pipe()
    # JAX's backends, which have threads, do not run yet.
    if os.fork():
      os.close(reads)
      return
    # No error may let the child return, as a second process of the run.
    try:
      os.setsid()
      for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
      os.close(self._writes)
      if not os.read(reads, 1):
        os.write(2, f"error: {line()}\n".encode())
    finally:
      os._exit(0)

  def silence(self) -> None:
    """Makes the child end silently."""
    os.write(self._writes, b".")


def _leave(code: int, process_id: int) -> NoReturn:
  """Ends the process without JAX's barrier, which would wait for a peer that is gone."""
  # After a mistake or a stop the others end, too, and JAX aborts those that outlive process 0.
  # After a loss this process ends before JAX aborts it.
  if code != 1:
    time.sleep(_MOMENT if process_id else 2 * _MOMENT)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def saved_words(workdir: str, unit: str, *, owner: bool) -> str:
  """Returns words about the newest checkpoint, for the line when a peer is lost.

  Args:
    owner: whether this is process 0, the only one that writes.
  """
  newest = checkpoint.newest(pathlib.Path(workdir))
  if newest is not None:
    return f"{unit} {newest} is saved in {workdir}"
  return "nothing is saved" if owner else "process 0 knows what is saved"


@contextlib.contextmanager
def join(
  options: Options, *, same: Mapping[str, str], saved: Callable[[], str]
) -> Iterator[None]:
  """Runs the block as one of the processes of JAX's multi-process runtime.

  Args:
    same: values that must be equal in all processes.
    saved: function that describes the saved state. It is called when a peer is lost.

  A UserError ends the process with one line and exit code 2, an OSError with one line and exit code
  1. If a process dies, each of the others ends with a line, below those of JAX's runtime.
  """
  _own_stdout()
  # gloo may write to peers that are gone, which would end this process by SIGPIPE.
  if hasattr(signal, "SIGPIPE"):
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
  me = f"process {options.process_id} of {options.num_processes}"
  last_words = _LastWords(
    lambda: f"{me}: lost another process, or was killed; {saved()}; {_THEN}"
  )

  def end(text: str, code: int) -> NoReturn:
    print(f"error: {me}: {' '.join(text.split())}", file=sys.stderr, flush=True)
    last_words.silence()
    _leave(code, options.process_id)

  try:
    runtime.start(
      options.coordinator,
      num_processes=options.num_processes,
      process_id=options.process_id,
      timeout=options.timeout,
      peer_timeout=options.peer_timeout,
      local_devices=options.local_devices,
      same=same,
    )
    yield
    jax.distributed.shutdown()
  except PeerLost:
    # The child says so, below what JAX's threads may still print.
    _leave(1, options.process_id)
  # OSError comes before UserError: a refused write is both, and must end with exit code 1.
  except OSError as error:
    end(str(error), 1)
  except UserError as error:
    end(str(app.by_flag(error)), 2)
  # A stop by a signal, which has printed its line.
  except SystemExit as error:
    last_words.silence()
    _leave(error.code if isinstance(error.code, int) else 1, options.process_id)
  except Exception:
    broken = app.without_device()
    if broken is not None:
      end(broken, 2)
    traceback.print_exc()
    end("a bug of dpjax, see above", 1)
  last_words.silence()

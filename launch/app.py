"""Frame of every launcher: parses flags and runs `main`.

A user's mistake ends in one line on stderr and exit code 2. A failed run ends in one line
and exit code 1.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags, logging

from dpjax import names, validate
from dpjax.parallel import allocator
from dpjax.validate import NO_VALUE, UserError

# Root of a checkout, or of an installation.
ROOT = pathlib.Path(__file__).resolve().parents[1]


def fail(message: object, code: int = 2) -> None:
  """Prints an error of one line on stderr, and ends the process with an exit code."""
  # The message is formatted like a UserError: on one line, without the middle of a very long word.
  line = " ".join(str(UserError(str(message))).split())
  print(f"error: {line}", file=sys.stderr, flush=True)
  sys.exit(code)


def as_typed(error: UserError, typed: Iterable[str]) -> UserError:
  """Returns an error about a field that names the flag which the user typed for it.

  A field that no flag set is that of a config file, and keeps its name. A sweep's flags set fields
  of its `base`, which its runs have without this word.

  Args:
    typed: names of the flags of the command line.

  >>> error = UserError("must be > 0", field="privacy.epsilon", value=-1.0)
  >>> print(as_typed(error, ["workdir", "config.privacy.epsilon"]))
  --config.privacy.epsilon=-1.0: must be > 0
  >>> print(as_typed(error, ["workdir"]))
  privacy.epsilon=-1.0: must be > 0
  >>> print(as_typed(error, ["config.base.privacy"]))
  --config.base.privacy.epsilon=-1.0: must be > 0
  """
  for flag in typed:
    path = flag.partition(".")[2]
    for name in (flag, path, path.removeprefix("base.")):
      rest = error.field.removeprefix(name)
      # What is inside a value is of the value's flag: an item of a list, a field of a choice.
      if name and error.field.startswith(name) and rest[:1] in ("", ".", "["):
        return error.of(field=f"--{flag}{rest}")
  return error


def by_flag(error: UserError, values: flags.FlagValues = flags.FLAGS) -> UserError:
  """Returns an error that names the flag of this command line, as of `as_typed`; also one that has
  its default, or is missing."""
  if error.field in values and error.is_about(error.field, values[error.field].value):
    value = NO_VALUE if error.value is None else error.value
    return UserError(error.must, field=f"--{error.field}", value=value, hint=error.hint)
  typed = [name for name in values if values[name].present]
  # The longest is the most exact: a field of a choice before the choice.
  return as_typed(error, sorted(typed, key=len, reverse=True))


@contextlib.contextmanager
def giving(**arguments: str) -> Iterator[None]:
  """Makes errors in the block about an argument errors about the flag that gives it.

  >>> with giving(shadows="attack.num_shadows"):
  ...   raise UserError("must be even", field="attack.num_shadows", value=3)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: shadows=3: must be even
  """
  try:
    yield
  except UserError as error:
    flag = next((flag for flag, field in arguments.items() if field == error.field), None)
    if flag is None:
      raise
    raise error.of(field=flag) from error


def flags_given(names: Iterable[str]) -> list[str]:
  """Returns those of some flags that the command line sets."""
  return [name for name in names if flags.FLAGS[name].present]


def refuse_given(names: Iterable[str], what: str) -> None:
  """Raises UserError, one line for all, if the command line sets any of these flags.

  Args:
    names: flags that would be ignored.
    what: the option that they need, in words.
  """
  present = flags_given(names)
  if present:
    first, *others = present
    also = f", as {', '.join(f'--{name}' for name in others)}" if others else ""
    raise UserError(
      f"would be ignored{also}; it needs {what}",
      field=first,
      value=flags.FLAGS[first].value,
    )


def refuse_failed(rows: Iterable[Mapping[str, Any]]) -> None:
  """Ends the process with one line and exit code 1 if runs of a grid failed. Each reason appears
  once, with its first run and the number of other runs."""
  rows = list(rows)
  reasons = dict[tuple[str, ...], list[str]]()
  for row in rows:
    if row["status"] == "failed":
      reasons.setdefault(tuple(row["refusal"]), []).append(row["name"])
  failures = []
  for facts, (first, *others) in reasons.items():
    also = f" and {len(others)} more" if others else ""
    failures.append(by_flag(UserError.of_facts(facts).at(f"{first}{also}")))
  if failures:
    failed = sum(map(len, reasons.values()))
    fail(f"{'; '.join(map(str, failures))}; {failed} of {len(rows)} runs failed", code=1)


def prepare_memory(configs: Iterable[Any]) -> None:
  """Makes the process keep freed memory if the kind of one of these runs says so.

  Such runs get faster, and other runs may get slower (`dpjax.parallel.allocator`). Call it before
  JAX is used.
  """
  from dpjax.experiments.run import kind

  for config in configs:
    # An unknown model raises UserError here. The run itself refuses it later, and names the field.
    with contextlib.suppress(UserError):
      if kind.experiment_of(config).keeps_memory:
        allocator.keep_freed_memory()


def without_device() -> str | None:
  """Returns a line for the user if JAX has no device to run on; None if it has one.

  With JAX_PLATFORMS=cuda on a machine without a GPU, for example, JAX raises an assertion or an
  error of many lines. Call this only after something has failed, because it starts JAX's backends.
  """
  import jax

  try:
    jax.devices()
  except Exception as error:
    asked = os.environ.get("JAX_PLATFORMS", "")
    first = (str(error).splitlines() or [""])[0].partition(" (set JAX_PLATFORMS")[0]
    first = first.removeprefix(f"Unable to initialize backend {asked!r}: ")
    reason = f" ({first:.110})" if first else ""
    return (
      f"JAX_PLATFORMS={asked}: JAX finds no such device on this machine{reason}; install what "
      "it needs, or set JAX_PLATFORMS=cpu, or leave it unset for the best that is there"
    )
  return None


_BETWEEN = (
  "stopped before, between or after trainings, whose steps are saved; run the same command "
  "to go on"
)


# Seconds after which a signal that was lost is sent again.
_AGAIN_SECONDS = 0.05


class _Stopped(KeyboardInterrupt):
  def __init__(self, signum: int):
    super().__init__(signum)
    self.signum = signum


def _behind(error: BaseException | None) -> Iterator[BaseException]:
  """Yields an error with all its causes and contexts, each once."""
  waiting = [error]
  # An error may be its own cause, so errors that were seen are skipped.
  seen: set[int] = set()
  while waiting:
    one = waiting.pop()
    if one is not None and id(one) not in seen:
      seen.add(id(one))
      yield one
      waiting += [one.__cause__, one.__context__]


def _stop_behind(error: BaseException | None) -> _Stopped | None:
  """Returns the `_Stopped` among an error and its causes and contexts; None if there is none."""
  return next((one for one in _behind(error) if isinstance(one, _Stopped)), None)


@contextlib.contextmanager
def stoppable(workdir: str) -> Iterator[None]:
  """Ends the process with one line and exit code 128 + signal if SIGINT, SIGTERM or SIGHUP stops
  the block. During a training, the loop handles the signal, finishes its step and saves.

  In between, the signal raises `_Stopped`. A destructor, or a callback of a library, may swallow
  it: then the signal is sent again. Other code may catch it and raise another error, as tqdm does:
  then `_stop_behind` finds it among the causes of that error.
  """
  from dpjax.experiments.run import loop

  hook = sys.unraisablehook
  again: list[threading.Timer] = []

  def stop(signum: int, frame: object) -> None:
    raise _Stopped(signum)

  def swallowed(unraisable: Any) -> None:
    stopped = _stop_behind(unraisable.exc_value)
    if stopped is None:
      hook(unraisable)
      return
    # The signal is sent later. This hook runs where the exception was lost, so another one raised
    # now would be lost, too.
    timer = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), stopped.signum))
    timer.daemon = True
    again.append(timer)
    timer.start()

  handlers = {}
  for signum in loop.STOPPING:
    # Ignored signals, as under nohup, stay ignored.
    if signal.getsignal(signum) != signal.SIG_IGN:
      handlers[signum] = signal.signal(signum, stop)
  sys.unraisablehook = swallowed
  try:
    yield
  except (Exception, KeyboardInterrupt) as error:
    saved = isinstance(error, loop.Interrupted)
    stopped = error if saved else _stop_behind(error)
    if stopped is None and not isinstance(error, KeyboardInterrupt):
      raise
    # After a hang-up nothing reads the terminal, so printing may fail.
    with contextlib.suppress(OSError):
      reason = error if saved else _BETWEEN
      print(f"{reason} (workdir {workdir})", file=sys.stderr, flush=True)
    sys.exit(128 + getattr(stopped, "signum", signal.SIGINT))
  finally:
    # After the block there is nothing left to stop.
    for timer in again:
      timer.cancel()
    sys.unraisablehook = hook
    for signum, handler in handlers.items():
      signal.signal(signum, handler)


def _parse(argv: Sequence[str], *, words: bool = False) -> list[str]:
  try:
    positional = flags.FLAGS(argv)
  # absl ends --help with code 1, but a request for help is no error.
  except SystemExit:
    sys.exit(0)
  except flags.UnrecognizedFlagError as error:
    # `config_flag` imports this module.
    from launch import config_flag

    name = error.flagname
    near = config_flag.did_you_mean(name) or validate.did_you_mean(name, flags.FLAGS)
    fail(f"--{name}: there is no such flag{near}")
  except flags.Error as error:
    # What absl says of a required flag that is missing.
    missing = re.fullmatch(
      r"flag (--\w+)=None: Flag \1 must have a value other than None\.", str(error)
    )
    text = str(error).removeprefix("flag ")
    # What Python says of text that is no number.
    text = re.sub(r"invalid literal for int\(\).*", "must be an integer", text)
    text = re.sub(r"could not convert string to float.*", "must be a number", text)
    fail(f"{missing[1]}: must be given" if missing else text)
  # Code that reads a flag's value may raise errors of Python, too.
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    fail(error.args[0] if error.args else error)
  if len(positional) > 1 and not words:
    fail(f"unexpected argument {positional[1]!r}: flags begin with --")
  return positional


def _end_unread(signum: int, frame: object) -> None:
  """Ends the process silently on SIGPIPE if stdout or stderr has no reader, as with `... | head`.

  A write to any other broken pipe fails as usual, such as one to a peer that is gone.
  """
  poll = select.poll()
  for number in (1, 2):
    # The mask 0 asks for no event, since errors and hang-ups are always reported.
    poll.register(number, 0)
  if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)


def _is_memory(error: BaseException) -> bool:
  """Returns whether an error, or one of its causes, is a lack of memory in Python, XLA or the
  system."""
  said = ("RESOURCE_EXHAUSTED", "can't start new thread", "Cannot allocate memory")
  return any(
    isinstance(one, MemoryError) or any(words in str(one) for words in said)
    for one in _behind(error)
  )


def run(main: Callable[..., None], *, words: bool = False) -> None:
  """Runs `main()` under absl with one-line errors.

  UserError, a missing package or device, and an error in a user's code that a config names by its
  import path end the process with exit code 2. OSError (a missing or unwritable file) and a lack of
  memory end it with exit code 1. Any other error is a bug of dpjax and keeps its traceback.

  Args:
    words: whether to call `main` with the arguments that are no flags. If False, such arguments are
      refused.
  """

  if hasattr(signal, "SIGPIPE"):
    signal.signal(signal.SIGPIPE, _end_unread)

  def guarded(argv: Sequence[str]) -> None:
    # Users do not see the informative messages of other libraries.
    logging.set_verbosity(logging.WARNING)
    try:
      main(*argv[1:])
    # OSError comes before UserError: a refused write is both, and must end with exit code 1.
    except OSError as error:
      # A name that no file can have is a mistake in an argument.
      fail(error, code=2 if error.errno == errno.ENAMETOOLONG else 1)
    except UserError as error:
      fail(by_flag(error))
    # A user's own code may call sys.exit.
    except (Exception, SystemExit) as error:
      if _is_memory(error):
        fail(f"out of memory: {str(error)[:160] or type(error).__name__}", code=1)
      from dpjax import optional

      blamed = optional.missing(error) or without_device() or names.blame(error)
      if blamed is None:
        raise
      fail(by_flag(blamed) if isinstance(blamed, UserError) else blamed)
    # stdout is flushed while `_end_unread` still handles SIGPIPE. If it is closed, print fails.
    finally:
      with contextlib.suppress(OSError):
        print(end="", flush=True)

  app.run(guarded, flags_parser=functools.partial(_parse, words=words))

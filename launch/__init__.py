"""Commands: `python -m launch.NAME`."""

import contextlib
import os
import pathlib
import sys
import warnings

# Smallest limit of the address space, in bytes, with which JAX's native code can start its threads.
_LEAST_BYTES = 2_500_000_000


def _check_memory() -> None:
  """Ends the process with one line if the limit of memory (`ulimit -v`) is too low for JAX."""
  try:
    import resource
  except ImportError:  # there are no such limits on Windows
    return
  limit = resource.getrlimit(resource.RLIMIT_AS)[0]
  if limit != resource.RLIM_INFINITY and limit < _LEAST_BYTES:
    print(
      f"error: ulimit -v: {limit:,} bytes of memory are allowed; JAX needs "
      f"{_LEAST_BYTES:,} to start",
      file=sys.stderr,
    )
    sys.exit(1)


def _keep_programs() -> None:
  """Makes JAX keep what it compiles in a folder of the user's cache, for later runs.

  JAX's own variables go before this: `JAX_COMPILATION_CACHE_DIR` names another folder, and
  `JAX_ENABLE_COMPILATION_CACHE=false` keeps nothing. Programs hold no keys and no examples. JAX
  tells those of other processors apart, which may share a home.
  """
  if "JAX_COMPILATION_CACHE_DIR" in os.environ:
    return
  with contextlib.suppress(OSError, RuntimeError):  # no home, or one that cannot be written
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(caches) / "dpjax" / "programs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.access(folder, os.W_OK) and _is_own(folder):
      os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
      # A run has about 40 small programs beside its step. They take as long as the step.
      os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  # Another process may be writing a program, or the disk be full: then JAX compiles as usual.
  warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def _is_own(folder: pathlib.Path) -> bool:
  """Returns whether no other user can put a program there, which JAX would run as it is."""
  status = folder.stat()
  if not hasattr(os, "getuid"):  # Windows
    return True
  return status.st_uid == os.getuid() and not status.st_mode & 0o022


# Both come before any launcher imports JAX.
_check_memory()
_keep_programs()

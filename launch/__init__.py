"""Commands: `python -m launch.NAME`."""

import sys

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


# The limit is checked before any launcher imports JAX.
_check_memory()

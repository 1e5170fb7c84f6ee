"""The C library's allocator, told to keep what is freed."""

from __future__ import annotations

import ctypes
import os

# Of mallopt(3), and what each is set to.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_SETTINGS = {
  _ARENA_MAX: 1,  # others hold no block above 64 MiB, and would ask the system for each
  _MMAP_THRESHOLD: 2**31 - 1,  # bytes, the most it takes; larger blocks still come and go
  _TRIM_THRESHOLD: -1,  # never
  _TOP_PAD: 2**26,  # bytes asked for ahead
}


def keep_freed_memory() -> bool:
  """Lets this process use freed blocks of up to 2 GiB again instead of giving them back.

  For steps on wide examples on a CPU, which free a batch and intermediate arrays above 32 MiB:
  by default glibc gives such blocks back to the system, which hands them out again at the next
  step, zeroed page by page. On scattering features that took more than half of the time. Steps of
  many small operations become slower, for all threads then share one heap (`python -m
  launch.benchmark --suite=allocator` measures both). The process keeps its peak of memory until
  it ends. No number of a run changes. Launchers call it for models of scattering features;
  elsewhere call it before JAX is first used: threads that are there keep what they have.

  Returns:
    Whether it took effect: not without glibc, and not where the user has chosen himself, by
    MALLOC_ variables, GLIBC_TUNABLES (an empty one will do) or another allocator (LD_PRELOAD).

  >>> keep_freed_memory() in (True, False)
  True
  """
  chosen = ("GLIBC_TUNABLES", "LD_PRELOAD")
  if any(name in chosen or name.startswith("MALLOC_") for name in os.environ):
    return False
  try:
    libc = ctypes.CDLL(None)
    libc.gnu_get_libc_version  # noqa: B018  (other libraries have a mallopt of other numbers)
    return all([libc.mallopt(option, value) for option, value in _SETTINGS.items()])
  except (AttributeError, OSError, TypeError):
    return False

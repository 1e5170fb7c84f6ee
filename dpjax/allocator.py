"""The C library's allocator, told to keep what is freed."""

from __future__ import annotations

import ctypes
import os

# Of mallopt(3), and what each is set to.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_KEPT, _LARGE, _AHEAD = 2**31 - 1, 2**30, 2**26  # bytes
_SETTINGS = {
  _ARENA_MAX: 1,  # others hold no block above 64 MiB, and would ask the system for each
  _MMAP_THRESHOLD: _LARGE,  # larger ones still come from the system and go back to it
  _TRIM_THRESHOLD: _KEPT,
  _TOP_PAD: _AHEAD,
}


def keep_freed_memory() -> bool:
  """Lets this process use freed blocks of up to a GiB again instead of giving them back.

  A training step on a CPU frees its batch and its intermediate arrays; by default glibc gives
  blocks above 32 MiB back to the system, which hands them out again at the next step, zeroed
  page by page: that took more than half of the time of steps on wide features (`python -m
  launch.benchmark --suite=allocator`). At most 2 GiB at the end of the heap stay unused with
  the process. No number of a run changes. Every launcher calls it; a notebook may, first.

  Returns:
    Whether it took effect: not without glibc, and not where the user has chosen himself, by
    MALLOC_ variables, GLIBC_TUNABLES or another allocator (LD_PRELOAD).

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

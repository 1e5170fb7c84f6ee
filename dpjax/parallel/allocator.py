"""Makes the C library's allocator keep freed memory, and tells how much memory a machine has."""

from __future__ import annotations

import ctypes
import os

# Option numbers of mallopt(3); `_SETTINGS` holds their values.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_SETTINGS = {
  # Blocks of up to this many bytes are kept; mallopt takes no larger value. glibc before 2.35
  # refuses this setting. As it comes first, a refusal leaves the others unset: alone they would
  # only switch off glibc's own adjustment of this threshold.
  _MMAP_THRESHOLD: 2**31 - 1,
  # Only the main arena keeps blocks above 64 MiB. Other arenas ask the system for each such block.
  _ARENA_MAX: 1,
  _TRIM_THRESHOLD: -1,  # never trim
  _TOP_PAD: 2**26,  # bytes that are requested in advance
}


def chosen_by_user() -> list[str]:
  """Returns the names of the set environment variables that choose an allocator's behaviour.

  These are MALLOC_*, GLIBC_TUNABLES and LD_PRELOAD (another allocator), even if they are empty.
  """
  named = ("GLIBC_TUNABLES", "LD_PRELOAD")
  return [name for name in os.environ if name in named or name.startswith("MALLOC_")]


def keep_freed_memory() -> bool:
  """Lets this process use freed blocks of up to 2 GiB again. They do not go back to the system.

  On a CPU this helps if each step frees arrays above 32 MiB: a batch of wide examples, and
  intermediate results. By default glibc gives such blocks back to the system, which zeroes them
  page by page at the next step. On scattering features the zeroing took over half of the time.
  Steps of many small operations become slower, since all threads then share one heap. `python -m
  benchmarks allocator` measures both effects. The process keeps its peak of memory until it ends or
  calls `give_back`. No number of a run changes. Launchers call this function for
  central training on scattering features. Elsewhere call it before JAX is first used: existing
  threads keep their heaps.

  Returns:
    True if the C library took the settings. False if nothing was changed: glibc 2.35 or newer is
    missing, or the user has chosen an allocator (`chosen_by_user`).

  >>> import dpjax
  >>> dpjax.parallel.allocator.keep_freed_memory()  # doctest: +SKIP
  True
  """
  if chosen_by_user():
    return False
  try:
    libc = ctypes.CDLL(None)
    libc.gnu_get_libc_version  # noqa: B018  (other libraries have a mallopt of other numbers)
    return all(libc.mallopt(option, value) for option, value in _SETTINGS.items())
  except (AttributeError, OSError, TypeError):
    return False


def machine_memory() -> int:
  """Returns the memory of this machine, in bytes.

  >>> machine_memory() > 2**20
  True
  """
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def give_back() -> None:
  """Gives freed memory back to the system at once, for example between two tasks. The settings of
  `keep_freed_memory` stay. Does nothing without glibc.

  >>> give_back()
  """
  try:
    ctypes.CDLL(None).malloc_trim(0)
  except (AttributeError, OSError, TypeError):
    return

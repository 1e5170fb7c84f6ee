"""Memory of this machine, and the C library's allocator, set to keep freed memory."""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt(3), and below their values.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_SETTINGS = {
  # Blocks of up to this many bytes are kept; mallopt takes no larger value. It is set first, since
  # glibc before 2.35 refuses it, and then the others are left alone. Without it they would
  # switch off glibc's own adjustment of this threshold.
  _MMAP_THRESHOLD: 2**31 - 1,
  # Other arenas hold no block above 64 MiB, and would ask the system for each.
  _ARENA_MAX: 1,
  _TRIM_THRESHOLD: -1,  # never
  _TOP_PAD: 2**26,  # bytes asked for ahead
}
# Stored here, since the C library cannot be asked.
_taken = False


def chosen_by_user() -> list[str]:
  """Returns the environment variables by which a user has chosen the allocator's behaviour:
  MALLOC_ variables, GLIBC_TUNABLES (even empty), another allocator (LD_PRELOAD)."""
  named = ("GLIBC_TUNABLES", "LD_PRELOAD")
  return [name for name in os.environ if name in named or name.startswith("MALLOC_")]


def keep_freed_memory() -> bool:
  """Lets this process use freed blocks of up to 2 GiB again instead of giving them back.

  It helps steps on wide examples on a CPU, which free a batch and intermediate arrays above 32 MiB.
  By default glibc gives such blocks back to the system, which zeroes them page by page at the next
  step. On scattering features that took more than half of the time. Steps of many small operations
  become slower, since all threads then share one heap (`python -m launch.benchmark
  --suite=allocator` measures both). The process keeps its peak of memory until it ends or calls
  `give_back`. No number of a run changes. Launchers call it for central training on scattering
  features. Elsewhere call it before JAX is first used: existing threads keep their heaps.

  Returns:
    Whether the C library took the settings; if not, nothing has changed: without glibc 2.35 or
    newer, and where the user has chosen an allocator (`chosen_by_user`).

  >>> import dpjax
  >>> dpjax.parallel.allocator.keep_freed_memory()  # doctest: +SKIP
  True
  """
  global _taken
  if chosen_by_user():
    return False
  try:
    libc = ctypes.CDLL(None)
    libc.gnu_get_libc_version  # noqa: B018  (other libraries have a mallopt of other numbers)
    _taken = all(libc.mallopt(option, value) for option, value in _SETTINGS.items())
  except (AttributeError, OSError, TypeError):
    return False
  return _taken


def keeps_freed_memory() -> bool:
  """Returns whether `keep_freed_memory` took effect here, for a parent that sets it in children.

  >>> keeps_freed_memory()
  False
  """
  return _taken


def machine_memory() -> int:
  """Returns the memory of this machine, in bytes.

  >>> machine_memory() > 2**20
  True
  """
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def give_back() -> None:
  """Gives freed memory back to the system now, as between two tasks. The settings of
  `keep_freed_memory` stay. Does nothing without glibc.

  >>> give_back()
  """
  try:
    ctypes.CDLL(None).malloc_trim(0)
  except (AttributeError, OSError, TypeError):
    return

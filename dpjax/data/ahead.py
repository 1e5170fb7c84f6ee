"""Reading ahead: the next batch is read while training uses the current one."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_END = object()


def ahead(items: Iterator[_T]) -> Generator[_T]:
  """Yields the same items. A thread makes each one while the caller uses the one before.

  The thread is at most one item ahead, so at most two items are in memory beside the caller's.
  What `items` raises is raised here, in its turn. The thread ends with the last item, or when
  this iterator is closed, after the item that is being made.

  >>> list(ahead(iter("abc")))
  ['a', 'b', 'c']
  """
  with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
    coming = thread.submit(next, items, _END)
    while (item := coming.result()) is not _END:
      # The next item is started before this one is handed out.
      coming = thread.submit(next, items, _END)
      yield item  # type: ignore[misc]

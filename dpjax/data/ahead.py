"""Reading ahead: the next batch is read while training uses the current one."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_END = object()


def ahead(items: Iterator[_T]) -> Generator[_T]:
  """Yields the items of `items`. A thread makes the next item while the caller uses this one.

  The thread makes at most one item in advance. The caller may still hold an item when it asks for
  the next one, so at most three items are in memory.
  An error of `items` is raised here, after the items before it. The thread ends after the last
  item. If this iterator is closed earlier, the thread first finishes the item that it is making.

  >>> list(ahead(iter("abc")))
  ['a', 'b', 'c']
  """
  with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
    coming = thread.submit(next, items, _END)
    while (item := coming.result()) is not _END:
      # The next item is started before this item is yielded, so both sides work at the same time.
      coming = thread.submit(next, items, _END)
      yield item  # type: ignore[misc]

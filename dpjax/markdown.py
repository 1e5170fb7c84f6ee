"""Markdown tables for readers."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
  """Returns a Markdown table: the head, a line of dashes, and a line for each row.

  >>> print(table(["x", "y"], [["1", "2"]]), end="")
  | x | y |
  | --- | --- |
  | 1 | 2 |
  """
  names = list(head)
  lines = [names, ["---"] * len(names), *rows]
  return "".join(f"| {' | '.join(line)} |\n" for line in lines)

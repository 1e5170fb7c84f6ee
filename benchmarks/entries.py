"""Entries of a benchmark, NamedTuples, as a CSV file."""

from __future__ import annotations

import csv
import pathlib
import typing
from collections.abc import Sequence
from typing import Any

import jax

from dpjax.experiments.run import report


def write(path: pathlib.Path, entries: Sequence[Any]) -> None:
  """Writes entries (NamedTuples) as CSV, with the platform and JAX's version."""
  where = {"platform": jax.default_backend(), "jax": jax.__version__}
  path.parent.mkdir(parents=True, exist_ok=True)
  report.write_csv(path, [{**entry._asdict(), **where} for entry in entries])


def read(path: pathlib.Path, kind: Any) -> list[Any]:
  """Returns entries from its CSV file; [] if the file does not exist.

  Args:
    path: file that `write` wrote. A missing column counts as empty.
    kind: NamedTuple of an entry. Its annotations are `str`, `int` or `float`; `int` and `float` may
      allow None, which is an empty cell.
  """
  if not path.exists():
    return []
  with path.open(newline="", encoding="utf-8") as lines:
    rows = list(csv.DictReader(lines))
  hints = typing.get_type_hints(kind)

  def value(name: str, text: str) -> Any:
    kinds = typing.get_args(hints[name]) or (hints[name],)
    if str in kinds:
      return text
    return None if text == "" else kinds[0](text)

  return [kind(**{n: value(n, row.get(n) or "") for n in kind._fields}) for row in rows]

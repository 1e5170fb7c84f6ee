"""Tables of games, written row by row: the same command continues where it stopped."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from dpjax import validate
from dpjax.auditing.games import registry
from dpjax.experiments.run import provenance, writers
from dpjax.validate import UserError, Verbatim

Row = dict[str, Any]


def check_asked(only: str, seed: int) -> None:
  """Raises UserError if `only` names no game, or if the seed is out of range.

  >>> check_asked("", -1)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: seed=-1: must be an integer >= 0
  """
  validate.integer_at_least(0, seed=seed)
  if seed >= 2**62:
    raise UserError("must be below 2**62", field="seed", value=Verbatim(hex(seed)[:20]))
  registry.subjects(only)


def stated(settings: Any) -> Row:
  """Returns everything that rows depend on: settings (a dataclass) and versions of libraries."""
  return {"settings": dataclasses.asdict(settings), "versions": provenance.versions()}


def resumed(
  settings: Any,
  file: pathlib.Path,
  *,
  what: str,
  holds: str,
) -> dict[str, Row]:
  """Returns the rows already in a file, by their `what`; an empty dict if there is no file.

  Args:
    settings: settings that the rows must have.
    file: JSON file with the result of `stated`, and `rows`.
    what: content of the file in words, such as "an audit".
    holds: beginning of the error about other settings, such as "an audit with".

  Raises:
    UserError: the file has another content, or other settings or versions.
  """
  if not file.exists():
    return {}
  try:
    stored = json.loads(file.read_text())
    same = stored["settings"] == dataclasses.asdict(settings) and provenance.same_libraries(
      stored["versions"]
    )
    named = {row["what"]: row for row in stored["rows"]}
  # The file is no JSON, or JSON of another layout.
  except (ValueError, KeyError, TypeError):
    raise UserError(
      f"{file.name} there is not that of {what}", field="out", value=file.parent
    ) from None
  if not same:
    raise UserError(
      f"holds {holds} other settings or versions; choose another folder",
      field="out",
      value=file.parent,
    )
  return named


def played(
  todo: Mapping[str, Callable[[], Row]],
  done: Mapping[str, Row],
  *,
  write: Callable[[list[Row]], None],
  label: str,
) -> list[Row]:
  """Plays the games that are missing, and returns all rows.

  Args:
    todo: name -> function that plays the game and returns its row.
    done: name -> row that exists already.
    write: function that stores all rows. It is called after each game, and at the end.
    label: label of the progress bar.
  """
  rows = dict(done)
  with writers.progress(len(todo), len(rows), label) as bar:
    for name, play in todo.items():
      if name in rows:
        continue
      bar.update(0, now=name)
      rows[name] = play()
      write(list(rows.values()))
      bar.update(1)
  write(list(rows.values()))
  return list(rows.values())

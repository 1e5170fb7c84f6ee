"""An append-only file of what a service decided, which survives a kill at any moment.

A line is one JSON object with its number, its time and its kind. It is on the disk before what it
says takes effect: a charge before the noise, a new stage before the first request that it sends
elsewhere. A service that starts again reads the lines and goes on where they end.

Counts of an open window change with every request, so they stand in a file of their own, which is
replaced whole every second. A kill loses the requests of that second from the counts, and no line.
Both files tell what requests contained, so only their owner may read them.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from dpjax import files, validate
from dpjax.experiments.run import writers
from dpjax.validate import UserError

NAME = "journal.jsonl"
COUNTS = "counts.json"


class ServiceJournal:
  """The journal of one service, in a folder of its own.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   with ServiceJournal(folder) as journal:
  ...     journal.write("stage", share=0.1)
  ...   with ServiceJournal(folder) as journal:
  ...     [line["kind"] for line in journal.lines]
  ['stage']

  Args:
    folder: made if it is missing.
    clock: seconds since the epoch.

  Raises:
    UserError: a line other than the last is none of a journal.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
  ):
    self.path = pathlib.Path(folder) / NAME
    self._clock = clock
    files.make_folder(self.path.parent)
    for path in (self.path, self._counts):
      validate.no_pipe(path, str(path))
    content = self.path.read_bytes() if self.path.exists() else b""
    # A kill in the middle of a write leaves a line without its end: it never took effect.
    whole = content[: content.rfind(b"\n") + 1]
    # Lines of earlier starts. Those of this one are not kept: a service may run for years.
    self.lines = [
      self._parsed(line, place) for place, line in enumerate(whole.splitlines())
    ]
    self._next = len(self.lines)
    if whole != content or not self.path.exists():
      files.replace_file(self.path, whole, secret=True)
    self._file = self.path.open("ab", buffering=0)

  @property
  def _counts(self) -> pathlib.Path:
    return self.path.with_name(COUNTS)

  def _parsed(self, line: bytes, place: int) -> dict[str, Any]:
    try:
      entry = json.loads(line)
    except (ValueError, RecursionError):
      entry = None
    if not isinstance(entry, dict) or entry.get("line") != place or "kind" not in entry:
      raise UserError(
        f"{str(self.path)[-120:]}: line {place + 1} is not what a service wrote there; bring it "
        "back, or choose another --workdir"
      )
    return entry

  def write(self, kind: str, **values: Any) -> None:
    """Appends a line. When it returns, the line survives a loss of power."""
    entry = {"line": self._next, "time": round(self._clock(), 3), "kind": kind}
    entry |= writers.plain(values)
    text = json.dumps(entry, allow_nan=False, ensure_ascii=False)
    self._file.write(f"{text}\n".encode())
    os.fsync(self._file.fileno())
    self._next += 1

  def of_kind(self, kind: str) -> list[dict[str, Any]]:
    """Returns the lines of a kind from earlier starts, oldest first."""
    return [line for line in self.lines if line["kind"] == kind]

  def save_counts(self, counts: Mapping[str, Any]) -> None:
    """Replaces the counts of open windows, whole or not at all."""
    writers.write_json(self._counts, counts, secret=True)

  def saved_counts(self) -> dict[str, Any]:
    """Returns the counts that were saved last; {} where there are none."""
    held = writers.read_json(self._counts) if self._counts.exists() else {}
    if not isinstance(held, dict):
      raise UserError(f"{str(self._counts)[-120:]}: is not what a service wrote there")
    return held

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def __enter__(self) -> ServiceJournal:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

"""An append-only file of what a service decided, which survives a kill at any moment.

A line is one JSON object with its number, its time and its kind. It is on the disk before its
content takes effect: a charge before the noise, a new stage before the first request of that
stage. A service that starts again reads the lines and goes on where they end.

Each line ends in a digest of all bytes before it, so a flipped bit or a missing line is seen. The
digest has no key: it protects from accidents, not from somebody who writes the file anew.

Counts of an open window change with every request, so they are in another file, which is replaced
as a whole every second. A kill loses the requests of that second from the counts, and no line.
Both files reveal what requests contained, so only their owner may read them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dpjax import files, validate
from dpjax.experiments.run import writers
from dpjax.validate import UserError

NAME = "journal.jsonl"
COUNTS = "counts.json"
# Increased when a line changes its meaning, so that an older version does not misread it.
FORMAT = 1
KINDS = (
  "start", "reference", "reference_charge", "charge", "window", "spent", "alarm", "candidate",
  "stage", "promote", "roll_back",
)  # fmt: skip
_CHAIN = ', "chain": "'


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
    folder: folder of the journal, made if it is missing.
    clock: returns seconds since the epoch.

  Raises:
    UserError: another process has the journal open; a line is not what a service wrote there, or
      is gone; a newer version wrote it.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
  ):
    self.path = pathlib.Path(folder) / NAME
    self._clock = clock
    self._saving = threading.Lock()
    # Lines of earlier starts. Those of this one are not kept: a service may run for years.
    self.lines: list[dict[str, Any]] = []
    self._hash = hashlib.sha256()
    self._is_chained = False
    with contextlib.ExitStack() as opened:
      files.make_folder(self.path.parent)
      # Two services with one journal would both charge, and both promote.
      opened.enter_context(writers.alone_in(self.path.parent))
      for path in (self.path, self._counts):
        validate.no_pipe(path, str(path))
      content = self.path.read_bytes() if self.path.exists() else b""
      whole = self._without_torn_end(content)
      # Not `splitlines`, which also ends lines at control characters that a flipped bit makes.
      for line in whole.split(b"\n")[:-1]:
        self._read(line)
      if whole != content or not self.path.exists():
        files.replace_file(self.path, whole, secret=True)
      self._size = len(whole)
      self._next = len(self.lines)
      self._file = opened.enter_context(self.path.open("ab", buffering=0))
      self._opened = opened.pop_all()

  @property
  def _counts(self) -> pathlib.Path:
    return self.path.with_name(COUNTS)

  @property
  def num_lines(self) -> int:
    """Number of lines of all starts."""
    return self._next

  def _without_torn_end(self, content: bytes) -> bytes:
    """Returns whole lines: a kill in the middle of a write leaves the start of one."""
    place = content.rfind(b"\n") + 1
    text = content[place:].decode(errors="replace")
    try:
      _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
      # The write was incomplete, so the line never took effect.
      return content[:place]
    # A whole object that lacks only its line feed counts, for it may have taken effect. A kill
    # leaves no bytes behind an object. If there are any, `_read` refuses the line.
    return content[:place] + text.encode() + b"\n" if end else content[:place]

  def _read(self, line: bytes) -> None:
    """Appends a line of the file to `lines`.

    Raises:
      UserError: it is not what a service wrote there, or a newer version wrote it.
    """
    place = len(self.lines)
    at = f"{str(self.path)[-120:]}: line {place + 1}"
    try:
      entry = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
      entry = None
    if not isinstance(entry, dict) or entry.get("line") != place or "kind" not in entry:
      entry = None
    # Earlier versions wrote no digests, so only the first lines may lack them.
    elif "chain" in entry or self._is_chained:
      text, _, _ = line.rpartition(_CHAIN.encode())
      self._is_chained = True
      if line != self._ended(text.decode(errors="replace")).encode():
        entry = None
    if entry is None:
      raise UserError(
        f"{at} is not what a service wrote there; bring it back, or choose another --workdir"
      )
    if entry["kind"] not in KINDS or entry.get("format", FORMAT) != FORMAT:
      raise UserError(
        f"{at} was written by another version of dpjax; serve with that one, or choose another "
        "--workdir"
      )
    self._hash.update(line + b"\n")
    self.lines.append(entry)

  def _ended(self, text: str) -> str:
    """Returns a line from its text without the last brace, ended by the digest of all bytes."""
    digest = self._hash.copy()
    digest.update(text.encode())
    return f'{text}{_CHAIN}{digest.hexdigest()[:32]}"}}'

  def write(self, kind: str, **values: Any) -> None:
    """Appends a line. When it returns, the line survives a loss of power.

    Raises:
      OSError: the disk took no line; the journal is as it was.
    """
    entry = {"line": self._next, "time": round(self._clock(), 3), "kind": kind}
    entry |= writers.plain(values)
    text = json.dumps(entry, allow_nan=False)
    line = f"{self._ended(text[:-1])}\n".encode()
    try:
      written = 0
      # A full disk takes a part of a line, and says nothing before the next write.
      while written < len(line):
        written += self._file.write(line[written:])
      os.fsync(self._file.fileno())
    except OSError:
      # The part would make one broken line with whatever is written next.
      os.ftruncate(self._file.fileno(), self._size)
      raise
    self._hash.update(line)
    self._size += len(line)
    self._next += 1

  def of_kind(self, kind: str) -> list[dict[str, Any]]:
    """Returns the lines of a kind from earlier starts, oldest first."""
    return [line for line in self.lines if line["kind"] == kind]

  def save_counts(self, counts: Mapping[str, Any]) -> None:
    """Replaces the counts of open windows, whole or not at all."""
    content = writers.plain(counts)
    # One at a time: the last save of a service that ends may meet one that is under way.
    with self._saving:
      writers.write_json(self._counts, content | {"sha256": _digest(content)}, secret=True)

  def saved_counts(self) -> dict[str, Any]:
    """Returns the counts that were saved last; {} where there are none.

    Raises:
      UserError: they are not what a service wrote, or the journal has fewer lines than at the save.
    """
    held = writers.read_json(self._counts) if self._counts.exists() else {}
    is_whole = isinstance(held, dict)
    if is_whole and "sha256" in held:
      is_whole = held.pop("sha256") == _digest(held)
    if not is_whole:
      raise UserError(
        f"{str(self._counts)[-120:]}: is not what a service wrote there; without it the counts of "
        "open windows and of the stage begin anew"
      )
    lines = held.get("lines", 0)
    if not isinstance(lines, int) or lines > self._next:
      raise UserError(
        f"{str(self.path)[-120:]}: has {self._next} lines and had {lines}; bring them back, or "
        "choose another --workdir"
      )
    return held

  def close(self) -> None:
    """Closes the file, and lets another service have it."""
    self._opened.close()

  def __enter__(self) -> ServiceJournal:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


def _no_number(name: str) -> Any:
  """Refuses NaN and infinities, which no service writes."""
  raise ValueError(f"{name} is no JSON number")


def _digest(content: Mapping[str, Any]) -> str:
  """Returns the digest of counts, whatever the order of their keys."""
  text = json.dumps(content, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:32]

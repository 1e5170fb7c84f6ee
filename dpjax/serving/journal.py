"""An append-only file of what a service decided, which survives a kill at any moment.

A line is one JSON object with its number, its time and its kind. It is on the disk before its
content takes effect: a charge before the noise, a new stage before the first request of that
stage. A service that starts again reads the lines and goes on where they end.

Each line ends in a digest of all bytes before it, so a flipped bit or a gap between lines is seen.
Lines that are missing at the end are seen by the number of lines that is saved with the counts. The
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
# Version of the lines. It is increased if a line changes its meaning, so that no other version of
# dpjax misreads the line.
FORMAT = 1
KINDS = (
  "start", "reference", "reference_charge", "charge", "window", "spent", "alarm", "candidate",
  "stage", "promote", "roll_back",
)  # fmt: skip
_CHAIN = ', "chain": "'


class ServiceJournal:
  """The journal of one service, in a folder that no other service uses.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   with ServiceJournal(folder) as journal:
  ...     journal.write("stage", share=0.1)
  ...   with ServiceJournal(folder) as journal:
  ...     [line["kind"] for line in journal.lines]
  ['stage']

  Args:
    folder: folder of the journal, made if it is missing.
    clock: function that returns seconds since the epoch.

  Raises:
    UserError: the folder can be neither used nor made; another process has the journal open; a
      line is not what a service wrote there, or is missing; another version of dpjax wrote the
      journal.
  """

  def __init__(
    self, folder: str | os.PathLike[str], *, clock: Callable[[], float] = time.time
  ):
    validate.folder(workdir=folder)
    self.path = pathlib.Path(folder) / NAME
    self._clock = clock
    self._saving = threading.Lock()
    # Lines of earlier starts. Lines of this start are not kept here: a service may run for years.
    self.lines: list[dict[str, Any]] = []
    self._hash = hashlib.sha256()
    with contextlib.ExitStack() as opened:
      files.make_folder(self.path.parent)
      # Two services with one journal would both spend its epsilon, and both move its release.
      opened.enter_context(writers.alone_in(self.path.parent))
      for path in (self.path, self._counts):
        validate.no_pipe(path, str(path))
      content = self.path.read_bytes() if self.path.exists() else b""
      whole = self._without_torn_end(content)
      # `splitlines` would also end a line at a carriage return, which a flipped bit may make.
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
    """Number of lines in the journal, with those of this start."""
    return self._next

  def _without_torn_end(self, content: bytes) -> bytes:
    """Returns the content without an incomplete last line, which a kill during a write leaves."""
    place = content.rfind(b"\n") + 1
    text = content[place:].decode(errors="replace")
    try:
      _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
      # The write was incomplete, so the line never took effect.
      return content[:place]
    # A whole object that lacks only its line feed is kept, since it may have taken effect. A kill
    # leaves no bytes after the object, so `_read` refuses a line with such bytes.
    return content[:place] + text.encode() + b"\n" if end else content[:place]

  def _read(self, line: bytes) -> None:
    """Appends a line of the file to `lines`.

    Raises:
      UserError: the line is not what a service wrote there, or another version wrote it.
    """
    place = len(self.lines)
    at = f"line {place + 1}"
    entry: Any = None
    with contextlib.suppress(ValueError, RecursionError):
      entry = json.loads(line, parse_constant=_no_number)
    text = line.rpartition(_CHAIN.encode())[0].decode(errors="replace")
    is_whole = isinstance(entry, dict) and entry.get("line") == place and "kind" in entry
    if not is_whole or line != self._whole_line(text).encode():
      raise UserError(
        f"{at} is not what a service wrote there; bring it back, or choose another --workdir",
        field=str(self.path)[-120:],
      )
    if entry["kind"] not in KINDS or entry.get("format", FORMAT) != FORMAT:
      raise UserError(
        f"{at} was written by another version of dpjax; serve with that one, or choose another "
        "--workdir",
        field=str(self.path)[-120:],
      )
    self._hash.update(line + b"\n")
    self.lines.append(entry)

  def _whole_line(self, text: str) -> str:
    """Returns a whole line. It consists of `text` (a JSON object without its last brace), of the
    digest of all bytes so far, and of the brace."""
    digest = self._hash.copy()
    digest.update(text.encode())
    return f'{text}{_CHAIN}{digest.hexdigest()[:32]}"}}'

  def write(self, kind: str, **values: Any) -> None:
    """Appends a line, which survives a loss of power once this function has returned.

    Raises:
      OSError: the disk did not take the line. The journal is unchanged.
    """
    entry = {"line": self._next, "time": round(self._clock(), 3), "kind": kind}
    entry |= writers.plain(values)
    text = json.dumps(entry, allow_nan=False)
    line = f"{self._whole_line(text[:-1])}\n".encode()
    try:
      written = 0
      # A full disk may take only a part of a line, and raises an error only at the next write.
      while written < len(line):
        written += self._file.write(line[written:])
      os.fsync(self._file.fileno())
    except OSError:
      # The written part of the line is removed: with the next line it would make one broken line.
      os.ftruncate(self._file.fileno(), self._size)
      raise
    self._hash.update(line)
    self._size += len(line)
    self._next += 1

  def of_kind(self, kind: str) -> list[dict[str, Any]]:
    """Returns the lines of a kind from earlier starts, oldest first."""
    return [line for line in self.lines if line["kind"] == kind]

  def save_counts(self, counts: Mapping[str, Any]) -> None:
    """Writes counts to their file in place of the earlier counts, completely or not at all."""
    # Only one save runs at a time: the last save of a service may begin while another runs.
    with self._saving:
      writers.write_digested(self._counts, counts)

  def saved_counts(self) -> dict[str, Any]:
    """Returns the counts that were saved last; {} if there are none.

    Raises:
      UserError: the counts are not what a service wrote, or the journal has fewer lines than when
        they were saved.
    """
    held = writers.read_digested(self._counts) if self._counts.exists() else {}
    lines = held.get("lines", 0)
    if not isinstance(lines, int) or lines > self._next:
      raise UserError(
        f"has {self._next} lines and had {lines}; bring them back, or "
        "choose another --workdir",
        field=str(self.path)[-120:],
      )
    return held

  def close(self) -> None:
    """Closes the journal, so that another service can open it."""
    self._opened.close()

  def __enter__(self) -> ServiceJournal:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


def _no_number(name: str) -> Any:
  """Raises ValueError for NaN and infinities, which no service writes."""
  raise ValueError(f"{name} is no JSON number")

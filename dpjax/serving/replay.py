"""Replay of the journal of earlier starts: epsilon spent, windows closed, release, reference."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpjax.serving import drift
from dpjax.serving.drift import Bins
from dpjax.serving.journal import ServiceJournal
from dpjax.serving.predictor import Predictor, digest_of
from dpjax.serving.windows import Reference
from dpjax.validate import UserError


def spent_on_windows(journal: ServiceJournal) -> float:
  """Returns the epsilon of all windows that were accounted."""
  charges = journal.of_kind("charge")
  # The last line holds the sum of all charges.
  return charges[-1]["spent"] if charges else 0.0


def released_exactly(journal: ServiceJournal) -> bool:
  """Returns whether a window was released without noise, so that no epsilon holds for its rows."""
  # The first window is the reference, whose line comes before that of the window.
  lines = journal.of_kind("window") + journal.of_kind("reference")
  return any(line["scale"] == 0 for line in lines)


def spent_on_references(journal: ServiceJournal) -> dict[str, float]:
  """Returns {digest of a run: epsilon that reference counts of its training rows have cost}.

  It is infinite for a run whose rows were counted without noise. What was spent stays spent,
  whatever the reference is now.
  """
  spent = collections.defaultdict[str, float](float)
  for line in journal.of_kind("reference_charge"):
    # Each line holds the sum of the run's charges so far.
    total = math.inf if line["spent"] is None else line["spent"]
    spent[line["run"]] = max(spent[line["run"]], total)
  return spent


def next_window(journal: ServiceJournal, of: str) -> int:
  """Returns the number of the window that is open at the end of the journal.

  Args:
    of: kind of the window, "drift" or "feedback".
  """
  # A window that was accounted is closed, even if a kill came before its release.
  lines = journal.of_kind("window") + journal.of_kind("charge")
  return 1 + max((line["number"] for line in lines if line["of"] == of), default=-1)


def own_lines(journal: ServiceJournal, digests: Sequence[str]) -> list[dict[str, Any]]:
  """Returns the lines of the last starts that all had these runs. A start with other runs ends
  their release."""
  first = 0
  is_other = False
  for place, line in enumerate(journal.lines):
    if line["kind"] == "start":
      is_other = set(line["runs"]) != set(digests)
    if is_other:
      first = place + 1
  return journal.lines[first:]


def last_of(lines: Sequence[dict[str, Any]], *kinds: str) -> dict[str, Any] | None:
  """Returns the last line of these kinds; None if there is none."""
  return next((line for line in reversed(lines) if line["kind"] in kinds), None)


def is_under_way(line: Mapping[str, Any] | None) -> bool:
  """Returns whether a release is under way after its last line."""
  return line is not None and line["kind"] in ("candidate", "stage")


def current(
  saved: Mapping[str, Any], line: Mapping[str, Any] | None, answering: str
) -> dict[str, Any]:
  """Returns the saved counts that belong to the state in which the journal ends; None for others.

  Args:
    saved: counts that were saved last.
    line: last line about a release.
    answering: digest of the run that answers.
  """
  # What was saved before this line is of another stage, even if one run is released twice.
  begun = -1 if line is None else line["line"]
  same_model = saved.get("run", answering) == answering
  same_stage = same_model and saved.get("lines", 0) > begun
  same_stage &= ("release" in saved) == is_under_way(line)
  return {
    "drift": saved.get("drift") if same_model else None,
    "feedback": saved.get("feedback") if same_stage else None,
    "release": saved.get("release") if same_stage else None,
  }


def model_of(
  line: Mapping[str, Any],
  which: str,
  known: Mapping[str, Predictor],
  load: Callable[[str], Predictor],
) -> Predictor:
  """Returns a model that a line of the journal names.

  Args:
    line: line about a release.
    which: name of the model in the line, "old" or "new".
    known: {digest: model} of the models that are loaded.
    load: function that loads a run from its folder.

  Raises:
    UserError: the folder of the model holds another run now.
  """
  digest = line[which]
  if digest in known:
    return known[digest]
  folder = line[f"{which}_folder"]
  run = load(folder)
  if digest_of(run) != digest:
    raise UserError(
      "is not the run that the journal released from there; bring it back, "
      "or choose another --workdir",
      field=repr(folder[-100:]),
    )
  return run


def reference_from_stream(
  lines: Sequence[dict[str, Any]], run: Predictor, bins: Sequence[Bins]
) -> Reference | None:
  """Returns a run's newest reference; None if there is none, if it is not from the stream, or if it
  has other bins."""
  digest = digest_of(run)
  line = last_of([line for line in lines if line.get("run") == digest], "reference")
  if line is None or line["source"] != "stream" or not drift.fits(line["counts"], bins):
    return None
  return Reference(line["counts"], line["source"], line["scale"])

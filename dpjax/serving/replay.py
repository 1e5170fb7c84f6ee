"""Replay of the journal of earlier starts: epsilon spent, windows closed, release, reference."""

from __future__ import annotations

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


def next_window(journal: ServiceJournal, of: str) -> int:
  """Returns the number of the window that is open at the end of the journal.

  Args:
    of: kind of the window, "drift" or "feedback".
  """
  # A window that was accounted is closed, even if a kill came before its release.
  lines = journal.of_kind("window") + journal.of_kind("charge")
  return 1 + max((line["number"] for line in lines if line["of"] == of), default=-1)


def is_resumed(journal: ServiceJournal, digests: Sequence[str]) -> bool:
  """Returns whether the last start had the same runs. If so, its release goes on."""
  starts = journal.of_kind("start")
  return bool(starts) and set(starts[-1]["runs"]) == set(digests)


def last_release(journal: ServiceJournal, digests: Sequence[str]) -> dict[str, Any] | None:
  """Returns the last line about a release of these runs; None if there is no release. The line says
  the state of the release."""
  kinds = ("candidate", "stage", "promote", "roll_back")
  state = None
  for line in journal.lines:
    # A start with other runs ends the release.
    if line["kind"] == "start" and set(line["runs"]) != set(digests):
      state = None
    if line["kind"] in kinds:
      state = line
  return state


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
      f"{folder[-100:]!r}: is not the run that the journal released from there; bring it back, "
      "or choose another --workdir"
    )
  return run


def reference_from_stream(
  journal: ServiceJournal, run: Predictor, bins: Sequence[Bins]
) -> Reference | None:
  """Returns a run's newest reference; None if there is none, if it is not from the stream, or if it
  has other bins."""
  digest = digest_of(run)
  lines = [line for line in journal.of_kind("reference") if line["run"] == digest]
  if not lines or lines[-1]["source"] != "stream":
    return None
  line = lines[-1]
  if not drift.fits(line["counts"], bins):
    return None
  return Reference(line["counts"], line["source"], line["scale"])

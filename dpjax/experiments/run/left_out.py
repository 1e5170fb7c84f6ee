"""Counts what a run could not use, and refuses a run that could use nothing.

An example whose gradient is NaN or infinite counts as 0, and so does a client whose message is. The
guarantee needs this. But a run that leaves out everything returns its first parameters, or noise,
and would look like any other run.

All counts depend on raw data, so they are NOT private. A kind of run gives `Phase.arrivals` only if
its diagnostics are on, and it is no release. Otherwise nothing is counted, written or printed, and
the exit code does not depend on the counts either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpjax.experiments.run import writers
from dpjax.parallel.exchanges import is_first
from dpjax.training.dp_sgd import StepInfo
from dpjax.validate import UserError


class Arrivals(NamedTuple):
  """Counts of one step, or their sums over a run."""

  used: int
  left_out: int
  coordinates_cut: int = 0  # of messages, by a secure sum
  rounds_refused: int = 0


def of_step(info: StepInfo) -> Arrivals:
  """Returns how many examples of a step of `dp_sgd` were used, and how many were left out."""
  left_out = int(info.left_out)
  return Arrivals(int(info.batch_size) - left_out, left_out)


def of_rows(*arrays: Any) -> Arrivals:
  """Returns how many rows of arrays [n, ...] are finite in all of them, and how many are not.

  >>> of_rows(np.array([[1.0], [np.nan]]), np.zeros(2))
  Arrivals(used=1, left_out=1, coordinates_cut=0, rounds_refused=0)
  """
  sound = np.ones(len(arrays[0]), bool)
  for array in arrays:
    finite = np.isfinite(np.asarray(array))
    sound &= finite.all(axis=tuple(range(1, finite.ndim)))
  return Arrivals(int(sound.sum()), int((~sound).sum()))


def clipped_cells(dataset: Any, *, shown: bool) -> dict[str, Any]:
  """Returns the part of result.json on the cells of a table that are not as declared; {} for other
  data.

  Args:
    dataset: training data of the run.
    shown: whether the run may show what depends on raw data.

  >>> import types
  >>> table = types.SimpleNamespace(clipped_cells={"age": 2, "sex": 0})
  >>> clipped_cells(table, shown=True)
  {'not_private/clipped_cells': {'age': 2, 'sex': 0}}
  >>> clipped_cells(table, shown=False)
  {}
  """
  counts = getattr(dataset, "clipped_cells", None)
  return {"not_private/clipped_cells": dict(counts)} if counts and shown else {}


class Tally:
  """The sums of the counts of all steps of a phase.

  Args:
    read: function from the info of a step to its counts; None: nothing is counted, and all methods
      do nothing.
    unit: what is counted, such as "examples".

  >>> tally = Tally(lambda used: Arrivals(used, 4 - used), "examples")
  >>> for step, used in ((1, 3), (2, 2)):
  ...   tally.add(step, used)
  >>> tally.facts()
  {'not_private/left_out': 3}
  """

  def __init__(self, read: Callable[[Any], Arrivals] | None, unit: str):
    self.unit = unit
    self._read = read
    self._total = Arrivals(0, 0)
    # Infos may still be on their way from the device. Reading each would make every step wait.
    self._pending: list[tuple[int, Any]] = []
    self._warned: set[str] = set()

  def add(self, step: int, info: Any) -> None:
    if self._read is not None:
      self._pending.append((step, info))

  def settle(self) -> Arrivals:
    """Returns the sums of all steps so far. Warns once of each kind of loss."""
    for step, info in self._pending:
      counts = self._read(info)  # pyright: ignore[reportOptionalCall]
      self._total = Arrivals(*map(sum, zip(self._total, counts)))
      # A refused round has its own warning.
      if counts.left_out and not counts.used and not counts.rounds_refused:
        self._warn(
          "all",
          f"step {step}: all {counts.left_out} {self.unit} were left out, since what they gave "
          "is NaN, infinite or empty; later steps are not reported one by one",
        )
      if counts.coordinates_cut:
        self._warn(
          "cut",
          f"step {step}: {counts.coordinates_cut} coordinates of messages were cut to "
          "+-secure_sum.largest_value, so the sum is not that of the messages; later steps are "
          "not reported one by one",
        )
    self._pending.clear()
    return self._total

  def _warn(self, kind: str, message: str) -> None:
    if kind not in self._warned and is_first():
      writers.warn(message)
    self._warned.add(kind)

  def to_meta(self) -> dict[str, int]:
    """Returns the sums as JSON data, for a checkpoint."""
    return self.settle()._asdict()

  def resume(self, meta: dict[str, int]) -> None:
    """Goes on from the sums that `to_meta` returned."""
    self._total = Arrivals(**meta)

  def facts(self) -> dict[str, Any]:
    """Returns the part of result.json on what was left out."""
    if self._read is None:
      return {}
    counts = self.settle()._asdict()
    counts.pop("used")
    return {
      f"not_private/{name}": count
      for name, count in counts.items()
      if count or name == "left_out"
    }

  def check(self, num_steps: int) -> None:
    """Raises UserError if no step could use anything."""
    total = self.settle()
    if self._read is not None and num_steps and not total.used:
      raise UserError(
        f"none of the {total.left_out} {self.unit} of {num_steps} steps could be used, so "
        "nothing was learned; no result is written, rows and checkpoints stay"
      )

"""Scores of an attack, separated by the truth."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dpjax.types import HostArray
from dpjax.validate import UserError


class Scores(NamedTuple):
  """Scores of an attack. A larger score means that a record was more likely in."""

  inside: np.ndarray  # [n] scores where the record was in
  outside: np.ndarray  # [m] scores where it was not


class CanaryScores(Scores):
  """Scores of the canaries of ONE run, where each score's canary is known.

  A score's place in `inside` or `outside` reveals the coin, so equal scores must not be ordered by
  place. When they were, `one_run` refuted epsilon 0 in 11 % of runs with 16 canaries of equal
  scores. The number of a canary reveals nothing.
  """

  numbers: np.ndarray  # [n + m] canary of each score, scores inside first

  @classmethod
  def separate(cls, scores: HostArray, included: np.ndarray) -> CanaryScores:
    """Separates the scores of all canaries [n + m] by their coins [n + m] bool.

    NaN, from a run that diverged, counts as 0. Raises UserError for another number of scores, or
    coins that all fell on one side.

    >>> scores = CanaryScores.separate([3.0, 1.0, 2.0], np.array([True, False, True]))
    >>> scores, scores.numbers
    (CanaryScores(inside=array([3., 2.]), outside=array([1.])), array([0, 2, 1]))
    """
    values = np.nan_to_num(
      np.asarray(scores, np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf
    )
    if values.shape != included.shape:
      raise UserError(f"must be one for each of {included.size} canaries", field="scores")
    if included.all() or not included.any():
      raise UserError("all of them are on one side; use more of them", field="canaries")
    parted = cls(values[included], values[~included])
    parted.numbers = np.concatenate([np.flatnonzero(included), np.flatnonzero(~included)])
    return parted

  def _replace(self, **changes: Any) -> CanaryScores:
    scores = super()._replace(**changes)
    scores.numbers = self.numbers
    return scores

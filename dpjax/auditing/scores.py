"""Scores of an attack, separated by the truth."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


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
  def parted(cls, values: np.ndarray, included: np.ndarray) -> CanaryScores:
    """Separates the values of all canaries [n + m] by their coins [n + m] bool.

    >>> CanaryScores.parted(np.array([3.0, 1.0, 2.0]), np.array([True, False, True])).numbers
    array([0, 2, 1])
    """
    scores = cls(values[included], values[~included])
    scores.numbers = np.concatenate([np.flatnonzero(included), np.flatnonzero(~included)])
    return scores

  def _replace(self, **changes: Any) -> CanaryScores:
    scores = super()._replace(**changes)
    scores.numbers = self.numbers
    return scores

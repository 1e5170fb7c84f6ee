"""Bootstrap intervals of numbers that are computed from scores. They are no guarantee.

Only the functions of `lower_bounds` can refute a claim. An interval here says how much an estimate,
such as an AUC, would vary if all scores were drawn anew. It holds in the limit of many scores.
Results label intervals with `MEANING`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from dpjax import validate
from dpjax.auditing.lower_bounds import Scores, epsilon_from_mu
from dpjax.validate import UserError

MEANING = "bootstrap, not a guarantee"


class Interval(NamedTuple):
  """An estimate, with a low and a high percentile of its bootstrap draws."""

  low: float
  estimate: float
  high: float

  def to_json(self) -> dict[str, Any]:
    """Returns the fields, and a note that the interval is no guarantee."""
    return {**self._asdict(), "meaning": MEANING}


def auc(scores: Scores) -> float:
  """Returns P(a score inside is above one outside), where ties count half.

  >>> auc(Scores(np.array([3.0, 2.0]), np.array([2.0, 1.0])))
  0.875
  """
  n = len(scores.inside)
  m = len(scores.outside)
  ranks = stats.rankdata(np.concatenate([scores.inside, scores.outside]))
  return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


def estimated_epsilon(scores: Scores, *, delta: float) -> float:
  """Returns the epsilon at `delta` of the Gaussian pair that fits the scores: NOT a bound.

  The mu of the pair is Phi^-1(1 - FPR) - Phi^-1(FNR), at the median of all scores as threshold.

  >>> noise = np.random.default_rng(0).standard_normal((2, 5000))
  >>> 4.0 < estimated_epsilon(Scores(1.0 + noise[0], noise[1]), delta=1e-5) < 4.8  # 4.38
  True
  """
  middle = np.median(np.concatenate([scores.inside, scores.outside]))
  missed = np.mean(scores.inside <= middle), np.mean(scores.outside > middle)
  sizes = len(scores.inside), len(scores.outside)
  # Rates of 0 and 1 would give an infinite mu, so they are moved by half a count.
  rates = [np.clip(r, 0.5 / n, 1 - 0.5 / n) for r, n in zip(missed, sizes)]
  return epsilon_from_mu(-float(sum(stats.norm.ppf(rates))), delta)


def bootstrap_interval(
  statistic: Callable[[Scores], float],
  scores: Scores,
  *,
  seed: int,
  confidence: float = 0.95,
  num_draws: int = 1000,
) -> Interval:
  """Returns the percentile interval of a statistic (Efron 1979): "bootstrap, not a guarantee".

  Scores inside and scores outside are drawn again, each with replacement. The interval is right if
  the scores are independent and many, as those of many trainings are (`final_model_scores`). For
  canaries of ONE run the interval leaves out the run's common noise, and so is too narrow. Do not
  use it for maxima or for bounds, which depend on few scores.

  Args:
    statistic: `Scores -> number`, such as `auc`.
    num_draws: number of bootstrap draws, at least 100.

  Raises UserError for fewer than 10 scores inside or outside.

  >>> noise = np.random.default_rng(0).standard_normal((2, 400))
  >>> interval = bootstrap_interval(auc, Scores(1 + noise[0], noise[1]), seed=0, num_draws=200)
  >>> interval.low < interval.estimate < interval.high, round(interval.high - interval.low, 2)
  (True, 0.06)
  """
  validate.open_unit(confidence=confidence)
  validate.integer_at_least(100, num_draws=num_draws)
  validate.integer_at_least(0, seed=seed)
  parts = [np.asarray(part, np.float64) for part in scores]
  if min(part.size for part in parts) < 10:
    raise UserError(
      "must be at least 10 inside and 10 outside, to be drawn again", field="scores"
    )
  rng = np.random.default_rng([seed, 0xB007])
  drawn = [
    statistic(Scores(*(part[rng.integers(part.size, size=part.size)] for part in parts)))
    for _ in range(num_draws)
  ]
  tail = (1 - confidence) / 2
  low, high = np.quantile(drawn, [tail, 1 - tail])
  return Interval(float(low), float(statistic(Scores(*parts))), float(high))

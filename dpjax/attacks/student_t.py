"""BaVarIA: LiRA with variances that work with few shadow models (Brännvall 2026).

`lira` uses a variance for each record, which a few shadows estimate badly. Or it uses one variance
for all records, which is wrong for most of them. A conjugate prior is between the two. It counts
the pooled variance of all records as some number of shadows. The record's own shadows are added to
them.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpjax import validate
from dpjax.attacks.membership import Evidence


def bavaria(
  evidence: Evidence, *, offline: bool = False, prior_weight: float = 8.0
) -> np.ndarray:
  """Returns log p(t | in) - log p(t | out) [n] under Student-t predictive distributions.

  t is the target's log odds of a record. Over models, log odds of a record are N(m, v). The prior
  of m is flat. The prior of v is inverse gamma, with the pooled variance of its side (in or out),
  worth `prior_weight` shadows. Let k shadows have mean c and sum S of squared deviations. Then a
  further model's log odds T follow Student's t distribution around c. It has
  d = prior_weight + k - 1 degrees of freedom, and the squared scale
  (prior_weight * pooled + S) / d * (1 + 1 / k). Source: arXiv 2603.11799, "BaVarIA-t"; the default
  weight is dpjax's. Offline, the score is the logit of P(T <= t | out), which grows with t.

  Args:
    offline: whether to use only shadows that did not hold a record.
    prior_weight: number of shadows that the prior counts as. A large number gives nearly one
      variance for all records; 0 gives each record its own variance.

  Raises UserError as `lira` does with a fixed variance, or without one if prior_weight is 0.

  >>> shadows = np.array([[1.0, 9.0], [2.0, 7.0], [8.0, 1.0], [9.0, 3.0]])
  >>> held = np.array([[False, True]] * 2 + [[True, False]] * 2)
  >>> bavaria(Evidence([9.0, 2.0], shadows, held)).round(1)  # record 0 was in, 1 was out
  array([ 7.5, -5.5])
  """
  validate.non_negative(prior_weight=prior_weight)
  least = 1 if prior_weight else 2
  center, scale, freedom = _predictive(evidence.side(False, least, "bavaria"), prior_weight)
  z = (evidence.target - center) / scale
  if offline:
    # The logit keeps digits in both tails, where P itself rounds to 0 or 1.
    below = special.stdtr(freedom, -np.abs(z))
    return np.sign(z) * (np.log1p(-below) - np.log(np.maximum(below, np.finfo(float).tiny)))
  outside = _log_density(z, freedom) - np.log(scale)
  center, scale, freedom = _predictive(evidence.side(True, least, "bavaria"), prior_weight)
  return _log_density((evidence.target - center) / scale, freedom) - np.log(scale) - outside


# Number that is added to every scale, so that none is 0, as in `lira`.
_FLOOR = 1e-30


def _predictive(
  side: np.ndarray, weight: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (center, scale, degrees of freedom), each [n], of scores [S, n]; NaN is left out."""
  count = np.sum(~np.isnan(side), axis=0)
  center = np.nanmean(side, axis=0)
  squares = np.nansum((side - center) ** 2, axis=0)
  # If every record has only one score, there is no variance to pool, and the divisor would be 0.
  pooled = squares.sum() / max(np.sum(count - 1), 1)
  freedom = weight + count - 1.0
  variance = (weight * pooled + squares) / freedom * (1 + 1 / count)
  return center, np.sqrt(variance) + _FLOOR, freedom


def _log_density(z: np.ndarray, freedom: np.ndarray) -> np.ndarray:
  """Returns the log density of Student's t distribution at z, for `freedom` degrees of freedom."""
  constant = special.gammaln((freedom + 1) / 2) - special.gammaln(freedom / 2)
  spread = 0.5 * np.log(freedom * math.pi)
  # The square may overflow. Beyond 1e100, log(z^2 / freedom) replaces log1p: they are equal there.
  far = np.abs(z) > 1e100
  square = np.log1p(np.where(far, 0.0, z) ** 2 / freedom)
  square = np.where(
    far, 2 * np.log(np.where(far, np.abs(z), 1.0)) - np.log(freedom), square
  )
  return constant - spread - (freedom + 1) / 2 * square

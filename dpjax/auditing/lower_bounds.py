"""Lower bounds on epsilon from the scores of records that were in and records that were out.

An audit REFUTES: with probability `confidence`, the true epsilon is at least the bound. A
bound below the claim proves nothing; no audit can show that something is private.

| bound             | valid for                                 | what one score is               |
| ----------------- | ----------------------------------------- | ------------------------------- |
| `clopper_pearson` | every (epsilon, delta)-DP mechanism       | one independent run             |
| `gdp_lower_bound` | mechanisms that are Gaussian-DP           | one independent run             |
| `one_run`         | every (epsilon, delta)-DP mechanism       | one canary, all in the same run |
| `one_run_fdp`     | mechanisms that are Gaussian-DP           | one canary, all in the same run |

The canaries of one run are not independent of each other, so the first two are only
indicative for them. No threshold is picked by its result: the thresholds lie at ranks
that are fixed by the number of scores alone, and the significance is divided by their
number (Bonferroni). A false positive rate above the j-th largest of n held-out scores is
Beta(j, n - j + 1) exactly, so the bounds need no large-sample argument.

Sources: Clopper, Pearson 1934; Jagielski, Ullman, Oprea 2020; Dong, Roth, Su 2022
(Gaussian DP, Eq. 6 and Corollary 2.13); Nasr et al. 2023; Steinke, Nasr, Jagielski 2023
(one run, Theorem 5.2); Mahloujifar, Melis, Chaudhuri 2024 (f-DP in one run, Algorithm 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy import special, stats

from dpjax import validate
from dpjax.types import HostArray
from dpjax.validate import UserError

_LARGEST = 200.0  # neither an epsilon nor a mu above this is looked for
# Thresholds lie at equal steps of the normal quantile of a held-out score. For a ratio of
# rates the extremes matter; for a mu, only where neither rate is small.
_EXTREMES = 9  # from the largest score to the smallest
_MIDDLE = special.ndtr(np.linspace(-1.5, 1.5, 5))
_GUESSES = 6  # numbers of guesses of a one-run audit
_TIES_SEED = 2305_08846  # equal scores are put in an order that knows nothing of the truth


class Scores(NamedTuple):
  """What an attack computed: larger means more likely to have been in."""

  inside: np.ndarray  # [n] scores where the record was in
  outside: np.ndarray  # [m] scores where it was not


def _one(values: Any, name: str) -> np.ndarray:
  array = np.asarray(values, np.float64)
  if array.ndim != 1 or array.size == 0 or np.isnan(array).any():
    raise UserError(f"scores.{name}: must be numbers [n], n >= 1, none of them NaN")
  return array


def _checked(scores: Scores, delta: float, confidence: float) -> Scores:
  """The scores' places among all of them, ties parted by coins that know no truth.

  Parting ties turns a threshold inside a tie into a randomised test, which is as valid, and
  for discrete outputs the best there is.
  """
  validate.open_unit(confidence=confidence)
  if delta != 0:
    validate.open_unit(delta=delta)
  parts = _one(scores.inside, "inside"), _one(scores.outside, "outside")
  values = np.concatenate(parts)
  coins = np.random.default_rng(_TIES_SEED).random(values.size)
  places = np.empty(values.size)
  places[np.lexsort((coins, values))] = np.arange(values.size)
  return Scores(places[: parts[0].size], places[parts[0].size :])


def rate_at_most(count: HostArray, n: int, significance: float) -> np.ndarray:
  """Clopper-Pearson: a rate of which `count` in n were seen is above this with probability
  at most `significance`.

  >>> round(float(rate_at_most(0, 10, 0.025)), 4)  # 1 - 0.025^(1/10)
  0.3085
  """
  count = np.asarray(count)
  bound = stats.beta.ppf(1 - significance, count + 1, np.maximum(n - count, 1))
  return np.where(count < n, bound, 1.0)


def _at(quantiles: np.ndarray, n: int) -> np.ndarray:
  return np.unique(np.clip(np.round(quantiles * (n + 1)).astype(int), 1, n))


def _extreme_ranks(n: int) -> np.ndarray:
  end = special.ndtri(1 / (n + 1))
  return _at(special.ndtr(np.linspace(end, -end, _EXTREMES)), n)


class _Rates(NamedTuple):
  """Upper bounds of the error rates at each threshold, all true with `confidence`."""

  false_positive: np.ndarray
  false_negative: np.ndarray


def _rates(scores: Scores, confidence: float, ranks: np.ndarray) -> _Rates:
  """At the ranks' thresholds: the rank-th largest of the scores outside."""
  n, m = len(scores.inside), len(scores.outside)
  significance = (1 - confidence) / (2 * len(ranks))
  thresholds = np.sort(scores.outside)[m - ranks]
  missed = np.searchsorted(np.sort(scores.inside), thresholds, side="right")
  return _Rates(
    rate_at_most(ranks - 1, m, significance), rate_at_most(missed, n, significance)
  )


def clopper_pearson(scores: Scores, *, delta: float, confidence: float = 0.95) -> float:
  """Lower bound on epsilon at `delta` from exact bounds on the error rates.

  (epsilon, delta)-DP implies TPR <= e^epsilon FPR + delta, and TNR <= e^epsilon FNR + delta.
  Valid for any mechanism, when the scores are those of independent runs.

  Raises:
    UserError: no scores, NaN, a confidence outside (0, 1).

  >>> scores = Scores(inside=np.ones(1000), outside=np.zeros(1000))  # told apart each time
  >>> round(clopper_pearson(scores, delta=0.0), 2)
  5.13
  """
  scores = _checked(scores, delta, confidence)
  rates = _rates(scores, confidence, _extreme_ranks(len(scores.outside)))
  one = _log_ratio(1 - rates.false_negative - delta, rates.false_positive)
  other = _log_ratio(1 - rates.false_positive - delta, rates.false_negative)
  return max(0.0, one, other)


def _log_ratio(numerator: np.ndarray, denominator: np.ndarray) -> float:
  positive = numerator > 0
  if not positive.any():
    return -math.inf
  return float(np.max(np.log(numerator[positive] / denominator[positive])))


def gdp_lower_bound(scores: Scores, *, delta: float, confidence: float = 0.95) -> float:
  """Lower bound on epsilon at `delta`, for a mechanism KNOWN to be Gaussian-DP.

  mu = Phi^-1(1 - FPR) - Phi^-1(FNR), at the upper bounds of both rates. It is negative
  where the scores tell nothing, and then there is no bound: taking |mu| there, as
  jax-privacy 2.0.0 does, turns the LACK of evidence into an epsilon of 4.

  Valid only if the mechanism is mu-Gaussian-DP for some mu, as a Gaussian mechanism
  without sampling is, and the scores are those of independent runs.

  >>> scores = Scores(inside=np.arange(1000) + 0.5, outside=np.arange(1000.0))  # alike
  >>> gdp_lower_bound(scores, delta=1e-5)
  0.0
  """
  scores = _checked(scores, delta, confidence)
  rates = _rates(scores, confidence, _at(_MIDDLE, len(scores.outside)))
  useful = (rates.false_positive < 1) & (rates.false_negative < 1)
  if not useful.any():
    return 0.0
  mus = -special.ndtri(rates.false_positive) - special.ndtri(rates.false_negative)
  return epsilon_from_mu(float(np.max(mus[useful])), delta)


def delta_from_mu(mu: float, epsilon: float) -> float:
  """The delta of a mu-Gaussian-DP mechanism at `epsilon` (Dong et al., Corollary 2.13).

  >>> round(delta_from_mu(1.0, 0.0), 4)  # 2 Phi(1/2) - 1
  0.3829
  """
  if mu <= 0:
    return 0.0
  ratio = epsilon / mu
  above = special.log_ndtr(mu / 2 - ratio)
  below = epsilon + special.log_ndtr(-mu / 2 - ratio)
  return float(np.exp(above) * -np.expm1(min(below - above, 0.0)))


def epsilon_from_mu(mu: float, delta: float) -> float:
  """The epsilon of a mu-Gaussian-DP mechanism at `delta`; 0 for mu <= 0. Rounds down.

  >>> round(epsilon_from_mu(1 / 2.5747, 1e-3), 3)  # analytic Gaussian, Balle and Wang 2018
  1.0
  """
  validate.open_unit(delta=delta)
  return _largest(lambda epsilon: delta_from_mu(mu, epsilon) > delta)


def mu_from_epsilon(epsilon: float, delta: float) -> float:
  """The largest mu whose Gaussian-DP mechanism is (epsilon, delta)-DP.

  >>> round(1 / mu_from_epsilon(1.0, 1e-3), 4)
  2.5747
  """
  validate.non_negative(epsilon=epsilon)
  validate.open_unit(delta=delta)
  return _largest(lambda mu: delta_from_mu(mu, epsilon) <= delta)


def _largest(holds: Callable[[float], bool], low: float = 0.0) -> float:
  """The largest value in [low, _LARGEST] at which a condition that holds first and then
  fails still holds, from below; `low` where it never does."""
  if not holds(low):
    return low
  high = max(1.0, 2 * low)
  while high < _LARGEST and holds(high):
    low, high = high, 2 * high
  while high - low > 1e-6 * max(1.0, high):
    middle = (low + high) / 2
    low, high = (middle, high) if holds(middle) else (low, middle)
  return low


def one_run_p_value(
  *, correct: int, guesses: int, num_canaries: int, epsilon: float, delta: float
) -> float:
  """P(that many correct guesses, or more) under (epsilon, delta)-DP (Steinke et al.).

  beta + 2 m delta max_i (P(W >= correct - i) - beta) / i for W ~ Binomial(guesses, e^eps /
  (1 + e^eps)), beta = P(W >= correct), when each of the m canaries was in by a fair coin.

  >>> p = one_run_p_value(correct=10, guesses=10, num_canaries=10, epsilon=0.0, delta=0.0)
  >>> p == 2.0**-10
  True
  """
  right = special.expit(epsilon)
  beta = float(stats.binom.sf(correct - 1, guesses, right))
  if delta == 0 or correct < 1:
    return beta
  i = np.arange(1, correct + 1)
  slope = np.max((stats.binom.sf(correct - i - 1, guesses, right) - beta) / i)
  return min(1.0, beta + 2 * num_canaries * delta * float(slope))


def _fdp_refuted(
  mu: float, *, correct: int, guesses: int, num_canaries: int, significance: float
) -> bool:
  """Whether that many correct guesses are too many for a mu-Gaussian-DP run: Algorithm 3
  of Mahloujifar et al., where x -> Phi(Phi^-1(x) - mu) inverts the blow-up function."""
  r = significance * correct / num_canaries
  h = significance * (guesses - correct) / num_canaries
  for i in range(correct - 1, -1, -1):
    higher = max(h, float(special.ndtr(special.ndtri(r) - mu)))
    if higher == h:
      break  # nothing changes any more
    r = min(1.0, r + i / (guesses - i) * (higher - h))
    h = higher
  return r + h > guesses / num_canaries


def _guesses(scores: Scores) -> Iterator[tuple[int, int]]:
  """(guesses, correct) when the top k scores are guessed to be in, for fixed values of k."""
  m = len(scores.inside) + len(scores.outside)
  values = np.concatenate([scores.inside, scores.outside])
  truth = np.arange(m) < len(scores.inside)
  correct = np.cumsum(truth[np.argsort(-values)])
  half = max(1, m // 2)  # more guesses than records that were in cannot help
  for k in np.unique(np.round(np.geomspace(min(8, half), half, _GUESSES)).astype(int)):
    yield int(k), int(correct[k - 1])


def _best(scores: Scores, confidence: float, refuted: Callable[..., bool]) -> float:
  """Largest value that some number of guesses refutes, at the corrected significance."""
  tried = list(_guesses(scores))
  significance, best = (1 - confidence) / len(tried), 0.0
  for guesses, correct in sorted(tried, key=lambda pair: -pair[1] / pair[0]):
    test = lambda value, k=guesses, v=correct: refuted(value, k, v, significance)
    best = _largest(test, best)
  return best


def one_run(scores: Scores, *, delta: float, confidence: float = 0.95) -> float:
  """Lower bound on epsilon at `delta` from the canaries of ONE run (Steinke et al. 2023).

  Valid for every (epsilon, delta)-DP training algorithm if each canary was in or out by an
  independent fair coin; each score is that of one canary. The bound cannot be large: m
  canaries that are all told apart give about log(m / 5).

  >>> scores = Scores(inside=np.ones(500), outside=np.zeros(500))
  >>> round(one_run(scores, delta=0.0), 2)
  4.64
  """
  scores = _checked(scores, delta, confidence)
  m = len(scores.inside) + len(scores.outside)

  def refuted(epsilon, guesses, correct, significance):
    case: dict[str, Any] = dict(
      correct=correct, guesses=guesses, num_canaries=m, epsilon=epsilon
    )
    if one_run_p_value(**case, delta=0.0) > significance:
      return False  # cheap, and true for every delta
    return one_run_p_value(**case, delta=delta) <= significance

  return _best(scores, confidence, refuted)


def one_run_fdp(scores: Scores, *, delta: float, confidence: float = 0.95) -> float:
  """Lower bound on epsilon at `delta` from the canaries of one run, for a mechanism KNOWN to
  be Gaussian-DP (Mahloujifar et al. 2024): tighter than `one_run`.

  The largest mu that the guesses refute, as an epsilon. DP-SGD with sampling is Gaussian-DP
  only in the limit of many steps, so there it is indicative; `one_run` is the proof.

  >>> scores = Scores(inside=np.ones(500), outside=np.zeros(500))
  >>> one_run_fdp(scores, delta=1e-5) > one_run(scores, delta=1e-5)
  True
  """
  scores = _checked(scores, delta, confidence)
  m = len(scores.inside) + len(scores.outside)

  def refuted(mu, guesses, correct, significance):
    return _fdp_refuted(
      mu, correct=correct, guesses=guesses, num_canaries=m, significance=significance
    )

  return epsilon_from_mu(_best(scores, confidence, refuted), delta)


METHODS: dict[str, Callable[..., float]] = {
  "one_run": one_run,
  "one_run_fdp": one_run_fdp,
  "clopper_pearson": clopper_pearson,
  "gdp": gdp_lower_bound,
}

"""Lower bounds on epsilon from the scores of records that were in and records that were out.

An audit REFUTES: with probability at least `confidence`, the true epsilon is at least the bound. A
bound below the claim does not confirm the claim: no audit can show that something is private.

| bound                    | valid for                           | what one score is               |
| ------------------------ | ----------------------------------- | ------------------------------- |
| `clopper_pearson`        | every (epsilon, delta)-DP mechanism | one independent run             |
| `gdp_lower_bound`        | mechanisms that are Gaussian-DP     | one independent run             |
| `one_run`                | every (epsilon, delta)-DP mechanism | one canary, all in the same run |
| `one_run_two_sided`      | every (epsilon, delta)-DP mechanism | one canary, all in the same run |
| `one_run_fdp`            | mechanisms that are Gaussian-DP     | one canary, all in the same run |
| `one_run_fdp_two_sided`  | mechanisms that are Gaussian-DP     | one canary, all in the same run |
| `one_run_gaussian`       | Gaussian noise on orthogonal        | one canary's noisy sum, all in  |
|                          | canaries, nothing sampled           | the same run                    |

The canaries of one run are not independent of each other. So the first two bounds are only
indicative for them. The last bound holds if the scores, given the coins, differ by independent
noise alone. The other four bounds allow canaries to depend on each other in any way: they are true
even for a mechanism that leaks all canaries in a rare event. These four also assume that every
canary is in by a fair coin of its own. Each score must be computed from what was released (and from
the data), never from the coins.

No threshold is picked by its result: the thresholds lie at ranks that follow from the number of
scores alone. The significance is divided by the number of thresholds (Bonferroni). The false
positive rate above the j-th largest of n held-out scores is Beta(j, n - j + 1) exactly. So the
bounds need no large-sample argument.

Sources: Clopper, Pearson 1934; Jagielski, Ullman, Oprea 2020; Dong, Roth, Su 2022
(Gaussian DP, Eq. 6 and Corollary 2.13); Nasr et al. 2023; Steinke, Nasr, Jagielski 2023
(one run, Theorem 5.2); Mahloujifar, Melis, Chaudhuri 2024 (f-DP in one run, Algorithm 3);
Johnson, Welch 1940 (the noncentral t distribution).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy import special, stats

from dpjax import validate
from dpjax.accounting.trade_off import TradeOff
from dpjax.auditing.scores import CanaryScores, Scores
from dpjax.types import HostArray
from dpjax.validate import UserError

# A search for an epsilon or mu doubles its upper end until it reaches this value.
_LARGEST = 200.0
# Thresholds are quantiles of the scores outside, at levels Phi(x) for equal steps of x. A ratio of
# rates needs the extremes, so `_EXTREMES` thresholds lie from the largest score to the smallest.
# mu needs the region where neither rate is small, so the levels of its thresholds are `_MIDDLE`.
_EXTREMES = 9
_MIDDLE = special.ndtr(np.linspace(-1.5, 1.5, 5))
# Number of values of k that a one-sided audit of one run tries: it guesses k canaries to be in.
_GUESSES = 6
# Number of values of k for a two-sided audit, which also guesses k canaries to be out.
_TWO_SIDED = 5
# Smallest k of a two-sided audit, unless it has fewer than 2 k canaries. Even if all are right,
# fewer guesses refute little at the usual confidence.
_FEWEST = 16
_P_VALUES = np.geomspace(1e-12, 1.0, 145)
# Seed of the random order of equal scores, which does not depend on the truth.
_TIES_SEED = 2305_08846


def _one(values: Any, name: str) -> np.ndarray:
  array = np.asarray(values, np.float64)
  if array.ndim != 1 or array.size == 0 or np.isnan(array).any():
    raise UserError("must be numbers [n], n >= 1, none of them NaN", field=f"scores.{name}")
  return array


def _joint_ranks(scores: Scores, delta: float, confidence: float) -> Scores:
  """Checks the arguments, and returns joint ranks of all scores, with ties broken at random.

  Breaking ties turns a threshold inside a tie into a randomised test. This test is equally valid,
  and the best one for discrete outputs. For independent trials the place of a score decides its
  random number. For canaries of one run the place would reveal the coin, so `_guesses` uses the
  canary's number.
  """
  words = "Scores, as auditing.canaries.loss_scores returns"
  validate.instance(Scores, words, scores=scores)
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
  """Returns the Clopper-Pearson upper bound on a rate, given `count` events in n. The rate exceeds
  the bound with probability at most `significance`.

  >>> round(float(rate_at_most(0, 10, 0.025)), 4)  # 1 - 0.025^(1/10)
  0.3085
  """
  count = np.asarray(count)
  # The beta distribution needs a positive parameter; the case count = n is set in the next line.
  bound = stats.beta.ppf(1 - significance, count + 1, np.maximum(n - count, 1))
  return np.where(count < n, bound, 1.0)


def _at(quantiles: np.ndarray, n: int) -> np.ndarray:
  return np.unique(np.clip(np.round(quantiles * (n + 1)).astype(int), 1, n))


class _Rates(NamedTuple):
  """Upper bounds on the error rates at each threshold. All hold together, with one confidence."""

  false_positive: np.ndarray
  false_negative: np.ndarray


def _rates(scores: Scores, confidence: float, ranks: np.ndarray) -> _Rates:
  """Returns bounds on the error rates, one for each rank. The threshold of rank r is the r-th
  largest score outside."""
  n = len(scores.inside)
  m = len(scores.outside)
  significance = (1 - confidence) / (2 * len(ranks))
  thresholds = np.sort(scores.outside)[m - ranks]
  missed = np.searchsorted(np.sort(scores.inside), thresholds, side="right")
  return _Rates(
    rate_at_most(ranks - 1, m, significance), rate_at_most(missed, n, significance)
  )


def clopper_pearson(scores: Scores, *, delta: float, confidence: float = 0.95) -> float:
  """Returns a lower bound on epsilon at `delta` from exact bounds on the error rates.

  (epsilon, delta)-DP implies TPR <= e^epsilon FPR + delta, and TNR <= e^epsilon FNR + delta.
  Valid for any mechanism, when the scores are those of independent runs.

  Raises:
    UserError: no scores, NaN, a delta outside [0, 1), a confidence outside (0, 1).

  >>> scores = Scores(inside=np.ones(1000), outside=np.zeros(1000))  # told apart each time
  >>> round(clopper_pearson(scores, delta=0.0), 2)
  5.13
  """
  scores = _joint_ranks(scores, delta, confidence)
  # Thresholds lie densely in the tails, where the bounds are decided.
  n = len(scores.outside)
  end = special.ndtri(1 / (n + 1))
  ranks = _at(special.ndtr(np.linspace(end, -end, _EXTREMES)), n)
  rates = _rates(scores, confidence, ranks)
  first = log_ratio(1 - rates.false_negative - delta, rates.false_positive)
  other = log_ratio(1 - rates.false_positive - delta, rates.false_negative)
  return float(max(0.0, *first, *other))


def log_ratio(likely: np.ndarray, rare: np.ndarray) -> np.ndarray:
  """Returns the logarithms of likely / rare, minus infinity where `likely` is not positive.

  >>> log_ratio(np.array([1.0, -0.1]), np.array([1.0, 0.5]))
  array([  0., -inf])
  """
  return np.where(likely > 0, np.log(np.where(likely > 0, likely, 1.0) / rare), -math.inf)


def gdp_lower_bound(scores: Scores, *, delta: float, confidence: float = 0.95) -> float:
  """Returns a lower bound on epsilon at `delta`, for a mechanism KNOWN to be Gaussian-DP.

  mu = Phi^-1(1 - FPR) - Phi^-1(FNR), at the upper bounds of both rates. It is negative if the
  scores say nothing, and then the bound is 0. Taking |mu| instead, as jax-privacy 2.0.0 does, turns
  the LACK of evidence into a large epsilon.

  Valid only if the mechanism is mu-Gaussian-DP for some mu, as a Gaussian mechanism without
  sampling is. The scores must be those of independent runs.

  >>> scores = Scores(inside=np.arange(1000) + 0.5, outside=np.arange(1000.0))  # alike
  >>> gdp_lower_bound(scores, delta=1e-5)
  0.0
  """
  scores = _joint_ranks(scores, delta, confidence)
  rates = _rates(scores, confidence, _at(_MIDDLE, len(scores.outside)))
  useful = (rates.false_positive < 1) & (rates.false_negative < 1)
  if not useful.any():
    return 0.0
  mus = -special.ndtri(rates.false_positive) - special.ndtri(rates.false_negative)
  return epsilon_from_mu(float(np.max(mus[useful])), delta)


def delta_from_mu(mu: float, epsilon: float) -> float:
  """Returns the delta of a mu-Gaussian-DP mechanism at `epsilon` (Dong et al., Corollary 2.13).

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
  """Returns the epsilon of a mu-Gaussian-DP mechanism at `delta`, rounded down; 0 for mu <= 0.

  >>> round(epsilon_from_mu(1 / 2.5747, 1e-3), 3)  # analytic Gaussian, Balle and Wang 2018
  1.0
  """
  validate.open_unit(delta=delta)
  return _largest(lambda epsilon: delta_from_mu(mu, epsilon) > delta)


def _largest(holds: Callable[[float], bool], low: float = 0.0) -> float:
  """Returns the largest value for which a monotone condition still holds, rounded down; `low` if it
  never holds. The range of the search doubles until it reaches `_LARGEST`."""
  if not holds(low):
    return low
  high = max(1.0, 2 * low)
  while high < _LARGEST and holds(high):
    low = high
    high = 2 * high
  while high - low > 1e-6 * max(1.0, high):
    middle = (low + high) / 2
    low, high = (middle, high) if holds(middle) else (low, middle)
  return low


def one_run_p_value(
  *, correct: int, guesses: int, num_canaries: int, epsilon: float, delta: float
) -> float:
  """Returns an upper bound on P(`correct` or more correct guesses) under (epsilon, delta)-DP.

  The bound of Steinke et al. is beta + 2 m delta max_i (P(W >= correct - i) - beta) / i. Fair
  coins must decide which of the m canaries are in. Here W ~ Binomial(guesses, e^eps / (1 + e^eps)),
  and beta = P(W >= correct).

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


def _too_many(
  least_fpr: Callable[[Any], Any],
  levels: Any,
  *,
  correct: int,
  guesses: int,
  num_canaries: int,
) -> Any:
  """Returns whether `correct` right guesses are too many, at each of the significance `levels`.

  This is Algorithm 3 of Mahloujifar et al.

  Args:
    least_fpr: function from true positive rates to the smallest false positive rates at which they
      are possible: the inverse of the paper's blow-up function.
  """
  r = levels * correct / num_canaries
  h = levels * (guesses - correct) / num_canaries
  for i in range(correct - 1, -1, -1):
    higher = np.maximum(h, least_fpr(r))
    if (higher == h).all():
      # Once h is unchanged, later iterations change neither h nor r.
      break
    r = np.minimum(1.0, r + i / (guesses - i) * (higher - h))
    h = higher
  return r + h > guesses / num_canaries


def _fdp_refuted(mu: float, *, significance: float, **counts: int) -> bool:
  """Returns whether the correct guesses are too many for a mu-Gaussian-DP run."""
  least_fpr = lambda tpr: special.ndtr(special.ndtri(tpr) - mu)
  return bool(_too_many(least_fpr, np.float64(significance), **counts))


def _ends(m: int, *, two_sided: bool) -> np.ndarray:
  """Returns the values of k, one for each test. A test guesses the k canaries with the largest
  scores to be in, and if it is two-sided also the k with the smallest to be out."""
  # About half of the canaries are in, and more guesses of "in" cannot help.
  half = max(1, m // 2)
  number, least = (_TWO_SIDED, _FEWEST) if two_sided else (_GUESSES, 8)
  spread = np.geomspace(min(least, half), half, number)
  return np.unique(np.round(spread).astype(int))


def _guesses(scores: Scores, *, two_sided: bool) -> Iterator[tuple[int, int]]:
  """Yields (guesses, correct) for fixed values of k: the k largest scores are guessed to be in.

  Two-sided tests also guess the k smallest scores to be out. Among equal scores whose canaries are
  unknown, the wrong guesses come first. Any other order has at least as many correct guesses.
  """
  values = np.concatenate([scores.inside, scores.outside])
  truth = np.arange(values.size) < len(scores.inside)
  from_top = np.lexsort((truth, -values))
  from_bottom = np.lexsort((~truth, values))
  if isinstance(scores, CanaryScores):
    coins = np.random.default_rng(_TIES_SEED).random(values.size)[scores.numbers]
    from_top = np.lexsort((coins, -values))
    from_bottom = from_top[::-1]
  m = values.size
  top = np.cumsum(truth[from_top])
  bottom = np.cumsum(~truth[from_bottom])
  for k in _ends(m, two_sided=two_sided):
    if two_sided:
      yield int(2 * k), int(top[k - 1] + bottom[k - 1])
    else:
      yield int(k), int(top[k - 1])


def _two_sided_coins(m: int) -> float:
  """Returns the probability that m fair coins are not all alike.

  Other coins leave nothing to compare, so such a run is refused, and begun with other coins. The
  bounds are proved for all coins. So they may err by this factor less often: among six canaries a
  level of 5 % would else become 5.2 %.
  """
  return 1 - 2.0 ** (1 - m)


def _best(tried: list[tuple[int, int]], error: float, refuted: Callable[..., bool]):
  """Returns the largest epsilon or mu that one of the tests refutes, Bonferroni-corrected."""
  significance = error / len(tried)
  best = 0.0
  # The test with the most accurate guesses comes first, so that the others mostly end early.
  for guesses, correct in sorted(tried, key=lambda pair: -pair[1] / pair[0]):
    test = lambda value, k=guesses, v=correct: refuted(value, k, v, significance)
    best = _largest(test, best)
  return best


def _dp_refuted(
  epsilon: float, guesses: int, correct: int, significance: float, *, m: int, delta: float
) -> bool:
  p_value = functools.partial(
    one_run_p_value, correct=correct, guesses=guesses, num_canaries=m, epsilon=epsilon
  )
  # Delta only weakens the test. If epsilon is not refuted at delta 0, which is cheap to test, no
  # delta refutes it.
  if p_value(delta=0.0) > significance:
    return False
  return p_value(delta=delta) <= significance


def _one_run(
  scores: Scores, delta: float, confidence: float, *, two_sided: bool, gaussian: bool
) -> float:
  """Returns one of the four bounds that allow dependent canaries."""
  _ = _joint_ranks(scores, delta, confidence)
  tried = list(_guesses(scores, two_sided=two_sided))
  m = len(scores.inside) + len(scores.outside)
  error = (1 - confidence) * _two_sided_coins(m)
  if not gaussian:
    refuted = functools.partial(_dp_refuted, m=m, delta=delta)
    return _best(tried, error, refuted)

  def refuted_mu(mu: float, guesses: int, correct: int, significance: float) -> bool:
    return _fdp_refuted(
      mu, correct=correct, guesses=guesses, num_canaries=m, significance=significance
    )

  return epsilon_from_mu(_best(tried, error, refuted_mu), delta)


def one_run(scores: Scores, *, delta: float, confidence: float = 0.95) -> float:
  """Returns a lower bound on epsilon at `delta` from the canaries of ONE run (Steinke et al. 2023).

  Valid for every (epsilon, delta)-DP training algorithm if each canary was in or out by an
  independent fair coin; each score is that of one canary. The bound cannot be large: m
  canaries that are all distinguished give about log(m / 10).

  >>> scores = Scores(inside=np.ones(500), outside=np.zeros(500))
  >>> round(one_run(scores, delta=0.0), 2)
  4.64
  """
  return _one_run(scores, delta, confidence, two_sided=False, gaussian=False)


def one_run_two_sided(scores: Scores, *, delta: float, confidence: float = 0.95) -> float:
  """Returns `one_run` with the largest scores guessed to be in AND the smallest to be out.

  Theorem 5.2 of Steinke et al. holds for any guesses in {in, out, none} that are a function of what
  was released. So the same proof holds. In a run without sampling, low scores say as much as high
  ones. Then k guesses become 2 k at the same accuracy. If a record takes part in few steps, high
  scores say more, and `one_run` may be larger.

  >>> scores = Scores(inside=np.ones(500), outside=np.zeros(500))
  >>> round(one_run_two_sided(scores, delta=0.0), 2)
  5.38
  """
  return _one_run(scores, delta, confidence, two_sided=True, gaussian=False)


def one_run_fdp(scores: Scores, *, delta: float, confidence: float = 0.95) -> float:
  """Returns a lower bound on epsilon at `delta` from the canaries of one run, mostly tighter than
  `one_run`.

  The mechanism must be KNOWN to be Gaussian-DP (Mahloujifar et al. 2024). The bound is the largest
  mu that the guesses refute, as an epsilon. DP-SGD with sampling is Gaussian-DP
  only in the limit of many steps, so with sampling this bound is indicative; `one_run` is the
  proof.

  >>> scores = Scores(inside=np.ones(500), outside=np.zeros(500))
  >>> one_run_fdp(scores, delta=1e-5) > one_run(scores, delta=1e-5)
  True
  """
  return _one_run(scores, delta, confidence, two_sided=False, gaussian=True)


def one_run_fdp_two_sided(
  scores: Scores, *, delta: float, confidence: float = 0.95
) -> float:
  """Returns `one_run_fdp` with the largest scores guessed to be in AND the smallest to be out.

  Proof that both kinds of guesses fit one recursion. Let C of the k guesses be right, p_j =
  P(C = j), and b_i the coin of canary i. F(x) = Phi(Phi^-1(x) + mu) is the largest TPR at FPR x.
  Let A_is be the event "canary i is guessed s, and at least c - 1 other guesses are right". It
  depends on b_i only through the output, so P(A_is | b_i = s) <= F(P(A_is | b_i = not s)). Since
  b_i is fair and F is concave, the sum over the m canaries and both s gives

    sum_{j >= c} j p_j = sum_is P(A_is, b_i = s) <= m F(sum_is P(A_is, b_i = not s) / m)
                       = m F(sum_{j >= c - 1} (k - j) p_j / m)

  This is the step of Algorithm 3. Nothing is assumed of how canaries depend on each other.

  >>> scores = Scores(inside=np.ones(500), outside=np.zeros(500))
  >>> one_run_fdp_two_sided(scores, delta=1e-5) > one_run_fdp(scores, delta=1e-5)
  True
  """
  return _one_run(scores, delta, confidence, two_sided=True, gaussian=True)


def one_run_gaussian(scores: Scores, *, delta: float, confidence: float = 0.95) -> float:
  """Returns a lower bound on epsilon at `delta` from the noisy sums of one run. Its confidence
  is exact. It is mostly by far the largest bound, but assumes the most.

  Valid if, given the coins, the scores are INDEPENDENT and normal. Their standard deviation is one
  number s, and their means are a + d (in) and a (out). The numbers a, d and s need not be known.
  Sums of white Gaussian noise along orthogonal canaries (`gradient_canaries`) are such scores. Each
  canary must take part in every step or in a fixed number of steps. Not valid for sampled
  participation, which gives the scores inside a larger spread. Nor is it valid for scores that are
  losses, or for canaries that share noise.

  Proof. With n in and m out, let T = (mean in - mean out) / (S sqrt(1 / n + 1 / m)), where S^2 is
  the pooled variance of n + m - 2 degrees of freedom. T is noncentral t with noncentrality
  (d / s) sqrt(n m / (n + m)), and its upper tail grows with the noncentrality. So the largest mu
  whose tail beyond T is at most 1 - confidence exceeds d / s with probability at most
  1 - confidence, whatever the coins. A score is a function of what was released: N(a, s^2) for a
  canary that is out, N(a + d, s^2) for one that is in. So the mechanism's delta at any epsilon is
  at least that of d / s (`delta_from_mu`). Its epsilon at `delta` is at least
  `epsilon_from_mu(d / s, delta)`. There is one test, so no correction.

  Unlike the other bounds it reads the values, not only their order. Infinite scores, and fewer
  than three scores, give 0: nothing is proved.

  >>> noise = np.random.default_rng(0).standard_normal((2, 500))
  >>> scores = Scores(inside=1.0 + noise[0], outside=noise[1])  # epsilon 4.38 at 1e-5
  >>> 3.9 < one_run_gaussian(scores, delta=1e-5) <= 4.38
  True
  """
  _ = _joint_ranks(scores, delta, confidence)
  inside, outside = (np.asarray(part, np.float64) for part in scores)
  n = inside.size
  m = outside.size
  if n + m < 3 or not np.isfinite([*inside, *outside]).all():
    return 0.0
  degrees = n + m - 2
  weight = math.sqrt(n * m / (n + m))
  gap = float(inside.mean() - outside.mean())
  spread = math.sqrt((inside.var() * n + outside.var() * m) / degrees)
  if gap <= 0:
    return 0.0
  # Without any spread the two sides are perfectly separable.
  t = min(gap / spread, _LARGEST) * weight if spread else _LARGEST * weight
  mu = _largest(lambda mu: _t_tail(t, degrees, mu * weight) <= 1 - confidence)
  return epsilon_from_mu(mu, delta)


def _t_tail(t: float, degrees: int, noncentrality: float) -> float:
  """Returns P(T > t), or 1 if SciPy's series does not converge, so that nothing is refuted."""
  with np.errstate(all="ignore"):
    tail = float(stats.nct.sf(t, degrees, noncentrality))
  return tail if 0 <= tail <= 1 else 1.0


def claim_p_value(scores: Scores, claim: TradeOff) -> float:
  """Returns an upper bound on the probability of guesses this good in ONE run, if the claim holds.

  The claim is every pair (epsilon, delta) of a proof at once. So it may be refuted even if
  `one_run` cannot refute one pair: with m perfect canaries `one_run` shows about log(m / 10), and
  less at a large delta. But a proof of epsilon 4 also limits how many canaries can be guessed.

  This is Algorithm 3 of Mahloujifar et al. 2024, with the claim's own curve of true positives F in
  place of a Gaussian's. The claim's pairs hold in both directions, and F is concave, which is all
  that `one_run_fdp_two_sided` assumes. The numbers of guesses follow from m alone, and the p-value
  is multiplied by the number of tests (Bonferroni).

  Guarantee: the result is at most p with probability at most p, if the claim holds. Fair
  coins must decide which canaries are in. The result is rounded up, to one of 12 values in each
  power of ten.

  >>> claim = TradeOff(np.array([1.0]), np.array([1e-3]))
  >>> claim_p_value(Scores(inside=np.ones(25), outside=np.zeros(25)), claim) < 0.01
  True
  >>> claim_p_value(Scores(inside=np.zeros(25), outside=np.ones(25)), claim)
  1.0
  """
  _ = _joint_ranks(scores, 0.0, 0.5)
  m = sum(map(len, scores))
  tried = list(_guesses(scores, two_sided=True))
  refuted = np.zeros(len(_P_VALUES), bool)
  for guesses, correct in tried:
    refuted |= _too_many(
      claim.false_positive_rate,
      _P_VALUES * _two_sided_coins(m) / len(tried),
      correct=correct,
      guesses=guesses,
      num_canaries=m,
    )
  return float(min([1.0, *_P_VALUES[refuted]]))


def alarm_p_value(scores: Scores, claim: TradeOff) -> float:
  """Returns `claim_p_value` as if canaries were independent: INDICATIVE, and often far smaller.

  If k canaries were in, the test guesses the k largest scores to be in, and all others out. One
  guess is right with probability (1 + v) / 2 at most, with v the claim's total variation. Noisy
  sums along orthogonal canaries are independent (white noise, each canary drawn by itself).
  Canaries that train are not, since they move a model that all of them share.

  >>> claim = TradeOff(np.zeros(1), np.array([0.5]))
  >>> p = alarm_p_value(Scores(inside=np.ones(25), outside=np.zeros(25)), claim)
  >>> bool(np.isclose(p, 0.75**50 + 50 * 0.75**49 * 0.25))
  True
  """
  _ = _joint_ranks(scores, 0.0, 0.5)
  values = np.concatenate(scores)
  inside = len(scores.inside)
  truth = np.arange(values.size) < inside
  # Among equal scores, wrong guesses come first.
  order = np.lexsort((truth, -values))
  right_inside = int(np.sum(truth[order[:inside]]))
  # For each missed canary, another one is wrongly guessed to be in.
  correct = values.size - 2 * (inside - right_inside)
  right = (1 + claim.total_variation) / 2
  # One right guess fewer is tested: mistakes come in pairs, and a threshold that depends on the
  # scores gains a little.
  return float(stats.binom.sf(correct - 2, values.size, right))


class LowerBound(NamedTuple):
  """A bound, and its meaning for one training run with many canaries."""

  bound: Callable[..., float]  # (scores, *, delta, confidence) -> epsilon
  meaning: str
  gaussian_only: bool = False  # says nothing of a mechanism that is not Gaussian-DP
  indicative: bool = False  # an alarm, without confidence

  def __call__(self, scores: Scores, **levels: float) -> float:
    """Returns the lower bound on epsilon; `levels` are `delta` and `confidence`."""
    return self.bound(scores, **levels)


_ANY = "valid for any (epsilon, delta)-DP training"
_GAUSSIAN = "valid only if the training is Gaussian-DP"
_SUMS = "valid only if scores are noisy sums along orthogonal canaries, unsampled"
_ONE_BY_ONE = "indicative: treats the canaries of one run as independent"
_BOTH = "indicative: as clopper_pearson, and only if the training is Gaussian-DP"
METHODS = {
  "one_run": LowerBound(one_run, _ANY),
  "one_run_two_sided": LowerBound(one_run_two_sided, _ANY),
  "one_run_fdp": LowerBound(one_run_fdp, _GAUSSIAN, gaussian_only=True),
  "one_run_fdp_two_sided": LowerBound(one_run_fdp_two_sided, _GAUSSIAN, gaussian_only=True),
  "one_run_gaussian": LowerBound(one_run_gaussian, _SUMS, gaussian_only=True),
  "clopper_pearson": LowerBound(clopper_pearson, _ONE_BY_ONE, indicative=True),
  "gdp": LowerBound(gdp_lower_bound, _BOTH, gaussian_only=True, indicative=True),
}

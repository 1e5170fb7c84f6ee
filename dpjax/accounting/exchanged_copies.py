"""Privacy loss of one noisy sum over a batch drawn WITH replacement, where a record is exchanged.

A step draws b times one of n records, uniformly, and adds Gaussian noise to the sum of their
clipped gradients, each copy clipped by itself. Norms are in multiples of the clip norm, and z is
the noise multiplier. A record has M copies in a batch, M binomial of b draws of chance 1 / n.

Draw b of the other n - 1 records, with replacement: o_1, .., o_b. Draw a set I of places, each of
them with chance 1 / n. The batch is o, with the record in the places I, so around the sum of o
the neighbours' outputs are, given o,

  P = E_I N(u_I),  u_I = sum over i in I of x - o_i,   and   Q = E_I N(v_I),  likewise with y.

With the chance 1 - q, q = 1 - (1 - 1 / n)^b, I is empty and both are N(0). Write P_1 and Q_1 for
the rest. For a set I of m places, u_I and v_I have norm 2 m at most, and so has their difference,
m (x - y). By advanced joint convexity (Balle, Barthe and Gaboardi 2018, arXiv:1807.01647, theorem
2), the hockey-stick divergence at g = 1 + q (g' - 1) >= 1 satisfies, with B = g / g',

  H_g(P, Q) <= (1 - B) q H_g'(P_1, N(0)) + B q H_g'(P_1, Q_1).

The first divergence is q H_g'(P_1, N(0)) = H_g(P, N(0)), that of a mixture of Gaussians against
one. It is at most G(g) = H_g(E N(2 M), N(0)) (`BoundedContributionKind` has the proof). The second
is at most h(g) = sum over m >= 1 of P(M = m) H_g'(N(2 m), N(0)), given the number of places. So

  k(g) = (1 - B) G(g) + B h(g)   for g >= 1,   k(g) = 1 - g + g k(1 / g)   for g < 1

is at least H_g(P, Q) and H_g(Q, P) and, as divergences are jointly convex, their mean over o. B
falls from 1 to q, so in the tails k is nearly G if q is small.

A profile composes adaptively if it is convex (Zhu, Dong and Wang 2022, arXiv:2106.08567, theorem
10). k is convex at g = 1 if G(1) >= h(1) / 2. This holds: take the points beyond half of the least
shift. There each Gaussian has more mass than N(0), by at least half of its total variation from
N(0). Elsewhere convexity is checked on the grid: if a slope falls, h takes the place of k. h is
convex for any b, as a mean of the profiles of `exchanged_sample`. It is a bound, too: it is k with
h in place of the smaller G (theorem 10 of Balle et al.).

Where a record joins, Q = N(0) given o. Then P and N(0) are a mixture of Gaussians against one:
`BoundedContributionKind` has the proof. Its user has b records of chance 1 / n, of twice the shift.

Renyi divergences do not help here. All b places hold the record with chance n^-b, and then the
sum moves by 2 b: e^((a - 1) D_a) is at least n^(-b a) e^(2 a (a - 1) b^2 / z^2). This is huge at
orders a well above 1 + z^2 log(n) / (2 b) (compare arXiv:2408.10456).
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import stats

from dpjax.accounting.exchanged_sample import profile
from dpjax.accounting.mixture_pld import removed_deltas

# A number m of copies is counted if the chance of m or more copies is above this. The chance of
# more copies than are counted is added to delta at every step.
_LEAST_MASS = 1e-20
# Largest number of copies that may be counted. As b <= n, m copies have a chance of at most 1 / m!,
# so far fewer are counted.
_MOST_COPIES = 200
# The grid of losses ends where delta is at most this, or at about `_LARGEST_LOSS`. Losses beyond
# its end count as infinite.
_LEAST_DELTA = 1e-18
# Once the end of the grid is above this, it is not doubled again: no useful epsilon is as large.
_LARGEST_LOSS = 1e9
# Allowance for the relative error of SciPy's chances of a binomial.
_CHANCE_ERROR = 1e-11


def copies(num_examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray, float]:
  """Returns the numbers 1, 2, .. of copies of a record in a batch, [m], and their chances, [m].

  The third result is the chance of more copies than these.

  >>> numbers, chances, beyond = copies(4, 2)
  >>> numbers.tolist(), chances.tolist(), beyond
  ([1, 2], [0.375, 0.0625], 0.0)
  """
  numbers = np.arange(1, min(batch_size, _MOST_COPIES) + 1)
  more = stats.binom.sf(numbers - 1, batch_size, 1 / num_examples)  # P(M >= number)
  kept = more > _LEAST_MASS
  chances = stats.binom.pmf(numbers[kept], batch_size, 1 / num_examples)
  beyond = float(more[~kept][0]) if not kept.all() else 0.0
  return numbers[kept], chances, beyond


def copies_profile(
  epsilons: np.ndarray, *, num_examples: int, batch_size: int, noise_multiplier: float
) -> np.ndarray:
  """Returns delta of one step at each epsilon, [k].

  Guarantee: at least the hockey-stick divergence of any two neighbours, in both directions.

  Args:
    epsilons: losses >= 0 at which delta is computed, rising, [k].
    num_examples: number n of records of each neighbour.
    batch_size: number b of draws of a step.
    noise_multiplier: std of the noise / clip norm of one copy.

  >>> copies_profile(np.array([0.0, 1.0]), num_examples=4, batch_size=2,
  ...   noise_multiplier=2.0).round(4)
  array([0.1863, 0.0424])
  """
  losses = np.asarray(epsilons, float)
  numbers, chances, beyond = copies(num_examples, batch_size)
  chances = chances * (1 + _CHANCE_ERROR)
  joining = sampling_prob(num_examples, batch_size)
  # `apart` is h of the proof: the mean, over numbers of copies M, of the profile at M times the
  # shift.
  apart = np.zeros(len(losses))
  for number, chance in zip(numbers, chances, strict=True):
    apart += (chance / joining) * profile(
      losses, sampling_prob=joining, noise_multiplier=noise_multiplier / number
    )
  # If the record is in every batch, then B = 1 and k = h in the proof.
  deltas = apart
  if joining < 1:
    one_sided = removed_deltas(
      losses,
      chances=np.append(1 - joining, chances),
      shifts=np.append(0.0, 2 * numbers / noise_multiplier),
    )
    share = joining / (1 - (1 - joining) * np.exp(-losses))  # B of the proof
    deltas = (1 - share) * np.minimum(one_sided, apart) + share * apart
    if not _is_convex(losses, deltas):
      deltas = apart
  # No privacy is claimed for batches with more copies than are counted.
  return np.minimum(deltas + beyond, 1.0)


def _is_convex(losses: np.ndarray, deltas: np.ndarray) -> bool:
  """Returns whether deltas at rising losses >= 0 are convex in e^loss, up to rounding."""
  if len(losses) < 3:
    return True
  # Each slope against e^loss is multiplied by e^loss at its left end, so that nothing overflows.
  rises = np.diff(deltas) / np.expm1(np.diff(losses))
  next_rises = rises[1:] * np.exp(-np.diff(losses)[:-1])
  # Each delta errs by about 1e-16, so a slope may seem to fall by up to `rounding`.
  rounding = 4e-16 / np.expm1(np.minimum(np.diff(losses)[1:], np.diff(losses)[:-1]))
  return bool((next_rises - rises[:-1] >= -rounding).all())


def sampling_prob(num_examples: int, batch_size: int) -> float:
  """Returns the chance that a record is in a batch, 1 - (1 - 1 / n)^b.

  >>> round(sampling_prob(10, 10), 4)
  0.6513
  """
  if num_examples == 1:
    return 1.0
  # expm1 and log1p keep the digits of a small chance.
  return -math.expm1(batch_size * math.log1p(-1 / num_examples))


@functools.lru_cache(maxsize=16)
def copies_largest_loss(
  num_examples: int, batch_size: int, noise_multiplier: float
) -> float:
  """Returns a loss at which delta is at most 1e-18, or about 1e9 if no smaller loss has this."""
  low = 0.0
  high = 1.0

  def delta_at(loss: float) -> float:
    return copies_profile(
      np.array([loss]),
      num_examples=num_examples,
      batch_size=batch_size,
      noise_multiplier=noise_multiplier,
    ).item()

  # The profile falls, so doubling brackets the loss, and bisection narrows the bracket.
  while delta_at(high) > _LEAST_DELTA and high < _LARGEST_LOSS:
    low = high
    high = 2 * high
  while high - low > 1e-2 * high:
    middle = (low + high) / 2
    low, high = (middle, high) if delta_at(middle) > _LEAST_DELTA else (low, middle)
  return high

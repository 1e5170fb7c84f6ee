"""Privacy loss of one noisy sum over a batch drawn WITH replacement, where a record is exchanged.

A step draws b times one of n records, uniformly, and adds Gaussian noise to the sum of their
clipped gradients, each copy clipped by itself. Norms are in multiples of the clip norm, and z is
the noise multiplier. A record has M copies in a batch, M binomial of b draws of chance 1 / n.

Draw b of the other n - 1 records, with replacement: o_1, .., o_b. Draw a set I of places, each of
them with chance 1 / n. The batch is o, with the record in the places I, so around the sum of o
the neighbours' outputs are, given o,

  P = E_I N(u_I),  u_I = sum over i in I of x - o_i,   and   Q = E_I N(v_I),  likewise with y.

At I empty both are N(0), with the chance 1 - q, q = 1 - (1 - 1 / n)^b. Of a set I of m places
u_I and v_I have norm 2 m at most, and so has their difference m (x - y). By advanced joint
convexity (Balle, Barthe and Gaboardi 2018, arXiv:1807.01647, theorems 2 and 10), at
g = 1 + q (g' - 1) >= 1,

  H_g(P, Q) <= sum over m >= 1 of P(M = m) H_g'(N(2 m), N(0)) = sum of w_m h_(q, z / m)(g),

where h_(q, z) is the profile of `dpjax.accounting.exchanged_sample` at the chance q, and
w_m = P(M = m) / q. The same holds with P and Q exchanged and, as divergences are jointly convex,
for the mean over o. A mean of profiles is convex and falling as they are, so it is the profile of
a pair, which composes adaptively (Zhu, Dong and Wang 2022, arXiv:2106.08567, theorem 10).

Where a record joins, Q = N(0) given o. Then P and N(0) are a mixture of Gaussians against one:
`BoundedContributionKind` has its proof, with b records of a chance 1 / n and twice the shift.

Renyi divergences do not help here. All b places hold the record with chance n^-b, and then the
sum moves by 2 b: e^((a - 1) D_a) is at least n^(-b a) e^(2 a (a - 1) b^2 / z^2), which no number
of other records makes small (compare arXiv:2408.10456).
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from scipy import stats

from dpjax.accounting.exchanged_sample import log_ratio, profile

# More copies than this together have a smaller chance, which counts as lost at every step.
_LEAST_MASS = 1e-20
# Beyond it, in standard deviations, a normal has a mass of 1e-23.
_TAIL = 10.0


def copies(num_examples: int, batch_size: int) -> tuple[np.ndarray, np.ndarray, float]:
  """Returns numbers of copies from 1 on, their chances [k], and the chance of still more.

  >>> numbers, chances, beyond = copies(4, 2)
  >>> numbers.tolist(), chances.tolist(), beyond
  ([1, 2], [0.375, 0.0625], 0.0)
  """
  numbers = np.arange(1, batch_size + 1)
  more = stats.binom.sf(numbers - 1, batch_size, 1 / num_examples)  # of so many or more
  kept = more > _LEAST_MASS
  chances = stats.binom.pmf(numbers[kept], batch_size, 1 / num_examples)
  beyond = float(more[~kept][0]) if not kept.all() else 0.0
  return numbers[kept], chances, beyond


def copies_profile(
  epsilons: np.ndarray, *, num_examples: int, batch_size: int, noise_multiplier: float
) -> np.ndarray:
  """Returns delta at each epsilon of one step; negative epsilons are allowed.

  Guarantee: at least the hockey-stick divergence of any two neighbours, in both directions.

  Args:
    epsilons: [k].
    num_examples: n, of both neighbours.
    batch_size: b, draws of a step.
    noise_multiplier: std of the noise / clip norm of one copy.

  >>> copies_profile(np.array([0.0, 1.0]), num_examples=4, batch_size=2,
  ...   noise_multiplier=2.0).round(4)
  array([0.1863, 0.0337])
  """
  numbers, chances, beyond = copies(num_examples, batch_size)
  joining = joining_prob(num_examples, batch_size)
  total = np.zeros(len(epsilons))
  for number, chance in zip(numbers, chances, strict=True):
    weight = chance / joining
    total += weight * profile(
      epsilons, sampling_prob=joining, noise_multiplier=noise_multiplier / number
    )
  # With more copies than are counted, nothing is claimed.
  return np.minimum(total + beyond, 1.0)


def joining_prob(num_examples: int, batch_size: int) -> float:
  """Returns the chance of a record to be in a batch, 1 - (1 - 1 / n)^b.

  >>> round(joining_prob(10, 10), 4)
  0.6513
  """
  if num_examples == 1:
    return 1.0
  # expm1 and log1p keep the digits of a small chance.
  return -math.expm1(batch_size * math.log1p(-1 / num_examples))


def copies_largest_loss(
  num_examples: int, batch_size: int, noise_multiplier: float
) -> float:
  """Returns a loss that the largest number of copies exceeds with a chance of 1e-23 at most."""
  numbers, _, _ = copies(num_examples, batch_size)
  shift = 2 * float(numbers[-1]) / noise_multiplier
  joining = joining_prob(num_examples, batch_size)
  return log_ratio(np.array([shift + _TAIL]), sampling_prob=joining, shift=shift).item()


def copies_pld(
  *, num_examples: int, batch_size: int, noise_multiplier: float, interval: float
) -> pld_lib.PrivacyLossDistribution:
  """Returns the privacy loss distribution of one step, on a grid of `interval`.

  Guarantee: an upper bound at any interval. The dots of the profile are connected (Doroshenko et
  al. 2022, arXiv:2207.04380). Both directions have the same distribution.

  Args:
    num_examples: n, of both neighbours.
    batch_size: b, draws of a step.
    noise_multiplier: std of the noise / clip norm of one copy.
    interval: distance of the losses.

  >>> pld = copies_pld(num_examples=4, batch_size=2, noise_multiplier=2.0, interval=1e-3)
  >>> round(float(pld.get_delta_for_epsilon(1.0)), 4)
  0.0337
  """
  top = copies_largest_loss(num_examples, batch_size, noise_multiplier)
  largest = max(1, math.ceil(top / interval))
  places = np.arange(-largest, largest + 1)
  deltas = copies_profile(
    places * interval,
    num_examples=num_examples,
    batch_size=batch_size,
    noise_multiplier=noise_multiplier,
  )
  return pld_lib.PrivacyLossDistribution(
    pld_pmf.create_pmf_pessimistic_connect_dots(interval, places, deltas)
  )

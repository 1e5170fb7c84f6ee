"""Integer noise, and the encoding around it: clip, scale, round, add noise, wrap, decode.

Secure aggregation adds integers modulo m, so a client sends

  encode: x in R^d, ||x|| <= C  ->  scale * x  ->  rounded to Z^d  ->  + noise  ->  mod m

and the server takes the sum, unwraps it and divides by the scale. What may go wrong, and
where it is handled (pitfalls P21, P38):

| rounding makes a vector longer | its sensitivity is `rounded_norm_bound`, not C scale;      |
| than C scale                   | `round_randomly` draws again until this bound holds        |
| the sum leaves [-m/2, m/2)     | `wrap_probability` bounds the chance; no harm to privacy   |
| a float sampler is not exact   | `discrete_gaussian` is, in integer arithmetic              |

All draws run in NumPy on the client, by a `numpy.random.Generator`. In a release seed it with 128
bits or more of the operating system's entropy. Its events have the cost.

| sampler                  | distribution                                                         |
| ------------------------ | -------------------------------------------------------------------- |
| `discrete_gaussian`      | exact, given uniform integers: rejection in 64-bit integers [1]      |
| `wide_discrete_gaussian` | the same, exact for variances up to 2^112: Python's integers         |
| `skellam`                | difference of two `Generator.poisson`, whose rejection is in float64 |

[1] Canonne, Kamath and Steinke 2020, arXiv:2004.00010, algorithms 1 to 3.
"""

from __future__ import annotations

import math

import numpy as np

from dpjax import validate
from dpjax.types import HostArray
from dpjax.validate import UserError

# Largest variance of `discrete_gaussian`, whose integers must fit into 64 bits.
MAX_VARIANCE = 2**24
# Largest variance for Python's integers: a standard deviation of 2^56. Draws that exceed 64 bits
# are then 128 standard deviations away.
MAX_WIDE_VARIANCE = 2**112
# Largest variance of Skellam noise. For larger variances NumPy's rejection in float64 is inexact.
# From 2^54 on it gives only even numbers.
MAX_SKELLAM = 2.0**32
# Default bound on the chance that rounding must be repeated (Kairouz et al. 2021).
BETA = math.exp(-0.5)
_TRIES = 1000

Shape = int | tuple[int, ...]


# --- samplers


def discrete_gaussian(
  rng: np.random.Generator, shape: Shape, *, variance: int
) -> np.ndarray:
  """Draws int64 [shape] of the discrete Gaussian N_Z(0, variance), without rounding.

  P(x) is proportional to exp(-x^2 / (2 variance)). Only values beyond 60 sigma, of mass below
  e^-1700, are never drawn.

  Args:
    rng: random generator, whose state must be secret.
    shape: shape of the result.
    variance: sigma^2, an integer in 1 .. 2^24, in units of the grid.

  >>> discrete_gaussian(np.random.default_rng(0), 3, variance=4).dtype
  dtype('int64')
  """
  validate.integer_at_least(1, variance=variance)
  if variance > MAX_VARIANCE:
    raise UserError(
      f"must be <= {MAX_VARIANCE}; scale by less", field="variance", value=variance
    )
  # Products of a NumPy integer could wrap around, which would change the distribution.
  variance = int(variance)
  size = int(np.prod(shape))
  accepted = np.zeros(0, np.int64)
  while accepted.size < size:
    # Algorithm 3 draws discrete Laplace proposals y of scale t = floor(sigma) + 1. It keeps each
    # with probability exp(-(|y| - variance / t)^2 / (2 variance)).
    scale = math.isqrt(variance) + 1
    y = _discrete_laplace(rng, 2 * (size - accepted.size), scale)
    # This limit keeps the numerator within 64 bits. A proposal exceeds the limit with chance e^-60.
    y = y[np.abs(y) < 60 * scale]
    numerator = (np.abs(y) * scale - variance) ** 2
    accepted = np.append(
      accepted, y[_bernoulli_exp(rng, numerator, 2 * variance * scale**2)]
    )
  return accepted[:size].reshape(shape)


def _discrete_laplace(rng: np.random.Generator, size: int, scale: int) -> np.ndarray:
  """Draws at most `size` integers x by algorithm 2, with P(x) proportional to exp(-|x| / scale)."""
  low = rng.integers(0, scale, size)
  low = low[_bernoulli_exp(rng, low, scale)]
  # `high` counts successes in a row of Bernoulli(1 / e), so it is a geometric draw.
  high = np.zeros(low.size, np.int64)
  alive = np.arange(low.size)
  while alive.size:
    alive = alive[_bernoulli_exp(rng, np.ones(alive.size, np.int64), 1)]
    high[alive] += 1
  negative = rng.integers(0, 2, low.size).astype(bool)
  x = low + scale * high
  # A negative zero is dropped. Otherwise zero would count twice, as 0 and as -0.
  keep = ~(negative & (x == 0))
  return np.where(negative, -x, x)[keep]


def _bernoulli_exp(
  rng: np.random.Generator, numerator: np.ndarray, denominator: int
) -> np.ndarray:
  """Returns [n] bool, true with probability exactly exp(-numerator / denominator): algorithm 1."""
  # exp(-(w + f)) = exp(-1)^w exp(-f). So w coins of chance exp(-1) and a coin of chance exp(-f)
  # must all succeed.
  whole, remainder = np.divmod(numerator, denominator)
  result = _bernoulli_exp_of_fraction(rng, remainder, denominator)
  for left in range(int(whole.max(initial=0))):
    undecided = np.flatnonzero(result & (whole > left))
    if not undecided.size:
      break
    result[undecided] = _bernoulli_exp_of_fraction(rng, np.ones_like(undecided), 1)
  return result


def _bernoulli_exp_of_fraction(
  rng: np.random.Generator, numerator: np.ndarray, denominator: int
) -> np.ndarray:
  """Returns [n] bool, true with probability exp(-numerator / denominator), for fractions up to 1.

  Draw k succeeds with probability fraction / k. The number of draws up to the first failure is odd
  with probability exp(-fraction).
  """
  draws = np.zeros(numerator.shape, np.int64)
  alive = np.arange(numerator.size)
  k = 0
  while alive.size:
    k += 1
    draws[alive] = k
    # Integers are compared, so that the probability fraction / k is not rounded.
    uniform = rng.integers(0, denominator * k, alive.size)
    alive = alive[uniform < numerator[alive]]
  return draws % 2 == 1


def wide_discrete_gaussian(
  rng: np.random.Generator, shape: Shape, *, variance: int
) -> np.ndarray:
  """Draws int64 [shape] of N_Z(0, variance) modulo 2^64, exactly, for large variances too.

  The algorithms are those of `discrete_gaussian`, with Python's integers, which have no size limit.
  A draw takes half a millisecond, so use this function for at most some thousand numbers.

  Args:
    rng: random generator, whose state must be secret.
    shape: shape of the result.
    variance: sigma^2, an integer in 1 .. 2^112, in units of the grid.

  Returns:
    Integers modulo 2^64, in two's complement; the reduction is post-processing.

  Raises:
    UserError: the variance is out of this range.

  >>> draws = wide_discrete_gaussian(np.random.default_rng(0), 100, variance=2**60)
  >>> bool(0.8 < draws.std() / 2**30 < 1.2)
  True
  """
  validate.integer_at_least(1, variance=variance)
  if variance > MAX_WIDE_VARIANCE:
    raise UserError("must be <= 2^112; scale by less", field="variance", value=variance)
  if variance <= MAX_VARIANCE:
    return discrete_gaussian(rng, shape, variance=variance)
  variance = int(variance)
  scale = math.isqrt(variance) + 1
  denominator = 2 * variance * scale**2
  values: list[int] = []
  while len(values) < int(np.prod(shape)):
    y = _wide_laplace(rng, scale)
    if _wide_coin(rng, (abs(y) * scale - variance) ** 2, denominator):
      values.append((y + 2**63) % 2**64 - 2**63)
  return np.array(values, np.int64).reshape(shape)


def _wide_laplace(rng: np.random.Generator, scale: int) -> int:
  """Draws one integer x by algorithm 2, with P(x) proportional to exp(-|x| / scale)."""
  while True:
    low = _below(rng, scale)
    if not _wide_coin(rng, low, scale):
      continue
    # `high` counts successes in a row of Bernoulli(1 / e), so it is a geometric draw.
    high = 0
    while _wide_coin(rng, 1, 1):
      high += 1
    x = low + scale * high
    is_negative = bool(_below(rng, 2))
    # A negative zero is drawn again. Otherwise zero would count twice, as 0 and as -0.
    if not (is_negative and x == 0):
      return -x if is_negative else x


def _wide_coin(rng: np.random.Generator, numerator: int, denominator: int) -> bool:
  """Returns True with probability exp(-numerator / denominator), exactly: algorithm 1."""
  whole, fraction = divmod(numerator, denominator)
  # exp(-(w + f)) = exp(-1)^w exp(-f), so w coins of chance exp(-1) and a coin of chance exp(-f)
  # must all succeed.
  for top, bottom in [(1, 1)] * whole + [(fraction, denominator)]:
    # As in `_bernoulli_exp_of_fraction`, the number of draws is odd with the coin's probability.
    count = 1
    while _below(rng, bottom * count) < top:
      count += 1
    if count % 2 == 0:
      return False
  return True


def _below(rng: np.random.Generator, bound: int) -> int:
  """Draws a uniform integer in [0, bound), by rejection of random bits."""
  bits = (bound - 1).bit_length()
  while True:
    value = int.from_bytes(rng.bytes((bits + 7) // 8), "little") & ((1 << bits) - 1)
    if value < bound:
      return value


def skellam(rng: np.random.Generator, shape: Shape, *, variance: float) -> np.ndarray:
  """Draws int64 [shape] of Skellam noise: differences of two Poisson draws of mean variance / 2.

  Sums of independent Skellam variables are Skellam again, so clients may add the noise in shares.
  The variance may be at most 2^32, since NumPy's sampler works in float64. For far larger variances
  draws would not cover the low bits of the numbers to which they are added.

  >>> skellam(np.random.default_rng(0), (2, 3), variance=0.5).shape
  (2, 3)
  """
  validate.positive(variance=variance)
  if variance > MAX_SKELLAM:
    raise UserError("must be <= 2^32; scale by less", field="variance", value=variance)
  return rng.poisson(variance / 2, shape) - rng.poisson(variance / 2, shape)


# --- rounding


def rounded_norm_bound(l2_norm: float, *, dim: int, beta: float = BETA) -> float:
  """Returns a bound on the L2 norm of a vector of norm `l2_norm` after `round_randomly`.

  With l2 = l2_norm, on a grid of step 1 in R^d, the bound is the smaller one of l2 + sqrt(d) and
  sqrt(l2^2 + d / 4 + sqrt(2 ln(1 / beta)) (l2 + sqrt(d) / 2)). The source is proposition 22 of
  Kairouz, Liu and Steinke 2021, arXiv:2102.06387. Account for noise with this sensitivity, not with
  `l2_norm`.

  Args:
    l2_norm: L2 norm before rounding, in steps of the grid.
    dim: number of coordinates d.
    beta: largest chance, in [0, 1), that one random rounding exceeds the bound. 0 gives the bound
      for the worst case, which always holds.

  >>> rounded_norm_bound(3.0, dim=4, beta=0.0), round(rounded_norm_bound(100.0, dim=4), 3)
  (5.0, 100.509)
  """
  validate.positive(l2_norm=l2_norm)
  validate.integer_at_least(1, dim=dim)
  worst = l2_norm + math.sqrt(dim)
  if beta == 0:
    return worst
  validate.open_unit(beta=beta)
  typical = l2_norm**2 + dim / 4
  typical += math.sqrt(2 * math.log(1 / beta)) * (l2_norm + math.sqrt(dim) / 2)
  return min(worst, math.sqrt(typical))


def round_randomly(
  rng: np.random.Generator, vector: HostArray, *, l2_norm: float, beta: float = BETA
) -> np.ndarray:
  """Rounds each coordinate of `vector` [d] up or down at random, to int64 [d].

  The whole vector is rounded again until its norm is at most `rounded_norm_bound(l2_norm, dim=d,
  beta=beta)`. After 1000 tries it is rounded toward zero. Repetition biases the result slightly.

  Args:
    l2_norm: bound on the vector's norm, in steps of the grid: scale * clip norm.
    beta: as for `rounded_norm_bound`.

  Raises:
    UserError: the vector was not clipped to `l2_norm`, is not finite, or is not [d].

  >>> round_randomly(np.random.default_rng(0), [2.0, -1.0], l2_norm=2.3)
  array([ 2, -1])
  """
  vector = np.asarray(vector, np.float64)
  if vector.ndim != 1 or not np.isfinite(vector).all():
    raise UserError(f"must be finite and flat, got shape {vector.shape}", field="vector")
  bound = rounded_norm_bound(l2_norm, dim=max(vector.size, 1), beta=beta)
  # The factor allows for float rounding of the clip. `within` checks the rounded vector exactly.
  if np.linalg.norm(vector) > l2_norm * (1 + 1e-6):
    raise UserError(
      f"its norm {np.linalg.norm(vector):.6g} must be <= l2_norm={l2_norm!r}; clip it",
      field="vector",
    )
  low = np.floor(vector)
  for _ in range(_TRIES):
    rounded = (low + (rng.random(vector.size) < vector - low)).astype(np.int64)
    if within(rounded, bound):
      return rounded
  # Rounding towards zero ends the search, since it never makes a vector longer.
  return np.trunc(vector).astype(np.int64)


def within(rounded: np.ndarray, bound: float) -> bool:
  """Returns whether an integer vector's L2 norm is at most `bound`, by exact integer squares.

  >>> within(np.array([3, 4]), 5.0), within(np.array([3, 4]), 4.999)
  (True, False)
  """
  # Squares beyond 64 bits would wrap around silently in NumPy, but not in Python.
  fits = int(np.abs(rounded).max(initial=0)) ** 2 * rounded.size < 2**63
  exact = rounded.astype(np.int64 if fits else object)
  return int(exact @ exact) <= bound * bound


# --- the ring


def wrap(values: HostArray, modulus: int) -> np.ndarray:
  """Reduces integers modulo `modulus`, to the range [-(modulus // 2), modulus - modulus // 2).

  >>> wrap(np.array([3, 4, -5, 8]), 8)
  array([ 3, -4,  3,  0])
  """
  validate.integer_at_least(2, modulus=modulus)
  values = np.asarray(values)
  if values.dtype.kind not in "iu":
    raise UserError(
      f"must be integers, got {values.dtype}; round them first", field="values"
    )
  half = modulus // 2
  return np.mod(values.astype(np.int64) + half, modulus) - half


def wrap_probability(
  *, modulus: int, largest_sum: float, variance: float, dim: int, noise: str
) -> float:
  """Returns an upper bound on the chance that a noisy sum wraps around in any coordinate.

  Wrapping makes the result wrong, but costs no privacy: it is post-processing.

  Args:
    largest_sum: bound on the absolute value of every coordinate of the sum before noise, such as
      num_clients * rounded_norm_bound(...).
    variance: variance of the whole noise on one coordinate.
    noise: "discrete_gaussian" (2 exp(-t^2 / (2 v)), [1] corollary 17) or "skellam" (Chernoff:
      2 exp(sqrt(v^2 + t^2) - v - t asinh(t / v))). These are bounds for one coordinate, with
      v = variance and t = modulus // 2 - largest_sum.

  >>> wrap_probability(modulus=2**16, largest_sum=3e4, variance=1e4, dim=10, noise="skellam") < 1e-9
  True
  """
  validate.integer_at_least(2, modulus=modulus)
  validate.integer_at_least(1, dim=dim)
  validate.positive(variance=variance)
  validate.non_negative(largest_sum=largest_sum)
  validate.one_of(("skellam", "discrete_gaussian"), noise=noise)
  margin = modulus // 2 - largest_sum
  if margin <= 0:
    return 1.0
  # This is Chernoff's bound on a Gaussian tail. Skellam noise has a heavier tail.
  exponent = -(margin**2) / (2 * variance)
  if noise == "skellam":
    exponent = (
      math.hypot(variance, margin) - variance - margin * math.asinh(margin / variance)
    )
  return min(1.0, 2 * dim * math.exp(exponent))


def scale_for(
  *,
  l2_clip_norm: float,
  noise_multiplier: float,
  num_clients: int,
  bits: int,
  num_stds: float = 6.0,
  spread: float = 1.0,
) -> float:
  """Returns the largest scale (grid points per unit) at which a sum with noise fits `bits` bits.

  A larger scale makes rounding cost less. Each of `num_clients` vectors of norm `l2_clip_norm` is
  scaled, and rounded up by at most 1. The noise has a standard deviation of
  noise_multiplier * l2_clip_norm * scale, and `num_stds` standard deviations must fit. If all these
  terms have one sign, they fill half of the range of 2^bits.

  Args:
    spread: largest coordinate of a vector of norm 1. After a rotation it is far below 1, except
      with a small chance (`rotated_spread`).

  Raises:
    UserError: too few bits for so many clients.

  >>> scale_for(l2_clip_norm=1.0, noise_multiplier=1.0, num_clients=58, bits=8)
  1.09375
  """
  validate.positive(l2_clip_norm=l2_clip_norm, num_stds=num_stds, spread=spread)
  validate.non_negative(noise_multiplier=noise_multiplier)
  validate.integer_at_least(1, num_clients=num_clients, bits=bits)
  # Each client's rounding may add up to 1 to a coordinate of the sum.
  margin = 2.0 ** (bits - 1) - num_clients
  if margin <= 0:
    raise UserError(
      f"2^(bits - 1) must be > num_clients={num_clients}", field="bits", value=bits
    )
  return margin / (l2_clip_norm * (num_clients * spread + num_stds * noise_multiplier))


def rotated_spread(dim: int, *, chance: float = 1e-6) -> float:
  """Returns a bound on the largest coordinate of a unit vector in R^dim after a random rotation.

  The rotation is H D: random signs D, then the orthonormal Hadamard transform H. The bound is
  min(1, sqrt(2 ln(2 dim / chance) / dim)), by Hoeffding's inequality. It fails with probability at
  most `chance`, if the signs are independent of the vector. It serves against wrapping around, on
  which privacy does not depend.

  >>> round(rotated_spread(4096), 3), rotated_spread(4)
  (0.106, 1.0)
  """
  validate.integer_at_least(1, dim=dim)
  validate.open_unit(chance=chance)
  return min(1.0, math.sqrt(2 * math.log(2 * dim / chance) / dim))


def encode(
  rng: np.random.Generator,
  vector: HostArray,
  *,
  l2_clip_norm: float,
  scale: float,
  beta: float = BETA,
) -> np.ndarray:
  """Clips, scales and rounds a client's vector [d], to int64 [d] without noise.

  Guarantee: the norm of the result is at most
  rounded_norm_bound(scale * l2_clip_norm, dim=d, beta=beta).

  >>> encode(np.random.default_rng(0), [30.0, 40.0], l2_clip_norm=5.0, scale=2.0)
  array([6, 8])
  """
  validate.positive(l2_clip_norm=l2_clip_norm, scale=scale)
  vector = np.asarray(vector, np.float64)
  norm = float(np.linalg.norm(vector))
  clipped = vector * (scale * min(1.0, l2_clip_norm / norm if norm > 0 else 1.0))
  return round_randomly(rng, clipped, l2_norm=scale * l2_clip_norm, beta=beta)


def decode(total: HostArray, *, modulus: int, scale: float) -> np.ndarray:
  """Decodes the server's sum modulo `modulus`, back to the units of the clients' vectors.

  >>> decode(np.array([6, 254]), modulus=256, scale=2.0)
  array([ 3., -1.])
  """
  validate.positive(scale=scale)
  return wrap(total, modulus) / scale

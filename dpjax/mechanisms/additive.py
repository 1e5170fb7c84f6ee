"""Noise added to a number or a vector: Laplace, classic Gaussian, analytic Gaussian.

Noise is drawn by `dpjax.noise`, in the float type of the value (at least float32). Outputs are
rounded to a public grid; the module `finite` says what is not proved about this. Laplace noise ends
at 133 scales, and Gaussian noise here at 16.3 standard deviations. Each misses at most 2^-192 of
its mass, which costs at most e^epsilon 2^-191 of delta for each coordinate. `Gaussian.delta`
includes that cost for one coordinate. `Gaussian.calibrated` refuses a delta so small that the tails
of a million coordinates would raise it by more than 0.1 %.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np
from scipy import special

from dpjax import trees, validate
from dpjax.mechanisms import finite, stated
from dpjax.noise import source
from dpjax.validate import UserError, Verbatim

METHODS = ("analytic", "classic")
# Below this argument the normal distribution function is 0 in float64.
_NO_MASS = -1e3
# Bound on the rounding error of a sum of logarithms, relative to the sum of their absolute values.
_ROUNDING = 4e-16
# Range in which the logarithm of a noise multiplier is searched.
_LOG_RANGE = (-20.0, 35.0)
# Logarithm of 2 * 2^-192: twice the mass that noise with finite tails misses.
_LOG_TAIL = -191 * math.log(2)
# Largest share of delta that the tails of one coordinate may cost. A million coordinates then cost
# at most 0.1 % of delta.
_TAIL_SHARE = 1e-9


@dataclasses.dataclass(frozen=True)
class Laplace:
  """Adds Laplace noise of scale l1_sensitivity / epsilon to every coordinate of a value.

  Guarantee: (epsilon, 0)-DP if one record moves `value` by at most `l1_sensitivity` in the L1
  norm, under `neighboring_relation`.
  Source: Dwork, McSherry, Nissim and Smith 2006; Dwork and Roth 2014, theorem 3.6.

  | input                        | outcome                               |
  | ---------------------------- | ------------------------------------- |
  | NaN or infinity in the value | UserError; not checked under tracing  |
  | integers                     | become float32, or float64 if they    |
  |                              | have 64 bits and x64 is enabled; they |
  |                              | are not rounded before the noise      |
  | bfloat16, float16            | noised and returned as float32        |
  | complex numbers, strings     | UserError                             |

  >>> mechanism = Laplace(epsilon=0.5, l1_sensitivity=1.0)
  >>> mechanism.scale, mechanism.event()
  (2.0, LaplaceDpEvent(noise_multiplier=2.0))
  >>> mechanism(jax.random.key(0), np.array([10, 20])).shape
  (2,)
  """

  epsilon: float
  l1_sensitivity: float
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    stated.positive(epsilon=self.epsilon, l1_sensitivity=self.l1_sensitivity)
    stated.positive(scale=self.scale)
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)

  @property
  def scale(self) -> float:
    """Returns the mean absolute value of the noise; the std is sqrt(2) times as large."""
    return float(self.l1_sensitivity) / float(self.epsilon)

  def __call__(self, key: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `value` [...] with noise on each entry, rounded to a public grid."""
    return self.on(key, *finite.pair("value", value, self.scale))

  def on(self, key: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """Adds noise to high + low, [...]. The two floats hold digits that one of them would lose."""
    trees.check_key(key=key)
    return finite.add_noise(source.laplace, key, high, low, self.scale)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event for `dpjax.accounting`, under `neighboring_relation`."""
    return stated.laplace_event(
      1 / float(self.epsilon), self.neighboring_relation, neighboring_relation
    )


@dataclasses.dataclass(frozen=True)
class Gaussian:
  """Adds Gaussian noise of std noise_multiplier * l2_sensitivity to every coordinate of a value.

  Guarantee: (epsilon, delta)-DP for every epsilon >= 0, if one record moves `value` by at most
  `l2_sensitivity` in the L2 norm, under `neighboring_relation`. Delta is
  `gaussian_delta(noise_multiplier, epsilon)`, which is exact for real noise, plus
  e^epsilon 2^-191 for each coordinate, because the tails are finite.
  Source: Balle and Wang 2018, arXiv:1805.06530, theorem 8. Edge cases: see `Laplace`.

  >>> mechanism = Gaussian.calibrated(epsilon=2.0, delta=1e-5, l2_sensitivity=3.0)  # doctest: +SLOW
  >>> round(mechanism.noise_multiplier, 4), round(mechanism.std, 4)
  (1.9938, 5.9814)
  >>> mechanism(jax.random.key(0), np.zeros(4)).shape
  (4,)
  """

  noise_multiplier: float
  l2_sensitivity: float
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    stated.positive(
      noise_multiplier=self.noise_multiplier, l2_sensitivity=self.l2_sensitivity
    )
    stated.positive(std=self.std)
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)

  @classmethod
  def calibrated(
    cls,
    *,
    epsilon: float,
    delta: float,
    l2_sensitivity: float,
    neighboring_relation: str = "add_or_remove_one",
    method: str = "analytic",
  ) -> Gaussian:
    """Returns the mechanism with the least noise that is (epsilon, delta)-DP.

    `method="classic"` uses the textbook formula, which gives more noise."""
    validate.one_of(METHODS, method=method)
    formula = (
      analytic_noise_multiplier if method == "analytic" else classic_noise_multiplier
    )
    mechanism = cls(formula(epsilon, delta), l2_sensitivity, neighboring_relation)
    # delta * _TAIL_SHARE may underflow to 0, which has no logarithm.
    if float(epsilon) + _LOG_TAIL > math.log(delta * _TAIL_SHARE or 5e-324):
      raise UserError(
        f"too small beside e^{epsilon!r} 2^-191, the tails of finite noise",
        field="delta",
        value=delta,
      )
    return mechanism

  @property
  def std(self) -> float:
    """Returns the standard deviation of the noise on each coordinate."""
    return float(self.noise_multiplier) * float(self.l2_sensitivity)

  def delta(self, epsilon: float) -> float:
    """Returns delta at `epsilon` for a value of one coordinate, with the cost of finite tails."""
    exact = gaussian_delta(self.noise_multiplier, epsilon)
    return min(1.0, exact + math.exp(min(0.0, float(epsilon) + _LOG_TAIL)))

  def __call__(self, key: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `value` [...] with noise on each entry, rounded to a public grid."""
    return self.on(key, *finite.pair("value", value, self.std))

  def on(self, key: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """Adds noise to high + low, [...]. The two floats hold digits that one of them would lose."""
    trees.check_key(key=key)
    draw = functools.partial(source.gaussian, long_tails=True)
    return finite.add_noise(draw, key, high, low, self.std)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event for `dpjax.accounting`, under `neighboring_relation`."""
    return stated.gaussian_event(
      float(self.noise_multiplier), self.neighboring_relation, neighboring_relation
    )


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
  """Returns the delta at `epsilon` of real Gaussian noise of std `noise_multiplier`, sensitivity 1.

  A bound on the rounding error is added, so that delta is never too small. The bound is
  4e-16 p (1 + |ln p| + |ln q| + epsilon), where z is the noise multiplier,
  p = Phi(1 / (2 z) - epsilon z) and q = Phi(-1 / (2 z) - epsilon z).
  Source: Balle and Wang 2018, arXiv:1805.06530, equation 6.

  >>> round(gaussian_delta(1.0, 1.0), 4)
  0.1269
  """
  stated.positive(noise_multiplier=noise_multiplier)
  validate.non_negative(epsilon=epsilon)
  noise_multiplier = float(noise_multiplier)
  epsilon = float(epsilon)
  half = 0.5 / noise_multiplier
  middle = epsilon * noise_multiplier
  # Here delta is below the least float above 0, which is returned as an upper bound.
  if half - middle < _NO_MASS:
    return math.ulp(0.0)
  log_near, log_far = map(
    float, special.log_ndtr(np.array([half - middle, -half - middle]))
  )
  # With p = e^log_near and q = e^log_far, delta is p - e^epsilon q. `expm1` keeps the digits that a
  # difference of two nearly equal products would lose.
  difference = -math.expm1(min(0.0, epsilon + log_far - log_near))
  # A bound on the rounding error is added, so that the answer is never too small.
  rounding = _ROUNDING * (1 + abs(log_near) + abs(log_far) + epsilon)
  delta = math.exp(log_near) * min(1.0, max(0.0, difference) + rounding)
  return max(delta, math.ulp(0.0))


def analytic_noise_multiplier(epsilon: float, delta: float) -> float:
  """Returns the least std / sensitivity of (epsilon, delta)-DP Gaussian noise, for any epsilon > 0.

  Guarantee: `gaussian_delta(answer, epsilon) <= delta`, rounding included.
  Raises UserError if the answer is outside of e^-20 .. e^35.
  Source: Balle and Wang 2018, arXiv:1805.06530, algorithm 1 (here by bisection).

  >>> [round(analytic_noise_multiplier(e, 1e-3), 4) for e in (1.0, 8.0)]
  [2.5747, 0.48]
  """
  stated.positive(epsilon=epsilon)
  validate.open_unit(delta=delta)
  excess = lambda log_z: gaussian_delta(math.exp(log_z), epsilon) - delta
  if excess(_LOG_RANGE[0]) <= 0 or excess(_LOG_RANGE[1]) > 0:
    raise UserError(
      "beyond what float64 can calibrate",
      field="epsilon",
      value=Verbatim(f"{epsilon!r}, delta={delta!r}"),
    )
  low, high = _LOG_RANGE
  while high - low > 1e-13:
    middle = (low + high) / 2
    low, high = (middle, high) if excess(middle) > 0 else (low, middle)
  # At the upper end of the bracket, delta is at most the requested one.
  return math.exp(high)


def classic_noise_multiplier(epsilon: float, delta: float) -> float:
  """Returns sqrt(2 ln(1.25 / delta)) / epsilon, which is proved for 0 < epsilon < 1 only.

  Raises UserError for epsilon >= 1, where the formula is unproved. Above an epsilon of about 8 it
  is false: at epsilon 10 and delta 1e-5 the true epsilon is 10.39 (pitfall P24).
  Source: Dwork and Roth 2014, theorem A.1.

  >>> round(classic_noise_multiplier(0.5, 1e-5), 3)
  9.69
  """
  validate.open_unit(delta=delta)
  stated.positive(epsilon=epsilon)
  if epsilon >= 1:
    raise UserError(
      "must be below 1 for the classic Gaussian formula; the analytic one holds "
      "for every epsilon",
      field="epsilon",
      value=epsilon,
    )
  # The logarithms are subtracted, since 1.25 / delta could overflow for a tiny delta.
  return math.sqrt(2 * (math.log(1.25) - math.log(delta))) / float(epsilon)


def calibrate(
  *, epsilon: float, delta: float, l1: float, l2: float, neighboring_relation: str
) -> Laplace | Gaussian:
  """Returns `Laplace` noise if delta is 0, else analytic `Gaussian` noise.

  `l1` and `l2` are the sensitivities of the value in the L1 and the L2 norm.

  >>> calibrate(epsilon=1.0, delta=0, l1=2.0, l2=1.5, neighboring_relation="replace_one")
  Laplace(epsilon=1.0, l1_sensitivity=2.0, neighboring_relation='replace_one')
  """
  validate.non_negative(delta=delta)
  if delta == 0:
    return Laplace(epsilon, l1, neighboring_relation)
  return Gaussian.calibrated(
    epsilon=epsilon,
    delta=delta,
    l2_sensitivity=l2,
    neighboring_relation=neighboring_relation,
  )

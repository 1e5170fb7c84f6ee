"""Logistic regression on shares, whose opened weights are differentially private.

Output perturbation (Chaudhuri, Monteleoni and Sarwate 2011, arXiv:0912.0071, algorithm 1; Wu et
al. 2017, arXiv:1606.04722; among several parties, Jayaraman et al. 2018). The bound
is proved for what really runs: K full-batch gradient steps in fixed point, with SecureML's
piecewise-linear sigmoid s(z) = min(max(z + 1/2, 0), 1).

What runs
---------
A row is v = (x, 1) with |x| <= C, so |v| <= R = sqrt(C^2 + 1), and k labels y in {0, 1}. From
w = 0, with u = 2^-f, rate a and penalty l,

  w <- w - trunc((a / n) (sum_i v_i (s(trunc(v_i w)) - y_i) + n l w)),

where trunc is the masked truncation of `products`: it returns one of the two multiples of u next to
its argument. Sums, comparisons and the products before a truncation are exact in the ring, as long
as nothing leaves it; `OutputNoise` checks that from `radius`. These steps descend the mean over
rows of the loss S(v w) - y v w, with S' = s, plus l |w|^2 / 2. The loss is convex, and its gradient
is R-Lipschitz in v w. It is no logistic loss, and the proof never uses one.

Sensitivity
-----------
Two data sets of n rows differ in one row. For one column of w (k = 1):

1. For two weights w, w' and the same rows, the exact steps G satisfy
   G(w) - G(w') = (I - a l - a H)(w - w'). Here H = (1 / n) sum_i t_i v_i v_i^T, with
   t_i = (s(v_i w) - s(v_i w')) / (v_i w - v_i w') in [0, 1]. So 0 <= H <= R^2, and G contracts by
   c = max(1 - a l, a (R^2 + l) - 1). A rate with c >= 1 is refused.
2. Rounding moves a step by at most p = u (a R + sqrt(d + 1)): each trunc(v_i w) errs by less than
   u, s is 1-Lipschitz, and the mean of errors times |v_i| <= R is at most u R; the truncation of
   the step errs by less than u in each of the d + 1 numbers. This holds for EVERY outcome of the
   random truncations, on both data sets.
3. The radius r of w grows to c r + a R / 2 + p at most: the step from 0 has length a R / 2 or less.
4. The replaced row moves the mean gradient, at the same w, by at most 2 R g / n with
   g = min(1, 1/2 + R r): |s(z) - y| <= min(1, 1/2 + |z|).

A distance D between the weights of both data sets therefore grows to at most
c D + 2 a R g / n + 2 p in a step. With k columns, the bounds in 4 and 2 are multiplied by sqrt(k).
For K to infinity without rounding, and g = 1, the distance becomes Chaudhuri's 2 R / (n l).

Noise
-----
Weights are integers in units of u, and so is the noise: an exact discrete Gaussian on each of them
(Canonne, Kamath and Steinke 2020, arXiv:2004.00010), so no float is added to a secret. EACH party
adds all of it. A party can subtract its own noise from the opened sum, but the noise of the other
party stays. Epsilon counts one party's noise, also against those who see the model alone.
Random truncation and noise are independent, so the outcome is a mixture over truncations; the
Renyi divergence of a mixture is at most the largest of its pairs, which 1-4 bound.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
from typing import NamedTuple

import numpy as np

from dpjax import accounting, validate
from dpjax.accounting import text
from dpjax.accounting.event_kinds.discrete_gaussian import DiscreteGaussianDpEvent
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.proved import REPLACE
from dpjax.noise import discrete
from dpjax.secure import row_norms
from dpjax.secure.mpc import comparison, ring64
from dpjax.secure.mpc.party import Party
from dpjax.secure.mpc.products import Shares, matmul, truncate
from dpjax.types import ArrayLike
from dpjax.validate import UserError, Verbatim

# Rows are scaled to this fraction of their bound. The margin exceeds float64's error in a norm.
_INSIDE = 1 - 1e-9
# Bounds are float sums. They are multiplied by this factor, which exceeds their rounding errors.
_UPWARDS = 1 + 1e-9
# The opened model must stay in the range of fixed point up to this many standard deviations of each
# party's noise.
_TAIL = 12
MOST_STEPS = 10**6
_LARGEST = 2.0**62


class _Bounds(NamedTuple):
  l2_sensitivity: float
  radius: float


@dataclasses.dataclass(frozen=True)
class OutputNoise:
  """Public numbers of a training on shares and of the noise on the model that is opened.

  Args:
    num_rows: n, the number of rows of all owners together; public.
    num_features: d, without the constant.
    l2_penalty: l, for weights and bias. n l is rounded to the grid; `penalty` is what runs.
    num_steps: K, full-batch gradient steps from weights of 0.
    noise_multiplier: standard deviation of ONE party's noise, divided by `l2_sensitivity`.
    feature_norm: C, the norm to which each owner clips its rows by `rows`.
    num_outputs: k, the number of label columns: one for two classes, else one for each class.
    learning_rate: a; a / n must be a power of two. None: the largest that contracts by 1 - a l.
    frac_bits: f, the fraction bits of the fixed point; the party must have the same.

  Guarantee: what `release` opens, and the view of either party in `train` and `release`, is
  `event()`-private under replace_one. The unit is one row of any owner or, if columns are split,
  the part of a row that another party holds. The module has the proof. It assumes that parties and
  dealer follow the protocol (honest but curious), and that nobody tells another its share or its
  noise. Owners must clip by `rows` or `bounded_rows`. ChaCha20 masks count as uniform. A second
  release costs epsilon again.

  Raises:
    UserError: no penalty; a rate that is too large, or that divided by n is no power of two; or
      sums or noise that would leave the ring.

  >>> mechanism = OutputNoise(num_rows=64, num_features=2, l2_penalty=0.5, num_steps=50,
  ...   noise_multiplier=4.0)
  >>> round(mechanism.l2_sensitivity, 4), round(2 * math.sqrt(2) / (64 * 0.5), 4)
  (0.0885, 0.0884)
  >>> round(mechanism.epsilon(delta=1e-5), 2)
  1.01
  """

  num_rows: int
  num_features: int
  l2_penalty: float
  num_steps: int
  noise_multiplier: float
  feature_norm: float = 1.0
  num_outputs: int = 1
  learning_rate: float | None = None
  frac_bits: int = ring64.FRAC_BITS

  def __post_init__(self) -> None:
    validate.integer_in(1, 2**24, num_rows=self.num_rows, num_features=self.num_features)
    validate.integer_in(1, MOST_STEPS, num_steps=self.num_steps)
    validate.integer_in(1, 2**16, num_outputs=self.num_outputs)
    validate.integer_in(1, ring64.MOST_FRAC_BITS, frac_bits=self.frac_bits)
    validate.positive(
      feature_norm=self.feature_norm, noise_multiplier=self.noise_multiplier
    )
    if not self.l2_penalty > 0:
      raise UserError(
        "must be > 0: without a penalty no step contracts, and nothing is proved",
        field="l2_penalty",
        value=self.l2_penalty,
      )
    # Fixed point holds no number of 2^62 or more. Far larger ones overflow when they are squared.
    for field in ("feature_norm", "noise_multiplier", "l2_penalty"):
      if not getattr(self, field) < _LARGEST:
        raise UserError(
          "must be < 2^62, or nothing fits fixed point",
          field=field,
          value=getattr(self, field),
        )
    # NumPy integers wrap around: 255 features (uint8) and a bias would be 0, and the bound would
    # be too small.
    for field in ("num_rows", "num_features", "num_steps", "num_outputs", "frac_bits"):
      object.__setattr__(self, field, int(getattr(self, field)))
    # `shift` is read for its checks alone.
    _ = self.shift
    self._check_rate()
    self._check_range()

  @property
  def row_norm(self) -> float:
    """R, the bound on the norm of a row with its constant."""
    return math.sqrt(float(self.feature_norm) ** 2 + 1)

  @property
  def rate(self) -> float:
    """a, the rate of every step."""
    if self.learning_rate is not None:
      return float(self.learning_rate)
    largest = 2 / (self.row_norm**2 + 2 * float(self.l2_penalty))
    return self.num_rows * 2.0 ** math.floor(math.log2(largest / self.num_rows))

  @property
  def shift(self) -> int:
    """s with rate / n = 2^-s. A step divides by 2^s, by truncation."""
    validate.positive(learning_rate=self.rate)
    exponent = math.log2(self.num_rows / self.rate)
    # With a rate near 0 the quotient num_rows / rate, and so the exponent, is infinite.
    fits = exponent < math.inf and 0 <= exponent + self.frac_bits <= 62
    if self.learning_rate is None and not fits:
      # The rate is about 2 / (R^2 + 2 l), so the error names the field of the larger term.
      is_norm = self.row_norm**2 > 2 * self.l2_penalty
      field = "feature_norm" if is_norm else "l2_penalty"
      raise UserError(
        f"leaves the learning rate {self.rate:.3g}, which over num_rows is below "
        f"{2.0 ** (self.frac_bits - 62):g}, the least in fixed point; must be smaller",
        field=field,
        value=getattr(self, field),
      )
    if not (fits and exponent == round(exponent)):
      raise UserError(
        f"over num_rows, {self.num_rows}, must be a power of two: steps are truncations; "
        "none chooses the largest",
        field="learning_rate",
        value=self.rate,
      )
    return int(exponent)

  @property
  def penalty(self) -> float:
    """The penalty that runs: n l rounded to a multiple of 2^-f, and divided by n."""
    return self._penalty_units * self._unit / self.num_rows

  @property
  def l2_sensitivity(self) -> float:
    """Bound on the distance, before noise, between the weights of two data sets that differ in a
    row."""
    return self._bounds.l2_sensitivity

  @property
  def radius(self) -> float:
    """Bound on the norm of a column of weights before noise, on any data."""
    return self._bounds.radius

  @property
  def std(self) -> float:
    """Standard deviation of one party's noise on each weight."""
    return math.sqrt(self.variance) * self._unit

  @property
  def variance(self) -> int:
    """Variance of one party's noise in squared units of the grid, a whole number."""
    units = self.l2_sensitivity / self._unit
    return max(1, math.ceil((float(self.noise_multiplier) * units) ** 2))

  def event(self, neighboring_relation: str = REPLACE) -> DpEvent:
    """Returns the event of one release, under replace_one alone: the number of rows is public."""
    if neighboring_relation != REPLACE:
      raise UserError(
        f"must be {REPLACE}: the number of rows is public",
        field="neighboring_relation",
        value=neighboring_relation,
      )
    # The accountant doubles the norm of one record, so the norm given here is half of the distance.
    half = self.l2_sensitivity / self._unit / 2
    return DiscreteGaussianDpEvent(math.sqrt(self.variance) / half)

  def epsilon(self, *, delta: float) -> float:
    """Returns epsilon of one release under replace_one."""
    return accounting.epsilon(
      self.event(), delta=delta, neighboring_relation=REPLACE, accountant="rdp"
    )

  def calibrated(self, *, epsilon: float, delta: float) -> OutputNoise:
    """Returns the same training with the least noise that is (epsilon, delta)-private by RDP."""

    def event_of(noise_multiplier: float) -> DpEvent:
      # The factor is 2, because the accountant takes noise relative to half of the distance.
      return DiscreteGaussianDpEvent(2 * noise_multiplier)

    needed = accounting.calibrate_noise_multiplier(
      event_of,
      epsilon=epsilon,
      delta=delta,
      neighboring_relation=REPLACE,
      accountant="rdp",
    )
    return dataclasses.replace(self, noise_multiplier=needed)

  def statement(self) -> str:
    """Returns a privacy statement about the release."""
    # Numbers are rounded so that none claims more than is proved.
    moved = accounting.upper(self.l2_sensitivity)
    std = text.lower(self.std)
    norm = accounting.upper(self.feature_norm, digits=6)
    return (
      f"Released once: a linear model of {self.num_features} features after {self.num_steps} "
      f"full-batch gradient steps on shares of {self.num_rows} rows, each clipped by its owner to "
      f"norm {norm}; penalty {self.penalty:g}, rate {self.rate:g}. One replaced row moves it by "
      f"{moved} at most, fixed-point rounding included. Each of two parties adds "
      f"discrete Gaussian noise of standard deviation {std}, and one "
      "party's is counted: it covers the view of the other party, who knows its own noise, as "
      "far as ChaCha20, which hides the shares, looks uniform to it. "
      "It does not cover parties that deviate from the protocol or pool what they know."
    )

  def rows(self, x: ArrayLike) -> np.ndarray:
    """Returns an owner's clipped rows with the constant 1, [m, d + 1], to be shared.

    Args:
      x: [m, d].
    """
    clipped = bounded_rows(x, self.feature_norm, frac_bits=self.frac_bits)
    if clipped.shape[1] != self.num_features:
      raise UserError(f"must be [m, {self.num_features}], not {clipped.shape}", field="x")
    return np.concatenate([clipped, np.ones((len(clipped), 1))], axis=1)

  def labels(self, y: ArrayLike) -> np.ndarray:
    """Returns an owner's labels [m, k] as numbers.

    Raises:
      UserError: labels other than 0 and 1, for which nothing is proved.
    """
    values = np.asarray(y, np.float64)
    if values.ndim != 2 or values.shape[1] != self.num_outputs:
      raise UserError(f"must be [m, {self.num_outputs}], not {values.shape}", field="y")
    if not np.isin(values, (0.0, 1.0)).all():
      raise UserError("must be 0 or 1, a column for each class", field="y")
    return values

  def train(
    self,
    party: Party,
    x: Shares,
    y: Shares,
    *,
    weights: Shares | None = None,
    first: int = 0,
    last: int | None = None,
  ) -> Shares:
    """Returns shares [d + 1, k] of the weights, the bias last. Reveals nothing.

    Args:
      x: [n, d + 1] shares of `rows`, of all owners.
      y: [n, k] shares of `labels`.
      weights: shares after `first` steps, to go on from; None: start from weights of 0.
      first, last: range of the steps that run, without `last`; last None: to the end.

    Raises:
      UserError: other shapes, another fixed point, or local truncation, which fails with a
        probability that depends on the data.
    """
    self._check_party(party)
    wanted = (
      (self.num_rows, self.num_features + 1),
      (self.num_rows, self.num_outputs),
    )
    if (x.shape, y.shape) != wanted:
      wrong, given, shape = (
        ("x", x.shape, wanted[0]) if x.shape != wanted[0] else ("y", y.shape, wanted[1])
      )
      raise UserError(f"must be {shape}", field=f"{wrong}.shape", value=given)
    validate.integer_in(0, self.num_steps, first=first)
    last = self.num_steps if last is None else last
    validate.integer_in(first, self.num_steps, last=last)
    if (weights is None) != (first == 0):
      raise UserError("must be 0, or weights must be given", field="first", value=first)
    if weights is None:
      weights = np.zeros(self._shape, np.uint64)
    columns = np.ascontiguousarray(x.T)
    for _ in range(first, last):
      scores = matmul(party, x, weights)  # [n, k]
      error = comparison.sigmoid(party, scores) - y
      # Products have twice the fraction bits. The penalty n l is a public word, so its product
      # with the weights needs no message, and one truncation rounds the sum of both products.
      gradient = matmul(party, columns, error, surplus=0)
      gradient = gradient + weights * np.uint64(self._penalty_units)
      weights = weights - truncate(party, gradient, party.frac_bits + self.shift)
    return weights

  def release(
    self, party: Party, weights: Shares, *, rng: np.random.Generator | None = None
  ) -> np.ndarray:
    """Reveals the weights plus both parties' noise to both. Returns them, [d + 1, k] float64.

    Args:
      weights: shares of `train`.
      rng: generator that only this party knows; None: one from the operating system's entropy.
    """
    self._check_party(party)
    if weights.shape != self._shape:
      raise UserError(f"must be {self._shape}, not {weights.shape}", field="weights")
    noise = self.noise(secret_generator() if rng is None else rng)
    (opened,) = party.open(weights + noise.view(np.uint64))
    return ring64.decode(opened, self.frac_bits)

  def noise(self, rng: np.random.Generator, count: int | None = None) -> np.ndarray:
    """Draws one party's noise [d + 1, k] in units of the grid, int64.

    Args:
      count: number of draws, [count, d + 1, k], for an audit; None: one draw.
    """
    shape = self._shape if count is None else (count, *self._shape)
    return discrete.wide_discrete_gaussian(rng, shape, variance=self.variance)

  def in_the_clear(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the weights [d + 1, k] of the same integer steps in the clear, before noise. NOT
    private.

    Every truncation rounds down. This is one of the outcomes that the protocol may have.

    Args:
      x: [n, d + 1] of `rows`.
      y: [n, k] of `labels`.
    """
    scale = 2.0**self.frac_bits
    rows = (np.asarray(x) * scale).astype(np.int64)
    labels = (np.asarray(y) * scale).astype(np.int64)
    weights = np.zeros(self._shape, np.int64)
    half = np.int64(1 << (self.frac_bits - 1))
    for _ in range(self.num_steps):
      scores = (rows @ weights) >> self.frac_bits
      error = np.clip(scores + half, 0, 2 * half) - labels
      gradient = rows.T @ error + self._penalty_units * weights
      weights = weights - (gradient >> (self.frac_bits + self.shift))
    return weights / scale

  @property
  def _shape(self) -> tuple[int, int]:
    return self.num_features + 1, self.num_outputs

  @property
  def _unit(self) -> float:
    return 2.0**-self.frac_bits

  @property
  def _penalty_units(self) -> int:
    return round(float(self.l2_penalty) * self.num_rows * 2**self.frac_bits)

  @property
  def _contraction(self) -> float:
    smooth = self.row_norm**2
    return max(1 - self.rate * self.penalty, self.rate * (smooth + self.penalty) - 1)

  @functools.cached_property
  def _bounds(self) -> _Bounds:
    """Computes `l2_sensitivity` and `radius`: bounds after all steps (module, 1 to 4)."""
    rate = self.rate
    norm = self.row_norm
    factor = self._contraction
    columns = math.sqrt(self.num_outputs)
    rounding = self._unit * (rate * norm + math.sqrt(self.num_features + 1))
    distance = 0.0
    radius = 0.0
    for _ in range(self.num_steps):
      slope = min(1.0, 0.5 + norm * radius)
      moved = 2 * rate * norm * slope / self.num_rows + 2 * rounding
      distance = factor * distance + columns * moved
      radius = factor * radius + rate * norm / 2 + rounding
    return _Bounds(_UPWARDS * distance, _UPWARDS * radius)

  def _check_rate(self) -> None:
    if not self._penalty_units:
      raise UserError(
        f"times num_rows must be >= {self._unit:g}, a step of the grid",
        field="l2_penalty",
        value=self.l2_penalty,
      )
    if not self._contraction < 1:
      most = 2 / (self.row_norm**2 + self.penalty)
      raise UserError(
        f"must be < {most:g} = 2 / (R^2 + l2_penalty), or steps do not contract",
        field="learning_rate",
        value=self.rate,
      )

  def _check_range(self) -> None:
    """Refuses numbers for which a sum could leave the ring, where it would wrap silently."""
    norm = self.row_norm
    # The argument of a truncation must be below 2^62 in units of 2^-2f.
    most = 2.0 ** (62 - 2 * self.frac_bits)
    gradient = self.num_rows * (norm + self.penalty * self.radius)
    if not max(gradient, norm * self.radius) < most:
      raise UserError(
        f"sums reach {max(gradient, norm * self.radius):.3g}, must be below {most:g}",
        field="frac_bits",
        value=self.frac_bits,
      )
    reached = self.radius + 2 * _TAIL * self.std
    largest = ring64.largest(self.frac_bits)
    if not reached < largest or self.variance > discrete.MAX_WIDE_VARIANCE:
      raise UserError(
        f"noise of std {self.std:.3g} leaves fixed point, which ends at {largest:g}",
        field="noise_multiplier",
        value=self.noise_multiplier,
      )

  def _check_party(self, party: Party) -> None:
    if party.truncation != "masked":
      raise UserError(
        "must be 'masked': the other one fails with a probability that depends on the data",
        field="truncation",
        value=party.truncation,
      )
    if party.frac_bits != self.frac_bits:
      raise UserError(
        f"must be {self.frac_bits}, for which the bound is proved",
        field="frac_bits",
        value=Verbatim(str(party.frac_bits)),
      )


def bounded_rows(
  x: ArrayLike, norm: float, *, frac_bits: int = ring64.FRAC_BITS
) -> np.ndarray:
  """Returns x [m, d], each row clipped to an l2 norm and rounded toward zero to multiples of 2^-f.

  If columns are split, each party clips its part, and the squares of the norms add up. A row with
  NaN or infinity becomes zeros. Each row of the result depends on one row of x alone.

  >>> bounded_rows(np.array([[3.0, 4.0], [0.25, np.nan]]), 2.5, frac_bits=1).tolist()
  [[1.0, 1.5], [0.0, 0.0]]
  """
  validate.positive(norm=norm)
  rows = np.asarray(x, np.float64)
  if rows.ndim != 2:
    raise UserError(f"must be [m, d], not {rows.shape}", field="x")
  rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
  rows = row_norms.shorten(rows, norm, inside=_INSIDE)
  return np.trunc(rows * 2.0**frac_bits) * 2.0**-frac_bits


def secret_generator() -> np.random.Generator:
  """Returns a Philox generator with a key of 128 bits from the operating system's entropy."""
  return np.random.Generator(np.random.Philox(secrets.randbits(256)))

"""Means, histograms and quantiles of bounded numbers.

For a mean or a quantile, values are clipped into public bounds first, so that a sensitivity exists;
a NaN counts as the middle of the bounds. If one call releases several numbers, one epsilon covers
all of them.

Each clipped value is rounded by itself to a multiple of 2^-23 of the bounds' width. In float64 the
unit is 2^-38 of the width, or 2^-30 for quantiles. This rounding raises no sensitivity. Sums and
ranks are then integers, so that rounding of a sum cannot add to the effect of one record. A mean or
a quantile takes at most 2^24 records.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from dpjax import trees, validate
from dpjax.mechanisms import finite, stated
from dpjax.mechanisms.additive import Gaussian, Laplace, calibrate
from dpjax.mechanisms.sensitivity import histogram_sensitivity, mean_sensitivity
from dpjax.noise import source
from dpjax.validate import UserError

_MOST_BINS = 2**31 - 2
_MEAN_RELATIONS = ("replace_one", "add_or_remove_one")


@dataclasses.dataclass(frozen=True)
class _Clipped:
  epsilon: float
  lower: float
  upper: float

  def _shares(self, values: jax.Array) -> jax.Array:
    """Clips `values` [n] into [lower, upper], and maps them linearly to [0, 1]."""
    numbers = finite.array("values", values)
    if numbers.ndim != 1:
      raise UserError(f"must have shape [n], not {numbers.shape}", field="values")
    if numbers.size > finite.MAX_RECORDS:
      raise UserError(
        f"at most {finite.MAX_RECORDS} records, got {numbers.size}", field="values"
      )
    return finite.units("values", numbers, self.lower, self.upper)

  def _at(self, share: jax.Array) -> jax.Array:
    """Maps a relative position, 0 for `lower` and 1 for `upper`, back to a number."""
    return float(self.lower) + (float(self.upper) - float(self.lower)) * share


@dataclasses.dataclass(frozen=True)
class BoundedMean(_Clipped):
  """Mean of numbers clipped into [lower, upper].

  Guarantee: (epsilon, delta)-DP, by Laplace noise if delta is 0, else by analytic Gaussian noise.
  Under replace_one the number of records n is public, and the noise is scaled by
  (upper - lower) / n. Under add_or_remove_one n is private: the sum of the centred values and the
  count get noise together, and the result is computed from their quotient.
  Source: Dwork and Roth 2014, section 3.3.

  | input                         | outcome                                                 |
  | ----------------------------- | ------------------------------------------------------- |
  | no record                     | UserError; under add_or_remove_one a number in          |
  |                               | [lower, upper] that depends on the noise alone          |
  | a value outside of the bounds | counts as the nearest bound                             |
  | NaN                           | counts as the middle of the bounds                      |

  >>> mechanism = BoundedMean(epsilon=1.0, lower=0.0, upper=100.0)  # doctest: +SLOW
  >>> mechanism.noise(num_records=1000).scale  # ages: not 1 / 1000
  0.1
  >>> mechanism(jax.random.key(0), jnp.full(1000, 40.0)).shape
  ()
  """

  delta: float = 0.0
  neighboring_relation: str = "replace_one"

  def __post_init__(self) -> None:
    stated.interval(self.lower, self.upper)
    validate.one_of(_MEAN_RELATIONS, neighboring_relation=self.neighboring_relation)
    # Refuses a wrong epsilon or delta before any call.
    self.noise(num_records=1)

  def noise(self, *, num_records: int) -> Laplace | Gaussian:
    """Returns the mechanism that adds the noise: to the mean, or under add_or_remove_one to the
    pair (centred sum, count)."""
    if self.neighboring_relation == "add_or_remove_one":
      # One record adds its centred value, in [-1, 1], and 1 to the count.
      l1 = 2.0
      l2 = 2.0**0.5
    else:
      l1 = l2 = mean_sensitivity(self.lower, self.upper, num_records=num_records)
    return self._calibrated(l1, l2)

  def _calibrated(self, l1: float, l2: float) -> Laplace | Gaussian:
    return calibrate(
      epsilon=self.epsilon,
      delta=self.delta,
      l1=l1,
      l2=l2,
      neighboring_relation=self.neighboring_relation,
    )

  def __call__(self, key: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the private mean, a scalar, of `values` [n]."""
    trees.check_key(key=key)
    shares = self._shares(values)
    n = shares.size
    lower = float(self.lower)
    upper = float(self.upper)
    if self.neighboring_relation == "replace_one":
      # Raises if there is no record, and so no mean.
      self.noise(num_records=n)
      whole = self._calibrated(1.0, 1.0).on(key, *finite.total(shares))  # noisy sum
      return self._at(whole / n)
    whole, fraction = finite.total(shares)
    count = jnp.full((), n, whole.dtype)
    # The centred value of a record is 2 share - 1. The sum of these values and the count are
    # released together.
    high = jnp.stack([2 * whole - count, count])
    low = jnp.stack([2 * fraction, jnp.zeros_like(fraction)])
    total, count = self.noise(num_records=1).on(key, high, low)
    # The noisy count may be near 0 or negative, so the divisor is at least 1.
    mean = (lower + upper) / 2 + (upper - lower) / 2 * (total / jnp.maximum(count, 1))
    return jnp.clip(mean, lower, upper)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event for `dpjax.accounting`, under `neighboring_relation`."""
    return self.noise(num_records=1).event(neighboring_relation)


@dataclasses.dataclass(frozen=True)
class Histogram:
  """Private counts of the records in each of `num_bins` bins, released together.

  Guarantee: (epsilon, delta)-DP, by Laplace noise if delta is 0, else by analytic Gaussian noise.
  One epsilon covers all bins, as one record changes one count (under replace_one two) by 1.
  Source: Dwork and Roth 2014, example 3.2.

  | input                       | outcome                             |
  | --------------------------- | ----------------------------------- |
  | a bin outside 0..num_bins-1 | the record is not counted           |
  | no record                   | noise around zero                   |

  >>> mechanism = Histogram(epsilon=0.5, num_bins=3)
  >>> mechanism.noise.scale
  2.0
  >>> mechanism(jax.random.key(0), jnp.array([0, 2, 2, -1])).shape
  (3,)
  """

  epsilon: float
  num_bins: int
  delta: float = 0.0
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    validate.integer_at_least(1, num_bins=self.num_bins)
    if self.num_bins > _MOST_BINS:
      raise UserError("must be below 2^31 - 1", field="num_bins", value=self.num_bins)
    # Refuses wrong fields before any call.
    _ = self.noise

  @property
  def noise(self) -> Laplace | Gaussian:
    """Returns the mechanism that adds noise to the exact counts."""
    relation = self.neighboring_relation
    return calibrate(
      epsilon=self.epsilon,
      delta=self.delta,
      l1=histogram_sensitivity("l1", neighboring_relation=relation),
      l2=histogram_sensitivity("l2", neighboring_relation=relation),
      neighboring_relation=relation,
    )

  def counts(self, bins: jax.Array) -> jax.Array:
    """Returns the exact counts [num_bins] of `bins` [n]; not private."""
    array = finite.integers("bins", bins)
    k = int(self.num_bins)
    places = finite.indices("bins", array, -1, k)
    # Values outside the bins go to an extra bin, which is dropped.
    places = jnp.where(places < 0, k, places)
    return jnp.bincount(places, length=k + 1)[:k]

  def __call__(self, key: jax.Array, bins: jax.Array) -> jax.Array:
    """Returns the private counts [num_bins], as floats; rounding or clipping them costs nothing."""
    return self.noise(key, self.counts(bins))

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event for `dpjax.accounting`, under `neighboring_relation`."""
    return self.noise.event(neighboring_relation)


@dataclasses.dataclass(frozen=True)
class Quantile(_Clipped):
  """Private `quantile` of numbers clipped into [lower, upper], by the exponential mechanism.

  A point of [lower, upper] with k of the n values below it has a density proportional to
  exp(-|k - quantile * n| / scale).
  Guarantee: (epsilon, 0)-DP. One record moves k - quantile * n by at most 1 under replace_one, and
  by at most max(quantile, 1 - quantile) under add_or_remove_one.
  Source: Smith 2011, "Privacy-preserving statistical estimation with optimal convergence
  rates", algorithm 2.

  | input                         | outcome                         |
  | ----------------------------- | ------------------------------- |
  | no record                     | uniform in [lower, upper]       |
  | a value outside of the bounds | counts as the nearest bound     |
  | NaN                           | counts as the middle            |

  >>> median = Quantile(epsilon=1.0, lower=0.0, upper=10.0)
  >>> median.scale
  1.0
  >>> 0 <= float(median(jax.random.key(0), jnp.array([3.0, 4.0, 90.0]))) <= 10
  True
  """

  quantile: float = 0.5
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    stated.positive(epsilon=self.epsilon)
    validate.open_unit(quantile=self.quantile)
    stated.interval(self.lower, self.upper)
    validate.one_of(_MEAN_RELATIONS, neighboring_relation=self.neighboring_relation)
    stated.positive(scale=self.scale)

  @property
  def scale(self) -> float:
    """Returns 2 * (sensitivity of the utility) / epsilon."""
    if self.neighboring_relation == "replace_one":
      return 2 / float(self.epsilon)
    return 2 * max(float(self.quantile), 1 - float(self.quantile)) / float(self.epsilon)

  def intervals(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (edges [n + 2], log-weights [n + 1] of the intervals between edges). Not private.

    Edges are integers from 0 for `lower` to 2^30 (2^23 in float32) for `upper`. A log-weight is
    log(width) - (|k - quantile * n| - m) / scale for an interval with k values below it. The
    integer m is the same for all intervals, so it cancels in their probabilities.
    """
    shares = self._shares(values)
    source.check_scale(self.scale, shares.dtype, "scale")
    parts = _parts(shares.dtype)
    inner = jnp.sort(jnp.round(shares * parts).astype(jnp.int32))
    edges = jnp.concatenate([jnp.zeros(1, jnp.int32), inner, jnp.full(1, parts, jnp.int32)])
    widths = jnp.diff(edges)
    target = float(self.quantile) * shares.size
    whole = math.floor(target)
    # The misrank |k - quantile * n| is |apart| + part: an integer, and a fraction whose sign is
    # fixed on each side of the target.
    apart = jnp.arange(widths.size, dtype=jnp.int32) - whole
    part = jnp.where(apart > 0, whole - target, target - whole)
    apart = jnp.abs(apart)
    # The least integer is subtracted, which rounds nothing. Intervals of width 0 have no mass, so
    # they do not count for the minimum.
    apart = apart - jnp.min(jnp.where(widths > 0, apart, shares.size + 1))
    misrank = apart.astype(shares.dtype) + part.astype(shares.dtype)
    return edges, jnp.log(widths.astype(shares.dtype)) - misrank / self.scale

  def __call__(self, key: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the private quantile, a scalar, of `values` [n]."""
    trees.check_key(key=key)
    edges, log_weights = self.intervals(values)
    for_interval, for_point = jax.random.split(key)
    # The largest of (log-weight + Gumbel noise) marks a draw of the exponential mechanism.
    index = jnp.argmax(log_weights + source.gumbel(for_interval, log_weights))
    low = edges[index]
    high = edges[index + 1]
    place = low + source.integers(for_point, (), high - low)
    part = place.astype(log_weights.dtype) + 0.5
    share = part / _parts(log_weights.dtype)
    return jnp.clip(self._at(share), float(self.lower), float(self.upper))

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event for `dpjax.accounting`, under `neighboring_relation`."""
    return stated.pure_event(
      float(self.epsilon), self.neighboring_relation, neighboring_relation
    )


def _parts(dtype: jnp.dtype) -> int:
  """Returns the number of equal parts of [lower, upper]; a quantile is the middle of a part."""
  return 2**30 if dtype == jnp.float64 else 2**23

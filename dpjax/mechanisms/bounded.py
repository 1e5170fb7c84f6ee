"""Means, histograms and quantiles of bounded numbers.

Values are clipped into public bounds first, so that a sensitivity exists; a NaN counts as
the middle of them. Where one call releases several numbers, one epsilon covers all of them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dpjax import validate
from dpjax.mechanisms import stated
from dpjax.mechanisms.additive import Gaussian, Laplace, calibrated
from dpjax.mechanisms.sensitivity import histogram_sensitivity, mean_sensitivity
from dpjax.validate import UserError

_MEAN_RELATIONS = ("replace_one", "add_or_remove_one")


@dataclasses.dataclass(frozen=True)
class BoundedMean:
  """The mean of numbers clipped into [lower, upper].

  Guarantee: (epsilon, delta)-DP; Laplace noise where delta is 0, else analytic Gaussian.
  Under replace_one the number of records n is public and the noise is scaled by
  (upper - lower) / n. Under add_or_remove_one n is private: the sum of the centred values
  and the count are released together, and what is returned is their quotient.
  Source: Dwork and Roth 2014, section 3.3.

  | input                         | outcome                                           |
  | ----------------------------- | ------------------------------------------------- |
  | no record                     | UserError; under add_or_remove_one the noisy middle |
  | outside of the bounds, NaN    | the nearest bound, the middle                     |

  >>> mechanism = BoundedMean(epsilon=1.0, lower=0.0, upper=100.0)
  >>> mechanism.noise(num_records=1000).scale  # ages: not 1 / 1000
  0.1
  >>> mechanism(jax.random.key(0), jnp.full(1000, 40.0)).shape
  ()
  """

  epsilon: float
  lower: float
  upper: float
  delta: float = 0.0
  neighboring_relation: str = "replace_one"

  def __post_init__(self) -> None:
    stated.interval(self.lower, self.upper)
    validate.one_of(_MEAN_RELATIONS, neighboring_relation=self.neighboring_relation)
    self.noise(num_records=1)  # checks epsilon and delta

  def noise(self, *, num_records: int) -> Laplace | Gaussian:
    """Of the mean; under add_or_remove_one of the pair (centred sum / half width, count)."""
    if self.neighboring_relation == "add_or_remove_one":
      l1, l2 = 2.0, 2.0**0.5
    else:
      l1 = l2 = mean_sensitivity(self.lower, self.upper, num_records=num_records)
    return calibrated(
      epsilon=self.epsilon,
      delta=self.delta,
      l1=l1,
      l2=l2,
      neighboring_relation=self.neighboring_relation,
    )

  def __call__(self, key: jax.Array, values: jax.Array) -> jax.Array:
    """The private mean, a scalar, of `values` [n]."""
    if jnp.ndim(values) != 1:
      raise UserError(f"values: must have shape [n], not {jnp.shape(values)}")
    values = stated.clipped(values, self.lower, self.upper)
    if self.neighboring_relation == "replace_one":
      return self.noise(num_records=values.size)(key, jnp.mean(values))
    middle, half = (self.lower + self.upper) / 2, (self.upper - self.lower) / 2
    pair = jnp.stack([jnp.sum((values - middle) / half), jnp.asarray(values.size, float)])
    total, count = self.noise(num_records=1)(key, pair)
    mean = middle + half * total / jnp.maximum(count, 1)
    return jnp.clip(mean, self.lower, self.upper)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """For `dpjax.accounting`, under `neighboring_relation`."""
    return self.noise(num_records=1).event(neighboring_relation)


@dataclasses.dataclass(frozen=True)
class Histogram:
  """How many records fall into each of `num_bins` bins, all counts at once.

  Guarantee: (epsilon, delta)-DP; Laplace noise where delta is 0, else analytic Gaussian.
  One epsilon covers all bins, for a record lies in one of them (under replace_one in two).
  Source: Dwork and Roth 2014, example 3.2.

  | input                       | outcome                             |
  | --------------------------- | ----------------------------------- |
  | a bin outside 0..num_bins-1 | that record is counted nowhere      |
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
    _ = self.noise  # checks the other fields

  @property
  def noise(self) -> Laplace | Gaussian:
    """What is added to the exact counts."""
    relation = self.neighboring_relation
    return calibrated(
      epsilon=self.epsilon,
      delta=self.delta,
      l1=histogram_sensitivity("l1", neighboring_relation=relation),
      l2=histogram_sensitivity("l2", neighboring_relation=relation),
      neighboring_relation=relation,
    )

  def counts(self, bins: jax.Array) -> jax.Array:
    """The exact counts [num_bins] of `bins` [n]; not private."""
    bins = jnp.asarray(bins)
    if bins.ndim != 1 or not jnp.issubdtype(bins.dtype, jnp.integer):
      raise UserError(f"bins: must be integers [n], not {bins.dtype} {bins.shape}")
    inside = (bins >= 0) & (bins < self.num_bins)
    places = jnp.where(inside, bins, self.num_bins)
    return jnp.bincount(places, length=self.num_bins + 1)[: self.num_bins]

  def __call__(self, key: jax.Array, bins: jax.Array) -> jax.Array:
    """The private counts [num_bins], not rounded; rounding or clipping them is free."""
    return self.noise(key, self.counts(bins))

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """For `dpjax.accounting`, under `neighboring_relation`."""
    return self.noise.event(neighboring_relation)


@dataclasses.dataclass(frozen=True)
class Quantile:
  """The `quantile` of numbers clipped into [lower, upper], by the exponential mechanism.

  A point of [lower, upper] with k values below it has density proportional to
  exp(-|k - quantile * n| / scale).
  Guarantee: (epsilon, 0)-DP. Changing one record moves k - quantile * n by at most 1
  under replace_one, by at most max(quantile, 1 - quantile) under add_or_remove_one.
  Source: Smith 2011, "Privacy-preserving statistical estimation with optimal convergence
  rates", algorithm 2.

  | input                         | outcome                         |
  | ----------------------------- | ------------------------------- |
  | no record                     | uniform in [lower, upper]       |
  | outside of the bounds, NaN    | the nearest bound, the middle   |

  >>> median = Quantile(epsilon=1.0, lower=0.0, upper=10.0)
  >>> median.scale
  1.0
  >>> 0 <= float(median(jax.random.key(0), jnp.array([3.0, 4.0, 90.0]))) <= 10
  True
  """

  epsilon: float
  lower: float
  upper: float
  quantile: float = 0.5
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    validate.positive(epsilon=self.epsilon)
    validate.open_unit(quantile=self.quantile)
    stated.interval(self.lower, self.upper)
    validate.one_of(_MEAN_RELATIONS, neighboring_relation=self.neighboring_relation)

  @property
  def scale(self) -> float:
    """2 * sensitivity of the utility / epsilon."""
    if self.neighboring_relation == "replace_one":
      return 2 / self.epsilon
    return 2 * max(self.quantile, 1 - self.quantile) / self.epsilon

  def intervals(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Edges [n + 2] and log-probabilities [n + 1] of the intervals between; not private."""
    if jnp.ndim(values) != 1:
      raise UserError(f"values: must have shape [n], not {jnp.shape(values)}")
    values = jnp.sort(stated.clipped(values, self.lower, self.upper))
    ends = jnp.array([self.lower, self.upper], values.dtype)
    edges = jnp.concatenate([ends[:1], values, ends[1:]])
    ranks = jnp.arange(values.size + 1, dtype=values.dtype)
    utilities = -jnp.abs(ranks - self.quantile * values.size)
    log_mass = jnp.log(jnp.diff(edges)) + utilities / self.scale
    return edges, jax.nn.log_softmax(log_mass)

  def __call__(self, key: jax.Array, values: jax.Array) -> jax.Array:
    """The private quantile, a scalar, of `values` [n]."""
    edges, log_probs = self.intervals(values)
    for_interval, for_point = jax.random.split(key)
    index = jax.random.categorical(for_interval, log_probs, mode="high")
    share = jax.random.uniform(for_point, (), edges.dtype)
    return edges[index] + share * (edges[index + 1] - edges[index])

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """For `dpjax.accounting`, under `neighboring_relation`."""
    return stated.pure_event(self.epsilon, self.neighboring_relation, neighboring_relation)

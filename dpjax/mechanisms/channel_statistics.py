"""Private mean and mean square of each channel over a whole data set.

Both statistics normalise features (Tramèr and Boneh 2021, arXiv:2011.11660, `scatter_normalization`
of their code). Each example is averaged over its positions, which gives one vector of means and one
of mean squares. Each vector is clipped to a norm, and the two sums get Gaussian noise. The clip
norms are public numbers, or private medians of the vectors' norms, whose cost the event includes.
(The paper uses exact medians, and does not account for them.)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax.data.rows import Rows
from dpjax.mechanisms import finite
from dpjax.mechanisms.noisy_means import NoisyMeans, chunks, clipped_total, each, norm
from dpjax.types import Array, ArrayLike
from dpjax.validate import UserError

MAX_CHANNELS = 2**20
# This number is added to variances, as in the paper's code.
VARIANCE_FLOOR = 1e-5


class ChannelMoments(NamedTuple):
  """Private statistics of channels, which may be released."""

  mean: jax.Array  # [C]
  mean_square: jax.Array  # [C]
  clip_norms: jax.Array  # [2]: for the vectors of means, and for those of mean squares

  def standardizer(self) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that normalises examples [b, ..., C] with these statistics."""
    return jax.jit(functools.partial(standardize, statistics=self))


def standardize(x: ArrayLike, statistics: ChannelMoments) -> jax.Array:
  """Computes (x - mean) / sqrt(variance + 1e-5) for each channel: [..., C] -> [..., C].

  A channel whose noisy variance is not positive becomes 0.

  >>> moments = ChannelMoments(jnp.array([1.0, 0.0]), jnp.array([5.0, 0.0]), jnp.ones(2))
  >>> standardize(jnp.array([[3.0, 3.0]]), moments).round(3).tolist()
  [[1.0, 0.0]]
  """
  x = jnp.asarray(x, jnp.float32)
  wide = lambda vector: jnp.asarray(vector, jnp.float32).reshape(*[1] * (x.ndim - 1), -1)
  mean = wide(statistics.mean)
  square = wide(statistics.mean_square)
  variance = square - mean**2
  scale = jnp.where(variance > 0, jax.lax.rsqrt(variance + VARIANCE_FLOOR), 0.0)
  return (x - mean) * scale


@dataclasses.dataclass(frozen=True)
class ChannelStatistics(NoisyMeans):
  """Mean and mean square of each channel of `x` [n, ..., C], over examples and positions.

  Args:
    normalize_by: public divisor of the noisy sums: the number of examples.
    noise_multiplier: std of the noise on a sum / clip norm of its vectors, the same for both sums.
    median_epsilon: epsilon of each of the two clip norms, if they are private medians.
    clip_norms: public norms of (the vector of means, the vector of mean squares), or () for private
      medians.

  Guarantee: the whole release costs no more than ONE Gaussian sum with the noise multiplier that
  `event` states, if an example influences at most one row of `x`. There is no sampling. Clipped
  sums are sums of integers, so rounding adds nothing to their sensitivity. Under replace_special
  leave an empty record out of `x` (it still counts in `normalize_by`).

  | example                        | outcome                                    |
  | ------------------------------ | ------------------------------------------ |
  | NaN, size >= 1e30 in a vector  | the vector counts as zero                  |
  | no example                     | noise around zero                          |
  | integers, other floats         | become float32, each by itself             |

  >>> mechanism = ChannelStatistics(normalize_by=2.0, noise_multiplier=1e-3, clip_norms=(4, 9))
  >>> moments = mechanism(jax.random.key(0), jnp.full((2, 3, 3, 1), 2.0))  # doctest: +SLOW
  >>> moments.mean.round(1).tolist(), moments.mean_square.round(1).tolist()
  ([2.0], [4.0])
  >>> mechanism.event().noise_multiplier == 1e-3 / 2**0.5
  True
  """

  vectors = ("means", "mean squares")

  def noisy_mean(self, key: jax.Array, rows: jax.Array, clip_norm: Array) -> jax.Array:
    """Clips each of `rows` [n, C], and returns their noisy mean, [C]."""
    return self.noisy_mean_of(key, *clipped_total(rows, clip_norm), clip_norm)

  def after(self, key: jax.Array, x: ArrayLike | Rows, before: Any) -> ChannelMoments:
    """Returns the statistics of `x`, as `NoisyMeans.after`. No sum depends on earlier releases, so
    `before` is unused. `Rows` are read once."""
    return _release(self, self.own_key(key), channel_moments(x))

  def statement(self, unit: str = "example") -> str:
    """Describes the release in words, for readers; `unit` is the word for one record.

    >>> print(ChannelStatistics(normalize_by=9, clip_norms=(1, 1)).statement())
    Before the first step: mean and mean square of each channel over all examples, ...
    """
    return self.describe_as("mean and mean square of each channel", unit)


@functools.partial(jax.jit, static_argnums=0)
def _release(
  mechanism: ChannelStatistics, key: jax.Array, vectors: jax.Array
) -> ChannelMoments:
  keys = jax.random.split(key, 4)
  rows = (vectors[:, 0], vectors[:, 1])
  lengths = [each(norm, row) for row in rows]
  norms = [
    mechanism.clip_norm(keys[i], row_lengths, i) for i, row_lengths in enumerate(lengths)
  ]
  means = [mechanism.noisy_mean(keys[2 + i], row, norms[i]) for i, row in enumerate(rows)]
  mean, square = means
  return ChannelMoments(mean, square, jnp.stack(norms))


def channel_moments(x: ArrayLike | Rows) -> jax.Array:
  """Returns each example's mean and mean square over positions: [n, ..., C] -> [n, 2, C].

  They are computed in float32, in chunks of examples. Not private.

  >>> channel_moments(jnp.array([[[1.0], [3.0]]])).tolist()
  [[[2.0], [5.0]]]
  """
  array = x if isinstance(x, Rows) else finite.array("x", x)
  if array.ndim < 2 or 0 in array.shape[1:]:
    raise UserError(f"must have shape [n, ..., channels], not {array.shape}", field="x")
  if array.shape[-1] > MAX_CHANNELS or len(array) > finite.MAX_RECORDS:
    raise UserError(
      f"must have at most {MAX_CHANNELS} channels and {finite.MAX_RECORDS} examples",
      field="x",
    )
  parts = [_moments(chunk)[:count] for chunk, count in chunks(array)]
  # Without examples there are no chunks, and `concatenate` needs at least one array.
  return jnp.concatenate([jnp.zeros((0, 2, array.shape[-1]), jnp.float32), *parts])


@jax.jit
def _moments(x: jax.Array) -> jax.Array:
  """Returns mean and mean square over positions: [n, positions, C] -> [n, 2, C]."""
  # Examples are computed one at a time, so that none changes the rounding of another.
  return jax.lax.map(
    lambda example: jnp.stack([example.mean(0), jnp.square(example).mean(0)]), x
  )

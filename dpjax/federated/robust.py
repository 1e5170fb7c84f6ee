"""Aggregators that a few arbitrary clients cannot steer. They need all messages at once.

None of them is private by itself. Each leaves out padding, clients of weight 0 and messages
that hold NaN or infinity; ignores how large weights are (a weight is a way to steer); and
returns 0 where nobody is left.

| aggregator         | stands up to                   | source                                |
| ------------------ | ------------------------------ | ------------------------------------- |
| `median`           | fewer than half, per coordinate| Yin et al. 2018                       |
| `trimmed_mean`     | `trim` of them at either end   | Yin et al. 2018                       |
| `krum`             | f with n > 2 f + 2             | Blanchard et al. 2017                 |
| `geometric_median` | fewer than half                | Pillutla et al. 2022 (RFA), Weiszfeld |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import trees, validate
from dpjax.federated.aggregation import Aggregator, finite
from dpjax.types import Array
from dpjax.validate import UserError

_SMOOTHING = 1e-6  # of a distance in Weiszfeld's algorithm, in units of the messages


def _robust(combine: Callable[[Any, Array], Any]) -> Aggregator:
  """`combine(messages, kept [C])`, with nothing that is not finite in the messages."""

  def update(messages: Any, mask: Array, state: Any, weights: Array | None = None) -> Any:
    kept = finite(messages, mask)
    kept = kept if weights is None else kept & (weights > 0)
    clean = jax.tree.map(
      lambda leaf: jnp.where(_along(kept, leaf), trees.at_least_float32(leaf), 0), messages
    )
    found = combine(clean, kept)
    some = jnp.any(kept)
    return jax.tree.map(lambda leaf: jnp.where(some, leaf, 0), found), state

  return Aggregator(lambda message: (), update)


def _along(values: Array, leaf: Array) -> Array:
  """[C] values in the rank of a leaf [C, ...]."""
  return values.reshape((-1,) + (1,) * (jnp.ndim(leaf) - 1))


def _by_rank(messages: Any, kept: Array, weight_of_rank: Array) -> Any:
  """sum over ranks of weight_of_rank [C] * (the messages sorted, coordinate by coordinate)."""

  def leaf(values: Array) -> Array:
    ordered = jnp.sort(jnp.where(_along(kept, values), values, jnp.inf), axis=0)
    ordered = jnp.where(jnp.isfinite(ordered), ordered, 0)
    return jnp.tensordot(weight_of_rank, ordered, axes=1)

  return jax.tree.map(leaf, messages)


def median() -> Aggregator:
  """The median of each coordinate; the mean of the middle two for an even number.

  >>> update = median().update(jnp.array([[1.0], [2.0], [1e9]]), jnp.ones(3, bool), ())
  >>> update[0]
  Array([2.], dtype=float32)
  """

  def combine(messages: Any, kept: Array) -> Any:
    count, ranks = jnp.sum(kept), jnp.arange(kept.shape[0])
    low, high = (count - 1) // 2, count // 2
    weights = 0.5 * (ranks == low) + 0.5 * (ranks == high)
    return _by_rank(messages, kept, weights.astype(jnp.float32))

  return _robust(combine)


def trimmed_mean(trim: float) -> Aggregator:
  """The mean of each coordinate without the floor(trim * n) smallest and largest.

  Args:
    trim: share cut off at either end, in [0, 0.5).

  >>> messages = jnp.array([[-1e9], [1.0], [2.0], [3.0], [1e9]])
  >>> trimmed_mean(0.2).update(messages, jnp.ones(5, bool), ())[0]
  Array([2.], dtype=float32)
  """
  validate.non_negative(trim=trim)
  if trim >= 0.5:
    raise UserError(f"trim={trim!r}: must be in [0, 0.5)")

  def combine(messages: Any, kept: Array) -> Any:
    count, ranks = jnp.sum(kept), jnp.arange(kept.shape[0])
    cut = jnp.floor(trim * count + 1e-6).astype(count.dtype)  # 0.2 * 5 is 1 in floats too
    inside = (ranks >= cut) & (ranks < count - cut)
    return _by_rank(messages, kept, inside / jnp.maximum(jnp.sum(inside), 1))

  return _robust(combine)


def _squared_distances(messages: Any) -> Array:
  """[C, C], by differences: no cancellation where messages nearly agree."""

  def to_all(one: Any) -> Array:
    differences = jax.tree.map(lambda a, b: a[None] - b, one, messages)
    return trees.per_example_norms(differences) ** 2

  return jax.lax.map(to_all, messages)


def krum(num_byzantine: int, *, num_selected: int = 1) -> Aggregator:
  """The mean of the `num_selected` messages nearest to their n - f - 2 nearest others.

  Args:
    num_byzantine: f; the guarantee of the paper needs n > 2 f + 2.
    num_selected: 1 is Krum, more is multi-Krum.

  >>> messages = jnp.array([[0.0], [0.1], [0.3], [9.0], [-7.0]])
  >>> krum(1).update(messages, jnp.ones(5, bool), ())[0]
  Array([0.1], dtype=float32)
  """
  validate.integer_at_least(0, num_byzantine=num_byzantine)
  validate.integer_at_least(1, num_selected=num_selected)

  def combine(messages: Any, kept: Array) -> Any:
    count = jnp.sum(kept)
    apart = kept[:, None] & kept[None, :] & ~jnp.eye(kept.shape[0], dtype=bool)
    distances = jnp.sort(jnp.where(apart, _squared_distances(messages), jnp.inf), axis=1)
    near = jnp.arange(kept.shape[0]) < jnp.maximum(count - num_byzantine - 2, 1)
    near = near[None] & jnp.isfinite(distances)
    scores = jnp.sum(jnp.where(near, distances, 0), axis=1)
    ranks = jnp.argsort(jnp.argsort(jnp.where(kept, scores, jnp.inf)))
    chosen = kept & (ranks < num_selected)
    return trees.weighted_sum(messages, chosen / jnp.maximum(jnp.sum(chosen), 1))

  return _robust(combine)


def geometric_median(num_iterations: int = 32) -> Aggregator:
  """The point with the smallest sum of distances to the messages, by smoothed Weiszfeld.

  The whole message is one point: unlike `median`, the result does not depend on the basis.

  >>> messages = jnp.array([[0.0], [1.0], [50.0]])  # on a line it is the median
  >>> found = geometric_median(100).update(messages, jnp.ones(3, bool), ())[0]
  >>> bool(jnp.abs(found[0] - 1.0) < 1e-3)
  True
  """
  validate.integer_at_least(1, num_iterations=num_iterations)

  def combine(messages: Any, kept: Array) -> Any:
    share = kept / jnp.maximum(jnp.sum(kept), 1)

    def step(_: Any, point: Any) -> Any:
      away = jax.tree.map(lambda leaf, p: leaf - p[None], messages, point)
      pull = jnp.where(kept, 1 / jnp.maximum(trees.per_example_norms(away), _SMOOTHING), 0)
      return trees.weighted_sum(messages, pull / jnp.maximum(jnp.sum(pull), 1e-30))

    start = trees.weighted_sum(messages, share.astype(jnp.float32))
    return jax.lax.fori_loop(0, num_iterations, step, start)

  return _robust(combine)

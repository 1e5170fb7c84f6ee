"""The geometric median (RFA, Pillutla et al. 2022), by Weiszfeld's algorithm."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax import trees, validate
from dpjax.federated.aggregation import Aggregator
from dpjax.federated.aggregators.robust import (
  TINY,
  Counts,
  along,
  coordinate_median,
  largest_entries,
  robust,
  row_lengths,
)
from dpjax.federated.described import aggregator, minority
from dpjax.types import Array

# Two distances in units of the spread (`unit` in `_centre`). A point beyond _FAR is moved towards
# the centre, to distance _FAR. Points within _NEAR of each other count as equal.
_FAR = 1e15
_NEAR = 1e-5
# Iterations end early when the residual of the certificate is at most this number.
_TOLERANCE = 1e-4


class Certificate(NamedTuple):
  """Quality of the last geometric median. It is computed from raw messages: NOT private."""

  residual: Array  # [] norm of the smallest subgradient / n; 0 at the exact minimum
  num_iterations: Array  # []


def _centre(messages: Any, kept: Array) -> tuple[Any, Array, Any]:
  """Returns (centre, unit, points) with messages = centre + unit * points.

  The centre is the median of each coordinate. A distance from it is the largest difference in a
  coordinate. The unit is the median distance, or 1 if most messages agree. A minority of messages
  controls neither. A point beyond `_FAR` is moved towards the centre to distance `_FAR`. Its
  direction from a message near the centre then turns by at most about 1 / _FAR.
  """
  biggest = jnp.finfo(jnp.float32).max
  centre = coordinate_median(messages, kept)
  away = jax.tree.map(
    lambda leaf, c: jnp.where(
      along(kept, leaf), jnp.clip(leaf - c[None], -biggest, biggest), 0
    ),
    messages,
    centre,
  )
  lengths = largest_entries(away)
  ordered = jnp.sort(jnp.where(kept, lengths, jnp.inf))
  unit = ordered[jnp.sum(kept) // 2 % kept.shape[0]]
  # If most messages agree, the spread is 0 and cannot be the unit.
  unit = jnp.where((unit > TINY) & jnp.isfinite(unit), unit, 1.0)
  far = lengths > _FAR * unit
  factor = jnp.where(far, _FAR / jnp.where(far, lengths, 1.0), 1.0 / unit)
  points = jax.tree.map(lambda leaf: leaf * along(factor, leaf), away)
  return centre, unit, points


class _Look(NamedTuple):
  """State of Weiszfeld's algorithm at a point."""

  residual: Array  # [] norm of the smallest subgradient / n
  step: Any  # difference to the next point
  nearest: Array  # [] index of the nearest message


def _look(points: Any, kept: Array, point: Any) -> _Look:
  """Returns the residual at `point`, the next step (Vardi and Zhang 2000) and the nearest message.

  Each message at `point` itself lowers the length of the others' pull by up to 1.
  """
  away = jax.tree.map(lambda leaf, p: leaf - p[None], points, point)
  distances = row_lengths(away)
  apart = kept & (distances > _NEAR)
  inverse = jnp.where(apart, 1 / jnp.maximum(distances, _NEAR), 0.0)
  pull = jax.tree.map(lambda leaf: jnp.tensordot(inverse, leaf, axes=1), away)
  # Near the minimum, squares of the pull may underflow, which `row_lengths` avoids.
  strength = row_lengths(jax.tree.map(lambda leaf: leaf[None], pull))[0]
  free = jnp.maximum(strength - jnp.sum(kept & ~apart), 0.0)
  scale = free / jnp.maximum(strength, TINY) / jnp.maximum(jnp.sum(inverse), TINY)
  return _Look(
    free / jnp.maximum(jnp.sum(kept), 1),
    trees.scale(pull, scale),
    jnp.argmin(jnp.where(kept, distances, jnp.inf)),
  )


def _weiszfeld(points: Any, kept: Array, most: int) -> tuple[Any, Certificate]:
  """Returns (the geometric median of the kept points, its certificate)."""
  look = lambda point: _look(points, kept, point)

  def or_nearest(point: Any) -> tuple[Any, _Look]:
    """Returns a point and its `_Look`: the nearest message if it is the minimum, else `point`."""
    there = look(point)
    message = jax.tree.map(lambda leaf: leaf[there.nearest], points)
    here = look(message)
    ends = (here.residual <= _TOLERANCE) & (here.residual <= there.residual)
    return jax.tree.map(lambda a, b: jnp.where(ends, a, b), (message, here), (point, there))

  def step(carry: Any) -> Any:
    count, point, seen = carry
    return count + 1, *or_nearest(trees.add(point, seen.step))

  def goes_on(carry: Any) -> Array:
    count, _, seen = carry
    return (seen.residual > _TOLERANCE) & (count < most)

  start = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), points)
  count, point, seen = jax.lax.while_loop(goes_on, step, (jnp.int32(0), *or_nearest(start)))
  return point, Certificate(seen.residual, count)


@aggregator(
  source="Pillutla et al. 2022",
  stands_up_to="fewer than half",
  tolerates=minority,
)
def geometric_median(num_iterations: int = 1000) -> Aggregator:
  """The point with the smallest sum of distances to the messages, by Weiszfeld's algorithm. It
  starts at the median of each coordinate.

  A whole message is one point. So the result does not depend on the basis, unlike that of `median`.
  The state is a `Certificate`. The sum of distances exceeds its minimum by at most
  `residual` * n times the distance to the minimum. Iterations end at `residual` <= 1e-4, or after
  `num_iterations`.

  Args:
    num_iterations: largest number of iterations. A few dozen are usual; a minimum near a message
      takes more.

  >>> messages = jnp.array([[0.0], [1.0], [50.0]])  # on a line it is the median
  >>> geometric_median().update(messages, jnp.ones(3, bool), ())[0]  # doctest: +SLOW
  Array([1.], dtype=float32)
  """
  validate.integer_at_least(1, num_iterations=num_iterations)

  def combine(messages: Any, kept: Array, counts: Counts) -> Any:
    del counts
    centre, unit, points = _centre(messages, kept)
    point, certificate = _weiszfeld(points, kept, num_iterations)
    return jax.tree.map(lambda c, p: c + unit * p, centre, point), certificate

  nothing = lambda message: Certificate(jnp.float32(0), jnp.int32(0))
  return robust(combine)._replace(init=nothing)

"""Aggregators that a few arbitrary clients cannot steer. They need all messages at once.

None of them is private by itself. Each leaves out padding, clients of weight 0 and messages
that hold NaN or infinity; ignores how large weights are (a weight is a way to steer); and
returns 0 where nobody is left. n is the number of messages that are left; for `krum` it is the
number of clients in the round (mask True), as who sends NaN or nothing counts among its f.

| aggregator         | stands up to                   | source                                |
| ------------------ | ------------------------------ | ------------------------------------- |
| `median`           | fewer than half, per coordinate| Yin et al. 2018                       |
| `trimmed_mean`     | floor(trim n) of them          | Yin et al. 2018                       |
| `krum`             | f; refuses n <= 2 f + 2        | Blanchard et al. 2017                 |
| `geometric_median` | fewer than half                | Pillutla et al. 2022 (RFA), Weiszfeld |

That is for ANY numbers that float32 holds: distances are computed without overflow, and what
is summed is bounded by what the honest majority spans. How far f arbitrary messages of n can
carry the result (tests/federated/test_breakdown.py):

| aggregator               | at most                                                        |
| ------------------------ | -------------------------------------------------------------- |
| `median`, `trimmed_mean` | within the honest messages' range, coordinate by coordinate    |
| `krum`                   | (1 + sqrt(n - f - 2)) honest diameters from an honest message  |
| `geometric_median`       | 2 (n - f) / (n - 2 f) honest radii from the honest centre      |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core as jax_core

from dpjax import trees, validate
from dpjax.federated.aggregation import Aggregator, at_least_one, finite
from dpjax.types import Array
from dpjax.validate import UserError

# In units of the messages' own spread (their median distance from the median of each
# coordinate): how far a message is looked at, and how near is the same point.
_FAR = 1e15
_NEAR = 1e-5
_TINY = 1e-37  # below this float32 loses its digits: treated as zero
_TOLERANCE = 1e-4  # of the geometric median's certificate, per message


class Certificate(NamedTuple):
  """How good the last geometric median was. Computed from raw messages: NOT private."""

  residual: Array  # [] least subgradient there / n; 0 at the exact minimum
  num_iterations: Array  # []


def _kept(messages: Any, mask: Array, weights: Array | None) -> Array:
  """[C] the messages that count."""
  kept = finite(messages, mask)
  return kept if weights is None else kept & (jnp.asarray(weights) > 0)


class _Counts(NamedTuple):
  """Counts of a round's clients, each []."""

  clients: Array  # mask True
  kept: Array  # their messages that count
  faulty: Array  # messages or weights that no honest client sends


def _counts(messages: Any, mask: Array, weights: Array | None) -> _Counts:
  mask = jnp.asarray(mask, bool)
  faulty = mask & ~finite(messages, mask)
  if weights is not None:
    weights = jnp.asarray(weights)
    faulty = faulty | (mask & ~((weights >= 0) & jnp.isfinite(weights)))
  kept = _kept(messages, mask, weights)
  return _Counts(jnp.sum(mask), jnp.sum(kept), jnp.sum(faulty))


def _at_least_one(counts: _Counts) -> Array:
  return jnp.ones_like(counts.kept)


def _robust(
  combine: Callable[[Any, Array, _Counts], Any],
  least: Callable[[_Counts], Array] = _at_least_one,
  wants: str = "",
) -> Aggregator:
  """`combine(messages, kept [C], counts) -> (update, state)`, with finite numbers in messages.

  Fewer than `least(counts)` messages, but some, are refused; NaN under jit, where nothing can
  be.
  """

  def check(messages: Any, mask: Array, weights: Array | None = None) -> None:
    if not len(mask):
      return
    counts = _counts(messages, mask, weights)
    count = int(counts.kept)
    fewest = int(least(counts))
    if 0 < count < fewest:
      raise UserError(f"{wants}: {count} clients sent a message; must be >= {fewest}")

  def update(messages: Any, mask: Array, state: Any, weights: Array | None = None) -> Any:
    del state
    mask = jnp.asarray(mask, bool)
    messages, mask, weights = at_least_one((messages, mask, weights))
    kept = _kept(messages, mask, weights)
    if not isinstance(kept, jax_core.Tracer):
      check(messages, mask, weights)
    clean = jax.tree.map(
      lambda leaf: jnp.where(_along(kept, leaf), trees.at_least_float32(leaf), 0), messages
    )
    counts = _counts(messages, mask, weights)
    found, after = combine(clean, kept, counts)
    wrong = jnp.where(counts.kept == 0, 0.0, jnp.nan)
    usable = (counts.kept > 0) & (counts.kept >= least(counts))
    return jax.tree.map(lambda leaf: jnp.where(usable, leaf, wrong), found), after

  return Aggregator(lambda message: (), update, check=check)


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


def _median(messages: Any, kept: Array) -> Any:
  count = jnp.sum(kept)
  ranks = jnp.arange(kept.shape[0])
  low = (count - 1) // 2
  high = count // 2
  weights = 0.5 * (ranks == low) + 0.5 * (ranks == high)
  return _by_rank(messages, kept, weights.astype(jnp.float32))


def median() -> Aggregator:
  """The median of each coordinate; the mean of the middle two for an even number.

  >>> update = median().update(jnp.array([[1.0], [2.0], [1e9]]), jnp.ones(3, bool), ())
  >>> update[0]
  Array([2.], dtype=float32)
  """
  return _robust(lambda messages, kept, counts: (_median(messages, kept), ()))


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
    raise UserError("must be in [0, 0.5)", field="trim", value=trim)

  def combine(messages: Any, kept: Array, counts: _Counts) -> Any:
    del counts
    count = jnp.sum(kept)
    ranks = jnp.arange(kept.shape[0])
    cut = jnp.floor(trim * count + 1e-6).astype(count.dtype)  # 0.2 * 5 is 1 in floats too
    inside = (ranks >= cut) & (ranks < count - cut)
    return _by_rank(messages, kept, inside / jnp.maximum(jnp.sum(inside), 1)), ()

  return _robust(combine)


def _largest(tree: Any) -> Array:
  """[C] the largest absolute entry of each row of leaves [C, ...]."""
  rows = [jnp.abs(leaf).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)]
  return jnp.max(jnp.stack([jnp.max(row, axis=1, initial=0.0) for row in rows]), axis=0)


def _lengths(tree: Any) -> Array:
  """[C] l2 norms of rows, in which no square over- or underflows; inf beyond float32."""
  largest = _largest(tree)
  usable = (largest > _TINY) & jnp.isfinite(largest)
  # A power of two first: the reciprocal of a huge number would be flushed to zero.
  power = jnp.where(largest > 1, 2.0**-64, 2.0**64)
  safe = jnp.where(usable, largest * power, 1.0)

  def squares(leaf: Array) -> Array:
    rows = leaf.reshape(leaf.shape[0], -1) * power[:, None] / safe[:, None]
    return jnp.sum(rows * rows, axis=1)

  root = jnp.sqrt(sum(squares(leaf) for leaf in jax.tree.leaves(tree)))
  lengths = safe * root / power
  return jnp.where(usable, lengths, jnp.where(jnp.isfinite(largest), 0.0, jnp.inf))


def krum(num_byzantine: int, *, num_selected: int = 1) -> Aggregator:
  """The mean of the `num_selected` messages nearest to their k nearest others.

  k is n - f - 2 where all n clients of the round send a message that counts, as in the paper.
  Else let m messages count, b clients send NaN, infinity or an impossible weight, and z send
  weight 0. Honest clients never do what the b do, so g = f - b attackers are left (b > f
  breaks the assumption and excuses nobody: g = f). Then k = max(m - g - 2, g).

  Guarantee, where at most f of n >= 2 f + 3 clients are arbitrary, silent or without examples:
  a selected message is within sqrt(k) honest diameters D of an honest one.
  Proof. At most g - z of the m messages are arbitrary, and at least n - f >= f + 3 are
  honest. So k <= n - f - 1: an honest message has k honest others, and scores k D^2 at most.
  A selected message scores no more than the worst honest one, as there are num_selected
  honest ones. If it is arbitrary, at most g - 1 of its k >= g nearest others are: one of them
  is honest, and its squared distance is one term of a score <= k D^2.
  The same holds where all z are honest and f more clients are arbitrary, if m >= 2 g + 1: a
  silent client buys the attackers no vote. So NaN and silence of attackers stop no round.

  Args:
    num_byzantine: f; a round of n <= 2 f + 2 clients is refused, and one in which more than
      f clients send nothing that counts, unless m >= 2 g + 3.
    num_selected: 1 is Krum, more is multi-Krum; at most n - f.

  Raises:
    UserError: by `update` and by a round: too few messages.

  >>> messages = jnp.array([[0.0], [0.1], [0.3], [9.0], [-7.0]])
  >>> krum(1).update(messages, jnp.ones(5, bool), ())[0]
  Array([0.1], dtype=float32)
  """
  validate.integer_at_least(0, num_byzantine=num_byzantine)
  validate.integer_at_least(1, num_selected=num_selected)
  least = max(2 * num_byzantine + 3, num_byzantine + num_selected)  # clients

  def attackers(counts: _Counts) -> Array:
    """g: those among the messages that count."""
    excused = jnp.where(counts.faulty <= num_byzantine, counts.faulty, 0)
    return num_byzantine - excused

  def enough(counts: _Counts) -> Array:
    left = attackers(counts)
    # where more than f are left out, some of them are honest, and f may still attack
    without = jnp.maximum(2 * left + 3, left + num_selected)
    fewest = jnp.minimum(counts.clients - num_byzantine, without)
    return jnp.where(counts.clients >= least, fewest, least)

  def combine(messages: Any, kept: Array, counts: _Counts) -> Any:
    apart = kept[:, None] & kept[None, :] & ~jnp.eye(kept.shape[0], dtype=bool)
    # by differences: no cancellation where messages nearly agree
    away = lambda one: _lengths(jax.tree.map(lambda a, b: a[None] - b, one, messages))
    distances = jnp.where(apart, jax.lax.map(away, messages), jnp.inf)  # [C, C]
    distances = jnp.sort(distances, axis=1)
    left = attackers(counts)
    near = jnp.arange(kept.shape[0]) < jnp.maximum(counts.kept - left - 2, left)
    # A root orders as its square does, and is finite for every message of the majority.
    scores = _lengths(jnp.where(near[None], distances, 0.0))
    ranks = jnp.argsort(jnp.argsort(jnp.where(kept, scores, jnp.nan)))  # NaN comes last
    chosen = kept & (ranks < num_selected)
    return trees.weighted_sum(messages, chosen / jnp.maximum(jnp.sum(chosen), 1)), ()

  wants = f"num_byzantine={num_byzantine}"
  if least > 2 * num_byzantine + 3:
    wants = f"num_selected={num_selected}"
  return _robust(combine, enough, wants)


def _centred(messages: Any, kept: Array) -> tuple[Any, Array, Any]:
  """(centre, unit, points): messages = centre + unit * points, `kept` ones near 1 for most.

  The centre is the median of each coordinate and the unit the median distance from it:
  neither is in the hands of a minority. A point beyond `_FAR` is drawn in to there, which
  turns no direction by more than 1 / _FAR.
  """
  biggest = jnp.finfo(jnp.float32).max
  centre = _median(messages, kept)
  away = jax.tree.map(
    lambda leaf, c: jnp.where(
      _along(kept, leaf), jnp.clip(leaf - c[None], -biggest, biggest), 0
    ),
    messages,
    centre,
  )
  lengths = _largest(away)
  ordered = jnp.sort(jnp.where(kept, lengths, jnp.inf))
  unit = ordered[jnp.sum(kept) // 2 % kept.shape[0]]
  unit = jnp.where((unit > _TINY) & jnp.isfinite(unit), unit, 1.0)
  far = lengths > _FAR * unit
  factor = jnp.where(far, _FAR / jnp.where(far, lengths, 1.0), 1.0 / unit)
  points = jax.tree.map(lambda leaf: leaf * _along(factor, leaf), away)
  return centre, unit, points


class _Look(NamedTuple):
  """View of Weiszfeld's algorithm from a point."""

  residual: Array  # [] norm of the least subgradient / n
  step: Any  # to the next point
  nearest: Array  # [] of the messages


def _look(points: Any, kept: Array, point: Any) -> _Look:
  """Vardi and Zhang 2000: messages at the point itself hold it with one unit each."""
  away = jax.tree.map(lambda leaf, p: leaf - p[None], points, point)
  distances = _lengths(away)
  apart = kept & (distances > _NEAR)
  inverse = jnp.where(apart, 1 / jnp.maximum(distances, _NEAR), 0.0)
  pull = jax.tree.map(lambda leaf: jnp.tensordot(inverse, leaf, axes=1), away)
  strength = _lengths(jax.tree.map(lambda leaf: leaf[None], pull))[0]
  free = jnp.maximum(strength - jnp.sum(kept & ~apart), 0.0)
  scale = free / jnp.maximum(strength, _TINY) / jnp.maximum(jnp.sum(inverse), _TINY)
  return _Look(
    free / jnp.maximum(jnp.sum(kept), 1),
    trees.scale(pull, scale),
    jnp.argmin(jnp.where(kept, distances, jnp.inf)),
  )


def _weiszfeld(points: Any, kept: Array, most: int) -> tuple[Any, Certificate]:
  """(the geometric median of the kept points, its certificate)."""
  look = lambda point: _look(points, kept, point)

  def or_nearest(point: Any) -> tuple[Any, _Look]:
    """The point, or the message nearest to it where that is a minimum: an exact end."""
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


def geometric_median(num_iterations: int = 1000) -> Aggregator:
  """The point with the smallest sum of distances to the messages, by Weiszfeld's algorithm
  from the median of each coordinate.

  The whole message is one point: unlike `median`, the result does not depend on the basis.
  The state is a `Certificate`: the sum of distances is minimal within `residual` * n times
  the distance to the minimum; iterations end where `residual` <= 1e-4 (almost always).

  Args:
    num_iterations: at most; a few dozen are usual, a minimum beside a message takes more.

  >>> messages = jnp.array([[0.0], [1.0], [50.0]])  # on a line it is the median
  >>> geometric_median().update(messages, jnp.ones(3, bool), ())[0]
  Array([1.], dtype=float32)
  """
  validate.integer_at_least(1, num_iterations=num_iterations)

  def combine(messages: Any, kept: Array, counts: _Counts) -> Any:
    del counts
    centre, unit, points = _centred(messages, kept)
    point, certificate = _weiszfeld(points, kept, num_iterations)
    return jax.tree.map(lambda c, p: c + unit * p, centre, point), certificate

  nothing = lambda message: Certificate(jnp.float32(0), jnp.int32(0))
  return _robust(combine)._replace(init=nothing)

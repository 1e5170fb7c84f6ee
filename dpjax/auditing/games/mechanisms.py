"""Games against query mechanisms: outputs of `mechanism(key, data)` on the worst data.

Each entry of `GAMES` takes the mechanism class (or a broken one) and returns its games, the
strongest one first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.auditing.games.game import (
  Adversary,
  Claim,
  Game,
  Outputs,
  claims_of_event,
  drawn_by,
  frequency,
  learn_bins,
  linear,
  repeats,
  together,
  two_sided,
)
from dpjax.mechanisms import least_squares, whitening
from dpjax.mechanisms.class_sums import ClassSums
from dpjax.mechanisms.least_squares import LeastSquares
from dpjax.mechanisms.whitening import Whitening
from dpjax.types import ArrayTree

NOISES = ("laplace", "gumbel", "exponential")
_ADD = "add_or_remove_one"
_REPLACE = "replace_one"
_NAN = math.nan
_HUGE = 1e30


class Mechanism(Protocol):
  """A query mechanism; one with a pure budget also has `epsilon`."""

  def __call__(self, key: jax.Array, data: ArrayTree, /) -> Any: ...
  def event(self, neighboring_relation: str) -> DpEvent: ...


def claims_of(mechanism: Mechanism, relation: str) -> tuple[Claim, ...]:
  """Returns a pure budget as a claim at delta 0, or else the claims of the mechanism's event."""
  delta = getattr(mechanism, "delta", None)
  budget = getattr(mechanism, "epsilon", None)
  if budget is not None and not (isinstance(delta, float) and delta):
    return (Claim(budget + getattr(mechanism, "epsilon_values", 0.0), 0.0),)
  return claims_of_event(mechanism.event(relation), relation)


def game(
  mechanism: Mechanism,
  case: str,
  zero: np.ndarray,
  one: np.ndarray,
  call: Callable[..., ArrayTree] | None = None,
  *,
  adversary: Adversary,
  relation: str,
) -> Game:
  """Returns the game on two neighbours; `call(key, data)`, or the mechanism, makes the release."""
  released = mechanism if call is None else call
  data = (zero, one)
  traced = zero.shape == one.shape and zero.dtype != np.float64

  @functools.cache
  def many(world: int) -> Callable:
    # Traced data are arguments, so one program serves both inputs.
    if traced:
      return jax.jit(jax.vmap(released, in_axes=(0, None)))
    # The data are not traced, so that work on the host, such as refusing, is played, too.
    draw_all = jax.jit(
      jax.vmap(lambda key: jax.tree.map(jnp.asarray, released(key, data[world])))
    )
    return lambda keys, _: draw_all(keys)

  outputs = drawn_by(lambda keys, world: many(0 if traced else world)(keys, data[world]))
  return Game(case, relation, claims_of(mechanism, relation), outputs, adversary)


def _games(adversary: Adversary, relation: str, *rows: tuple) -> list[Game]:
  """Returns games, one for each (mechanism, case, input, its neighbour, and optionally
  call)."""
  return [game(*row, adversary=adversary, relation=relation) for row in rows]


def _f(*values: float) -> np.ndarray:
  return np.array(values, np.float32)


def _i(*values: int) -> np.ndarray:
  return np.array(values, np.int32)


_NOBODY = _f()
# A far value in float64. Coarse rounding of such values must not tell two neighbours apart.
_FAR = 1e9 + 31.9


def _laplace(kind: Callable) -> list[Game]:
  unit = lambda eps: kind(epsilon=eps, l1_sensitivity=1.0)
  far = np.array([_FAR]), np.array([_FAR + 1])
  return [
    *_games(
      linear,
      _ADD,
      (unit(0.5), "0, 1", _f(0), _f(1)),
      (unit(4.0), "0, 1, high epsilon", _f(0), _f(1)),
      (unit(1.0), "1e30, 1e30 + 1", _f(_HUGE), _f(_HUGE + 1)),
      (unit(1.0), "1e9 + 31.9, 1e9 + 32.9 in float64", *far),
    ),
    *_games(two_sided, _ADD, (unit(1.0), "(0, 0), (.5, -.5)", _f(0, 0), _f(0.5, -0.5))),
  ]


def _gaussian(kind: Callable) -> list[Game]:
  two = lambda z, **relation: kind(noise_multiplier=z, l2_sensitivity=2.0, **relation)
  hop = two(1.0, neighboring_relation=_REPLACE)
  root = math.sqrt(2)
  far = np.array([_FAR]), np.array([_FAR + 2])
  return [
    *_games(
      linear,
      _ADD,
      (two(2.0), "0, 2", _f(0), _f(2)),
      (two(0.5), "(0, 0), (r, -r), little noise", _f(0, 0), _f(root, -root)),
      (two(1.0), "1e9 + 31.9, 1e9 + 33.9 in float64", *far),
    ),
    *_games(linear, _REPLACE, (hop, "0, 2 under replace_one", _f(0), _f(2))),
  ]


def _bounded_mean(kind: Callable) -> list[Game]:
  swap = functools.partial(kind, lower=-1.0, upper=3.0)
  grow = functools.partial(swap, neighboring_relation=_ADD)
  strange = _f(-1, -1, _NAN), _f(-1, -1, math.inf)
  return [
    *_games(
      linear,
      _REPLACE,
      (swap(epsilon=1.0), "n = 1: lower, upper", _f(-1), _f(3)),
      (swap(epsilon=4.0), "-1e30, 1e30 among 3", _f(0, 0, -_HUGE), _f(0, 0, _HUGE)),
      (swap(epsilon=1.0), "NaN, infinity among duplicates", *strange),
      (swap(epsilon=1.0, delta=0.01), "Gaussian: lower, upper", _f(-1, 0), _f(3, 0)),
    ),
    *_games(
      learn_bins,
      _ADD,
      (grow(epsilon=1.0), "no record, one record", _NOBODY, _f(3)),
      (grow(epsilon=4.0), "NaN added", _f(-1), _f(-1, _NAN)),
      (grow(epsilon=1.0, delta=0.01), "Gaussian: one added", _f(-1), _f(-1, 3)),
    ),
  ]


def _histogram(kind: Callable) -> list[Game]:
  grow = functools.partial(kind, num_bins=2)
  swap = functools.partial(grow, neighboring_relation=_REPLACE)
  return [
    *_games(
      linear,
      _ADD,
      (grow(epsilon=0.5), "no record, one record", _i(), _i(1)),
      (grow(epsilon=4.0), "a duplicate added", _i(0, 0), _i(0, 0, 0)),
      (grow(epsilon=1.0), "a bin out of range added", _i(0), _i(0, -7)),
      (grow(epsilon=1.0, delta=0.01), "Gaussian: one added", _i(0), _i(0, 1)),
    ),
    *_games(
      two_sided,
      _REPLACE,
      (swap(epsilon=1.0), "bin 0, bin 1: a singleton moves", _i(0), _i(1)),
    ),
    *_games(
      linear,
      _REPLACE,
      (swap(epsilon=1.0, delta=0.01), "Gaussian: a singleton moves", _i(0), _i(1)),
    ),
  ]


def _quantile(kind: Callable) -> list[Game]:
  grow = functools.partial(kind, lower=0.0, upper=10.0)
  swap = functools.partial(grow, neighboring_relation=_REPLACE)
  # The narrow gap between 4.9 and 5.1 is the most sensitive test.
  near = _f(4.9, 5.1)
  far = _f(5, 5, -_HUGE), _f(5, 5, math.inf)
  return [
    *_games(
      together(learn_bins, repeats),
      _REPLACE,
      (swap(epsilon=4.0), "the upper side of a gap moves", near, _f(0, 4.9)),
      (swap(epsilon=4.0), "-1e30, infinity among 3", *far),
    ),
    *_games(
      learn_bins,
      _ADD,
      (grow(epsilon=4.0), "a record added below a gap", near, _f(0, 4.9, 5.1)),
      (grow(epsilon=1.0), "no record, one record", _NOBODY, _f(10)),
      (grow(epsilon=1.0), "NaN added to duplicates", _f(5, 5), _f(5, 5, _NAN)),
    ),
  ]


def _channel_statistics(kind: Callable) -> list[Game]:
  """Returns games with public clip norms. Private norms come from `Quantile`, which has games
  of its own."""
  build = functools.partial(kind, normalize_by=1.0, clip_norms=(1.0, 2.0))
  loud = build(noise_multiplier=0.7)
  swap = build(noise_multiplier=2.0, neighboring_relation=_REPLACE)
  # Each example has one position and one channel.
  pixel = lambda *values: _f(*values).reshape(-1, 1, 1)
  empty = "an empty example, a long one"
  return [
    *_games(linear, _ADD, (loud, empty, pixel(0), pixel(1e4))),
    *_games(linear, _REPLACE, (swap, "-9, 9 under replace_one", pixel(-9), pixel(9))),
  ]


def _whitening(kind: Callable) -> list[Game]:
  """Returns games with public clip norms; `spreads` computes releases for many keys at once."""
  # The second moments of an empty example about a noisy mean seldom reach such large norms.
  norms = (1.0, 100.0, 100.0, 100.0, 1.0)
  build = functools.partial(kind, normalize_by=1.0, clip_norms=norms)
  loud = build(noise_multiplier=2.0)
  swap = build(noise_multiplier=4.0, neighboring_relation=_REPLACE)
  pixel = lambda *values: _f(*values).reshape(-1, 1, 1)
  rows = (
    (_ADD, (loud, "an empty example, a long one", pixel(0), pixel(1e4))),
    (_REPLACE, (swap, "-9, 9 under replace_one", pixel(-9), pixel(9))),
  )
  return _games_at_once(spreads, rows)


def _games_at_once(
  releases: Callable[..., Any], rows: Iterable[tuple[str, tuple]]
) -> list[Game]:
  """Returns the games of rows (relation, row of `_games`); `releases` takes many keys at once."""
  return [
    Game(
      case,
      relation,
      claims_of(mechanism, relation),
      at_once(releases, mechanism, pair),
      linear,
    )
    for relation, (mechanism, case, *pair) in rows
  ]


def at_once(
  releases: Callable[..., Any], mechanism: Any, data: Sequence[np.ndarray]
) -> Outputs:
  """Returns `Game.outputs` of a mechanism whose releases are drawn for many keys at once."""
  # A broken twin makes its own releases from those of the mechanism that it breaks.
  release = getattr(mechanism, "at_once", None)
  if release is None:
    return drawn_by(lambda keys, world: releases(mechanism, keys, data[world]))
  return drawn_by(lambda keys, world: release(releases, keys, data[world]))


def spreads(mechanism: Whitening, keys: jax.Array, x: np.ndarray) -> whitening.Spread:
  """Returns the releases of `Whitening` on few examples, for many keys at once.

  The mechanism pads its examples to a thousand and works on the host between its five releases, so
  a draw takes 10 ms. Here one program computes one of the five for all draws, with the functions
  of the mechanism itself. Examples are padded to two, which changes no release: sums are exact, and
  zeros add nothing to them.

  Args:
    mechanism: mechanism with public clip norms.
    keys: [n], keys of the draws.
    x: [examples, ..., channels].

  Returns:
    Fields [n, ...], equal to those of `mechanism.after(key, x, None)` for each key, up to the last
    bits.
  """
  n = len(keys)
  shape = (max(2, len(x)), math.prod(x.shape[1:-1]), x.shape[-1])
  chunk = np.zeros(shape, np.float32)
  chunk[: len(x)] = np.reshape(x, (len(x), *shape[1:]))
  split = jax.vmap(lambda key: jax.random.split(mechanism.own_key(key), 10))(keys)
  statistics: dict[str, Any] = {}
  known = [whitening._Map()] * n
  for place, name in enumerate(mechanism.vectors):
    norm = jnp.float32(mechanism.clip_norms[place])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *known)
    high, low = _totals(name, stacked, chunk, jnp.int32(len(x)), norm)
    summed = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    whole = np.round(summed)
    parts = (np.float32(whole), np.float32(summed - whole))
    statistics[name] = _noisy_means(mechanism, split[:, 2 * place + 1], *parts, norm)
    if name == "variances":
      statistics["floor"] = jax.vmap(mechanism._floor, in_axes=(0, None))(
        statistics[name], norm
      )
    if name == mechanism.vectors[-1]:
      break
    fields = {field: np.asarray(values) for field, values in statistics.items()}
    known = [
      whitening._map(
        {field: values[draw] for field, values in fields.items()},
        shape[1:],
        mechanism.num_directions,
      )
      for draw in range(n)
    ]
  norms = np.tile(np.array(mechanism.clip_norms, np.float32), (n, 1))
  return whitening.Spread(**statistics, clip_norms=jnp.asarray(norms))


@functools.partial(jax.jit, static_argnums=0)
def _totals(name: str, known: Any, chunk: Any, count: Any, norm: Any) -> Any:
  of_draw = functools.partial(whitening._chunk_total, name)
  return jax.vmap(of_draw, in_axes=(0, None, None, None))(known, chunk, count, norm)


@functools.partial(jax.jit, static_argnums=0)
def _noisy_means(mechanism: Whitening, keys: Any, high: Any, low: Any, norm: Any) -> Any:
  return jax.vmap(mechanism.noisy_mean_of, in_axes=(0, 0, 0, None))(keys, high, low, norm)


def _least_squares(kind: Callable) -> list[Game]:
  """Returns games on rows (x1, x2, y). The mechanism itself runs on the host, so `moments` computes
  its releases for many keys at once."""
  build = functools.partial(kind, feature_norm=1.0, target_norm=1.0)
  loud = build(noise_multiplier=1.0)
  swap = build(noise_multiplier=1.0, neighboring_relation=_REPLACE)
  nobody = np.zeros((0, 3), np.float32)
  far = _f(0.0, 1e4, 1e4).reshape(1, 3)
  # This pair attains the joint bound: x turns by 120 degrees, and the target stays.
  turned = _f(-1e4 * math.sqrt(3) / 2, -0.5e4, 1e4).reshape(1, 3)
  strange = np.concatenate([far, _f(_NAN, 1e4, 1e4).reshape(1, 3)])
  rows = (
    (_ADD, (loud, "no record, a long one", nobody, far)),
    (_ADD, (loud, "NaN added", far, strange)),
    (_REPLACE, (swap, "a row turns by 120 degrees", far, turned)),
  )
  return _games_at_once(moments, rows)


def moments(mechanism: LeastSquares, keys: jax.Array, rows: np.ndarray) -> np.ndarray:
  """Returns the releases of `LeastSquares` on few rows, for many keys at once.

  Args:
    keys: [n], keys of the draws.
    rows: [examples, d + 1], the target last.

  Returns:
    Noisy sums [n, d + d + d (d - 1) / 2]: x y^T, then diagonal and upper triangle of x x^T.
  """
  xx, xy = least_squares.exact_sums(mechanism, rows[:, :-1], rows[:, -1:])
  beside = xx[np.triu_indices(len(xx), 1)]
  sums = (xy.ravel(), np.diagonal(xx), beside)
  feature = float(mechanism.feature_norm)
  units = (feature * float(mechanism.target_norm), feature**2, feature**2)
  # The key is split as in `LeastSquares.noisy`.
  split = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
  places = (2, 0, 1)
  parts = [
    unit * least_squares.draw_at_once(split[:, place], part, std)
    for part, std, unit, place in zip(sums, mechanism.stds, units, places)
  ]
  return np.concatenate(parts, axis=1)


def _class_sums(kind: Callable) -> list[Game]:
  """Returns games on rows (f1, f2, label); `class_releases` takes many keys at once."""
  build = functools.partial(kind, num_classes=2, feature_norm=1.0)
  loud = build(noise_multiplier=1.0)
  swap = build(noise_multiplier=1.0, neighboring_relation=_REPLACE)
  nobody = np.zeros((0, 3), np.float32)
  far = _f(0.0, 1e4, 1.0).reshape(1, 3)
  # A vector and its opposite in one class attain the bound.
  turned = _f(0.0, -1e4, 1.0).reshape(1, 3)
  strange = np.concatenate([far, _f(_NAN, 1.0, 0.0).reshape(1, 3)])
  rows = (
    (_ADD, (loud, "no record, a long one", nobody, far)),
    (_ADD, (loud, "NaN added", far, strange)),
    (_REPLACE, (swap, "a row turns round", far, turned)),
  )
  return _games_at_once(class_releases, rows)


def class_releases(mechanism: ClassSums, keys: jax.Array, rows: np.ndarray) -> np.ndarray:
  """Returns the releases of `ClassSums` on few rows, for many keys at once.

  Args:
    keys: [n], keys of the draws.
    rows: [examples, d + 1], the label last.

  Returns:
    Noisy sums [n, K d].
  """
  sums = mechanism.exact([rows[:, :-1]], rows[:, -1].astype(np.int32))
  norm = float(mechanism.feature_norm)
  return norm * least_squares.draw_at_once(keys, sums, mechanism.std / norm)


def _randomized_response(kind: Callable) -> list[Game]:
  return _games(
    frequency,
    _REPLACE,
    (kind(epsilon=0.5), "0, 1", _i(0), _i(1)),
    (kind(epsilon=5.0, num_categories=4), "0, 3 of 4", _i(0), _i(3)),
    (kind(epsilon=1.0, num_categories=3), "-7, 99", _i(-7), _i(99)),
  )


def _unary_encoding(kind: Callable) -> list[Game]:
  return _games(
    frequency,
    _REPLACE,
    (kind(epsilon=1.0), "0, 1", _i(0), _i(1)),
    (kind(epsilon=4.0, num_categories=3), "0, 2 of 3", _i(0), _i(2)),
    (kind(epsilon=1.0, num_categories=3), "-7, 99", _i(-7), _i(99)),
  )


def _local_hashing(kind: Callable) -> list[Game]:
  # Few hash values, so that each response occurs often.
  build = functools.partial(kind, num_buckets=3)
  return _games(
    frequency,
    _REPLACE,
    (build(epsilon=1.0), "0, 1", _i(0), _i(1)),
    (build(epsilon=4.0, num_categories=9), "one digit of two: 0, 6 of 9", _i(0), _i(6)),
    (build(epsilon=1.0, num_categories=3), "-7, 99", _i(-7), _i(99)),
  )


def _selection(kind: Callable, **options: str) -> list[Game]:
  build = functools.partial(kind, **options)
  tag = "".join(f", {value} noise" for value in options.values())
  far = np.array([1e9, _FAR]), np.array([1e9, _FAR + 1])
  up = _f(1, 0), _f(0, 0)
  return _games(
    frequency,
    _ADD,
    (build(epsilon=1.0), f"one up, two down{tag}", _f(1, -1, -1), _f(0, 0, 0)),
    (build(epsilon=4.0), f"one up, one down{tag}", _f(1, -1), _f(0, 0)),
    (build(epsilon=1.0, monotonic=True), f"monotonic: one up{tag}", *up),
    (build(epsilon=1.0), f"1e9 + 31.9, 1e9 + 32.9 in float64{tag}", *far),
  )


def _noisy_max(kind: Callable) -> list[Game]:
  first, *others = (_selection(kind, noise=noise) for noise in NOISES)
  return [*first, *(games[0] for games in others)]


def _aggregate_mean(kind: Callable) -> list[Game]:
  build = functools.partial(kind, num_shards=2, lower=0.0, upper=1.0)
  mechanisms = [build(epsilon=1.0), build(epsilon=4.0), build(epsilon=1.0, delta=0.01)]
  low, high, smooth = mechanisms
  of = lambda mechanism, answer: lambda key, examples: mechanism(key, examples, answer)
  root = lambda shard: jnp.log(jnp.sum(shard))
  pair = (_f(0, 0), _f(0, 1))
  far = (_f(0, 0, 0, -_HUGE), _f(0, 0, 0, _HUGE))
  negative = (_f(2, 2, -9), _f(2, 2, 2))
  return _games(
    linear,
    _REPLACE,
    (low, "one record a shard: 0, 1", *pair, of(low, jnp.sum)),
    (high, "-1e30, 1e30", *far, of(high, jnp.sum)),
    (low, "the shard's answer is NaN", *negative, of(low, root)),
    (smooth, "Gaussian: 0, 1", *pair, of(smooth, jnp.sum)),
  )


def _aggregate_vote(kind: Callable) -> list[Game]:
  build = functools.partial(kind, num_shards=2, num_classes=2)
  low = build(epsilon=1.0)
  high = build(epsilon=4.0, noise="exponential")
  of = lambda mechanism: lambda key, votes: mechanism(key, votes, lambda shard: shard[0])
  return _games(
    frequency,
    _REPLACE,
    (low, "a vote moves", _i(0, 1), _i(1, 1), of(low)),
    (high, "a vote moves, exponential noise", _i(0, 1), _i(1, 1), of(high)),
    (low, "a vote for no class", _i(0, 1), _i(99, 1), of(low)),
  )


def _sparse_vector(kind: Callable) -> list[Game]:
  build = functools.partial(kind, threshold=0.0)
  low = build(epsilon=1.0)
  high = build(epsilon=4.0, max_above=2)
  with_values = build(epsilon=0.5, epsilon_values=1.0)
  same = build(epsilon=2.0, monotonic=True)
  above = lambda mechanism: lambda key, queries: mechanism(key, queries).above
  seen = lambda key, queries: with_values(key, queries)[1:]
  many = (_f(*[0] * 5, 1), _f(*[1] * 5, 0))
  all_up = (_f(0, 0, 0), _f(1, 1, 1))
  return [
    *_games(learn_bins, _ADD, (with_values, "with values", _f(9, 0), _f(10, 0), seen)),
    *_games(
      frequency,
      _ADD,
      (low, "all but the last move up", *many, above(low)),
      (high, "two hits", *many, above(high)),
      (same, "monotonic: all move up", *all_up, above(same)),
    ),
  ]


# Number of queries in a game about votes: several answers show what one answer cannot.
_VOTES = 16


def _votes_game(
  mechanism: Any, case: str, zero: np.ndarray, one: np.ndarray, relation: str, **num: int
) -> Game:
  """Returns a game of equal queries with counts [K]; `num` gives `event` the numbers of queries."""

  def released(key: jax.Array, counts: jax.Array) -> jax.Array:
    labels = mechanism(key, counts)
    # A linear score needs a column for each class, and one for a query without an answer.
    return jax.nn.one_hot(labels + 1, zero.shape[-1] + 1)

  before = np.tile(zero, (_VOTES, 1))
  after = np.tile(one, (_VOTES, 1))
  rules: dict[str, Any] = {"adversary": linear, "relation": relation}
  played = game(mechanism, case, before, after, released, **rules)
  return dataclasses.replace(
    played, claims=claims_of_event(mechanism.event(relation, **num), relation)
  )


def _gnmax(kind: Callable) -> list[Game]:
  swap = functools.partial(kind, neighboring_relation=_REPLACE)
  rows = ((kind, _ADD), (swap, _REPLACE))
  return [
    *(
      _votes_game(
        build(std=4.0), f"a vote moves, {_VOTES} queries, {relation}",
        _f(1, 0), _f(0, 1), relation, num_queries=_VOTES,
      )
      for build, relation in rows
    ),
    *_games(frequency, _ADD, (kind(std=1.0), "a vote moves, a query", _f(1, 0), _f(0, 1))),
  ]  # fmt: skip


def _confident_gnmax(kind: Callable) -> list[Game]:
  build = functools.partial(kind, threshold=2.0, check_std=4.0, std=4.0)
  low = functools.partial(kind, threshold=-1e9, check_std=4.0, std=4.0)
  num = {"num_checks": _VOTES}
  return [
    _votes_game(low(), "a vote moves, all answered", _f(1, 0), _f(0, 1), _ADD, **num),
    _votes_game(build(), "agreement ends", _f(2, 0), _f(1, 1), _ADD, **num),
  ]


GAMES: dict[str, Callable[[Any], list[Game]]] = {
  "Laplace": _laplace,
  "Gaussian": _gaussian,
  "BoundedMean": _bounded_mean,
  "Histogram": _histogram,
  "Quantile": _quantile,
  "ChannelStatistics": _channel_statistics,
  "Whitening": _whitening,
  "LeastSquares": _least_squares,
  "ClassSums": _class_sums,
  "RandomizedResponse": _randomized_response,
  "OptimizedUnaryEncoding": _unary_encoding,
  "OptimizedLocalHashing": _local_hashing,
  "Exponential": _selection,
  "PermuteAndFlip": _selection,
  "ReportNoisyMax": _noisy_max,
  "SampleAndAggregateMean": _aggregate_mean,
  "SampleAndAggregateVote": _aggregate_vote,
  "SparseVector": _sparse_vector,
  "GNMax": _gnmax,
  "ConfidentGNMax": _confident_gnmax,
}

"""Games against query mechanisms: what comes out of `mechanism(key, data)` on the worst data.

Each entry of `GAMES` takes the mechanism class (or a broken one) and returns its games, the
strongest one first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import accounting
from dpjax.auditing.games.game import (
  Adversary,
  Claim,
  Game,
  binned,
  frequency,
  linear,
  two_sided,
)
from dpjax.types import ArrayTree

ROOM = "mechanisms"
NOISES = ("laplace", "gumbel", "exponential")
DELTAS = (
  1e-5,
  0.01,
  0.1,
)  # points of a curve: where tails count, and where the middle does
_ADD, _REPLACE = "add_or_remove_one", "replace_one"
_NAN, _HUGE = math.nan, 1e30


class Mechanism(Protocol):
  """What every query mechanism has; one with a pure budget also has `epsilon`."""

  def __call__(self, key: jax.Array, data: ArrayTree, /) -> Any: ...
  def event(self, neighboring_relation: str) -> accounting.DpEvent: ...


def claims_of(mechanism: Mechanism, relation: str) -> tuple[Claim, ...]:
  """The price that the mechanism's event has: at delta 0 where it is pure."""
  delta = getattr(mechanism, "delta", None)
  budget = getattr(mechanism, "epsilon", None)
  if budget is not None and not (isinstance(delta, float) and delta):
    return (Claim(budget + getattr(mechanism, "epsilon_values", 0.0), 0.0),)
  event = mechanism.event(relation)
  return tuple(
    Claim(accounting.epsilon(event, delta=d, neighboring_relation=relation), d)
    for d in DELTAS
  )


def game(
  mechanism: Mechanism,
  case: str,
  data: Sequence[Any],
  adversary: Adversary,
  *,
  relation: str,
  call: Callable[..., Any] | None = None,
  subject: str = "",
) -> Game:
  """The game on `data` = (one input, its neighbour); `call(key, data)` releases leaves."""
  released = mechanism if call is None else call
  traced = data[0].shape == data[1].shape and data[0].dtype != np.float64

  @functools.cache
  def many(world: int) -> Callable:
    if traced:  # both inputs share one program
      return jax.jit(jax.vmap(released, in_axes=(0, None)))
    # concrete data: what the mechanism does on the host, refusing included, is played too
    given = jax.jit(
      jax.vmap(lambda key: jax.tree.map(jnp.asarray, released(key, data[world])))
    )
    return lambda keys, _: given(keys)

  def outputs(world: int, seed: int, n: int) -> np.ndarray:
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), world), n)
    leaves = jax.tree.leaves(many(0 if traced else world)(keys, data[world]))
    return np.concatenate([np.asarray(x, np.float64).reshape(n, -1) for x in leaves], 1)

  name = subject or type(mechanism).__name__
  claims = claims_of(mechanism, relation)
  return Game(ROOM, name, case, relation, claims, outputs, adversary)


def _array(*values: float) -> np.ndarray:
  return np.array(values, np.float32)


def _laplace(kind: Callable) -> list[Game]:
  unit = lambda eps: kind(epsilon=eps, l1_sensitivity=1.0)
  one = functools.partial(game, adversary=linear, relation=_ADD, subject="Laplace")
  far = (
    np.array([1e9 + 31.9]),
    np.array([1e9 + 32.9]),
  )  # float64: rounding must not part them
  return [
    one(unit(0.5), "0, 1", (_array(0), _array(1))),
    one(unit(4.0), "0, 1, high epsilon", (_array(0), _array(1))),
    one(
      unit(1.0),
      "(0, 0), (.5, -.5)",
      (_array(0, 0), _array(0.5, -0.5)),
      adversary=two_sided,
    ),
    one(unit(1.0), "1e30, 1e30 + 1", (_array(_HUGE), _array(_HUGE + 1))),
    one(unit(1.0), "1e9 + 31.9, 1e9 + 32.9 in float64", far),
  ]


def _gaussian(kind: Callable) -> list[Game]:
  one = functools.partial(game, adversary=linear, relation=_ADD, subject="Gaussian")
  two = lambda z: kind(noise_multiplier=z, l2_sensitivity=2.0)
  hop = kind(noise_multiplier=1.0, l2_sensitivity=2.0, neighboring_relation=_REPLACE)
  root = math.sqrt(2)
  far = (np.array([1e9 + 31.9]), np.array([1e9 + 33.9]))
  return [
    one(two(2.0), "0, 2", (_array(0), _array(2))),
    one(two(0.5), "(0, 0), (r, -r), little noise", (_array(0, 0), _array(root, -root))),
    one(hop, "0, 2 under replace_one", (_array(0), _array(2)), relation=_REPLACE),
    one(two(1.0), "1e9 + 31.9, 1e9 + 33.9 in float64", far),
  ]


def _bounded_mean(kind: Callable) -> list[Game]:
  replace = functools.partial(kind, lower=-1.0, upper=3.0)
  either = functools.partial(replace, neighboring_relation=_ADD)
  one = functools.partial(game, adversary=linear, relation=_REPLACE, subject="BoundedMean")
  grow = functools.partial(game, adversary=binned, relation=_ADD, subject="BoundedMean")
  none = np.zeros(0, np.float32)
  return [
    one(replace(epsilon=1.0), "n = 1: lower, upper", (_array(-1), _array(3))),
    one(
      replace(epsilon=4.0),
      "-1e30, 1e30 among 3",
      (_array(0, 0, -_HUGE), _array(0, 0, _HUGE)),
    ),
    one(
      replace(epsilon=1.0),
      "NaN, infinity among duplicates",
      (_array(-1, -1, _NAN), _array(-1, -1, math.inf)),
    ),
    one(
      replace(epsilon=1.0, delta=0.01),
      "Gaussian: lower, upper",
      (_array(-1, 0), _array(3, 0)),
    ),
    grow(either(epsilon=1.0), "no record, one record", (none, _array(3))),
    grow(either(epsilon=4.0), "NaN added", (_array(-1), _array(-1, _NAN))),
    grow(
      either(epsilon=1.0, delta=0.01), "Gaussian: one added", (_array(-1), _array(-1, 3))
    ),
  ]


def _histogram(kind: Callable) -> list[Game]:
  bins = lambda *values: np.array(values, np.int32)
  swap = functools.partial(kind, num_bins=2, neighboring_relation=_REPLACE)
  one = functools.partial(game, adversary=linear, relation=_ADD, subject="Histogram")
  two = functools.partial(game, adversary=two_sided, relation=_REPLACE, subject="Histogram")
  plain = functools.partial(kind, num_bins=2)
  return [
    one(plain(epsilon=0.5), "no record, one record", (bins(), bins(1))),
    one(plain(epsilon=4.0), "a duplicate added", (bins(0, 0), bins(0, 0, 0))),
    one(plain(epsilon=1.0), "a bin out of range added", (bins(0), bins(0, -7))),
    one(plain(epsilon=1.0, delta=0.01), "Gaussian: one added", (bins(0), bins(0, 1))),
    two(swap(epsilon=1.0), "bin 0, bin 1: a singleton moves", (bins(0), bins(1))),
    one(
      swap(epsilon=1.0, delta=0.01),
      "Gaussian: a singleton moves",
      (bins(0), bins(1)),
      relation=_REPLACE,
    ),
  ]


def _quantile(kind: Callable) -> list[Game]:
  median = functools.partial(kind, lower=0.0, upper=10.0)
  swap = functools.partial(median, neighboring_relation=_REPLACE)
  one = functools.partial(game, adversary=binned, relation=_ADD, subject="Quantile")
  two = functools.partial(one, relation=_REPLACE)
  none, near = np.zeros(0, np.float32), _array(4.9, 5.1)  # the narrow gap tells most
  return [
    two(swap(epsilon=4.0), "the upper side of a gap moves", (near, _array(0, 4.9))),
    one(median(epsilon=4.0), "a record added below a gap", (near, _array(0, 4.9, 5.1))),
    one(median(epsilon=1.0), "no record, one record", (none, _array(10))),
    one(median(epsilon=1.0), "NaN added to duplicates", (_array(5, 5), _array(5, 5, _NAN))),
    two(
      swap(epsilon=4.0),
      "-1e30, infinity among 3",
      (_array(5, 5, -_HUGE), _array(5, 5, math.inf)),
    ),
  ]


def _randomized_response(kind: Callable) -> list[Game]:
  one = functools.partial(
    game, adversary=frequency, relation=_REPLACE, subject="RandomizedResponse"
  )
  label = lambda value: np.array([value], np.int32)
  return [
    one(kind(epsilon=0.5), "0, 1", (label(0), label(1))),
    one(kind(epsilon=5.0, num_categories=4), "0, 3 of 4", (label(0), label(3))),
    one(kind(epsilon=1.0, num_categories=3), "-7, 99", (label(-7), label(99))),
  ]


def _selection(kind: Callable, name: str, **options: Any) -> list[Game]:
  made = functools.partial(kind, **options)
  tag = "".join(f", {value} noise" for value in options.values())
  one = functools.partial(game, adversary=frequency, relation=_ADD, subject=name)
  apart = (_array(1, -1, -1), _array(0, 0, 0))
  far = (np.array([1e9, 1e9 + 31.9]), np.array([1e9, 1e9 + 32.9]))
  return [
    one(made(epsilon=1.0), f"one up, two down{tag}", apart),
    one(made(epsilon=4.0), f"one up, one down{tag}", (_array(1, -1), _array(0, 0))),
    one(
      made(epsilon=1.0, monotonic=True),
      f"monotonic: one up{tag}",
      (_array(1, 0), _array(0, 0)),
    ),
    one(made(epsilon=1.0), f"1e9 + 31.9, 1e9 + 32.9 in float64{tag}", far),
  ]


def _noisy_max(kind: Callable) -> list[Game]:
  laplace = _selection(kind, "ReportNoisyMax", noise="laplace")
  others = [
    _selection(kind, "ReportNoisyMax", noise=n)[0] for n in NOISES if n != "laplace"
  ]
  return [*laplace, *others]


def _aggregate_mean(kind: Callable) -> list[Game]:
  made = functools.partial(kind, num_shards=2, lower=0.0, upper=1.0)
  swap = lambda mechanism, case, data, fn: game(
    mechanism,
    case,
    data,
    linear,
    relation=_REPLACE,
    subject="SampleAndAggregateMean",
    call=lambda key, examples: mechanism(key, examples, fn),
  )
  total, root = (lambda shard: jnp.sum(shard)), (lambda shard: jnp.log(jnp.sum(shard)))
  return [
    swap(
      made(epsilon=1.0), "one record a shard: 0, 1", (_array(0, 0), _array(0, 1)), total
    ),
    swap(
      made(epsilon=4.0),
      "-1e30, 1e30",
      (_array(0, 0, 0, -_HUGE), _array(0, 0, 0, _HUGE)),
      total,
    ),
    swap(
      made(epsilon=1.0),
      "the shard's answer is NaN",
      (_array(2, 2, -9), _array(2, 2, 2)),
      root,
    ),
    swap(
      made(epsilon=1.0, delta=0.01), "Gaussian: 0, 1", (_array(0, 0), _array(0, 1)), total
    ),
  ]


def _aggregate_vote(kind: Callable) -> list[Game]:
  made = functools.partial(kind, num_shards=2, num_classes=2)
  swap = lambda mechanism, case, data: game(
    mechanism,
    case,
    data,
    frequency,
    relation=_REPLACE,
    subject="SampleAndAggregateVote",
    call=lambda key, examples: mechanism(key, examples, lambda shard: shard[0]),
  )
  votes = lambda *values: np.array(values, np.int32)
  return [
    swap(made(epsilon=1.0), "a vote moves", (votes(0, 1), votes(1, 1))),
    swap(
      made(epsilon=4.0, noise="exponential"),
      "a vote moves, exponential noise",
      (votes(0, 1), votes(1, 1)),
    ),
    swap(made(epsilon=1.0), "a vote for no class", (votes(0, 1), votes(99, 1))),
  ]


def _sparse_vector(kind: Callable) -> list[Game]:
  made = functools.partial(kind, threshold=0.0)
  one = functools.partial(game, relation=_ADD, subject="SparseVector")
  above = lambda mechanism: lambda key, queries: mechanism(key, queries).above
  seen = lambda mechanism: lambda key, queries: mechanism(key, queries)[1:]
  many = (_array(*[0] * 5, 1), _array(*[1] * 5, 0))
  low, high, paid = (
    made(epsilon=1.0),
    made(epsilon=4.0, max_above=2),
    made(epsilon=0.5, epsilon_values=1.0),
  )
  same = made(epsilon=2.0, monotonic=True)
  return [
    one(paid, "with values", (_array(9, 0), _array(10, 0)), binned, call=seen(paid)),
    one(low, "all but the last move up", many, frequency, call=above(low)),
    one(high, "two hits", many, frequency, call=above(high)),
    one(
      same,
      "monotonic: all move up",
      (_array(0, 0, 0), _array(1, 1, 1)),
      frequency,
      call=above(same),
    ),
  ]


GAMES: dict[str, Callable[[Any], list[Game]]] = {
  "Laplace": _laplace,
  "Gaussian": _gaussian,
  "BoundedMean": _bounded_mean,
  "Histogram": _histogram,
  "Quantile": _quantile,
  "RandomizedResponse": _randomized_response,
  "Exponential": lambda kind: _selection(kind, "Exponential"),
  "PermuteAndFlip": lambda kind: _selection(kind, "PermuteAndFlip"),
  "ReportNoisyMax": _noisy_max,
  "SampleAndAggregateMean": _aggregate_mean,
  "SampleAndAggregateVote": _aggregate_vote,
  "SparseVector": _sparse_vector,
}

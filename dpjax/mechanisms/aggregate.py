"""Sample and aggregate: a function runs on disjoint shards, and its outputs are combined privately.

The records are cut at random into `num_shards` disjoint shards of equal size; records left over are
in no shard. So a record is in at most one shard. If it is exchanged, at most one output changes,
whatever the function does; one that could see other shards under `vmap` is refused. The function
needs no sensitivity. The mean clips its outputs, because a mean of unbounded outputs would have no
sensitivity.

Both mechanisms are private under replace_one only. Shards follow from the number of records: with
one record more or fewer all of them could change, so add_or_remove_one is refused.

Source: Nissim, Raskhodnikova and Smith 2007; the vote: Papernot et al. 2017,
arXiv:1610.05755 (PATE).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import accounting, trees, validate
from dpjax.gradients import loss_checks
from dpjax.mechanisms import finite, stated
from dpjax.mechanisms.additive import Gaussian, Laplace, calibrate
from dpjax.mechanisms.selection import ReportNoisyMax
from dpjax.types import ArrayTree
from dpjax.validate import UserError

_RELATION = "replace_one"


@dataclasses.dataclass(frozen=True)
class SampleAndAggregateMean:
  """Mean over shards of `fn(shard)`, each coordinate clipped into [lower, upper].

  Guarantee: (epsilon, delta)-DP under replace_one, by Laplace noise if delta is 0, else by analytic
  Gaussian noise. One shard moves each of the d coordinates of the mean by at most
  s = (upper - lower) / num_shards. So the L1 sensitivity is d s, the L2 sensitivity sqrt(d) s.

  | `fn` returns     | counts as                    |
  | ---------------- | ---------------------------- |
  | NaN              | the middle of the bounds     |
  | infinity         | the nearest bound            |

  >>> mechanism = SampleAndAggregateMean(epsilon=1.0, num_shards=50, lower=0.0, upper=1.0)
  >>> mechanism.noise(3).scale  # 3 coordinates: 3 * (1 - 0) / 50 / epsilon  # doctest: +SLOW
  0.06
  >>> mechanism(jax.random.key(0), jnp.ones((100, 3)), lambda shard: shard.mean(0)).shape
  (3,)
  """

  epsilon: float
  num_shards: int
  lower: float
  upper: float
  delta: float = 0.0

  neighboring_relation = _RELATION

  def __post_init__(self) -> None:
    validate.integer_at_least(2, num_shards=self.num_shards)
    _check_few(num_shards=self.num_shards)
    stated.interval(self.lower, self.upper)
    # Refuses a wrong epsilon or delta before any call.
    self.noise(1)

  def noise(self, num_coordinates: int) -> Laplace | Gaussian:
    """Returns the mechanism that adds noise to the mean of outputs of `num_coordinates` entries."""
    validate.integer_at_least(1, num_coordinates=num_coordinates)
    return self._noise(num_coordinates, (self.upper - self.lower) / int(self.num_shards))

  def _noise(self, num_coordinates: int, each: float) -> Laplace | Gaussian:
    return calibrate(
      epsilon=self.epsilon,
      delta=self.delta,
      l1=num_coordinates * each,
      l2=math.sqrt(num_coordinates) * each,
      neighboring_relation=_RELATION,
    )

  def __call__(
    self, key: jax.Array, examples: ArrayTree, fn: Callable[[Any], jax.Array]
  ) -> jax.Array:
    """Returns the private mean [*out] of `fn(shard) -> [*out]`; every leaf of examples is
    [n, ...].

    `fn` sees the shard's records as leaves [n // num_shards, ...], under vmap.
    """
    trees.check_key(key=key)
    for_shards, for_noise = jax.random.split(key)
    outputs = _outputs(fn, shards(for_shards, examples, self.num_shards))  # [k, *out]
    lower = float(self.lower)
    upper = float(self.upper)
    k = int(self.num_shards)
    shares = finite.units("fn", outputs, lower, upper)
    # Outputs are mapped to [0, 1], so one shard moves each coordinate of their exact sum by at most
    # 1. Noise is added to this sum.
    noise = self._noise(shares[0].size, 1.0)
    total = noise.on(for_noise, *finite.total(shares))
    return lower + (upper - lower) * (total / k)

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event of one call for `dpjax.accounting`, whatever the number of coordinates."""
    return self.noise(1).event(neighboring_relation)


@dataclasses.dataclass(frozen=True)
class SampleAndAggregateVote:
  """Releases the label with the most votes of shards after noise, by report-noisy-max as in PATE.

  Guarantee: every released label is (epsilon, 0)-DP under replace_one. One shard moves at most two
  counts: one up by 1, another one down by 1.

  | `fn` returns                      | counts as      |
  | --------------------------------- | -------------- |
  | a label outside 0..num_classes-1  | no vote        |

  >>> mechanism = SampleAndAggregateVote(epsilon=1.0, num_shards=50, num_classes=3)
  >>> vote = lambda shard: jnp.argmax(jnp.bincount(shard, length=3))  # doctest: +SLOW
  >>> int(mechanism(jax.random.key(0), jnp.full(100, 2), vote))
  2
  """

  epsilon: float  # of each label released
  num_shards: int
  num_classes: int
  noise: str = "laplace"  # see ReportNoisyMax

  neighboring_relation = _RELATION

  def __post_init__(self) -> None:
    validate.integer_at_least(2, num_shards=self.num_shards, num_classes=self.num_classes)
    _check_few(num_shards=self.num_shards, num_classes=self.num_classes)
    # Refuses a wrong epsilon or noise before any call.
    _ = self.selection

  @property
  def selection(self) -> ReportNoisyMax:
    """Returns the mechanism that chooses the winner from the counts."""
    return ReportNoisyMax(self.epsilon, neighboring_relation=_RELATION, noise=self.noise)

  def counts(self, votes: jax.Array) -> jax.Array:
    """Counts the votes of k shards: [k, *queries] -> [*queries, num_classes]. Not private."""
    hits = votes[..., None] == jnp.arange(int(self.num_classes))[(None,) * votes.ndim]
    return jnp.sum(hits, axis=0)

  def __call__(
    self, key: jax.Array, examples: ArrayTree, fn: Callable[[Any], jax.Array]
  ) -> jax.Array:
    """Returns the winning labels [*queries], int32. `fn(shard)` gives integer labels [*queries]."""
    trees.check_key(key=key)
    for_shards, for_noise = jax.random.split(key)
    votes = _outputs(fn, shards(for_shards, examples, self.num_shards))
    if not jnp.issubdtype(votes.dtype, jnp.integer):
      raise UserError(f"must return integer labels, not {votes.dtype}", field="fn")
    return self.selection(for_noise, self.counts(votes))

  def event(
    self, neighboring_relation: str = "add_or_remove_one", *, num_queries: int = 1
  ) -> stated.DpEvent:
    """Returns the event of `num_queries` released labels, for `dpjax.accounting`."""
    validate.integer_at_least(1, num_queries=num_queries)
    event = self.selection.event(neighboring_relation)
    return accounting.compose(event, int(num_queries))


def _check_few(**named: int) -> None:
  for name, value in named.items():
    if value > finite.MAX_RECORDS:
      raise UserError(f"must be at most {finite.MAX_RECORDS}", field=name, value=value)


def shards(key: jax.Array, examples: ArrayTree, num_shards: int) -> Any:
  """Returns disjoint random shards of equal size: leaves [n, ...] -> [num_shards, size, ...].

  `size` is n // num_shards. Raises UserError if there are fewer records than shards, or if leaves
  differ in n.

  >>> sorted(shards(jax.random.key(0), jnp.arange(4), 2).reshape(-1).tolist())
  [0, 1, 2, 3]
  """
  leaves = jax.tree.map(lambda leaf: finite.array("examples", leaf), examples)
  sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(leaves)}
  if len(sizes) != 1 or sizes == {()}:
    raise UserError("every leaf must have the same leading axis [n, ...]", field="examples")
  (n,) = sizes.pop()
  if n < num_shards:
    raise UserError(
      "must be at most the number of records", field="num_shards", value=num_shards
    )
  size = n // int(num_shards)
  num_shards = int(num_shards)
  # The n % num_shards records that are left out are drawn at random.
  order = jax.random.permutation(key, n)[: num_shards * size]
  cut = lambda leaf: jnp.asarray(leaf)[order].reshape(
    num_shards, size, *jnp.shape(leaf)[1:]
  )
  return jax.tree.map(cut, leaves)


def _outputs(fn: Callable[[Any], jax.Array], cut: Any) -> jax.Array:
  """Returns the outputs of `fn`, [num_shards, *out].

  Raises:
    UserError: the outputs are not one array, or a shard could reach another's output under `vmap`.
  """
  loss_checks.check_apart(fn, cut, name="fn")
  outputs = jax.vmap(fn)(cut)
  if not isinstance(outputs, jax.Array) or not outputs.size:
    raise UserError("must return one array of at least one number", field="fn")
  return finite.array("fn", outputs)

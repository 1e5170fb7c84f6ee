"""Common part of aggregators that a few arbitrary clients cannot steer. They need all messages.

None of them is private by itself. Each leaves out padding, clients of weight 0 and messages
that hold NaN or infinity. Each ignores how large weights are, since a weight is a way to steer.
Each returns 0 if no message is left. n is the number of messages that are left. For `krum`, n is
the number of clients in the round (mask True): clients that send NaN or nothing count among its f.

`python -m launch.list aggregators` shows how many arbitrary messages each aggregator tolerates.
These messages may hold ANY float32 numbers: distances are computed without overflow, and sums are
bounded by the range of the honest majority. If an aggregator tolerates f such messages of n, they
can move its result this far (tests/federated/test_breakdown.py):

| aggregator               | at most                                                        |
| ------------------------ | -------------------------------------------------------------- |
| `median`, `trimmed_mean` | within the honest messages' range, coordinate by coordinate    |
| `krum`                   | (1 + sqrt(n - f - 2)) honest diameters from any honest message |
| `geometric_median`       | 2 (n - f) / (n - 2 f) honest radii from the honest centre      |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core as jax_core

from dpjax import trees
from dpjax.federated.aggregation import (
  Aggregator,
  RoundRefused,
  at_least_one,
  finite,
)
from dpjax.types import Array

# Absolute values up to this number are treated as zero. Below 1.2e-38, float32 loses digits.
TINY = 1e-37


def kept_messages(messages: Any, mask: Array, weights: Array | None) -> Array:
  """Returns a mask [C] of the messages that count: finite messages with a finite weight > 0."""
  kept = finite(messages, mask)
  if weights is None:
    return kept
  weights = jnp.asarray(weights)
  # A message with an infinite weight is faulty. If it counted, too, Krum would expect one attacker
  # too few among the messages that count.
  return kept & (weights > 0) & jnp.isfinite(weights)


class Counts(NamedTuple):
  """Numbers of clients of a round, each a scalar array."""

  clients: Array  # all clients (mask True)
  kept: Array  # clients whose message counts
  faulty: Array  # clients with a message or a weight that no honest client sends


def counts_of(messages: Any, mask: Array, weights: Array | None) -> Counts:
  mask = jnp.asarray(mask, bool)
  faulty = mask & ~finite(messages, mask)
  if weights is not None:
    weights = jnp.asarray(weights)
    faulty = faulty | (mask & ~((weights >= 0) & jnp.isfinite(weights)))
  kept = kept_messages(messages, mask, weights)
  return Counts(jnp.sum(mask), jnp.sum(kept), jnp.sum(faulty))


def _at_least_one(counts: Counts) -> Array:
  return jnp.ones_like(counts.kept)


def robust(
  combine: Callable[[Any, Array, Counts], Any],
  least: Callable[[Counts], Array] = _at_least_one,
  wants: Mapping[str, Any] | None = None,
  *,
  min_clients: int = 1,
) -> Aggregator:
  """Makes an aggregator from `combine(finite messages, kept [C], counts) -> (update, state)`.

  If some messages count, but fewer than `least(counts)`, the aggregator raises a RoundRefused that
  names `wants`, an argument and its value. Under jit, which cannot raise, the update is NaN.
  `min_clients` is the smallest n with least(Counts(n, n, 0)) <= n.
  """

  def check(messages: Any, mask: Array, weights: Array | None = None) -> None:
    if not len(mask):
      return
    counts = counts_of(messages, mask, weights)
    count = int(counts.kept)
    fewest = int(least(counts))
    if 0 < count < fewest:
      ((field, value),) = (wants or {"messages": count}).items()
      raise RoundRefused(
        f"{count} clients sent a message; must be >= {fewest}", field=field, value=value
      )

  def update(messages: Any, mask: Array, state: Any, weights: Array | None = None) -> Any:
    del state
    mask = jnp.asarray(mask, bool)
    messages, mask, weights = at_least_one((messages, mask, weights))
    kept = kept_messages(messages, mask, weights)
    # Under jit no value is known, so a round calls `check` before the compiled update.
    if not isinstance(kept, jax_core.Tracer):
      check(messages, mask, weights)
    clean = jax.tree.map(
      lambda leaf: jnp.where(along(kept, leaf), trees.at_least_float32(leaf), 0), messages
    )
    counts = counts_of(messages, mask, weights)
    combined, after = combine(clean, kept, counts)
    # If some messages are left, but too few, the update is NaN: 0 would look like a valid update.
    wrong = jnp.where(counts.kept == 0, 0.0, jnp.nan)
    usable = (counts.kept > 0) & (counts.kept >= least(counts))
    return jax.tree.map(lambda leaf: jnp.where(usable, leaf, wrong), combined), after

  return Aggregator(lambda message: (), update, check=check, min_clients=min_clients)


def along(values: Array, leaf: Array) -> Array:
  """Reshapes values [C] to the rank of a leaf [C, ...]."""
  return values.reshape((-1,) + (1,) * (jnp.ndim(leaf) - 1))


def by_rank(messages: Any, kept: Array, weight_of_rank: Array) -> Any:
  """Sums weight_of_rank [C] * (messages sorted in each coordinate) over ranks."""

  def leaf(values: Array) -> Array:
    # Messages that do not count are sorted to the end, beyond every used rank.
    ordered = jnp.sort(jnp.where(along(kept, values), values, jnp.inf), axis=0)
    # The ranks at the end have weight 0, but 0 x infinity would be NaN.
    ordered = jnp.where(jnp.isfinite(ordered), ordered, 0)
    return jnp.tensordot(weight_of_rank, ordered, axes=1)

  return jax.tree.map(leaf, messages)


def coordinate_median(messages: Any, kept: Array) -> Any:
  count = jnp.sum(kept)
  ranks = jnp.arange(kept.shape[0])
  low = (count - 1) // 2
  high = count // 2
  weights = 0.5 * (ranks == low) + 0.5 * (ranks == high)
  return by_rank(messages, kept, weights.astype(jnp.float32))


def largest_entries(tree: Any) -> Array:
  """Returns [C]: the largest absolute entry of each row of leaves [C, ...]."""
  rows = [jnp.abs(leaf).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)]
  return jnp.max(jnp.stack([jnp.max(row, axis=1, initial=0.0) for row in rows]), axis=0)


def row_lengths(tree: Any) -> Array:
  """Returns [C]: l2 norms of rows, without over- or underflow of squares. The norm is 0 if no entry
  exceeds TINY, and inf beyond float32 or for NaN."""
  largest = largest_entries(tree)
  usable = (largest > TINY) & jnp.isfinite(largest)
  # Rows are multiplied by a power of two first, since the reciprocal of a huge number would be
  # flushed to zero.
  power = jnp.where(largest > 1, 2.0**-64, 2.0**64)
  safe = jnp.where(usable, largest * power, 1.0)

  def squares(leaf: Array) -> Array:
    rows = leaf.reshape(leaf.shape[0], -1) * power[:, None] / safe[:, None]
    return jnp.sum(rows * rows, axis=1)

  root = jnp.sqrt(sum(squares(leaf) for leaf in jax.tree.leaves(tree)))
  lengths = safe * root / power
  return jnp.where(usable, lengths, jnp.where(jnp.isfinite(largest), 0.0, jnp.inf))

"""Krum and multi-Krum (Blanchard et al. 2017): the messages nearest to their neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dpjax import validate
from dpjax.federated.aggregation import Aggregator
from dpjax.federated.aggregators.robust import Counts, robust, row_lengths
from dpjax.federated.described import aggregator
from dpjax.gradients.weighted_sums import weighted_sum
from dpjax.types import Array


@aggregator(
  source="Blanchard et al. 2017",
  stands_up_to="num_byzantine, of at least 2 num_byzantine + 3",
  tolerates=lambda n, *, num_byzantine: num_byzantine if n >= 2 * num_byzantine + 3 else 0,
  options={"num_byzantine": 1},
)
def krum(num_byzantine: int, *, num_selected: int = 1) -> Aggregator:
  """Aggregates by the mean of the `num_selected` messages that are closest to their k nearest
  neighbours.

  f is `num_byzantine`. If all n clients of the round send a message that counts, k is n - f - 2, as
  in the paper. Otherwise m messages count, b clients send NaN, infinity or an impossible weight,
  and z send weight 0. No honest client is among the b, so g = f - b attackers are left. (If b > f
  the assumption is broken, and g = f.) Then k = max(m - g - 2, g).

  Guarantee: a selected message is within sqrt(k) D of an honest message, where D is the diameter
  of the honest messages. At most f of n >= 2 f + 3 clients may be arbitrary, silent or without
  examples.
  Proof. At most g - z of the m messages are arbitrary, and at least n - f >= f + 3 are
  honest. So k <= n - f - 1: an honest message has k honest others, and scores k D^2 at most.
  A selected message scores no more than the worst honest message, as there are num_selected
  honest messages. If it is arbitrary, at most g - 1 of its k >= g nearest others are arbitrary. So
  one of these is honest, and its squared distance is one term of a score <= k D^2.
  The same holds if all z clients of weight 0 are honest and f other clients are arbitrary, and
  m >= 2 g + 1: a silent client gives the attackers no vote. So NaN and silence of attackers stop
  no round.

  Args:
    num_byzantine: number f of arbitrary clients. A round of n <= 2 f + 2 clients is refused. A
      round in which more than f clients send nothing that counts is refused, too, unless
      m >= max(2 g + 3, g + num_selected).
    num_selected: number of messages that are averaged, at most n - f. 1 is Krum, more is
      multi-Krum.

  Raises:
    RoundRefused: too few messages count. `update` and a round raise it.

  >>> messages = jnp.array([[0.0], [0.1], [0.3], [9.0], [-7.0]])  # doctest: +SLOW
  >>> krum(1).update(messages, jnp.ones(5, bool), ())[0]
  Array([0.1], dtype=float32)
  """
  validate.integer_at_least(0, num_byzantine=num_byzantine)
  validate.integer_at_least(1, num_selected=num_selected)
  least = max(2 * num_byzantine + 3, num_byzantine + num_selected)  # smallest allowed n

  def attackers(counts: Counts) -> Array:
    """Returns g: the largest number of attackers among the messages that count."""
    excused = jnp.where(counts.faulty <= num_byzantine, counts.faulty, 0)
    return num_byzantine - excused

  def enough(counts: Counts) -> Array:
    left = attackers(counts)
    # If more than f messages are left out, some of these are honest, and g attackers may remain.
    without = jnp.maximum(2 * left + 3, left + num_selected)
    fewest = jnp.minimum(counts.clients - num_byzantine, without)
    return jnp.where(counts.clients >= least, fewest, least)

  def combine(messages: Any, kept: Array, counts: Counts) -> Any:
    apart = kept[:, None] & kept[None, :] & ~jnp.eye(kept.shape[0], dtype=bool)
    # Distances are computed from differences: |a|^2 - 2 a b + |b|^2 would cancel for messages that
    # nearly agree.
    away = lambda message: row_lengths(
      jax.tree.map(lambda a, b: a[None] - b, message, messages)
    )
    distances = jnp.where(apart, jax.lax.map(away, messages), jnp.inf)  # [C, C]
    distances = jnp.sort(distances, axis=1)
    left = attackers(counts)
    near = jnp.arange(kept.shape[0]) < jnp.maximum(counts.kept - left - 2, left)
    # Scores are square roots of sums of squared distances. They have the same order as the sums,
    # which could overflow. The scores are finite for every message of the majority.
    scores = row_lengths(jnp.where(near[None], distances, 0.0))
    ranks = jnp.argsort(jnp.argsort(jnp.where(kept, scores, jnp.nan)))  # NaN comes last
    chosen = kept & (ranks < num_selected)
    return weighted_sum(messages, chosen / jnp.maximum(jnp.sum(chosen), 1)), ()

  wants = {"num_byzantine": num_byzantine}
  if least > 2 * num_byzantine + 3:
    wants = {"num_selected": num_selected}
  return robust(combine, enough, wants, min_clients=least)

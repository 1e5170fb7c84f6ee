"""Poisoning by clients who agree, and adapt to the messages of honest clients.

| attack    | what every attacker sends                           | source                      |
| --------- | --------------------------------------------------- | --------------------------- |
| `alie`    | the honest mean minus z honest standard deviations  | Baruch et al. 2019          |
| `min_max` | the honest mean, moved until it is as far from an   | Shejwalkar, Houmansadr 2021 |
|           | honest message as the two most distant are apart    |                             |
| `min_sum` | the same for the sum of squared distances to all    | Shejwalkar, Houmansadr 2021 |
|           | honest messages                                     |                             |

The attackers know the messages of all honest clients of a round: the strongest adversary of the
papers. One client alone cannot compute such a lie, so it is inserted before the aggregator.
Attackers send NaN as a mark, and `colluding` replaces the marks by the lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy import special

from dpjax import validate
from dpjax.attacks.poisoning import Colluders, Poisoning
from dpjax.federated.aggregation import Aggregator
from dpjax.types import Array
from dpjax.validate import UserError

DIRECTIONS = ("std", "unit", "sign")


class _Honest(NamedTuple):
  """Facts that attackers know about a round, with one row for each message."""

  messages: Array  # [C, d], 0 where a client is not honest
  there: Array  # [C] bool, True for honest clients
  num_clients: Array  # []
  num_attackers: Array  # []

  @property
  def mean(self) -> Array:
    """Mean message [d] of the honest clients; 0 if there are none."""
    return jnp.sum(self.messages, axis=0) / jnp.maximum(jnp.sum(self.there), 1)

  @property
  def std(self) -> Array:
    """Standard deviation [d] of the messages of all honest clients."""
    off = jnp.where(self.there[:, None], self.messages - self.mean[None], 0.0)
    return jnp.sqrt(jnp.sum(off**2, axis=0) / jnp.maximum(jnp.sum(self.there), 1))


def alie(z: float | None = None) -> Poisoning:
  """Returns the attack "A little is enough": the honest mean minus z standard deviations.

  Args:
    z: number of standard deviations. None: the largest z at which attackers and the honest clients
      beyond z form a majority, for Gaussian messages. It solves Phi(z) =
      (n - m - s) / (n - m), where m of n clients attack, and s = floor(n / 2 + 1) - m.

  Raises UserError for z that is not positive.

  >>> alie(1.5).victims is None
  True
  """
  if z is not None:
    validate.positive(z=z)

  def lie(honest: _Honest) -> Array:
    n = honest.num_clients
    m = honest.num_attackers
    supporters = jnp.floor(n / 2 + 1) - m
    share = (n - m - supporters) / jnp.maximum(n - m, 1)
    # The clip keeps z finite if the attackers alone are a majority: then every z works.
    largest = special.ndtri(jnp.clip(share, 1e-3, 1 - 1e-3))
    return honest.mean - (largest if z is None else z) * honest.std

  return _colluders(lie)


def min_max(direction: str = "std") -> Poisoning:
  """Returns an attack that sends the honest mean + gamma p; honest messages' distances limit gamma.

  gamma is the largest number that keeps the lie near all honest messages: none of these is further
  from the lie than the two most distant honest messages are from each other. Each honest client
  gives a quadratic equation for gamma, and the smallest positive root of all is taken.

  Args:
    direction: the direction p: "std" (minus the honest standard deviations), "unit" (against the
      honest mean), or "sign" (against the signs of the honest mean).

  Raises UserError for another direction.

  >>> min_max("unit").victims is None
  True
  """

  def farthest(honest: _Honest, off: Array, way: Array, square: Array) -> Array:
    there = honest.there
    apart = lambda message: jnp.where(
      there, jnp.sum((honest.messages - message[None]) ** 2, axis=1), 0.0
    )
    # Rows are taken one at a time: all differences at once would be [C, C, d].
    pairs = jnp.where(there[:, None], jax.lax.map(apart, honest.messages), 0.0)
    along = off @ way
    # For each honest client, the largest gamma solves
    # `square` * gamma^2 + 2 * `along` * gamma = `spare`.
    spare = jnp.maximum(jnp.max(pairs) - jnp.sum(off**2, axis=1), 0.0)
    roots = (-along + jnp.sqrt(along**2 + square * spare)) / jnp.where(
      square > 0, square, 1.0
    )
    return jnp.min(jnp.where(there, roots, jnp.inf))

  return _shift_mean(direction, farthest)


def min_sum(direction: str = "std") -> Poisoning:
  """Returns an attack that sends the honest mean + gamma p; sums of squared distances limit gamma.

  gamma is the largest number that keeps the lie's sum of squared distances to all honest messages
  within a limit: the largest such sum of an honest message.

  Args:
    direction: the direction p, as in `min_max`.

  Raises UserError for another direction.

  >>> min_sum("sign").victims is None
  True
  """

  def farthest(honest: _Honest, off: Array, way: Array, square: Array) -> Array:
    # Offsets from the mean sum to 0. So a message's sum of squared distances to the n honest ones
    # is n times its own squared offset, plus the sum of all squared offsets.
    squares = jnp.sum(off**2, axis=1)
    return jnp.sqrt(jnp.max(squares) / jnp.where(square > 0, square, 1.0))

  return _shift_mean(direction, farthest)


def _shift_mean(direction: str, farthest: Callable[..., Array]) -> Poisoning:
  """Returns the attack that sends the honest mean + gamma p.

  Args:
    direction: the direction p [d].
    farthest: (honest, offsets [C, d] of honest messages from their mean, p, |p|^2) -> gamma.
  """
  validate.one_of(DIRECTIONS, direction=direction)

  def lie(honest: _Honest) -> Array:
    mean = honest.mean
    length = jnp.linalg.norm(mean)
    way = {
      "std": -honest.std,
      "unit": -mean / jnp.where(length > 0, length, 1.0),
      "sign": -jnp.sign(mean),
    }[direction]
    off = jnp.where(honest.there[:, None], mean[None] - honest.messages, 0.0)
    square = jnp.sum(way**2)
    gamma = farthest(honest, off, way, square)
    return mean + jnp.where(jnp.isfinite(gamma) & (square > 0), gamma, 0.0) * way

  return _colluders(lie)


def _colluders(lie: Callable[[_Honest], Array]) -> Poisoning:
  return Poisoning(lambda dataset, held: dataset, None, collude=lie)


def colluding(aggregator: Aggregator, attack: Poisoning) -> Aggregator:
  """Returns an aggregator that first replaces the attackers' messages of the round by their lie.

  If the attackers do not collude, the aggregator is returned unchanged. Else the new aggregator
  holds all messages of a round in memory, and does not add them up one by one.

  Raises UserError for an aggregator that sees no single message (a secure sum).

  >>> from dpjax.federated import weighted_mean  # doctest: +SLOW
  >>> mean, nan = weighted_mean(), jnp.nan
  >>> lied = colluding(mean, alie(1.0))
  >>> sent = jnp.array([[1.0], [3.0], [nan]])  # the last is an attacker
  >>> lied.update(sent, jnp.ones(3, bool), lied.init(sent[0]))[0]  # (1 + 3 + 2 - 1) / 3
  Array([1.6666667], dtype=float32)
  """
  lie = attack.collude
  if lie is None:
    return aggregator
  if aggregator.through is not None:
    raise UserError(
      "sees a secure sum alone, into which no colluder can look; must see messages",
      field="aggregator",
    )

  def replaced(messages: Any, mask: Array) -> Any:
    leaves, treedef = jax.tree.flatten(messages)
    count = leaves[0].shape[0]
    flat = jnp.concatenate(
      [leaf.reshape(count, -1).astype(jnp.float32) for leaf in leaves], axis=1
    )
    # NaN in every entry is the mark of an attacker.
    marked = mask & jnp.all(jnp.isnan(flat), axis=1)
    # Any other message with NaN or infinity is neither an attacker's mark nor an honest message.
    there = mask & jnp.all(jnp.isfinite(flat), axis=1)
    # Rows that do not count are set to 0, since NaN times a weight of 0 is still NaN.
    rows = jnp.where(there[:, None], flat, 0.0)
    lies = lie(_Honest(rows, there, jnp.sum(mask), jnp.sum(marked)))
    flat = jnp.where(marked[:, None], lies[None], flat)
    ends = [0]
    for leaf in leaves:
      ends.append(ends[-1] + math.prod(leaf.shape[1:]))
    parts = [
      flat[:, start:end].reshape(leaf.shape).astype(leaf.dtype)
      for leaf, start, end in zip(leaves, ends, ends[1:])
    ]
    return jax.tree.unflatten(treedef, parts)

  def update(messages: Any, mask: Array, state: Any, weights: Array | None = None) -> Any:
    sent = replaced(messages, mask)
    aggregated, inner = aggregator.update(sent, mask, state.own, weights)
    return aggregated, Colluders(inner)

  def check(messages: Any, mask: Array, weights: Any) -> None:
    if aggregator.check is not None:
      aggregator.check(replaced(messages, jnp.asarray(mask)), mask, weights)

  return aggregator._replace(
    init=lambda message: Colluders(aggregator.init(message)),
    update=update,
    partial=None,
    finish=None,
    check=check,
  )

"""Ways to add the noise of a private mean at one guarantee, and their costs.

The mean of n clients' vectors, each clipped to norm C, is released once, with (epsilon, delta)
under "replace one client". The noise is Gaussian. z is the smallest noise multiplier that the
accountant proves for the sensitivity 2 C:

| placement     | noise of one client | noise of the mean  | who must be trusted     |
| ------------- | ------------------- | ------------------ | ----------------------- |
| server        | 0                   | 2 z C / n          | the server              |
| client        | 2 z C               | 2 z C / sqrt(n)    | nobody                  |
| distributed   | 2 z C / sqrt(m)     | 2 z C sqrt(n/m) / n| the secure summation    |

m <= n is the number of clients that surely stay. The noise of dropouts is missing, so that of any
m clients must suffice. The noise of the mean is given for the case that all n stay. With client
noise it is sqrt(n) times that with server noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import dp_accounting as dpa

from dpjax import accounting, validate
from dpjax.accounting.proved import NeighboringRelation
from dpjax.validate import UserError


class Placement(NamedTuple):
  """A way to add noise, with standard deviations per coordinate, in the unit of the vectors."""

  name: str
  trusted: str
  client_std: float  # noise that one client adds
  server_std: float  # noise that is added to the sum
  mean_std: float  # noise of the released mean
  rmse: float  # error of the released mean over all coordinates: sqrt(E ||error||^2)


def local_event(noise_multiplier: float, num_messages: int = 1) -> dpa.DpEvent:
  """Returns the event of one client's messages to the server. Account for it under "replace_one".

  Args:
    noise_multiplier: argument of `client_noise`, relative to the clip norm.
    num_messages: largest number of rounds that one client takes part in.
  """
  return accounting.compose(accounting.gaussian_event(noise_multiplier), num_messages)


def local_epsilon(noise_multiplier: float, delta: float, num_messages: int = 1) -> float:
  """Returns a proved epsilon of a client's messages against the server, under "replace_one".

  No amplification by sampling or shuffling is claimed: the server sees who sends.

  >>> central = accounting.epsilon(accounting.gaussian_event(1.0), delta=1e-5)
  >>> abs(local_epsilon(2.0, 1e-5) - central) < 1e-3  # twice the sensitivity
  True
  """
  return accounting.epsilon(
    local_event(noise_multiplier, num_messages),
    delta=delta,
    neighboring_relation=NeighboringRelation.REPLACE_ONE,
  )


def compare_placements(
  *,
  num_clients: int,
  min_survivors: int | None = None,
  epsilon: float,
  delta: float,
  l2_clip_norm: float = 1.0,
  dimension: int = 1,
) -> tuple[Placement, ...]:
  """Returns the placements server, client and distributed at one (epsilon, delta), under
  "replace_one".

  Args:
    num_clients: number n of clients, which is public here.
    min_survivors: number m of clients that surely stay in a distributed sum; None for n.
    dimension: dimension of the vectors; only `rmse` depends on it.

  >>> server, client, distributed = compare_placements(epsilon=2, delta=1e-5, num_clients=100)
  >>> round(client.mean_std / server.mean_std, 9), distributed.mean_std == server.mean_std
  (10.0, True)
  """
  validate.positive(epsilon=epsilon, l2_clip_norm=l2_clip_norm)
  validate.integer_at_least(1, num_clients=num_clients, dimension=dimension)
  stay = num_clients if min_survivors is None else min_survivors
  validate.integer_at_least(1, min_survivors=stay)
  if stay > num_clients:
    raise UserError(
      f"must be <= num_clients={num_clients}", field="min_survivors", value=stay
    )
  std = l2_clip_norm * accounting.calibrate_noise_multiplier(
    accounting.gaussian_event,
    epsilon=epsilon,
    delta=delta,
    neighboring_relation=NeighboringRelation.REPLACE_ONE,
  )
  root = math.sqrt(num_clients)
  # Variances add up, so the noise of `stay` clients makes up the whole noise.
  share = std / math.sqrt(stay)

  def placement(name: str, trusted: str, client: float, server: float, mean: float):
    return Placement(name, trusted, client, server, mean, mean * math.sqrt(dimension))

  return (
    placement("server", "the server", 0.0, std, std / num_clients),
    placement("client", "nobody", std, 0.0, std / root),
    placement("distributed", "secure summation", share, 0.0, share * root / num_clients),
  )

"""Federated averaging (McMahan et al. 2017): clients train, the server takes the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from dpjax.federated import client as clients
from dpjax.federated.aggregation import Aggregator
from dpjax.federated.client import ClientAlgorithm, Weighting
from dpjax.federated.described import algorithm
from dpjax.federated.execution.context import MapClients
from dpjax.federated.round import FederatedAlgorithm, federated, optimizing_server
from dpjax.types import Array, ClientTx, LossFn, Params


@algorithm(
  client="local training",
  server="any Optax optimizer on -mean difference",
  source="McMahan et al. 2017",
  wraps_clients=True,
  one_difference=True,
  plain_client=True,
  records=True,
)
def fed_avg(
  loss_fn: LossFn,
  client_tx: ClientTx,
  server_tx: optax.GradientTransformation | None = None,
  aggregator: Aggregator | None = None,
  map_clients: MapClients | None = None,
  *,
  key: Array,
  weighting: Weighting = clients.uniform,
  wrap: Callable[[ClientAlgorithm], ClientAlgorithm] | None = None,
  memory: Callable[[Params], Any] | None = None,
  **local: Any,
) -> FederatedAlgorithm:
  """Federated averaging (McMahan et al. 2017): the mean of the differences w_local - w_server.

  Args:
    loss_fn: `(params, example) -> scalar`, for ONE example.
    client_tx: Optax optimizer of a client, fresh in every round, or a function of the
      client's key that returns one.
    server_tx: Optax optimizer of the server; None for plain averaging.
    aggregator: rule for the mean. None is the weighted mean; `central(plan, noise_key)` gives
      user-level privacy.
    map_clients: how clients are run; None chooses by platform.
    key: typed key of the clients' randomness, not of the server's noise. If clients draw noise
      (`client_noise`, `silos`), it is as secret as their data.
    weighting: `uniform`, `capped_weight(n)`, or, without privacy, `by_examples` as in the paper.
    wrap: function that changes the client, such as `lambda c: compressed(c, quantize(4))`.
    memory: `(params) -> state` that one client keeps between rounds; needed if the wrapped client
      keeps state.
    **local: hooks of `local_training`, or `silos` for record-level privacy.

  Guarantee: the sequence of all parameters is (plan.epsilon(), plan.delta)-DP for one client. It
  needs `central(plan, noise_key)` and the algorithm's own `cohorts`. It holds for any client
  optimizer and any local work. RoundInfo is computed without privacy: do not release it.

  >>> import jax
  >>> import jax.numpy as jnp
  >>> import numpy as np
  >>> from dpjax.federated.cohort import from_batches
  >>> loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
  >>> algorithm = fed_avg(loss_fn, optax.sgd(1.0), key=jax.random.key(0))
  >>> cohort = from_batches([np.array([[1.0]]), np.array([[4.0], [6.0]])])
  >>> state, info = algorithm.round(algorithm.init(jnp.zeros(1)), cohort)
  >>> state.params, int(info.num_clients)
  (Array([3.], dtype=float32), 2)
  """
  client = clients.local_training(loss_fn, client_tx, weighting=weighting, **local)
  return federated(
    client if wrap is None else wrap(client),
    optimizing_server(server_tx),
    key=key,
    aggregator=aggregator,
    map_clients=map_clients,
    memory=memory,
  )

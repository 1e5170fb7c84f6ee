"""Fine-tuning: each client continues to train the server's model, and sends nothing."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax.federated import client as clients
from dpjax.federated.client import Received
from dpjax.federated.cohort import Cohort
from dpjax.federated.execution.context import Context, MapClients
from dpjax.federated.execution.named import auto_clients
from dpjax.types import Array, ClientTx, LossFn, Params


def fine_tune(
  loss_fn: LossFn,
  client_tx: ClientTx,
  map_clients: MapClients | None = None,
  *,
  key: Array,
) -> Callable[[Params, Cohort], Params]:
  """Makes a function (params, cohort) -> parameters of each client, with leaves [C, *p].

  Each client trains from the server's parameters, and nothing is sent.

  >>> import optax
  >>> from dpjax.federated.cohort import from_batches
  >>> tune = fine_tune(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), optax.sgd(0.5),
  ...   key=jax.random.key(0))
  >>> tune(jnp.zeros(1), from_batches([jnp.array([[2.0]]), jnp.array([[4.0]])]))
  Array([[1.],
         [2.]], dtype=float32)
  """
  client = clients.local_training(loss_fn, client_tx)
  map_clients = auto_clients() if map_clients is None else map_clients
  run = map_clients(client, None)

  def tune(params: Params, cohort: Cohort) -> Params:
    received = Received(jax.tree.map(jnp.asarray, params))
    mapped = run(Context(received, cohort.data, None, key, None), cohort)
    return jax.tree.map(
      lambda delta, p: p[None] + delta, mapped.sent.message["delta"], received.params
    )

  return tune

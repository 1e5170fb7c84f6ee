"""Mean-regularised multi-task learning (Liu et al. 2022): each client keeps a model of its own."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from dpjax import validate
from dpjax.federated import client as clients
from dpjax.federated.client import Local, Received
from dpjax.federated.described import algorithm
from dpjax.federated.round import Common, FederatedAlgorithm, federated, optimizing_server
from dpjax.federated.silos import Silos
from dpjax.types import Array, ClientTx, LossFn


@algorithm(
  client="trains a model of its own, with lam (w_k - w_server) added to its gradients",
  server="as `fed_avg`: its model is the mean of the clients' models",
  source="Liu et al. 2022",
  options={"lam": 0.1},
  weighted=False,
  keeps_state=True,
  one_difference=True,
  records=True,
  personal=lambda server, kept: kept,
  checks={"lam": validate.non_negative},
  played={"lam": 0.5},
)
def mr_mtl(
  loss_fn: LossFn,
  client_tx: ClientTx,
  server_tx: optax.GradientTransformation | None = None,
  *,
  lam: float,
  silos: Silos | None = None,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """Each client minimises its loss + lam / 2 ||w_k - mean of all w||^2 over a model w_k of its own.

  MR-MTL (Liu, Hu, Wu and Smith 2022, arXiv:2206.07902, algorithm A1). lam = 0 is training alone; a
  large lam keeps all models together, as FedAvg does. A client begins a round where it ended the
  one before. `state.memories.rows(clients)` returns the models w_k of `clients`.

  With `silos` every w_k is a function of noisy steps and public numbers: lam (w_k - w_server) is
  added after the noise, and costs nothing. So the models w_k themselves may be published. With a
  private aggregator they may not: no guarantee covers what a client keeps.

  Args:
    lam: strength of the pull to the mean, >= 0. Learning rate times lam must be below 2.
    silos: plans of all clients, for record-level privacy.
  """
  validate.non_negative(lam=lam)

  def message(received: Received, local: Local) -> tuple[Any, Any]:
    return {"delta": clients.difference(received, local)}, local.params

  training = clients.local_training(
    loss_fn, client_tx, adjust=clients.pull(lam), message=message, silos=silos
  )

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Local:
    local = training.init(received, memory, num_examples, key)
    return local._replace(params=local.memory)

  return federated(
    training._replace(init=init),
    optimizing_server(server_tx),
    memory=lambda params: jax.tree.map(jnp.asarray, params),
    **common,
  )

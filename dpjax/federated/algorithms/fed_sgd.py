"""FedSGD (McMahan et al. 2017): one gradient of all data of a client."""

from __future__ import annotations

from typing import Unpack

import optax

from dpjax.federated import client as clients
from dpjax.federated.client import Weighting
from dpjax.federated.described import algorithm
from dpjax.federated.round import Common, FederatedAlgorithm, federated, optimizing_server
from dpjax.types import LossFn


@algorithm(
  client="one gradient of all its data",
  server="any Optax optimizer",
  source="McMahan et al. 2017",
  optimizers=("server_tx",),
  local_steps=False,
  one_difference=True,
)
def fed_sgd(
  loss_fn: LossFn,
  server_tx: optax.GradientTransformation,
  *,
  weighting: Weighting = clients.by_examples,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """Federated SGD: one gradient of each client's whole data per round (McMahan et al. 2017).

  With `by_examples` and all clients, the mean message is minus the gradient of the mean loss over
  all data. The size of local batches only bounds memory. Use it with `LocalWork(epochs=1)`.
  """
  client = clients.full_gradient(loss_fn, weighting=weighting)
  return federated(client, optimizing_server(server_tx), **common)

"""FedProx (Li et al. 2020): clients are pulled towards the parameters of the server."""

from __future__ import annotations

from typing import Any

from dpjax import validate
from dpjax.federated import client as clients
from dpjax.federated.algorithms.fed_avg import fed_avg
from dpjax.federated.described import algorithm
from dpjax.federated.round import FederatedAlgorithm
from dpjax.types import ClientTx, LossFn


@algorithm(
  client="as `fed_avg`, with mu (w - w_server) added to its gradients",
  server="as `fed_avg`",
  source="Li et al. 2020",
  options={"mu": 0.01},
  wraps_clients=True,
  one_difference=True,
  records=True,
  checks={"mu": validate.non_negative},
  played={"mu": 0.1},
)
def fed_prox(
  loss_fn: LossFn, client_tx: ClientTx, *args: Any, mu: float, **options: Any
) -> FederatedAlgorithm:
  """`fed_avg` whose local loss has mu / 2 ||w - w_server||^2 added (Li et al. 2020).

  mu = 0 is `fed_avg`, operation by operation.
  """
  validate.non_negative(mu=mu)

  # The term is left out at mu = 0, since adding 0 would still change XLA's rounding.
  adjust = clients.pull(mu) if mu else None
  return fed_avg(loss_fn, client_tx, *args, adjust=adjust, **options)

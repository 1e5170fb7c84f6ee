"""FedAdam, FedYogi and FedAdagrad (Reddi et al. 2021): adaptive optimizers of the server."""

from __future__ import annotations

import functools
from typing import Any

from dpjax.federated.algorithms.fed_avg import fed_avg
from dpjax.federated.described import algorithm
from dpjax.federated.round import FederatedAlgorithm
from dpjax.federated.server_optimizers import fed_opt
from dpjax.types import ClientTx, LossFn

_adaptive = functools.partial(
  algorithm,
  client="as `fed_avg`",
  source="Reddi et al. 2021",
  # No config names these algorithms, since --config.server_optimizer.rule selects them.
  options=None,
  optimizers=("client_tx",),
  wraps_clients=True,
  one_difference=True,
  played={"server_learning_rate": 0.1},
)


def _fed_opt(
  name: str, loss_fn: LossFn, client_tx: ClientTx, rate: float, options: dict[str, Any]
) -> FederatedAlgorithm:
  of_server = {"beta_1", "beta_2", "tau"} & set(options)
  server_tx = fed_opt(name, rate, **{number: options.pop(number) for number in of_server})
  return fed_avg(loss_fn, client_tx, server_tx, **options)


@_adaptive(server="the optimizer `adam` of `fed_opt`")
def fed_adam(
  loss_fn: LossFn, client_tx: ClientTx, *, server_learning_rate: float, **options: Any
) -> FederatedAlgorithm:
  """`fed_avg` with the server's FedAdam (Reddi et al. 2021, algorithm 2; see `fed_opt`).

  Args:
    options: `beta_1` (default 0.9), `beta_2` (0.99), `tau` (1e-3), and arguments of `fed_avg`.
  """
  return _fed_opt("adam", loss_fn, client_tx, server_learning_rate, options)


@_adaptive(server="the optimizer `yogi` of `fed_opt`")
def fed_yogi(
  loss_fn: LossFn, client_tx: ClientTx, *, server_learning_rate: float, **options: Any
) -> FederatedAlgorithm:
  """`fed_avg` with the server's FedYogi; see `fed_adam`."""
  return _fed_opt("yogi", loss_fn, client_tx, server_learning_rate, options)


@_adaptive(server="the optimizer `adagrad` of `fed_opt`")
def fed_adagrad(
  loss_fn: LossFn, client_tx: ClientTx, *, server_learning_rate: float, **options: Any
) -> FederatedAlgorithm:
  """`fed_avg` with the server's FedAdagrad; see `fed_adam`. `beta_1` is 0 unless given."""
  return _fed_opt("adagrad", loss_fn, client_tx, server_learning_rate, options)

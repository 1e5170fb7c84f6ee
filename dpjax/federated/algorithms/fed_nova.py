"""FedNova (Wang et al. 2020): clients with more steps get no more weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp
import optax

from dpjax import trees, validate
from dpjax.federated import client as clients
from dpjax.federated.client import Local, Received, Weighting
from dpjax.federated.described import RunNumbers, algorithm
from dpjax.federated.round import (
  Common,
  FederatedAlgorithm,
  check_public,
  federated,
  optimizing_server,
)
from dpjax.types import Array, ClientTx, LossFn, Params
from dpjax.validate import UserError


def momentum_steps(momentum: float) -> Callable[[Array], Array]:
  """Returns a function that says how far tau local steps go, as a number of gradients.

  The number is ||a||_1 of Wang et al. 2020 for SGD with momentum. Without momentum it is tau.

  >>> print(round(float(momentum_steps(0.5)(2)), 6))  # 1 + (1 + 0.5)
  2.5
  """
  validate.non_negative(momentum=momentum)
  if momentum >= 1:
    raise UserError("must be below 1", field="momentum", value=momentum)

  def norm(tau: Array) -> Array:
    tau = jnp.asarray(tau, jnp.float32)
    lost = momentum * (1 - momentum**tau) / (1 - momentum)
    return (tau - lost) / (1 - momentum)

  return norm


def _steps_of(run: RunNumbers) -> dict[str, Any]:
  return {"steps": momentum_steps(run.client_momentum)}


@algorithm(
  client="sends its difference, divided by its local steps",
  server="as `fed_avg`, times the mean number of steps",
  source="Wang et al. 2020",
  private_if="tau_eff",
  # `tau_eff` is a public constant. None stands for the weighted mean of the clients' ||a||_1.
  options={"tau_eff": None},
  client_rule="sgd",
  from_run=_steps_of,
  checks={"tau_eff": validate.positive},
  played={"tau_eff": 1.0},
)
def fed_nova(
  loss_fn: LossFn,
  client_tx: ClientTx,
  server_tx: optax.GradientTransformation | None = None,
  *,
  weighting: Weighting = clients.uniform,
  steps: Callable[[Array], Array] | None = None,
  tau_eff: float | None = None,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """FedAvg in which a client divides its difference by its number of local steps (with momentum, by
  ||a||_1). Clients with more steps then do not pull the optimum towards their own optima (FedNova,
  Wang et al. 2020).

  Args:
    steps: function from a number of local steps to ||a||_1. None is for plain SGD;
      `momentum_steps(m)` is for SGD with momentum m.
    tau_eff: public constant that the mean direction is multiplied by; None for the weighted
      mean of the clients' ||a||_1, which clients then send, too.

  Raises:
    UserError: a private aggregator without `tau_eff`. The step counts would use up most of the clip
      norm. And the model would move by a product of two noisy means.
  """
  why = ", such as the expected number of local steps"
  check_public(common, why, check=validate.positive, tau_eff=tau_eff)
  steps = momentum_steps(0.0) if steps is None else steps
  server = optimizing_server(server_tx)

  def message(received: Received, local: Local) -> tuple[Any, Any]:
    tau = steps(local.num_steps)
    # A client without a step sends exactly 0; 0 / 0 would be NaN.
    inverse = jnp.where(local.num_steps > 0, 1 / jnp.maximum(tau, 1e-6), 0.0)
    direction = trees.scale(clients.difference(received, local), inverse)
    sent = {"direction": direction}
    # The number of steps reveals the size of the client, so it is sent only if needed.
    return sent if tau_eff is not None else sent | {"tau": tau}, local.memory

  def apply(params: Params, state: Any, mean: Any, size: Array) -> tuple[Params, Any]:
    tau = mean["tau"] if tau_eff is None else tau_eff
    return server.apply(params, state, {"delta": trees.scale(mean["direction"], tau)}, size)

  client = clients.local_training(loss_fn, client_tx, weighting=weighting, message=message)
  return federated(client, server._replace(apply=apply), **common)

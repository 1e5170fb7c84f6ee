"""SCAFFOLD (Karimireddy et al. 2020): control variates against client drift.

The change of a control variate is part of the message, which a private aggregator clips and
noises as one vector.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from dpjax import trees, validate
from dpjax.federated import client as clients
from dpjax.federated.client import Local, Received
from dpjax.federated.described import RunNumbers, algorithm
from dpjax.federated.round import (
  Common,
  FederatedAlgorithm,
  Server,
  check_public,
  federated,
  optimizing_server,
)
from dpjax.federated.silos import Silos
from dpjax.types import Array, ClientTx, LossFn, Params


class ScaffoldServer(NamedTuple):
  """State of SCAFFOLD's server: its optimizer's state and its control variate."""

  opt_state: Any
  control: Params  # control variate c


def _sizes_of(run: RunNumbers) -> dict[str, Any]:
  return {
    "client_learning_rate": run.client_learning_rate,
    "num_clients": run.num_clients,
    "expected_cohort": run.expected_cohort,
  }


@algorithm(
  client="adds c - c_i to its gradients, and moves c_i",
  server="as `fed_avg`, and moves c",
  source="Karimireddy et al. 2020",
  private_if="expected_cohort",
  weighted=False,
  keeps_state=True,
  client_rule="sgd",
  # With momentum, the formula for c_i would not give the mean of plain gradients.
  client_momentum=False,
  records=True,
  from_run=_sizes_of,
  played={"client_learning_rate": 0.5, "num_clients": 4, "expected_cohort": 2.0},
)
def scaffold(
  loss_fn: LossFn,
  client_tx: ClientTx,
  server_tx: optax.GradientTransformation | None = None,
  *,
  client_learning_rate: float,
  num_clients: int,
  expected_cohort: float | None = None,
  silos: Silos | None = None,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """Control variates against client drift (SCAFFOLD option II, Karimireddy et al. 2020).

  A client descends along g - c_i + c and then sets c_i to c_i - c + (w_server - w) / (K lr), for
  K local steps of learning rate lr. The server adds |cohort| / num_clients of the mean change to c.
  All c and c_i start at 0. Clients without examples keep their c_i. `init(params, num_clients)`
  keeps a c_i for every client.

  Args:
    client_tx: plain SGD with `client_learning_rate` (the formula for c_i is SGD's).
    expected_cohort: public size of a cohort for the update of c; None for the realised size. A
      private aggregator needs a public size, since the realised size is secret.
    silos: plans of all clients, for record-level privacy. The c_i then follow from noisy steps.

  Raises:
    UserError: a private aggregator without `expected_cohort`.
  """
  why = "; how many clients took part is a secret"
  check_public(common, why, check=validate.positive, expected_cohort=expected_cohort)
  validate.positive(client_learning_rate=client_learning_rate)
  validate.integer_at_least(1, num_clients=num_clients)
  inner = optimizing_server(server_tx)

  def adjust(gradient: Any, received: Received, local: Local) -> Any:
    return jax.tree.map(
      lambda g, c, control: g + (c - control), gradient, received.extra, local.memory
    )

  def message(received: Received, local: Local) -> tuple[Any, Any]:
    delta = clients.difference(received, local)
    scale = 1.0 / (client_learning_rate * jnp.maximum(local.num_steps, 1))
    moved = local.num_steps > 0
    # A client without a step keeps its control variate.
    change = jax.tree.map(
      lambda d, c: jnp.where(moved, -d * scale - c, 0), delta, received.extra
    )
    return {"delta": delta, "control": change}, trees.add(local.memory, change)

  def apply(params: Params, state: ScaffoldServer, mean: Any, size: Array) -> Any:
    params, opt_state = inner.apply(params, state.opt_state, mean, size)
    # If clients are sampled, the actual size is secret. A private run uses a public size instead.
    share = (size if expected_cohort is None else expected_cohort) / num_clients
    control = trees.add(state.control, trees.scale(mean["control"], share))
    return params, ScaffoldServer(opt_state, control)

  server = Server(
    init=lambda params: ScaffoldServer(inner.init(params), trees.zeros(params)),
    extra=lambda state: state.control,
    apply=apply,
  )
  return federated(
    clients.local_training(loss_fn, client_tx, adjust=adjust, message=message, silos=silos),
    server,
    memory=trees.zeros,
    **common,
  )

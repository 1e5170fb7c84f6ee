"""Algorithms that correct for what clients do between rounds: FedNova, SCAFFOLD, Mime-lite.

Each sends more than a difference. What it sends beside it is part of the message, which a
private aggregator clips and noises as one vector; what can not be is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from dpjax import trees, validate
from dpjax.federated import client as clients
from dpjax.federated.algorithms import (
  Common,
  FederatedAlgorithm,
  Server,
  cast_like,
  check_public,
  federated,
  optimizing_server,
)
from dpjax.federated.client import ClientAlgorithm, Local, Received, Weighting
from dpjax.types import Array, ClientTx, LossFn, Params
from dpjax.validate import UserError


def momentum_steps(momentum: float) -> Callable[[Array], Array]:
  """||a||_1 of Wang et al. 2020 for SGD with momentum: how far tau local steps go, in units
  of one gradient.

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
  """Differences divided by local steps, so that clients with more steps do not pull the
  optimum towards their own (FedNova, Wang et al. 2020).

  Args:
    steps: number of local steps -> ||a||_1; None for plain SGD, `momentum_steps(m)` for
      momentum.
    tau_eff: public constant that the mean direction is multiplied by; None for the weighted
      mean of the clients' own, which they then send too.

  Raises:
    UserError: a private aggregator without `tau_eff`: the step counts would use up most of
      the clip norm, and the product of two noisy means would be what the model learns.
  """
  why = ", such as the expected number of local steps"
  check_public(common, why, check=validate.positive, tau_eff=tau_eff)
  steps = momentum_steps(0.0) if steps is None else steps
  server = optimizing_server(server_tx)

  def message(received: Received, local: Local) -> tuple[Any, Any]:
    tau = steps(local.num_steps)
    inverse = jnp.where(local.num_steps > 0, 1 / jnp.maximum(tau, 1e-6), 0.0)
    direction = trees.scale(clients.difference(received, local), inverse)
    sent = {"direction": direction}
    return sent if tau_eff is not None else sent | {"tau": tau}, local.memory

  def apply(params: Params, state: Any, mean: Any, size: Array) -> tuple[Params, Any]:
    tau = mean["tau"] if tau_eff is None else tau_eff
    return server.apply(params, state, {"delta": trees.scale(mean["direction"], tau)}, size)

  client = clients.local_training(loss_fn, client_tx, weighting=weighting, message=message)
  return federated(client, server._replace(apply=apply), **common)


class ScaffoldServer(NamedTuple):
  """The server of SCAFFOLD."""

  opt_state: Any
  control: Params  # c


def scaffold(
  loss_fn: LossFn,
  client_tx: ClientTx,
  server_tx: optax.GradientTransformation | None = None,
  *,
  client_learning_rate: float,
  num_clients: int,
  expected_cohort: float | None = None,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """Control variates against client drift (SCAFFOLD option II, Karimireddy et al. 2020).

  A client steps along g - c_i + c and then sets c_i to c_i - c + (w_server - w) / (K lr); the
  server adds |cohort| / num_clients of the mean change to c. All c start at 0. Clients that
  hold nothing keep their c_i. `init(params, num_clients)` keeps a c_i for every client.

  Args:
    client_tx: plain SGD with `client_learning_rate` (the formula for c_i is SGD's).
    expected_cohort: public size of a cohort for the update of c; None for the realised one.
      A private aggregator needs it: the realised size is secret.

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
      lambda g, c, own: g + (c - own), gradient, received.extra, local.memory
    )

  def message(received: Received, local: Local) -> tuple[Any, Any]:
    delta = clients.difference(received, local)
    scale = 1.0 / (client_learning_rate * jnp.maximum(local.num_steps, 1))
    moved = local.num_steps > 0
    change = jax.tree.map(
      lambda d, c: jnp.where(moved, -d * scale - c, 0), delta, received.extra
    )
    return {"delta": delta, "control": change}, trees.add(local.memory, change)

  def apply(params: Params, state: ScaffoldServer, mean: Any, size: Array) -> Any:
    params, opt_state = inner.apply(params, state.opt_state, mean, size)
    share = (size if expected_cohort is None else expected_cohort) / num_clients
    control = trees.add(state.control, trees.scale(mean["control"], share))
    return params, ScaffoldServer(opt_state, control)

  server = Server(
    init=lambda params: ScaffoldServer(inner.init(params), trees.zeros(params)),
    extra=lambda state: state.control,
    apply=apply,
  )
  return federated(
    clients.local_training(loss_fn, client_tx, adjust=adjust, message=message),
    server,
    memory=trees.zeros,
    **common,
  )


class _Mime(NamedTuple):
  """A client of Mime-lite in the middle of its work."""

  local: Local  # trains from the server's parameters
  full: Local  # adds up the gradient at the server's parameters

  @property
  def key(self) -> Array:
    return self.local.key


def _mime_client(
  loss_fn: LossFn, base_tx: optax.GradientTransformation, weighting: Weighting
) -> ClientAlgorithm:
  """Local training with frozen statistics and the full gradient, as ONE message."""

  def frozen(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return base_tx.update(updates, state, params)[0], state

  training = clients.local_training(
    loss_fn,
    optax.GradientTransformation(base_tx.init, frozen),
    weighting=weighting,
    start=lambda opt_state, received: received.extra,
  )
  measuring = clients.full_gradient(loss_fn, weighting=weighting)

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> _Mime:
    args = received, memory, num_examples, key
    return _Mime(training.init(*args), measuring.init(*args))

  def step(received: Received, both: _Mime, examples: Any, mask: Array) -> _Mime:
    args = examples, mask
    local = training.step(received, both.local, *args)
    return _Mime(local, measuring.step(received, both.full, *args))

  def finish(received: Received, both: _Mime) -> Any:
    sent, memory, _ = training.finish(received, both.local)
    full, _, _ = measuring.finish(received, both.full)
    gradient = trees.scale(full.message["delta"], -1.0)
    message = sent.message | {"gradient": gradient}
    return sent._replace(message=message), memory, clients.info(both.local, message)

  return ClientAlgorithm(init, step, finish)


def mime_lite(
  loss_fn: LossFn,
  base_tx: optax.GradientTransformation,
  *,
  weighting: Weighting = clients.uniform,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """Clients use the server's optimizer with its statistics frozen; the server moves these by
  the mean of full local gradients at its own parameters (MimeLite, Karimireddy et al. 2021).

  Difference and gradient are one message: a private aggregator clips them together and adds
  its noise to both, so that a round is one release. Each local step restores the statistics.
  """

  def apply(params: Params, state: Any, mean: Any, size: Array) -> tuple[Params, Any]:
    del size
    gradient = cast_like(mean["gradient"], params)
    after = optax.apply_updates(params, cast_like(mean["delta"], params))
    return after, base_tx.update(gradient, state, params)[1]

  server = Server(base_tx.init, lambda state: state, apply)
  return federated(_mime_client(loss_fn, base_tx, weighting), server, **common)

"""Algorithms that correct for what clients do between rounds: FedNova, SCAFFOLD, Mime-lite.

Each sends more than a difference. What it sends beside it is part of the message, which a
private aggregator clips and noises as one vector; what can not be is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import trees, validate
from dpjax.federated import client as clients
from dpjax.federated import execution
from dpjax.federated.aggregation import Aggregator
from dpjax.federated.algorithms import (
  FederatedAlgorithm,
  Server,
  cast_like,
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
    raise UserError(f"momentum={momentum!r}: must be below 1")

  def norm(tau: Array) -> Array:
    tau = jnp.asarray(tau, jnp.float32)
    lost = momentum * (1 - momentum**tau) / (1 - momentum)
    return (tau - lost) / (1 - momentum)

  return norm


def fed_nova(
  loss_fn: LossFn,
  client_tx: ClientTx,
  server_tx: optax.GradientTransformation | None = None,
  aggregator: Aggregator | None = None,
  map_clients: execution.MapClients | None = None,
  *,
  key: Array,
  weighting: Weighting = clients.uniform,
  steps: Callable[[Array], Array] | None = None,
  tau_eff: float | None = None,
  adjust: Callable[..., Any] | None = None,
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
  if tau_eff is None and aggregator is not None and aggregator.private:
    raise UserError(
      "tau_eff=None: must be a public number with a private aggregator, such as the "
      "expected number of local steps"
    )
  steps = (lambda tau: jnp.asarray(tau, jnp.float32)) if steps is None else steps
  if tau_eff is not None:
    validate.positive(tau_eff=tau_eff)
  server = optimizing_server(optax.sgd(1.0) if server_tx is None else server_tx)

  def message(received: Received, local: Local) -> tuple[Any, Any]:
    tau = steps(local.num_steps)
    inverse = jnp.where(local.num_steps > 0, 1 / jnp.maximum(tau, 1e-6), 0.0)
    direction = trees.scale(clients.difference(received, local), inverse)
    sent = {"direction": direction}
    return sent if tau_eff is not None else sent | {"tau": tau}, local.memory

  def apply(params: Params, state: Any, mean: Any, size: Array) -> tuple[Params, Any]:
    tau = mean["tau"] if tau_eff is None else tau_eff
    return server.apply(params, state, {"delta": trees.scale(mean["direction"], tau)}, size)

  client = clients.local_training(
    loss_fn, client_tx, weighting=weighting, message=message, adjust=adjust
  )
  return federated(
    client,
    server._replace(apply=apply),
    key=key,
    aggregator=aggregator,
    map_clients=map_clients,
  )


class ScaffoldServer(NamedTuple):
  """The server of SCAFFOLD."""

  opt_state: Any
  control: Params  # c


def _zeros(params: Params) -> Params:
  return jax.tree.map(
    lambda leaf: jnp.zeros_like(trees.at_least_float32(jnp.asarray(leaf))), params
  )


def scaffold(
  loss_fn: LossFn,
  client_tx: ClientTx,
  server_tx: optax.GradientTransformation | None = None,
  aggregator: Aggregator | None = None,
  map_clients: execution.MapClients | None = None,
  *,
  key: Array,
  client_learning_rate: float,
  num_clients: int,
  expected_cohort: float | None = None,
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
  if expected_cohort is not None:
    validate.positive(expected_cohort=expected_cohort)
  elif aggregator is not None and aggregator.private:
    raise UserError(
      "expected_cohort=None: must be a public number with a private aggregator; how many "
      "clients took part is a secret"
    )
  validate.positive(client_learning_rate=client_learning_rate)
  validate.integer_at_least(1, num_clients=num_clients)
  server_tx = optax.sgd(1.0) if server_tx is None else server_tx
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
    init=lambda params: ScaffoldServer(server_tx.init(params), _zeros(params)),
    extra=lambda state: state.control,
    apply=apply,
  )
  return federated(
    clients.local_training(loss_fn, client_tx, adjust=adjust, message=message),
    server,
    key=key,
    aggregator=aggregator,
    map_clients=map_clients,
    memory=_zeros,
  )


class _Mime(NamedTuple):
  """A client of Mime-lite in the middle of its work."""

  local: Local  # trains from the server's parameters
  full: Local  # adds up the gradient at the server's parameters

  @property
  def key(self) -> Array:
    return self.local.key

  @property
  def num_steps(self) -> Array:
    return self.local.num_steps


def _mime_client(
  loss_fn: LossFn, base_tx: optax.GradientTransformation, weighting: Weighting
) -> ClientAlgorithm:
  """Local training with frozen statistics and the full gradient, as ONE message."""

  def start(opt_state: Any, received: Received) -> Any:
    del opt_state
    return received.extra

  frozen = _frozen(base_tx)
  training = clients.local_training(loss_fn, frozen, weighting=weighting, start=start)
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
  map_clients: execution.MapClients | None = None,
  *,
  key: Array,
  aggregator: Aggregator | None = None,
  weighting: Weighting = clients.uniform,
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

  return federated(
    _mime_client(loss_fn, base_tx, weighting),
    Server(base_tx.init, lambda state: state, apply),
    key=key,
    aggregator=aggregator,
    map_clients=map_clients,
  )


def _frozen(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """The updates of `tx` from a state that never moves."""

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return tx.update(updates, state, params)[0], state

  return optax.GradientTransformation(tx.init, update)

"""Models for single clients: fine-tuning, mixtures (APFL) and clusters (HypCluster).

What stays on a client is seen by that client alone and is covered by no guarantee: privacy is
promised for what the server sees and for its parameters.
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
  FederatedState,
  Server,
  federated,
  optimizing_server,
)
from dpjax.federated.client import ClientAlgorithm, Local, Received
from dpjax.federated.cohort import Cohort
from dpjax.types import Array, LossFn, Params
from dpjax.validate import UserError


def fine_tune(
  loss_fn: LossFn,
  client_tx: Any,
  map_clients: execution.MapClients | None = None,
  *,
  key: Array,
) -> Callable[[Params, Cohort], Params]:
  """`(params, cohort) -> each client's own parameters`, leaves [C, *p]: local training from
  the server's model, sent to nobody.

  >>> from dpjax.federated.cohort import from_batches
  >>> tune = fine_tune(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), optax.sgd(0.5),
  ...   key=jax.random.key(0))
  >>> tune(jnp.zeros(1), from_batches([jnp.array([[2.0]]), jnp.array([[4.0]])]))
  Array([[1.],
         [2.]], dtype=float32)
  """
  client = clients.local_training(loss_fn, client_tx)
  map_clients = execution.auto_clients() if map_clients is None else map_clients
  run = map_clients(client, None)

  def tune(params: Params, cohort: Cohort) -> Params:
    received = Received(jax.tree.map(jnp.asarray, params), None, cohort.data)
    mapped = run(execution.Context(received, None, key, None), cohort)
    return jax.tree.map(
      lambda delta, p: p[None] + delta, mapped.sent.message["delta"], received.params
    )

  return tune


class Personal(NamedTuple):
  """A client of APFL in the middle of its work."""

  local: Local
  params: Params  # v, the client's own model
  opt_state: Any

  @property
  def key(self) -> Array:
    return self.local.key

  @property
  def num_steps(self) -> Array:
    return self.local.num_steps


def mixed(own: Params, shared: Params, alpha: float) -> Params:
  """alpha * own + (1 - alpha) * shared: the model that a client of APFL uses."""
  return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, own, shared)


def apfl_client(loss_fn: LossFn, client_tx: Any, *, alpha: float) -> ClientAlgorithm:
  """Local training of w, which is sent, and of the client's own v, which is kept: v follows
  the gradient of the loss of alpha v + (1 - alpha) w with respect to v."""
  shared = clients.local_training(loss_fn, client_tx)
  grad_fn = clients.mean_grad(loss_fn)

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Personal:
    local = shared.init(received, None, num_examples, key)
    return Personal(local, memory, clients.make_tx(client_tx, key).init(memory))

  def step(received: Received, own: Personal, examples: Any, mask: Array) -> Personal:
    local = shared.step(received, own.local, examples, mask)
    mixture = mixed(own.params, local.params, alpha)
    gradient, _ = grad_fn(mixture, clients.take(received, examples), mask)
    tx = clients.make_tx(client_tx, own.key)
    gradient = trees.scale(gradient, alpha)
    updates, opt_state = tx.update(gradient, own.opt_state, own.params)
    return Personal(local, optax.apply_updates(own.params, updates), opt_state)

  def finish(received: Received, own: Personal) -> Any:
    sent, _, info = shared.finish(received, own.local)
    return sent, own.params, info

  return ClientAlgorithm(init, step, finish)


def apfl(
  loss_fn: LossFn,
  client_tx: Any,
  server_tx: optax.GradientTransformation | None = None,
  aggregator: Aggregator | None = None,
  map_clients: execution.MapClients | None = None,
  *,
  key: Array,
  alpha: float = 0.5,
) -> FederatedAlgorithm:
  """Adaptive personalized federated learning with a fixed mixture (Deng et al. 2020, alg. 1).

  `state.memories` holds every client's v; `mixed(v, state.params, alpha)` is its model.
  alpha = 0 is `fed_avg`; alpha = 1 trains each client alone.
  """
  validate.non_negative(alpha=alpha)
  if alpha > 1:
    raise UserError(f"alpha={alpha!r}: must be in [0, 1]")
  return federated(
    apfl_client(loss_fn, client_tx, alpha=alpha),
    optimizing_server(optax.sgd(1.0) if server_tx is None else server_tx),
    key=key,
    aggregator=aggregator,
    map_clients=map_clients,
    memory=lambda params: jax.tree.map(jnp.array, params),
  )


def _scores(loss_fn: LossFn) -> ClientAlgorithm:
  """The client's mean loss under each of K models [K, *p]; nothing is trained."""

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Local:
    count = jax.tree.leaves(received.params)[0].shape[0]
    zero = jnp.zeros((), jnp.float32)
    sums = jnp.zeros(count, jnp.float32)
    return Local(
      sums, None, memory, zero, zero, jnp.int32(0), jnp.asarray(num_examples), key
    )

  def step(received: Received, local: Local, examples: Any, mask: Array) -> Local:
    examples = clients.take(received, examples)
    total = lambda params: clients.batch_loss(loss_fn, params, examples, mask)[1]
    return local._replace(
      params=local.params + jax.vmap(total)(received.params),
      num_seen=local.num_seen + jnp.sum(mask),
      num_steps=local.num_steps + 1,
    )

  def finish(received: Received, local: Local) -> Any:
    del received
    sent = {"losses": local.params / jnp.maximum(local.num_seen, 1)}
    return clients.Sent(sent, jnp.float32(1)), local.memory, clients.info(local, sent)

  return ClientAlgorithm(init, step, finish)


def _in_cluster(client: ClientAlgorithm) -> ClientAlgorithm:
  """Trains the model that the client's memory names; sends it in that model's place."""

  def chosen(received: Received, choice: Array) -> Received:
    return received._replace(
      params=jax.tree.map(lambda leaf: leaf[choice], received.params)
    )

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Local:
    local = client.init(chosen(received, memory), None, num_examples, key)
    return local._replace(memory=memory)

  def step(received: Received, local: Local, examples: Any, mask: Array) -> Local:
    return client.step(chosen(received, local.memory), local, examples, mask)

  def finish(received: Received, local: Local) -> Any:
    sent, _, info = client.finish(chosen(received, local.memory), local)
    count = jax.tree.leaves(received.params)[0].shape[0]
    mine = (jnp.arange(count) == local.memory).astype(jnp.float32)
    placed = jax.tree.map(
      lambda leaf: jnp.tensordot(mine, leaf, axes=0), sent.message["delta"]
    )
    members = mine * (local.num_steps > 0)
    return sent._replace(message={"delta": placed, "members": members}), local.memory, info

  return ClientAlgorithm(init, step, finish)


def hyp_cluster(
  loss_fn: LossFn,
  client_tx: Any,
  map_clients: execution.MapClients | None = None,
  *,
  key: Array,
  num_clients: int,
  aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
  """K models; each client trains the one that fits its data best (HypCluster, Mansour et al.
  2020; IFCA, Ghosh et al. 2020).

  `init(params)` takes K stacked models, leaves [K, *p], which must differ. The message is the
  difference in the place of the chosen model, and who chose it, so a private aggregator
  covers the choice too. `state.memories` holds every client's last choice.
  """
  validate.integer_at_least(1, num_clients=num_clients)
  map_clients = execution.auto_clients() if map_clients is None else map_clients
  score = map_clients(_scores(loss_fn), None)

  def apply(params: Params, state: Any, mean: Any, size: Array) -> tuple[Params, Any]:
    del size
    share = mean["members"]
    inverse = jnp.where(share > 1e-6, 1 / jnp.maximum(share, 1e-6), 0.0)
    move = lambda p, d: (
      p + (d * inverse.reshape((-1,) + (1,) * (d.ndim - 1))).astype(p.dtype)
    )
    return jax.tree.map(move, params, mean["delta"]), state

  training = federated(
    _in_cluster(clients.local_training(loss_fn, client_tx)),
    Server(lambda params: (), lambda state: None, apply),
    key=key,
    aggregator=aggregator,
    map_clients=map_clients,
    memory=lambda params: jnp.int32(0),
  )

  def init(params: Params, num_clients: int = num_clients) -> FederatedState:
    return training.init(params, num_clients)

  def one_round(state: FederatedState, cohort: Cohort) -> Any:
    if not cohort.size:
      return training.round(state, cohort)
    received = Received(state.params, None, cohort.data)
    context = execution.Context(received, None, state.key, None)
    losses = score(context, cohort).sent.message["losses"]  # [C, K]
    choice = jnp.argmin(losses, axis=1).astype(jnp.int32)
    memories = jnp.asarray(state.memories).at[cohort.ids].set(choice)
    return training.round(state._replace(memories=memories), cohort)

  return FederatedAlgorithm(init, one_round)

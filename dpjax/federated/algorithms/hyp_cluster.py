"""HypCluster (Mansour et al. 2020): of several models, each client trains the one that fits best.

The state that a client keeps is seen by that client alone, and no guarantee covers it. The
guarantee is for what the server sees and for its parameters.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from dpjax import trees, validate
from dpjax.federated import client as clients
from dpjax.federated.client import ClientAlgorithm, Local, Received
from dpjax.federated.cohort import Cohort
from dpjax.federated.described import algorithm
from dpjax.federated.execution.context import Context
from dpjax.federated.execution.named import auto_clients
from dpjax.federated.round import (
  Common,
  FederatedAlgorithm,
  FederatedState,
  Server,
  cast_like,
  check_cohort,
  check_public,
  federated,
)
from dpjax.noise import source
from dpjax.types import Array, ClientTx, LossFn, Params
from dpjax.validate import UserError


def _scores(loss_fn: LossFn) -> ClientAlgorithm:
  """Makes a client that sends its mean loss under each of K models [K, *p], without training."""

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Local:
    count = jax.tree.leaves(received.params)[0].shape[0]
    sums = jnp.zeros(count, jnp.float32)
    return clients.begin(sums, None, memory, num_examples, key)

  def step(received: Received, local: Local, examples: Any, mask: Array) -> Local:
    total = lambda params: clients.batch_loss(loss_fn, params, examples, mask)[1]
    totals = jax.vmap(total)(received.params)  # [K]
    # The loop over steps needs sums of one type, also for losses in float64.
    sums = local.params + totals.astype(local.params.dtype)
    return local._replace(params=sums).add_counts(mask)

  def finish(received: Received, local: Local) -> Any:
    del received
    sent = {"losses": local.params / jnp.maximum(local.num_seen, 1)}
    return clients.Sent(sent, jnp.float32(1)), local.memory, clients.info(local, sent)

  return ClientAlgorithm(init, step, finish)


def _in_cluster(client: ClientAlgorithm, counted: bool) -> ClientAlgorithm:
  """Makes a client that trains the model of its cluster and sends the difference in that model's
  place, with zeros elsewhere. If `counted`, the message also names the cluster."""

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
    # The message has a place for every model. Clipped as a whole and with noise, it also hides
    # which model the client chose.
    message: dict[str, Any] = {"delta": placed}
    if counted:
      message["members"] = mine * (local.num_steps > 0)
    return sent._replace(message=message), local.memory, info

  # The choice is made anew in each round, by the models that the client receives.
  return ClientAlgorithm(init, step, finish).keeping_apart()


@algorithm(
  client="trains the one of K models that fits it best",
  server="moves each model by the mean of those who trained it",
  source="Mansour et al. 2020; Ghosh et al. 2020",
  private_if="cluster_share",
  # No config names HypCluster, since a run of dpjax starts from one model.
  options=None,
  optimizers=("client_tx",),
  weighted=False,
  keeps_state=True,
  played={"num_clients": 4, "cluster_share": 0.5},
)
def hyp_cluster(
  loss_fn: LossFn,
  client_tx: ClientTx,
  *,
  num_clients: int,
  cluster_share: float | None = None,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """Trains K models, of which each client trains the one that fits its data best (HypCluster,
  Mansour et al. 2020; IFCA, Ghosh et al. 2020).

  `init(params)` takes K stacked models, leaves [K, *p], which must differ. The message holds the
  difference in the place of the chosen model, so a private aggregator covers the choice, too.
  `state.memories.rows(clients)` returns the last choices of `clients`, as indices of models.

  Args:
    num_clients: number of clients whose choices are kept.
    cluster_share: public share of a cohort, in (0, 1], that a model's mean difference is
      divided by, such as 1 / K. None divides by the share of clients that chose the model. Clients
      then send their choice, too.

  Raises:
    UserError: a private aggregator without `cluster_share` (a noisy sum would be divided by
      a noisy count, which is close to 0 for a model that nobody chose), or an aggregator that
      is no mean: a median of messages in different places is the update of no model.
  """
  validate.integer_at_least(1, num_clients=num_clients)
  why = ", such as 1 / the number of models"
  aggregator = common.get("aggregator")
  check_public(common, why, check=validate.probability, cluster_share=cluster_share)
  if aggregator is not None and not aggregator.private and aggregator.finish is None:
    raise UserError(
      "must be a mean; clients send models in different places", field="aggregator"
    )
  map_clients = common.get("map_clients") or auto_clients()
  score = map_clients(_scores(loss_fn), None)

  def apply(params: Params, state: Any, mean: Any, size: Array) -> tuple[Params, Any]:
    del size
    delta = mean["delta"]
    if cluster_share is not None:
      update = trees.scale(delta, 1.0 / cluster_share)
    else:
      share = mean["members"]
      # A model that nobody chose does not move.
      inverse = jnp.where(share > 1e-6, 1 / jnp.maximum(share, 1e-6), 0.0)
      along = lambda d: inverse.reshape((-1,) + (1,) * (d.ndim - 1))
      update = jax.tree.map(lambda d: d * along(d), delta)
    return optax.apply_updates(params, cast_like(update, params)), state

  training = federated(
    _in_cluster(clients.local_training(loss_fn, client_tx), cluster_share is None),
    Server(lambda params: (), lambda state: None, apply),
    memory=lambda params: jnp.int32(0),
    **common,
  )

  def init(params: Params, num_clients: int = num_clients) -> FederatedState:
    return training.init(params, num_clients)

  def one_round(state: FederatedState, cohort: Cohort) -> Any:
    # The cohort is checked before the choices are stored, since only known clients have a place.
    check_cohort(cohort, state.memories)
    if not cohort.size:
      return training.round(state, cohort)
    key = source.from_words(state.key)
    context = Context(Received(state.params), cohort.data, None, key, None)
    losses = score(context, cohort).sent.message["losses"]  # [C, K]
    # A model with a NaN loss is chosen only if all losses are NaN or infinite.
    losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
    chosen = jnp.argmin(losses, axis=1)
    memories = state.memories.replace_rows(cohort.ids, chosen)  # pyright: ignore[reportOptionalMemberAccess]
    return training.round(state._replace(memories=memories), cohort)

  return FederatedAlgorithm(init, one_round, training.cohorts)

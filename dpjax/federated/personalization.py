"""Models for single clients: fine-tuning, mixtures (APFL) and clusters (HypCluster).

What stays on a client is seen by that client alone and is covered by no guarantee: privacy is
promised for what the server sees and for its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from dpjax import trees, validate
from dpjax.federated import client as clients
from dpjax.federated import execution
from dpjax.federated.algorithms import (
  Common,
  FederatedAlgorithm,
  FederatedState,
  Server,
  cast_like,
  check_cohort,
  check_public,
  federated,
  optimizing_server,
)
from dpjax.federated.client import ClientAlgorithm, Local, Received
from dpjax.federated.cohort import Cohort
from dpjax.types import Array, ArrayLike, ClientTx, LossFn, Params
from dpjax.validate import UserError


def fine_tune(
  loss_fn: LossFn,
  client_tx: ClientTx,
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
    received = Received(jax.tree.map(jnp.asarray, params))
    mapped = run(execution.Context(received, cohort.data, None, key, None), cohort)
    return jax.tree.map(
      lambda delta, p: p[None] + delta, mapped.sent.message["delta"], received.params
    )

  return tune


class PersonalMemory(NamedTuple):
  """State that a client of APFL keeps between rounds."""

  params: Params  # v, the client's own model
  alpha: Array  # [] share of v in the model that it uses


class Personal(NamedTuple):
  """A client of APFL in the middle of its work."""

  local: Local
  params: Params  # v
  opt_state: Any
  alpha: Array  # []

  @property
  def key(self) -> Array:
    return self.local.key


def mixed(own: Params, shared: Params, alpha: ArrayLike) -> Params:
  """alpha * own + (1 - alpha) * shared: the model that a client of APFL uses."""
  return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, own, shared)


def apfl_client(
  loss_fn: LossFn, client_tx: ClientTx, *, alpha_learning_rate: float = 0.0
) -> ClientAlgorithm:
  """Local training of w, which is sent, and of the client's own v, which is kept: v follows
  the gradient of the loss of alpha v + (1 - alpha) w with respect to v. All of w, v and alpha
  move from where they stood before the step."""
  shared = clients.local_training(loss_fn, client_tx)
  grad_fn = clients.mean_grad(loss_fn)
  own_tx = lambda key: clients.make_tx(
    client_tx, jax.random.fold_in(key, clients.PERSONAL_KEY)
  )

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Personal:
    local = shared.init(received, None, num_examples, key)
    return Personal(local, memory.params, own_tx(key).init(memory.params), memory.alpha)

  def step(received: Received, own: Personal, examples: Any, mask: Array) -> Personal:
    mixture = mixed(own.params, own.local.params, own.alpha)
    gradient, _ = grad_fn(mixture, examples, mask)
    updates, opt_state = own_tx(own.key).update(
      trees.scale(gradient, own.alpha), own.opt_state, own.params, mask=mask
    )
    # alpha moves at the first local step of a round, within [0, 1]
    slopes = jax.tree.map(
      lambda v, w, g: jnp.sum((v - w) * g), own.params, own.local.params, gradient
    )
    along = alpha_learning_rate * sum(jax.tree.leaves(slopes))
    moved = own.alpha - jnp.where(own.local.num_steps == 0, along, 0.0)
    return Personal(
      local=shared.step(received, own.local, examples, mask),
      params=optax.apply_updates(own.params, updates),
      opt_state=opt_state,
      alpha=jnp.clip(moved, 0.0, 1.0),
    )

  def finish(received: Received, own: Personal) -> Any:
    sent, _, info = shared.finish(received, own.local)
    return sent, PersonalMemory(own.params, own.alpha), info

  return ClientAlgorithm(init, step, finish)


def apfl(
  loss_fn: LossFn,
  client_tx: ClientTx,
  server_tx: optax.GradientTransformation | None = None,
  *,
  alpha: float = 0.5,
  alpha_learning_rate: float = 0.0,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """Adaptive personalized federated learning (Deng et al. 2020, arXiv:2003.13461, alg. 1).

  A local step moves, all from the values before it, w by the gradient at w, and v by alpha
  times the gradient at the mixture alpha v + (1 - alpha) w. With `alpha_learning_rate` > 0
  the first step of a round also moves the client's own alpha along -<v - w, that gradient>
  (section 4), kept within [0, 1].

  `state.memories.rows(clients)` are their v and alpha (`PersonalMemory`);
  `mixed(v, state.params, alpha)` is its model. alpha = 0 is `fed_avg`; alpha = 1 trains each
  client alone.
  """
  validate.non_negative(alpha=alpha, alpha_learning_rate=alpha_learning_rate)
  if alpha > 1:
    raise UserError("must be in [0, 1]", field="alpha", value=alpha)
  begin = lambda params: PersonalMemory(jax.tree.map(jnp.array, params), jnp.float32(alpha))
  client = apfl_client(loss_fn, client_tx, alpha_learning_rate=alpha_learning_rate)
  return federated(client, optimizing_server(server_tx), memory=begin, **common)


def _scores(loss_fn: LossFn) -> ClientAlgorithm:
  """The client's mean loss under each of K models [K, *p]; nothing is trained."""

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Local:
    count = jax.tree.leaves(received.params)[0].shape[0]
    sums = jnp.zeros(count, jnp.float32)
    return clients.begun(sums, None, memory, num_examples, key)

  def step(received: Received, local: Local, examples: Any, mask: Array) -> Local:
    total = lambda params: clients.batch_loss(loss_fn, params, examples, mask)[1]
    sums = local.params + jax.vmap(total)(received.params)
    return local._replace(params=sums).counted(mask)

  def finish(received: Received, local: Local) -> Any:
    del received
    sent = {"losses": local.params / jnp.maximum(local.num_seen, 1)}
    return clients.Sent(sent, jnp.float32(1)), local.memory, clients.info(local, sent)

  return ClientAlgorithm(init, step, finish)


def _in_cluster(client: ClientAlgorithm, counted: bool) -> ClientAlgorithm:
  """Trains the model that the client's memory names; sends it in that model's place, and,
  where it is `counted`, whose member it is."""

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
    message: dict[str, Any] = {"delta": placed}
    if counted:
      message["members"] = mine * (local.num_steps > 0)
    return sent._replace(message=message), local.memory, info

  return ClientAlgorithm(init, step, finish)


def hyp_cluster(
  loss_fn: LossFn,
  client_tx: ClientTx,
  *,
  num_clients: int,
  cluster_share: float | None = None,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """K models; each client trains the one that fits its data best (HypCluster, Mansour et al.
  2020; IFCA, Ghosh et al. 2020).

  `init(params)` takes K stacked models, leaves [K, *p], which must differ. The message is the
  difference in the place of the chosen model, so a private aggregator covers the choice too.
  `state.memories.rows(clients)` are their last choices, which stay with the clients.

  Args:
    cluster_share: public share of a cohort, in (0, 1], that a model's mean difference is
      divided by, such as 1 / K. None divides by the share of those who chose it, which they
      then send too.

  Raises:
    UserError: a private aggregator without `cluster_share` (a noisy sum would be divided by
      a noisy count, which is close to 0 for a model that nobody chose), or an aggregator that
      is no mean: a median of messages in different places is not a model's.
  """
  validate.integer_at_least(1, num_clients=num_clients)
  why = ", such as 1 / the number of models"
  aggregator = common.get("aggregator")
  check_public(common, why, check=validate.probability, cluster_share=cluster_share)
  if aggregator is not None and not aggregator.private and aggregator.finish is None:
    raise UserError(
      "must be a mean; clients send models in different places", field="aggregator"
    )
  map_clients = common.get("map_clients") or execution.auto_clients()
  score = map_clients(_scores(loss_fn), None)

  def apply(params: Params, state: Any, mean: Any, size: Array) -> tuple[Params, Any]:
    del size
    delta = mean["delta"]
    if cluster_share is not None:
      update = trees.scale(delta, 1.0 / cluster_share)
    else:
      share = mean["members"]
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
    check_cohort(cohort, state.memories)  # before its clients' choices are kept
    if not cohort.size:
      return training.round(state, cohort)
    context = execution.Context(Received(state.params), cohort.data, None, state.key, None)
    losses = score(context, cohort).sent.message["losses"]  # [C, K]
    losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)  # a broken model wins nobody
    chosen = jnp.argmin(losses, axis=1)
    memories = state.memories.replaced(cohort.ids, chosen)  # pyright: ignore[reportOptionalMemberAccess]
    return training.round(state._replace(memories=memories), cohort)

  return FederatedAlgorithm(init, one_round, training.cohorts)

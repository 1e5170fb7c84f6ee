"""APFL (Deng et al. 2020): each client mixes its own model with the shared one.

The state that a client keeps is seen by that client alone, and no guarantee covers it. The
guarantee is for what the server sees and for its parameters.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from dpjax import trees, validate
from dpjax.federated import client as clients
from dpjax.federated.client import ClientAlgorithm, Local, Received
from dpjax.federated.described import algorithm
from dpjax.federated.round import Common, FederatedAlgorithm, federated, optimizing_server
from dpjax.key_uses import KeyUse, key_for
from dpjax.types import Array, ArrayLike, ClientTx, LossFn, Params


class PersonalMemory(NamedTuple):
  """State that a client of APFL keeps between rounds."""

  params: Params  # v, the client's own model
  alpha: Array  # [] share of v in the model that the client uses


class Personal(NamedTuple):
  """A client of APFL in the middle of its work."""

  local: Local
  params: Params  # v
  opt_state: Any
  alpha: Array  # []

  @property
  def key(self) -> Array:
    return self.local.key


def mix(personal: Params, shared: Params, alpha: ArrayLike) -> Params:
  """Returns alpha * personal + (1 - alpha) * shared, the model that a client of APFL uses."""
  return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, personal, shared)


def apfl_client(
  loss_fn: LossFn, client_tx: ClientTx, *, alpha_learning_rate: float = 0.0
) -> ClientAlgorithm:
  """Makes a client that trains w, the shared model, and v, its own. It sends the change of w.

  v follows the gradient of the loss of alpha v + (1 - alpha) w with respect to v."""
  shared = clients.local_training(loss_fn, client_tx)
  grad_fn = clients.mean_grad(loss_fn)
  own_tx = lambda key: clients.make_tx(client_tx, key_for(KeyUse.PERSONAL_OPTIMIZER, key))

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Personal:
    local = shared.init(received, None, num_examples, key)
    return Personal(local, memory.params, own_tx(key).init(memory.params), memory.alpha)

  def step(received: Received, personal: Personal, examples: Any, mask: Array) -> Personal:
    # v, alpha and w all move from their values before this step, as in algorithm 1.
    mixture = mix(personal.params, personal.local.params, personal.alpha)
    gradient, _ = grad_fn(mixture, examples, mask)
    updates, opt_state = own_tx(personal.key).update(
      trees.scale(gradient, personal.alpha), personal.opt_state, personal.params, mask=mask
    )
    # alpha moves only at the first local step of a round, and stays within [0, 1].
    slopes = jax.tree.map(
      lambda v, w, g: jnp.sum((v - w) * g), personal.params, personal.local.params, gradient
    )
    along = alpha_learning_rate * sum(jax.tree.leaves(slopes))
    change = jnp.where(personal.local.num_steps == 0, along, 0.0)
    # The loop over steps needs alpha to keep its type, also if parameters are float64.
    moved = personal.alpha - change.astype(personal.alpha.dtype)
    return Personal(
      local=shared.step(received, personal.local, examples, mask),
      params=optax.apply_updates(personal.params, updates),
      opt_state=opt_state,
      alpha=jnp.clip(moved, 0.0, 1.0),
    )

  def finish(received: Received, personal: Personal) -> Any:
    sent, _, info = shared.finish(received, personal.local)
    return sent, PersonalMemory(personal.params, personal.alpha), info

  return ClientAlgorithm(init, step, finish).keeping_apart()


@algorithm(
  client="trains w, which it sends, and v, which it keeps",
  server="as `fed_avg`",
  source="Deng et al. 2020",
  options={"alpha": 0.5, "alpha_learning_rate": 0.0},
  weighted=False,
  keeps_state=True,
  one_difference=True,
  checks={
    "alpha": functools.partial(validate.number_in, 0, 1),
    "alpha_learning_rate": validate.non_negative,
  },
  personal=lambda server, kept: mix(kept.params, server, kept.alpha),
  played={"alpha": 0.5},
)
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

  A local step moves w by the gradient at w, and v by alpha times the gradient at the mixture
  alpha v + (1 - alpha) w. Both gradients are taken at the values before the step. With
  `alpha_learning_rate` > 0 the first step of a round also moves the client's alpha by
  -alpha_learning_rate <v - w, gradient at the mixture> (section 4). alpha is kept within [0, 1].

  `state.memories.rows(clients)` returns v and alpha of `clients` (`PersonalMemory`). A client
  uses the model `mix(v, state.params, alpha)`. If alpha stays 0, this is `fed_avg`; if alpha
  stays 1, each client uses v, which it trains alone.
  """
  validate.number_in(0, 1, alpha=alpha)
  validate.non_negative(alpha_learning_rate=alpha_learning_rate)
  begin = lambda params: PersonalMemory(jax.tree.map(jnp.array, params), jnp.float32(alpha))
  client = apfl_client(loss_fn, client_tx, alpha_learning_rate=alpha_learning_rate)
  return federated(client, optimizing_server(server_tx), memory=begin, **common)

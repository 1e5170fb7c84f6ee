"""MimeLite (Karimireddy et al. 2021): clients use the server's optimizer with frozen state."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import optax

from dpjax import trees
from dpjax.federated import client as clients
from dpjax.federated.client import ClientAlgorithm, Local, Received, Weighting
from dpjax.federated.described import algorithm
from dpjax.federated.round import Common, FederatedAlgorithm, Server, cast_like, federated
from dpjax.types import Array, LossFn, Params


class _Mime(NamedTuple):
  """A client of Mime-lite in the middle of its work."""

  local: Local  # training from the server's parameters
  full: Local  # sum of gradients at the server's parameters

  @property
  def key(self) -> Array:
    return self.local.key


def _mime_client(
  loss_fn: LossFn, base_tx: optax.GradientTransformation, weighting: Weighting
) -> ClientAlgorithm:
  """Makes a client that trains with the optimizer's statistics frozen, and sends the difference and
  the full gradient as ONE message."""

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
    # Difference and gradient are one message. So a private aggregator clips them as one vector, and
    # adds noise to all of it.
    message = sent.message | {"gradient": gradient}
    return (
      sent._replace(message=message),
      memory,
      clients.info(both.local, message, sent.weight),
    )

  return ClientAlgorithm(init, step, finish)


@algorithm(
  client="the server's optimizer, its statistics frozen",
  server="adds the mean difference, and moves the statistics by full gradients",
  source="Karimireddy et al. 2021",
  optimizers=("client_tx",),
)
def mime_lite(
  loss_fn: LossFn,
  base_tx: optax.GradientTransformation,
  *,
  weighting: Weighting = clients.uniform,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """Clients use the server's optimizer with frozen statistics. The server updates the statistics by
  the mean of full local gradients at the server's parameters (MimeLite, Karimireddy et al. 2021).

  Difference and gradient are one message: a private aggregator clips them together and adds
  its noise to both, so that a round is one release. The server adds the mean difference as it is.
  """

  def apply(params: Params, state: Any, mean: Any, size: Array) -> tuple[Params, Any]:
    del size
    gradient = cast_like(mean["gradient"], params)
    after = optax.apply_updates(params, cast_like(mean["delta"], params))
    return after, base_tx.update(gradient, state, params)[1]

  server = Server(base_tx.init, lambda state: state, apply)
  return federated(_mime_client(loss_fn, base_tx, weighting), server, **common)

"""FedBN (Li et al. 2021): some parameters stay with their client, all others are averaged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from dpjax import trees
from dpjax.federated import client as clients
from dpjax.federated.client import Local, Received, Weighting
from dpjax.federated.described import algorithm
from dpjax.federated.round import (
  Common,
  FederatedAlgorithm,
  Server,
  federated,
  optimizing_server,
)
from dpjax.federated.silos import Silos
from dpjax.types import Array, ClientTx, LossFn, Params
from dpjax.validate import UserError

Kept = str | Callable[[str], bool]


def _pattern(**named: Any) -> None:
  """Raises UserError for a text that is no regular expression."""
  ((field, value),) = named.items()
  try:
    re.compile(value)
  except (re.error, TypeError) as error:
    raise UserError(
      f"must be a regular expression: {error}", field=field, value=value
    ) from error


def split(params: Params, kept: Kept) -> tuple[Any, Any]:
  """Returns (the shared part, the part that a client keeps) of parameters.

  Each is the tree of the parameters with None in the place of the other part's leaves.

  >>> split({"head": 1, "norm_0": 2}, "norm")
  ({'head': 1, 'norm_0': None}, {'head': None, 'norm_0': 2})
  """
  stays = kept if callable(kept) else re.compile(kept, re.IGNORECASE).search
  leaves = trees.named_leaves(params)
  treedef = jax.tree.structure(params)
  mine = {name: bool(stays(name)) for name in leaves}
  part = lambda own: jax.tree.unflatten(
    treedef, [leaf if mine[name] == own else None for name, leaf in leaves.items()]
  )
  return part(False), part(True)


def join(part: Any, other: Any) -> Any:
  """Returns the tree with the leaves of `part`, and those of `other` where `part` has None.

  >>> join({"head": None, "norm_0": 2}, {"head": 1, "norm_0": 7})
  {'head': 1, 'norm_0': 2}
  """
  missing = lambda leaf: leaf is None
  return jax.tree.map(lambda a, b: b if a is None else a, part, other, is_leaf=missing)


def check_parts(params: Params, kept: Kept) -> None:
  """Raises UserError for a text that keeps nothing, and for parameters of which none is sent."""
  shared, own = split(params, kept)
  if not jax.tree.leaves(shared):
    raise UserError("keeps every parameter; must leave some to be averaged", field="kept")
  if isinstance(kept, str) and not jax.tree.leaves(own):
    names = ", ".join(list(trees.named_leaves(params))[:4])
    raise UserError(
      f"is in no parameter's name; must be in that of some, such as {names}",
      field="kept",
      value=kept,
    )


@algorithm(
  client="trains its model, sends the change of shared parameters, and keeps its own ones",
  server="as `fed_avg`, of the shared parameters",
  source="Li et al. 2021",
  options={"kept": "norm"},
  keeps_state=True,
  records=True,
  checks={"kept": _pattern},
  personal=lambda server, kept: join(kept, server),
)
def fed_bn(
  loss_fn: LossFn,
  client_tx: ClientTx,
  server_tx: optax.GradientTransformation | None = None,
  *,
  kept: Kept = "norm",
  weighting: Weighting = clients.uniform,
  silos: Silos | None = None,
  **common: Unpack[Common],
) -> FederatedAlgorithm:
  """`fed_avg` of some parameters; each client keeps the others, and trains all (FedBN, Li et al.
  2021, arXiv:2102.07623).

  With "norm" those of normalisation layers stay, which is FedBN. With "head" the last layer stays,
  which is FedPer (Arivazhagan et al. 2019, arXiv:1912.00818) with as many steps for both parts.
  FedBN also keeps statistics of batches. Models of dpjax have none: they normalise each example by
  itself.

  The server's parameters hold the first values of what clients keep. `state.memories.rows(clients)`
  returns what `clients` keep; a client uses `join(kept, state.params)`.

  Guarantee: with a private aggregator, that of `fed_avg` for the shared parameters, since a message
  holds nothing else. If every client takes part by a coin of its own (Poisson sampling), it also
  holds for what all OTHER clients keep and use together: that follows from the shared parameters,
  their own data and their own coins. With other samplers it does not, since who else took part
  tells something about the client; if one takes part in another's place, the plan is refused
  (`Sampler.proved_with_memory`). It never covers what the client itself keeps: show that to the
  client alone. With `silos` all parts follow from noisy steps, and the guarantee of a record covers
  what its silo keeps, too.

  Args:
    kept: regular expression; a parameter stays if it is found in the parameter's name, such as
      "params/norm_0/scale", in upper or lower case. Or a function from the name to whether it
      stays.
    silos: plans of all clients, for record-level privacy.

  Raises:
    UserError: raised by `init` if `kept` is in no parameter's name, or in all names.
  """
  if not callable(kept):
    _pattern(kept=kept)

  def message(received: Received, local: Local) -> tuple[Any, Any]:
    shared, own = split(local.params, kept)
    before = Received(split(received.params, kept)[0])
    return {"delta": clients.difference(before, local._replace(params=shared))}, own

  training = clients.local_training(
    loss_fn, client_tx, weighting=weighting, message=message, silos=silos
  )

  def init(received: Received, memory: Any, num_examples: Array, key: Array) -> Local:
    whole = received._replace(params=join(memory, received.params))
    return training.init(whole, memory, num_examples, key)

  inner = optimizing_server(server_tx)

  def apply(params: Params, state: Any, mean: Any, size: Array) -> tuple[Params, Any]:
    shared, state = inner.apply(split(params, kept)[0], state, mean, size)
    return join(shared, params), state

  def first(params: Params) -> Any:
    check_parts(params, kept)
    own = jax.tree.map(jnp.asarray, split(params, kept)[1])
    # A function may keep nothing: then clients have no state.
    return own if jax.tree.leaves(own) else None

  server = Server(
    lambda params: inner.init(split(params, kept)[0]), lambda state: None, apply
  )
  return federated(training._replace(init=init), server, memory=first, **common)

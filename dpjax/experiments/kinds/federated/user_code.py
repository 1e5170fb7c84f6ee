"""Loads user-defined parts of a federated run by import path; see `config.user_code`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from dpjax import federated, names
from dpjax.experiments.config.user_code import shapes, wrong
from dpjax.federated import client, round
from dpjax.federated.cohort import Cohort
from dpjax.federated.round import optimizing_server
from dpjax.types import ArrayTree, ClientTx, LossFn, Params
from dpjax.validate import UserError


def aggregator(path: str) -> federated.Aggregator:
  """Returns the aggregator that a user's function `make()` at `path` returns.

  The aggregator never counts as private, even if it says so. Raises UserError if `make` returns
  an object of another type.
  """
  field = "aggregator"
  built = names.call(path, field)
  if not isinstance(built, federated.Aggregator):
    raise wrong(field, path, "a federated.Aggregator", built)
  # Shapes of one message; `init` fills the list when a run begins.
  expected: list[Any] = []

  def init(message: ArrayTree) -> ArrayTree:
    expected[:] = [jax.tree.map(lambda leaf: tuple(leaf.shape), message)]
    return built.init(message)

  def like_a_message(part: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **named: Any) -> Any:
      mean, state = part(*args, **named)
      if expected and shapes(mean) != expected[0]:
        raise wrong(field, path, "an update of the shapes of a message", shapes(mean))
      return mean, state

    return checked

  parts = {"init": init, "update": like_a_message(built.update), "partial": built.partial}
  parts |= {"finish": built.finish and like_a_message(built.finish), "check": built.check}
  guarded = {n: part and names.guard(path, field, part) for n, part in parts.items()}
  # A user's aggregator that says it is private proves nothing, so `private` is set to False.
  return built._replace(private=False, plan=None, **guarded)


def _client(
  users_client: federated.ClientAlgorithm, path: str
) -> federated.ClientAlgorithm:
  """Returns a user's client with checks. They raise UserError if `step` changes the shapes of the
  state, or if `finish` returns something else than (Sent, memory, ClientInfo).

  Without examples it weighs 0: under replace_special an emptied client must contribute nothing."""

  def step(received: client.Received, local: Any, *batch: Any) -> Any:
    after = users_client.step(received, local, *batch)
    # Steps run in a compiled loop, so the state must keep its shapes.
    if shapes(after) != shapes(local):
      raise wrong("algorithm", path, "of a step a state like the last", after)
    return after

  def finish(received: client.Received, local: Any) -> Any:
    sent, memory, info = users_client.finish(received, local)
    message = sent.message if isinstance(sent, client.Sent) else None
    delta = message.get("delta") if isinstance(message, dict) else None
    if delta is None or shapes(delta) != shapes(received.params):
      wanted = 'Sent({"delta": as the parameters}, weight)'
      raise wrong("algorithm", path, wanted, sent)
    if not isinstance(info, client.ClientInfo):
      raise wrong("algorithm", path, "a ClientInfo", info)
    return sent, memory, info._replace(weight=sent.weight)

  silent = users_client.wrap(step=step, finish=finish).silent_when_empty()
  guarded = {
    name: names.guard(path, "algorithm", getattr(silent, name))
    for name in ("init", "step", "finish")
  }
  return silent.wrap(**guarded)


def _whole(
  users_algorithm: federated.FederatedAlgorithm, path: str
) -> federated.FederatedAlgorithm:
  """Returns a user's algorithm. It raises UserError for wrong shapes, or without a `RoundInfo`."""

  def init(params: Params, num_clients: int = 0) -> ArrayTree:
    state = users_algorithm.init(params, num_clients)
    if shapes(round.params_of(state)) != shapes(params):
      raise wrong("algorithm", path, "states with the parameters it was given", state)
    return state

  def one_round(state: ArrayTree, cohort: Cohort) -> Any:
    after, info = users_algorithm.round(state, cohort)
    if not isinstance(info, round.RoundInfo):
      raise wrong("algorithm", path, "(state, RoundInfo) of a round", info)
    return after, info

  parts = users_algorithm._replace(init=init, round=one_round)
  return users_algorithm._make(names.guard(path, "algorithm", part) for part in parts)


def algorithm(
  path: str,
  loss_fn: LossFn,
  client_tx: ClientTx,
  server_tx: optax.GradientTransformation,
  *,
  weighting: client.Weighting,
  guarded: bool,
  **common: Any,
) -> federated.FederatedAlgorithm:
  """Returns the algorithm that a user's function `make` at `path` returns.

  dpjax calls `make(loss_fn, client_tx, server_tx=, weighting=, aggregator=, map_clients=, key=)`.
  A `ClientAlgorithm` says what ONE client does. dpjax adds clip, noise, sum and server, so the
  guarantee holds. A whole `FederatedAlgorithm` could release values without noise, or send them
  beside the secure sum.

  Args:
    guarded: whether the run promises what a message tells: it is private, or has a secure sum.

  Raises:
    UserError: `make` returns neither of the two, or a `FederatedAlgorithm` in a guarded run.
  """
  offered = {"server_tx": server_tx, "weighting": weighting, **common}
  built = names.call(path, "algorithm", loss_fn, client_tx, **offered)
  if isinstance(built, federated.ClientAlgorithm):
    return round.federated(_client(built, path), optimizing_server(server_tx), **common)
  if not isinstance(built, federated.FederatedAlgorithm):
    raise wrong("algorithm", path, "a ClientAlgorithm or FederatedAlgorithm", built)
  if guarded:
    raise UserError(
      "returns a FederatedAlgorithm, of which nobody knows that its rounds "
      "release noisy messages or sums alone; return a ClientAlgorithm, or set "
      "privacy='none' and secure_sum='none'",
      field="algorithm",
      value=path,
    )
  return _whole(built, path)

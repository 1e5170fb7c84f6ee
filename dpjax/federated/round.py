"""Federated algorithms as `(init, round, cohorts)`: pure values in, pure values out.

Each algorithm of `dpjax.federated.algorithms` is one call of `federated(client, server, ...)`.
Its parts are a client algorithm (the work of clients), an aggregator (how the mean message is
taken, and how private it is), a server (the effect of the mean message) and an execution.

Facts of each algorithm are beside its code (`@algorithm(...)`): the work of client and server,
its source and its requirements for privacy. `python -m launch.list algorithms` shows them.
FedOpt (Reddi et al. 2021) is `fed_avg` with a server's optimizer of `server_optimizers`.

Everything that a round releases is a function of the aggregator's output alone, so a private
aggregator covers it. Quantities beside the difference (SCAFFOLD's control, Mime's gradient) are
part of the clipped message. With a private aggregator, an algorithm refuses to release what cannot
be part of that message (a realised count).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Required, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import closed_over, trees, validate
from dpjax.accounting.proved import ZERO
from dpjax.federated.aggregation import Aggregator, weighted_mean
from dpjax.federated.client import ClientAlgorithm, ClientInfo, Received, Sent
from dpjax.federated.cohort import Cohort, bucket, check_drawn, cohorts, pad
from dpjax.federated.execution.context import Context, MapClients
from dpjax.federated.execution.named import auto_clients
from dpjax.gradients import Flat
from dpjax.gradients.arguments import check_real
from dpjax.key_uses import KeyUse, key_for
from dpjax.noise import source
from dpjax.parallel.client_states import ClientStates
from dpjax.plan import Plan
from dpjax.sampling import batches
from dpjax.transforms import guard
from dpjax.types import Array, ArrayTree, Params
from dpjax.validate import UserError, Verbatim


class FederatedAlgorithm(NamedTuple):
  """A federated algorithm as three functions. A private algorithm gets its plan in its aggregator,
  and the plan determines noise and cohorts."""

  init: Callable[..., Any]  # (params, num_clients=0) -> state
  round: Callable[..., Any]  # (state, cohort) -> (state, info)
  # Function (federation, work, *, rng=None, start=0) that yields the cohorts of rounds start,
  # start + 1, and so on.
  cohorts: Callable[..., Iterator[Cohort]]


class FederatedState(NamedTuple):
  """State of an algorithm. `aggregator` may hold a noise key: keep it secret."""

  params: Params
  server: Any  # state of the server's optimizer, and what else the server keeps
  aggregator: Any
  memories: ClientStates | None  # state of each client; None if clients keep no state
  key: Array  # words (`source.to_words`) of the key of all randomness on clients
  round: Array  # int32, number of rounds done
  run: Array  # int32, number of the run whose cohorts it takes (`Drawn.run`); 0 until then


class RoundInfo(NamedTuple):
  """Diagnostics for users. They are computed from raw client data: NOT private."""

  train_loss: (
    Any  # mean loss over the examples of clients that count; NumPy, like all fields
  )
  mean_norm: Any  # mean norm of the messages that count; both NaN if all are left out
  num_clients: (
    Any  # clients whose message counts: a secret unless the sampler's sizes are public
  )
  num_steps: Any  # number of local steps of all clients
  upload_bits: Any  # number of bits that all clients send
  clients: ClientInfo  # leaves [C]
  # Clients of the cohort that fell silent, have no example, or sent NaN, infinity or an impossible
  # weight.
  left_out: Any = np.int32(0)
  coordinates_cut: Any = np.int32(0)  # of the messages that count, by a secure sum
  rounds_refused: Any = np.int32(0)  # 1 if the round was refused, and moved nothing


class Server(NamedTuple):
  """The server's state, in addition to the parameters, and its update by the mean message."""

  init: Callable[..., Any]  # (params) -> server state
  extra: Callable[..., Any]  # (server state) -> `received.extra` of all clients
  # Function (params, server state, mean, count) -> (params, server state). `count` is the number of
  # clients whose message counts. With a private aggregator it is secret, so None.
  apply: Callable[..., Any]


class Common(TypedDict, total=False):
  """Keyword arguments that every algorithm takes, in addition to special ones; see `federated`."""

  key: Required[Array]
  aggregator: Aggregator | None
  map_clients: MapClients | None


def counting_mask(info: ClientInfo) -> np.ndarray:
  """Returns a mask [C] of the clients whose message is finite, with a finite weight above 0."""
  weight = np.asarray(info.weight)
  return np.isfinite(info.update_norm) & np.isfinite(weight) & (weight > 0)


def _info(info: ClientInfo, size: int) -> RoundInfo:
  """Returns the diagnostics of a cohort of `size` clients, of which some may have fallen silent."""
  info = jax.tree.map(np.asarray, info)
  kept = counting_mask(info)
  # 0 would look like a perfect fit. An empty cohort has nothing to divide by.
  mean = lambda values, weights: (
    np.sum(values[kept] * weights[kept]) / np.maximum(np.sum(weights[kept]), 1)
    if kept.any() or not size
    else np.float32(np.nan)
  )
  return RoundInfo(
    train_loss=mean(info.train_loss, info.num_examples * (info.num_steps > 0)),
    mean_norm=mean(info.update_norm, np.ones(len(kept))),
    num_clients=np.int32(np.sum(kept)),
    num_steps=np.sum(info.num_steps),
    upload_bits=np.sum(info.upload_bits, dtype=np.float64),
    clients=info,
    left_out=np.int32(size - np.sum(kept)),
    coordinates_cut=np.sum(np.where(kept, info.coordinates_cut, 0)),
  )


def _remember(memories: ClientStates | None, ids: np.ndarray, parts: Any) -> Any:
  """Returns all client states, with the states of the cohort replaced. Padding changes no state.

  A client whose new state is not finite keeps its old state. Otherwise none of its later messages
  would count. Nothing is overwritten: the state before the round stays valid.
  """
  if memories is None:
    return None
  # States are replaced on the host, since the states of all clients may exceed a device's memory.
  for part in jax.device_get(parts):
    sound = part.mask  # [K]
    for leaf in jax.tree.leaves(part.memories):  # [K, ...]
      if jnp.issubdtype(leaf.dtype, jnp.inexact):
        sound = sound & np.isfinite(leaf.reshape(len(sound), -1)).all(axis=1)
    rows = jax.tree.map(lambda leaf: leaf[sound], part.memories)  # noqa: B023
    memories = memories.replace_rows(np.asarray(ids)[part.places[sound]], rows)
  return memories


def _combine(aggregator: Aggregator) -> Callable[..., Any]:
  """Returns a function (mapped, aggregator state) -> (mean message, aggregator state)."""
  if aggregator.finish is not None:
    finish = closed_over.jitted(aggregator.finish)
    return lambda mapped, state: finish(mapped.sums, state)
  update = closed_over.jitted(aggregator.update)

  def stacked(mapped: Any, state: Any) -> Any:
    count = mapped.sent.weight.shape[0]
    # Messages are padded to one of few sizes, so that random cohorts need few compilations.
    size = max(1, bucket(count))
    sent, mask = jax.device_put((pad(mapped.sent, size), np.arange(size) < count))
    if aggregator.check is not None:
      aggregator.check(sent.message, mask, sent.weight)
    return update(sent.message, mask, state, sent.weight)

  return stacked


def check_public(
  common: Common, why: str, *, check: Callable[..., None], **named: float | None
) -> None:
  """Raises UserError if `check` refuses the number, or if the number is None with a private
  aggregator."""
  ((name, value),) = named.items()
  aggregator = common.get("aggregator")
  if value is not None:
    check(**named)
  elif aggregator is not None and aggregator.private:
    raise UserError(
      f"must be a public number with a private aggregator{why}", field=name, value=None
    )


def check_cohort(cohort: Cohort, memories: ClientStates | None) -> None:
  """Refuses a cohort with a number that names no client, or with a client twice.

  A client's number determines its key and its state, so each client has one number.

  Raises:
    UserError: a number is repeated, is negative, is above 2^31 - 1, or has no client state.
  """
  ids = np.asarray(cohort.ids)
  if len(np.unique(ids)) != len(ids):
    raise UserError(
      "each client can take part once in a round; twice is twice its bound",
      field="cohort.ids",
    )
  if len(ids) and not 0 <= ids.min() <= ids.max() <= np.iinfo(np.int32).max:
    wrong = ids.min() if ids.min() < 0 else ids.max()
    raise UserError(f"must be numbered from 0 to 2^31 - 1, not {wrong}", field="cohort.ids")
  if memories is None or not cohort.size:
    return
  held = memories.num_clients
  if int(np.max(cohort.ids)) >= held:
    raise UserError(
      f"must be below num_clients={held} of init(params, num_clients=)",
      field="client",
      value=int(np.max(cohort.ids)),
    )


@jax.jit
def _of_round(key: Array, round: Array) -> tuple[Array, Array]:
  """Returns (key of the round's clients, number of the next round). It is compiled, so that no
  constant is sent from the host."""
  return jax.random.fold_in(key_for(KeyUse.CLIENTS, key), round), round + 1


def _with_own_noise(client: ClientAlgorithm) -> ClientAlgorithm:
  """Returns the client whose `init` takes (client state, numbers of its noise) for its state."""

  def init(received: Received, pair: Any, num_examples: Array, key: Array) -> Any:
    memory, silo = pair
    return client.init(received._replace(silo=silo), memory, num_examples, key)

  return client._replace(init=init)


def _noise_of_its_run(state: FederatedState, run: int) -> Any:
  """Returns the aggregator's state before a round, with the noise of the run that begins with it.

  Args:
    run: number of the run (`Drawn.run`).
  """
  if run <= 0 or int(state.round):
    return state.aggregator
  return guard.noise_of_run(state.aggregator, jnp.bool_(True), jnp.int32(run))


def _checked_run(state: FederatedState, cohort: Cohort) -> int:
  """Returns the number of the run of a cohort; 0 if it has none.

  Raises UserError if earlier cohorts were of another run: a client may take part more often in
  rounds of two runs than in those of one.
  """
  run = 0 if cohort.drawn is None else cohort.drawn.run
  if run and int(state.run) not in (0, run):
    raise UserError(
      "was drawn by another call, rng or number of clients than those of earlier rounds: of both a "
      "client may take part more often than is accounted for",
      field="cohort",
    )
  return run


def check_apart(plan: Plan, why: str) -> None:
  """Raises UserError for a private plan that draws clients in each other's place.

  Its event holds only if nobody can tell in whose place a client takes part; `why` says who can.
  """
  if not plan.is_private or plan.sampler.proved_with_memory:
    return
  raise UserError(
    f"must draw each client apart from all others, as 'poisson' does: {why}",
    field="sampler",
    value=plan.sampler.name or Verbatim(type(plan.sampler).__name__),
  )


def check_empty(client: ClientAlgorithm, plan: Plan) -> None:
  """Raises UserError for a private plan under replace_special whose clip norm does not bound how
  far a client is from its emptied twin.

  A twin that sends nothing is one clip norm away. One that sends noise is as far away as the client
  says, which a flat clip does not increase; of any other clip, up to two clip norms.
  """
  if not (client.apart_from_empty and plan.is_private):
    return
  if plan.neighboring_relation != ZERO:
    return
  clip = plan.l2_clip_norm
  flat = clip.is_one_number and type(clip.rule) is Flat
  least = plan.l2_bound * min(clip.schedule, default=1.0)
  if flat and client.apart_from_empty <= least:
    return
  raise UserError(
    "must be 'add_or_remove_one': an emptied client still sends its noise, up to two clip norms "
    "apart; or a flat clip to no less than the client's own, and no compression",
    field="neighboring_relation",
    value=plan.neighboring_relation,
  )


def _as_accounted(
  client: ClientAlgorithm, plan: Plan, *, keeps_state: bool
) -> ClientAlgorithm:
  """Returns the client whose messages a private plan may account; see `federated` for errors."""
  check_empty(client, plan)
  if keeps_state and client.sends_memory:
    check_apart(
      plan,
      "messages depend on what clients keep, and so tell in whose place another one took part",
    )
  emptied = plan.is_private and plan.neighboring_relation == ZERO
  return client.silent_when_empty() if emptied and not client.apart_from_empty else client


def federated(
  client: ClientAlgorithm,
  server: Server,
  *,
  key: Array,
  aggregator: Aggregator | None = None,
  map_clients: MapClients | None = None,
  memory: Callable[[Params], Any] | None = None,
) -> FederatedAlgorithm:
  """Makes an algorithm from the one loop body that all algorithms here share.

  Args:
    client: the work of a client; see `local_training`. With `silos` its cohorts are those of
      `Silos.cohorts`.
    server: the effect of the mean message on the server.
    key: typed key of all randomness on clients (rounding, local noise). Each client of
      each round gets another key from it. If clients draw noise, it is as secret as their data.
    aggregator: rule for the mean message. The default is `weighted_mean()`;
      `central(plan, noise_key)` gives user-level privacy.
    map_clients: execution of the clients; `auto_clients()` by default.
    memory: `(params) -> state of ONE client before its first round`. States are kept as
      `ClientStates`, on the host, for clients that have taken part. Devices hold the states of one
      cohort at most. To keep states on disk: `state._replace(memories=OnDisk(state.memories,
      Journal(folder, state.memories.row_bytes)))`.

  Returns:
    `init(params, num_clients=0)`, `round(state, cohort) -> (state, RoundInfo)` and
    `cohorts(federation, work, rng=)`, drawn by the aggregator's plan. `round` is ordinary
    Python around compiled pieces: do not jit it. It is a pure function: the same state and
    cohort give the same bits again, and the state stays usable.

  Raises:
    UserError: a private plan whose sampler draws clients in each other's place (such as
      `FixedSizeSampler`), and a client whose messages depend on its state (`sends_memory`). A
      private plan under replace_special, and a client that sends noise without examples, too, if
      both may be more than a clip norm apart (`check_empty`).
    UserError: raised by `init` for parameters that are no real floats, or a weight that is no one
      number. Raised by `round` for a cohort that `check_cohort` or `check_drawn` refuses, such as
      one with a client twice. Raised by `cohorts` if the aggregator has no plan.
  """
  trees.check_key(key=key)
  source.check_generator(key)
  aggregator = weighted_mean() if aggregator is None else aggregator
  validate.instance(
    Aggregator, "an aggregator, as central(plan, key)", aggregator=aggregator
  )
  silos = client.silos
  if silos is not None and aggregator.private:
    raise UserError(
      "must add no noise with silos=, whose messages are private by themselves",
      field="aggregator",
    )
  if aggregator.plan is not None:
    client = _as_accounted(client, aggregator.plan, keeps_state=memory is not None)
  if silos is not None:
    client = _with_own_noise(client)
  map_clients = auto_clients() if map_clients is None else map_clients
  through = aggregator.through or (lambda inner: inner)
  run = through(map_clients)(client, aggregator.partial)
  combine = _combine(aggregator)
  apply = closed_over.jitted(server.apply)

  def sent(params: Params, client_state: Any) -> Sent:
    received = Received(params, server.extra(server.init(params)))
    if silos is not None:
      client_state = (client_state, jax.tree.map(lambda leaf: leaf[0], silos.noise()))
    # `sent` is traced only for shapes, so any key will do, and no example is needed.
    local = client.init(received, client_state, jnp.int32(0), key)
    return client.finish(received, local)[0]

  def init(params: Params, num_clients: int = 0) -> FederatedState:
    check_real(params=params)
    # The parameters are copied, since the caller may change or donate its arrays.
    params = jax.tree.map(jnp.array, params)
    first_state = None if memory is None else memory(params)
    if first_state is not None and num_clients == 0:
      raise UserError(
        "must be that of the federation, whose clients keep a state between rounds: "
        "init(params, federation.num_clients)",
        field="num_clients",
        value=num_clients,
      )
    memories = None if first_state is None else ClientStates(first_state, num_clients)
    like = jax.eval_shape(sent, params, first_state)
    if like.weight.shape:
      raise UserError(f"must be one number, has shape {like.weight.shape}", field="weight")
    zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype)
    return FederatedState(
      params=params,
      server=server.init(params),
      aggregator=aggregator.init(jax.tree.map(zeros, like.message)),
      memories=memories,
      key=source.to_words(key),
      round=jnp.zeros((), jnp.int32),
      run=jnp.zeros((), jnp.int32),
    )

  def one_round(state: FederatedState, cohort: Cohort) -> tuple[FederatedState, RoundInfo]:
    validate.instance(
      FederatedState, "the state that init or a round returned", state=state
    )
    validate.instance(
      Cohort, "a cohort, as `cohorts` of the algorithm yields", cohort=cohort
    )
    check_cohort(cohort, state.memories)
    if silos is None:
      check_drawn(cohort, aggregator.plan, aggregator.private, int(state.round))
    else:
      silos.check_cohort(cohort, int(state.round))
    run_number = _checked_run(state, cohort)
    noise = _noise_of_its_run(state, run_number)
    # Places are padded to one of few numbers of rows, so that few programs are compiled.
    places, _ = batches.pad(np.asarray(cohort.ids), max(1, bucket(cohort.size)))
    # The cohort knows its run, so the number is folded in anew in each round: a state that saw a
    # refused round has no other key than before.
    words = guard.key_of_run(state.key, run_number) if run_number > 0 else state.key
    key, following = _of_round(source.from_words(words), state.round)
    memories = None if state.memories is None else state.memories.rows(places)
    if silos is not None:
      memories = (memories, jax.tree.map(lambda leaf: leaf[places], silos.noise()))
    context = Context(
      received=Received(state.params, server.extra(state.server)),
      data=cohort.data,
      memories=memories,
      key=key,
      state=noise,
    )
    mapped = run(context, cohort)
    mean, aggregated = combine(mapped, noise)
    info = _info(mapped.info, cohort.size)
    # With a private aggregator the number of participants is secret, so the server does not get it.
    size = None if aggregator.private else jax.device_put(np.float32(info.num_clients))
    params, moved = apply(state.params, state.server, mean, size)
    after = FederatedState(
      params=params,
      server=moved,
      aggregator=aggregated,
      memories=_remember(state.memories, cohort.ids, mapped.memories),
      key=state.key,
      round=following,
      run=jnp.int32(run_number) if run_number else state.run,
    )
    return after, info

  draw = functools.partial(cohorts, aggregator.plan) if silos is None else silos.cohorts
  return FederatedAlgorithm(init, one_round, draw)


def cast_like(updates: ArrayTree, params: Params) -> Any:
  """Casts the updates to the dtypes of the parameters."""
  return jax.tree.map(lambda u, p: jnp.asarray(u, jnp.asarray(p).dtype), updates, params)


def optimizing_server(server_tx: optax.GradientTransformation | None = None) -> Server:
  """Returns a server whose optimizer takes minus the mean difference as its gradient (Reddi et
  al. 2021).

  Args:
    server_tx: optimizer of the server; None for `optax.sgd(1.0)`, plain averaging.
  """
  tx = optax.sgd(1.0) if server_tx is None else server_tx
  validate.optimizer(server_tx=tx)

  def apply(params: Params, opt_state: Any, mean: Any, size: Array) -> tuple[Params, Any]:
    del size
    gradient = cast_like(trees.scale(mean["delta"], -1.0), params)
    updates, opt_state = tx.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return Server(tx.init, lambda opt_state: None, apply)


def params_of(state: FederatedState) -> Params:
  """Returns the server's parameters from the state of any algorithm here."""
  return state.params

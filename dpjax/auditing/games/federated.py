"""Games against federated algorithms: one client is present or absent, with unbounded
updates.

A game runs the algorithm as it is, from `init`, for two rounds with `central` noise. After each
round the adversary sees parameters, the server's optimizer and its control variates. These are the
state without the noise key, and without what clients keep. Draws differ in the noise key alone. So
an algorithm is built once, and thousands of draws are one `vmap` of its rounds. The loop
`federated` is also played draw by draw, with the executions that users run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from dpjax import federated, sampling
from dpjax.auditing.games.game import Game, claims, drawn_by, linear
from dpjax.auditing.games.plans import small_plan
from dpjax.federated import described
from dpjax.federated.aggregation import local_epsilon
from dpjax.federated.client import ClientAlgorithm, Received
from dpjax.federated.cohort import Cohort
from dpjax.federated.execution import client_blocks
from dpjax.federated.execution.context import (
  Context,
  MapClients,
  Mapped,
  Partial,
  Run,
  nobody,
  row,
)
from dpjax.federated.round import FederatedState, optimizing_server
from dpjax.noise import source
from dpjax.plan import Plan
from dpjax.transforms import guard
from dpjax.types import Params

ROUNDS = 2
_ADD = "add_or_remove_one"
_REPLACE = "replace_one"
_Z = 1.5
_CLIP = 0.5
_FAR = 1e6
# Number of first draws of a call that run one by one, as ordinary Python. Later draws run together.
_ONE_BY_ONE = 16
# Tolerance between a draw alone and the same draw among others, relative to the largest number.
_ROUNDING = 1e-4
# A leaf of at least this many numbers is shown by the spread of its noise (`visible_numbers`).
_MANY = 64
_LOSS = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)

_ROWS = described.algorithms()
_START = np.zeros(2, np.float32)  # NumPy: an import starts no backend

Aggregate = Callable[[Plan, Any], Any]  # `federated.central`, or a broken one
# Games of a function, or of a broken one, and of an aggregator if it is not `federated.central`.
Games = Callable[..., list[Game]]


def the_plan() -> Plan:
  """Returns a plan with every client in every round, so sampling hides nothing."""
  sampler = sampling.PoissonSampler(sampling_prob=1.0, capacity=8)
  return small_plan(sampler=sampler, noise_multiplier=_Z, num_steps=ROUNDS, unit="user")


def _client(x: float, width: int) -> np.ndarray:
  """Returns one example of a client, [1, width]: x, then zeros."""
  return np.array([[x, *[0.0] * (width - 1)]], np.float32)


_JOINS = "a client joins another"
_LEAVES = "a client joins another, for one round"
_WORLDS: dict[str, tuple[list[float], list[float]]] = {
  _JOINS: ([-_FAR], [-_FAR, _FAR]),
  "NaN joins": ([-_FAR], [-_FAR, math.nan]),
  _LEAVES: ([-_FAR], [-_FAR, _FAR]),
}
_ALONE = {"nobody, one client": ([], [_FAR])}


def _with_keys(state: FederatedState, key: Any) -> FederatedState:
  """Returns the state with noise keys of one draw; no two keys are equal."""
  # No state holds more than eight keys.
  places = iter(range(8))

  def fresh(leaf: Any) -> Any:
    if not guard.is_guarded(leaf):
      return leaf
    words = source.to_words(jax.random.fold_in(key, next(places)))
    return guard.exchange(leaf, lambda inner: inner._replace(key=words))

  return jax.tree.map(fresh, state, is_leaf=guard.is_guarded)


def visible_numbers(leaf: Any) -> np.ndarray:
  """Returns the numbers of a leaf that the adversary sees: [n, features].

  For `_MANY` numbers or more, these are the first two, and the log of the others' spread.
  """
  values = np.asarray(leaf, np.float64).reshape(len(leaf), -1)
  if values.shape[1] < _MANY:
    return values
  spread = np.log(values[:, 2:].std(axis=1, keepdims=True) + 1e-30)
  return np.concatenate([values[:, :2], spread], axis=1)


class _Choices:
  """Client states like `ClientStates`, as arrays [N, ...] that may differ between draws."""

  def __init__(self, rows: Any, num_clients: int):
    self._rows = rows
    self.num_clients = num_clients

  @classmethod
  def like(cls, states: Any) -> _Choices:
    """Returns the same client states, which may now differ from draw to draw."""
    return cls(jax.tree.map(jnp.asarray, states.all()), states.num_clients)

  def rows(self, ids: Any) -> Any:
    """Returns the states of the K clients `ids`, with leaves [K, ...]."""
    return jax.tree.map(lambda leaf: leaf[np.asarray(ids)], self._rows)

  def replace_rows(self, ids: Any, rows: Any) -> _Choices:
    """Returns client states in which the clients `ids` have the new `rows`."""
    put = lambda leaf, new: leaf.at[np.asarray(ids)].set(jnp.asarray(new, leaf.dtype))
    return _Choices(jax.tree.map(put, self._rows, rows), self.num_clients)


def _to_numpy(tree: Any) -> Any:
  """Converts leaves to NumPy arrays. Traced leaves, which differ between draws, become zeros."""
  known = lambda leaf: not isinstance(leaf, Tracer)
  seen = lambda leaf: np.asarray(leaf) if known(leaf) else np.zeros(leaf.shape, leaf.dtype)
  return jax.tree.map(seen, tree)


def _draws_at_once(choices: bool = False) -> MapClients:
  """Returns an execution like `vmap_clients`, for rounds under a `vmap` over noise keys. Blocks of
  clients run as one compiled program.

  An execution fetches diagnostics and client states. In the first round they are known while
  tracing, since noise comes after them. In the last round nobody sees them. So zeros may replace
  values that are not known. `choices` is for an algorithm that reads single messages (without
  `partial`), or that sets client states by what was released. With it one block runs, and its
  messages stay traced arrays of all draws.
  """

  def bind(client: ClientAlgorithm, partial: Partial) -> Run:
    program = jax.jit(functools.partial(client_blocks.run_block, client, partial))
    if choices:
      return functools.partial(_one_block, program, nobody(client, partial))
    assert partial is not None
    size = lambda count: max(1, count)
    way = client_blocks.Dispatch(program, size, fetch=_to_numpy)
    return client_blocks.Blocks(client, partial, way)

  return bind


def _one_block(
  program: Callable[..., Any],
  empty: Callable[[Context], Mapped],
  context: Context,
  cohort: Cohort,
) -> Mapped:
  """Runs a cohort whose results need not be known while tracing. Client states stay as the server's
  choice set them, since a HypCluster client returns its state unchanged."""
  if not cohort.size:
    return empty(context)
  everything = client_blocks.ByteBudget(client_blocks.MOST_BYTES)
  (block,) = client_blocks.blocks(cohort, cohort.size, None, everything)
  rows = row(context.memories, block.places)
  collected, _, info = program(context._replace(memories=None), rows, block)
  # The block orders clients by number of steps. Messages must follow the order of the cohort.
  sent = row(collected, np.argsort(block.places))
  return Mapped(collected, sent, (), _to_numpy(info))


def _game(
  case: str,
  build: Callable[[], federated.FederatedAlgorithm],
  worlds: tuple[list[float], list[float]],
  *,
  params: Params,
  num_clients: int = 0,
  at_once: Callable[[], federated.FederatedAlgorithm] | None = None,
  leaves: bool = False,
  choices: bool = False,
) -> Game:
  """Returns the game of `ROUNDS` rounds of the algorithm from `build`, with one noisy sum in each.

  Args:
    at_once: function that builds the same algorithm for many draws at once, if the algorithm of
      `build` draws one by one. The first draws are then made in both ways. If they differ, all
      draws are made one by one.
    leaves: whether the client takes part in the first round alone, so that a later round which
      repeats the noise reveals the client.
    choices: whether client states differ from draw to draw.
  """
  cached_build = functools.cache(build)
  cached_at_once = cached_build if at_once is None else functools.cache(at_once)
  width = jax.tree.leaves(params)[0].shape[-1]

  def release(keys: Any, world: int) -> list[np.ndarray]:
    every = _at_once(one_draw(cached_at_once(), world), keys)
    if at_once is not None:
      every = _as_users(one_draw(cached_build(), world), keys, every)
    return [visible_numbers(leaf) for leaf in every]

  def one_draw(algorithm: Any, world: int) -> Callable[[Any], list[Any]]:
    first = algorithm.init(params, num_clients) if num_clients else algorithm.init(params)
    if choices:
      first = first._replace(memories=_Choices.like(first.memories))
    present = [world, *[0 if leaves else world] * (ROUNDS - 1)]
    cohorts = [
      federated.from_batches([_client(x, width) for x in worlds[which]])
      for which in present
    ]

    def draw(key: Any) -> list[Any]:
      state = _with_keys(first, key)
      leaves = []
      for cohort in cohorts:
        state, _info = algorithm.round(state, cohort)
        leaves += jax.tree.leaves((state.params, state.server))
      return leaves

    return draw

  return Game(case, _ADD, claims(the_plan().epsilon), drawn_by(release), linear)


def _at_once(one: Callable[[Any], list[Any]], keys: Any) -> list[Any]:
  return jax.vmap(one)(keys)


def _one_by_one(draw: Callable[[Any], list[Any]], keys: Any) -> list[np.ndarray]:
  """Returns the same leaves [n, ...] as `_at_once`, drawn one after the other."""
  return [np.stack(leaves) for leaves in zip(*(map(np.asarray, draw(key)) for key in keys))]


def _as_users(
  draw: Callable[[Any], list[Any]], keys: Any, at_once: list[Any]
) -> list[np.ndarray]:
  """Returns the leaves [n, ...] of all draws; the first draws run as users run them.

  A round is a function of its noise key, so draws made in both ways from the same keys are compared
  number by number. If they differ, all draws are made as users run them.
  """
  first = _one_by_one(draw, keys[:_ONE_BY_ONE])
  quick = [np.asarray(leaf) for leaf in at_once]
  for mine, leaf in zip(first, quick, strict=True):
    allowed = _ROUNDING * max(1.0, float(np.nan_to_num(np.abs(mine)).max(initial=0.0)))
    if not np.allclose(mine, leaf[: len(mine)], rtol=0, atol=allowed, equal_nan=True):
      return _one_by_one(draw, keys)
  later = [leaf[len(mine) :] for mine, leaf in zip(first, quick, strict=True)]
  return [np.concatenate(parts) for parts in zip(first, later, strict=True)]


def _algorithm(
  subject: str,
  worlds: dict,
  *arguments: Any,
  params: Params = _START,
  map_clients: Callable[[], MapClients] | None = None,
  choices: bool = False,
  **options: Any,
) -> Games:
  """Returns a function (kind, aggregate) -> games of the algorithm that `kind` makes.

  `kind` takes `aggregator=`, `map_clients=` and `key=`.

  Args:
    map_clients: function that makes the execution that users run. The first draws use it, and
      check the draws that are made at once. None: all draws are made at once.
  """
  keeps_state = subject in _ROWS and _ROWS[subject].keeps_state
  kept: dict[str, Any] = {"num_clients": 4} if keeps_state else {}
  kept |= {"choices": choices}
  at_once = functools.partial(_draws_at_once, choices) if choices else _draws_at_once

  def games(kind: Any, aggregate: Aggregate = federated.central) -> list[Game]:
    def build(execution: Callable[[], MapClients]) -> federated.FederatedAlgorithm:
      return kind(
        *arguments,
        key=jax.random.key(1),
        map_clients=execution(),
        aggregator=aggregate(the_plan(), jax.random.key(0)),
        **options,
      )

    quick = lambda: build(at_once)
    ways: dict[str, Any] = {"build": quick}
    if map_clients is not None:
      ways = {"build": functools.partial(build, map_clients), "at_once": quick}
    game_of = functools.partial(_game, params=params, **ways, **kept)
    return [
      game_of(case, worlds=pair, leaves=case == _LEAVES) for case, pair in worlds.items()
    ]

  return games


def _all(*several: Games) -> Games:
  return lambda *broken: [game for games in several for game in games(*broken)]


# --- aggregators: pure functions, so many draws at once


def _aggregator(make: Callable[..., federated.Aggregator]) -> Games:
  return lambda kind, *_: _of_messages(functools.partial(make, kind))


def _of_messages(make: Callable[..., federated.Aggregator]) -> list[Game]:
  """Returns games on two weighted messages; on one of the inputs the second is absent.

  `make` maps a noise key to the aggregator.
  """
  far = jnp.array([[-_FAR, 0.0], [_FAR, 0.0]])

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(0, None, None, None, None))
  def run(key: Any, messages: Any, mask: Any, later: Any, weights: Any) -> Any:
    aggregator = make(key)
    state = aggregator.init(messages[0])
    first, state = aggregator.update(messages, mask, state, weights)
    second, _ = aggregator.update(messages, later, state, weights)
    return jnp.concatenate([first, second])

  def game_of(case: str, messages: Any, weight: float, leaves: bool = False) -> Game:
    def release(keys: Any, world: int) -> Any:
      mask = jnp.array([True, bool(world)])
      later = mask.at[1].set(False) if leaves else mask
      return run(keys, messages, mask, later, jnp.array([1.0, weight]))

    return Game(case, _ADD, claims(the_plan().epsilon), drawn_by(release), linear)

  return [
    game_of(_JOINS, far, 1.0),
    game_of("with a weight of 1e6", far * 1e-6, 1e6),
    game_of("with a weight of NaN", far, math.nan),
    game_of("with NaN", far.at[1, 0].set(math.nan), 1.0),
    game_of("with 1e30", far.at[1, 0].set(1e30), 1.0),
    game_of(_LEAVES, far, 1.0, leaves=True),
  ]


def _client_noise(kind: Any, *_: Aggregate) -> list[Game]:
  """Returns games on a client's message to an untrusted server; the client's data are replaced."""
  client = federated.local_training(_LOSS, optax.sgd(0.5), weighting=federated.by_examples)
  local = kind(client, l2_clip_norm=_CLIP, noise_multiplier=2 * _Z)

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(0, None, None))
  def run(key: Any, x: Any, size: Any) -> Any:
    received = Received(jnp.zeros(2))
    state = local.init(received, None, size, key)
    state = local.step(received, state, x, jnp.ones(1, bool))
    sent = local.finish(received, state)[0]
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(sent)])

  def game_of(
    case: str, values: tuple[float, float], sizes: tuple[int, int] = (1, 1)
  ) -> Game:
    def release(keys: Any, world: int) -> Any:
      return run(keys, _client(values[world], 2), jnp.int32(sizes[world]))

    claimed = claims(functools.partial(local_epsilon, 2 * _Z))
    return Game(case, _REPLACE, claimed, drawn_by(release), linear)

  return [
    game_of("its data turn round", (-_FAR, _FAR)),
    game_of("its number of examples", (_FAR, _FAR), (1, 10**6)),
    game_of("its data become NaN", (-_FAR, math.nan)),
  ]


_SGD = optax.sgd(0.5)
_FAST = optax.sgd(1.0)
_NEAR = {_JOINS: ([-1.5], [-1.5, 1.5])}  # so that a choice of cluster survives the clip
_loop = lambda worlds, **options: _algorithm(
  "federated",
  worlds,
  federated.local_training(_LOSS, _SGD),
  optimizing_server(optax.adam(0.1)),
  **options,
)


def _games_of(name: str, worlds: dict = _WORLDS, **changes: Any) -> Games:
  """Returns the function of `_algorithm`, with the arguments that `described` lists as `played`.

  Args:
    changes: arguments that replace those of `played`; None leaves an argument out.
  """
  row = _ROWS[name]
  offered = {"client_tx": _SGD, "server_tx": _FAST}
  optimizers = [offered[each] for each in row.optimizers]
  arguments = {**row.played, **changes}
  options = {key: value for key, value in arguments.items() if value is not None}
  return _algorithm(name, worlds, _LOSS, *optimizers, **options)


# A part that stays with the client, whose large gradients must not show in what is sent.
_PARTS: dict[str, Any] = {"norm": _START, "w": _START}
_OF_PARTS = lambda w, x: 0.5 * jnp.sum((w["w"] + w["norm"] - x) ** 2)
_CLUSTERS: dict[str, Any] = {
  "params": np.array([[1, 0], [-1, 0]], np.float32),
  # Clusters follow from losses of released models, so client states differ between draws.
  "choices": True,
}
# Algorithms for which one joining client is not the only worst case. Their games have more inputs,
# other inputs or other settings.
_CLOSER: dict[str, Games] = {
  "fed_avg": _games_of("fed_avg", _WORLDS | _ALONE),
  "fed_nova": _all(
    _games_of("fed_nova"),
    _games_of("fed_nova", {"clients send their steps": _WORLDS[_JOINS]}, tau_eff=None),
  ),
  "scaffold": _all(
    _games_of("scaffold"),
    _games_of(
      "scaffold",
      {"the size of the cohort is not given": _WORLDS[_JOINS]},
      expected_cohort=None,
      params=np.zeros(_MANY, np.float32),
    ),
  ),
  "fed_bn": _algorithm("fed_bn", _WORLDS, _OF_PARTS, _SGD, _FAST, params=_PARTS),
  # Momentum gives the server's optimizer statistics, which the server releases, too.
  "mime_lite": _algorithm("mime_lite", _WORLDS, _LOSS, optax.sgd(0.5, momentum=0.9)),
  "hyp_cluster": _all(
    _games_of("hyp_cluster", _ALONE | _WORLDS | _NEAR, **_CLUSTERS),
    _games_of(
      "hyp_cluster",
      {"models are divided by their members": _NEAR[_JOINS]},
      cluster_share=None,
      **_CLUSTERS,
    ),
  ),
}

GAMES: dict[str, Games] = {
  **{name: _CLOSER.get(name) or _games_of(name) for name in _ROWS},
  "federated": _all(  # the loop itself, with the parts of FedAvg
    _loop(_ALONE),
    _loop(
      {"one by one: loop_clients": _WORLDS[_JOINS]}, map_clients=federated.loop_clients
    ),
    _loop({_LEAVES: _WORLDS[_JOINS]}),
    _loop(
      {"one by one: vmap_clients": _WORLDS[_JOINS]}, map_clients=federated.vmap_clients
    ),
  ),
  "dp_mean": _aggregator(
    lambda kind, key: kind(the_plan().transform(key), l2_clip_norm=_CLIP)
  ),
  "central": _aggregator(lambda kind, key: kind(the_plan(), key)),
  "client_noise": _client_noise,
}
NO_CLAIM = {
  **{row.make.__name__: row.no_claim for row in described.aggregators().values()},
  "fine_tune": "what it makes is sent to nobody",
  **dict.fromkeys(
    ("local_training", "full_gradient", "apfl_client", "mean_grad", "batch_loss"),
    "the client inside an algorithm, played with it",
  ),
  **dict.fromkeys(
    ("by_sums", "robust"), "what an aggregator is made of, played with each aggregator"
  ),
  "compressed": "changes what a client sends, before the clip that is played",
}

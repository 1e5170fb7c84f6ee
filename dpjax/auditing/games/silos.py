"""Games against silos: one record more in one silo, all rounds, every message of the silo seen.

A server that nobody trusts sends what it likes: here its first model in each round. It keeps all
messages of the silo. Silos do not see each other, so one run of many silos with the same records is
as many draws, whose keys and samples differ.
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

from dpjax import federated, sampling, trees
from dpjax.auditing.games.federated import visible_numbers
from dpjax.auditing.games.game import Game, claims, key, linear
from dpjax.auditing.games.plans import small_plan
from dpjax.data import Federation, from_arrays
from dpjax.federated.aggregation import Aggregator
from dpjax.federated.silos import Silos
from dpjax.noise import source
from dpjax.plan import Plan
from dpjax.types import Example

ROUNDS = 2
_STEPS = 2  # local steps of a round
_ADD = "add_or_remove_one"
_FAR = 1e6
# Enough numbers to see the spread of the noise, which an undeclared size would change.
_WIDTH = 64
_RATE = 0.5
_LOSS = lambda w, example: 0.5 * jnp.sum((w - example.x) ** 2)

_OF_PARTS = lambda w, example: 0.5 * jnp.sum((w["w"] + w["norm"] - example.x) ** 2)

Make = Callable[..., federated.FederatedAlgorithm]  # (silos=, **common)


def _in_parts(**common: Any) -> federated.FederatedAlgorithm:
  """Returns FedBN, whose silos keep a half of the parameters."""
  algorithm = federated.fed_bn(_OF_PARTS, optax.sgd(_RATE), **common)
  both = lambda params, count: algorithm.init({"norm": params, "w": params}, count)
  return algorithm._replace(init=both)


ALGORITHMS: dict[str, Make] = {
  "fed_avg": functools.partial(federated.fed_avg, _LOSS, optax.sgd(_RATE)),
  "fed_prox": functools.partial(federated.fed_prox, _LOSS, optax.sgd(_RATE), mu=0.5),
  "scaffold": functools.partial(
    federated.scaffold,
    _LOSS,
    optax.sgd(_RATE),
    client_learning_rate=_RATE,
    num_clients=2,
  ),
  "mr_mtl": functools.partial(federated.mr_mtl, _LOSS, optax.sgd(_RATE), lam=0.5),
  "fed_bn": _in_parts,
}
_JOINS = "a record joins another"
_WORLDS: dict[str, tuple[list[float], list[float]]] = {
  _JOINS: ([-_FAR], [-_FAR, _FAR]),
  "NaN joins": ([-_FAR], [-_FAR, math.nan]),
  "a record in an empty silo": ([], [_FAR]),
}


def the_plan(prob: float = 1.0) -> Plan:
  """Returns the plan of each silo; with `prob` 1 sampling hides nothing."""
  sampler = sampling.PoissonSampler(sampling_prob=prob, capacity=8)
  return small_plan(sampler=sampler, noise_multiplier=2.5, num_steps=ROUNDS * _STEPS)


def _all_messages() -> Aggregator:
  """Returns an aggregator whose state holds the messages of the last round, and whose mean is 0."""

  def update(messages: Any, mask: Any, state: Any, weights: Any = None) -> Any:
    del mask, state, weights
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), messages), messages

  return Aggregator(trees.zeros, update)


def _federation(records: list[float], count: int) -> tuple[Federation, Example]:
  """Returns `count` silos with the same records, and the rows of all. Rows may hold NaN, which no
  data set may."""
  width = max(1, len(records))
  x = np.zeros((count, width, _WIDTH), np.float32)
  x[:, : len(records), 0] = records
  x = x.reshape(-1, _WIDTH)
  y = np.zeros(len(x), np.int32)
  rows = np.arange(len(x)).reshape(count, width)[:, : len(records)]
  return Federation(from_arrays(np.zeros_like(x), y, num_classes=1), [*rows]), Example(x, y)


def _game(
  case: str, kind: Callable[..., Silos], make: Make, plan: Plan, worlds: Any
) -> Game:
  @functools.cache
  def algorithm_of(count: int) -> federated.FederatedAlgorithm:
    return make(
      silos=kind((plan,) * count, num_rounds=ROUNDS),
      key=jax.random.key(0),
      map_clients=federated.vmap_clients(clients_per_block=count),
      aggregator=_all_messages(),
    )

  def outputs(world: int, seed: int, n: int) -> np.ndarray:
    federation, data = _federation(worlds[world], n)
    algorithm = algorithm_of(n)
    state = algorithm.init(jnp.zeros(_WIDTH), n)
    state = state._replace(key=source.to_words(key(world, seed)))
    leaves: list[Any] = []
    for cohort in algorithm.cohorts(federation, None, rng=2 * seed + world):
      state, _ = algorithm.round(state, cohort._replace(data=data))
      leaves += jax.tree.leaves(state.aggregator)
      # What a silo keeps follows from its noisy steps, too, and may be published.
      if state.memories is not None:
        leaves += jax.tree.leaves(state.memories.all())
    # Messages are padded to one of few numbers of clients.
    return np.concatenate([visible_numbers(leaf[:n]) for leaf in leaves], axis=1)

  return Game(case, _ADD, claims(plan.epsilon), outputs, linear)


def games(
  kind: Callable[..., Silos], algorithms: dict[str, Make] | None = None
) -> list[Game]:
  """Returns the games of silos, the strongest first.

  Args:
    kind: `Silos`, or a broken one.
    algorithms: name -> function of (silos=, **common), to play another algorithm.
  """
  makes = ALGORITHMS if algorithms is None else algorithms
  played = [
    _game(f"{name}: {_JOINS}", kind, make, the_plan(), _WORLDS[_JOINS])
    for name, make in makes.items()
  ]
  name, make = next(iter(makes.items()))
  others = [
    _game(f"{name}: {case}", kind, make, the_plan(), pair)
    for case, pair in _WORLDS.items()
    if case != _JOINS
  ]
  sampled = _game(f"{name}: sampled", kind, make, the_plan(0.5), _WORLDS[_JOINS])
  return [*played, *others, sampled]


GAMES = {"Silos": games}

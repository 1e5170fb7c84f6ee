"""Games against the proofs of `dpjax.relevance`, stage by stage and method by method.

| subject              | what is played                                                       |
| -------------------- | -------------------------------------------------------------------- |
| features:NAME        | one record's noisy features (stage C), local                         |
| relevance:NAME       | the noisy mean relevance of one record (stage B)                     |
| labels:NAME          | one record's response (stage L), local                               |
| method:radp_rigorous | features and response together, at the cost in the method's ledger   |
| method:NAME          | the plan that the method hands to its trainer, at the cost it prints |

A method runs once, with a trainer that only records its arguments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np

from dpjax import data, relevance
from dpjax.auditing.games import plans, samplers
from dpjax.auditing.games.game import (
  Claim,
  Game,
  frequency,
  key,
  linear,
  repeats,
  together,
  two_sided,
)
from dpjax.relevance import feature_shares as shares_lib
from dpjax.relevance import labels as labels_lib
from dpjax.relevance import pipeline, rigorous, settings, train
from dpjax.relevance import record_noise as noise_lib
from dpjax.zoo import networks

_RELATION = "replace_one"
# Delta of the stages that need a delta.
_DELTA = 0.01
_BETA = np.array([0.5, 0.5])
_CLASSES = 3

Worlds = tuple[np.ndarray, np.ndarray]


def names() -> tuple[str, ...]:
  """Returns the names of all methods, and of all kinds of features, relevance noise and labels."""
  kinds = {
    "method": tuple(pipeline.METHODS),
    "features": settings.FEATURES,
    "relevance": settings.RELEVANCE_NOISE,
    "labels": settings.LABELS,
  }
  return tuple(f"{kind}:{name}" for kind, methods in kinds.items() for name in methods)


# --- stages


def _features(name: str) -> Callable[..., list[Game]]:
  def games(noisy_records: Callable = noise_lib.noisy_records) -> list[Game]:
    how = settings.Rigorous(features=name, shuffle=False, delta=_DELTA, pool=1, clip=0.25)
    # If two releases share their noise, only their difference shows it: `repeats` learns from that.
    adversary = linear if name == "gaussian" else together(two_sided, repeats)

    def game_of(case: str, epsilon: float, worlds: Worlds) -> Game:
      features = functools.cache(
        lambda: rigorous.feature_noise(_BETA, how, epsilon=epsilon, channels=1)
      )

      def outputs(world: int, seed: int, n: int) -> np.ndarray:
        record = np.asarray(worlds[world], np.float32)
        # The method is run, so that records which it refuses are refused here, too.
        job = _job(np.tile(record[None], (4, 1)), rigorous=how)
        with _record("fit"), np.errstate(over="ignore"):
          relevance.run("radp_rigorous", job)
        with np.errstate(over="ignore"):
          x = rigorous.clip_records(np.tile(record[None], (n, 1)), _BETA, how)
        return noisy_records(
          key(world, seed),
          np.arange(n),
          x,
          features().scales,
          mechanism=features().mechanism,
        )

      delta = _DELTA if name in ("laplace_pld", "gaussian") else 0.0
      claims = (Claim(epsilon, delta),)
      return Game(case, _RELATION, claims, outputs, adversary)

    corner = (
      ([1.0, 0.0], [0.0, 1.0]) if name == "laplace_clipped" else ([0.0] * 2, [1.0] * 2)
    )
    corner = np.array(corner[0]), np.array(corner[1])
    far = (np.array([-1e30, 0.5]), np.array([1e30, 0.5]))
    return [
      game_of("opposite corners", 1.0, corner),
      game_of("opposite corners, high epsilon", 4.0, corner),
      game_of("outside of the range", 1.0, (np.array([-3.0, 0.5]), np.array([4.0, 0.5]))),
      game_of("-1e30, 1e30", 1.0, far),
    ]

  return games


def _relevance(name: str) -> Callable[..., list[Game]]:
  """Returns a function that makes games on one record, whose relevance moves to another feature."""

  def games(noisy_relevance: Callable = rigorous.noisy_relevance) -> list[Game]:
    delta = _DELTA if name == "gaussian" else 0.0
    # If two releases share their noise, only their difference shows it: `repeats` learns from that.
    adversary = linear if name == "gaussian" else together(two_sided, repeats)

    def game_of(case: str, epsilon: float, scores: Worlds) -> Game:
      def outputs(world: int, seed: int, n: int) -> np.ndarray:
        share = shares_lib.shares(np.asarray(scores[world])[None]).mean(axis=0)
        # Each entry has independent noise, so one call on n rows makes n draws.
        rows = np.tile(share[None], (n, 1))
        return noisy_relevance(
          key(world, seed), rows, num_records=1, epsilon=epsilon, delta=delta
        )

      claims = (Claim(epsilon, delta),)
      return Game(case, _RELATION, claims, outputs, adversary)

    strange = (np.array([math.nan, 1.0]), np.array([1e300, -1e300]))
    return [
      game_of("the other feature", 1.0, (np.array([1.0, 0.0]), np.array([0.0, -5.0]))),
      game_of(
        "the other feature, high epsilon", 4.0, (np.array([1.0, 0.0]), np.array([0.0, 9.0]))
      ),
      game_of("NaN, 1e300", 1.0, strange),
    ]

  return games


def _responses(noisy_labels: Callable = labels_lib.noisy_labels) -> list[Game]:
  def game_of(case: str, epsilon: float, labels: tuple[int, int]) -> Game:
    def outputs(world: int, seed: int, n: int) -> np.ndarray:
      true_labels = np.full(n, labels[world])
      return noisy_labels(
        key(world, seed), np.arange(n), true_labels, epsilon=epsilon, num_classes=_CLASSES
      )[:, None].astype(np.float64)

    claims = (Claim(epsilon, 0.0),)
    return Game(case, _RELATION, claims, outputs, frequency)

  return [
    game_of("a singleton class", 0.5, (0, 2)),
    game_of("high epsilon", 4.0, (1, 2)),
    game_of("labels that there are not", 1.0, (-1, 99)),
  ]


# --- methods


def _job(x: Any = None, epsilon: float = 2.0, **fields: Any) -> relevance.Inputs:
  x = np.array([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]) if x is None else x
  y = np.arange(len(x)) % _CLASSES
  x = np.asarray(x, np.float32)
  rows = data.from_arrays(x, y, num_classes=_CLASSES, nominal_size=len(x))
  test = data.from_arrays(np.ones((2, 2), np.float32), [0, 1], num_classes=_CLASSES)
  net = networks.build("linear", num_classes=_CLASSES)
  keys = relevance.Keys(jax.random.key(0), jax.random.key(1), 0, 2**100 + 1)
  fields = {"training": settings.Training(num_epochs=2, batch_size=2), **fields}
  return relevance.Inputs(
    epsilon=epsilon,
    train=rows,
    test=test,
    nets=relevance.Nets(net, net, net, net),
    keys=keys,
    **fields,
  )


def _record(trainer: str) -> Any:
  """Returns a context in which a training is a mock that learns nothing and records arguments."""

  def nothing(loss: Any, params: Any, *_: Any, **__: Any) -> train.Steps:
    begun = lambda: (params, None)
    return train.Steps(
      train.SECOND, 0, 1, begun, lambda state, draw: state, lambda t: iter(())
    )

  return mock.patch.object(train, trainer, side_effect=nothing)


def _method(name: str) -> Callable[..., list[Game]]:
  """Returns a function that makes games on a method's plan; other records have no gradient."""

  def game_of(relation: str, attacked: Callable[[Any], Any]) -> Game:
    private = settings.Private(neighboring_relation=relation, delta=_DELTA)
    with _record("fit_private") as trainer:
      printed = relevance.run(name, _job(epsilon=1.0, private=private)).privacy
    # The fourth argument of `fit_private` is the plan.
    plan = attacked(trainer.call_args_list[0].args[3])
    worlds = samplers.worlds(relation, 0.0)
    return plans.game(
      f"{relation}, alone",
      plan,
      worlds,
      epsilon=printed.epsilon,
      delta=printed.delta,
    )

  return lambda attacked=lambda plan: plan: [
    game_of(r, attacked) for r in settings.RELATIONS
  ]


def _radp(noisy_records: Callable = noise_lib.noisy_records) -> list[Game]:
  """Returns games on a record that moves to the opposite corner and another label.

  The claim is the total of the method's ledger.
  """
  how = settings.Rigorous(features="laplace", shuffle=False, pool=1)
  corners = (np.zeros(2, np.float32), np.ones(2, np.float32))

  @functools.cache
  def run() -> Any:
    with _record("fit"):
      return relevance.run("radp_rigorous", _job(rigorous=how, epsilon=2.0))

  def outputs(world: int, seed: int, n: int) -> np.ndarray:
    noise = run().noise
    details = run().privacy.details
    x = noisy_records(
      key(world, seed),
      np.arange(n),
      np.tile(corners[world][None], (n, 1)),
      noise.scales,
      mechanism=noise.mechanism,
      grid=noise.grid,
    )
    y = labels_lib.noisy_labels(
      key(world, seed + 1),
      np.arange(n),
      np.full(n, world),
      epsilon=details["epsilon_labels"],
      num_classes=_CLASSES,
    )
    return np.concatenate([x, np.eye(_CLASSES)[y]], axis=1)

  claims = (Claim(2.0, 0.0),)
  case = "opposite corners with another label"
  return [Game(case, _RELATION, claims, outputs, linear)]


_PLANNED = ("radp_dpsgd", "dpsgd", "tempered", "dp_adam", "dpdligdo", "dp_sgld")

GAMES: dict[str, Callable[..., list[Game]]] = {
  **{
    f"features:{name}": _features(name)
    for name in ("laplace", "laplace_clipped", "laplace_pld", "gaussian")
  },
  **{f"relevance:{name}": _relevance(name) for name in ("laplace", "gaussian")},
  "labels:randomized_response": _responses,
  "method:radp_rigorous": _radp,
  **{f"method:{name}": _method(name) for name in _PLANNED},
}
_CLAIMED = "claims an epsilon, proves none; `launch.relevance --audit` attacks it"
NO_CLAIM = {
  "method:radp": _CLAIMED,
  "method:adlm": _CLAIMED,
  "method:ilm": _CLAIMED,
  "method:no_dp": "no privacy",
  "relevance:entropy": "refused by `Rigorous`",
  "labels:public": "labels count as public",
  "labels:raw": "refused by `Rigorous`",
}

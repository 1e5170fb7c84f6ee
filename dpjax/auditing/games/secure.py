"""Games against noise inside a secure sum: one client's message changes.

The server sees the sum of the integers alone, here as the mean that it releases. Neighbours
are those of the guarantee: the same clients, one of which sends zeros (replace_special) or
something else (replace_one). Each client adds its share of the noise in both cases.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dpjax.auditing.games.game import Game, claims_of_event, linear
from dpjax.secure.distributed_noise import SkellamSum
from dpjax.secure.sums import PlainSum

_CLIENTS = 3
_LEAST = 2
_DIM = 2
_Z = 1.5
_CLIP = 0.5
_FAR = 1e6
# Share of the requested draws that is made. It is small, since a draw is a round on the host.
_SHARE = 0.35
# Number of draws in one call. It may be small, since the host compiles nothing for it.
_AT_ONCE = 100
_ZERO = "replace_special"
_REPLACE = "replace_one"

Kind = Callable[..., Any]  # `skellam_mean`, or a broken one
# Case -> relation, first number of the client's message on either input, number of clients.
_WORLDS: dict[str, tuple[str, float, float, int]] = {
  "its message becomes zeros": (_ZERO, 0.0, _FAR, _LEAST),
  "its message turns round": (_REPLACE, -_FAR, _FAR, _LEAST),
  "its message becomes NaN, and more are left": (_ZERO, math.nan, _FAR, _CLIENTS),
}


def the_mechanism() -> SkellamSum:
  """Returns the Skellam sum of the games: up to three clients, who send two numbers each."""
  return SkellamSum.sized(
    noise_multiplier=_Z,
    l2_clip_norm=_CLIP,
    dim=_DIM,
    bits=12,
    max_clients=_CLIENTS,
    min_survivors=_LEAST,
  )


def skellam_games(kind: Kind, mechanism: SkellamSum | None = None) -> list[Game]:
  """Returns games where one client's message changes; the strongest first.

  Args:
    mechanism: mechanism whose event accounts for `kind`; None: `the_mechanism()`.
  """
  accounted = the_mechanism() if mechanism is None else mechanism

  @functools.cache
  def aggregator(seed: int) -> Any:
    return kind(PlainSum(min_survivors=_LEAST), accounted, seed=seed)

  def game_of(case: str) -> Game:
    relation, *worlds, size = _WORLDS[case]

    def outputs(world: int, seed: int, n: int) -> np.ndarray:
      messages = np.zeros((size, accounted.dim), np.float32)
      messages[:, 0] = [-_FAR] * (size - 1) + [worlds[world]]
      run = aggregator(2 * seed + world)
      there = np.ones(size, bool)
      draws = (run.update(messages, there, draw)[0] for draw in range(n))
      return np.array([size * np.asarray(drawn) for drawn in draws])

    prices = claims_of_event(accounted.event, relation, accountant="rdp")
    return Game(case, relation, prices, outputs, linear, draws=_SHARE, at_once=_AT_ONCE)

  return [game_of(case) for case in _WORLDS]


GAMES: dict[str, Callable[[Kind], list[Game]]] = {"skellam_mean": skellam_games}
NO_CLAIM = {
  "secure_mean": "hides messages behind their sum, which it releases as it is",
  "forgiving": "goes on after a round that released nothing",
}

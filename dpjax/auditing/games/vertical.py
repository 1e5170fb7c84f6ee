"""Games against releases of parties with different columns: noisy statistics of a regression."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpjax.auditing.games.game import Game, claims, drawn_by, linear
from dpjax.secure.linear_regression import PrivateStatistics

_ADD = "add_or_remove_one"
_REPLACE = "replace_one"
_FAR = 1e30

Rows = tuple[Any, Any]  # (x [n, f], y [n]) of one client


def _rows(*pairs: tuple[float, float]) -> Rows:
  return np.array([[x] for x, _ in pairs]).reshape(-1, 1), np.array([y for _, y in pairs])


_OTHER = _rows((-0.5, 0.2))
# Case -> relation, noise multiplier, rows of one client on either input. The other
# client has `_OTHER`.
_WORLDS: dict[str, tuple[str, float, tuple[Rows, Rows]]] = {
  "a row of the largest norm added": (_ADD, 1.0, (_rows(), _rows((_FAR, _FAR)))),
  "a row turns round": (_REPLACE, 2.0, (_rows((-_FAR, _FAR)), _rows((_FAR, _FAR)))),
  "NaN added": (_ADD, 1.0, (_rows(), _rows((float("nan"), 1.0)))),
}


def _statistics(kind: Callable[..., Any] = PrivateStatistics) -> list[Game]:
  def game_of(case: str) -> Game:
    relation, noise, clients = _WORLDS[case]
    statistics = kind(
      noise_multiplier=noise, x_bound=1.0, y_bound=1.0, neighboring_relation=relation
    )

    @functools.cache
    def released() -> Any:
      return jax.jit(jax.vmap(statistics.noisy, in_axes=(0, None)))

    def release(keys: Any, world: int) -> Any:
      vector = statistics.exact([_OTHER, clients[world]])
      with jax.enable_x64(True):
        return released()(keys, vector)

    claimed = claims(lambda delta: statistics.epsilon(delta=delta))
    return Game(case, relation, claimed, drawn_by(release), linear)

  return [game_of(case) for case in _WORLDS]


GAMES: dict[str, Callable[..., list[Game]]] = {"PrivateStatistics": _statistics}
NO_CLAIM: dict[str, str] = {}

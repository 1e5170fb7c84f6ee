"""Games against a model that two parties train on shares and open with noise.

The adversary is one of the parties: it sees the opened weights, and subtracts its own noise. The
weights before noise are computed from the same integers in the clear, so that no draw needs a
protocol. The claim's sensitivity covers what the protocol's random roundings add to the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dpjax.auditing.games.game import Game, claims, linear
from dpjax.secure.mpc.output_noise import OutputNoise

_REPLACE = "replace_one"
_FAR = 1e30
_NAN = float("nan")
# Share of the requested draws that is made. It is below 1, since exact integer noise is slow.
_SHARE = 0.7


Rows = list[tuple[float, float]]  # (x, y) of each row
# Case -> noise multiplier, settings of the training, rows of two neighbours.
_WORLDS: dict[str, tuple[float, dict[str, Any], tuple[Rows, Rows]]] = {
  # The penalty holds the weights near 0. There the errors of labels 0 and 1 are about 1/2 and -1/2,
  # which makes this pair nearly the worst.
  "the label of the only row": (
    1.0,
    {"num_rows": 1, "l2_penalty": 1000.0, "num_steps": 3, "feature_norm": 4.0},
    ([(_FAR, 0.0)], [(_FAR, 1.0)]),
  ),
  "a row beyond the clip norm turns round": (
    1.0,
    {"num_rows": 2, "l2_penalty": 4.0, "num_steps": 8, "frac_bits": 12},
    ([(_FAR, 1.0), (0.0, 1.0)], [(-_FAR, 1.0), (0.0, 1.0)]),
  ),
  "a row becomes NaN": (
    1.0,
    {"num_rows": 2, "l2_penalty": 4.0, "num_steps": 8, "frac_bits": 12},
    ([(1.0, 0.0), (1.0, 1.0)], [(_NAN, 1.0), (1.0, 1.0)]),
  ),
}


def views(mechanism: OutputNoise, weights: np.ndarray, seed: int, n: int) -> np.ndarray:
  """Returns n openings [n, d + 1, k], from which one party has subtracted its own noise.

  Args:
    weights: weights [d + 1, k] before noise.
  """
  rng = np.random.Generator(np.random.Philox(seed))
  return weights + mechanism.noise(rng, n) * 2.0**-mechanism.frac_bits


def _output_noise(kind: Callable[..., Any] = OutputNoise) -> list[Game]:
  def game_of(case: str) -> Game:
    noise, numbers, data = _WORLDS[case]
    mechanism = kind(num_features=1, noise_multiplier=noise, **numbers)

    @functools.cache
    def weights(world: int) -> np.ndarray:
      x, y = np.array(data[world]).T
      return mechanism.in_the_clear(
        mechanism.rows(x[:, None]), mechanism.labels(y[:, None])
      )

    def outputs(world: int, seed: int, n: int) -> np.ndarray:
      # A broken twin opens its model in another way.
      opened = getattr(mechanism, "views", functools.partial(views, mechanism))
      return opened(weights(world), 2 * seed + world, n).reshape(n, -1)

    claimed = claims(lambda delta: mechanism.epsilon(delta=delta))
    return Game(case, _REPLACE, claimed, outputs, linear, draws=_SHARE)

  return [game_of(case) for case in _WORLDS]


GAMES: dict[str, Callable[..., list[Game]]] = {"OutputNoise": _output_noise}
NO_CLAIM: dict[str, str] = {}

"""Games against samplers, each in a plan that believes its event.

| relation          | the two data sets                                                       |
| ----------------- | ----------------------------------------------------------------------- |
| add_or_remove_one | others; the same with one more record, first or last, pulling one way   |
| replace_special   | the record's gradient is zero in one of them                            |
| replace_one       | it pulls one way, and the other                                         |

The others have no gradient (nothing hides the record) or pull the other way, all alike (then
whoever is pushed out of a batch shows). `GAMES` names the settings by which a sampler is
played; the relations are those that the sampler says it is proved under.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dpjax.auditing.games import plans
from dpjax.auditing.games.game import Game
from dpjax.noise.correlated import BandedToeplitz
from dpjax.plan import Plan
from dpjax.types import NeighboringRelation

ROOM = "samplers"
OTHERS = 3
STEPS = 2
MUCH, LITTLE = 1.2, 0.9  # noise, as multiples of the sensitivity
_DELTA = 1e-5

MakePlan = Callable[..., Plan]


def worlds(relation: str, others: float) -> tuple[np.ndarray, np.ndarray]:
  """The gradients of two neighbours, in clip norms.

  >>> worlds("replace_one", 0.0)
  (array([-1.,  0.,  0.,  0.]), array([1., 0., 0., 0.]))
  """
  rest = np.full(OTHERS, others)
  if relation == NeighboringRelation.ADD_OR_REMOVE_ONE:
    return rest, np.append(1.0, rest)
  first = 0.0 if relation == NeighboringRelation.REPLACE_SPECIAL else -1.0
  return np.append(first, rest), np.append(1.0, rest)


def _games(
  subject: str, sampler: Any, make_plan: MakePlan, *, tag: str = "", **options: Any
) -> list[Game]:
  """Every relation with nobody else in the batch; the first one also against a crowd."""
  made = functools.partial(
    make_plan,
    sampler=sampler,
    l2_clip_norm=0.5,
    normalize_by=2.0,
    num_steps=STEPS,
    delta=_DELTA,
    **options,
  )
  cases = [(relation, 0.0, MUCH) for relation in sampler.relations]
  cases.append((sampler.relations[0], -1.0, LITTLE))
  return [_game(subject, made, *case, tag) for case in cases]


def _game(
  subject: str, made: MakePlan, relation: str, others: float, z: float, tag: str
) -> Game:
  double = 2 if relation == NeighboringRelation.REPLACE_ONE else 1
  plan = made(noise_multiplier=z * double, neighboring_relation=relation)
  crowd = "against a crowd, little noise" if others else "alone"
  case = f"{relation}, {crowd}{tag}"
  return plans.game(ROOM, subject, case, plan, worlds(str(relation), others))


def _of(subject: str, *settings: dict[str, Any]) -> Callable[..., list[Game]]:
  def games(kind: Any, make_plan: MakePlan = Plan) -> list[Game]:
    found = []
    for one in settings:
      tag = f" ({', '.join(f'{k} {v}' for k, v in one.items())})"
      found += _games(subject, kind(**one), make_plan, tag=tag)
    return found

  return games


def _banded(subject: str, settings: dict[str, Any]) -> Callable[..., list[Game]]:
  """Also with correlated noise."""
  plain = _of(subject, settings)

  def games(kind: Any, make_plan: MakePlan = Plan) -> list[Game]:
    strategy = BandedToeplitz((1.0, 0.5))
    made = functools.partial(make_plan, correlation=strategy)
    correlated = _games(subject, kind(**settings), made, tag=", banded noise")
    return [*plain(kind, make_plan), correlated[0]]

  return games


_SIZE, _ROOM = OTHERS + 1, OTHERS + 2

GAMES: dict[str, Callable[..., list[Game]]] = {
  "PoissonSampler": _of("PoissonSampler", {"prob": 0.5, "capacity": _ROOM}),
  "UserSampler": _of("UserSampler", {"prob": 0.2, "capacity": _ROOM}),
  "TruncatedPoissonSampler": _of(
    "TruncatedPoissonSampler",
    {"prob": 0.5, "capacity": 3, "num_examples": _SIZE},
    {"prob": 0.7, "capacity": 1, "num_examples": _SIZE},
  ),
  "FixedSizeSampler": _of(
    "FixedSizeSampler",
    {"batch_size": _SIZE, "num_examples": _SIZE},
    {"batch_size": 1, "num_examples": _SIZE},
  ),
  "ShuffledSampler": _of("ShuffledSampler", {"batch_size": 2, "num_examples": _SIZE}),
  "CyclicSampler": _banded("CyclicSampler", {"steps_per_pass": 2, "num_examples": _SIZE}),
  "CyclicPoissonSampler": _banded(
    "CyclicPoissonSampler", {"prob": 0.5, "num_groups": 2, "capacity": _ROOM}
  ),
  "BallsInBinsSampler": _banded("BallsInBinsSampler", {"num_bins": 2, "capacity": _ROOM}),
  "MinSepSampler": _banded(
    "MinSepSampler", {"prob": 1.0, "min_sep": 2, "num_steps": STEPS, "capacity": _ROOM}
  ),
}

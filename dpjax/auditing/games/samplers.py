"""Games against samplers, each in a plan that trusts its event.

| relation          | the two data sets                                                       |
| ----------------- | ----------------------------------------------------------------------- |
| add_or_remove_one | others; others and the record, which comes first and pulls one way      |
| replace_special   | others and the record, whose gradient is zero in the first data set     |
| replace_one       | others and the record, which pulls the other way in the first data set  |

Other records have no gradient, so that nothing hides the record. Or all of them pull the other way:
then it shows if the record pushes one of them out of a batch. `Sampler.small` has the settings to
play; the relations are those of the sampler's `proof`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dpjax.accounting.proved import NeighboringRelation
from dpjax.auditing.games import plans
from dpjax.auditing.games.game import Game
from dpjax.noise import NoiseShape
from dpjax.noise.correlated import BandedToeplitz
from dpjax.plan import Plan
from dpjax.sampling import Sampler

OTHERS = 3
# Noise multipliers for much and for little noise, in multiples of the sensitivity.
MUCH = 1.2
LITTLE = 0.9

MakePlan = Callable[..., Plan]


def worlds(relation: str, others: float, *, rows: int = 1) -> tuple[np.ndarray, np.ndarray]:
  """Returns the gradients of two neighbours, in clip norms; the record owns `rows` rows.

  >>> worlds("replace_one", 0.0)
  (array([-1.,  0.,  0.,  0.]), array([1., 0., 0., 0.]))
  """
  unchanged = np.full(OTHERS, others)
  if relation == NeighboringRelation.ADD_OR_REMOVE_ONE:
    return unchanged, np.append(np.ones(rows), unchanged)
  first = 0.0 if relation == NeighboringRelation.REPLACE_SPECIAL else -1.0
  return np.append(np.full(rows, first), unchanged), np.append(np.ones(rows), unchanged)


def _games(
  sampler: Any, make_plan: MakePlan, *, tag: str = "", **options: Any
) -> list[Game]:
  """Returns one game for each relation, in which other records have no gradient, and a last game.

  The last game is of the first relation again. In it, other records pull the other way.
  """
  build = functools.partial(plans.small_plan, make_plan, sampler=sampler, **options)
  relations = sampler.proved_under
  cases = [(relation, 0.0, MUCH) for relation in relations]
  cases.append((relations[0], -1.0, LITTLE))
  games = []
  for relation, others, z in cases:
    # Replacing a record moves the sum by two clip norms.
    double = 2 if relation == NeighboringRelation.REPLACE_ONE else 1
    plan = build(noise_multiplier=z * double, neighboring_relation=relation)
    crowd = "against a crowd, little noise" if others else "alone"
    case = f"{relation}, {crowd}{tag}"
    sides = worlds(relation, others, rows=plan.sampler.rows_of_record)
    games.append(plans.game(case, plan, sides))
  return games


def games(kind: type[Sampler], make_plan: MakePlan = Plan) -> list[Game]:
  """Returns the games of one class of samplers, on its own small settings.

  A sampler that bounds participation is also played under correlated noise.
  """
  settings = kind.small
  all_games = []
  for options in settings:
    tag = f" ({', '.join(f'{k} {v}' for k, v in options.items())})"
    all_games += _games(kind(**options), make_plan, tag=tag)
  first = kind(**settings[0])
  if first.participation is not None:
    shape = NoiseShape(correlation=BandedToeplitz((1.0, 0.5)))
    build = functools.partial(make_plan, noise_shape=shape)
    all_games.append(_games(first, build, tag=", banded noise")[0])
  return all_games

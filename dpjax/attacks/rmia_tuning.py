"""Tuning of RMIA on shadow models: gamma and temperature, as its authors choose them.

Each shadow model plays the target once, if enough others are left. Its shadows are the others,
except one that holds exactly the records that it lacks. The members of a shadow are known, so each
setting has a true positive rate on it. The real target's members are not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dpjax import validate
from dpjax.attacks import roc
from dpjax.attacks.membership import (
  Evidence,
  beaten_share,
  relative_confidence,
  rmia,
  shadows_of,
)
from dpjax.types import HostArray
from dpjax.validate import UserError

GAMMAS = (1.0, 1.1, 1.5, 2.0)
TEMPERATURES = (0.5, 1.0, 2.0, 4.0, 8.0)
FPR = 0.01


class RmiaSettings(NamedTuple):
  """Arguments of `rmia` that `tune_rmia` chose."""

  gamma: float
  temperature: float


def tune_rmia(
  evidence: Evidence,
  *,
  gammas: Sequence[float] = GAMMAS,
  temperatures: Sequence[float] = TEMPERATURES,
  fpr: float = FPR,
  offline: bool = False,
  offline_a: float = 0.3,
) -> RmiaSettings:
  """Returns the gamma and temperature that find the most members of the shadow models.

  The best pair has the largest true positive rate at `fpr`, in the mean over the shadow models.
  Ties go to the smaller gamma, then to the larger mean AUC, then to the earlier pair. The target's
  own scores are not read. For one model a larger gamma only ties records and reorders none. So if
  `gammas` holds 1, the chosen gamma is 1.

  Args:
    gammas, temperatures: values to try, in all pairs.
    fpr: false positive rate in (0, 1).
    offline, offline_a: as in `rmia`.

  Raises UserError for no pair to try, a value out of its range, or no shadow that can play the
  target. A shadow can play it if at least two other shadows remain, not counting its complement
  (which holds exactly the records that it lacks). Each record must be out of at least one of these
  and, online, in at least one.

  >>> from dpjax.attacks.shadows import random_halves
  >>> held, rng = random_halves(9, 300, seed=0), np.random.default_rng(0)
  >>> odds = 9 + 2 * held + rng.standard_normal(300) + rng.standard_normal((9, 300))
  >>> tune_rmia(Evidence(odds[0], odds[1:], held[1:])).gamma
  1.0
  """
  validate.open_unit(fpr=fpr)
  pairs = [(gamma, temperature) for temperature in temperatures for gamma in gammas]
  if not pairs:
    raise UserError("gammas, temperatures: must each hold at least one value to try")
  for gamma in gammas:
    validate.positive(gammas=gamma)
    if gamma < 1:
      raise UserError("must be >= 1", field="gammas", value=gamma)
  games = list(_games(evidence, offline))
  if not games:
    raise UserError(
      f"none of {len(evidence.shadows)} can play the target: must leave two "
      "others, and each record in one and out of one of them; use rmia, or more "
      "shadows",
      field="shadows",
    )
  everyone = np.ones(evidence.target.size, bool)
  best = (-math.inf, -math.inf, -math.inf)
  chosen = pairs[0]
  for temperature in temperatures:
    options = {"temperature": temperature, "offline": offline, "offline_a": offline_a}
    # Ratios do not depend on gamma, so one set serves all gammas.
    ratios = [relative_confidence(played, **options) for played, _ in games]
    for gamma in gammas:
      curves = [
        roc.curve_of(beaten_share(ratio, gamma=gamma, compared=everyone), members)
        for ratio, (_, members) in zip(ratios, games)
      ]
      # Each model has its own curve, since pooled scores would mix their scales.
      rate = np.mean([curve.tpr[curve.fpr <= fpr].max() for curve in curves])
      quality = (float(rate), -gamma, float(np.mean([curve.auc for curve in curves])))
      if quality > best:
        best = quality
        chosen = (gamma, temperature)
  return RmiaSettings(*chosen)


def rmia_tuned(
  evidence: Evidence,
  *,
  population: HostArray | None = None,
  offline: bool = False,
  offline_a: float = 0.3,
) -> np.ndarray:
  """Returns the scores [n] of `rmia` with the gamma and temperature that `tune_rmia` chooses.

  Raises UserError as these two functions do.

  >>> from dpjax.attacks.shadows import random_halves
  >>> held = random_halves(8, 4, seed=0)
  >>> rmia_tuned(Evidence([9.0, 2.0, 1.0, 0.0], held + 0.0, held)).round(2)
  array([1.  , 0.67, 0.33, 0.  ])
  """
  chosen = tune_rmia(evidence, offline=offline, offline_a=offline_a)
  return rmia(
    evidence,
    population=population,
    gamma=chosen.gamma,
    temperature=chosen.temperature,
    offline=offline,
    offline_a=offline_a,
  )


def _games(evidence: Evidence, offline: bool) -> Iterator[tuple[Evidence, np.ndarray]]:
  """Yields (evidence, members) with each usable shadow as the target."""
  for target, members in enumerate(evidence.included):
    kept = shadows_of(target, evidence.included)
    included = evidence.included[kept]
    counts = included.sum(axis=0)
    enough = len(included) >= 2 and (counts < len(included)).all()
    enough &= members.any() and not members.all()
    if enough and (offline or (counts > 0).all()):
      yield (
        Evidence(evidence.shadows[target], evidence.shadows[kept], included),
        members,
      )

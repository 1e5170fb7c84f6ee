"""What an attacker can do at most, in people: numbers out of 100 and of 1,000.

They follow from bounds on every test of membership (docs/promises.md), and are rounded up, so they
never claim more protection than is proved.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dpjax.accounting import attack_bounds
from dpjax.experiments.run import guarantee, writers


class Accused(NamedTuple):
  """What an attacker finds at one rate of wrong accusations."""

  wrong: int  # of 1,000 outsiders, how many he accuses
  found: int  # of 1,000 participants, how many he finds, at most
  right: int  # of 100 whom he accuses, how many took part, at most, if half of all did


class Attacker(NamedTuple):
  """Bounds on an attacker, as whole numbers of people."""

  right: int  # of 100 answers, how many are right, at most; a coin: 50
  accused: tuple[Accused, ...]


def of(result: Mapping[str, Any]) -> Attacker | None:
  """Returns the bounds that a result.json states; None: it has no finite epsilon.

  Without stated rates they follow from epsilon and delta alone, which is never less.

  >>> of({"epsilon_kind": "proved", "epsilon": 1.0, "delta": 0.0}).right  # e / (1 + e) = .731
  74
  >>> of({"epsilon_kind": "none", "epsilon": None}) is None
  True
  """
  epsilon = writers.number(result["epsilon"])
  if result["epsilon_kind"] == "none" or not math.isfinite(epsilon):
    return None

  def profile(epsilons: Any) -> np.ndarray:
    return _worst(np.asarray(epsilons), epsilon, result["delta"] or 0.0)

  advantage = result.get(guarantee.ADVANTAGE, attack_bounds.advantage(profile))
  accused = []
  for name, fpr in guarantee.RATES.items():
    tpr = result.get(name, attack_bounds.true_positive_rate(profile, fpr))
    accused.append(
      Accused(
        wrong=round(1000 * fpr),
        found=_up(1000 * _exact(tpr)),
        right=_up(100 * _exact(tpr) / (_exact(tpr) + _exact(fpr))),
      )
    )
  return Attacker(_up(50 * (1 + _exact(advantage))), tuple(accused))


def _worst(epsilons: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
  """Returns the privacy profile of the worst mechanism that is (epsilon, delta)-private:
  randomised response, which fails with probability delta (Kairouz et al. 2015, theorem 3.4)."""
  tail = -np.expm1(np.minimum(epsilons - epsilon, 0)) / (1 + math.exp(-epsilon))
  return delta + (1 - delta) * tail


def _exact(value: float) -> decimal.Decimal:
  return decimal.Decimal(repr(float(value)))


def _up(value: decimal.Decimal) -> int:
  return int(value.to_integral_value(decimal.ROUND_CEILING))

"""One audit, as data: the bound that counts, the others beside it, and the verdict."""

from __future__ import annotations

import dataclasses
from typing import Any

from dpjax import validate
from dpjax.accounting import lower, upper
from dpjax.auditing import lower_bounds
from dpjax.auditing.lower_bounds import Scores

_MEANING = {
  "one_run": "valid for any (epsilon, delta)-DP training",
  "one_run_fdp": "valid only if the training is Gaussian-DP",
  "clopper_pearson": "indicative: treats the canaries of one run as independent",
  "gdp": "indicative: as clopper_pearson, and only if the training is Gaussian-DP",
}


@dataclasses.dataclass(frozen=True)
class Audit:
  """The result of an audit. `refuted` False does NOT mean private: no audit can show that."""

  epsilon_lower: float
  method: str
  confidence: float
  delta: float
  epsilon_claimed: float | None  # None: nothing is claimed, so nothing can be refuted
  others: dict[str, float]  # lower bounds by the other methods, for information

  @property
  def refuted(self) -> bool:
    """Whether the claim is false, with `confidence`."""
    return self.epsilon_claimed is not None and self.epsilon_lower > self.epsilon_claimed

  @property
  def verdict(self) -> str:
    """One line for people.

    >>> Audit(2.5, "one_run", 0.95, 1e-5, 1.0, {}).verdict
    'REFUTED: epsilon >= 2.5 (one_run, 95% confidence, delta=1e-05), above the claimed 1'
    >>> Audit(2.5, "one_run", 0.95, 1e-5, None, {}).verdict
    'epsilon >= 2.5 (one_run, 95% confidence, delta=1e-05); no epsilon is claimed'
    """
    found = (
      f"epsilon >= {lower(self.epsilon_lower)} ({self.method}, "
      f"{100 * self.confidence:.4g}% confidence, delta={upper(self.delta)})"
    )
    if self.epsilon_claimed is None:
      return f"{found}; no epsilon is claimed"
    claim = f"the claimed {upper(self.epsilon_claimed)}"
    if self.refuted:
      return f"REFUTED: {found}, above {claim}"
    return f"not refuted: {found}, {claim}; an audit cannot show that a run is private"

  def to_json(self) -> dict[str, Any]:
    """Plain data for result.json."""
    return {
      "epsilon_audited_lower": self.epsilon_lower,
      "method": self.method,
      "meaning": _MEANING[self.method],
      "confidence": self.confidence,
      "delta": self.delta,
      "refuted": self.refuted,
      "verdict": self.verdict,
      "others": {
        name: {"epsilon_lower": value, "meaning": _MEANING[name]}
        for name, value in self.others.items()
      },
    }


def audit(
  scores: Scores,
  *,
  delta: float,
  epsilon_claimed: float | None,
  method: str = "one_run",
  confidence: float = 0.95,
) -> Audit:
  """The lower bound by `method` on the scores of one run's canaries, against a claim.

  The method is chosen beforehand: taking the largest of several bounds would need a
  correction of its own. The others are reported beside it and decide nothing.

  >>> import numpy as np
  >>> scores = Scores(inside=np.ones(500), outside=np.zeros(500))
  >>> audit(scores, delta=1e-5, epsilon_claimed=1.0).refuted
  True
  """
  validate.one_of(lower_bounds.METHODS, method=method)
  found = {
    name: bound(scores, delta=delta, confidence=confidence)
    for name, bound in lower_bounds.METHODS.items()
  }
  chosen = found.pop(method)
  return Audit(chosen, method, confidence, delta, epsilon_claimed, found)

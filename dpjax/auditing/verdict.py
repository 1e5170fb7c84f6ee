"""One audit, as data: the bound that counts, the others beside it, and the verdict."""

from __future__ import annotations

import dataclasses
from typing import Any

from dpjax import validate
from dpjax.accounting import events, lower, upper
from dpjax.auditing.lower_bounds import METHODS
from dpjax.auditing.scores import Scores
from dpjax.plan import Plan


def check_method(method: str, plan: Plan) -> None:
  """Refuses a bound that only holds for Gaussian-DP mechanisms where a plan's is not one.

  A plan is Gaussian-DP where all that it is charged for is Gaussian noise without sampling:
  the composition of mu_t-Gaussian-DP steps is sqrt(sum mu_t^2)-Gaussian-DP (Dong et al.,
  Corollary 3.3). With Poisson sampling it is so only in the limit of many steps, and an
  unclipped or noiseless run is so for no mu. `gdp` is indicative even where it is taken.

  >>> from dpjax.sampling import PoissonSampler
  >>> plan = Plan(sampler=PoissonSampler(prob=0.1, capacity=64), noise_multiplier=1.0,
  ...   l2_clip_norm=1.0, normalize_by=1, num_steps=1, delta=1e-5)
  >>> check_method("one_run_two_sided", plan)  # holds for any mechanism
  >>> check_method("one_run_fdp", plan)
  Traceback (most recent call last):
  dpjax.validate.UserError: method='one_run_fdp': valid only for Gaussian noise without ...
  """
  validate.one_of(METHODS, method=method)
  if not METHODS[method].gaussian_only:
    return
  parts = events.merged_parts(plan.event())
  other = sorted({type(part).__name__ for part in parts if not _is_gaussian(part)})
  if other:
    raise validate.UserError(
      f"method={method!r}: valid only for Gaussian noise without sampling, and this plan "
      f"charges {', '.join(other)}; use 'one_run' or 'one_run_two_sided'"
    )


def _is_gaussian(part: Any) -> bool:
  """Gaussian noise on everybody; drawn with probability 1 is not sampled."""
  everybody = getattr(part, "sampling_probability", None) == 1.0
  return type(part.event if everybody else part).__name__ == "GaussianDpEvent"


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
    """Whether the bound is above the claim: it is false, with `confidence`; by a method that
    is only indicative this is an alarm, and no more."""
    return self.epsilon_claimed is not None and self.epsilon_lower > self.epsilon_claimed

  @property
  def verdict(self) -> str:
    """One line for people.

    >>> Audit(2.5, "one_run", 0.95, 1e-5, 1.0, {}).verdict
    'REFUTED: epsilon >= 2.5 (one_run, 95% confidence, delta=1e-05), above the claimed 1'
    >>> Audit(2.5, "one_run", 0.95, 1e-5, None, {}).verdict
    'epsilon >= 2.5 (one_run, 95% confidence, delta=1e-05); no epsilon is claimed'
    >>> Audit(2.5, "gdp", 0.95, 1e-5, 1.0, {}).verdict
    'ALARM: epsilon >= 2.5 (gdp, indicative, no confidence, delta=1e-05), above the claimed 1'
    """
    indicative = METHODS[self.method].indicative
    sure = "indicative, no" if indicative else f"{lower(100 * self.confidence)}%"
    found = (
      f"epsilon >= {lower(self.epsilon_lower)} ({self.method}, {sure} confidence, "
      f"delta={upper(self.delta)})"
    )
    if self.epsilon_claimed is None:
      return f"{found}; no epsilon is claimed"
    claim = f"the claimed {upper(self.epsilon_claimed)}"
    if self.refuted:
      return f"{'ALARM' if indicative else 'REFUTED'}: {found}, above {claim}"
    return f"not refuted: {found}, {claim}; an audit cannot show that a run is private"

  def to_json(self) -> dict[str, Any]:
    """Plain data for result.json."""
    return {
      "epsilon_audited_lower": self.epsilon_lower,
      "method": self.method,
      "meaning": METHODS[self.method].meaning,
      "confidence": self.confidence,
      "delta": self.delta,
      "refuted": self.refuted,
      "verdict": self.verdict,
      "others": {
        name: {"epsilon_lower": value, "meaning": METHODS[name].meaning}
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
  correction of its own. The others are reported beside it and decide nothing; at delta 0,
  where Gaussian-DP has no epsilon, those that are valid for any mechanism.

  >>> import numpy as np
  >>> scores = Scores(inside=np.ones(500), outside=np.zeros(500))
  >>> audit(scores, delta=1e-5, epsilon_claimed=1.0).refuted
  True
  """
  validate.one_of(METHODS, method=method)
  found = {
    name: bound(scores, delta=delta, confidence=confidence)
    for name, bound in METHODS.items()
    if delta or name == method or not bound.gaussian_only
  }
  chosen = found.pop(method)
  return Audit(chosen, method, confidence, delta, epsilon_claimed, found)

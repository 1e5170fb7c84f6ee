"""The result of an audit: the bound that counts, the other bounds, and the verdict."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from dpjax import validate
from dpjax.accounting import upper
from dpjax.accounting.event_kinds.elements import merged_parts
from dpjax.accounting.proved import RELATIONS
from dpjax.accounting.text import lower, percent
from dpjax.accounting.trade_off import TradeOff
from dpjax.auditing.lower_bounds import METHODS, alarm_p_value, claim_p_value
from dpjax.auditing.scores import Scores

# Largest p-value that raises an alarm. The test of an alarm assumes independent canaries.
_ALARMING = 1e-3
# The test by `claim_p_value` may err with the error probability of the bound, divided by this.
_SHARE = 10


def check_method(method: str, event: Any) -> None:
  """Raises UserError for a bound of Gaussian-DP mechanisms if a run is not Gaussian-DP.

  A run is Gaussian-DP if all that it accounts for is Gaussian noise without sampling: the
  composition of mu_t-Gaussian-DP steps is sqrt(sum mu_t^2)-Gaussian-DP (Dong et al., Corollary
  3.3). With Poisson sampling this holds only in the limit of many steps. A run without clipping or
  noise is Gaussian-DP for no mu. `gdp` is only indicative even for Gaussian-DP runs.

  Args:
    event: event of the whole run, such as `plan.event()`.

  >>> from dpjax import accounting
  >>> gaussian = accounting.gaussian_event(1.0)
  >>> check_method("one_run_fdp", accounting.compose(gaussian, 5))
  >>> sampled = accounting.poisson_sampled_event(gaussian, sampling_prob=0.1)
  >>> check_method("one_run_two_sided", sampled)  # holds for any mechanism
  >>> check_method("one_run_fdp", sampled)
  Traceback (most recent call last):
  dpjax.validate.UserError: method='one_run_fdp': valid only for Gaussian noise without ...
  """
  validate.one_of(METHODS, method=method)
  if not METHODS[method].gaussian_only:
    return
  other = set()
  parts: list[Any] = list(merged_parts(event))
  for part in parts:
    # Sampling with probability 1 counts as no sampling: only the noise matters.
    everybody = getattr(part, "sampling_probability", None) == 1.0
    noise = part.event if everybody else part
    if type(noise).__name__ != "GaussianDpEvent":
      other.add(type(part).__name__)
  if other:
    raise validate.UserError(
      "valid only for Gaussian noise without sampling, and this run accounts for "
      f"{', '.join(sorted(other))}; use 'one_run' or 'one_run_two_sided'",
      field="method",
      value=method,
    )


class AtBest(NamedTuple):
  """Bound and p-values that perfect scores would give."""

  epsilon_lower: float  # by the method
  claim_p_value: float | None = None  # None: no claim of many pairs is known
  alarm_p_value: float | None = None


def reason(
  shown: AtBest | Audit, *, epsilon_claimed: float | None, method: str, confidence: float
) -> str:
  """Returns "REFUTED", "ALARM" or "", by what `shown` says about a claim.

  >>> case = dict(method="one_run", confidence=0.95)
  >>> reason(AtBest(2.0), epsilon_claimed=1.0, **case)
  'REFUTED'
  >>> reason(AtBest(0.5, 1.0, 1e-4), epsilon_claimed=1.0, **case)
  'ALARM'
  """
  if epsilon_claimed is None:
    return ""
  above = shown.epsilon_lower > epsilon_claimed
  unlikely = _at_most(shown.claim_p_value, (1 - confidence) / _SHARE)
  if unlikely or (above and not METHODS[method].indicative):
    return "REFUTED"
  return "ALARM" if above or _at_most(shown.alarm_p_value, _ALARMING) else ""


@dataclasses.dataclass(frozen=True)
class Audit:
  """The result of an audit. `refuted` False does NOT mean private: no audit can show that.

  `refuted` is True for the verdicts REFUTED and ALARM. REFUTED errs with probability at most
  1 - confidence by its bound, and a tenth of that by `claim_p_value`. An ALARM comes from a method
  that is only indicative, or from `alarm_p_value`, which assumes independent canaries.
  """

  epsilon_lower: float
  method: str
  confidence: float
  delta: float
  epsilon_claimed: float | None  # None: nothing is claimed, so nothing can be refuted
  others: dict[str, float]  # lower bounds by the other methods, for information
  claim_p_value: float | None = None
  alarm_p_value: float | None = None
  ceiling: AtBest | None = None  # what perfect scores of as many canaries would show
  neighboring_relation: str = (
    ""  # of the pairs that the canaries were; "" where it is not stated
  )

  @property
  def refuted(self) -> bool:
    """Whether this audit refutes the claim, or raises an alarm."""
    return bool(self._reason(self))

  @property
  def can_refute(self) -> bool:
    """Whether perfect scores would have refuted the claim, or raised an alarm; True if unknown."""
    return self.ceiling is None or bool(self._reason(self.ceiling))

  def _reason(self, shown: AtBest | Audit) -> str:
    return reason(
      shown,
      epsilon_claimed=self.epsilon_claimed,
      method=self.method,
      confidence=self.confidence,
    )

  @property
  def verdict(self) -> str:
    """Returns the verdict, in one line.

    >>> Audit(2.5, "one_run", 0.95, 1e-5, 1.0, {}).verdict
    'REFUTED: epsilon >= 2.5 (one_run, 95% confidence, delta=1e-05), above the claimed 1'
    >>> Audit(2.5, "one_run", 0.95, 1e-5, None, {}).verdict
    'epsilon >= 2.5 (one_run, 95% confidence, delta=1e-05); no epsilon is claimed'
    >>> Audit(2.5, "gdp", 0.95, 1e-5, 1.0, {}).verdict
    'ALARM: epsilon >= 2.5 (gdp, indicative, no confidence, delta=1e-05), above the claimed 1'
    >>> Audit(2.5, "one_run", 0.95, 1e-5, None, {}, neighboring_relation="replace_one").verdict
    'epsilon >= 2.5 (one_run, 95% confidence, delta=1e-05, replace_one); no epsilon is claimed'
    """
    indicative = METHODS[self.method].indicative
    sure = "indicative, no" if indicative else percent(self.confidence)
    relation = self.neighboring_relation and f", {self.neighboring_relation}"
    bound = (
      f"epsilon >= {lower(self.epsilon_lower)} ({self.method}, {sure} confidence, "
      f"delta={upper(self.delta)}{relation})"
    )
    if self.epsilon_claimed is None:
      return f"{bound}; no epsilon is claimed"
    claim = f"the claimed {upper(self.epsilon_claimed)}"
    word = self._reason(self)
    if self.epsilon_lower > self.epsilon_claimed:
      return f"{word}: {bound}, above {claim}"
    if word:
      return f"{word}: {self._unlikely(word)}; {bound}, {claim}"
    comparison = f"{bound}, {claim}{self._at_best()}"
    return f"not refuted: {comparison}; an audit cannot show that a run is private"

  def _unlikely(self, word: str) -> str:
    is_proof = word == "REFUTED"
    p = self.claim_p_value if is_proof else self.alarm_p_value
    premise = "" if is_proof else ", if canaries are independent"
    assert p is not None
    return f"such guesses have probability <= {upper(p)} under the claim{premise}"

  def _at_best(self) -> str:
    if self.ceiling is None:
      return ""
    best = f" (perfect scores would show {lower(self.ceiling.epsilon_lower)})"
    if self.can_refute:
      return best
    return f"{best}; so few canaries CANNOT refute it"

  def to_json(self) -> dict[str, Any]:
    """Returns plain data for result.json."""
    return {
      "epsilon_audited_lower": self.epsilon_lower,
      "method": self.method,
      "meaning": METHODS[self.method].meaning,
      "confidence": self.confidence,
      "delta": self.delta,
      "neighboring_relation": self.neighboring_relation,
      "refuted": self.refuted,
      "verdict": self.verdict,
      "claim_p_value": self.claim_p_value,
      "alarm_p_value": self.alarm_p_value,
      "can_refute": self.can_refute,
      "ceiling": None if self.ceiling is None else self.ceiling._asdict(),
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
  claim: TradeOff | None = None,
  at_best: Scores | None = None,
  neighboring_relation: str = "",
) -> Audit:
  """Returns the audit of a claim: the lower bound by `method` from the scores of one run's
  canaries, and the verdict.

  Choose the method beforehand: taking the largest of several bounds would need a correction. The
  other bounds are reported and decide nothing. At delta 0, where Gaussian-DP has no epsilon, only
  bounds that do not assume Gaussian-DP are reported.

  Args:
    scores: scores of the canaries. Independent fair coins must have decided which were in.
    delta, epsilon_claimed: one pair of the claim.
    claim: all pairs of the claim, as `Plan.trade_off` gives them; with all pairs far more can be
      refuted. None: no p-values are computed.
    at_best: scores that a perfect attack would give, for the audit's power: equal scores where
      nothing was seen of a canary. None: all scores inside are above all scores outside.
    neighboring_relation: relation of the claim, for the verdict.

  >>> import numpy as np
  >>> scores = Scores(inside=np.ones(500), outside=np.zeros(500))
  >>> audit(scores, delta=1e-5, epsilon_claimed=1.0).refuted
  True
  """
  validate.one_of(METHODS, method=method)
  if neighboring_relation:
    validate.one_of(RELATIONS, neighboring_relation=neighboring_relation)
  bounds = {
    name: bound(scores, delta=delta, confidence=confidence)
    for name, bound in METHODS.items()
    if delta or name == method or not bound.gaussian_only
  }
  chosen = bounds.pop(method)
  if at_best is None:
    at_best = _perfect(len(scores.inside), len(scores.outside))
  best = _best(at_best, delta=delta, method=method, confidence=confidence, claim=claim)
  p_values = _p_values(scores, claim)
  of_claim = {"ceiling": best, "neighboring_relation": str(neighboring_relation)}
  return Audit(
    chosen, method, confidence, delta, epsilon_claimed, bounds, *p_values, **of_claim
  )


def _perfect(num_inside: int, num_outside: int) -> Scores:
  """Returns scores in which all inside are above all outside."""
  return Scores(inside=np.ones(num_inside), outside=np.zeros(num_outside))


def _best(
  scores: Scores, *, delta: float, method: str, confidence: float, claim: TradeOff | None
) -> AtBest:
  bound = METHODS[method](scores, delta=delta, confidence=confidence)
  return AtBest(bound, *_p_values(scores, claim))


def ceiling(
  num_canaries: int,
  *,
  delta: float,
  method: str,
  num_inside: int | None = None,
  confidence: float = 0.95,
  claim: TradeOff | None = None,
) -> AtBest:
  """Returns the best possible result, in which all scores inside are above all scores outside.

  Args:
    num_inside: number of canaries that the coins put in. None: half of all canaries, an estimate
      before the coins are drawn.

  >>> round(ceiling(50, delta=1e-3, method="one_run").epsilon_lower, 2)
  0.7
  """
  validate.integer_at_least(2, num_canaries=num_canaries)
  if num_inside is None:
    num_inside = num_canaries // 2
  validate.integer_at_least(1, num_inside=num_inside)
  validate.integer_at_least(1, num_outside=num_canaries - num_inside)
  perfect = _perfect(num_inside, num_canaries - num_inside)
  return _best(perfect, delta=delta, method=method, confidence=confidence, claim=claim)


def _p_values(scores: Scores, claim: TradeOff | None) -> tuple[float | None, float | None]:
  if claim is None:
    return None, None
  return claim_p_value(scores, claim), alarm_p_value(scores, claim)


def _at_most(p_value: float | None, level: float) -> bool:
  return p_value is not None and p_value <= level

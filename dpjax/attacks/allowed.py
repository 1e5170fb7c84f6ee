"""The line that no attack may cross: the true positive rate that a guarantee allows.

(epsilon, delta)-DP bounds every test that tells a run with a record from one without
(Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015):

  TPR <= e^epsilon FPR + delta    and    1 - FPR <= e^epsilon (1 - TPR) + delta

A run satisfies many such pairs (epsilon, delta) at once. So its line is the minimum of the lines of
all pairs (Dong, Roth and Su 2022, Proposition 2.12). It is often far below the printed pair's.

The neighbouring relation defines "with a record". Under add_or_remove_one an independent coin must
decide for each record whether it is a member (`shadows.random_halves`). If the size of the training
set is fixed, another record takes the place of one that is left out: then use the line of
replace_one (`replacement_line`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from dpjax import validate
from dpjax.accounting import upper
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.text import lower
from dpjax.accounting.trade_off import TradeOff, all_pairs
from dpjax.attacks import roc, signals
from dpjax.plan import Plan
from dpjax.types import HostArray
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class AllowedRoc:
  """The largest TPR that a guarantee allows at each FPR: `line(fpr)`. `words` names its source."""

  words: str
  tpr: Callable[[np.ndarray], np.ndarray]  # of FPRs in [0, 1]

  def __call__(self, fpr: HostArray) -> np.ndarray:
    values = signals.numbers("fpr", fpr)
    if ((values < 0) | (values > 1)).any():
      raise UserError(
        f"runs from {values.min()} to {values.max()}: must be in [0, 1]", field="fpr"
      )
    # No line is below TPR = FPR, which a random guess reaches.
    return np.clip(self.tpr(values), values, 1.0)


def by_epsilon(epsilon: float, delta: float) -> AllowedRoc:
  """Returns the line that (epsilon, delta) alone allows.

  >>> line = by_epsilon(np.log(4), 0.0)
  >>> line([0.0, 0.1, 0.8]).round(4)  # 4 * .1, and 1 - .2 / 4
  array([0.  , 0.4 , 0.95])
  """
  validate.non_negative(epsilon=epsilon)
  if delta:
    validate.open_unit(delta=delta)
  words = f"epsilon = {upper(epsilon)} at delta = {upper(delta)}"
  pair = TradeOff(np.array([epsilon], float), np.array([delta], float))
  return AllowedRoc(words, pair.true_positive_rate)


def by_mu(mu: float) -> AllowedRoc:
  """Returns the line of mu-Gaussian DP, Phi(Phi^-1(FPR) + mu) (Dong, Roth and Su 2022, Eq. 6).

  The line is proved where the mechanism IS mu-GDP, such as Gaussian noise without sampling. For a
  sampled run the mu of `accounting.gdp.approximate` is an approximation, and so is the line.

  >>> by_mu(1.0)([0.5]).round(4)  # Phi(1)
  array([0.8413])
  """
  validate.non_negative(mu=mu)
  return AllowedRoc(
    f"{upper(mu)}-Gaussian DP", lambda fpr: special.ndtr(special.ndtri(fpr) + mu)
  )


def by_event(
  event: DpEvent,
  *,
  neighboring_relation: str = "add_or_remove_one",
  accountant: str = "pld",
) -> AllowedRoc:
  """Returns the line that the accountant proves for an event, from many (epsilon, delta) pairs.

  Raises UserError if no epsilon is proved for the event.

  >>> from dpjax import accounting
  >>> line = by_event(accounting.gaussian_event(1.0))  # which is 1-Gaussian DP
  >>> bool(0.8413 <= line([0.5])[0] < 0.842)
  True
  """
  pairs = all_pairs(event, neighboring_relation=neighboring_relation, accountant=accountant)
  return _by_pairs("event", pairs, accountant, neighboring_relation)


def by_plan(plan: Plan, *, steps: int | None = None) -> AllowedRoc:
  """Returns the line that a plan guarantees after `steps` steps (None: all).

  A run may abort on a batch that is too large. The line accounts for that at every epsilon.

  Raises UserError for a plan that guarantees nothing.

  >>> from dpjax.sampling import FixedSizeSampler
  >>> plan = Plan(sampler=FixedSizeSampler(num_examples=100, batch_size=10),
  ...   noise_multiplier=2.0, l2_clip_norm=1.0, normalize_by=10, num_steps=1, delta=1e-5)
  >>> by_plan(plan).words
  'proved by pld, replace_one'
  """
  if not plan.is_private:
    raise UserError("promises no epsilon, so no line is allowed or forbidden", field="plan")
  return _by_pairs(
    "plan",
    plan.trade_off(steps),
    plan.accountant,
    plan.neighboring_relation,
    plan.assumptions,
  )


def replacement_line(line: AllowedRoc) -> AllowedRoc:
  """Returns the line for a fixed number of members, from a line for adding or removing a record.

  Another record then takes the place of one that is left out. That is two steps of the relation: a
  removal and an addition. The line bounds each step (group privacy, Dong et al. 2022, Theorem
  2.14).

  >>> line = replacement_line(by_mu(1.0))  # which is 2-Gaussian DP
  >>> line([0.5]).round(4)  # Phi(2)
  array([0.9772])
  """
  return dataclasses.replace(
    of_group(line, 2), words=f"{line.words}, twice: a record takes another's place"
  )


def of_group(line: AllowedRoc, size: int) -> AllowedRoc:
  """Returns the line for a group of `size` records, which are all in or all out.

  Each record is one step of the relation, and the line bounds each step (group privacy, Dong et
  al. 2022, Theorem 2.14).

  Raises UserError for a size below 1.

  >>> of_group(by_mu(0.5), 4)([0.5]).round(4)  # which is 2-Gaussian DP: Phi(2)
  array([0.9772])
  """
  validate.integer_at_least(1, size=size)
  if size == 1:
    return line

  def together(fpr: np.ndarray) -> np.ndarray:
    rates = fpr
    for _ in range(size):
      rates = line(rates)
    return rates

  return AllowedRoc(f"{line.words}, for {size} records at once", together)


def _by_pairs(
  name: str,
  pairs: TradeOff,
  accountant: str,
  relation: str,
  assumed: Sequence[str] = (),
) -> AllowedRoc:
  if not (pairs.deltas < 1).any():
    raise UserError(
      "has no finite epsilon at any delta, so no line is forbidden", field=name
    )
  kind = f"claimed, if {'; '.join(assumed)}" if assumed else "proved"
  return AllowedRoc(f"{kind} by {accountant}, {relation}", pairs.true_positive_rate)


class Judged(NamedTuple):
  """Verdict on an attack at a single false positive rate."""

  rate: roc.RateAtFpr
  allowed: tuple[float, float]  # allowed TPR at both ends of the FPR's interval
  verdict: str


class Judgement(NamedTuple):
  """Verdict on an attack, "below", "above" or "cannot tell", with the rates behind it."""

  verdict: str
  points: tuple[Judged, ...]
  words: str  # one line to print


def judge(
  curve: roc.Roc,
  line: AllowedRoc,
  *,
  fprs: Sequence[float] = roc.FPRS,
  confidence: float = 0.95,
) -> Judgement:
  """Judges whether an attack is below a line, above it, or has too few records to tell.

  Let the TPR's interval be [t0, t1] and the FPR's [f0, f1]. The verdict is "above" if t0 > line(f1)
  at one of the rates. It is "below" if t1 <= line(f0) at each of the rates. Only these rates are
  judged, not the whole line. All intervals hold together with probability `confidence`
  (Bonferroni), if the records are independent. "Above" is only an alarm; `dpjax.auditing.audit` can
  refute the epsilon that a run prints.

  >>> truth = np.arange(20_000) >= 10_000
  >>> leaky = roc.curve_of(truth + 0.0, truth)  # told apart without a mistake
  >>> judge(leaky, by_epsilon(1.0, 1e-5)).verdict
  'above'
  >>> judge(leaky, by_epsilon(12.0, 1e-5)).verdict  # which allows TPR 1 at FPR .001
  'cannot tell'
  """
  validate.open_unit(confidence=confidence)
  if not (fprs := validate.several(fprs=fprs)):
    raise UserError("must hold at least one rate", field="fprs")
  # Bonferroni: the intervals of TPR and FPR at all rates hold together.
  each = 1 - (1 - confidence) / (2 * len(fprs))
  points = tuple(_verdict_of(roc.rate_at(curve, f, confidence=each), line) for f in fprs)
  verdicts = [point.verdict for point in points]
  if "above" in verdicts:
    verdict = "above"
  else:
    verdict = "cannot tell" if "cannot tell" in verdicts else "below"
  details = []
  for point in points:
    tpr = point.rate.tpr_interval
    fpr = point.rate.fpr_interval
    details.append(
      f"TPR {lower(tpr[0])} to {upper(tpr[1])} at FPR {lower(fpr[0])} to {upper(fpr[1])}, "
      f"where at most {lower(point.allowed[0])} to {upper(point.allowed[1])} is allowed"
    )
  return Judgement(
    verdict, points, f"{_WORDS[verdict]} ({line.words}): {'; '.join(details)}"
  )


_WORDS = {
  "above": "ABOVE the line that the guarantee allows",
  "below": "below the line that the guarantee allows",
  "cannot tell": "too few records to tell on which side of the line",
}


def _verdict_of(rate: roc.RateAtFpr, line: AllowedRoc) -> Judged:
  ends: Any = line(rate.fpr_interval)
  low = float(ends[0])
  high = float(ends[1])
  if rate.tpr_interval[0] > high:
    verdict = "above"
  else:
    verdict = "below" if rate.tpr_interval[1] <= low else "cannot tell"
  return Judged(rate, (low, high), verdict)

"""Strength of an attack: its ROC and the important rates, each with its uncertainty.

An average over all records hides the few that leak (Carlini et al. 2022). So the true positive rate
at a low false positive rate comes first. Its threshold is the (floor(fpr n) + 1)-th largest
score of the n non-members. This rank is fixed before any score is seen. So the exact interval of
Clopper and Pearson (1934) holds for the share of members above the threshold.

The AUC has Hoeffding's interval for a two-sample U-statistic (1963, section 5). The best balanced
accuracy has Massart's interval (1990), which covers all thresholds together. Both hold for any
scores, with ties or perfect separation, and for small samples.

All intervals assume independent scores. Scores of records of ONE trained model are not quite
independent. To refute an epsilon from one run use `dpjax.auditing.one_run`.

Scores of several target models are pooled as [targets, n]. They are of the same n records, so every
interval is as wide as for the records of one model. Exact intervals do not hold for such a mean of
dependent counts. Chernoff's does (Hoeffding 1963, section 5). With 17 targets and 200 records, a
tenth of which leaked, exact intervals missed the TPR in 44 % of cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special, stats

from dpjax import markdown, validate
from dpjax.accounting.text import round_out
from dpjax.attacks import signals
from dpjax.types import HostArray
from dpjax.validate import UserError

FPRS = (0.001, 0.01)
Interval = tuple[float, float]


class Roc(NamedTuple):
  """ROC curve: a point for each threshold, from infinity down to the smallest score.

  Records with scores at or above the threshold are called members, so ties stay together.
  """

  thresholds: np.ndarray  # [T], the first is infinite
  false_positives: np.ndarray  # [T] non-members called members
  true_positives: np.ndarray  # [T]
  num_targets: int = 1  # models whose scores of the same records were pooled

  @property
  def num_members(self) -> int:
    return int(self.true_positives[-1])

  @property
  def num_non_members(self) -> int:
    return int(self.false_positives[-1])

  @property
  def fpr(self) -> np.ndarray:
    return self.false_positives / self.num_non_members

  @property
  def tpr(self) -> np.ndarray:
    return self.true_positives / self.num_members

  @property
  def auc(self) -> float:
    """Probability that a member scores more than a non-member, where a tie counts half."""
    return float(np.trapezoid(self.tpr, self.fpr))


def curve_of(scores: HostArray, membership: HostArray) -> Roc:
  """Returns the ROC of scores [n] against the true membership, bool [n].

  Several models that are asked about the same n records give scores and membership [targets, n].

  Raises UserError for no members or no non-members, NaN, unequal lengths.

  >>> curve = curve_of([3.0, 2.0, 2.0, 1.0], np.array([True, True, False, False]))
  >>> curve.true_positives.tolist(), curve.false_positives.tolist(), curve.auc
  ([0, 1, 2, 2], [0, 0, 1, 2], 0.875)
  """
  values = signals.numbers("scores", scores)
  truth = np.asarray(membership)
  shaped = values.ndim in (1, 2) and truth.shape == values.shape
  if not shaped or truth.dtype != bool:
    raise UserError(
      f"must be bool, one for each of scores [n] or [targets, n], got {truth.dtype} of shape "
      f"{truth.shape} beside {values.shape}",
      field="membership",
    )
  num_targets = 1 if values.ndim == 1 else len(values)
  values, truth = values.ravel(), truth.ravel()
  for name, number in (("members", truth.sum()), ("non-members", (~truth).sum())):
    if not number:
      raise UserError(f"holds no {name}, so no attack can be measured", field="membership")
  order = np.argsort(-values, kind="stable")
  ordered = values[order]
  # Marks the last of each group of equal scores, since no threshold separates a group.
  last = np.append(ordered[1:] != ordered[:-1], True)
  false, true = (np.append(0, np.cumsum(side[order])[last]) for side in (~truth, truth))
  return Roc(np.append(np.inf, ordered[last]), false, true, num_targets)


class RateAtFpr(NamedTuple):
  """The true positive rate of the threshold that allows `allowed` false positives."""

  fpr: float  # the rate that was asked for
  allowed: int  # floor(fpr * non-members)
  false_positives: int  # fewer than allowed where a tie would have to be split
  fpr_interval: Interval
  tpr: float
  tpr_interval: Interval

  @property
  def resolved(self) -> bool:
    """Whether there are enough non-members for this rate, so that it allows a false positive."""
    return self.allowed >= 1


def exact_interval(count: int, n: int, confidence: float) -> Interval:
  """Returns the exact interval of a rate, given `count` events in `n`.

  >>> low, high = exact_interval(0, 10, 0.95)
  >>> low, round(high, 4)  # 1 - 0.025^(1/10)
  (0.0, 0.3085)
  """
  exact = stats.binomtest(int(count), int(n)).proportion_ci(confidence, method="exact")
  return float(exact.low), float(exact.high)


def _interval(count: int, n: int, num_targets: int, confidence: float) -> Interval:
  """Returns the interval of a rate: exact for one target, Chernoff's for several."""
  if num_targets == 1:
    return exact_interval(count, n, confidence)
  rate = count / n
  # All rates p are in it for which size * KL(rate, p) <= log(2 / (1 - confidence)).
  most = math.log(2 / (1 - confidence)) * num_targets / n

  def end(outside: float) -> float:
    inside = rate
    for _ in range(60):
      middle = (inside + outside) / 2
      apart = special.rel_entr(rate, middle) + special.rel_entr(1 - rate, 1 - middle)
      inside, outside = (middle, outside) if apart <= most else (inside, middle)
    return outside

  return end(0.0), end(1.0)


class Counted(NamedTuple):
  """A count out of a number of records, with the exact interval of the rate."""

  count: int
  total: int
  interval: Interval

  @property
  def rate(self) -> float:
    return self.count / self.total


def with_interval(count: int, total: int, confidence: float = 0.95) -> Counted:
  """Returns the count with its Clopper-Pearson interval.

  >>> with_interval(0, 10).interval[0], round(with_interval(5, 10).rate, 1)
  (0.0, 0.5)
  """
  validate.integer_at_least(1, total=total)
  validate.integer_in(0, total, count=count)
  validate.open_unit(confidence=confidence)
  return Counted(count, total, exact_interval(count, total, confidence))


def _place_at(curve: Roc, fpr: float) -> tuple[int, int]:
  """Returns (number of false positives that a rate allows, place of their threshold)."""
  validate.open_unit(fpr=fpr)
  # If fpr * n is a whole number, its float may be slightly smaller, which the factor undoes.
  allowed = math.floor(fpr * curve.num_non_members * (1 + 1e-12))
  return allowed, int(np.searchsorted(curve.false_positives, allowed, side="right")) - 1


def rate_at(curve: Roc, fpr: float, *, confidence: float = 0.95) -> RateAtFpr:
  """Returns the TPR at `fpr`; each interval holds with probability `confidence`.

  >>> curve = curve_of(np.arange(200.0), np.arange(200) >= 100)  # all members are above
  >>> rate = rate_at(curve, 0.01)
  >>> rate.tpr, rate.false_positives, [round(end, 3) for end in rate.tpr_interval]
  (1.0, 1, [0.964, 1.0])
  """
  validate.open_unit(confidence=confidence)
  n = curve.num_non_members
  allowed, at = _place_at(curve, fpr)
  false = int(curve.false_positives[at])
  true = int(curve.true_positives[at])
  of = lambda count, size: _interval(count, size, curve.num_targets, confidence)
  # Ties may lower the count below the fixed rank, so the interval covers both counts.
  low, high = (of(count, n) for count in (false, allowed))
  interval = of(true, curve.num_members)
  return RateAtFpr(fpr, allowed, false, (low[0], high[1]), float(curve.tpr[at]), interval)


def loss_tail(scores: HostArray, membership: HostArray, *, fnr: float = 0.01) -> RateAtFpr:
  """Returns a rate whose `tpr` is the share of non-members that score below nearly all members.

  That is the true negative rate of the loss attack at a false negative rate of `fnr`: the share of
  non-members that score below all but a share `fnr` of the members. Training moves hard members out
  of this tail. So the share estimates how many members LiRA would find at a false positive rate of
  `fnr`, without shadow models (Dodd et al. 2025, arXiv 2510.19773). It is an estimate, no attack.

  Args:
    scores: [n] or [targets, n], larger for smaller losses, such as log odds.
    membership: bool, of the same shape.

  Raises UserError as `curve_of` does.

  >>> odds, truth = np.array([5.0, 6, 7, 8, -3, -2, 6, 7]), np.arange(8) < 4
  >>> loss_tail(odds, truth).tpr  # two of four non-members are harder than any member
  0.5
  """
  values = signals.numbers("scores", scores)
  return rate_at(curve_of(-values, ~np.asarray(membership)), fnr)


class Leakage(NamedTuple):
  """The measured strength of an attack; `table` prints it."""

  num_members: int
  num_non_members: int
  auc: float
  auc_interval: Interval
  balanced_accuracy: float  # of the best threshold for these very scores
  balanced_accuracy_interval: Interval
  rates: tuple[RateAtFpr, ...]
  curve: Roc


def auc_interval(curve: Roc, *, confidence: float) -> Interval:
  """Returns Hoeffding's interval around an AUC (Hoeffding 1963).

  >>> curve = curve_of(np.arange(2000.0), np.arange(2000) >= 1000)
  >>> round(auc_interval(curve, confidence=0.95)[0], 3)
  0.957
  """
  size = min(curve.num_members, curve.num_non_members) / curve.num_targets
  return _around(curve.auc, math.sqrt(math.log(2 / (1 - confidence)) / (2 * size)))


class Strongest(NamedTuple):
  """The strongest of several attacks. Its intervals allow for the choice."""

  name: str
  auc: float
  auc_interval: Interval
  rate: RateAtFpr | None  # None: chosen by its AUC alone

  @property
  def words(self) -> str:
    """What it finds, as text."""
    if self.rate is None:
      return "too few others"
    ends = round_out(self.rate.tpr_interval)
    return f"TPR {self.rate.tpr:.3f} ({ends}) at {100 * self.rate.fpr:g} % FPR"

  def to_json(self) -> dict[str, Any]:
    """Returns plain data for result.json."""
    facts = {"method": self.name, "auc": self.auc, "auc_interval": list(self.auc_interval)}
    if self.rate is not None:
      facts |= {"fpr": self.rate.fpr, "tpr": self.rate.tpr}
      facts["tpr_interval"] = list(self.rate.tpr_interval)
    return facts | {"words": self.words}


def strongest(
  curves: Mapping[str, Roc], *, fpr: float | None, confidence: float = 0.95
) -> Strongest:
  """Returns the attack with the largest TPR at `fpr`, then the largest AUC.

  The strongest of many attacks is partly the luckiest: of fifteen that know nothing, an interval
  for one attack is above the truth in one of seven cases. So each interval is as wide as needed for
  all attacks together (Bonferroni).

  Args:
    curves: ROC of each attack, by its name.
    fpr: None to choose by the AUC alone.

  >>> truth = np.arange(400) < 200
  >>> curves = {"blind": curve_of(np.zeros(400), truth), "sure": curve_of(truth + 0.0, truth)}
  >>> best = strongest(curves, fpr=0.01)
  >>> best.name, round(best.rate.tpr_interval[0], 3), round(rate_at(curves["sure"], 0.01)[-1][0], 3)
  ('sure', 0.978, 0.982)
  >>> best.words
  'TPR 1.000 (0.978-1.000) at 1 % FPR'
  """
  validate.open_unit(confidence=confidence)
  power = {
    name: (0.0 if fpr is None else curve.tpr[_place_at(curve, fpr)[1]], curve.auc)
    for name, curve in curves.items()
  }
  name = max(power, key=lambda name: power[name])
  curve = curves[name]
  each = 1 - (1 - confidence) / len(curves)
  return Strongest(
    name,
    curve.auc,
    auc_interval(curve, confidence=each),
    None if fpr is None else rate_at(curve, fpr, confidence=each),
  )


def measure(
  scores: HostArray,
  membership: HostArray,
  *,
  fprs: Sequence[float] = FPRS,
  confidence: float = 0.95,
) -> Leakage:
  """Measures AUC, balanced accuracy and TPR at each of `fprs`, with intervals at `confidence`.

  Args:
    scores: [n], or [targets, n] of several models that are asked about the same records.
    membership: bool, of the same shape.

  >>> leakage = measure(np.arange(2000.0), np.arange(2000) >= 1000)
  >>> leakage.auc, leakage.balanced_accuracy, leakage.rates[0].tpr
  (1.0, 1.0, 1.0)
  >>> round(leakage.auc_interval[0], 3), leakage.rates[0].resolved
  (0.957, True)
  """
  validate.open_unit(confidence=confidence)
  curve = curve_of(scores, membership)
  sizes = (curve.num_members, curve.num_non_members)
  spare = 1 - confidence
  balanced = float(np.max((curve.tpr + 1 - curve.fpr) / 2))
  of_one = [n / curve.num_targets for n in sizes]
  massart = sum(math.sqrt(math.log(4 / spare) / (2 * n)) for n in of_one) / 2
  return Leakage(
    *sizes,
    curve.auc,
    auc_interval(curve, confidence=confidence),
    balanced,
    _around(balanced, massart),
    tuple(
      rate_at(curve, fpr, confidence=confidence) for fpr in validate.several(fprs=fprs)
    ),
    curve,
  )


def _around(value: float, width: float) -> Interval:
  return max(0.0, value - width), min(1.0, value + width)


def table(
  leakages: Mapping[str, Leakage], *, allowed: Mapping[float, float] | None = None
) -> str:
  """Returns a Markdown table with one row for each attack.

  A rate is marked < if there are so few non-members that its threshold admits no false positive.

  Args:
    leakages: results of `measure`, by name of the attack.
    allowed: the TPR that a guarantee allows at each FPR; a column shows each that was measured.

  >>> print(table({"loss": measure(np.arange(20.0), np.arange(20) >= 10, fprs=[0.2])}))
  | attack | TPR at 20 % FPR | AUC | balanced accuracy |
  | --- | --- | --- | --- |
  | loss | 1.0000 (0.6915-1.0000) | 1.0000 (0.5705-1.0000) | 1.0000 (0.5319-1.0000) |
  <BLANKLINE>
  """
  asked = {tuple(rate.fpr for rate in leakage.rates) for leakage in leakages.values()} or {
    ()
  }
  if len(asked) > 1:
    raise UserError(f"was measured at different rates: {sorted(asked)}", field="leakages")
  (rates,) = asked
  head = [
    "attack",
    *(f"TPR at {100 * fpr:g} % FPR" for fpr in rates),
    *("AUC", "balanced accuracy"),
  ]
  cell = lambda value, ends: f"{value:.4f} ({round_out(ends, 4)})"
  known = [fpr for fpr in rates if fpr in (allowed or {})]
  head += [f"allowed TPR at {100 * fpr:g} % FPR" for fpr in known]
  # A bound is never shown smaller than it is.
  bounds = [f"{math.ceil(1e4 * (allowed or {})[fpr]) / 1e4:.4f}" for fpr in known]
  rows = []
  for name, leakage in leakages.items():
    shown = [
      ("" if rate.resolved else "< ") + cell(rate.tpr, rate.tpr_interval)
      for rate in leakage.rates
    ]
    shown += [cell(leakage.auc, leakage.auc_interval)]
    balanced = cell(leakage.balanced_accuracy, leakage.balanced_accuracy_interval)
    rows.append([name, *shown, balanced, *bounds])
  return markdown.table(head, rows)

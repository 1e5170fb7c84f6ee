"""Bounds on attackers: guarantees that can take the place of an epsilon.

An attack here is a test of membership: from all that a run releases it says whether a record
was there. A bound is one of four numbers (Kulynych et al. 2024, arXiv 2407.02191):

- `TruePositiveRate`: TPR at one false positive rate.
- `Advantage`: the largest TPR - FPR, which is delta at epsilon 0.
- `GaussianDp`: mu of Gaussian DP (Dong, Roth and Su 2022), up to delta.
- `BayesRisk`: the smallest chance of error of an attacker who has a prior (Kulynych et al. 2025,
  arXiv 2507.06969, proposition D.1).

All are read from the privacy profile epsilon -> delta of the whole run; every pair of the profile
is proved. None is converted from the epsilon at one given delta, or taken from the central limit.
`calibration.calibrate_noise_to_attack` finds the noise for such a bound.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import numpy as np

from dpjax import validate
from dpjax.accounting.loss_grid import Profile
from dpjax.accounting.text import lower, upper
from dpjax.accounting.trade_off import pairs_of
from dpjax.validate import UserError

# Numbers of epsilons in the coarse search for the best bound, and in the fine search around its
# result.
_COARSE = 257
_FINE = 65
# Largest epsilon tried: e^-40 is below the rounding of a rate.
_LARGEST = 40.0
# More than what the few operations of a bound may round off.
_ROUNDING = 1e-15


def true_positive_rate(profile: Profile, fpr: float) -> float:
  """Returns a bound on the true positive rate of any test at a false positive rate in (0, 1).

  It is the smallest value, over all epsilon, of e^epsilon FPR + delta and of
  1 - e^-epsilon (1 - FPR - delta): Proposition 2.12 of Dong, Roth and Su 2022.

  Guarantee: an upper bound. Each epsilon gives an upper bound; the search may miss the smallest.

  >>> from dpjax.accounting.epsilon import privacy_profile
  >>> from dpjax.accounting import gaussian_event
  >>> profile = privacy_profile(gaussian_event(1.0))
  >>> round(true_positive_rate(profile, 0.01), 4)  # Phi(Phi^-1(.01) + 1) is .0924
  0.0924
  """
  validate.open_unit(fpr=fpr)

  def steep(epsilons: np.ndarray) -> np.ndarray:
    return (np.exp(epsilons) * fpr + profile(epsilons)) * (1 + _ROUNDING)

  def flat(epsilons: np.ndarray) -> np.ndarray:
    return 1 - np.exp(-epsilons) * (1 - fpr - profile(epsilons)) + _ROUNDING

  best = 1.0
  # `steep` is above 1 for an epsilon above log(1 / FPR). `steep` is convex in e^epsilon and `flat`
  # in e^-epsilon, so the best epsilon lies next to the best coarse epsilon.
  for line, last in ((steep, min(-math.log(fpr), _LARGEST)), (flat, _LARGEST)):
    coarse = np.linspace(0, last, _COARSE)
    nearest = int(np.argmin(line(coarse)))
    sides = coarse[max(nearest - 1, 0)], coarse[min(nearest + 1, _COARSE - 1)]
    best = min(best, float(line(np.linspace(*sides, _FINE)).min()))
  # A random guess has TPR = FPR, so rounding must not give a bound below FPR.
  return max(best, fpr)


def advantage(profile: Profile) -> float:
  """Returns an upper bound on TPR - FPR of any test: delta at epsilon 0.

  >>> from dpjax.accounting.epsilon import privacy_profile
  >>> from dpjax.accounting import gaussian_event
  >>> profile = privacy_profile(gaussian_event(1.0))
  >>> round(advantage(profile), 4)  # 2 Phi(1/2) - 1
  0.3829
  """
  return float(profile([0.0])[0])


def bayes_risk(profile: Profile, prior: float) -> float:
  """Returns a lower bound on the chance of error of any attacker who knows the prior of membership.

  It is min(prior, 1 - prior) (1 - delta(epsilon)) at epsilon = |log(prior / (1 - prior))|.

  Args:
    prior: chance in (0, 1) that the record is in the data, or that it has the first of its two
      possible values.

  >>> from dpjax.accounting.epsilon import privacy_profile
  >>> from dpjax.accounting import gaussian_event
  >>> profile = privacy_profile(gaussian_event(1.0))
  >>> round(bayes_risk(profile, 0.5), 4)  # Phi(-1/2)
  0.3085
  """
  validate.open_unit(prior=prior)
  return min(prior, 1 - prior) * (1 - float(profile([_log_odds(prior)])[0]))


def _log_odds(prior: float) -> float:
  # log1p keeps the digits of a prior near 0, where 1 - prior rounds to 1.
  return abs(math.log(prior) - math.log1p(-prior))


class AttackBound(abc.ABC):
  """Bound on what an attacker gains. A run keeps it if `cost(profile, delta) <= limit`."""

  @property
  @abc.abstractmethod
  def limit(self) -> float:
    """Returns the largest cost that keeps the bound."""

  @abc.abstractmethod
  def cost(self, profile: Profile, delta: float) -> float:
    """Returns an upper bound on what an attacker gains, in the unit of `limit`.

    The cost falls as the noise grows.

    Args:
      profile: privacy profile of the whole run.
      delta: slack of `GaussianDp`; the other bounds ignore it.
    """

  @abc.abstractmethod
  def words(self, delta: float) -> str:
    """Returns the guarantee as a clause, without a full stop."""


@dataclasses.dataclass(frozen=True)
class TruePositiveRate(AttackBound):
  """No test of membership has a true positive rate above `tpr` at the false positive rate `fpr`.

  Raises:
    UserError: a rate outside (0, 1), or a `tpr` that a guess reaches.

  >>> TruePositiveRate(tpr=0.01, fpr=0.1)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: tpr=0.01: must be above fpr=0.1, which a guess reaches at any noise
  """

  tpr: float
  fpr: float

  def __post_init__(self) -> None:
    validate.open_unit(tpr=self.tpr, fpr=self.fpr)
    if self.tpr <= self.fpr:
      raise UserError(
        f"must be above fpr={self.fpr!r}, which a guess reaches at any noise",
        field="tpr",
        value=self.tpr,
      )

  @property
  def limit(self) -> float:
    return self.tpr - self.fpr

  def cost(self, profile: Profile, delta: float) -> float:
    return true_positive_rate(profile, self.fpr) - self.fpr

  def words(self, delta: float) -> str:
    return (
      f"no test of membership has a true positive rate above {upper(self.tpr)} at a false "
      f"positive rate of {lower(self.fpr)}"
    )


@dataclasses.dataclass(frozen=True)
class Advantage(AttackBound):
  """No test of membership has a TPR - FPR above `advantage`.

  Raises:
    UserError: `advantage` outside (0, 1).
  """

  advantage: float

  def __post_init__(self) -> None:
    validate.open_unit(advantage=self.advantage)

  @property
  def limit(self) -> float:
    return self.advantage

  def cost(self, profile: Profile, delta: float) -> float:
    return advantage(profile)

  def words(self, delta: float) -> str:
    return (
      "no test of membership has a true positive rate more than "
      f"{upper(self.advantage)} above its false positive rate"
    )


@dataclasses.dataclass(frozen=True)
class GaussianDp(AttackBound):
  """No test of membership beats the best test between N(0, 1) and N(mu, 1), up to delta.

  For every false positive rate, TPR <= Phi(Phi^-1(FPR) + mu) + delta. This is proved from the whole
  trade-off curve, for sampled mechanisms too, and needs no central limit. Losses are known
  only up to a largest value, so no mu would hold without the slack delta.

  Raises:
    UserError: mu <= 0.
  """

  mu: float

  def __post_init__(self) -> None:
    validate.positive(mu=self.mu)

  @property
  def limit(self) -> float:
    return self.mu

  def cost(self, profile: Profile, delta: float) -> float:
    return pairs_of(profile, delta).mu(delta)

  def words(self, delta: float) -> str:
    return (
      f"no test of membership does better than one that tells N(0, 1) from "
      f"N({upper(self.mu)}, 1), up to {upper(delta)} of its true positive rate"
    )


@dataclasses.dataclass(frozen=True)
class BayesRisk(AttackBound):
  """No attacker who knows the `prior` of membership errs with a chance below `bayes_risk`.

  Raises:
    UserError: a number outside (0, 1), or a risk that no noise reaches: a guess of the likelier
      answer errs with probability min(prior, 1 - prior).
  """

  bayes_risk: float
  prior: float

  def __post_init__(self) -> None:
    validate.open_unit(bayes_risk=self.bayes_risk, prior=self.prior)
    least = min(self.prior, 1 - self.prior)
    if self.bayes_risk >= least:
      raise UserError(
        f"must be below {least!r}, the error of a guess at prior={self.prior!r}",
        field="bayes_risk",
        value=self.bayes_risk,
      )

  @property
  def limit(self) -> float:
    return 1 - self.bayes_risk / min(self.prior, 1 - self.prior)

  def cost(self, profile: Profile, delta: float) -> float:
    return float(profile([_log_odds(self.prior)])[0])

  def words(self, delta: float) -> str:
    return (
      f"an attacker who knows that the record is there with probability {self.prior!r} errs "
      f"with probability {lower(self.bayes_risk)} or more"
    )


def attack_bound(
  *,
  tpr: float | None = None,
  fpr: float | None = None,
  advantage: float | None = None,
  mu: float | None = None,
  bayes_risk: float | None = None,
  prior: float | None = None,
) -> AttackBound | None:
  """Returns the bound that the given numbers define, or None if all of them are None.

  Raises:
    UserError: numbers of several bounds, only one number of a pair, or a number out of range.

  >>> attack_bound(tpr=0.1, fpr=0.01)
  TruePositiveRate(tpr=0.1, fpr=0.01)
  >>> attack_bound(tpr=0.1, mu=1.0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: tpr: tpr, mu are numbers of several guarantees; give those of one
  """
  # Kind of bound -> the numbers that define it.
  ways = {
    TruePositiveRate: {"tpr": tpr, "fpr": fpr},
    Advantage: {"advantage": advantage},
    GaussianDp: {"mu": mu},
    BayesRisk: {"bayes_risk": bayes_risk, "prior": prior},
  }
  stated = {
    kind: numbers
    for kind, numbers in ways.items()
    if any(value is not None for value in numbers.values())
  }
  if not stated:
    return None
  if len(stated) > 1:
    names = [
      name
      for numbers in stated.values()
      for name, value in numbers.items()
      if value is not None
    ]
    raise UserError(
      f"{', '.join(names)} are numbers of several guarantees; give those of one",
      field=names[0],
    )
  ((kind, numbers),) = stated.items()
  for name, value in numbers.items():
    if value is None:
      (other,) = numbers.keys() - {name}
      raise UserError(f"must be given with {other}", field=name, value=None)
  return kind(**numbers)

"""Membership inference: was a record part of a model's training data?

Most attacks are pure functions of `Evidence`, which holds what the attacker knows, but not the true
members. Each attack gives every record a score, larger for a more likely member. `roc` compares
scores with the true members.

| attack              | knows besides the target's answers        | source                     |
| ------------------- | ----------------------------------------- | -------------------------- |
| `confidence_rule`   | nothing                                   | folklore: sure above .8    |
| `loss_threshold`    | nothing (`loss_rule`: mean training loss) | Yeom et al. 2018           |
| `lira`              | shadows trained with and without a record | Carlini et al. 2022        |
| `lira`, offline     | shadows trained without it                | ibid.                      |
| `rmia`              | shadows, and other records to compare to  | Zarifzadeh et al. 2024     |
| `rmia`, offline     | shadows trained without it, other records | ibid.                      |
| `rmia_tuned`        | as `rmia`; tunes it on the shadows        | ibid.                      |
| `informia`          | as `rmia`                                 | Tao and Shokri 2025        |
| `bavaria`           | as `lira`; steadier with few shadows      | Brännvall 2026             |
| `quantile_regression` | other records, certainly not trained on | Bertran et al. 2023        |
| `attack_network`    | whole answers of shadows, not log odds    | Shokri et al. 2017         |

For several queries of one record (augmented copies) there is one `Evidence` for each query. The
code of Carlini et al. thresholds the mean of a record's `lira` scores.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from dpjax import validate
from dpjax.attacks import roc, signals
from dpjax.types import HostArray
from dpjax.validate import UserError

# Added to every standard deviation, so that none is 0, as in the code of Carlini et al.
_FLOOR = 1e-30
# Scores of this size or more are refused. For smaller scores, the square of (difference of two
# scores / floor) stays far within float64.
_HUGE = 1e60
# Values of `tune_rmia`, as its authors choose them.
GAMMAS = (1.0, 1.1, 1.5, 2.0)
TEMPERATURES = (0.5, 1.0, 2.0, 4.0, 8.0)
FPR = 0.01


def _scores(name: str, values: HostArray, rank: int) -> np.ndarray:
  array = signals.numbers(name, values)
  if array.ndim != rank or array.size == 0:
    wanted = "[records]" if rank == 1 else "[shadows, records]"
    raise UserError(
      f"must be {wanted}, none of them 0", field=f"{name}.shape", value=array.shape
    )
  if far := np.count_nonzero(np.abs(array) >= _HUGE):
    raise UserError(
      f"{far} of {array.size} scores are infinite or beyond {_HUGE:g}; the "
      "log odds of attacks.signals are not",
      field=name,
    )
  return array


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
  """An attacker's knowledge of n records, without the target's members.

  Args:
    target: [n], the target's log odds for each record (see `signals`).
    shadows: [S, n], log odds of S >= 2 shadow models.
    included: bool [S, n], which shadow was trained on which record.

  Raises UserError for shapes that do not match (was the target asked about other records?), or a
  mask that is not bool. It is also raised for fewer than two shadows, and NaN or infinite scores.

  >>> Evidence([0.0, 1.0], np.zeros((2, 2)), np.eye(2, dtype=bool)).shadows.shape
  (2, 2)
  """

  target: np.ndarray  # [n]
  shadows: np.ndarray  # [S, n]
  included: np.ndarray  # [S, n] bool

  def __post_init__(self):
    target = _scores("target", self.target, 1)
    shadows = _scores("shadows", self.shadows, 2)
    included = np.asarray(self.included)
    if target.size != shadows.shape[1]:
      raise UserError(
        f"has scores of {target.size} records, the shadows of {shadows.shape[1]}: "
        "must be asked about the same records (was the target trained elsewhere?)",
        field="target",
      )
    if included.shape != shadows.shape or included.dtype != bool:
      raise UserError(
        f"must be bool of shape {shadows.shape}, as shadows, got "
        f"{included.dtype} of shape {included.shape}",
        field="included",
      )
    if len(shadows) < 2:
      raise UserError("holds 1 shadow model; must hold at least 2", field="shadows")
    for name, value in (("target", target), ("shadows", shadows), ("included", included)):
      object.__setattr__(self, name, value)

  def side(self, inside: bool, least: int, attack: str) -> np.ndarray:
    """Returns [S, n]: scores of the shadows that held (or did not hold) a record; others are NaN.

    Raises UserError for a record with fewer than `least` such shadows, which `attack` needs.
    """
    chosen = self.included if inside else ~self.included  # [S, n]
    counts = chosen.sum(axis=0)
    if (short := np.flatnonzero(counts < least)).size:
      word = "in" if inside else "out of"
      wish = "; use fixed_variance=True" if counts.min() >= 1 else ""
      raise UserError(
        f"{short.size} of {counts.size} records are {word} fewer than "
        f"{least} of the {len(chosen)} shadows, the first is record {short[0]}: "
        f"{attack} needs {least}{wish}",
        field="included",
      )
    return np.where(chosen, self.shadows, np.nan)


def shadows_of(target: int, included: np.ndarray) -> np.ndarray:
  """Returns bool [M]: the models that may be shadows of model `target`, all but its complement.

  No real attacker has a shadow with exactly the records that the target lacks: it would reveal the
  members.

  >>> held = np.array([[True, False], [False, True], [True, True]])
  >>> shadows_of(0, held).tolist()
  [False, False, True]
  """
  kept = ~np.all(included == ~included[target], axis=1)
  kept[target] = False
  return kept


def confidence_rule(confidences: HostArray, *, threshold: float = 0.8) -> np.ndarray:
  """Scores 1 if the model's largest probability for a record exceeds `threshold`, else 0.

  This rule of thumb finds easy records, not members.

  Args:
    confidences: [n], from `signals.top_confidences`.

  >>> confidence_rule([0.9, 0.8, 0.3])
  array([1., 0., 0.])
  """
  validate.open_unit(threshold=threshold)
  values = _scores("confidences", confidences, 1)
  return (values > threshold).astype(np.float64)


def loss_rule(losses: HostArray, *, mean_training_loss: float) -> np.ndarray:
  """Scores 1 for a record whose loss is at most the mean training loss, else 0: losses [n] -> [n].

  The adversary must know that mean (Yeom et al. 2018).

  >>> loss_rule([0.1, 2.0], mean_training_loss=0.5)
  array([1., 0.])
  """
  validate.non_negative(mean_training_loss=mean_training_loss)
  return (_scores("losses", losses, 1) <= mean_training_loss).astype(np.float64)


def loss_threshold(evidence: Evidence) -> np.ndarray:
  """Returns minus the target's loss [n]. One threshold serves all records (Yeom et al. 2018).

  >>> loss_threshold(Evidence([0.0, 9.0], np.zeros((2, 2)), np.eye(2, dtype=bool))).round(3)
  array([-0.693, -0.   ])
  """
  return special.log_expit(evidence.target)


def lira(
  evidence: Evidence,
  *,
  offline: bool = False,
  fixed_variance: bool = False,
  two_sided: bool = False,
) -> np.ndarray:
  """Returns the scores [n] of the likelihood-ratio attack (Carlini et al. 2022).

  Online the score is log N(t; m_in, s_in) - log N(t; m_out, s_out), where t is the target's log
  odds. m and s are median and standard deviation over the shadows that held a record (in), or that
  did not (out). Offline the score is (t - m_out) / s_out, which orders records as the paper's
  one-sided 1 - P(Z > t) does.

  Args:
    offline: whether to use only shadows that did not hold a record.
    fixed_variance: whether all records have one standard deviation. Online, s_in then also replaces
      s_out, as in the authors' code. Use it with fewer than about 64 shadows.
    two_sided: whether the offline score is -log N(t; m_out, s_out), as in the authors' code. A
      record that is surprisingly hard then counts as a member, too.

  Raises UserError for two_sided online, and for a record without shadows that did not hold it, or
  (online) that held it. Without `fixed_variance`, two such shadows are needed.

  >>> shadows = np.array([[1.0, 9.0], [2.0, 7.0], [8.0, 1.0], [9.0, 3.0]])
  >>> held = np.array([[False, True]] * 2 + [[True, False]] * 2)
  >>> lira(Evidence([9.0, 2.0], shadows, held)).round(1)  # record 0 was in, 1 was out
  array([112., -18.])
  """
  if two_sided and not offline:
    raise UserError(
      "the online attack has no sides; must be False", field="two_sided", value=True
    )
  least, name = (1, "lira") if fixed_variance else (2, "a variance of its own (lira)")
  axis = None if fixed_variance else 0
  outside = evidence.side(False, least, name)
  center = np.nanmedian(outside, axis=0)
  t = evidence.target
  if offline:
    std = np.nanstd(outside, axis=axis) + _FLOOR
    return -_log_density(t, center, std) if two_sided else (t - center) / std
  inside = evidence.side(True, least, name)
  std_in = np.nanstd(inside, axis=axis) + _FLOOR
  std_out = std_in if fixed_variance else np.nanstd(outside, axis=0) + _FLOOR
  held = _log_density(t, np.nanmedian(inside, axis=0), std_in)
  return held - _log_density(t, center, std_out)


def _log_density(t: np.ndarray, mean: np.ndarray, std: Any) -> np.ndarray:
  return -0.5 * ((t - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)


def relative_confidence(
  evidence: Evidence,
  *,
  temperature: float = 1.0,
  offline: bool = False,
  offline_a: float = 0.3,
) -> np.ndarray:
  """Returns log p(x) - log P(x) [n], from which `rmia` and `informia` make their scores.

  p is the target's confidence in x: the logistic function of its log odds over `temperature`. That
  is a softmax with this temperature over two classes, the record's label and all other labels.
  P is the mean of P_in and P_out, the mean confidences of shadows with and without the
  record. With `offline`, P_in is estimated as a * P_out + 1 - a, where a is `offline_a`.

  Args:
    temperature: divisor of log odds. Above 1 it spreads the confidences of a model that is sure of
      all records.
    offline: whether to use only shadows that did not hold a record.
    offline_a: the number a, in [0, 1].

  Raises UserError for a record that no shadow held (online), or that every shadow held.

  >>> held = np.array([[True, False], [False, True]])
  >>> relative_confidence(Evidence([0.0, 2.0], np.zeros((2, 2)), held)).round(3)
  array([0.   , 0.566])
  """
  validate.positive(temperature=temperature)
  validate.number_in(0, 1, offline_a=offline_a)
  confidence = lambda side: np.nanmean(special.expit(side / temperature), axis=0)  # [n]
  without = confidence(evidence.side(False, 1, "rmia"))
  if offline:
    prior = ((1 + offline_a) * without + 1 - offline_a) / 2
  else:
    prior = (confidence(evidence.side(True, 1, "rmia")) + without) / 2
  return special.log_expit(evidence.target / temperature) - np.log(prior)


def rmia(
  evidence: Evidence,
  *,
  population: HostArray | None = None,
  gamma: float = 2.0,
  temperature: float = 1.0,
  offline: bool = False,
  offline_a: float = 0.3,
) -> np.ndarray:
  """Returns the scores [n] of the relative attack (Zarifzadeh et al. 2024), in [0, 1].

  The score of x is the share of other records z with (p(x) / P(x)) / (p(z) / P(z)) > gamma.
  p and P are those of `relative_confidence`. The defaults are the paper's gamma and no
  temperature. They find few members if a model is sure of all records; `rmia_tuned` then chooses
  gamma and temperature on the shadow models.

  Args:
    population: bool [n], which records serve as z; None: all. The attacker need not know whether
      they are members of the target. A record is never compared to itself.
    gamma: the factor gamma in the formula above, at least 1.
    temperature, offline, offline_a: as in `relative_confidence`.

  Raises UserError as `relative_confidence` does, and for an empty population or a gamma below 1.

  >>> held = np.array([[True, False, True], [False, True, False]])
  >>> rmia(Evidence([3.0, 0.0, -1.0], np.zeros((2, 3)), held), gamma=1.5)
  array([1. , 0.5, 0. ])
  """
  validate.positive(gamma=gamma)
  if gamma < 1:
    raise UserError("must be >= 1", field="gamma", value=gamma)
  compared = _compared_records(population, evidence.target.size)
  ratio = relative_confidence(
    evidence, temperature=temperature, offline=offline, offline_a=offline_a
  )
  return _beaten_share(ratio, gamma=gamma, compared=compared)


def _beaten_share(ratio: np.ndarray, *, gamma: float, compared: np.ndarray) -> np.ndarray:
  """Returns [n]: the share of `compared` records whose log ratio is lower by more than log gamma.

  >>> _beaten_share(np.array([1.0, 0.0, 0.5]), gamma=1.0, compared=np.ones(3, bool))
  array([1. , 0. , 0.5])
  """
  # side="left": a ratio that is smaller by a factor of exactly gamma is not beaten.
  beaten = np.searchsorted(np.sort(ratio[compared]), ratio - math.log(gamma), side="left")
  # A record is not compared to itself.
  others = compared.sum() - compared
  return beaten / np.maximum(others, 1)


def _compared_records(population: HostArray | None, n: int) -> np.ndarray:
  """Returns bool [n]: the records that each record is compared to; all of them for None.

  Raises UserError for another shape, or if no record is selected.

  >>> _compared_records(None, 2)
  array([ True,  True])
  """
  if population is None:
    return np.ones(n, bool)
  chosen = np.asarray(population)
  if chosen.dtype != bool or chosen.shape != (n,) or not chosen.any():
    raise UserError(f"must be bool [{n}] and hold at least one True", field="population")
  return chosen


def informia(
  evidence: Evidence,
  *,
  population: HostArray | None = None,
  temperature: float = 2.0,
  offline: bool = False,
  offline_a: float = 0.3,
) -> np.ndarray:
  """Returns the mean over other records z of log[(p(x) / P(x)) / (p(z) / P(z))]: [n], in nats.

  `rmia` counts the records that x beats, so records that beat equally many others are tied. This is
  their mean margin, and needs no gamma. p and P are those of `rmia`. Source: arXiv 2510.05582; the
  paper's average is taken here over the records other than x.

  Args:
    population: bool [n], which records serve as z; None: all. A record is never compared to itself.
    temperature: temperature of the confidences; above 1 for models that are sure of most records.
    offline, offline_a: as in `rmia`.

  Raises UserError as `rmia` does.

  >>> held = np.array([[True, False, True], [False, True, False]])
  >>> informia(Evidence([4.0, 0.0, -4.0], np.zeros((2, 3)), held)).round(2)
  array([ 1.28,  0.43, -1.72])
  """
  compared = _compared_records(population, evidence.target.size)
  ratio = relative_confidence(
    evidence, temperature=temperature, offline=offline, offline_a=offline_a
  )
  # The average leaves out x. The term of x is 0, so only the number of terms changes.
  others = np.maximum(compared.sum() - compared, 1)
  return (compared.sum() * ratio - ratio[compared].sum()) / others


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

  Each shadow model plays the target once, if enough others are left. Its members are known, so each
  setting has a true positive rate on it; the real target's members are not used.

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
    empty = "temperatures" if gammas else "gammas"
    raise UserError("must hold at least one value to try", field=empty)
  for name, gamma in validate.entries(gammas=gammas).items():
    validate.positive(**{name: gamma})
    if gamma < 1:
      raise UserError("must be >= 1", field=name, value=gamma)
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
        roc.curve_of(_beaten_share(ratio, gamma=gamma, compared=everyone), members)
        for ratio, (_, members) in zip(ratios, games)
      ]
      # Each model has its own curve, since pooled scores would mix their scales.
      rate = np.mean([curve.tpr[curve.fpr <= fpr].max() for curve in curves])
      quality = (float(rate), -gamma, float(np.mean([curve.auc for curve in curves])))
      if quality > best:
        best = quality
        chosen = (gamma, temperature)
  return RmiaSettings(*chosen)


def rmia_tuned(evidence: Evidence, *, offline: bool = False) -> np.ndarray:
  """Returns the scores [n] of `rmia` with the gamma and temperature that `tune_rmia` chooses.

  Raises UserError as these two functions do.

  >>> from dpjax.attacks.shadows import random_halves
  >>> held = random_halves(8, 4, seed=0)
  >>> rmia_tuned(Evidence([9.0, 2.0, 1.0, 0.0], held + 0.0, held)).round(2)
  array([1.  , 0.67, 0.33, 0.  ])
  """
  chosen = tune_rmia(evidence, offline=offline)
  return rmia(evidence, offline=offline, **chosen._asdict())


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


def bavaria(
  evidence: Evidence, *, offline: bool = False, prior_weight: float = 8.0
) -> np.ndarray:
  """Returns log p(t | in) - log p(t | out) [n] under Student-t predictive distributions.

  `lira` uses a variance for each record, which a few shadows estimate badly, or one for all, wrong
  for most. A conjugate prior is between the two: it counts the pooled variance of all records as
  some number of shadows, to which the record's own are added.

  t is the target's log odds of a record. Over models, log odds of a record are N(m, v). The prior
  of m is flat. The prior of v is inverse gamma, with the pooled variance of its side (in or out),
  worth `prior_weight` shadows. Let k shadows have mean c and sum S of squared deviations. Then a
  further model's log odds T follow Student's t distribution around c. It has
  d = prior_weight + k - 1 degrees of freedom, and the squared scale
  (prior_weight * pooled + S) / d * (1 + 1 / k). Source: arXiv 2603.11799, "BaVarIA-t"; the default
  weight is dpjax's. Offline, the score is the logit of P(T <= t | out), which grows with t.

  Args:
    offline: whether to use only shadows that did not hold a record.
    prior_weight: number of shadows that the prior counts as. A large number gives nearly one
      variance for all records; 0 gives each record its own variance.

  Raises UserError as `lira` does with a fixed variance, or without one if prior_weight is 0.

  >>> shadows = np.array([[1.0, 9.0], [2.0, 7.0], [8.0, 1.0], [9.0, 3.0]])
  >>> held = np.array([[False, True]] * 2 + [[True, False]] * 2)
  >>> bavaria(Evidence([9.0, 2.0], shadows, held)).round(1)  # record 0 was in, 1 was out
  array([ 7.5, -5.5])
  """
  validate.non_negative(prior_weight=prior_weight)
  least = 1 if prior_weight else 2
  center, scale, freedom = _predictive(evidence.side(False, least, "bavaria"), prior_weight)
  z = (evidence.target - center) / scale
  if offline:
    # The logit keeps digits in both tails, where P itself rounds to 0 or 1.
    below = special.stdtr(freedom, -np.abs(z))
    return np.sign(z) * (np.log1p(-below) - np.log(np.maximum(below, np.finfo(float).tiny)))
  outside = _log_student(z, freedom) - np.log(scale)
  center, scale, freedom = _predictive(evidence.side(True, least, "bavaria"), prior_weight)
  return _log_student((evidence.target - center) / scale, freedom) - np.log(scale) - outside


def _predictive(
  side: np.ndarray, weight: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (center, scale, degrees of freedom), each [n], of scores [S, n]; NaN is left out."""
  count = np.sum(~np.isnan(side), axis=0)
  center = np.nanmean(side, axis=0)
  squares = np.nansum((side - center) ** 2, axis=0)
  # If every record has only one score, there is no variance to pool, and the divisor would be 0.
  pooled = squares.sum() / max(np.sum(count - 1), 1)
  freedom = weight + count - 1.0
  variance = (weight * pooled + squares) / freedom * (1 + 1 / count)
  return center, np.sqrt(variance) + _FLOOR, freedom


def _log_student(z: np.ndarray, freedom: np.ndarray) -> np.ndarray:
  """Returns the log density of Student's t distribution at z, for `freedom` degrees of freedom."""
  constant = special.gammaln((freedom + 1) / 2) - special.gammaln(freedom / 2)
  spread = 0.5 * np.log(freedom * math.pi)
  # The square may overflow. Beyond 1e100, log(z^2 / freedom) replaces log1p: they are equal there.
  far = np.abs(z) > 1e100
  square = np.log1p(np.where(far, 0.0, z) ** 2 / freedom)
  square = np.where(
    far, 2 * np.log(np.where(far, np.abs(z), 1.0)) - np.log(freedom), square
  )
  return constant - spread - (freedom + 1) / 2 * square


# Attacks that need only a target's `Evidence`.
MEMBERSHIP_ATTACKS: dict[str, Callable[[Evidence], np.ndarray]] = {
  "loss": loss_threshold,
  "lira": lira,
  "lira_fixed": functools.partial(lira, fixed_variance=True),
  "lira_offline": functools.partial(lira, offline=True),
  "lira_offline_fixed": functools.partial(lira, offline=True, fixed_variance=True),
  "rmia": rmia,
  "rmia_offline": functools.partial(rmia, offline=True),
  "rmia_tuned": rmia_tuned,
  "rmia_tuned_offline": functools.partial(rmia_tuned, offline=True),
  "informia": informia,
  "informia_offline": functools.partial(informia, offline=True),
  "bavaria": bavaria,
  "bavaria_offline": functools.partial(bavaria, offline=True),
}

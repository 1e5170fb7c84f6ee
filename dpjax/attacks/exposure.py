"""Exposure of canaries: how well a language model remembers a secret line of its training text.

Carlini et al. 2019, "The Secret Sharer" (arXiv:1802.08232). A canary is a line of a declared
format, such as "the key of ada is 4711.". The secret in it was drawn uniformly. An attacker who
knows the format ranks all possible secrets by their loss. The exposure of a canary is log2(number
of secrets) - log2(rank), in bits. It is largest, log2(number of secrets), at rank 1.

| exposure by         | needs                                 | exact                        |
| ------------------- | ------------------------------------- | ---------------------------- |
| `exposure_by_rank`  | the loss of every secret              | yes                          |
| `extrapolate`       | the losses of some hundred secrets    | no: a skew-normal is fitted  |

A canary that was never in the text has a uniform rank. So the mean of its exposure is about 1.44
bits (log2 e), and not 0. `ExposureBound` gives the exposure that a proved epsilon allows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np
from scipy import special, stats

from dpjax import validate
from dpjax.attacks import allowed, signals
from dpjax.types import Example, HostArray, LossFn, Params
from dpjax.validate import UserError

# A format with more secrets is refused, since `exposure_by_rank` needs the loss of each.
_MOST_SECRETS = 10**7
# Larger skewness is cut to this before the fit, since a skew-normal has at most .9953.
_MOST_SKEWED = 0.99
# The expected exposure is summed rank by rank up to this rank, and in larger steps beyond.
_EACH_RANK = 10_000


@dataclasses.dataclass(frozen=True)
class CanaryFormat:
  """A line with a secret in it: every character of the secret is drawn from an alphabet.

  Args:
    template: the line, with one "{}" where the secret stands.
    alphabet: the different characters from which a secret is made, at least two.
    length: number of characters of the secret.

  Raises UserError for a template without exactly one "{}", an alphabet that repeats a character or
  has fewer than two, or more than 1e7 secrets.

  >>> form = CanaryFormat("the key is {}.", alphabet="01", length=3)
  >>> form.num_secrets, form.text(5)
  (8, 'the key is 101.')
  """

  template: str
  alphabet: str = "0123456789"
  length: int = 4

  def __post_init__(self):
    if not isinstance(self.template, str) or self.template.count("{}") != 1:
      raise UserError("must hold one '{}'", field="template", value=self.template)
    if not isinstance(self.alphabet, str) or len(set(self.alphabet)) != len(self.alphabet):
      raise UserError(
        "must be characters, none twice", field="alphabet", value=self.alphabet
      )
    if len(self.alphabet) < 2:
      raise UserError("must hold at least 2", field="alphabet", value=self.alphabet)
    validate.integer_at_least(1, length=self.length)
    if self.length * math.log(len(self.alphabet)) > math.log(_MOST_SECRETS) + 1e-9:
      raise UserError(
        f"leaves {len(self.alphabet)}^{self.length} secrets, must leave at most "
        f"{_MOST_SECRETS}",
        field="length",
        value=self.length,
      )

  @property
  def num_secrets(self) -> int:
    """Number of possible secrets, len(alphabet)^length."""
    return len(self.alphabet) ** self.length

  def text(self, secret: int) -> str:
    """Returns the line with secret number `secret`, from 0 to num_secrets - 1."""
    validate.integer_in(0, self.num_secrets - 1, secret=secret)
    base = len(self.alphabet)
    places = [secret // base**place % base for place in reversed(range(self.length))]
    # `str.format` would read other braces of the template, which are plain text.
    return self.template.replace("{}", "".join(self.alphabet[place] for place in places))


def sequence_losses(
  loss_fn: LossFn, params: Params, tokens: HostArray, *, batch_size: int = 500
) -> np.ndarray:
  """Returns the loss of each line: tokens [n, T] -> float64 [n].

  Args:
    loss_fn: loss of ONE example, such as `losses.next_token(..., reduction="sum")`, the
      log-perplexity of a line. Sums compare fairly, since all secrets of a format are equally long.
    params: parameters of the attacked model.
    tokens: lines [n, T].
    batch_size: number of lines that are evaluated at once.

  >>> sequence_losses(lambda w, e: w * e.x.sum(), 2.0, np.array([[1, 2], [0, 1]])).tolist()
  [6.0, 2.0]
  """
  validate.integer_at_least(1, batch_size=batch_size)
  lines = np.asarray(tokens)
  if lines.ndim != 2 or not len(lines):
    raise UserError("must be lines [n, T]", field="tokens.shape", value=lines.shape)
  each = jax.jit(jax.vmap(lambda row: loss_fn(params, Example(row, 0))))
  losses = signals.by_parts(lambda part: each(lines[part]), len(lines), batch_size)
  return np.asarray(losses, np.float64)


class Exposure(NamedTuple):
  """Exposure of a canary among all secrets of its format."""

  bits: float
  rank: int
  num_secrets: int


def exposure_by_rank(losses: HostArray, secret: int) -> Exposure:
  """Returns the exposure of a canary, from the losses of all secrets.

  Secrets of the same loss count as ahead of the canary, so that a model that knows nothing
  exposes nothing.

  Args:
    losses: [N], the loss of every secret of the format.
    secret: place of the true secret in `losses`.

  Raises UserError for NaN, or a place that does not exist.

  >>> exposure_by_rank([3.0, 1.0, 2.0, 4.0], secret=2)  # second of four
  Exposure(bits=1.0, rank=2, num_secrets=4)
  """
  values = _losses("losses", losses, least=2)
  validate.integer_in(0, len(values) - 1, secret=secret)
  rank = int(np.sum(values <= values[secret]))
  return Exposure(math.log2(len(values)) - math.log2(rank), rank, len(values))


def _losses(name: str, losses: HostArray, *, least: int) -> np.ndarray:
  # NaN is refused: every comparison with NaN is False, so a diverged model would seem to leak.
  values = signals.numbers(name, losses)
  if values.ndim != 1 or len(values) < least:
    raise UserError(
      f"must be at least {least} numbers [n]", field=f"{name}.shape", value=values.shape
    )
  return values


class Extrapolation(NamedTuple):
  """Exposure of a canary, estimated by a skew-normal distribution, and the quality of the fit."""

  bits: float
  statistic: float  # Kolmogorov and Smirnov's distance of the references from the fit
  p_value: float  # of that distance; small: the bits are not to be believed
  outside: bool  # the canary's loss is below all references: the fit is extrapolated


def extrapolate(
  loss: float, references: HostArray, *, draws: int = 200, seed: int = 0
) -> Extrapolation:
  """Estimates the exposure: -log2 of the share of secrets whose loss is at most the canary's.

  The losses of random secrets are assumed to be skew-normal (Carlini et al. 2019, section 4.3), and
  are fitted here by their first three moments. A canary with a loss below all references may
  get more bits than counting could give. A fit is always close to its own data, so the p-value
  comes from a parametric bootstrap.

  Args:
    loss: loss of the canary.
    references: [m], losses of at least 20 random secrets of the same format.
    draws: number of samples for the p-value; each is drawn from the fit, and fitted again.
    seed: seed of these samples.

  Raises UserError for numbers that are not finite, too few references, or equal references.

  >>> references = 10 + special.ndtri(np.arange(0.5, 1000) / 1000)
  >>> extrapolated = extrapolate(6.0, references)  # 4 deviations: -log2(3.2e-5)
  >>> round(extrapolated.bits, 1), extrapolated.outside, extrapolated.p_value > 0.5
  (15.0, True, True)
  """
  validate.integer_at_least(20, draws=draws)
  validate.integer_at_least(0, seed=seed)
  if not math.isfinite(loss):
    raise UserError("must be finite", field="loss", value=loss)
  values = _losses("references", references, least=20)
  if not np.isfinite(values).all():
    raise UserError("must be finite", field="references")
  if np.ptp(values) == 0:
    raise UserError("must not all be equal: nothing can be fitted", field="references")
  shape, place, scale = _fit(values)
  statistic = _distance(values)
  rng = np.random.default_rng(seed)
  delta = shape / math.hypot(1.0, shape)
  sizes = (draws, len(values))
  # delta |Z| + sqrt(1 - delta^2) Z' is skew-normal for standard normal Z and Z' (Azzalini 1985).
  samples = delta * np.abs(rng.standard_normal(sizes))
  samples += math.sqrt(1 - delta**2) * rng.standard_normal(sizes)
  further = sum(_distance(sample) >= statistic for sample in samples)
  bits = -_log_cdf((loss - place) / scale, shape) / math.log(2)
  return Extrapolation(
    bits=max(0.0, bits),
    statistic=statistic,
    p_value=(1 + further) / (1 + draws),
    outside=bool(loss < values.min()),
  )


def _fit(values: np.ndarray) -> tuple[float, float, float]:
  """Returns (shape, location, scale) of the skew-normal that has the first moments of `values`.

  These moments are mean, variance and skewness; the skewness is cut to [-.99, .99].
  """
  skewness = float(np.clip(stats.skew(values), -_MOST_SKEWED, _MOST_SKEWED))
  part = abs(skewness) ** (2 / 3)
  delta = math.sqrt(math.pi / 2 * part / (part + ((4 - math.pi) / 2) ** (2 / 3)))
  delta = math.copysign(delta, skewness)
  scale = float(np.std(values)) / math.sqrt(1 - 2 * delta**2 / math.pi)
  place = float(np.mean(values)) - scale * delta * math.sqrt(2 / math.pi)
  return delta / math.sqrt(1 - delta**2), place, scale


def _distance(values: np.ndarray) -> float:
  """Returns the largest distance of the values' distribution function from that of their fit."""
  shape, place, scale = _fit(values)
  fitted = stats.skewnorm.cdf(np.sort(values), shape, place, scale)
  steps = np.arange(len(values) + 1) / len(values)
  return float(max(np.max(steps[1:] - fitted), np.max(fitted - steps[:-1])))


def _log_cdf(z: float, shape: float) -> float:
  """Returns log of the standard skew-normal distribution function at z.

  Integrates the density below z, in logarithms. The usual formula with Owen's T loses all digits in
  the tail, where canaries lie: there it is a difference of nearly equal numbers.
  """
  # Near z the density changes over lengths of 1 / (1 + |z| (1 + shape^2)), and further away over
  # lengths of 1. A geometric grid resolves both.
  width = 1.0 / (1.0 + abs(z) * (1.0 + shape**2))
  below = np.geomspace(1e-7 * width, max(z, 0.0) + 40.0, 6000)
  points = z - below
  log_density = math.log(2) + stats.norm.logpdf(points) + special.log_ndtr(shape * points)
  # The sum runs over equal steps of log(below), with d below = below * d log(below).
  step = math.log(below[-1] / below[0]) / (len(below) - 1)
  inside = float(np.logaddexp.reduce(log_density + np.log(below))) + math.log(step)
  return min(0.0, float(np.logaddexp(inside, log_density[0] + math.log(below[0]))))


@dataclasses.dataclass(frozen=True)
class ExposureBound:
  """Upper bounds on a canary's exposure under a guarantee, for every attacker.

  The secret is uniform among N, and occurs in `copies` records. Without those records the output
  does not depend on the secret, so Pr[rank <= m] <= m / N for every way to rank. With the records,
  Pr[rank <= m] is at most G(...G(m / N)). G is the line of the guarantee (the largest TPR at an
  FPR), applied once for each copy: group privacy (Dong, Roth and Su 2022, Theorem 2.14). For one
  (epsilon, delta) and one copy this means Pr[exposure >= b] <= e^epsilon / 2^b + delta.

  Args:
    line: line of the guarantee, such as `allowed.by_plan(plan)`.
    num_secrets: number N of possible secrets.
    copies: number of protected units that hold the secret. A unit is a line, or a user with any
      number of such lines.

  Raises UserError for fewer than 2 secrets, or no copy.

  >>> bound = ExposureBound(allowed.by_epsilon(np.log(4), 0.0), num_secrets=64, copies=1)
  >>> round(bound.probability(5.0), 4)  # one of the first two: 4 * 2 / 64
  0.125
  """

  line: allowed.AllowedRoc
  num_secrets: int
  copies: int = 1

  def __post_init__(self):
    validate.integer_at_least(2, num_secrets=self.num_secrets)
    validate.integer_at_least(1, copies=self.copies)

  def probability(self, bits: float) -> float:
    """Returns an upper bound on the probability of an exposure of at least `bits`."""
    if not math.isfinite(bits):
      raise UserError("must be finite", field="bits", value=bits)
    if bits <= 0:
      return 1.0
    # The rank is a whole number; the factor 1 + 1e-9 undoes the rounding of a power of 2.
    rank = math.floor(2.0 ** (math.log2(self.num_secrets) - bits) * (1 + 1e-9))
    # No rank is below 1, so no exposure is above log2(num_secrets).
    return float(self._chance_of_rank(np.array([rank]))[0]) if rank else 0.0

  def mean(self) -> float:
    """Returns an upper bound on the mean exposure over secret and training, in bits.

    With many secrets it is about log2 e even if nothing leaks.
    """
    each = np.arange(1, min(self.num_secrets, _EACH_RANK) + 1)
    number = 1 + int(4000 * math.log10(max(1.0, self.num_secrets / each[-1])))
    further = np.unique(np.geomspace(each[-1], self.num_secrets, number).round())
    ranks = np.unique(np.concatenate([each, further]))
    # E[log2 N - log2 rank] is the sum over m of Pr[rank <= m] (log2(m + 1) - log2 m). Within a step
    # of several ranks the probability is at most that of the last rank.
    return float(np.sum(self._chance_of_rank(ranks[1:] - 1) * np.diff(np.log2(ranks))))

  def most(self, confidence: float = 0.95) -> float:
    """Returns an upper bound on the exposure, in bits, that holds with probability `confidence`."""
    validate.open_unit(confidence=confidence)
    low = 0  # a rank that is exceeded with this confidence
    high = self.num_secrets
    while high - low > 1:
      middle = (low + high) // 2
      if self._chance_of_rank(np.array([middle]))[0] <= 1 - confidence:
        low = middle
      else:
        high = middle
    return math.log2(self.num_secrets) - math.log2(low + 1)

  def _chance_of_rank(self, ranks: np.ndarray) -> np.ndarray:
    """Returns upper bounds on the probability that the rank is at most each of `ranks`."""
    return np.asarray(allowed.of_group(self.line, self.copies)(ranks / self.num_secrets))

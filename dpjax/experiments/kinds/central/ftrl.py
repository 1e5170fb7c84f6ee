"""DP-FTRL from a config: which strategy correlates the noise, which sampler bounds who
takes part when."""

from __future__ import annotations

from typing import Any

from dpjax import names, sampling, validate
from dpjax.experiments.config import fields, user_code
from dpjax.experiments.kinds.central.config import PrivacyConfig, TrainConfig
from dpjax.noise import NoiseShape, correlated
from dpjax.noise import shape as shapes
from dpjax.validate import UserError

SAMPLERS = {
  "cyclic": sampling.CyclicSampler,
  "cyclic_poisson": sampling.CyclicPoissonSampler,
  "balls_in_bins": sampling.BallsInBinsSampler,
  "min_sep": sampling.MinSepSampler,
}


def check_levels(privacy: PrivacyConfig) -> None:
  """Raises unless the noise levels are factors of some noise."""
  levels = privacy.noise_levels
  validate.factors(**{"privacy.noise_levels": levels})
  if privacy.method == "dp_sgd":
    shapes.check_levels(levels, privacy.accountant, name="privacy.noise_levels")
  if levels and privacy.method == "sgd":
    raise UserError(
      "not with privacy.method='sgd', which adds no noise",
      field="privacy.noise_levels",
      value=privacy.noise_levels,
    )


def check(privacy: PrivacyConfig) -> None:
  """Raises UserError for what can be told without data."""
  ftrl = privacy.ftrl
  names.one_of(SAMPLERS, **{"privacy.ftrl.sampler": ftrl.sampler})
  if cyclic(privacy):
    check_passes(privacy, f"privacy.ftrl.sampler={ftrl.sampler!r}")
  if separation(privacy) * privacy.sampling_prob > 1 + 1e-9 and not cyclic(privacy):
    raise UserError(
      f"must be <= {1 / privacy.sampling_prob:.6g}, the steps of a pass, for "
      f"privacy.ftrl.sampler={ftrl.sampler!r}, whose rows take part every that "
      "many steps",
      field="privacy.ftrl.separation",
      value=ftrl.separation,
    )


def cyclic(privacy: PrivacyConfig) -> bool:
  """Whether every pass takes each example once."""
  return privacy.ftrl.sampler in ("cyclic", "balls_in_bins")


def check_passes(privacy: PrivacyConfig, told: str) -> None:
  """Raises, for a sampler that is `told`, unless a pass is a whole number of steps."""
  sampling.check_passes(privacy.sampling_prob, told, name="privacy.sampling_prob")


def separation(privacy: PrivacyConfig) -> int:
  """Least number of steps between two participations of one example: a pass, unless the
  sampler lets it come back as soon as `separation` allows.

  >>> from dpjax.experiments.kinds.central.config import FtrlConfig
  >>> separation(PrivacyConfig(ftrl=FtrlConfig(sampler="cyclic_poisson", separation=4)))
  4
  """
  if cyclic(privacy):
    return sampling.steps_per_pass(privacy.sampling_prob)
  return privacy.ftrl.separation or max(1, int(1 / privacy.sampling_prob + 1e-9))


def sampler(
  privacy: PrivacyConfig,
  num_steps: int,
  num_examples: int,
  capacity: int,
  unit: str = "example",
) -> sampling.Sampler:
  """The sampler of a DP-FTRL run, with the expected batch of `sampling_prob`, over rows
  that are one `unit` each."""
  apart = separation(privacy)
  rate = privacy.sampling_prob
  if names.is_path(privacy.ftrl.sampler):
    field = "privacy.ftrl.sampler"
    return user_code.sampler(
      privacy.ftrl.sampler, field, num_examples=num_examples, prob=rate, unit=unit
    )
  if privacy.ftrl.sampler == "cyclic" and apart > num_examples:
    raise UserError(
      f"its pass of {apart} steps must be of at most {num_examples}, one for "
      f"each {unit}; a larger batch makes it shorter",
      field="privacy.ftrl.sampler",
      value="cyclic",
    )
  if privacy.ftrl.sampler == "cyclic":
    return sampling.CyclicSampler(steps_per_pass=apart, num_examples=num_examples)
  if privacy.ftrl.sampler == "balls_in_bins":
    return sampling.BallsInBinsSampler(num_bins=apart, capacity=capacity)
  if privacy.ftrl.sampler == "cyclic_poisson":
    prob = _prob_in_turn(privacy)
    return sampling.CyclicPoissonSampler(prob=prob, num_groups=apart, capacity=capacity)
  prob = sampling.MinSepSampler.prob_of(rate, apart)
  return sampling.MinSepSampler(
    prob=prob, min_sep=apart, num_steps=num_steps, capacity=capacity
  )


def _prob_in_turn(privacy: PrivacyConfig) -> float:
  """Returns an example's probability in a step of its group; 1 where only rounding is below."""
  prob = privacy.sampling_prob * separation(privacy)
  return 1.0 if prob > 1 - 1e-9 else prob


def correlation(privacy: PrivacyConfig, num_steps: int) -> correlated.Correlation:
  """The strategy, optimised for this run's steps where it has coefficients.

  >>> correlation(PrivacyConfig(sampling_prob=0.5), 10).bands
  2
  """
  apart = separation(privacy)
  made = privacy.ftrl.strategy.make(num_steps, apart)
  # with everybody of a group nothing is amplified, and any noise has its price
  amplified = privacy.ftrl.sampler == "cyclic_poisson" and _prob_in_turn(privacy) < 1
  if amplified and (made.bands is None or made.bands > apart):
    raise UserError(
      f"must have at most {apart} bands, the steps between two of an example, "
      "for privacy.ftrl.sampler='cyclic_poisson', which amplifies no other "
      f"noise; it has {made.bands or 'no end of them'}",
      field="privacy.ftrl.strategy",
      value=fields.name_of(privacy.ftrl, "strategy"),
    )
  return made


def noise_shape(config: TrainConfig, shares: Any = None) -> NoiseShape:
  """How noise is shaped over the steps, and over groups by their shares."""
  privacy = config.privacy
  steps = config.num_steps
  return NoiseShape(
    schedule=staircase(privacy.noise_levels, steps) if privacy.noise_levels else (),
    correlation=correlation(privacy, steps) if privacy.method == "dp_ftrl" else None,
    shares=shares,
  )


def staircase(levels: list[float], num_steps: int) -> tuple[float, ...]:
  """Each level for an equal share of the steps, in their order.

  >>> staircase([1.5, 0.5], 5)
  (1.5, 1.5, 1.5, 0.5, 0.5)

  Raises:
    UserError: more levels than steps, of which some would be left out.
  """
  if len(levels) > num_steps:
    raise UserError(
      f"must be at most num_steps={num_steps} of them, not {len(levels)}",
      field="privacy.noise_levels",
      value=levels,
    )
  return tuple(levels[step * len(levels) // num_steps] for step in range(num_steps))

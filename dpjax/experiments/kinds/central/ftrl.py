"""Makes the parts of DP-FTRL from a config: the correlation of the noise, and the sampler that
bounds participation."""

from __future__ import annotations

from typing import Any

from dpjax import sampling, validate
from dpjax.experiments.config import fields, samplers
from dpjax.experiments.kinds.central.config import DpFtrl, DpSgd, NoisySteps, TrainConfig
from dpjax.noise import NoiseShape, correlated
from dpjax.noise import shape as shapes
from dpjax.sampling import batch_sizes
from dpjax.sampling.registry import Sizing
from dpjax.validate import UserError


def check_levels(privacy: NoisySteps) -> None:
  """Raises UserError for noise levels that are no valid factors, or too many for the
  accountant."""
  levels = privacy.noise_levels
  validate.factors(**{"privacy.noise_levels": levels})
  if isinstance(privacy, DpSgd):
    shapes.check_levels(levels, privacy.accountant, name="privacy.noise_levels")


def check(privacy: DpFtrl) -> None:
  """Raises UserError if a pass has no whole number of steps, for a sampler that takes each example
  once in it (`cyclic`). For another sampler, a pass must not be shorter than the separation."""
  name = privacy.sampler.name
  if cyclic(privacy):
    check_passes(privacy, f"privacy.sampler={name!r}")
  elif steps_apart(privacy) * privacy.sampling_prob > 1 + 1e-9:
    raise UserError(
      f"must be <= {1 / privacy.sampling_prob:.6g}, the steps of a pass, for "
      f"privacy.sampler={name!r}, whose rows take part every that "
      "many steps",
      field="privacy.sampler.steps_apart",
      value=privacy.sampler.number("steps_apart"),
    )


def cyclic(privacy: DpFtrl) -> bool:
  """Returns whether the sampler takes each example once in every pass."""
  scheme = privacy.sampler.scheme
  return scheme is not None and scheme.in_passes


def check_passes(privacy: DpFtrl, sampler: str) -> None:
  """Raises UserError unless a pass has a whole number of steps; the message names `sampler`."""
  batch_sizes.check_passes(privacy.sampling_prob, sampler, name="privacy.sampling_prob")


def _size(privacy: DpFtrl) -> Sizing:
  """Returns the numbers of the config that a sampler needs; `num_examples` is still 0."""
  return Sizing(
    sampling_prob=privacy.sampling_prob,
    num_examples=0,
    steps_apart=privacy.sampler.number("steps_apart"),
    neighboring_relation=privacy.neighboring_relation,
  )


def steps_apart(privacy: DpFtrl) -> int:
  """Returns the smallest number of steps between two participations of one example.

  It is the length of a pass, unless the sampler allows an example again after `steps_apart` steps.

  >>> steps_apart(DpFtrl(sampler={"name": "cyclic_poisson", "steps_apart": 4}))
  4
  """
  if cyclic(privacy):
    return batch_sizes.steps_per_pass(privacy.sampling_prob)
  return _size(privacy).apart


def sampler(
  privacy: DpFtrl,
  num_steps: int,
  num_examples: int,
  capacity: int,
  unit: str = "example",
) -> sampling.Sampler:
  """Returns the sampler of a DP-FTRL run. One row is one `unit`, and the expected batch is
  `sampling_prob` of all rows."""
  size = _size(privacy)._replace(
    num_examples=num_examples, num_steps=num_steps, padded_batch_size=capacity, unit=unit
  )
  return samplers.make(privacy.sampler, size)


def correlation(privacy: DpFtrl, num_steps: int) -> correlated.Correlation:
  """Returns the correlation of the noise. Numbers that the strategy leaves open, such as the
  coefficients of bands, are optimised for this run's steps.

  Raises UserError if the sampler amplifies privacy, and the correlation has too many bands.

  >>> correlation(DpFtrl(sampling_prob=0.5), 10).bands
  2
  """
  apart = steps_apart(privacy)
  noise = privacy.strategy.make(num_steps, apart)
  # If an example takes part in each of its turns with probability 1, sampling amplifies nothing.
  # Then any correlated noise can be accounted for.
  amplified = (
    privacy.sampler.name == sampling.CyclicPoissonSampler.name
    and _size(privacy).turn_prob < 1
  )
  if amplified and (noise.bands is None or noise.bands > apart):
    raise UserError(
      f"must have at most {apart} bands, the steps between two of an example, "
      f"for privacy.sampler={privacy.sampler.name!r}, which amplifies no other "
      f"noise; it has {noise.bands or 'no end of them'}",
      field="privacy.strategy",
      value=fields.name_of(privacy, "strategy"),
    )
  return noise


def noise_shape(config: TrainConfig, shares: Any = None) -> NoiseShape:
  """Returns the shape of the noise over the steps, and over groups of layers.

  Args:
    shares: result of `PerLayer.shares`; None: all layers have the same noise.
  """
  privacy = config.privacy
  if not isinstance(privacy, NoisySteps):
    return NoiseShape()
  steps = config.num_steps
  return NoiseShape(
    schedule=staircase(privacy.noise_levels, steps) if privacy.noise_levels else (),
    correlation=correlation(privacy, steps) if isinstance(privacy, DpFtrl) else None,
    shares=shares,
  )


def staircase(levels: list[float], num_steps: int) -> tuple[float, ...]:
  """Returns one level for each step. Numbers of steps of two levels differ by at most one.

  >>> staircase([1.5, 0.5], 5)
  (1.5, 1.5, 1.5, 0.5, 0.5)

  Raises:
    UserError: there are more levels than steps, so some levels would be left out.
  """
  if len(levels) > num_steps:
    raise UserError(
      f"must be at most num_steps={num_steps} of them, not {len(levels)}",
      field="privacy.noise_levels",
      value=levels,
    )
  # Integer arithmetic is exact, so rounding loses no level.
  return tuple(levels[step * len(levels) // num_steps] for step in range(num_steps))

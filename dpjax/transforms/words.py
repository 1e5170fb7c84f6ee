"""Describes the noise of a step for privacy statements, if the event alone does not describe it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from dpjax import accounting, noise
from dpjax.accounting import text
from dpjax.gradients import Clip
from dpjax.noise import NoiseShape
from dpjax.sampling import Sampler
from dpjax.transforms.group_noise import group_stds

if TYPE_CHECKING:
  from dpjax.transforms.scale_then_privatize import CoordinateScaling

# Largest number of steps for which the dense matrix C of correlated noise is inverted, to find the
# noise of single steps.
_MAX_DENSE = 1024


def noise_in_words(
  clip: Clip,
  noise_shape: NoiseShape,
  sampler: Sampler,
  unit: str,
  noise_multiplier: float,
  normalize_by: float,
  num_steps: int,
  *,
  scaling: CoordinateScaling | None = None,
) -> str:
  """Returns the sentences about the noise for a privacy statement; "" if the event says it all.

  >>> from dpjax.sampling import PoissonSampler
  >>> sampler = PoissonSampler(0.5, 16)
  >>> noise_in_words(Clip(1.0), NoiseShape(), sampler, "example", 1.0, 8.0, num_steps=1)
  ''
  """
  # `together.APART` refuses scaling with all features below.
  if scaling is not None:
    return scaling.statement
  if sampler.participation is not None:
    shown = _stds_in_words(noise_shape, noise_multiplier, num_steps)
    return _correlation(noise_shape, sampler, shown, unit)
  if clip.rule.adapts:
    return clip.rule.statement(noise_multiplier, normalize_by)
  if noise_shape.shares is None:
    return ""
  stds = jax.tree.leaves(group_stds(clip, noise_multiplier, noise_shape.shares))
  low, high = (text.lower(std, digits=6) for std in (min(stds), max(stds)))
  return (
    f"Noise by group: its standard deviation on the sum is {low} to {high}, by the public "
    "shares of the groups; after division by the shares it is the noise above."
  )


def _correlation(noise_shape: NoiseShape, sampler: Sampler, shown: str, unit: str) -> str:
  name = type(noise_shape.strategy).__name__
  steps_apart, cyclic, prob = sampler.participation or (1, False, 1.0)
  apart = (
    f"exactly {steps_apart} steps apart" if cyclic else f"{steps_apart} steps apart or more"
  )
  amplified = (
    "each turn's noise on the largest column of C, with probability "
    f"{accounting.upper(prob, digits=6)}"
    if prob < 1
    else f"one Gaussian mechanism on the columns of C that one {unit} can touch"
  )
  return (
    f"Noise: C^-1 z (strategy {name}), z white. {shown}\nAssumed, and kept by "
    f"{type(sampler).__name__}: the steps of one {unit} are {apart}. Charged as "
    f"{amplified}."
  )


def _stds_in_words(noise_shape: NoiseShape, noise_multiplier: float, num_steps: int) -> str:
  """Describes the noise on the sum by its standard deviations.

  The correlation's matrix C has a unit diagonal, so the noise of step t is z_t plus a part that
  earlier noise fixes."""
  factors = np.array(noise_shape.schedule or np.ones(num_steps))
  # Numbers are rounded down, since a statement must not claim more noise than there is.
  number = lambda value: text.lower(noise_multiplier * value, digits=6)
  low = number(factors.min())
  high = number(factors.max())
  new = low if low == high else f"{low} to {high}"
  words = (
    f"Given the noise of all earlier steps, that of a step has {new} times the clip norm as "
    "its standard deviation"
  )
  if num_steps > _MAX_DENSE:
    return f"{words}; taken alone it has more."
  matrix = noise.correlated.matrix(noise_shape.strategy, num_steps)
  alone = np.linalg.norm(np.linalg.inv(matrix) * factors, axis=1)
  return f"{words}; taken alone it has up to {number(alone.max())}."

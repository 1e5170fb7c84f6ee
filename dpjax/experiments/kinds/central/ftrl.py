"""DP-FTRL from a section `privacy`, with examples or clients as rows: how far apart two steps of a
row are, and the correlation of the noise."""

from __future__ import annotations

from typing import Any

from dpjax import sampling
from dpjax.experiments.config import choices
from dpjax.noise import correlated
from dpjax.sampling.registry import Sizing, steps_per_pass
from dpjax.validate import UserError


def check_apart(privacy: Any, sampling_prob: float) -> None:
  """Raises UserError if a pass is shorter than the separation that a section `privacy` asks for."""
  asked = privacy.sampler.number("steps_apart")
  if asked is not None and asked * sampling_prob > 1 + 1e-9:
    raise UserError(
      f"must be <= {1 / sampling_prob:.6g}, the steps of a pass, for "
      f"privacy.sampler={privacy.sampler.name!r}, whose rows take part every that "
      "many steps",
      field="privacy.sampler.steps_apart",
      value=asked,
    )


def steps_apart(privacy: Any, sampling_prob: float) -> int:
  """Returns the smallest number of steps between two participations of one example.

  It is the length of a pass, unless the sampler allows an example again after `steps_apart` steps.

  >>> from dpjax.experiments.kinds.central.config import DpFtrl
  >>> steps_apart(DpFtrl(sampler={"name": "cyclic_poisson", "steps_apart": 4}), 0.05)
  4
  """
  scheme = privacy.sampler.scheme
  if scheme is not None and scheme.in_passes:
    return steps_per_pass(sampling_prob)
  return _size(privacy, sampling_prob).apart


def _size(privacy: Any, sampling_prob: float) -> Sizing:
  return privacy.sampler.sizing(sampling_prob=sampling_prob, num_examples=0)


def correlation(
  privacy: Any, sampling_prob: float, num_steps: int
) -> correlated.Correlation:
  """Returns the correlation of the noise. Numbers that the strategy leaves open, such as the
  coefficients of bands, are optimised for this run's steps.

  Raises UserError if the sampler amplifies privacy, and the correlation has too many bands.

  >>> from dpjax.experiments.kinds.central.config import DpFtrl
  >>> correlation(DpFtrl(), 0.5, 10).bands
  2
  """
  apart = steps_apart(privacy, sampling_prob)
  noise = privacy.strategy.make(num_steps, apart)
  # If an example takes part in each of its turns with probability 1, sampling amplifies nothing.
  # Then any correlated noise can be accounted for.
  amplified = (
    privacy.sampler.name == sampling.CyclicPoissonSampler.name
    and _size(privacy, sampling_prob).turn_prob < 1
  )
  if amplified and (noise.bands is None or noise.bands > apart):
    raise UserError(
      f"must have at most {apart} bands, the steps between two of an example, "
      f"for privacy.sampler={privacy.sampler.name!r}, which amplifies no other "
      f"noise; it has {noise.bands or 'no end of them'}",
      field="privacy.strategy",
      value=choices.name_of(privacy, "strategy"),
    )
  return noise

"""Makes the plan of a training run from a `TrainConfig`, and checks its privacy settings."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from dpjax import data, gradients, noise, sampling, transforms, validate
from dpjax.experiments.config import choices, common, samplers
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds import privacy_section
from dpjax.experiments.kinds.central import ftrl, normalization
from dpjax.experiments.kinds.central.config import (
  ConstantClip,
  DpFtrl,
  DpSgd,
  Guarantee,
  LeastSquares,
  NoisySteps,
  TrainConfig,
)
from dpjax.experiments.run import sizes
from dpjax.noise import shape as shapes
from dpjax.plan import Plan
from dpjax.transforms.clip_scale import scheduled_scales
from dpjax.validate import UserError

NOISE_AWARE = ("dp_adam", "dp_sgld")  # optimizers that must know the noise of the plan


def check(config: TrainConfig) -> None:
  """Raises UserError for incompatible fields; loads no data."""
  privacy = config.privacy
  if config.release and not config.is_private:
    raise UserError(
      "needs privacy='dp_sgd' or another private one, not 'sgd'; without noise nothing may be "
      "released",
      field="release",
      value=True,
    )
  if not isinstance(privacy, LeastSquares):
    _check_prob(privacy)
  if isinstance(privacy, DpFtrl):
    ftrl.check_apart(privacy, privacy.sampling_prob)
  if isinstance(privacy, NoisySteps):
    _check_levels(privacy)
    audited = config.audit is not None and config.audit.kind == "gradient"
    if audited and _scaling(privacy) is not None:
      raise UserError(
        "not with privacy.scaling, which makes the noise along a canary's parameter another at "
        "each step; 'mislabelled' and 'random' go with it",
        field="audit.kind",
        value="gradient",
      )
  _check_noise_aware(config)
  if isinstance(privacy, Guarantee):
    privacy_section.check(privacy, release=config.release, num_steps=config.num_steps)


def _check_prob(privacy: Any) -> None:
  """Raises UserError for a sampling probability that the sampler does not support."""
  chosen = privacy.sampler
  if chosen.scheme is None:
    return
  size = chosen.sizing(sampling_prob=privacy.sampling_prob, num_examples=0)
  with within("privacy"), within("sampler", of=chosen):
    chosen.scheme.check_prob(size, purpose=f"privacy.sampler={chosen.name!r}")


def _check_levels(privacy: NoisySteps) -> None:
  """Raises UserError for noise levels that are no valid factors, or too many for the accountant,
  and for noise by step beside a clip norm that follows the data."""
  levels = privacy.noise_levels
  validate.factors(**{"privacy.noise_levels": levels})
  if isinstance(privacy, DpSgd):
    shapes.check_levels(levels, privacy.accountant, name="privacy.noise_levels")
  if not privacy.clipping.adapts:
    return
  schedule = choices.name_of(privacy, "clip_schedule")
  for field, value in (("noise_levels", levels), ("clip_schedule", schedule)):
    if value not in ([], "constant"):
      raise UserError(
        f"not with privacy.clipping={choices.name_of(privacy, 'clipping')!r}, whose clip norm, and "
        "so its noise, follows the data",
        field=f"privacy.{field}",
        value=value,
      )


def _check_noise_aware(config: TrainConfig) -> None:
  """Raises UserError for an optimizer that must know the noise, where it has not one standard
  deviation or there is none."""
  privacy = config.privacy
  name = choices.name_of(config.optimizer, "rule")
  if name not in NOISE_AWARE:
    return
  needs = functools.partial(UserError, field="optimizer.rule", value=name)
  if isinstance(privacy, NoisySteps):
    schedule = choices.name_of(privacy, "clip_schedule")
    strategy = "identity"
    if isinstance(privacy, DpFtrl):
      strategy = choices.name_of(privacy, "strategy")
    changing = privacy.clipping.adapts or schedule != "constant" or privacy.noise_levels
    if changing or strategy != "identity":
      raise needs(
        "needs noise of one standard deviation at every step, so neither "
        "privacy.clipping='adaptive' nor a privacy.clip_schedule nor "
        f"privacy.noise_levels nor privacy.strategy={strategy!r} of dp_ftrl"
      )
    if _scaling(privacy) is not None:
      raise needs(
        "needs noise of one standard deviation at every step and coordinate, which "
        f"privacy.scaling={choices.name_of(privacy, 'scaling')!r} does not leave"
      )
  noiseless = not isinstance(privacy, Guarantee) or privacy.noise_multiplier == 0
  if noiseless and name == "dp_adam":
    raise needs(
      "corrects for the noise of the private gradient, and there is none; use 'adam'"
    )
  if noiseless:
    raise needs(
      "its noise is that of the private gradient; without clipping and noise "
      "(privacy='dp_sgd') nothing is proved, at any temperature"
    )
  rule = getattr(privacy, "clipping", None)
  if name == "dp_sgld" and isinstance(rule, transforms.PerLayer):
    why = " for optimizer.rule='dp_sgld', or the parameters have different temperatures"
    common.only(config, "privacy.clipping.noise", ["shared"], why)


def public_size(config: TrainConfig, train: data.Dataset) -> int:
  """Returns the number of examples that the mechanism may depend on; see `run.sizes`.

  Raises:
    UserError: the run is private under add_or_remove_one, and the declared number is missing or
      above twice the true number.
  """
  privacy = config.privacy
  known = train.nominal_size
  return sizes.public(
    len(train),
    config.data.num_examples if known is None else known,
    relation=privacy_section.relation(privacy),
    promised=isinstance(privacy, Guarantee) and privacy.noise_multiplier != 0,
    field="data.num_examples",
    other="privacy.neighboring_relation=replace_special",
  )


def sampler(config: TrainConfig, num_examples: int, unit: str = "") -> sampling.Sampler:
  """Returns a run's sampler. Batches that can overflow are padded for all examples and one more."""
  privacy = config.privacy
  assert not isinstance(privacy, LeastSquares)
  # A neighbouring data set may have one more record, and a batch of all records must fit.
  capacity = num_examples + 1
  chosen = privacy.sampler
  asked = chosen.number("capacity")
  if (asked or 0) > capacity:
    raise UserError(
      f"must be at most {capacity}, the examples and one more",
      field="privacy.sampler.capacity",
      value=asked,
    )
  size = chosen.sizing(
    sampling_prob=privacy.sampling_prob,
    num_examples=num_examples,
    num_steps=config.num_steps,
    padded_batch_size=capacity,
    neighboring_relation=getattr(privacy, "neighboring_relation", ""),
    may_leave=0 if config.audit is None else config.audit.num_canaries,
    unit=unit or "example",
  )
  made = samplers.make(chosen, size)
  if isinstance(privacy, DpSgd) and privacy.noise_levels and made.period != 1:
    raise UserError(
      f"must be empty for privacy.sampler={chosen.name!r}, which pays several "
      "steps at the first of them",
      field="privacy.noise_levels",
      value=privacy.noise_levels,
    )
  return made


def _clip(config: TrainConfig, params: Any) -> gradients.Clip:
  """Returns the clip. Of `params`, only the public shapes of the layers are read."""
  privacy = config.privacy
  schedule = ()
  if not isinstance(privacy, NoisySteps):
    return gradients.Clip(math.inf)
  if not isinstance(privacy.clip_schedule, ConstantClip):
    schedule = scheduled_scales(
      choices.name_of(privacy, "clip_schedule"),
      config.num_steps,
      privacy.clip_schedule.final,
    )
  return privacy.clipping.make(privacy.l2_clip_norm, params, schedule)


def _scaling(privacy: Any) -> transforms.CoordinateScaling | None:
  chosen = getattr(privacy, "scaling", None)
  return chosen if isinstance(chosen, transforms.CoordinateScaling) else None


def _noise_shape(config: TrainConfig, clip: gradients.Clip) -> noise.NoiseShape:
  """Returns the shape of the noise over the steps, and over groups of layers."""
  privacy = config.privacy
  if not isinstance(privacy, NoisySteps):
    return noise.NoiseShape()
  steps = config.num_steps
  correlation = None
  if isinstance(privacy, DpFtrl):
    correlation = ftrl.correlation(privacy, privacy.sampling_prob, steps)
  rule = privacy.clipping
  return noise.NoiseShape(
    schedule=staircase(privacy.noise_levels, steps) if privacy.noise_levels else (),
    correlation=correlation,
    shares=rule.shares(clip) if isinstance(rule, transforms.PerLayer) else None,
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


def make_plan(
  config: TrainConfig, num_examples: int, params: Any = None, unit: str = ""
) -> Plan:
  """Makes the plan of a config. Noise and capacity are as given, or else calculated.

  `num_examples` is the result of `public_size`; no other size of the data enters the plan.
  `params` are needed for clipping="per_layer"; only their shapes are read. `unit` is that of a row
  of the data; "" for the sampler's.
  """
  privacy = config.privacy
  if isinstance(privacy, LeastSquares):
    from dpjax.experiments.kinds.central import one_release  # no other method needs it

    return one_release.make_plan(config, num_examples)
  clip = _clip(config, params)
  # A batch that is padded for all examples cannot overflow. `_with_capacity` chooses a smaller
  # capacity later.
  whole = sampler(config, num_examples, unit)
  plan = privacy_section.plan(
    privacy,
    noise_multiplier=None if isinstance(privacy, Guarantee) else 0.0,
    sampler=whole,
    num_steps=config.num_steps,
    l2_clip_norm=clip,
    normalize_by=privacy.sampling_prob * num_examples,
    slices=config.slices,
    noise_shape=_noise_shape(config, clip),
    statistics=normalization.mechanism(config, num_examples, whole),
    scaling=_scaling(privacy),
    unit=unit,
  )
  plan = _with_capacity(plan, privacy.sampler, num_examples)
  most = plan.sampler.padded_batch_size
  common.at_most(config, "slices", most, " rows of a padded batch")
  return plan


def _with_capacity(plan: Plan, chosen: samplers.SamplerChoice, num_examples: int) -> Plan:
  capacity = chosen.number("capacity")
  if not plan.sampler.can_overflow:
    # Samplers of dpjax that cannot overflow have no such number, so this one is a user's.
    if chosen.scheme is None and capacity is not None:
      raise UserError(
        f"needs a sampler that can overflow, which {chosen.name!r} is not; leave it at None",
        field="privacy.sampler.capacity",
        value=capacity,
      )
    return plan
  plan = plan.fitted(num_examples)
  if capacity is None:
    return plan
  sampler: Any = plan.sampler
  plan = dataclasses.replace(plan, sampler=dataclasses.replace(sampler, capacity=capacity))
  # A capacity of the config may overflow more often than the share of delta for overflow allows.
  plan.check_capacity(num_examples)
  return plan

"""Makes the plan of a training run from a `TrainConfig`, and checks its privacy settings."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from dpjax import data, gradients, names, sampling, transforms, validate
from dpjax.accounting.attack_bounds import AttackBound
from dpjax.experiments.config import fields, user_code
from dpjax.experiments.config.attacker import attack_of
from dpjax.experiments.config.ignored import WouldBeIgnored
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.central import ftrl, normalization
from dpjax.experiments.kinds.central.config import PrivacyConfig, TrainConfig
from dpjax.experiments.run import sizes
from dpjax.plan import Plan
from dpjax.sampling.registry import used_for
from dpjax.sampling.samplers import Sizing
from dpjax.transforms.clip_scale import CLIP_SCHEDULES, scheduled_scales
from dpjax.validate import UserError, Verbatim

PRIVATE_METHODS = {
  "dp_sgd": "clipped gradients, fresh noise in every step; privacy is amplified by the sampler",
  "dp_ftrl": "clipped gradients, noise that is correlated over the steps",
  "least_squares": "noisy second moments of clipped inputs, one release and no steps",
}
METHODS = {**PRIVATE_METHODS, "sgd": "no clipping, no noise, no epsilon"}
SAMPLERS = used_for("examples")
NOISE_AWARE = ("dp_adam", "dp_sgld")  # optimizers that must know the noise of the plan


def check_names(privacy: PrivacyConfig) -> None:
  """Raises UserError for an unknown method, invalid noise levels, or a DP-FTRL sampler whose steps
  do not fit `sampling_prob`."""
  validate.one_of(METHODS, **{"privacy.method": privacy.method})
  ftrl.check_levels(privacy)
  if privacy.method == "dp_ftrl":
    ftrl.check(privacy)


def check(config: TrainConfig) -> None:
  """Raises UserError for incompatible fields; loads no data."""
  privacy = config.privacy
  if config.release and privacy.method not in PRIVATE_METHODS:
    raise UserError(
      f"needs privacy.method='dp_sgd' or another private one, not {privacy.method!r}; "
      "without noise nothing may be released",
      field="release",
      value=True,
    )
  if config.release and privacy.noise_multiplier == 0:
    raise UserError(
      "without noise nothing may be released", field="privacy.noise_multiplier", value=0
    )
  kind = SAMPLERS.get(privacy.sampler)
  if kind is not None:
    _check_prob(privacy, kind)
  _check_clipping(config)
  _check_noise_aware(config)
  _check_scaling(config)
  if privacy.method in PRIVATE_METHODS:
    _check_promise(privacy)


def _check_prob(privacy: PrivacyConfig, kind: type[sampling.Sampler]) -> None:
  """Raises UserError for a sampling probability that the sampler does not support."""
  size = Sizing(
    sampling_prob=privacy.sampling_prob,
    num_examples=0,
    num_selected=privacy.num_selected,
  )
  with bounds.within("privacy"):
    kind.check_prob(size, purpose=f"privacy.sampler={privacy.sampler!r}")


def _check_clipping(config: TrainConfig) -> None:
  privacy = config.privacy
  name = fields.name_of(config.optimizer, "rule")
  validate.one_of(CLIP_SCHEDULES, **{"privacy.clip_schedule": privacy.clip_schedule})
  changing = privacy.clipping.adapts or privacy.clip_schedule != "constant"
  if privacy.method == "sgd" and (changing or privacy.clipping != gradients.Flat()):
    raise UserError(
      "not with privacy.method='sgd', which does not clip",
      field="privacy.clipping",
      value=Verbatim(
        f"{fields.get(privacy, 'clipping')!r}, privacy.clip_schedule={privacy.clip_schedule!r}"
      ),
    )
  asked = {"noise_levels": privacy.noise_levels, "clip_schedule": privacy.clip_schedule}
  for field, value in asked.items():
    if privacy.clipping.adapts and value not in ([], "constant"):
      raise UserError(
        f"not with privacy.clipping={fields.name_of(privacy, 'clipping')!r}, whose clip norm, and "
        "so its noise, follows the data",
        field=f"privacy.{field}",
        value=value,
      )
  strategy = fields.name_of(privacy.ftrl, "strategy")
  correlated = privacy.method == "dp_ftrl" and strategy != "identity"
  if name in NOISE_AWARE and (changing or privacy.noise_levels or correlated):
    raise UserError(
      "needs noise of one standard deviation at every step, so neither "
      "privacy.clipping='adaptive' nor a privacy.clip_schedule nor "
      f"privacy.noise_levels nor privacy.ftrl.strategy={strategy!r} of dp_ftrl",
      field="optimizer.rule",
      value=name,
    )


def _check_noise_aware(config: TrainConfig) -> None:
  privacy = config.privacy
  name = fields.name_of(config.optimizer, "rule")
  noiseless = not config.is_private or privacy.noise_multiplier == 0
  if name == "dp_adam" and noiseless:
    raise UserError(
      "corrects for the noise of the private gradient, and there is none; use 'adam'",
      field="optimizer.rule",
      value="dp_adam",
    )
  if name != "dp_sgld":
    return
  if noiseless:
    raise UserError(
      "its noise is that of the private gradient; without clipping and noise "
      "(privacy.method='dp_sgd') nothing is proved, at any temperature",
      field="optimizer.rule",
      value="dp_sgld",
    )
  rule = privacy.clipping
  if isinstance(rule, transforms.PerLayer) and rule.noise != "shared":
    raise UserError(
      "must be 'shared' for optimizer.rule='dp_sgld', or the parameters have "
      "different temperatures",
      field="privacy.clipping.noise",
      value=rule.noise,
    )


def _check_scaling(config: TrainConfig) -> None:
  privacy = config.privacy
  if _scaling(privacy) is None:
    return
  name = fields.name_of(config.optimizer, "rule")
  if name in NOISE_AWARE:
    raise UserError(
      "needs noise of one standard deviation at every step and coordinate, which "
      f"privacy.scaling={fields.name_of(privacy, 'scaling')!r} does not leave",
      field="optimizer.rule",
      value=name,
    )
  if config.audit.enabled and config.audit.kind == "gradient":
    raise UserError(
      "not with privacy.scaling, which makes the noise along a canary's parameter another at each "
      "step; 'mislabelled' and 'random' go with it",
      field="audit.kind",
      value=config.audit.kind,
    )


def _check_promise(privacy: PrivacyConfig) -> None:
  if attack_of(privacy) is not None:
    return
  if privacy.epsilon is None and privacy.noise_multiplier is None:
    raise UserError(
      "give privacy.epsilon or privacy.noise_multiplier, or numbers of privacy.attacker",
      field="privacy.epsilon",
      value=None,
    )
  if privacy.epsilon is not None and privacy.noise_multiplier is not None:
    raise UserError(
      f"give it or privacy.epsilon={privacy.epsilon!r}, not both "
      "(--config.privacy.epsilon=none)",
      field="privacy.noise_multiplier",
      value=privacy.noise_multiplier,
    )


def public_size(config: TrainConfig, train: data.Dataset) -> int:
  """Returns the number of examples that the mechanism may depend on; see `run.sizes`.

  Raises:
    UserError: the run is private under add_or_remove_one, and the declared number is missing or
      above twice the true number.
  """
  privacy = config.privacy
  known = train.nominal_size
  correlated = privacy.method == "dp_ftrl"
  kinds = ftrl.SAMPLERS if correlated else SAMPLERS
  kind = kinds.get(privacy.ftrl.sampler if correlated else privacy.sampler)
  asked = privacy.neighboring_relation if privacy.method in PRIVATE_METHODS else ""
  return sizes.public(
    len(train),
    config.data.num_examples if known is None else known,
    relation=asked or sizes.usual_relation(kind),
    promised=privacy.method in PRIVATE_METHODS and privacy.noise_multiplier != 0,
    field="data.num_examples",
    other="privacy.neighboring_relation=replace_special",
  )


def sampler(config: TrainConfig, num_examples: int) -> sampling.Sampler:
  """Returns a run's sampler. Batches that can overflow are padded for all examples and one more."""
  privacy = config.privacy
  # A neighbouring data set may have one more record, and a batch of all records must fit.
  capacity = num_examples + 1
  if (privacy.capacity or 0) > capacity:
    raise UserError(
      f"must be at most {capacity}, the examples and one more",
      field="privacy.capacity",
      value=privacy.capacity,
    )
  if privacy.method == "dp_ftrl":
    return ftrl.sampler(privacy, config.num_steps, num_examples, capacity)
  chosen = _sampler(config, num_examples=num_examples, capacity=capacity)
  if privacy.noise_levels and config.is_private and not chosen.steps_alike:
    raise UserError(
      f"must be empty for privacy.sampler={privacy.sampler!r}, which pays several "
      "steps at the first of them",
      field="privacy.noise_levels",
      value=privacy.noise_levels,
    )
  return chosen


def _sampler(config: TrainConfig, *, num_examples: int, capacity: int) -> sampling.Sampler:
  privacy = config.privacy
  relation = privacy.neighboring_relation if config.is_private else ""
  size = Sizing(
    sampling_prob=privacy.sampling_prob,
    num_examples=num_examples,
    num_steps=config.num_steps,
    padded_batch_size=capacity,
    capacity=privacy.capacity,
    num_selected=privacy.num_selected,
    neighboring_relation=relation,
    may_leave=config.audit.num_canaries if config.audit.enabled else 0,
  )
  if names.is_path(privacy.sampler):
    return user_code.sampler(privacy.sampler, "privacy.sampler", size)
  return SAMPLERS[privacy.sampler].sized(size)


def _clip(config: TrainConfig, params: Any) -> gradients.Clip:
  """Returns the clip. Of `params`, only the public shapes of the layers are read."""
  privacy = config.privacy
  schedule = ()
  if not config.is_private:
    return gradients.Clip(math.inf)
  if privacy.clip_schedule != "constant":
    schedule = scheduled_scales(
      privacy.clip_schedule, config.num_steps, privacy.clip_schedule_final
    )
  return privacy.clipping.make(privacy.l2_clip_norm, params, schedule)


def _scaling(privacy: PrivacyConfig) -> transforms.CoordinateScaling | None:
  chosen = privacy.scaling
  return chosen if isinstance(chosen, transforms.CoordinateScaling) else None


def maker(
  epsilon: float | None,
  noise_multiplier: float | None,
  attack: AttackBound | None = None,
) -> Callable[..., Plan]:
  """Returns a function that makes a plan from all arguments except its noise.

  The noise is `noise_multiplier` if given, else calibrated to `attack` if given, else to `epsilon`.
  """
  if attack is not None and noise_multiplier is None:
    return functools.partial(Plan.calibrated, attack=attack)
  if noise_multiplier is None:
    return functools.partial(Plan.calibrated, epsilon=epsilon or 0.0)
  return functools.partial(Plan, noise_multiplier=noise_multiplier)


@bounds.names_fields
def make_plan(config: TrainConfig, num_examples: int, params: Any = None) -> Plan:
  """Makes the plan of a config. Noise and capacity are as given, or else calculated.

  `num_examples` is the result of `public_size`; no other size of the data enters the plan.
  `params` are needed for clipping="per_layer"; only their shapes are read.
  """
  privacy = config.privacy
  promises = config.is_private
  noise = privacy.noise_multiplier if promises else 0.0
  make = maker(privacy.epsilon, noise, attack_of(privacy) if promises else None)
  if privacy.method == "least_squares":
    from dpjax.experiments.kinds.central import one_release  # no other method needs it

    return one_release.make_plan(config, num_examples, make)
  clip = _clip(config, params)
  rule = privacy.clipping
  shares = rule.shares(clip) if isinstance(rule, transforms.PerLayer) else None
  noise_shape = ftrl.noise_shape(config, shares)
  # A batch that is padded for all examples cannot overflow. `_with_capacity` chooses a smaller
  # capacity later.
  whole = sampler(config, num_examples)
  statistics = normalization.mechanism(config, num_examples, whole)
  plan = make(
    sampler=whole,
    num_steps=config.num_steps,
    l2_clip_norm=clip,
    normalize_by=privacy.sampling_prob * num_examples,
    delta=privacy.delta,
    neighboring_relation=privacy.neighboring_relation if promises else "",
    accountant=privacy.accountant if promises else "",
    slices=config.slices,
    noise_shape=noise_shape,
    statistics=statistics,
    scaling=_scaling(privacy),
  )
  plan = _with_capacity(plan, privacy, num_examples)
  if plan.slices > plan.sampler.padded_batch_size:
    raise UserError(
      f"must be <= {plan.sampler.padded_batch_size} rows of a padded batch",
      field="slices",
      value=plan.slices,
    )
  return plan


def _with_capacity(plan: Plan, privacy: PrivacyConfig, num_examples: int) -> Plan:
  if not plan.sampler.can_overflow:
    _check_no_capacity(privacy)
    return plan
  sampler = plan.fitted_sampler(num_examples)
  if privacy.capacity is not None:
    sampler = dataclasses.replace(sampler, capacity=privacy.capacity)
  plan = dataclasses.replace(plan, sampler=sampler)
  # A capacity of the config may overflow more often than the share of delta for overflow allows.
  plan.check_capacity(num_examples)
  return plan


def _check_no_capacity(privacy: PrivacyConfig) -> None:
  """Raises WouldBeIgnored for a capacity beside a user-defined sampler.

  The caller has found that the sampler cannot overflow. `unused` refuses a capacity for samplers of
  dpjax.
  """
  name = privacy.ftrl.sampler if privacy.method == "dp_ftrl" else privacy.sampler
  if names.is_path(name) and privacy.capacity is not None:
    raise WouldBeIgnored(
      f"would be ignored, it needs a sampler that can overflow, which {name!r} is "
      "not; leave it at None",
      field="privacy.capacity",
      value=privacy.capacity,
    )

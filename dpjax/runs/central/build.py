"""From a typed config to the objects of a run. No training happens here."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import (
  auditing,
  data,
  gradients,
  losses,
  metrics,
  models,
  names,
  sampling,
  training,
  transforms,
  trees,
  validate,
)
from dpjax.data.dataset import first_line
from dpjax.runs.central import audit
from dpjax.runs import bounds
from dpjax.runs.central import ftrl
from dpjax.runs import unused
from dpjax.runs import user_code
from dpjax.runs import writers
from dpjax.runs import streams as streams_lib
from dpjax.runs.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  PrivacyConfig,
  TrainConfig,
  to_dict,
)
from dpjax.plan import Plan
from dpjax.types import Algorithm, LossFn
from dpjax.validate import UserError

PRIVATE_METHODS = ("dp_sgd", "dp_ftrl")
METHODS = (*PRIVATE_METHODS, "sgd")
SAMPLERS = ("poisson", "truncated_poisson", "fixed_size", "shuffled")
_PROVED_SHUFFLED = ("replace_one", "replace_special")  # relations of a shuffled epoch
CLIPPINGS = (*gradients.CLIPPINGS, "adaptive", "per_layer")
NOISE_ALLOCATIONS = ("shared", "uniform")
AUGMENTATIONS = ("none", *sorted(training.AUGMENTATIONS))
_OPTIMIZERS = {
  "sgd": lambda rate, c, noise: optax.sgd(rate, momentum=c.momentum or None),
  "adam": lambda rate, c, noise: optax.adam(rate),
  "adamw": lambda rate, c, noise: optax.adamw(rate, weight_decay=c.weight_decay),
  "rmsprop": lambda rate, c, noise: optax.rmsprop(rate, momentum=c.momentum),
  "adagrad": lambda rate, c, noise: optax.adagrad(rate),
  "dp_adam": lambda rate, c, noise: transforms.dp_adam(
    rate, noise_std=noise.std, noise_floor=c.noise_floor
  ),
  "dp_sgld": lambda rate, c, noise: transforms.dp_sgld(
    lambda step: rate(step) / noise.num_examples,
    noise_std=noise.std,
    num_examples=noise.num_examples,
    prior_precision=c.prior_precision,
  ),
}
_NOISE_AWARE = ("dp_adam", "dp_sgld")  # optimizers that must know the noise of the plan


class Noise(NamedTuple):
  """What an optimizer may know of the private gradient: public numbers."""

  std: Any  # of the mean gradient; see Plan.noise_std
  num_examples: int


class Task(NamedTuple):
  """What is learnt, and how it is scored."""

  name: str
  loss: Callable[[Any], LossFn]  # of model.apply
  evaluate: Callable[..., dict[str, float]]  # (apply, params, dataset)
  width: Callable[[Any], int]  # of the logits, from the data set


_CLASSIFICATION = Task(
  "classification",
  losses.softmax_cross_entropy,
  metrics.evaluate,
  lambda dataset: dataset.num_classes,
)
_LANGUAGE = Task(
  "language_modeling",
  functools.partial(losses.next_token, padding_id=data.PADDING_ID),
  functools.partial(metrics.evaluate_next_token, padding_id=data.PADDING_ID),
  lambda dataset: dataset.vocab_size,
)


class Streams(NamedTuple):
  """Every source of randomness of a run. In release mode: see runs/release.py."""

  init: jax.Array  # key of the initial parameters; depends on the seed alone
  noise: jax.Array
  example: jax.Array  # augmentation
  sampler: int  # 128 bits or more


def config_digest(config: TrainConfig) -> bytes:
  """Of everything in the config but for where data lie, so that a run can be repeated on
  another machine, and what an audit that is switched off would do. Public."""
  fields = to_dict(config)
  fields["data"].pop("data_dir")
  if not config.audit.enabled:
    fields.pop("audit")
  return streams_lib.config_digest("central", fields)


def streams(config: TrainConfig, data: bytes) -> Streams:
  """Streams that depend on the seed, on everything else in the config and on the data.

  Args:
    data: `dpjax.data.digest` of the training data, before canaries.
  """
  keys = streams_lib.keys(config.seed, config_digest(config), data)
  return Streams(keys.init, keys.first, keys.second, keys.sampler)


class Run(NamedTuple):
  """What a training loop needs."""

  plan: Plan
  algorithm: Algorithm
  params: Any  # at step 0
  apply: Any  # (params, x [B, ...]) -> logits
  schedule: optax.Schedule
  random: Streams
  train: Any
  test: Any
  task: Task
  loss_fn: LossFn  # of ONE example, augmentation included: what is clipped
  canaries: auditing.Canaries | None = None  # rows of `train` when the run is audited
  sgld_temperature: float | None = None  # that the plan's noise amounts to, at step 0


def check(config: TrainConfig) -> None:
  """Raises UserError for what can be told without data."""
  bounds.typed(config)
  privacy = config.privacy
  validate.one_of(METHODS, **{"privacy.method": privacy.method})
  ftrl.check_levels(privacy)
  if privacy.method == "dp_ftrl":
    ftrl.check(privacy)
  names.one_of(SAMPLERS, **{"privacy.sampler": privacy.sampler})
  names.one_of(_OPTIMIZERS, **{"optimizer.name": config.optimizer.name})
  validate.one_of(AUGMENTATIONS, augmentation=config.augmentation)
  bounds.training(config)
  if config.augmult > 1 and config.augmentation == "none":
    raise UserError(f"augmult={config.augmult}: must be 1 unless augmentation is set")
  if config.release and privacy.method not in PRIVATE_METHODS:
    raise UserError(
      f"release=True: needs privacy.method='dp_sgd' or 'dp_ftrl', not {privacy.method!r}; "
      "without noise nothing may be released"
    )
  audit.check(config.audit)
  _check_clipping(config)
  _check_noise_aware(config)
  if privacy.method in PRIVATE_METHODS:
    _check_promise(privacy)
  unused.refuse(config, unused.of_training(config))


def _check_clipping(config: TrainConfig) -> None:
  privacy, name = config.privacy, config.optimizer.name
  validate.one_of(CLIPPINGS, **{"privacy.clipping": privacy.clipping})
  validate.one_of(
    ("uniform", "by_size"), **{"privacy.clip_allocation": privacy.clip_allocation}
  )
  validate.one_of(
    NOISE_ALLOCATIONS, **{"privacy.noise_allocation": privacy.noise_allocation}
  )
  validate.one_of(
    transforms.CLIP_SCHEDULES, **{"privacy.clip_schedule": privacy.clip_schedule}
  )
  changing = privacy.clipping == "adaptive" or privacy.clip_schedule != "constant"
  if privacy.noise_allocation != "shared" and privacy.clipping != "per_layer":
    raise UserError(
      f"privacy.noise_allocation={privacy.noise_allocation!r}: needs "
      f"privacy.clipping='per_layer', not {privacy.clipping!r}"
    )
  if privacy.method == "sgd" and (changing or privacy.clipping != "flat"):
    raise UserError(
      f"privacy.clipping={privacy.clipping!r}, privacy.clip_schedule="
      f"{privacy.clip_schedule!r}: not with privacy.method='sgd', which does not clip"
    )
  if name in _NOISE_AWARE and changing:
    raise UserError(
      f"optimizer.name={name!r}: needs noise of one standard deviation at every step, so "
      "neither privacy.clipping='adaptive' nor a privacy.clip_schedule"
    )


def _check_noise_aware(config: TrainConfig) -> None:
  privacy = config.privacy
  noiseless = privacy.method == "sgd" or privacy.noise_multiplier == 0
  if config.optimizer.name == "dp_adam" and noiseless:
    raise UserError(
      "optimizer.name='dp_adam': corrects for the noise of the private gradient, and there "
      "is none; use 'adam'"
    )
  if config.optimizer.name != "dp_sgld":
    return
  if noiseless:
    raise UserError(
      "optimizer.name='dp_sgld': its noise is that of the private gradient; without clipping "
      "and noise (privacy.method='dp_sgd') nothing is proved, at any temperature"
    )
  if privacy.noise_allocation != "shared":
    raise UserError(
      f"privacy.noise_allocation={privacy.noise_allocation!r}: must be 'shared' for "
      "optimizer.name='dp_sgld', or the parameters have different temperatures"
    )


def _check_promise(privacy: PrivacyConfig) -> None:
  if privacy.epsilon is None and privacy.noise_multiplier is None:
    raise UserError(
      "privacy.epsilon=None: give privacy.epsilon or privacy.noise_multiplier"
    )
  if privacy.epsilon is not None and privacy.noise_multiplier is not None:
    raise UserError(
      f"privacy.noise_multiplier={privacy.noise_multiplier!r}: give it or privacy.epsilon="
      f"{privacy.epsilon!r}, not both (--config.privacy.epsilon=none)"
    )


def load_data(config: TrainConfig) -> tuple[Any, Any]:
  """(train, test), preprocessed by public constants only, with features computed."""
  train, test = load_arrays(config)
  if models.needs_features(config.model.name) == "scattering":
    num_groups = make_model(config.model, train.num_classes).num_groups
    train, test = (_scattered(part, num_groups) for part in (train, test))
  return train, test


def load_arrays(config: TrainConfig) -> tuple[Any, Any]:
  """As `load_data` without features: `dpjax.data.digest` of the two is the same."""
  train, test = data.load(
    config.data.name,
    data_dir=config.data.data_dir,
    max_length=config.data.max_length,
    num_classes=config.data.num_classes,
  )
  unused.refuse(config, unused.of_dataset(train))
  train, test = _preprocessed(train, config.data), _preprocessed(test, config.data)
  return limited(train, config.data), test


def limited(train: Any, config: DataConfig) -> Any:
  """The first `config.limit` examples. More than there are is refused: then the number that
  a config states would not be the number that the run treats as public."""
  if config.limit is None:
    return train
  bounds.limit(config, len(train))
  return train.subset(slice(0, config.limit))


def _preprocessed(dataset: Any, config: DataConfig) -> Any:
  return data.preprocess.center(dataset) if config.center else dataset


def make_model(config: ModelConfig, width: int, **fixed: Any) -> Any:
  """The model that a config names, with `width` outputs; `fixed` goes before its options."""
  return models.build(config.name, num_classes=width, **{**config.options, **fixed})


def init_params(config: ModelConfig, model: Any, key: jax.Array, first: jax.Array) -> Any:
  """`model.init(key, first)`.

  Raises:
    UserError: the model cannot be built with its options on examples of this shape, in
      whatever way it fails: a module checks its fields where it is first applied; or it has
      more parameters than the machine has memory for.
  """
  try:
    size = trees.size(jax.eval_shape(model.init, key, first))
    if 4 * size > _memory():
      told = f"model.name={config.name!r}, model.options={config.options!r}"
      raise UserError(
        f"{told}: has {size} parameters, more than the {_memory() / 1e9:.0f} GB of this "
        "machine hold; width, classes or the size of an example must be smaller"
      )
    return model.init(key, first)
  except UserError:
    raise
  except Exception as error:
    reason = first_line(error)
    raise UserError(
      f"model.options={config.options!r}: model.name={config.name!r} cannot be built with "
      f"them on examples of shape {tuple(first.shape[1:])} ({type(error).__name__}: {reason})"
    ) from error


def _memory() -> int:
  """Bytes of the machine."""
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _scattered(dataset: Any, num_groups: int | None) -> Any:
  done = 0

  def tell(count: int, _: int) -> None:
    nonlocal done
    bar.update(count - done)
    done = count

  with writers.progress(len(dataset), 0, "scattering features") as bar:
    features = models.scattering_features(dataset.x, progress=tell)
  features = models.standardized_features(features, num_groups, in_place=True)
  return data.computed(dataset, features)


def _sampler(privacy: PrivacyConfig, num_examples: int, capacity: int) -> sampling.Sampler:
  if names.is_path(privacy.sampler):
    return user_code.sampler(
      privacy.sampler,
      "privacy.sampler",
      num_examples=num_examples,
      prob=privacy.sampling_prob,
    )
  batch_size = sampling.whole_batch_size(privacy.sampling_prob, num_examples)
  if privacy.sampler == "poisson":
    return sampling.PoissonSampler(prob=privacy.sampling_prob, capacity=capacity)
  if privacy.sampler == "fixed_size":
    return sampling.FixedSizeSampler(batch_size=batch_size, num_examples=num_examples)
  if privacy.sampler == "truncated_poisson":
    return _truncated(privacy, num_examples)
  proved = privacy.method != "sgd" and privacy.neighboring_relation in _PROVED_SHUFFLED
  if proved and privacy.noise_levels:  # an epoch is paid at its first step's noise
    raise UserError(
      f"privacy.noise_levels={privacy.noise_levels!r}: must be empty for "
      "privacy.sampler='shuffled', which pays an epoch at its first step"
    )
  return sampling.ShuffledSampler(
    batch_size=batch_size, num_examples=num_examples if proved else None
  )


def _truncated(privacy: PrivacyConfig, num_examples: int) -> sampling.Sampler:
  """By default three standard deviations above the mean: one step in a thousand is cut."""
  prob = privacy.sampling_prob
  mean, deviation = prob * num_examples, math.sqrt(prob * (1 - prob) * num_examples)
  return sampling.TruncatedPoissonSampler(
    prob=prob,
    capacity=privacy.capacity or 8 * math.ceil((mean + 3 * deviation) / 8),
    num_examples=num_examples,
  )


def _clipping(config: TrainConfig, params: Any) -> dict[str, Any]:
  """The fields of the plan that say how gradients are clipped, beyond one clip norm."""
  privacy = config.privacy
  options: dict[str, Any] = {"slices": config.slices}
  if privacy.method == "sgd":
    return options
  if privacy.clip_schedule != "constant":
    options["clip_schedule"] = transforms.scheduled_scales(
      privacy.clip_schedule, config.num_steps, privacy.clip_schedule_final
    )
  kind = privacy.clipping
  if kind == "automatic":
    return options | {"clipping": kind, "gamma": privacy.gamma}
  if kind == "adaptive":
    return options | {"clipping": _adaptive(privacy)}
  return options | (_per_layer(privacy, params) if kind == "per_layer" else {})


def _adaptive(privacy: PrivacyConfig) -> transforms.AdaptiveClipping:
  return transforms.AdaptiveClipping(
    target_quantile=privacy.clip_quantile,
    learning_rate=privacy.clip_learning_rate,
    count_noise_std=privacy.clip_count_noise_std,
  )


def _per_layer(privacy: PrivacyConfig, params: Any) -> dict[str, Any]:
  """Shares by the public shapes of the layers alone."""
  bounds = gradients.allocate_clip_norms(
    params, privacy.l2_clip_norm, rule=privacy.clip_allocation
  )
  equal = privacy.noise_allocation == "uniform"
  shares = jax.tree.map(lambda _: 1.0, bounds) if equal else None
  return {"l2_clip_norm": bounds, "noise_shares": shares}


def make_plan(config: TrainConfig, num_examples: int, params: Any = None) -> Plan:
  """The plan of a config: noise calibrated or as given, capacity as given or safe.

  `params`, of which only the shapes are read, are needed for clipping="per_layer".
  """
  privacy = config.privacy
  numbers: dict[str, Any] = dict(
    num_steps=config.num_steps,
    l2_clip_norm=privacy.l2_clip_norm,
    normalize_by=privacy.sampling_prob * num_examples,
    delta=privacy.delta,
    neighboring_relation=privacy.neighboring_relation,
    accountant=privacy.accountant,
  )
  numbers |= _clipping(config, params) | ftrl.options(config)
  whole = _sampler(privacy, num_examples, num_examples + 1)  # cannot overflow
  if privacy.method == "dp_ftrl":
    whole = ftrl.sampler(privacy, config.num_steps, num_examples, num_examples + 1)
    numbers["normalize_by"] = ftrl.expected_share(privacy) * num_examples
  if privacy.method == "sgd":
    numbers |= dict(l2_clip_norm=math.inf, neighboring_relation="", accountant="")
    plan = Plan(sampler=whole, noise_multiplier=0.0, **numbers)
  elif privacy.noise_multiplier is not None:
    plan = Plan(sampler=whole, noise_multiplier=privacy.noise_multiplier, **numbers)
  else:
    plan = Plan.calibrated(epsilon=privacy.epsilon or 0.0, sampler=whole, **numbers)
  return _with_capacity(plan, privacy, num_examples)


def _with_capacity(plan: Plan, privacy: PrivacyConfig, num_examples: int) -> Plan:
  if not sampling.has_capacity(plan.sampler):
    _check_no_capacity(privacy)
    return plan
  sampler = plan.fitted_sampler(num_examples)
  if privacy.capacity is not None:
    sampler = dataclasses.replace(sampler, capacity=privacy.capacity)
  plan = dataclasses.replace(plan, sampler=sampler)
  plan.check_capacity(num_examples)
  return plan


def _check_no_capacity(privacy: PrivacyConfig) -> None:
  """Of a user's sampler it is known only when it is made; of ours, `unused` knows."""
  name = privacy.ftrl.sampler if privacy.method == "dp_ftrl" else privacy.sampler
  if names.is_path(name) and privacy.capacity is not None:
    raise UserError(
      f"privacy.capacity={privacy.capacity}: would be ignored, it needs a sampler with "
      f"log_overflow_prob, which {name!r} is not; leave it at None"
    )


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
  """Learning rate by step; fixed in advance, so it costs no privacy."""
  rate = config.learning_rate
  if config.schedule == "cosine":
    return optax.cosine_decay_schedule(rate, num_steps)
  if config.schedule == "linear":
    return optax.linear_schedule(rate, 0.0, num_steps)
  return optax.constant_schedule(rate)


def optimizer(
  config: OptimizerConfig, schedule: optax.Schedule, noise: Noise | None = None
) -> optax.GradientTransformation:
  """The Optax optimizer of a config; `noise` is for those that must know it."""
  if names.is_path(config.name):
    return user_code.optimizer(config.name, schedule)
  return _OPTIMIZERS[config.name](schedule, config, noise)


def _noise(config: TrainConfig, plan: Plan, num_examples: int) -> Noise | None:
  if config.optimizer.name not in _NOISE_AWARE:
    return None
  return Noise(plan.noise_std, num_examples)


def _sgld_temperature(config: TrainConfig, plan: Plan, num_examples: int) -> float | None:
  if config.optimizer.name != "dp_sgld":
    return None
  return transforms.sgld_temperature(
    step_size=config.optimizer.learning_rate / num_examples,
    noise_std=plan.noise_std,
    num_examples=num_examples,
  )


def make_task(config: TrainConfig, dataset: Any) -> Task:
  """Classification, or the next token where the model is a transformer over text; with a
  user's own loss where the config names one. The scores stay those of the task."""
  task = _standard_task(config, dataset)
  return task if config.loss == "auto" else task._replace(loss=user_code.loss(config.loss))


def _standard_task(config: TrainConfig, dataset: Any) -> Task:
  if config.model.name != "transformer":
    return _CLASSIFICATION
  if dataset.vocab_size is None:
    raise UserError(
      f"model.name='transformer': needs text of a declared vocabulary, which data.name="
      f"{config.data.name!r} does not hold"
    )
  return _LANGUAGE


def memory_budget(config: TrainConfig) -> float | None:
  """Bytes that a microbatch may take; None where no budget is set."""
  return None if config.memory_budget_gb is None else config.memory_budget_gb * 1e9


def _loss(config: TrainConfig, loss_fn: LossFn) -> LossFn:
  if config.augmentation == "none":
    return loss_fn
  augment = training.AUGMENTATIONS[config.augmentation]
  return training.augmented(loss_fn, augment, augmult=config.augmult)


def build(
  config: TrainConfig,
  loaded: tuple[Any, Any] | None = None,
  random: Streams | None = None,
) -> Run:
  """Every object of a run. Deterministic in (config, data, streams); the streams are those
  of config and data unless given."""
  check(config)
  train, test = load_data(config) if loaded is None else loaded
  task = make_task(config, train)
  # load_data has standardised the features of a scattering head already
  fixed = {"num_groups": None} if models.needs_features(config.model.name) else {}
  model = make_model(config.model, task.width(train), **fixed)
  random = streams(config, data.digest(train)) if random is None else random
  # of the shape of an example, never of one: no model may start from somebody's record
  params = init_params(config.model, model, random.init, jnp.zeros_like(train.x[:1]))
  # Of the whole set: canaries take rows away or exchange them.
  plan, num_examples = make_plan(config, len(train), params), len(train)
  train, canaries = audit.insert(config, train, plan)
  loss_fn = _loss(config, task.loss(model.apply))
  schedule = learning_rate_schedule(config.optimizer, config.num_steps)
  algorithm = training.dp_sgd(
    loss_fn,
    plan,
    optimizer(config.optimizer, schedule, _noise(config, plan, num_examples)),
    noise_key=random.noise,
    example_key=None if config.augmentation == "none" else random.example,
    ema_decay=config.ema_decay,
    method=config.grad_method,
    microbatch_size=config.microbatch_size,
    memory_budget=memory_budget(config),
  )
  return Run(
    plan=plan,
    algorithm=algorithm,
    params=params,
    apply=model.apply,
    schedule=schedule,
    random=random,
    train=train,
    test=test,
    task=task,
    loss_fn=loss_fn,
    canaries=canaries,
    sgld_temperature=_sgld_temperature(config, plan, num_examples),
  )

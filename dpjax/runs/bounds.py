"""The bounds of the fields that several kinds of config share: type first, then range."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpjax import gradients, models, names, validate
from dpjax.runs import fields
from dpjax.runs.central.config import (
  DataConfig,
  FtrlConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.runs.federated.config import FedConfig
from dpjax.validate import UserError

LOSSES = ("auto",)
SCHEDULES = ("constant", "cosine", "linear")
ACCOUNTANTS = ("", "pld", "rdp")
OBJECTIVES = ("mean", "max")
_FLOAT32 = np.finfo(np.float32)


def typed(config: Any) -> None:
  """Raises unless every field has the type of its annotation; NaN is never a number.

  >>> typed(OptimizerConfig(momentum="a lot"))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: config.momentum='a lot': must be a number
  """
  fields.check(config, type(config), "config")


def named(room: str, config: Any, *names: str) -> dict[str, Any]:
  """The fields of a room ("": of the config itself) by their dotted names, those at None
  left out.

  >>> named("data", DataConfig(limit=3), "limit", "data_dir")
  {'data.limit': 3}
  """
  dot = "." if room else ""
  found = {f"{room}{dot}{name}": getattr(config, name) for name in names}
  return {name: value for name, value in found.items() if value is not None}


def data(config: DataConfig) -> None:
  """Raises UserError for a number of examples, bytes or classes below one, or an import path
  that leads nowhere."""
  validate.integer_at_least(
    1, **named("data", config, "limit", "max_length", "num_classes")
  )
  if names.is_path(config.name):
    names.find(config.name, "data.name")


def limit(config: DataConfig, num_examples: int) -> None:
  """Raises UserError for a limit that leaves all of that many examples."""
  if config.limit is not None and config.limit > num_examples:
    raise UserError(
      f"data.limit={config.limit}: must be <= {num_examples}, the training examples of "
      f"data.name={config.name!r}, or none"
    )


def model(config: ModelConfig, room: str = "model") -> None:
  """Raises UserError for a model or an option that does not exist."""
  names.one_of(models.names(), **{f"{room}.name": config.name})
  models.check_options(config.name, config.options)


def optimizer(config: OptimizerConfig, room: str = "optimizer") -> None:
  """Raises UserError for a rate, a momentum or a penalty outside its range."""
  validate.positive(**named(room, config, "learning_rate"))
  validate.share(**named(room, config, "momentum"))
  others = ("weight_decay", "noise_floor", "prior_precision")
  validate.non_negative(**named(room, config, *others))
  validate.one_of(SCHEDULES, **named(room, config, "schedule"))


def privacy(config: Any) -> None:
  """Raises UserError for what both kinds of runs promise, and how they clip."""
  positive = ("epsilon", "epsilon_budget", "l2_clip_norm", "clip_learning_rate")
  validate.positive(**named("privacy", config, *positive, "clip_count_noise_std"))
  low, high = (float(bound) for bound in (_FLOAT32.tiny, _FLOAT32.max))
  if not low <= config.l2_clip_norm <= high:  # beyond them it is 0, or clips nothing
    raise UserError(
      f"privacy.l2_clip_norm={config.l2_clip_norm!r}: must be in [{low:.3g}, {high:.3g}], "
      "the range of float32"
    )
  validate.non_negative(**named("privacy", config, "noise_multiplier"))
  validate.open_unit(**named("privacy", config, "delta", "clip_quantile"))
  validate.one_of(ACCOUNTANTS, **named("privacy", config, "accountant"))
  ftrl(config.ftrl)


def ftrl(config: FtrlConfig) -> None:
  """Raises UserError for a count below one, or an unknown aim."""
  counts = ("bands", "buffers", "restart_every")
  validate.integer_at_least(1, **named("privacy.ftrl", config, *counts))
  validate.one_of(OBJECTIVES, **named("privacy.ftrl", config, "objective"))


def training(config: TrainConfig) -> None:
  """Raises UserError for a number of a central run outside its range."""
  data(config.data)
  model(config.model)
  names.one_of(LOSSES, loss=config.loss)
  privacy(config.privacy)
  optimizer(config.optimizer)
  validate.one_of(gradients.METHODS, grad_method=config.grad_method)
  validate.probability(**named("privacy", config.privacy, "sampling_prob"))
  validate.positive(**named("privacy", config.privacy, "gamma", "clip_schedule_final"))
  validate.integer_at_least(1, **named("privacy", config.privacy, "capacity"))
  counts = ("num_steps", "augmult", "slices", "eval_every", "checkpoint_every")
  validate.integer_at_least(1, **named("", config, *counts, "microbatch_size"))
  validate.integer_at_least(0, seed=config.seed)
  validate.positive(**named("", config, "memory_budget_gb"))
  validate.open_unit(**named("", config, "ema_decay"))


def federation(config: FedConfig) -> None:
  """Raises UserError for a number of a run over clients outside its range."""
  data(config.data)
  model(config.model)
  names.one_of(LOSSES, loss=config.loss)
  optimizer(config.client_optimizer, "client_optimizer")
  optimizer(config.server_optimizer, "server_optimizer")
  privacy(config.privacy)
  validate.non_negative(**named("privacy", config.privacy, "local_noise_multiplier"))
  simulated = named("privacy", config.privacy, "simulated_cohort", "simulated_clients")
  validate.integer_at_least(1, **simulated)
  _partition(config)
  _algorithm(config)
  local = named("local", config.local, "batch_size", "epochs", "max_examples")
  validate.integer_at_least(1, **local)
  counts = ("num_rounds", "eval_every", "checkpoint_every", "num_devices", "num_threads")
  validate.integer_at_least(1, **named("", config, *counts))
  validate.integer_at_least(0, seed=config.seed)
  validate.positive(clients_per_round=config.clients_per_round)
  targets = {f"targets[{index}]": value for index, value in enumerate(config.targets)}
  validate.probability(**targets, **named("", config, "stop_at_accuracy"))


def _partition(config: FedConfig) -> None:
  room = config.partition
  counts = ("num_clients", "shards_per_client", "min_chars")
  validate.integer_at_least(1, **named("partition", room, *counts))
  validate.integer_at_least(0, **named("partition", room, "min_size", "seed"))
  validate.positive_or_inf(**named("partition", room, "alpha"))
  validate.non_negative(**named("partition", room, "exponent"))


def _algorithm(config: FedConfig) -> None:
  room = config.algorithm
  validate.non_negative(**named("algorithm", room, "mu", "trim"))
  validate.positive(**named("algorithm", room, "tau_eff"))
  validate.integer_at_least(0, **named("algorithm", room, "num_byzantine"))
  validate.integer_at_least(1, **named("algorithm", room, "weight_cap"))
  validate.integer_at_least(1, **named("algorithm", room, "compression_bits"))
  validate.probability(**named("algorithm", room, "compression_share"))

"""The bounds of the fields of a run over clients: type first, then range."""

from __future__ import annotations

import math

from dpjax import names, validate
from dpjax.experiments.config import fields
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.bounds import named
from dpjax.experiments.kinds.federated.config import FedConfig, algorithm_of
from dpjax.validate import UserError

_ANY_BATCH = 1024  # of a client, however few examples there are
_LEAST_COHORT = 1e-3  # clients expected in a round
# Beyond them shares are 0 or 1 anyway.
_LEAST_ALPHA = 1e-9
_MOST_EXPONENT = 50.0


def local_batch(config: FedConfig, num_examples: int) -> None:
  """Raises UserError for a batch of a client that is padded to more examples than there are."""
  size = config.local.batch_size
  most = max(num_examples, _ANY_BATCH)
  if size is not None and size > most:
    raise UserError(
      f"must be <= {most}, or none, a client's examples at once",
      field="local.batch_size",
      value=size,
    )


def federation(config: FedConfig) -> None:
  """Raises UserError for a number of a run over clients outside its range."""
  bounds.data(config.data)
  bounds.model(config.model)
  names.one_of(bounds.LOSSES, loss=config.loss)
  bounds.optimizer(config.client_optimizer, "client_optimizer")
  bounds.optimizer(config.server_optimizer, "server_optimizer")
  bounds.privacy(config.privacy)
  validate.non_negative(**named("privacy", config.privacy, "local_noise_multiplier"))
  simulated = named("privacy", config.privacy, "simulated_cohort", "simulated_clients")
  validate.integer_at_least(1, **simulated)
  _partition(config)
  for option, refuse in algorithm_of(config).checks.items():
    refuse(**named("algorithm", config.algorithm, option))
  for chosen in (config.weighting, config.aggregator, config.compression):
    if isinstance(chosen, fields.Setting):
      chosen.make()  # it checks its numbers
  local = named("local", config.local, "batch_size", "max_examples")
  validate.integer_at_least(1, **local)
  validate.integer_in(1, bounds.MOST_EPOCHS, **named("local", config.local, "epochs"))
  counts = ("eval_every", "checkpoint_every", "num_devices")
  validate.integer_at_least(1, **named("", config, *counts))
  bounds.steps("num_rounds", config.num_rounds, config.privacy)
  validate.integer_in(1, bounds.MOST_THREADS, **named("", config, "num_threads"))
  validate.positive(**named("", config, "memory_budget_gb"))
  validate.integer_at_least(0, seed=config.seed)
  validate.positive(clients_per_round=config.clients_per_round)
  if config.clients_per_round < _LEAST_COHORT:
    raise UserError(
      f"must be >= {_LEAST_COHORT:g}",
      field="clients_per_round",
      value=config.clients_per_round,
    )
  targets = {f"targets[{index}]": value for index, value in enumerate(config.targets)}
  validate.probability(**targets, **named("", config, "stop_at_accuracy"))


def _partition(config: FedConfig) -> None:
  room = config.partition
  validate.integer_at_least(1, **named("partition", room, "min_chars", "max_examples"))
  shape = getattr(room, "shape", None)
  if shape is not None and not (shape and all(side > 0 for side in shape)):
    raise UserError(
      "must be positive integers, or none", field="partition.shape", value=shape
    )
  if getattr(room, "client_id", None) == "" and not names.is_path(config.data.name):
    raise UserError(
      "must name the field that says whose each record is",
      field="partition.client_id",
      value="",
    )
  counts = ("num_clients", "shards_per_client")
  validate.integer_in(1, bounds.MOST_CLIENTS, **named("partition", room, *counts))
  validate.integer_at_least(0, **named("partition", room, "min_size", "seed"))
  alpha = getattr(room, "alpha", math.inf)
  exponent = getattr(room, "exponent", 0.0)
  low = _LEAST_ALPHA
  high = 1 / _LEAST_ALPHA
  if not (low <= alpha <= high or alpha == math.inf):
    raise UserError(
      f"must be in [{low:g}, {high:g}] or inf", field="partition.alpha", value=alpha
    )
  if not 0 <= exponent <= _MOST_EXPONENT:
    raise UserError(
      f"must be in [0, {_MOST_EXPONENT:g}]", field="partition.exponent", value=exponent
    )

"""Checks of fields of a federated run that rules of single fields cannot express."""

from __future__ import annotations

from dpjax import names, validate
from dpjax.experiments.config import fields, rules
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.bounds import named
from dpjax.experiments.kinds.federated.config import FedConfig, algorithm_of
from dpjax.validate import UserError
from dpjax.zoo.datasets.published import has_owners

# A client's batch of up to this size is accepted for any number of examples.
_ANY_BATCH = 1024


def local_batch(config: FedConfig, num_examples: int) -> None:
  """Raises UserError for a `local.batch_size` above both 1024 and the number of training examples
  of all clients together."""
  size = config.local.batch_size
  most = max(num_examples, _ANY_BATCH)
  if size is not None and size > most:
    raise UserError(
      f"must be <= {most}, or none, a client's examples at once",
      field="local.batch_size",
      value=size,
    )


def federation(config: FedConfig) -> None:
  """Raises UserError for errors in a federated run's config beyond the rules of single fields."""
  bounds.data(config.data)
  bounds.model(config.model)
  bounds.unit_range(config.model.name, config.data)
  bounds.optimizer(config.client_optimizer, "client_optimizer")
  bounds.optimizer(config.server_optimizer, "server_optimizer")
  _partition(config)
  for option, refuse in algorithm_of(config).checks.items():
    refuse(**named("algorithm", config.algorithm, option))
  for chosen in (config.weighting, config.aggregator, config.compression):
    if isinstance(chosen, fields.Setting):
      # Making a function checks its arguments.
      chosen.make()
  bounds.steps("num_rounds", config.num_rounds, config.privacy)


def _partition(config: FedConfig) -> None:
  partition = config.partition
  validate.integer_at_least(1, **named("partition", partition, "min_chars", "max_examples"))
  shape = getattr(partition, "shape", None)
  if shape is not None and not (shape and all(side > 0 for side in shape)):
    raise UserError(
      "must be positive integers, or none", field="partition.shape", value=shape
    )
  without_field = names.is_path(config.data.name) or has_owners(config.data.name)
  if getattr(partition, "client_id", None) == "" and not without_field:
    raise UserError(
      "must name the field that says whose each record is",
      field="partition.client_id",
      value="",
    )
  counts = ("num_clients", "shards_per_client")
  validate.integer_in(1, rules.MOST_CLIENTS, **named("partition", partition, *counts))
  validate.integer_at_least(0, **named("partition", partition, "min_size", "seed"))
  validate.positive_or_inf(**named("partition", partition, "alpha"))
  validate.non_negative(**named("partition", partition, "exponent"))

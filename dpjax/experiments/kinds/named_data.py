"""What kinds of run share whose config names one data set, with a public side: its test set."""

from __future__ import annotations

from typing import Any

from dpjax import data
from dpjax.experiments.config.fields import to_dict
from dpjax.experiments.run import config_names, run_keys
from dpjax.validate import UserError


def digest(kind: str, config: Any) -> bytes:
  """Returns the public digest of everything in a config that shapes its run.

  Args:
    kind: name of the kind of run.
    config: has no field beside where the data lie that a run may change.
  """
  fields = config_names.without_places(to_dict(config))
  return run_keys.config_digest(kind, fields)


def load(config: Any) -> tuple[Any, Any]:
  """Returns (private data, public data) of `config.dataset`."""
  return data.load(config.dataset, data_dir=config.data_dir)


def check_images(config: Any, train: Any, task: str) -> None:
  """Raises UserError unless the data are images with one class each.

  Args:
    task: what needs them, in words.
  """
  data.needs_classes(train, task)
  if len(train.x.shape) != 4:
    raise UserError(
      f"must hold images [H, W, C]; an example is of shape {train.x.shape[1:]}",
      field="dataset",
      value=config.dataset,
    )


def check_pool(config: Any, public: Any) -> None:
  """Raises UserError unless the pool, the first public examples, leaves some for scores."""
  if len(public) <= config.num_pool:
    raise UserError(
      f"must leave some of the {len(public)} public examples to score the student",
      field="num_pool",
      value=config.num_pool,
    )

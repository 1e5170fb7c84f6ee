"""Loads the data that a config names: by its section `data`, or by its field `dataset`, a data set
with a public test set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from dpjax import data
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import common
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.central.config import ExamplesConfig
from dpjax.plan import Plan
from dpjax.validate import NO_VALUE, UserError
from dpjax.zoo.datasets import published


def check_folder(config: Any) -> None:
  """Raises UserError for a `data_dir` of data that do not lie in a folder."""
  lies_there = published.lies_in_folder(config.dataset)
  common.read_if(config, lies_there, "data that lie in a folder", "data_dir")


def load(config: Any) -> tuple[Any, Any]:
  """Returns (private data, public data) of `config.dataset`.

  Raises:
    UserError: the data cannot be loaded; the error names `dataset` or `data_dir`.
  """
  with errors_of_dataset(config):
    return data.load(config.dataset, data_dir=config.data_dir)


def load_section(config: ExamplesConfig, **more: Any) -> tuple[Any, Any]:
  """Loads (train, test) of a section `data`, whose fields errors name.

  Args:
    more: other arguments of `dpjax.data.load`.
  """
  with within("data", of=config):
    return data.load(
      config.name,
      data_dir=config.data_dir,
      num_classes=config.num_classes,
      num_examples=config.num_examples,
      declaration=config.declaration,
      **more,
    )


# The configs have no fields for these arguments of `data.load`, so the data must declare them. The
# values are the errors for data that do not declare them.
_DECLARED_BY_DATA = {
  "num_classes": "must declare num_classes, an integer in the file, since counting private labels "
  "would let one record decide the shape of the model",
  "num_examples": "must declare its number of examples: a round number near it, num_examples in "
  "the .npz file or the declaration, or nominal_size of a Dataset",
}


@contextlib.contextmanager
def errors_of_dataset(config: Any) -> Iterator[None]:
  """Makes errors about what data must declare name the field `dataset` of the config, which has no
  field for it."""
  try:
    yield
  except UserError as error:
    is_undeclared = error.field in _DECLARED_BY_DATA and error.value in (None, NO_VALUE)
    if is_undeclared:
      must = _DECLARED_BY_DATA[error.field]
    elif error.field == "declaration":
      must = f"its {error}"
    else:
      raise
    raise UserError(must, field="dataset", value=config.dataset) from error


def plan(config: Any, train: Any, **settings: Any) -> Plan:
  """Returns the plan of `config.epsilon` and `config.delta`; errors name the config's fields.

  Args:
    settings: other arguments of `Plan.for_data`.
  """
  with errors_of_dataset(config):
    return Plan.for_data(train, epsilon=config.epsilon, delta=config.delta, **settings)


def check_images(config: Any, train: Any, task: str, *, tables: bool = False) -> None:
  """Raises UserError unless the data are images with one class each.

  Args:
    task: name of what needs images, for the message.
    tables: whether rows of numbers will do, too.
  """
  needs_classes(train, "dataset", config.dataset)
  rows = tables and len(train.x.shape) == 2 and train.vocab_size is None
  if len(train.x.shape) != 4 and not rows:
    raise UserError(
      f"must hold images [H, W, C]{' or a table' if tables else ''}; an example is of shape "
      f"{train.x.shape[1:]}",
      field="dataset",
      value=config.dataset,
    )


def check_pool(config: Any, public: Any) -> None:
  """Raises UserError if the pool takes all public examples, so that none is left for scores."""
  if len(public) <= config.num_pool:
    raise UserError(
      f"must leave some of the {len(public)} public examples to score the student",
      field="num_pool",
      value=config.num_pool,
    )

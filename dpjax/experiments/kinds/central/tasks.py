"""Learning tasks: their loss on a data set, and their scores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpjax import data, losses, metrics, models, training
from dpjax.experiments.config import user_code
from dpjax.experiments.kinds.central import embeddings
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.plan import Plan
from dpjax.types import LossFn
from dpjax.validate import UserError


class Task(NamedTuple):
  """A task: its loss and its scores."""

  name: str
  loss: Callable[[Any], LossFn]  # of model.apply
  evaluate: Callable[..., dict[str, float]]  # (apply, params, dataset)
  width: Callable[[Any], int]  # of the outputs, from the data set
  keyed: bool = False  # whether the model draws from `example.key` in training


_CLASSIFICATION = Task(
  "classification",
  losses.softmax_cross_entropy,
  metrics.evaluate,
  lambda dataset: dataset.num_classes,
)
_NEXT_TOKEN = functools.partial(losses.next_token, padding_id=data.PADDING_ID)
_OF_PEOPLE = functools.partial(_NEXT_TOKEN, sequences=True)
_LANGUAGE = Task(
  "language_modeling",
  _NEXT_TOKEN,
  functools.partial(metrics.evaluate_next_token, padding_id=data.PADDING_ID),
  lambda dataset: dataset.vocab_size,
)


def make_task(config: TrainConfig, dataset: data.Dataset) -> Task:
  """Makes the task: classification, or the next token for a language model, or embeddings
  of two views if named. A user's loss may replace the loss. The scores stay those of the
  task."""
  if config.loss == embeddings.NAME:
    return _embedding(config)
  task = _LANGUAGE if models.is_language(config.model.name) else _CLASSIFICATION
  if task is _LANGUAGE and dataset.vocab_size is None:
    raise UserError(
      f"needs text of a declared vocabulary, which data.name={config.data.name!r} "
      "does not hold",
      field="model.name",
      value=config.model.name,
    )
  if task is _LANGUAGE and of_people(dataset):
    task = task._replace(loss=_OF_PEOPLE)
  return task if config.loss == "auto" else task._replace(loss=user_code.loss(config.loss))


def _embedding(config: TrainConfig) -> Task:
  augment = training.AUGMENTATIONS[config.augmentation]
  evaluate = functools.partial(embeddings.evaluate, augment)
  return Task(embeddings.NAME, embeddings.loss, evaluate, lambda _: embeddings.WIDTH)


def of_people(dataset: data.Dataset) -> bool:
  """Whether an example is several sequences of tokens, [m, T], all of one user."""
  return dataset.x.dtype == np.int32 and dataset.x.ndim == 3


def check_unit(config: TrainConfig, dataset: data.Dataset, plan: Plan) -> None:
  """Raises UserError unless the guarantee names the unit that one row of the data is."""
  people = of_people(dataset)
  if people != (plan.sampler.unit == "user"):
    must, what = ("be", "all") if people else ("not be", "not all")
    raise UserError(
      f"must {must} 'users' for data.name={config.data.name!r}, an example of "
      f"which is {what} that one person wrote",
      field="privacy.sampler",
      value=config.privacy.sampler,
    )

"""What is learnt from a data set, and how it is scored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from dpjax import data, losses, metrics
from dpjax.runs.central.config import TrainConfig
from dpjax.schema import user_code
from dpjax.types import LossFn
from dpjax.validate import UserError


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


def make_task(config: TrainConfig, dataset: data.Dataset) -> Task:
  """Classification, or the next token where the model is a transformer over text; with a
  user's own loss where the config names one. The scores stay those of the task."""
  task = _LANGUAGE if config.model.name == "transformer" else _CLASSIFICATION
  if task is _LANGUAGE and dataset.vocab_size is None:
    raise UserError(
      f"model.name='transformer': needs text of a declared vocabulary, which data.name="
      f"{config.data.name!r} does not hold"
    )
  return task if config.loss == "auto" else task._replace(loss=user_code.loss(config.loss))

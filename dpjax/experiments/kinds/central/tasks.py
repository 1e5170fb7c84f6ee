"""Learning tasks: their loss on a data set, and their scores."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from dpjax import data, losses, metrics, validate
from dpjax.data.target_kinds import needs_classes
from dpjax.data.text import PADDING_ID
from dpjax.experiments.config import common, user_code
from dpjax.experiments.kinds.central.config import (
  CONTRASTIVE,
  BalancedClasses,
  EqualClasses,
  TrainConfig,
)
from dpjax.training.augment import AUGMENTATIONS
from dpjax.types import Array, Example, LossFn, Params
from dpjax.validate import UserError
from dpjax.zoo.networks import registry


class Task(NamedTuple):
  """Holds the parts of a learning task: loss, scores, and number of outputs of a model."""

  name: str  # `task` in result.json
  loss: Callable[[Any], LossFn]  # (model.apply) -> loss of one example
  evaluate: Callable[..., dict[str, float]]  # (apply, params, dataset) -> scores
  width: Callable[[Any], int]  # (dataset) -> number of outputs
  keyed: bool = False  # whether the model draws from `example.key` in training


_NUM_CLASSES = operator.attrgetter("num_classes")
# Maps the type of the data's target (None: classes) to a task. A new type needs one entry here.
TASKS: dict[type | None, Task] = {
  None: Task(
    "classification",
    losses.softmax_cross_entropy,
    metrics.evaluate,
    _NUM_CLASSES,
  ),
  data.Labels: Task(
    "multi_label",
    losses.sigmoid_cross_entropy,
    metrics.evaluate_labels,
    _NUM_CLASSES,
  ),
  # Targets are scaled to [-1, 1] by public bounds. While predictions stay in that range, an
  # error is at most 2, so gradients are of the same order as in classification.
  data.Interval: Task(
    "regression",
    losses.mean_squared_error,
    metrics.evaluate_regression,
    _NUM_CLASSES,
  ),
}
_NEXT_TOKEN = functools.partial(losses.next_token, padding_id=PADDING_ID)
_OF_USERS = functools.partial(_NEXT_TOKEN, sequences=True)
_LANGUAGE = Task(
  "language_modeling",
  _NEXT_TOKEN,
  functools.partial(metrics.evaluate_next_token, padding_id=PADDING_ID),
  operator.attrgetter("vocab_size"),
)


def make_task(config: TrainConfig, dataset: data.Dataset) -> Task:
  """Returns the task of a run.

  It follows from the data's target (`TASKS`). Language models predict the next token instead, and
  loss="contrastive" trains embeddings of two views. A user's loss replaces only the loss of the
  task, not its scores. Raises UserError for a language model if the data are no text, and for the
  contrastive loss if the data have no classes.
  """
  if config.loss == CONTRASTIVE:
    # Imported here, since few runs need this module.
    from dpjax.experiments.kinds.central import embeddings

    needs_classes(dataset, "loss", config.loss)
    augment = AUGMENTATIONS[config.augmentation]
    evaluate = functools.partial(embeddings.evaluate, augment)
    return Task(embeddings.NAME, embeddings.loss, evaluate, lambda _: embeddings.WIDTH)
  kind = None if dataset.target is None else type(dataset.target)
  task = _LANGUAGE if registry.entry(config.model.name).is_language else TASKS[kind]
  if task is _LANGUAGE and dataset.vocab_size is None:
    raise UserError(
      f"needs text of a declared vocabulary, which data.name={config.data.name!r} "
      "does not hold",
      field="model.name",
      value=config.model.name,
    )
  if task is _LANGUAGE and dataset.unit == "user":
    task = task._replace(loss=_OF_USERS)
  if config.loss != "auto":
    return task._replace(loss=user_code.loss(config.loss))
  return _weigh(task, config.class_weights)


def check_weights(config: TrainConfig) -> None:
  """Raises UserError for class weights that are no constants of a sensible size, or that nothing
  would read."""
  chosen = config.class_weights
  if isinstance(chosen, EqualClasses):
    return
  common.read_if(config, config.loss == "auto", "loss='auto'", "class_weights")
  field, numbers = _declared_weights(chosen)
  if len(numbers) < 2:
    raise UserError(
      "must be declared, one public number for each class: counting private labels would cost "
      "privacy",
      field=field,
      value=numbers,
    )
  # With a larger factor, a gradient at the clip norm would be cut to the length that it had.
  validate.number_in(validate.MIN_FACTOR, 1, **validate.entries(**{field: numbers}))
  # Shares may be round numbers, but they are shares.
  if isinstance(chosen, BalancedClasses) and not abs(sum(numbers) - 1) <= 0.01:
    raise UserError("must sum to 1", field=field, value=numbers)


def _declared_weights(chosen: Any) -> tuple[str, tuple[float, ...]]:
  """Returns (name of the field, numbers) that class weights are declared by."""
  name = "shares" if isinstance(chosen, BalancedClasses) else "factors"
  return f"class_weights.{name}", getattr(chosen, name)


def _weigh(task: Task, chosen: Any) -> Task:
  """Returns a task of classes whose loss has the weights of a config."""
  if isinstance(chosen, EqualClasses):
    return task
  weights = chosen.weights()
  if task.name != "classification":
    raise UserError(
      f"must be 'equal' for {task.name}, which has no classes", field="class_weights"
    )
  loss = functools.partial(losses.softmax_cross_entropy, class_weights=weights)

  def width(dataset: data.Dataset) -> int:
    field, numbers = _declared_weights(chosen)
    if dataset.num_classes != len(numbers):
      raise UserError(
        f"must have one number for each of {dataset.num_classes} classes",
        field=field,
        value=numbers,
      )
    return dataset.num_classes

  return task._replace(loss=loss, width=width)


def keyed_loss(make: Callable[..., LossFn]) -> Callable[..., LossFn]:
  """Returns a function apply -> loss, where the model draws random numbers from `example.key`.

  If the key of an example is None, the model draws none, as in evaluation.

  Args:
    make: function apply -> loss, which calls apply(params, x).
  """

  def of(apply: Callable[..., Array]) -> LossFn:
    def loss(params: Params, example: Example) -> Array:
      key = example.key
      if key is None:
        return make(apply)(params, example)
      return make(lambda trained, x: apply(trained, x, key=key))(params, example)

    return loss

  return of

"""Labels that come back for answers: each finds its answer and counts once, as right or wrong."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpjax import data
from dpjax.experiments.run.model_inputs import ModelInputs
from dpjax.validate import UserError


class AwaitedLabels:
  """Holds answers that wait for their labels.

  Args:
    most: largest number of requests whose answers are kept. Beyond it the oldest request is
      forgotten.
  """

  def __init__(self, most: int):
    self._most = most
    self._answers: collections.OrderedDict[str, tuple[str, np.ndarray]] = (
      collections.OrderedDict()
    )

  def add(self, request: str, model: str, answers: np.ndarray) -> None:
    """Keeps the answers to one request.

    Args:
      request: id of the request.
      model: digest of the run that answered.
      answers: result of `Predictor.classes`.
    """
    self._answers[request] = (model, answers)
    while len(self._answers) > self._most:
      self._answers.popitem(last=False)

  def take(
    self, request: str, labels: Sequence[Any], inputs: ModelInputs
  ) -> tuple[str, int, int]:
    """Returns (digest of the run, number of right answers, number of answers), and forgets the
    request.

    Args:
      request: id of the request.
      labels: list with an entry for each row: a class by name or number, or a list of 0 and 1 for
        several labels.
      inputs: facts about the model's inputs and answers.

    Raises:
      UserError: the id is unknown or was used before; the labels are not those of the model; the
        model predicts numbers.
    """
    if isinstance(inputs.target, data.Interval):
      raise UserError("needs a model of classes or labels", field="feedback")
    if request not in self._answers:
      raise UserError(
        "is no id of an answer that waits for labels (each is taken once)", field="id"
      )
    model, answers = self._answers[request]
    if not isinstance(labels, list) or len(labels) != len(answers):
      raise UserError(f"must be a list of {len(answers)}, one for each row", field="labels")
    if inputs.target is None:
      truth = np.array([_class_of(label, inputs.labels) for label in labels])
      right = answers == truth
    else:
      truth = np.array([_row_of(label, inputs.labels) for label in labels])
      right = (answers == truth).all(axis=1)
    # Each id is accepted once, so that labels that are sent twice do not count twice.
    del self._answers[request]
    return model, int(right.sum()), len(answers)


def _class_of(label: Any, labels: Sequence[str]) -> int:
  """Returns the number of the class that a label gives by name or by number."""
  if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(labels):
    return label
  if isinstance(label, str) and label in labels:
    return list(labels).index(label)
  raise UserError(
    f"must be of the {len(labels)} classes, by name or by number",
    field="labels",
    value=label,
  )


def _row_of(label: Any, labels: Sequence[str]) -> list[int]:
  """Returns the labels of one row as a list of 0 and 1. Raises UserError for anything else."""
  is_row = isinstance(label, list) and len(label) == len(labels)
  if not is_row or not all(value in (0, 1) for value in label):
    raise UserError(
      f"must be {len(labels)} numbers of 0 and 1 for each row", field="labels"
    )
  return [int(value) for value in label]

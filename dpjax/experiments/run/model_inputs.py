"""Public facts of the inputs and outputs of a run's model: `inputs.json` beside its params.npz.

A server reads this file, so that it needs no training data. The file holds, for example, the shape
of one example, the names of the classes, and the declaration of a table. All of it is public before
the first step. result.json holds a digest of the file.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpjax import data, names, validate
from dpjax.data import target_kinds
from dpjax.experiments.run import writers
from dpjax.validate import UserError

NAME = "inputs.json"
_DTYPES = ("float32", "int32")
_MOST_NUMBERS = 2**26


@dataclasses.dataclass(frozen=True)
class ModelInputs:
  """Public facts of the inputs and outputs of a model.

  Args:
    shape: shape of one example, before it is centred and before its features are computed.
    dtype: "float32", or "int32" for tokens.
    num_classes: number of classes or of labels; 1 for a number.
    vocab_size: number of different tokens; None: the inputs are no tokens.
    target: kind of the targets: an `Interval`, `Labels`, or None for classes.
    labels: names of the classes or labels, in order; () for a number.
    unit_range: whether every number of an example lies in [0, 1] by its definition.
    declaration: declaration of a table; None for other data.
  """

  shape: tuple[int, ...]
  dtype: str
  num_classes: int
  vocab_size: int | None
  target: target_kinds.Target | None
  labels: tuple[str, ...]
  unit_range: bool
  declaration: Mapping[str, Any] | None

  def __post_init__(self):
    validate.one_of(_DTYPES, dtype=self.dtype)
    validate.integer_at_least(1, num_classes=self.num_classes)
    validate.integer_at_least(1, **validate.entries(shape=self.shape))
    if not self.shape or np.prod(self.shape, dtype=float) > _MOST_NUMBERS:
      raise UserError(
        f"must be an example of 1 to {_MOST_NUMBERS} numbers",
        field="shape",
        value=self.shape,
      )

  def zeros(self) -> data.Dataset:
    """Returns a data set with one example of zeros, to which these facts apply."""
    y: Any = np.zeros(1, np.int32)
    if isinstance(self.target, data.Interval):
      y = np.zeros(1, np.float32)
    elif self.target is not None:
      y = np.zeros((1, self.num_classes), np.int32)
    return data.Dataset(
      x=np.zeros((1, *self.shape), self.dtype),
      y=y,
      name="served",
      num_classes=self.num_classes,
      split="test",
      vocab_size=self.vocab_size,
      target=self.target,
    )


def of(
  config: Any, dataset: data.Dataset, *, unit_range: bool = False
) -> ModelInputs | None:
  """Returns the facts of a run's data; None of dicts of arrays, which `launch.serve` does not take.

  Args:
    config: section `data` of a run's config.
    dataset: one split of the run's data.
    unit_range: whether the model refuses numbers outside [0, 1], as some features do.
  """
  if dataset.in_columns:
    return None
  shape = dataset.source_shape or dataset.x.shape[1:]
  # Arrays of a user's own may hold any numbers; images of a folder have declared classes.
  own = names.is_path(config.name) or config.name.endswith((".npz", "/"))
  scaled = len(shape) == 3 and (not own or config.center or bool(dataset.classes))
  table = dataset.declaration
  labels: tuple[str, ...] = dataset.classes
  if isinstance(dataset.target, data.Labels):
    labels = dataset.target.names
  elif dataset.target is None and table is None:
    labels = labels or tuple(map(str, range(dataset.num_classes)))
  return ModelInputs(
    shape=tuple(map(int, shape)),
    # Features of texts are floats, but a server gets tokens.
    dtype=str(dataset.x.dtype) if dataset.vocab_size is None else "int32",
    num_classes=dataset.num_classes,
    vocab_size=dataset.vocab_size,
    target=dataset.target,
    labels=labels,
    unit_range=unit_range or scaled or (table is not None and dataset.vocab_size is None),
    declaration=None if table is None else table.content,
  )


def write(folder: pathlib.Path, facts: ModelInputs | None) -> None:
  """Writes `inputs.json` into a run's folder. Does nothing if `facts` is None."""
  if facts is not None:
    writers.write_json(folder / NAME, dataclasses.asdict(facts))


def read(folder: pathlib.Path) -> ModelInputs | None:
  """Reads `inputs.json` of a run's folder; None: there is no such file.

  Raises:
    UserError: the file does not hold what `write` writes; one line.
  """
  path = folder / NAME
  if not path.exists():
    return None
  held = writers.read_json(path)
  wanted = [field.name for field in dataclasses.fields(ModelInputs)]
  if not isinstance(held, dict) or set(held) != set(wanted):
    raise UserError(f"must have the keys {', '.join(wanted)}", field=str(path)[-120:])
  target = held["target"]
  try:
    if target is not None:
      kind = data.Interval if "lower" in target else data.Labels
      held["target"] = kind(**target)
    held["shape"] = tuple(held["shape"])
    held["labels"] = tuple(map(str, held["labels"]))
    return ModelInputs(**held)
  except (TypeError, ValueError) as error:
    raise UserError(
      f"is not what a run writes there ({error})", field=str(path)[-120:]
    ) from None

"""Targets other than classes: one number for each example, or several yes-no labels.

A `Dataset` with target=None holds classes. The bounds of a number and the names of labels are
public: the owner of the data declares them, and nothing is estimated from the rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpjax.types import HostArray
from dpjax.validate import NO_VALUE, UserError, finite, several, shape_of_rows


@dataclasses.dataclass(frozen=True)
class Interval:
  """Target of one number for each example, clipped to public bounds and scaled to [-1, 1].

  Args:
    lower, upper: finite bounds in the units of the data; upper is 2e-30 to 2e30 above lower.

  >>> Interval(0, 400).scale([0.0, 300.0, 900.0])
  array([-1. ,  0.5,  1. ], dtype=float32)
  >>> Interval(0, 400).original(np.float32(0.5))
  300.0
  """

  lower: float
  upper: float

  def __post_init__(self):
    for name in ("lower", "upper"):
      value = getattr(self, name)
      finite(**{name: value})
      # 0, 0.0 and -0.0 are the same bound, but have different texts. A data set's digest covers the
      # text of its target. Adding 0 turns -0.0 into 0.0.
      object.__setattr__(self, name, float(value) + 0.0)
    if not self.lower < self.upper:
      raise UserError(f"must be > lower={self.lower}", field="upper", value=self.upper)
    # Models compute in float32. Products with smaller or larger widths could underflow or overflow.
    if not 1e-30 < self.half_width < 1e30:
      raise UserError("must lie 2e-30 to 2e30 above lower", field="upper", value=self.upper)

  @property
  def half_width(self) -> float:
    """The length, in units of the data, that scaling turns into 1: half of upper - lower."""
    return self.upper / 2 - self.lower / 2

  def scale(self, values: HostArray) -> np.ndarray:
    """Scales numbers [n] from units of the data to float32 [n], clipped to [-1, 1].

    The number of clipped values is never printed: counting them is a query on private data.

    Raises:
      UserError: a value that is not finite.
    """
    numbers = np.asarray(values, np.float64)
    if not np.isfinite(numbers).all():
      raise UserError("every value must be finite", field="y")
    middle = self.lower / 2 + self.upper / 2
    return np.clip((numbers - middle) / self.half_width, -1, 1).astype(np.float32)

  def original(self, scaled: HostArray) -> Any:
    """Converts scaled numbers back to units of the data, in float64; a scalar becomes a float."""
    middle = self.lower / 2 + self.upper / 2
    numbers = np.asarray(scaled, np.float64) * self.half_width + middle
    return numbers if numbers.ndim else float(numbers)


@dataclasses.dataclass(frozen=True)
class Labels:
  """Target of several yes-no labels for each example: 1 means yes, 0 means no.

  Args:
    names: distinct names of the labels, in the order of the columns of `y`.

  >>> Labels(("asthma", "diabetes")).names
  ('asthma', 'diabetes')
  """

  names: tuple[str, ...]

  def __post_init__(self):
    names = several(names=self.names)
    if not names or not all(isinstance(name, str) and name for name in names):
      raise UserError("must be one text or more", field="names", value=self.names)
    if len(set(names)) < len(names):
      raise UserError("must be distinct", field="names", value=self.names)
    object.__setattr__(self, "names", names)


# Kinds of targets that a `Dataset` may hold, besides classes.
Target = Interval | Labels


def _check_target(target: object) -> None:
  if not isinstance(target, Target):
    raise UserError(
      "must be a dpjax.data.Interval, dpjax.data.Labels or None (classes)",
      field="target",
      value=target,
    )


def check(y: object, num_examples: int, target: Target, num_classes: int) -> None:
  """Raises UserError if the targets `y` of a data set do not match its `target`."""
  _check_target(target)
  wanted: Any = (num_examples,)
  dtype: Any = np.float32
  width = 1
  if isinstance(target, Labels):
    width = len(target.names)
    wanted = (num_examples, width)
    dtype = np.int32
  if num_classes != width:
    raise UserError(
      f"must be {width}, the outputs of {target}", field="num_classes", value=num_classes
    )
  if not isinstance(y, np.ndarray) or y.dtype != dtype or y.shape != wanted:
    # The number of rows may be secret, so shapes are shown with n.
    kind = (
      f"{getattr(y, 'dtype', type(y).__name__)} {shape_of_rows(getattr(y, 'shape', ()))}"
    )
    raise UserError(
      f"must be a {np.dtype(dtype)} array {shape_of_rows(wanted)}, one row for each of the n rows "
      f"of x, got {kind}",
      field="y",
    )
  if isinstance(target, Labels) and not np.isin(y, (0, 1)).all():
    raise UserError("must hold 0 and 1 alone", field="y")
  if isinstance(target, Interval) and not (np.abs(y) <= 1).all():
    raise UserError("must be scaled to [-1, 1]", field="y")


def as_targets(array: np.ndarray, target: Target) -> np.ndarray:
  """Converts an array to the targets of a `Dataset`.

  Args:
    array: numbers [n] in the units of the data for an `Interval`; 0 and 1 [n, labels] for
      `Labels`.
  """
  _check_target(target)
  if array.dtype.kind not in "biuf":
    raise UserError(f"must hold numbers, got {array.dtype}", field="y")
  if isinstance(target, Interval):
    return target.scale(array)
  if not np.isin(array, (0, 1)).all():
    raise UserError("must hold 0 and 1 alone", field="y")
  return array.astype(np.int32)


def needs_arrays(dataset: object, field: str, value: Any = NO_VALUE) -> None:
  """Raises UserError if an example's input is a dict. The arguments are those of
  `needs_classes`."""
  if getattr(getattr(dataset, "dataset", dataset), "in_columns", False):
    raise UserError(
      "needs data with one array of inputs; a dict of arrays is taken by launch.train, "
      "launch.sweep and notebooks",
      field=field,
      value=value,
    )


def needs_classes(dataset: object, field: str, value: Any = NO_VALUE) -> None:
  """Raises UserError if a data set has no classes, or if its inputs are dicts of arrays.

  Args:
    dataset: a `Dataset`, or a `Federation` with one.
    field, value: the setting that needs classes, or the one that names the data.
  """
  needs_arrays(dataset, field, value)
  target = getattr(getattr(dataset, "dataset", dataset), "target", None)
  if target is None:
    return
  kind = "numbers" if isinstance(target, Interval) else "several labels"
  raise UserError(
    f"needs data with one class for each example, not {kind}", field=field, value=value
  )

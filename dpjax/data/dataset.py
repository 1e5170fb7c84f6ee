"""The container of examples, and the functions that make it from arrays and files."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import validate
from dpjax.columns import Columns, rows_at
from dpjax.data import target_kinds
from dpjax.data.rows import CHUNK_BYTES, Rows, RowSource
from dpjax.data.target_kinds import Target
from dpjax.types import Example, HostArray
from dpjax.validate import UserError


def _check_x(x: Any) -> None:
  if isinstance(x, Columns):
    for place, leaf in x.named_arrays():
      _check_array(leaf, place)
    return
  if isinstance(x, np.ndarray | Rows) and x.ndim < 2:
    raise UserError(
      "must be [n, *features] (one column: [n, 1])",
      field="x.shape",
      value=validate.shape_of_rows(x.shape),
    )
  _check_array(x, "x")


def _check_array(x: Any, field: str) -> None:
  if not isinstance(x, np.ndarray | Rows) or x.dtype not in (np.float32, np.int32):
    kind = getattr(x, "dtype", type(x).__name__)
    raise UserError(f"must be a float32 or int32 NumPy array, got {kind}", field=field)
  if 0 in x.shape[1:]:
    raise UserError(
      "one example must hold at least one number",
      field=f"{field}.shape",
      value=validate.shape_of_rows(x.shape),
    )
  # The values of `Rows` are checked whenever rows are read; see `in_files`.
  if isinstance(x, Rows) or x.dtype != np.float32:
    return
  bad = 0
  # A mask of all numbers at once would take a quarter of the data's memory.
  rows = max(1, CHUNK_BYTES // max(1, x[:1].nbytes))
  for start in range(0, len(x), rows):
    part = x[start : start + rows]
    bad += part.size - int(np.count_nonzero(np.isfinite(part)))
  if bad:
    raise UserError(f"every value must be finite in float32, {bad} are not", field=field)


def _check_range(array: np.ndarray, bound: int | None, name: str, bound_name: str) -> None:
  if array.size == 0:
    return
  low = int(array.min())
  high = int(array.max())
  if low < 0 or (bound is not None and high >= bound):
    limit = "negative" if bound is None else f"outside [0, {bound_name}={bound})"
    # Integer inputs are tokens, which surprises who has a table of whole numbers.
    hint = "integers are tokens; make numbers .astype(np.float32)" if name != "y" else ""
    must = f"holds values from {low} to {high}: none may be {limit}"
    raise UserError(must, field=name, hint=hint)


def _check_y(y: Any, n: int) -> None:
  if not isinstance(y, np.ndarray) or y.dtype != np.int32:
    kind = getattr(y, "dtype", type(y).__name__)
    raise UserError(f"must be an int32 NumPy array, got {kind}", field="y")
  if y.shape != (n,):
    # The number of rows may be secret, so no message of this package shows it.
    kind = "" if y.ndim == 1 else f", is {validate.shape_of_rows(y.shape)}"
    raise UserError(
      f"must have shape (n,), one label for each of the n rows of x{kind}", field="y"
    )


def _read_only(array: np.ndarray) -> np.ndarray:
  view = array.view()
  view.flags.writeable = False
  return view


def _frozen_columns(x: Columns, vocab_size: int | None) -> Columns:
  """Returns the columns as read-only views. Raises UserError if `vocab_size` is given."""
  if vocab_size is not None:
    raise UserError(
      "must be left out where x is a dict: which of its arrays would it bound?",
      field="vocab_size",
      value=vocab_size,
    )
  return Columns(jax.tree.map(_read_only, x.tree), "x")


class Groups(NamedTuple):
  """The group of each test row, by which scores are told apart."""

  column: str
  names: tuple[str, ...]  # declared values of the column
  places: np.ndarray  # [n] int32: place in `names`


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
  """Examples with random access: `d[i]`, `d[indices]` and `d[a:b]` return an `Example`.

  The constructor checks that x and y are equally long, x is finite, labels lie in
  [0, num_classes), and tokens lie in [0, vocab_size). The arrays are read-only views. x may lie in
  files (`Rows`): then it is checked whenever it is read, and only labels are in memory.

  The shape of one example, `num_classes`, `vocab_size`, `nominal_size` and `target` are taken as
  public. The values of x and y are secret, and under add-or-remove-one `len(d)` is secret, too.

  >>> d = from_arrays(np.zeros((4, 2, 2, 1)), [0, 1, 1, 0], num_classes=2)
  >>> d
  Dataset(arrays/train: 4 x (2, 2, 1) float32, 2 classes)
  >>> d[np.array([1, 3])].y
  array([1, 0], dtype=int32)
  >>> len(d.subset(slice(0, 3)))
  3
  >>> from_arrays(np.zeros((4, 1)), [0] * 4, num_classes=1, nominal_size=5).nominal_size
  5
  """

  # An array or `Rows`: float32 [n, H, W, C] or [n, *features], or int32 tokens [n, T]. Or
  # `Columns`: a dict of arrays [n, ...], so that an example's x is a dict.
  x: Any
  y: np.ndarray  # [n] int32 classes; for other kinds see `target`
  name: str
  num_classes: int
  split: str  # "train" | "test"
  vocab_size: int | None = None  # number of token ids; None: unknown, or no tokens
  # [n] bool; a row that is not present is an empty record: it keeps its place, may be drawn, and
  # contributes zero (relation replace_special). `Plan.batches` masks such rows. None: all are
  # present.
  present: np.ndarray | None = None
  # The declared number of examples: a constant that does not follow from the rows, so
  # adding or removing a row does not change it. None: nothing is declared.
  nominal_size: int | None = None
  # Kind of y. None: classes. Interval: y is float32 [n] in [-1, 1], and `num_classes` is 1.
  # Labels: y is int32 [n, labels] of 0 and 1, and `num_classes` is the number of labels.
  target: Target | None = None
  # Of a table: the number of cells that are not as declared, by column, in all rows of train and
  # test (`clipped_cells`). It is as secret as x. None: not a table.
  clipped_cells: Mapping[str, int] | None = None
  # Of the test rows of a table that declares a group. None: there is none.
  groups: Groups | None = None
  # Of a table: its `Declaration`, which is public. None: not a table.
  declaration: Any = None
  # Declared names of the classes, in order; (): they have none.
  classes: tuple[str, ...] = ()
  # Of texts that a tokenizer's file has read: `Tokenizer.facts`. None: there is no such file.
  tokenizer: Mapping[str, Any] | None = None
  # Shape of one input before features took its place (`identity.with_inputs`); None: x has it.
  source_shape: tuple[int, ...] | None = None

  def __post_init__(self):
    validate.integer_at_least(1, num_classes=self.num_classes)
    if self.nominal_size is not None:
      validate.integer_at_least(1, nominal_size=self.nominal_size)
    _check_x(self.x)
    if self.target is not None:
      target_kinds.check(self.y, len(self.x), self.target, self.num_classes)
    else:
      _check_y(self.y, len(self.x))
      _check_range(self.y, self.num_classes, "y", "num_classes")
    if isinstance(self.x, Columns):
      object.__setattr__(self, "x", _frozen_columns(self.x, self.vocab_size))
    elif isinstance(self.x, np.ndarray):
      if self.x.dtype == np.int32:
        _check_range(self.x, self.vocab_size, "x", "vocab_size")
      object.__setattr__(self, "x", _read_only(self.x))
    object.__setattr__(self, "y", _read_only(self.y))
    if self.groups is not None and self.groups.places.shape != (len(self.x),):
      raise UserError("must have one place for each row of x", field="groups")
    if self.present is not None:
      n = len(self.x)
      if (
        not isinstance(self.present, np.ndarray)
        or self.present.dtype != bool
        or self.present.shape != (n,)
      ):
        raise UserError(
          "must be a bool NumPy array [n], one for each row of x", field="present"
        )
      object.__setattr__(self, "present", _read_only(self.present))

  def __len__(self) -> int:
    return len(self.y)

  def __getitem__(self, indices: Any) -> Example:
    return Example(rows_at(self.x, indices), rows_at(self.y, indices))

  def __repr__(self) -> str:
    kind = self.x if self.in_columns else f"{self.x.shape[1:]} {self.x.dtype}"
    x = f"{len(self)} x {kind}"
    x += "" if self.in_memory else " in files"
    learnt = f"{self.num_classes} classes" if self.target is None else str(self.target)
    return f"Dataset({self.name}/{self.split}: {x}, {learnt})"

  def subset(self, indices: np.ndarray | slice) -> Dataset:
    """Returns the rows at `indices` (integers, a slice or a mask), in the order of `indices`.

    The result keeps `nominal_size`, so that a data set with one row less has the same plan. If the
    result is used as a separate data set, declare its size: `part.declared(100)`.

    Raises:
      UserError: no rows of this data set; or a row comes twice, as in a bootstrap or where a rare
        class is repeated. Its record would be two, and move a sum by twice the clip norm.
    """
    if not isinstance(indices, slice):
      # NumPy reads an empty list as floats.
      indices = np.asarray(indices, int if np.size(indices) == 0 else None)
      try:
        rows = np.arange(len(self))[indices]
      # NumPy's text would show how many rows there are.
      except IndexError:
        rows = np.zeros(())
      if rows.ndim != 1:
        raise UserError(
          "must be a slice, integers of rows that are there, or a bool for each row",
          field="indices",
          value=indices,
        )
      if np.unique(rows).size < rows.size:
        raise UserError(
          "must name each row once: a record in two rows has twice the influence that an epsilon "
          "counts; weigh a rare class in the loss",
          field="indices",
        )
    present = None if self.present is None else self.present[indices]
    x = self.x[indices] if self.in_memory else self.x.subset(indices)
    x = Columns(x, "x") if self.in_columns else x
    groups = self.groups
    if groups is not None:
      groups = groups._replace(places=groups.places[indices])
    return dataclasses.replace(self, x=x, y=self.y[indices], present=present, groups=groups)

  def without_empty_records(self) -> Dataset:
    """Returns the rows that are present, in their order."""
    return self if self.present is None else self.subset(self.present)

  def declared(self, nominal_size: int | None) -> Dataset:
    """Returns the same rows with another `nominal_size`.

    >>> d = from_arrays(np.zeros((4, 1)), [0] * 4, num_classes=1)
    >>> d.subset(slice(0, 2)).declared(2).nominal_size
    2
    """
    if nominal_size is not None:
      validate.integer_at_least(1, nominal_size=nominal_size)
    # Unlike `replace`, `copy` does not check the rows again, and keeps the digest of `with_inputs`.
    same = copy.copy(self)
    object.__setattr__(same, "nominal_size", nominal_size)
    return same

  @property
  def in_memory(self) -> bool:
    """Whether x is in memory (an array or `Columns`); otherwise it is `Rows`, read on request."""
    return not isinstance(self.x, Rows)

  @property
  def unit(self) -> str:
    """What a row is: "user" if it holds several sequences of tokens, all of one user, [m, T]; else
    "", for the sampler says it."""
    return "user" if self.x.dtype == np.int32 and self.x.ndim == 3 else ""

  @property
  def in_columns(self) -> bool:
    """Whether x is `Columns`, so that an example's x is a dict of arrays."""
    return isinstance(self.x, Columns)

  def read(self) -> Dataset:
    """Returns the same data set in memory."""
    if self.in_memory:
      return self
    return dataclasses.replace(self, x=self.x[:])

  def replace_rows(self, indices: np.ndarray, by: Dataset) -> Dataset:
    """Returns a copy with row i of `by` at `indices[i]`, and with the `num_classes` of `by`.

    The indices must be distinct. Raises UserError if x is a dict of arrays.
    """
    if self.in_columns:
      raise UserError("is a dict of arrays, whose rows cannot be replaced", field="x")
    y = self.y.copy()
    y[indices] = by.y
    if self.in_memory:
      x = self.x.copy()
      x[indices] = by.x
    else:
      x = self.x.replace_rows(indices, by.x)
    return dataclasses.replace(self, x=x, y=y, num_classes=by.num_classes)


def _as_array(value: Any, name: str) -> np.ndarray:
  if np.ma.is_masked(value):
    raise UserError(
      "holds masked entries, which have no value; fill them: .filled(0)", field=name
    )
  try:
    array = np.asarray(value)
  # For example, NumPy raises ValueError for ragged lists, and JAX raises TypeError for PRNG keys.
  except (ValueError, TypeError) as error:
    raise UserError(
      f"is not a rectangular array ({validate.first_line(error)})", field=name
    ) from error
  # What NumPy does not know, such as a sparse matrix, becomes one entry of an array without axes.
  if array.dtype == object and array.ndim == 0:
    kind = type(value).__name__
    raise UserError(
      f"is {kind}, must be an array [n, ...]; of a sparse matrix .toarray(), of a generator a list",
      field=name,
    )
  return array


def _to_int32(array: np.ndarray, name: str) -> np.ndarray:
  cast = array.astype(np.int32)
  if not np.array_equal(cast, array):
    raise UserError(f"holds {array.dtype} values that do not fit in int32", field=name)
  return cast


def _as_features(value: Any) -> np.ndarray:
  x = _as_array(value, "x")
  if x.dtype == np.uint8 and x.ndim in (3, 4):
    return np.divide(x[..., np.newaxis] if x.ndim == 3 else x, 255, dtype=np.float32)
  if x.dtype.kind == "f":
    # Values beyond float32 become infinite. `Dataset` then refuses them.
    with np.errstate(over="ignore"):
      return x.astype(np.float32, copy=False)
  if x.dtype.kind in "iu" and x.dtype != np.uint8 and x.ndim == 2:
    return _to_int32(x, "x")
  raise UserError(
    f"{x.dtype} of shape {validate.shape_of_rows(x.shape)} is not supported: must be uint8 images "
    "[n, H, W] or [n, H, W, C], floats [n, *features], or wider integers as "
    "tokens [n, T]",
    field="x",
  )


def _as_columns(tree: dict[Any, Any]) -> Columns:
  """Converts arrays of a dict: uint8 images and floats to float32, other integer types to int32."""

  def converted(place: str, leaf: Any) -> np.ndarray:
    array = _as_array(leaf, place)
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
      return _to_int32(array, place)
    if array.dtype.kind == "f" or (array.dtype == np.uint8 and array.ndim in (3, 4)):
      return _as_features(array)
    raise UserError(
      f"{array.dtype} of shape {validate.shape_of_rows(array.shape)} is not supported: must be "
      "uint8 images, floats, or wider integers",
      field=place,
    )

  held = Columns(tree, "x")
  leaves = [converted(place, leaf) for place, leaf in held.named_arrays()]
  return Columns(jax.tree.unflatten(jax.tree.structure(tree), leaves), "x")


def _as_labels(value: Any) -> np.ndarray:
  y = _as_array(value, "y")
  if y.size == 0:
    return y.astype(np.int32)
  if y.dtype.kind not in "iu":
    raise UserError(f"must hold integer class labels, got {y.dtype}", field="y")
  return _to_int32(y, "y")


def in_files(source: RowSource, y: HostArray, **more: Any) -> Dataset:
  """Makes a `Dataset` whose inputs stay in a source, which is read a few rows at a time.

  Args:
    source: source of raw rows [k, ...]: uint8 images, floats or tokens, as in `from_arrays`.
    y: integer labels [n].
    more: arguments `num_classes`, `vocab_size`, `name`, `split`, `nominal_size` of `from_arrays`.

  Raises:
    UserError: labels or inputs that `from_arrays` refuses; no rows; or a user's source whose rows 0
      and 1 change when they are read together. Inputs are checked when they are read.

  >>> class Grey:
  ...   def __len__(self): return 3
  ...   def read(self, places): return np.full((len(places), 2, 2), 255, np.uint8)
  >>> d = in_files(Grey(), np.array([0, 1, 0]), num_classes=2)
  >>> d, float(d[np.array([2])].x.max())
  (Dataset(arrays/train: 3 x (2, 2, 1) float32 in files, 2 classes), 1.0)
  """
  vocab_size = more.get("vocab_size")

  def decode(raw: np.ndarray) -> np.ndarray:
    x = _as_features(raw)
    _check_x(x)
    if x.dtype == np.int32:
      _check_range(x, vocab_size, "x", "vocab_size")
    return x

  if not len(source):
    raise UserError("must have at least one row", field="source")
  labels = _as_labels(y)
  _check_y(labels, len(source))
  first = decode(source.read(np.zeros(1, np.int64)))
  x = Rows(source, first.shape[1:], first.dtype, decode)
  # Only a user's source is checked: the sources of dpjax read each row independently.
  if type(source).__module__.partition(".")[0] != "dpjax":
    _check_apart(x)
  named: Any = {"name": "arrays", "split": "train"} | more
  return Dataset(x=x, y=labels, **named)


def _check_apart(x: Rows) -> None:
  """Raises UserError if rows 0 and 1 of a user's source change when they are read together.

  The gradient of such a row would depend on other records, and no clipping would bound their
  influence.
  """
  if len(x) < 2:
    return
  looks = []
  for _ in range(2):
    apart = np.concatenate([x[:1], x[1:2]])
    looks.append((apart.tobytes(), x[:2].tobytes()))
  (apart, together), again = looks
  if apart != together or looks[0] != again:
    when = "at each read" if looks[0] != again else "when they are read together"
    raise UserError(
      "source.read(places) must return the row of each place, in their order, whatever else is "
      f"read; rows 0 and 1 are others {when}",
      field="x",
    )


def from_arrays(
  x: HostArray | dict[str, Any],
  y: HostArray,
  *,
  num_classes: int | None = None,
  vocab_size: int | None = None,
  name: str = "arrays",
  split: str = "train",
  nominal_size: int | None = None,
  target: Target | None = None,
) -> Dataset:
  """Makes a `Dataset` from anything that NumPy can read as an array.

  Args:
    x: inputs, of one of these kinds.
      Images: uint8 [n, H, W] or [n, H, W, C], divided by 255; a missing channel axis is added.
      Floats: finite [n, *features], cast to float32. Scale them yourself, by public constants.
      Tokens: integers [n, T] of any type but uint8, cast to int32.
      A dict of such arrays: a model gets a dict, and integers may have any shape [n, ...].
    y: integer labels [n] in [0, num_classes); for other kinds see `target`.
    num_classes: number of classes. It is public, and never counted from the labels.
    target: kind of y. None: classes. `Interval(lower, upper)`: numbers [n], which are clipped to
      these public bounds and scaled to [-1, 1]. `Labels(names)`: 0 and 1, [n, labels].
    vocab_size: number of token ids: tokens must lie in [0, vocab_size). None: any id >= 0 is
      allowed. It must be None if x is a dict.
    nominal_size: declared number of examples: a public constant near n, never counted from the
      rows. Under add-or-remove-one, where n is a secret, mechanisms use it in place of n.

  Raises:
    UserError: one line, for every other dtype or shape, a non-finite value, or a label or token
      out of range. No record is dropped or repaired.
    TypeError: neither `num_classes` nor `target` is given.

  >>> d = from_arrays(np.full((2, 3, 3), 255, np.uint8), [0, 9], num_classes=10)
  >>> d.x.shape, d.x.dtype, float(d.x.max())
  ((2, 3, 3, 1), dtype('float32'), 1.0)
  >>> from_arrays(np.zeros((2, 1)), [0, 9], num_classes=9)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: y: holds values from 0 to 9: none may be outside [0, ...=9)
  >>> from_arrays(np.zeros((2, 1)), [90.0, 240.0], target=target_kinds.Interval(40, 240)).y
  array([-0.5,  1. ], dtype=float32)
  """
  if target is None and num_classes is None:
    # Python raises TypeError for a missing argument, too.
    raise TypeError(
      "from_arrays() needs num_classes=, or target=: counting private labels would let one "
      "record decide the shape of the model"
    )
  if isinstance(target, target_kinds.Labels) and num_classes is None:
    num_classes = len(target.names)
  return Dataset(
    x=_as_columns(x) if isinstance(x, dict) else _as_features(x),
    y=_as_labels(y)
    if target is None
    else target_kinds.as_targets(_as_array(y, "y"), target),
    name=name,
    num_classes=1 if num_classes is None else num_classes,
    split=split,
    vocab_size=vocab_size,
    nominal_size=nominal_size,
    target=target,
  )

"""Reads rows of a user's data by index, and checks them; each failure is a one-line error.

No error names an index, since who was drawn is secret.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpjax import columns, trees
from dpjax.types import Indexed
from dpjax.validate import UserError


def size_of(data: Indexed) -> int:
  """Returns the number of rows of a data set.

  Raises:
    UserError: the data have no rows, or `len` fails.

  >>> size_of(np.zeros((3, 2)))
  3
  """
  data = columns.by_place(data)
  try:
    size = len(data)
  # A user's class may raise any error. The error's text is not shown, since it may hold records.
  except Exception:
    size = None
  if size is None:
    raise _wrong(data, "which has no len()")
  if not size:
    raise UserError(
      f"must hold at least one row, {type(data).__name__} holds none", field="data"
    )
  return size


def present_in(data: Indexed, size: int) -> np.ndarray | None:
  """Returns the `present` of a data set, bool [n], or None if it has none.

  Raises:
    UserError: one that is no bool array with an entry for each of the `size` rows.
  """
  present = getattr(data, "present", None)
  if present is None:
    return None
  # It is checked here, since NumPy's error would name a drawn index, which is secret.
  kind = getattr(getattr(present, "dtype", None), "kind", "")
  if kind != "b" or np.shape(present) != (size,):
    # The number of rows may be secret, so no shape is shown.
    raise UserError(
      "must be a bool array [n], one entry for each of the n rows of data; is "
      f"{type(present).__name__} of another type or shape",
      field="data.present",
    )
  return present


def reader(data: Indexed, size: int) -> Callable[[np.ndarray], Any]:
  """Returns a function from indices to a batch, after a test that reads at least the first row.

  Args:
    data: rows by place, as of `columns.by_place`.
    size: number of rows.

  Raises:
    UserError: rows cannot be read by index, come in another order than their indices, depend on
      other rows of the batch, or are drawn at random. The returned function raises UserError if a
      later read fails, or gives rows of another shape.

  >>> reader(np.arange(3.0), 3)(np.array([2, 0]))
  array([2., 0.])
  """
  first = np.zeros(1, np.int64)
  # One row is read before the run, so that unreadable data fail here, not in the middle of the run.
  if _reads_by_place(data):
    rows_of(data, first)
    return functools.partial(rows_of, data)
  kind = _kind_of_row(_own_arrays(data, rows_of(data, first)))

  def read(indices: np.ndarray) -> Any:
    rows = _own_arrays(data, rows_of(data, indices))
    if _kind_of_row(rows) != kind:
      raise _wrong(
        data,
        "whose rows differ in shape or type; pad them to one public length: with "
        "the longest of a batch, one record would change what the others are",
      )
    return rows

  _check_order(data, read, size)
  return read


def _kind_of_row(rows: Any) -> tuple[Any, ...]:
  """Returns the structure of a batch, with shape and type of one row of each leaf."""
  leaves, treedef = jax.tree.flatten(rows)
  return treedef, [(leaf.shape[1:], leaf.dtype) for leaf in leaves]


def _reads_by_place(data: Any) -> bool:
  """Returns whether `data[indices]` is known to return new arrays in the order of the indices."""
  # `Columns` and `users.UserBlocks` wrap a user's data, which may sort or mix rows. So the inner
  # data decide.
  if isinstance(data, columns.Columns):
    return all(map(_reads_by_place, jax.tree.leaves(data.tree)))
  is_ours = type(data).__module__.partition(".")[0] == "dpjax"
  if is_ours and hasattr(data, "data"):
    return _reads_by_place(data.data)
  # A subclass of a NumPy array may define indexing anew, so it is not trusted.
  return is_ours or type(data) is np.ndarray or isinstance(data, jax.Array)


def rows_of(data: Indexed, indices: np.ndarray) -> Any:
  """Returns `data[indices]`, checked.

  Raises:
    UserError: the result is not a tree of arrays of numbers, each with one row for each index. Data
      that declare `adds_rows` may return more rows.

  >>> rows_of(np.arange(3.0), np.array([1, 1]))
  array([1., 1.])
  """
  failure = ""
  examples = None
  leaves = []
  shapes = []
  try:
    examples = columns.rows_at(data, indices)
    leaves = jax.tree.leaves(examples)
    for leaf in leaves:
      # A leaf without a shape gets None here, and `_check_kind` refuses it below.
      shape = getattr(leaf, "shape", None)
      shapes.append(shape if shape is None else tuple(shape))
  except UserError:
    raise
  # The text of the error may contain the requested indices, so only the error's type is kept.
  except Exception as error:
    failure = type(error).__name__
  # The new error is raised outside the handler, so that it does not refer to the old error.
  if failure:
    raise _wrong(data, f"whose data[indices] raised {failure}")
  if not leaves:
    raise _wrong(data, "whose data[indices] holds no array")
  adds_rows = getattr(data, "adds_rows", False)
  for leaf, shape in zip(leaves, shapes):
    _check_kind(data, leaf)
    lengths = shape[:1] if shape else ()
    # A source that declares `adds_rows` may return more rows than requested, but never fewer.
    enough = adds_rows and lengths > (len(indices),)
    if lengths != (len(indices),) and not enough:
      # Rows that came may be all rows of the data, whose number may be secret.
      raise _wrong(data, "which returns other than a row for each of the indices")
  return examples


def _wrong(data: object, what: str) -> UserError:
  kind = type(data)
  return UserError(
    "needs len() and data[indices] that returns a tree of arrays, each with a leading axis of "
    f"len(indices); got {kind.__module__.partition('.')[0]}.{kind.__name__}, {what}",
    field="data",
  )


def _check_kind(data: Indexed, leaf: Any) -> None:
  """Raises UserError for anything but an array of numbers."""
  if isinstance(leaf, np.ma.MaskedArray):
    raise _wrong(
      data, "which returns masked arrays, whose mask JAX would drop; fill them: .filled(0)"
    )
  dtype = getattr(leaf, "dtype", None)
  if getattr(dtype, "names", None):
    raise _wrong(
      data,
      "which returns arrays with named fields; give a dict of arrays, one for each field",
    )
  is_text = getattr(dtype, "kind", "") in ("O", "S", "U", "M", "m")
  # JAX has no type for extended precision, so these arrays are refused.
  if isinstance(leaf, np.ndarray) and dtype in (np.longdouble, np.clongdouble):
    raise _wrong(data, f"which returns arrays of {dtype}; make it .astype(np.float32)")
  # Types that select by label, such as a pandas Series, have an attribute `iloc`. They are refused.
  if getattr(leaf, "shape", None) is None or is_text or hasattr(leaf, "iloc"):
    kind = f"arrays of {dtype}" if is_text else type(leaf).__name__
    raise _wrong(
      data,
      f"which returns {kind}; make it .with_format('numpy') (Hugging Face) or "
      ".to_numpy() (pandas)",
    )


def _own_arrays(data: Indexed, rows: Any) -> Any:
  """Returns the rows as new NumPy arrays (JAX arrays stay).

  A user's class may reuse its memory, and `jax.jit` takes no tensors of torch, frames of polars or
  arrays of xarray."""
  failure = ""
  copies = None
  try:
    copies = jax.tree.map(
      lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), rows
    )
  # The error's text may hold records, so only its type is kept.
  except Exception as error:
    failure = type(error).__name__
  if failure:
    raise _wrong(data, f"of which NumPy cannot read one ({failure})")
  for leaf in jax.tree.leaves(copies):
    _check_kind(data, leaf)
  return copies


def _check_order(data: Indexed, read: Callable[[np.ndarray], Any], size: int) -> None:
  """Raises UserError if rows do not follow the order of the indices, or depend on each other.

  A batch is padded at its end with copies of row 0, and its mask marks these positions. If a class
  sorts rows, padding moves to positions that count, and one record counts many times. If a row
  holds something of other rows, such as their mean, clipping does not bound their influence.
  """
  # The probes are the first row, the last row, and both in falling order with a repeat. The third
  # probe shows sorting.
  probes = [np.array(places) for places in ([0], [size - 1], [size - 1, 0, 0])]
  looks = [[_contents(read(places)) for places in probes] for _ in range(2)]
  # The draws of a generator go by the order of its calls. Whoever knows its seed would see a record
  # that comes or goes in all rows that are read after it.
  if looks[0] != looks[1]:
    raise _wrong(
      data,
      "whose rows are others at each read; draw at random in the loss, from "
      "example.key (dpjax.training.dp_sgd: example_key)",
    )
  for batch, other, rows in zip(*looks[0]):
    if batch != other and rows in ([*batch, *batch, *other], [*batch, *other, *batch]):
      raise _wrong(
        data,
        "which sorts its rows; they must come in the order of indices, or "
        "the padding of a batch would count",
      )
    if rows[1:] != [*batch, *batch]:
      raise _wrong(
        data,
        "whose rows change with those that are read beside them; each must be "
        "a function of its own record",
      )


def _contents(examples: Any) -> list[list[bytes]]:
  """Returns, for each leaf, a list of the bytes of each row."""
  # NumPy cannot read the bytes of random keys, so they are left out.
  leaves = [leaf for leaf in jax.tree.leaves(examples) if not trees.is_key(leaf)]
  return [[row.tobytes() for row in np.asarray(leaf)] for leaf in leaves]

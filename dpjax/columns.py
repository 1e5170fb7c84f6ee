"""Data sets that are dicts of arrays, indexed by row."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dpjax import trees
from dpjax.types import Array
from dpjax.validate import UserError


def rows_at(array: Any, indices: Any) -> Any:
  """Returns `array[indices]`; rows of a NumPy array are copied whole, which takes less time.

  >>> rows_at(np.arange(6.0).reshape(3, 2), np.array([2, 0])).tolist()
  [[4.0, 5.0], [0.0, 1.0]]
  """
  is_plain = type(array) is np.ndarray and type(indices) is np.ndarray
  # `take` reads no mask, and would copy a whole array that is laid out in another way.
  if not is_plain or indices.dtype != np.int64:
    return array[indices]
  laid_out = array.flags.c_contiguous and array.flags.aligned
  return array.take(indices, axis=0) if laid_out else array[indices]


class Columns:
  """A dict of arrays with one leading axis: `columns[indices]` is a dict of the same names.

  Args:
    tree: dict of arrays [n, ...] of NumPy or JAX. It may also hold dicts, tuples and lists of
      such arrays.
    name: name of the dict in error messages.

  Raises:
    UserError: no array at all; an entry that is None, a number without an axis, or a pandas
      Series; unequal lengths; or names that cannot be sorted.

  >>> columns = Columns({"age": np.arange(3.0), "text": np.zeros((3, 5), np.int32)})
  >>> len(columns), columns[np.array([2, 0])]["age"].tolist(), columns.shapes
  (3, [2.0, 0.0], {'age': (), 'text': (5,)})
  """

  # Callers read these two attributes of every data set. The arrays have no common dtype, and share
  # only the row axis.
  dtype = None
  ndim = 1

  def __init__(self, tree: dict[Any, Any], name: str = "data"):
    trees.check_no_none(tree, name)
    first = ""
    size = 0
    for place, leaf in _named_arrays(tree, name):
      shape = getattr(leaf, "shape", None)
      # Types that select by label, such as a pandas Series, have `iloc` to select by place. They
      # are refused, since indices are places.
      if shape is None or hasattr(leaf, "iloc"):
        raise UserError(
          f"must be an array [n, ...], got {type(leaf).__name__}; np.asarray makes one",
          field=place,
        )
      if not shape:
        raise UserError(
          "is one number, must be an array [n, ...] with a value for each example",
          field=place,
        )
      if first and shape[0] != size:
        # The number of rows may be secret.
        raise UserError(
          f"has another number of rows than {first}; each example needs all", field=place
        )
      first = first or place
      size = shape[0]
    if not first:
      raise UserError("is a dict without arrays; an example must hold one", field=name)
    self.tree = tree
    self._size = size

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, indices: Any) -> dict[Any, Any]:
    return jax.tree.map(functools.partial(rows_at, indices=indices), self.tree)

  def __array__(self, *args: Any, **named: Any) -> np.ndarray:
    # Without this method NumPy would make an array of objects.
    raise UserError("is a dict of arrays, and one array is needed", field="x")

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns (n,): the leading axis that all arrays share."""
    return (self._size,)

  @property
  def nbytes(self) -> int:
    """Returns the number of bytes of all arrays together."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self.tree))

  @property
  def shapes(self) -> Any:
    """Returns the dict with the shape of one example in place of each array."""
    return jax.tree.map(lambda leaf: leaf.shape[1:], self.tree)

  def named_arrays(self, name: str = "x") -> Iterator[tuple[str, np.ndarray | Array]]:
    """Yields (path, array) pairs such as ("x['age']", array), sorted by name as in JAX."""
    return _named_arrays(self.tree, name)

  def __repr__(self) -> str:
    kinds = (
      f"{place[1:]}: {leaf.dtype}{list(leaf.shape[1:])}"
      for place, leaf in self.named_arrays()
    )
    return f"{{{', '.join(kinds)}}}"


def by_place(data: Any, name: str = "data") -> Any:
  """Wraps a dict of arrays in `Columns`; returns any other data unchanged.

  The `len` of a plain dict would be the number of names, not of examples.

  >>> len(by_place({"x": np.zeros((4, 2)), "y": np.zeros(4)})), len(by_place(np.zeros(3)))
  (4, 3)
  """
  return Columns(data, name) if isinstance(data, dict) else data


def _named_arrays(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
  try:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
  # JAX sorts the names of a dict, so they must be comparable.
  except (TypeError, ValueError) as error:
    raise UserError("must have names of one type, such as text", field=name) from error
  for path, leaf in leaves:
    yield f"{name}{jax.tree_util.keystr(path)}", leaf

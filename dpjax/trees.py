"""Small functions on parameter trees, independent of privacy."""

from __future__ import annotations

import collections
import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from dpjax.branches import rarely_taken
from dpjax.types import ArrayLike, ArrayTree, DType
from dpjax.validate import UserError, Verbatim

# Largest number of float32 terms of a sum that are added one after the other. Let 1 + eps be
# the float after 1. In a sum of N equal terms, each of the last N / 2 additions may be rounded by
# N eps / 4 of a term. For N = 1,024 these errors sum to .016 terms, for N = 65,536 to 64 terms. One
# more example can change the errors, and so move the sum by more than its own term.
ADDED_AT_ONCE = 1024
# Largest number of norms that are joined without being stacked.
_SEPARATE = 8


def wide_dtype(dtype: DType) -> Any:
  """Returns the type to compute in for arrays of `dtype`: float32, or a wider one.

  >>> wide_dtype(jnp.float8_e5m2), wide_dtype(jnp.complex64)
  (dtype('float32'), dtype('complex64'))
  """
  # JAX promotes no floats of 8 bits or fewer; with jax_numpy_dtype_promotion="strict" no others.
  narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
  wide = jnp.issubdtype(dtype, jnp.inexact) and not narrow
  return jnp.dtype(dtype if wide else jnp.float32)


def at_least_float32(x: jax.Array) -> jax.Array:
  """Casts integers, and floats of less than 32 bits, to float32; leaves wider floats alone.

  >>> at_least_float32(jnp.ones(2, jnp.bfloat16)).dtype
  dtype('float32')
  """
  return x.astype(wide_dtype(x.dtype))


def _rows(leaf: jax.Array) -> jax.Array:
  """Flattens a leaf to [B, n], in float32 or wider; complex numbers become absolute values."""
  wide = at_least_float32(leaf).reshape(leaf.shape[0], math.prod(leaf.shape[1:]))
  return jnp.abs(wide) if jnp.iscomplexobj(wide) else wide


def per_example_norms(tree: ArrayTree, *, exact_above: float = 0.0) -> jax.Array:
  """Returns the L2 norm of each example over all leaves: leaves [B, ...] -> [B].

  Norms are computed in float32 or wider, and are correct for every finite input: numbers whose
  squares would overflow or underflow are scaled before they are squared. An example that holds NaN
  or infinity gets a norm that is NaN or infinite.

  Args:
    tree: leaves [B, ...].
    exact_above: norms up to this number need not be exact. Their results are at most this number,
      too. That saves the scaling, for example if gradients are exactly zero.

  >>> per_example_norms({"a": jnp.array([[3.0], [0.0]]), "b": jnp.array([4.0, 2.0])})
  Array([5., 2.], dtype=float32)
  >>> per_example_norms(jnp.array([[3e-30, 4e-30]])) == 5e-30
  Array([ True], dtype=bool)
  """
  leaves = [_rows(leaf) for leaf in jax.tree.leaves(tree)]
  squares = sum(jnp.sum(leaf * leaf, axis=1) for leaf in leaves)
  plain = jnp.sqrt(squares)
  if not leaves:
    return plain
  # Squares below the smallest normal number may be flushed to zero. `lost` bounds what the sum
  # loses by that. The smallest normal number is larger for float32 than for float64.
  lost = sum(float(jnp.finfo(leaf.dtype).tiny) * leaf.shape[1] for leaf in leaves)
  sound = jnp.isfinite(plain) & (squares * jnp.finfo(plain.dtype).eps >= lost)
  harmless = jnp.sqrt(squares + lost) <= exact_above
  keep = sound | harmless
  return jax.lax.cond(jnp.all(keep), _as_they_are, _rescue, plain, keep, leaves)


# Both branches are defined at module level, so that JAX finds their traces in its cache again.
def _as_they_are(plain: jax.Array, keep: jax.Array, leaves: list[jax.Array]) -> jax.Array:
  del keep, leaves
  return plain


@rarely_taken
def _rescue(plain: jax.Array, keep: jax.Array, leaves: list[jax.Array]) -> jax.Array:
  """Returns the norms `plain`, but computes those anew whose `keep` is False.

  Each row is scaled by itself, so no example affects the rounding of another one's norm.
  """
  return jnp.where(keep, plain, scaled_norms(leaves).astype(plain.dtype))


def scaled_norms(leaves: list[jax.Array]) -> jax.Array:
  """Returns the norm of each row over all leaves, [B], without overflow of the squares.

  Each row is first divided by about its largest entry. Leaves are real, [B, n].
  """
  largest = functools.reduce(
    jnp.maximum, (jnp.max(jnp.abs(leaf), axis=1, initial=0) for leaf in leaves)
  )
  # XLA may replace division by a product with the inverse, which must be a normal number, too.
  most = float(jnp.finfo(largest.dtype).max) ** 0.8
  unit = jnp.clip(largest, 1 / most, most)
  squares = sum(jnp.sum(jnp.square(leaf / unit[:, None]), axis=1) for leaf in leaves)
  return jnp.where(jnp.isfinite(largest), jnp.sqrt(squares) * unit, largest)


def root_sum_squares(norms: list[jax.Array]) -> jax.Array:
  """Returns sqrt(sum_l norms_l^2), of shape [B], without underflow or overflow.

  Args:
    norms: arrays [B].

  >>> root_sum_squares([jnp.array([3e-30]), jnp.array([4e-30])]) == 5e-30
  Array([ True], dtype=bool)
  """
  if len(norms) == 1:
    return norms[0]
  wide = list(map(at_least_float32, norms))
  # XLA writes a stack to memory, and reads it twice. Many arrays are compiled faster as one.
  few = len(wide) <= _SEPARATE
  return scaled_norms([x[:, None] for x in wide] if few else [jnp.stack(wide, axis=1)])


def varying_axes(tree: ArrayTree) -> set[str]:
  """Returns the axes of a mesh along which some leaf is marked; none outside of `shard_map`."""
  axes: set[str] = set()
  for leaf in jax.tree.leaves(tree):
    marks = getattr(jax.typeof(leaf), "manual_axis_type", None)
    axes.update(getattr(marks, "varying", ()))
  return axes


def require(ok: Any, error: Callable[[], Exception]) -> Any:
  """Returns `ok`, a scalar bool that may be traced. Raises the error if `ok` is known to be false.

  >>> require(jnp.array(True), lambda: ValueError("no"))
  Array(True, dtype=bool)
  """
  if not isinstance(ok, core.Tracer) and not bool(ok):
    raise error()
  return ok


def nan_unless(ok: Any, tree: ArrayTree) -> Any:
  """Returns the tree of floats, or NaN in all of them if `ok`, a scalar bool, is false.

  >>> nan_unless(False, jnp.ones(2))
  Array([nan, nan], dtype=float32)
  """
  if not isinstance(ok, core.Tracer) and bool(ok):
    return tree
  return jax.tree.map(lambda leaf: jnp.where(ok, leaf, jnp.nan), tree)


def only_where(ok: Any, tree: ArrayTree, error: Callable[[], Exception]) -> Any:
  """Returns the tree if `ok` is true. If `ok` is false it raises, or under jit gives NaN.

  Args:
    ok: scalar bool; may be traced.
    tree: tree of floats. Under jit all of them are NaN if `ok` is false.
    error: function that returns the exception to raise outside of jit.

  >>> held = lambda ok: only_where(ok, jnp.ones(2), lambda: ValueError("no"))
  >>> held(jnp.array(True)), jax.jit(held)(jnp.array(False))
  (Array([1., 1.], dtype=float32), Array([nan, nan], dtype=float32))
  """
  return nan_unless(require(ok, error), tree)


def pairwise_sum(x: jax.Array) -> jax.Array:
  """Returns the sum of x [m, ...] over its first axis, in pairs: ceil(log2(m)) roundings in a row.

  >>> pairwise_sum(jnp.array([1.0, 2.0, 3.0]))
  Array(6., dtype=float32)
  """
  while x.shape[0] > 1:
    half = x.shape[0] // 2
    x = jnp.concatenate([x[:half] + x[half : 2 * half], x[2 * half :]])
  return x[0]


def is_key(leaf: object) -> bool:
  """Whether a leaf is a typed random key (or an array of them).

  >>> is_key(jax.random.key(0)), is_key(jnp.zeros(2)), is_key(None)
  (True, False, False)
  """
  dtype = getattr(leaf, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def check_no_none(tree: Any, name: str) -> None:
  """Raises UserError where an entry of a dict is None.

  JAX treats None as a tree without arrays, so each example would silently lack that input.
  A field of a named tuple may be None, as `Example.key` is."""
  if isinstance(tree, dict):
    for key, entry in tree.items():
      if entry is None:
        raise UserError(
          "is None, must be an array [n, ...]; leave the entry out",
          field=f"{name}[{key!r}]",
        )
      check_no_none(entry, f"{name}[{key!r}]")
  elif isinstance(tree, tuple | list):
    for entry in tree:
      check_no_none(entry, name)


def check_key(**named: Any) -> None:
  """Raises UserError unless each value is ONE typed random key.

  >>> check_key(key=0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: key=0: must be a typed key, dpjax.new_key()
  """
  for name, key in named.items():
    if is_key(key) and not key.ndim:
      continue
    # The words of a raw key are a secret.
    is_array = hasattr(key, "dtype")
    shown = Verbatim(f"{key.dtype}{list(key.shape)}") if is_array else key
    what = "ONE" if is_key(key) else "a"
    raise UserError(f"must be {what} typed key, dpjax.new_key()", field=name, value=shown)


def shapes(tree: ArrayTree) -> Any:
  """Returns the tree with the shape of each array in its place.

  >>> shapes({"x": jnp.ones((2, 3))})
  {'x': (2, 3)}
  """
  return jax.tree.map(jnp.shape, tree)


def add(a: ArrayTree, b: ArrayTree) -> Any:
  """Returns a + b, leaf by leaf."""
  return jax.tree.map(jnp.add, a, b)


def zeros(tree: ArrayTree) -> Any:
  """Returns a tree of zeros of the same shapes, in float32 or wider."""
  return jax.tree.map(
    lambda leaf: jnp.zeros_like(at_least_float32(jnp.asarray(leaf))), tree
  )


def scale(tree: ArrayTree, factor: ArrayLike) -> Any:
  """Returns tree * factor, leaf by leaf."""
  return jax.tree.map(lambda leaf: leaf * factor, tree)


def size(tree: ArrayTree) -> int:
  """Returns the number of scalars in all leaves of a tree.

  >>> size({"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)})
  16
  """
  return sum(int(np.prod(np.shape(leaf))) for leaf in jax.tree.leaves(tree))


def unflatten(flat: np.ndarray, like: ArrayTree) -> Any:
  """Reshapes a vector [size(like)] to a tree with the shapes of `like`; its dtype is kept.

  >>> unflatten(np.arange(3.0), {"b": jnp.zeros(1), "w": jnp.zeros((1, 2))})
  {'b': array([0.]), 'w': array([[1., 2.]])}
  """
  leaves, treedef = jax.tree.flatten(like)
  ends = np.cumsum([np.size(leaf) for leaf in leaves])
  parts = zip(np.split(flat, ends[:-1]), leaves)
  shaped = [part.reshape(np.shape(leaf)) for part, leaf in parts]
  return jax.tree.unflatten(treedef, shaped)


def path_parts(path: tuple[Any, ...]) -> list[str]:
  """Returns the dict keys and attribute names on the path of a leaf, as strings.

  >>> ((path, _),) = jax.tree_util.tree_leaves_with_path({"head": {"bias": 1}})
  >>> path_parts(path)
  ['head', 'bias']
  """
  return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]


def leaf_names(tree: ArrayTree) -> list[str]:
  """Returns the path of each leaf, with "/" between the names; that of a lone array is "".

  The box around a variable of Flax (nnx's, or linen's with metadata) adds nothing to its path: it
  is `head/kernel`, not `head/kernel/value`.

  >>> leaf_names({"params": {"head": {"bias": 1}}})
  ['params/head/bias']
  """
  paths = [tuple(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
  siblings = collections.Counter(path[:-1] for path in paths)
  box = jax.tree_util.GetAttrKey("value")
  names = []
  for path in paths:
    # A module may have arrays `query`, `key` and `value`; in a box the value is alone.
    is_boxed = path[-1:] == (box,) and siblings[path[:-1]] == 1
    bare = path[:-1] if is_boxed else path
    names.append(jax.tree_util.keystr(bare, simple=True, separator="/"))
  return names


def named_leaves(tree: ArrayTree) -> dict[str, Any]:
  """Returns path -> leaf, by the paths of `leaf_names`.

  >>> named_leaves({"params": {"head": {"bias": 1}}})
  {'params/head/bias': 1}
  """
  return dict(zip(leaf_names(tree), jax.tree.leaves(tree)))


def sha256(tree: ArrayTree) -> str:
  """Returns the SHA-256 of a tree's paths, dtypes, shapes and bytes, in hexadecimal digits.

  >>> sha256({"w": jnp.zeros(2)}) == sha256({"w": jnp.zeros(2)})
  True
  >>> sha256({"w": jnp.zeros(2)}) == sha256({"w": jnp.zeros(3)})
  False
  """
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    array = np.asarray(leaf)
    digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
    # The digest reads the bytes of the array without a copy: a model may fill most of the memory.
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
  return digest.hexdigest()

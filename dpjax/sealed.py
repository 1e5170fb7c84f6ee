"""Gradients with which only a private transform can compute.

A transform before the private one in a chain sees all examples of a batch. There
`optax.clip_by_global_norm` would let one example scale the gradients of the others, so one
example could move the sum by more than the noise covers. Two things prevent this:

| who computes with the gradients        | what happens                                        |
| -------------------------------------- | --------------------------------------------------- |
| a transform or a wrapper of Optax      | `UserError` where it takes the tree apart, in the   |
|                                        | words of `MISPLACED`                                |
| anybody else, by `jax.tree.map`        | JAX refuses arithmetic on a sealed leaf, since its  |
|                                        | type is `key<sealed: ...>`                          |

This holds for stacked gradients, and for total, norms and losses of a `ClippedSum`. From its norms
an adaptive clip norm follows.

A sealed leaf holds the bits of its array as a typed random key. So it works in jit, vmap, scan,
cond, shard_map and donation. Under jit, sealing and opening a leaf cost nothing, because XLA
removes both.

Rows may be cut, moved and joined, in all leaves alike. Each row has a number, sealed beside the
gradients: from 1 on among the rows computed together, or 0 for padding. A number that comes twice
means that a record would count twice, so it is refused. Rows of two computations share numbers;
`dpjax.wrap_grads(grads.arrays)` numbers them anew, as different examples. Moving the rows of one
leaf but not of another is not detected.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from typing import Any, NamedTuple, TypeVar

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import core

from dpjax.validate import UserError

MISPLACED = (
  "were taken apart by Optax before they were private: plan.transform must stand first in "
  "optax.chain, inside no wrapper: wrap what follows it, or use plan.accumulated in place of "
  "MultiSteps; to read them: .arrays (stacked), .total (ClippedSum)"
)
_TAG = "sealed: plan.transform must stand first in optax.chain"
_Class = TypeVar("_Class", bound=type)


def _never(*args: Any) -> Any:
  raise UserError("nobody draws from it", field="seal")


def _impl(words: int) -> Any:
  return jax.extend.random.define_prng_impl(
    key_shape=(words,),
    seed=_never,
    split=_never,
    random_bits=_never,
    fold_in=_never,
    name=f"dpjax_sealed_{32 * words}",
    tag=_TAG,
  )


_IMPLS = {1: _impl(1), 2: _impl(2)}  # by how many 32-bit words a number takes


def refuse_inside_optax() -> None:
  """Raises UserError if Optax is the caller, with no function of dpjax in between.

  It reads the call stack. This gives a clear message, and catches transforms that only select
  leaves by shape. Arithmetic fails in any case, because of the leaves' type.
  """
  # The search begins at the caller's caller: the caller itself is always a part of dpjax.
  frame = sys._getframe(1).f_back
  while frame is not None:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package == "optax":
      raise UserError(MISPLACED, field="gradients")
    if package == "dpjax":
      return
    frame = frame.f_back


class Sealed(type):
  """Metaclass of classes that Optax must not take apart.

  If a mask and the gradients differ in structure, JAX raises an error that prints the class. So
  its `repr` raises `MISPLACED`, too, in Optax. Flax tests `name in grads`: it is always False.
  """

  def __new__(mcs, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
    def contains(grads: Any, name: object) -> bool:
      del grads, name
      return False

    return super().__new__(mcs, name, bases, {"__contains__": contains, **members})

  def __repr__(cls) -> str:
    refuse_inside_optax()
    return super().__repr__()


class _SealedField:
  """Descriptor of a field, a tree of floats, whose leaves are sealed in the tree that JAX makes of
  the object.

  Whoever holds the object reads plain arrays. `jax.tree.map` and everything else that takes the
  object apart gets sealed leaves, and if it exchanges one, reading raises UserError. No leaf is
  sealed or opened before the object passes through JAX.
  """

  def __init__(self, name: str) -> None:
    self.name = name

  def __set__(self, value: Any, tree: Any) -> None:
    vars(value)[self.name] = tree

  def __get__(self, value: Any, owner: type) -> Any:
    if value is None:
      return self
    held = vars(value)[self.name]
    if not isinstance(held, _Closed):
      return held
    opened = held.open()
    # A traced array must not outlive its trace, and a shape has no bits to seal again.
    kept_out = (core.Tracer, jax.ShapeDtypeStruct)
    if not any(isinstance(leaf, kept_out) for leaf in jax.tree.leaves(opened)):
      vars(value)[self.name] = opened
    return opened

  def close(self, value: Any) -> _Closed:
    """Returns the sealed leaves of the field."""
    held = vars(value)[self.name]
    return held if isinstance(held, _Closed) else _Closed.of(held)


class _Closed(NamedTuple):
  """A tree of sealed leaves, with the dtypes of the arrays in the order of the leaves."""

  tree: Any
  dtypes: tuple[Any, ...]  # None for a leaf that was no array of floats, and is as it was

  @classmethod
  def of(cls, tree: Any) -> _Closed:
    leaves, treedef = jax.tree.flatten(tree)
    dtypes: list[Any] = [None] * len(leaves)
    for place, leaf in enumerate(leaves):
      dtype = getattr(leaf, "dtype", None)
      if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        continue
      # NumPy's float64 becomes float32 where JAX has no float64.
      dtype = jax.dtypes.canonicalize_dtype(dtype)
      if jnp.finfo(dtype).bits >= 8:
        dtypes[place] = dtype
        leaves[place] = _close(jnp.asarray(leaf))
    return cls(treedef.unflatten(leaves), tuple(dtypes))

  def open(self) -> Any:
    """Returns the arrays. Raises UserError if a leaf was exchanged or left out."""
    leaves, treedef = jax.tree.flatten(self.tree)
    if len(leaves) != len(self.dtypes):
      raise UserError(
        "leaves were left out; give all of them to the transform", field="gradients"
      )
    open_ = lambda leaf, dtype: leaf if dtype is None else _open(leaf, dtype)
    return treedef.unflatten(map(open_, leaves, self.dtypes))


def register(cls: _Class) -> _Class:
  """Registers a dataclass as a pytree that Optax may not flatten.

  Fields with `metadata={"static": True}` are part of the structure. Leaves of fields with
  `metadata={"sealed": True}` are sealed.
  """
  fields = dataclasses.fields(cls)
  static = [field.name for field in fields if field.metadata.get("static")]
  names = [field.name for field in fields if field.name not in static]
  shut = {f.name: _SealedField(f.name) for f in fields if f.metadata.get("sealed")}
  for name, field in shut.items():
    setattr(cls, name, field)

  def flatten(value: Any) -> tuple[Any, Any]:
    refuse_inside_optax()
    children, dtypes = [], []
    for name in names:
      if name in shut:
        closed = shut[name].close(value)
        children.append(closed.tree)
        dtypes.append(closed.dtypes)
      else:
        children.append(getattr(value, name))
    return children, (tuple(dtypes), tuple(getattr(value, name) for name in static))

  def flatten_with_keys(value: Any) -> tuple[Any, Any]:
    # The call in `flatten` would find this function, not Optax.
    refuse_inside_optax()
    children, values = flatten(value)
    keys = map(jax.tree_util.GetAttrKey, names)
    return list(zip(keys, children)), values

  def unflatten(values: Any, children: Any) -> Any:
    dtypes, fixed = values
    parts = dict(zip(names, children))
    for name, each in zip(shut, dtypes):
      parts[name] = _Closed(parts[name], each)
    return cls(**parts, **dict(zip(static, fixed)))

  jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
  return cls


def seal(*numbers: float) -> jax.Array:
  """Returns a sealed leaf, [], on which arithmetic fails, so a transform of all leaves fails.

  It holds a 64-bit digest of `numbers`, which `is_seal_of` checks.

  >>> import jax
  >>> jax.tree.map(lambda leaf: 2 * leaf, [seal()])  # doctest: +ELLIPSIS
  Traceback (most recent call last):
  ...
  TypeError: ...sealed: plan.transform must stand first in optax.chain...
  """
  return jax.random.wrap_key_data(jnp.asarray(_digest(numbers)), impl=_IMPLS[2])


def _digest(numbers: tuple[float, ...]) -> np.ndarray:
  """Returns the first 64 bits of a SHA-256 of the numbers, as two words, [2]."""
  text = ",".join(map(float.hex, map(float, numbers)))
  return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint32)


def is_seal_of(leaf: Any, *numbers: float) -> jax.Array:
  """Returns whether a sealed leaf was made from these numbers, [] bool; may be traced.

  Other code can exchange the structure of a tree, and with it static numbers. The seal is a leaf,
  so such code keeps it.

  >>> is_seal_of(seal(1.0), 1.0), is_seal_of(seal(10.0), 1.0)
  (Array(True, dtype=bool), Array(False, dtype=bool))
  """
  words = jax.random.key_data(leaf)  # [..., 2]
  return jnp.all(words[..., :2] == _digest(numbers)) & (words.shape[-1] == 2)


def is_closed(leaf: object) -> bool:
  """Whether a leaf is sealed; works during tracing.

  >>> is_closed(seal()), is_closed(jax.random.key(0)), is_closed(None)
  (True, False, False)
  """
  dtype = getattr(leaf, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    return False
  return jax.random.key_impl(leaf) in _IMPLS.values()  # type: ignore[arg-type]


@jax.custom_jvp
def _close(leaf: jax.Array) -> jax.Array:
  bits = jnp.finfo(leaf.dtype).bits
  if bits == 64:
    words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)  # [..., 2]
    return jax.random.wrap_key_data(words, impl=_IMPLS[2])
  # Keys hold words of 32 bits, so the bits of a narrower float are widened to one word.
  words = jax.lax.bitcast_convert_type(leaf, f"uint{bits}").astype(jnp.uint32)
  return jax.random.wrap_key_data(words[..., None], impl=_IMPLS[1])


@_close.defjvp
def _no_derivative(primals: Any, tangents: Any) -> Any:
  # JAX would take the derivative of bits as zero, which is silently wrong.
  del primals, tangents
  raise UserError(
    "sealed ones have no derivative; differentiate jax.vmap(jax.grad(loss_fn))",
    field="gradients",
  )


def _open(leaf: Any, dtype: Any) -> Any:
  # `jax.eval_shape` gives shapes in place of arrays.
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(leaf.shape, dtype)
  if not is_closed(leaf):
    raise UserError(
      f"a leaf was exchanged by {type(leaf).__name__}; nothing but the private "
      "transform may change them, so plan.transform must stand first in "
      "optax.chain",
      field="gradients",
    )
  words = jax.random.key_data(leaf)
  bits = jnp.finfo(dtype).bits
  if bits == 64:
    return jax.lax.bitcast_convert_type(words, dtype)
  return jax.lax.bitcast_convert_type(words[..., 0].astype(f"uint{bits}"), dtype)


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PerExampleGrads(metaclass=Sealed):
  """Gradients of each example, stacked, which only a private transform opens. NOT private.

  `dpjax.per_example_grads` returns them; `dpjax.wrap_grads` makes them from arrays. They work in
  every transformation of JAX but differentiation. An Optax transform before the private one raises
  a UserError.

  >>> grads = PerExampleGrads.of({"w": jnp.ones((3, 2))})
  >>> grads.arrays["w"].shape, grads
  ((3, 2), PerExampleGrads({'w': 'float32[3, 2]'}))
  """

  leaves: Any  # tree of sealed [B, *param]
  mask: Any  # [B] bool, False for padding; None where it comes beside the gradients
  # Dtypes of the arrays, in the order of the leaves.
  dtypes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})
  rows: Any = None  # sealed [B], the number of each row; None where there is no row axis
  origin: Any = None  # [B, 4] int32, see `gradients.arguments.origin_of`

  @classmethod
  def of(
    cls, arrays: Any, mask: Any = None, rows: Any = None, origin: Any = None
  ) -> PerExampleGrads:
    """Seals a tree of real floating-point arrays, [B, *param] each. The mask [B] stays readable.

    `rows`: sealed row numbers of the gradients from which the arrays were made, row by row; None
    numbers the rows from 1 on.
    """
    # Floats of fewer than 8 bits cannot be sealed as words. They become float32, which has all
    # their values.
    whole = lambda leaf: leaf if jnp.finfo(leaf.dtype).bits >= 8 else leaf.astype("float32")
    arrays = jax.tree.map(lambda leaf: whole(jnp.asarray(leaf)), arrays)
    dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(arrays))
    shapes = [leaf.shape for leaf in jax.tree.leaves(arrays)]
    # Without a row axis there is nothing to number.
    if rows is None and shapes and shapes[0]:
      # Rows are numbered from 1 on; padding has the number 0.
      numbers = jnp.arange(1, shapes[0][0] + 1, dtype=jnp.uint32)
      if mask is not None:
        numbers = jnp.where(jnp.asarray(mask), numbers, jnp.uint32(0))
      rows = jax.random.wrap_key_data(numbers[:, None], impl=_IMPLS[1])
    return cls(jax.tree.map(_close, arrays), mask, dtypes, rows, origin)

  def numbers(self, size: int) -> jax.Array:
    """Returns the number of each row, [size]: from 1 on, and 0 for padding.

    Raises:
      UserError: numbers that are not sealed, or not one for each row.
    """
    if not is_closed(self.rows) or self.rows.shape != (size,):
      raise UserError(
        f"{size} rows with {getattr(self.rows, 'shape', None)} numbers: cut and "
        "join all leaves alike, by jax.tree.map; dpjax.wrap_grads(grads.arrays) takes "
        "rows of your own",
        field="gradients",
      )
    return jax.random.key_data(self.rows)[..., 0]

  @property
  def arrays(self) -> Any:
    """Returns the gradients as plain arrays, [B, *param] each, to inspect them. NOT private.

    Raises:
      UserError: a leaf that is no longer sealed, or is missing.
    """
    return _Closed(self.leaves, self.dtypes).open()

  def __repr__(self) -> str:
    leaves, treedef = jax.tree.flatten(self.leaves)
    shapes = [
      f"{dtype}{list(getattr(leaf, 'shape', ()))}"
      for leaf, dtype in zip(leaves, self.dtypes)
    ]
    if len(shapes) != len(leaves):
      return "PerExampleGrads(...)"
    return f"PerExampleGrads({treedef.unflatten(shapes)})"

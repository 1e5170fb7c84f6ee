"""A model as two parts: parameters by name, and everything else."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import traverse_util

from dpjax import jaxprs
from dpjax.models.libraries import by_path
from dpjax.types import Array, ArrayTree, Params
from dpjax.validate import UserError

_SEPARATOR = "/"
_ALONE = "value"  # name of a parameter that is the whole tree


class ConstructedModel:
  """Base class of the adapters for libraries whose modules are built by a constructor.

  Args:
    construct: function of the library's key argument (and input_shape=) that returns a module.
    path: the user's import path, for messages.
    shaped: whether `construct` takes input_shape=.
  """

  def __init__(self, construct: Callable[..., Any], *, path: str, shaped: bool):
    self._construct = construct
    self._path = path
    self._shaped = shaped
    self._shapes: dict[str, Any] = {}

  def _note_shape(self, x: ArrayTree) -> None:
    """Keeps the shape of one example if the constructor asks for it."""
    if self._shaped:
      self._shapes = {
        by_path.INPUT_SHAPE: jax.tree.map(lambda leaf: jnp.shape(leaf)[1:], x)
      }

  def _refusal(self, must: str) -> UserError:
    return UserError(must, field="model.name", value=self._path)


class NameOf(Protocol):
  """Function that names the parameters in a model's tree."""

  def __call__(self, path: jax.tree_util.KeyPath, leaf: Array, /) -> str | None:
    """Returns a parameter's name by its path in the tree; None if the leaf is no parameter."""
    ...


@dataclasses.dataclass(frozen=True)
class Parts:
  """The structure of a model: which leaves are parameters, and the values of all other leaves.

  Args:
    treedef: structure of the model's tree.
    names: name of each leaf that is a parameter; None for a constant.
    constants: value of each leaf that is a constant; None for a parameter.
  """

  treedef: Any
  names: tuple[str | None, ...]
  constants: tuple[Any, ...]

  def whole(self, params: Params) -> Any:
    """Returns the model's tree with leaves from `params` and from the constants."""
    named = traverse_util.flatten_dict(params["params"], sep=_SEPARATOR)
    leaves = [
      constant if name is None else named[name]
      for name, constant in zip(self.names, self.constants)
    ]
    return jax.tree.unflatten(self.treedef, leaves)


def params_of(tree: ArrayTree, name_of: NameOf, path: str) -> Params:
  """Returns the parameters of a model's tree: {"params": nested dictionaries}.

  Args:
    path: the user's import path, for messages.

  Raises:
    UserError: two parameters have the same name, or there is no parameter.

  >>> params_of({"body": [jax.numpy.ones(2), 3]}, lambda at, leaf: keystr(at), "mine:Net")
  {'params': {'body': {'0': Array([1., 1.], dtype=float32)}}}
  """
  named = [
    (name_of(at, leaf), leaf)
    for at, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if isinstance(leaf, jax.Array)
  ]
  named = [(name, leaf) for name, leaf in named if name is not None]
  _check_names([name for name, _ in named], path)
  split = {tuple(name.split(_SEPARATOR)): leaf for name, leaf in named}
  return {"params": traverse_util.unflatten_dict(split)}


def parts_of(build: Callable[[Array], Any], name_of: NameOf) -> Parts:
  """Splits the tree that `build(key)` returns for a constant key into names and constants.

  >>> build = lambda key: [jax.random.normal(key, (2,)), 3]
  >>> parts = parts_of(build, lambda at, leaf: keystr(at))
  >>> parts.names, parts.constants
  (('0', None), (None, 3))
  >>> parts.whole({"params": {"0": 1.0}})
  [1.0, 3]
  """
  # The first call of a model is often inside a traced function. A traced constant would outlive
  # the trace, and nnx would take a traced array for a static setting.
  with jax.ensure_compile_time_eval():
    leaves, treedef = jax.tree_util.tree_flatten_with_path(build(jax.random.key(0)))
  names = [
    name_of(at, leaf) if isinstance(leaf, jax.Array) else None for at, leaf in leaves
  ]
  constants = [None if name else leaf for name, (_, leaf) in zip(names, leaves)]
  return Parts(treedef, tuple(names), tuple(constants))


def keystr(path: Sequence[Any]) -> str:
  """Returns the name that params.npz has for the leaf at a path; "value" for the empty path."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator=_SEPARATOR) or _ALONE


def _check_names(names: list[str], path: str) -> None:
  """Raises UserError if there is no name, or a name comes twice or is a prefix, as "a" of "a/b"."""
  if not names:
    raise UserError(
      "must have parameters: arrays of floats", field="model.name", value=path
    )
  counts = collections.Counter(names)
  # With leaves "a" and "a/b", the entry "a" would be an array and a dictionary at once. So
  # prefixes count as names, too.
  for name in names:
    parts = name.split(_SEPARATOR)
    counts.update(_SEPARATOR.join(parts[:end]) for end in range(1, len(parts)))
  twice = next((name for name in names if counts[name] > 1), None)
  if twice is not None:
    raise UserError(
      f"must have one parameter of the name {twice!r}, not several",
      field="model.name",
      value=path,
    )


def depends_on_key(call: Callable[[Array], Any]) -> bool:
  """Returns whether the result of `call(key)` may depend on the key. Nothing is computed.

  >>> depends_on_key(lambda key: 1.0), depends_on_key(jax.random.normal)
  (False, True)
  """
  # JAX caches traces by function, and `call` may have changed.
  jaxpr = jax.make_jaxpr(lambda key: call(key))(jax.random.key(0)).jaxpr
  return any(jaxprs.reach(jaxpr, [True] * len(jaxpr.invars)))

"""Models that are two functions, in the form of `dpjax.models.libraries.by_path.Model`.

Such a model is an object with `init(key, x)` and `apply(params, x)`, such as
`haiku.without_apply_rng(haiku.transform(f))`, or a pair as in `jax.example_libraries.stax`:
`init(key, shape) -> (shape, params)` and `apply(params, x)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpjax.models.libraries import linen_modules
from dpjax.models.libraries import parts as parts_lib
from dpjax.types import Array, ArrayTree, Params
from dpjax.validate import UserError

_KEY = "key"


class FunctionModel:
  """Gives two functions of a user the interface `by_path.Model`.

  Args:
    init: function of (key, x) that returns a tree of arrays of floats.
    apply: function of (params, x) that may also take key= and a training flag.
    path: the user's import path, for messages.
  """

  def __init__(self, init: Callable[..., Any], apply: Callable[..., Any], *, path: str):
    self._init = init
    self._apply = apply
    self._path = path
    self._first: Any = None
    self._parts: parts_lib.Parts | None = None
    if "rng" in linen_modules.parameters_of(apply):
      raise UserError(
        "its apply takes rng, as that of hk.transform does; give it apply(params, x, key=None): "
        "hk.without_apply_rng(hk.transform(f)), or a function that hands key on as rng",
        field="model.name",
        value=path,
      )

  def init(self, key: Array, x: ArrayTree) -> Params:
    """Returns first parameters, {"params": nested dictionaries}; see `by_path.Model.init`."""
    # Only the shapes of x are kept: constants of a model must not depend on a record.
    self._first = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, x))
    return parts_lib.params_of(self._init(key, x), self._name_of, self._path)

  def apply(self, params: Params, x: ArrayTree, *, key: Array | None = None) -> Any:
    """Returns the outputs [B, ...] for a batch x [B, ...]; see `by_path.Model.apply`."""
    if self._parts is None:
      first = self._first
      zeros = lambda key: self._init(
        key, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)
      )
      self._parts = parts_lib.parts_of(zeros, self._name_of)
    how = linen_modules.mode_arguments(self._apply, training=key is not None)
    if _KEY in linen_modules.parameters_of(self._apply) and key is not None:
      how[_KEY] = key
    return self._apply(self._parts.whole(params), x, **how)

  def draws(self, params: Params, first: ArrayTree) -> bool:
    """Returns whether training draws random numbers. `apply` is traced, not computed."""
    return parts_lib.depends_on_key(lambda key: self.apply(params, first, key=key))

  def _name_of(self, path: Any, leaf: Array) -> str:
    name = parts_lib.keystr(path)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      raise UserError(
        f"init must return parameters alone, arrays of floats; {name} of {leaf.dtype} is state",
        field="model.name",
        value=self._path,
      )
    return name


def model_of(value: Any, path: str) -> FunctionModel | None:
  """Returns the model of an object with `init` and `apply`, or of a pair (init, apply) of stax.
  Returns None for anything else.

  >>> model_of(7, "mine:net") is None
  True
  """
  functions: list[Any] = [getattr(value, name, None) for name in ("init", "apply")]
  if all(map(callable, functions)):
    return FunctionModel(functions[0], functions[1], path=path)
  if type(value) is not tuple or len(value) != 2 or not all(map(callable, value)):
    return None
  first, apply = value

  def init(key: Array, x: ArrayTree) -> Params:
    # stax wants the shape of a batch, and returns the shape of the outputs beside the parameters.
    _, params = first(key, jnp.shape(x))
    return params

  return FunctionModel(init, apply, path=path)

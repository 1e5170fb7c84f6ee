"""Equinox modules, in the form of `dpjax.models.libraries.by_path.Model`.

A module of Equinox sees ONE example, as its layers do, so `apply` maps it over a batch. Its
arrays of floats are parameters (`eqx.is_inexact_array`); everything else is constant. Source:
the Equinox guide, "Filtered transformations" (docs.kidger.site/equinox).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from dpjax.models.libraries import linen_modules
from dpjax.models.libraries import parts as parts_lib
from dpjax.types import Array, ArrayTree, Params

_KEY = "key"


class EquinoxModel(parts_lib.ConstructedModel):
  """Gives a constructor of Equinox modules the interface `by_path.Model`.

  Args:
    construct: function of key= (and input_shape=) that returns a module.
    path: the user's import path, for messages.
    shaped: whether `construct` takes input_shape=.
  """

  def __init__(self, construct: Callable[..., Any], *, path: str, shaped: bool):
    super().__init__(construct, path=path, shaped=shaped)
    self._parts: parts_lib.Parts | None = None

  def init(self, key: Array, x: ArrayTree) -> Params:
    """Returns first parameters, {"params": nested dictionaries}; see `by_path.Model.init`."""
    self._note_shape(x)
    return parts_lib.params_of(self._build(key), _name_of, self._path)

  def _build(self, key: Array) -> Any:
    module = self._construct(key=key, **self._shapes)
    if not isinstance(module, eqx.Module):
      raise self._refusal(f"must return an Equinox module, not {type(module).__name__}")
    self._check_state(module)
    return module

  def apply(self, params: Params, x: ArrayTree, *, key: Array | None = None) -> Any:
    """Returns outputs [B, ...], by mapping the module over the examples of x [B, ...]."""
    if self._parts is None:
      self._parts = parts_lib.parts_of(self._build, _name_of)
    module = self._parts.whole(params)
    names = linen_modules.parameters_of(type(module).__call__)
    module = eqx.nn.inference_mode(module, value=key is None)
    how = linen_modules.mode_arguments(type(module).__call__, training=key is not None)
    if _KEY in names and key is not None:
      how[_KEY] = key
    return jax.vmap(lambda row: module(row, **how))(x)

  def draws(self, params: Params, first: ArrayTree) -> bool:
    """Returns whether training draws random numbers.

    Raises:
      UserError: the model fails in evaluation, without a key, but not in training.
    """
    try:
      jax.eval_shape(lambda params: self.apply(params, first), params)
    except Exception as error:
      # If the model fails with a key, too, this call raises its real error.
      jax.eval_shape(
        lambda params, key: self.apply(params, first, key=key), params, jax.random.key(0)
      )
      raise self._refusal(
        "must run without a key in evaluation (eqx.nn.inference_mode, key=None): "
        f"{type(error).__name__}: {' '.join(str(error).split()):.80}"
      ) from error
    return parts_lib.depends_on_key(lambda key: self.apply(params, first, key=key))

  def _check_state(self, module: Any) -> None:
    """Raises UserError for layers that keep state between calls."""
    stateful = lambda node: isinstance(node, (eqx.nn.StatefulLayer, eqx.nn.StateIndex))
    for node in jax.tree.leaves(module, is_leaf=stateful):
      if not stateful(node):
        continue
      kind = type(node).__name__
      if "BatchNorm" in kind:
        raise self._refusal(linen_modules.MIXES)
      raise self._refusal(
        f"must hold no state, not a {kind}; the loss of one example cannot carry it to the "
        "next step"
      )


def _name_of(path: Any, leaf: Array) -> str | None:
  return parts_lib.keystr(path) if eqx.is_inexact_array(leaf) else None


adapter = EquinoxModel

"""Flax nnx modules, in the form of `dpjax.models.libraries.by_path.Model`.

`nnx.split` takes a module apart into its graph, its `nnx.Param`s and all else. `nnx.merge` puts
it together inside every call, so a call is a pure function of the parameters. Source: the Flax
guide to nnx, "The functional API" (flax.readthedocs.io).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dpjax.key_uses import KeyUse, key_for
from dpjax.models.libraries import linen_modules
from dpjax.models.libraries import parts as parts_lib
from dpjax.types import Array, ArrayTree, Params

# Last part of a leaf's path, which names the array inside an nnx variable.
_VALUE = "value"
# Argument of `__call__` that takes random streams for one call.
_STREAMS = "rngs"


class NnxModel(parts_lib.ConstructedModel):
  """Gives a constructor of nnx modules the interface `by_path.Model`.

  Args:
    construct: function of rngs= (and input_shape=) that returns a module.
    path: the user's import path, for messages.
    shaped: whether `construct` takes input_shape=.
  """

  def __init__(self, construct: Callable[..., Any], *, path: str, shaped: bool):
    super().__init__(construct, path=path, shaped=shaped)
    self._split: tuple[Any, parts_lib.Parts] | None = None

  def init(self, key: Array, x: ArrayTree) -> Params:
    """Returns first parameters, {"params": nested dictionaries}; see `by_path.Model.init`."""
    self._note_shape(x)
    _, *states = self._build(key)
    return parts_lib.params_of(states, _name_of, self._path)

  def _build(self, key: Array) -> tuple[Any, Any, Any]:
    """Returns (graph, parameters, everything else) of a new module."""
    module = self._construct(rngs=nnx.Rngs(key), **self._shapes)
    if not isinstance(module, nnx.Module):
      raise self._refusal(f"must return an nnx module, not {type(module).__name__}")
    self._check_state(module)
    graph, params, others = nnx.split(module, nnx.Param, ...)
    return graph, params, others

  def _whole(self, params: Params) -> tuple[Any, Any, Any]:
    """Returns the arguments of `nnx.merge` for a module with `params`: (graph, parameters,
    everything else)."""
    if self._split is None:
      graphs = []

      def build(key: Array) -> Any:
        graph, *states = self._build(key)
        graphs.append(graph)
        return states

      parts = parts_lib.parts_of(build, _name_of)
      self._split = (graphs[0], parts)
    graph, parts = self._split
    return (graph, *parts.whole(params))

  def apply(self, params: Params, x: ArrayTree, *, key: Array | None = None) -> Any:
    """Returns the outputs [B, ...] for a batch x [B, ...]; see `by_path.Model.apply`."""
    outputs, _ = self._call(params, x, key, training=key is not None)
    return outputs

  def draws(self, params: Params, first: ArrayTree) -> bool:
    """Returns whether training draws random numbers.

    Raises:
      UserError: evaluation draws random numbers, too, or a call writes to a parameter.
    """
    jax.eval_shape(lambda params: self._evaluate(params, first), params)
    # The first carry of a recurrent cell takes a key and is zeros. So the question is whether the
    # outputs depend on the key, not whether a stream moved on.
    depends = lambda training: parts_lib.depends_on_key(
      lambda key: self._call(params, first, key, training=training)[0]
    )
    if depends(False):
      raise self._refusal(
        "draws random numbers in evaluation too; give its __call__ an argument "
        "deterministic, or use nnx.Dropout, which evaluation turns off"
      )
    return depends(True)

  def _call(
    self, params: Params, x: ArrayTree, key: Array | None, *, training: bool
  ) -> tuple[Any, Any]:
    """Returns (outputs, the module after the call). Without a key the streams are the first."""
    # Each call makes a new module, so what a call writes to it reaches no other example.
    module = nnx.merge(*self._whole(params))
    if training:
      module.train()
    else:
      module.eval()
    if key is not None:
      state = nnx.state(module, nnx.RngKey)
      leaves, structure = jax.tree.flatten(state)
      # Each random stream gets a different key, so that no two layers share a dropout mask.
      keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
      keys = [jax.random.split(key, jnp.shape(old)) for key, old in zip(keys, leaves)]
      nnx.update(module, jax.tree.unflatten(structure, keys))
    names = linen_modules.parameters_of(type(module).__call__)
    how = linen_modules.mode_arguments(type(module).__call__, training=training)
    if _STREAMS in names and key is not None:
      how[_STREAMS] = nnx.Rngs(key_for(KeyUse.MODEL_STREAMS, key))
    return module(x, **how), module

  def _evaluate(self, params: Params, x: ArrayTree) -> Any:
    """Returns outputs in evaluation. Raises UserError if the call writes to a parameter."""
    _, *before = self._whole(params)
    outputs, module = self._call(params, x, None, training=False)
    _, after, _ = nnx.split(module, nnx.Param, ...)
    # A variable that the call did not write to still holds the same object.
    if not _same(before[0], after):
      raise self._refusal("writes to a parameter in its call; only steps may change it")
    return outputs

  def _check_state(self, module: Any) -> None:
    """Raises UserError for variables that are neither parameters nor random streams."""
    for path, variable in nnx.to_flat_state(nnx.state(module)):
      kind = type(variable)
      if not isinstance(variable, nnx.Variable) or issubclass(
        kind, (nnx.Param, nnx.RngState)
      ):
        continue
      layer = _layer_of(module, path)
      if issubclass(kind, nnx.BatchStat) and isinstance(layer, nnx.BatchNorm):
        raise self._refusal(
          "its BatchNorm mixes examples, and frozen it holds state that no step may change; "
          "use GroupNorm, which sees one example"
        )
      name = "/".join(map(str, path))
      raise self._refusal(
        f"must hold no state but nnx.Param, not {name} of type {kind.__name__} in its "
        f"{type(layer).__name__}; the loss of one example cannot carry it to the next step"
      )


def _layer_of(module: Any, path: Any) -> Any:
  """Returns the innermost module on the way to a variable."""
  layer = part = module
  for name in path:
    by_name = isinstance(name, str) and hasattr(part, name)
    part = getattr(part, name) if by_name else part[name]  # pyright: ignore[reportIndexIssue]
    layer = part if isinstance(part, nnx.Module) else layer
  return layer


def _name_of(path: Any, leaf: Array) -> str | None:
  """Returns the name of a parameter, or None for a leaf that is no parameter."""
  del leaf
  which, *names = path
  if which.idx:
    return None
  last = names[-1]
  within = getattr(last, "name", getattr(last, "key", None)) == _VALUE
  return parts_lib.keystr(names[:-1] if within else names)


def _same(before: Any, after: Any) -> bool:
  leaves = (jax.tree.leaves(before), jax.tree.leaves(after))
  return len(leaves[0]) == len(leaves[1]) and all(a is b for a, b in zip(*leaves))


adapter = NnxModel

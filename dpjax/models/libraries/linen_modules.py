"""Linen modules that differ between training and evaluation: dropout, with a key for each
example.

A linen module without such a difference is used as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.errors
import jax

from dpjax.key_uses import KeyUse, key_for
from dpjax.types import Array, ArrayTree, Params
from dpjax.validate import UserError

# Message for BatchNorm, which no model of any library may have.
MIXES = (
  "its BatchNorm mixes examples in training, and holds statistics beside the parameters even if it "
  "is frozen (use_running_average=True); use GroupNorm, which sees one example, or write frozen "
  "statistics as a constant scale and shift"
)
# Arguments of `__call__` that say whether a model trains, each with its value in training.
TRAINING = {"train": True, "training": True, "is_training": True, "deterministic": False}
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Modes:
  """Wraps a linen module, and passes its `__call__` the training flags that it takes.

  Args:
    module: linen module.
    training: values of the training flags in training, by argument name of `__call__`.
    evaluating: their values in evaluation.
  """

  module: Any
  training: dict[str, bool]
  evaluating: dict[str, bool]

  def init(self, key: Array, x: ArrayTree) -> Params:
    """Initialises parameters in evaluation mode, which needs no example's key."""
    return self.module.init(key, x, **self.evaluating)

  def apply(self, params: Params, x: ArrayTree, *, key: Array | None = None) -> Array:
    """Computes outputs [B, ...]. With a `key`, which belongs to ONE example, the model is in
    training mode, else in evaluation mode."""
    if key is None:
      return self.module.apply(params, x, **self.evaluating)
    # From "params" Flax draws for all random collections except "dropout".
    rngs = {"dropout": key, "params": key_for(KeyUse.MODEL_PARAMS, key)}
    return self.module.apply(params, x, **self.training, rngs=rngs)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.module, name)


def modes(module: Any) -> Any:
  """Wraps a module in `Modes` if its `__call__` has a training flag. Returns any other module
  unchanged.

  >>> modes("a model without such an argument")
  'a model without such an argument'
  """
  try:
    training = training_flags(module) if callable(module) else {}
  # Some callables have no signature that Python can read.
  except TypeError:
    training = {}
  evaluating = {name: not value for name, value in training.items()}
  return Modes(module, training, evaluating) if training else module


def draws(model: Any, params: Params, first: ArrayTree, path: str) -> bool:
  """Returns whether the model needs a key in training (dropout).

  Args:
    model: the model, as `modes` returns it.
    first: batch [1, ...] of one example. Only its shape is used.
    path: name of the model, for messages.

  Raises:
    UserError: the model draws random numbers in evaluation, too.
  """
  if _needs_key(model.apply, params, first):
    raise UserError(
      "draws random numbers in evaluation too; give its __call__ an argument "
      "train=False, and nn.Dropout deterministic=not train",
      field="model.name",
      value=path,
    )
  if not isinstance(model, Modes):
    return False
  return _needs_key(functools.partial(model.module.apply, **model.training), params, first)


def _needs_key(apply: Callable[..., Any], params: Params, x: ArrayTree) -> bool:
  try:
    # It only traces shapes, so nothing is computed.
    jax.eval_shape(apply, params, x)
  # Flax shows only by this error that a module draws random numbers.
  except flax.errors.InvalidRngError:
    return True
  return False


def parameters_of(part: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
  """Returns the arguments of a class or function, by name. Native code counts as taking `**options`
  only.

  >>> list(parameters_of(lambda num_classes, rngs: None))
  ['num_classes', 'rngs']
  """
  try:
    signature = inspect.signature(part)
    by_meta = isinstance(part, type) and type(part).__call__ is not type.__call__
    # The metaclass of nnx takes any arguments, so the arguments of __init__ are returned.
    if by_meta and all(each.kind in _ANY for each in signature.parameters.values()):
      _, *arguments = inspect.signature(part.__init__).parameters.values()
      signature = inspect.Signature(arguments)
    return signature.parameters
  # inspect finds no signature for some native code.
  except ValueError:
    return inspect.signature(lambda **options: None).parameters


def mode_arguments(call: Callable[..., Any], *, training: bool) -> dict[str, Any]:
  """Returns the arguments that switch a model's call to training or to evaluation.

  >>> mode_arguments(lambda x, deterministic: x, training=False)
  {'deterministic': True}
  """
  return {name: training == value for name, value in training_flags(call).items()}


def training_flags(call: Callable[..., Any]) -> dict[str, bool]:
  """Returns the training flags of a model's call, by argument name, with their values in training.

  >>> training_flags(lambda x, deterministic: x)
  {'deterministic': False}
  """
  names = parameters_of(call)
  return {name: value for name, value in TRAINING.items() if name in names}

"""Models that differ between training and evaluation: dropout, with a key for each example."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.errors
import jax

from dpjax.types import Array, Example, LossFn, Params
from dpjax.validate import UserError

# Arguments of `__call__` that tell Flax models to train -> their value.
_TRAINING = {"train": True, "training": True, "is_training": True, "deterministic": False}
# Folded into an example's key, for all random collections but "dropout".
_OTHER_KEY = 1


@dataclasses.dataclass(frozen=True)
class Modes:
  """Wraps a linen module, and passes it the training flag that its `__call__` takes.

  Args:
    module: the model.
    flags: arguments of its `__call__` with their values in training.
  """

  module: Any
  flags: dict[str, bool]

  def init(self, key: Array, x: Any) -> Params:
    """Initialises parameters in evaluation mode, which needs no example's key."""
    return self.module.init(key, x, **self._evaluating)

  def apply(self, params: Params, x: Any, *, key: Array | None = None) -> Array:
    """Computes outputs [B, ...]: in training mode with a key, which one example draws from;
    else in evaluation mode."""
    if key is None:
      return self.module.apply(params, x, **self._evaluating)
    rngs = {"dropout": key, "params": jax.random.fold_in(key, _OTHER_KEY)}
    return self.module.apply(params, x, **self.flags, rngs=rngs)

  @property
  def _evaluating(self) -> dict[str, bool]:
    return {name: not value for name, value in self.flags.items()}

  def __getattr__(self, name: str) -> Any:
    return getattr(self.module, name)


def modes(module: Any) -> Any:
  """Wraps the module if its `__call__` has a training flag. Any other module is returned
  unchanged.

  >>> modes("a model without such an argument")
  'a model without such an argument'
  """
  try:
    names = inspect.signature(module).parameters if callable(module) else {}
  # Native code has no signature to inspect.
  except (TypeError, ValueError):
    names = {}
  flags = {name: value for name, value in _TRAINING.items() if name in names}
  return Modes(module, flags) if flags else module


def draws(model: Any, params: Params, first: Any, field: str) -> bool:
  """Whether the model needs a key in training (dropout).

  Raises:
    UserError: it draws in evaluation too.
  """
  # Shapes alone: nothing is computed.
  evaluated = lambda: jax.eval_shape(lambda p, x: model.apply(p, x), params, first)
  if not _needs_key(evaluated):
    flags = getattr(model, "flags", {})
    training = lambda p, x: model.module.apply(p, x, **flags)
    return bool(flags) and _needs_key(lambda: jax.eval_shape(training, params, first))
  raise UserError(
    "draws random numbers in evaluation too; give its __call__ an argument "
    "train=False, and nn.Dropout deterministic=not train",
    field=field,
  )


def _needs_key(run: Callable[[], Any]) -> bool:
  try:
    run()
  # Flax shows only by this error that a module draws random numbers.
  except flax.errors.InvalidRngError:
    return True
  return False


def keyed_loss(make: Callable[..., LossFn]) -> Callable[..., LossFn]:
  """Makes a loss whose model draws from `example.key`; without a key, in evaluation mode.

  Args:
    make: `apply -> loss`, with apply(params, x).
  """

  def of(apply: Callable[..., Array]) -> LossFn:
    def loss(params: Params, example: Example) -> Array:
      key = example.key
      if key is None:
        return make(apply)(params, example)
      return make(lambda own, x: apply(own, x, key=key))(params, example)

    return loss

  return of

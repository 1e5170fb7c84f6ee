"""Models of a user's own, written with any library, in one form for the launchers.

A linen module has that form already: `init(key, x)` makes parameters, `apply(params, x)` makes
outputs. One file for each row of `LIBRARIES` gives a library's models the same two functions, and
`functions` adapts two functions of a user. All models have parameters as nested dictionaries under
"params". So names in params.npz, checkpoints, `pretrained`, `trainable` and clipping do not depend
on the library.

Rules that every adapter keeps:

- A model holds nothing that steps change, except its parameters. BatchNorm, counters and caches
  are refused: the loss of one example could not carry them to the next step.
- `apply` without a key is the model in evaluation. With a key it is the model in training, and
  draws from that key alone.
- Arrays that are no parameters are constants. They are built once, from a constant key, so they
  are the same in training, in evaluation and after a resume.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import flax.linen as nn

from dpjax import names
from dpjax.models.libraries.linen_modules import parameters_of
from dpjax.types import Array, ArrayTree, Params
from dpjax.validate import UserError

# Argument with which a constructor asks for the shape of ONE example.
INPUT_SHAPE = "input_shape"


@runtime_checkable
class Model(Protocol):
  """Interface by which the launchers call a model of another library than linen."""

  def init(self, key: Array, x: ArrayTree) -> Params:
    """Returns first parameters, {"params": nested dictionaries of arrays}.

    Args:
      key: typed JAX key from which the first parameters are drawn.
      x: batch [1, ...] of one example. Only its shape may be used.
    """
    ...

  def apply(self, params: Params, x: ArrayTree, *, key: Array | None = None) -> Any:
    """Returns the outputs [B, ...] for a batch x [B, ...].

    Args:
      key: key from which ONE example draws in training; None in evaluation.
    """
    ...

  def draws(self, params: Params, first: ArrayTree) -> bool:
    """Returns whether outputs in training depend on the key (dropout)."""
    ...


class Library(NamedTuple):
  """A library whose modules are built from a key."""

  name: str  # in messages
  package: str  # module that holds the library's class `Module`
  argument: str  # constructor argument that takes the key
  file: str  # module with `adapter(construct, *, path, shaped)`


LIBRARIES = (
  Library("nnx", "flax.nnx", "rngs", "dpjax.models.libraries.nnx_modules"),
  Library("Equinox", "equinox", "key", "dpjax.models.libraries.equinox_modules"),
)


def find(path: str) -> Callable[..., Any]:
  """Returns the class or function at a user's path, `package.module:name`.

  Raises:
    UserError: the path cannot be imported, or it names a class whose objects no launcher takes as a
      model.
  """
  part = names.find(path, "model")
  if isinstance(part, type) and not is_model_class(part):
    raise not_linen(path, part)
  return part


def is_model_class(part: object) -> bool:
  """Returns whether `part` is a class of models: modules of a library, or objects with `init` and
  `apply`.

  >>> is_model_class(nn.Dense), is_model_class(dict)
  (True, False)
  """
  if not isinstance(part, type):
    return False
  functions = all(callable(getattr(part, name, None)) for name in ("init", "apply"))
  return functions or _has_made(part) is not None


def build(path: str, **options: Any) -> Any:
  """Returns the model that the class or function at a path makes with these options.

  Returns:
    A linen module, or a `Model`. A constructor that takes a key is called later, when the run has
    the key and the shape of an example.
  """
  part = find(path)
  library = _of_constructor(part)
  if library is not None:
    construct = functools.partial(names.call, path, "model", **options)
    if library.argument not in parameters_of(part):
      raise _without_key(library, path)
    adapter = importlib.import_module(library.file).adapter
    return adapter(construct, path=path, shaped=INPUT_SHAPE in arguments(part))
  value = names.call(path, "model", **options)
  if isinstance(value, nn.Module):
    return value
  library = _has_made(value)
  if library is not None:
    raise _without_key(library, path)
  functions = importlib.import_module("dpjax.models.libraries.functions")
  model = functions.model_of(value, path)
  if model is None:
    raise not_linen(path, type(value))
  return model


def not_linen(name: str, kind: type) -> UserError:
  """Returns the error for a model that is of no known library. The message shows only the model's
  type, since its repr may have many lines."""
  shown = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
  return UserError(
    f"must return a linen module, not {shown:.80}; but for launch.relevance, nnx, Equinox "
    "and objects with init and apply will do, too; Plan.clipped_grad in a notebook takes "
    "any loss(params, example)",
    field="model.name",
    value=name,
  )


def _has_made(value: object) -> Library | None:
  """Returns the row of `LIBRARIES` for a module or a class of modules; None for anything else.

  No library is imported here: a library that was never imported cannot have made the value.
  """
  kind = value if isinstance(value, type) else type(value)
  for library in LIBRARIES:
    package = sys.modules.get(library.package)
    if package is not None and issubclass(kind, package.Module):
      return library
  return None


def _of_constructor(part: Callable[..., Any]) -> Library | None:
  """Returns the library whose modules a class or a function builds; None for linen and others.

  A class shows its library by its base class, a function by the name of its key argument.

  >>> _of_constructor(lambda num_classes, rngs: None).name
  'nnx'
  """
  if isinstance(part, type):
    return _has_made(part)
  parameters = parameters_of(part)
  return next((row for row in LIBRARIES if row.argument in parameters), None)


def arguments(part: Callable[..., Any]) -> tuple[str, ...]:
  """Returns the names of the arguments that dpjax gives a constructor, besides num_classes.

  >>> arguments(lambda num_classes, rngs, input_shape, width: None)
  ('rngs', 'input_shape')
  """
  library = _of_constructor(part)
  if library is None:
    return ()
  optional = (library.argument, INPUT_SHAPE)
  return tuple(name for name in optional if name in parameters_of(part))


def _without_key(library: Library, path: str) -> UserError:
  """Returns the error for a constructor without a key argument. Without a key, the initial
  parameters of its modules would not follow from the run's seed."""
  return UserError(
    f"must take an argument {library.argument}, as first parameters of a module of "
    f"{library.name} follow from the run's seed",
    field="model.name",
    value=path,
  )

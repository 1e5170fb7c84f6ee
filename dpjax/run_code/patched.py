"""User functions and classes in the public namespaces of numerical libraries."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from dpjax.run_code.packages import DISTRIBUTIONS, is_users_code

# Namespaces used in losses, models and optimizers. Their private modules are 20 times as
# large.
_NAMESPACES = (
  "dpjax.losses",
  "flax.linen",
  "flax.nnx",
  "jax.lax",
  "jax.nn",
  "jax.nn.initializers",
  "jax.numpy",
  "jax.numpy.linalg",
  "jax.random",
  "jax.scipy.special",
  "optax",
  "optax.losses",
)
_MOST_WRAPPED = 20


def replaced() -> Iterator[Any]:
  """Yields replacements, from a user's file, of a function, a method or a class.

  A startup file, a config file or a cell of a notebook can do so, and no source that a run names
  tells of it: `jnp.tanh = mine`, `nn.Dense.__call__ = mine`.

  >>> list(replaced())
  []
  """
  checkouts = tuple(_checkouts())
  for name in _NAMESPACES:
    module = sys.modules.get(name)
    # Without `getattr`, which would trigger a library's lazy imports.
    for value in [*getattr(module, "__dict__", {}).values()]:
      methods = [*vars(value).values()] if isinstance(value, type) else []
      parts = (value, *methods)
      files = {file for part in parts for file in _files_of(part)}
      if any(is_users_code(file) and not file.startswith(checkouts) for file in files):
        yield value


def _checkouts() -> Iterator[str]:
  """Yields library folders among the user's files; a digest of all sources is their
  version."""
  for name in DISTRIBUTIONS:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None and is_users_code(file):
      yield os.path.join(os.path.dirname(file), "")


def _files_of(value: Any) -> Iterator[str]:
  """Yields the files of a function and of what it wraps; nothing for other objects."""
  for _ in range(_MOST_WRAPPED):
    if isinstance(value, functools.partial):
      value = value.func
    if isinstance(value, types.FunctionType):
      yield value.__code__.co_filename
    # `jax.jit`, `functools.wraps` and the like keep `__wrapped__` in their own dict.
    value = getattr(value, "__dict__", {}).get("__wrapped__")
    if value is None:
      return

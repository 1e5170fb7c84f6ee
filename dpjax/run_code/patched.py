"""User functions and classes in the public namespaces of numerical libraries."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from dpjax.run_code.packages import DISTRIBUTIONS, is_users_code

# Namespaces used in losses, models and optimizers. Their private modules, 20 times as large,
# are not searched.
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

  A startup file, a config file or a cell of a notebook can set `jnp.tanh = mine` or
  `nn.Dense.__call__ = mine`. No source that the run names shows it.

  >>> list(replaced())
  []
  """
  checkouts = tuple(_checkouts())
  for name in _NAMESPACES:
    module = sys.modules.get(name)
    # Without `getattr`, which would trigger a library's lazy imports.
    values = [*getattr(module, "__dict__", {}).values()]
    # Thousands of functions come from a hundred files, so a namespace is first checked as a whole:
    # every digest of a run makes this check, and nearly all find nothing.
    if _are_of_user(values, checkouts):
      yield from (value for value in values if _are_of_user([value], checkouts))


def _are_of_user(values: list[Any], checkouts: tuple[str, ...]) -> bool:
  """Whether a function among values, or among methods of their classes, is of a user's file.

  Args:
    values: values of a namespace.
    checkouts: folders of libraries among the user's files.
  """
  classes = [value for value in values if isinstance(value, type)]
  methods = [method for value in classes for method in vars(value).values()]
  files = _files_of([*values, *methods])
  return any(is_users_code(file) and not file.startswith(checkouts) for file in files)


def _checkouts() -> Iterator[str]:
  """Yields library folders among the user's files; a digest of all sources is their
  version."""
  for name in DISTRIBUTIONS:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None and is_users_code(file):
      yield os.path.join(os.path.dirname(file), "")


def _files_of(values: list[Any]) -> set[str]:
  """Returns the files of functions and of what they wrap; other objects have none."""
  files = set()
  for _ in range(_MOST_WRAPPED):
    # Strings, tuples and descriptors have no dict of their own: half of what a module holds.
    values = [
      value.func if isinstance(value, functools.partial) else value
      for value in values
      if type(value).__dictoffset__
    ]
    files |= {
      value.__code__.co_filename
      for value in values
      if isinstance(value, types.FunctionType)
    }
    # `jax.jit`, `functools.wraps` and the like keep `__wrapped__` in their own dict.
    inner = [getattr(value, "__dict__", {}).get("__wrapped__") for value in values]
    values = [value for value in inner if value is not None]
    if not values:
      break
  return files

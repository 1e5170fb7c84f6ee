"""Search for a user's functions and classes in the public namespaces of numerical libraries."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from dpjax.run_code.packages import DISTRIBUTIONS, is_users_code

# Namespaces used in losses, models and optimizers. Private modules of the libraries, 20 times as
# large, are not searched.
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
  """Yields what user's files have put into library namespaces: functions that such a file defines,
  and classes with a method that such a file defines.

  A startup file, a config file or a cell of a notebook can set `jnp.tanh = mine` or
  `nn.Dense.__call__ = mine`. The sources that the run names do not show such a replacement.

  >>> list(replaced())
  []
  """
  checkouts = tuple(_checkouts())
  for name in _NAMESPACES:
    module = sys.modules.get(name)
    # The module's `__dict__` is read, because reading its attributes by name would trigger lazy
    # imports.
    values = [*getattr(module, "__dict__", {}).values()]
    # Thousands of functions come from a hundred files, so a namespace is first checked as a whole.
    # Each search for a run's code makes this check, and nearly always nothing is found.
    if _are_of_user(values, checkouts):
      yield from (value for value in values if _are_of_user([value], checkouts))


def _are_of_user(values: list[Any], checkouts: tuple[str, ...]) -> bool:
  """Returns whether a user's file defined a function, or a method of a class, among `values`.

  Args:
    values: values of a namespace.
    checkouts: folders of libraries outside site-packages, whose files are no user's files.
  """
  classes = [value for value in values if isinstance(value, type)]
  methods = [method for value in classes for method in vars(value).values()]
  files = _files_of([*values, *methods])
  return any(is_users_code(file) and not file.startswith(checkouts) for file in files)


def _checkouts() -> Iterator[str]:
  """Yields the folders of libraries that are imported from outside site-packages.

  The version of such a library contains a digest of all its sources.
  """
  for name in DISTRIBUTIONS:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None and is_users_code(file):
      yield os.path.join(os.path.dirname(file), "")


def _files_of(values: list[Any]) -> set[str]:
  """Returns the source files of the functions among `values`, and of the functions they wrap."""
  files = set()
  for _ in range(_MOST_WRAPPED):
    # Half of a module's values are strings, tuples and descriptors, which have no `__dict__`.
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
    # `jax.jit`, `functools.wraps` and the like set `__wrapped__` in the `__dict__` of the wrapper.
    inner = [getattr(value, "__dict__", {}).get("__wrapped__") for value in values]
    values = [value for value in inner if value is not None]
    if not values:
      break
  return files

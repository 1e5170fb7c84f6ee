"""Values in modules: which of them may affect a computation, and their digests."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def is_number_or_array(value: Any) -> bool:
  """Returns whether a value is a number, an array of numbers, or a non-empty tuple of these.

  Strings do not count: computed strings in modules are mostly names of folders, hosts and users.

  >>> is_number_or_array((1.5, np.ones(2))), is_number_or_array(()), is_number_or_array("tanh")
  (True, False, False)
  """
  if isinstance(value, tuple):
    return bool(value) and all(map(is_number_or_array, value))
  if isinstance(value, (np.ndarray, np.generic)):
    return value.dtype.kind in "biufcV"
  if isinstance(value, jax.Array):
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    # Nobody can read a tracer that a trace left behind, or an array on other processes' devices.
    is_here = not isinstance(value, Tracer) and value.is_fully_addressable
    return not is_key and is_here
  return type(value) in (bool, int, float, complex)


def is_option(value: Any) -> bool:
  """Returns whether a value is an option: None, a number, an array, text without a folder, or a
  tuple or dict of options.

  >>> is_option((1, "tanh", None)), is_option("a/b"), is_option([1])
  (True, False, False)
  """
  if isinstance(value, tuple):
    return all(map(is_option, value))
  if type(value) is dict:
    return all(isinstance(key, str) and is_option(part) for key, part in value.items())
  if isinstance(value, (str, bytes)):
    return os.sep not in os.fsdecode(value)
  return value is None or is_number_or_array(value)


def is_settings(value: Any) -> bool:
  """Returns whether a value is a dataclass or a namespace that holds options only, and at least one
  (`is_option`).

  >>> is_settings(types.SimpleNamespace(scale=1.0)), is_settings(1.0)
  (True, False)
  """
  is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
  if not is_object and type(value) is not types.SimpleNamespace:
    return False
  held = getattr(value, "__dict__", {})
  return bool(held) and is_option(held)


def is_table(value: Any) -> bool:
  """Returns whether a value is a list, a set or a dict of options (`is_option`)."""
  if isinstance(value, (list, set)):
    return is_option(tuple(value))
  return type(value) is dict and is_option(value)


def sha256(value: Any) -> str:
  """Returns a digest of a value. Values of equal types and contents have the same digest in every
  process.

  >>> sha256({"a": 1, "b": {2, 3}}) == sha256({"b": {3, 2}, "a": 1})
  True
  """
  return hashlib.sha256(_text(value).encode()).hexdigest()


def _text(value: Any) -> str:
  if isinstance(value, Mapping):
    return f"dict {sorted((_text(key), _text(part)) for key, part in value.items())}"
  if isinstance(value, (set, frozenset)):
    return f"set {sorted(map(_text, value))}"
  if isinstance(value, (list, tuple)):
    return f"{type(value).__name__} {[*map(_text, value)]}"
  if isinstance(value, (np.ndarray, np.generic, jax.Array)):
    array = np.ascontiguousarray(np.asarray(value))
    content = hashlib.sha256(array.tobytes()).hexdigest()
    return f"array {array.dtype} {np.shape(value)} {content}"
  if is_settings(value):
    return f"{type(value).__qualname__} {_text(vars(value))}"
  if value is None or type(value) in (bool, int, float, complex, str, bytes):
    return f"{type(value).__name__} {value!r}"
  # Only the type of another object counts: its repr would contain an address, which changes between
  # processes.
  return f"of type {type(value).__module__}.{type(value).__qualname__}"

"""Sources as they were imported, and byte code."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import marshal
import os
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from dpjax.validate import UserError

SEEN: dict[int, tuple[Any, bytes]] = {}  # id of a spec -> (the spec, its source)


def read(spec: Any, file: str) -> bytes:
  """Returns the source of an imported module, as first seen; a reload makes a new spec."""
  if id(spec) not in SEEN:
    content = bytes_of(spec, file)
    _check_compiled(spec, file, content)
    SEEN[id(spec)] = (spec, content)
  return SEEN[id(spec)][1]


def bytes_of(spec: Any, file: str) -> bytes:
  # A loader can read from an archive, too.
  read = getattr(spec.loader, "get_data", None)
  return pathlib.Path(file).read_bytes() if read is None else read(file)


def _check_compiled(spec: Any, file: str, content: bytes) -> None:
  """Raises UserError where the compiled file does not belong to the present source.

  An import updates the compiled file. So the source was edited since. Or an edit kept the size and
  the second of the file, so that Python runs the older compiled file.
  """
  if is_compiled_by_others(spec):
    return
  # Without writing byte code, compiled files are never updated.
  if sys.dont_write_bytecode:
    return
  try:
    cached = pathlib.Path(importlib.util.cache_from_source(file))
    held = cached.read_bytes()
    # If its folder is read-only, an old compiled file cannot be avoided.
    if held[:4] != importlib.util.MAGIC_NUMBER or not os.access(cached.parent, os.W_OK):
      return
    # A compiled file begins with 16 bytes: magic, flags, and the source's identity.
    compiled = code_name(marshal.loads(held[16:]))
    same = compiled == code_name(compile(content, file, "exec", dont_inherit=True))
  except (OSError, NotImplementedError, ValueError, EOFError, TypeError, SyntaxError):
    return
  if not same:
    raise UserError(
      f"module {spec.name!r}: its file was edited after it was imported or compiled; touch it "
      "and start Python again (a notebook: its kernel), so that what runs is what it says"
    )


def source(file: str) -> bytes:
  """Returns the bytes of a code file as they were when its module was first seen.

  Raises:
    OSError: it cannot be read.
  """
  for module in list(sys.modules.values()):
    spec = getattr(module, "__spec__", None)
    if spec is not None and getattr(spec, "origin", None) == file:
      return read(spec, file)
  return pathlib.Path(file).read_bytes()


def is_compiled_by_others(spec: Any) -> bool:
  """Whether another tool compiled a module, so that it differs from its source. Examples: a
  test whose assertions pytest rewrites, an instrumented module."""
  loader = getattr(spec, "loader", None)
  return loader is not None and type(loader) is not importlib.machinery.SourceFileLoader


# --- byte code


def _constant(value: Any) -> Any:
  if isinstance(value, types.CodeType):
    return code_name(value)
  if isinstance(value, tuple):
    return ["tuple", *map(_constant, value)]
  # Its order changes between processes.
  if isinstance(value, frozenset):
    return ["frozenset", *sorted(map(repr, value))]
  return [type(value).__name__, repr(value)]


def code_name(code: types.CodeType) -> str:
  """Returns a name for byte code, without its file and its lines."""
  parts = [
    code.co_qualname,
    code.co_code.hex(),
    code.co_argcount,
    code.co_posonlyargcount,
    code.co_kwonlyargcount,
    code.co_flags,
    code.co_names,
    code.co_varnames,
    code.co_freevars,
    code.co_cellvars,
    code.co_exceptiontable.hex(),
    [_constant(value) for value in code.co_consts],
  ]
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
  yield code
  for value in code.co_consts:
    if isinstance(value, types.CodeType):
      yield from codes_in(value)

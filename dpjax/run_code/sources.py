"""Sources of modules as they were imported, and digests of byte code."""

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
  """Returns the source of an imported module as it was first read. A reload makes a new spec, for
  which the source is read again."""
  if id(spec) not in SEEN:
    content = bytes_of(spec, file)
    _check_compiled(spec, file, content)
    SEEN[id(spec)] = (spec, content)
  return SEEN[id(spec)][1]


def bytes_of(spec: Any, file: str) -> bytes:
  # `get_data` of a loader can read from an archive, too.
  read = getattr(spec.loader, "get_data", None)
  return pathlib.Path(file).read_bytes() if read is None else read(file)


def _check_compiled(spec: Any, file: str, content: bytes) -> None:
  """Raises UserError if the compiled file does not match the current source.

  An import updates the compiled file. So if the two differ, the source was edited after the import.
  Or an edit kept the source's size and its time in seconds, and Python ran the old compiled file.
  """
  if is_compiled_by_others(spec):
    return
  # If Python writes no byte code, a compiled file may be older than the imported source.
  if sys.dont_write_bytecode:
    return
  try:
    cached = pathlib.Path(importlib.util.cache_from_source(file))
    held = cached.read_bytes()
    # In a read-only folder, Python cannot replace an old compiled file, so it is not compared.
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
  """Returns the bytes of a code file as they were when its module was first seen. If no imported
  module is of this file, returns its bytes now.

  Raises:
    OSError: the file cannot be read.
    UserError: the file was edited after its module was imported.
  """
  for module in list(sys.modules.values()):
    spec = getattr(module, "__spec__", None)
    if spec is not None and getattr(spec, "origin", None) == file:
      return read(spec, file)
  return pathlib.Path(file).read_bytes()


def is_compiled_by_others(spec: Any) -> bool:
  """Returns whether another tool compiled a module, so that its byte code may differ from its
  source. Examples: a test whose assertions pytest rewrites, an instrumented module."""
  loader = getattr(spec, "loader", None)
  return loader is not None and type(loader) is not importlib.machinery.SourceFileLoader


# --- byte code


def _constant(value: Any) -> Any:
  if isinstance(value, types.CodeType):
    return code_name(value)
  if isinstance(value, tuple):
    return ["tuple", *map(_constant, value)]
  # The order of a frozenset changes between processes, so its entries are sorted.
  if isinstance(value, frozenset):
    return ["frozenset", *sorted(map(repr, value))]
  return [type(value).__name__, repr(value)]


def code_name(code: types.CodeType) -> str:
  """Returns a digest of byte code, which does not depend on its file or its line numbers."""
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

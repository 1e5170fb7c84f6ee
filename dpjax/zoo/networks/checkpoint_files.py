"""Weights in checkpoints of Flax and of Orbax: names, shapes and values, checked.

A Flax checkpoint is one msgpack file (`flax.serialization.to_bytes`,
`flax.training.checkpoints`). An Orbax checkpoint is a folder. Plain arrays alone are read:
nothing that a file holds is called or imported, and a pickle is refused.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dpjax import names, trees, weight_folders
from dpjax.types import Params
from dpjax.validate import UserError, about, first_line
from dpjax.zoo.networks import weight_files

# Types that a parameter may have. A checkpoint may also hold arrays of other types, such as a
# count of steps.
_DTYPES = {
  "float16": np.float16,
  "float32": np.float32,
  "float64": np.float64,
  "bfloat16": jnp.bfloat16,
}
# Collections of state that no model of dpjax has. A layer without its state would compute other
# values.
_COLLECTIONS = ("batch_stats", "cache")
# Codes of Flax for types that msgpack does not know.
_ARRAY = 1
_COMPLEX = 2
_SCALAR = 3
_CHUNKED = "__msgpack_chunked_array__"
# Name of a file that dpjax writes into each step folder of its checkpoints.
_OF_A_RUN = "sha256.json"
_MOST_METADATA = 2**24
_PICKLE = 0x80
_NEWEST_PICKLE = 5


class _Stored(NamedTuple):
  """Array as a file stores it. Its bytes are not yet numbers; for Orbax they are not read: b""."""

  shape: tuple[int, ...]
  dtype: str
  content: bytes


def load_checkpoint(path: str | os.PathLike[str], params: Params) -> Params:
  """Loads the parameters of a model from a checkpoint of Flax or of Orbax.

  Args:
    path: a msgpack file, an Orbax folder, or a folder of checkpoints (the newest one is
      read). The parameters are the whole tree, or the part under "params".
    params: first parameters of the model. The last layer, `head`, keeps them if the file has no
      `head` for this number of classes.

  Returns:
    Parameters in the structure and the types of `params`.

  Raises:
    UserError: the path is missing, or is no checkpoint of Flax or Orbax; an array is missing,
      unknown, of another shape, not of floating point numbers, or not finite; the checkpoint holds
      batch statistics or a cache, or belongs to a run of dpjax; the file is a pickle or a pipe; the
      folder holds a link or a pipe. The message is one line.

  >>> from flax import serialization
  >>> import tempfile
  >>> params = {"params": {"head": {"bias": np.ones(2, np.float32)}}}
  >>> path = tempfile.mkdtemp() + "/best.msgpack"
  >>> _ = pathlib.Path(path).write_bytes(serialization.to_bytes(params))
  >>> load_checkpoint(path, params)
  {'params': {'head': {'bias': array([1., 1.], dtype=float32)}}}
  """
  with about("path", os.fspath(path)):
    arrays, fresh = read(path, params)
    leaves = {}
    for name, leaf in trees.named_leaves(params).items():
      leaves[name] = leaf
      if name not in fresh:
        with np.errstate(over="ignore"):
          leaves[name] = arrays[name].astype(leaf.dtype)
        weight_files.finite(np.asarray(leaves[name], np.float64), name)
    return jax.tree.unflatten(jax.tree.structure(params), list(leaves.values()))


def read(
  path: str | os.PathLike[str], params: Params
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
  """Reads the arrays of a checkpoint for a model.

  Args:
    path, params: arguments of `load_checkpoint`.

  Returns:
    (arrays by the model's names, without a last layer that does not fit; names of the parameters
    that keep their first values)

  Raises:
    UserError: in the cases that `load_checkpoint` names; without a field.
  """
  wanted = {name: np.shape(leaf) for name, leaf in trees.named_leaves(params).items()}
  file = names.weights_file(os.fspath(path))
  is_orbax = os.path.isdir(file)
  stored = _parameters(_orbax(file) if is_orbax else _flax(file))
  fresh = tuple(name for name in wanted if _is_head(name))
  if all(name in stored and stored[name][1].shape == wanted[name] for name in fresh):
    fresh = ()
  if fresh:
    stored = {name: entry for name, entry in stored.items() if not _is_head(name)}
  weight_files.check_names(stored, {*wanted} - {*fresh})
  # Shapes are checked before Orbax reads values, so it takes memory only for arrays that fit.
  for name, (_, entry) in stored.items():
    if entry.shape != wanted[name]:
      have = f"{name} is of shape {entry.shape}"
      raise UserError(f"{have}, the model wants {wanted[name]}")
    if entry.dtype not in _DTYPES:
      raise UserError(f"{name} is {entry.dtype}, must be one of {', '.join(_DTYPES)}")
  if is_orbax:
    paths = {name: place for name, (place, _) in stored.items()}
    arrays = _orbax_arrays(file, paths)
  else:
    arrays = {name: _numbers(entry) for name, (_, entry) in stored.items()}
  for name, array in arrays.items():
    weight_files.finite(np.asarray(array, np.float64), name)
  return arrays, fresh


def _is_head(name: str) -> bool:
  return f"/{weight_files.HEAD}/" in f"/{name}"


def _parameters(
  stored: Mapping[tuple[str, ...], Any],
) -> dict[str, tuple[tuple[str, ...], Any]]:
  """Selects the parameters among the entries of a checkpoint.

  Returns:
    A dictionary from dpjax's name to (path in the checkpoint, entry).

  Raises:
    UserError: the checkpoint holds batch statistics or a cache, an entry that is no array, or two
      entries of one name.
  """
  inside = {path: (path, entry) for path, entry in stored.items() if path}
  tops = {path[0] for path in inside}
  # A saved training state has a field "params", which holds linen's collection "params".
  while "params" in tops:
    bad = sorted(tops & {*_COLLECTIONS})
    if bad:
      raise UserError(f"holds {', '.join(bad)}, and models of dpjax hold parameters alone")
    inside = {path[1:]: entry for path, entry in inside.items() if path[0] == "params"}
    tops = {path[0] for path in inside if path}
  # In the state of an nnx module, each array lies under the key "value".
  if inside and all(path[-1:] == ("value",) for path in inside):
    inside = {path[:-1]: entry for path, entry in inside.items()}
  selected: dict[str, tuple[tuple[str, ...], Any]] = {}
  for path, (place, entry) in inside.items():
    name = "/".join(("params", *path))
    if not path or not isinstance(entry, _Stored):
      raise UserError(f"{name} is no array, must be of floating point numbers")
    # Two paths may give the same name if a part of a path holds a slash.
    if name in selected:
      raise UserError(f"holds {name} twice")
    selected[name] = (place, entry)
  return selected


def _numbers(entry: _Stored) -> np.ndarray:
  dtype = np.dtype(_DTYPES[entry.dtype])
  return np.frombuffer(entry.content, dtype).reshape(entry.shape)


# --- Flax


def _flax(path: str) -> dict[tuple[str, ...], Any]:
  """Returns the entries of a msgpack file by path. The bytes of arrays stay bytes.

  Raises:
    UserError: the file is a pickle, or is no checkpoint of Flax.
  """
  # msgpack is imported here, since few runs need it.
  import msgpack

  content = weight_files.content_of(path)
  # Loading a pickle may run code. msgpack would read its first byte as an empty table.
  if len(content) > 2 and content[0] == _PICKLE and content[1] <= _NEWEST_PICKLE:
    raise UserError("is a pickle, which may run code; save it as msgpack or Orbax")
  try:
    tree = msgpack.unpackb(
      content, ext_hook=_extension, object_pairs_hook=_table, strict_map_key=False
    )
  # msgpack raises ValueError or a subclass for a damaged file, TypeError for a table as a key.
  except (ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
    raise UserError(f"is no checkpoint of Flax ({first_line(error)})") from error
  if not isinstance(tree, dict):
    raise UserError("is no checkpoint of Flax (it holds no table of arrays)")
  return dict(_flat(tree, ()))


def _table(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
  """Returns a table of msgpack as a dictionary with text keys. Raises ValueError if a key comes
  twice, or is neither text nor an integer."""
  table: dict[str, Any] = {}
  for key, value in pairs:
    if not isinstance(key, str | int) or str(key) in table:
      raise ValueError(f"the name {key!r:.40} stands twice, or is no text")
    table[str(key)] = value
  return table


def _extension(code: int, data: bytes) -> Any:
  """Returns an array or a number as `_Stored`, and None for a complex number. Raises ValueError for
  any other object and for a malformed array."""
  import msgpack

  if code == _COMPLEX:
    return None
  if code not in (_ARRAY, _SCALAR):
    raise ValueError(f"it holds an object of type {code}, and arrays alone are read")
  shape, dtype, content = msgpack.unpackb(data, raw=True)
  sizes = tuple(shape)
  # Without this check, a list instead of bytes would pass if it had the right length.
  if not isinstance(dtype, bytes) or not isinstance(content, bytes):
    raise ValueError("an array whose type or content is no text")
  name = dtype.decode("ascii")
  if not all(type(size) is int and size >= 0 for size in sizes):
    raise ValueError(f"an array of shape {sizes!s:.40}")
  if name in _DTYPES and math.prod(sizes) * np.dtype(_DTYPES[name]).itemsize != len(
    content
  ):
    raise ValueError(f"an array of shape {sizes!s:.40} has {len(content)} bytes")
  return _Stored(sizes, name, content)


def _flat(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterable[tuple[Any, Any]]:
  """Yields (path, entry) of every leaf. The entry of an array whose chunks are damaged is None."""
  # This is a loop, since tables may be nested deeper than Python allows recursion.
  unread = [(path, tree)]
  while unread:
    where, table = unread.pop()
    for name, value in table.items():
      if isinstance(value, dict) and value.get(_CHUNKED) is True:
        yield (*where, name), _join(value)
      elif isinstance(value, dict):
        unread.append(((*where, name), value))
      else:
        yield (*where, name), value


def _join(table: Mapping[str, Any]) -> Any:
  """Returns an array that Flax wrote in chunks, as it does above 1 GiB. Returns None if the chunks
  are damaged."""
  shape = table.get("shape")
  chunks = table.get("chunks")
  if not isinstance(shape, dict) or not isinstance(chunks, dict) or not chunks:
    return None
  sizes: Any = tuple(shape.get(str(i)) for i in range(len(shape)))
  parts: Any = [chunks.get(str(i)) for i in range(len(chunks))]
  if not all(isinstance(part, _Stored) for part in parts):
    return None
  if not all(type(size) is int and size >= 0 for size in sizes):
    return None
  dtypes = {part.dtype for part in parts}
  dtype = dtypes.pop()
  content = b"".join(part.content for part in parts)
  known = dtype in _DTYPES and not dtypes
  if not known or math.prod(sizes) * np.dtype(_DTYPES[dtype]).itemsize != len(content):
    return None
  return _Stored(sizes, dtype, content)


# --- Orbax


def _orbax(folder: str) -> dict[tuple[str, ...], Any]:
  """Returns the shapes and types of the arrays in an Orbax folder, by path. No values are read.

  Raises:
    UserError: the folder is no checkpoint of Orbax, belongs to a run of dpjax, or holds a link or a
      pipe; its metadata or the chunks of an array are too large; Orbax is not installed.
  """
  weight_folders.files_within(folder)
  place = pathlib.Path(folder)
  if any((step / _OF_A_RUN).exists() for step in (place, place.parent)):
    raise UserError(
      "is a checkpoint of a run, as secret as its data; give the run's folder"
    )
  if (place / "_METADATA").stat().st_size > _MOST_METADATA:
    raise UserError(f"its _METADATA is larger than {_MOST_METADATA} bytes")
  orbax = _orbax_library()
  try:
    tree = orbax.PyTreeCheckpointer().metadata(place.absolute()).item_metadata.tree
  # For a damaged folder, Orbax and tensorstore raise errors of many kinds.
  except Exception as error:
    raise UserError(f"is no checkpoint of Orbax ({first_line(error)})") from error
  described: dict[tuple[str, ...], Any] = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
    path = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
    described[path] = leaf
    shape = getattr(leaf, "shape", None)
    if shape is None:
      continue
    chunk = getattr(leaf.storage, "chunk_shape", None) or ()
    # A chunk is read whole, so its size decides how much memory is taken.
    if math.prod(chunk) > max(math.prod(shape), 1):
      raise UserError(f"{'/'.join(path)} has chunks larger than itself")
    described[path] = _Stored(tuple(shape), np.dtype(leaf.dtype).name, b"")
  return described


def _orbax_arrays(
  folder: str, paths: Mapping[str, tuple[str, ...]]
) -> dict[str, np.ndarray]:
  """Reads arrays of an Orbax folder to the host, whatever devices they were saved from.

  Args:
    paths: name -> path in the folder's tree, for each array to read.
  """
  orbax = _orbax_library()
  as_numpy = orbax.RestoreArgs(restore_type=np.ndarray)
  nested = traverse_util.unflatten_dict
  asked = orbax.args.PyTreeRestore(
    item=nested(dict.fromkeys(paths.values(), 0)),
    restore_args=nested(dict.fromkeys(paths.values(), as_numpy)),
    partial_restore=True,
  )
  try:
    tree = orbax.PyTreeCheckpointer().restore(pathlib.Path(folder).absolute(), args=asked)
    flat = traverse_util.flatten_dict(tree)
    return {name: np.asarray(flat[path]) for name, path in paths.items()}
  except Exception as error:
    raise UserError(f"cannot be read by Orbax ({first_line(error)})") from error


def _orbax_library() -> Any:
  # Orbax takes a second to import, and few runs need it.
  try:
    import orbax.checkpoint as orbax
  except ImportError as error:
    raise UserError(f"needs Orbax ({error}); pip install orbax-checkpoint") from error
  return orbax

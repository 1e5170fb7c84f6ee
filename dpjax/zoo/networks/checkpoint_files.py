"""Weights in checkpoints of Flax and of Orbax: names, shapes and values, checked.

A Flax checkpoint is one msgpack file (`flax.serialization.to_bytes`,
`flax.training.checkpoints`). An Orbax checkpoint is a folder. Plain arrays alone are read:
nothing that a file holds is called or imported, and a pickle is refused.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import serialization, traverse_util

from dpjax import names, trees, weight_folders
from dpjax.types import Params
from dpjax.validate import UserError, about, first_line
from dpjax.zoo.networks import weight_files

# Types that a parameter may have. A checkpoint may also hold arrays of other types, such as a
# count of steps.
_DTYPES = ("float16", "float32", "float64", "bfloat16")
# Collections of state that no model of dpjax has. A layer without its state would compute other
# values.
_COLLECTIONS = ("batch_stats", "cache")
_MOST_METADATA = 2**24
_PICKLE = 0x80
_NEWEST_PICKLE = 5


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
    if entry.dtype.name not in _DTYPES:
      raise UserError(f"{name} is {entry.dtype}, must be one of {', '.join(_DTYPES)}")
  if is_orbax:
    paths = {name: place for name, (place, _) in stored.items()}
    arrays = _orbax_arrays(file, paths)
  else:
    arrays = {name: np.asarray(entry) for name, (_, entry) in stored.items()}
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
    if not path or not hasattr(entry, "dtype"):
      raise UserError(f"{name} is no array, must be of floating point numbers")
    # Two paths may give the same name if a part of a path holds a slash.
    if name in selected:
      raise UserError(f"holds {name} twice")
    selected[name] = (place, entry)
  return selected


# --- Flax


def _flax(path: str) -> dict[tuple[str, ...], Any]:
  """Returns the entries of a msgpack file by path.

  Raises:
    UserError: the file is a pickle, or is no checkpoint of Flax.
  """
  content = weight_files.content_of(path)
  # Loading a pickle may run code. msgpack would read its first byte as an empty table.
  if len(content) > 2 and content[0] == _PICKLE and content[1] <= _NEWEST_PICKLE:
    raise UserError("is a pickle, which may run code; save it as msgpack or Orbax")
  try:
    tree = serialization.msgpack_restore(content)
    if not isinstance(tree, dict):
      raise ValueError("it holds no table of arrays")
    flat = traverse_util.flatten_dict(tree)
  # A damaged file may raise any of these.
  except (
    ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError,
    RecursionError,
  ) as error:  # fmt: skip
    raise UserError(f"is no checkpoint of Flax ({first_line(error)})") from error
  return {tuple(map(str, place)): entry for place, entry in flat.items()}


# --- Orbax


def _orbax(folder: str) -> dict[tuple[str, ...], Any]:
  """Returns the shapes and types of the arrays in an Orbax folder, by path. No values are read.

  Raises:
    UserError: the folder is no checkpoint of Orbax, or holds a link or a pipe; its metadata or the
      chunks of an array are too large; Orbax is not installed.
  """
  weight_folders.files_within(folder)
  place = pathlib.Path(folder)
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
    described[path] = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
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

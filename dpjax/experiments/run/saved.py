"""Parameters in a `params.npz` of an earlier run: reading them, and starting from them.

The guarantee of a run that starts from such parameters covers only records that did not influence
the parameters. So their origin must be known. The result.json beside a params.npz holds a digest of
the parameters. It names the data on which they were trained, and the data of the parameters from
which that training began. If the new run's data are among these data, by name, file or digest, the
params.npz is refused. If not, the privacy statement names these data.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dpjax import data, names, trees, validate
from dpjax.accounting.text import paragraph
from dpjax.experiments.run import run_keys, workdir, writers
from dpjax.types import Params
from dpjax.validate import UserError
from dpjax.zoo.datasets.registry import takes_declaration

# Key of result.json: data sets that the first parameters depend on, the most recent data set first.
PRETRAINED_ON = "pretrained_on"
# Data sets of random numbers, which contain nobody's record.
SYNTHETIC = ("random_process",)
# Name for the unknown data of weights that no result.json is bound to.
_UNNAMED = "data that nothing beside it names"
HEAD = "head"  # name of the last layer in every model of dpjax


def read(path: str) -> dict[str, np.ndarray]:
  """Returns the arrays of a params.npz, by name.

  Raises:
    UserError: the file is missing, or `numpy.savez` did not write it; or an array does not hold
      floating point numbers, is not in this machine's byte order, or holds NaN or infinity.
      It names no field: the caller knows which one gave the path (`validate.about`).
  """
  # Imported here, because most runs begin from random parameters and read no file.
  from dpjax.data import npz

  with validate.about("is no params.npz"):
    arrays = npz.arrays_of(pathlib.Path(path))
  return {name: _numbers(array, name) for name, array in arrays.items()}


def _numbers(array: np.ndarray, name: str) -> np.ndarray:
  """Returns the array. Raises UserError if it cannot be a parameter."""
  floats = jnp.issubdtype(array.dtype, jnp.floating)
  if not floats:
    raise UserError(f"must hold floating point numbers, not {array.dtype}", field=name)
  # JAX accepts only numbers of the native byte order.
  if not array.dtype.isnative:
    raise UserError(
      f"must be of this machine's byte order, not {array.dtype.str}", field=name
    )
  # One NaN would make every loss and gradient NaN, and clipping drops such gradients.
  if not np.isfinite(np.asarray(array, np.float64)).all():
    raise UserError("holds NaN or infinity", field=name)
  return array


def in_place_of(
  like: Params, arrays: Mapping[str, np.ndarray], fresh: tuple[str, ...] = ()
) -> Params:
  """Returns the arrays in the structure of `like`. The leaves in `fresh` keep the values of `like`.

  Raises:
    UserError: leaves or shapes of another model, or numbers that the dtypes of `like` cannot hold.
  """
  leaves = trees.named_leaves(like)
  treedef = jax.tree.structure(like)
  for name in sorted({*leaves, *arrays} - {*fresh}):
    got = arrays[name].shape if name in arrays else "no such leaf"
    wanted = np.shape(leaves[name]) if name in leaves else "no such leaf"
    if got != wanted:
      raise UserError(
        f"does not fit the model of this config: {name} has shape {got} there, {wanted} in the "
        "model"
      )
  fitted_leaves = [
    leaf if name in fresh else _cast(arrays[name], leaf.dtype, name)
    for name, leaf in leaves.items()
  ]
  return jax.tree.unflatten(treedef, fitted_leaves)


def _cast(array: np.ndarray, dtype: Any, name: str) -> np.ndarray:
  """Returns the array in the dtype of the model, with a warning if it had another one. Raises
  UserError if that dtype cannot hold a number."""
  if array.dtype == dtype:
    return array
  with np.errstate(over="ignore"):
    cast = array.astype(dtype)
  if not np.isfinite(np.asarray(cast, np.float64)).all():
    raise UserError(
      f"holds numbers beyond {dtype}, the type of the model's own", field=name
    )
  # A cast may round: the parameters may differ from the trained parameters in their last bits.
  writers.warn(f"saved parameter {name}: is {array.dtype}, cast to {dtype}")
  return cast


def result_of(path: str, params: Mapping[str, Any] | Params) -> dict[str, Any] | None:
  """Returns the content of the result.json beside a params.npz, if it holds the digest of these
  parameters; else None."""
  result = _beside(path)
  return result if result.get("params_sha256") == trees.sha256(params) else None


def _beside(path: str) -> dict[str, Any]:
  """Returns the content of the result.json in a file's folder; {} if it is missing."""
  file = pathlib.Path(path).parent / writers.RESULT
  result = writers.read_json(file) if file.exists() else {}
  return result if isinstance(result, dict) else {}


def first_params(path: str | None, params: Params) -> Params:
  """Returns the first parameters of a run: those of the file `path`, or `params` if it is None.

  If the file lacks the last layer, `head`, or has other shapes there (for other classes), that
  layer stays as in `params`.

  Raises:
    UserError: the file is no params.npz, or belongs to another model.
  """
  if path is None:
    return params
  with validate.about("pretrained", path):
    arrays = read(names.weights_file(path))
    leaves = trees.named_leaves(params)
    last = list(filter(in_head, leaves))
    shape = lambda name: arrays[name].shape if name in arrays else None
    same = all(shape(name) == np.shape(leaves[name]) for name in last)
    return in_place_of(params, arrays, () if same else tuple(last))


def in_head(name: str) -> bool:
  """Returns whether a parameter belongs to the last layer, by its name.

  >>> in_head("params/head/kernel"), in_head("params/heads/kernel")
  (True, False)
  """
  return f"/{HEAD}/" in f"/{name}"


def pretrained_on(path: str | None, data_name: str, train: data.Dataset) -> list[str]:
  """Returns the data sets that a file's parameters depend on, the most recent one first.

  Without a path, the list is empty. No result is bound to weights in safetensors, Flax and Orbax
  format. For such weights, the list begins with a name for unknown data.

  Args:
    path: path of the file of parameters, or None.
    data_name, train: name and training data of this run.

  Raises:
    UserError: a params.npz lacks its result, so its data are unknown; or the data of this run are
      among the data sets, by name, by file, or by the digest that the earlier run stored.
  """
  if path is None:
    return []
  from dpjax import weight_folders  # most runs begin from random numbers

  file = names.weights_file(path)
  # A result.json beside weights of another format may belong to another file.
  unbound = file.endswith(".safetensors") or weight_folders.is_checkpoint(file)
  with validate.about("pretrained", path):
    result = _beside(file) if unbound else result_of(file, _nest(read(file)))
  if result is None:
    raise UserError(
      "no result.json of these parameters lies beside it, so nothing says which data they know, "
      "and no epsilon would hold; give the params.npz in the folder of its run",
      field="pretrained",
      value=path,
    )
  dataset = result.get("dataset")
  known = [str(dataset)] if dataset else []
  known += map(str, result.get(PRETRAINED_ON) or [])
  if unbound or not dataset:
    known.insert(0, _UNNAMED)
  seen = bare(data_name) in map(bare, known)
  # The data are compared by digest as well as by name: the same records may have another name.
  remembered = workdir.recall(pathlib.Path(file).parent) or {}
  if seen or run_keys.data_of(remembered) == data.digest(train):
    raise UserError(
      f"was trained on {data_name!r}, the data of this run, whose epsilon would leave out what "
      "the first parameters know of them; must be of other data",
      field="pretrained",
      value=path,
    )
  return known


def bare(name: str) -> str:
  """Returns the name of a data set without its version, or the real path of its file.

  >>> bare("mnist:3.0.1"), bare("./a/../own.npz") == bare("own.npz")
  ('mnist', True)
  """
  if name.endswith(".npz") or takes_declaration(name):
    return os.path.realpath(os.path.expanduser(name))
  return name if names.is_path(name) else name.partition(":")[0]


def _nest(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Returns the tree of nested dicts in which the array "a/b" has the keys "a" and "b"."""
  split = {tuple(name.split("/")): leaf for name, leaf in arrays.items()}
  try:
    return traverse_util.unflatten_dict(split)
  except (TypeError, AttributeError, IndexError, ValueError) as error:
    raise UserError("one array has the name of a folder of others") from error


def assumption(path: str | None, known: list[str]) -> str:
  """Returns the assumption of a run whose first parameters were trained on users' data; "" for
  other runs.

  Nothing can check whether a record of this run is among the users' data: names may differ, and so
  may the records' order, number and preprocessing. So the guarantee is a claim, not a proof.

  >>> assumption("a/params.npz", ["random_process"]), assumption(None, [])
  ('', '')
  >>> assumption("a/params.npz", ["mnist"])
  'no record of this run is known to a/params.npz, which was trained on mnist'
  """
  if path is None or set(known) <= set(SYNTHETIC):
    return ""
  return (
    f"no record of this run is known to {path}, which was trained on {', '.join(known)}"
  )


def statement(path: str | None, known: list[str]) -> str:
  """Returns the text about the first parameters, which precedes a privacy statement; "" for a run
  that starts from random parameters.

  >>> print(statement("a/params.npz", ["random_process"]))
  First parameters. The run begins from a/params.npz, which was trained on synthetic images of
  random processes alone: on no record of anybody's.
  """
  if path is None:
    return ""
  if set(known) <= set(SYNTHETIC):
    what = "synthetic images of random processes alone: on no record of anybody's."
  else:
    what = (
      f"{', '.join(known)}. Nothing is promised to records that are in those data, too, or that "
      "they follow from; that there are none is assumed, not checked."
    )
  text = f"First parameters. The run begins from {path}, which was trained on {what}"
  return paragraph(text)

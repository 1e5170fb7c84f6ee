"""Checkpoints: everything the next step needs, in one file per step.

A checkpoint holds the noise key and a digest of the data. Anyone who reads a checkpoint can
subtract the noise from the updates, or confirm a guess of the data: keep it as secret as the data.

Client state (`client_states.Memory`) lies beside the steps, as rows that are only appended. A
step holds an index of the rows, so each save writes only rows that changed. The rows are as secret
as a client's data, and the index reveals which clients were drawn.

A step is an .npz archive, which gets its name once it is complete and durable; older steps are
removed later. So after a loss of power, the newest or the previous step is complete. The archive
has a checksum of each array, which shows accidents such as a flipped bit, and is no signature.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import files, trees
from dpjax.data import npz
from dpjax.experiments.run import writers
from dpjax.parallel import exchanges
from dpjax.parallel.exchanges import is_first, on_first
from dpjax.parallel.spanning import own_copy, place
from dpjax.types import ArrayTree
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.parallel.client_states import Memory

FOLDER = "checkpoints"
_SUFFIX = ".npz"
# Member of a step's archive beside the arrays of the state, which are numbered: JSON data.
_META = "meta"
_FORMS = "arrays"  # entry of the JSON data; see `_forms`


def newest(workdir: pathlib.Path) -> int | None:
  """Returns the largest step of a checkpoint of any phase; None: there is no checkpoint.

  It reads only names of files, so it works while another thread writes checkpoints.
  """
  # A run of one phase stores its steps in `checkpoints`; a run of several phases has a subfolder
  # for each phase.
  folder = workdir / FOLDER
  return max([*_steps(folder), *_steps(folder, "*/*")], default=None)


def remove(workdir: pathlib.Path) -> None:
  """Removes every checkpoint of every phase, and the client states beside them."""
  for path in (workdir / FOLDER).glob("*"):
    if path.is_dir():
      shutil.rmtree(path)
    elif path.suffix == _SUFFIX:
      path.unlink()


def _steps(directory: pathlib.Path, pattern: str = "*") -> list[int]:
  """Returns the steps in a folder, in order."""
  paths = directory.glob(f"{pattern}{_SUFFIX}")
  return sorted(int(path.stem) for path in paths if path.stem.isdigit())


def _to_arrays(tree: ArrayTree) -> Any:
  """Returns a tree of NumPy arrays: of keys their data, of what spans processes a whole copy."""
  return jax.tree.map(
    lambda leaf: np.asarray(jax.random.key_data(leaf) if trees.is_key(leaf) else leaf),
    own_copy(tree),
  )


def _place_like(array: np.ndarray, like: Any) -> Any:
  """Returns an array of `_to_arrays` as `like` is: on its devices, a key, an array of NumPy or a
  number."""
  if trees.is_key(like):
    data = _place_like(array, jax.random.key_data(like))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
  if isinstance(like, jax.Array):
    return place(array, like.sharding) if like.committed else jnp.asarray(array)
  return array if isinstance(like, np.ndarray) else array.item()


def _known(array: np.ndarray) -> np.ndarray:
  """Returns an array that a file of NumPy can hold: of other types, as bfloat16, the bytes."""
  is_known = array.dtype.isbuiltin == 1
  return array if is_known else array.view(f"V{array.dtype.itemsize}")


def _forms(arrays: Any) -> list[str]:
  """Returns place in the tree, type and shape of each array."""
  return [
    # A state may begin with arrays of NumPy, which JAX makes its own types of.
    f"{jax.dtypes.canonicalize_dtype(array.dtype)}{list(array.shape)} as {name[-60:]}"
    for name, array in zip(trees.leaf_names(arrays), jax.tree.leaves(arrays))
  ]


class Checkpoints:
  """Saves and restores (state, meta) under `<workdir>/checkpoints`.

  With several processes, all processes make the same calls. Only process 0 uses the files, and it
  sends what it reads to the other processes.

  Args:
    workdir: directory of the run.
    phase: subfolder of `checkpoints`, for a run of several phases; "" for one phase.
    memory: function (folder, first state) -> what stores the `ClientStates` of a state; None: there
      are none.

  >>> import tempfile
  >>> checkpoints = Checkpoints(pathlib.Path(tempfile.mkdtemp()))
  >>> checkpoints.latest is None
  True
  >>> checkpoints.save(3, {"key": jax.random.key(1)}, {"ledger": []})
  >>> state, meta = checkpoints.restore({"key": jax.random.key(0)})
  >>> bool(state["key"] == jax.random.key(1)), meta
  (True, {'ledger': []})
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    phase: str = "",
    *,
    memory: Callable[[pathlib.Path, Any], Memory] | None = None,
  ):
    self._new_memory = memory
    self._memory: Memory | None = None
    self.directory = pathlib.Path(workdir).resolve() / FOLDER / phase
    if is_first():
      writers.secret_folder(self.directory)
    steps = on_first(_steps, self.directory)
    # Step of the newest checkpoint; None: there is none.
    self.latest: int | None = steps[-1] if steps else None

  def begin(self, state: ArrayTree) -> Any:
    """Returns the first state of a run, with its `ClientStates` where the run will keep them: in
    memory or on disk."""
    if self._new_memory is None:
      return state
    self._memory = self._new_memory(self.directory, state)
    return self._memory.begun

  def save(self, step: int, state: ArrayTree, meta: dict[str, Any]) -> None:
    """Writes state (a tree of arrays and keys) and meta (JSON data), all or nothing.

    Raises:
      UserError: the processes do not hold the same state.
      OSError: the disk is full, or refuses the write; earlier checkpoints are unchanged.
    """
    if self._memory is None:
      self.begin(state)
    arrays = _to_arrays(state if self._memory is None else self._memory.save(state))
    if jax.process_count() > 1:
      # States are compared before the write: if processes have diverged, only the state of process
      # 0 would be saved.
      exchanges.same(state=trees.sha256(arrays))
    if step != self.latest:
      on_first(self._write, step, arrays, meta)
      # Old rows are removed only after the step has its name. If the process is killed before, the
      # two older steps still need them.
      if self._memory is not None:
        self._memory.commit()
    self.latest = step

  def _path(self, step: int | str | None) -> pathlib.Path:
    return self.directory / f"{step}{_SUFFIX}"

  def _write(self, step: int, arrays: Any, meta: dict[str, Any]) -> None:
    meta = {**meta, "step": step, _FORMS: _forms(arrays)}
    held: dict[str, Any] = {
      str(index): _known(leaf) for index, leaf in enumerate(jax.tree.leaves(arrays))
    }
    held[_META] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    for left in files.half_written(self._path("*")):  # by an interrupted save
      left.unlink()
    files.replace_file(self._path(step), lambda file: np.savez(file, **held), secret=True)
    for old in _steps(self.directory)[: -files.KEPT]:
      self._path(old).unlink()

  def restore(self, like: ArrayTree) -> tuple[Any, dict[str, Any]]:
    """Returns (state, meta) of the newest checkpoint, where state has the structure of `like`.

    Raises:
      UserError: the checkpoint cannot be read, has another structure, or is not what was saved.
        Nothing is deleted.
    """
    if self._memory is None:
      self.begin(like)
    unread = like if self._memory is None else self._memory.unread(like)
    arrays = _to_arrays(unread)
    read = []
    meta = on_first(self._read, arrays, read)
    # The other processes have no files, so they receive the arrays that process 0 read.
    arrays = exchanges.arrays_from_first(read[0] if read else arrays)
    state = jax.tree.map(_place_like, arrays, unread)
    return state if self._memory is None else self._memory.restore(state, like), meta

  def _read(self, like: Any, into: list[Any]) -> dict[str, Any]:
    """Returns the meta data, and puts the arrays into the list `into`."""
    try:
      held = npz.arrays_of(self._path(self.latest))
      meta = dict(json.loads(held.pop(_META).tobytes()))
      step, forms = meta.pop("step"), list(meta.pop(_FORMS))
      arrays = [held[str(index)] for index in range(len(forms))]
    except UserError as error:
      raise self._refusal(f"it {error}") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
      raise self._refusal(f"its meta data are damaged: {type(error).__name__}") from error
    if step != self.latest:
      raise self._refusal("it is that of another step")
    for there, now in itertools.zip_longest(forms, _forms(like), fillvalue="nothing more"):
      if there != now:
        raise UserError(
          f"its state has {there!s:.160}, where this run has {now}; go on with the model, the "
          "optimizer and the flags of JAX with which it was begun, or choose another directory, "
          "nothing was changed",
          field="checkpoint",
          value=str(self._path(step))[-100:],
        )
    leaves, treedef = jax.tree.flatten(like)
    restored = []
    for form, array, leaf in zip(forms, arrays, leaves):
      if array.shape != leaf.shape:
        raise self._refusal(f"it does not hold {form}")
      is_known = _known(leaf) is leaf
      cast = array.astype(leaf.dtype, copy=False) if is_known else array.view(leaf.dtype)
      restored.append(cast)
    into.append(jax.tree.unflatten(treedef, restored))
    return meta

  def _refusal(self, reason: str) -> UserError:
    # A long path is cut at its beginning, because its end identifies the checkpoint.
    return UserError(
      f"cannot be read ({reason:.160}); nothing was changed, remove this file to go on from an "
      "earlier step",
      field="checkpoint",
      value=str(self._path(self.latest))[-100:],
    )

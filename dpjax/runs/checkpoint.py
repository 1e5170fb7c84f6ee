"""Checkpoints: everything the next step needs, in one atomic directory per step.

A checkpoint holds the noise key and a digest of the data. Whoever reads it can subtract the
noise from the updates, or confirm a guess of the data: keep it as secret as the data.

What clients keep (`ClientStates`) lies beside the steps in `clients/`, rows that are only ever
appended; a step holds an index of them, so what it writes is what changed since the one
before. The rows are a client's own, and which clients have one tells who was drawn.
"""

from __future__ import annotations

import errno
import logging
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dpjax import processes, trees
from dpjax.federated import row_journal
from dpjax.federated.client_states import ClientStates, Keeper
from dpjax.runs import writers
from dpjax.types import ArrayTree
from dpjax.validate import UserError

FOLDER = "checkpoints"
_KEEP = row_journal.KEPT  # the newest, and one before it
_ROWS = "clients"
_ALONE = "state"


def to_arrays(tree: ArrayTree) -> Any:
  """Keys as their data. One process of several writes copies of its own."""
  arrays = jax.tree.map(
    lambda leaf: jax.random.key_data(leaf) if trees.is_key(leaf) else leaf,
    processes.own_copy(tree),
  )
  return jax.device_get(arrays) if jax.process_count() > 1 else arrays


def to_keys(arrays: ArrayTree, like: ArrayTree) -> Any:
  """The inverse of `to_arrays`; `like` tells what was a key."""

  def wrap(array, leaf):
    if not trees.is_key(leaf):
      return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))

  return jax.tree.map(wrap, arrays, like)


def _states(tree: ArrayTree) -> list[ClientStates]:
  return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, ClientStates)]


def _with_states(tree: ArrayTree, others: Sequence[Any], like: ArrayTree) -> Any:
  """The tree with these, in order, where `like` has `ClientStates`."""
  left = list(others)
  place = lambda old, leaf: left.pop(0) if isinstance(leaf, ClientStates) else old
  return jax.tree.map(place, tree, like)


def _filled(arrays: ArrayTree) -> Any:
  """One zero where an array is empty, which the library cannot save."""
  return jax.tree.map(lambda leaf: leaf if np.size(leaf) else np.zeros(1), arrays)


def _emptied(arrays: ArrayTree, like: ArrayTree) -> Any:
  """The inverse of `_filled`."""
  return jax.tree.map(lambda leaf, old: leaf if np.size(old) else old, arrays, like)


def _tree(arrays: ArrayTree) -> Any:
  """As it is; an array by itself in a dict, for the library saves containers alone."""
  alone = jax.tree_util.treedef_is_leaf(jax.tree.structure(arrays))
  return {_ALONE: arrays} if alone else arrays


def newest(workdir: pathlib.Path) -> int | None:
  """The newest complete checkpoint under `workdir`, of whichever phase, as its files have it
  at this moment.

  For whoever cannot wait for a `Checkpoints` that another thread is writing with.
  """
  found = (workdir / FOLDER).glob("*"), (workdir / FOLDER).glob("*/*")
  names = [path.name for paths in found for path in paths if path.is_dir()]
  return max((int(name) for name in names if name.isdigit()), default=None)


def remove(workdir: pathlib.Path) -> None:
  """Takes every checkpoint of every phase away."""
  for path in (workdir / FOLDER).glob("*"):
    if path.is_dir():
      shutil.rmtree(path)


class Checkpoints:
  """Saves and restores (state, meta) under `<workdir>/checkpoints`.

  Of several processes all make the same calls; process 0 alone looks at the files, and what
  it reads goes to all.

  Args:
    workdir: of the run.
    phase: folder in it, for a run of several trainings; "" for one training.
    rows_on_disk: `ClientStates` lie there also between checkpoints.

  >>> import tempfile
  >>> checkpoints = Checkpoints(pathlib.Path(tempfile.mkdtemp()))
  >>> checkpoints.latest_step() is None
  True
  >>> checkpoints.save(3, {"key": jax.random.key(1)}, {"ledger": []})
  >>> state, meta = checkpoints.restore({"key": jax.random.key(0)})
  >>> bool(state["key"] == jax.random.key(1)), meta
  (True, {'ledger': []})
  """

  def __init__(self, workdir: pathlib.Path, phase: str = "", *, rows_on_disk: bool = False):
    self._rows_on_disk, self._keepers = rows_on_disk, None
    self.directory = pathlib.Path(workdir).resolve() / FOLDER / phase
    self._manager: Any = _manager(self.directory) if processes.is_first() else None
    self._latest = processes.on_first(lambda: self._manager.latest_step())

  def latest_step(self) -> int | None:
    """The newest complete checkpoint, or None. A save that was cut off does not count."""
    return self._latest

  def begun(self, state: ArrayTree) -> Any:
    """The state that a run begins with, its `ClientStates` where they are to lie."""
    folder = lambda i: self.directory / f"{_ROWS}{i or ''}"
    self._keepers = [
      Keeper(folder(i), states, on_disk=self._rows_on_disk)
      for i, states in enumerate(_states(state))
    ]
    return _with_states(state, [keeper.begun for keeper in self._keepers], state)

  def save(self, step: int, state: ArrayTree, meta: dict[str, Any]) -> None:
    """Writes state (a tree of arrays and keys) and meta (JSON data), all or nothing.

    Raises:
      UserError: the processes do not hold the same state.
      OSError: the disk is full; earlier checkpoints are as they were.
    """
    if self._keepers is None:
      self.begun(state)
    pairs = list(zip(self._keepers or (), _states(state)))
    rows = [keeper.saved(states) for keeper, states in pairs]
    arrays = to_arrays(_with_states(state, rows, state))
    if jax.process_count() > 1:
      processes.same(state=trees.sha256(arrays))
    if step != self._latest:
      processes.on_first(lambda: self._write(step, arrays, meta))
      for keeper, _ in pairs:
        keeper.committed()
    self._latest = step

  def _write(self, step: int, arrays: Any, meta: dict[str, Any]) -> None:
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(_tree(_filled(arrays))), meta=ocp.args.JsonSave(meta)
    )
    try:
      self._manager.save(step, args=args, force=True)
    except Exception as error:  # of many types, and told in many lines
      if not writers.is_full(error):
        raise
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None

  def restore(self, like: ArrayTree) -> tuple[Any, dict[str, Any]]:
    """The newest checkpoint, with the structure, shapes and dtypes of `like`.

    Raises:
      UserError: it cannot be read, or is of another structure. Nothing is deleted.
    """
    if self._keepers is None:
      self.begun(like)
    empty = [row_journal.no_rows(states.num_clients) for states in _states(like)]
    like_arrays, read = to_arrays(_with_states(like, empty, like)), []
    meta = processes.on_first(lambda: self._read(like_arrays, read))
    arrays = read[0] if read else like_arrays
    if jax.process_count() > 1:
      arrays = processes.arrays_from_first(to_arrays(arrays))
      arrays = jax.tree.map(processes.placed_like, arrays, like)
    state = to_keys(arrays, like)
    indexes = [
      index
      for index, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(like))
      if isinstance(leaf, ClientStates)
    ]
    pairs = zip(self._keepers or (), indexes)
    rows = [keeper.restored(np.asarray(index)) for keeper, index in pairs]
    return _with_states(state, rows, like), meta

  def _read(self, like: Any, into: list[Any]) -> dict[str, Any]:
    """The meta data; the arrays go `into` a list."""
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _tree(_filled(like)))
    args = ocp.args.Composite(
      state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore()
    )
    try:
      restored = self._manager.restore(self._latest, args=args)
    except Exception as error:  # orbax and tensorstore raise many types for a broken file
      reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
      raise UserError(
        f"checkpoint={self.directory / str(self._latest)}: cannot be read ({reason}); nothing "
        "was changed, remove this directory to go on from an earlier step"
      ) from error
    found = restored.state if _tree(like) is like else restored.state[_ALONE]
    into.append(_emptied(found, like))
    return restored.meta

  def close(self) -> None:
    """Waits for writes and releases the directory."""
    if self._manager is not None:
      self._manager.close()


def _manager(directory: pathlib.Path) -> ocp.CheckpointManager:
  logging.getLogger("absl").setLevel(logging.ERROR)  # orbax logs every save at INFO
  writers.secret_folder(directory)  # orbax makes none where it is alone
  alone = ocp.options.MultiprocessingOptions(
    primary_host=jax.process_index(), active_processes={jax.process_index()}
  )
  options = ocp.CheckpointManagerOptions(
    max_to_keep=_KEEP,
    enable_async_checkpointing=False,
    create=False,
    multiprocessing_options=alone,
  )
  return ocp.CheckpointManager(directory, options=options)

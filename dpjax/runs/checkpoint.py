"""Checkpoints: everything the next step needs, in one atomic directory per step.

A checkpoint holds the noise key and a digest of the data. Whoever reads it can subtract the
noise from the updates, or confirm a guess of the data: keep it as secret as the data.
"""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from dpjax.types import ArrayTree
from dpjax import trees
from dpjax.validate import UserError

_KEEP = 2  # the newest, and one before it


def to_arrays(tree: ArrayTree) -> Any:
  """Keys as their data. One process of several writes copies of its own."""
  arrays = jax.tree.map(
    lambda leaf: jax.random.key_data(leaf) if trees.is_key(leaf) else leaf, tree
  )
  return jax.device_get(arrays) if jax.process_count() > 1 else arrays


def to_keys(arrays: ArrayTree, like: ArrayTree) -> Any:
  """The inverse of `to_arrays`; `like` tells what was a key."""

  def wrap(array, leaf):
    if not trees.is_key(leaf):
      return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))

  return jax.tree.map(wrap, arrays, like)


def newest(workdir: pathlib.Path) -> int | None:
  """The newest complete checkpoint under `workdir`, as its files have it at this moment.

  For whoever cannot wait for a `Checkpoints` that another thread is writing with.
  """
  names = [path.name for path in (workdir / "checkpoints").glob("*")]
  return max((int(name) for name in names if name.isdigit()), default=None)


def meta_of(workdir: pathlib.Path) -> dict[str, Any] | None:
  """The meta data of the newest checkpoint under `workdir`; None where there is none.

  Raises:
    UserError: it cannot be read.
  """
  if newest(workdir) is None:
    return None
  checkpoints = Checkpoints(workdir)
  try:
    return checkpoints.meta() if checkpoints.latest_step() is not None else None
  finally:
    checkpoints.close()


class Checkpoints:
  """Saves and restores (state, meta) under `<workdir>/checkpoints`.

  Args:
    workdir: of the run.

  >>> import tempfile
  >>> checkpoints = Checkpoints(pathlib.Path(tempfile.mkdtemp()))
  >>> checkpoints.latest_step() is None
  True
  >>> checkpoints.save(3, {"key": jax.random.key(1)}, {"ledger": []})
  >>> state, meta = checkpoints.restore({"key": jax.random.key(0)})
  >>> bool(state["key"] == jax.random.key(1)), meta
  (True, {'ledger': []})
  """

  def __init__(self, workdir: pathlib.Path):
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax logs every save at INFO
    self.directory = pathlib.Path(workdir).resolve() / "checkpoints"
    self.directory.mkdir(parents=True, exist_ok=True)  # orbax will not where it is alone
    alone = ocp.options.MultiprocessingOptions(
      primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    options = ocp.CheckpointManagerOptions(
      max_to_keep=_KEEP,
      enable_async_checkpointing=False,
      create=False,
      multiprocessing_options=alone,
    )
    self._manager = ocp.CheckpointManager(self.directory, options=options)

  def latest_step(self) -> int | None:
    """The newest complete checkpoint, or None. A save that was cut off does not count."""
    return self._manager.latest_step()

  def save(self, step: int, state: ArrayTree, meta: dict[str, Any]) -> None:
    """Writes state (a tree of arrays and keys) and meta (JSON data), all or nothing."""
    if step == self.latest_step():
      return
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(to_arrays(state)), meta=ocp.args.JsonSave(meta)
    )
    self._manager.save(step, args=args, force=True)

  def restore(self, like: ArrayTree) -> tuple[Any, dict[str, Any]]:
    """The newest checkpoint, with the structure, shapes and dtypes of `like`.

    Raises:
      UserError: it cannot be read, or is of another structure. Nothing is deleted.
    """
    step = self.latest_step()
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, to_arrays(like))
    args = ocp.args.Composite(
      state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore()
    )
    try:
      restored: Any = self._manager.restore(step, args=args)
    except Exception as error:  # orbax and tensorstore raise many types for a broken file
      raise self._unreadable(step, error) from error
    return to_keys(restored.state, like), restored.meta

  def meta(self) -> dict[str, Any]:
    """The meta data of the newest checkpoint alone; UserError as for `restore`."""
    step = self.latest_step()
    try:
      args = ocp.args.Composite(meta=ocp.args.JsonRestore())
      return self._manager.restore(step, args=args).meta  # type: ignore[union-attr]
    except Exception as error:  # as in restore
      raise self._unreadable(step, error) from error

  def _unreadable(self, step: int | None, error: Exception) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
    return UserError(
      f"checkpoint={self.directory / str(step)}: cannot be read ({reason}); nothing was "
      "changed, remove this directory to go on from an earlier step"
    )

  def close(self) -> None:
    """Waits for writes and releases the directory."""
    self._manager.close()

"""Checkpoints: everything the next step needs, in one atomic directory per step.

A checkpoint holds the noise key and a digest of the data. Anyone who reads a checkpoint can
subtract the noise from the updates, or confirm a guess of the data: keep it as secret as the data.

Client state (`client_states.Memory`) lies beside the steps, as rows that are only appended. A
step holds an index of the rows, so each save writes only rows that changed. The rows are as secret
as a client's data, and the index reveals which clients were drawn.

A step is written to another folder, made durable, and only then renamed to its number; older steps
are removed later. So after a loss of power, the newest or the previous step is complete. A digest
of each file shows accidents, such as a flipped bit. Digests are no signature. Every file's digest
is checked before its content is used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import shutil
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from dpjax import files, trees
from dpjax.experiments.run import writers
from dpjax.parallel import exchanges
from dpjax.parallel.exchanges import is_first, on_first
from dpjax.parallel.spanning import own_copy, place_like
from dpjax.types import ArrayTree
from dpjax.validate import UserError, first_line

# Orbax is imported by what saves and restores: a plan does neither.
if TYPE_CHECKING:
  import orbax.checkpoint as ocp

  from dpjax.parallel.client_states import Memory

FOLDER = "checkpoints"
# Entry of the dict that Orbax saves: it takes no single array.
_STATE = "state"
# Entry of the meta data: type and shape of each array of the state.
_FORMS = "arrays"
# Name of the folder in which a step is written. A complete step is moved out of it.
_NEW = ".new"
# File in a step's folder that holds the digests of the other files.
_DIGESTS = "sha256.json"


def to_arrays(tree: ArrayTree) -> Any:
  """Returns a tree as Orbax can save it: keys as their data, one zero in place of each empty array.
  With several processes, each process gets a copy in its host memory."""

  def plain(leaf):
    if trees.is_key(leaf):
      return jax.random.key_data(leaf)
    return leaf if np.size(leaf) else np.zeros(1)

  arrays = jax.tree.map(plain, own_copy(tree))
  return jax.device_get(arrays) if jax.process_count() > 1 else arrays


def to_keys(arrays: ArrayTree, like: ArrayTree) -> Any:
  """Inverts `to_arrays`. The tree `like` shows which leaves were keys or empty."""

  def wrap(array, leaf):
    if not trees.is_key(leaf):
      return array if np.size(leaf) else leaf
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))

  return jax.tree.map(wrap, arrays, like)


def _forms(arrays: Any) -> dict[str, str]:
  """Returns type and shape of each array, by its place in the tree."""

  def form(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    # A state may begin with arrays of NumPy, which JAX makes its own types of.
    return f"{jax.dtypes.canonicalize_dtype(dtype)}{list(np.shape(leaf))}"

  return {name: form(leaf) for name, leaf in trees.named_leaves(arrays).items()}


def newest(workdir: pathlib.Path) -> int | None:
  """Returns the largest step of a complete checkpoint of any phase; None: there is no checkpoint.

  It reads only names of folders, so it works while another thread writes checkpoints.
  """
  # A run of one phase stores its steps in `checkpoints`; a run of several phases has a subfolder
  # for each phase. A save that is not complete lies in a hidden folder.
  steps = _numbers(workdir / FOLDER)
  for folder in (workdir / FOLDER).glob("[!.]*"):
    steps += _numbers(folder)
  return max(steps, default=None)


def remove(workdir: pathlib.Path) -> None:
  """Removes every checkpoint of every phase."""
  for path in (workdir / FOLDER).glob("*"):
    if path.is_dir():
      shutil.rmtree(path)


def half_written(workdir: pathlib.Path) -> set[pathlib.Path]:
  """Returns the files and folders of saves that did not end; the next save removes them."""
  inside = (workdir / FOLDER).rglob("*")
  return {path for path in inside if _NEW in path.relative_to(workdir).parts}


def clear(workdir: pathlib.Path) -> None:
  """Removes what is in the folder of checkpoints, and leaves the folder.

  After a refused write, threads of Orbax go on writing for a moment, and make their folders anew.
  These must lie where only the owner may enter.
  """
  for path in (workdir / FOLDER).glob("*"):
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path, ignore_errors=True)
    else:
      # A file system that refuses writes may refuse deletions, too.
      with contextlib.suppress(OSError):
        path.unlink()


def _numbers(directory: pathlib.Path) -> list[int]:
  """Returns the steps in a folder, in order."""
  paths = directory.glob("*")
  return sorted([int(path.name) for path in paths if path.name.isdigit() and path.is_dir()])


def _file_digests(step: pathlib.Path) -> dict[str, str]:
  """Returns the SHA-256 of each file in a step's folder, by relative path, without sha256.json."""
  digests = {}
  for path in sorted(step.rglob("*")):
    name = path.relative_to(step).as_posix()
    if path.is_file() and name != _DIGESTS:
      digests[name] = files.sha256(path)
  return digests


def write_digests(step: pathlib.Path) -> None:
  """Writes the digests of a step's files to sha256.json in the step's folder."""
  text = json.dumps(_file_digests(step), indent=1)
  (step / _DIGESTS).write_text(text, encoding="utf-8")


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
    self._orbax: Any = _orbax(self.directory) if is_first() else None
    steps = on_first(_numbers, self.directory)
    # Step of the newest complete checkpoint; None: there is none.
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
      Exception: the disk is full, or refuses the write (`writers.refusal`); earlier checkpoints are
        unchanged.
    """
    if self._memory is None:
      self.begin(state)
    arrays = to_arrays(state if self._memory is None else self._memory.save(state))
    if jax.process_count() > 1:
      # States are compared before the write: if processes have diverged, only the state of process
      # 0 would be saved.
      exchanges.same(state=trees.sha256(arrays))
    if step != self.latest:
      on_first(self._write, step, arrays, meta)
      # Old rows are removed only after the rename. If the process is killed before the rename, the
      # two older steps still need them.
      if self._memory is not None:
        self._memory.commit()
    self.latest = step

  def _write(self, step: int, arrays: Any, meta: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    held = {**meta, "step": step, _FORMS: _forms(arrays)}
    args = ocp.args.Composite(
      state=ocp.args.StandardSave({_STATE: arrays}), meta=ocp.args.JsonSave(held)
    )
    new = self.directory / _NEW
    # An interrupted save may have left this folder. It has no number, so no step is lost.
    shutil.rmtree(new, ignore_errors=True)
    writers.secret_folder(new)
    try:
      self._orbax.save(new / str(step), args=args)
    except Exception as error:
      code = writers.refusal(error)
      if code is None:
        raise
      # Orbax says the reason last, in many words: other processes would get the first alone.
      raise OSError(code, os.strerror(code), str(self.directory / str(step))) from error
    write_digests(new / str(step))
    # The step is durable, for its owner alone, before it gets its name, and has its name before
    # older steps are removed.
    for path in (*(new / str(step)).rglob("*"), new / str(step)):
      files.sync(path, 0o700 if path.is_dir() else 0o600)
    os.rename(new / str(step), self.directory / str(step))
    files.sync(self.directory)
    new.rmdir()
    for old in _numbers(self.directory)[: -files.KEPT]:
      shutil.rmtree(self.directory / str(old))

  def restore(self, like: ArrayTree) -> tuple[Any, dict[str, Any]]:
    """Returns (state, meta) of the newest checkpoint, where state has the structure of `like`.

    Raises:
      UserError: the checkpoint cannot be read, has another structure, or is not what was saved.
        Nothing is deleted.
    """
    if self._memory is None:
      self.begin(like)
    like_arrays = to_arrays(like if self._memory is None else self._memory.unread(like))
    read = []
    meta = on_first(self._read, like_arrays, read)
    arrays = read[0] if read else like_arrays
    if jax.process_count() > 1:
      # The other processes have no files, so they receive the arrays that process 0 read.
      arrays = exchanges.arrays_from_first(to_arrays(arrays))
      arrays = jax.tree.map(place_like, arrays, like)
    state = to_keys(arrays, like)
    return state if self._memory is None else self._memory.restore(state, like), meta

  def _read(self, like: Any, into: list[Any]) -> dict[str, Any]:
    """Returns the meta data, and puts the arrays into the list `into`."""
    import orbax.checkpoint as ocp

    step = self.directory / str(self.latest)
    # Files are checked first: for a broken file, Orbax leaves tasks behind that raise errors much
    # later.
    self._check_files(step)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, {_STATE: like})
    try:
      read = self._orbax.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
      # Orbax would cast a state of other types, and leave tasks behind at one of other shapes.
      meta = self._check_meta(read.meta, _forms(like))
      restored = self._orbax.restore(
        step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target))
      )
    except UserError:
      raise
    # Orbax and tensorstore raise many types of errors for a broken file.
    except Exception as error:
      raise self._unreadable(first_line(error)) from error
    into.append(restored.state[_STATE])
    return meta

  def _unreadable(self, reason: str) -> UserError:
    # A long path is cut at its beginning, because its end identifies the checkpoint.
    where = str(self.directory / str(self.latest))[-100:]
    return UserError(
      f"cannot be read ({reason}); nothing was changed, remove this directory "
      "to go on from an earlier step",
      field="checkpoint",
      value=where,
    )

  def _check_files(self, step: pathlib.Path) -> None:
    """Raises UserError if a file of the step is missing, new or changed since it was saved."""
    try:
      saved = writers.read_json(step / _DIGESTS)
      now = _file_digests(step)
    except (UserError, OSError) as error:
      raise self._unreadable(str(error)[-120:]) from None
    if not isinstance(saved, dict):
      raise self._unreadable(f"{_DIGESTS} is no mapping")
    for name in sorted({*saved, *now}):
      if saved.get(name) != now.get(name):
        raise self._unreadable(f"its {name.split('/')[0]} is not what was saved")

  def _check_meta(self, meta: Any, forms: dict[str, str]) -> dict[str, Any]:
    """Returns the meta data that `save` got. Raises UserError if they are no mapping, or belong to
    another step, or to a state of other arrays than these `forms`."""
    if not isinstance(meta, dict):
      raise self._unreadable("its meta data are no mapping")
    held = dict(meta)
    if held.pop("step", None) != self.latest:
      raise self._unreadable("it is that of another step")
    there = held.pop(_FORMS, forms)
    for name in sorted({*there, *forms}):
      if there.get(name) != forms.get(name):
        now = forms.get(name, "nothing")
        raise UserError(
          f"its state has {there.get(name, 'nothing')} as {name[-60:]}, where this run has {now}; "
          "go on with the model, the optimizer and the flags of JAX with which it was begun, or "
          "choose another directory, nothing was changed",
          field="checkpoint",
          value=str(self.directory / str(self.latest))[-100:],
        )
    return held

  def close(self) -> None:
    """Closes Orbax's reader and writer, if this process has one."""
    if self._orbax is not None:
      self._orbax.close()


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
  trace = record.exc_info[2] if isinstance(record.exc_info, tuple) else None
  sources = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
  return not any(
    "orbax" in text for text in (record.pathname, record.getMessage(), *sources)
  )


def _orbax(directory: pathlib.Path) -> ocp.Checkpointer:
  """Returns Orbax's reader and writer of one step.

  This module deletes older steps itself. `ocp.CheckpointManager` would delete them before the
  newest step survives a loss of power."""
  import orbax.checkpoint as ocp

  # Orbax logs every save at level INFO, which would fill the terminal.
  logging.getLogger("absl").setLevel(logging.ERROR)
  # After one failed write, many tasks of Orbax fail. Each task logs thirty lines through absl's
  # logger, and asyncio does the same, sometimes at exit. These lines are dropped, because the
  # caller gets the error itself.
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_not_of_orbax)
  writers.secret_folder(directory)
  # Only process 0 writes. By default Orbax would wait for the other processes, which make no call.
  alone = ocp.options.MultiprocessingOptions(
    primary_host=jax.process_index(), active_processes={jax.process_index()}
  )
  return ocp.Checkpointer(
    ocp.CompositeCheckpointHandler(
      composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
      state=ocp.StandardCheckpointHandler(multiprocessing_options=alone),
      meta=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    ),
    multiprocessing_options=alone,
  )

"""One run on several processes: process 0 holds the files, all hold the state.

The same objects as in a run of one process; in process 0 they work, in the others they do
nothing, and what is read from a file goes from process 0 to all. With one process nothing is
exchanged and nothing differs.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.federated import processes
from dpjax.runs import checkpoint, writers


class Checkpoints:
  """`checkpoint.Checkpoints` of process 0. All processes must make the same calls.

  Args:
    workdir: of the run; only process 0 looks at it.
    phase: as there.
  """

  def __init__(self, workdir: pathlib.Path, phase: str = ""):
    first = processes.is_first()
    self._files = checkpoint.Checkpoints(workdir, phase) if first else None
    self._latest = processes.on_first(lambda: self._held().latest_step())

  def _held(self) -> checkpoint.Checkpoints:
    assert self._files is not None  # only process 0 asks
    return self._files

  def latest_step(self) -> int | None:
    """The newest complete checkpoint, or None."""
    return self._latest

  def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
    """Process 0 writes, once all have shown that they hold the same state.

    Raises:
      UserError: they do not.
    """
    if jax.process_count() > 1:
      processes.same(state=trees.sha256(checkpoint.to_arrays(state)))
    processes.on_first(lambda: self._held().save(step, state, meta))
    self._latest = step

  def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
    """What process 0 reads, in all processes; UserError in all where it cannot."""
    if jax.process_count() == 1:
      return self._held().restore(like)
    read: list[Any] = []

    def meta() -> dict[str, Any]:
      state, found = self._held().restore(like)
      read.append(state)
      return found

    found = processes.on_first(meta)
    arrays = processes.arrays_from_first(checkpoint.to_arrays(read[0] if read else like))
    return checkpoint.to_keys(jax.tree.map(jnp.asarray, arrays), like), found

  def close(self) -> None:
    """Waits for writes and releases the directory."""
    if self._files is not None:
      self._files.close()


class _Silent:
  """Stands for a writer or a progress bar where nothing is to be said."""

  def write(self, step: int, values: dict[str, Any]) -> None:
    """Nothing."""

  def update(self, n: int = 1, **postfix: Any) -> None:
    """Nothing."""

  def close(self) -> None:
    """Nothing."""


def metrics(workdir: pathlib.Path, resume_step: int | None) -> Any:
  """A `MetricsWriter` in process 0."""
  if not processes.is_first():
    return _Silent()
  return writers.MetricsWriter(workdir, resume_step=resume_step)


def progress(total: int, initial: int, desc: str) -> Any:
  """`writers.progress` in process 0."""
  if not processes.is_first():
    return _Silent()
  return writers.progress(total, initial, desc)

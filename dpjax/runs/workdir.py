"""The folder of one run: whose it is, what it remembers, who works in it."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from dpjax.runs import checkpoint, fields, writers
from dpjax.validate import UserError

CONFIG = "config.json"
PARAMS = "params.npz"


def _differences(old: Any, new: Any, prefix: str = "config") -> Iterator[str]:
  if isinstance(old, dict) and isinstance(new, dict):
    for name in sorted({*old, *new}):
      yield from _differences(old.get(name), new.get(name), f"{prefix}.{name}")
  elif old != new:
    yield f"{prefix}: {old!r} there, {new!r} now"


def claim(workdir: pathlib.Path, config: Any) -> None:
  """Makes the directory this run's own, or raises if it holds another config's run."""
  wanted = writers.plain(fields.to_dict(config))
  path = workdir / CONFIG
  if path.exists():
    differences = list(_differences(writers.read_json(path), wanted))
    if differences:
      raise UserError(
        f"workdir={workdir}: holds a run of another config ({differences[0]}); choose "
        "another directory, nothing was changed"
      )
  elif workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
    raise UserError(f"workdir={workdir}: must be a new, an empty or a run's own directory")
  else:
    writers.write_json(path, wanted)


@contextmanager
def given_back(workdir: pathlib.Path, *, fresh: bool) -> Iterator[None]:
  """Empties a folder that a run has claimed if it is refused before its first step.

  The setting that is mended makes another config, which the folder would otherwise refuse.

  Args:
    fresh: the folder was claimed by this very process, and the run is no release: the keys
      of a release are never drawn twice for one folder.
  """
  try:
    yield
  except UserError:
    if fresh and not checkpoint.newest(workdir) and not writers.read_metrics(workdir):
      for name in (checkpoint.FOLDER, writers.EVENTS):
        shutil.rmtree(workdir / name, ignore_errors=True)
      for name in (writers.METRICS, writers.LOCK, CONFIG):
        (workdir / name).unlink(missing_ok=True)
    raise


def known(workdir: pathlib.Path, config: Any) -> dict[str, Any] | None:
  """What the run of this very config remembers; None: it has not begun.

  Raises:
    UserError: the directory holds another config's run.
  """
  if not ((workdir / writers.RESULT).exists() or (workdir / CONFIG).exists()):
    return None
  claim(workdir, config)  # before its checkpoints are looked into
  return remembered(workdir)


def _memory(workdir: pathlib.Path) -> pathlib.Path:
  return workdir / checkpoint.FOLDER / "run.json"


def remembered(workdir: pathlib.Path) -> dict[str, Any] | None:
  """What `remember` wrote; {} for a run that has begun and does not remember, None for one
  that has not begun."""
  if _memory(workdir).exists():
    return writers.read_json(_memory(workdir)) or {}
  begun = checkpoint.newest(workdir) is not None or (workdir / writers.RESULT).exists()
  # Rows were released with keys that are gone: a release must not draw others for them.
  return {} if begun or writers.read_metrics(workdir) else None


def remember(
  workdir: pathlib.Path, meta: dict[str, Any], *, before: dict[str, Any] | None
) -> None:
  """Keeps what a run must know when it goes on (`streams.to_meta`), as secret as the data.

  Raises:
    UserError: the folder does not remember `before` (None: nothing) any more: since it was
      looked into, another process has drawn keys there.
  """
  if remembered(workdir) != before:
    raise UserError(
      f"workdir={workdir}: another process has just been at work there; run the same "
      "command again"
    )
  if meta != before:
    writers.write_json(_memory(workdir), meta)


def save_params(path: pathlib.Path, params: Any) -> None:
  """The released model alone, without the noise key: one array per path."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  arrays: dict[str, Any] = {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
    for path, leaf in leaves
  }
  np.savez(path, **arrays)

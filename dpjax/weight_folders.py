"""Folders of weights that Flax or Orbax saved: the newest checkpoint, and the files in it."""

from __future__ import annotations

import hashlib
import json
import os
import re

from dpjax.validate import UserError

# File in which Orbax lists the arrays of a folder.
_ORBAX_TREE = "_METADATA"
# Usual names of the weights' folder within a step of Orbax. The first that exists is read.
_ORBAX_ITEMS = ("params", "default", "state")
_STEP = re.compile(r"(?:\w*_)?(\d+)", re.ASCII)
_MOST_FILES = 100_000


def newest(path: str, *, is_step: bool = False) -> str | None:
  """Returns the path of the newest checkpoint in a folder; None if there is none.

  It is a file `checkpoint_N` of Flax, the folder of the weights in a numbered step of Orbax, or
  the folder itself if Orbax saved directly into it.

  Args:
    is_step: whether the folder is one step, so that no steps are looked for inside it.
  """
  try:
    entries = set(os.listdir(path))
  except OSError:
    return None
  if _ORBAX_TREE in entries:
    return path
  # In a step of Orbax's CheckpointManager each tree lies in a folder that the user named.
  trees = [
    name for name in sorted(entries)
    if os.path.isfile(os.path.join(path, name, _ORBAX_TREE)) and not _STEP.fullmatch(name)
  ]  # fmt: skip
  chosen = next((name for name in _ORBAX_ITEMS if name in trees), None)
  if chosen or len(trees) == 1:
    return os.path.join(path, chosen or trees[0])
  steps = {name: int(match[1]) for name in entries if (match := _STEP.fullmatch(name))}
  if not steps or is_step:
    return None
  last = os.path.join(path, max(steps, key=lambda name: (steps[name], name)))
  return newest(last, is_step=True) if os.path.isdir(last) else last


def is_checkpoint(file: str) -> bool:
  """Returns whether a path from `dpjax.names.weights_file` is a checkpoint of Flax or Orbax.

  >>> is_checkpoint("best.msgpack"), is_checkpoint("ckpt/checkpoint_300")
  (True, True)
  >>> is_checkpoint("runs/a/params.npz"), is_checkpoint("model.safetensors")
  (False, False)
  """
  name = os.path.basename(file)
  return os.path.isdir(file) or name.endswith(".msgpack") or bool(_STEP.fullmatch(name))


def files_within(folder: str) -> list[str]:
  """Returns the paths of all files in a folder and its subfolders, relative to it, sorted.

  Raises:
    UserError: the folder holds a link, a pipe, a device or more than 100,000 files, or cannot
      be read. It names no field.
  """
  paths: list[str] = []
  open_folders = [""]
  while open_folders:
    where = open_folders.pop()
    try:
      entries = list(os.scandir(os.path.join(folder, where)))
    except OSError as error:
      raise UserError(f"cannot be read ({error.strerror})") from error
    for entry in entries:
      name = os.path.join(where, entry.name)
      if entry.is_dir(follow_symlinks=False):
        open_folders.append(name)
      # A link may lead out of the folder, and reading a pipe may never end.
      elif not entry.is_file(follow_symlinks=False):
        raise UserError(f"{name} must be a file, not a link, a pipe or a device")
      else:
        paths.append(name)
    if len(paths) + len(open_folders) > _MOST_FILES:
      raise UserError(f"holds more than {_MOST_FILES} files")
  return sorted(paths)


def sha256(folder: str) -> str:
  """Returns the SHA-256 of the names and contents of all files in a folder.

  Raises:
    UserError: as `files_within`; or a file cannot be read.
  """
  names = files_within(folder)
  digests = []
  try:
    for name in names:
      with open(os.path.join(folder, name), "rb") as file:
        digests.append(hashlib.file_digest(file, "sha256").hexdigest())
  except OSError as error:
    raise UserError(f"{error.strerror}") from error
  # JSON keeps names and digests apart, so two different folders never give the same text.
  return hashlib.sha256(json.dumps([names, digests]).encode()).hexdigest()

"""The folder of one run: its config, and what makes another run of it; the data that it stores to
resume; its result."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from dpjax import files, names, trees, validate
from dpjax.experiments.config import choices, fields
from dpjax.experiments.run import checkpoint, run_keys, writers
from dpjax.types import Config, Params
from dpjax.validate import NO_VALUE, UserError, Verbatim

CONFIG = "config.json"
PARAMS = "params.npz"
# Key of result.json: digests of the files beside it.
FILES = "files_sha256"
# Key of result.json: digest of config and result (`seal_of`).
SEAL = "run_sha256"
# File of what a run stores in order to resume (`remember`), as secret as its checkpoints.
_MEMORY = f"{checkpoint.FOLDER}/run.json"
# Files without a digest in the result: config, lock, the result itself, and reports, which can be
# redrawn.
_UNBOUND = (CONFIG, writers.RESULT, writers.LOCK, *writers.REPORT)
# Fields that locate data on one machine. They are no part of a run's identity, since the digest of
# the data covers the content of the data and of their declaration.
PLACES = ("data_dir", "declaration")
# Sections of a config that may hold the fields `PLACES`.
_OF_DATA = ("data", "train", "target", "task")


def differences(
  there: object, now: object, path: tuple[str, ...] = ("config",)
) -> Iterator[str]:
  """Yields a line for each entry that differs in the JSON data of two configs.

  A field has one type, so 1 and 1.0 count as the same number. Under any key "options", True, 1 and
  1.0 are three values: a user's model may distinguish their types.

  >>> list(differences({"seed": 1, "data": {"limit": 3}}, {"seed": 1.0, "data": {"limit": 4}}))
  ['config.data.limit: 3 there, 4 now']
  """
  if isinstance(there, dict) and isinstance(now, dict):
    for name in sorted({*there, *now}):
      one, other = (data.get(name, NO_VALUE) for data in (there, now))
      yield from differences(one, other, (*path, name))
  elif there != now or ("options" in path and _typed(there) != _typed(now)):
    yield f"{'.'.join(path)[:87]}: {_short(there)} there, {_short(now)} now"


def _typed(value: object) -> str:
  return json.dumps(value, sort_keys=True)


def _short(value: object) -> str:
  """Returns a value as text of at most 60 characters."""
  text = "nothing" if value is NO_VALUE else repr(value)
  return text if len(text) <= 60 else f"{text[:57]}..."


def identity(
  kind: type, held: Mapping[str, Any], without: Iterable[str] = ()
) -> dict[str, Any]:
  """Returns the fields of a config, as plain data, that make it another run.

  Left out are those that `where` of its type names, such as devices, those in `without`, and
  `PLACES`, in sections of data, too.

  Args:
    kind: type of the config.
  """
  return _without(held, {*getattr(kind, "where", ()), *without, *PLACES})


def config_digest(config: Config, without: Iterable[str] = ()) -> str:
  """Returns a public SHA-256 of the name of a config's type and its `identity`.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> config_digest(TrainConfig(seed=1)) == config_digest(TrainConfig())
  False
  """
  kind = type(config)
  return writers.digest([kind.__name__, identity(kind, choices.to_dict(config), without)])


def _without(held: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
  kept = {}
  for name, entry in held.items():
    if name not in names:
      is_of_data = name in _OF_DATA and isinstance(entry, Mapping)
      kept[name] = _without(entry, PLACES) if is_of_data else entry
  return kept


def config_of(workdir: pathlib.Path, config: Config) -> dict[str, Any]:
  """Returns the config as the run in this folder wrote it (`recall_for`), from which its names are
  made: a version with more fields gives it no other names. Without such a run: as it would be
  written.
  """
  path = workdir / CONFIG
  return (
    writers.read_json(path) if path.exists() else writers.plain(choices.to_dict(config))
  )


def _differences(there: Any, config: Config) -> list[str]:
  """Returns how the content of a config.json differs from `config`, in what makes another run.

  A field that it lacks, since a later version added it, counts with its default there.
  """
  # What no version reads is compared as it is.
  with contextlib.suppress(UserError):
    there = writers.plain(choices.to_dict(fields.from_dict(type(config), there)))
  here = writers.plain(choices.to_dict(config))
  its_identity = functools.partial(identity, type(config))
  # A file may hold anything.
  there = its_identity(there) if isinstance(there, dict) else there
  return [*differences(there, its_identity(here))]


def recall_for(workdir: pathlib.Path, config: Config) -> dict[str, Any] | None:
  """Returns the data that the run with this config stored (`remember`). None: it has not begun.

  Raises:
    UserError: the directory holds a run of another config or other files, or `workdir` is a file.
  """
  validate.folder(workdir=workdir)
  path = workdir / CONFIG
  if path.exists():
    differences = _differences(writers.read_json(path), config)
    if differences:
      raise UserError(
        f"holds a run of another config ({differences[0]}); choose another "
        "directory, nothing was changed",
        field="workdir",
        value=workdir,
      )
    return recall(workdir)
  begun = files.half_written(path)
  for there in workdir.rglob("*"):
    # A run uses fixed file names, so it could overwrite files that it did not write.
    if not (there.is_dir() or there in begun or there.name == writers.LOCK):
      raise UserError(
        "must be a new, an empty or a run's own directory", field="workdir", value=workdir
      )
  return None


def check_own(
  workdir: pathlib.Path, first: str, *before: str, field: str = "workdir"
) -> None:
  """Raises UserError if a folder is not that of several runs, whose files of fixed names would
  overwrite somebody's. Hidden files may lie there: systems leave some, and none has a fixed name.

  Args:
    first: name of the first file that they write.
    before: names of what may be there before that file, beside their lock.
    field: argument that names the folder.
  """
  # Looked at before the first file, since other processes may be at work there.
  there = [path.name for path in workdir.iterdir()] if workdir.exists() else []
  known = (writers.LOCK, *before)
  others = [name for name in there if name[0] != "." and name not in known]
  if others and not (workdir / first).exists():
    raise UserError(
      "must be a new, an empty or an earlier start's directory", field=field, value=workdir
    )


def claim(workdir: pathlib.Path, config: Config) -> dict[str, Any] | None:
  """Stores the config in the directory, which then belongs to this run. Returns what the run stored
  there before, as `recall_for` does, and raises its errors."""
  stored = recall_for(workdir, config)
  if not (workdir / CONFIG).exists():
    writers.write_json(workdir / CONFIG, choices.to_dict(config))
  return stored


@contextmanager
def release_if_refused(
  workdir: pathlib.Path, may_release: Callable[[], bool]
) -> Iterator[None]:
  """Removes a run's files from a claimed folder if the run is refused before its first step.

  Otherwise the folder would refuse the corrected config, which is another config.

  Args:
    may_release: function that returns whether this very process claimed the folder, and the run is
      no release, whose folder keeps its first keys.
  """
  try:
    yield
  except Exception as error:
    is_refused = isinstance(error, UserError) or writers.refusal(error) is not None
    if not (is_refused and may_release()):
      raise
    if not checkpoint.newest(workdir) and not writers.read_metrics(workdir):
      shutil.rmtree(workdir / writers.EVENTS, ignore_errors=True)
      shutil.rmtree(workdir / checkpoint.FOLDER, ignore_errors=True)
      for name in (writers.METRICS, writers.LOCK, CONFIG):
        # A file system that refuses writes may refuse deletions, too.
        with contextlib.suppress(OSError):
          (workdir / name).unlink(missing_ok=True)
    raise


def recall(workdir: pathlib.Path) -> dict[str, Any] | None:
  """Reads what `remember` wrote in this folder.

  Returns {} for a run that has begun and stored nothing, and None for a run that has not begun.
  Raises UserError if the stored file was changed.
  """
  path = workdir / _MEMORY
  if path.exists():
    return writers.read_digested(path)
  begun = checkpoint.newest(workdir) is not None or (workdir / writers.RESULT).exists()
  # If there are rows, they were released with keys that are lost. A run must not draw other keys
  # for the same rows.
  return {} if begun or writers.read_metrics(workdir) else None


def remember(workdir: pathlib.Path, meta: Mapping[str, Any]) -> None:
  """Stores what a run needs in order to resume (`run_keys.to_meta`), as secret as the data."""
  path = workdir / _MEMORY
  writers.secret_folder(path.parent)
  writers.write_digested(path, meta)


# --- result


def seal_of(config: Mapping[str, Any], result: Mapping[str, Any]) -> str:
  """Returns a public digest of the content of config.json, which a run writes once, and of a result
  without its own digest."""
  unsealed = {name: value for name, value in result.items() if name != SEAL}
  return writers.digest([config, unsealed])


def write_result(
  workdir: pathlib.Path, config: Config, result: Mapping[str, Any]
) -> dict[str, Any]:
  """Writes result.json, bound to its run (see `finished_result`); returns its content."""
  sealed_result = {**result, SEAL: seal_of(config_of(workdir, config), result)}
  writers.write_result(workdir, sealed_result)
  return sealed_result


def finished_result(workdir: pathlib.Path, config: Config) -> dict[str, Any] | None:
  """Returns the content of result.json of this config's run; None: there is no result yet.

  The entry `run_sha256` is a digest of config and result. So an edited result, or a result of
  another config, is refused. The result has digests of the files beside it, so one of other data or
  of another release is refused, too. They are no signature: anyone can compute them for a forged
  result, and forge the other files, too.

  Raises:
    UserError: result.json is not the result of this run, or a file beside it is missing or changed.
  """
  path = workdir / writers.RESULT
  if not path.exists():
    return None
  result = writers.read_json(path)
  is_own = isinstance(result, dict) and (
    result.get(SEAL) == seal_of(config_of(workdir, config), result)
  )
  if not is_own:
    raise UserError(
      f"its {path.name} is not the result of this run; take it away, or choose "
      "another directory, nothing was changed",
      field="workdir",
      value=workdir,
    )
  check_files(workdir, result.get(FILES, {}))
  return result


def digests(workdir: pathlib.Path) -> dict[str, str]:
  """Returns the SHA-256 of each file directly in a run's folder, by name. Hidden files, config,
  lock, result and report are left out."""
  found = {}
  for path in sorted(workdir.iterdir()):
    if path.is_file() and path.name not in _UNBOUND and path.name[0] != ".":
      found[path.name] = files.sha256(path)
  return found


def check_files(workdir: pathlib.Path, written: Mapping[str, str]) -> None:
  for name, digest in written.items():
    path = workdir / name
    if path.is_file() and files.sha256(path) == digest:
      continue
    what = "is not what the run wrote" if path.exists() else "is gone"
    raise UserError(
      f"its {name} {what}; bring it back, or take result.json away, too: the "
      "same command then writes both from the checkpoint",
      field="workdir",
      value=Verbatim(str(workdir)[-120:]),
    )


def check_weights(config: Config, result: Mapping[str, Any]) -> None:
  """Raises UserError, which names the field, unless each file of weights that the config names is
  the one that the finished run began with: params.npz may hold only what was trained beside it."""
  for field, digest in result.get(run_keys.WEIGHTS, {}).items():
    path = getattr(config, field)
    if names.weights_sha256(path, field) != digest:
      raise UserError(
        "is not the file that the run began with; bring that back", field=field, value=path
      )


def save_params(path: pathlib.Path, params: Params) -> None:
  """Saves only the released parameters, without the noise key: one array for each leaf, named by
  its path. A single array is named "params"."""
  leaves = trees.named_leaves(params)
  arrays: dict[str, Any] = {
    name or "params": np.asarray(leaf) for name, leaf in leaves.items()
  }
  files.replace_file(path, lambda file: np.savez(file, **arrays))

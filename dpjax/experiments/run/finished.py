"""A finished run of any kind, read from its folder alone."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from dpjax.experiments.config import fields
from dpjax.experiments.run import workdir, writers
from dpjax.experiments.run.kind import KINDS
from dpjax.types import Config
from dpjax.validate import UserError

# Errors raised by values that no run writes, in a file whose digest fits.
STRANGE = (
  AttributeError,
  KeyError,
  OverflowError,
  RecursionError,
  TypeError,
  ValueError,
)


def config_of(path: pathlib.Path, field: str = "runs") -> Config:
  """Returns the config of the run in a folder, of whatever kind it is, from its config.json.

  Args:
    field: argument that names the folder, for errors.

  Raises:
    UserError: the folder has no config of a run, or that of another version of dpjax.
  """
  file = path / workdir.CONFIG
  held: Any = writers.read_json(file) if file.exists() else None
  if not isinstance(held, dict):
    raise odd(path, f"has no {workdir.CONFIG} of a run", field)
  command = _command_of(held)
  if command is None:
    raise odd(path, f"its {workdir.CONFIG} is of no kind of run of this dpjax", field)
  try:
    return fields.from_dict(KINDS[command].config_class, held)
  except UserError as error:
    reason = f"was written by another version of dpjax: {error!s:.100}"
    raise odd(path, reason, field) from error


def _command_of(held: dict[str, Any]) -> str | None:
  """Returns the name in `KINDS` of the kind of a config.json; None if no kind has its fields."""
  # A run of an earlier version may lack a field. Kinds are imported until one has all names.
  for command, kind in KINDS.items():
    if held.keys() <= {each.name for each in dataclasses.fields(kind.config_class)}:
      return command
  return None


class Finished(NamedTuple):
  """A folder with the content of its config.json and of its result.json, which fit together."""

  path: pathlib.Path
  config: dict[str, Any]
  result: dict[str, Any]

  @property
  def is_attack(self) -> bool:
    """Returns whether this is an attack: its epsilon is then that of the attacked run."""
    return isinstance(self.config.get("attack"), dict)

  @property
  def is_federated(self) -> bool:
    """Returns whether this is a run of `launch.federate`."""
    return _command_of(self.config) == "federate"


def odd(path: pathlib.Path, reason: str, field: str = "runs") -> UserError:
  """Returns an error about a folder that is not as needed; `field` is the argument for it."""
  return UserError(reason, field=field, value=str(path))


@contextlib.contextmanager
def as_runs_write(path: pathlib.Path, field: str = "runs") -> Iterator[None]:
  """Turns errors of the block about values that no run writes into one line about the folder."""
  try:
    yield
  # A UserError is a ValueError, too, which `STRANGE` would catch.
  except UserError:
    raise
  except STRANGE as error:
    reason = f"holds what no run writes ({type(error).__name__})"
    raise odd(path, reason, field) from error


def read(path: pathlib.Path, field: str = "runs") -> Finished:
  """Returns the finished run in a folder.

  Args:
    field: argument that names the folder, for errors.

  Raises:
    UserError: the folder holds no finished run, or its result is not that of its config, as after
      an edit. The digest is no signature; see `workdir.finished_result`.
  """
  for name in (writers.RESULT, workdir.CONFIG):
    if not (path / name).exists():
      raise odd(path, f"has no {name}: it holds no finished run", field)
  result = writers.read_json(path / writers.RESULT)
  config = writers.read_json(path / workdir.CONFIG)
  if not isinstance(result, dict) or not isinstance(config, dict):
    raise odd(path, "is no folder of a run", field)
  with as_runs_write(path, field):
    seal = workdir.seal_of(config, result)
  if result.get(workdir.SEAL) != seal:
    reason = f"its {writers.RESULT} is not the result of its {workdir.CONFIG}"
    raise odd(path, reason, field)
  return Finished(path, config, result)

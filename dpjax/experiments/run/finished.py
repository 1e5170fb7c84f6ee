"""A finished run of any kind, read from its folder alone."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from dpjax.experiments.run import workdir, writers
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


# In the folder of a private selection: the folder of its trials, and the secret list of them.
TRIALS = "trials"
TRIALS_FILE = "trials.json"


class Finished(NamedTuple):
  """A folder with the content of its config.json and of its result.json, which fit together."""

  path: pathlib.Path
  config: dict[str, Any]
  result: dict[str, Any]

  @property
  def is_attack(self) -> bool:
    """Returns whether this is an attack: its epsilon is then that of the attacked run."""
    return isinstance(self.config.get("attack"), dict)


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


def check_no_trial(path: pathlib.Path, field: str = "runs") -> None:
  """Raises UserError for a trial of a private selection.

  Its own result leaves out what the choice cost, and its name says how many trials there were.
  """
  folder = path.resolve().parent
  # A user's own folder may have the same name.
  if folder.name == TRIALS and (folder.parent / TRIALS_FILE).exists():
    reason = "is a trial of a private selection; its cost is in best/selection.json"
    raise odd(path, reason, field)


def read(path: pathlib.Path, field: str = "runs") -> Finished:
  """Returns the finished run in a folder.

  Args:
    field: argument that names the folder, for errors.

  Raises:
    UserError: the folder holds no finished run, or its result is not that of its config, as after
      an edit. The digest is no signature; see `workdir.finished`. Or it is a trial of a private
      selection.
  """
  check_no_trial(path, field)
  for name in (writers.RESULT, workdir.CONFIG):
    if not (path / name).exists():
      raise odd(path, f"has no {name}: it holds no finished run", field)
  result = writers.read_json(path / writers.RESULT)
  config = writers.read_json(path / workdir.CONFIG)
  if not isinstance(result, dict) or not isinstance(config, dict):
    raise odd(path, "is no folder of a run", field)
  with as_runs_write(path, field):
    seal = workdir.sealed(config, result)
  if result.get(workdir.SEAL) != seal:
    reason = f"its {writers.RESULT} is not the result of its {workdir.CONFIG}"
    raise odd(path, reason, field)
  return Finished(path, config, result)

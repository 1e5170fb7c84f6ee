"""Hooks that get the rows of metrics, too: Weights & Biases, MLflow, or a user's function.

A hook is called with (step, row) after the row is in metrics.jsonl. An error of a hook does not
end the run: it prints one warning, and the hook is not called again. After a resume, the hook gets
the rows since the last checkpoint again.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from dpjax import names
from dpjax.experiments.config import choices
from dpjax.experiments.run import writers
from dpjax.types import Config
from dpjax.validate import UserError

FIELD = "writer"
Log = Callable[[int, dict[str, float]], Any]


def _wandb(
  library: Any, name: str, config: Mapping[str, Any]
) -> tuple[Log, Callable[[], Any]]:
  run = library.init(project="dpjax", name=name, config=dict(config))
  return (lambda step, row: run.log(row, step=step)), run.finish


def _mlflow(
  library: Any, name: str, config: Mapping[str, Any]
) -> tuple[Log, Callable[[], Any]]:
  library.start_run(run_name=name)
  # Values are cut, because MLflow limits their length.
  library.log_params({key: str(value)[:250] for key, value in config.items()})
  return (lambda step, row: library.log_metrics(row, step=step)), library.end_run


# Functions (library, name, config) -> (log, end), by the name of a service, which is also the name
# of its package.
SERVICES = {"wandb": _wandb, "mlflow": _mlflow}


class RowHook:
  """Calls a hook with each row, until the hook's first error."""

  def __init__(self, name: str, begin: Callable[[], tuple[Log, Callable[[], Any]]]):
    self._name = name
    self._log: Log | None = None
    self._end: Callable[[], Any] | None = None
    begun = self._guard(begin)
    if begun is not None:
      self._log, self._end = begun

  def __call__(self, step: int, row: Mapping[str, float]) -> None:
    """Calls the hook with one row; does nothing after an error of the hook."""
    log = self._log
    # The hook gets a copy, since it may change the row.
    if log is not None:
      self._guard(lambda: log(step, dict(row)))

  def close(self) -> None:
    """Ends the run in the hook's service; a second call does nothing."""
    end = self._end
    self._end = None
    if end is not None:
      self._guard(end)

  def _guard(self, call: Callable[[], Any]) -> Any:
    try:
      return call()
    # A hook may raise any error, and SystemExit would end the run.
    except (Exception, SystemExit) as error:
      self._log = None
      file = None
      if names.is_path(self._name):
        file = inspect.getsourcefile(inspect.unwrap(names.find(self._name, FIELD)))
      writers.warn(
        f"{FIELD}={self._name!r}: {names.reason(error, file)}; it gets no more rows, and the "
        "run goes on"
      )
      return None


def check(name: str | None, *, release: bool) -> None:
  """Raises UserError for an unknown or uncallable hook, a missing package, a service in a release.

  >>> check(None, release=True)
  >>> check("wandb", release=True)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: writer='wandb': must be none or a function of your own with ...
  """
  if name is None:
    return
  names.one_of(tuple(SERVICES), **{FIELD: name})
  if names.is_path(name):
    log = names.find(name, FIELD)
    try:
      inspect.signature(log).bind(0, {})
    except TypeError as error:
      raise UserError(
        f"is called with (step, row): {error}", field=FIELD, value=name
      ) from error
    # Native code has no signature to inspect.
    except ValueError:
      pass
    return
  if release:
    raise UserError(
      "must be none or a function of your own with release=True: the service records the time "
      "of every row, and times follow from the data",
      field=FIELD,
      value=name,
    )
  _library(name)


def _library(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise UserError(
      f"needs the package {name}: pip install {name}", field=FIELD, value=name
    ) from error


def of_run(config: Config, folder: pathlib.Path) -> RowHook | None:
  """Returns the hook that a config names; None: the config names no hook.

  Args:
    config: config of a run, whose kind may have no field `writer`.
    folder: folder of the run; a service shows its name.
  """
  name = getattr(config, FIELD, None)
  if name is None:
    return None
  if names.is_path(name):
    log: Any = names.find(name, FIELD)
    return RowHook(name, lambda: (log, lambda: None))
  library = _library(name)
  # The seed is left out: with it, anyone who has the data could compute the noise.
  settings = writers.plain(choices.to_dict(config))
  shown = {key: value for key, value in settings.items() if key != "seed"}
  return RowHook(name, lambda: SERVICES[name](library, folder.name, shown))

"""Kinds of configs: the functions that launchers need for one type of config."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from dpjax.experiments.config.unread import Unused
from dpjax.experiments.run.experiment import Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A type of config, of one run or of a table of several runs.

  Attributes:
    config: dataclass of the configs.
    launcher: name of the module that runs a config, such as "launch.train".
    check: function that raises UserError for a config whose run would be refused.
    unread: function from a config to the fields that its runs do not read, with the setting that
      each field would need. By default all fields are read.
    columns: names of the fields that say how several runs of a config differ, such as "rows".
  """

  config: type
  launcher: str
  check: Callable[[Any], object]
  unread: Callable[[Any], Unused] = lambda config: {}
  columns: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunKind(Kind):
  """A type of run that trains one model.

  Attributes:
    load_data: function (config, features=True) -> (train, test).
    build: function (config, data) -> Job.
    featured: function (config.model, data) -> the data with the inputs that the model needs.
  """

  load_data: Callable[..., tuple[Any, Any]]
  build: Callable[..., Any]
  featured: Callable[[Any, Any], Any]


# Class of a config (its module and name) -> its experiment.
EXPERIMENTS: dict[str, type[Experiment[Any]] | str] = {
  f"dpjax.experiments.kinds.{config}": f"dpjax.experiments.kinds.{experiment}"
  for config, experiment in {
    "pate.config:PateConfig": "pate.build:Pate",
    "distillation.config:DistillationConfig": "distillation.build:Distillation",
    "synthesis.config:SynthesisConfig": "synthesis.build:PrivateSynthesis",
  }.items()
}


def _name(config: type) -> str:
  return f"{config.__module__}:{config.__qualname__}"


def experiment_of(config: Any) -> Experiment[Any] | None:
  """Returns one run of a config."""
  found = EXPERIMENTS.get(_name(type(config)))
  if isinstance(found, str):
    home, _, name = found.partition(":")
    found = getattr(importlib.import_module(home), name)
  return None if found is None else found(config)

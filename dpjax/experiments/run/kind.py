"""Kinds of configs: the functions that launchers need for one type of config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A type of config, of one run or of a table of several runs.

  Attributes:
    config: dataclass of the configs.
    launcher: name of the module that runs a config, such as "launch.train".
    check: function that raises UserError for a config whose run would be refused.
  """

  config: type
  launcher: str
  check: Callable[[Any], object]


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

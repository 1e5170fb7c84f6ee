"""Kinds of configs: the functions that launchers need for one type of config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from dpjax.experiments.config.unread import Unused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A type of config: of one run, or of a table of several.

  Attributes:
    config: the dataclass of its configs.
    launcher: the module that runs it, "launch.train".
    check: (config) -> anything; raises UserError for a config whose run would be refused.
    unread: (config) -> fields that its runs do not read, with what each would need. By default
      its runs read all fields.
    columns: fields that say in what the several runs of a config differ.
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
    load_data: (config, features=True) -> (train, test).
    build: (config, data) -> Job.
    digest: (config) -> 32 bytes that identify what its run computes.
    featured: (config.model, data) -> the data as that model reads them.
  """

  load_data: Callable[..., tuple[Any, Any]]
  build: Callable[..., Any]
  digest: Callable[[Any], bytes]
  featured: Callable[[Any, Any], Any]

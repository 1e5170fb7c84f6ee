"""Defines `Kind`: what launchers need to know of one type of config, owned by that kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dpjax.experiments.config.unread import Unused


class Kind(NamedTuple):
  """A kind of run, or a table of several runs.

  Attributes:
    config: the dataclass of its configs.
    launcher: the module that runs it, "launch.train".
    check: (config) -> anything; raises UserError for whatever a run would be refused for.
    unread: (config) -> the fields that it does not read, and what each would need.
    columns: fields that hold what several runs of a config differ in.
    load_data: (config, features=True) -> (train, test), of one run; None of a table.
    build: (config, data) -> Job, of one run; None of a table.
    featured: (config.model, data) -> the data as that model reads them, of one run.
  """

  config: type
  launcher: str
  check: Callable[[Any], object]
  unread: Callable[[Any], Unused]
  columns: tuple[str, ...] = ()
  load_data: Callable[..., tuple[Any, Any]] | None = None
  build: Callable[..., Any] | None = None
  featured: Callable[[Any, Any], Any] | None = None

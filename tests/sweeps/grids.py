"""Sweeps as tests write them: every combination of the values of dotted fields."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import loop, workdir, writers
from dpjax.experiments.sweeps import engine
from dpjax.experiments.sweeps.sweep import Runs, Selection, Sweep


@dataclasses.dataclass
class Grid:
  """A variant is a name and the fields that it sets together; the whole grid is run for each."""

  base: Any = dataclasses.field(default_factory=TrainConfig)
  grid: dict[str, list] = dataclasses.field(default_factory=dict)
  variants: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  seeds: list[int] | None = None
  x: str = "privacy.epsilon"
  y: str = "test_accuracy"
  series: str | None = None
  title: str = ""
  selection: Selection | None = None

  def named(self) -> Iterator[tuple[str, Any]]:
    for variant, changes in (self.variants or {"": {}}).items():
      for values in itertools.product(*self.grid.values()):
        chosen = dict(zip(self.grid, values))
        words = ", ".join(
          f"{path.split('.')[-1]}={value}" for path, value in chosen.items()
        )
        name = " @ ".join(filter(None, (variant, words)))
        yield name, fields.replace_all(self.base, changes | chosen)

  def runs(self) -> Runs:
    of_sweep = ("base", "seeds", "x", "y", "series", "title", "selection")
    sweep = Sweep(**{name: getattr(self, name) for name in of_sweep})
    return Runs(self.named(), sweep)


def points(grid: Grid) -> list[engine.Point]:
  return grid.runs().points


def run(
  grid: Grid, folder: Any, train: Any, load: Any = lambda config: None, *, only: Any = None
) -> list[dict[str, Any]]:
  """Runs a grid by a train function (config, folder, data=...)."""
  with by(train, load):
    return grid.runs().run(folder, only)


@contextlib.contextmanager
def by(train: Any, load: Any = lambda config: None) -> Iterator[None]:
  """Makes every run of a sweep one of these functions, whose result is written if it is not."""

  def trained(config: Any, at: pathlib.Path, *, data: Any) -> dict[str, Any]:
    result = train(config, at, data=data)
    if not (at / writers.RESULT).exists():
      workdir.claim(at, config)
      workdir.write_result(at, config, result)
    return result

  with mock.patch.multiple(loop, train=trained, load=load):
    yield

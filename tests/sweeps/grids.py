"""Sweeps as tests write them: every combination of the values of dotted fields."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import TrainConfig
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
  grid: Grid, workdir: Any, train: Any, load: Any = lambda config: None, *, only: Any = None
) -> list[dict[str, Any]]:
  """Runs a grid by a train function (config, folder, data=...)."""
  runs = grid.runs()
  return engine.run(
    runs.points, runs.table, workdir, settings=runs.config, title=runs.title, only=only,
    train=lambda point, at, data: train(point.config, at, data=data), load=load,
  )  # fmt: skip

"""The curves of a relevance experiment by epoch: accuracy above, cross-entropy below."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import report

Row = dict[str, Any]
_SCORES = ("test_accuracy", "test_loss")
_OF_RUN = ("curve", "dataset", "epsilon_target", "seed")
_MEANING = (
  "epsilon_kind",
  "claimed_epsilon_thm7",
  "proved_epsilon",
  "delta",
  "neighboring_relation",
  "unit",
)


def draw(
  workdir: pathlib.Path,
  config: RelevanceConfig,
  results: Sequence[Row],
  metrics: Sequence[list[Row]],
) -> None:
  """Writes `workdir`/report.csv (every epoch of every run), and its picture.

  Args:
    workdir: folder of the experiment.
    config: config of the experiment, for the title of the picture.
    results: result of each run.
    metrics: rows of metrics.jsonl, for each run.
  """
  rows = [row for curve in map(_by_epoch, results, metrics) for row in curve]
  report.write_csv(workdir / "report.csv", rows)
  curves = list(dict.fromkeys(row["curve"] for row in rows))
  title = config.title or f"{config.data.name}: {', '.join(curves)}"
  redraw.write(workdir / "report.csv", recipe(title))


def recipe(title: str) -> Recipe:
  """Returns how report.csv is drawn: panels by data set, epsilon and neighbouring relation."""
  return Recipe(
    "lines", ("epoch",), _SCORES, "curve", title=title,
    panels=("dataset", "epsilon_target", "neighboring_relation"),
    words={"test_loss": "cross-entropy (nats)", "epsilon_target": "epsilon"},
  )  # fmt: skip


def _by_epoch(result: Row, lines: list[Row]) -> list[Row]:
  of_run, meaning = (
    {name: result[name] for name in names} for names in (_OF_RUN, _MEANING)
  )
  scores = [{name: line[name] for name in _SCORES} for line in lines]
  epochs = [{"epoch": line["step"]} for line in lines]
  return [of_run | epoch | score | meaning for epoch, score in zip(epochs, scores)]

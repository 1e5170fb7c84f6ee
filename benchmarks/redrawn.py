"""Printed intervals, drawn by a seed, each met or missed by one more run.

    python -m benchmarks.redrawn --draws=20 --seed=2032

The intervals are those of results/expected, and of all rows of results/carried, silos and
table_settings that hold a number of runs and their sd: Student's prediction interval of one more
run. Each drawn one is run once more, with keys that no run had. results/expected/redrawn.csv has a
row for each. Stop it at any time: the same command goes on.

Left out: rows without noise, whose runs are equal; Fashion-MNIST, whose data are to be prepared;
rows of smartwatch, which take minutes each.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import math
import pathlib
import random
import secrets
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks import carried, expected, silos, table_settings
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated import build as federated_build
from dpjax.experiments.run import report, writers

RESULTS = expected.FOLDER.parent
REDRAWN = "redrawn.csv"
_SILOS = ("patients", "digits_by_5")
_CARRIED = ("voices", "mortgages", "insurance")


class Interval(NamedTuple):
  """A printed interval, and how to meet it."""

  name: str  # its folder, its row and its epsilon
  score: str
  runs: int
  low: float
  high: float
  again: Callable[[], float]  # one more run


class Redrawn(NamedTuple):
  """One more run of an interval."""

  interval: str
  score: str
  runs: int
  low: float
  high: float
  value: float
  is_inside: bool
  day: str


def _rows(path: str) -> list[dict[str, str]]:
  with (RESULTS / path).open(newline="", encoding="utf-8") as lines:
    return list(csv.DictReader(lines))


def _predicted(runs: int, mean: float, sd: float, score: str) -> tuple[float, float]:
  half = expected.half_width(runs, sd)
  low, high = mean - half, mean + half
  return (low, high) if score == "loss" else (max(low, 0.0), min(high, 1.0))


def _expected() -> Iterator[Interval]:
  for row in _rows("expected/expected.csv"):

    def again(name: str = row["config"]) -> float:
      with tempfile.TemporaryDirectory() as folder:
        return expected.measure(name, pathlib.Path(folder) / "run").score

    low, high = float(row["low"]), float(row["high"])
    name = f"expected {row['config']}"
    yield Interval(name, row["score"], int(row["runs"]), low, high, again)


def _carried() -> Iterator[Interval]:
  for name in _CARRIED:
    held = carried.DATA[name]
    ((line, runs),) = held.lines.items()
    keys = {line: held.y} | held.groups
    for row in _rows(f"carried/{name}/by_epsilon.csv"):
      if not float(row["sd"]):
        continue
      epsilon, key = float(row["privacy.epsilon"]), keys[row["line"]]

      def again(epsilon: float = epsilon, key: str = key, runs: Any = runs) -> float:
        (scores,) = runs(epsilon, 1)
        return float(scores[key])

      count, mean, sd = int(row["seeds"]), float(row["mean"]), float(row["sd"])
      ends = _predicted(count, mean, sd, key)
      label = f"carried/{name}, {row['line']}, epsilon {epsilon:g}"
      yield Interval(label, key, count, *ends, again)


def _silos() -> Iterator[Interval]:
  for federation in _SILOS:
    by_point: dict[tuple[str, float], list[float]] = {}
    for row in _rows(f"silos/{federation}/runs.csv"):
      point = (row["method"], float(row["privacy.epsilon"]))
      by_point.setdefault(point, []).append(float(row[silos.Y]))
    for (method, epsilon), scores in by_point.items():
      if math.isinf(epsilon):
        continue

      def again(at: tuple[str, str, float] = (federation, method, epsilon)) -> float:
        config = silos.config_of(*at, None)
        # Published runs have the seeds 0 to 9.
        seed = 1_000 + secrets.randbelow(2**30)
        data = federated_build.load_data(config)
        (run,) = silos.runs(config, data, range(seed, seed + 1))
        return float(run[silos.Y])

      ends = expected.interval(scores)
      label = f"silos/{federation}, {method}, epsilon {epsilon:g}"
      yield Interval(label, silos.Y, len(scores), *ends, again)


def _tables() -> Iterator[Interval]:
  for row in _rows("table_settings/table.csv"):
    table, epsilon = row["table"], float(row["epsilon"])

    def again(table: str = table, epsilon: float = epsilon) -> float:
      config = importlib.import_module("configs.table").get_config()
      config = fields.replace(config, "diagnostics", False)
      config = fields.replace(config, "privacy.epsilon", epsilon)
      loaded = config.data.preprocess(*table_settings.TABLES[table]())
      (scores,) = table_settings.scores(config, loaded, 1)
      return float(scores["loss"])

    count, mean, sd = int(row["runs"]), float(row["loss"]), float(row["sd"])
    ends = _predicted(count, mean, sd, "loss")
    label = f"table_settings, {table}, epsilon {epsilon:g}"
    yield Interval(label, "loss", count, *ends, again)


def intervals() -> list[Interval]:
  """Returns all printed intervals, in the order of their files."""
  return [*_expected(), *_carried(), *_silos(), *_tables()]


def drawn(draws: int, seed: int) -> list[Interval]:
  """Returns so many of them."""
  return random.Random(seed).sample(intervals(), draws)


def main() -> None:
  """Runs each drawn interval once more."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--draws", type=int, default=20)
  parser.add_argument("--seed", type=int, default=2032)
  parser.add_argument("--out", type=pathlib.Path, default=expected.FOLDER)
  flags = parser.parse_args()
  path = flags.out / REDRAWN
  rows: list[dict[str, Any]] = [*_rows(str(path.resolve()))] if path.exists() else []
  for each in drawn(flags.draws, flags.seed):
    if each.name in {row["interval"] for row in rows}:
      continue
    with writers.silent():
      value = each.again()
    is_inside = each.low <= value <= each.high
    day = datetime.date.today().isoformat()
    rows.append(Redrawn(*each[:-1], value, is_inside, day)._asdict())
    report.write_csv(path, rows, Redrawn._fields)
    print(f"{each.name}: {value:.4g} of [{each.low:.4g}, {each.high:.4g}]", flush=True)
  inside = sum(str(row["is_inside"]) == "True" for row in rows)
  print(f"{inside} of {len(rows)} lie in their interval")


if __name__ == "__main__":
  import launch  # noqa: F401  # keeps compiled programs, as a user's command does

  main()

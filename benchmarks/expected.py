"""The score that a new run of a config meets with 95 %: cheap configs, run again with fresh keys.

    python -m benchmarks.expected --minutes=60 [--only=breast_cancer]

Each config of `CONFIGS` runs ten times, and thirty times on a table below 5,000 rows. Each run
draws its own keys, as a user's command does. `results/expected/runs.csv` has a row for each run,
and `expected.csv` the mean, the sd and the interval for ONE more run by Student's t. Stop it at any
time: rows stay, and the same command goes on. Runs of an edited config count no more.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy import stats

from dpjax.experiments.run import kind, loop, report, workdir, writers

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "results" / "expected"
RUNS = "runs.csv"
EXPECTED = "expected.csv"
_CONFIDENCE = 0.95


class Config(NamedTuple):
  """A config that is cheap to run, and how often it runs."""

  launcher: str
  runs: int = 10
  score: str = "test_accuracy"


# Of tables below 5,000 rows, thirty runs: their scores spread most.
CONFIGS = {
  "breast_cancer": Config("train", runs=30),
  "quickstart": Config("train"),
  "diabetes": Config("train", runs=30, score="test_rmse"),
  "table": Config("train", runs=30),
  "fed.quickstart": Config("federate"),
  "fed.hospitals": Config("federate", runs=30),
  "pate.quickstart": Config("pate"),
  "distillation.quickstart": Config("distill"),
  "synthesis.quickstart": Config("synthesize"),
}


class Run(NamedTuple):
  """One run of a config."""

  config: str
  digest: str  # of the config's content
  score: float
  epsilon: float
  day: str


class Expected(NamedTuple):
  """The interval of a config's score."""

  config: str
  score: str
  runs: int
  mean: float
  sd: float
  low: float  # one more run lies in [low, high] with 95 %
  high: float
  epsilon: float
  day: str  # of the last run
  command: str


def half_width(runs: int, sd: float) -> float:
  """Returns how far one more score may lie from the mean of so many."""
  factor = stats.t.ppf((1 + _CONFIDENCE) / 2, runs - 1) * math.sqrt(1 + 1 / runs)
  return float(factor) * sd


def interval(scores: Sequence[float], *, share: bool = True) -> tuple[float, float]:
  """Returns the prediction interval of one more score, by Student's t.

  Args:
    scores: at least two scores.
    share: whether scores lie in [0, 1], to which the interval is then cut.

  >>> low, high = interval([0.9, 0.92, 0.94])
  >>> round(low, 3), round(high, 3)  # .92 -+ 4.303 x .02 x sqrt(4 / 3), cut at 1
  (0.821, 1.0)
  """
  half = half_width(len(scores), statistics.stdev(scores))
  mean = statistics.fmean(scores)
  low, high = mean - half, mean + half
  return (max(low, 0.0), min(high, 1.0)) if share else (low, high)


def summary(runs: Sequence[Run]) -> list[Expected]:
  """Returns a row for each config of which at least two runs count: those of its newest content."""
  rows = []
  for name, config in CONFIGS.items():
    of_config = [run for run in runs if run.config == name]
    held = [run for run in of_config if run.digest == of_config[-1].digest]
    if len(held) < 2:
      continue
    scores = [run.score for run in held]
    low, high = interval(scores, share=config.score == "test_accuracy")
    path = name.replace(".", "/")
    rows.append(
      Expected(
        name, config.score, len(held), statistics.fmean(scores), statistics.stdev(scores),
        low, high, max(run.epsilon for run in held), held[-1].day,
        f"python -m launch.{config.launcher} --config=configs/{path}.py",
      )
    )  # fmt: skip
  return rows


def _content(name: str) -> Any:
  return importlib.import_module(f"configs.{name}").get_config()


def _digest(name: str) -> str:
  return workdir.config_digest(_content(name))[:16]


def measure(name: str, folder: pathlib.Path) -> Run:
  """Runs a config in a folder, with keys of its own."""
  with writers.silent():
    result = loop.run(kind.experiment_of(_content(name)), folder)
  return Run(
    name,
    _digest(name),
    float(result[CONFIGS[name].score]),
    float(result["epsilon"]),
    datetime.date.today().isoformat(),
  )


def read(folder: pathlib.Path) -> list[Run]:
  """Returns the runs so far."""
  path = folder / RUNS
  if not path.exists():
    return []
  with path.open(newline="", encoding="utf-8") as lines:
    return [
      Run(
        row["config"], row["digest"], float(row["score"]), float(row["epsilon"]), row["day"]
      )
      for row in csv.DictReader(lines)
    ]


def write(folder: pathlib.Path, runs: Sequence[Run]) -> None:
  """Writes all runs, and the interval of each config."""
  folder.mkdir(parents=True, exist_ok=True)
  report.write_csv(folder / RUNS, [run._asdict() for run in runs], Run._fields)
  rows = [row._asdict() for row in summary(runs)]
  report.write_csv(folder / EXPECTED, rows, Expected._fields)


def missing(runs: Sequence[Run]) -> list[str]:
  """Returns the name of each run that is still to be made. All configs run in turns, so that a
  short time gives an interval of each."""
  counts = {}
  for name in CONFIGS:
    wanted = (name, _digest(name))
    counts[name] = sum((run.config, run.digest) == wanted for run in runs)
  places = (
    (place, name) for name in CONFIGS for place in range(counts[name], CONFIGS[name].runs)
  )
  return [name for _, name in sorted(places, key=lambda each: each[0])]


def main() -> None:
  """Runs what is missing, until the time is over."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--minutes", type=float, default=60.0)
  parser.add_argument("--only", action="append", choices=CONFIGS)
  parser.add_argument("--out", type=pathlib.Path, default=FOLDER)
  flags = parser.parse_args()
  end = time.monotonic() + 60 * flags.minutes
  runs = read(flags.out)
  for name in missing(runs):
    if flags.only and name not in flags.only:
      continue
    if time.monotonic() > end:
      break
    with tempfile.TemporaryDirectory() as folder:
      runs.append(measure(name, pathlib.Path(folder) / "run"))
    write(flags.out, runs)
    print(f"{name}: {runs[-1].score:.4f}", flush=True)
  for row in summary(runs):
    words = (
      f"{row.mean:.4g} +- {row.sd:.2g}, one more run in [{row.low:.4g}, {row.high:.4g}]"
    )
    print(f"{row.config}: {words} ({row.runs} runs)")


if __name__ == "__main__":
  import launch  # noqa: F401  # keeps compiled programs, as a user's command does

  main()

"""Scores by epsilon of the data that packages carry: `python -m benchmarks.carried --out=DIR`.

    pip install -e '.[data]' && pip install --no-deps aeon==1.6.0 islp==0.6.0

Ten runs of each config at each epsilon, each with fresh keys. Epsilon inf is the same run without
noise. Each program is compiled once for all runs, which take no folder, and are those of
`launch.train` and `launch.federate` in all else. Writes runs.csv (each run),
by_epsilon.csv (mean, sd and number of runs) and its picture to DIR/NAME.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import dpjax
from benchmarks import silos
from dpjax import training
from dpjax.data import by_client
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build, facts
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import kind, loop, report, writers
from dpjax.zoo.datasets import carried

EPSILONS = (1.0, 3.0, 8.0, math.inf)
_MEANS = ("epsilon", "epsilon_kind", "delta", "neighboring_relation", "unit")
Row = dict[str, Any]
# Function (epsilon, number of runs) -> the scores of each run.
Runs = Callable[[float, int], Iterator[Row]]


class Data(NamedTuple):
  """One data set.

  Attributes:
    lines: name of a line of the picture -> its runs.
    y: score that is drawn.
    groups: more lines: their name -> key of the score in a run's row.
  """

  title: str
  y: str
  lines: dict[str, Runs]
  groups: dict[str, str] = {}  # noqa: RUF012


def trained(config: Any, loaded: Any, count: int) -> Iterator[Row]:
  """Yields the scores of so many runs of `launch.train`, in which each step takes all records."""
  config = fields.replace(config, "diagnostics", False)
  run = build.assemble(config, loaded)
  phase = build.phase(config, run)
  means = silos.promised(run.guarantee, config.num_steps)
  assert phase.evaluate is not None
  for _ in range(count):
    # A step gives its state's memory away, so that first parameters are copied.
    params = jax.tree.map(jnp.copy, run.params)
    state = run.with_keys(dpjax.new_key(), None).init(params)
    for draw in phase.draws(0):
      state, _ = phase.step(state, draw)
    params = training.eval_params(state)
    row = {f"test_{name}": value for name, value in phase.evaluate(state).items()}
    row |= facts.class_scores(run.apply, params, run.test, warn=False)
    grouped = facts.group_scores(run.task, run.apply, params, run.test)
    by_group = grouped.get("test_by_group", {"scores": {}})
    for name, scores in by_group["scores"].items():
      row |= {f"{key}_{name}": value for key, value in scores.items()}
    yield row | means


def _table(name: str) -> Runs:
  def runs(epsilon: float, count: int) -> Iterator[Row]:
    config = importlib.import_module(f"configs.{name}").get_config()
    config = silos.at_epsilon(config, epsilon)
    yield from trained(config, build.load_data(config), count)

  return runs


def _smartwatch(changes: Row, pairs: Sequence[int] = (9,)) -> Runs:
  """Returns the runs of configs/fed/smartwatch.py; each of `pairs` is the first of two people who
  do not train."""

  def runs(epsilon: float, count: int) -> Iterator[Row]:
    config = fields.replace_all(
      importlib.import_module("configs.fed.smartwatch").get_config(), changes
    )
    for first in pairs:
      (train, people), (test, _) = carried.smartwatch_owners(unseen=(first, first + 1))
      # In one place all recordings are of one silo.
      pooled = getattr(config.privacy, "num_examples", ()) == (112,)
      owners = people * 0 if pooled else people
      federation = by_client(train.declared(len(train)), owners)
      federation = dataclasses.replace(federation, nominal_users=federation.num_clients)
      each = range(max(1, count // len(pairs)))
      yield from silos.runs(silos.at_epsilon(config, epsilon), (federation, test), each)

  return runs


_WHOLE = {
  "privacy": "central",
  "privacy.delta": 1e-2,
  "privacy.l2_clip_norm": 1.0,
  "local.epochs": 20,
  "client_optimizer.learning_rate": 0.5,
  "clients_per_round": 8,
  "num_rounds": 10,
}
DATA = {
  "voices": Data(
    "Nine speakers, 270 utterances", "test_accuracy", {"utterance": _table("voices")}
  ),
  "mortgages": Data(
    "Mortgages in Boston: who is denied",
    "test_auroc",
    {"all applicants": _table("mortgages")},
    {"black applicants": "auroc_yes", "others": "auroc_no"},
  ),
  "insurance": Data(
    "Who insures a caravan", "test_auroc", {"customer": _table("insurance")}
  ),
  "smartwatch": Data(
    "Exercises of two people who did not train",
    "test_accuracy",
    {
      "recordings, in one place": _smartwatch({"privacy.num_examples": (112,)}),
      "recordings, on each person's device": _smartwatch({}),
      "whole people": _smartwatch(_WHOLE),
    },
  ),
  "smartwatch_pairs": Data(
    "Exercises of each pair of people in turn, who did not train",
    "test_accuracy",
    {"recordings, on each person's device": _smartwatch({}, pairs=(1, 3, 5, 7, 9))},
  ),
}


def _summary(line: str, epsilon: float, rows: list[Row], y: str) -> Row:
  values = [float(row[y]) for row in rows]
  return {
    "line": line,
    "privacy.epsilon": None if math.isinf(epsilon) else epsilon,
    "seeds": len(rows),
    "mean": statistics.fmean(values),
    "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
    "min": min(values),
    "max": max(values),
    "largest_class": rows[0].get("test_largest_class"),
    **{key: rows[0].get(key) for key in _MEANS},
  }


def points_of(data: Data, rows: list[Row]) -> list[Row]:
  """Returns mean and sd over the runs, for each line and epsilon."""
  points = []
  keys = dict.fromkeys((row["line"], float(row["privacy.epsilon"])) for row in rows)
  for line, epsilon in keys:
    of = [
      row for row in rows if (row["line"], float(row["privacy.epsilon"])) == (line, epsilon)
    ]
    of_lines = {line: data.y} | data.groups
    points += [_summary(each, epsilon, of, y) for each, y in of_lines.items()]
  return points


def measure(name: str, folder: pathlib.Path, epsilons: list[float], count: int) -> None:
  """Runs a data set's lines, and writes its files."""
  data = DATA[name]
  folder.mkdir(parents=True, exist_ok=True)
  rows: list[Row] = []
  for line, runs in data.lines.items():
    for epsilon in epsilons:
      began = time.monotonic()
      found = [
        {"line": line, "privacy.epsilon": epsilon, "run": place, **row}
        for place, row in enumerate(runs(epsilon, count))
      ]
      rows += found
      seconds = (time.monotonic() - began) / len(found)
      shown = " ".join(
        f"{point['mean']:.3f}+-{point['sd']:.3f}" for point in points_of(data, found)
      )
      print(name, line, epsilon, shown, f"{seconds:.1f} s a run", flush=True)
      report.write_csv(folder / "runs.csv", rows)
  write(data, folder, rows)


def write(data: Data, folder: pathlib.Path, rows: list[Row]) -> None:
  """Writes by_epsilon.csv and its picture."""
  report.write_csv(folder / "by_epsilon.csv", points_of(data, rows))
  word = "AUROC" if data.y == "test_auroc" else "test accuracy"
  recipe = Recipe(
    "lines", ("privacy.epsilon",), ("mean",), "line", ends=("min", "max"),
    log=("privacy.epsilon",), words={"mean": word, "privacy.epsilon": "epsilon"},
    title=data.title,
  )  # fmt: skip
  redraw.write(folder / "by_epsilon.csv", recipe)


# Lines of configs/attack/faces.py of which ten runs are made.
_DEFENCES = ("none", "noise .001", "noise .01", "epsilon 8")
_FACES = "faces"


def faces(folder: pathlib.Path, count: int) -> None:
  """Attacks eight faces under each defence, each time with another model and other noise."""
  module = importlib.import_module("configs.attack.faces")
  folder.mkdir(parents=True, exist_ok=True)
  rows: list[Row] = []
  for name, config in module.get_configs(module.get_config()):
    defence = name.partition(", ")[2]
    if defence not in _DEFENCES:
      continue
    for place in range(count):
      with tempfile.TemporaryDirectory() as run, writers.silent():
        attacked = fields.replace(config, "seed", place)
        result = loop.run(kind.experiment_of(attacked), pathlib.Path(run) / "run")
      exact = result["success"]["exact"]
      rows.append(
        {"defence": defence, "run": place, "share": exact["count"] / exact["total"]}
        | {key: result[key] for key in ("median_psnr", *_MEANS)}
      )
    write_faces(folder, rows)


def write_faces(folder: pathlib.Path, rows: list[Row]) -> None:
  """Writes runs.csv, by_defence.csv and its picture."""
  report.write_csv(folder / "runs.csv", rows)
  points = []
  for defence in dict.fromkeys(row["defence"] for row in rows):
    of = [row for row in rows if row["defence"] == defence]
    psnr = statistics.median(float(row["median_psnr"]) for row in of)
    point = _summary(defence, math.inf, of, "share")
    points.append({"defence": defence, "median_psnr": psnr, **point})
    print(_FACES, defence, f"{point['mean']:.3f}+-{point['sd']:.3f}", flush=True)
  header = ["defence", "seeds", "mean", "sd", "min", "max", "median_psnr", *_MEANS]
  report.write_csv(folder / "by_defence.csv", points, header)
  recipe = Recipe(
    "points", ("mean",), ("defence",), ends=("min", "max"),
    words={"mean": "share of eight faces recovered exactly"},
    title="Faces out of messages",
  )  # fmt: skip
  redraw.write(folder / "by_defence.csv", recipe)


def main() -> None:
  """Measures each data set."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--only", nargs="*", choices=[*DATA, _FACES], default=[*DATA, _FACES])
  parser.add_argument("--epsilons", nargs="*", type=float, default=[*EPSILONS])
  parser.add_argument("--runs", type=int, default=10)
  flags = parser.parse_args()
  for name in flags.only:
    if name == _FACES:
      faces(flags.out / name, flags.runs)
      continue
    measure(name, flags.out / name, flags.epsilons, flags.runs)


if __name__ == "__main__":
  import launch  # noqa: F401  # keeps compiled programs, as a user's command does

  main()

"""Log loss of the settings for tables, beside that of answering the shares of the classes.

    pip install -e '.[data]' && pip install --no-deps islp==0.6.0
    python -m benchmarks.table_settings [--config=quickstart] [--seeds=1]

Each table is trained on at epsilon 1, 3 and 8 with five fresh keys. Settings that are worse than
the constant answer on a table spoil probabilities there. Two tables have nothing to learn: the
labels of `coin` are tossed, and on `stock market` ordinary logistic regression is worse than the
constant answer, too. Writes results/table_settings/CONFIG.csv. Needs a minute of a core for each
table.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import pathlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dpjax import data, optional
from dpjax.data import Dataset
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.run import report

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "results" / "table_settings"
EPSILONS = (1.0, 3.0, 8.0)
_SPLIT = {"test_share": 0.2}
Pair = tuple[Dataset, Dataset]


class Entry(NamedTuple):
  """One table at one epsilon."""

  table: str
  rows: int  # to train on
  epsilon: float
  runs: int
  loss: float  # test log loss, in nats
  sd: float
  constant_loss: float  # of answering the shares of the classes in the training rows
  logistic_loss: float  # of scikit-learn's logistic regression, without privacy
  accuracy: float
  larger_class: float


def _islp(file: str) -> dict[str, list[str]]:
  """Returns the columns of a table of the package islp, which is found without an import."""
  with (optional.folder("ISLP") / "data" / file).open(
    newline="", encoding="utf-8"
  ) as lines:
    rows = list(csv.DictReader(lines))
  return {name: [row[name] for row in rows] for name in rows[0]}


def _table(columns: Any, inputs: dict[str, Any], target: str, values: list[Any]) -> Pair:
  declared = {
    "columns": inputs,
    "target": {"column": target, "values": values},
    "split": _SPLIT,
    "ignore": "*",
  }
  train, test = data.table(columns, declared)
  # The tables are published, so their number of rows is public.
  return train.declared(len(train)), test


def _orange_juice() -> Pair:
  inputs: dict[str, Any] = {
    **{name: {"lower": 1, "upper": 3} for name in ("PriceCH", "PriceMM")},
    **{name: {"lower": 0, "upper": 1} for name in ("DiscCH", "DiscMM", "LoyalCH")},
    **{name: {"values": [0, 1]} for name in ("SpecialCH", "SpecialMM")},
    "STORE": {"values": [0, 1, 2, 3, 4]},
  }
  return _table(_islp("OJ.csv"), inputs, "Purchase", ["CH", "MM"])


def _stock_market() -> Pair:
  inputs = {f"Lag{day}": {"lower": -5, "upper": 5} for day in range(1, 6)}
  inputs["Volume"] = {"lower": 0, "upper": 4}
  return _table(_islp("Smarket.csv"), inputs, "Direction", ["Down", "Up"])


def _coin() -> Pair:
  rng = np.random.default_rng(0)
  columns = {f"x{place}": rng.random(750) for place in range(8)}
  inputs = {name: {"lower": 0, "upper": 1} for name in columns}
  return _table({**columns, "y": rng.integers(0, 2, 750)}, inputs, "y", [0, 1])


TABLES: dict[str, Callable[[], Pair]] = {
  "breast cancer": lambda: data.load("breast_cancer"),
  "wine": lambda: data.load("wine"),
  "mortgages": lambda: data.load("mortgages"),
  "caravan insurance": lambda: data.load("insurance"),
  "orange juice": _orange_juice,
  "stock market": _stock_market,
  "coin": _coin,
}


def scores(config: Any, loaded: Pair, seeds: int) -> list[dict[str, float]]:
  """Returns the test scores of so many runs, each with its own keys."""
  found = []
  first = None
  for seed in range(seeds):
    config = fields.replace(config, "seed", seed)
    phase = build.phase(config, build.assemble(config, loaded))
    # The keys lie in the state, so that one compiled step serves all runs.
    first = first or phase
    state = phase.init()
    for draw in phase.draws(0):
      state, _ = first.step(state, draw)
    assert first.evaluate is not None
    found.append(first.evaluate(state))
  return found


def measure(name: str, table: str, seeds: int) -> Iterator[Entry]:
  """Yields the entries of a config on a table."""
  from sklearn.linear_model import LogisticRegression
  from sklearn.metrics import log_loss

  config = importlib.import_module(f"configs.{name}").get_config()
  config = fields.replace(config, "diagnostics", False)
  train, test = TABLES[table]()
  shares = np.bincount(train.y, minlength=train.num_classes) / len(train)
  ordinary = LogisticRegression(max_iter=1000).fit(train.x, train.y)
  for epsilon in EPSILONS:
    of_epsilon = fields.replace(config, "privacy.epsilon", epsilon)
    loaded = of_epsilon.data.preprocess(train, test)
    found = scores(of_epsilon, loaded, seeds)
    losses = [each["loss"] for each in found]
    yield Entry(
      table=table,
      rows=len(train),
      epsilon=epsilon,
      runs=seeds,
      loss=statistics.fmean(losses),
      sd=statistics.stdev(losses) if seeds > 1 else 0.0,
      constant_loss=float(-np.mean(np.log(shares[test.y]))),
      logistic_loss=float(log_loss(test.y, ordinary.predict_proba(test.x))),
      accuracy=statistics.fmean(each["accuracy"] for each in found),
      larger_class=float(np.bincount(test.y).max() / len(test)),
    )


def main() -> None:
  """Measures each table, and writes all entries after each."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--config", default="table")
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--out", type=pathlib.Path, default=FOLDER)
  flags = parser.parse_args()
  flags.out.mkdir(parents=True, exist_ok=True)
  entries: list[Entry] = []
  for table in TABLES:
    for entry in measure(flags.config, table, flags.seeds):
      entries.append(entry)
      print(*entry, flush=True)
      rows = [each._asdict() for each in entries]
      report.write_csv(flags.out / f"{flags.config}.csv", rows, Entry._fields)


if __name__ == "__main__":
  main()

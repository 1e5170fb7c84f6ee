"""Clients with models of their own, beside one for all: `python -m benchmarks.personal --out=DIR`.

Eight clients hold scikit-learn's digits, each with its pictures turned by an angle of its own: 0,
45, ..., 315 degrees. A third of a client's rows is its test. Methods: FedAvg, FedBN (normalisation
stays), FedPer (the last layer stays), APFL, training alone (MR-MTL without a pull), and FedAvg
whose model each client trains for five more passes. No privacy. Ten runs each, which differ in
first parameters and order of rows. All have the same settings, and none was chosen on these rows.

Writes runs.csv, by_method.csv and by_method.png to DIR. A run takes no folder, and is that of
`launch.federate` in all else.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from scipy import ndimage

from dpjax import data
from dpjax.data import Federation
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated import build
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import report, run_keys
from dpjax.noise import source

NUM_CLIENTS = 8
_TUNED = "FedAvg, then each alone"
METHODS: dict[str, dict[str, Any]] = {
  "FedAvg": {"algorithm": "fed_avg", "fine_tune_epochs": 5},
  "FedBN": {"algorithm": "fed_bn"},
  "FedPer": {"algorithm": "fed_bn", "algorithm.kept": "head"},
  "APFL": {"algorithm": "apfl"},
  "each alone": {"algorithm": "mr_mtl", "algorithm.lam": 0.0},
}
SCORES = {"mean": "mean of clients", "worst": "worst client"}


class Net(nn.Module):
  """A network of 64 hidden units, which normalises each example by itself."""

  num_classes: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = nn.Dense(64)(x.reshape(len(x), -1))
    return nn.Dense(self.num_classes, name="head")(nn.relu(nn.LayerNorm(name="norm")(x)))


def turned_digits() -> tuple[Federation, Federation]:
  """Returns (training, test) federations of clients whose digits are turned."""
  train, test = data.load("digits")
  x, y = np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y])
  owners = np.random.default_rng(0).permutation(len(y)) % NUM_CLIENTS
  for client in range(NUM_CLIENTS):
    angle = 360 * client / NUM_CLIENTS
    rows = owners == client
    x[rows] = ndimage.rotate(x[rows], angle, axes=(1, 2), reshape=False, order=1)
  is_test = np.arange(len(y)) % 3 == 0
  parts = []
  for name, rows in (("train", ~is_test), ("test", is_test)):
    part = data.from_arrays(
      np.clip(x[rows], 0, 1), y[rows], num_classes=10, name="turned_digits", split=name
    )
    parts.append(data.by_client(part, owners[rows]))
  return parts[0], parts[1]


def config_of(method: str) -> FedConfig:
  """Returns the config of a run of `launch.federate`."""
  usual = {
    "data.name": "benchmarks.personal:turned_digits",
    "partition": "natural",
    "model.name": "benchmarks.personal:Net",
    "privacy": "none",
    "privacy.sampler": "fixed_size",
    "clients_per_round": NUM_CLIENTS,
    "num_rounds": 20,
    "local.batch_size": 50,
    "local.epochs": 5,
    "client_optimizer.learning_rate": 0.2,
    "execution": "loop",
    "num_threads": 1,
  }
  return fields.replace_all(FedConfig(), usual | METHODS[method])


def runs(method: str, seeds: range) -> Iterator[dict[str, Any]]:
  """Yields the scores of one run for each seed. One program serves all."""
  config = config_of(method)
  build.check(config)
  loaded = build.load_data(config)
  fed = build.assemble_loaded(config, loaded, run_keys.draw(0, private=False))
  phase = build.phase(fed)
  for seed in seeds:
    keys = run_keys.draw(seed, private=False)
    params = build.start(config, fed.federation, keys)[2]
    state = fed.algorithm.init(params, NUM_CLIENTS)
    state = state._replace(key=source.to_words(keys.local))
    for cohort in fed.algorithm.cohorts(fed.federation, fed.work, rng=keys.sampler):
      state, _ = phase.step(state, cohort)
    facts = phase.describe(state, {"epsilon": None}, [])
    named = {method: "client_scores", _TUNED: "client_scores_fine_tuned"}
    for words, key in named.items():
      if key in facts:
        shown = {k: value for k, value in facts[key].items() if k != "scored_on"}
        yield {"method": words, "seed": seed, **shown}


def summarised(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
  """Yields mean, standard deviation and extremes of each method's runs."""
  for score, words in SCORES.items():
    for method in dict.fromkeys(row["method"] for row in rows):
      values = [row[score] for row in rows if row["method"] == method]
      yield {
        "score": words,
        "method": method,
        "n": len(values),
        "accuracy": statistics.fmean(values),
        "sd": statistics.stdev(values),
        "low": min(values),
        "high": max(values),
      }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", required=True, help="folder to write to")
  parser.add_argument("--methods", nargs="*", choices=METHODS, default=[*METHODS])
  parser.add_argument(
    "--seeds", type=int, default=10, help="runs of each method, 2 or more"
  )
  args = parser.parse_args()
  folder = pathlib.Path(args.out)
  folder.mkdir(parents=True, exist_ok=True)
  rows = []
  for method in args.methods:
    rows += runs(method, range(args.seeds))
    report.write_csv(folder / "runs.csv", rows)
    print(f"{method}: {len(rows)} rows so far", flush=True)
  table = folder / "by_method.csv"
  report.write_csv(table, [*summarised(rows)])
  recipe = Recipe(
    "bars", ("accuracy",), ("method",), panels=("score",), ends=("low", "high"),
    title="Digits of eight clients, each turned by its own angle",
    note=f"means of {args.seeds} runs; lines: their extremes",
  )  # fmt: skip
  redraw.write(table, recipe)


if __name__ == "__main__":
  main()

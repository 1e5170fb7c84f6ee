"""Accuracy by epsilon of three federations of silos: `python -m benchmarks.silos --out=DIR`.

Each federation is public data dealt to a few silos. Methods: all records in one place; the silos'
records private by MR-MTL, by FedAvg, and alone (MR-MTL without a pull); the whole silo private, by
FedAvg with noise of the server. Ten runs each, which differ in noise and sampling. A row's accuracy
is that of all test rows, each answered by the model that its silo uses.

Each program is compiled once for an epsilon and used for all ten runs. So a run takes no folder,
and is that of `launch.federate` in all else. Writes runs.csv, by_epsilon.csv and by_epsilon.png to
DIR/NAME.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax

from configs.fed import patients
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated import build
from dpjax.experiments.run import experiment, run_keys
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.sweeps.curves import Curves
from dpjax.experiments.sweeps.sweep import Sweep
from dpjax.noise import source
from dpjax.transforms import guard

Y = "test_silo_accuracy"
# Fields of each federation, beside those of configs/fed/patients.py.
FEDERATIONS: dict[str, dict[str, Any]] = {
  "patients": {},
  "digits_by_5": {
    "data.name": "digits",
    "partition.num_clients": 5,
    "partition.sizes": (600, 400, 250, 130, 57),
    "local.batch_size": 50,
  },
  "fashion_by_10": {
    "data.name": "fashion_mnist",
    "data.limit": 3000,
    "partition.num_clients": 10,
    "partition.sizes": None,
    "local.batch_size": 60,
  },
}
_AVERAGE = {"algorithm": "fed_avg"}
_POOLED = {"partition.num_clients": 1, "partition.sizes": None}
_RATE = "client_optimizer.learning_rate"
# Of a whole silo: noise of the server, with the clip norm of configs/fed/hospitals.py.
_SILO = {
  "privacy": "central",
  "privacy.l2_clip_norm": 0.3,
  "privacy.delta": 1e-2,
  "local.batch_size": None,
  "local.epochs": 20,
  _RATE: 0.1,
}
METHODS: dict[str, dict[str, Any]] = {
  "records in one place": {**_AVERAGE, **_POOLED},
  "records by MR-MTL": {"algorithm": "mr_mtl", "algorithm.lam": 0.03},
  "records by FedAvg": _AVERAGE,
  "records of each silo alone": {"algorithm": "mr_mtl", "algorithm.lam": 0.0},
  "whole silos by FedAvg": {**_AVERAGE, **_SILO},
}


def at_epsilon(config: Any, epsilon: float) -> Any:
  """Returns a config at an epsilon; inf: without noise."""
  if math.isinf(epsilon):
    noise = {"privacy.epsilon": None, "privacy.noise_multiplier": 0.0}
    return fields.replace_all(config, noise)
  return fields.replace(config, "privacy.epsilon", epsilon)


def promised(guarantee: Guarantee, num_steps: int) -> dict[str, Any]:
  """Returns what a run of so many steps guarantees, as columns of a table."""
  spent = guarantee.curve(num_steps)
  return {
    "epsilon": None if math.isinf(spent) else spent,
    "epsilon_kind": guarantee.kind,
    "delta": guarantee.delta,
    "neighboring_relation": guarantee.relation,
    "unit": guarantee.unit,
  }


def config_of(federation: str, method: str, epsilon: float, rate: float | None) -> Any:
  """Returns the config of a run of `launch.federate`."""
  config = fields.replace_all(patients.get_config(), FEDERATIONS[federation])
  silos = config.partition.num_clients
  config = fields.replace_all(config, METHODS[method])
  if method.startswith("whole"):
    config = fields.replace_all(config, {"clients_per_round": silos})
  config = at_epsilon(config, epsilon)
  return config if rate is None else fields.replace(config, _RATE, rate)


def _with_key(state: Any, key: jax.Array) -> Any:
  """Returns the first state of a run with other keys, of the clients and of the server."""
  words = source.to_words(jax.random.fold_in(key, 0))

  def fresh(leaf: Any) -> Any:
    if not guard.is_guarded(leaf):
      return leaf
    return guard.exchange(leaf, lambda inner: inner._replace(key=words))

  state = jax.tree.map(fresh, state, is_leaf=guard.is_guarded)
  return state._replace(key=source.to_words(jax.random.fold_in(key, 1)))


def runs(config: Any, data: Any, seeds: range) -> Iterator[dict[str, Any]]:
  """Yields the privacy and the scores of one run for each seed."""
  build.check(config)
  fed = build.assemble_loaded(config, data, run_keys.draw(0))
  phase = build.phase(fed)
  facts = promised(fed.guarantee, config.num_rounds)
  for seed in seeds:
    state = _with_key(phase.init(), jax.random.key(seed))
    for cohort in fed.algorithm.cohorts(fed.federation, fed.work, rng=1_000 + seed):
      state, _ = phase.step(state, cohort)
    scores = experiment.score(phase, state)
    # Whole records in one place are one silo, which has all test rows.
    yield facts | scores | {Y: scores.get(Y, scores["test_accuracy"])}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", required=True, help="folder to write to")
  parser.add_argument("--only", nargs="*", choices=FEDERATIONS, default=[*FEDERATIONS])
  parser.add_argument("--methods", nargs="*", choices=METHODS, default=[*METHODS])
  parser.add_argument(
    "--epsilons", nargs="*", type=float, default=[0.3, 1.0, 3.0, math.inf]
  )
  parser.add_argument("--rates", nargs="*", type=float, default=[None], help="of clients")
  parser.add_argument("--seeds", type=int, default=10, help="runs of each point")
  args = parser.parse_args()
  for federation in args.only:
    folder = pathlib.Path(args.out) / federation
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for method in args.methods:
      data = build.load_data(config_of(federation, method, 1.0, None))
      for epsilon, rate in itertools.product(args.epsilons, args.rates):
        began = time.monotonic()
        config = config_of(federation, method, epsilon, rate)
        named = {"method": method, "privacy.epsilon": epsilon}
        more = [
          {**named, "seed": seed, **row}
          for seed, row in enumerate(runs(config, data, range(args.seeds)))
        ]
        rows += more
        mean = sum(row[Y] for row in more) / len(more)
        seconds = time.monotonic() - began
        print(
          federation, method, epsilon, rate, f"{mean:.4f}", f"{seconds:.0f} s", flush=True
        )
      header = [*dict.fromkeys(name for row in rows for name in row)]
      with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, header, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    title = _TITLES[federation]
    sweep = Sweep(x="privacy.epsilon", y=Y, series="method", title=title)
    labelled = [{**row, "label": row["method"]} for row in rows]
    Curves(sweep).write(folder, labelled, title=title, last=False)
    for suffix in (".csv", ".png", ".picture.json"):  # a curve.csv is that of a sweep
      (folder / f"curve{suffix}").replace(folder / f"by_epsilon{suffix}")


_TITLES = {
  "patients": "Three hospitals: what is private, a patient or the hospital",
  "digits_by_5": "Digits of five silos",
  "fashion_by_10": "Fashion-MNIST, 300 pictures in each of ten silos",
}

if __name__ == "__main__":
  main()

"""Accuracy by epsilon of a model trained on shares and opened with noise, beside DP-SGD.

`python -m tests.published.test_output_noise` writes results/secure/output_noise.{csv,json};
`python -m pytest -m long tests/published/test_output_noise.py` makes the same runs.

The training runs once for each data set under the protocol, for a release differs in its noise
alone; 20 openings each, with both parties' noise. DP-SGD is configs/breast_cancer.py with other
epsilons, in the clear, by a trusted server. Its relation is add_or_remove_one: replacing a row is
removing one and adding one, so its epsilon is worth less by up to a factor of two.
"""

import csv
import dataclasses
import json
import pathlib
import tempfile

import numpy as np
import pytest

from configs import breast_cancer
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.secure import noisy_model
from dpjax.experiments.kinds.secure.noisy_model import NoisyModelTask
from dpjax.experiments.run import loop
from dpjax.secure import mpc
from dpjax.secure.mpc import private_values

_OUT = pathlib.Path(__file__).parents[2] / "results" / "secure"
_EPSILONS = (0.1, 0.5, 1.0, 3.0, 8.0, 30.0)
_OPENINGS = 20
_SEEDS = 3


def _row(data, method, epsilon, relation, accuracies, **more):
  return {
    "data": data,
    "method": method,
    "epsilon": epsilon,
    "neighboring_relation": relation,
    "accuracy": round(float(np.mean(accuracies)), 4),
    "least": round(float(np.min(accuracies)), 4),
    "most": round(float(np.max(accuracies)), 4),
    "seeds": len(accuracies),
    **more,
  }


def on_shares(data):
  """Rows of one data set: without noise, and at each epsilon."""
  task = NoisyModelTask(dataset=data)
  loaded = task.load()
  first = noisy_model.mechanism_of(task, loaded)
  shares = private_values.split((first.rows(loaded.x), first.labels(loaded.y)))
  trained = mpc.run(first.train, *shares).outputs
  rows = first.rows(loaded.test_x)

  def accuracy(weights):
    scores = rows @ weights
    several = scores.shape[1] > 1
    classes = scores.argmax(axis=1) if several else scores[:, 0] >= 0
    return float(np.mean(classes == loaded.test_labels))

  exact = accuracy(private_values.join(*trained))
  yield _row(data, "on shares", "", "none", [exact], l2_sensitivity="", noise_std="")
  for epsilon in _EPSILONS:
    made = first.calibrated(epsilon=epsilon, delta=task.delta)
    opened = [
      mpc.run(made.release, *((share,) for share in trained)).outputs[0]
      for _ in range(_OPENINGS)
    ]
    yield _row(
      data, "on shares, noise on the output", epsilon, "replace_one",
      [accuracy(weights) for weights in opened],
      l2_sensitivity=f"{made.l2_sensitivity:.4g}", noise_std=f"{made.std:.4g}",
    )  # fmt: skip


def in_the_clear():
  """Rows of DP-SGD."""
  for epsilon in _EPSILONS[:-1]:
    changes = {"privacy.epsilon": epsilon}
    found = []
    for seed in range(_SEEDS):
      config = fields.replace_all(breast_cancer.get_config(), changes | {"seed": seed})
      with tempfile.TemporaryDirectory() as folder:
        found.append(loop.train(config, folder)["test_accuracy"])
    yield _row(
      "breast_cancer", "DP-SGD in the clear", epsilon, "add_or_remove_one", found,
      l2_sensitivity="", noise_std="",
    )  # fmt: skip


def measured():
  """All rows."""
  return [*on_shares("breast_cancer"), *in_the_clear(), *on_shares("digits")]


@pytest.mark.long
def test_noise_on_the_output_costs_what_the_table_says():
  with (_OUT / "output_noise.csv").open() as file:
    published = list(csv.DictReader(file))
  for row, known in zip([*on_shares("breast_cancer")], published):
    for name in ("method", "l2_sensitivity", "noise_std"):
      assert row[name] == known[name]
    # Of 20 draws the range is 3.7 standard deviations. Four standard errors of two such means:
    spread = float(known["most"]) - float(known["least"])
    error = 4 * spread / 3.7 * (2 / _OPENINGS) ** 0.5
    assert row["accuracy"] == pytest.approx(float(known["accuracy"]), abs=0.01 + error)


def main():
  """Writes the table and its settings."""
  rows = measured()
  with (_OUT / "output_noise.csv").open("w", newline="") as file:
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
  settings = dataclasses.asdict(NoisyModelTask())
  settings = {
    name: settings[name] for name in settings if name not in ("dataset", "epsilon")
  }
  text = json.dumps({"settings": settings, "rows": rows}, indent=1)
  (_OUT / "output_noise.json").write_text(text + "\n")


if __name__ == "__main__":
  main()

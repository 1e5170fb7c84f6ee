"""How fast FedAvg converges on diabetes, beside the bound that is proved of it.

  python examples/fed_avg_bound.py

Ridge regression of how far the disease goes on in a year, of 357 patients in five clinics. Each
local step is on one random patient, at a learning rate that falls like 1 / t, as the theorem asks.
Then the gap of the objective falls like 1 / t, too, far below its bound. The bound's largest
gradient is the one that was seen. NOT private: this is about optimization alone.
Source: Li et al. 2020, arXiv:1907.02189, theorem 1. Time: 20 s on two CPU cores.
"""

import csv
import pathlib
import tempfile

import numpy as np

import dpjax
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.secure import linear_regression as lr

CLINICS, RIDGE, STEPS, RUNS = 5, 0.1, 20_000, 10

# Columns and target in units of their standard deviations; patients sorted by age, so that
# clinics differ.
train, _ = dpjax.data.load("diabetes")
x, y = (np.asarray(part, np.float64) for part in (train.x, train.y))
x, y = (x - x.mean(axis=0)) / x.std(axis=0), ((y - y.mean()) / y.std()).ravel()
order = np.argsort(x[:, 0], kind="stable")
clinics = [(x[rows], y[rows]) for rows in np.array_split(order, CLINICS)]

table, slopes, shares = [], {}, {}
for local_steps in (1, 5, 20):
  options = {"ridge": RIDGE, "num_local_steps": local_steps}
  # Learning rates follow from curvature alone, so any gradient will do at first.
  rates = lr.FedAvgBound.of(clinics, gradient=1.0, **options)
  gaps, largest = lr.stochastic_fed_avg(
    clinics, rates, ridge=RIDGE, num_rounds=STEPS // local_steps, num_runs=RUNS, seed=0
  )
  bound = lr.FedAvgBound.of(clinics, gradient=largest, **options)
  steps = local_steps * np.arange(1, len(gaps) + 1)
  above = np.array([bound.gap(int(t)) for t in steps])
  late = steps >= STEPS // 10
  time = np.log(bound.offset + steps[late])
  slopes[local_steps] = float(np.polyfit(time, np.log(gaps.mean(axis=1)[late]), 1)[0])
  shares[local_steps] = gaps.mean(axis=1) / above
  print(
    f"{local_steps} local steps a round: gap {gaps[-1].mean():.2g} after {STEPS} steps (sd "
    f"{gaps[-1].std(ddof=1):.1g}, {RUNS} runs), bound {above[-1]:.3g}; falls like "
    f"t^{slopes[local_steps]:.2f}"
  )
  # Equal distances on a logarithmic axis.
  for place in np.unique(np.geomspace(1, len(steps), 40).astype(int)) - 1:
    seen, sd = gaps[place].mean(), gaps[place].std(ddof=1)
    table.append((local_steps, steps[place], "measured", f"{seen:.4g}", f"{sd:.4g}", RUNS))
    table.append((local_steps, steps[place], "bound", f"{above[place]:.4g}", "", ""))

path = pathlib.Path(tempfile.mkdtemp()) / "fed_avg_bound.csv"
with path.open("w", newline="", encoding="utf-8") as file:
  rows = csv.writer(file, lineterminator="\n")
  rows.writerow(("local_steps", "steps", "line", "gap", "sd", "runs"))
  rows.writerows(table)
picture = Recipe(
  *("lines", ("steps",), ("gap",), "line", ("local_steps",)),
  log=("steps", "gap"),
  words={
    "steps": "local steps",
    "gap": "F(w) - F(w*)",
    "local_steps": "local steps a round",
  },
  title="FedAvg on diabetes and its bound (Li et al. 2020)",
)
redraw.write(path, picture)
print(f"{path} and its picture")

"""Noise multipliers by riskcal (Kulynych et al. 2024), in an environment of its own.

    RISKCAL/bin/python benchmarks/riskcal_noise.py > results/accounting/riskcal.csv

where RISKCAL is an environment with `pip install riskcal==1.5.1`. It imports nothing of dpjax:
`tests/core/accounting/test_riskcal.py` compares. `seconds` are of the processor.
"""

# pyright: reportMissingImports=false
# (riskcal is in an environment of its own)

import csv
import sys
import time
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from scipy import optimize

# One row a setting: what is bounded, its numbers, sampling probability, steps.
SETTINGS = (
  ("tpr", {"tpr": 0.1, "fpr": 0.01}, 1.0, 1),
  ("tpr", {"tpr": 0.05, "fpr": 0.01}, 0.01, 1000),
  ("tpr", {"tpr": 0.02, "fpr": 0.001}, 0.02, 500),
  ("tpr", {"tpr": 0.3, "fpr": 0.1}, 0.05, 200),
  ("tpr", {"tpr": 0.6, "fpr": 0.4}, 0.1, 50),
  ("advantage", {"advantage": 0.1}, 1.0, 10),
  ("advantage", {"advantage": 0.2}, 0.01, 1000),
  ("advantage", {"advantage": 0.05}, 0.02, 100),
  ("bayes_risk", {"bayes_risk": 0.4, "prior": 0.5}, 0.02, 500),
  ("bayes_risk", {"bayes_risk": 0.18, "prior": 0.2}, 0.05, 200),
)
# Of riskcal's grid of privacy losses.
_GRID = 5e-4
_NAMES = ("bound", "tpr", "fpr", "advantage", "bayes_risk", "prior")


def _noise(bound: str, numbers: dict, prob: float, steps: int) -> float:
  """Returns riskcal's noise multiplier for one setting."""
  # Here, so that this file can be read where riskcal is not installed.
  from riskcal import analysis
  from riskcal.calibration import dpsgd

  run = {"sample_rate": prob, "num_steps": steps, "grid_step": _GRID}
  limits = {"noise_min": 0.3, "noise_max": 60.0}
  if bound == "tpr":
    rates = {"alpha": numbers["fpr"], "beta": 1 - numbers["tpr"]}
    return dpsgd.find_noise_multiplier_for_err_rates(
      **rates, **run, **limits, beta_tol=1e-4
    )
  if bound == "advantage":
    return dpsgd.find_noise_multiplier_for_advantage(
      **numbers, **run, **limits, advantage_tol=1e-4
    )

  # riskcal computes this risk and has no search for it.
  def missing(log_noise: float) -> float:
    pld = pld_lib.from_gaussian_mechanism(
      np.exp(log_noise), sampling_prob=prob, value_discretization_interval=_GRID
    ).self_compose(steps)
    risk = analysis.get_bayes_risk_from_pld(pld, prior=numbers["prior"])
    return risk - numbers["bayes_risk"]

  root: Any = optimize.brentq(missing, np.log(0.3), np.log(60.0), xtol=1e-4)
  return float(np.exp(root))


def main() -> None:
  """Writes the table to stdout."""
  columns: list[str] = [
    *_NAMES,
    "sampling_prob",
    "num_steps",
    "noise_multiplier",
    "seconds",
  ]
  table = csv.DictWriter(sys.stdout, columns, restval="", lineterminator="\n")
  table.writeheader()
  for bound, numbers, prob, steps in SETTINGS:
    began = time.process_time()
    sigma = _noise(bound, numbers, prob, steps)
    seconds = time.process_time() - began
    row: dict[Any, Any] = {"bound": bound, "sampling_prob": prob, "num_steps": steps}
    row |= {"noise_multiplier": f"{sigma:.6g}", "seconds": f"{seconds:.3f}"}
    table.writerow({**row, **numbers})
    sys.stdout.flush()


if __name__ == "__main__":
  main()

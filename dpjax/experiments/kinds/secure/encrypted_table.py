"""Runs regression on ciphertexts of scikit-learn's tables."""

from __future__ import annotations

import numpy as np

from dpjax import optional
from dpjax.experiments.config import common
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.secure.build import Computed, Measuring, digest_of, once
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.secure.homomorphic.regression import regress
from dpjax.secure.homomorphic.regression_plan import RegressionPlan

# Number of decimals of the released weights. The noise of a decryption is far below 1e-4.
_DECIMALS = 4
_NUMBERS = ("error", "step_error", "refreshes", "upload_bytes", "refresh_bytes")
_NUMBERS += ("result_bytes", "seconds")


def load_data(config: SecureConfig) -> tuple[np.ndarray, np.ndarray]:
  """Loads (x [n, d], y [n]): all rows of the table, and its first d columns."""
  # Imported here: scikit-learn is slow to import, and an optional package.
  with optional.require_extra():
    from sklearn import datasets

  loaders = {
    "diabetes": datasets.load_diabetes,
    "breast_cancer": datasets.load_breast_cancer,
  }
  x, y = loaders[config.task.table](return_X_y=True)
  wanted = config.task.num_features
  why = f", those of task.table={config.task.table!r}"
  common.at_most(config, "task.num_features", x.shape[1], why)
  return np.asarray(x[:, :wanted], np.float64), np.asarray(y, np.float64)


def data_digest(loaded: tuple[np.ndarray, np.ndarray]) -> bytes:
  """Returns the digest of rows and targets."""
  return digest_of(*loaded)


def execute(
  config: SecureConfig, loaded: tuple[np.ndarray, np.ndarray], random: RunKeys
) -> Measuring:
  """Returns the outcome of a regression, from encryption to decrypted predictions.

  Raises UserError if ciphertexts allow too few products, or if there are fewer rows than
  `task.num_predicted`.
  """
  # `random` is not used, since keys and noise of ciphertexts come from the operating system.
  del random
  x, y = loaded
  n, d = x.shape
  task = config.task
  count = task.num_predicted
  common.at_most(config, "task.num_predicted", n)
  with within("task", of=task):
    plan = RegressionPlan(
      n,
      d,
      ridge=task.ridge,
      tolerance=task.tolerance,
      most_refreshes=task.most_refreshes,
    )
  like = {"weights": np.zeros(d), "numbers": np.zeros(len(_NUMBERS))}

  def compute() -> Arrays:
    regression = regress(x, y, x[:count], plan)
    numbers = np.array([getattr(regression, name) for name in _NUMBERS], np.float64)
    # Weights are rounded, since exact values of a CKKS decryption leak information on the secret
    # key.
    return {"weights": regression.weights.round(_DECIMALS), "numbers": numbers}

  state = (yield once(compute, like, "regression")).state
  numbers = dict(zip(_NUMBERS, np.asarray(state["numbers"]).tolist()))
  refreshes = int(numbers["refreshes"])
  return Computed(
    protocol="ckks",
    sizes=f"{n} rows x {d} columns, {count} predicted",
    seconds=numbers["seconds"],
    num_bytes=int(
      numbers["upload_bytes"] + numbers["refresh_bytes"] + numbers["result_bytes"]
    ),
    error=numbers["error"],
    error_is="largest, of a standardised weight, against the closed form",
    found=f"{plan.num_steps} gradient steps in {plan.depth} products, {refreshes} refreshes",
    hides="rows, targets, weights and predictions from the server; only the owner decrypts",
    num_steps=plan.num_steps,
    params={"weights": np.asarray(state["weights"])},
    more={
      "error_of_steps": numbers["step_error"],
      "planned_error": plan.planned_error,
      "depth": plan.depth,
      "refreshes": refreshes,
      "upload_bytes": int(numbers["upload_bytes"]),
      "refresh_bytes": int(numbers["refresh_bytes"]),
      "result_bytes": int(numbers["result_bytes"]),
    },
  )

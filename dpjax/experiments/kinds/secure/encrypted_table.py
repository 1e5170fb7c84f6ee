"""Runs regression on ciphertexts of scikit-learn's tables."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np

from dpjax import optional
from dpjax.experiments.config import common, rules
from dpjax.experiments.config.naming import within
from dpjax.experiments.config.sections import DataConfig
from dpjax.experiments.kinds.secure.task import (
  MOST_ROWS,
  Computed,
  Measuring,
  SecureTask,
  digest_of,
  once,
)
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.secure.homomorphic import ckks
from dpjax.secure.homomorphic.regression import regress
from dpjax.secure.homomorphic.regression_plan import RegressionPlan

# Number of decimals of the released weights. The noise of a decryption is far below 1e-4.
_DECIMALS = 4
_NUMBERS = ("error", "step_error", "refreshes", "upload_bytes", "refresh_bytes")
_NUMBERS += ("result_bytes", "seconds")


@dataclasses.dataclass(frozen=True)
class RegressTask(SecureTask):
  """`secure.homomorphic.regression` on a table of scikit-learn."""

  table: Annotated[str, rules.among(("diabetes", "breast_cancer")), "of scikit-learn"] = (
    "diabetes"
  )
  num_features: Annotated[
    int | None, rules.between(1, 64), "the table's first columns; none: all"
  ] = None
  num_predicted: Annotated[
    int, rules.between(1, MOST_ROWS), "rows that are encrypted again, to be predicted"
  ] = 50
  ridge: Annotated[float, rules.POSITIVE, "penalty of the weights"] = 0.1
  tolerance: Annotated[float, rules.OPEN_UNIT, "of the solution, relative"] = 1e-5
  most_refreshes: Annotated[
    int, rules.between(0, rules.MOST_RUNS), "of ciphertexts, by who holds the key"
  ] = 2
  needs = (ckks.library,)

  @property
  def data(self) -> DataConfig:
    return DataConfig(name=self.table)

  def load(self) -> tuple[np.ndarray, np.ndarray]:
    """Loads (x [n, d], y [n]): all rows of the table, and its first d columns."""
    # Imported here: scikit-learn is slow to import, and an optional package.
    with optional.require_extra():
      from sklearn import datasets

    loaders = {
      "diabetes": datasets.load_diabetes,
      "breast_cancer": datasets.load_breast_cancer,
    }
    x, y = loaders[self.table](return_X_y=True)
    wanted = self.num_features
    why = f", those of task.table={self.table!r}"
    with within("task"):
      common.at_most(self, "num_features", x.shape[1], why)
    return np.asarray(x[:, :wanted], np.float64), np.asarray(y, np.float64)

  def digest(self, loaded: tuple[np.ndarray, np.ndarray]) -> bytes:
    """Returns the digest of rows and targets."""
    return digest_of(*loaded)

  def execute(
    self, loaded: tuple[np.ndarray, np.ndarray], random: RunKeys, seed: int
  ) -> Measuring:
    """Returns the outcome of a regression, from encryption to decrypted predictions.

    Raises UserError if ciphertexts allow too few products, or if there are fewer rows than
    `task.num_predicted`.
    """
    # `random` is not used, since keys and noise of ciphertexts come from the operating system.
    del random, seed
    x, y = loaded
    n, d = x.shape
    count = self.num_predicted
    with within("task", of=self):
      common.at_most(self, "num_predicted", n)
      plan = RegressionPlan(
        n,
        d,
        ridge=self.ridge,
        tolerance=self.tolerance,
        most_refreshes=self.most_refreshes,
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

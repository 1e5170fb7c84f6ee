"""RADP as in the paper (Kang and Wang 2024), and which of its assumptions fail.

The epsilons of the paper are returned as claims. No epsilon is proved for this mode.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import numpy as np

from dpjax import validate
from dpjax.accounting import upper
from dpjax.noise import source
from dpjax.relevance import feature_budget
from dpjax.relevance.settings import Paper
from dpjax.types import HostArray

# Reasons why the claims of a run do not hold, by name. docs/relevance.md lists the codes that
# earlier published results use for them.
CRITIQUE = {
  "neighbors": "definition 1 adds or removes a record, theorem 2 replaces one, theorem 4 "
  "changes every record of a batch: the three are never reconciled",
  "range of shares": "relevance shares need not lie in [0, 1] (eq. 10), so 1/n does not bound "
  "them",
  "Delta R": "1/n is the change of one mean share; a replaced record moves the vector by 2/n",
  "data-dependent noise": "the scale of the relevance noise depends on the data: no finite "
  "epsilon holds, and printing epsilon_1 leaks as well",
  "entropy as epsilon": "epsilon_1 as the sum of entropies is neither an upper bound nor the "
  "cost of fixed budgets",
  "model 1": "it is trained on the raw data without privacy, and every relevance map depends "
  "on it",
  "sensitivity L": "Delta_x = L is the sensitivity of a batch sum to a change of all L records",
  "batch sums": "the proof compares batch sums, the algorithm noises records: ",
  "redrawn noise": "noise is drawn again and again, so the cost grows with every draw",
  "entropy floor": "this run floors the entropies, which the paper does not: without it P3 "
  "falls to chance (docs/relevance.md)",
  "relevance floor": "noisy relevance is negative or zero for many features; it was floored "
  "here, which the paper does not say",
  "raw labels": "for a record with its label no finite epsilon holds; theorem 6 says that the "
  "loss needs no noise, by a series that diverges",
  "epsilon_1 left out": "epsilon_2 alone is reported, where theorem 7 adds epsilon_1",
  "L2 sensitivity": "it is taken as L where it is sqrt(L)",
  "Gaussian by coordinate": "it is compared coordinate by coordinate, not as a vector",
  "delta by coordinate": "d * delta = {d_delta} for the record, and n * delta = {n_delta} "
  "records may be published in clear",
  "shared channels": "the channels of a place share their noise: their differences are "
  "noise-free",
}
_BATCH_SUMS = {
  "sum1": "one record's features have epsilon_2 (or epsilon_2 / L) of local privacy",
  "mean1": "with beta of mean 1 one record's features have d * epsilon_2 of local privacy",
  "shared": "with one noise map for several records, nothing holds for one record",
}


class Features(NamedTuple):
  """Result of stages 1 and 2: shares, noise scales and epsilon_1, which is a claim."""

  relevance: np.ndarray  # [d] R, NOT private
  beta: np.ndarray  # [d]
  scales: np.ndarray  # [d] Laplace scales, or Gaussian standard deviations
  epsilon_1: float  # eq. 16, in bits


def features(
  key: jax.Array,
  relevance: HostArray,
  how: Paper,
  *,
  epsilon: float,
  num_records: int,
  batch_size: int,
) -> Features:
  """Runs algorithms 2 (from step 11) and 3 (to step 5), with the repairs that `how` names.

  >>> drawn = features(jax.random.key(0), np.full(4, 0.25), Paper(), epsilon=2.0,  # doctest: +SLOW
  ...                  num_records=1000, batch_size=10)
  >>> round(drawn.epsilon_1, 6), round(float(drawn.beta.sum()), 6)
  (2.0, 1.0)
  """
  validate.positive(epsilon=epsilon)
  relevance = np.asarray(relevance, np.float64)
  d = relevance.size
  default = feature_budget.default_entropy_floor(d)
  floor = default if how.entropy_floor is None else how.entropy_floor
  b = feature_budget.entropy_noise_scales(relevance, num_records, floor)
  # The relevance is float64, so its noise must be, too.
  with jax.enable_x64(True):
    unit = np.asarray(source.laplace(key, np.zeros(d), 1.0))
  at_least = feature_budget.default_floor(d) if how.floor is None else how.floor
  # With an entropy floor of 0, noise may be infinite or NaN. The cut keeps it finite. A feature
  # with such noise then gets the smallest share, or nearly the whole budget.
  noisy = np.nan_to_num(np.clip(relevance + unit * b, -1e12, 1e12))
  beta = feature_budget.floor_normalized(noisy, at_least)
  scales = how.reading.scales(beta, epsilon=epsilon, batch_size=batch_size)
  bits = float(feature_budget.entropy_bits(relevance).sum())
  if how.mechanism != "laplace":
    # The paper's Gaussian uses the same "sensitivity" L and the classic formula, also for
    # epsilon >= 1, where the formula is not proved (eq. 21, test 4).
    scales = scales * math.sqrt(2 * math.log(1.25 / how.delta))
  return Features(relevance, beta, scales, bits)


def claims(paper_features: Features, epsilon: float) -> dict[str, float]:
  """Returns the claimed epsilons: the reported epsilon, and that of the paper's theorem 7."""
  return {
    "claimed_epsilon": epsilon,
    "claimed_epsilon_thm7": epsilon + paper_features.epsilon_1,
  }


def failed_assumptions(
  how: Paper, *, num_features: int, num_channels: int, num_records: int
) -> list[str]:
  """Returns the reasons why the claims fail for the settings of a run, as lines "name: reason" in
  the order of `CRITIQUE`.

  >>> failed = failed_assumptions(Paper(entropy_floor=0.0), num_features=784, num_channels=1,
  ...                             num_records=60_000)
  >>> [line.split(":")[0] for line in failed][:4]
  ['neighbors', 'Delta R', 'data-dependent noise', 'entropy as epsilon']
  """
  reading = how.reading
  shared = reading.draw in ("batch", "run")
  gaussian = how.mechanism == "gaussian"
  applies = {
    "range of shares": how.rel_norm == "raw",
    "sensitivity L": reading.times_batch_size,
    "redrawn noise": reading.draw != "record_once",
    "entropy floor": how.entropy_floor != 0,
    "L2 sensitivity": gaussian and reading.times_batch_size,
    "Gaussian by coordinate": gaussian,
    "delta by coordinate": gaussian,
    "shared channels": how.shared_channels and num_channels > 1,
  }
  numbers = {
    "d_delta": upper(num_features * how.delta, digits=3),
    "n_delta": upper(num_records * how.delta, digits=3),
  }
  lines = {name: text.format(**numbers) for name, text in CRITIQUE.items()}
  lines["batch sums"] += _BATCH_SUMS["shared" if shared else reading.beta_norm]
  return [f"{name}: {lines[name]}" for name in CRITIQUE if applies.get(name, True)]


def departures(how: Paper, *, num_records: int, averaged: int) -> list[str]:
  """Returns the differences of a run from the paper, as lines "name: difference".

  These lines do not judge the privacy. `failed_assumptions` does that.

  Args:
    how: the settings of the run.
    num_records: number of training records.
    averaged: number of records that the relevance is a mean over.

  >>> lines = departures(Paper(), num_records=60_000, averaged=10_000)
  >>> lines[0]
  'noise: its scale is 1 / (d beta_j epsilon_2); algorithm 3 has L / (beta_j epsilon_2)'
  >>> [line.split(":")[0] for line in lines]
  ['noise', 'shares', 'records', 'loss', 'kernels']
  """
  reading = how.reading
  factor = "d " if reading.beta_norm == "mean1" else ""
  top = "L" if reading.times_batch_size else "1"
  printed = reading == feature_budget.PRESETS["P1"]
  differs = {
    f"noise: its scale is {top} / ({factor}beta_j epsilon_2); algorithm 3 has "
    "L / (beta_j epsilon_2)": not printed,
    "shares: |R| / sum |R|; eq. 10 has R / sum R": how.rel_norm == "abs",
    "shares: max(R, 0) over their sum; eq. 10 has R / sum R": how.rel_norm == "relu",
    f"records: the relevance is a mean over {averaged} of {num_records}; algorithm 2 takes "
    "all": averaged < num_records,
    "loss: cross-entropy is minimised and reported; eq. 20 has the squared error, which "
    "result.json gives beside it": True,
    "kernels: table 2's 4x4 to 128x128 are read as numbers of 3x3 filters": True,
  }
  return [line for line, applies in differs.items() if applies]


def local_epsilon(paper_features: Features, how: Paper, num_channels: int) -> float:
  """Returns the epsilon that independent Laplace noise of these scales WOULD prove, if drawn once.

  It covers a record's features only, not its label, model 1 or beta. It is infinite for Gaussian,
  shared or repeated noise. It is only information, and no epsilon of the whole method.
  """
  once = how.reading.draw == "record_once" and how.mechanism == "laplace"
  if not once or (how.shared_channels and num_channels > 1):
    return math.inf
  return feature_budget.local_epsilon(paper_features.scales, channels=num_channels)

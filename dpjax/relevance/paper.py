"""RADP as the paper has it (Kang and Wang 2024), and which of its assumptions fail.

The numbers that it claims are returned as claims. No epsilon is proved for this mode.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import numpy as np

from dpjax import noise as noise_lib
from dpjax import validate
from dpjax.accounting import upper
from dpjax.relevance import feature_budget
from dpjax.relevance.settings import Paper
from dpjax.types import HostArray

# The critique C1-C18 of the design, in one line each.
CRITIQUE = {
  "C1": "definition 1 adds or removes a record, theorem 2 replaces one, theorem 4 changes "
  "every record of a batch: the three are never reconciled",
  "C2": "relevance shares need not lie in [0, 1] (eq. 10), so 1/n does not bound them",
  "C4": "the scale of the relevance noise depends on the data: no finite epsilon holds, "
  "and printing epsilon_1 leaks as well",
  "C5": "epsilon_1 as the sum of entropies is neither an upper bound nor the cost of fixed "
  "budgets",
  "C6": "model 1 is trained on the raw data without privacy, and every relevance map "
  "depends on it",
  "C8": "Delta_x = L is the sensitivity of a batch sum to a change of all L records",
  "C9": "the proof compares batch sums, the algorithm noises records: ",
  "C10": "noise is drawn again and again, so the cost grows with every draw",
  "C11": "noisy relevance is negative or zero for many features; it was floored here, "
  "which the paper does not say",
  "C12": "the labels are used raw: for a record with its label no finite epsilon holds",
  "C13": "epsilon_2 alone is reported, where theorem 7 adds epsilon_1",
  "C14": "the L2 sensitivity is taken as L where it is sqrt(L)",
  "C15": "the Gaussian is compared coordinate by coordinate, not as a vector",
  "C16": "delta is counted per coordinate: d * delta = {d_delta} for the record, and "
  "n * delta = {n_delta} records may be published in clear",
  "C17": "the channels of a place share their noise: their differences are noise-free",
}
_C9 = {
  "sum1": "one record's features have epsilon_2 (or epsilon_2 / L) of local privacy",
  "mean1": "with beta of mean 1 one record's features have d * epsilon_2 of local privacy",
  "shared": "with one noise map for several records, nothing holds for one record",
}


class Features(NamedTuple):
  """Stages 1 and 2: what noise the features get, and what is claimed for it."""

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
  """Algorithms 2 (from step 11) and 3 (to step 5), with the repairs that `how` names.

  >>> found = features(jax.random.key(0), np.full(4, 0.25), Paper(), epsilon=2.0,
  ...                  num_records=1000, batch_size=10)
  >>> round(found.epsilon_1, 6), round(float(found.beta.sum()), 6)
  (2.0, 1.0)
  """
  validate.positive(epsilon=epsilon)
  relevance = np.asarray(relevance, np.float64)
  d = relevance.size
  default = feature_budget.default_entropy_floor(d)
  floor = default if how.entropy_floor is None else how.entropy_floor
  b = feature_budget.entropy_noise_scales(relevance, num_records, floor)
  with jax.enable_x64(True):  # the relevance is float64, and so must its noise be
    unit = np.asarray(noise_lib.source.laplace(key, np.zeros(d), 1.0))
  at_least = feature_budget.default_floor(d) if how.floor is None else how.floor
  # A feature without budget would get infinite noise; as a share that is the floor or all.
  noisy = np.nan_to_num(np.clip(relevance + unit * b, -1e12, 1e12))
  beta = feature_budget.floor_normalized(noisy, at_least)
  scales = how.reading.scales(beta, epsilon=epsilon, batch_size=batch_size)
  bits = float(feature_budget.entropy_bits(relevance).sum())
  return Features(relevance, beta, scales * _gaussian_factor(how), bits)


def _gaussian_factor(how: Paper) -> float:
  """The paper's Gaussian has the same "sensitivity" L and the classic formula, also where
  epsilon >= 1 and it is not proved (eq. 21, test 4)."""
  return 1.0 if how.mechanism == "laplace" else math.sqrt(2 * math.log(1.25 / how.delta))


def claims(found: Features, epsilon: float) -> dict[str, float]:
  """The claimed epsilons: as it is reported, and by the paper's own theorem 7."""
  return {
    "claimed_epsilon": epsilon,
    "claimed_epsilon_thm7": epsilon + found.epsilon_1,
  }


def failed_assumptions(
  how: Paper, *, num_features: int, num_channels: int, num_records: int
) -> list[str]:
  """Why the claims do not hold, by the switches of this run: "C4: ..." in order.

  >>> failed = failed_assumptions(Paper(), num_features=784, num_channels=1,
  ...                             num_records=60_000)
  >>> [line.split(":")[0] for line in failed]
  ['C1', 'C4', 'C5', 'C6', 'C9', 'C11', 'C12', 'C13']
  """
  reading = how.reading
  shared = reading.draw in ("batch", "run")
  gaussian = how.mechanism == "gaussian"
  applies = {
    "C2": how.rel_norm == "raw",
    "C8": reading.times_batch_size,
    "C10": reading.draw != "record_once",
    "C14": gaussian and reading.times_batch_size,
    "C15": gaussian,
    "C16": gaussian,
    "C17": how.shared_channels and num_channels > 1,
  }
  numbers = {
    "d_delta": upper(num_features * how.delta, digits=3),
    "n_delta": upper(num_records * how.delta, digits=3),
  }
  lines = {name: text.format(**numbers) for name, text in CRITIQUE.items()}
  lines["C9"] += _C9["shared" if shared else reading.beta_norm]
  return [f"{name}: {lines[name]}" for name in CRITIQUE if applies.get(name, True)]


def local_epsilon(found: Features, how: Paper, num_channels: int) -> float:
  """What independent, one-time Laplace noise of these scales WOULD prove for a record's
  features, labels, model 1 and beta left aside; infinite for shared or repeated noise.

  Information only: no epsilon of the whole method.
  """
  once = how.reading.draw == "record_once" and how.mechanism == "laplace"
  if not once or (how.shared_channels and num_channels > 1):
    return math.inf
  return feature_budget.local_epsilon(found.scales, channels=num_channels)

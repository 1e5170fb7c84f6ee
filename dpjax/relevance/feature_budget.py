"""Each feature's share of the privacy budget, by the rule of the paper or repaired, and the scale
of each feature's noise.

`beta` [d] sums to 1. Feature j gets the share beta_j of the feature budget, and so noise of a scale
proportional to 1 / beta_j. "The paper" is Kang and Wang 2024 (RADP); notation as in its eqs. 10-16.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dpjax import validate
from dpjax.types import HostArray
from dpjax.validate import UserError

BETA_NORMS = ("sum1", "mean1")
DRAWS = ("record_once", "record_fresh", "batch", "run")


def entropy_bits(shares: HostArray) -> np.ndarray:
  """Returns the entropies -R_j log2 R_j in bits (eq. 15). They are 0 for R_j = 0, and at most
  0.5307, at R_j = 1 / e. Raises UserError for a share below 0.

  >>> entropy_bits([0.5, 0.5, 0.0]).tolist()
  [0.5, 0.5, 0.0]
  """
  shares = np.asarray(shares, np.float64)
  if (shares < 0).any():
    raise UserError(
      "must be >= 0 to have an entropy; see feature_shares.shares", field="shares"
    )
  # A share of 0 gives 0 * log2(1) = 0, which is the limit of the entropy.
  return shares * np.log2(1 / np.where(shares > 0, shares, 1.0))


def value_frequencies(values: HostArray) -> np.ndarray:
  """Returns how often each entry's value occurs in its column, as a share (eq. 12): [n, d].

  No method uses these frequencies (eqs. 11 and 12). The paper's algorithm takes the entropies
  of relevance shares (eq. 15) instead.

  Args:
    values: [n, d], n >= 1.

  >>> value_frequencies([[0, 1], [0, 2], [3, 2], [0, 2]]).tolist()
  [[0.75, 0.25], [0.75, 0.75], [0.25, 0.75], [0.75, 0.75]]
  """
  values = np.asarray(values)
  if values.ndim != 2 or len(values) == 0:
    raise UserError(f"must be [n, d] with n >= 1, got shape {values.shape}", field="values")
  shares = np.empty(values.shape)
  for j, column in enumerate(values.T):
    _, which, counts = np.unique(column, return_inverse=True, return_counts=True)
    shares[:, j] = counts[which] / len(values)
  return shares


def default_entropy_floor(num_features: int) -> float:
  """Returns log2(d) / d, the entropy of each of d equal shares. It reads no data.

  >>> round(default_entropy_floor(784), 4)
  0.0123
  """
  return math.log2(num_features) / num_features


def entropy_noise_scales(shares: HostArray, num_records: int, floor: float) -> np.ndarray:
  """Returns the scales (1 / n) / max(eps_j, floor) of the noise on R_j (Alg. 2, step 14).

  eps_j is the entropy of R_j, and n is `num_records`. The paper has floor 0, which gives a feature
  without relevance infinite noise. The scale depends on the data, so no finite epsilon
  holds for this noise.
  """
  validate.non_negative(floor=floor)
  with np.errstate(divide="ignore"):
    return (1 / num_records) / np.maximum(entropy_bits(shares), floor)


def default_floor(num_features: int) -> float:
  """Returns the default floor 0.1 / d, to which smaller noisy relevances are raised. It reads no
  data.

  >>> default_floor(100)
  0.001
  """
  return 0.1 / num_features


def floor_normalized(noisy: HostArray, floor: float, power: float = 1.0) -> np.ndarray:
  """Returns shares beta_j proportional to max(R_j, floor)^power, which are > 0 and sum to 1.

  This is post-processing of the noisy shares R, so it costs no privacy. The paper has no floor,
  so its shares and noise scales can be negative.

  >>> floor_normalized([0.6, -0.2, 0.2], floor=0.2).tolist()
  [0.6, 0.2, 0.2]
  """
  validate.positive(floor=floor, power=power)
  noisy = np.asarray(noisy, np.float64)
  if noisy.ndim != 1 or not np.isfinite(noisy).all():
    raise UserError("must be finite numbers [d]", field="noisy")
  raised = np.maximum(noisy, floor) ** power
  return raised / raised.sum()


def uniform(num_features: int) -> np.ndarray:
  """Returns d equal shares 1 / d, which are beta without a relevance stage.

  >>> uniform(4).tolist()
  [0.25, 0.25, 0.25, 0.25]
  """
  return np.full(num_features, 1 / num_features)


@dataclasses.dataclass(frozen=True)
class Reading:
  """An interpretation of the paper's Algorithm 3, or of the older AdLM code. The noise scale is
  m / (beta'_j eps2), with m = L (the batch size) or 1, and beta' = beta or d * beta.

  >>> PRESETS["P2"].scales(np.array([0.25, 0.75]), epsilon=2.0, batch_size=100).tolist()
  [2.0, 0.6666666666666666]
  """

  beta_norm: str  # "sum1" | "mean1" (beta times d)
  times_batch_size: bool  # Delta_x = L, as theorem 4 has it
  draw: str  # "record_once" | "record_fresh" (each epoch) | "batch" | "run"

  def __post_init__(self) -> None:
    validate.one_of(BETA_NORMS, beta_norm=self.beta_norm)
    validate.one_of(DRAWS, draw=self.draw)

  def scales(self, beta: np.ndarray, *, epsilon: float, batch_size: int) -> np.ndarray:
    """Returns the scales [d] of the Laplace noise on the features."""
    validate.positive(epsilon=epsilon)
    sensitivity = batch_size if self.times_batch_size else 1
    weights = beta * len(beta) if self.beta_norm == "mean1" else beta
    return sensitivity / (weights * epsilon)


PRESETS = {
  "P1": Reading("sum1", True, "record_once"),  # Algorithm 3 as printed
  "P2": Reading("sum1", False, "record_once"),
  "P3": Reading("mean1", False, "record_once"),  # P2 with beta times d, as in AdLM
  "P4": Reading("mean1", False, "batch"),  # AdLM on MNIST: one map per batch
  "P5": Reading("mean1", False, "run"),  # AdLM on CIFAR-10: one map per run
}


def local_epsilon(scales: HostArray, *, channels: int = 1, width: float = 1.0) -> float:
  """Returns the epsilon sum_j channels * width / b_j that independent Laplace noise of scales b_j
  proves, if it is drawn once.

  The epsilon is pure and local, under replace_one, for records with entries in an interval of this
  width.

  >>> local_epsilon([2.0, 4.0], channels=2)
  1.5
  """
  scales = np.asarray(scales, np.float64)
  if not (scales > 0).all():
    raise UserError("must be > 0", field="scales")
  return float(np.sum(channels * width / scales))

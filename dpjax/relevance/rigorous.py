"""RADP with a proof: stages A (model 1), B (relevance), C (features), L (labels), S (shuffle).

Neighbours differ in one record (image, label), replaced by another; with labels="public" they
differ in one image alone. The number of records and all settings are public. Entries of records
must lie in [0, 1]. A split divides the records into D1 (n1 records) for stages A and B, and D2 for
the others. c is the number of channels of an image, C is the clip norm, and b_j is the noise scale
of feature j:

| stage | mechanism                                         | cost of a record in it         |
| ----- | ------------------------------------------------- | ------------------------------ |
| A     | no training, public data, or DP-SGD on D1         | 0, 0, (eps_A, delta_A)         |
| B     | mean share + Laplace(2 / (n1 eps_B)), or Gaussian | eps_B, or (eps_B, delta_B)     |
| C     | laplace: b_j = c / (beta_j eps_C)                 | eps_C, local                   |
| C     | laplace_clipped: weighted L1 clip to C,           | eps_C, local                   |
|       | b_j = min(c, 2C) / (beta_j eps_C)                 |                                |
| C     | laplace_pld: scales by the PLD of all features    | (eps_C, delta), local          |
| C     | gaussian: weighted L2 clip                        | (eps_C, delta), local          |
| L     | randomised response on the label                  | eps_L, local                   |
| S     | the noisy records of D2 secretly permuted         | eps_C + eps_L -> (eps, delta)  |

beta and everything trained on the noisy records is post-processing. With a split, each record
is in D1 or D2, by a hash of its index. So the total is the larger cost of the two (parallel
composition, which is adaptive, as beta comes from D1). Without a split, the total is the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from dpjax import accounting, mechanisms, validate
from dpjax.accounting import shuffle as shuffle_lib
from dpjax.mechanisms import additive
from dpjax.relevance.feature_shares import l1_sensitivity
from dpjax.relevance.settings import Rigorous
from dpjax.types import HostArray
from dpjax.validate import UserError

RELATION = "replace_one"
# Name of the relation if labels are used unchanged. It says what is NOT covered.
FEATURES_ONLY = f"{RELATION} (features only, label public)"
FEATURES_UNIT = "example's features"
_SALT = b"dpjax relevance split"
# Largest factor by which float32 may enlarge a clipped norm.
_SLACK = 1 + 1e-6
# Relative tolerance of the searches for an epsilon. The result is on the private side.
_TOLERANCE = 1e-4
# Number of scales per octave in laplace_pld. Scales are rounded, so that few different events are
# composed.
_LEVELS = 4


@dataclasses.dataclass(frozen=True)
class StageCharge:
  """The cost of a stage for the records that it reads."""

  stage: str
  records: str  # "D1" | "D2" | "all"
  epsilon: float
  delta: float
  what: str

  def __post_init__(self) -> None:
    validate.one_of(("D1", "D2", "all"), records=self.records)
    validate.non_negative(epsilon=self.epsilon, delta=self.delta)


def total(charges: Sequence[StageCharge]) -> tuple[float, float]:
  """Returns the total (epsilon, delta) of all stages. Costs for the same records are added, and the
  larger cost of D1 and D2 counts.

  >>> a, b = StageCharge("B", "D1", 0.5, 0.0, ""), StageCharge("C", "D2", 2.0, 1e-6, "")
  >>> total([a, b]), total([a, b, dataclasses.replace(b, records="all")])
  ((2.0, 1e-06), (4.0, 2e-06))
  """
  spent = lambda records, name: math.fsum(
    getattr(charge, name) for charge in charges if charge.records == records
  )
  epsilon, delta = (
    spent("all", name) + max(spent("D1", name), spent("D2", name))
    for name in ("epsilon", "delta")
  )
  return epsilon, delta


def split_by_hash(num_records: int, share: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns (ids of D1, ids of D2). About `share` of the records are in D1, by a hash of the index.

  >>> first, second = split_by_hash(1000, 0.2)
  >>> 150 < len(first) < 250, len(first) + len(second)
  (True, 1000)
  """
  validate.open_unit(share=share)
  word = lambda i: hashlib.sha256(_SALT + i.to_bytes(8, "big")).digest()[:8]
  values = np.array([int.from_bytes(word(i), "big") for i in range(num_records)], float)
  chosen = values < share * 2.0**64
  return np.flatnonzero(chosen), np.flatnonzero(~chosen)


# --- stage B


def noisy_relevance(
  key: jax.Array,
  relevance: HostArray,
  *,
  num_records: int,
  epsilon: float,
  delta: float = 0.0,
  neighboring_relation: str = RELATION,
) -> np.ndarray:
  """Adds Laplace noise to the mean share [d], or Gaussian noise if delta > 0.

  The Laplace scale is 2 / (n epsilon), or 1 / (n epsilon) under add_or_remove_one.

  Guarantee: (epsilon, delta)-DP under `neighboring_relation` for a mean of rows on the
  simplex (L1 sensitivity 2 / n, L2 sqrt(2) / n under replace_one; both 1 / n under
  add_or_remove_one with a public n). Value and noise are float64: float32 noise would leave
  the low bits of the mean without noise. `mechanisms.finite` says what the grid of the noise leaves
  open.
  """
  l1 = l1_sensitivity(num_records, neighboring_relation)
  l2 = (math.sqrt(2) if neighboring_relation == RELATION else 1.0) / num_records
  noise = additive.calibrate(
    epsilon=epsilon,
    delta=delta,
    l1=l1,
    l2=l2,
    neighboring_relation=neighboring_relation,
  )
  with jax.enable_x64(True):
    return np.asarray(noise(key, jnp.asarray(relevance, jnp.float64)))


# --- public transformations


def pool(x: np.ndarray, factor: int) -> np.ndarray:
  """Averages over factor x factor blocks of images [n, H, W, C]. Uneven edges are cut off equally.
  Other inputs are unchanged. The transformation is public: nothing is estimated.

  >>> pool(np.arange(4.0).reshape(1, 2, 2, 1), 2).ravel().tolist()
  [1.5]
  """
  if x.ndim != 4 or factor == 1:
    return x
  return _blocks(x, factor).mean(axis=(2, 4))


def pooled_shares(
  shares: np.ndarray, shape: tuple[int, ...], factor: int, name: str = "rigorous.pool"
) -> np.ndarray:
  """Sums shares of relevance, one for each place of an image, over the blocks of `pool`.

  Shares of other inputs are unchanged. An error names the setting `name`."""
  if len(shape) != 3 or factor == 1:
    return shares
  places = np.reshape(shares, (1, *shape[:2], 1))
  return _blocks(places, factor, name).sum(axis=(2, 4)).ravel()


def _blocks(x: np.ndarray, factor: int, name: str = "rigorous.pool") -> np.ndarray:
  n, height, width, channels = x.shape
  rows = height // factor
  columns = width // factor
  if rows == 0 or columns == 0:
    raise UserError(f"larger than the images {height}x{width}", field=name, value=factor)
  top = (height - rows * factor) // 2
  left = (width - columns * factor) // 2
  kept = x[:, top : top + rows * factor, left : left + columns * factor]
  return kept.reshape(n, rows, factor, columns, factor, channels)


def check_domain(**named: Any) -> None:
  """Raises UserError unless each array [n, ...] holds float32 numbers in [0, 1].

  >>> check_domain(x=np.array([[0.5, 1.5]], np.float32))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: x: must be float32 numbers in [0, 1], found 0.5 to 1.5; the ...
  """
  for name, x in named.items():
    x = np.asarray(x)
    why = f"found dtype {x.dtype}"
    if x.dtype == np.float32:
      # NaN fails these comparisons, too.
      if x.size == 0 or (x.min() >= 0 and x.max() <= 1):
        continue
      why = f"found {x.min():g} to {x.max():g}"
    raise UserError(
      f"must be float32 numbers in [0, 1], {why}; the noise is proved for no others",
      field=name,
    )


def clip_records(x: np.ndarray, beta: np.ndarray, how: Rigorous) -> np.ndarray:
  """Transforms records for the noise of stage C: centres them for "gaussian", and scales them down
  to the clip norm for "gaussian" and "laplace_clipped". For other noise they are unchanged.

  Raises:
    UserError: a record is not of float32 numbers in [0, 1]. For such a record no scale of
      `feature_noise` proves anything.
  """
  check_domain(x=x)
  if how.features == "laplace_clipped":
    return _scale_to(x, _weighted_norm(np.abs(x), beta), how.clip)
  if how.features == "gaussian":
    centred = x - np.float32(0.5)
    return _scale_to(centred, np.sqrt(_weighted_norm(centred**2, beta)), how.clip)
  return x


def _weighted_norm(magnitudes: np.ndarray, beta: np.ndarray) -> np.ndarray:
  """Returns the sum of each record's magnitudes, weighted by beta: [n]. The sums are in float64,
  since float32 sums of many features err by more than `_SLACK`."""

  def norm(magnitude: np.ndarray) -> float:
    wide = magnitude.astype(np.float64)  # [d] or [height, width, channels]
    return float((wide.sum(axis=2) if magnitude.ndim == 3 else wide).reshape(-1) @ beta)

  return np.array([norm(magnitude) for magnitude in magnitudes], np.float64)


def _scale_to(x: np.ndarray, norms: np.ndarray, clip: float) -> np.ndarray:
  # A record of zeros has norm 0, which must not be a divisor.
  factor = np.minimum(1, clip / np.maximum(norms, 1e-30)).astype(np.float32)
  return x * factor.reshape(-1, *[1] * (x.ndim - 1))


# --- stage C


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureNoise:
  """The noise of stage C, and the epsilon that it proves for one record's features."""

  mechanism: str  # "laplace" | "gaussian"
  scales: np.ndarray  # [d'] Laplace scales or standard deviations
  epsilon: float
  delta: float


def feature_noise(
  beta: np.ndarray, how: Rigorous, *, epsilon: float, channels: int
) -> FeatureNoise:
  """Returns the noise that makes the release of a record from `clip_records` locally (epsilon,
  delta)-DP. delta is `how.delta` for "gaussian" and "laplace_pld", else 0.

  >>> noise = feature_noise(np.array([0.5, 0.5]), Rigorous(features="laplace"),
  ...                       epsilon=2.0, channels=1)
  >>> noise.scales.tolist(), float((1 / noise.scales).sum())
  ([1.0, 1.0], 2.0)
  """
  validate.positive(epsilon=epsilon)
  if how.features == "gaussian":
    # The vector sqrt(beta_j) x_j has L2 norm <= C, so replacing a record moves it by at most 2 C.
    # So sigma_j = 2 C s / sqrt(beta_j), where s is the noise multiplier.
    multiplier = mechanisms.analytic_noise_multiplier(epsilon, how.delta)
    scales = 2 * how.clip * _SLACK * multiplier / np.sqrt(beta)
    return FeatureNoise("gaussian", scales, epsilon, how.delta)
  if how.features == "laplace_pld":
    # Scales are proportional to 1 / beta, rounded to a few levels. The PLD accountant gives the
    # factor.
    shape = 2 ** (np.round(_LEVELS * np.log2(1 / (beta * len(beta)))) / _LEVELS)
    levels, counts = np.unique(shape, return_counts=True)
    factor = _pld_factor(
      tuple(levels.tolist()), tuple((counts * channels).tolist()), epsilon, how.delta
    )
    return FeatureNoise("laplace", factor * shape, epsilon, how.delta)
  clip = math.inf if how.features == "laplace" else how.clip
  # In the L1 norm weighted by beta, a replaced record moves by at most `channels`. A clipped record
  # moves by at most 2 C.
  sensitivity = min(float(channels), 2 * clip * _SLACK)
  return FeatureNoise("laplace", sensitivity / (beta * epsilon), epsilon, 0.0)


@functools.lru_cache(maxsize=8)
def _pld_factor(levels: tuple, counts: tuple, epsilon: float, delta: float) -> float:
  return accounting.calibrate_noise_multiplier(
    lambda z: laplace_vector_event([z * level for level in levels], counts),
    epsilon=epsilon,
    delta=delta,
    neighboring_relation=RELATION,
    tol=1e-3,
  )


def laplace_vector_event(scales: Sequence[float], counts: Sequence[int]) -> Any:
  """Returns the event of Laplace noise on a vector of entries in [0, 1], under replace_one.

  `counts[i]` entries have the noise scale b = `scales[i]`. The accountant wants a bound on the
  norm of one record, not of a difference. An entry is within 1/2 of the public centre, so the bound
  is 1/2, and the multiplier is 2 b.
  """
  events = [
    accounting.compose(accounting.laplace_event(2 * float(b)), int(count))
    for b, count in zip(scales, counts)
  ]
  return dp_accounting.ComposedDpEvent(events)


# --- stage S


@functools.lru_cache(maxsize=64)
def shuffled_epsilon(local_epsilon: float, num_records: int, delta: float) -> float:
  """Returns the central epsilon at `delta` of `num_records` shuffled reports.

  Each report is pure eps0-local, with eps0 = `local_epsilon`. The result is never above eps0.
  Source: numeric clones bound of Feldman, McMillan and Talwar 2021.

  >>> round(shuffled_epsilon(7.0, 60_000, 1e-5), 2)  # doctest: +SLOW
  1.14
  """
  validate.open_unit(delta=delta)
  spent = functools.partial(
    shuffle_lib.amplified_delta, local_epsilon=local_epsilon, num_reports=num_records
  )
  private = local_epsilon
  unsafe = 0.0
  # With too few reports to hide among, only the local epsilon holds.
  if spent(epsilon=local_epsilon * (1 - 1e-9)) > delta:
    return local_epsilon
  while private - unsafe > _TOLERANCE * max(1.0, private):
    middle = (private + unsafe) / 2
    private, unsafe = (
      (middle, unsafe) if spent(epsilon=middle) <= delta else (private, middle)
    )
  return private


@functools.lru_cache(maxsize=64)
def local_epsilon_for(epsilon: float, num_records: int, delta: float) -> float:
  """Returns nearly the largest local eps0 whose shuffled reports cost at most (epsilon, delta). It
  is epsilon itself if there are too few records.

  >>> round(local_epsilon_for(1.5, 60_000, 1e-5), 2)  # doctest: +SLOW
  7.35
  """
  validate.positive(epsilon=epsilon)
  validate.open_unit(delta=delta)
  spent = functools.partial(
    shuffle_lib.amplified_delta, num_reports=num_records, epsilon=epsilon
  )
  private = epsilon
  # Above log n almost no amplification is left, so the search ends 1 above it.
  unsafe = max(epsilon, math.log(num_records)) + 1
  while unsafe - private > _TOLERANCE * private:
    middle = (private + unsafe) / 2
    private, unsafe = (
      (middle, unsafe) if spent(local_epsilon=middle) <= delta else (private, middle)
    )
  return private

"""Gradient leakage scores: one number for how much a gradient shows of its input.

The score is sometimes described as the correlation of "the gradient with the input". That needs
two vectors of equal length, but gradient and input have different lengths. Three definitions make
sense of it:

| score                  | what it is                                     | for               |
| ---------------------- | ---------------------------------------------- | ----------------- |
| `dense_leakage`        | max over units k of abs corr(dL/dW1[:, k], x)  | dense first layer |
| `recovered_leakage`    | corr(x, what an attack has reconstructed)      | any attack        |
| `distance_correlation` | between gradients and inputs over many records | any model         |

At batch size 1 the first score is 1 for EVERY model: dL/dW1[:, k] is x times a number. It falls as
the batch grows, while its null rises (CIFAR-10, 256 sigmoid units, 12 batches each):

| batch | score | null |
| ----- | ----- | ---- |
| 1     | 1.000 | 0.18 |
| 4     | 0.923 | 0.37 |
| 16    | 0.687 | 0.46 |
| 64    | 0.570 | 0.50 |

No score means anything alone, since any two natural images are alike. So each comes with its null:
the same score of shuffled pairs, whose gradients and inputs do not belong together. A score above
its null is a leak; a score at its null is no proof of privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.spatial import distance

from dpjax import validate
from dpjax.types import HostArray
from dpjax.validate import UserError


class LeakageScore(NamedTuple):
  """A score with its null (the scores of mismatched pairs), p-value and interval."""

  score: float
  null: np.ndarray  # [num_null] scores of shuffled pairs
  p_value: float  # (1 + random pairings that score at least as much) / (1 + num_null)
  # Hoeffding's at 95 %, over records or batches; None for a single number.
  interval: tuple[float, float] | None


def _shuffles(count: int, num_null: int, seed: int) -> list[np.ndarray]:
  """Draws permutations without fixed points, as random cycles through all records."""
  validate.integer_at_least(1, num_null=num_null)
  validate.integer_at_least(0, seed=seed)
  if count < 3:
    raise UserError(f"must be at least 3 to be shuffled, got {count}", field="records")
  rng = np.random.default_rng(seed)
  shuffles = []
  for _ in range(num_null):
    order = rng.permutation(count)
    shuffle = np.empty(count, int)
    shuffle[order] = np.roll(order, 1)
    shuffles.append(shuffle)
  return shuffles


def _score(
  score: Callable[[np.ndarray], np.ndarray],
  count: int,
  num_null: int,
  seed: int,
  *,
  least: float,
) -> LeakageScore:
  """Computes a score with its null.

  Args:
    score: `score(order)` returns the score's values after one side of the pairs is reordered.
    least: smallest value of a score; the largest is 1.
  """
  values = np.asarray(score(np.arange(count)), np.float64)
  null = np.array([np.mean(score(order)) for order in _shuffles(count, num_null, seed)])
  mean = float(np.mean(values))
  # The p-value is exact if orders are drawn from a group. All permutations form a group; the cycles
  # of the null do not.
  rng = np.random.default_rng([seed, 0x9A1F])
  drawn = [np.mean(score(rng.permutation(count))) for _ in range(num_null)]
  # With the tolerance, means count as equal if they differ only by the rounding of their sums.
  as_much = np.sum(np.array(drawn) >= mean - 1e-12)
  p_value = (1 + int(as_much)) / (1 + num_null)
  if values.size == 1:
    return LeakageScore(mean, null, p_value, None)
  # Records of one batch share its gradient, so their mean counts once. The interval holds for any
  # scores. Student's would miss the mean of eight records, of which one in ten is not recovered, in
  # two of five cases: all eight are then alike.
  size = len(values)
  half = (1 - least) * math.sqrt(math.log(2 / 0.05) / (2 * size))
  return LeakageScore(mean, null, p_value, (max(mean - half, least), min(mean + half, 1.0)))


def _unit(rows: np.ndarray) -> np.ndarray:
  """Returns rows [..., d] centred and scaled to length 1; constant rows become 0."""
  centred = rows - rows.mean(-1, keepdims=True)
  length = np.linalg.norm(centred, axis=-1, keepdims=True)
  return np.divide(centred, length, out=np.zeros_like(centred), where=length > 0)


def _finite(name: str, value: HostArray, rank: int) -> np.ndarray:
  array = np.asarray(value, np.float64)
  if array.ndim < rank or not np.isfinite(array).all():
    raise UserError(f"must be finite numbers of at least {rank} axes", field=name)
  largest = np.max(np.abs(array), initial=0.0)
  # Numbers are scaled: no score depends on the scale, and squares of large numbers would overflow.
  return array / largest if largest else array


def dense_leakage(
  kernels: HostArray, x: HostArray, *, num_null: int = 200, seed: int = 0
) -> LeakageScore:
  """Measures how well the best unit of a first dense layer shows each record of a batch.

  Args:
    kernels: [N, d, m], gradients of the first kernel, one for each of N batches.
    x: the batches [N, B, *features], with d features in all. The null pairs the gradients with the
      records of other batches.

  Raises:
    UserError: fewer than 3 batches, NaN, shapes that do not belong together.

  >>> x = np.random.default_rng(0).normal(size=(5, 1, 8))
  >>> leakage = dense_leakage(x.reshape(5, 8, 1) * [[[2.0, -1.0, 0.0]]], x)
  >>> round(leakage.score, 6), bool(np.max(leakage.null) < 0.9)
  (1.0, True)
  """
  slopes = _finite("kernels", kernels, 3)
  batches = _finite("x", x, 3)
  batches = batches.reshape(*batches.shape[:2], -1)
  if slopes.ndim != 3 or slopes.shape[:2] != (batches.shape[0], batches.shape[2]):
    raise UserError(
      f"must be [{batches.shape[0]}, {batches.shape[2]}, units], one gradient "
      f"for each batch of x, got {slopes.shape}",
      field="kernels",
    )
  units = _unit(np.swapaxes(slopes, 1, 2))  # [N, m, d]
  records = _unit(batches)  # [N, B, d]

  def score(order: np.ndarray) -> np.ndarray:
    products = records[order] @ np.swapaxes(units, 1, 2)  # [N, B, m]
    # Rounding may lift a correlation above 1.
    return np.minimum(np.max(np.abs(products), axis=-1), 1.0)

  return _score(score, len(units), num_null, seed, least=0.0)


def recovered_leakage(
  truth: HostArray, recovered: HostArray, *, num_null: int = 200, seed: int = 0
) -> LeakageScore:
  """Measures the correlation of each record [n, ...] with its reconstruction [n, ...].

  Raises:
    UserError: fewer than 3 records, NaN, or different shapes.

  >>> x = np.random.default_rng(0).normal(size=(6, 9))
  >>> round(recovered_leakage(x, 2 * x + 1).score, 6)
  1.0
  """
  a = _finite("truth", truth, 2)
  b = _finite("recovered", recovered, 2)
  if a.shape != b.shape:
    raise UserError(
      f"must have the shape of the truth, {a.shape}, got {b.shape}", field="recovered"
    )
  a = _unit(a.reshape(len(a), -1))
  b = _unit(b.reshape(len(b), -1))
  score = lambda order: np.sum(a[order] * b, axis=1)
  return _score(score, len(a), num_null, seed, least=-1.0)


def _centre(rows: np.ndarray) -> np.ndarray:
  """Returns U-centred distances [n, n] of rows (Székely, Rizzo 2014).

  For two independent sets of rows, the products of these distances sum to 0 on average.
  """
  away = distance.squareform(distance.pdist(rows))
  n = len(rows)
  sums = away.sum(0) / (n - 2)
  centred = away - sums[:, None] - sums[None, :] + away.sum() / ((n - 1) * (n - 2))
  np.fill_diagonal(centred, 0.0)
  return centred


def distance_correlation(
  gradients: HostArray, x: HostArray, *, num_null: int = 200, seed: int = 0
) -> LeakageScore:
  """Computes the bias-corrected distance correlation of gradients [n, p] and inputs [n, ...].

  The result is sign(R) * sqrt(|R|), where R is the correlation of U-centred distances. It is in
  [-1, 1], around 0 for independent pairs, and 1 if the gradients are a similarity transform of the
  inputs. The score without correction is not used: in many dimensions it tends to 1 for all data. A
  pair may also be a whole batch and its gradient.

  Raises:
    UserError: fewer than 4 records, NaN, another number of gradients than inputs.

  >>> x = np.random.default_rng(0).normal(size=(20, 3))
  >>> round(distance_correlation(-2 * x, x).score, 6)
  1.0
  """
  a = _finite("gradients", gradients, 2)
  b = _finite("x", x, 2)
  if len(a) != len(b) or len(a) < 4:
    raise UserError(
      f"must be one for each of at least 4 inputs, got {len(a)} and {len(b)}",
      field="gradients",
    )
  a = _centre(a.reshape(len(a), -1))
  b = _centre(b.reshape(len(b), -1))
  scale = np.sqrt(np.sum(a * a) * np.sum(b * b))
  if scale == 0:
    raise UserError("all alike; their distances say nothing", field="gradients")

  def score(order: np.ndarray) -> np.ndarray:
    ratio = np.sum(a[np.ix_(order, order)] * b) / scale
    return np.array([np.sign(ratio) * np.sqrt(abs(ratio))])

  return _score(score, len(a), num_null, seed, least=-1.0)

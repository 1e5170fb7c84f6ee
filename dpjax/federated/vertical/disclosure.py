"""What the parties of two-party regression could solve for: counted, and refused in time.

In a step on B rows a party with a matrix X [B, d] of its own (b's has the column of ones)
learns X^T r, d linear equations for the B residuals r. A residual is the other party's secret
and, with it, labels or scores. The rules, the same for a and b, over ALL steps that one
`Disclosure` has seen, whichever run or state they belonged to:

| rule                                         | what would happen without it                 |
| -------------------------------------------- | -------------------------------------------- |
| B > d, counted in different rows             | d equations for B residuals: solved          |
| no row of X is (nearly) alone: leverage      | a column that only row i has gives r_i away, |
| h_i <= 0.9, h the diagonal of X (X^T X)^+ X^T| though B > d                                 |
| a row is in one batch only; a batch may come | the difference of two batches with all but   |
| again                                        | one row in common is that row's residual     |
| steps on a batch * d < numbers that the      | residuals change with the weights: new       |
| other party holds in it                      | equations, until its features are determined |
| bits of a's equations < B, where b's weights | residuals are 1/2 - y then: one sum over the |
| are all 0                                    | labels tells as many of them as it has bits  |

A residual r_i is determined by X^T r alone exactly where h_i = 1; X^T r then fixes r up to
the null space, which holds (1 - h_i) of e_i. What a batch holds of the other party's is known
at most up to a rotation of its k features: B k - k (k - 1) / 2 numbers, and b's B labels.

These rules hold for parties that follow the protocol; a party that lies about its own matrix
is not caught. None of this is differential privacy: what is learnt is still true.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from dpjax.validate import UserError

MAX_LEVERAGE = 0.9
# What is too small to be learnt: a share of the largest singular value, and no more than the
# step of the masks' lattice, for small columns may stand beside large ones.
_RANK, _STEP = 1e-9, 2.0**-28
_ROUNDING = 1e-14  # of the singular values themselves, as a share of the largest
_BITS = 20  # below the point of a sum over rows that CKKS decrypts: errors of about 1e-6


def leverages(matrix: np.ndarray) -> np.ndarray:
  """[B] how far each row's own residual is determined by matrix^T residuals, in [0, 1].

  >>> leverages(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 5.0]])).round(6)
  array([0.5, 0.5, 1. ])
  """
  left, values, _ = np.linalg.svd(matrix, full_matrices=False)
  largest = max(values.max(initial=0.0), np.finfo(float).tiny)
  kept = values > max(_ROUNDING * largest, min(_RANK * largest, _STEP))
  return np.sum(left[:, kept] ** 2, axis=1)


def numbers_held(num_rows: int, num_features: int, *, labels: bool) -> int:
  """How many numbers of a party its rows hold, features up to a rotation.

  >>> numbers_held(10, 3, labels=False), numbers_held(10, 3, labels=True)
  (27, 37)
  """
  features = num_rows * num_features - num_features * (num_features - 1) // 2
  return features + num_rows * labels


def _digests(*arrays: np.ndarray) -> list[bytes]:
  """[B] fingerprints of rows."""
  # + 0.0: 0 and -0 are one number
  rows = [np.ascontiguousarray(array + 0.0).reshape(len(array), -1) for array in arrays]
  return [
    hashlib.sha256(b"".join(part.tobytes() for part in row)).digest() for row in zip(*rows)
  ]


class Disclosure:
  """Counts, for both parties, what all steps so far have told, and refuses the step too many.

  It is the parties' memory of the protocol and therefore no part of a step's state: a run
  that starts again from an old state asks again. Give the same one to every
  `two_party_logistic` over the same entities.

  >>> seen, rng = Disclosure(), np.random.default_rng(0)
  >>> x_a, x_b, y = rng.normal(size=(9, 2)), rng.normal(size=(9, 1)), np.arange(9) % 2
  >>> x_b = np.column_stack([x_b, np.ones(9)])
  >>> for _ in range(8):  # a: 2 equations a step, for b's 9 features and 9 labels
  ...   seen.admit(x_a, x_b, y)
  >>> seen.admit(x_a, x_b, y)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: batch: step 9 on these rows would give party a 18 equations; ...
  """

  def __init__(self):
    self._seen: set[bytes] = set()  # rows of all batches
    self._steps: dict[bytes, int] = {}  # batch -> steps on it

  def admit(
    self, x_a: np.ndarray, x_b: np.ndarray, y: np.ndarray, only_labels: bool = False
  ) -> None:
    """Counts one step, or raises.

    Args:
      x_a, x_b: [B, f_a], and [B, f_b + 1] with the column of ones last.
      y: [B] labels, which b holds.
      only_labels: b's weights are all 0, so that its residuals hold nothing but labels.

    Raises:
      UserError: a rule of this module is broken; nothing is counted then.
    """
    rows = _digests(x_a, x_b, np.asarray(y, np.float64))
    first = list({row: i for i, row in enumerate(rows)}.values())  # one of each
    batch = hashlib.sha256(b"".join(sorted(rows))).digest()
    if batch not in self._steps:
      self._check_batch(rows)
      own = {"a": x_a[first], "b": x_b[first]}
      for check in (_check_rows, _check_leverages):
        for party, matrix in own.items():
          check(party, matrix)
    if only_labels:
      _check_labels(x_a[first])
    self._check_steps(batch, len(first), x_a.shape[1], x_b.shape[1])
    self._steps[batch] = self._steps.get(batch, 0) + 1
    self._seen.update(rows)

  def _check_batch(self, rows: list[bytes]) -> None:
    if not self._seen.isdisjoint(rows):
      raise UserError(
        "batch: holds a row of another batch; a row must be in one batch only (the "
        "difference of two batches would tell residuals of single rows)"
      )

  def _check_steps(self, batch: bytes, num_rows: int, width_a: int, width_b: int) -> None:
    step = self._steps.get(batch, 0) + 1
    held = {
      "a": numbers_held(num_rows, width_b - 1, labels=True),  # by b, for a to solve for
      "b": numbers_held(num_rows, width_a, labels=False),
    }
    for party, width in {"a": width_a, "b": width_b}.items():
      if held[party] and step * width >= held[party]:
        raise UserError(
          f"batch: step {step} on these rows would give party {party} {step * width} "
          f"equations; must be fewer than the {held[party]} numbers that the other holds"
        )


def _check_rows(party: str, matrix: np.ndarray) -> None:
  num_rows, width = matrix.shape
  if num_rows <= width:
    raise UserError(
      f"batch: {num_rows} different rows; must be more than the {width} columns of party "
      f"{party} (its gradient would tell every residual)"
    )


def _check_labels(matrix: np.ndarray) -> None:
  bits = float(np.sum(np.log2(1 + np.abs(matrix).sum(axis=0) * 2.0**_BITS)))
  if bits >= len(matrix):
    raise UserError(
      f"batch: {len(matrix)} different rows while b's weights are 0; must be more than "
      f"{math.ceil(bits)}, the bits of party a's {matrix.shape[1]} equations (they would tell "
      "every label); begin with weights of b that are secret, or with more rows"
    )


def _check_leverages(party: str, matrix: np.ndarray) -> None:
  highest = leverages(matrix).max()
  if highest > MAX_LEVERAGE:
    raise UserError(
      f"batch: party {party} has a row of leverage {highest:.3f}; must be <= {MAX_LEVERAGE} "
      "(its gradient would tell that row's residual)"
    )

"""Sums of feature vectors, class by class, in one Gaussian release.

Private synthesis from a kernel mean is built on these sums (Harder, Adamczewski and Park 2021,
arXiv:2002.11603). Each record (x, y) adds its feature vector f(x), of norm at most 1 (in units of
`feature_norm`), to the row of its class y. So it adds v(x, y) = e_y f(x)^T to all rows together,
where e_y is the unit vector of class y.

Sensitivity
-----------
1. add_or_remove_one, replace_special: |v| = |f| <= 1. A vector of norm 1 attains this bound.
2. replace_one: |v - v'| <= |v| + |v'| <= 2. A vector and its opposite, in one class, attain it.

Sums are released, not means, since under add_or_remove_one the number of records is private. Add a
constant feature to release the (noisy) number of records of each class, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from dpjax import trees, validate
from dpjax.mechanisms import finite, least_squares, stated
from dpjax.types import ArrayLike
from dpjax.validate import UserError

_MOST_CLASSES = 2**20
# Largest number of entries of a release: 1 GB in float64.
_MOST_ENTRIES = 2**27


@dataclasses.dataclass(frozen=True)
class ClassSums:
  """Noisy sums of feature vectors by class: rows [n, d], labels [n] -> [K, d].

  Args:
    noise_multiplier: std of the noise / `l2_sensitivity`.
    num_classes: public number K of classes. Every class has a row, even without a record.
    feature_norm: rows are clipped to this l2 norm.
    neighboring_relation: relation of the guarantee.

  Guarantee: one Gaussian release with this `noise_multiplier` and `l2_sensitivity`, if a record
  gives one row. Rows are rounded toward zero to integers and summed exactly. The noise is drawn in
  float64, and the result is rounded to a public grid (`finite`).

  | record                             | outcome                              |
  | ---------------------------------- | ------------------------------------ |
  | NaN or infinity in its features    | counts as zero                       |
  | features longer than the norm      | clipped, each record by itself       |
  | a label outside [0, K)             | counts as zero                       |
  | no records, in a class or at all   | noise around zero                    |

  >>> mechanism = ClassSums(noise_multiplier=1e-3, num_classes=2)
  >>> rows = np.array([[3.0, 4.0], [0.0, 0.5], [1.0, 0.0]])
  >>> mechanism(jax.random.key(0), rows, np.array([0, 0, 1])).round(1).tolist()
  [[0.6, 1.3], [1.0, -0.0]]
  >>> ClassSums(2.0, 10, neighboring_relation="replace_one").l2_sensitivity
  2.0
  """

  noise_multiplier: float
  num_classes: int
  feature_norm: float = 1.0
  neighboring_relation: str = "add_or_remove_one"

  def __post_init__(self) -> None:
    stated.positive(noise_multiplier=self.noise_multiplier, feature_norm=self.feature_norm)
    validate.integer_in(1, _MOST_CLASSES, num_classes=self.num_classes)
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)
    stated.positive(std=self.std)

  @property
  def l2_sensitivity(self) -> float:
    """Returns the largest L2 change of all sums together by one record."""
    hops = 2.0 if self.neighboring_relation == "replace_one" else 1.0
    return hops * float(self.feature_norm)

  @property
  def std(self) -> float:
    """Returns the standard deviation of the noise on every entry."""
    return float(self.noise_multiplier) * self.l2_sensitivity

  def event(self, neighboring_relation: str = "add_or_remove_one") -> stated.DpEvent:
    """Returns the event for `dpjax.accounting`, under `neighboring_relation`."""
    return stated.gaussian_event(
      float(self.noise_multiplier), self.neighboring_relation, neighboring_relation
    )

  def __call__(self, key: jax.Array, rows: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """Returns the noisy sums [K, d], float64."""
    return self.of_chunks(key, [rows], labels)

  def of_chunks(
    self, key: jax.Array, chunks: Iterable[ArrayLike], labels: ArrayLike
  ) -> np.ndarray:
    """Returns the noisy sums [K, d]. Chunks [*, d] hold the rows, in the order of `labels` [n]."""
    # The key is checked before the sums, which take long.
    trees.check_key(key=key)
    return self.noisy(key, self.exact(chunks, labels))

  def noisy(self, key: jax.Array, sums: np.ndarray) -> np.ndarray:
    """Returns the sums of `exact` with noise: [K, d], float64, in units of the features."""
    trees.check_key(key=key)
    norm = float(self.feature_norm)
    return norm * least_squares.noisy_sums(key, sums, self.std / norm)

  def exact(self, chunks: Iterable[ArrayLike], labels: ArrayLike) -> np.ndarray:
    """Returns the sums [K, d] as int64 multiples of 2^-38 of `feature_norm`. NOT private.

    Raises:
      UserError: rows or labels of wrong shapes, no chunk, too many records or entries.
    """
    classes = _classes(labels)
    sums: Any = None
    start = 0
    for chunk in chunks:
      width = None if sums is None else sums.shape[1]
      rows = _rows(chunk, len(classes) - start, width)
      if sums is None:
        if self.num_classes * rows.shape[1] > _MOST_ENTRIES:
          raise UserError(
            f"must give at most {_MOST_ENTRIES} sums with {rows.shape[1]} features",
            field="num_classes",
            value=self.num_classes,
          )
        sums = np.zeros((self.num_classes, rows.shape[1]), np.int64)
      units = least_squares.whole_rows(rows, self.feature_norm)
      units[~np.isfinite(rows).all(axis=1)] = 0.0
      part = classes[start : start + len(rows)]
      start += len(rows)
      member = part[None, :] == np.arange(self.num_classes)[:, None]
      # Entries are integers of at most 2^19, so float64 sums 2^24 of them exactly in any order.
      sums += (member.astype(np.float64) @ units).astype(np.int64)
    if sums is None:
      raise UserError(
        "must come in one chunk or more; where there is no record, one of shape [0, d]",
        field="rows",
      )
    if start != len(classes):
      raise UserError("must be as many as the classes", field="rows")
    return sums << least_squares.BITS

  def statement(self, unit: str = "example") -> str:
    """Describes the release in words, for readers; `unit` is the word for one record."""
    move = f"{self.l2_sensitivity:g}"
    return (
      f"Released once, over all {unit}s: the sum of a feature vector clipped to norm "
      f"{self.feature_norm:g}, for each of {self.num_classes} classes. One {unit} moves all "
      f"sums together by at most {move} in the L2 norm. Exact numbers of "
      "records, of a class or of all, are not used."
    )


def _classes(labels: ArrayLike) -> np.ndarray:
  """Returns labels as an integer array [n]; UserError for another type or shape, or too many."""
  classes = np.asarray(finite.integers("labels", labels))
  if len(classes) > finite.MAX_RECORDS:
    raise UserError(f"must be at most {finite.MAX_RECORDS}", field="labels")
  return classes


def _rows(chunk: ArrayLike, most: int, width: int | None) -> np.ndarray:
  """Returns a chunk as float64 [n, width], with n <= `most`.

  `width` is None for the first chunk, which may have any width. Later chunks must have the same.
  """
  # With one memory layout, a row's norm is rounded in the same way for every kind of array.
  rows = np.asarray(finite.array("rows", chunk), np.float64, order="C")
  if rows.ndim != 2 or not rows.shape[1] or len(rows) > most:
    raise UserError(
      f"must have shape [{most}, d], one row for each label, not {rows.shape}",
      field="rows",
    )
  # NumPy would broadcast a chunk of one feature to every column, far beyond the sensitivity.
  if width not in (None, rows.shape[1]):
    raise UserError(
      f"must have {width} features in every chunk, not {rows.shape[1]}", field="rows"
    )
  return rows

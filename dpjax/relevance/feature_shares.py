"""From relevance maps to each feature's share: p [n, d] on the simplex, and its mean R [d].

A feature is an entry of an input, or a place of an image, whose channels are summed. The privacy
proofs need one fact: every row of p is >= 0 and sums to 1, for every record and model. So with a
fixed model, replacing a record moves the mean by at most 2 / n in the L1 norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from dpjax import validate
from dpjax.data import Dataset
from dpjax.relevance import lrp
from dpjax.relevance.lrp import Lrp
from dpjax.types import HostArray, Params
from dpjax.validate import UserError

NORMS = ("abs", "relu", "raw")
# A relevance map whose weights have at most this sum counts as one without information.
_NOTHING = 1e-12


def num_features(shape: tuple[int, ...]) -> int:
  """Number of features of one example: places of an image [H, W, C], entries of anything
  else.

  >>> num_features((28, 28, 1)), num_features((32, 32, 3)), num_features((5,))
  (784, 1024, 5)
  """
  return int(np.prod(shape[:2] if len(shape) == 3 else shape))


def shares(scores: HostArray, norm: str = "abs") -> np.ndarray:
  """Turns relevance scores [n, *features] into shares p [n, d], float64.

  | norm   | share of feature j        | on the simplex?                         |
  | ------ | ------------------------- | --------------------------------------- |
  | "abs"  | abs(R_j) / sum abs(R)     | always                                  |
  | "relu" | max(R_j, 0) / sum of them | always                                  |
  | "raw"  | R_j / sum R (eq. 10)      | UserError unless every R has one sign   |

  Where the divisor of "abs" or "relu" is at most 1e-12 or not finite, the row becomes 1 / d.
  Dropping the row would make n depend on the data. "raw" raises unless its shares are in [0, 1].

  >>> shares([[[[3.0, -2.0]], [[-3.0, 0.0]]]])  # one image of 2 places, 2 channels
  array([[0.25, 0.75]])
  """
  validate.one_of(NORMS, rel_norm=norm)
  by_channel = np.asarray(scores, np.float64)
  # The channels of a pixel are one feature, whose relevance is the sum over the channels.
  summed = by_channel.sum(axis=3) if by_channel.ndim == 4 else by_channel
  places = summed.reshape(len(summed), -1)
  if norm == "raw":
    return _raw(places)
  weights = np.abs(places) if norm == "abs" else np.maximum(places, 0)
  total = weights.sum(axis=1, keepdims=True)
  useful = np.isfinite(total) & (total > _NOTHING)
  uniform = 1 / places.shape[1]
  # The inner calls of `where` avoid NumPy's warnings about rows without information.
  return np.where(
    useful, np.where(useful, weights, 0) / np.where(useful, total, 1), uniform
  )


def _raw(places: np.ndarray) -> np.ndarray:
  p = places / places.sum(axis=1, keepdims=True)
  bad = int(np.count_nonzero(~np.isfinite(p).all(axis=1) | (p < 0).any(axis=1)))
  if bad:
    raise UserError(
      f"{bad} of {len(p)} relevance maps have shares outside [0, 1], which "
      "eq. 10 of the paper rules out; use 'abs' or 'relu', or the rule 'z_plus' "
      "with relu",
      field="rel_norm",
      value="raw",
    )
  return p


@functools.lru_cache(maxsize=16)
def _compile(apply: Callable, how: Lrp) -> Callable[..., Any]:
  return jax.jit(lambda params, x, y: lrp.relevance(apply, params, x, y, how).scores)


def mean_shares(
  apply: Callable,
  params: Params,
  data: Dataset,
  how: Lrp,
  *,
  norm: str = "abs",
  batch_size=200,
) -> np.ndarray:
  """Returns the mean R [d] over `data` of each feature's share. R sums to 1. NOT private.

  Args:
    apply: function of the net. Pass the same object each time, so that it is compiled once.
    data: object with arrays `.x` [n, ...] and `.y` [n].

  Guarantee: replacing one record of `data` changes R by at most 2 / n in the L1 norm and
  sqrt(2) / n in the L2 norm. It needs the norm "abs" or "relu", and parameters that do not depend
  on `data`.
  """
  if not isinstance(apply, Hashable):
    raise UserError(
      "must be hashable: a function, or a bound method as model.apply", field="apply"
    )
  run = _compile(apply, how)
  total = 0.0
  for start in range(0, len(data.y), batch_size):
    x = data.x[start : start + batch_size]
    y = data.y[start : start + batch_size]
    # A batch of another size may round every row otherwise. So the last batch is padded: a record
    # more or less moves no other record's share. And one compilation serves all batches.
    missing = batch_size - len(y)
    x = np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    scores = np.asarray(run(params, x, np.pad(y, (0, missing))))[: len(y)]
    total = total + shares(scores, norm).sum(axis=0)
  return np.asarray(total) / len(data.y)


def l1_sensitivity(num_records: int, neighboring_relation: str = "replace_one") -> float:
  """Returns the bound on how far one record moves the mean share, in the L1 norm.

  Under add_or_remove_one the sum of shares must be divided by a public `num_records`, not by the
  true number of records.

  >>> l1_sensitivity(1000), l1_sensitivity(1000, "add_or_remove_one")
  (0.002, 0.001)
  """
  validate.integer_at_least(1, num_records=num_records)
  return (2 if neighboring_relation == "replace_one" else 1) / num_records

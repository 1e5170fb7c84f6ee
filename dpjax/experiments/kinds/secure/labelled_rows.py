"""Rows and labels for training on shares, and test rows for predictions."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np


class LabelledRows(NamedTuple):
  """Holds the data of a training on shares: float64, except the integers `test_labels`."""

  x: np.ndarray  # [n, d]
  y: np.ndarray  # [n, k] 0 or 1
  test_x: np.ndarray  # [m, d]
  test_labels: np.ndarray  # [m]


def data_digest(loaded: LabelledRows) -> bytes:
  """Returns the SHA-256 digest of the training rows and labels; test rows do not count."""
  return hashlib.sha256(loaded.x.tobytes() + loaded.y.tobytes()).digest()

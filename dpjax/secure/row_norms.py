"""Rows of numbers, bounded by their owner before they are summed or shared."""

from __future__ import annotations

import numpy as np


def shorten(rows: np.ndarray, norm: float, *, inside: float) -> np.ndarray:
  """Returns finite rows [n, d], those longer than `inside` * `norm` scaled to that length.

  Args:
    inside: a little below 1, so that rounding cannot put a row outside of `norm`.

  >>> shorten(np.array([[3.0, 4.0], [0.5, 0.0]]), 2.5, inside=1.0).tolist()
  [[1.5, 2.0], [0.5, 0.0]]
  """
  # Rows are divided by their largest entry first: the square of 1e200 is infinite.
  largest = np.abs(rows).max(axis=1, keepdims=True, initial=1e-300)
  # Overflow is harmless: a row whose norm is infinite becomes zero, and one of zeros is not scaled.
  with np.errstate(over="ignore"):
    norms = largest * np.linalg.norm(rows / largest, axis=1, keepdims=True)
    scale = np.minimum(1.0, inside * float(norm) / np.maximum(norms, 1e-300))
  return rows * scale

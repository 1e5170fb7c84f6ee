"""Fixed, public preprocessing: nothing here is estimated from the data.

The pixel mean and standard deviation that circulate for a data set (such as .1307 and
.3081 for MNIST) were computed from its training images. If these images are the private data,
using their mean is a query that no epsilon here accounts for. So dpjax offers no table of means.
It offers `center`, whose constants are public: the middle and the half width of the pixel
range. And it offers `standardize`, for constants that you state.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpjax.data.dataset import Dataset
from dpjax.data.rows import Rows
from dpjax.types import HostArray
from dpjax.validate import UserError


def _constant(name: str, value: Any, channels: int) -> np.ndarray:
  try:
    constant = np.asarray(value, np.float32)
  # NumPy raises these errors for "estimate" or for a function, for example.
  except (TypeError, ValueError):
    constant = None
  if value is None or constant is None:
    raise UserError(
      "must be a public constant: estimating it from private data is a query "
      "that no epsilon charges; use center(x) = (x - 0.5) / 0.5 instead",
      field=name,
      value=value,
    )
  if constant.shape not in ((), (1,), (channels,)) or not np.isfinite(constant).all():
    raise UserError(
      f"must be finite, one number or {channels} (one each)", field=name, value=value
    )
  return constant


def standardize(data: Dataset | Rows | HostArray, mean: HostArray, std: HostArray) -> Any:
  """Returns (x - mean) / std with PUBLIC constants.

  The result is a `Dataset` for a `Dataset`, `Rows` for `Rows`, else an array.
  `mean` and `std` are one number, or one for each entry of the last axis (the channel).
  They must not come from the private data, but from another, public data set or the definition of
  the range. This function cannot estimate them.

  Raises:
    UserError: for a request such as `mean="estimate"`, a wrong shape, std <= 0, or integer data.

  >>> standardize(np.array([[0.0, 1.0]], np.float32), mean=0.5, std=[0.5, 0.25])
  array([[-1.,  2.]], dtype=float32)
  >>> standardize(np.zeros((1, 1)), mean="estimate", std=1.0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: mean='estimate': must be a public constant: ...
  """
  if isinstance(data, Dataset):
    return dataclasses.replace(data, x=standardize(data.x, mean, std))
  if isinstance(data, Rows):
    # Without this call, a wrong constant would raise its error only when rows are read.
    standardize(data[:0], mean, std)
    return data.then(lambda x: standardize(x, mean, std))
  x = np.asarray(data)
  if x.dtype.kind != "f":
    raise UserError(f"must be floats to be standardized, got {x.dtype}", field="x")
  mean = _constant("mean", mean, x.shape[-1])
  std = _constant("std", std, x.shape[-1])
  if not (std > 0).all():
    raise UserError("must be > 0", field="std", value=std.tolist())
  return (x.astype(np.float32, copy=False) - mean) / std


def center(data: Dataset | HostArray) -> Any:
  """Returns (x - 0.5) / 0.5, which maps the public pixel range [0, 1] to [-1, 1].

  >>> center(np.array([0.0, 0.5, 1.0]))
  array([-1.,  0.,  1.], dtype=float32)
  """
  return standardize(data, mean=0.5, std=0.5)

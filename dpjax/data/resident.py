"""A data set on the accelerator, where batches are gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from dpjax.columns import Columns
from dpjax.data.rows import Rows
from dpjax.parallel import spanning
from dpjax.types import Example, Labelled
from dpjax.validate import UserError

# Largest size of the inputs of a data set that `resident` moves to the device by default.
LIMIT_BYTES = 8 * 2**30


@jax.jit
def _take(arrays: Any, indices: jax.Array) -> Any:
  return jax.tree.map(lambda array: jnp.take(array, indices, axis=0), arrays)


class Resident:
  """Holds `x` and `y` of a data set as device arrays. `d[indices]` gathers rows on the device.

  The gathered values are the same as those of the data set on the host. A CPU may hold both in the
  same memory, so nobody may write to the data set later.

  Args:
    everywhere: sharding that places the whole data set on each of several devices.
    split: function that shards gathered rows over these devices, so that each device gathers only
      its part.

  >>> from dpjax.data.dataset import from_arrays
  >>> d = Resident(from_arrays(np.arange(6.0).reshape(3, 2), [0, 1, 1], num_classes=2))
  >>> d[np.array([2, 0])].x.tolist(), len(d)
  ([[4.0, 5.0], [0.0, 1.0]], 3)
  """

  def __init__(
    self,
    dataset: Labelled,
    everywhere: Sharding | None = None,
    split: Callable[[Any], Any] | None = None,
  ):
    if not hasattr(dataset, "x"):
      raise UserError(
        f"is {type(dataset).__name__}, must be a data set with x and y; group users after it: "
        "group_by_user(Resident(data), ...)",
        field="dataset",
      )
    x = dataset.x.tree if isinstance(dataset.x, Columns) else dataset.x
    arrays = Example(x, dataset.y)
    # `jnp.asarray` would hold a second copy while it compiles one.
    put = jax.device_put
    if everywhere is not None:
      put = functools.partial(spanning.place, sharding=everywhere)
    self._arrays = jax.tree.map(put, arrays)
    shared = lambda arrays, indices: split(_take(arrays, indices))  # type: ignore[misc]
    self._take = _take if split is None else jax.jit(shared)
    # The masking of batches reads `present`.
    self.present = getattr(dataset, "present", None)
    # The check of capacities reads `nominal_size`.
    self.nominal_size = getattr(dataset, "nominal_size", None)
    # A plan reads whether a row is all of one user.
    self.unit = getattr(dataset, "unit", "")
    # Several devices get equally many rows each, so a batch may have more rows than requested.
    self.adds_rows = split is not None

  def __len__(self) -> int:
    return self._arrays.y.shape[0]

  def __getitem__(self, indices: np.ndarray) -> Example:
    return self._take(self._arrays, indices)


def resident_bytes(dataset: Labelled, limit_bytes: int = LIMIT_BYTES) -> int:
  """Returns the bytes that `resident` takes on each device for a data set; 0 if it stays on the
  host."""
  fits = dataset.x.nbytes <= limit_bytes and not isinstance(dataset.x, Rows)
  return dataset.x.nbytes + np.asarray(dataset.y).nbytes if fits else 0


def resident(dataset: Labelled, limit_bytes: int = LIMIT_BYTES, **placed: Any) -> Any:
  """Returns a data set on the device, as `Resident`, if its inputs fit into `limit_bytes`. Returns
  larger data, and data in files, as they are. `placed` holds the arguments `everywhere` and `split`
  of `Resident`."""
  return Resident(dataset, **placed) if resident_bytes(dataset, limit_bytes) else dataset

"""The mean of each coordinate without its extremes (Yin et al. 2018)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from dpjax import validate
from dpjax.federated.aggregation import Aggregator
from dpjax.federated.aggregators.robust import Counts, by_rank, robust
from dpjax.federated.described import aggregator
from dpjax.types import Array
from dpjax.validate import UserError


def _num_trimmed(n: int, *, trim: float) -> int:
  # As in `trimmed_mean`, 1e-6 makes up for products just below an integer, such as 0.29 * 100.
  return int(trim * n + 1e-6)


@aggregator(
  source="Yin et al. 2018",
  stands_up_to="floor(trim n) of them",
  tolerates=_num_trimmed,
  options={"trim": 0.1},
)
def trimmed_mean(trim: float) -> Aggregator:
  """The mean of each coordinate without the floor(trim * n) smallest and largest values.

  Args:
    trim: share of the values that is cut off at either end, in [0, 0.5).

  >>> messages = jnp.array([[-1e9], [1.0], [2.0], [3.0], [1e9]])
  >>> trimmed_mean(0.2).update(messages, jnp.ones(5, bool), ())[0]
  Array([2.], dtype=float32)
  """
  validate.non_negative(trim=trim)
  if trim >= 0.5:
    raise UserError("must be in [0, 0.5)", field="trim", value=trim)

  def combine(messages: Any, kept: Array, counts: Counts) -> Any:
    del counts
    count = jnp.sum(kept)
    ranks = jnp.arange(kept.shape[0])
    # 1e-6 makes up for products just below an integer, such as 0.29 * 100.
    cut = jnp.floor(trim * count + 1e-6).astype(count.dtype)
    inside = (ranks >= cut) & (ranks < count - cut)
    return by_rank(messages, kept, inside / jnp.maximum(jnp.sum(inside), 1)), ()

  return robust(combine)

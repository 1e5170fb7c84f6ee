"""The median of each coordinate (Yin et al. 2018)."""

from __future__ import annotations

from dpjax.federated.aggregation import Aggregator
from dpjax.federated.aggregators.robust import coordinate_median, robust
from dpjax.federated.described import aggregator, minority


@aggregator(
  source="Yin et al. 2018",
  stands_up_to="fewer than half, per coordinate",
  tolerates=minority,
)
def median() -> Aggregator:
  """The median of each coordinate; the mean of the middle two for an even number of messages.

  >>> import jax.numpy as jnp
  >>> update = median().update(jnp.array([[1.0], [2.0], [1e9]]), jnp.ones(3, bool), ())
  >>> update[0]
  Array([2.], dtype=float32)
  """
  return robust(lambda messages, kept, counts: (coordinate_median(messages, kept), ()))

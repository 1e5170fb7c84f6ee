"""A round of FedJAX's federated averaging on the benchmark's own cohort, to compare with.

FedJAX is no longer maintained: 0.0.17, its last release, calls `jax.tree_map`, which JAX has
removed. That one name is given back, for FedJAX alone to use; install it with
`pip install fedjax==0.0.17 --no-deps` and `pip install dm-haiku msgpack`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.federated.cohort import Cohort
from dpjax.types import Example, LossFn, Params


def is_installed() -> bool:
  """Whether FedJAX is there."""
  return importlib.util.find_spec("fedjax") is not None


def one_round(
  loss_fn: LossFn, params: Params, cohort: Cohort, rate: float
) -> Callable[[], Any]:
  """() -> the server's parameters after one round of SGD at every client.

  Args:
    cohort: a `Cohort` of rows, all of whose batches have one size.
  """
  if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree.map  # type: ignore[attr-defined]
  import fedjax  # type: ignore[import-not-found]

  def mean_loss(params: Any, batch: Any, rng: Any) -> Any:
    del rng
    return jnp.mean(jax.vmap(loss_fn, (None, 0))(params, Example(batch["x"], batch["y"])))

  size = cohort.batches[0].mask.shape[1]
  algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    jax.grad(mean_loss),
    fedjax.optimizers.sgd(rate),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=size, num_epochs=1, drop_remainder=True),
  )
  x = np.asarray(cohort.data.x)
  y = np.asarray(cohort.data.y)
  rows = [np.asarray(batches.examples).ravel() for batches in cohort.batches]
  clients = [
    (who, fedjax.ClientDataset({"x": x[row], "y": y[row]}), jax.random.key(who))
    for who, row in enumerate(rows)
  ]
  state = algorithm.init(params)
  return lambda: jax.block_until_ready(algorithm.apply(state, clients)[0].params)

"""Training of the attacker's models by minibatch Adam, with one compiled step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import validate
from dpjax.types import Array, ArrayTree, Params
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class Fit:
  """Adam on batches drawn with replacement; the learning rate falls to 0 along a cosine.

  Args:
    steps: number of steps of the optimizer.
    batch_size: number of rows of each step, which may exceed the number of all rows.
  """

  steps: int = 2000
  learning_rate: float = 1e-3
  batch_size: int = 128

  def __post_init__(self):
    validate.integer_at_least(1, steps=self.steps, batch_size=self.batch_size)
    validate.positive(learning_rate=self.learning_rate)

  def __call__(
    self,
    loss: Callable[[Params, ArrayTree], Array],
    params: Params,
    rows: ArrayTree,
    *,
    seed: int,
  ) -> Params:
    """Returns the parameters after all steps from `params`.

    Args:
      loss: `(params, batch) -> scalar`, where batch has leaves [batch_size, ...].
      rows: training data, leaves [n, ...].

    Raises UserError for no rows, or if the last loss is not finite.

    >>> squares = lambda w, x: jnp.mean((w - x) ** 2)
    >>> fit = Fit(steps=300, learning_rate=0.1, batch_size=4)
    >>> print(round(float(fit(squares, jnp.float32(0), np.full(3, 2.0, np.float32), seed=0)), 2))
    2.0
    """
    validate.integer_at_least(0, seed=seed)
    rows = jax.tree.map(np.asarray, rows)
    count = len(jax.tree.leaves(rows)[0])
    if not count:
      raise UserError("must hold at least one to be trained on", field="rows")
    tx = optax.adam(optax.cosine_decay_schedule(self.learning_rate, self.steps))

    @jax.jit
    def step(params: Params, state: Any, batch: ArrayTree) -> Any:
      value, gradient = jax.value_and_grad(loss)(params, batch)
      updates, state = tx.update(gradient, state, params)
      return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(seed)
    state = tx.init(params)
    value = jnp.float32(0)
    for _ in range(self.steps):
      places = rng.integers(count, size=self.batch_size)
      batch = jax.tree.map(lambda leaf, at=places: leaf[at], rows)
      params, state, value = step(params, state, batch)
    # NaN spreads to all later values, so checking the last one is enough.
    if not np.isfinite(float(value)):
      raise UserError(
        "the attacker's model diverged", field="learning_rate", value=self.learning_rate
      )
    return params

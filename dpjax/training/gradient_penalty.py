"""The gradient penalty of WGAN-GP for ONE pair of a real and a generated example."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.types import Array
from dpjax.validate import UserError


def gradient_penalty(
  score: Callable[[Array], Array], real: Array, generated: Array, key: Array
) -> Array:
  """Returns (|gradient of the score| - 1)^2 at a random point between two examples.

  Use it within the critic's loss of `recipes.adversarial`, whose examples are pairs. The penalty
  then reads one private example, as the rest of that loss does. Clipping bounds the gradient of the
  whole loss, so the penalty costs no privacy and needs no separate bound.

  Args:
    score: the critic's score of ONE example, a scalar.
    real, generated: the two examples of one pair, of one shape.
    key: typed key of the point, which is uniform between the two examples. `recipes.adversarial`
      passes a secret key to `pair`: make this one from it by `jax.random.split`.

  Returns:
    A scalar, at least 0.

  Raises:
    UserError: examples of two shapes, a real example that is not of floats, or a score that is no
      scalar. A penalty of a batch would mix examples, so clipping would not bound the influence of
      one example.

  Source: Gulrajani et al. 2017 (arXiv:1704.00028), equation 3.

  >>> linear = lambda x: jnp.sum(jnp.array([3.0, 4.0]) * x)
  >>> float(gradient_penalty(linear, jnp.ones(2), jnp.zeros(2), jax.random.key(0)))
  16.0
  """
  trees.check_key(key=key)
  real = jnp.asarray(real)
  generated = jnp.asarray(generated)
  if real.shape != generated.shape:
    raise UserError(
      f"must be of the real example's shape {real.shape}",
      field="generated",
      value=generated.shape,
    )
  shape = jax.eval_shape(score, real).shape
  if shape != ():
    raise UserError(
      "must be one number for ONE example; a penalty of several joins them, and clipping bounds "
      f"none: its shape is {shape}",
      field="score",
    )
  if not jnp.issubdtype(real.dtype, jnp.floating):
    raise UserError("must hold floats", field="real", value=str(real.dtype))
  share = jax.random.uniform(key, (), real.dtype)
  between = share * real + (1 - share) * generated
  squared = jnp.sum(jnp.square(jax.grad(score)(between)))
  # If the critic's gradient is 0, the root has an infinite slope. Then 0 * infinity would be NaN,
  # and an example whose gradient is NaN is dropped.
  flat = squared == 0
  norm = jnp.where(flat, 0.0, jnp.sqrt(jnp.where(flat, 1.0, squared)))
  return jnp.square(norm - 1)

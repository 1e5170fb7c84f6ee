"""Augmentation multiplicity (De et al. 2022): several augmented copies of one example,
averaged BEFORE its gradient is clipped, so the privacy cost is that of one copy."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax import validate
from dpjax.types import Array, Example, LossFn

AugmentFn = Callable[[Array, Array], Array]  # (key, x [H, W, C]) -> x [H, W, C]


def shift(key: Array, x: Array, *, pixels: int = 4) -> Array:
  """A random crop of the reflected image: each axis moves by at most `pixels`.

  >>> shift(jax.random.key(0), jnp.ones((8, 8, 1))).shape
  (8, 8, 1)
  """
  padded = jnp.pad(x, ((pixels, pixels), (pixels, pixels), (0, 0)), mode="reflect")
  corner = jax.random.randint(key, (2,), 0, 2 * pixels + 1)
  return jax.lax.dynamic_slice(padded, (corner[0], corner[1], 0), x.shape)


def flip_shift(key: Array, x: Array, *, pixels: int = 4) -> Array:
  """`shift`, then mirrored left to right with probability 1/2."""
  key_flip, key_shift = jax.random.split(key)
  moved = shift(key_shift, x, pixels=pixels)
  return jnp.where(jax.random.bernoulli(key_flip), moved[:, ::-1], moved)


AUGMENTATIONS: dict[str, AugmentFn] = {"shift": shift, "flip_shift": flip_shift}


def augmented(loss_fn: LossFn, augment_fn: AugmentFn, *, augmult: int) -> LossFn:
  """The loss of one example averaged over `augmult` augmented copies.

  Args:
    loss_fn: `(params, Example(x, y)) -> scalar`.
    augment_fn: `(key, x) -> x`.
    augmult: number of copies, K >= 1.

  Returns:
    A loss that reads `example.key`, one typed key per example.

  >>> loss_fn = lambda w, example: w * jnp.sum(example.x)
  >>> loss = augmented(loss_fn, lambda key, x: x + 1, augmult=3)
  >>> loss(2.0, Example(jnp.ones(2), 0, jax.random.key(0)))
  Array(8., dtype=float32)
  """
  validate.integer_at_least(1, augmult=augmult)

  def loss(params, example):
    if example.key is None:
      raise validate.UserError("example.key=None: augmentation needs a key per example")
    copies = jax.vmap(augment_fn, in_axes=(0, None))(
      jax.random.split(example.key, augmult), example.x
    )
    losses = jax.vmap(lambda x: loss_fn(params, Example(x, example.y)))(copies)
    return jnp.mean(losses)

  return loss

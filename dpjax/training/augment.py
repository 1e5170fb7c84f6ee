"""Augmentation multiplicity (De et al. 2022): an example's loss is averaged over augmented copies.

The gradient of the average is clipped, so the privacy cost is that of one copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpjax import validate
from dpjax.key_uses import KeyUse, key_for
from dpjax.types import Array, Example, LossFn

AugmentFn = Callable[[Array, Array], Array]  # (key, x [H, W, C]) -> x [H, W, C]


def shift(key: Array, x: Array, *, pixels: int = 4) -> Array:
  """Shifts the image along each axis by a random number of pixels, reflected at the edges.

  The number is at most `pixels` in each direction.

  >>> shift(jax.random.key(0), jnp.ones((8, 8, 1))).shape
  (8, 8, 1)
  """
  padded = jnp.pad(x, ((pixels, pixels), (pixels, pixels), (0, 0)), mode="reflect")
  corner = jax.random.randint(key, (2,), 0, 2 * pixels + 1)
  return jax.lax.dynamic_slice(padded, (corner[0], corner[1], 0), x.shape)


def flip_shift(key: Array, x: Array, *, pixels: int = 4) -> Array:
  """Applies `shift`, then mirrors the image left to right with probability 1/2."""
  key_flip, key_shift = jax.random.split(key)
  moved = shift(key_shift, x, pixels=pixels)
  return jnp.where(jax.random.bernoulli(key_flip), moved[:, ::-1], moved)


def crop_color(
  key: Array, x: Array, *, least_area: float = 0.2, strength: float = 0.4
) -> Array:
  """Takes a random part of the image, enlarges it to full size, mirrors it at random and
  changes its colours.

  Args:
    least_area: smallest area of the part, as a share of the image's area, up to 3/4. Above 3/4 a
      part may be smaller than that, because no side is longer than the image's.
      The sides of the part, as shares of the image's sides, have a ratio from 3/4 to 4/3.
    strength: each channel's contrast changes by at most this share, and its mean by at most
      this many standard deviations of the image. Results are clipped to the image's range.

  >>> crop_color(jax.random.key(0), jnp.ones((8, 8, 3))).shape  # doctest: +SLOW
  (8, 8, 3)
  """
  key_crop, key_flip, key_color = jax.random.split(key, 3)
  x = _crop(key_crop, x, least_area)
  x = jnp.where(jax.random.bernoulli(key_flip), x[:, ::-1], x)
  # Contrast and brightness of each channel change; pixels stay within the range of the image.
  drawn = jax.random.uniform(key_color, (2, 1, 1, x.shape[-1]), minval=-1, maxval=1)
  factor, offset = strength * drawn
  mean = jnp.mean(x, axis=(0, 1), keepdims=True)
  changed = mean + (1 + factor) * (x - mean) + offset * jnp.std(x)
  return jnp.clip(changed, jnp.min(x), jnp.max(x))


def _crop(key: Array, x: Array, least_area: float) -> Array:
  key_size, key_corner = jax.random.split(key)
  area, skew = jax.random.uniform(key_size, (2,))
  ratio = (4 / 3) ** (2 * skew - 1)
  area = least_area + (1 - least_area) * area
  part = jnp.minimum(jnp.sqrt(area * jnp.stack([ratio, 1 / ratio])), 1)  # of each side
  corner = jax.random.uniform(key_corner, (2,)) * (1 - part) * jnp.array(x.shape[:2])
  return jax.image.scale_and_translate(
    x, x.shape, (0, 1), 1 / part, -corner / part, "linear", antialias=False
  )


AUGMENTATIONS: dict[str, AugmentFn] = {
  "shift": shift,
  "flip_shift": flip_shift,
  "crop_color": crop_color,
}


def augment(loss_fn: LossFn, augment_fn: AugmentFn, *, augmult: int) -> LossFn:
  """Returns the loss of one example averaged over `augmult` augmented copies.

  Args:
    loss_fn: `(params, Example(x, y)) -> scalar`.
    augment_fn: `(key, x) -> x`.
    augmult: number of copies, K >= 1.

  Returns:
    A loss that reads `example.key`, one typed key per example.

  >>> loss_fn = lambda w, example: w * jnp.sum(example.x)
  >>> loss = augment(loss_fn, lambda key, x: x + 1, augmult=3)
  >>> loss(2.0, Example(jnp.ones(2), 0, jax.random.key(0)))
  Array(8., dtype=float32)
  """
  validate.integer_at_least(1, augmult=augmult)

  def loss(params, example):
    if example.key is None:
      raise validate.UserError(
        "augmentation needs a key per example", field="example.key", value=None
      )
    keys = jax.random.split(example.key, augmult)
    copies = jax.vmap(augment_fn, in_axes=(0, None))(keys, example.x)
    # Random draws of a model, such as dropout, are new for each copy.
    model_keys = jax.vmap(functools.partial(key_for, KeyUse.MODEL))(keys)
    loss_of_copy = lambda x, key: loss_fn(params, Example(x, example.y, key))
    losses = jax.vmap(loss_of_copy)(copies, model_keys)
    return jnp.mean(losses)

  return loss

"""Contrastive learning without labels or privacy: alignment and uniformity of two views.

Wang and Isola (2020, arXiv 2005.10242) train embeddings on the unit sphere: two augmented views of
one image are pulled together, and different images are spread over the sphere. The loss is that of
a whole BATCH: every example changes the gradient of every other. No clip norm bounds this
influence, so clipping examples cannot make anything here private. Use it for data that nobody owns,
such as images of random processes (Baradad et al. 2021, arXiv 2106.05963).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpjax import trees, validate
from dpjax.gradients import arguments
from dpjax.losses import Apply
from dpjax.training import schedule_free
from dpjax.training.augment import AugmentFn
from dpjax.training.dp_sgd import StepInfo, TrainState, average
from dpjax.types import Algorithm, Array, Batch, Params

# Factor t of squared distances in `uniformity`. It is as published, like the square in `alignment`.
_TEMPERATURE = 2.0
# Squared length below which a point is not stretched to length 1.
_LEAST = 1e-12


def on_sphere(z: Array) -> Array:
  """Returns points [B, D] divided by their lengths, or by 1e-6 if it is larger, so that 0 stays 0.

  They are in float32 or wider.

  >>> on_sphere(jnp.array([[3.0, 4.0], [0.0, 0.0]]))
  Array([[0.6, 0.8],
         [0. , 0. ]], dtype=float32)
  """
  z = trees.at_least_float32(z)
  return z * jax.lax.rsqrt(jnp.maximum(jnp.sum(z * z, axis=1, keepdims=True), _LEAST))


def alignment(u: Array, v: Array, mask: Array) -> Array:
  """Returns the mean over i of |u_i - v_i|^2; u and v [B, D] are two views of the same examples.

  Args:
    mask: [B] bool; False is padding, which does not count.

  >>> here, there = jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 1.0]])
  >>> print(alignment(here, here, jnp.array([True])), alignment(here, there, jnp.array([True])))
  0.0 2.0
  """
  squared = jnp.sum((u - v) ** 2, axis=1)
  return jnp.sum(jnp.where(mask, squared, 0)) / jnp.maximum(jnp.sum(mask), 1)


def uniformity(u: Array, mask: Array) -> Array:
  """Returns log(mean over pairs i != j of exp(-2 |u_i - u_j|^2)) of rows u_i [B, D] of length 1.

  It is 0 if all points coincide, and smallest if they are uniform on the sphere. With fewer than
  two points it is 0.

  >>> ends = jnp.array([[1.0, 0.0], [-1.0, 0.0]])
  >>> print(uniformity(ends, jnp.array([True, True])))  # -2 * 2^2
  -8.0
  """
  lengths = jnp.sum(u * u, axis=1)
  products = jnp.matmul(u, u.T, precision=jax.lax.Precision.HIGHEST)
  # Rounding may make a squared distance negative, so it is raised to 0.
  squared = jnp.maximum(lengths[:, None] + lengths[None, :] - 2 * products, 0)
  pairs = mask[:, None] & mask[None, :] & ~jnp.eye(len(mask), dtype=bool)
  count = jnp.sum(pairs)
  total = jnp.sum(jnp.where(pairs, jnp.exp(-_TEMPERATURE * squared), 0))
  # Without pairs this is log 1, since log 0 would make the gradient NaN.
  return jnp.log(jnp.where(count > 0, total / jnp.maximum(count, 1), 1))


def alignment_and_uniformity(u: Array, v: Array, mask: Array) -> Array:
  """Returns alignment(u, v) + (uniformity(u) + uniformity(v)) / 2, for views on the unit sphere.

  >>> ends = jnp.array([[1.0, 0.0], [-1.0, 0.0]])
  >>> print(alignment_and_uniformity(ends, ends, jnp.array([True, True])))
  -8.0
  """
  spread = (uniformity(u, mask) + uniformity(v, mask)) / 2
  return alignment(u, v, mask) + spread


def two_views(augment_fn: AugmentFn, keys: Array, x: Array) -> tuple[Array, Array]:
  """Returns two augmented views [B, H, W, C] of the images x; `keys` [B] holds one key per image.

  >>> first, second = two_views(lambda key, x: x, jax.random.split(jax.random.key(0), 3),
  ...   jnp.ones((3, 8, 8, 1)))
  >>> first.shape == second.shape == (3, 8, 8, 1)
  True
  """
  keys = jax.vmap(jax.random.split)(keys)  # [B, 2]
  both = jax.vmap(jax.vmap(augment_fn, (0, None)))(keys, x)  # [B, 2, ...]
  return both[:, 0], both[:, 1]


def contrastive_loss(
  apply: Apply, augment_fn: AugmentFn, params: Params, batch: Batch, keys: Array
) -> Array:
  """Returns `alignment_and_uniformity` of the embeddings apply(params, x) [B, D] of two views.

  Args:
    batch: images `batch.examples.x` [B, H, W, C]; labels are not read.
    keys: [B], one typed key for each example.

  >>> from dpjax.types import Example
  >>> x = jnp.array([1.0, -1.0]).reshape(2, 1, 1, 1)
  >>> batch = Batch(Example(x, None), jnp.array([True, True]))
  >>> apply, keys = lambda params, x: x.reshape(-1, 1), jax.random.split(jax.random.key(0))
  >>> print(contrastive_loss(apply, lambda key, x: x, None, batch, keys))
  -8.0
  """
  views = two_views(augment_fn, keys, batch.examples.x)
  u, v = jnp.split(on_sphere(apply(params, jnp.concatenate(views))), 2)
  return alignment_and_uniformity(u, v, batch.mask)


def contrastive(
  apply: Apply,
  augment_fn: AugmentFn,
  tx: optax.GradientTransformation,
  *,
  view_key: Array,
  ema_decay: float | None = None,
) -> Algorithm:
  """Gradient descent on `contrastive_loss`, with the interface of `dp_sgd`. NOT private,
  with any `tx`.

  Args:
    apply: (params, x [B, H, W, C]) -> embeddings [B, D].
    tx: optimizer, which gets the gradient of the batch's loss.
    view_key: typed key from which every example of every step gets its two views.
    ema_decay: decay of an exponential average of the parameters; None for no average.

  Returns:
    `init(params) -> TrainState` and `step(state, batch) -> (TrainState, StepInfo)`. Nothing is
    clipped, and `mean_norm` of the info is the norm of the batch's gradient.

  >>> from dpjax.types import Example  # doctest: +SLOW
  >>> x = jnp.array([[1.0, 0.0], [1.0, 0.1]]).reshape(2, 1, 1, 2)
  >>> apply = lambda params, x: x.reshape(-1, 2) @ params
  >>> init, step = contrastive(apply, lambda key, x: x, optax.sgd(0.1),
  ...   view_key=jax.random.key(0))
  >>> state, batch = init(jnp.eye(2)), Batch(Example(x, None), jnp.array([True, True]))
  >>> state, first = step(state, batch)
  >>> bool(step(state, batch)[1].train_loss < first.train_loss)  # further apart
  True
  """
  if ema_decay is not None:
    validate.open_unit(ema_decay=ema_decay)
  # `identity` stands in place of a private transform, so that the state is laid out as in `dp_sgd`.
  chain = optax.chain(optax.identity(), tx)

  def init(params: Params) -> TrainState:
    # The parameters are copied, so that donation does not delete the caller's arrays.
    params = jax.tree.map(jnp.copy, params)
    ema = None if ema_decay is None else jax.tree.map(jnp.copy, params)
    opt_state = chain.init(params)
    schedule_free.check(opt_state, params, ema_decay)
    return TrainState(params, opt_state, ema, jnp.zeros((), jnp.int32))

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepInfo]:
    arguments.masked_batch(batch)
    mask = jnp.asarray(batch.mask)
    keys = jax.random.split(jax.random.fold_in(view_key, state.step), len(mask))
    value_and_grad = jax.value_and_grad(contrastive_loss, argnums=2)
    loss, grad = value_and_grad(apply, augment_fn, state.params, batch, keys)
    updates, opt_state = chain.update(grad, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    ema = state.ema
    if ema_decay is not None:
      ema = average(ema, params, state.step, ema_decay)
    # The loss of a whole batch leaves out no example.
    info = StepInfo(
      loss, optax.tree.norm(grad), jnp.zeros(()), jnp.sum(mask), left_out=jnp.int32(0)
    )
    return TrainState(params, opt_state, ema, state.step + 1), info

  return Algorithm(init, step)

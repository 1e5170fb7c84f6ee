"""DP-FTRL's gradient: `clip_and_noise` with noise that is correlated over steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from dpjax import closed_over, trees, validate
from dpjax.gradients import Clip
from dpjax.noise import NoiseShape, gaussian
from dpjax.noise.correlated import draw
from dpjax.noise.correlated.draw import CorrelatedNoiseState
from dpjax.transforms.clip_and_noise import clip_of
from dpjax.transforms.clip_scale import follow_schedule
from dpjax.transforms.group_noise import check_drawn, noise_std
from dpjax.transforms.guard import with_guard
from dpjax.transforms.inputs import Mechanism, is_placeholder, open_gradients
from dpjax.types import ClipLike


def clip_and_correlated_noise(
  *,
  l2_clip_norm: ClipLike,
  noise_multiplier: float,
  normalize_by: float,
  key: jax.Array,
  noise_shape: NoiseShape,
  num_steps: int,
) -> optax.GradientTransformationExtraArgs:
  """Returns `clip_and_noise` with noise C^{-1} z in place of z; C is the matrix of the correlation.

  Followed by an Optax optimizer, it is DP-FTRL (Kairouz et al. 2021; the matrix mechanism of
  Denisov et al. 2022). `init` needs the parameters, since the state holds arrays of their shapes
  with earlier noise: as many as the correlation has `buffers`, or none if the correlation draws
  earlier noise again (`noise.correlated.InverseBanded`).

  Args:
    l2_clip_norm, noise_multiplier, normalize_by, key: as for `clip_and_noise`. The white noise z on
      the SUM has standard deviation s = noise_multiplier * l2_clip_norm. Given the noise of all
      earlier steps, the noise of a step has standard deviation s times the step's factor in the
      schedule.
    noise_shape: shape with a correlation, a schedule, or both, fixed in advance.
    num_steps: number of updates that were accounted for; a later one raises, or is NaN under jit.

  Guarantee: the updates are post-processing of a Gaussian mechanism on C x, where x are the clipped
  sums of all steps, for any gradients and masks. Its cost depends on how often, and how far apart,
  an example takes part. This transform cannot see that: `dpjax.Plan` computes the cost from the
  sampler.

  Raises:
    UserError: as `clip_and_noise`; a schedule whose length is not `num_steps`; too many steps.

  >>> import jax.numpy as jnp
  >>> from dpjax.gradients import wrap_grads
  >>> from dpjax.noise.correlated import BandedToeplitz
  >>> tx = clip_and_correlated_noise(
  ...   l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=2, key=jax.random.key(0),
  ...   noise_shape=NoiseShape(correlation=BandedToeplitz((1.0, 0.5))),
  ...   num_steps=1)
  >>> grads, params = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5]])}, {"w": jnp.zeros(2)}
  >>> grads = wrap_grads(grads)
  >>> tx.update(grads, tx.init(params), params, mask=jnp.ones(2, bool))[0]["w"]
  Array([0.3 , 0.65], dtype=float32)
  """
  shape = dataclasses.replace(noise_shape, correlation=noise_shape.strategy)
  clip = clip_of(l2_clip_norm, noise_multiplier, normalize_by, key, shape)
  validate.integer_at_least(1, num_steps=num_steps)
  shape.check_steps(num_steps)
  correlated = correlated_noise(
    clip,
    noise_multiplier=noise_multiplier,
    normalize_by=normalize_by,
    key=key,
    shape=shape,
    num_steps=num_steps,
  )
  return with_guard(correlated)


def correlated_noise(
  clip: Clip,
  *,
  noise_multiplier: float,
  normalize_by: float,
  key: jax.Array,
  shape: NoiseShape,
  num_steps: int,
) -> Mechanism:
  """Returns the mechanism of `clip_and_correlated_noise`, without a guard; its arguments are not
  checked."""
  std = closed_over.Number(noise_std(clip, noise_multiplier))
  correlation = shape.strategy

  def init_fn(params) -> CorrelatedNoiseState:
    check_drawn(std, params)
    if is_placeholder(params):
      started = gaussian.init(key)
      return CorrelatedNoiseState(started.key, started.draws, jnp.zeros(()))
    return draw.init(key, correlation, params)

  def update_fn(updates, state, params=None, *, mask=None, count=None, conditions):
    del count  # there is no query
    summed, sound = open_gradients(updates, params, mask, clip, conditions)
    noisy, state = draw.add_correlated(
      state,
      summed.total,
      std,
      correlation=correlation,
      num_steps=num_steps,
      factors=shape.schedule,
      sound=sound,
    )
    # Division by a public number after the noise is post-processing.
    return trees.scale(noisy, 1.0 / normalize_by), state

  mechanism = Mechanism(init_fn, update_fn, CorrelatedNoiseState)
  return follow_schedule(mechanism, clip)

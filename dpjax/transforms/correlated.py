"""Clip each example, sum, add correlated Gaussian noise, divide by a public constant."""

from __future__ import annotations

from typing import Any

import jax
import optax

from dpjax import gradients, noise, trees, validate
from dpjax.noise.correlated import CorrelatedNoiseState, Correlation
from dpjax.transforms.clip_and_noise import check_arguments
from dpjax.transforms.clip_scale import MAX_SCALE, MIN_SCALE
from dpjax.transforms.clipped import clipped_sum
from dpjax.validate import UserError


def clip_and_correlated_noise(
  *,
  l2_clip_norm: Any,
  noise_multiplier: float,
  normalize_by: float,
  key: jax.Array,
  correlation: Correlation,
  num_steps: int,
  noise_schedule: tuple[float, ...] = (),
) -> optax.GradientTransformationExtraArgs:
  """`clip_and_noise` with noise C^{-1} z in place of z: DP-FTRL (Kairouz et al. 2021; the
  matrix mechanism of Denisov et al. 2022), with whatever Optax optimizer follows.

  `init` needs the parameters: the state holds `correlation.buffers` copies of them.

  Args:
    l2_clip_norm, noise_multiplier, normalize_by, key: as for `clip_and_noise`; the white
      noise z on the SUM has standard deviation noise_multiplier * l2_clip_norm, which is
      also what a step's noise has, given the noise of all earlier steps.
    correlation: a strategy of `dpjax.noise.correlated`.
    num_steps: updates that were accounted for; a later one raises, or is NaN under jit.
    noise_schedule: factors of the noise multiplier, one per step, fixed in advance.

  Guarantee: the updates are post-processing of a Gaussian mechanism on C x, whatever the
  gradients and masks. What it costs depends on how often, and how far apart, an example
  takes part, which this transform cannot see: `dpjax.Plan` binds it to a sampler that does.

  Raises:
    UserError: as `clip_and_noise`; a schedule of another length; a step not paid for.

  >>> import jax.numpy as jnp
  >>> tx = clip_and_correlated_noise(
  ...   l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=2, key=jax.random.key(0),
  ...   correlation=noise.correlated.BandedToeplitz((1.0, 0.5)), num_steps=1)
  >>> grads, params = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5]])}, {"w": jnp.zeros(2)}
  >>> tx.update(grads, tx.init(params), params, mask=jnp.ones(2, bool))[0]["w"]
  Array([0.3 , 0.65], dtype=float32)
  """
  check_arguments(l2_clip_norm, noise_multiplier, normalize_by, key)
  validate.integer_at_least(1, num_steps=num_steps)
  check_schedule(noise_schedule, num_steps)
  if 0 in jax.tree.leaves(l2_clip_norm):
    raise UserError(
      f"l2_clip_norm={l2_clip_norm!r}: a bound of 0 would freeze a group of parameters, to "
      "which correlated noise is added all the same"
    )
  std = noise_multiplier * gradients.l2_bound(l2_clip_norm) if noise_multiplier else 0.0

  def init_fn(params) -> CorrelatedNoiseState:
    return noise.correlated.init(key, correlation, params)

  def update_fn(updates, state, params=None, *, mask=None, **extra_args):
    del extra_args
    summed = clipped_sum(updates, params, mask, l2_clip_norm)
    noisy, state = noise.correlated.add_correlated(
      state,
      summed.total,
      std,
      correlation=correlation,
      num_steps=num_steps,
      factors=tuple(noise_schedule),
    )
    return trees.scale(noisy, 1.0 / normalize_by), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def check_schedule(noise_schedule: Any, num_steps: int) -> None:
  """Raises unless the schedule is empty or has one factor for each step, within the bounds
  of a clip schedule: far beyond them the factor vanishes in float32, and the noise with it.

  >>> check_schedule((1.0,), 2)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: noise_schedule: has 1 factors, must have num_steps=2
  """
  if len(noise_schedule) not in (0, num_steps):
    raise UserError(
      f"noise_schedule: has {len(noise_schedule)} factors, must have num_steps={num_steps}"
    )
  validate.positive(**{f"noise_schedule[{i}]": f for i, f in enumerate(noise_schedule)})
  for factor in noise_schedule:
    if not MIN_SCALE <= factor <= MAX_SCALE:
      raise UserError(
        f"noise_schedule={factor!r}: must be in [{MIN_SCALE:g}, {MAX_SCALE:g}]"
      )

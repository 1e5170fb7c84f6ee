"""DP-SGD's gradient: clip each example, sum, add Gaussian noise, divide by a public constant.

One step, from `tx.update` to the noise: `guard.with_guard` checks the state's checksum and its
plan's mark (a wrong one raises, or is NaN under jit). `white_noise` opens the gradients by
`inputs.open_gradients`, which checks seal, mask and bounds; they were clipped and summed in
`gradients/clipping.py`. `gaussian.add_gaussian` folds the number of the draw into the key and adds
`source.gaussian`, for each leaf by a key of its own. The sum is divided by `normalize_by`, the
number of draws goes up by one, and the guard writes a new checksum.
"""

from __future__ import annotations

import jax
import optax

from dpjax import closed_over, noise, trees, validate
from dpjax.gradients import Clip
from dpjax.noise import NoiseShape, gaussian, source
from dpjax.noise.gaussian import NoiseState
from dpjax.noise.shape import WHITE
from dpjax.transforms import group_noise, together
from dpjax.transforms.clip_scale import follow_schedule
from dpjax.transforms.guard import with_guard
from dpjax.transforms.inputs import Mechanism, open_gradients
from dpjax.types import ClipLike, NumberTree
from dpjax.validate import UserError


def clip_of(
  l2_clip_norm: ClipLike,
  noise_multiplier: float,
  normalize_by: float,
  key: jax.Array,
  shape: NoiseShape = WHITE,
) -> Clip:
  """Returns the clip of a private transform; raises UserError for an invalid argument."""
  clip = Clip.of(l2_clip_norm)
  together.check(together.features(clip, shape))
  validate.non_negative(noise_multiplier=noise_multiplier)
  validate.positive(normalize_by=normalize_by)
  trees.check_key(key=key)
  source.check_generator(key)
  return clip


def clip_and_noise(
  *,
  l2_clip_norm: ClipLike,
  noise_multiplier: float,
  normalize_by: float,
  key: jax.Array,
  noise_shape: NoiseShape = WHITE,
  num_steps: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Clips per-example gradients, sums, adds Gaussian noise, divides by a public constant.

  This is the Gaussian mechanism of DP-SGD (Abadi et al. 2016, Algorithm 1) as an Optax transform.
  Its `update(grads, state, params, *, mask)` takes gradients of `dpjax.per_example_grads` (leaves
  [B, *param], with `mask` [B]) or a `dpjax.types.ClippedSum` (mask already applied). Wrap arrays
  from elsewhere in `dpjax.wrap_grads`. The transform must be first in `optax.chain`. It works under
  jit, with donated state. Give every step the state that the last step returned. A state changed by
  other code raises, or gives NaN under jit. A whole earlier state draws the same noise twice, which
  cannot be detected.

  Args:
    l2_clip_norm: bound C on the L2 norm of one example's gradient, a prefix tree of bounds, or a
      `Clip`.
    noise_multiplier: z; the noise on the SUM has standard deviation z * C in every
      coordinate (C = sqrt(sum C_l^2) for a tree of bounds). 0 adds no noise.
    normalize_by: public constant that the noisy sum is divided by, such as the EXPECTED
      batch size; never the realised one.
    key: a typed key, `dpjax.new_key()`. There is no default.
    noise_shape: `NoiseShape` in which only `shares` may be set: a tree like the clip norms, with
      each group's share of the privacy budget. Shares are scaled to sum 1. Group g then gets
      noise of standard deviation z C_g / sqrt(share_g), at the same z for the accountant (see
      `transforms/group_noise.py`).
    num_steps: number of updates that were accounted for; a later one raises, or is NaN under jit.
      None sets no limit. `dpjax.Plan` passes its number of steps.

  A group whose bound is 0 is frozen: its update is exactly 0.

  Guarantee: each update is the post-processing of a Gaussian mechanism with noise multiplier z on
  a sum of sensitivity C (add_or_remove_one). This holds for any mask and any gradients, also for an
  empty batch. Account for it with `dpjax.Plan`, which builds this transform.

  Raises:
    UserError: bare arrays, a mask that is missing or of another length, gradients without a batch
      axis, a ClippedSum clipped to a larger bound, a clip norm or divisor out of range, a state
      that other code changed or that was restored without its types.

  >>> import jax.numpy as jnp
  >>> from dpjax.gradients import wrap_grads
  >>> tx = clip_and_noise(
  ...   l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=2, key=jax.random.key(0))
  >>> grads = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5], [9.0, 9.0]])}
  >>> mask = jnp.array([True, True, False])
  >>> params = {"w": jnp.zeros(2)}
  >>> tx.update(wrap_grads(grads), tx.init(params), params, mask=mask)[0]["w"]
  Array([0.3 , 0.65], dtype=float32)
  """
  clip = clip_of(l2_clip_norm, noise_multiplier, normalize_by, key, noise_shape)
  if clip.rule.adapts or noise_shape.by_step:
    raise UserError(
      "noise that differs by step is that of clip_and_correlated_noise, a clip "
      "norm that follows a quantile that of adaptive_clip_and_noise",
      field="clip_and_noise",
    )
  if num_steps is not None:
    # The state counts steps by an int32.
    validate.integer_in(1, 2**31 - 1, num_steps=num_steps)
  white = white_noise(
    clip,
    noise_multiplier=noise_multiplier,
    normalize_by=normalize_by,
    key=key,
    shares=noise_shape.shares,
    num_steps=num_steps,
  )
  return with_guard(white)


def white_noise(
  clip: Clip,
  *,
  noise_multiplier: float,
  normalize_by: float,
  key: jax.Array,
  shares: NumberTree = None,
  num_steps: int | None = None,
) -> Mechanism:
  """Returns the mechanism of `clip_and_noise`, without a guard; its arguments are not checked."""
  std = closed_over.Number(group_noise.noise_std(clip, noise_multiplier))
  weights = group_noise.group_weights(clip, shares)
  alike = set(jax.tree.leaves(weights)) <= {1}

  def init_fn(params) -> NoiseState:
    group_noise.check_drawn(std, params)
    return gaussian.init(key, params)

  def update_fn(updates, state, params=None, *, mask=None, count=None, conditions):
    del count  # there is no query
    summed, sound = open_gradients(updates, params, mask, clip, conditions)
    # Shares need a sum that was clipped group by group.
    if shares is not None:
      group_noise.check_groups(summed, clip)
    # One draw of white noise serves all groups. The weights before and after the noise give each
    # group its noise level.
    total = summed.total if alike else group_noise.weigh(summed.total, weights)
    noisy, state = noise.add_gaussian(state, total, std, num_steps=num_steps, sound=sound)
    noisy = noisy if alike else group_noise.unweigh(noisy, weights)
    return trees.scale(noisy, 1.0 / normalize_by), state

  return follow_schedule(Mechanism(init_fn, update_fn, NoiseState), clip)

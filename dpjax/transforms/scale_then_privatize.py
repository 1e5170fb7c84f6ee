"""Scales coordinates by earlier private outputs before the clip, and back after the noise.

Gradients differ in size between coordinates, while clipping and noise treat all alike. With a
number s_t > 0 for each coordinate, a private transform is applied to g / s_t, and its output is
multiplied by s_t. So small coordinates get little noise, and large ones much.

Guarantee, for ANY s_t that follows from earlier outputs of the transform and from public numbers:
given these, x -> x / s_t is a fixed function of one example's gradient. The inner transform clips
what it is given, so its sensitivity and its event do not change. The product with s_t is
post-processing. Steps compose adaptively as before. s_t never follows from gradients without noise.

Source: Ganesh, McMahan and Thakurta 2025, arXiv:2507.01129, algorithm 8. There s_t is
sqrt(v) + eps, where v is a moving average of squared outputs. Here a floor takes the place of eps,
and s_t is divided by its root mean square. So the clip norm keeps its meaning, and the noise has
the same total variance as without scaling. On the digits data set, at one clip norm, scaling with
the defaults lowers the accuracy.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import trees, validate
from dpjax.transforms.guard import as_mechanism, mechanism_state, with_guard
from dpjax.transforms.inputs import Mechanism, divide_rows, is_placeholder
from dpjax.types import ClippedSum, LossFn, Params
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class CoordinateScaling:
  """Scaling of coordinates by earlier private outputs: the setting of a `Plan` or a config.

  Args:
    b2: decay of the moving average of squared outputs, in [1e-6, 0.999999].
    floor: least root of the moving average, as a share of the root mean square of all these roots,
      in [1e-6, 1].

  Raises:
    UserError: a number out of its range. With smaller numbers, quotients or squares would leave the
      range of float32. A larger b2 could round to 1 in float32.

  >>> CoordinateScaling(floor=0.0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: floor=0.0: must be in [1e-06, 1]
  """

  b2: float = 0.9
  floor: float = 0.1

  def __post_init__(self):
    validate.number_in(validate.MIN_FACTOR, 1 - validate.MIN_FACTOR, b2=self.b2)
    validate.number_in(validate.MIN_FACTOR, 1, floor=self.floor)

  @property
  def statement(self) -> str:
    """Returns the sentences about the scaling for a privacy statement."""
    return (
      "Scaled coordinates: in each step every coordinate is divided by a number that follows "
      "from earlier noisy sums alone, then clipped and noised as stated, then multiplied by it. "
      "The numbers may be released."
    )


class ScalingState(NamedTuple):
  """Moving average of the squares of private outputs; `inner` holds the noise key.

  Optax can reset an optimizer's state by field names, so no field has a name that Optax uses.
  """

  inner: Any
  mean_squares: Any
  floor: jax.Array  # float32; stored here, so that a state alone gives s_t


class ScaledLoss:
  """The loss of one example as a function of d, at parameters w + d / s_t.

  At d = 0 its value is the loss at w. Its gradient there is the gradient at w divided by s_t, as it
  must be clipped. With this loss, `clipped_grad` can compute the clipped sum without keeping
  gradients of single examples.
  """

  def __init__(self, loss_fn: LossFn, params: Params, scales: Any):
    self._loss_fn = loss_fn
    self._params = params
    self._scales = scales

  @property
  def start(self) -> Params:
    """Returns d = 0, at which the gradient is taken."""
    # Half precision is widened, since its range is too narrow for gradients divided by s_t.
    return jax.tree.map(
      lambda leaf: jnp.zeros_like(trees.at_least_float32(leaf)), self._params
    )

  def __call__(self, offset: Params, example: Any) -> Any:
    moved = jax.tree.map(
      lambda w, d, s: w + (d / s).astype(w.dtype), self._params, offset, self._scales
    )
    return self._loss_fn(moved, example)


def coordinate_scales(state: object) -> Any:
  """Returns the tree s_t of the next update from a state; None for the state of another transform.

  It is a function of earlier private outputs alone, so it may be released with them.
  """
  state = mechanism_state(state)
  if not isinstance(state, ScalingState):
    return None
  return _scales(state.mean_squares, state.floor)


def scale_then_privatize(
  tx: optax.GradientTransformationExtraArgs,
  *,
  b2: float = 0.9,
  floor: float = 0.1,
  takes_scaled_sums: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Returns a private transform that clips and noises each coordinate in units of its size.

  Args:
    tx: `clip_and_noise`, or another private transform with the same inputs.
    b2, floor: as for `CoordinateScaling`.
    takes_scaled_sums: whether to accept a `ClippedSum`, too. The sum should be that of a
      `ScaledLoss`. Another sum costs no more privacy, but was clipped in other units.

  Guarantee: that of `tx`, by the proof at the top of this module. At the first step nothing is
  scaled.

  Raises:
    UserError: a `ClippedSum` without `takes_scaled_sums`, since its examples were clipped before
      they could be scaled. Use the gradients of `dpjax.per_example_grads`.

  >>> from dpjax.gradients import wrap_grads
  >>> from dpjax.transforms.clip_and_noise import clip_and_noise
  >>> tx = scale_then_privatize(clip_and_noise(l2_clip_norm=9.0, noise_multiplier=0.0,
  ...   normalize_by=1, key=jax.random.key(0)))
  >>> grads, mask = wrap_grads(jnp.array([[3.0, 4.0]])), jnp.array([True])
  >>> first, state = tx.update(grads, tx.init(jnp.zeros(2)), mask=mask)
  >>> first, tx.update(grads, state, mask=mask)[0].round(4)
  (Array([3., 4.], dtype=float32), Array([3., 4.], dtype=float32))
  """
  scaling = CoordinateScaling(b2, floor)  # raises for numbers out of range
  return with_guard(
    scaled_noise(as_mechanism(tx), scaling, takes_scaled_sums=takes_scaled_sums)
  )


def scaled_noise(
  mechanism: Mechanism, scaling: CoordinateScaling, *, takes_scaled_sums: bool
) -> Mechanism:
  """Returns the mechanism that clips and noises each coordinate in units of its size."""
  b2, floor = scaling.b2, scaling.floor

  def init_fn(params: Any) -> ScalingState:
    inner = mechanism.init(params)
    if is_placeholder(params):
      # Hides `mean_squares` from Optax's reset of optimizer moments; see `is_placeholder`.
      return ScalingState(inner, jnp.zeros(()), jnp.float32(floor))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), params)
    return ScalingState(inner, zeros, jnp.float32(floor))

  def update_fn(updates, state, params=None, *, conditions, **extra_args):
    if isinstance(updates, ClippedSum) and not takes_scaled_sums:
      raise UserError(
        "must be stacked gradients of dpjax.per_example_grads: a ClippedSum was clipped before "
        "its examples could be scaled",
        field="updates",
        value=type(updates).__name__,
      )
    scales = _scales(state.mean_squares, state.floor)
    # A sum of a `ScaledLoss` was scaled before it was clipped.
    scaled = divide_rows(updates, scales)
    noisy, inner = mechanism.update(
      scaled, state.inner, params, conditions=conditions, **extra_args
    )
    private = jax.tree.map(lambda leaf, s: leaf * s, noisy, scales)
    # The state stays float32 for float64 gradients, too: `lax.scan` refuses a state that changes
    # its type.
    mean_squares = jax.tree.map(
      lambda v, g: (b2 * v + (1 - b2) * g**2).astype(jnp.float32),
      state.mean_squares,
      private,
    )
    return private, ScalingState(inner, mean_squares, state.floor)

  return Mechanism(init_fn, update_fn, ScalingState)


def _scales(mean_squares: Any, floor: Any) -> Any:
  """Returns s_t for each coordinate, with a root mean square of 1, from private outputs alone.

  If an output was NaN, because its step was not accounted for, all s_t are NaN.
  """
  leaves = jax.tree.leaves(mean_squares)
  # The count is a float, since 2^31 coordinates or more do not fit in int32.
  count = float(sum(leaf.size for leaf in leaves))
  mean = sum(jnp.sum(leaf) for leaf in leaves) / count
  # Nothing is scaled before the first output, if all outputs were zero, or if squares overflow.
  is_known = (mean > 0) & jnp.isfinite(mean)
  relative = jax.tree.map(
    lambda v: jnp.where(is_known, jnp.sqrt(v / jnp.where(is_known, mean, 1.0)), 1.0),
    mean_squares,
  )
  raised = jax.tree.map(lambda root: jnp.maximum(root, floor), relative)
  squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(raised))
  size = jnp.sqrt(squares / count)
  # At the first step s_t is exactly 1, where leaf / size could differ from 1 by rounding.
  unscaled = jnp.where(jnp.isnan(mean), jnp.nan, 1.0)
  return jax.tree.map(lambda leaf: jnp.where(is_known, leaf / size, unscaled), raised)

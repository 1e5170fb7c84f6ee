"""A clip norm that changes from step to step, at the privacy cost of a constant one.

To clip g to C_t = C s_t is to clip g / s_t to the constant C and to multiply by s_t. So the
mechanism always sees terms of norm <= C, and adds noise for C. The noisy result is multiplied by
s_t, which is public or a function of earlier private outputs. The event is that of a constant clip
norm, for every s_t.

Stacked gradients are divided here. If you give a ClippedSum, divide the LOSS by s_t before, as
`training.dp_sgd` does; the sum's norms and losses are then in units of s_t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import gradients, trees, validate
from dpjax.transforms.guard import as_mechanism, mechanism_state, with_guard
from dpjax.transforms.inputs import Mechanism, divide_rows
from dpjax.validate import UserError

CLIP_SCHEDULES = ("constant", "linear", "cosine", "exponential")


class ScaledState(NamedTuple):
  """State of a transform whose clip norm changes; `inner` holds the noise key."""

  inner: Any
  scale: jax.Array  # float32: clip norm of the NEXT update / l2_clip_norm
  steps: jax.Array  # int32, number of updates so far


def clip_scale(state: object) -> jax.Array | None:
  """Returns s_t, the next update's factor of the clip norm; None if the clip norm is constant.

  Args:
    state: state of a private transform.

  >>> clip_scale(ScaledState(None, jnp.float32(0.5), jnp.int32(0)))
  Array(0.5, dtype=float32)
  """
  state = mechanism_state(state)
  return state.scale if isinstance(state, ScaledState) else None


def scheduled_scales(name: str, num_steps: int, final: float) -> tuple[float, ...]:
  """Returns a factor of the clip norm for each step, from 1 at the first to `final` at the last.

  `name` is one of `CLIP_SCHEDULES`; "constant" is 1 throughout.

  >>> scheduled_scales("linear", 3, 0.5)
  (1.0, 0.75, 0.5)
  >>> scheduled_scales("exponential", 3, 0.25)
  (1.0, 0.5, 0.25)
  """
  validate.one_of(CLIP_SCHEDULES, clip_schedule=name)
  validate.integer_at_least(1, num_steps=num_steps)
  validate.factors(clip_schedule=[final])
  if num_steps == 1 and name != "constant":
    raise UserError(
      "needs num_steps >= 2, its first and its last", field="clip_schedule", value=name
    )
  curves: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1 - (1 - final) * x,
    "cosine": lambda x: final + (1 - final) * 0.5 * (1 + math.cos(math.pi * x)),
    "exponential": lambda x: final**x,
  }
  return tuple(curves[name](t / max(num_steps - 1, 1)) for t in range(num_steps))


def with_clip_schedule(
  tx: optax.GradientTransformationExtraArgs, scales: Sequence[float]
) -> optax.GradientTransformationExtraArgs:
  """Returns a private transform whose clip norm at step t is `scales[t]` times that of `tx`.

  Args:
    tx: `clip_and_noise`, or another private transform with the same inputs.
    scales: public factors, fixed before the data are seen; later steps use the last one.

  Guarantee: that of `tx`, for any factors, since they multiply its private output. The noise of
  step t has standard deviation scales[t] times that of `tx`.

  >>> from dpjax.transforms.clip_and_noise import clip_and_noise
  >>> tx = with_clip_schedule(clip_and_noise(l2_clip_norm=1.0, noise_multiplier=0.0,
  ...   normalize_by=1, key=jax.random.key(0)), [1.0, 0.5])
  >>> g, mask = gradients.wrap_grads(jnp.array([[3.0, 4.0]])), jnp.array([True])
  >>> first, state = tx.update(g, tx.init(jnp.zeros(2)), mask=mask)
  >>> first, tx.update(g, state, mask=mask)[0]
  (Array([0.6, 0.8], dtype=float32), Array([0.3, 0.4], dtype=float32))
  """
  if not len(scales):
    raise UserError("must hold one factor for each step", field="clip_schedule", value=())
  validate.factors(clip_schedule=scales)
  return with_guard(_scheduled_noise(as_mechanism(tx), scales))


def _scheduled_noise(mechanism: Mechanism, scales: Sequence[float]) -> Mechanism:
  """Returns the mechanism whose clip norm at step t is `scales[t]` times that of `mechanism`."""
  table = jnp.asarray(scales, jnp.float32)

  def state_at(inner, count) -> ScaledState:
    return ScaledState(inner, table[jnp.minimum(count, len(scales) - 1)], count)

  def init_fn(params) -> ScaledState:
    return state_at(mechanism.init(params), jnp.zeros((), jnp.int32))

  def update_fn(updates, state, params=None, *, conditions, **extra_args):
    # Gradients are divided by the scale before, and the output is multiplied by it.
    scaled = divide_rows(updates, state.scale)
    noisy, inner = mechanism.update(
      scaled, state.inner, params, conditions=conditions, **extra_args
    )
    return trees.scale(noisy, state.scale), state_at(inner, state.steps + 1)

  return Mechanism(init_fn, update_fn, ScaledState)


def follow_schedule(mechanism: Mechanism, clip: gradients.Clip) -> Mechanism:
  """Returns the mechanism with the clip's schedule; itself if the clip has none."""
  return _scheduled_noise(mechanism, clip.schedule) if clip.schedule else mechanism

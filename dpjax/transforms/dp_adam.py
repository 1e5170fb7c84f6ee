"""DP-Adam with the noise removed from its second moment (DP-AdamBC).

Adam divides by the root of a moving average of g^2. For a private gradient g = signal + N(0, s^2)
this average is about E[signal^2] + s^2. In private training the second term usually dominates. Then
every coordinate is divided by about s, and Adam is no more than a rescaled SGD with momentum. s^2
is public, so it can be subtracted, at no privacy cost (post-processing). Source: Tang, Shpilevskiy
and Lecuyer 2024, "DP-AdamBC" (arXiv:2312.14334), the equation for Delta_t with gamma'.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import validate
from dpjax.types import NumberTree


class DpAdamState(NamedTuple):
  """Moving averages of the private gradient and of its square."""

  count: jax.Array  # int32
  mu: Any
  nu: Any  # of the square; it contains the variance of the noise


def scale_by_dp_adam(
  *,
  mean_noise_std: NumberTree,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  noise_floor: float = 0.3,
) -> optax.GradientTransformation:
  """Returns `optax.scale_by_adam` with the noise's variance subtracted from its second moment.

  The update is m_hat / (sqrt(max(v_hat - s^2, (noise_floor s)^2)) + eps), s = mean_noise_std.

  Args:
    mean_noise_std: standard deviation of the noise on the MEAN gradient, the same at every step:
      `plan.mean_noise_std`. A number, or a prefix tree of numbers if groups of parameters differ.
    b1, b2, eps: constants of Adam.
    noise_floor: least root in the denominator, in units of mean_noise_std, since the estimate
      v_hat - s^2 may be negative. A smaller floor makes longer steps in coordinates with a weak
      signal.

  With mean_noise_std 0 the transform is `optax.scale_by_adam`.

  >>> tx = scale_by_dp_adam(mean_noise_std=3.0)
  >>> update, _ = tx.update(jnp.array([5.0]), tx.init(jnp.zeros(1)))
  >>> update.round(4)  # 5 / sqrt(25 - 9)
  Array([1.25], dtype=float32)
  """
  validate.non_negative(eps=eps, noise_floor=noise_floor)
  validate.open_unit(b1=b1, b2=b2)
  for std in jax.tree.leaves(mean_noise_std):
    validate.non_negative(mean_noise_std=std)

  def init_fn(params) -> DpAdamState:
    # The two trees are separate, since a donated state must not hold one buffer twice.
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    return DpAdamState(jnp.zeros((), jnp.int32), zeros(), zeros())

  def direction(std, m, v):
    squares = jnp.maximum(v - std**2, (noise_floor * std) ** 2)
    return m / (jnp.sqrt(squares) + eps)

  def update_fn(updates, state, params=None):
    del params
    count: Any = optax.safe_increment(state.count)
    mu = optax.tree.update_moment(updates, state.mu, b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
    m_hat = optax.tree.bias_correction(mu, b1, count)
    v_hat = optax.tree.bias_correction(nu, b2, count)
    each = lambda std, ms, vs: jax.tree.map(lambda m, v: direction(std, m, v), ms, vs)
    return jax.tree.map(each, mean_noise_std, m_hat, v_hat), DpAdamState(count, mu, nu)

  return optax.GradientTransformation(init_fn, update_fn)


def dp_adam(
  learning_rate: optax.ScalarOrSchedule, *, mean_noise_std: NumberTree, **options: Any
) -> optax.GradientTransformation:
  """Returns Adam for private gradients; options are those of `scale_by_dp_adam`.

  >>> tx = dp_adam(0.1, mean_noise_std=3.0)
  >>> tx.update(jnp.array([5.0]), tx.init(jnp.zeros(1)))[0].round(4)
  Array([-0.125], dtype=float32)
  """
  scale = scale_by_dp_adam(mean_noise_std=mean_noise_std, **options)
  return optax.chain(scale, optax.scale_by_learning_rate(learning_rate))

"""Convolution kernels that are standardised for each output channel.

Its gradients have a rule of their own: the fast route of `gradients` finds this transform in the
trace of a loss, and computes norms of per-example gradients without keeping these.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

# Name of the jitted function below in a trace.
NAME = "_standardize"


def standardize_kernel(
  kernel: jax.Array, gain: jax.Array, epsilon: float = 1e-4
) -> jax.Array:
  """Returns gain * (W - mean) / sqrt(max(fan_in * var, epsilon)), per output channel.

  The kernel W is [kh, kw, c_in, c_out] and `gain` [c_out]. Mean and variance are those of the
  fan_in = kh * kw * c_in weights of a channel. So every output channel has squared norm gain**2, or
  less if fan_in * var is below `epsilon`. This is scaled weight standardisation
  (Brock et al. 2021; used by De et al. 2022).

  Clipped gradients are slow in three cases, since each example's gradient is then formed alone:
  the size of a gain is outside [1e-6, 1e6], the mean of a channel is more than about 64 of its
  standard deviations, or fan_in * var is within 0.1 % of `epsilon`.

  >>> kernel = jnp.array([1.0, 3.0, 5.0, 7.0]).reshape(2, 2, 1, 1)
  >>> jnp.round(jnp.square(standardize_kernel(kernel, jnp.array([2.0]))).sum(), 4).item()
  4.0
  """
  return _standardize(kernel, gain, epsilon)


@jax.jit
def _standardize(kernel, gain, epsilon):
  mean = kernel.mean(axis=(0, 1, 2), keepdims=True)
  square = jnp.square(kernel - mean).sum(axis=(0, 1, 2), keepdims=True)  # fan_in * var
  # The bound `epsilon` keeps a constant channel from a division by zero.
  return (
    (kernel - mean) * lax.rsqrt(jnp.maximum(square, epsilon)) * gain.reshape(1, 1, 1, -1)
  )


def floor_of(eqn: Any) -> float | None:
  """Returns `epsilon` of an equation that calls `standardize_kernel`; None for any other equation.

  The result is also None if `epsilon` has no known value in the trace.

  Args:
    eqn: equation of a jaxpr. A call has the inputs (kernel, gain, epsilon).
  """
  if eqn.params.get("name") != NAME or len(eqn.invars) != 3:
    return None
  kernel, gain, epsilon = eqn.invars
  if not isinstance(epsilon, jex.Literal) or len(kernel.aval.shape) != 4:
    return None
  # A gain or a kernel that is broadcast has another gradient.
  if gain.aval.shape != kernel.aval.shape[-1:] or gain.aval.dtype != kernel.aval.dtype:
    return None
  value = float(epsilon.val)
  known = _text(kernel.aval.shape, kernel.aval.dtype, jax.config.read("jax_enable_x64"))
  # Another function may have this name. So its program is compared, too.
  return value if str(eqn.params["jaxpr"]) == known else None


@functools.cache
def _text(shape: tuple, dtype: Any, x64: bool) -> str:
  """Returns the program of `_standardize` as text, for a kernel of this shape and a gain."""
  del x64  # decides the type of `epsilon` in the text
  shapes = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[-1:], dtype)
  (eqn,) = jax.make_jaxpr(standardize_kernel)(*shapes).jaxpr.eqns
  return str(eqn.params["jaxpr"])

"""Convolutions rewritten so that XLA's CPU backend runs them at full speed in compiled
loops.

XLA has a fast route on the CPU for convolutions whose batch comes first and whose features come
last, with kernels [*window, in, out]. It brings other convolutions into that form, but only in the
outermost computation of a program (its pass `ConvCanonicalization`; seen in the text of compiled
programs). JAX writes the gradients of a convolution in another form. So these gradients take many
times as long inside `scan`, `while_loop` or `cond` (`benchmarks gradients`), unless
they are rewritten as here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax import jaxprs
from dpjax.parallel import made_for

_Fn = TypeVar("_Fn", bound=Callable[..., Any])
CONVOLUTION = "conv_general_dilated"


def canonical_convolutions(fn: _Fn) -> _Fn:
  """Returns `fn` with convolutions that are fast in a compiled loop on the CPU.

  Use it for the body of a `scan`, under `jit`, that holds a gradient of a convolutional network.
  Apply it to the function that takes the gradient, not to the function whose gradient is taken.
  Code outside of a loop, and all code on other devices, is as fast as before. Results are the same
  to rounding. An infinite kernel gives NaN at the padding, as everywhere in XLA's fast route.

  Convolutions in these places are not rewritten, and stay slow: in a `shard_map` inside of `fn`, in
  branches by platform, and in functions with custom derivatives (`custom_jvp`, `custom_vjp`) that
  are not differentiated inside of `fn`. An eager call compiles anew each time.

  Args:
    fn: function of pytrees to pytrees. Leaves that are not arrays pass through unchanged.

  >>> import jax, jax.numpy as jnp
  >>> from jax import lax
  >>> conv = lambda k: lax.conv(jnp.ones((1, 1, 3, 3)), k, (1, 1), "VALID").sum()
  >>> canonical_convolutions(jax.grad(conv))(jnp.ones((1, 1, 2, 2))).tolist()
  [[[[4.0, 4.0], [4.0, 4.0]]]]
  """

  @functools.wraps(fn)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    if made_for.platform() != "cpu":
      return fn(*args, **kwargs)
    return jaxprs.rewritten(fn, _Canonical(), *args, **kwargs)

  return wrapped  # type: ignore[return-value]


def _is_swapped(eqn: Any) -> bool:
  """Returns whether XLA would exchange image and window, because the window is larger."""
  lhs, rhs = (atom.aval.shape for atom in eqn.invars)
  params = eqn.params
  image, window, _ = params["dimension_numbers"]
  if not all(isinstance(size, int) for size in (*lhs, *rhs)):
    # A symbolic size cannot be compared.
    return False
  size = lambda shape, spec: math.prod(shape[axis] for axis in spec[2:])
  alone = params["feature_group_count"] == params["batch_group_count"] == 1
  real = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
  return alone and real and size(rhs, window) > size(lhs, image) and math.prod(lhs) > 0


def _form(eqn: Any) -> lax.ConvDimensionNumbers:
  """Returns XLA's fast layout: arrays [batch, *space, features], kernels [*window, in, out]."""
  rank = len(eqn.params["window_strides"])
  space = tuple(range(rank))
  arrays = (0, rank + 1, *(axis + 1 for axis in space))
  return lax.ConvDimensionNumbers(arrays, (rank + 1, rank, *space), arrays)


class _Canonical(jaxprs.Rewriting):
  """Evaluates jaxprs with convolutions in the layout of `_form`."""

  def meets(self, eqn: Any) -> bool:
    if eqn.primitive.name != CONVOLUTION:
      return False
    other = _form(eqn) != eqn.params["dimension_numbers"]
    return other or eqn.params["batch_group_count"] > 1 or _is_swapped(eqn)

  def rewrite(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
    return [_convolution(eqn, *values)]


def _convolution(eqn: Any, lhs: Any, rhs: Any) -> Any:
  """Evaluates a convolution in the layout of `_form`, and transposes the result back."""
  params: dict[str, Any] = eqn.params | {"dimension_numbers": _form(eqn)}
  (batch, features, *space), (out, into, *window), results = eqn.params["dimension_numbers"]
  lhs = lax.transpose(lhs, (batch, *space, features))  # [N, *space, C]
  rhs = lax.transpose(rhs, (*window, into, out))  # [*window, I, O]
  groups = params["batch_group_count"]
  # XLA has a fast algorithm for groups of features, and none for groups of the batch.
  if groups > 1:
    rows, *shape, depth = lhs.shape
    lhs = lhs.reshape(groups, rows // groups, *shape, depth)
    lhs = jnp.moveaxis(lhs, 0, -2)  # [N / G, *space, G, C]
    lhs = lhs.reshape(rows // groups, *shape, groups * depth)
    params |= {"batch_group_count": 1, "feature_group_count": groups}
  if _is_swapped(eqn):
    lhs = _widen(lhs, params)
    params |= {"padding": [(0, 0)] * len(window), "lhs_dilation": (1,) * len(window)}
  convolved = lax.conv_general_dilated(lhs, rhs, **params)
  batch, features, *space = results
  places = {batch: 0, features: len(space) + 1, **{at: i + 1 for i, at in enumerate(space)}}
  return lax.transpose(convolved, [places[axis] for axis in range(len(places))])


def _widen(lhs: Any, params: dict[str, Any]) -> Any:
  """Returns the image with its padding, [N, *space, C], at least as large as the window.

  It pads with zeros that XLA does not recognise. XLA would fold known zeros into the padding again.
  """
  first = lhs[(0,) * lhs.ndim]
  # Nothing is below -inf. XLA does not know that, so it cannot fold `zero` to a constant.
  no = lax.lt(first, lax.full_like(first, -np.inf))
  zero = lax.select(no, first, lax.full_like(first, 0))
  axes = zip(params["padding"], params["lhs_dilation"])
  widths = [(low, high, dilation - 1) for (low, high), dilation in axes]
  return lax.pad(lhs, zero, [(0, 0, 0), *widths, (0, 0, 0)])

"""Convolutions that XLA's CPU backend computes at full speed in compiled loops, too.

XLA has a fast route on the CPU for convolutions whose batch comes first and whose features come
last, with kernels [*window, in, out]. Others it brings into that form, but only in the outermost
computation of a program (its pass `ConvCanonicalization`; seen in the text of compiled
programs): the gradients of a convolution, which JAX writes in another form, take 50 to 90
times as long inside `scan`, `while_loop` or `cond`. Written in that form they do not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpjax.gradients import equations

_Fn = TypeVar("_Fn", bound=Callable[..., Any])
_CONVOLUTION = "conv_general_dilated"
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


def canonical_convolutions(fn: _Fn) -> _Fn:
  """The same function, whose convolutions are fast in a compiled loop on the CPU.

  For the body of a `scan` that holds a gradient of a convolutional network. Results are the
  same; what is outside of a loop is as fast as before, and so is all of it on other devices.
  Apply it to the function that takes the gradient, not to the one whose gradient is taken.

  Args:
    fn: of pytrees of arrays, to pytrees of arrays. Custom derivatives inside of it hold.

  >>> import jax.numpy as jnp
  >>> conv = lambda k: lax.conv(jnp.ones((1, 1, 3, 3)), k, (1, 1), "VALID").sum()
  >>> canonical_convolutions(jax.grad(conv))(jnp.ones((1, 1, 2, 2))).tolist()
  [[[[4.0, 4.0], [4.0, 4.0]]]]
  """

  @functools.wraps(fn)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    if jax.default_backend() != "cpu":
      return fn(*args, **kwargs)
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
    if not _to_rewrite(closed.jaxpr):
      return fn(*args, **kwargs)
    results = _run(closed.jaxpr, closed.consts, jax.tree.leaves((args, kwargs)))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)

  return wrapped  # type: ignore[return-value]


def _to_rewrite(jaxpr: Any) -> bool:
  """Whether it holds a convolution of another form, at any depth that is entered."""
  return any(
    _is_other(eqn) or any(map(_to_rewrite, _inner(eqn).values())) for eqn in jaxpr.eqns
  )


def _is_other(eqn: Any) -> bool:
  if eqn.primitive.name != _CONVOLUTION:
    return False
  other = _form(eqn) != eqn.params["dimension_numbers"]
  return other or eqn.params["batch_group_count"] > 1 or _is_swapped(eqn)


def _is_swapped(eqn: Any) -> bool:
  """Whether XLA would exchange its operands, and so leave the form: the window is the larger."""
  (lhs, rhs), params = (atom.aval.shape for atom in eqn.invars), eqn.params
  image, window, _ = params["dimension_numbers"]
  size = lambda shape, spec: math.prod(shape[axis] for axis in spec[2:])
  alone = params["feature_group_count"] == params["batch_group_count"] == 1
  return alone and size(rhs, window) > size(lhs, image)


def _inner(eqn: Any) -> dict[str, Any]:
  """The jaxprs of an equation that is entered, by a name of their own."""
  name, params = eqn.primitive.name, eqn.params
  if name in _CALLS:
    return {"body": params[_CALLS[name]].jaxpr}
  if name == "scan":
    return {"body": params["jaxpr"].jaxpr}
  if name in equations.REMATS:
    return {"body": params["jaxpr"]}
  if name == "while":
    return {"body": params["body_jaxpr"].jaxpr, "test": params["cond_jaxpr"].jaxpr}
  if name == "cond":
    return {str(i): branch.jaxpr for i, branch in enumerate(params["branches"])}
  return {}


def _form(eqn: Any) -> lax.ConvDimensionNumbers:
  """Batch first and features last; windows, features in, features out."""
  rank = len(eqn.params["window_strides"])
  space = tuple(range(rank))
  arrays = (0, rank + 1, *(axis + 1 for axis in space))
  return lax.ConvDimensionNumbers(arrays, (rank + 1, rank, *space), arrays)


def _run(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
  """Evaluates a jaxpr, the convolutions in that form."""
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values]))
  read = lambda atom: atom.val if equations.is_literal(atom) else env[atom]
  for eqn in jaxpr.eqns:
    env.update(zip(eqn.outvars, _result(eqn, list(map(read, eqn.invars)))))
  return list(map(read, jaxpr.outvars))


def _result(eqn: Any, values: list[Any]) -> Sequence[Any]:
  if _is_other(eqn):
    return [_convolution(eqn, *values)]
  if not any(map(_to_rewrite, _inner(eqn).values())):
    known = equations.named(eqn, values)
    return equations.eqn_fn(eqn)(*(known[v] for v in equations.operands(eqn)))
  name, params = eqn.primitive.name, eqn.params
  if name in _CALLS:
    return _closed(params[_CALLS[name]])(*values)
  if name in equations.REMATS:
    again = functools.partial(_run, params["jaxpr"], ())
    how = {key: params[key] for key in ("policy", "prevent_cse")}
    return jax.checkpoint(again, **how)(values)
  if name == "cond":
    return lax.switch(values[0], list(map(_closed, params["branches"])), *values[1:])
  return _while(params, values) if name == "while" else _scan(params, values)


def _closed(closed: Any) -> Callable[..., list[Any]]:
  return lambda *values: _run(closed.jaxpr, closed.consts, values)


def _scan(params: dict[str, Any], values: list[Any]) -> list[Any]:
  first_carry = params["num_consts"]
  first_xs = first_carry + params["num_carry"]
  consts, carry, xs = values[:first_carry], values[first_carry:first_xs], values[first_xs:]
  step = _closed(params["jaxpr"])

  def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
    outs = step(*consts, *carry, *slices)
    return outs[: len(carry)], outs[len(carry) :]

  how = {key: params[key] for key in ("length", "reverse", "unroll")}
  carry, ys = lax.scan(body, carry, xs, **how)
  return [*carry, *ys]


def _while(params: dict[str, Any], values: list[Any]) -> list[Any]:
  for_test, for_body = params["cond_nconsts"], params["body_nconsts"]
  tested, known = values[:for_test], values[for_test : for_test + for_body]
  test, step = _closed(params["cond_jaxpr"]), _closed(params["body_jaxpr"])
  return lax.while_loop(
    lambda carry: test(*tested, *carry)[0],
    lambda carry: step(*known, *carry),
    values[for_test + for_body :],
  )


def _convolution(eqn: Any, lhs: Any, rhs: Any) -> Any:
  """One convolution, its operands and its result transposed."""
  params: dict[str, Any] = eqn.params | {"dimension_numbers": _form(eqn)}
  (batch, features, *space), (out, into, *window), results = eqn.params["dimension_numbers"]
  lhs = lax.transpose(lhs, (batch, *space, features))  # [N, *space, C]
  rhs = lax.transpose(rhs, (*window, into, out))  # [*window, I, O]
  groups = params["batch_group_count"]
  if groups > 1:  # the same with groups of features, which there is a fast route for
    rows, *shape, depth = lhs.shape
    lhs = lhs.reshape(groups, rows // groups, *shape, depth)
    lhs = jnp.moveaxis(lhs, 0, -2)  # [N / G, *space, G, C]
    lhs = lhs.reshape(rows // groups, *shape, groups * depth)
    params |= {"batch_group_count": 1, "feature_group_count": groups}
  if _is_swapped(eqn):
    sizes = [eqn.outvars[0].aval.shape[axis] for axis in results[2:]]
    found = _as_product(lhs, rhs, sizes, params)
  else:
    found = lax.conv_general_dilated(lhs, rhs, **params)
  batch, features, *space = results
  places = {batch: 0, features: len(space) + 1, **{at: i + 1 for i, at in enumerate(space)}}
  return lax.transpose(found, [places[axis] for axis in range(len(places))])


def _as_product(lhs: Any, rhs: Any, sizes: Sequence[int], params: dict[str, Any]) -> Any:
  """A convolution of few positions as a product of patches, [N, *space, C] -> [N, *sizes, O]."""
  taps = _taps(lhs.shape[1:-1], rhs.shape[:-2], sizes, params)  # [Q, W]
  rows = lax.collapse(lhs, 1, -1)  # [N, P, C]
  rows = jnp.pad(rows, ((0, 0), (0, 1), (0, 0)))  # and what lies outside
  weights = lax.collapse(rhs, 0, -2)  # [W, C, O]
  same = {name: params[name] for name in ("precision", "preferred_element_type")}
  found = jnp.einsum("nqwc,wco->nqo", rows[:, taps], weights, **same)
  return found.reshape(lhs.shape[0], *sizes, rhs.shape[-1])


def _taps(
  image: Sequence[int],
  window: Sequence[int],
  sizes: Sequence[int],
  params: dict[str, Any],
) -> np.ndarray:
  """[positions of the result, of the window] position of the image there; beyond all: none."""
  rank, place, inside = len(image), np.zeros((), int), np.ones((), bool)
  names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
  of_axes = zip(image, window, sizes, *(params[name] for name in names))
  for axis, (n, width, size, stride, (low, _), dilation, apart) in enumerate(of_axes):
    at = np.arange(size)[:, None] * stride + np.arange(width) * apart - low  # [size, width]
    met = (at >= 0) & (at % dilation == 0) & (at < n * dilation)
    shape = [1] * (2 * rank)
    shape[axis], shape[rank + axis] = size, width
    place = place * n + (at // dilation).reshape(shape)
    inside = inside & met.reshape(shape)
  return np.where(inside, place, math.prod(image)).reshape(
    math.prod(sizes), math.prod(window)
  )

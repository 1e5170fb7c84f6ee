"""Convolutions rewritten so that XLA's CPU backend runs them at full speed in compiled
loops.

XLA has a fast route on the CPU for convolutions whose batch comes first and whose features come
last, with kernels [*window, in, out]. It brings other convolutions into that form, but only in the
outermost computation of a program (its pass `ConvCanonicalization`; seen in the text of compiled
programs). JAX writes the gradients of a convolution in another form. So these gradients take many
times as long inside `scan`, `while_loop` or `cond` (`launch.benchmark --suite=gradients`), unless
they are rewritten as here.
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
from jax.extend import core as jex

from dpjax.gradients import equations
from dpjax.parallel import made_for

_Fn = TypeVar("_Fn", bound=Callable[..., Any])
CONVOLUTION = "conv_general_dilated"
_ARRAYS = (jax.Array, np.ndarray, np.generic)


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
    return rewritten(fn, Rewriting(), *args, **kwargs)

  return wrapped  # type: ignore[return-value]


def rewritten(
  fn: Callable[..., Any], rewriting: Rewriting, *args: Any, **kwargs: Any
) -> Any:
  """Returns `fn(*args, **kwargs)`, computed from the jaxpr of `fn` as `rewriting` changes it."""
  leaves, structure = jax.tree.flatten((args, kwargs))
  places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]
  outputs: dict[str, Any] = {}

  # A new function for each call, since JAX caches traces by function.
  def on_arrays(*arrays: Any) -> list[Any]:
    arguments = list(leaves)
    for place, array in zip(places, arrays):
      arguments[place] = array
    args, kwargs = jax.tree.unflatten(structure, arguments)
    outputs["outs"], outputs["tree"] = jax.tree.flatten(fn(*args, **kwargs))
    return [out for out in outputs["outs"] if isinstance(out, _ARRAYS)]

  arrays = [leaves[place] for place in places]
  closed = jax.make_jaxpr(on_arrays)(*arrays)
  due = rewriting.is_due(closed.jaxpr)
  evaluate = rewriting.closed(closed) if due else jex.jaxpr_as_fun(closed)
  values = zip(closed.out_avals, evaluate(*arrays))
  # A jaxpr may return a constant unchanged. Then the result may be no array of JAX.
  is_array = lambda value: isinstance(value, jax.Array)
  results = iter([x if is_array(x) else jnp.asarray(x, aval.dtype) for aval, x in values])
  outs = [next(results) if isinstance(out, _ARRAYS) else out for out in outputs["outs"]]
  return jax.tree.unflatten(outputs["tree"], outs)


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


def entered(eqn: Any) -> dict[str, Any]:
  """Returns name -> jaxpr for the jaxprs inside an equation, if a rewriting can change them."""
  name = eqn.primitive.name
  params = eqn.params
  if name in equations.CALLS:
    return {"body": params[equations.CALLS[name]].jaxpr}
  if name == "scan":
    return {"body": params["jaxpr"].jaxpr}
  if name in equations.REMATS:
    return {"body": params["jaxpr"]}
  if name == "while":
    return {"body": params["body_jaxpr"].jaxpr, "test": params["cond_jaxpr"].jaxpr}
  if name == "cond" and not params.get("branches_platforms"):
    return {str(i): branch.jaxpr for i, branch in enumerate(params["branches"])}
  return {}


def _form(eqn: Any) -> lax.ConvDimensionNumbers:
  """Returns XLA's fast layout: arrays [batch, *space, features], kernels [*window, in, out]."""
  rank = len(eqn.params["window_strides"])
  space = tuple(range(rank))
  arrays = (0, rank + 1, *(axis + 1 for axis in space))
  return lax.ConvDimensionNumbers(arrays, (rank + 1, rank, *space), arrays)


class Rewriting:
  """Evaluates jaxprs with convolutions in the layout of `_form`; rewrites shared jaxprs once.

  A subclass chooses other equations (`meets`), and what is computed for them (`replaced`).
  """

  def __init__(self) -> None:
    # Each result is stored with its jaxpr. While this jaxpr lives, no other object has its id.
    self._due: dict[int, tuple[Any, bool]] = {}
    self._called: dict[int, tuple[Any, Callable[..., list[Any]]]] = {}

  def meets(self, eqn: Any) -> bool:
    """Returns whether an equation is rewritten itself."""
    if eqn.primitive.name != CONVOLUTION:
      return False
    other = _form(eqn) != eqn.params["dimension_numbers"]
    return other or eqn.params["batch_group_count"] > 1 or _is_swapped(eqn)

  def replaced(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
    """Returns the results of an equation that is rewritten."""
    return [_convolution(eqn, *values)]

  def is_due(self, jaxpr: Any) -> bool:
    """Returns whether a jaxpr contains an equation that is rewritten, at any depth."""
    if id(jaxpr) not in self._due:
      due = any(self.meets(eqn) or self._is_due_inside(eqn) for eqn in jaxpr.eqns)
      self._due[id(jaxpr)] = jaxpr, due
    return self._due[id(jaxpr)][1]

  def _is_due_inside(self, eqn: Any) -> bool:
    return any(map(self.is_due, entered(eqn).values()))

  def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr with the rewriting, and returns its results."""
    return equations.evaluated(jaxpr, consts, values, self._result)

  def _result(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
    if self.meets(eqn):
      return self.replaced(eqn, values)
    if not self._is_due_inside(eqn):
      return equations.results_of(eqn, values)
    name = eqn.primitive.name
    params = eqn.params
    if name in equations.CALLS:
      return self._call(params[equations.CALLS[name]])(*values)
    if name in equations.REMATS:
      again = functools.partial(self.run, params["jaxpr"], ())
      how = {key: params[key] for key in ("policy", "prevent_cse")}
      return jax.checkpoint(again, **how)(values)
    if name == "cond":
      return lax.switch(values[0], list(map(self.closed, params["branches"])), *values[1:])
    return self._while(params, values) if name == "while" else self._scan(eqn, values)

  def closed(self, closed: Any) -> Callable[..., list[Any]]:
    """Returns a closed jaxpr as a function that evaluates it with the rewriting."""
    return lambda *values: self.run(closed.jaxpr, closed.consts, values)

  def _call(self, closed: Any) -> Callable[..., list[Any]]:
    """Returns the jitted function of a called jaxpr. All its calls share this one program."""
    if id(closed) not in self._called:
      self._called[id(closed)] = closed, jax.jit(self.closed(closed))
    return self._called[id(closed)][1]

  def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    first_carry, first_xs = equations.ScanParts.of(eqn)
    consts = values[:first_carry]
    carry = values[first_carry:first_xs]
    xs = values[first_xs:]
    step = self.closed(params["jaxpr"])

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
      outs = step(*consts, *carry, *slices)
      return outs[: len(carry)], outs[len(carry) :]

    how = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, carry, xs, **how)
    return [*carry, *ys]

  def _while(self, params: dict[str, Any], values: list[Any]) -> list[Any]:
    for_test = params["cond_nconsts"]
    for_body = params["body_nconsts"]
    tested = values[:for_test]
    known = values[for_test : for_test + for_body]
    test = self.closed(params["cond_jaxpr"])
    step = self.closed(params["body_jaxpr"])
    return lax.while_loop(
      lambda carry: test(*tested, *carry)[0],
      lambda carry: step(*known, *carry),
      values[for_test + for_body :],
    )


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
    lhs = _widened(lhs, params)
    params |= {"padding": [(0, 0)] * len(window), "lhs_dilation": (1,) * len(window)}
  convolved = lax.conv_general_dilated(lhs, rhs, **params)
  batch, features, *space = results
  places = {batch: 0, features: len(space) + 1, **{at: i + 1 for i, at in enumerate(space)}}
  return lax.transpose(convolved, [places[axis] for axis in range(len(places))])


def _widened(lhs: Any, params: dict[str, Any]) -> Any:
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

"""Keeps clients apart under `jax.vmap`, so that no client's numbers change those of another.

If clients have different parameters, `jax.vmap` joins their convolutions into one with groups.
XLA's CPU backend computes some of these by a kernel with zeros between the groups, and NaN times
zero is NaN. So one client with a NaN would make the gradients of all other clients NaN.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

from dpjax import jaxprs
from dpjax.gradients import convolutions
from dpjax.parallel import made_for

_Fn = TypeVar("_Fn", bound=Callable[..., Any])


def clients_apart(fn: _Fn) -> _Fn:
  """Returns `fn` with convolutions that take clients one by one under `jax.vmap`.

  Use it for the program of ONE client, after differentiation. It rewrites only convolutions that
  could mix clients (`mixes_clients`). A convolution may be inside an equation that cannot be
  rewritten, such as a custom derivative. Then that whole equation is computed client by client.
  Without `jax.vmap` nothing changes.

  Args:
    fn: function of pytrees to pytrees. Leaves that are not arrays pass through unchanged.

  >>> import jax.numpy as jnp
  >>> conv = lambda x, k: lax.conv(x[None, None], k[None, None], (1,), "VALID").sum()
  >>> rows = (jnp.array([[1.0, 2.0], [3.0, jnp.nan]]), jnp.ones((2, 1)))
  >>> jax.vmap(clients_apart(conv))(*rows).tolist()
  [3.0, nan]
  """

  @functools.wraps(fn)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    return jaxprs.rewritten(fn, _Apart(), *args, **kwargs)

  return wrapped  # type: ignore[return-value]


def mixes_clients(eqn: Any) -> bool:
  """Returns whether a convolution may mix clients, if `jax.vmap` makes groups of them.

  On a CPU, mixing was seen for floats wider than 32 bits and for groups of the batch. On other
  devices wide floats count too, although untested, and groups of the batch do not.
  """
  if eqn.primitive.name != convolutions.CONVOLUTION:
    return False
  return is_wide(eqn) or (
    made_for.platform() == "cpu" and eqn.params["batch_group_count"] > 1
  )


def is_wide(eqn: Any) -> bool:
  """Returns whether an equation is a convolution of numbers of more than 32 bits."""
  is_convolution = eqn.primitive.name == convolutions.CONVOLUTION
  return is_convolution and any(var.aval.dtype.itemsize > 4 for var in eqn.invars)


class _Apart(jaxprs.Rewriting):
  """Evaluates jaxprs. Convolutions that could mix clients are computed client by client."""

  def meets(self, eqn: Any) -> bool:
    if jaxprs.jaxprs_to_rewrite(eqn):
      return False
    bodies = map(jaxprs.every_equation, jaxprs.inside(eqn))
    return any(map(mixes_clients, (eqn, *itertools.chain.from_iterable(bodies))))

  def rewrite(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
    known = jaxprs.bind(eqn, values)
    operands = [known[var] for var in jaxprs.operands(eqn)]
    # `jax.vmap` makes groups only of two mapped operands, unless the batch has groups already.
    both = mixes_clients(eqn) and eqn.params["batch_group_count"] == 1
    return _one_client(jaxprs.eqn_fn(eqn), needs_two=both)(*operands)


def _one_client(fn: Callable[..., Any], *, needs_two: bool) -> Callable[..., Any]:
  """Returns a function of arrays that takes clients one by one where `jax.vmap` maps it.

  Args:
    fn: function of arrays to a list.
    needs_two: whether to take clients one by one only if two or more operands are mapped. With one
      mapped operand `jax.vmap` keeps clients apart by itself.
  """

  @jax.custom_batching.custom_vmap
  def alone(*operands: Any) -> Any:
    return fn(*operands)

  @alone.def_vmap
  def several_clients(size: int, mapped: Any, *operands: Any) -> Any:
    axes = tuple(0 if is_mapped else None for is_mapped in mapped)
    # With one mapped operand, clients become rows of one batch or features of one kernel. Neither
    # rows nor features mix.
    if needs_two and sum(mapped) < 2:
      outs = clients_apart(jax.vmap(fn, in_axes=axes, axis_size=size))(*operands)
      return outs, jax.tree.map(lambda _: True, outs)
    clients = [x for x, is_mapped in zip(operands, mapped) if is_mapped]

    def of_one(clients: list[Any]) -> Any:
      rows = iter(clients)
      every = [next(rows) if is_mapped else x for x, is_mapped in zip(operands, mapped)]
      # `differentiable` has this batching rule, too, since an outer vmap may map clients again.
      return differentiable(*every)

    outs = lax.map(of_one, clients)
    return outs, jax.tree.map(lambda _: True, outs)

  # JAX cannot transpose a mapped `custom_vmap`, so the gradient is defined separately.
  @jax.custom_vjp
  def differentiable(*operands: Any) -> Any:
    return alone(*operands)

  def forward(*operands: Any) -> Any:
    return differentiable(*operands), operands

  def backward(operands: Any, cotangents: Any) -> Any:
    pull_back = lambda operands, cotangents: jax.vjp(fn, *operands)[1](cotangents)
    return clients_apart(pull_back)(operands, cotangents)

  differentiable.defvjp(forward, backward)
  return differentiable

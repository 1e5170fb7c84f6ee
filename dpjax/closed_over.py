"""Jitted functions whose closed-over arrays are arguments of their program, not constants in it.

`jax.jit` writes the value of each closed-over array into the program. A step closes over the scale
of its noise, its learning rate and keys of examples. So each value would be compiled anew, and
JAX's cache of programs on disk would hold secret keys. Here equal functions of other values give
equal programs: a sweep over epsilon compiles one step, and the cache knows it in the next process.

| closed over                                   | in the program         |
| --------------------------------------------- | ---------------------- |
| `jax.Array`, typed key                        | an argument            |
| the same, by a function that is jitted inside | an argument            |
| number of Python or NumPy, array of NumPy     | a constant             |
| array that every trace makes anew             | an argument for the    |
|                                               | first shapes alone     |

XLA may fold a constant, and so round the last bits of a result otherwise than with an argument. On
CPUs the tested steps give the same bits either way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import core

from dpjax import jaxprs
from dpjax.parallel import made_for


class Jitted:
  """Function `fn`, jitted; see `jitted`."""

  def __init__(self, fn: Callable[..., Any], *, donate_argnums: int | tuple[int, ...] = ()):
    places = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums
    self._fn = fn
    # Arrays that the first trace closed over. They are arguments of every program.
    self._held: list[Any] | None = None
    self._lock = threading.Lock()
    self._first: tuple[Any, Any] | None = None

    def run(held: list[Any], *args: Any) -> Any:
      first = self._first
      if first is not None and first[0] == _signature(args):
        closed, shapes = first[1]
      else:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
      values = jax.tree.leaves(args)
      inlined = _Inlined(self._held or [], held)
      consts = inlined.arguments(closed.consts)
      if inlined.is_due(closed.jaxpr):
        flat = inlined.run(closed.jaxpr, consts, values)
      else:
        flat = jex.jaxpr_as_fun(jex.ClosedJaxpr(closed.jaxpr, consts))(*values)
      return jax.tree.unflatten(jax.tree.structure(shapes), flat)

    run.__name__ = getattr(getattr(fn, "func", fn), "__name__", "run")
    # XLA's default is half of AVX-512's vectors: noise takes twice the time, and has equal bits.
    wide = {"xla_cpu_prefer_vector_width": 512} if made_for.platform() == "cpu" else None
    later = tuple(place + 1 for place in places)
    self._jitted = jax.jit(run, donate_argnums=later, compiler_options=wide)
    # A part of another compiled function has that one's options.
    self._nested = jax.jit(run)

  def __call__(self, *args: Any) -> Any:
    """Calls the compiled function."""
    nested = any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(args))
    out = (self._nested if nested else self._jitted)(self._arrays(args), *args)
    # Programs of other shapes are traced anew, so the first trace is needed no more.
    self._first = None
    return out

  def lower(self, *args: Any) -> Any:
    """Lowers the function for arguments of these shapes, as `jax.jit(fn).lower` does."""
    # Shapes alone: the arguments may be on the devices of another machine.
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._arrays(args)]
    return self._jitted.lower(shapes, *args)

  def _arrays(self, args: tuple[Any, ...]) -> list[Any]:
    # Threads that call it first at once must agree on the arrays.
    with self._lock:
      if self._held is None:
        self._first = _signature(args), jax.make_jaxpr(self._fn, return_shape=True)(*args)
        arrays = filter(_is_argument, jaxprs.constants(self._first[1][0]))
        self._held = list({id(array): array for array in arrays}.values())
      return self._held


def jitted(fn: Callable[..., Any], *, donate_argnums: int | tuple[int, ...] = ()) -> Jitted:
  """Returns `jax.jit(fn)`, whose closed-over arrays are arguments of the compiled program.

  Args:
    fn: function of trees of arrays. It closes over the same arrays at every call.
    donate_argnums: as for `jax.jit`.

  >>> rate = argument(0.5)
  >>> halve = jitted(lambda x: rate * x)
  >>> float(halve(3.0)), "0.5" in halve.lower(3.0).as_text()
  (1.5, False)
  """
  return Jitted(fn, donate_argnums=donate_argnums)


def argument(value: Any, dtype: Any = None) -> jax.Array:
  """Returns an array of this value, which `jitted` makes an argument of what closes over it.

  It is never traced, even if it is made within a trace.
  """
  with jax.ensure_compile_time_eval():
    return jnp.asarray(value, dtype)


class Number(float):
  """A Python number for checks, and `argument(value)` where a computation takes it.

  >>> import math
  >>> std = Number(2.0)
  >>> math.sqrt(2 * std), within(std, jnp.float32)
  (2.0, Array(2., dtype=float32))
  """

  array: jax.Array

  def __new__(cls, value: float) -> Number:
    number = super().__new__(cls, value)
    number.array = argument(float(value))
    return number


def within(number: Any, dtype: Any) -> Any:
  """Returns what a computation in `dtype` takes for a number: the array of a `Number` that is at
  least as exact, else the number itself, which is a constant of the program."""
  if not isinstance(number, Number):
    return number
  exact = jnp.finfo(number.array.dtype).bits >= jnp.finfo(dtype).bits
  return number.array.astype(dtype) if exact else float(number)


def _signature(args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
  leaves, treedef = jax.tree.flatten(args)
  names = ("shape", "dtype", "weak_type")
  return treedef, [tuple(getattr(leaf, name, None) for name in names) for leaf in leaves]


class _Inlined(jaxprs.Rewriting):
  """Puts the jaxpr of a jitted function that holds arrays in the place of its call.

  JAX makes them no arguments of the call, so they would be constants. The arguments `given` take
  the places of the arrays `held`.
  """

  def __init__(self, held: Sequence[Any], given: Sequence[Any]):
    super().__init__()
    self._argument_of = dict(zip(map(id, held), given))

  def arguments(self, consts: Sequence[Any]) -> list[Any]:
    return [self._argument_of.get(id(const), const) for const in consts]

  def meets(self, eqn: Any) -> bool:
    called = jaxprs.CALLS.get(eqn.primitive.name)
    return called is not None and any(map(_is_argument, eqn.params[called].consts))

  def rewrite(self, eqn: Any, values: list[Any]) -> list[Any]:
    called = eqn.params[jaxprs.CALLS[eqn.primitive.name]]
    return self.run(called.jaxpr, self.arguments(called.consts), values)


def _is_argument(const: Any) -> bool:
  # JAX wraps arrays of NumPy in a type of its own, which is no array on a device.
  return isinstance(const, jax.Array) and hasattr(const, "sharding")

"""Equations of a jaxpr: operands, evaluation of one equation, and users of a value.

The module relies on `jax.extend.core` and on the names of a few primitives of JAX.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from dpjax import trees

Var = Any  # jax.extend.core.Var
Eqn = Any  # jax.extend.core.JaxprEqn
Jaxpr = Any  # jax.extend.core.Jaxpr

# Primitives of calls, each with its parameter that holds the called jaxpr.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
REMATS = ("remat2", "checkpoint", "remat")
REARRANGED = ("reshape", "squeeze", "expand_dims", "rev", "copy", "slice")


class HasDType(Protocol):
  """An array, or an abstract value of a jaxpr."""

  @property
  def dtype(self) -> Any: ...


def is_literal(atom: object) -> bool:
  """Returns whether an operand is a literal of the equation, not a variable."""
  return isinstance(atom, jex.Literal)


def is_float(aval: HasDType) -> bool:
  """Returns whether gradients flow through values of this type (real or complex floats)."""
  return jnp.issubdtype(aval.dtype, jnp.inexact)


class EqnChain(NamedTuple):
  """A chain of equations, treated as one: only the next equation reads the results of each."""

  eqns: tuple[Eqn, ...]
  name: str

  @property
  def primitive(self) -> EqnChain:
    """Returns the chain itself, which has a `name` as a primitive has."""
    return self

  @property
  def params(self) -> dict[str, Any]:
    return {}

  @property
  def invars(self) -> list[Any]:
    """Returns the operands that come from outside of the chain."""
    inside = {var for eqn in self.eqns for var in eqn.outvars}
    return [atom for eqn in self.eqns for atom in eqn.invars if _is_new(atom, inside)]

  @property
  def outvars(self) -> list[Var]:
    return list(self.eqns[-1].outvars)

  @property
  def effects(self) -> Any:
    return self.eqns[-1].effects


def _is_new(atom: Any, known: set[Var]) -> bool:
  # A literal has no hash.
  return is_literal(atom) or atom not in known


def operands(eqn: Eqn) -> tuple[Var, ...]:
  """Returns the distinct variables that an equation reads."""
  return tuple(dict.fromkeys(atom for atom in eqn.invars if not is_literal(atom)))


def named(eqn: Eqn, values: Sequence[Any]) -> dict[Var, Any]:
  """Returns the value bound to each variable of an equation."""
  return {v: x for v, x in zip(eqn.invars, values) if not is_literal(v)}


def inner_jaxprs(jaxpr: Jaxpr) -> Iterator[Any]:
  """Yields the jaxprs, open or closed, in the parameters of a jaxpr's equations."""
  for equation in jaxpr.eqns:
    for value in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda v: isinstance(v, jex.Jaxpr | jex.ClosedJaxpr),
    ):
      if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
        yield value


def primitives(closed: Any) -> Iterator[str]:
  """Yields the names of all operations in a jaxpr, open or closed, and in the jaxprs inside it."""
  jaxpr = getattr(closed, "jaxpr", closed)
  yield from (equation.primitive.name for equation in jaxpr.eqns)
  for inner in inner_jaxprs(jaxpr):
    yield from primitives(inner)


def closed_over(closed: Any) -> Iterator[Any]:
  """Yields the arrays that a jaxpr holds as constants, at any depth, but no single numbers.

  >>> table = np.ones(3)
  >>> [array.shape for array in closed_over(jax.make_jaxpr(lambda x: x * table)(1.0))]
  [(3,)]
  """
  jaxpr = getattr(closed, "jaxpr", closed)
  yield from (c for c in getattr(closed, "consts", ()) if np.ndim(c))
  for equation in jaxpr.eqns:
    values = (v.val for v in equation.invars if isinstance(v, jex.Literal))
    yield from (value for value in values if np.ndim(value))
  for inner in inner_jaxprs(jaxpr):
    yield from closed_over(inner)


def needed(eqns: Sequence[Eqn], wanted: Iterable[Var]) -> list[Eqn]:
  """Returns the equations that the wanted variables depend on, in order."""
  live = set(wanted)
  kept = []
  for eqn in reversed(eqns):
    if live.intersection(eqn.outvars):
      live.update(operands(eqn))
      kept.append(eqn)
  return kept[::-1]


def alone_fn(eqn: Eqn, invars: list[Any], outvars: list[Any]) -> Callable[..., list[Any]]:
  """Returns a function invars -> outvars that computes this equation and nothing else.

  Args:
    eqn: an equation, or a chain of them; custom derivatives stay intact.
    invars: operands of the equation that are not literals, each once.
    outvars: results of the equation that the function returns.
  """
  eqns = list(eqn.eqns) if isinstance(eqn, EqnChain) else [eqn]
  alone = _template().replace(
    invars=invars, outvars=outvars, eqns=eqns, effects=eqn.effects
  )
  return jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, []))


def eqn_fn(eqn: Eqn) -> Callable[..., list[Any]]:
  """Returns the equation as a function of `operands(eqn)`, with custom derivatives intact."""
  # An unused result has no variable that a jaxpr could return; None stands for it.
  outvars = [var for var in eqn.outvars if not isinstance(var, jex.DropVar)]
  evaluate = alone_fn(eqn, list(operands(eqn)), outvars)

  def call(*args):
    results = iter(evaluate(*args))
    return [None if isinstance(var, jex.DropVar) else next(results) for var in eqn.outvars]

  return call


def results_of(eqn: Eqn, values: Sequence[Any]) -> list[Any]:
  """Returns the results of an equation at the values of all its operands, literals included."""
  known = named(eqn, values)
  return eqn_fn(eqn)(*(known[v] for v in operands(eqn)))


def evaluated(
  jaxpr: Jaxpr,
  consts: Sequence[Any],
  values: Sequence[Any],
  step: Callable[[Eqn, list[Any]], Sequence[Any]] = results_of,
) -> list[Any]:
  """Returns the results of a jaxpr, evaluated equation by equation.

  Args:
    jaxpr: an open jaxpr.
    consts: constants of the jaxpr.
    values: arguments of the jaxpr.
    step: function (equation, values of its operands) -> results of the equation.

  >>> closed = jax.make_jaxpr(lambda x: 2.0 * x + 1.0)(0.0)
  >>> evaluated(closed.jaxpr, closed.consts, [3.0])
  [Array(7., dtype=float32, weak_type=True)]
  """
  env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values)))

  def read(atom):
    return atom.val if is_literal(atom) else env[atom]

  for eqn in jaxpr.eqns:
    env.update(zip(eqn.outvars, step(eqn, [read(atom) for atom in eqn.invars])))
  return [read(atom) for atom in jaxpr.outvars]


def is_narrow(aval: HasDType) -> bool:
  """Returns whether a value is a float of less than 32 bits."""
  return jnp.issubdtype(aval.dtype, jnp.floating) and jnp.finfo(aval.dtype).bits < 32


def wide_fn(
  eqn: Eqn, precision: lax.Precision = lax.Precision.HIGHEST
) -> Callable[..., list[Any]] | None:
  """Returns the equation as a function of `operands(eqn)` that computes in at least float32.

  Returns None if the equation's parameters hold another program (a branch, a custom derivative).
  That program computes in the types that it was traced with.

  Args:
    eqn: equation, or chain of equations.
    precision: precision of the products. Below `HIGHEST`, a term of a sum could be longer than the
      norm computed for it, unless the norm includes that growth (`ghost.precision`).
  """
  if isinstance(eqn, EqnChain):
    return _wide_chain(eqn, precision)
  params = eqn.params
  # Functions and jaxprs may also be in a list, as the branches of a cond are.
  listed = [
    value if isinstance(value, (tuple, list)) else (value,) for value in params.values()
  ]
  held = [each for values in listed for each in values]
  if any(
    callable(each) or hasattr(each, "eqns") or hasattr(each, "jaxpr") for each in held
  ):
    return None
  full = {"preferred_element_type": None, "precision": (precision,) * 2}
  known = params | {name: value for name, value in full.items() if name in params}

  def call(*args):
    values = dict(zip(operands(eqn), args))
    operand_values = []
    for atom in eqn.invars:
      value = atom.val if is_literal(atom) else values[atom]
      # Integers and booleans keep their types: they may be indices or choices.
      if is_float(atom.aval):
        value = trees.at_least_float32(jnp.asarray(value))
      operand_values.append(value)
    results = eqn.primitive.bind(*operand_values, **known)
    return results if eqn.primitive.multiple_results else [results]

  return call


def _wide_chain(
  chain: EqnChain, precision: lax.Precision
) -> Callable[..., list[Any]] | None:
  parts = [(eqn, wide_fn(eqn, precision)) for eqn in chain.eqns]

  def call(*args):
    values = dict(zip(operands(chain), args))
    for eqn, evaluate in parts:
      assert evaluate is not None
      values.update(zip(eqn.outvars, evaluate(*(values[v] for v in operands(eqn)))))
    return [values[var] for var in chain.outvars]

  return None if any(evaluate is None for _, evaluate in parts) else call


class ScanParts(NamedTuple):
  """Positions at which the parts of a scan's operands begin: constants, carry, scanned inputs."""

  first_carry: int
  first_xs: int

  @classmethod
  def of(cls, eqn: Eqn) -> ScanParts:
    """Reads the parts of a scan from the ranks of its operands and results.

    JAX up to 0.10 stores `num_consts` and `num_carry` with a scan; JAX from 0.11 does not. In all
    versions a carry has the same rank in the body, and a scanned input has one axis less.

    >>> scan = lambda c, x: jax.lax.scan(lambda c, x: (c + x, c), c, x)
    >>> ScanParts.of(jax.make_jaxpr(scan)(0.0, jnp.ones(3)).eqns[0])
    ScanParts(first_carry=0, first_xs=1)
    """
    body = eqn.params["jaxpr"].jaxpr
    stepped = _count_stepped(eqn.invars, body.invars)
    carried = len(eqn.outvars) - _count_stepped(eqn.outvars, body.outvars)
    first_xs = len(eqn.invars) - stepped
    return cls(first_xs - carried, first_xs)


def _count_stepped(outside: Sequence[Any], inside: Sequence[Any]) -> int:
  ranks = ((len(o.aval.shape), len(i.aval.shape)) for o, i in zip(outside, inside))
  return sum(seen != within for seen, within in ranks)


@functools.cache
def _template() -> Any:
  """Returns an empty jaxpr to be filled, since the constructor of jaxprs is not public."""
  return jax.make_jaxpr(lambda: ())().jaxpr


class Ends(NamedTuple):
  """Values whose cotangents, concatenated along an axis, give the cotangent of another value."""

  parts: tuple[Var, ...]
  axis: int = 0


class Graph(NamedTuple):
  """Users of each value of a jaxpr, and the value's place among the results of its equation."""

  uses: collections.Counter
  users: dict[Var, Eqn]  # the last equation that reads the value
  position: dict[Var, int]

  @classmethod
  def of(cls, jaxpr: Jaxpr) -> Graph:
    """Returns the graph of a whole jaxpr."""
    uses = collections.Counter(v for v in jaxpr.outvars if not is_literal(v))
    users = {}
    position = {}
    for eqn in jaxpr.eqns:
      inputs = [v for v in eqn.invars if not is_literal(v)]
      uses.update(inputs)
      users.update(dict.fromkeys(inputs, eqn))
      position.update({v: i for i, v in enumerate(eqn.outvars)})
    return cls(uses, users, position)

  def ends(self, results: Sequence[Var]) -> dict[Var, Ends]:
    """Returns, for each result, the values whose cotangents give the cotangent of the result.

    They are the result itself, the last sum that it enters, or the parts into which this sum is
    split. Parts are returned only if another result ends in the same parts. For example, both
    products of a recurrent cell end in its gates.
    """
    whole = {var: self.same_cotangent(var) for var in results}
    split = {end: self._split(end) for end in whole.values()}
    shared = collections.Counter(split.values())
    best = {e: s if s and shared[s] > 1 else Ends((e,)) for e, s in split.items()}
    return {var: best[end] for var, end in whole.items()}

  def same_cotangent(self, var: Var) -> Var:
    """Follows a value through sums that are its only use. Returns the last sum, or the value.

    The cotangent of the result equals the cotangent of the value.
    """
    while self._only_user(var) in ("add", "add_any"):
      total = self.users[var].outvars[0]
      # An operand that was broadcast or cast has another cotangent than the sum.
      if (total.aval.shape, total.aval.dtype) != (var.aval.shape, var.aval.dtype):
        break
      var = total
    return var

  def _only_user(self, var: Var) -> str | None:
    alone = self.uses[var] == 1 and var in self.users
    return self.users[var].primitive.name if alone else None

  def _split(self, var: Var) -> Ends | None:
    """Returns the sums in which the parts of a value end. None if a split is not its only use, or
    if a part enters no sum."""
    if self._only_user(var) != "split":
      return None
    eqn = self.users[var]
    parts = tuple(map(self.same_cotangent, eqn.outvars))
    moved = all(part is not out for part, out in zip(parts, eqn.outvars))
    return Ends(parts, eqn.params["axis"]) if moved else None

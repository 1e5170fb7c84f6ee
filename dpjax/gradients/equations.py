"""Equations of a jaxpr: what they read, one evaluated alone, and who uses a value.

Of JAX this relies on `jax.extend.core` and on the names of a few primitives.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend import core as jex

Var = Any  # jax.extend.core.Var
Eqn = Any  # jax.extend.core.JaxprEqn
Jaxpr = Any  # jax.extend.core.Jaxpr

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}  # what is called
REMATS = ("remat2", "checkpoint", "remat")
REARRANGED = ("reshape", "squeeze", "expand_dims", "rev", "copy", "slice")


class HasDType(Protocol):
  """An array, or an abstract value of a jaxpr."""

  @property
  def dtype(self) -> Any: ...


def is_literal(atom: object) -> bool:
  """Whether an operand is written into the equation."""
  return isinstance(atom, jex.Literal)


def is_float(aval: HasDType) -> bool:
  """Whether gradients flow through values of this type."""
  return jnp.issubdtype(aval.dtype, jnp.inexact)


def operands(eqn: Eqn) -> tuple[Var, ...]:
  """The distinct variables that an equation reads."""
  return tuple(dict.fromkeys(atom for atom in eqn.invars if not is_literal(atom)))


def named(eqn: Eqn, values: Sequence[Any]) -> dict[Var, Any]:
  """What each variable that an equation reads stands for."""
  return {v: x for v, x in zip(eqn.invars, values) if not is_literal(v)}


def needed(eqns: Sequence[Eqn], wanted: Iterable[Var]) -> list[Eqn]:
  """The equations on which the wanted variables depend, in order."""
  live, kept = set(wanted), []
  for eqn in reversed(eqns):
    if live.intersection(eqn.outvars):
      live.update(operands(eqn))
      kept.append(eqn)
  return kept[::-1]


def eqn_fn(eqn: Eqn) -> Callable[..., list[Any]]:
  """The equation as a function of `operands(eqn)`, custom derivatives intact."""
  outvars = [var for var in eqn.outvars if not isinstance(var, jex.DropVar)]
  alone = _template().replace(
    invars=list(operands(eqn)), outvars=outvars, eqns=[eqn], effects=eqn.effects
  )
  evaluate = jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, []))

  def call(*args):
    results = iter(evaluate(*args))
    return [None if isinstance(var, jex.DropVar) else next(results) for var in eqn.outvars]

  return call


@functools.cache
def _template() -> Any:
  """An empty jaxpr to be filled: its constructor is not public."""
  return jax.make_jaxpr(lambda: ())().jaxpr


class Ends(NamedTuple):
  """Values whose cotangents, joined along an axis, are that of another value."""

  parts: tuple[Var, ...]
  axis: int = 0


class Graph(NamedTuple):
  """Who uses a value, and where it is among the results of its equation."""

  uses: collections.Counter
  users: dict[Var, Eqn]  # the last of them
  position: dict[Var, int]

  @classmethod
  def of(cls, jaxpr: Jaxpr) -> Graph:
    """Of a whole jaxpr."""
    uses = collections.Counter(v for v in jaxpr.outvars if not is_literal(v))
    users, position = {}, {}
    for eqn in jaxpr.eqns:
      inputs = [v for v in eqn.invars if not is_literal(v)]
      uses.update(inputs)
      users.update(dict.fromkeys(inputs, eqn))
      position.update({v: i for i, v in enumerate(eqn.outvars)})
    return cls(uses, users, position)

  def ends(self, results: Sequence[Var]) -> dict[Var, Ends]:
    """Each result's ends; the parts it is split into only where others end there too, as
    the two products of a recurrent cell do whose gates are summed one by one."""
    whole = {var: self.same_cotangent(var) for var in results}
    split = {end: self._split(end) for end in whole.values()}
    shared = collections.Counter(split.values())
    best = {e: s if s and shared[s] > 1 else Ends((e,)) for e, s in split.items()}
    return {var: best[end] for var, end in whole.items()}

  def same_cotangent(self, var: Var) -> Var:
    """Follows a value through sums that are its only use: their cotangents are its own."""
    while self._only_user(var) in ("add", "add_any"):
      total = self.users[var].outvars[0]
      if (total.aval.shape, total.aval.dtype) != (var.aval.shape, var.aval.dtype):
        break
      var = total
    return var

  def _only_user(self, var: Var) -> str | None:
    alone = self.uses[var] == 1 and var in self.users
    return self.users[var].primitive.name if alone else None

  def _split(self, var: Var) -> Ends | None:
    """The sums in which the parts of a value end, where it is only split."""
    if self._only_user(var) != "split":
      return None
    eqn = self.users[var]
    parts = tuple(map(self.same_cotangent, eqn.outvars))
    moved = all(part is not out for part, out in zip(parts, eqn.outvars))
    return Ends(parts, eqn.params["axis"]) if moved else None

"""Reads, walks, evaluates and rewrites jaxprs, the programs that JAX traces.

| to                    | is here                                                              |
| --------------------- | -------------------------------------------------------------------- |
| read an equation      | `operands`, `is_literal`, `ScanParts`, `EqnChain`                    |
| walk equations        | `inside`, `every_equation`, `primitives`, `constants`,               |
|                       | `closed_over`, `reach`, `needed_eqns`, `between`, `Graph`            |
| evaluate              | `results_of` one equation, `evaluate` a jaxpr, `wide_fn`             |
| evaluate with changes | `Rewriting`, `scan_again`, `remat_again`                             |

The module relies on `jax.extend.core` and on the names of a few primitives of JAX.
"""

from __future__ import annotations

import collections
import functools
import itertools
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
_ARRAYS = (jax.Array, np.ndarray, np.generic)
_PLACE = object()  # stands for an array among the results of a function (`rewritten`)
_JAXPRS = (jex.Jaxpr, jex.ClosedJaxpr)

# Primitives of calls, each with its parameter that holds the called jaxpr.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
REMATS = ("remat2", "checkpoint", "remat")
# Primitives of one inner jaxpr that is evaluated once, at the operands as they stand.
_ALIGNED = {
  *CALLS,
  *REMATS,
  "custom_jvp_call",
  "custom_vjp_call",
  "custom_vmap_call",
  "shard_map",
}
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
    atoms = [atom for eqn in self.eqns for atom in eqn.invars]
    # A literal has no hash.
    return [atom for atom in atoms if is_literal(atom) or atom not in inside]

  @property
  def outvars(self) -> list[Var]:
    return list(self.eqns[-1].outvars)

  @property
  def effects(self) -> Any:
    return self.eqns[-1].effects


def bind(eqn: Eqn, values: Sequence[Any]) -> dict[Var, Any]:
  """Returns the value of each of the distinct variables that an equation reads, in order."""
  known = {}
  for atom, value in zip(eqn.invars, values):
    if not is_literal(atom):
      known[atom] = value
  return known


def operands(eqn: Eqn) -> tuple[Var, ...]:
  """Returns the distinct variables that an equation reads, in order."""
  return tuple(bind(eqn, eqn.invars))


def _is_jaxpr(value: object) -> bool:
  return isinstance(value, _JAXPRS)


def inside(eqn: Eqn) -> list[Any]:
  """Returns the jaxprs, open or closed, in an equation's parameters (calls, loops, branches)."""
  held = []
  for value in eqn.params.values():
    several = isinstance(value, tuple | list | dict)
    values = jax.tree.leaves(value, is_leaf=_is_jaxpr) if several else [value]
    held += filter(_is_jaxpr, values)
  return held


def open_jaxpr(jaxpr: Any) -> Jaxpr:
  """Returns the open jaxpr of a jaxpr that is open or closed."""
  return getattr(jaxpr, "jaxpr", jaxpr)


def every_equation(jaxpr: Any) -> Iterator[Eqn]:
  """Yields the equations of a jaxpr, and the equations inside of calls, loops and branches."""
  for eqn in open_jaxpr(jaxpr).eqns:
    yield eqn
    for inner in inside(eqn):
      yield from every_equation(inner)


def primitives(jaxpr: Any) -> Iterator[str]:
  """Yields the names of all operations in a jaxpr, and in the jaxprs inside it."""
  return (eqn.primitive.name for eqn in every_equation(jaxpr))


def constants(closed: Any) -> Iterator[Any]:
  """Yields the constants of a jaxpr, and of the jaxprs inside it."""
  for jaxpr in (closed, *itertools.chain(*map(inside, every_equation(closed)))):
    yield from getattr(jaxpr, "consts", ())


def closed_over(closed: Any) -> Iterator[Any]:
  """Yields the arrays that a jaxpr holds as constants, at any depth, but no single numbers.

  >>> table = np.ones(3)
  >>> [array.shape for array in closed_over(jax.make_jaxpr(lambda x: x * table)(1.0))]
  [(3,)]
  """
  atoms = itertools.chain(*(eqn.invars for eqn in every_equation(closed)))
  literals = (atom.val for atom in filter(is_literal, atoms))
  yield from filter(np.ndim, itertools.chain(constants(closed), literals))


def reach(
  jaxpr: Any,
  inputs: Sequence[bool],
  visit: Callable[[Eqn, list[bool]], object] = lambda eqn, given: None,
) -> list[bool]:
  """Returns which results of a jaxpr may depend on the inputs that are marked True.

  Args:
    jaxpr: an open or closed jaxpr.
    inputs: a mark for each input.
    visit: called with each equation, at any depth, and the marks of its operands. It may get an
      equation of a loop several times, with more marks each time.

  >>> reach(jax.make_jaxpr(lambda x, y: (2 * x, 3 * y))(0.0, 0.0), [True, False])
  [True, False]
  """
  jaxpr = open_jaxpr(jaxpr)
  marked = {var for var, mark in zip(jaxpr.invars, inputs) if mark}
  is_marked = lambda atom: not is_literal(atom) and atom in marked
  for eqn in jaxpr.eqns:
    given = list(map(is_marked, eqn.invars))
    visit(eqn, given)
    results = _reached_results(eqn, given, visit)
    marked.update(var for var, mark in zip(eqn.outvars, results) if mark)
  return list(map(is_marked, jaxpr.outvars))


def _reached_results(eqn: Eqn, given: list[bool], visit: Callable) -> list[bool]:
  bodies = list(map(open_jaxpr, inside(eqn)))
  name = eqn.primitive.name
  if name == "scan":
    carry, xs = ScanParts.of(eqn)
    while True:
      results = reach(bodies[0], given, visit)
      # What a turn carries is an input of the next.
      after = [a or b for a, b in zip(given[carry:xs], results)]
      if after == given[carry:xs]:
        return results
      given = [*given[:carry], *after, *given[xs:]]
  if name in _ALIGNED and len(bodies) == 1 and len(bodies[0].invars) == len(given):
    return reach(bodies[0], given, visit)
  # In a branch or another loop, every value may depend on marked ones.
  for body in bodies:
    reach(body, [True] * len(body.invars), visit)
  return [any(given)] * len(eqn.outvars)


def needed_eqns(eqns: Sequence[Eqn], wanted: Iterable[Var]) -> list[Eqn]:
  """Returns the equations that the wanted variables depend on, in order."""
  live = set(wanted)
  kept = []
  for eqn in reversed(eqns):
    if live.intersection(eqn.outvars):
      live.update(operands(eqn))
      kept.append(eqn)
  return kept[::-1]


def between(jaxpr: Jaxpr, sources: Iterable[Var]) -> list[Eqn]:
  """Returns the equations through which a gradient flows from the results back to `sources`."""
  found = set(sources)
  after = []
  for eqn in jaxpr.eqns:
    # A value that only stop_gradient reads is not differentiated.
    stops = eqn.primitive.name == "stop_gradient"
    if not stops and found.intersection(operands(eqn)):
      found.update(eqn.outvars)
      after.append(eqn)
  return needed_eqns(after, (var for var in jaxpr.outvars if not is_literal(var)))


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
  return eqn_fn(eqn)(*bind(eqn, values).values())


def evaluate(
  jaxpr: Jaxpr,
  consts: Sequence[Any],
  values: Sequence[Any],
  step: Callable[[Eqn, list[Any]], Sequence[Any]] = results_of,
  *,
  literal: Callable[[Any], Any] = lambda value: value,
  wanted: Sequence[Any] | None = None,
) -> list[Any]:
  """Returns the results of a jaxpr, evaluated equation by equation.

  Args:
    jaxpr: an open jaxpr.
    consts: constants of the jaxpr.
    values: arguments of the jaxpr.
    step: function (equation, values of its operands) -> results of the equation.
    literal: function of a literal's number; its result is what `step` gets.
    wanted: variables to return in place of the results; only what they need is evaluated.

  >>> closed = jax.make_jaxpr(lambda x: 2.0 * x + 1.0)(0.0)
  >>> evaluate(closed.jaxpr, closed.consts, [3.0])
  [Array(7., dtype=float32, weak_type=True)]
  """
  env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values)))
  read = lambda atom: literal(atom.val) if is_literal(atom) else env[atom]
  for eqn in jaxpr.eqns if wanted is None else needed_eqns(jaxpr.eqns, wanted):
    env.update(zip(eqn.outvars, step(eqn, list(map(read, eqn.invars)))))
  return list(map(read, jaxpr.outvars if wanted is None else wanted))


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
    uses = collections.Counter([v for v in jaxpr.outvars if not is_literal(v)])
    users = {}
    position = {}
    for eqn in jaxpr.eqns:
      for atom in eqn.invars:
        if not is_literal(atom):
          uses[atom] += 1
          users[atom] = eqn
      position.update(zip(eqn.outvars, itertools.count()))
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
    ends = {}
    for var, end in whole.items():
      parts = split[end]
      ends[var] = parts if parts and shared[parts] > 1 else Ends((end,))
    return ends

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


def jaxprs_to_rewrite(eqn: Any) -> dict[str, Any]:
  """Returns name -> jaxpr for the jaxprs inside an equation, if a rewriting can change them."""
  name = eqn.primitive.name
  params = eqn.params
  if name in CALLS:
    return {"body": params[CALLS[name]].jaxpr}
  if name == "scan":
    return {"body": params["jaxpr"].jaxpr}
  if name in REMATS:
    return {"body": params["jaxpr"]}
  if name == "while":
    return {"body": params["body_jaxpr"].jaxpr, "test": params["cond_jaxpr"].jaxpr}
  if name == "cond" and not params.get("branches_platforms"):
    return {str(i): branch.jaxpr for i, branch in enumerate(params["branches"])}
  return {}


def remat_again(eqn: Eqn, fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `fn` with its results recomputed in the backward pass, as a remat equation says."""
  return jax.checkpoint(fn, **{key: eqn.params[key] for key in ("policy", "prevent_cse")})


def scan_again(
  eqn: Eqn,
  values: Sequence[Any],
  step: Callable[[list[Any], Any], tuple[Sequence[Any], Any]],
  more: Any = None,
) -> tuple[list[Any], Any]:
  """Evaluates a scan with another body. Returns (results, what `step` gave beside its results).

  Args:
    eqn: equation of the scan.
    values: its operands.
    step: `(operands of the body, slices of more) -> (results of the body, arrays to stack)`.
    more: tree of arrays that are sliced as the scanned inputs are.
  """
  first_carry, first_xs = ScanParts.of(eqn)
  consts = values[:first_carry]

  def body(carry: list[Any], slices: Any) -> Any:
    xs, beside = slices
    outs, seen = step([*consts, *carry, *xs], beside)
    return list(outs[: len(carry)]), (list(outs[len(carry) :]), seen)

  how = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
  begun = list(values[first_carry:first_xs])
  carry, (ys, seen) = lax.scan(body, begun, (list(values[first_xs:]), more), **how)
  return [*carry, *ys], seen


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
    outs, outputs["tree"] = jax.tree.flatten(fn(*args, **kwargs))
    # No array is kept: tracers must not outlive their trace.
    outputs["outs"] = [_PLACE if isinstance(out, _ARRAYS) else out for out in outs]
    return [out for out in outs if isinstance(out, _ARRAYS)]

  arrays = [leaves[place] for place in places]
  closed = jax.make_jaxpr(on_arrays)(*arrays)
  due = rewriting.is_due(closed.jaxpr)
  evaluate = rewriting.as_function(closed) if due else jex.jaxpr_as_fun(closed)
  values = zip(closed.out_avals, evaluate(*arrays))
  # A jaxpr may return a constant unchanged. Then the result may be no array of JAX.
  is_array = lambda value: isinstance(value, jax.Array)
  results = iter([x if is_array(x) else jnp.asarray(x, aval.dtype) for aval, x in values])
  outs = [next(results) if out is _PLACE else out for out in outputs["outs"]]
  return jax.tree.unflatten(outputs["tree"], outs)


class Rewriting:
  """Evaluates jaxprs with some equations replaced; rewrites shared jaxprs once.

  A subclass chooses these equations (`meets`), and what is computed for them (`rewrite`).
  """

  def __init__(self) -> None:
    # Each result is stored with its jaxpr. While this jaxpr lives, no other object has its id.
    self._due: dict[int, tuple[Any, bool]] = {}
    self._called: dict[int, tuple[Any, Callable[..., list[Any]]]] = {}

  def meets(self, eqn: Eqn) -> bool:
    """Returns whether an equation is rewritten itself."""
    raise NotImplementedError

  def rewrite(self, eqn: Eqn, values: list[Any]) -> Sequence[Any]:
    """Returns the results of an equation that is rewritten."""
    raise NotImplementedError

  def is_due(self, jaxpr: Any) -> bool:
    """Returns whether a jaxpr contains an equation that is rewritten, at any depth."""
    if id(jaxpr) not in self._due:
      due = any(self.meets(eqn) or self._is_due_inside(eqn) for eqn in jaxpr.eqns)
      self._due[id(jaxpr)] = jaxpr, due
    return self._due[id(jaxpr)][1]

  def _is_due_inside(self, eqn: Any) -> bool:
    return any(map(self.is_due, jaxprs_to_rewrite(eqn).values()))

  def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr with the rewriting, and returns its results."""
    return evaluate(jaxpr, consts, values, self._result)

  def _result(self, eqn: Eqn, values: list[Any]) -> Sequence[Any]:
    if self.meets(eqn):
      return self.rewrite(eqn, values)
    if not self._is_due_inside(eqn):
      return results_of(eqn, values)
    name = eqn.primitive.name
    params = eqn.params
    if name in CALLS:
      return self._call(params[CALLS[name]])(*values)
    if name in REMATS:
      return remat_again(eqn, functools.partial(self.run, params["jaxpr"], ()))(values)
    if name == "cond":
      return lax.switch(
        values[0], list(map(self.as_function, params["branches"])), *values[1:]
      )
    if name == "while":
      return self._while(params, values)
    step = self.as_function(params["jaxpr"])
    return scan_again(eqn, values, lambda operands, _: (step(*operands), None))[0]

  def as_function(self, closed: Any) -> Callable[..., list[Any]]:
    """Returns a closed jaxpr as a function that evaluates it with the rewriting."""
    return lambda *values: self.run(closed.jaxpr, closed.consts, values)

  def _call(self, closed: Any) -> Callable[..., list[Any]]:
    """Returns the jitted function of a called jaxpr. All its calls share this one program."""
    if id(closed) not in self._called:
      self._called[id(closed)] = closed, jax.jit(self.as_function(closed))
    return self._called[id(closed)][1]

  def _while(self, params: dict[str, Any], values: list[Any]) -> list[Any]:
    for_test = params["cond_nconsts"]
    for_body = params["body_nconsts"]
    tested = values[:for_test]
    known = values[for_test : for_test + for_body]
    test = self.as_function(params["cond_jaxpr"])
    step = self.as_function(params["body_jaxpr"])
    return lax.while_loop(
      lambda carry: test(*tested, *carry)[0],
      lambda carry: step(*known, *carry),
      values[for_test + for_body :],
    )

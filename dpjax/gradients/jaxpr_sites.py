"""Where a loss uses its parameters: the traced program of one example, with its sites.

Every value of the program is PARAM (a function of the parameters alone), DATA (depends on
the example) or CONST (neither, or not differentiable). A *site* is an equation in which
PARAM meets DATA. Calls that see a parameter are entered, also `scan` bodies and `remat`;
everything else is evaluated as it stands, so that custom derivatives stay intact; an
equation that cannot be entered (cond, while, custom_vjp ...) is a site as a whole. Where a
PARAM value must become DATA (the start of a scan's carry, say) an identity site lifts it.

Of JAX this relies on `jax.make_jaxpr`, `jax.extend.core` and the names and parameters of
the primitives in `_CALLS`, "scan" and those of `row_forms`; tests pin them.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from dpjax.types import ArrayTree, Params

Var = Any  # jax.extend.core.Var
Eqn = Any  # jax.extend.core.JaxprEqn

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
_REMATS = ("remat2", "checkpoint", "remat")
_RESHAPES = (
  "reshape",
  "squeeze",
  "expand_dims",
  "broadcast_in_dim",
  "rev",
  "copy",
  "slice",
)


class Kind(enum.IntEnum):
  """What a value depends on."""

  CONST = 0
  PARAM = 1
  DATA = 2


@dataclasses.dataclass(frozen=True)
class Loop:
  """One scan around a site."""

  index: int
  length: int


class Source(NamedTuple):
  """How a PARAM value comes from the parameter leaves."""

  leaves: frozenset[int]
  is_view: bool = False  # a rearrangement of parts of leaves: norms are preserved
  perm: tuple[int, ...] | None = None  # dimension j is the leaf's dimension perm[j]
  loops: tuple[Loop, ...] = ()  # scans that step through it, outermost first


class Value(NamedTuple):
  """Kind of a value, and its source where it is PARAM."""

  kind: Kind
  source: Source = Source(frozenset())


_CONST, _DATA = Value(Kind.CONST), Value(Kind.DATA)


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
  """An equation where parameters meet data; eqn None: a parameter lifted to data."""

  index: int
  eqn: Eqn  # or None
  params: tuple[Var, ...]
  data: tuple[Var, ...]
  sources: tuple[Source, ...]  # of params
  loops: tuple[Loop, ...]  # scans around it, outermost first
  outs: tuple[int, ...]  # differentiable results of the equation

  @property
  def name(self) -> str:
    """The primitive."""
    return self.eqn.primitive.name if self.eqn is not None else "parameter"

  @property
  def out_avals(self) -> tuple[Any, ...]:
    """Shapes and dtypes of the differentiable results, without loops."""
    if self.eqn is None:
      return (self.params[0].aval,)
    return tuple(self.eqn.outvars[i].aval for i in self.outs)

  @property
  def leaves(self) -> frozenset[int]:
    """Indices of the parameter leaves that reach it."""
    return frozenset().union(*(source.leaves for source in self.sources))


class Tap(NamedTuple):
  """A zero added to a value, whose gradient is the cotangent there."""

  index: int
  out: int  # the position of the value among the results (or operands) of its step
  aval: Any
  loops: tuple[Loop, ...]


class Cotangent(NamedTuple):
  """Where the cotangent of a site's result is found: at taps, joined along an axis."""

  taps: tuple[int, ...]
  axis: int = 0


class Lift(NamedTuple):
  """A PARAM value that becomes DATA at this position, by an identity site."""

  site: Site
  tap: Tap


class Action(enum.Enum):
  """How a step of the program is evaluated."""

  PLAIN = enum.auto()
  SITE = enum.auto()
  CALL = enum.auto()
  REMAT = enum.auto()
  SCAN = enum.auto()


class Step(NamedTuple):
  """One equation of the program."""

  action: Action
  eqn: Eqn
  values: tuple[Value, ...]  # of the results
  inner: Program | None = None
  site: Site | None = None
  lifts: tuple[Lift, ...] = ()  # of operands
  loop: Loop | None = None  # of a scan
  taps: tuple[Tap, ...] = ()  # of results


class Program(NamedTuple):
  """A jaxpr with a plan for each equation."""

  jaxpr: Any
  consts: tuple[Any, ...]
  steps: tuple[Step, ...]
  outs: tuple[Value, ...]
  out_lifts: tuple[Lift, ...]
  cotangents: dict[int, tuple[Cotangent, ...]]  # of the results of each site of this jaxpr

  def sites(self) -> Iterator[Site]:
    """Every site, nested ones included."""
    for step in self.steps:
      yield from (lift.site for lift in step.lifts)
      if step.site is not None:
        yield step.site
      if step.inner is not None:
        yield from step.inner.sites()
    yield from (lift.site for lift in self.out_lifts)

  def taps(self) -> Iterator[Tap]:
    """Every tap, nested ones included."""
    for step in self.steps:
      yield from (lift.tap for lift in step.lifts)
      yield from step.taps
      if step.inner is not None:
        yield from step.inner.taps()
    yield from (lift.tap for lift in self.out_lifts)

  def all_cotangents(self) -> dict[int, tuple[Cotangent, ...]]:
    """Site -> where the cotangents of its results are found, nested sites included."""
    found = dict(self.cotangents)
    lifts = list(self.out_lifts)
    for step in self.steps:
      lifts += step.lifts
      found.update(step.inner.all_cotangents() if step.inner is not None else {})
    return found | {site.index: (Cotangent((tap.index,)),) for site, tap in lifts}


def is_literal(atom: Any) -> bool:
  """Whether an operand is written into the equation."""
  return isinstance(atom, jex.Literal)


def is_float(aval: Any) -> bool:
  """Whether gradients flow through values of this type."""
  return jnp.issubdtype(aval.dtype, jnp.inexact)


def is_complex(site: Site) -> bool:
  """Whether a site takes or gives complex numbers, also from real parameters."""
  avals = [*(var.aval for var in (*site.params, *site.data)), *site.out_avals]
  return any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals)


def operands(eqn: Eqn) -> tuple[Var, ...]:
  """The distinct variables that an equation reads."""
  return tuple(dict.fromkeys(atom for atom in eqn.invars if not is_literal(atom)))


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


class _Builder:
  """Numbers sites, taps and loops in the order of the program."""

  def __init__(self):
    self._sites, self._taps, self._loops = (itertools.count() for _ in range(3))

  def site(self, eqn, params, data, sources, loops, outs) -> Site:
    return Site(next(self._sites), eqn, params, data, sources, loops, outs)

  def tap(self, out: int, aval, loops) -> Tap:
    return Tap(next(self._taps), out, aval, loops)

  def lift(self, position: int, var, value: Value, loops) -> Lift:
    site = self.site(None, (var,), (), (value.source,), loops, (0,))
    return Lift(site, self.tap(position, var.aval, loops))

  def loop(self, length: int) -> Loop:
    return Loop(next(self._loops), length)


def trace(loss_fn: Callable, params: Params, example: ArrayTree) -> Program:
  """The program of `loss_fn(params, ONE example)`; arguments may be ShapeDtypeStructs.

  Its inputs are the leaves of params, then those of the example; its one output is DATA.
  """
  # A fresh function: JAX hashes what it traces, and must not find an old trace of a loss
  # whose closure has changed.
  closed = jax.make_jaxpr(lambda p, e: loss_fn(p, e))(params, example)
  leaves, rest = len(jax.tree.leaves(params)), len(jax.tree.leaves(example))
  avals = closed.jaxpr.invars[:leaves]
  values = [_leaf_value(i, var.aval) for i, var in enumerate(avals)] + [_DATA] * rest
  return _analyse(closed.jaxpr, closed.consts, values, (), _Builder(), lift_outs=True)


def _leaf_value(index: int, aval: Any) -> Value:
  if not is_float(aval) or not aval.size:
    return _CONST
  return Value(Kind.PARAM, Source(frozenset([index]), True, tuple(range(len(aval.shape)))))


def _analyse(jaxpr, consts, values, loops, builder, *, lift_outs) -> Program:
  env = dict(zip(jaxpr.constvars, [_CONST] * len(jaxpr.constvars)))
  env.update(zip(jaxpr.invars, values))
  steps = []
  for eqn in jaxpr.eqns:
    step = _plan(eqn, [_read(env, atom) for atom in eqn.invars], loops, builder)
    env.update(zip(eqn.outvars, step.values))
    steps.append(step)
  outs = tuple(_read(env, atom) for atom in jaxpr.outvars)
  lifts = tuple(
    builder.lift(i, atom, value, loops)
    for i, (atom, value) in enumerate(zip(jaxpr.outvars, outs))
    if lift_outs and value.kind is Kind.PARAM
  )
  steps, found = _place_taps(jaxpr, _without_dead_sites(jaxpr, steps), loops, builder)
  return Program(jaxpr, tuple(consts), steps, outs, lifts, found)


def _without_dead_sites(jaxpr, steps) -> list[Step]:
  """Sites whose results no gradient reaches are plain equations.

  Some (a while loop behind a stop_gradient) could not even be differentiated.
  """
  live = {v for v in jaxpr.outvars if not is_literal(v)}
  kept = []
  for step in reversed(steps):
    reached = live.intersection(step.eqn.outvars)
    if reached and step.eqn.primitive.name != "stop_gradient":
      live.update(v for v in operands(step.eqn) if is_float(v.aval))
    alive = step.site is None or reached
    kept.append(step if alive else step._replace(action=Action.PLAIN, site=None))
  return kept[::-1]


def _place_taps(jaxpr, steps, loops, builder):
  """Taps of every site's results; results that only end in one sum share its tap."""
  graph = _Graph.of(jaxpr, steps)
  results = [
    (step.site.index, [step.eqn.outvars[i] for i in step.site.outs])
    for step in steps
    if step.site is not None
  ]
  ends = graph.ends([var for _, results in results for var in results])
  taps: dict[Var, Tap] = {}

  def tap_at(end) -> int:
    if end not in taps:
      taps[end] = builder.tap(graph.position[end], end.aval, loops)
    return taps[end].index

  def cotangent(var) -> Cotangent:
    parts, axis = ends[var]
    return Cotangent(tuple(map(tap_at, parts)), axis)

  found = {index: tuple(map(cotangent, outvars)) for index, outvars in results}
  placed = (
    step._replace(taps=tuple(taps[v] for v in step.eqn.outvars if v in taps))
    for step in steps
  )
  return tuple(placed), found


class _Ends(NamedTuple):
  """Values whose cotangents, joined along an axis, are that of another value."""

  parts: tuple[Var, ...]
  axis: int = 0


class _Graph(NamedTuple):
  """Who uses a value, and where it is among the results of its equation."""

  uses: collections.Counter
  users: dict[Var, Eqn]  # the last of them
  position: dict[Var, int]

  @classmethod
  def of(cls, jaxpr, steps) -> _Graph:
    uses = collections.Counter(v for v in jaxpr.outvars if not is_literal(v))
    users, position = {}, {}
    for step in steps:
      inputs = [v for v in step.eqn.invars if not is_literal(v)]
      uses.update(inputs)
      users.update({v: step.eqn for v in inputs})
      position.update({v: i for i, v in enumerate(step.eqn.outvars)})
    return cls(uses, users, position)

  def ends(self, results: Sequence[Var]) -> dict[Var, _Ends]:
    """Each result's ends; the parts it is split into only where others end there too, as
    the two products of a recurrent cell do whose gates are summed one by one."""
    whole = {var: self.same_cotangent(var) for var in results}
    split = {end: self._split(end) for end in whole.values()}
    shared = collections.Counter(split.values())
    best = {e: s if s and shared[s] > 1 else _Ends((e,)) for e, s in split.items()}
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

  def _split(self, var: Var) -> _Ends | None:
    """The sums in which the parts of a value end, where it is only split."""
    if self._only_user(var) != "split":
      return None
    eqn = self.users[var]
    parts = tuple(map(self.same_cotangent, eqn.outvars))
    moved = all(part is not out for part, out in zip(parts, eqn.outvars))
    return _Ends(parts, eqn.params["axis"]) if moved else None


def _read(env, atom) -> Value:
  return _CONST if is_literal(atom) else env[atom]


def _plan(eqn, values, loops, builder) -> Step:
  kinds = {value.kind for value in values}
  if Kind.PARAM not in kinds or not any(is_float(var.aval) for var in eqn.outvars):
    kind = Kind.DATA if Kind.DATA in kinds else Kind.CONST
    return Step(Action.PLAIN, eqn, (Value(kind),) * len(eqn.outvars))
  name = eqn.primitive.name
  if name in _CALLS:
    return _enter(Action.CALL, eqn, eqn.params[_CALLS[name]], values, loops, builder)
  if Kind.DATA not in kinds:
    return Step(Action.PLAIN, eqn, _transformed(eqn, values))
  if name in _REMATS:
    return _enter(Action.REMAT, eqn, eqn.params["jaxpr"], values, loops, builder)
  if name == "scan":
    return _enter_scan(eqn, values, loops, builder)
  return _meet(eqn, values, loops, builder)


def _transformed(eqn, values) -> tuple[Value, ...]:
  """Results of an equation on parameters alone."""
  if eqn.primitive.name == "stop_gradient":
    return (_CONST,) * len(eqn.outvars)
  source = _view(eqn, values)
  return tuple(
    Value(Kind.PARAM, source) if is_float(v.aval) else _CONST for v in eqn.outvars
  )


def _view(eqn, values) -> Source:
  sources = [value.source for value in values if value.kind is Kind.PARAM]
  loops = tuple(sorted({loop for s in sources for loop in s.loops}, key=lambda x: x.index))
  plain = Source(frozenset().union(*(s.leaves for s in sources)), loops=loops)
  if len(sources) != len(values) or not all(source.is_view for source in sources):
    return plain
  if eqn.primitive.name == "concatenate":
    disjoint = len(plain.leaves) == sum(len(source.leaves) for source in sources)
    return plain._replace(is_view=disjoint and len({s.loops for s in sources}) == 1)
  return _view_of_one(eqn, sources[0], plain) if len(values) == 1 else plain


def _view_of_one(eqn, source, plain) -> Source:
  name, before, after = eqn.primitive.name, eqn.invars[0].aval, eqn.outvars[0].aval
  if name == "transpose":
    perm = source.perm and tuple(source.perm[d] for d in eqn.params["permutation"])
    return source._replace(perm=perm)
  if name == "convert_element_type" and is_float(after):
    return source
  if name in _RESHAPES and after.size <= before.size:  # no broadcasting
    return source._replace(perm=None)
  return plain


def _inner_jaxpr(jaxpr) -> tuple[Any, Sequence[Any]]:
  return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def _enter(action, eqn, jaxpr, values, loops, builder) -> Step:
  inner = _analyse(*_inner_jaxpr(jaxpr), values, loops, builder, lift_outs=False)
  return Step(action, eqn, inner.outs, inner=inner)


def _enter_scan(eqn, values, loops, builder) -> Step:
  consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
  first_xs = consts + carries
  lifts = tuple(
    builder.lift(i, eqn.invars[i], values[i], loops)
    for i in range(consts, first_xs)
    if values[i].kind is Kind.PARAM
  )
  loop = builder.loop(eqn.params["length"])
  inside = [
    *values[:consts],
    *[_DATA] * carries,
    *(_sliced(value, loop) for value in values[first_xs:]),
  ]
  jaxpr, inner_consts = _inner_jaxpr(eqn.params["jaxpr"])
  inner = _analyse(jaxpr, inner_consts, inside, (*loops, loop), builder, lift_outs=True)
  return Step(
    Action.SCAN, eqn, (_DATA,) * len(eqn.outvars), inner=inner, lifts=lifts, loop=loop
  )


def _sliced(value: Value, loop: Loop) -> Value:
  if value.kind is not Kind.PARAM:
    return value
  source = value.source
  return value._replace(source=source._replace(perm=None, loops=(*source.loops, loop)))


def _meet(eqn, values, loops, builder) -> Step:
  kind_of = {v: value for v, value in zip(eqn.invars, values) if not is_literal(v)}
  params = tuple(v for v in operands(eqn) if kind_of[v].kind is Kind.PARAM)
  data = tuple(v for v in operands(eqn) if kind_of[v].kind is not Kind.PARAM)
  outs = tuple(
    i
    for i, var in enumerate(eqn.outvars)
    if is_float(var.aval) and not isinstance(var, jex.DropVar)
  )
  sources = tuple(kind_of[v].source for v in params)
  site = builder.site(eqn, params, data, sources, loops, outs)
  return Step(Action.SITE, eqn, (_DATA,) * len(eqn.outvars), site=site)

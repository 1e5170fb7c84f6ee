"""Uses of parameters in a loss: the traced program of one example, with its sites.

Every value of the program is PARAM (a function of the parameters alone), DATA (depends on
the example) or CONST (neither, or not differentiable). A *site* is an equation in which
PARAM meets DATA. Calls that see a parameter are entered, also `scan` bodies and `remat`.
Everything else is evaluated as it is, so that custom derivatives stay intact. An
equation that cannot be entered (cond, while, custom_vjp ...) is a site as a whole. If a
PARAM value must become DATA (such as the start of a scan's carry), an identity site lifts it.

This module relies on parts of JAX that may change: `jax.make_jaxpr`, `jax.extend.core`, and names
and parameters of primitives (of `jaxprs.CALLS`, `scan` and `row_forms`). Tests pin them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jex

from dpjax import standard_kernels
from dpjax.gradients.ghost import chosen_products, row_forms
from dpjax.jaxprs import (
  CALLS,
  REARRANGED,
  REMATS,
  Eqn,
  Graph,
  ScanParts,
  Var,
  evaluate,
  is_float,
  is_literal,
  operands,
)


class Kind(enum.IntEnum):
  """Dependence of a value: on the example (DATA), on parameters alone (PARAM), or none (CONST)."""

  CONST = 0
  PARAM = 1
  DATA = 2


@dataclasses.dataclass(frozen=True)
class Loop:
  """A scan around a site: its number in the program, and the number of its steps."""

  index: int
  length: int


class Source(NamedTuple):
  """Computation of a PARAM value from the parameter leaves."""

  leaves: frozenset[int]
  is_view: bool = False  # a rearrangement of parts of leaves: norms are preserved
  perm: tuple[int, ...] | None = None  # dimension j is the leaf's dimension perm[j]
  is_cast: bool = False  # a view whose dtype was changed on the way, if only for a while
  loops: tuple[Loop, ...] = ()  # scans that step through it, outermost first
  layer: Any = None  # the value is that of a layer with a rule of its own (`standardized`)


class Value(NamedTuple):
  """Kind of a value, and its source if the kind is PARAM."""

  kind: Kind
  source: Source = Source(frozenset())


_CONST = Value(Kind.CONST)
_DATA = Value(Kind.DATA)


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
  """An equation in which parameters meet data. One without `eqn` lifts a parameter to data."""

  index: int
  eqn: Eqn  # or None
  params: tuple[Var, ...]
  data: tuple[Var, ...]
  sources: tuple[Source, ...]  # of params
  loops: tuple[Loop, ...]  # scans around it, outermost first
  outs: tuple[int, ...]  # differentiable results of the equation
  kept: tuple[Var, ...] = ()  # results that are recorded like data

  @property
  def name(self) -> str:
    """Name of the primitive, or "parameter" if a parameter is lifted."""
    return self.eqn.primitive.name if self.eqn is not None else "parameter"

  @property
  def steps(self) -> int:
    """Number of evaluations for one example."""
    return math.prod([loop.length for loop in self.loops])

  @functools.cached_property
  def out_avals(self) -> tuple[Any, ...]:
    """Shapes and dtypes of the differentiable results, without loops."""
    if self.eqn is None:
      return (self.params[0].aval,)
    return tuple([self.eqn.outvars[i].aval for i in self.outs])

  @functools.cached_property
  def leaves(self) -> frozenset[int]:
    """Indices of the parameter leaves that reach the site."""
    return frozenset().union(*[source.leaves for source in self.sources])

  @functools.cached_property
  def avals(self) -> tuple[Any, ...]:
    """Shapes and dtypes of parameters, data operands and differentiable results."""
    return (*[var.aval for var in (*self.params, *self.data)], *self.out_avals)

  @functools.cached_property
  def is_complex(self) -> bool:
    """Whether a site has complex inputs or results, even from real parameters."""
    return any([jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in self.avals])

  @functools.cached_property
  def form(self) -> row_forms.RowForm | None:
    """The row form of the site; None if its gradient is no sum of outer products."""
    return row_forms.find(self)


class Tap(NamedTuple):
  """A zero added to a value, so that its gradient is the cotangent of that value."""

  index: int
  out: int  # the position of the value among the results (or operands) of its step
  aval: Any
  loops: tuple[Loop, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape [*loops, ...], with a zero for each turn of the loops."""
    return (*[loop.length for loop in self.loops], *self.aval.shape)


class Cotangent(NamedTuple):
  """Location of the cotangent of a site's result: at taps, concatenated along an axis."""

  taps: tuple[int, ...]
  axis: int = 0


class Lift(NamedTuple):
  """A PARAM value that an identity site turns into DATA, with the tap that is added there."""

  site: Site
  tap: Tap


class Step(NamedTuple):
  """An equation of the program, with its taps and the plan to evaluate it."""

  eqn: Eqn
  values: tuple[Value, ...]  # of the results
  inner: Any = None  # Program, where the equation is entered: a call, a remat or a scan
  site: Site | None = None
  lifts: tuple[Lift, ...] = ()  # of operands
  loop: Any = None  # Loop, of a scan
  taps: tuple[Tap, ...] = ()  # of results


class Program(NamedTuple):
  """A jaxpr with a plan for each equation.

  Sites, taps and cotangents are those of nested programs, too, in program order.
  """

  jaxpr: Any
  consts: tuple[Any, ...]
  steps: tuple[Step, ...]
  outs: tuple[Value, ...]
  in_lifts: tuple[Lift, ...]  # of inputs: parameters that are data throughout
  out_lifts: tuple[Lift, ...]
  sites: tuple[Site, ...]
  taps: tuple[Tap, ...]
  cotangents: dict[int, tuple[Cotangent, ...]]  # of the results of each site, by its index


def program_of(
  loss: jex.ClosedJaxpr, num_params: int, lifted: Collection[int] = ()
) -> Program:
  """Returns the program of a loss of ONE example, whose first `num_params` inputs are parameters.

  Its one output is DATA. Leaves whose index is in `lifted` are DATA throughout: the backward pass
  itself gives their gradient per example, at one identity site each.
  """
  closed = chosen_products.with_choices_inline(loss)
  values = [_DATA] * len(closed.jaxpr.invars)
  for i, leaf in enumerate(closed.jaxpr.invars[:num_params]):
    source = Source(frozenset([i]), True, tuple(range(len(leaf.aval.shape))))
    # An empty leaf, or a leaf of integers, has no gradient to clip.
    has_gradient = is_float(leaf.aval) and leaf.aval.size
    values[i] = Value(Kind.PARAM, source) if has_gradient else _CONST
  return _analyse(closed, values, (), itertools.count(), lifted=lifted)


def _analyse(closed, values, loops, ids, *, lifted=(), lift_outs=True) -> Program:
  """Returns the program of a jaxpr, with a plan for each equation.

  `ids` numbers sites, taps and loops in program order. Inputs whose place is in `lifted` become
  DATA; with `lift_outs`, PARAM results do.
  """
  jaxpr = closed.jaxpr
  in_lifts = _lifts([(i, jaxpr.invars[i], values[i]) for i in sorted(lifted)], loops, ids)
  for _, tap in in_lifts:
    values[tap.out] = _DATA
  steps: list[Step] = []

  def step(eqn, values):
    steps.append(_plan(eqn, values, loops, ids))
    return steps[-1].values

  constants = [_CONST] * len(jaxpr.constvars)
  outs = tuple(evaluate(jaxpr, constants, values, step, literal=lambda _: _CONST))
  lifted_outs = zip(itertools.count(), jaxpr.outvars, outs) if lift_outs else ()
  out_lifts = _lifts(lifted_outs, loops, ids)
  graph = Graph.of(jaxpr)
  _move_to_chosen_products(graph, steps)
  # Dead sites are removed first, since their taps would have no cotangent to record.
  _remove_dead_sites(jaxpr, steps)
  cotangents = _place_taps(graph, steps, loops, ids)
  sites: list[Site] = []
  taps: list[Tap] = []

  def add(lifts):
    for site, tap in lifts:
      sites.append(site)
      taps.append(tap)
      cotangents[site.index] = (Cotangent((tap.index,)),)

  add(in_lifts)
  for each in steps:
    add(each.lifts)
    if each.site is not None:
      sites.append(each.site)
    taps += each.taps
    if each.inner is not None:
      sites += each.inner.sites
      taps += each.inner.taps
      cotangents |= each.inner.cotangents
  add(out_lifts)
  return Program(
    jaxpr,
    tuple(closed.consts),
    tuple(steps),
    outs,
    in_lifts,
    out_lifts,
    tuple(sites),
    tuple(taps),
    cotangents,
  )


def _move_to_chosen_products(graph: Graph, steps: list[Step]) -> None:
  """Moves sites from the choice of a matrix by an index to the product that uses the matrix.

  At the product the cotangent is a vector. At the choice it would be a matrix for each example.
  """
  for i, step in enumerate(steps):
    if step.site is None or step.site.name not in chosen_products.CHOICES:
      continue
    chain = chosen_products.find(graph, step.site)
    if chain is None:
      continue
    last = next(j for j, each in enumerate(steps) if each.eqn is chain.eqns[-1])
    if steps[last].site is not None or steps[last].inner is not None:
      continue
    data = tuple([v for v in operands(chain) if v not in step.site.params])
    site = dataclasses.replace(step.site, eqn=chain, data=data, outs=(0,))
    steps[i] = step._replace(site=None)
    steps[last] = steps[last]._replace(site=site)


def _lifts(places: Iterable[tuple[int, Var, Value]], loops, ids) -> tuple[Lift, ...]:
  """Returns the lifts of those (position, variable, value) whose value is PARAM."""
  lifts = []
  for position, var, (kind, source) in places:
    if kind is Kind.PARAM:
      site = Site(next(ids), None, (var,), (), (source,), loops, (0,))
      lifts.append(Lift(site, Tap(next(ids), position, var.aval, loops)))
  return tuple(lifts)


def _remove_dead_sites(jaxpr, steps: list[Step]) -> None:
  """Turns a site into a plain equation if no gradient reaches its results.

  Such a site, for example a while loop behind a stop_gradient, may have no derivative at all.
  """
  live = {v for v in jaxpr.outvars if not is_literal(v)}
  for i, step in reversed(list(enumerate(steps))):
    if live.isdisjoint(step.eqn.outvars):
      steps[i] = step._replace(site=None)
    elif step.eqn.primitive.name != "stop_gradient":
      live.update([v for v in operands(step.eqn) if is_float(v.aval)])


def _place_taps(graph: Graph, steps: list[Step], loops, ids) -> dict:
  """Places taps on every site's results, and returns the cotangents of each site.

  Results that only one sum reads share the sum's tap.
  """
  results = {}
  for step in steps:
    if step.site is not None:
      results[step.site.index] = [step.eqn.outvars[i] for i in step.site.outs]
  ends = graph.ends([var for each in results.values() for var in each])
  taps: dict[Var, Tap] = {}
  cotangents = {}
  for index, outvars in results.items():
    found = []
    for parts, axis in [ends[var] for var in outvars]:
      for end in parts:
        if end not in taps:
          taps[end] = Tap(next(ids), graph.position[end], end.aval, loops)
      found.append(Cotangent(tuple([taps[end].index for end in parts]), axis))
    cotangents[index] = tuple(found)
  for i, step in enumerate(steps):
    placed = tuple([taps[var] for var in step.eqn.outvars if var in taps])
    steps[i] = step._replace(taps=placed)
  return cotangents


def _plan(eqn, values, loops, ids) -> Step:
  kinds = {value.kind for value in values}
  if Kind.PARAM not in kinds or not any([is_float(var.aval) for var in eqn.outvars]):
    kind = Kind.DATA if Kind.DATA in kinds else Kind.CONST
    return Step(eqn, (Value(kind),) * len(eqn.outvars))
  name = eqn.primitive.name
  # A call is entered also without data: a transposed parameter inside stays a view of its leaf,
  # and keeps its norm.
  if name in CALLS:
    step = _enter(eqn, eqn.params[CALLS[name]], values, loops, ids)
    if eqn.params.get("name") != standard_kernels.NAME:
      return step
    # This module reads sites, and few losses need it.
    from dpjax.gradients.ghost import standardized

    layer = standardized.find(eqn, values)
    if layer is None:
      return step
    (result,) = step.values
    known = result.source._replace(layer=layer)
    return step._replace(values=(result._replace(source=known),))
  if Kind.DATA not in kinds:
    return Step(eqn, _transform(eqn, values))
  if name in REMATS:
    return _enter(eqn, eqn.params["jaxpr"], values, loops, ids)
  if name == "scan":
    return _enter_scan(eqn, values, loops, ids)
  return _meet(eqn, values, loops, ids)


def _transform(eqn, values) -> tuple[Value, ...]:
  """Returns kinds and sources of the results of an equation on parameters alone."""
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
    # A leaf joined with itself gets the sum of two gradients, which has another norm.
    disjoint = len(plain.leaves) == sum(len(source.leaves) for source in sources)
    is_view = disjoint and len({s.loops for s in sources}) == 1
    return plain._replace(is_view=is_view, is_cast=any(s.is_cast for s in sources))
  return _view_of_one(eqn, sources[0], plain) if len(values) == 1 else plain


def _view_of_one(eqn, source, plain) -> Source:
  name = eqn.primitive.name
  before = eqn.invars[0].aval
  after = eqn.outvars[0].aval
  if name == "transpose":
    perm = source.perm and tuple(source.perm[d] for d in eqn.params["permutation"])
    return source._replace(perm=perm)
  if name == "convert_element_type" and is_float(after):
    return source._replace(is_cast=source.is_cast or before.dtype != after.dtype)
  # A broadcast that repeats entries adds up their gradients, so it is no view.
  if name in (*REARRANGED, "broadcast_in_dim") and after.size <= before.size:
    return source._replace(perm=None)
  return plain


def _enter(eqn, jaxpr, values, loops, ids) -> Step:
  closed = jaxpr if hasattr(jaxpr, "consts") else jex.ClosedJaxpr(jaxpr, ())
  inner = _analyse(closed, values, loops, ids, lift_outs=False)
  return Step(eqn, inner.outs, inner=inner)


def _enter_scan(eqn, values, loops, ids) -> Step:
  closed = eqn.params["jaxpr"]
  carries = slice(*ScanParts.of(eqn))
  # A carry changes with every step, so it is data; a parameter that starts it is lifted.
  places = list(zip(itertools.count(), eqn.invars, values))[carries]
  lifts = _lifts(places, loops, ids)
  loop = Loop(next(ids), eqn.params["length"])
  values[carries] = [_DATA] * len(places)
  for i, (kind, source) in enumerate(values[carries.stop :], carries.stop):
    # The loop steps through a parameter: each turn sees a slice with one dimension less.
    if kind is Kind.PARAM:
      sliced = source._replace(perm=None, loops=(*source.loops, loop))
      values[i] = Value(kind, sliced)
  inner = _analyse(closed, values, (*loops, loop), ids)
  outs = (_DATA,) * len(eqn.outvars)
  return Step(eqn, outs, inner=inner, lifts=lifts, loop=loop)


def _meet(eqn, values, loops, ids) -> Step:
  sources: dict[Var, Source] = {}
  data: dict[Var, Value] = {}
  for atom, value in zip(eqn.invars, values):
    if value.kind is Kind.PARAM:
      sources[atom] = value.source
    elif not is_literal(atom):
      data[atom] = value
  outs = []
  for i, var in enumerate(eqn.outvars):
    if is_float(var.aval) and not isinstance(var, jex.DropVar):
      outs.append(i)
  kept: tuple[Var, ...] = ()
  for source in sources.values():
    if source.layer and not loops and source.layer.keeps(eqn):
      kept = tuple([eqn.outvars[i] for i in outs])
  site = Site(
    next(ids),
    eqn,
    tuple(sources),
    tuple(data),
    tuple(sources.values()),
    loops,
    tuple(outs),
    kept,
  )
  return Step(eqn, (_DATA,) * len(eqn.outvars), site=site)

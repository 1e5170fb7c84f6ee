"""Runs a program with taps: one forward and one backward pass record operands and cotangents.

A tap is a zero that is added to a site's result; its gradient is the cotangent there. The
parameters are neither batched nor differentiated. So under vmap the matrix products and
convolutions are the ordinary ones of the whole batch. `ParamFlow` takes the parameters from their
leaves to the sites, and gradients back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpjax import jaxprs, trees
from dpjax.gradients.ghost.jaxpr_sites import (
  Cotangent,
  Kind,
  Lift,
  Loop,
  Program,
  Site,
  Step,
)
from dpjax.gradients.traced_values import as_varying_as
from dpjax.types import Array, DType

Taps = dict[int, Any]  # tap index -> array [*loops, ...]
Operands = dict[int, tuple[Any, ...]]  # site index -> its data operands
Cotangents = dict[int, tuple[Any, ...]]  # site index -> one array per result


class Recorded(NamedTuple):
  """Values recorded by one forward and backward pass over the batch."""

  losses: jax.Array  # [B]
  operands: Operands  # arrays [*loops, B, ...]
  cotangents: Cotangents  # arrays [*loops, B, ...]

  def at(self, sites: Sequence[Site]) -> Recorded:
    """Returns the losses, and what was recorded at these sites."""
    part = Recorded(self.losses, {}, {})
    for site in sites:
      part.operands[site.index] = self.operands[site.index]
      part.cotangents[site.index] = self.cotangents[site.index]
    return part

  def in_front(self, sites: Sequence[Site]) -> Recorded:
    """Returns the same part with the axis of examples first: [B, *loops, ...]."""
    part = self.at(sites)
    for site in sites:
      for arrays in part[1:]:
        front = [jnp.moveaxis(x, len(site.loops), 0) for x in arrays[site.index]]
        arrays[site.index] = tuple(front)
    return part


def record(
  program: Program,
  leaves: Sequence[Any],
  examples: Sequence[Any],
  keeping: Collection[int] = (),
) -> Recorded:
  """Records losses, data operands and cotangents of every site, for each example.

  Args:
    program: program of one example.
    leaves: leaves of the parameters, [*param].
    examples: leaves of the batch, [B, ...].
    keeping: indices of sites for which the results in `Site.kept` follow the operands.
  """

  def loss(taps, example):
    outs, seen = run(program, [*leaves, *example], taps, keeping)
    return outs[0], seen

  zeros, tap_axes = {}, {}
  for tap in program.taps:
    zeros[tap.index] = jnp.zeros(tap.shape, tap.aval.dtype)  # [*loops, *result]
    tap_axes[tap.index] = len(tap.loops)
  operand_axes = {site.index: len(site.loops) for site in program.sites}
  # The taps are not batched. Their gradients are, since the gradient of ONE loss is mapped.
  (losses, operands), at_taps = jax.vmap(
    jax.value_and_grad(loss, has_aux=True),
    in_axes=(None, 0),
    out_axes=((0, operand_axes), tap_axes),
  )(as_varying_as(examples, zeros), list(examples))
  operands, at_taps = jax.tree.map(_settle, (operands, at_taps))  # [*loops, B, ...]
  # Results with the same taps share one array, which joins the gradients of these taps.
  joined: dict[Cotangent, jax.Array] = {}
  cotangents = {}
  for index, places in program.cotangents.items():
    for place in places:
      if place not in joined:
        parts = [at_taps[tap] for tap in place.taps]  # [*loops, B, *part]
        axis = tap_axes[place.taps[0]] + 1 + place.axis
        joined[place] = jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]
    cotangents[index] = tuple([joined[place] for place in places])
  return Recorded(losses, operands, cotangents)


def _settle(x: jax.Array) -> jax.Array:
  """Rounds half precision once, for all later uses.

  XLA may keep more digits in one use of a value than in another. Then a norm and the sum that it
  bounds would belong to different gradients.
  """
  half = jaxprs.is_float(x) and jnp.finfo(x.dtype).bits < 32
  return lax.optimization_barrier(x) if half else x


def run(
  program: Program, args: Sequence[Any], taps: Taps, keeping: Collection[int] = ()
) -> tuple[list[Any], Operands]:
  """Evaluates a program with its taps. Returns (results, site index -> data operands of the site,
  followed by the results in `Site.kept` if the index is in `keeping`)."""
  env = dict(zip(program.jaxpr.constvars, program.consts))
  args = list(args)
  read = lambda atom: atom.val if jaxprs.is_literal(atom) else env[atom]
  seen: Operands = {}
  _lift(program.in_lifts, args, taps, seen)
  env.update(zip(program.jaxpr.invars, args))
  for step in program.steps:
    values = list(map(read, step.eqn.invars))
    _lift(step.lifts, values, taps, seen)
    if step.inner is None:
      results = jaxprs.results_of(step.eqn, values)
    else:
      results, more = _enter(step, values, taps, keeping)
      seen.update(more)
    # A tap is zero, and its gradient is the cotangent of the value that it is added to.
    for tap in step.taps:
      results[tap.out] = results[tap.out] + taps[tap.index]
    env.update(zip(step.eqn.outvars, results))
    if step.site is not None:
      site = step.site
      kept = site.kept if site.index in keeping else ()
      seen[site.index] = tuple([env[v] for v in (*site.data, *kept)])
  outs = list(map(read, program.jaxpr.outvars))
  _lift(program.out_lifts, outs, taps, seen)
  return outs, seen


def _lift(lifts: Sequence[Lift], values: list[Any], taps: Taps, seen: Operands) -> None:
  """Adds the taps of identity sites to `values`; their data operands, none, go to `seen`."""
  for site, tap in lifts:
    values[tap.out] = values[tap.out] + taps[tap.index]
    seen[site.index] = ()


def _enter(
  step: Step, values: list[Any], taps: Taps, keeping: Collection[int]
) -> tuple[list[Any], Operands]:
  """Evaluates an equation whose inner program is entered, as `run` does."""
  inner_taps = {tap.index: taps[tap.index] for tap in step.inner.taps}
  again = functools.partial(run, step.inner, keeping=keeping)
  if step.loop is not None:
    # Taps are sliced as the inputs are, since every turn has its own cotangents.
    return jaxprs.scan_again(step.eqn, values, again, inner_taps)
  if step.eqn.primitive.name in jaxprs.REMATS:
    again = jaxprs.remat_again(step.eqn, again)
  return again(values, inner_taps)


class ParamFlow(NamedTuple):
  """The part of a program that depends on the parameters alone, as one flat jaxpr."""

  jaxpr: Any
  consts: Sequence[Any]
  leaves: Sequence[jax.Array]  # at least float32
  positions: dict[int, tuple[int, ...]]  # site index -> positions among the results

  @classmethod
  def of(cls, program: Program, leaves: Sequence[Any]) -> ParamFlow:
    """Returns the flow of a program's parameters, traced once by `site_params`."""
    wide = [trees.at_least_float32(x) if jaxprs.is_float(x) else x for x in leaves]
    trace = jax.make_jaxpr(functools.partial(site_params, program), return_shape=True)
    closed, shapes = trace(wide)
    count = len(jax.tree.leaves(shapes))
    positions = jax.tree.unflatten(jax.tree.structure(shapes), range(count))
    return cls(closed.jaxpr, closed.consts, wide, positions)

  def pull(
    self, leaves: Sequence[int], sites: Sequence[Site]
  ) -> tuple[dict[int, tuple[Any, ...]], Callable[..., tuple[jax.Array, ...]]]:
    """Returns (values that the sites see, transpose from their cotangents to gradients of
    the leaves).

    The transpose takes {site index: one array per parameter of the site}.
    """

    places, treedef = jax.tree.flatten({s.index: self.positions[s.index] for s in sites})
    wanted = [self.jaxpr.outvars[place] for place in places]

    def forward(chosen):
      inputs = list(self.leaves)
      for i, leaf in zip(leaves, chosen):
        inputs[i] = leaf
      return treedef.unflatten(
        jaxprs.evaluate(self.jaxpr, self.consts, inputs, wanted=wanted)
      )

    chosen = tuple([self.leaves[i] for i in leaves])  # [*leaf]
    seen, transpose = jax.vjp(forward, chosen)  # of each site: [*source.loops, *param]

    def back(cotangents):
      # The transpose takes cotangents of exactly the types that the sites saw.
      return transpose(jax.tree.map(cast_as, cotangents, seen))[0]  # [*leaf]

    return seen, back


class _Stacked(NamedTuple):
  """A value stacked along the scans that step through it, outermost first."""

  value: Any
  loops: tuple[Loop, ...] = ()


def site_params(program: Program, leaves: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
  """Returns site index -> the parameters as the site sees them, arrays [*source.loops, ...].

  This is a differentiable function of the leaves alone. Its transpose takes gradients of
  the sites' parameters back to the leaves. Values in half precision are widened.
  """
  params_at: dict[int, tuple[Any, ...]] = {}
  padding = len(program.jaxpr.invars) - len(leaves)
  inputs = [*map(_Stacked, leaves), *[None] * padding]
  _collect(program, inputs, params_at)
  return params_at


def _collect(program: Program, inputs: Sequence[_Stacked | None], params_at: dict) -> list:
  env: dict[Any, Any] = dict(zip(program.jaxpr.constvars, map(_Stacked, program.consts)))
  env.update(zip(program.jaxpr.invars, inputs))

  def read(atom):
    # A literal may be a scalar of a JAX type, which has a dtype but cannot be cast.
    literal = jaxprs.is_literal(atom)
    return _Stacked(jnp.asarray(atom.val, atom.aval.dtype)) if literal else env[atom]

  lifts = [*program.in_lifts, *program.out_lifts]
  sites = []
  for step in program.steps:
    lifts += step.lifts
    if step.site is not None:
      sites.append(step.site)
    results = _collect_step(step, list(map(read, step.eqn.invars)), params_at)
    env.update(zip(step.eqn.outvars, results))
  for site in (*sites, *[site for site, _ in lifts]):
    params_at[site.index] = tuple([env[v].value for v in site.params])
  return list(map(read, program.jaxpr.outvars))


def _collect_step(step: Step, values: Sequence[_Stacked | None], params_at: dict) -> list:
  if step.inner is not None:
    entering = list(values)
    if step.loop is not None:
      # A carry changes between turns; arrays that the scan steps through get one more loop.
      first_carry, first_xs = jaxprs.ScanParts.of(step.eqn)
      unknown = [None] * (first_xs - first_carry)
      sliced = [v and _Stacked(v.value, (*v.loops, step.loop)) for v in values[first_xs:]]
      entering = [*values[:first_carry], *unknown, *sliced]
    return _collect(step.inner, entering, params_at)
  if not step.values or any([value.kind is Kind.DATA for value in step.values]):
    # The step depends on data, or has no result, such as a print.
    return [None] * len(step.values)
  return _vectorise(step.eqn, [value for value in values if value is not None])


def _vectorise(eqn: Any, values: Sequence[_Stacked]) -> list[_Stacked]:
  """Evaluates an equation on stacked values, vmapped over all scans that stack one of them."""
  stacked = jaxprs.bind(eqn, values).values()
  loops = sorted({loop for s in stacked for loop in s.loops}, key=lambda loop: loop.index)
  fn = _widening_fn(eqn)
  for loop in reversed(loops):
    fn = jax.vmap(fn, in_axes=tuple(0 if loop in s.loops else None for s in stacked))
  return [_Stacked(out, tuple(loops)) for out in fn(*(s.value for s in stacked))]


def _widening_fn(eqn: Any) -> Callable[..., list[Any]]:
  """Returns a function that evaluates an equation on wide values.

  Its transpose may get a sum of clipped gradients on the way from a site to the leaves. So the
  transpose rounds nothing below float32, unless `jaxprs.wide_fn` has no form of the equation.
  """
  evaluate = jaxprs.eqn_fn(eqn)
  if not any(map(jaxprs.is_narrow, (v.aval for v in (*eqn.invars, *eqn.outvars)))):
    return lambda *args: evaluate(*_cast_to_operands(eqn, args))
  if eqn.primitive.name == "convert_element_type" and jaxprs.is_float(eqn.invars[0].aval):
    return lambda x: [_round_to(x, eqn.outvars[0].aval.dtype)]
  wide = jaxprs.wide_fn(eqn)
  if wide is None:
    # The results are no view of the leaves, so the transpose gets gradients of ONE example.
    return lambda *args: evaluate(*_cast_to_operands(eqn, args))
  return lambda *args: [
    _round_to(x, var.aval.dtype) if jaxprs.is_narrow(var.aval) else x
    for x, var in zip(wide(*args), eqn.outvars)
  ]


def _cast_to_operands(eqn: Any, args: Sequence[Any]) -> list[Any]:
  return [cast_as(x, v.aval) for x, v in zip(args, jaxprs.operands(eqn))]


def _round_to(x: Array, dtype: DType) -> Any:
  """Rounds values to `dtype` but keeps at least float32; gradients pass unchanged."""
  like = jax.ShapeDtypeStruct((), dtype)
  if not jaxprs.is_narrow(like):
    return cast_as(x, like)

  @jax.custom_jvp
  def rounded(x):
    return x.astype(dtype).astype(x.dtype)

  rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))
  return rounded(trees.at_least_float32(x))


def cast_as(x: Array, like: Any) -> Any:
  """Casts x to the dtype of `like`; returns x itself if it has this dtype (keys, tokens)."""
  return x if x.dtype == like.dtype else x.astype(like.dtype)

"""Clipped per-example gradients without per-example gradients.

One forward and one backward pass over the batch leave each site's operand a and cotangent
g (`tapped`); the norm of each example's gradient is taken from them unit by unit
(`units`, `row_forms`, `cost_model`), and the clipped sum is the ordinary transpose of each
site with c_i g_i in place of g_i, as in "Differentially Private Optimization on Large
Model at Small Cost" (Bu et al. 2023, book-keeping), here for any traced function.

| case                                          | what happens                              |
| --------------------------------------------- | ----------------------------------------- |
| NaN or infinite gradient, padding             | contributes exactly 0                     |
| squares overflow on the way to a norm, or     | the example's gradient is formed and      |
| underflow by what shows in its factor         | scaled before it is squared, in a loop    |
|                                               | over such examples (`lengths.scaled`)     |
| c_i g_i underflows beside large operands      | its gradient is formed, then clipped,     |
|                                               | in a loop over such examples              |
| complex numbers meet a parameter              | its (real) gradient per example           |
| parameter the loss does not use               | gradient 0                                |
| floats of less than 32 bits                   | norms and sums in float32 (`clipping`)    |
| rows of an example that cancel                | their rounding is added to the norm, so   |
|                                               | that the bound holds; else below 1e-5;    |
|                                               | 1024 norms of rows count as one at least  |
| parameter joined with, or transformed by,     | its gradient per example, pulled back and |
| others; used in several layouts, or in single | freed after its norm; if so, formed again |
| and in double precision                       | for the sum and held to that norm         |
| cond, while, custom_vjp that see a parameter  | a site as a whole, in the same way        |
| an index chooses most of a stack of matrices  | its gradient per example, held            |

`explain` shows the choices for a loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpjax import trees
from dpjax.branches import rarely_taken
from dpjax.gradients import clipping
from dpjax.gradients.clip import Clip
from dpjax.gradients.equations import is_literal
from dpjax.gradients.ghost import (
  jaxpr_sites,
  lengths,
  row_forms,
  tapped,
  unit_rules,
  units,
)
from dpjax.gradients.ghost.jaxpr_sites import Program
from dpjax.gradients.ghost.param_flow import ParamFlow
from dpjax.gradients.ghost.units import Rule, Sum, Unit, sum_of
from dpjax.gradients.loss_checks import inner_jaxprs, mixes
from dpjax.gradients.manual_axes import as_varying_as
from dpjax.gradients.settling import on_settled
from dpjax.parallel import made_for
from dpjax.types import ArrayTree, ClippedSum, LossFn, NumberTree, Params

# Number of parameters whose per-example gradients are cheap to stack.
_SMALL = 4096


def first_of(batch: ArrayTree) -> Any:
  """Returns the first example of a batch, to trace with: its values are not used."""
  return jax.tree.map(lambda leaf: leaf[0], batch)


class Recipe(NamedTuple):
  """The traced program of one example, and the rule of every unit of its parameters."""

  program: Program
  units: tuple[Unit, ...]
  platform: str


def plan(
  loss_fn: LossFn,
  params: Params,
  example: ArrayTree,
  l2_clip_norm: NumberTree = 1.0,
  platform: str | None = None,
) -> Recipe:
  """Traces the loss once and chooses the rules; arguments may be ShapeDtypeStructs."""
  treedef = jax.tree.structure(l2_clip_norm)
  groups = _spread(treedef.unflatten(range(treedef.num_leaves)), params)
  platform = platform or made_for.platform()
  leaves = jax.tree.leaves(params)
  program = jaxpr_sites.trace(loss_fn, params, example)
  planned = units.find_units(program, leaves, groups, platform)
  # Only a first trace shows which leaves an index chooses from; a second one lifts them.
  if stacked := units.better_stacked(planned, leaves):
    program = jaxpr_sites.trace(loss_fn, params, example, stacked)
    planned = units.find_units(program, leaves, groups, platform)
  return Recipe(program, planned, platform)


def _spread(prefix: Any, params: Any) -> list[Any]:
  """Returns, for each leaf of the parameters, the value of its group."""
  spread = lambda value, group: jax.tree.map(lambda _: value, group)
  return jax.tree.leaves(jax.tree.map(spread, prefix, params))


def pays(planned: Sequence[Unit], params: Params) -> bool:
  """Whether this route can be better than vmap: some unit has a rule, or memory is at
  stake."""
  general = all(unit.rule in (Rule.GRADIENT, Rule.UNUSED) for unit in planned)
  return not general or trees.size(params) > _SMALL


def clipped_sum(
  planned: Recipe,
  params: Params,
  batch: ArrayTree,
  mask: jax.Array,
  clip: Clip,
  *,
  rescale_to_unit_norm: bool = False,
) -> ClippedSum:
  """Returns the sum of clipped gradients, equal to the vmap route's (see `clip_and_sum`)."""
  leaves, treedef = jax.tree.flatten(params)
  program, planned_units, platform = planned
  flow = ParamFlow.of(program, leaves)
  recorded = tapped.record(program, leaves, jax.tree.leaves(batch))  # [*loops, B, ...]
  held, recomputed = [
    [u for u in planned_units if u.hold is hold] for hold in (True, False)
  ]
  # Arrays held for the sum are formed first, so that they are settled, too.
  early = unit_rules.norms(held, flow, recorded, platform)

  def clipped(settled):
    early, recorded = settled
    late = unit_rules.norms(recomputed, flow, recorded, platform)
    first = [*map(unit_rules.finished, early), *late]
    by_leaf = treedef.unflatten(_by_leaf(ordered, [each.lengths for each in first]))
    groups = _group_lengths(clip.norms, by_leaf)  # of each clip norm: [B]

    def exactly(row):
      each = [
        unit_rules.entries(unit, flow, recorded, known, row)
        for unit, known in zip(ordered, first)
      ]
      by_leaf = treedef.unflatten(_by_leaf(ordered, each))
      return jax.tree.map(lambda _, group: lengths.scaled(group), clip.norms, by_leaf)

    sums_at = lambda weights: _Sums(
      ordered,
      flow,
      recorded,
      first,
      factors=_spread(weights.factors, params),  # of each leaf: [B]
      longest=_spread(weights.longest, params),  # of each leaf: [B]
    )
    unclear = mask & ~clipping.is_certain(groups, clip)
    if platform == "cpu":
      weights = _weights(_made_certain(groups, unclear, exactly), clip, mask)
      return sums_at(weights).one_by_one(), weights.norms
    weights = _weights(groups, clip, mask)
    usual = sums_at(weights)

    @rarely_taken
    def unusual(known):
      del known
      certain = _weights(_made_certain(groups, unclear, exactly), clip, mask)
      return sums_at(certain).unusual(), certain

    # The one conditional, after the work: a GPU's program waits for the host where it branches.
    is_usual = usual.drops_nobody() & ~jnp.any(unclear)
    known = (usual.usual(), weights)
    sums, weights = lax.cond(is_usual, lambda known: known, unusual, known)
    return _Totals(sums | sums_at(weights).formed_again(), {}, {}), weights.norms

  ordered = [*held, *recomputed]
  totals, norms = on_settled(clipped, (early, unit_rules.sites_only(recomputed, recorded)))
  # In a branch XLA's CPU backend takes three times as long for a convolution.
  convolved = {
    i: unit_rules.convolutions(ordered[i], flow, recorded, factors)
    for i, factors in totals.convolved.items()
  }
  sums = _with_rows_alone(totals.sums | convolved, ordered, flow, recorded, totals.waiting)
  total = treedef.unflatten(
    _by_leaf(ordered, [sums[i] for i in range(len(ordered))])
  )  # leaves [*param]
  unit = rescale_to_unit_norm
  total = clipping.rescaled(total, clip, rescale_to_unit_norm=unit)
  bounds = clip.group_bounds(rescale_to_unit_norm=unit)
  return ClippedSum(total, norms, recorded.losses, math.hypot(*bounds), bounds, mask)


class _Totals(NamedTuple):
  """Sums over the examples, by the place of their unit, and what is left to do."""

  sums: dict[int, Any]
  convolved: dict[int, Any]  # factors of units that are summed outside of the branch
  waiting: dict[int, unit_rules.Waiting]  # examples whose terms are added one by one


class _Sums(NamedTuple):
  """Arrays from which clipped sums are formed, once the factors are known."""

  units: Sequence[Unit]
  flow: ParamFlow
  recorded: tapped.Recorded
  first: Sequence[unit_rules.Norms]
  factors: Sequence[jax.Array]  # of each leaf: [B]
  longest: Sequence[jax.Array]  # of each leaf: [B]

  def total(self, i: int, factors: Sequence[jax.Array], finite: bool | None) -> Any:
    """Returns the sum of a unit; see `unit_rules.totals`."""
    unit = self.units[i]
    known = self.first[i]
    if sum_of(unit) is Sum.AGAIN:
      known = unit_rules.at_most(known, [self.longest[leaf] for leaf in unit.leaves])
    return unit_rules.totals(unit, self.flow, self.recorded, known, factors, finite)

  def factors_of(self, i: int) -> list[jax.Array]:
    """Returns the factors of a unit's leaves."""
    return [self.factors[leaf] for leaf in self.units[i].leaves]

  def waiting(self) -> dict[int, unit_rules.Waiting]:
    """Finds the examples whose terms are added one by one, after the sum."""
    each = {}
    for i, unit in enumerate(self.units):
      leaf = unit.leaves[0]
      factor = self.factors[leaf]
      each[i] = unit_rules.waiting(unit, self.first[i], factor, self.longest[leaf])
    return {i: alone for i, alone in each.items() if alone is not None}

  def used(self, waiting: dict[int, unit_rules.Waiting]) -> list[list[jax.Array]]:
    """Returns the factors of each unit without the examples that wait."""
    factors = [self.factors_of(i) for i in range(len(self.units))]
    for i, alone in waiting.items():
      factors[i] = [jnp.where(alone.left, 0, factors[i][0])] * len(factors[i])
    return factors

  def sharing_cotangents(self, chosen: Sequence[int]) -> list[list[int]]:
    """Groups units that read one array of cotangents, such as a matrix and its bias."""
    groups: dict[Any, list[int]] = {}
    for i in chosen:
      # A held gradient is summed as it lies.
      sites = () if self.units[i].hold else self.units[i].sites
      read = [array for site in sites for array in self.recorded.cotangents[site.index]]
      groups.setdefault(tuple(map(id, read)) or ("held", i), []).append(i)
    return list(groups.values())

  def one_by_one(self) -> _Totals:
    """Forms each sum by itself, but those of convolutions."""
    waiting = self.waiting()
    used = self.used(waiting)
    convolved = {i: used[i] for i, u in enumerate(self.units) if unit_rules.convolves(u)}
    at_once = [i for i in range(len(used)) if i not in convolved]
    sums = {i: self.total(i, used[i], None) for i in at_once}
    return _Totals(sums, convolved, waiting)

  def drops_nobody(self) -> jax.Array:
    """Whether each example's terms are finite, and none is added by itself: [] bool."""
    lefts = [alone.left for alone in self.waiting().values()]
    someone_waits = jnp.any(jnp.stack(lefts)) if lefts else False
    return unit_rules.all_finite(self.first) & jnp.logical_not(someone_waits)

  def _at_once(self) -> list[int]:
    """Returns the units that are not summed in a loop. A compiled loop is not compiled twice."""
    each = enumerate(self.units)
    return [i for i, unit in each if sum_of(unit) is not Sum.AGAIN]

  def usual(self) -> dict[int, Any]:
    """Forms the sums where `drops_nobody`; else they are arbitrary.

    An accelerator is bound by memory. Here no operand is copied to drop an example from it, and
    no sum to add terms to it.
    """
    at_once = self._at_once()
    sums = {}
    places = {i: [id(factor) for factor in self.factors_of(i)] for i in at_once}
    # Leaves of one clip group share one array, and so one transpose (`unit_rules.totals`).
    factors = {id(f): f for i in at_once for f in self.factors_of(i)}
    for group in self.sharing_cotangents(at_once):
      # One after the other, or the products c_i g_i of all are in memory at once.
      if sums:
        arrays, sums = lax.optimization_barrier((list(factors.values()), sums))
        factors = dict(zip(factors, arrays))
      sums |= {i: self.total(i, [factors[f] for f in places[i]], True) for i in group}
    return sums

  def unusual(self) -> dict[int, Any]:
    """Forms the sums of any batch, with copies of operands from which examples are dropped."""
    waiting = self.waiting()
    used = self.used(waiting)
    sums = {i: self.total(i, used[i], False) for i in self._at_once()}
    return _with_rows_alone(sums, self.units, self.flow, self.recorded, waiting)

  def formed_again(self) -> dict[int, Any]:
    """Forms the sums of the other units, in a loop that drops examples by itself."""
    at_once = self._at_once()
    again = [i for i in range(len(self.units)) if i not in at_once]
    return {i: self.total(i, self.factors_of(i), None) for i in again}


class _Weights(NamedTuple):
  """Factors of the examples with what they follow from; trees of [B], one for each clip norm."""

  factors: Any
  longest: Any  # longest that the gradients of a group can be
  norms: jax.Array  # of the whole gradients: [B]


def _weights(groups: Any, clip: Clip, mask: jax.Array) -> _Weights:
  """Returns the factors of gradients of these lengths, a tree of Length [B]."""
  pick = lambda name: jax.tree.map(lambda _, g: getattr(g, name), clip.norms, groups)
  longest = pick("longest")
  factors, norms = clipping.clip_factors(pick("norm"), clip, mask, longest=longest)
  return _Weights(factors, longest, norms)


def _with_rows_alone(
  sums: dict[int, Any],
  ordered: Sequence[Unit],
  flow: ParamFlow,
  recorded: tapped.Recorded,
  waiting: dict[int, unit_rules.Waiting],
) -> dict[int, Any]:
  """Adds the terms of examples whose c_i g_i underflow to the sums, one example after the
  other."""
  if not waiting:
    return sums

  def add(sums, row):
    more = dict(sums)
    for i, each in waiting.items():
      terms = unit_rules.alone(ordered[i], flow, recorded, row, each)
      more[i] = tuple(s + t.astype(s.dtype) for s, t in zip(sums[i], terms))
    return more

  left = functools.reduce(jnp.logical_or, [each.left for each in waiting.values()])  # [B]
  # The carry of the loop keeps its type, also under shard_map.
  first = as_varying_as((recorded, left), {i: sums[i] for i in waiting})
  return sums | _row_by_row(add, left, first)


def _row_by_row(fn: Callable[[Any, jax.Array], Any], rows: jax.Array, first: Any) -> Any:
  """Returns fn(... fn(fn(first, i), j) ..., k) over the rows i < j < ... < k that are True.

  Args:
    fn: `(carry, row) -> carry`; it may close over arrays of the whole batch.
    rows: [B] bool.
    first: the first carry.
  """

  def step(state):
    left, carry = state
    row = jnp.argmax(left)
    return left.at[row].set(False), fn(carry, row)

  @rarely_taken
  def loop(state):
    return lax.while_loop(lambda state: jnp.any(state[0]), step, state)

  # XLA copies the closure of a loop, even for a loop of no steps. In a conditional it
  # copies only if there are such rows. Otherwise scattering features would cost four times
  # as much.
  return lax.cond(jnp.any(rows), loop, lambda state: state, (rows, first))[1]


def keeps_apart(planned: Recipe) -> bool:
  """Whether no convolution of the program mixes examples (`loss_checks.mixes`).

  A convolution with rows mixes none: its kernel is not batched, and its gradient is a product of
  rows. Where the data make the kernel, or a branch holds it, nothing is known. A constant kernel
  mixes none.
  """
  jaxpr = planned.program.jaxpr
  sites = planned.program.sites()
  by_rows = {id(site.eqn) for site in sites if row_forms.find(site) is not None}
  return all(id(eqn) in by_rows for eqn in _suspects(jaxpr, set(jaxpr.invars)))


def _suspects(jaxpr: Any, inputs: set[Any]) -> list[Any]:
  """Returns the equations that may mix examples, given the variables that follow from inputs.

  A constant kernel is neither batched nor differentiated, so its convolution mixes none.
  """
  suspects = []
  known = set(inputs)
  for eqn in jaxpr.eqns:
    is_known = [not is_literal(atom) and atom in known for atom in eqn.invars]
    inner = inner_jaxprs(eqn)
    if mixes(eqn) and (is_known[1] or eqn.params["batch_group_count"] > 1):
      suspects.append(eqn)
    for body in inner:
      # Operands of a call are its arguments, in their order; of others nothing is assumed.
      aligned = len(inner) == 1 and len(body.invars) == len(is_known)
      reached = is_known if aligned else [True] * len(body.invars)
      # What a loop carries may follow from inputs after its first turn.
      carries = eqn.primitive.name in ("scan", "while")
      entering = {v for v, given in zip(body.invars, reached) if given or carries}
      suspects += _suspects(body, entering)
    if any(is_known):
      known.update(eqn.outvars)
  return suspects


def stacked_gradients(
  loss_fn: LossFn, params: Params, batch: ArrayTree
) -> tuple[jax.Array, Any]:
  """Returns losses [B] and the gradient of each example, leaves [B, *param], in at least
  float32.

  Formed from the operands and cotangents that the loss computed, as they are for the fast
  route: where the loss computes in less than float32, JAX would round (or overflow) once more.
  One example after the other where a convolution could mix them.
  """
  recipe = plan(loss_fn, params, first_of(batch))
  if keeps_apart(recipe):
    return _stacked(recipe, params, batch)

  def alone(example: ArrayTree) -> Any:
    row = jax.tree.map(lambda leaf: leaf[None], example)
    return jax.tree.map(lambda leaf: leaf[0], _stacked(recipe, params, row))

  return lax.map(alone, batch)


def _stacked(recipe: Recipe, params: Params, batch: ArrayTree) -> tuple[jax.Array, Any]:
  leaves, treedef = jax.tree.flatten(params)
  program, planned, _ = recipe
  flow = ParamFlow.of(program, leaves)
  recorded = tapped.record(program, leaves, jax.tree.leaves(batch))  # [*loops, B, ...]
  grads = [unit_rules.stacked(unit, flow, recorded) for unit in planned]
  return recorded.losses, treedef.unflatten(_by_leaf(planned, grads))


def _made_certain(
  groups: Any, unclear: jax.Array, exactly: Callable[[jax.Array], Any]
) -> Any:
  """Replaces lengths that squares could not determine, one example after the other.

  Args:
    groups: tree of Length [B], one per clip norm.
    unclear: [B] bool, whose lengths are replaced.
    exactly: the same tree of Length [], of the example in a row.
  """

  def replace(groups, row):
    def write(known, new):
      return known.at[row].set(new.astype(known.dtype))

    return jax.tree.map(write, groups, exactly(row))

  return _row_by_row(replace, unclear, groups)


def _by_leaf(planned: Sequence[Unit], values: Sequence[Sequence[Any]]) -> list[Any]:
  """Flattens values per unit and leaf, in the order of the leaves."""
  pairs = [pair for unit, each in zip(planned, values) for pair in zip(unit.leaves, each)]
  return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]


def _group_lengths(l2_clip_norm: Any, by_leaf: Any) -> Any:
  """Returns a Length [B] for each clip norm; 0 for a group without parameters."""
  is_length = lambda x: isinstance(x, lengths.Length)
  some = jax.tree.leaves(by_leaf, is_leaf=is_length)[0]
  none = jax.tree.map(jnp.zeros_like, some)
  lengths_in = lambda group: jax.tree.leaves(group, is_leaf=is_length)
  joined = lambda _, group: lengths.joined(lengths_in(group) or [none])
  return jax.tree.map(joined, l2_clip_norm, by_leaf)

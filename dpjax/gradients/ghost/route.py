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
|                                               | that the bound holds; else below 1e-5     |
| parameter joined with, or transformed by,     | its gradient per example, pulled back and |
| others; used in several layouts               | freed after its norm; if so, formed again |
|                                               | for the sum and held to that norm         |
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
from dpjax.gradients.ghost import (
  jaxpr_sites,
  lengths,
  tapped,
  unit_rules,
  units,
)
from dpjax.gradients.ghost.jaxpr_sites import Program
from dpjax.gradients.ghost.param_flow import ParamFlow
from dpjax.gradients.ghost.units import Rule, Sum, Unit, sum_of
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

    groups = _made_certain(groups, clip, mask, exactly)
    pick = lambda name: jax.tree.map(lambda _, g: getattr(g, name), clip.norms, groups)
    longest = pick("longest")
    factors, norms = clipping.clip_factors(pick("norm"), clip, mask, longest=longest)
    leaf_factors = _spread(factors, params)  # of each leaf: [B]
    most = _spread(longest, params)  # of each leaf: [B]
    used = []
    waiting = {}
    for i, (unit, known) in enumerate(zip(ordered, first)):
      each = of(unit, leaf_factors)
      alone = unit_rules.waiting(unit, known, each[0], of(unit, most)[0])
      if alone is not None:
        waiting[i] = alone
        # Their terms are added one by one, after the sum (`_with_rows_alone`).
        each = [jnp.where(alone.left, 0, each[0])] * len(each)
      used.append(each)

    def total(i, factors, finite):
      known = first[i]
      if sum_of(ordered[i]) is Sum.AGAIN:
        known = unit_rules.at_most(known, of(ordered[i], most))
      return unit_rules.totals(ordered[i], flow, recorded, known, factors, finite)

    places = range(len(ordered))
    if platform == "cpu":
      # A convolution is summed below, outside this branch.
      at_once = [i for i in places if not unit_rules.convolves(ordered[i])]
      sums = {i: total(i, used[i], None) for i in at_once}
      return sums, norms, used, waiting
    at_once = [i for i in places if sum_of(ordered[i]) is not Sum.AGAIN]

    def usual():
      return {i: total(i, of(ordered[i], leaf_factors), True) for i in at_once}

    @rarely_taken
    def unusual():
      sums = {i: total(i, used[i], False) for i in at_once}
      return _with_rows_alone(sums, ordered, flow, recorded, waiting)

    # An accelerator is bound by memory: as a rule no operand is copied to drop an example, and
    # no sum is, to add terms to it.
    lefts = [each.left for each in waiting.values()]
    nobody_waits = jnp.logical_not(jnp.any(jnp.stack(lefts))) if lefts else True
    sums = lax.cond(unit_rules.all_finite(first) & nobody_waits, usual, unusual)
    formed_again = {i: total(i, used[i], None) for i in places if i not in at_once}
    return sums | formed_again, norms, None, None

  ordered = [*held, *recomputed]
  of = lambda unit, leaves: [leaves[i] for i in unit.leaves]
  sums, norms, used, waiting = on_settled(
    clipped, (early, unit_rules.sites_only(recomputed, recorded))
  )
  if platform == "cpu":
    # In a branch XLA's CPU backend takes three times as long for a convolution.
    convolved = {
      i: unit_rules.convolutions(unit, flow, recorded, used[i])
      for i, unit in enumerate(ordered)
      if i not in sums
    }
    sums = _with_rows_alone(sums | convolved, ordered, flow, recorded, waiting)
  total = treedef.unflatten(_by_leaf(ordered, [sums[i] for i in range(len(ordered))]))  # leaves [*param]
  unit = rescale_to_unit_norm
  total = clipping.rescaled(total, clip, rescale_to_unit_norm=unit)
  bounds = clip.group_bounds(rescale_to_unit_norm=unit)
  return ClippedSum(total, norms, recorded.losses, math.hypot(*bounds), bounds, mask)


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


def stacked_gradients(
  loss_fn: LossFn, params: Params, batch: ArrayTree
) -> tuple[jax.Array, Any]:
  """Returns losses [B] and the gradient of each example, leaves [B, *param], in at least
  float32.

  Formed from the operands and cotangents that the loss computed, as they are for the fast
  route: where the loss computes in less than float32, JAX would round (or overflow) once more.
  """
  leaves, treedef = jax.tree.flatten(params)
  program, planned, _ = plan(loss_fn, params, first_of(batch))
  flow = ParamFlow.of(program, leaves)
  recorded = tapped.record(program, leaves, jax.tree.leaves(batch))  # [*loops, B, ...]
  grads = [unit_rules.stacked(unit, flow, recorded) for unit in planned]
  return recorded.losses, treedef.unflatten(_by_leaf(planned, grads))


def _made_certain(
  groups: Any, clip: Clip, mask: jax.Array, exactly: Callable[[jax.Array], Any]
) -> Any:
  """Replaces lengths that squares could not determine, one example after the other.

  Args:
    groups: tree of Length [B], one per clip norm.
    clip: how they are clipped.
    mask: [B] bool; nothing is asked of padding.
    exactly: the same tree of Length [], of the example in a row.
  """

  def replace(groups, row):
    def write(known, new):
      return known.at[row].set(new.astype(known.dtype))

    return jax.tree.map(write, groups, exactly(row))

  return _row_by_row(replace, mask & ~clipping.is_certain(groups, clip), groups)


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

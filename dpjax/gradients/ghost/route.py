"""Sums of clipped per-example gradients, mostly without forming these gradients.

A site is an equation where a parameter meets data, and a unit is a group of parameters with common
sites. One forward and one backward pass over the batch record each site's operand a and cotangent g
(`tapped`). The norm of each example's gradient is computed from them, unit by unit (`units`,
`row_forms`, `cost_model`). The clipped sum is, in most units, the ordinary transpose of each site
with c_i g_i in place of g_i, where c_i is the clip factor of example i. Source: "Differentially
Private Optimization on Large Model at Small Cost" (Bu et al. 2023, book-keeping), here for any
traced function.

| case                                          | what happens                              |
| --------------------------------------------- | ----------------------------------------- |
| NaN or infinite gradient, padding             | contributes exactly 0                     |
| squares overflow on the way to a norm, or     | the example is left out of the sums; its  |
| underflow enough to change the factor; or     | gradient is formed, scaled before it is   |
| c_i g_i underflows beside large operands      | squared, clipped and added, in a loop     |
|                                               | over such examples                        |
| complex numbers meet a parameter              | its (real) gradient per example           |
| parameter the loss does not use               | gradient 0                                |
| floats of less than 32 bits                   | norms and sums in float32 (`clipping`)    |
| rows of an example that cancel                | their rounding is added to the norm, so   |
|                                               | that the bound holds, up to 1e-5          |
| rows that cancel, and could change the        | as for squares that overflow: in the loop |
| rounding of other examples                    | over such examples                        |
| standardised kernel with its gain             | norm from rows (`standardized`)           |
| parameter transformed, or joined with one of  | its gradient per example, pulled back; it |
| another clip norm; used in several layouts,   | is held for the sum, or freed, formed     |
| or in single and in double precision          | again and cut to the norm found before    |
| cond, while, custom_vjp that see a parameter  | one site; gradient per example, as above  |
| an index chooses a third or more of a stack   | the stack's gradient per example, held    |
| of matrices, and their products have no rows  |                                           |

`explain` shows the choices for a loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from dpjax import jaxprs, trees
from dpjax.branches import rarely_taken
from dpjax.gradients import clipping
from dpjax.gradients.clip import Clip
from dpjax.gradients.exact_sum import ExactSum
from dpjax.gradients.ghost import (
  jaxpr_sites,
  lengths,
  tapped,
  unit_rules,
  units,
)
from dpjax.gradients.ghost.jaxpr_sites import Program
from dpjax.gradients.ghost.tapped import ParamFlow
from dpjax.gradients.ghost.units import Rule, Sum, Unit, sum_of
from dpjax.gradients.loss_checks import Loss, mixes
from dpjax.gradients.traced_values import as_varying_as, on_settled
from dpjax.parallel import made_for
from dpjax.types import ArrayTree, NumberTree, Params

# Largest number of parameters whose per-example gradients are cheap to stack.
_SMALL = 4096


class Recipe(NamedTuple):
  """The traced program of one example, and the rule of every unit of its parameters."""

  program: Program
  units: tuple[Unit, ...]
  group_of: Sequence[int]  # index of the clip norm of each leaf
  platform: str


def plan(
  loss: jex.ClosedJaxpr,
  params: Params,
  l2_clip_norm: NumberTree = 1.0,
  platform: str | None = None,
) -> Recipe:
  """Returns the recipe of the program of a loss: finds its sites, and chooses the rules.

  Args:
    loss: jaxpr of `(params, ONE example) -> scalar`.
    params: parameters, or their ShapeDtypeStructs.
    l2_clip_norm: the clip norms; only their places in the tree count.
    platform: backend; None for the one that programs are made for.
  """
  norms, treedef = jax.tree.flatten(l2_clip_norm)
  indices = treedef.unflatten(range(len(norms)))
  groups = jax.tree.leaves(jax.tree.broadcast(indices, params))
  platform = platform or made_for.platform()
  leaves = jax.tree.leaves(params)
  program = jaxpr_sites.program_of(loss, len(leaves))
  planned = units.find_units(program, leaves, groups, platform)
  # Only sites show which leaves an index chooses from. These leaves are then lifted to data.
  if stacked := units.better_stacked(planned, leaves):
    program = jaxpr_sites.program_of(loss, len(leaves), stacked)
    planned = units.find_units(program, leaves, groups, platform)
  return Recipe(program, planned, groups, platform)


def pays(planned: Sequence[Unit], params: Params) -> bool:
  """Returns whether this route can beat vmap: some unit has a cheap rule, or the model is large."""
  general = all(unit.rule in (Rule.GRADIENT, Rule.UNUSED) for unit in planned)
  return not general or trees.size(params) > _SMALL


def clipped_sum(
  planned: Recipe,
  params: Params,
  batch: ArrayTree,
  mask: jax.Array,
  clip: Clip,
) -> clipping.Clipped:
  """Returns the sum of clipped gradients, not yet `clipping.rescale`.

  It equals that of the vmap route (`clipping.sum_clipped`), up to the rounding that norms include.
  """
  leaves, treedef = jax.tree.flatten(params)
  program, planned_units, group_of, platform = planned
  flow = ParamFlow.of(program, leaves)
  examples = jax.tree.leaves(batch)
  keeping = units.kept_at(planned_units)
  recorded = tapped.record(program, leaves, examples, keeping)  # [*loops, B, ...]
  rules = [unit_rules.rule_of(unit, flow) for unit in planned_units]
  held = [rule for rule in rules if rule.unit.hold]
  recomputed = [rule for rule in rules if not rule.unit.hold]
  rules = [*held, *recomputed]
  # Arrays held for the sum are formed before `on_settled`, which stores them in memory, too.
  early = unit_rules.norms(held, recorded, platform)
  rows = unit_rules.RowReader(rules, recorded, [*early, *[None] * len(recomputed)])
  with_rows_alone = functools.partial(_with_rows_alone, rules, rows, group_of, clip)

  def clipped(settled):
    early, recorded = settled
    late = unit_rules.norms(recomputed, recorded, platform)
    first = [*[norms.finish() for norms in early], *late]
    groups = []  # of each clip norm: lengths [B]
    for each in _group(rules, group_of, clip, [norms.lengths for norms in first]):
      if not each:  # no parameters
        each = [jax.tree.map(jnp.zeros_like, first[0].lengths[0])]
      groups.append(lengths.join(each))
    unclear = mask & ~clipping.is_certain(groups, clip)
    factors, norms = clipping.clip_factors(groups, clip, mask & ~unclear)
    longest = [length.longest for length in groups]
    sums = _Sums(rules, recorded, first, group_of, factors, longest)
    rare = unclear | sums.loses_terms() | sums.stray_far(clip)
    without_rare = sums._replace(factors=[jnp.where(rare, 0, each) for each in factors])
    if platform == "cpu":
      return *without_rare.one_by_one(), without_rare.factors, norms, rare

    @rarely_taken
    def unusual(known):
      del known
      begun = without_rare.unusual()
      total, factors, all_norms = with_rows_alone(begun, without_rare.factors, norms, rare)
      return total | sums._replace(factors=factors).of_held(False), all_norms

    # A GPU's program waits for the host at a branch. So a usual batch meets only this conditional,
    # after most of the work.
    is_usual = unit_rules.all_finite(first) & ~jnp.any(rare)
    known = (sums.usual(), norms)
    begun, all_norms = lax.cond(is_usual, lambda known: known, unusual, known)
    return without_rare.form_again(begun), {}, [], all_norms, rare

  seen = (early, recorded.at(unit_rules.sites_of(recomputed)))
  sums, missing, factors, norms, rare = on_settled(clipped, seen)
  # In a branch XLA's CPU backend takes three times as long for a convolution, so these sums are
  # formed here.
  for i, of_leaves in missing.items():
    sums[i] = rules[i].transpose(recorded, of_leaves, settled=False)
  if platform == "cpu":
    sums, factors, norms = with_rows_alone(sums, factors, norms, rare)

    def of_held(settled):
      first, factors = settled
      return _Sums(held, recorded, first, group_of, factors, ()).of_held(None)

    sums |= on_settled(of_held, (early, factors))
  by_leaf = _by_leaf(rules, [sums[i] for i in range(len(rules))])
  return clipping.Clipped(treedef.unflatten(by_leaf), norms, recorded.losses)


class _Sums(NamedTuple):
  """Units, and the arrays from which their clipped sums are formed."""

  rules: Sequence[unit_rules.UnitRule]
  recorded: tapped.Recorded
  first: Sequence[unit_rules.Norms]
  group_of: Sequence[int]  # index of the clip norm of each leaf
  factors: Sequence[jax.Array]  # of each clip norm: [B]
  longest: Sequence[jax.Array]  # of each clip norm: [B]

  def total(self, i: int, finite: bool | None, begun: Any = None) -> Any:
    """Returns the sum of a unit; see `unit_rules.UnitRule.sum`."""
    known = self.first[i]
    if self._is_again(i):
      known = known.at_most(self._of_leaves(i, self.longest))
    factors = self._of_leaves(i, self.factors)
    return self.rules[i].sum(self.recorded, known, factors, finite, begun)

  def _of_leaves(self, i: int, groups: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the array of its clip norm for each leaf of a unit."""
    return [groups[self.group_of[leaf]] for leaf in self.rules[i].unit.leaves]

  def loses_terms(self) -> jax.Array:
    """Returns [B] bool: whether some unit's sum would lose a visible part of the example's term."""
    lost = jnp.zeros(self.recorded.losses.shape, bool)
    for rule, known in zip(self.rules, self.first):
      group = self.group_of[rule.unit.leaves[0]]
      of_unit = rule.loses_terms(known, self.factors[group], self.longest[group])
      lost = lost if of_unit is None else lost | of_unit
    return lost

  def stray_far(self, clip: Clip) -> jax.Array:
    """Returns [B] bool: whether the example's rows could visibly change the rounding of others.

    Each unit counts by the share of its clip group in the squared bound, or by 1 / number of groups
    if that is more. The reason is that noise may be split over the groups.
    """
    bounds = clip.group_bounds()
    groups = len(bounds) - bounds.count(0)
    square = jnp.zeros(self.recorded.losses.shape, jnp.float32)
    for rule, known in zip(self.rules, self.first):
      group = self.group_of[rule.unit.leaves[0]]
      bound = bounds[group]
      far = rule.stray(known, self.factors[group], bound) if bound else None
      if far is not None:
        share = max((bound / math.hypot(*bounds)) ** 2, 1 / groups)
        square = square + share * jnp.square(far)
    # The test is negated, so that NaN counts as far: `far` is NaN if the norms of an example's rows
    # exceed the range of floats.
    return ~(square <= 1)

  def sharing_cotangents(self, chosen: Sequence[int]) -> list[list[int]]:
    """Groups units that read the same array of cotangents, such as a matrix and its bias."""
    groups: dict[Any, list[int]] = {}
    for i in chosen:
      # A held gradient is summed without its cotangent.
      sites = () if self.rules[i].unit.hold else self.rules[i].unit.sites
      read = [array for site in sites for array in self.recorded.cotangents[site.index]]
      groups.setdefault(tuple(map(id, read)) or ("held", i), []).append(i)
    return list(groups.values())

  def one_by_one(self) -> tuple[dict[int, Any], dict[int, list[jax.Array]]]:
    """Returns (the sums of units by their place, the factors of those that are convolutions).

    Units that hold arrays are left to `of_held`."""
    sums, convolved = {}, {}
    for i, rule in enumerate(self.rules):
      if rule.unit.hold:
        continue
      if rule.convolves:
        convolved[i] = self._of_leaves(i, self.factors)
      else:
        sums[i] = self.total(i, None)
    return sums, convolved

  def _is_again(self, i: int) -> bool:
    """Returns whether a unit is summed in a loop.

    The loop stays outside the branches, so that it is compiled once."""
    return sum_of(self.rules[i].unit) is Sum.AGAIN

  def _begin(self) -> dict[int, Any]:
    """Returns zeros in place of the sums that are formed in a loop."""
    again = filter(self._is_again, range(len(self.rules)))
    return {i: self.rules[i].zeros(self.recorded) for i in again}

  def usual(self) -> dict[int, Any]:
    """Forms the sums of a batch without rare or dropped examples; wrong for any other batch.

    An accelerator is bound by memory, so nothing is copied here: neither operands, to drop an
    example from them, nor sums, to add terms to them.
    """
    at_once = [i for i in range(len(self.rules)) if not self._is_again(i)]
    sums = {}
    now = self
    for group in self.sharing_cotangents(at_once):
      # Groups are summed one after the other. Otherwise the products c_i g_i of all groups would be
      # in memory at once.
      if sums:
        factors, sums = lax.optimization_barrier((now.factors, sums))
        now = self._replace(factors=factors)
      sums |= {i: now.total(i, True) for i in group}
    return sums | self._begin()

  def unusual(self) -> dict[int, Any]:
    """Forms the sums of any batch, with copies of operands from which examples are dropped.

    Units that hold arrays are left to `of_held`."""
    at_once = []
    for i, rule in enumerate(self.rules):
      if not (rule.unit.hold or self._is_again(i)):
        at_once.append(i)
    return {i: self.total(i, False) for i in at_once} | self._begin()

  def of_held(self, finite: bool | None) -> dict[int, Any]:
    """Returns the sums of the units that hold arrays, by their place."""
    held = [i for i, rule in enumerate(self.rules) if rule.unit.hold]
    return {i: self.total(i, finite) for i in held}

  def form_again(self, begun: dict[int, Any]) -> dict[int, Any]:
    """Returns `begun` with the sums of loops filled in. A loop drops examples by itself."""
    return {
      i: self.total(i, None, sums) if self._is_again(i) else sums
      for i, sums in begun.items()
    }


def _by_leaf(
  rules: Sequence[unit_rules.UnitRule], values: Sequence[Sequence[Any]]
) -> list[Any]:
  """Flattens values per unit and leaf, in the order of the leaves."""
  by_leaf = {}
  for rule, each in zip(rules, values):
    by_leaf.update(zip(rule.unit.leaves, each))
  return [by_leaf[leaf] for leaf in range(len(by_leaf))]


def _group(
  rules: Sequence[unit_rules.UnitRule],
  group_of: Sequence[int],
  clip: Clip,
  values: Sequence[Sequence[Any]],
) -> list[list[Any]]:
  """Returns values per unit and leaf as those of the leaves of each clip norm."""
  groups: list[list[Any]] = [[] for _ in clip.group_bounds()]
  for group, value in zip(group_of, _by_leaf(rules, values)):
    groups[group].append(value)
  return groups


def _with_rows_alone(
  rules: Sequence[unit_rules.UnitRule],
  rows: unit_rules.RowReader,
  group_of: Sequence[int],
  clip: Clip,
  sums: dict[int, Any],
  factors: Sequence[jax.Array],
  norms: jax.Array,
  rare: jax.Array,
) -> tuple[dict[int, Any], Sequence[jax.Array], jax.Array]:
  """Adds the clipped gradients of rare examples, formed one after the other.

  Where a unit holds the gradients of examples, the exact factor is all that a rare one needs. So
  their sums are formed after this loop, in which each of them would be compiled again.

  Args:
    sums: sums over the other examples, by the place of their unit, of units that hold nothing.
    factors: [B] for each clip norm, whose entries are replaced for rare examples.
    norms: [B] norms, whose entries are replaced, too.
    rare: [B] bool, True for rare examples.

  Returns:
    (sums, factors, norms) of all examples.
  """

  def term(grad, factor):
    grad = trees.at_least_float32(grad)
    # A factor of 0 drops the example, whatever its gradient is.
    return jnp.where(factor != 0, grad * factor.astype(grad.dtype), 0)

  def clipped(gradients):
    # The norm is that of the very arrays that are clipped and added. So norm
    # and sum have the same rounding.
    groups = list(map(lengths.scaled_norm, _group(rules, group_of, clip, gradients)))
    of_one = jax.tree.map(lambda length: length[None], groups)  # a batch of one
    factors, norms = clipping.clip_factors(of_one, clip, jnp.ones(1, bool))
    of_leaf = [factors[group][0] for group in group_of]
    terms = {}
    for i in sums:
      of_unit = [of_leaf[leaf] for leaf in rules[i].unit.leaves]
      terms[i] = tuple(map(term, gradients[i], of_unit))
    return terms, factors, norms

  def step(state):
    left, sums, *known = state
    row = jnp.argmax(left)
    gradients = []
    for rule, first in zip(rules, rows.kept):
      gradients.append(rule.row_gradient(rows, first, row))
    terms, *exact = on_settled(clipped, gradients)
    more = jax.tree.map(tapped.cast_as, terms, sums.total)
    replaced = lambda x, of_one: x.at[row].set(of_one[0].astype(x.dtype))
    known = jax.tree.map(replaced, known, exact)
    return left.at[row].set(False), sums.plus(more), *known

  @rarely_taken
  def loop(rare, sums, factors, norms):
    # The carry of the loop keeps its type, also under shard_map.
    begun = as_varying_as((rare, sums), ExactSum.of(sums))
    any_left = lambda state: jnp.any(state[0])
    state = (rare, begun, factors, norms)
    _, sums, factors, norms = lax.while_loop(any_left, step, state)
    return sums.value(), factors, norms

  # XLA copies the closure of a loop, even for a loop of no steps. In a conditional it
  # copies only if a row is rare. Without the conditional, training steps on scattering features
  # would take four times as long.
  given = as_varying_as((rows.recorded, rare), (sums, factors, norms))
  without = lambda rare, *given: given
  return lax.cond(jnp.any(rare), loop, without, rare, *given)


def keeps_apart(planned: Recipe) -> bool:
  """Returns whether no convolution of the program mixes examples (`loss_checks.mixes`).

  A convolution with a row form mixes no examples: its kernel is not batched, and its gradient is a
  product of rows. If the kernel depends on data, or a branch holds the convolution, it may mix
  them. A constant kernel mixes none.
  """
  by_rows = {id(site.eqn) for site in planned.program.sites if site.form is not None}
  suspects = []

  def visit(eqn: Any, given: list[bool]) -> None:
    # A constant kernel is neither batched nor differentiated.
    constant = eqn.primitive.name == "conv_general_dilated" and not given[1]
    constant = constant and eqn.params["batch_group_count"] == 1
    if any(given) and not constant and id(eqn) not in by_rows and mixes(eqn):
      suspects.append(eqn)

  jaxpr = planned.program.jaxpr
  jaxprs.reach(jaxpr, [True] * len(jaxpr.invars), visit)
  return not suspects


def stacked_gradients(
  loss: Loss, params: Params, batch: ArrayTree
) -> tuple[jax.Array, Any]:
  """Returns losses [B] and the gradient of each example, leaves [B, *param], in at least
  float32.

  The gradients are formed from recorded operands and cotangents, as on the fast route. If the loss
  computes in less than float32, JAX itself would round (or overflow) once more. Examples are taken
  one after the other if a convolution could mix them.
  """
  recipe = plan(loss.closed, params)
  if not loss.mixes or keeps_apart(recipe):
    return _stack(recipe, params, batch)

  def alone(example: ArrayTree) -> Any:
    row = jax.tree.map(lambda leaf: leaf[None], example)
    return jax.tree.map(lambda leaf: leaf[0], _stack(recipe, params, row))

  return lax.map(alone, batch)


def _stack(recipe: Recipe, params: Params, batch: ArrayTree) -> tuple[jax.Array, Any]:
  leaves, treedef = jax.tree.flatten(params)
  program, planned, *_ = recipe
  flow = ParamFlow.of(program, leaves)
  recorded = tapped.record(program, leaves, jax.tree.leaves(batch))  # [*loops, B, ...]
  rules = [unit_rules.rule_of(unit, flow) for unit in planned]
  grads = [rule.stack(recorded) for rule in rules]
  return recorded.losses, treedef.unflatten(_by_leaf(rules, grads))

"""Groups of leaves and sites that belong together, and the rule for their norm.

Leaves that reach a common site form one *unit* with all their sites. A unit can take its norm
from rows (`row_forms`) if each of its sites has a row form, in one layout, and its leaf reaches
them unchanged, up to rearrangement. Several leaves must be joined into one array and share a clip
norm. One layer has a rule of its own (`standardized`). Any other unit
forms per-example gradients, and holds them for the sum or frees them after their norm.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dpjax.gradients.ghost import chosen_products, cost_model, row_forms
from dpjax.gradients.ghost.cost_model import Cost
from dpjax.gradients.ghost.jaxpr_sites import Program, Site
from dpjax.gradients.ghost.row_forms import RowForm
from dpjax.jaxprs import is_narrow

# Names of sites that combine data and a broadcast parameter entry by entry, or lift a parameter
# ("parameter").
ELEMENTWISE = frozenset(("add", "add_any", "sub", "mul", "div", "parameter"))


class Rule(enum.StrEnum):
  """Way to compute the norm of a unit's gradient."""

  OUTER = "outer"  # one row: |a|^2 |g|^2
  GRAM = "gram"  # sum of (a a^T) * (g g^T)
  PRODUCT = "product"  # a^T g of one example
  GRADIENT = "gradient"  # the leaf's gradient of one example
  UNUSED = "unused"  # no site: the gradient is zero


class Sum(enum.StrEnum):
  """Way to compute the clipped sum of a unit's gradients, once their norms are known."""

  ZERO = "zero"
  HELD = "held"  # from the arrays that the first pass has kept
  TRANSPOSE = "transpose"  # of each site, at c_i g_i
  AGAIN = "again"  # each example's gradient once more, in a loop, cut to its norm


class Unit(NamedTuple):
  """Leaves and sites that belong together, with the rule chosen for them."""

  leaves: tuple[int, ...]
  sites: tuple[Site, ...]
  rule: Rule
  cost: Cost  # of the rule, per example
  hold: bool = False  # keep per-example products or gradients, and sum those
  forms: tuple[RowForm, ...] = ()  # of the sites, if rows give the norm
  swapped: tuple[bool, ...] = ()  # per site: exchange its sides, to match the other sites
  reason: str = (
    ""  # why rows cannot give the norm; "" for elementwise sites, or if they can
  )
  layer: Any = None  # the leaves are those of this layer (`Source.layer`)


def sum_of(unit: Unit) -> Sum:
  """Returns how to form the sum of a unit.

  TRANSPOSE needs a transpose that is linear in g_i, up to rounding that the norm includes
  (`row_forms`). Transposes of rows and of entrywise sums are linear in this sense.
  """
  if unit.rule is Rule.UNUSED:
    return Sum.ZERO
  if unit.hold:
    return Sum.HELD
  again = unit.rule is Rule.GRADIENT and not _entrywise(unit.sites)
  return Sum.AGAIN if again else Sum.TRANSPOSE


def _entrywise(sites: Sequence[Site]) -> bool:
  """Returns whether each entry of the gradient is one entry of a cotangent, up to its sign."""
  site, *more = sites
  if more or site.name not in ("add", "add_any", "sub", "parameter"):
    return False
  alone = len(site.params) == 1 and site.sources[0].is_view
  # If a bias [n] is added to one row [1, n], its gradient is the cotangent, up to axes of size 1.
  wide = [
    [n for n in aval.shape if n != 1] for aval in (site.out_avals[0], site.params[0].aval)
  ]
  alike = wide[0] == wide[1] and not site.is_complex
  return alone and alike and len(site.loops) == len(site.sources[0].loops)


def find_units(
  program: Program, leaves: Sequence[Any], clip_groups: Sequence[int], platform: str
) -> tuple[Unit, ...]:
  """Returns units that hold every leaf exactly once, so that none is dropped.

  Args:
    program: program of one example.
    leaves: parameter leaves (only their shapes are used).
    clip_groups: index of the clip norm of each leaf.
    platform: backend, whose constants decide between rules.
  """
  group_of = {i: {i} for i in range(len(leaves))}  # leaves that reach a common site
  for site in program.sites:
    merged = set().union(*[group_of[i] for i in site.leaves])
    group_of.update(dict.fromkeys(merged, merged))
  units = []
  for group in sorted({tuple(sorted(members)) for members in group_of.values()}):
    sites = [site for site in program.sites if not site.leaves.isdisjoint(group)]
    size = sum([math.prod(leaves[i].shape) for i in group])
    one_clip_norm = len({clip_groups[i] for i in group}) == 1
    units.append(_unit(group, sites, size, one_clip_norm, platform))
  return tuple(units)


def _unit(group, sites, size, one_clip_norm, platform) -> Unit:
  if not sites:
    return Unit(group, (), Rule.UNUSED, Cost(0, 0))
  layer = sites[0].sources[0].layer if len(sites[0].sources) == 1 else None
  if layer and one_clip_norm and (own := layer.unit(group, sites, platform)):
    return own
  forms, reason = _forms(group, sites, one_clip_norm)
  if not forms:
    # Sums and products with a broadcast parameter fuse with the sum over positions. Other
    # equations may form large intermediate arrays, and then a loop may pay.
    heavy = not ELEMENTWISE.issuperset([site.name for site in sites])
    # Numbers of one example that the transposes of the sites touch.
    work = sum([site.steps * sum([aval.size for aval in site.avals]) for site in sites])
    cost, hold = cost_model.gradient(work, size, heavy)
    # Holding a gradient that was recorded anyway costs nothing. A gradient that is rounded to half
    # precision is held, so that the sum uses the array whose norm was taken.
    recorded = len(sites) == 1 and sites[0].name == "parameter" and not sites[0].loops
    # If a cotangent is itself the gradient of several parameters, an accelerator reads it once for
    # all their norms and sums. If it were held, it would be one more array in memory.
    hold = hold and (platform == "cpu" or not _entrywise(sites))
    hold = hold or any(map(_rounds, sites)) or recorded
    return Unit(group, tuple(sites), Rule.GRADIENT, cost, hold, reason=reason)
  if platform == "tpu" and cost_model.holds_convolution(sites[0].name, forms):
    cost = cost_model.held_convolution(forms[0])
    return Unit(group, tuple(sites), Rule.GRADIENT, cost, hold=True)
  rule, cost, hold = _cheapest(forms, platform)
  swapped = _orientation(sites, forms)
  return Unit(group, tuple(sites), rule, cost, hold, tuple(forms), swapped)


def kept_at(planned: Sequence[Unit]) -> frozenset[int]:
  """Returns the indices of the sites whose kept results the norms read."""
  kept = set()
  for unit in planned:
    if unit.layer and unit.rule is Rule.GRAM:
      kept.update([site.index for site in unit.sites])
  return frozenset(kept)


def _forms(group, sites, one_clip_norm) -> tuple[list[RowForm], str]:
  """Returns (row forms of a unit's sites, ""), or ([], `Unit.reason`) if rows give no norm."""
  joined = len(sites) == 1 and one_clip_norm and sites[0].sources[0].is_view
  if len(group) > 1 and not joined:
    return [], f"{len(group)} parameters are combined before they meet the data"
  forms = []
  for site in sites:
    if site.is_complex:
      return [], "complex numbers meet the parameter"
    if len(site.params) > 1:
      return [], f"{site.name} takes the parameter more than once"
    if not site.sources[0].is_view:
      return [], "the parameter is transformed before it meets the data"
    if site.form is None:
      return [], "" if site.name in ELEMENTWISE else f"no row form for {site.name}"
    forms.append(site.form)
  if len(sites) > 1 and not _mergeable(sites, forms):
    return [], f"used at {len(sites)} sites in different layouts"
  return forms, ""


def _mergeable(sites, forms) -> bool:
  """Returns whether all sites see the leaf as one matrix (or its transpose), or as one stack of
  matrices, and in one precision."""
  if len(row_forms.precisions(sites)) > 1:
    return False
  if any(form.width for form in forms):
    return _same_blocks(sites, forms)
  matrices = all(
    site.sources[0].perm is not None
    and sorted(site.sources[0].perm) == [0, 1]
    and not site.sources[0].loops
    and (form.blocks, len(form.left_dims), len(form.right_dims)) == (1, 1, 1)
    for site, form in zip(sites, forms)
  )
  if not matrices:
    return False
  one_hot = {_left_dim(site, form) for site, form in zip(sites, forms) if form.one_hot}
  return len(one_hot) <= 1


def _same_blocks(sites, forms) -> bool:
  """Returns whether rows at all sites are in blocks of the same leaf, with the same sides."""
  first = forms[0]
  sides = (first.blocks, first.width, first.left_dims, first.right_dims)
  return all(
    site.sources[0].perm == sites[0].sources[0].perm is not None
    and not site.sources[0].loops
    and sides == (form.blocks, form.width, form.left_dims, form.right_dims)
    for site, form in zip(sites, forms)
  )


def _left_dim(site: Site, form: RowForm) -> int:
  perm = site.sources[0].perm
  assert perm is not None
  return perm[form.left_dims[0]]


def _orientation(sites, forms) -> tuple[bool, ...]:
  if len(sites) == 1 or forms[0].width:
    return (False,) * len(sites)
  one_hot = [_left_dim(site, form) for site, form in zip(sites, forms) if form.one_hot]
  first = one_hot[0] if one_hot else 0
  return tuple(_left_dim(site, form) != first for site, form in zip(sites, forms))


def _cheapest(forms: Sequence[RowForm], platform: str) -> tuple[Rule, Cost, bool]:
  if len(forms) == 1 and forms[0].rows == 1:
    return Rule.OUTER, cost_model.outer(forms[0]), False
  # With chosen matrices, a product would be as large as all the matrices to choose from.
  if forms[0].width:
    return Rule.GRAM, cost_model.gram(forms, platform), False
  gram = cost_model.gram(forms, platform)
  product, hold = cost_model.product(forms, platform)
  contraction = cost_model.contraction(forms, platform)
  # A held product saves the transpose that forms the sum. A gram product does not.
  after = cost_model.holding(forms, platform) if hold else contraction
  if gram.seconds(platform) + contraction < product.seconds(platform) + after:
    return Rule.GRAM, gram, False
  return Rule.PRODUCT, product, hold


def better_stacked(planned: Sequence[Unit], leaves: Sequence[Any]) -> set[int]:
  """Returns the indices of leaves whose gradients the backward pass should stack per example.

  These are leaves from which an example's index chooses so many matrices that recording them would
  cost more (`cost_model.stacks`).
  """
  stacked = set()
  for unit in planned:
    if unit.forms and unit.forms[0].width:
      continue  # vectors are recorded, not matrices
    matrices = sum([_num_gathered(site) for site in unit.sites])
    if matrices and cost_model.stacks(sum([leaves[i].size for i in unit.leaves]), matrices):
      stacked.update(unit.leaves)
  return stacked


def _num_gathered(site: Site) -> int:
  """Returns the number of elements of the matrices that an example's index chooses from a
  parameter."""
  eqn = site.eqn.eqns[0] if site.name == chosen_products.NAME else site.eqn
  if eqn is None or not chosen_products.chooses_matrices(eqn):
    return 0
  return site.steps * eqn.outvars[0].aval.size if eqn.invars[0] in site.params else 0


def _rounds(site: Site) -> bool:
  """Returns whether a site's transpose rounds to half precision.

  If so, the rounded gradients must be held, so that norm and sum come from the same numbers.
  """
  half = any(map(is_narrow, [*[var.aval for var in site.params], *site.out_avals]))
  return half and (site.form is None or site.form.one_hot)

"""Clipping of one example's gradient: norms, factors, and the resulting sensitivity.

| case                         | flat                               | automatic             |
| ---------------------------- | ---------------------------------- | --------------------- |
| norm <= C                    | g                                  | g * C / (norm + gamma)|
| norm > C                     | g * C / norm, computed in float32+ | g * C / (norm + gamma)|
| norm = 0                     | 0                                  | 0                     |
| any entry NaN or infinite    | 0 (the example is dropped)         | 0 (dropped)           |
| mask False (padding)         | 0                                  | 0                     |
| squares outside float32      | norm from scaled numbers: as above | as above              |
| norm beyond float32, or so   | 0 (dropped)                        | 0 (dropped)           |
| large that the factor is 0   |                                    |                       |
| C = inf                      | g; the sensitivity is inf          | UserError             |
| C <= 0, NaN, or not in       | UserError                          | UserError             |
| [1e-25, 1e30]                |                                    |                       |
| C = 0 for one group of many  | 0: the group is frozen             | 0: frozen             |
| gradient complex or integer  | UserError                          | UserError             |

These rows hold on every route (`auto`, `ghost`, `vmap`, microbatches, meshes). If the loss
computes in a narrow type (bfloat16, float16, any float8), the rows hold for the gradient in
float32:

| in a loss with narrow types    | what happens, on every route                               |
| ------------------------------ | ---------------------------------------------------------- |
| the parameter is narrow, or is | the gradient is formed, clipped and summed in float32; a   |
| cast to a narrow type and back | cast rounds the parameter's values, never its gradients    |
| an activation or its cotangent | it is infinite, NaN or 0 in the loss itself; an example is |
| leaves the range of its type   | dropped if its gradient then is NaN or infinite            |
| a product of an activation and | it is formed in float32, so the example is kept            |
| a cotangent leaves that range  |                                                            |
| a gradient inside of cond,     | it is computed in the types that were traced, then clipped |
| while or a custom derivative   | and summed in float32                                      |
| types that JAX does not join   | UserError (float8 and float32 without a cast)              |

The sum, its noise and its division are computed in float32 or wider. Only the updated parameters
are rounded to their type, after the noise.

During the sum, terms are kept away from the ends of the range of floats. Factors that would make
terms longer (C / gamma, 1 / C for unit norms), or very short (C < 1e-6), multiply the finished sum
instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax import trees, validate
from dpjax.gradients.arguments import check_real, checked_mask
from dpjax.gradients.clip import Clip, ClipRule, Flat, top_of
from dpjax.gradients.ghost.lengths import Length
from dpjax.gradients.loss_checks import check_apart
from dpjax.gradients.traced_values import on_settled
from dpjax.gradients.weighted_sums import weighted_sum
from dpjax.types import ArrayLike, ClipLike, ClippedSum, Updates

# Entries of a term below 1e-38 are lost. A bound of at least 1e-6 leaves 32 decades for small
# entries. Terms with a smaller bound are lifted.
_LEAST_TERM = 1e-6
# An error of a norm below this share of the clip norm (or of gamma) does not change the factor.
_NEGLIGIBLE = 1e-7
# Norms that differ by less than this share give the same factor, up to rounding.
_ALIKE = 1e-6


class Clipped(NamedTuple):
  """A sum of clipped gradients inside of its computation, where nobody else sees it."""

  total: Any  # [*param]
  norms: jax.Array  # [B]
  losses: jax.Array  # [B]


def _lift(top: float) -> float:
  """Returns a power of two that lifts tiny terms above the smallest floats during the sum.

  Otherwise factors and entries would lose digits or become 0, and a term could exceed its bound.
  """
  return 2.0 ** max(0, math.ceil(math.log2(1 / top))) if top < _LEAST_TERM else 1.0


def _factor(longest, keep, bound, rule):
  """Returns the factors [B] of a group with norms of at most `longest` [B]; 0 if not `keep` [B]."""
  # A bound of 0 freezes the group. It has no `top`, and its factors need no length.
  if bound == 0:
    return jnp.zeros_like(longest)  # [B]
  top = top_of(rule, bound)
  lift = _lift(top)
  most = Flat().factors(longest, top * lift, lift)  # [B]
  if type(rule).factors is Flat.factors:
    return jnp.where(keep, most, 0.0)
  # A rule sees one length at a time, so that no example changes the factor of another. Its result
  # is cut to at most the flat factor, so that the bound holds.
  name = f"{type(rule).__name__}.factors"

  def factor_of(length: jax.Array) -> jax.Array:
    factors = rule.factors(length[None], top * lift, lift)
    shape = getattr(factors, "shape", type(factors).__name__)
    if shape != (1,):
      what = "must be an array with a factor for each length"
      raise validate.UserError(f"returned {shape}: {what}", field=name)
    return factors[0]

  # Under vmap a callback or a batching rule of its own would see all lengths.
  check_apart(factor_of, longest, name=name)
  asked = jax.vmap(factor_of)(longest)  # [B]
  return jnp.where(keep & ~jnp.isnan(asked), jnp.clip(asked, 0.0, most), 0.0)


def rescale(total: Updates, clip: Clip, *, rescale_to_unit_norm: bool) -> Any:
  """Returns the sum of each group times the part that `clip_factors` leaves out of the factors.

  This part is bound / top(bound), divided by the lift, and by the bound for unit norms.
  """

  def times(bound, group):
    if bound == 0:
      return group
    top = top_of(clip.rule, float(bound))
    # C = inf has top = inf, and inf / inf is NaN.
    left = 1.0 if top == bound else bound / top
    left = left / _lift(top) / (bound if rescale_to_unit_norm else 1.0)
    return group if left == 1 else trees.scale(group, left)

  return jax.tree.map(times, clip.norms, total)


def clip_factors(
  groups: Sequence[Length], clip: Clip, mask: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
  """Returns the factor by which each example's gradient is multiplied, group by group.

  Args:
    groups: norms [B] for each clip norm, in the order of its tree. Factors are for `longest`, since
      underflow may have reduced the computed norm.
    clip: the clip norms and their rule.
    mask: [B] bool; False means padding.

  Returns:
    ([B] factors for each clip norm, total norms [B]). Factors of padding and of examples with a
    non-finite norm in any group are exactly 0. Apply `rescale` to the sum.

  >>> norms = jnp.array([2.0, 0.5, jnp.nan])
  >>> clip_factors([Length(norms, norms)], Clip(1.0), jnp.ones(3, bool))[0]
  [Array([0.5, 1. , 0. ], dtype=float32)]
  """
  norms = trees.root_sum_squares([length.norm for length in groups])  # [B]
  # If one group is not finite, the whole example is dropped, as padding is. Its other groups would
  # be an arbitrary vector.
  finite = [jnp.isfinite(length.longest) for length in groups]  # of each group: [B]
  keep = jnp.all(jnp.stack([mask, *finite]), axis=0)  # [1 + groups, B] -> [B]
  factors = []
  for bound, length in zip(clip.group_bounds(), groups):
    factors.append(_factor(length.longest, keep, bound, clip.rule))
  return factors, norms


def is_certain(groups: Sequence[Length], clip: Clip) -> jax.Array:
  """Returns whether each example's factor is exact, [B] bool, for norms computed from squares.

  It is not exact if squares left the range of floats: the norm is infinite or NaN, or underflow
  may have changed the factor visibly. Arguments are those of `clip_factors`.
  """
  certain = []
  for bound, length in zip(clip.group_bounds(), groups):
    exact = length.longest <= length.norm * (1 + _ALIKE)
    harmless = length.longest <= _exact_above(bound, clip.rule)
    certain.append(jnp.isfinite(length.longest) & (exact | harmless))  # [B]
  return jnp.all(jnp.stack(certain), axis=0)


def _exact_above(bound: float, rule: ClipRule) -> float:
  """Returns the length above which a norm must be exact: below it no error shows in the factor."""
  usual = bound or 1.0
  visible = rule.visible(bound)
  # The length is never above that of the flat clip, whose factors bound those of every rule.
  return (visible if 0 <= visible <= usual else usual) * _NEGLIGIBLE


def clip_and_sum(
  grads: Updates,
  losses: jax.Array,
  mask: ArrayLike,
  l2_clip_norm: ClipLike,
  *,
  rescale_to_unit_norm: bool = False,
) -> ClippedSum:
  """Clips stacked per-example gradients, and returns their sum with its bounds.

  Args:
    grads: params-shaped tree with leaves [B, *param], real floating point.
    losses: [B], passed through.
    mask: [B] bool, or True if every row is an example.
    l2_clip_norm: a `Clip`, or the number or prefix tree of a flat `Clip`.
    rescale_to_unit_norm: see `dpjax.clipped_grad`.

  Guarantee: changing, adding or removing one example moves `total` by at most, up to rounding,
  `l2_bound` (add/remove) or twice that (replace), for any input, NaN included.

  >>> g = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5], [jnp.nan, 0.0]])}
  >>> clip_and_sum(g, jnp.zeros(3), True, 1.0).total["w"]
  Array([0.6, 1.3], dtype=float32)
  """
  clip = Clip.of(l2_clip_norm)
  mask = _check(grads, mask, clip)
  unit = rescale_to_unit_norm
  out = sum_clipped(grads, losses, mask, clip)
  total = rescale(out.total, clip, rescale_to_unit_norm=unit)
  bounds = clip.group_bounds(rescale_to_unit_norm=unit)
  shortened = clip.shortens(rescale_to_unit_norm=unit)
  bound = math.hypot(*bounds)
  return ClippedSum(total, out.norms, losses, bound, bounds, mask, shortened=shortened)


def sum_clipped(grads: Updates, losses: jax.Array, mask: jax.Array, clip: Clip) -> Clipped:
  """Returns the sum of clipped gradients, not yet `rescale`; see `clip_and_sum`."""
  # Norms and sum must use the same rounded numbers, or a term could exceed its bound.
  total, norms = on_settled(lambda grads: weighted_and_norms(grads, mask, clip), grads)
  return Clipped(total, norms, losses)


def weighted_and_norms(
  grads: Updates, mask: jax.Array, clip: Clip
) -> tuple[Any, jax.Array]:
  """Returns (the sum of clipped gradients, [*param], not yet `rescale`; their norms [B])."""

  bounds, treedef = jax.tree.flatten(clip.norms)
  groups = treedef.flatten_up_to(grads)
  lengths = []
  for bound, group in zip(bounds, groups):
    # Norms are exact where they change the factor. They are 0 for a group without arrays.
    exact_above = _exact_above(bound, clip.rule)
    norms = trees.per_example_norms(group, exact_above=exact_above)  # [B], or []
    norms = jnp.broadcast_to(norms, mask.shape)  # [B]
    lengths.append(Length(norms, norms))
  factors, norms = clip_factors(lengths, clip, mask)  # of each group: [B]; [B]
  # If all norms are finite, `weighted_sum` skips the pass that drops examples.
  all_finite = jnp.all(jnp.isfinite(norms))  # []
  sums = []
  for group, factor in zip(groups, factors):
    sums.append(weighted_sum(group, factor, all_finite))
  return treedef.unflatten(sums), norms  # leaves [*param]; [B]


def _check(grads: Any, mask: Any, clip: Clip) -> jax.Array:
  clip.check_prefix(grads)
  check_real(grads=grads)
  sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(grads)}
  if len(sizes) != 1 or () in sizes:
    raise validate.UserError(
      f"must be stacked per example, [B, *param], found {sorted(map(str, sizes))}",
      field="grads",
    )
  return checked_mask(mask, sizes.pop()[0])

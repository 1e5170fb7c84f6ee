"""How one example's gradient is clipped: norms, factors, and the sensitivity they give.

The clip norm is a number, or a tree of numbers that is a prefix of the parameter tree:
each number then bounds the subtree it stands for (per-layer clipping), and the whole
gradient is bounded by sqrt(sum C_l^2). "flat" clipping leaves short gradients alone;
"automatic" clipping gives every gradient the length C norm / (norm + gamma) < C, so that C
only scales the learning rate (AUTO-S of Bu et al. 2022, arXiv:2206.07136; the same as
DP-NSGD of Yang et al. 2022, arXiv:2206.13033).

| case                         | flat                               | automatic             |
| ---------------------------- | ---------------------------------- | --------------------- |
| norm <= C                    | g                                  | g * C / (norm + gamma)|
| norm > C                     | g * C / norm, computed in float32+ | g * C / (norm + gamma)|
| norm = 0                     | 0                                  | 0                     |
| any entry NaN or infinite    | 0 (the example is dropped)         | 0 (dropped)           |
| mask False (padding)         | 0                                  | 0                     |
| squares outside float32      | norm from scaled numbers: as above | as above              |
| norm * C beyond float32      | 0                                  | 0                     |
| C = inf                      | g; the sensitivity is inf          | UserError             |
| C <= 0, NaN, or not in       | UserError                          | UserError             |
| [1e-25, 1e30]                |                                    |                       |
| C = 0 for one group of many  | 0: the group is frozen             | 0: frozen             |
| gradient complex or integer  | UserError                          | UserError             |

While they are summed, terms are kept away from the ends of the range of floats: what makes
them longer (C / gamma, 1 / C for unit norms), or very short (C < 1e-6), is a number that the
finished sum is multiplied by.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import trees, validate
from dpjax.gradients.arguments import check_real, checked_mask
from dpjax.gradients.settling import on_settled
from dpjax.types import ClippedSum, NeighboringRelation

CLIPPINGS = ("flat", "automatic")
# Within these a bound, and every term as long as it, are normal numbers of float32.
_MIN_NORM, _MAX_NORM = 1e-25, 1e30
_LEAST_TERM = 1e-6
# The quotient limit keeps every factor finite.
_MIN_GAMMA, _MAX_QUOTIENT = 1e-8, 1e30
# Of the clip norm (of gamma): errors of a norm below this do not show in its factor.
_NEGLIGIBLE = 1e-7


def check_clip_norm(
  l2_clip_norm: Any, rescale_to_unit_norm: bool, gamma: float | None = None
) -> None:
  """Raises unless every clip norm is a number in [1e-25, 1e30], or inf (but not where units
  are rescaled or clipping is automatic). In a tree some may be 0: their group is frozen."""
  bounded = rescale_to_unit_norm or gamma is not None
  check = validate.positive if bounded else validate.positive_or_inf
  leaves = jax.tree.leaves(l2_clip_norm)
  active = [leaf for leaf in leaves if not _is_zero(leaf)]
  if not active or jax.tree.structure(l2_clip_norm).num_nodes == 1:
    check(l2_clip_norm=l2_clip_norm)
  for leaf in active:
    check(l2_clip_norm=leaf)
    if not (_MIN_NORM <= leaf <= _MAX_NORM or math.isinf(leaf)):
      raise validate.UserError(
        f"l2_clip_norm={leaf!r}: must be in [{_MIN_NORM:g}, {_MAX_NORM:g}], the range in "
        "which float32 can bound a gradient"
      )
  if gamma is not None:
    _check_gamma(gamma, max(active))


def _is_zero(leaf: Any) -> bool:
  return isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and leaf == 0


def _check_gamma(gamma: float, largest: float) -> None:
  validate.positive(gamma=gamma)
  least = max(_MIN_GAMMA, largest / _MAX_QUOTIENT)
  if gamma < least:
    raise validate.UserError(f"gamma={gamma!r}: must be >= {least:g}")
  if gamma > _MAX_NORM:
    raise validate.UserError(f"gamma={gamma!r}: must be <= {_MAX_NORM:g}")


def l2_bound(l2_clip_norm: Any, *, rescale_to_unit_norm: bool = False) -> float:
  """The largest l2 norm that one example's clipped gradient can have.

  >>> l2_bound({"dense": 3.0, "head": 4.0})
  5.0
  >>> l2_bound({"dense": 3.0, "head": 4.0}, rescale_to_unit_norm=True) == math.sqrt(2)
  True
  """
  return math.hypot(*group_bounds(l2_clip_norm, rescale_to_unit_norm=rescale_to_unit_norm))


def group_bounds(
  l2_clip_norm: Any, *, rescale_to_unit_norm: bool = False
) -> tuple[float, ...]:
  """The largest l2 norm of each group of one example's clipped gradient.

  >>> group_bounds({"dense": 3.0, "head": 0.0}, rescale_to_unit_norm=True)
  (1.0, 0.0)
  """
  bounds = tuple(float(c) for c in jax.tree.leaves(l2_clip_norm))
  return tuple(float(c > 0) for c in bounds) if rescale_to_unit_norm else bounds


def sensitivity(bound: float, relation: NeighboringRelation | str) -> float:
  """L2 sensitivity of a sum whose terms have norm <= bound.

  >>> sensitivity(1.5, "add_or_remove_one"), sensitivity(1.5, "replace_one")
  (1.5, 3.0)
  """
  validate.one_of(NeighboringRelation, neighboring_relation=str(relation))
  exchanged = NeighboringRelation(relation) is NeighboringRelation.REPLACE_ONE
  return 2 * bound if exchanged else bound


def check_prefix(l2_clip_norm: Any, params: Any) -> None:
  """Raises unless the tree of bounds is a prefix of the parameters, which hold arrays."""
  if not jax.tree.leaves(params):
    raise validate.UserError("params: must hold at least one array")
  try:
    jax.tree.map(lambda _, group: None, l2_clip_norm, params)
  except ValueError:
    raise validate.UserError(
      "l2_clip_norm: must be a number, or a prefix of the parameter tree"
    ) from None


def _top(clip_norm: float, gamma: float | None) -> float:
  """A factor is this / norm, or this / (norm + gamma)."""
  return clip_norm if gamma is None else min(clip_norm, gamma)


def _lift(top: float) -> float:
  """A power of two that takes tiny terms away from the smallest floats while they are
  summed: there c_i g_i would round to 0 in part, and what is left could be longer."""
  return (
    2.0 ** max(0, math.ceil(math.log2(_LEAST_TERM / top))) if top < _LEAST_TERM else 1.0
  )


def _factor(longest, keep, clip_norm, gamma):
  if clip_norm == 0:  # frozen
    return jnp.zeros_like(longest)
  top = _top(clip_norm, gamma)
  lift = _lift(top)
  if gamma is None:
    shrink = jnp.minimum(lift, top * lift / longest)  # 0 -> inf -> lift; never NaN
  else:
    shrink = top * lift / (longest + gamma)
  return jnp.where(keep, shrink, 0.0)


def _after_sum(clip_norm: float, unit: bool, gamma: float | None) -> float:
  if clip_norm == 0:
    return 1.0
  top = _top(clip_norm, gamma)
  length = 1.0 if gamma is None else clip_norm / top
  return length / _lift(top) / (clip_norm if unit else 1.0)


def rescaled(
  total: Any, l2_clip_norm: Any, *, rescale_to_unit_norm: bool, gamma: float | None
) -> Any:
  """The sum, times what `clip_factors` has left out of the factors."""

  def times(clip_norm, group):
    left = _after_sum(clip_norm, rescale_to_unit_norm, gamma)
    return group if left == 1 else trees.scale(group, left)

  return jax.tree.map(times, l2_clip_norm, total)


def clip_factors(
  group_norms: Any,
  l2_clip_norm: Any,
  mask: jax.Array,
  *,
  longest: Any = None,
  gamma: float | None = None,
) -> tuple[Any, jax.Array]:
  """Factor by which each example's gradient is multiplied, group by group.

  Args:
    group_norms: tree of [B] norms, one per clip norm.
    l2_clip_norm: tree of numbers with the same structure.
    mask: [B] bool; False means padding.
    longest: what each norm may be at most, where it may have lost something to underflow;
      the factors are for these. None: the norms are exact.
    gamma: None for flat clipping; a number > 0 makes clipping automatic.

  Returns:
    (tree of [B] factors, total norms [B]). Factors of padding and of examples with a
    non-finite norm in any group are exactly 0. The sum is to be `rescaled`.

  >>> clip_factors(jnp.array([2.0, 0.5, jnp.nan]), 1.0, jnp.array([True, True, True]))[0]
  Array([0.5, 1. , 0. ], dtype=float32)
  """
  longest = group_norms if longest is None else longest
  norms = trees.root_sum_squares(jax.tree.leaves(group_norms))
  finite = [jnp.isfinite(norm) for norm in jax.tree.leaves(longest)]
  keep = jnp.all(jnp.stack([mask, *finite]), axis=0)
  factors = jax.tree.map(lambda c, n: _factor(n, keep, c, gamma), l2_clip_norm, longest)
  return factors, norms


def clip_and_sum(
  grads: Any,
  losses: jax.Array,
  mask: jax.Array,
  l2_clip_norm: Any,
  *,
  rescale_to_unit_norm: bool = False,
  gamma: float | None = None,
) -> ClippedSum:
  """Clips stacked per-example gradients and sums them.

  Args:
    grads: params-shaped tree with leaves [B, *param], real floating point.
    losses: [B], passed through.
    mask: [B] bool, or True: every row is an example.
    l2_clip_norm: number, or prefix tree of numbers.
    rescale_to_unit_norm: see `l2_bound`.
    gamma: None for flat clipping; a number > 0 makes clipping automatic.

  Guarantee: changing, adding or removing one example moves `total` by at most
  `l2_bound` (add/remove) or twice that (replace), for any input, NaN included.

  >>> g = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5], [jnp.nan, 0.0]])}
  >>> clip_and_sum(g, jnp.zeros(3), True, 1.0).total["w"]
  Array([0.6, 1.3], dtype=float32)
  """
  mask = _checked(grads, mask, l2_clip_norm)

  def clip(grads):
    total, norms = _clipped(grads, mask, l2_clip_norm, gamma)
    unit = rescale_to_unit_norm
    total = rescaled(total, l2_clip_norm, rescale_to_unit_norm=unit, gamma=gamma)
    return total, norms

  total, norms = on_settled(clip, grads)
  bounds = group_bounds(l2_clip_norm, rescale_to_unit_norm=rescale_to_unit_norm)
  return ClippedSum(total, norms, losses, math.hypot(*bounds), bounds, mask)


def _clipped(grads, mask, l2_clip_norm, gamma):
  group_norms = jax.tree.map(
    lambda c, sub: _norms(sub, mask.shape, (c or 1.0) if gamma is None else gamma),
    l2_clip_norm,
    grads,
  )
  factors, norms = clip_factors(group_norms, l2_clip_norm, mask, gamma=gamma)
  all_finite = jnp.all(jnp.isfinite(norms))
  total = jax.tree.map(
    lambda factor, sub: trees.weighted_sum(sub, factor, all_finite), factors, grads
  )
  return total, norms


def _norms(group: Any, shape: tuple[int, ...], unit: float) -> jax.Array:
  """Exact where it can show in the factor; a group without arrays has norm 0."""
  norms = trees.per_example_norms(group, exact_above=unit * _NEGLIGIBLE)
  return jnp.broadcast_to(norms, shape)


def _checked(grads: Any, mask: Any, l2_clip_norm: Any) -> jax.Array:
  check_prefix(l2_clip_norm, grads)
  check_real(grads=grads)
  sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(grads)}
  if len(sizes) != 1 or () in sizes:
    raise validate.UserError(
      f"grads: must be stacked per example, [B, *param], found {sorted(map(str, sizes))}"
    )
  return checked_mask(mask, sizes.pop()[0])

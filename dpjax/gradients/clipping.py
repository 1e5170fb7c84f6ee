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
| C = inf                      | g; the sensitivity is inf          | UserError             |
| C <= 0 or NaN                | UserError                          | UserError             |
| C = 0 for one group of many  | 0: the group is frozen             | 0: frozen             |
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import trees, validate
from dpjax.types import ClippedSum, NeighboringRelation

CLIPPINGS = ("flat", "automatic")
# Below this a norm that underflows in float32 could exceed its bound; the quotient limit
# keeps every factor finite.
_MIN_GAMMA, _MAX_QUOTIENT = 1e-8, 1e30
# The square of a float32 entry below 1e-19 is 0: even a billion of them, none of which a
# norm would count, are far below this.
_LEAST = 1e-12


def check_clip_norm(
  l2_clip_norm: Any, rescale_to_unit_norm: bool, gamma: float | None = None
) -> None:
  """Raises unless every clip norm is a number >= 1e-12 (finite where units are rescaled, or
  clipping is automatic). In a tree some may be 0, which freezes their group."""
  bounded = rescale_to_unit_norm or gamma is not None
  check = validate.positive if bounded else validate.positive_or_inf
  leaves = jax.tree.leaves(l2_clip_norm)
  active = [leaf for leaf in leaves if not _is_zero(leaf)]
  if not active or jax.tree.structure(l2_clip_norm).num_nodes == 1:
    check(l2_clip_norm=l2_clip_norm)
  for leaf in active:
    check(l2_clip_norm=leaf)
    if leaf < _LEAST:
      raise validate.UserError(
        f"l2_clip_norm={leaf!r}: must be >= {_LEAST:g}; norms as small underflow in float32"
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


def _root_sum_squares(norms: list[jax.Array]) -> jax.Array:
  return norms[0] if len(norms) == 1 else trees.per_example_norms(norms)


def _factor(norm, keep, clip_norm, unit, gamma):
  if clip_norm == 0:  # frozen
    return jnp.zeros_like(norm)
  flat = jnp.minimum(1.0, clip_norm / norm)  # norm 0 -> inf -> 1; never NaN as C > 0
  shrink = flat if gamma is None else clip_norm / (norm + gamma)
  return jnp.where(keep, shrink / clip_norm if unit else shrink, 0.0)


def clip_factors(
  group_norms: Any,
  l2_clip_norm: Any,
  mask: jax.Array,
  *,
  rescale_to_unit_norm: bool = False,
  gamma: float | None = None,
) -> tuple[Any, jax.Array]:
  """Factor by which each example's gradient is multiplied, group by group.

  Args:
    group_norms: tree of [B] norms, one per clip norm.
    l2_clip_norm: tree of numbers with the same structure.
    mask: [B] bool; False means padding.
    rescale_to_unit_norm: divide each group by its clip norm as well.
    gamma: None for flat clipping; a number > 0 makes clipping automatic.

  Returns:
    (tree of [B] factors, total norms [B]). Factors of padding and of examples with a
    non-finite norm in any group are exactly 0.

  >>> clip_factors(jnp.array([2.0, 0.5, jnp.nan]), 1.0, jnp.array([True, True, True]))[0]
  Array([0.5, 1. , 0. ], dtype=float32)
  """
  norms = _root_sum_squares(jax.tree.leaves(group_norms))
  finite = [jnp.isfinite(norm) for norm in jax.tree.leaves(group_norms)]
  keep = jnp.all(jnp.stack([mask, *finite]), axis=0)
  factors = jax.tree.map(
    lambda c, norm: _factor(norm, keep, c, rescale_to_unit_norm, gamma),
    l2_clip_norm,
    group_norms,
  )
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
    grads: params-shaped tree with leaves [B, *param].
    losses: [B], passed through.
    mask: [B] bool.
    l2_clip_norm: number, or prefix tree of numbers.
    rescale_to_unit_norm: see `l2_bound`.
    gamma: None for flat clipping; a number > 0 makes clipping automatic.

  Guarantee: changing, adding or removing one example moves `total` by at most
  `l2_bound` (add/remove) or twice that (replace), for any input, NaN included.

  >>> g = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5], [jnp.nan, 0.0]])}
  >>> clip_and_sum(g, jnp.zeros(3), jnp.ones(3, bool), 1.0).total["w"]
  Array([0.6, 1.3], dtype=float32)
  """
  group_norms = jax.tree.map(
    lambda _, sub: trees.per_example_norms(sub), l2_clip_norm, grads
  )
  factors, norms = clip_factors(
    group_norms,
    l2_clip_norm,
    mask,
    rescale_to_unit_norm=rescale_to_unit_norm,
    gamma=gamma,
  )
  all_finite = jnp.all(jnp.isfinite(norms))
  total = jax.tree.map(
    lambda factor, sub: trees.weighted_sum(sub, factor, all_finite), factors, grads
  )
  bounds = group_bounds(l2_clip_norm, rescale_to_unit_norm=rescale_to_unit_norm)
  return ClippedSum(total, norms, losses, math.hypot(*bounds), bounds)

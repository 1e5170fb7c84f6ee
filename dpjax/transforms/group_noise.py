"""Noise that differs by group of parameters, at the cost of one Gaussian mechanism.

The gradient x_g of group g, clipped to C_g, gets noise of standard deviation s_g. The mechanism is
the Gaussian one on the vector of all x_g / s_g. Its norm is at most sqrt(sum C_g^2 / s_g^2) for one
example, so its noise multiplier z satisfies z^-2 = sum_g (C_g / s_g)^2 exactly. A group's share r_g
of the budget 1 / z^2 gives s_g = z C_g / sqrt(r_g), sum r_g = 1. So the accountant has one z for
all shares. Without shares every group gets s_g = z sqrt(sum C_g^2).

With and without shares there is one draw of noise of standard deviation z C, C = sqrt(sum C_g^2).
The groups are multiplied by w_g before the noise is added, and divided by w_g after it. With shares
w_g = sqrt(r_g) C / C_g, else w_g = 1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dpjax import gradients, trees, validate
from dpjax.noise import source
from dpjax.types import ClipLike, ClippedSum, NumberTree, Updates
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class PerLayer:
  """Clips each layer flat to its share of one bound. `make` returns the `Clip` of a model.

  Args:
    allocation: "uniform" or "by_size", see `gradients.allocate_clip_norms`.
    noise: "shared" for one standard deviation; "uniform" for equal shares of the privacy budget.

  >>> clip = PerLayer().make(5.0, {"a": {"w": jnp.ones(2)}, "b": {"w": jnp.ones(3)}})
  >>> round(clip.norms["a"], 3), PerLayer(noise="uniform").shares(clip)
  (3.536, {'a': 1.0, 'b': 1.0})
  """

  adapts: ClassVar[bool] = False

  allocation: str = "uniform"
  noise: str = "shared"

  def __post_init__(self):
    validate.one_of(("uniform", "by_size"), allocation=self.allocation)
    validate.one_of(("shared", "uniform"), noise=self.noise)

  def make(
    self, l2_clip_norm: float, params: Any, schedule: tuple[float, ...] = ()
  ) -> gradients.Clip:
    """Returns the clip of a model with these parameters."""
    bounds = gradients.allocate_clip_norms(params, l2_clip_norm, rule=self.allocation)
    return gradients.Clip(bounds, schedule=schedule)

  def shares(self, clip: gradients.Clip) -> Any:
    """Returns equal shares of the privacy budget, 1.0 for each layer; None for shared noise."""
    return None if self.noise == "shared" else jax.tree.map(lambda _: 1.0, clip.norms)


def group_weights(clip: gradients.Clip, noise_shares: NumberTree = None) -> NumberTree:
  """Returns the weight w_g of each group: 0 for a frozen group (C_g = 0).

  For other groups w_g is 1 if no shares are given, and sqrt(r_g) C / C_g if they are. C is the
  bound on the whole gradient. The r_g are shares, scaled to sum 1 over groups that are not frozen.

  Raises:
    UserError: shares that are not a tree of numbers >= 0 like the clip's; for a group that is not
      frozen, a share of 0 or an infinite bound.

  >>> clip = gradients.Clip({"a": 3.0, "b": 4.0})
  >>> group_weights(clip, {"a": 1, "b": 1})["a"] == math.sqrt(0.5) * 5 / 3
  True
  """
  if noise_shares is None:
    return jax.tree.map(lambda c: float(c > 0), clip.norms)
  if jax.tree.structure(noise_shares) != jax.tree.structure(clip.norms):
    raise UserError("must be a tree of numbers like l2_clip_norm", field="noise_shares")
  for share in jax.tree.leaves(noise_shares):
    validate.non_negative(noise_shares=share)
  shares = jax.tree.map(lambda r, c: float(r) if c else 0.0, noise_shares, clip.norms)
  bound = clip.l2_bound
  total = math.fsum(jax.tree.leaves(shares))

  def weight(share, clip_norm):
    if clip_norm and not (share and math.isfinite(clip_norm)):
      raise UserError(
        f"must be > 0 for a group clipped to {clip_norm}", field="noise_shares", value=share
      )
    # With these weights sum_g (w_g C_g)^2 equals the square of the whole bound.
    return math.sqrt(share / total) * bound / clip_norm if clip_norm else 0.0

  return jax.tree.map(weight, shares, clip.norms)


def check_groups(updates: ClippedSum, l2_clip_norm: ClipLike) -> None:
  """Raises UserError unless the sum was clipped group by group to at most these bounds."""
  allowed = gradients.Clip.of(l2_clip_norm).group_bounds()
  seen = updates.group_bounds
  # The factor allows for rounding of the bounds. NaN is within no bound.
  within = (0 <= s <= a * (1 + 1e-12) for s, a in zip(seen, allowed))
  if len(seen) != len(allowed) or not all(within):
    raise UserError(
      f"the ClippedSum has group bounds {seen}, the noise is for {allowed}",
      field="noise_shares",
    )


def weigh(tree: Updates, weights: NumberTree) -> Updates:
  """Multiplies each group by its weight; a frozen group becomes exactly 0."""
  return _per_group(lambda leaf, w: leaf * w if w else jnp.zeros_like(leaf), tree, weights)


def unweigh(tree: Updates, weights: NumberTree) -> Updates:
  """Divides each group by its weight; a frozen group is exactly 0, without noise."""
  return _per_group(lambda leaf, w: leaf / w if w else jnp.zeros_like(leaf), tree, weights)


def _per_group(fn: Any, tree: Any, weights: Any) -> Any:
  return jax.tree.map(
    lambda w, group: jax.tree.map(lambda x: fn(x, w), group), weights, tree
  )


def noise_std(clip: gradients.Clip, noise_multiplier: float) -> float:
  """Returns the standard deviation of the noise on the weighted sum; 0 without noise.

  Raises:
    UserError: an infinite clip norm, or a product that overflows or vanishes.

  >>> noise_std(gradients.Clip(2.0), 1.5)
  3.0
  """
  if not noise_multiplier:
    return 0.0
  bound = clip.l2_bound
  if not math.isfinite(bound):
    raise UserError(
      "must be finite where noise_multiplier > 0, for no noise covers what is not bounded",
      field="l2_clip_norm",
      value=bound,
    )
  # The product is the noise that is drawn, so it must not round to 0 or infinity.
  std = float(noise_multiplier) * bound
  if not 0 < std < math.inf:
    raise UserError(
      f"times l2_clip_norm={bound!r} must be a finite number > 0, not {std!r}",
      field="noise_multiplier",
      value=noise_multiplier,
    )
  return std


def check_drawn(std: float, params: Any) -> None:
  """Raises UserError if noise of this size leaves the range of the gradients' floats."""
  for leaf in jax.tree.leaves(params):
    # Placeholders of Optax have no type.
    if std and hasattr(leaf, "dtype"):
      source.check_scale(
        std, trees.wide_dtype(leaf.dtype), "noise_multiplier * l2_clip_norm"
      )


def group_stds(
  l2_clip_norm: ClipLike, noise_multiplier: float, noise_shares: NumberTree = None
) -> NumberTree:
  """Returns the standard deviation of the noise on the sum, group by group; 0 for frozen groups.

  >>> group_stds({"a": 3.0, "b": 4.0}, 2.0)
  {'a': 10.0, 'b': 10.0}
  >>> group_stds({"a": 3.0, "b": 4.0}, 2.0, {"a": 9, "b": 16})
  {'a': 10.0, 'b': 10.0}
  """
  clip = gradients.Clip.of(l2_clip_norm)
  std = noise_std(clip, noise_multiplier)
  weights = group_weights(clip, noise_shares)
  return jax.tree.map(lambda w: std / w if w else 0.0, weights)

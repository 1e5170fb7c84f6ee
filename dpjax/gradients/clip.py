"""The definition of clipping, as ONE value for gradients, transforms and plan.

A rule determines how much a gradient of some length is shortened. `RULES` lists the known rules;
a new rule is a class and a row of `RULES`. The clip norm may change between steps, at the privacy
cost of a constant norm (`transforms/clip_scale.py`). It may follow a public schedule. With a rule
that `adapts`, it follows earlier releases of the mechanism (`transforms/adaptive_clipping.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dpjax import validate
from dpjax.accounting.proved import NeighboringRelation
from dpjax.types import Array, ClipLike, NumberTree, Params
from dpjax.validate import UserError

# Within these limits float32 holds a bound, and the length of a clipped term, as normal numbers.
MIN_NORM = 1e-25
MAX_NORM = 1e30
# Smallest gamma of `Automatic`, and largest C / gamma. The finished sum is multiplied by C / gamma,
# which must be finite in float32.
_MIN_GAMMA = 1e-8
_MAX_QUOTIENT = 1e30


class ClipRule:
  """Shortens a gradient of length n to at most C. Subclasses are frozen dataclasses.

  A subclass must satisfy n * factors(n, top(C), 1) <= top(C) <= C and 0 <= factors <= 1, for
  every n >= 0. Larger factors are cut, and NaN counts as 0 (`clipping.clip_factors`).
  """

  # True if C depends on releases of the mechanism.
  adapts: ClassVar[bool] = False
  # True if C = inf is allowed, which means no clipping.
  may_be_unbounded: ClassVar[bool] = False

  def make(
    self, l2_clip_norm: float, params: Any, schedule: tuple[float, ...] = ()
  ) -> Clip:
    """Returns the clip of a model with these parameters, from their shapes alone."""
    return Clip(l2_clip_norm, self, schedule)

  def check(self, largest: float) -> None:
    """Raises UserError unless the rule's numbers allow clip norms up to `largest`."""

  def top(self, bound: float) -> float:
    """Returns the bound on each term while the terms are summed.

    It is smaller than `bound` if factors could otherwise exceed 1. The finished sum is multiplied
    by bound / top(bound)."""
    return bound

  def visible(self, bound: float) -> float:
    """Returns a length L such that an error of 1e-7 L in a gradient's length changes no factor.

    A length is computed again, without underflow, if its error may be larger.
    """
    return bound or 1.0

  def factors(self, lengths: Array, top: float, most: float) -> Array:
    """Returns the factor of each gradient, times `most`, [B].

    Args:
      lengths: [B], l2 norms of the gradients; 0, infinity and NaN occur.
      top: `self.top(C)` times `most`.
      most: a power of two, which lifts tiny factors so that they keep their digits.

    A rule that is a quotient returns `top / denominator(lengths)`. Any other rule computes its
    factors with `self.top(C) = top / most`, and multiplies them by `most`.
    """
    raise UserError(
      "must be defined by a clipping rule", field=f"{type(self).__name__}.factors"
    )


@dataclasses.dataclass(frozen=True)
class Flat(ClipRule):
  """Flat clipping by min(1, C / norm): short gradients stay unchanged (Abadi et al. 2016)."""

  may_be_unbounded: ClassVar[bool] = True

  def factors(self, lengths: Array, top: float, most: float) -> Array:
    # A length of 0 gives inf, which becomes `most`. Only lengths that are not finite can give NaN.
    return jnp.minimum(most, top / lengths)  # [B]


@dataclasses.dataclass(frozen=True)
class Automatic(ClipRule):
  """Automatic clipping by C / (norm + gamma): all lengths become C norm / (norm + gamma) < C.

  So C only scales the learning rate. This is AUTO-S (Bu et al. 2022, arXiv:2206.07136), which is
  the same as DP-NSGD (Yang et al. 2022, arXiv:2206.13033).

  Args:
    gamma: smoothing constant, in units of the gradient norm.
  """

  gamma: float = 0.01

  def check(self, largest: float) -> None:
    validate.positive(gamma=self.gamma)
    # The finished sum is multiplied by C / gamma, which must be a float32 number.
    least = max(_MIN_GAMMA, largest / _MAX_QUOTIENT)
    if self.gamma < least:
      raise UserError(f"must be >= {least:g}", field="gamma", value=self.gamma)
    if self.gamma > MAX_NORM:
      raise UserError(f"must be <= {MAX_NORM:g}", field="gamma", value=self.gamma)

  def top(self, bound: float) -> float:
    # With top <= gamma the factor top / (n + gamma) is at most 1, as every rule requires.
    return min(bound, self.gamma)

  def visible(self, bound: float) -> float:
    return self.gamma

  def factors(self, lengths: Array, top: float, most: float) -> Array:
    return top / (lengths + self.gamma)  # [B]


# Rules that a `Clip` or a config may name. `transforms.every_clip_rule` adds those whose clip norm
# follows a noisy query.
RULES: dict[str, type[ClipRule]] = {"flat": Flat, "automatic": Automatic}


@dataclasses.dataclass(frozen=True)
class Clip:
  """Bounds on one example's gradient. A number, or a tree, is short for the flat clip.

  Args:
    norms: a number C in [1e-25, 1e30], or a tree of numbers that is a prefix of the parameter
      tree. Each number bounds its subtree, and the whole gradient is bounded by sqrt(sum C_l^2).
      A group of bound 0 is frozen. inf means no clipping, if the rule allows it.
    rule: a clipping rule, or its name in `RULES`.
    schedule: public factors of the norms, one for each step; they cost no privacy.

  >>> Clip({"dense": 3.0, "head": 4.0}).l2_bound
  5.0
  >>> Clip(1.5).sensitivity("replace_one"), Clip(1.0, "automatic").rule
  (3.0, Automatic(gamma=0.01))
  """

  norms: NumberTree
  rule: Any = Flat()  # ClipRule | str
  schedule: tuple[float, ...] = ()

  def __post_init__(self):
    if isinstance(self.rule, str):
      validate.one_of(RULES, rule=self.rule)
      object.__setattr__(self, "rule", RULES[self.rule]())
    if not isinstance(self.rule, ClipRule):
      raise UserError(
        f"must be a ClipRule, or one of {', '.join(RULES)}",
        field="rule",
        value=self.rule,
      )
    object.__setattr__(self, "schedule", validate.several(schedule=self.schedule))
    validate.factors(schedule=self.schedule)
    # A dict of the caller's may change later, and the noise of a transform would not follow.
    object.__setattr__(self, "norms", jax.tree.map(lambda norm: norm, self.norms))
    unbounded = self.rule.may_be_unbounded
    self._check_norms("norms", validate.positive_or_inf if unbounded else validate.positive)

  @classmethod
  def of(cls, clip: ClipLike, rule: ClipRule = Flat()) -> Clip:
    """Returns the given clip; for a number or a tree, `l2_clip_norm`, the clip by `rule`."""
    if isinstance(clip, Clip):
      return clip
    try:
      return cls(clip, rule)
    except UserError as error:
      # The caller wrote no `norms`.
      raise error.of(field=error.field.replace("norms", "l2_clip_norm", 1)) from None

  def _check_norms(self, name: str, check: Any) -> None:
    # A bound of 0 freezes its group. As the only bound it would freeze the model, so it is
    # refused. False equals 0 but is no number, so the check below refuses it.
    active = []
    for leaf in jax.tree.leaves(self.norms):
      is_number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
      if not (is_number and leaf == 0):
        active.append(leaf)
    if not active or jax.tree.structure(self.norms).num_nodes == 1:
      check(**{name: self.norms})
    for leaf in active:
      check(**{name: leaf})
      if not math.isinf(leaf):
        check_norm(**{name: leaf})
    self.rule.check(max(active))
    for leaf in active:
      top_of(self.rule, float(leaf))

  def check_steps(self, num_steps: int) -> None:
    """Raises UserError unless the schedule is empty or has a factor for each step."""
    if self.schedule and len(self.schedule) < num_steps:
      raise UserError(
        f"has {len(self.schedule)} factors, must have one for each of num_steps={num_steps}",
        field="clip_schedule",
      )

  def check_finite(self) -> None:
    """Raises UserError unless every bound is finite."""
    self._check_norms("l2_clip_norm", validate.positive)

  @property
  def is_one_number(self) -> bool:
    """Returns whether one bound holds for the whole gradient, not one for each group."""
    return isinstance(self.norms, (int, float))

  @property
  def l2_bound(self) -> float:
    """Returns the largest l2 norm that one example's clipped gradient can have."""
    # Groups hold different coordinates, so their bounds add up as a root of squares
    # (pitfall P10).
    return math.hypot(*jax.tree.leaves(self.norms))

  def group_bounds(self, *, rescale_to_unit_norm: bool = False) -> tuple[float, ...]:
    """Returns the largest l2 norm of each group of one example's clipped gradient.

    >>> Clip({"dense": 3.0, "head": 0.0}).group_bounds(rescale_to_unit_norm=True)
    (1.0, 0.0)
    """
    bounds = tuple(map(float, jax.tree.leaves(self.norms)))
    return tuple(float(c > 0) for c in bounds) if rescale_to_unit_norm else bounds

  def shortens(self, *, rescale_to_unit_norm: bool = False) -> bool:
    """Returns whether no clipped gradient is longer than the gradient was.

    >>> Clip(1.0).shortens(), Clip(1.0, "automatic").shortens()
    (True, False)
    """
    # A rule with a top of its own has its finished sum multiplied by bound / top.
    kind = type(self.rule)
    flat = kind.factors is Flat.factors and kind.top is Flat.top
    return flat and not rescale_to_unit_norm

  def sensitivity(self, relation: NeighboringRelation | str) -> float:
    """Returns the l2 sensitivity of the sum of clipped gradients under this relation."""
    return sensitivity(self.l2_bound, relation)

  def check_prefix(self, params: Params) -> None:
    """Raises UserError unless the norms are a prefix tree of `params`, which must hold an array."""
    if not jax.tree.leaves(params):
      raise UserError("must hold at least one array", field="params")
    try:
      jax.tree.structure(self.norms).flatten_up_to(params)
    except ValueError:
      raise UserError(
        "must be a number, or a prefix of the parameter tree", field="l2_clip_norm"
      ) from None


@functools.cache
def top_of(rule: ClipRule, bound: float) -> float:
  """Returns `rule.top(bound)`, computed once, since factors and the finished sum must use one
  value."""
  top = rule.top(bound)
  validate.positive_or_inf(**{f"{type(rule).__name__}.top({bound})": top})
  return top


def check_norm(**named: float) -> None:
  """Raises UserError unless each value is in [1e-25, 1e30], where float32 can bound a gradient.

  >>> check_norm(l2_clip_norm=1e-30)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: l2_clip_norm=1e-30: must be in [1e-25, 1e+30], the range in ...
  """
  for name, value in named.items():
    if not MIN_NORM <= value <= MAX_NORM:
      raise UserError(
        f"must be in [{MIN_NORM:g}, {MAX_NORM:g}], the range in which float32 can bound "
        "a gradient",
        field=name,
        value=value,
      )


def sensitivity(bound: float, relation: NeighboringRelation | str) -> float:
  """Returns the l2 sensitivity of a sum whose terms have norm <= bound.

  >>> sensitivity(1.5, "add_or_remove_one"), sensitivity(1.5, "replace_one")
  (1.5, 3.0)
  """
  validate.one_of(NeighboringRelation, neighboring_relation=relation)
  # Under replace_one an old term leaves the sum and a new one enters: each moves it by <= `bound`.
  exchanged = NeighboringRelation(relation) is NeighboringRelation.REPLACE_ONE
  return 2 * bound if exchanged else bound

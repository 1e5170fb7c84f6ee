"""Clip norms for groups of parameters that share one bound on the whole gradient.

The noise of the sum is the same in every coordinate. So a group with a smaller bound has a weaker
signal under the same noise. A group with bound 0 is frozen. Choices by size, by name or by a score
from public data cost no privacy. A score that is computed from the private data is a release like
any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from dpjax import trees, validate
from dpjax.types import ArrayTree, Params
from dpjax.validate import UserError

RULES = ("uniform", "by_size", "by_score")
ORIGINS = ("public", "released")


def layers(params: Params) -> Any:
  """Returns the size of each layer; a mapping that holds only arrays is one layer.

  >>> import numpy as np
  >>> layers({"dense": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}, "scale": np.ones(4)})
  {'dense': 9, 'scale': 4}
  """
  if isinstance(params, Mapping) and any(isinstance(v, Mapping) for v in params.values()):
    return {name: layers(value) for name, value in params.items()}
  return trees.size(params)


def _root_sum_square_at_most(shares: Any, bound: float) -> Any:
  """Returns shares times a factor, so that the root of the sum of squares is at most `bound`."""
  length = lambda shares: math.hypot(*jax.tree.leaves(shares))
  factor = bound / length(shares)
  # Rounding may leave the length just above the bound, and then the sensitivity, too.
  while length(trees.scale(shares, factor)) > bound:
    factor = math.nextafter(factor, 0.0)
  bounds = trees.scale(shares, factor)
  for share, leaf_bound in zip(jax.tree.leaves(shares), jax.tree.leaves(bounds)):
    if share and not leaf_bound:
      raise UserError(
        "vanishes beside the others, which would freeze its group; give it 0 to mean that",
        field="scores",
        value=share,
      )
  return bounds


def allocate_clip_norms(
  params: Params,
  l2_clip_norm: float,
  *,
  rule: str = "uniform",
  scores: ArrayTree = None,
  scores_are: str = "",
) -> Any:
  """Splits one clip norm among the layers of a model.

  Args:
    params: parameters of the model; a mapping that holds only arrays is one layer.
    l2_clip_norm: bound C on the whole gradient, finite.
    rule: "uniform" gives each layer C / sqrt(number of layers). "by_size" gives C sqrt(d_l / d) to
      layer l, which has d_l of d coordinates. "by_score" gives C s_l / sqrt(sum s^2) to group l of
      score s_l.
    scores: prefix tree of `params`, for "by_score". It holds each group's share of the signal, a
      number >= 0; 0 freezes the group. See `shares_from_sensitivity`.
    scores_are: origin of the scores: "public" (computed without private data) or "released" (the
      output of a DP mechanism whose event is accounted in the same ledger). No other origin is
      allowed, such as the private data themselves.

  Returns:
    A prefix tree of clip norms for `l2_clip_norm=`.

  Guarantee: the root of the sum of the squared clip norms is <= C, also after rounding. So the
  sensitivity is that of flat clipping at C (pitfall P10).

  >>> import numpy as np
  >>> params = {"dense": {"w": np.ones((3, 3))}, "head": {"w": np.ones((4, 4))}}
  >>> allocate_clip_norms(params, 5.0, rule="by_size")
  {'dense': 3.0, 'head': 4.0}
  >>> allocate_clip_norms(
  ...   params, 1.0, rule="by_score", scores={"dense": 2, "head": 0}, scores_are="public")
  {'dense': 1.0, 'head': 0.0}
  """
  validate.positive(l2_clip_norm=l2_clip_norm)
  validate.one_of(RULES, rule=rule)
  if rule == "by_score":
    shares = _checked_scores(params, scores, scores_are)
  elif scores is not None:
    raise UserError("must be 'by_score' where scores are given", field="rule", value=rule)
  else:
    share = (lambda size: 1.0) if rule == "uniform" else math.sqrt
    shares = jax.tree.map(share, layers(params))
  return _root_sum_square_at_most(shares, float(l2_clip_norm))


def _checked_scores(params: Any, scores: Any, scores_are: str) -> Any:
  if scores_are not in ORIGINS:
    raise UserError(
      "must be 'public', or 'released' by a mechanism that is accounted; scores "
      "computed from the private data are themselves a release",
      field="scores_are",
      value=scores_are,
    )
  _check_numbers(scores)
  try:
    jax.tree.map(lambda _, group: None, scores, params)
  except ValueError:
    raise UserError("must be a prefix of the parameter tree", field="scores") from None
  return jax.tree.map(float, scores)


def _check_numbers(scores: Any) -> None:
  leaves = jax.tree.leaves(scores)
  for score in leaves:
    validate.non_negative(scores=score)
  if not any(leaves):
    raise UserError("at least one must be > 0", field="scores", value=scores)


def shares_from_sensitivity(scores: ArrayTree, *, freeze_below: float = 0.0) -> Any:
  """Returns each group's share of the signal from sensitivity scores; sensitive groups get less.

  A group with score s gets the share 1 / s. So under the common noise its signal-to-noise
  ratio is proportional to 1 / s. A group with s < `freeze_below`, or s = 0, is frozen
  (share 0). Give the result as `scores` to `allocate_clip_norms(rule="by_score")`.

  These scores are saliencies (how far the output moves with the input). They are NOT
  sensitivities of differential privacy and prove nothing: the bound comes from clipping.

  >>> shares_from_sensitivity({"dense": 4.0, "head": 2.0, "bias": 0.1}, freeze_below=0.5)
  {'bias': 0.0, 'dense': 0.25, 'head': 0.5}
  """
  _check_numbers(scores)
  validate.non_negative(freeze_below=freeze_below)
  shares = jax.tree.map(lambda s: 0.0 if s == 0 or s < freeze_below else 1.0 / s, scores)
  if not any(jax.tree.leaves(shares)):
    raise UserError("would freeze every group", field="freeze_below", value=freeze_below)
  return shares

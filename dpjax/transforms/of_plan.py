"""The link between a private transform and the plan that accounts for it.

A notebook is run cell by cell, so two plans may stand beside each other. A state that draws the
noise of one would be accounted by the other, and a batch that is larger than any draw of the plan
was not drawn by it.

| what is given                                     | what follows                        |
| ------------------------------------------------- | ----------------------------------- |
| the state of a plan with another noise, bound or  | `UserError`; NaN where it is traced |
| sampling probability, to `update` or `spent`      |                                     |
| the state of the same plan with other steps       | it goes on                          |
| more examples than the sampler ever draws         | `UserError`; NaN where it is traced, |
|                                                   | in the state's own numbers, too     |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from dpjax import gradients, trees
from dpjax.transforms import beside_noise
from dpjax.transforms.beside_noise import marked
from dpjax.types import ArrayTree, ClippedSum, PerExampleGrads
from dpjax.validate import UserError


def mark_of(facts: Mapping[str, Any]) -> int:
  """Returns 32 bits that depend on the releases and costs of a plan's steps, never 0.

  Numbers count to six digits, so that the last bits of another machine make no other plan.

  >>> mark_of({"noise_multiplier": 1.0}) == mark_of({"noise_multiplier": 1.0000001})
  True
  >>> mark_of({"noise_multiplier": 1.0}) == mark_of({"noise_multiplier": 1.1})
  False
  """
  # Converted to floats, so that NumPy's numbers are written like Python's.
  text = json.dumps(facts, default=lambda number: float(number))
  rounded = lambda digits: f"{float(digits):.6g}"
  known = json.loads(text, parse_float=rounded, parse_int=rounded, parse_constant=str)
  digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).digest()
  # A mark of 0 would leave a state unchanged.
  return int.from_bytes(digest[:4], "big") or 1


def _mask_of(updates: Any, mask: Any) -> Any:
  """Returns the mask [B] of the examples; None where it is not known here."""
  if isinstance(updates, ClippedSum):
    return updates.mask
  if not isinstance(updates, PerExampleGrads):
    return None
  known = [part for part in (updates.mask, mask) if part is not None]
  shape = getattr(updates.rows, "shape", ())
  if not known or len(shape) != 1:
    return None
  masks = [gradients.checked_mask(part, shape[0]) for part in known]
  return masks[0] if len(masks) == 1 else masks[0] & masks[1]


def _as_drawn(noisy: ArrayTree, mask: Any, padded_batch_size: int) -> Any:
  """Returns the update, NaN where there are more examples than any draw has; UserError
  where values are known."""
  # A sufficiently small batch needs no check of its mask.
  if mask is None or jnp.size(mask) <= padded_batch_size:
    return noisy
  count = jnp.sum(mask)

  def too_many() -> UserError:
    return UserError(
      f"{int(count)} examples in a step of a plan that draws at most {padded_batch_size}: "
      "its epsilon is not theirs; take batches from plan.batches, or plan for "
      "the larger ones",
      field="updates",
    )

  return trees.only_where(count <= padded_batch_size, noisy, too_many)


def of_plan(
  tx: optax.GradientTransformationExtraArgs, mark: int, padded_batch_size: int
) -> optax.GradientTransformationExtraArgs:
  """Returns the same private transform, for states and batches of one plan only.

  Args:
    tx: the transform, with the plan's numbers.
    mark: the plan's, by `mark_of`.
    padded_batch_size: rows that a draw of the plan has at most.
  """
  # The type of `tx` does not include ClippedSum.
  inner: Any = tx

  def init_fn(params: Any) -> Any:
    return marked(tx.init(params), mark)

  def update_fn(
    updates: Any, state: Any, params: Any = None, *, mask: Any = None, **extra_args: Any
  ) -> Any:
    # Removes the mark. The state of another plan keeps a wrong checksum, and is refused.
    inner_state = marked(state, mark)
    noisy, after = inner.update(updates, inner_state, params, mask=mask, **extra_args)
    real = _mask_of(updates, mask)
    noisy = _as_drawn(noisy, real, padded_batch_size)
    if real is not None and jnp.size(real) > padded_batch_size:
      # What the next step reads follows from the same sum, so it goes the same way.
      after = beside_noise.invalid_unless(jnp.sum(real) <= padded_batch_size, after)
    return noisy, marked(after, mark)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)

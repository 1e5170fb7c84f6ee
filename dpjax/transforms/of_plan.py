"""Binds a private transform to the plan that accounts for it.

In a notebook two plans may exist at once. Then the noise of one plan could be accounted for by
the other plan. A batch could also be larger than any draw of the plan's sampler. Both are refused,
as far as they can be seen:

| what is given                                     | what follows                        |
| ------------------------------------------------- | ----------------------------------- |
| the state of a plan with another noise, bound or  | `UserError`; NaN under jit          |
| sampling probability, to `update` or `spent`      |                                     |
| the state of the same plan with another number of | it is accepted, unless the sampler  |
| steps                                             | bounds participation                |
| more examples than the sampler ever draws         | `UserError`; NaN under jit,         |
|                                                   | also in the state's scale of noise  |
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
  """Returns a hash of 32 bits, never 0, of the facts that define the steps of a plan.

  Numbers are rounded to six digits, so that rounding on another machine does not change the hash.

  >>> mark_of({"noise_multiplier": 1.0}) == mark_of({"noise_multiplier": 1.0000001})
  True
  >>> mark_of({"noise_multiplier": 1.0}) == mark_of({"noise_multiplier": 1.1})
  False
  """
  # NumPy's numbers become floats, so that they are written like Python's.
  text = json.dumps(facts, default=lambda number: float(number))
  rounded = lambda digits: f"{float(digits):.6g}"
  known = json.loads(text, parse_float=rounded, parse_int=rounded, parse_constant=str)
  digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).digest()
  # A mark of 0 would leave a state unchanged.
  return int.from_bytes(digest[:4], "big") or 1


def _mask_of(updates: Any, mask: Any) -> Any:
  """Returns the mask [B] of the examples; None if it is not known here."""
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
  """Returns the update if `mask` is unknown or has at most `padded_batch_size` examples. Otherwise
  raises UserError, or returns NaN under jit."""
  # At most `padded_batch_size` rows cannot hold too many examples, whatever the mask.
  if mask is None or jnp.size(mask) <= padded_batch_size:
    return noisy

  def too_many() -> UserError:
    # The number of examples may be that of all data, and secret.
    return UserError(
      f"must be of at most {padded_batch_size} examples, more than this plan ever draws, so its "
      "epsilon is not theirs; take batches from plan.batches, or plan for the larger ones",
      field="updates",
    )

  return trees.only_where(jnp.sum(mask) <= padded_batch_size, noisy, too_many)


def of_plan(
  tx: optax.GradientTransformationExtraArgs, mark: int, padded_batch_size: int
) -> optax.GradientTransformationExtraArgs:
  """Returns the private transform `tx`, restricted to states and batches of one plan.

  Args:
    tx: transform with the noise, bound and number of steps of the plan.
    mark: hash of the plan by `mark_of`.
    padded_batch_size: largest number of rows in a draw of the plan.
  """
  # The declared type of `tx` does not include ClippedSum.
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
      # The next state's numbers that scale noise follow from the same sum, so they become NaN, too.
      after = beside_noise.invalid_unless(jnp.sum(real) <= padded_batch_size, after)
    return noisy, marked(after, mark)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)

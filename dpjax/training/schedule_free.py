"""Averages of Optax's schedule-free optimizers: the parameters to evaluate and to release.

A schedule-free optimizer (Defazio et al. 2024, arXiv:2405.15682) takes gradients at points y, moves
points z, and averages the points z to x. Training keeps y as the parameters and z in the optimizer
state; x follows from both. All three are functions of the noisy gradients, so they cost no privacy.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
import optax.contrib
from jax import core

from dpjax.types import Params
from dpjax.validate import UserError


def _is_free(node: Any) -> bool:
  return isinstance(node, optax.contrib.ScheduleFreeState)


def states(opt_state: optax.OptState) -> list[Any]:
  """Returns the states of all schedule-free optimizers inside the state of an optimizer."""
  return [node for node in jax.tree.leaves(opt_state, is_leaf=_is_free) if _is_free(node)]


def check(opt_state: optax.OptState, params: Params, ema_decay: float | None) -> None:
  """Raises UserError if the average of a schedule-free optimizer would be wrong or unused.

  Args:
    opt_state: first state of any optimizer.
    params: parameters of the same training.
    ema_decay: decay of a second average, or None.
  """
  free = states(opt_state)
  if not free:
    return
  if ema_decay is not None:
    # `ema_decay` would average the points y, at which nobody evaluates.
    raise UserError(
      "must be None with a schedule-free optimizer, which averages the parameters itself",
      field="ema_decay",
      value=ema_decay,
    )
  if len(free) > 1 or jax.tree.structure(free[0].z) != jax.tree.structure(params):
    raise UserError(
      "must be ONE schedule-free optimizer of all parameters; of some of them, or twice, it "
      "has no average to evaluate",
      field="tx",
    )
  # x = (y - (1 - b1) z) / b1 is computed anew in each step. In narrow types its rounding errors
  # would add up.
  narrow = {str(leaf.dtype) for leaf in jax.tree.leaves(params) if leaf.dtype.itemsize < 4}
  if narrow:
    raise UserError(
      f"must be of float32 or wider with a schedule-free optimizer, got {min(narrow)}: its "
      "average is computed from their rounded values",
      field="params",
    )
  beta = free[0].b1
  # Under jit the value of b1 is unknown. It is checked where the state is made outside of jit.
  if isinstance(beta, core.Tracer):
    return
  if not 0 < beta <= 1:
    raise UserError(
      "must be in (0, 1] in a schedule-free optimizer", field="b1", value=float(beta)
    )


def average(opt_state: optax.OptState, params: Params) -> Params | None:
  """Returns the average x of a schedule-free optimizer; None for any other optimizer.

  >>> import jax.numpy as jnp
  >>> tx = optax.contrib.schedule_free_sgd(0.5, b1=0.9)
  >>> state = tx.init(jnp.float32(1))
  >>> updates, state = tx.update(jnp.float32(1), state, jnp.float32(1))
  >>> print(average(state, jnp.float32(1) + updates), average(optax.EmptyState(), 1.0))
  0.5 None
  """
  free = states(opt_state)
  if not free:
    return None
  return optax.contrib.schedule_free_eval_params(free[0], params)

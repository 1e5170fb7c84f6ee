"""The noise state: a key and a count of draws.

Draw t under a key is a function of key and t alone. So a count that was set back would draw the
same noise twice, which cancels in the difference of two sums. The functions here see a count that
is no integer, is negative or is not accounted for. Whether other code has changed a state is seen
by the guard of the private transforms (`dpjax/transforms/guard.py`), which covers all of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core

from dpjax.noise import source
from dpjax.types import Array
from dpjax.validate import UserError


class NoiseState(NamedTuple):
  """State of white noise. Keep it secret: whoever knows it can compute and subtract the noise.

  Give each update the state that the last update returned. `state_at` makes a state from a key and
  a count.
  """

  key: jax.Array  # words of the key (`source.to_words`), uint32 [words]; never change
  draws: jax.Array  # int32, number of draws so far


def state_at(key: jax.Array, draws: Array | int) -> NoiseState:
  """Returns the state after `draws` draws under `key`, so that a run can be repeated.

  >>> int(state_at(jax.random.key(0), 3).draws)
  3
  """
  return NoiseState(source.to_words(key), jnp.asarray(draws, jnp.int32))


def check_count(name: str, count: Any) -> None:
  """Raises UserError unless a count in a state is an integer.

  >>> check_count("state.draws", jnp.float32(1.0))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: state.draws: float32: must be an integer; change nothing ...
  """
  dtype = None if count is None else jnp.result_type(count)
  if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
    raise UserError(
      f"{dtype}: must be an integer; change nothing in the state of a private "
      "transform, and give each update the state that the one before gave",
      field=name,
    )


def check_accounted(state: Any, num_steps: int | None) -> Any:
  """Returns whether the next draw of a noise state is accounted for, [] bool.

  Raises:
    UserError: a draw that is known not to be accounted for, or no noise state.

  Args:
    state: a `NoiseState`, or another state with its fields.
    num_steps: number of draws that are accounted for; None for no limit.

  >>> check_accounted(state_at(jax.random.key(0), 20), 20)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: step=20: the noise was accounted for num_steps=20 steps only
  """
  if not hasattr(state, "draws"):
    raise UserError(
      f"{type(state).__name__}: must be what init and update of the private "
      "transform return; restore it with tx.init(params) as the target",
      field="state",
    )
  check_count("state.draws", state.draws)
  is_sound = state.draws >= 0
  is_accounted = is_sound if num_steps is None else is_sound & (state.draws < num_steps)
  # A traced state has no values. For it the caller gives NaN in place of an error.
  if isinstance(is_accounted, core.Tracer) or bool(is_accounted):
    return is_accounted
  if not is_sound:
    raise UserError("must be >= 0", field="state.draws", value=int(state.draws))
  raise UserError(
    f"the noise was accounted for num_steps={num_steps} steps only",
    field="step",
    value=int(state.draws),
  )

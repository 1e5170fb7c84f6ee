"""The noise state: a key, a count of draws, and a checksum that detects changes from outside.

Optax has functions that change a state by the names of its fields, and `jax.tree.map` changes
every leaf. A count that was set back would draw the same noise twice, which cancels in the
difference of two sums. So the state holds a checksum of key and count:

| what happens to the state                          | what follows                       |
| -------------------------------------------------- | ---------------------------------- |
| the count or the key is exchanged, or set to zero  | `UserError`; NaN where it is traced |
| a count that is no integer, or negative            | the same                           |
| a whole earlier state is used again                | cannot be detected                 |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.noise import source
from dpjax.types import Array, ArrayTree
from dpjax.validate import UserError

# 2^32 / golden ratio, an odd number: multiplying by it is a bijection modulo 2^32.
_ODD = 0x9E3779B1


class NoiseState(NamedTuple):
  """State of white noise. Keep it secret: whoever knows it can compute and subtract the noise.

  Give each update the state that the last update returned. `state_at` makes a state from a key and
  a count.
  """

  key: jax.Array  # words of the key (`source.to_words`), uint32 [words]; never change
  draws: jax.Array  # int32, number of draws so far
  checksum: Any = None  # uint32, of key and draws; None is refused


def checksum(count: Array, key: Array | None = None) -> jax.Array:
  """Returns the uint32 checksum of a count, and of a key if given.

  Each step of its computation is a bijection, so under one key no two counts share a checksum. A
  state whose numbers were all set to 0 has a wrong checksum.

  >>> checksum(jnp.int32(0)) == checksum(jnp.int32(1))
  Array(False, dtype=bool)
  """
  # ~ makes the checksum of a count of 0 non-zero, so that a state of zeros is refused.
  mixed = ~jnp.asarray(count).astype(jnp.uint32) * jnp.uint32(_ODD)
  if key is None:
    return mixed
  words = jax.random.key_data(key) if trees.is_key(key) else key
  words = words.astype(jnp.uint32)
  for place in range(words.shape[-1]):
    mixed = (mixed ^ (mixed >> 15) ^ words[..., place]) * jnp.uint32(_ODD)
  return mixed


def state_at(key: jax.Array, draws: Array | int) -> NoiseState:
  """Returns the state after `draws` draws under `key`, so that a run can be repeated.

  >>> int(state_at(jax.random.key(0), 3).draws)
  3
  """
  draws = jnp.asarray(draws, jnp.int32)
  return NoiseState(source.to_words(key), draws, checksum(draws, key))


def with_key(state: NoiseState, key: Array) -> NoiseState:
  """Returns the state with another key. A right checksum stays right, a wrong checksum wrong.

  >>> after = with_key(state_at(jax.random.key(0), 3), jax.random.key(1))
  >>> is_sound(after.draws, after.checksum, after.key)
  Array(True, dtype=bool)
  """
  seen = next_checksum(state.draws, state.checksum, state.draws, state.key)
  off = seen ^ checksum(state.draws, state.key)
  return state._replace(key=source.to_words(key), checksum=checksum(state.draws, key) ^ off)


def next_checksum(count: Array, seen: Array, after: Array, key: Array | None = None) -> Any:
  """Returns the checksum of the next count `after`; a wrong one if the last checksum is wrong.

  The last checksum is `seen`. If a wrong checksum became right, a caller who skips NaN updates
  would go on with repeated noise.

  >>> wrong = next_checksum(jnp.int32(0), jnp.uint32(0), jnp.int32(1))
  >>> is_sound(jnp.int32(1), wrong)
  Array(False, dtype=bool)
  """
  off = jnp.asarray(seen).astype(jnp.uint32) ^ checksum(count, key)
  return checksum(after, key) ^ off


def after_draw(state: Any) -> NoiseState:
  """Returns the state after one more draw. A wrong checksum of `state` stays wrong."""
  draws = state.draws + 1
  return NoiseState(
    state.key, draws, next_checksum(state.draws, state.checksum, draws, state.key)
  )


def is_sound(count: Array, seen: Array, key: Array | None = None) -> jax.Array:
  """Returns whether a count is >= 0 and `seen` is its checksum, [] bool; works during tracing.

  >>> is_sound(jnp.int32(0), jnp.uint32(0))
  Array(False, dtype=bool)
  """
  return (jnp.asarray(count) >= 0) & (checksum(count, key) == seen)


def check_count(name: str, count: Any, seen: Any) -> None:
  """Raises UserError unless a count and its checksum `seen` are integers.

  >>> check_count("state.draws", jnp.float32(1.0), jnp.uint32(0))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: state.draws: float32: must be an integer; change nothing ...
  """
  for part, value in ((name, count), (f"checksum of {name}", seen)):
    dtype = None if value is None else jnp.result_type(value)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
      raise UserError(
        f"{dtype}: must be an integer; change nothing in the state of a private "
        "transform, and give each update the state that the one before gave",
        field=part,
      )


def changed(name: str, count: Any) -> UserError:
  """Returns the error for a state that does not match its checksum; `name` and `count` say where in
  it."""
  return UserError(
    "does not belong to its checksum: something set, mapped or mixed the state "
    "of a private transform, and noise could be drawn twice, or another plan "
    "made it; give each update the state that the one before gave, or restore "
    "it whole",
    field=name,
    value=int(count),
  )


def check_accounted(state: Any, num_steps: int | None) -> None:
  """Raises UserError if a noise state was changed, or its next draw is not accounted for.

  A traced state cannot be checked here; `poisoned` then turns the result into NaN.

  Args:
    state: a `NoiseState`, or another state with its fields.
    num_steps: number of draws that are accounted for; None for no limit.

  >>> check_accounted(state_at(jax.random.key(0), 20), 20)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: step=20: the noise was accounted for num_steps=20 steps only
  """
  if not hasattr(state, "checksum"):
    raise UserError(
      f"{type(state).__name__}: must be what init and update of the private "
      "transform return; restore it with tx.init(params) as the target",
      field="state",
    )
  source.from_words(state.key, "state.key")
  check_count("state.draws", state.draws, state.checksum)
  try:
    done = int(state.draws)
    sound = bool(is_sound(state.draws, state.checksum, state.key))
  except jax.errors.ConcretizationTypeError:
    # A traced state has no values. For it `poisoned` gives NaN in place of an error.
    return
  if not sound:
    raise changed("state.draws", done)
  if num_steps is not None and done >= num_steps:
    raise UserError(
      f"the noise was accounted for num_steps={num_steps} steps only",
      field="step",
      value=done,
    )


def poisoned(noisy: ArrayTree, state: Any, num_steps: int | None) -> Any:
  """Returns the tree; all NaN if the state was changed, or its next draw is not accounted for.

  So also under jit, no number is released that is not accounted for.

  >>> poisoned(jnp.ones(2), state_at(jax.random.key(0), 20), 20)
  Array([nan, nan], dtype=float32)
  """
  is_accounted = is_sound(state.draws, state.checksum, state.key)
  if num_steps is not None:
    is_accounted = is_accounted & (state.draws < num_steps)
  return jax.tree.map(lambda leaf: jnp.where(is_accounted, leaf, jnp.nan), noisy)

"""Draws correlated noise: white noise of `dpjax.noise`, multiplied by one row of C^{-1}."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.noise import source
from dpjax.noise.correlated.strategies import Correlation, Redrawn
from dpjax.noise.gaussian import check_accounted, check_one_sum
from dpjax.noise.gaussian import init as init_white
from dpjax.types import ArrayTree
from dpjax.validate import UserError


class CorrelatedNoiseState(NamedTuple):
  """State of correlated noise. Keep it secret: whoever knows it can subtract the noise."""

  key: jax.Array  # words of the key (`source.to_words`); never change
  draws: jax.Array  # int32, draws so far
  memory: Any  # the strategy's state: earlier noise, or a `Redrawn` if it is drawn again


def init(key: jax.Array, correlation: Correlation, like: ArrayTree) -> CorrelatedNoiseState:
  """Returns the state before the first draw; `like` has the shapes of the parameters."""
  started = init_white(key, like)
  return CorrelatedNoiseState(started.key, started.draws, correlation.init(like))


def add_correlated(
  state: CorrelatedNoiseState,
  tree: ArrayTree,
  std: float,
  *,
  correlation: Correlation,
  num_steps: int,
  factors: tuple[float, ...] = (),
  sound: Any = True,
) -> tuple[Any, CorrelatedNoiseState]:
  """Returns tree + row `state.draws` of C^{-1} z, and the state for the next row.

  Args:
    state: key, draws and the strategy's memory, as `init` or the last draw returned them.
    tree: leaves are cast to at least float32 before the noise is added.
    std: standard deviation of the white noise z; with 0 no noise is added.
    correlation: strategy C, the same at every call.
    num_steps: number of rows that are accounted for. A later row raises UserError, or gives NaN if
      the state is traced.
    factors: factor of std at each step, or () for 1 at every step.
    sound: [] bool, may be traced. If it is False, all numbers are NaN.

  Without factors the white noise of step t equals the draw of `noise.add_gaussian` after t draws.
  With a release key the noisy tree is rounded to a public grid, which is post-processing.

  >>> from dpjax.noise.correlated import Independent
  >>> state = init(jax.random.key(0), Independent(), jnp.ones(2))
  >>> total, state = add_correlated(
  ...   state, jnp.ones(2), 0.0, correlation=Independent(), num_steps=1)
  >>> total, int(state.draws)
  (Array([1., 1.], dtype=float32), 1)
  """
  sound = sound & check_accounted(state, num_steps)
  key = source.from_words(state.key, "state.key")
  tree = source.as_floats(tree)
  # The checksum of a traced state says nothing yet, and the parameters may have changed since.
  wanted = jax.eval_shape(correlation.init, tree)
  held = jax.eval_shape(lambda memory: memory, state.memory)
  # A state that was made where JAX has float64 has other types where it has not.
  kinds = lambda part: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), part)
  if kinds(wanted) != kinds(held):
    raise UserError(
      "holds earlier noise of other shapes or types: it is the state of another plan, or of other "
      "parameters; begin with tx.init(params)",
      field="state.memory",
    )
  if std == 0:
    return trees.nan_unless(sound, tree), state._replace(draws=state.draws + 1)
  sound = sound & check_one_sum(tree, state)
  for leaf in jax.tree.leaves(tree):
    # std is checked alone first, since a std that is no number has no product with a factor.
    source.check_scale(std, leaf.dtype, "std")
    for end in {min(factors, default=1.0), max(factors, default=1.0)}:
      source.check_scale(std * end, leaf.dtype, "std * noise_schedule")

  is_release = source.is_release(key)

  def white_at(step: jax.Array) -> Any:
    own_key = jax.random.fold_in(key, step)
    white = source.gaussian(own_key, tree, std)
    if not factors:
      return white
    return trees.scale(white, jnp.asarray(factors, jnp.float32)[step])

  if isinstance(state.memory, Redrawn):
    memory = state.memory
    noisy = _with_redrawn(state, tree, correlation, white_at, is_release)
  else:
    row, memory = correlation.next(white_at(state.draws), state.memory)
    noisy = trees.add(tree, row)
  if is_release:
    # All steps share one public grid, which is fine enough for the step with the least noise.
    noisy = source.snap(noisy, source.grid_step(std * min(factors, default=1.0)))
  after = CorrelatedNoiseState(state.key, state.draws + 1, memory)
  return trees.nan_unless(sound, noisy), after


def _with_redrawn(
  state: Any, tree: Any, strategy: Any, white_at: Any, is_release: bool
) -> Any:
  """Returns tree + row of C^{-1} z; earlier white noise is drawn again to compute this row."""
  if not is_release:
    return strategy.redrawn(white_at, state.draws, state.memory, tree)
  # For a release the noise is summed first, so that data and noise are added with one rounding.
  # If draws were added one by one, data plus a part of the noise would be rounded, too.
  row = strategy.redrawn(
    white_at, state.draws, state.memory, jax.tree.map(jnp.zeros_like, tree)
  )
  return trees.add(tree, row)

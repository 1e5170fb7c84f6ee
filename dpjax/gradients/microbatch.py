"""Cuts a batch into microbatches, and adds their clipped sums: it takes less memory and time.

Each example is still clipped on its own: a microbatch is never the unit of privacy. One whose rows
are all padding is skipped, which changes no bit of the sum. Whoever can time a step learns from
that how many microbatches held an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import jaxprs, trees
from dpjax.gradients.clipping import Clipped
from dpjax.gradients.convolutions import canonical_convolutions
from dpjax.gradients.exact_sum import ExactSum
from dpjax.gradients.traced_values import zeros_of
from dpjax.parallel import made_for
from dpjax.types import ArrayTree, Params

# Measured on 2 cores: a clipped sum takes so long for each multiplication of an example's loss, and
# a microbatch for itself, which reads the parameters again and adds to a sum of their size.
_MULTIPLICATION_SECONDS = 1 / 15e9
_PARAMETER_SECONDS = 2e-9
_MICROBATCH_SECONDS = 1e-4
# Largest share of the whole batch's time at which microbatches are taken.
_WORTH = 0.8


def fill(tree: ArrayTree, rows: int) -> Any:
  """Pads leaves [B, ...] -> [rows, ...] with zeros, and leaves of random keys with the last key.

  >>> fill(jnp.array([True, True]), 3)
  Array([ True,  True, False], dtype=bool)
  """

  def fill_leaf(leaf):
    missing = rows - leaf.shape[0]
    if not missing:
      return leaf
    # A key has no zero, so the last key is repeated, in a masked row.
    if trees.is_key(leaf):
      return jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)])
    pad = np.pad if isinstance(leaf, np.ndarray) else jnp.pad
    return pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))

  return jax.tree.map(fill_leaf, tree)


def in_microbatches(
  fn: Callable[[Any, Any, jax.Array], Clipped], microbatch_size: int
) -> Callable[[Any, Any, jax.Array], Clipped]:
  """Returns `fn`, computed for `microbatch_size` examples at a time.

  The last microbatch is filled up with masked padding. Sums are added in float32 or wider. Rows of
  a microbatch without examples have norms and losses of 0.
  """

  def wrapped(params, batch, mask):
    batch_size = mask.shape[0]
    count = -(-batch_size // microbatch_size)
    if count == 1:
      return fn(params, batch, mask)
    cut = lambda leaf: leaf.reshape((count, microbatch_size, *leaf.shape[1:]))
    full = fill((batch, mask), microbatch_size * count)
    parts = jax.tree.map(cut, full)  # [count, size, ...]

    # In a scan, XLA's CPU backend takes many times as long for gradients of convolutions.
    @canonical_convolutions
    def of_part(params, batch, mask):
      out = fn(params, batch, mask)
      return out.total, (out.norms, out.losses)  # [*param], ([size],) * 2

    shapes = jax.eval_shape(fn, params, *jax.tree.map(lambda leaf: leaf[0], parts))
    # A scan's carry and both results of a branch must have one type. Under shard_map the sums
    # differ between devices, so the zeros must be marked as different, too.
    nothing = zeros_of(shapes, parts)

    def body(total, part):
      def added(total):
        more, aux = of_part(params, *part)
        return total.plus(more), aux

      def left(total):
        return total, (nothing.norms, nothing.losses)

      # Draws fill the rows from the first on, so the last parts of most batches hold no example.
      return jax.lax.cond(jnp.any(part[1]), added, left, total)

    total, aux = jax.lax.scan(body, ExactSum.of(nothing.total), parts)
    norms, losses = (leaf.reshape(-1)[:batch_size] for leaf in aux)  # [count, size] -> [B]
    return Clipped(total.value(), norms, losses)

  return wrapped


def faster_size(closed: Any, params: Params, rows: int, filled: float) -> int | None:
  """Returns the size of microbatches with which a padded batch takes the least time on a CPU.

  None if the whole batch is about as fast, or for another platform, where nothing was measured.
  Convolutions and products over positions use a parameter many times for an example. So they gain
  most: reading the parameters again costs them little.

  Args:
    closed: program of ONE example's loss.
    rows: number of rows, padding included.
    filled: share of the rows that usually hold an example. These stand first.
  """
  if made_for.platform() != "cpu":
    return None
  of_row = multiplications(closed) * _MULTIPLICATION_SECONDS
  of_part = trees.size(params) * _PARAMETER_SECONDS + _MICROBATCH_SECONDS
  examples = rows * filled
  # With parts of m rows, examples / m parts and half of one more are computed, each of which takes
  # of_part + m of_row. This is least at the root below, here a multiple of 8.
  size = 8 * math.ceil(math.sqrt(2 * examples * of_part / max(of_row, 1e-12)) / 8)
  seconds = (examples / size + 0.5) * (of_part + size * of_row)
  return size if size < rows and seconds < _WORTH * rows * of_row else None


def multiplications(jaxpr: Any) -> int:
  """Returns the number of multiplications of a jaxpr's matrix products and convolutions.

  A loop without a known number of turns counts as one turn, a conditional as its largest branch.

  >>> multiplications(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 5))))
  30
  """
  total = 0
  for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
    name = eqn.primitive.name
    of_inner = list(map(multiplications, jaxprs.inside(eqn)))
    if name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      shape = eqn.invars[0].aval.shape
      total += eqn.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    elif name == "conv_general_dilated":
      kernel = eqn.invars[1].aval
      outputs = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
      total += eqn.outvars[0].aval.size * kernel.size // max(outputs, 1)
    elif name == "cond":
      total += max(of_inner)
    else:
      total += sum(of_inner) * eqn.params.get("length", 1)
  return total

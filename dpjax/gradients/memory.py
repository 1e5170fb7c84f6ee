"""Estimates the memory of a clipped sum, and chooses the microbatch that fits a budget.

The parameters, the whole batch and the sum itself come on top of the table. With microbatches the
sum counts twice, as its roundings are kept beside it.

| route  | bytes for one example                          | bytes for any batch         |
| ------ | ---------------------------------------------- | --------------------------- |
| tapped | max(R + A' + G, A + G + H) + W + E             | 4 P: loop of rare examples  |
| vmap   | R + 2.6 P + E: stacked gradients, and copies   |                             |

R is what the forward pass keeps for the backward pass, by JAX's trace. A and G are operands and
cotangents of all sites, the equations where a parameter meets data. Outside of a scan an operand is
already a part of R; in a scan it is stacked once more (A'). So are results that a site keeps
(`Site.kept`). H are products and gradients that are held for the sum, minus the arrays that can be
freed for them. W is the largest array that is formed for a norm and then freed. In a loop over
chunks it counts once for any batch. E is the example. P are the parameters in float32. The tapped
route forms the gradients of rare examples, such as those whose squares overflow, one by one. XLA
reserves memory for that loop, also for batches without such examples.

XLA may use memory again that this estimate counts twice. The estimate was compared with XLA's own
count of its temporaries (CPU, float32, workloads of the benchmark). It was 1.1 to 2.0 times as
large on the tapped route, and 1.0 to 2.2 times on the vmap route. It is a guide, not a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from dpjax import trees, validate
from dpjax.gradients.ghost import cost_model, tapped
from dpjax.gradients.ghost.route import Recipe
from dpjax.gradients.ghost.units import Rule, Sum, Unit, kept_at, sum_of
from dpjax.types import ArrayTree, LossFn, Params

_FLOAT32_BYTES = 4
# Number of copies of the stacked gradients: the largest measured, where the least was 0.7.
_VMAP_COPIES = 2.6
# Number of copies of the parameters in the loop of rare examples, as measured: a gradient, its
# clipped terms, a new sum and the part that its roundings left out.
_RARE_COPIES = 4.0


class Bytes(NamedTuple):
  """Estimated temporaries of one pass over n examples: fixed + n * per_example."""

  per_example: float
  fixed: float = 0.0


def estimate(
  loss_fn: LossFn, params: Params, example: ArrayTree, planned: Recipe | None
) -> Bytes:
  """Estimates temporaries of a clipped sum, on the vmap route if `planned` is None."""
  if planned is None:
    return vmap_route(loss_fn, params, example)
  return tapped_route(planned, params, example)


def tapped_route(planned: Recipe, params: Params, example: ArrayTree) -> Bytes:
  """Estimates temporaries of the tapped route; arguments may be ShapeDtypeStructs."""
  program = planned.program
  leaves = jax.tree.leaves(params)
  looped = {site.index for site in program.sites if site.loops}
  keeping = kept_at(planned.units)

  def forward(leaves, taps, examples):
    def loss(taps, example):
      outs, seen = tapped.run(program, [*leaves, *example], taps, keeping)
      return outs[0], seen

    return jax.vjp(lambda taps: jax.vmap(loss)(taps, examples), taps, has_aux=True)

  def sizes(count: int) -> tuple[float, ...]:
    struct = jax.ShapeDtypeStruct
    taps = {t.index: struct((count, *t.shape), t.aval.dtype) for t in program.taps}
    examples = [_stack(leaf, count) for leaf in jax.tree.leaves(example)]
    _, back, seen = jax.eval_shape(forward, leaves, taps, examples)
    # The results that a site keeps are no part of what JAX keeps.
    stacked_again = {i: arrays for i, arrays in seen.items() if i in looped | keeping}
    return tuple(map(_nbytes, (back, stacked_again, seen, taps)))

  residuals, again, operands, cotangents = _slope(sizes)
  held = sum(_held_bytes(unit, leaves) for unit in planned.units)
  # The peak is in the backward pass, or in the sums that follow it.
  peak = max(residuals + again + cotangents, operands + cotangents + held)
  work, loop_work = _work(planned)
  rare = _RARE_COPIES * _FLOAT32_BYTES * trees.size(params)
  return Bytes(peak + work + _nbytes(example), loop_work + rare)


def vmap_route(loss_fn: LossFn, params: Params, example: ArrayTree) -> Bytes:
  """Estimates temporaries of the vmap route; arguments may be ShapeDtypeStructs."""

  def forward(params, examples):
    losses = lambda params: jax.vmap(loss_fn, (None, 0))(params, examples)
    return jax.vjp(losses, params)

  def sizes(count: int) -> tuple[float, ...]:
    examples = jax.tree.map(lambda leaf: _stack(leaf, count), example)
    return (_nbytes(jax.eval_shape(forward, params, examples)[1]),)

  (kept,) = _slope(sizes)
  stacked = _VMAP_COPIES * _FLOAT32_BYTES * trees.size(params)
  return Bytes(kept + stacked + _nbytes(example))


def microbatch(budget: float, estimate: Bytes, batch_size: int) -> int | None:
  """Returns the size of a microbatch whose estimated temporaries fit in `budget` bytes.

  The result is None if the whole batch fits. Otherwise it cuts the batch into the fewest passes
  that fit, or into at most twice as many if the last pass then has less padding.

  Raises:
    UserError: not even one example fits.

  >>> microbatch(1000, Bytes(per_example=10.0), 60) is None
  True
  >>> microbatch(500, Bytes(per_example=10.0), 60)  # 50 fit: two passes
  30
  """
  least = estimate.fixed + estimate.per_example
  if budget < least:
    raise validate.UserError(
      f"must be >= {math.ceil(least)} bytes, which one example needs by "
      "estimate; or give microbatch_size",
      field="memory_budget",
      value=validate.Verbatim(f"{budget:g}"),
    )
  fitting = int((budget - estimate.fixed) // max(estimate.per_example, 1.0))
  if fitting >= batch_size:
    return None
  fewest = -(-batch_size // fitting)
  sizes = [-(-batch_size // count) for count in range(fewest, 2 * fewest + 1)]
  return min(sizes, key=lambda size: (-batch_size % size, -size))


def _slope(sizes: Callable[[int], tuple[float, ...]]) -> list[float]:
  """Returns the bytes that one more example adds to each entry of `sizes`."""
  return [two - of_one for of_one, two in zip(sizes(1), sizes(2))]


def _stack(leaf: Any, count: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype)


def _nbytes(tree: Any) -> float:
  leaves = [leaf for leaf in jax.tree.leaves(tree) if not trees.is_key(leaf)]
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _held_bytes(unit: Unit, leaves: Any) -> float:
  """Returns the bytes per example that a unit holds for the sum, minus the bytes freed for it."""
  if not unit.hold:
    return 0.0
  if unit.rule is Rule.GRADIENT:
    held = sum(math.prod(leaves[i].shape) for i in unit.leaves)
    recorded = sum(
      site.steps * math.prod(aval.shape) for site in unit.sites for aval in site.out_avals
    )
  else:
    held = cost_model.size(unit.forms[0])
    recorded = sum(form.recorded for form in unit.forms)
  # A loop needs all records of the sites until its last turn, so it frees none of them.
  new = max(0, held - recorded) if unit.cost.fused else held
  return new * trees.wide_dtype(leaves[unit.leaves[0]].dtype).itemsize


def _work(planned: Recipe) -> tuple[float, float]:
  """Returns (bytes per example without a loop, bytes in total in a loop over chunks) of the largest
  temporary of a norm, or of a sum that computes gradients again."""
  norms = [unit.cost for unit in planned.units if not unit.hold]
  again = [unit.cost for unit in planned.units if sum_of(unit) is Sum.AGAIN]
  chunks = [(cost, cost_model.chunk(cost, planned.platform)) for cost in norms]
  chunks += [(cost, cost_model.in_flight(cost, planned.platform)) for cost in again]
  batched = [cost.elements * _FLOAT32_BYTES for cost, chunk in chunks if chunk is None]
  looped = [cost.elements * _FLOAT32_BYTES * chunk for cost, chunk in chunks if chunk]
  return max(batched, default=0.0), max(looped, default=0.0)

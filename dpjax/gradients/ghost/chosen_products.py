"""Finds matrices that an example's index chooses from a parameter, and that one product uses.

A mixture of experts computes x W[i]. The gradient of W[i] is an outer product, x g^T. If the choice
and the product are one site, its rows are x and g, and no matrix is recorded for an example.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from dpjax.jaxprs import (
  CALLS,
  Eqn,
  EqnChain,
  Graph,
  evaluate,
  is_float,
  is_literal,
  results_of,
)

if TYPE_CHECKING:
  from dpjax.gradients.ghost.jaxpr_sites import Site

NAME = "chosen_product"
# Largest ratio of pairs of rows to numbers of a matrix. All pairs are multiplied, so more pairs
# would cost more than the matrices.
_MOST_PAIRS = 4
# Largest number of equations of a called function, such as `jnp.take`, that is searched for a
# choice.
_MOST_INLINE = 16
CHOICES = ("gather", "dynamic_slice")
# Equations that only move, add or drop axes of the chosen entries.
_MOVES = ("squeeze", "reshape", "transpose", "broadcast_in_dim", "expand_dims")


def chooses_matrices(eqn: Eqn) -> bool:
  """Returns whether an equation takes matrices, not single rows or numbers, by an index."""
  is_choice = eqn.primitive.name in CHOICES
  return is_choice and sum(size > 1 for size in eqn.params["slice_sizes"]) > 1


def with_choices_inline(closed: Any) -> Any:
  """Returns a closed jaxpr with choices in the same jaxpr as the products that use them.

  In a jaxpr, `jnp.take` and `lax.dynamic_index_in_dim` are calls with an inner jaxpr.
  """
  # Most programs have no such call, and are not traced again.
  if not any(map(_calls_choice, closed.jaxpr.eqns)):
    return closed

  def step(eqn, values):
    if not _calls_choice(eqn):
      return results_of(eqn, values)
    inner = eqn.params[CALLS[eqn.primitive.name]]
    return evaluate(inner.jaxpr, inner.consts, values, step)

  def inlined(*args):
    return evaluate(closed.jaxpr, closed.consts, args, step)

  return jax.make_jaxpr(inlined)(*(var.aval for var in closed.jaxpr.invars))


def _calls_choice(eqn: Eqn) -> bool:
  if eqn.primitive.name not in CALLS:
    return False
  inner = eqn.params[CALLS[eqn.primitive.name]].jaxpr.eqns
  return len(inner) <= _MOST_INLINE and any(map(chooses_matrices, inner))


class ChosenAxis(NamedTuple):
  """Origin of an axis of the chosen matrices; both fields may be None for an axis of size 1."""

  dim: int | None = None  # of the parameter
  position: int | None = None  # of the indices, one matrix for each


class ChosenAxes(NamedTuple):
  """Roles of the axes in a product of data with chosen matrices."""

  contracted: tuple[int, ...]  # dimensions of the parameter, in the order of the product
  kept: tuple[int, ...]  # dimensions of the parameter that the result has
  positions: tuple[int, ...]  # of the indices, in the order of the product's batch
  shared: tuple[int, ...]  # of the indices whose matrices all meet the same row
  param_first: bool


def find(graph: Graph, site: Site) -> EqnChain | None:
  """Returns the equations from a choice to the only product that uses it, if they pay as one site.

  Returns None if there is no such product, or if recording the matrices costs less.

  Args:
    graph: graph of the jaxpr that the site is in.
    site: site where the choice is made, an equation of `CHOICES`.
  """
  if site.eqn.invars[0] not in site.params:
    return None
  # A literal index is not chosen by the example.
  if is_literal(site.eqn.invars[1]) or is_float(site.eqn.invars[1].aval):
    return None
  eqns = [site.eqn]
  while eqns[-1].primitive.name != "dot_general":
    # The chosen matrices may be rearranged, but nothing may be chosen from them again.
    if len(eqns) > 1 and eqns[-1].primitive.name not in _MOVES:
      return None
    (var,) = eqns[-1].outvars
    if graph.uses[var] != 1 or var not in graph.users:
      return None
    eqns.append(graph.users[var])
  chain = EqnChain(tuple(eqns), NAME)
  # Steps of a scan that share the parameter all add rows to its matrices.
  steps = [loop.length for loop in site.loops if loop not in site.sources[0].loops]
  return chain if _pays(chain, math.prod(steps)) else None


def _pays(chain: EqnChain, steps: int) -> bool:
  known = axes(chain)
  product = chain.eqns[-1]
  if known is None:
    return False
  # A literal is a single number, so it has no rows.
  data = product.invars[1 if known.param_first else 0]
  if is_literal(data) or data is chain.eqns[-2].outvars[0]:
    return False
  shape = chain.eqns[0].invars[0].aval.shape
  width = math.prod(shape[d] for d in known.contracted)
  columns = math.prod(shape[d] for d in known.kept)
  rows = steps * math.prod(product.outvars[0].aval.shape) // max(columns, 1)
  # A chosen vector already is a row of a table, so nothing would be gained.
  return min(width, columns) > 1 and rows * rows <= _MOST_PAIRS * width * columns


def axes(chain: EqnChain) -> ChosenAxes | None:
  """Returns the roles of the product's axes; None for a product without rows."""
  labels = _chosen_axes(chain.eqns[0])
  for eqn in chain.eqns[1:-1]:
    labels = labels and _move(eqn, labels)
  if labels is None:
    return None
  product = chain.eqns[-1]
  (lhs_c, rhs_c), (lhs_b, rhs_b) = product.params["dimension_numbers"]
  matrices = chain.eqns[-2].outvars[0]
  param_first = product.invars[0] is matrices
  contracted = lhs_c if param_first else rhs_c
  batch = lhs_b if param_first else rhs_b
  kept = [d for d in range(len(labels)) if d not in (*contracted, *batch)]
  sizes = matrices.aval.shape
  is_position = lambda d: labels[d].position is not None and sizes[d] != 1
  is_dim = lambda d: labels[d].dim is not None and sizes[d] != 1
  # A product that sums over positions, or has a dimension of the parameter as a batch, has no rows.
  if any(map(is_position, contracted)) or any(map(is_dim, batch)):
    return None
  dims = lambda places: tuple(labels[d].dim for d in places if labels[d].dim is not None)
  positions = lambda places: tuple(
    labels[d].position for d in places if labels[d].position is not None
  )
  # The result keeps the matrices' order of axes. Positions must come first, in one block.
  order = [is_position(d) for d in kept if is_position(d) or is_dim(d)]
  if order != sorted(order, reverse=True):
    return None
  return ChosenAxes(
    dims(contracted), dims(kept), positions(batch), positions(kept), param_first
  )


def _chosen_axes(eqn: Eqn) -> list[ChosenAxis] | None:
  """Returns the axes of the chosen entries; None for a gather with batch axes."""
  rank = len(eqn.outvars[0].aval.shape)
  if eqn.primitive.name == "dynamic_slice":
    return [ChosenAxis(dim=d) for d in range(rank)]
  numbers = eqn.params["dimension_numbers"]
  if numbers.operand_batching_dims:
    return None
  collapsed = numbers.collapsed_slice_dims
  dims = iter(
    d for d in range(len(eqn.invars[0].aval.shape)) if d not in map(int, collapsed)
  )
  offsets = [int(d) for d in numbers.offset_dims]
  position = iter(range(rank))
  return [
    ChosenAxis(dim=next(dims)) if d in offsets else ChosenAxis(position=next(position))
    for d in range(rank)
  ]


def _move(eqn: Eqn, labels: list[ChosenAxis]) -> list[ChosenAxis] | None:
  """Returns the axes after a transpose, or after axes of size 1 are added or dropped; else None."""
  name = eqn.primitive.name
  before = eqn.invars[0].aval.shape
  after = eqn.outvars[0].aval.shape
  if name == "transpose":
    return [labels[d] for d in eqn.params["permutation"]]
  wide = [d for d, size in enumerate(before) if size != 1]
  if [before[d] for d in wide] != [size for size in after if size != 1]:
    return None
  # The places of axes of size 1 are unknown now, but nothing needs them.
  order = iter(wide)
  return [ChosenAxis() if size == 1 else labels[next(order)] for size in after]

"""Table for users that shows how each parameter's clipped gradient is computed, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import validate
from dpjax.gradients import memory
from dpjax.gradients.arguments import check_arrays, check_real
from dpjax.gradients.ghost import cost_model
from dpjax.gradients.ghost import route as ghost
from dpjax.gradients.ghost.units import Unit, sum_of
from dpjax.gradients.loss_checks import check_callable, check_loss
from dpjax.types import ArrayTree, LossFn, Params

_RULES = {
  "outer": "|a|^2 |g|^2",
  "gram": "(a a^T) * (g g^T)",
  "product": "a^T g per example",
  "gradient": "gradient per example",
  "unused": "zero",
}


class UnitRow(NamedTuple):
  """A row for one unit of parameters (see `dpjax.gradients.ghost.units`)."""

  sites: str  # the primitives where the parameter meets data, in program order
  params: tuple[str, ...]  # paths in the parameter tree
  shapes: tuple[tuple[int, ...], ...]
  rule: str  # how the norm is taken: outer | gram | product | gradient | unused
  sum: str  # how the sum is formed: transpose | held | again | zero (`units.Sum`)
  chunk: int | None  # examples at a time in a compiled loop; None: the whole batch
  flops: float  # of the norm, per example
  bytes: float  # moved by the norm, per example
  reason: str  # why rows cannot give the norm; "" for elementwise sites, or if they can


class Explanation(NamedTuple):
  """Rows for all parameters; `str()` is a table.

  `uses_vmap` tells whether the method "auto" takes the vmap route for this loss.
  """

  rows: tuple[UnitRow, ...]
  platform: str
  uses_vmap: bool
  bytes_per_example: float  # memory that one more example takes; see `gradients.memory`

  def __str__(self) -> str:
    header = ("parameter", "shape", "site", "norm", "sum", "at once", "Mflop", "MB", "why")
    note = f"{self.platform}; flops and bytes of the norm, per example"
    note += f"; memory: about {self.bytes_per_example / 1e6:.3g} MB per example"
    route = "; method=auto takes the vmap route" if self.uses_vmap else ""
    return "\n".join([aligned([header, *map(_cells, self.rows)]), note + route])


def aligned(rows: Sequence[Sequence[str]]) -> str:
  """Formats rows of cells as text, in columns."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cells(row: UnitRow) -> tuple[str, ...]:
  return (
    ", ".join(row.params),
    ", ".join("x".join(map(str, shape)) or "scalar" for shape in row.shapes),
    row.sites or "-",
    _RULES[row.rule],
    row.sum,
    "all" if row.chunk is None else str(row.chunk),
    f"{row.flops / 1e6:.3g}",
    f"{row.bytes / 1e6:.3g}",
    row.reason,
  )


def explain(
  loss_fn: LossFn, params: Params, example: ArrayTree, *, platform: str | None = None
) -> Explanation:
  """Returns a table, for `print`, of how `clipped_grad(loss_fn, ...)` treats each parameter.

  Args:
    loss_fn: `(params, ONE example) -> scalar`.
    params: parameters, or their ShapeDtypeStructs.
    example: ONE example, without a batch axis.
    platform: "cpu", "gpu" or "tpu"; None for the default backend.

  Nothing is computed: the loss is only traced. Every parameter appears in exactly one row.

  >>> table = explain(lambda w, x: jnp.sum(jnp.tanh(x @ w)), jnp.ones((3, 2)), jnp.ones(3))
  >>> table.rows[0].rule, table.rows[0].sites, table.rows[0].flops  # 2 (3 + 2)
  ('outer', 'dot_general', 10)
  """
  check_callable(loss_fn)
  if platform is not None:
    validate.one_of(("cpu", "gpu", "tpu"), platform=platform)
  check_arrays(example=example, params=params)
  shaped = lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
  params, example = jax.tree.map(shaped, (params, example))
  check_real(params=params)
  of_one = lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype)
  loss = check_loss(loss_fn, params, jax.tree.map(of_one, example))
  planned = ghost.plan(loss.closed, params, platform=platform)
  paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
  shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
  rows = tuple(_row(unit, paths, shapes, planned.platform) for unit in planned.units)
  pays = ghost.pays(planned.units, params)
  needed = memory.estimate(loss_fn, params, example, planned if pays else None)
  return Explanation(rows, planned.platform, not pays, needed.per_example)


def _row(unit: Unit, paths: Sequence[str], shapes: Sequence[Any], platform: str) -> UnitRow:
  names = dict.fromkeys(site.name for site in unit.sites)
  return UnitRow(
    sites=", ".join(names),
    params=tuple(paths[i] or "params" for i in unit.leaves),
    shapes=tuple(shapes[i] for i in unit.leaves),
    rule=str(unit.rule),
    sum=str(sum_of(unit)),
    chunk=cost_model.chunk(unit.cost, platform),
    flops=unit.cost.flops,
    bytes=unit.cost.elements * np.dtype(np.float32).itemsize,
    reason=unit.reason,
  )

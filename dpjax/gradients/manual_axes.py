"""Marks values under `shard_map` as different on each device, even if they are equal.

If a value is the same on all devices, JAX adds its gradient up over the devices. That is too
early for gradients that must first be clipped example by example. So parameters (and the taps of
`ghost.tapped`) are first marked as different on each device.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from dpjax.types import ArrayTree


def _varying_axes(tree: Any) -> frozenset[str]:
  types = [getattr(jax.typeof(x), "manual_axis_type", None) for x in jax.tree.leaves(tree)]
  return frozenset().union(*(getattr(each, "varying", ()) for each in types))


def as_varying_as(reference: ArrayTree, tree: ArrayTree) -> Any:
  """Marks the tree as different on every device along the axes for which `reference` is marked.

  Outside `shard_map` this changes nothing.
  """
  axes = _varying_axes(reference)

  def mark(leaf):
    missing = tuple(sorted(axes - _varying_axes(leaf)))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(mark, tree)

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


def varying_axes(tree: ArrayTree) -> set[str]:
  """Returns the axes of a mesh along which some leaf is marked; none outside of `shard_map`."""
  axes: set[str] = set()
  for leaf in jax.tree.leaves(tree):
    marks = getattr(jax.typeof(leaf), "manual_axis_type", None)
    axes.update(getattr(marks, "varying", ()))
  return axes


def as_varying_as(reference: ArrayTree, tree: ArrayTree) -> Any:
  """Marks the tree as different on every device along the axes for which `reference` is marked.

  Outside `shard_map` this changes nothing.
  """
  axes = varying_axes(reference)
  if not axes:
    return tree

  def mark(leaf):
    missing = tuple(sorted(axes - varying_axes(leaf)))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(mark, tree)

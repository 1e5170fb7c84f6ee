"""Flow of parameters from their leaves to each site, and of gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from dpjax import trees
from dpjax.gradients import jaxprs
from dpjax.gradients.ghost import tapped
from dpjax.gradients.ghost.jaxpr_sites import Program, Site


class ParamFlow(NamedTuple):
  """The part of a program that depends on the parameters alone, as one flat jaxpr."""

  jaxpr: Any
  consts: Sequence[Any]
  leaves: Sequence[jax.Array]  # at least float32
  positions: dict[int, tuple[int, ...]]  # site index -> positions among the results

  @classmethod
  def of(cls, program: Program, leaves: Sequence[Any]) -> ParamFlow:
    """Returns the flow of a program's parameters, traced once by `tapped.site_params`."""
    floats = [jaxprs.is_float(leaf) for leaf in leaves]
    wide = [trees.at_least_float32(x) if y else x for x, y in zip(leaves, floats)]
    trace = jax.make_jaxpr(lambda xs: tapped.site_params(program, xs), return_shape=True)
    closed, shapes = trace(wide)
    count = len(jax.tree.leaves(shapes))
    positions = jax.tree.unflatten(jax.tree.structure(shapes), range(count))
    return cls(closed.jaxpr, closed.consts, wide, positions)

  def pull(
    self, leaves: Sequence[int], sites: Sequence[Site]
  ) -> tuple[dict[int, tuple[Any, ...]], Callable[..., tuple[jax.Array, ...]]]:
    """Returns (values that the sites see, transpose from their cotangents to gradients of
    the leaves).

    The transpose takes {site index: one array per parameter of the site}.
    """

    def forward(chosen):
      known = dict(zip(leaves, chosen))
      inputs = [known.get(i, leaf) for i, leaf in enumerate(self.leaves)]
      places = {site.index: self.positions[site.index] for site in sites}
      wanted = [self.jaxpr.outvars[i] for i in jax.tree.leaves(places)]
      values = jaxprs.evaluated(self.jaxpr, self.consts, inputs, wanted=wanted)
      return jax.tree.unflatten(jax.tree.structure(places), values)

    chosen = tuple(self.leaves[i] for i in leaves)  # [*leaf]
    seen, transpose = jax.vjp(forward, chosen)  # of each site: [*source.loops, *param]

    def back(cotangents):
      # The transpose takes cotangents of exactly the types that the sites saw.
      cast = lambda g, x: tapped.cast(g, x.dtype)
      return transpose(jax.tree.map(cast, cotangents, seen))[0]  # [*leaf]

    return seen, back

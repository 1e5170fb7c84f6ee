"""From the parameter leaves to what each site sees, and gradients back again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from dpjax import trees
from dpjax.gradients import jaxpr_sites, tapped
from dpjax.gradients.jaxpr_sites import Program, Site


class ParamFlow(NamedTuple):
  """The part of a program that depends on the parameters alone, as one flat jaxpr."""

  jaxpr: Any
  consts: Sequence[Any]
  leaves: Sequence[jax.Array]  # at least float32
  slots: dict[int, tuple[int, ...]]  # site index -> positions among the results

  @classmethod
  def of(cls, program: Program, leaves: Sequence[Any]) -> ParamFlow:
    """Traces `tapped.site_params` once."""
    wide = [trees.at_least_float32(leaf) if _is_float(leaf) else leaf for leaf in leaves]
    trace = jax.make_jaxpr(lambda xs: tapped.site_params(program, xs), return_shape=True)
    closed, shapes = trace(wide)
    count = len(jax.tree.leaves(shapes))
    slots = jax.tree.unflatten(jax.tree.structure(shapes), range(count))
    return cls(closed.jaxpr, closed.consts, wide, slots)

  def pull(
    self, leaves: Sequence[int], sites: Sequence[Site]
  ) -> tuple[dict[int, tuple[Any, ...]], Callable[..., tuple[jax.Array, ...]]]:
    """(what the sites see, transpose from cotangents of that to gradients of the leaves).

    The transpose takes {site index: one array per parameter of the site}.
    """

    def forward(chosen):
      known = dict(zip(leaves, chosen))
      inputs = [known.get(i, leaf) for i, leaf in enumerate(self.leaves)]
      return self._evaluate(inputs, [site.index for site in sites])

    seen, transpose = jax.vjp(forward, tuple(self.leaves[i] for i in leaves))

    def back(cotangents):
      cast = lambda g, x: tapped.cast(g, x.dtype)
      return transpose(jax.tree.map(cast, cotangents, seen))[0]

    return seen, back

  def _evaluate(self, inputs, indices) -> dict[int, tuple[Any, ...]]:
    wanted = {i: [self.jaxpr.outvars[slot] for slot in self.slots[i]] for i in indices}
    env = dict(zip(self.jaxpr.constvars, self.consts))
    env.update(zip(self.jaxpr.invars, inputs))
    for eqn in _needed(self.jaxpr, [atom for atoms in wanted.values() for atom in atoms]):
      args = [env[v] for v in jaxpr_sites.operands(eqn)]
      env.update(zip(eqn.outvars, jaxpr_sites.eqn_fn(eqn)(*args)))
    return {i: tuple(env[atom] for atom in atoms) for i, atoms in wanted.items()}


def _is_float(leaf: Any) -> bool:
  return jaxpr_sites.is_float(leaf)


def _needed(jaxpr: Any, wanted: Sequence[Any]) -> list[Any]:
  """The equations on which the wanted variables depend, in order."""
  live, kept = set(wanted), []
  for eqn in reversed(jaxpr.eqns):
    if live.intersection(eqn.outvars):
      live.update(jaxpr_sites.operands(eqn))
      kept.append(eqn)
  return kept[::-1]

"""The oracle of the fast route: the vmap route, in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import gradients
from dpjax.gradients.ghost import route


def first_of(batch):
  return jax.tree.map(lambda leaf: leaf[0], batch)


def plan(loss_fn, params, example, *options, **more):
  """The recipe of a loss of ONE example."""
  loss = jax.make_jaxpr(lambda p, e: loss_fn(p, e))(params, example)
  return route.plan(loss, params, *options, **more)


def as_float64(tree):
  def cast(leaf):
    leaf = jnp.asarray(leaf)
    return leaf.astype(jnp.float64) if leaf.dtype == jnp.float32 else leaf

  return jax.tree.map(cast, tree)


def compiled(loss_fn, *, clip_norm=0.5, **options):
  """A program of both routes, for `both` and `check`: one for all values of the same shapes."""
  slow, fast = (
    gradients.clipped_grad(loss_fn, l2_clip_norm=clip_norm, method=method, **options)
    for method in ("vmap", "ghost")
  )
  return jax.jit(lambda p, b, m: (slow(p, b, m), fast(p, b, m)))


def both(loss_fn, params, batch, *, mask=True, run=None, **options):
  """(vmap, ghost) clipped sums, compiled together."""
  run = compiled(loss_fn, **options) if run is None else run
  return run(params, batch, mask)


def relative_error(a, b):
  flat = lambda tree: np.concatenate(
    [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
  )
  a, b = flat(a), flat(b)
  assert np.isfinite(a).all() and np.isfinite(b).all()
  return np.abs(a - b).max() / max(np.abs(a).max(), 1e-300)


def check(loss_fn, params, batch, *, bound=1e-10, **options):
  """Sums and norms of the two routes agree; the norms are not all zero."""
  slow, fast = both(loss_fn, params, batch, **options)
  assert jax.tree.structure(slow.total) == jax.tree.structure(fast.total)
  assert np.asarray(slow.norms).max() > 0
  assert relative_error(slow.norms, fast.norms) <= bound
  assert relative_error(slow.total, fast.total) <= bound
  assert relative_error(slow.losses, fast.losses) <= bound
  assert slow.l2_bound == fast.l2_bound

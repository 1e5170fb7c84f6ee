"""Routes of a clipped gradient, and norms of what comes out, for losses that nobody would write."""

import os

import jax
import numpy as np

ROUTES = {
  "auto": dict(method="auto"),
  "ghost": dict(method="ghost"),
  "vmap": dict(method="vmap"),
  "microbatched": dict(method="auto", microbatch_size=3),
}
SLACK = 1e-5  # the guarantee
# Losses of the acceptance run.
LOSSES = int(os.environ.get("DPJAX_ADVERSARY_LOSSES", "200"))


def flat(tree):
  leaves = [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
  return np.concatenate(leaves)


def norm(numbers):
  """Of numbers up to 1e308."""
  largest = np.abs(numbers).max(initial=0)
  if 0 < largest < np.inf:
    return largest * np.linalg.norm(numbers / largest)
  return largest

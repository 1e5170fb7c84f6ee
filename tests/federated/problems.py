"""Tiny federations whose answers can be worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np


def quadratic(w, x):
  """0.5 ||w - x||^2: the gradient is w - x, the optimum of a client is its mean."""
  return 0.5 * jnp.sum((w["w"] - x) ** 2)


def network(params, example):
  """A small smooth network of one example x [3]."""
  hidden = jnp.tanh(example @ params["a"] + params["b"])
  return jnp.sum((hidden @ params["c"] - example[0]) ** 2)


def network_params():
  rng = np.random.default_rng(3)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32)
  return {"a": draw(3, 4), "b": draw(4), "c": draw(4, 2)}


def ragged(sizes=(5, 1, 0, 7, 3), seed=0, width=3):
  """Clients of these sizes, own arrays."""
  rng = np.random.default_rng(seed)
  return [np.asarray(rng.normal(size=(n, width)), np.float32) for n in sizes]


def assert_trees_close(a, b, rtol=2e-5, atol=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)

"""Rounding of inner products of rows, where an example's rows nearly cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import gradients

_CLIP = 0.01


@pytest.mark.parametrize(("inner", "width"), [(4096, 64), (16384, 8), (1024, 16)])
@pytest.mark.parametrize("kind", ["constant", "uniform"])
def test_rows_that_nearly_cancel_are_within_the_bound(inner, width, kind):
  """A blank patch twice, with opposite signs: 6.7 bounds before the rounding was charged."""
  shares = np.geomspace(3e-4, 3e-2, 12)
  rng = np.random.default_rng(0)
  draw = (
    (lambda: np.full(inner, 0.3)) if kind == "constant" else (lambda: rng.random(inner))
  )
  firsts = [draw() for _ in shares]
  rows = [np.stack([u, -u * (1 + share)]) for u, share in zip(firsts, shares)]
  batch = {
    "x": np.stack(rows).astype(np.float32),  # [B, 2, K]
    "g": np.ones((len(shares), 2, width), np.float32),
  }

  def loss_fn(w, example):
    return jnp.sum((example["x"] @ w) * example["g"])

  w = jnp.zeros((inner, width))
  clipped = jax.jit(gradients.clipped_grad(loss_fn, l2_clip_norm=_CLIP))
  for i in range(len(shares)):
    term = np.asarray(clipped(w, batch, np.arange(len(shares)) == i).total, np.float64)
    assert np.linalg.norm(term) <= _CLIP * (1 + 1e-5)

"""Rounding of inner products of rows, where an example's rows nearly cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import gradients
from dpjax.gradients.ghost import units
from dpjax.gradients.ghost.units import Rule

_CLIP = 0.01


@pytest.mark.cases(slow=["uniform-16384-8"], long=...)
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


def _blank(rows, inner, width, share):
  """Constant rows; the second half of them nearly cancels the first."""
  operand = np.full((rows, inner), 0.3)
  operand[rows // 2 :] *= -(1 + share)
  return operand.astype(np.float32), np.ones((rows, width), np.float32)


@pytest.mark.cases(slow=["1000-1-8"], long=...)
@pytest.mark.parametrize(("rows", "inner", "width"), [(64, 64, 64), (1000, 1, 8)])
def test_the_rounding_of_a_sum_of_many_rows_is_charged(rows, inner, width, monkeypatch):
  """A charge of eps let the very numbers that are summed be 1.01 and 1.05 bounds long."""
  product = lambda forms, platform: (Rule.PRODUCT, units.cost_model.outer(forms[0]), False)
  monkeypatch.setattr(units, "_cheapest", product)
  # Rows of the first cancel so far that each is added alone. Others are summed at once.
  shares = [0.0, *np.geomspace(1e-7, 3e-3, 4), *np.geomspace(1.5e-2, 1e-1, 6)]
  batch = tuple(map(np.stack, zip(*(_blank(rows, inner, width, s) for s in shares))))
  loss = lambda w, example: jnp.sum((example[0] @ w) * example[1])
  run = jax.jit(gradients.clipped_grad(loss, l2_clip_norm=_CLIP, method="ghost"))
  for alone in np.eye(len(shares), dtype=bool):
    term = np.asarray(run(jnp.zeros((inner, width)), batch, alone).total, np.float64)
    assert np.linalg.norm(term) <= _CLIP * (1 + 1e-5)


@pytest.mark.cases(long=["product"])
@pytest.mark.parametrize("rule", [Rule.GRAM, Rule.PRODUCT])
def test_rows_that_cancel_near_the_largest_float_are_kept(rule, monkeypatch):
  cheapest = lambda forms, platform: (rule, units.cost_model.outer(forms[0]), False)
  monkeypatch.setattr(units, "_cheapest", cheapest)
  loss = lambda w, example: jnp.sum((example[0] @ w) * example[1])
  operand = np.array([[[2e38], [-2e38]]], np.float32)
  batch = operand, np.ones((1, 2, 1), np.float32)
  run = jax.jit(gradients.clipped_grad(loss, l2_clip_norm=1.0, method="ghost"))
  assert np.isfinite(run(jnp.zeros((1, 1)), batch, True).norms).all()

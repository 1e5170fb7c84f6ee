"""Rounding of inner products of rows, where an example's rows nearly cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import gradients
from dpjax.gradients.ghost import precision, row_forms, units
from dpjax.gradients.ghost.row_forms import RowFactors
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


# --- lengths by themselves, against float64


def _dense(rows, size):
  """Integer rows as one-hot rows, where -1 is a row of zeros."""
  return np.where((rows >= 0)[..., None], np.eye(size)[np.maximum(rows, 0)], 0.0)


@pytest.mark.parametrize("one_hot", [(True, False), (False, True), (True, True)])
def test_inner_products_of_tokens_are_those_of_one_hot_rows(one_hot):
  rng = np.random.default_rng(0)
  sides = []
  exact = []
  for count, tokens in zip((7, 5), one_hot):
    rows = np.array([[0, 1, 2, 3, 0, -1, 1][:count]])
    side = rows if tokens else rng.normal(size=(1, count, 4)).astype(np.float32)
    sides.append(jnp.asarray(side))
    exact.append(_dense(side, 4) if tokens else side)
  gram = np.asarray(row_forms.side_gram(*sides), np.float64)
  np.testing.assert_allclose(gram, exact[0] @ exact[1].swapaxes(1, 2), atol=1e-5)


def _rows(count=6, inner=64, width=48, left=1.0, right=1.0):
  rng = np.random.default_rng(1)
  sides = (1, count, inner), (1, count, width)
  values = [scale * rng.normal(size=shape) for scale, shape in zip((left, right), sides)]
  return [value.astype(np.float32) for value in values]


def _exact(a, g):
  a, g = (side.astype(np.float64) for side in (a, g))
  return float(np.linalg.norm(a[0].T @ g[0]))


def test_a_gram_is_charged_for_the_rounding_of_inner_products():
  """eps times 4 |pairs| and half of K |a| |a'| |<g, g'>| + P |<a, a'>| |g| |g'|, for each pair."""
  a, g = _rows()
  eps = float(jnp.finfo(jnp.float32).eps)
  length = row_forms.gram_length([RowFactors(*map(jnp.asarray, (a, g)))]).lengths[0]
  a, g = (side[0].astype(np.float64) for side in (a, g))
  grams = a @ a.T, g @ g.T
  most = [np.sqrt(np.outer(np.diag(gram), np.diag(gram))) for gram in grams]
  off = a.shape[1] * most[0] * np.abs(grams[1]) + g.shape[1] * np.abs(grams[0]) * most[1]
  size = np.sum(4 * np.abs(grams[0] * grams[1]) + off / 2)
  square = np.sum(grams[0] * grams[1]) + eps * size
  sizes = np.sum(np.sqrt(np.diag(grams[0]) * np.diag(grams[1])))
  # The charge is a hundred times what float32 rounds here.
  exact = np.sqrt(np.sum(grams[0] * grams[1]))
  charged = np.sqrt(square) + eps * sizes - exact
  assert charged > 5e-6 * exact
  assert float(length.norm) - exact == pytest.approx(charged, rel=0.1)


@pytest.mark.parametrize("left, right", [(1e6, 3e-22), (3e-22, 1e6)])
def test_squares_that_underflow_shorten_no_gram(left, right):
  a, g = _rows(left=left, right=right)
  found = row_forms.gram_length([RowFactors(*map(jnp.asarray, (a, g)))]).lengths[0]
  assert float(found.norm) < _exact(a, g) <= float(found.longest)


@pytest.mark.parametrize("growth", [0.0, 0.25])
def test_the_growth_of_a_rounded_product_is_added_to_a_length(growth, monkeypatch):
  rounded = precision.SumPrecision(jax.lax.Precision.HIGHEST, growth)
  monkeypatch.setattr(precision, "of_sums", lambda dtype: rounded)
  a, g = _rows(count=1)
  sides = RowFactors(*map(jnp.asarray, (a, g)))
  exact = (1 + growth) * _exact(a, g)
  assert float(row_forms.outer_length(sides).lengths[0].norm) == pytest.approx(
    exact, rel=1e-5
  )
  several = _rows(count=6)
  found = row_forms.gram_length([RowFactors(*map(jnp.asarray, several))]).lengths[0]
  reach = np.sum(np.prod([np.linalg.norm(side[0], axis=1) for side in several], axis=0))
  exact = _exact(*several) + growth * reach
  assert float(found.norm) == pytest.approx(exact, rel=1e-4)

"""Clipped sums of losses whose gradients are known in closed form: each is one line of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import gradients
from dpjax.gradients.ghost import row_forms
from tests import quick_compile

_RNG = np.random.default_rng(0)
_W = _RNG.normal(size=3)
_ROWS = _RNG.normal(size=(5, 4, 3))
_BOUND = 2.5


def _scanned(w, x):
  step = lambda total, row: (total + jnp.sum(row @ w), None)
  return lax.scan(step, jnp.float32(0), x)[0]


# The loss of one example x [4, 3] and its gradient [3].
_LOSSES = {
  "linear": (lambda w, x: jnp.sum(x @ w), lambda w, x: x.sum(0)),
  "squared": (lambda w, x: jnp.sum((x @ w) ** 2), lambda w, x: 2 * (x @ w) @ x),
  # P30: both uses of w count, and their cross terms.
  "tied": (
    lambda w, x: jnp.sum(x @ w) + jnp.sum(jnp.tanh(w)),
    lambda w, x: x.sum(0) + 1 / np.cosh(w) ** 2,
  ),
  # P31: a parameter inside a scan.
  "scan": (_scanned, lambda w, x: x.sum(0)),
}


def _by_hand(gradient, rows, mask):
  total = np.zeros(3)
  for x, taken in zip(rows, mask):
    row = gradient(_W, x)
    total += taken * row * min(1.0, _BOUND / np.linalg.norm(row))
  return total


def _compiled(grad_fn, *args):
  """A tolerance of 1e-5 sees no rounding."""
  with quick_compile.quickly():
    return jax.jit(grad_fn)(*args)


@pytest.mark.parametrize("method", ["vmap", "ghost"])
@pytest.mark.parametrize("name", _LOSSES)
def test_p30_p31_the_clipped_sum_is_the_textbooks(name, method):
  loss, gradient = _LOSSES[name]
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=_BOUND, method=method)
  found = _compiled(grad_fn, jnp.float32(_W), jnp.float32(_ROWS), True)
  np.testing.assert_allclose(
    found.total, _by_hand(gradient, _ROWS, [1] * 5), rtol=1e-5, atol=1e-6
  )
  norms = [np.linalg.norm(gradient(_W, x)) for x in _ROWS]
  np.testing.assert_allclose(found.norms, norms, rtol=1e-5, atol=1e-6)
  assert min(norms) < _BOUND < max(norms)
  np.testing.assert_allclose(
    found.losses, [loss(_W, x) for x in _ROWS], rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_p7_p11_padding_adds_nothing_and_each_example_is_clipped_by_itself(microbatch_size):
  loss, gradient = _LOSSES["linear"]
  grad_fn = gradients.clipped_grad(
    loss, l2_clip_norm=_BOUND, method="vmap", microbatch_size=microbatch_size
  )
  mask = np.array([True, False, True, True, False])
  rows = np.where(mask[:, None, None], _ROWS, np.nan)
  found = _compiled(grad_fn, jnp.float32(_W), jnp.float32(rows), jnp.asarray(mask))
  np.testing.assert_allclose(
    found.total, _by_hand(gradient, _ROWS, mask), rtol=1e-5, atol=1e-6
  )


@pytest.mark.cases(slow=["ghost"])
@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_rows_of_every_chosen_matrix_count_the_first_too(method):
  """Row t of an example meets matrix index[t]: its gradient is x_t in each column, there alone."""
  index = np.array([[0, 0, 2, 1], [0, 0, 0, 0], [2, 2, 1, 0], [1, 1, 1, 1], [0, 2, 0, 2]])

  def loss(w, example):
    x, index = example
    return jnp.sum(jnp.einsum("ti,tip->tp", x, w[index]))

  expected = np.zeros((3, 3, 2))
  for x, rows in zip(_ROWS, index):
    row = np.zeros((3, 3, 2))
    np.add.at(row, rows, x[:, :, None] * np.ones(2))
    expected += row * min(1.0, _BOUND / np.linalg.norm(row))
  grad_fn = gradients.clipped_grad(loss, l2_clip_norm=_BOUND, method=method)
  batch = (jnp.float32(_ROWS), jnp.asarray(index))
  found = _compiled(grad_fn, jnp.ones((3, 3, 2)), batch, True)
  np.testing.assert_allclose(found.total, expected, rtol=1e-5, atol=1e-6)


def test_the_length_of_a_sum_of_products_counts_every_part():
  """|3, 4| |1, 0| + |0, 1| |0, 2| = 7 for each of two parts; the products' sum has length 2 |P|."""
  left = jnp.array([[[3.0, 4.0], [0.0, 1.0]]])
  right = jnp.array([[[1.0, 0.0], [0.0, 2.0]]])
  parts = [row_forms.RowFactors(left, right)] * 2
  summed = row_forms.summed_product(parts, 2)
  np.testing.assert_allclose(summed[0], 2 * np.array([[3.0, 0.0], [4.0, 2.0]]))
  lengths = row_forms.with_rounding(summed, parts)
  assert float(lengths.reach) == pytest.approx(14, rel=1e-3)
  norm = float(lengths.lengths[0].norm)
  assert 2 * np.sqrt(29) < norm < 2 * np.sqrt(29) + 14 * 1e-6

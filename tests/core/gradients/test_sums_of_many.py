"""One example more, in a sum of many others that were chosen to be rounded otherwise beside it.

Sums of floats that are added one after the other: Casacuberta et al. 2022, arXiv:2207.10635.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import gradients
from dpjax.gradients.weighted_sums import dot_examples

_MOST = 1.04


def _terms(count):
  """Terms of at most 1; the one in the middle moves the sum of those before it over 2^k.

  There each pair of later ones, 1.1 and -.9 units of the last place below 2^k, adds two of them
  above 2^k, and nothing below it.
  """
  half = count // 2
  unit = half * 2.0**-24
  assert np.log2(half) % 1 == 0
  after = np.where(np.arange(half - 1) % 2 == 0, 1.1 * unit, -0.9 * unit)
  return np.concatenate([np.ones(half - 1), [0.5, 1.0], after]).astype(np.float32), half


def _one_after_the_other(terms):
  total = np.float32(0)
  for term in terms:
    total = total + term
  return float(total)


def test_the_attack_works_on_a_plain_sum():
  terms, middle = _terms(16384)
  without = np.delete(terms, middle)
  assert _one_after_the_other(terms) - _one_after_the_other(without) > 4.9


def _of_table(w, example):
  return jnp.sum(example["g"] * w[example["token"]])


def _of_matrix(w, example):
  return jnp.sum((example["x"] @ w) * example["g"])


def _of_standardised(w, example):
  # No rows: each example's gradient is formed again, in a loop.
  return jnp.sum((example["x"] @ (w * (1 + 0 * jnp.sum(w)))) * example["g"])


def _batch(terms, rows, width):
  """Terms are cut into equal rows. Of those after the middle, each row is a pair's half."""
  count = len(terms)
  right = np.zeros((count, rows, width), np.float32)
  right[:, :, 0] = terms[:, None] / rows
  if rows > 1:
    right[count // 2 + 1 :, :, 0] = np.tile(terms[-2:], rows // 2)
  left = np.zeros((count, rows, width), np.float32)
  left[:, :, 0] = 1
  return {"x": left, "g": right, "token": np.zeros((count, rows), np.int32)}


def _moves(run, batch, middle):
  keep = np.arange(len(batch["g"])) != middle
  both = [np.asarray(run(batch, mask), np.float64) for mask in (keep | True, keep)]
  exact = np.sum(batch["g"][keep], dtype=np.float64)
  assert abs(both[1].sum() - exact) <= 0.04
  return np.linalg.norm(both[0] - both[1])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("loss_fn", "count", "rows", "options"),
  [
    (_of_table, 16384, 1, {}),
    (_of_table, 2048, 64, {}),
    (_of_table, 16384, 1, {"method": "vmap"}),
    (_of_matrix, 16384, 1, {"method": "vmap"}),
    (_of_matrix, 16384, 1, {"method": "ghost"}),
    (_of_matrix, 2048, 64, {"method": "ghost"}),
    (_of_matrix, 16384, 1, {"method": "ghost", "microbatch_size": 1}),
    (_of_standardised, 16384, 1, {"method": "ghost"}),
  ],
)
def test_one_example_moves_a_sum_of_many_by_its_own_term(loss_fn, count, rows, options):
  """Up to 5 bounds in these sums, and 65 in those of 65,536 rows of a table."""
  terms, middle = _terms(count)
  width = 80
  batch = _batch(terms, rows, width)
  w = jnp.zeros((8 if loss_fn is _of_table else width, width))
  clipped = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, **options)
  run = jax.jit(lambda batch, mask: clipped(w, batch, mask).total)
  assert _moves(run, batch, middle) <= _MOST


@pytest.mark.slow
def test_examples_that_are_added_alone_are_summed_as_exactly():
  terms, middle = _terms(8192)
  # Their squares overflow, so that each is formed and added by itself.
  clip = 1e20
  batch = {"g": (terms * clip).astype(np.float32)}
  loss = lambda w, example: jnp.sum(w * example["x"][:, None] * example["g"])
  batch["x"] = np.ones((8192, 2), np.float32) * np.float32(0.5**0.5)
  clipped = gradients.clipped_grad(loss, l2_clip_norm=clip, method="ghost")
  run = jax.jit(lambda batch, mask: clipped(jnp.zeros((2, 1)), batch, mask).total / clip)
  keep = np.arange(8192) != middle
  both = [np.asarray(run(batch, mask), np.float64) for mask in (keep | True, keep)]
  assert np.linalg.norm(both[0] - both[1]) <= _MOST


@pytest.mark.parametrize("count", [2053, 4096])
def test_parts_add_up(count):
  rng = np.random.default_rng(0)
  weights = rng.normal(size=count).astype(np.float32)
  leaf = rng.normal(size=(count, 3, 2)).astype(np.float32)
  exact = np.tensordot(weights.astype(np.float64), leaf.astype(np.float64), axes=1)
  np.testing.assert_allclose(
    dot_examples(jnp.asarray(weights), jnp.asarray(leaf)), exact, atol=1e-3
  )


@pytest.mark.slow
@pytest.mark.parametrize("count", [61, 1031])
def test_tables_and_matrices_are_summed_in_parts_of_any_batch(count):
  """Prime batches, tokens in and outside of the table, and a dropped example."""
  rng = np.random.default_rng(1)
  rows, width = 33, 5
  batch = {
    "x": rng.normal(size=(count, rows, 7)).astype(np.float32),
    "g": rng.normal(size=(count, rows, width)).astype(np.float32),
    "token": rng.integers(-3, 12, (count, rows)).astype(np.int32),
  }
  batch["g"][5, 0, 0] = np.nan
  params = {"w": jnp.zeros((7, width)), "t": jnp.zeros((9, width))}
  loss = lambda p, e: _of_matrix(p["w"], e) + _of_table(p["t"], e)
  sums = [
    jax.jit(gradients.clipped_grad(loss, l2_clip_norm=1.0, method=method))(
      params, batch, mask=True
    ).total
    for method in ("ghost", "vmap")
  ]
  for name in params:
    np.testing.assert_allclose(sums[0][name], sums[1][name], atol=1e-3)

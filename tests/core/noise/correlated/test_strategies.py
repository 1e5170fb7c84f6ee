"""Each strategy's stream is C^{-1} z, and its coefficients are as good as anyone's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg

from dpjax.noise import correlated
from dpjax.noise.correlated import series, toeplitz
from tests.refuses import refuses

_STRATEGIES = {
  "independent": correlated.Independent(),
  "tree": correlated.Tree(restart_every=32),
  "tree_restarts": correlated.Tree(restart_every=5),
  "one_band": correlated.BandedToeplitz((1.0,)),
  "banded": correlated.BandedToeplitz.optimized(num_steps=23, bands=6),
  "all_bands": correlated.BandedToeplitz.optimized(num_steps=23, bands=23),
  "blt": correlated.BufferedToeplitz.optimized(num_steps=23, buffers=3, steps_apart=5),
  "inverse": correlated.InverseBanded.square_root(5, redraw=False),
}
_every = pytest.mark.parametrize("strategy", _STRATEGIES.values(), ids=_STRATEGIES)


def _stream(strategy, white):
  """The recurrence, one row of [n, 2] at a time, compiled once."""
  step = jax.jit(strategy.next)
  state, rows = strategy.init({"w": white[0]}), []
  for row in white:
    out, state = step({"w": row}, state)
    rows.append(out["w"])
  return np.array(rows), state


@pytest.mark.cases(quick=["banded", "blt", "inverse"], long=...)
@_every
def test_the_stream_is_the_dense_inverse(strategy, x64):
  white = jnp.asarray(np.random.default_rng(0).normal(size=(23, 2)))
  dense = correlated.matrix(strategy, 23)
  rows, _ = _stream(strategy, white)
  np.testing.assert_allclose(rows, np.linalg.solve(dense, np.asarray(white)), atol=1e-12)


@pytest.mark.cases(quick=["banded", "blt", "inverse"], long=...)
@_every
def test_float32_streams_stay_close_and_are_float32_at_least(strategy):
  white = jnp.asarray(np.random.default_rng(1).normal(size=(23, 2)), jnp.float32)
  rows, _ = _stream(strategy, white)
  expected = np.linalg.solve(correlated.matrix(strategy, 23), np.asarray(white, np.float64))
  np.testing.assert_allclose(rows, expected, atol=2e-5)
  half = strategy.init({"w": jnp.zeros(2, jnp.bfloat16)})
  floats = [x for x in jax.tree.leaves(half) if jnp.issubdtype(x.dtype, jnp.floating)]
  assert all(leaf.dtype == jnp.float32 for leaf in floats)


@_every
def test_c_is_lower_triangular_with_a_unit_diagonal_and_no_negative_entry(strategy):
  dense = correlated.matrix(strategy, 23)
  assert not np.triu(dense, 1).any() and (np.diag(dense) == 1).all() and dense.min() >= 0
  if strategy.bands is not None:
    assert not np.tril(dense, -strategy.bands).any()
  np.testing.assert_array_equal(dense[:9, :9], correlated.matrix(strategy, 9))
  if strategy.toeplitz:
    np.testing.assert_allclose(dense[1:, 1:], dense[:-1, :-1], atol=1e-15)


@_every
def test_memory_is_what_is_stated(strategy):
  state = strategy.init(jnp.zeros(7))
  held = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim)
  assert held == 7 * strategy.buffers


@pytest.mark.parametrize("bands", [3, 64, 65, 200])
def test_many_bands_are_multiplied_as_few_are(bands):
  random = np.random.default_rng(0)
  coefficients, x = random.random(bands), random.normal(size=(150, 2))
  dense = linalg.toeplitz(np.pad(coefficients, (0, 150))[:150], np.zeros(150))
  np.testing.assert_allclose(toeplitz._times(coefficients, x), dense @ x, atol=1e-10)


def test_tree_prefix_noise_is_one_node_for_each_bit():
  n = 40
  dense = correlated.matrix(correlated.Tree(restart_every=64), n)
  prefix = np.tril(np.ones((n, n))) @ np.linalg.inv(dense)
  bits = [bin(t).count("1") for t in range(1, n + 1)]
  np.testing.assert_allclose((prefix**2).sum(1), bits, atol=1e-12)
  assert (dense**2).sum(0).max() == 1 + int(np.log2(n))


def test_every_restart_is_a_new_tree():
  dense = correlated.matrix(correlated.Tree(restart_every=4), 12)
  block = correlated.matrix(correlated.Tree(restart_every=4), 4)
  np.testing.assert_array_equal(dense, np.kron(np.eye(3), block))


def test_a_tree_of_one_step_is_white_noise():
  np.testing.assert_array_equal(
    correlated.matrix(correlated.Tree(restart_every=1), 5), np.eye(5)
  )


# --- how good the coefficients are


def _error_times_norm(dense, reduce=np.mean):
  prefix = np.tril(np.ones_like(dense)) @ np.linalg.inv(dense)
  return reduce((prefix**2).sum(1)) * (dense**2).sum(0).max()


@pytest.mark.parametrize("objective", ["mean", "max"])
def test_prefix_error_is_that_of_the_dense_matrices(objective):
  strategy = _STRATEGIES["banded"]
  dense = correlated.matrix(strategy, 23)
  reduce = np.mean if objective == "mean" else np.max
  error = series.prefix_error(np.array(strategy.coefficients), 23, objective)
  norm = (dense**2).sum(0).max()
  assert error * norm == pytest.approx(_error_times_norm(dense, reduce), rel=1e-12)


def _peer_loss(coefficients, num_steps):
  toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")

  with jax.enable_x64(True):
    return float(toeplitz.loss(jnp.asarray(coefficients, jnp.float64), num_steps))


@pytest.mark.cases(slow=["16"], long=...)
@pytest.mark.parametrize("bands", [2, 5, 16])
def test_bands_are_as_good_as_jax_privacys(bands):
  toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")

  ours = correlated.BandedToeplitz.optimized(num_steps=64, bands=bands).coefficients
  with jax.enable_x64(True):
    theirs = np.asarray(toeplitz.optimize_banded_toeplitz(64, bands))
  loss = _peer_loss(ours, 64)
  assert loss <= _peer_loss(theirs, 64) * (1 + 1e-5)
  assert _peer_loss(series.square_root(bands), 64) > loss  # the start was not the answer


@pytest.mark.slow
def test_bands_are_close_to_the_dense_optimum():
  dense = pytest.importorskip("jax_privacy.matrix_factorization.dense")

  with jax.enable_x64(True):
    best = np.asarray(dense.optimize(24, epochs=1, bands=6))
  ours = correlated.matrix(correlated.BandedToeplitz.optimized(num_steps=24, bands=6), 24)
  ratio = _error_times_norm(ours) / _error_times_norm(best)
  assert 1 - 1e-6 <= ratio < 1.05  # Toeplitz costs a few per cent
  assert _error_times_norm(np.eye(24)) / _error_times_norm(best) > 2


def test_all_bands_reach_the_square_root_for_the_largest_error():
  found = correlated.BandedToeplitz.optimized(num_steps=32, bands=32, objective="max")
  best = series.square_root(32)  # optimal: Dvijotham et al. 2024
  loss = lambda c: series.prefix_error(np.asarray(c), 32, "max") * np.sum(np.square(c))
  assert loss(found.coefficients) == pytest.approx(loss(best), rel=1e-5)


def _blt(buffers):
  return correlated.BufferedToeplitz.optimized(
    num_steps=100, buffers=buffers, steps_apart=100, objective="max"
  )


def _blt_loss(scales, decays):
  c = series.buffered_coefficients(np.array(scales), np.array(decays), 100)
  return series.prefix_error(c, 100, "max") * np.sum(c**2)


def test_buffers_approach_the_optimum():
  losses = [_blt_loss(one.scales, one.decays) for one in map(_blt, (1, 2, 3))]
  best = series.prefix_error(series.square_root(100), 100, "max") ** 2
  assert losses[0] > losses[1] > losses[2] > best * (1 - 1e-6)
  assert losses[2] < 1.002 * best < losses[0]


@pytest.mark.long
def test_buffers_are_as_good_as_jax_privacys():
  peer = "jax_privacy.matrix_factorization.buffered_toeplitz"
  buffered_toeplitz = pytest.importorskip(peer)
  with jax.numpy_rank_promotion("allow"):
    theirs = buffered_toeplitz.optimize(n=100, min_buffers=2, max_buffers=2)
  ours = _blt(2)
  loss = _blt_loss(ours.scales, ours.decays)
  assert loss <= 1.001 * _blt_loss(theirs.output_scale, theirs.buf_decay)


def test_the_gradients_of_the_optimisers_are_exact():
  at = np.array([0.1, -0.2])
  loss = series._with_gradient(lambda v: np.exp(v[0]) * np.sin(v[1]))
  expected = [np.exp(0.1) * np.sin(-0.2), np.exp(0.1) * np.cos(-0.2)]
  np.testing.assert_allclose(loss(at)[1], expected, rtol=1e-12)


@settings(max_examples=20)
@given(num_steps=st.integers(1, 60), bands=st.integers(1, 20))
def test_optimised_bands_fall_and_never_lose_to_white_noise(num_steps, bands):
  c = np.array(
    correlated.BandedToeplitz.optimized(num_steps=num_steps, bands=bands).coefficients
  )
  assert c[0] == 1 and (np.diff(c) <= 0).all() and c.min() >= 0
  loss = series.prefix_error(c, num_steps) * np.sum(c[:num_steps] ** 2)
  assert loss <= series.prefix_error(np.ones(1), num_steps) * (1 + 1e-6)


def test_coefficients_are_float32_numbers_so_that_c_is_what_runs():
  strategy = correlated.BandedToeplitz((1.0, 0.1))
  assert strategy.coefficients[1] == float(np.float32(0.1)) != 0.1
  buffered = correlated.BufferedToeplitz((0.3,), (0.9,))
  assert buffered.decays == (float(np.float32(0.9)),)


@pytest.mark.cases(long=[11, 12, 13])
@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: correlated.Tree(restart_every=0), "restart_every"),
    (lambda: correlated.BandedToeplitz(()), "coefficients"),
    (lambda: correlated.BandedToeplitz((2.0, 1.0)), "coefficients"),
    (lambda: correlated.BandedToeplitz((1.0, -0.5)), "coefficients[1]"),
    (lambda: correlated.BandedToeplitz((1.0, float("nan"))), "coefficients[1]"),
    (lambda: correlated.BandedToeplitz((1.0, 0.2, 0.3)), "coefficients[2]"),
    (lambda: correlated.BufferedToeplitz((0.8, 0.3), (0.5, 0.1)), "scales"),
    (lambda: correlated.BufferedToeplitz((0.1,), (0.1, 0.2)), "decays"),
    (lambda: correlated.BufferedToeplitz((0.1,), (1.5,)), "decays"),
    (lambda: correlated.BandedToeplitz.optimized(num_steps=0, bands=1), "num_steps"),
    (lambda: correlated.BandedToeplitz.optimized(num_steps=4, bands=0), "bands"),
    (
      lambda: correlated.BandedToeplitz.optimized(num_steps=4, bands=2, objective="avg"),
      "objective",
    ),
    (
      lambda: correlated.BufferedToeplitz.optimized(num_steps=4, buffers=0, steps_apart=1),
      "buffers",
    ),
    (lambda: correlated.matrix(correlated.Independent(), 0), "num_steps"),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field) as caught:
    make()
  assert "\n" not in str(caught.value)

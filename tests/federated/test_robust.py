"""Robust aggregators against NumPy, with padding and broken clients among the messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.federated import geometric_median, krum, median, trimmed_mean
from tests.refuses import refuses

_UPDATES = {
  "median": jax.jit(median().update),
  "trimmed": jax.jit(trimmed_mean(0.25).update),
  "krum": jax.jit(krum(1).update),
  "multi_krum": jax.jit(krum(1, num_selected=3).update),
  "geometric": jax.jit(geometric_median(100).update),
}


def _krum(x, f, m):
  distances = ((x[:, None] - x[None]) ** 2).sum(-1)
  scores = [
    np.sort(np.delete(row, i))[: len(x) - f - 2].sum() for i, row in enumerate(distances)
  ]
  return x[np.argsort(scores, kind="stable")[:m]].mean(0)


def _trimmed(x, share):
  cut = int(share * len(x) + 1e-6)
  return np.sort(x, axis=0)[cut : len(x) - cut].mean(0)


_ORACLES = {
  "median": lambda x: np.median(x, axis=0),
  "trimmed": lambda x: _trimmed(x, 0.25),
  "krum": lambda x: _krum(x, 1, 1),
  "multi_krum": lambda x: _krum(x, 1, 3),
}


def _padded(rows):
  """Eight slots: the rows, a NaN, an infinity, and padding that holds rubbish."""
  whole = np.full((8, 2), 7.0, np.float32)
  whole[: len(rows)] = rows
  whole[len(rows)] = np.nan
  whole[len(rows) + 1] = [np.inf, 0.0]
  return {"a": whole[:, :1], "b": whole[:, 1]}, np.arange(8) < len(rows) + 2


@pytest.mark.cases(quick=["trimmed"], long=...)
@pytest.mark.parametrize("name", sorted(_ORACLES))
@settings(max_examples=15)
@given(st.integers(5, 6), st.integers(0, 100))
def test_each_agrees_with_numpy_on_the_clients_that_count(name, count, seed):
  rows = np.asarray(np.random.default_rng(seed).normal(size=(count, 2)), np.float32)
  messages, mask = _padded(rows)
  found, _ = _UPDATES[name](messages, mask, ())
  expected = _ORACLES[name](rows)
  np.testing.assert_allclose(
    np.hstack([found["a"], found["b"]]), expected, rtol=1e-4, atol=1e-5
  )


def test_the_geometric_median_is_a_minimum():
  rows = np.asarray(np.random.default_rng(0).normal(size=(5, 2)), np.float32)
  messages, mask = _padded(rows)
  found, _ = _UPDATES["geometric"](messages, mask, ())
  point = np.hstack([found["a"], found["b"]])
  cost = lambda p: np.linalg.norm(rows - p, axis=1).sum()
  around = [cost(point + 0.02 * np.array([np.cos(t), np.sin(t)])) for t in range(7)]
  assert cost(point) < min(around)


@pytest.mark.cases(long=["krum", "multi_krum"])
@pytest.mark.parametrize("name", sorted(_UPDATES))
def test_a_minority_cannot_carry_the_result_away(name):
  rows = np.asarray(np.random.default_rng(1).normal(size=(5, 2)), np.float32)
  messages, mask = _padded(rows)
  messages["a"][4], messages["b"][4] = 1e6, -1e6
  found, _ = _UPDATES[name](messages, mask, ())
  assert max(abs(float(found["a"][0])), abs(float(found["b"]))) < 10


@pytest.mark.cases(long=["krum", "multi_krum"])
@pytest.mark.parametrize("name", sorted(_UPDATES))
def test_nobody_is_zero(name):
  messages, _ = _padded(np.zeros((4, 2)))
  found, _ = _UPDATES[name](messages, np.zeros(8, bool), ())
  jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 0), found)


def test_weights_do_not_steer():
  x, mask = jnp.array([[1.0], [2.0], [9.0]]), jnp.ones(3, bool)
  heavy = median().update(x, mask, (), jnp.array([1.0, 1.0, 1e6]))[0]
  assert float(heavy[0]) == 2.0
  without = median().update(x, mask, (), jnp.array([0.0, 1.0, 1.0]))[0]
  assert float(without[0]) == 5.5  # a client that holds nothing has no vote


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: trimmed_mean(0.5), "trim"),
    (lambda: trimmed_mean(-0.1), "trim"),
    (lambda: krum(-1), "num_byzantine"),
    (lambda: krum(1, num_selected=0), "num_selected"),
    (lambda: geometric_median(0), "num_iterations"),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field):
    make()

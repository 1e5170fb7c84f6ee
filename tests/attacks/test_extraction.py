"""Model extraction: exact where equations can be solved, and fidelity that is counted honestly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import attacks
from dpjax.attacks import extraction
from dpjax.attacks.extraction import solve_softmax
from dpjax.attacks.fitting import Fit
from dpjax.validate import UserError
from tests.refuses import refuses

_D, _K = 12, 4


def _linear(w, x):
  return x @ w["kernel"] + w["bias"][None]


def _weights(seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return {"kernel": draw(_D, _K), "bias": draw(_K)}


def _inputs(n, seed=1):
  return (np.random.default_rng(seed).normal(size=(n, _D)) * 0.5).astype(np.float32)


def test_d_plus_1_queries_solve_a_linear_model_and_d_do_not():
  weights, x = _weights(), _inputs(_D + 1)
  answers = extraction.ask(_linear, weights)(x)
  kernel, bias = solve_softmax(x, answers)
  wanted = weights["kernel"] - weights["kernel"][:, :1]
  np.testing.assert_allclose(kernel, wanted, atol=1e-4)
  np.testing.assert_allclose(bias, weights["bias"] - weights["bias"][0], atol=1e-4)
  with refuses("x"):
    solve_softmax(x[:_D], answers[:_D])


def test_digits_that_are_taken_away_take_exactness_away():
  weights, x = _weights(), _inputs(_D + 1)
  errors = []
  for decimals in (6, 4, 2):
    door = extraction.ask(_linear, weights, decimals=decimals)
    kernel, _ = solve_softmax(x, np.maximum(door(x), 1e-6))
    errors.append(np.abs(kernel - weights["kernel"] + weights["kernel"][:, :1]).max())
  assert errors[0] < errors[1] < errors[2] and errors[2] > 0.05


def _extraction(**options):
  model = dpjax.zoo.networks.build("linear", num_classes=_K)
  init = lambda key: model.init(key, jnp.zeros((1, _D)))
  fit = Fit(**{**dict(steps=400, learning_rate=0.05, batch_size=64), **options})
  return attacks.Extraction(model.apply, init, fit)


@functools.cache
def _curve(labels_only, sizes=(10, 100, 1000)):
  door = extraction.ask(_linear, _weights(), labels_only=labels_only)
  queries, others = _inputs(1000, seed=2), _inputs(600, seed=3)
  return extraction.extraction_curve(
    _extraction(), door, queries, others, num_queries=sizes, seed=0
  )


@pytest.mark.long
def test_a_student_agrees_more_the_more_it_asks_and_the_more_it_is_told():
  probabilities, labels = _curve(False), _curve(True)
  assert [one.num_queries for one in probabilities] == [10, 100, 1000]
  probabilities, labels = ([one.alike for one in rows] for rows in (probabilities, labels))
  assert (
    probabilities[-1].rate > 0.97 and probabilities[0].rate < probabilities[-1].interval[0]
  )
  assert labels[0].rate < labels[-1].rate
  assert probabilities[1].rate > labels[1].interval[1]


@pytest.mark.slow
def test_a_student_of_random_answers_agrees_by_chance():
  rng = np.random.default_rng(0)
  door = extraction.ask(_linear, _weights())
  queries, others = _inputs(300, seed=2), _inputs(600, seed=3)
  answers = np.eye(_K)[rng.integers(0, _K, 300)]
  params = _extraction(steps=200)(queries, answers, seed=0)
  copy = extraction.ask(_extraction().apply, params)
  found = extraction.agreement(copy(others), door(others), num_queries=300)
  assert found.alike.rate < 0.45  # four labels, unequally frequent


def test_doors_say_what_they_are_told_to():
  weights, x = _weights(), _inputs(7)
  full = extraction.ask(_linear, weights, batch_size=3)(x)
  np.testing.assert_allclose(full, jax.nn.softmax(_linear(weights, x)), rtol=1e-5)
  labels = extraction.ask(_linear, weights, labels_only=True)(x)
  np.testing.assert_array_equal(labels.argmax(axis=1), full.argmax(axis=1))
  assert np.isin(labels, (0, 1)).all() and labels.sum() == 7
  np.testing.assert_allclose(
    extraction.ask(_linear, weights, decimals=2)(x), full.round(2), atol=1e-6
  )


def test_bad_extractions_are_one_line():
  refused = lambda words: pytest.raises(UserError, match=words)
  weights, x = _weights(), _inputs(20)
  door = extraction.ask(_linear, weights)
  with refused("decimals=2: labels have none"):
    extraction.ask(_linear, weights, labels_only=True, decimals=2)
  with refused("the model takes no such input"):
    door(np.zeros((2, 5), np.float32))
  with refused("at least one query"):
    door(x[:0])
  with refused("have no log odds"):
    solve_softmax(x, extraction.ask(_linear, weights, labels_only=True)(x))
  with refused(r"num_queries\[0\]=21: must be an integer in \[1, 20\]"):
    extraction.extraction_curve(_extraction(), door, x, x, num_queries=[21], seed=0)
  with refused("20 of 20 inputs are queries as well"):
    extraction.extraction_curve(_extraction(), door, x, x, num_queries=[20], seed=0)
  # The same numbers in another type, and with another zero, are the same inputs.
  x[0, 0] = 0.0
  other = x.astype(np.float64)
  other[0, 0] = -0.0
  with refused("20 of 20 inputs are queries as well"):
    extraction.extraction_curve(_extraction(), door, x, other, num_queries=[20], seed=0)
  with refused("the student has 4 classes: must have 3"):
    _extraction()(x, np.full((20, 3), 1 / 3), seed=0)
  with refused("are 19 to 20 queries"):
    _extraction()(x, door(x)[:19], seed=0)
  with refused("must be that of the answers"):
    extraction.agreement(door(x), door(x)[:3], num_queries=1)

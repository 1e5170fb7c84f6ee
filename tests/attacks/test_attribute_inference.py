"""Attribute inference: the rule by hand, and the advantage, which is 0 where nothing leaks."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import attacks, training
from dpjax.attacks.attribute_inference import attribute_advantage, guessed_attribute
from dpjax.data import from_arrays
from dpjax.types import Example
from dpjax.validate import UserError
from tests import plans

_N, _D, _M = 120, 8, 600


def _linear(w, x):
  return x @ w


def _kernel_machine(w, x):
  """Random features (Rahimi and Recht 2007) so narrow that each record stands alone."""
  rng = np.random.default_rng(5)
  waves, shifts = rng.normal(size=(_D, _M)) * 1.5, rng.random((1, _M)) * 2 * np.pi
  return jnp.cos(x @ jnp.asarray(waves, jnp.float32) + jnp.asarray(shifts, jnp.float32)) @ w


def _records(signal=0.0):
  """The last number, -1 or 1, is the attribute; `signal` is how much the label follows it."""
  rng = np.random.default_rng(0)
  attribute = rng.integers(0, 2, _N)
  y = np.where(rng.random(_N) < signal, attribute, rng.integers(0, 2, _N))
  x = rng.standard_normal((_N, _D))
  x[:, -1] = 2 * attribute - 1
  return from_arrays(x, y, num_classes=2), attribute


def _found(apply, width, signal, noise_multiplier=0.0):
  records, attribute = _records(signal)
  plan = plans.of(
    _N, noise_multiplier=noise_multiplier, l2_clip_norm=20.0, normalize_by=30, num_steps=40
  )
  loss_fn = dpjax.losses.softmax_cross_entropy(apply)
  halves = attacks.random_halves(4, _N, seed=0)
  guesses = attacks.train_shadows(
    records,
    halves,
    algorithm=lambda key: training.dp_sgd(loss_fn, plan, optax.sgd(0.5), noise_key=key),
    batches=plan.batches,
    init_params=lambda key: jnp.zeros((width, 2)),
    signal=guessed_attribute(apply, [_D - 1], [-1.0, 1.0]),
    seed=0,
    side_by_side=4,
  )
  return attribute_advantage(guesses, halves, attribute)


@pytest.mark.slow
def test_what_is_true_of_all_is_no_advantage_over_the_record():
  """The label follows the attribute: guesses are right of anybody."""
  found = _found(_linear, _D, signal=0.95)
  assert found.with_record > 0.9 and found.without_record > 0.9
  assert found.interval[0] < 0 < found.interval[1] and found.baseline < 0.6


@pytest.mark.long
def test_a_memorised_record_gives_its_attribute_away_and_noise_hides_it():
  """Random labels: whatever the model knows of an attribute, it has from the record."""
  found = _found(_kernel_machine, _M, signal=0.0)
  assert found.interval[0] > 0.2 and found.without_record < 0.65
  hidden = _found(_kernel_machine, _M, signal=0.0, noise_multiplier=5.0)
  assert hidden.interval[0] < 0 < hidden.interval[1]


def test_guesses_follow_bayes_rule():
  """p(y = 1 | value) is .88 and .5: a prior of .9 for the second outweighs them."""
  weights = np.array([[0.0, 2.0], [0.0, 0.0]])
  apply = lambda w, x: x @ w
  ask = lambda **options: guessed_attribute(apply, [0], [1.0, 0.0], **options)
  records = Example(np.full((3, 2), 7.0), np.array([1, 1, 0]))
  assert ask()(weights, records).tolist() == [0, 0, 1]
  assert ask(prior=[0.1, 0.9])(weights, records).tolist() == [1, 1, 1]


def test_guesses_between_integers_are_not_cut():
  """Records of integers, and two guesses that both are 0 without their fractions."""
  apply = lambda w, x: x @ w
  guess = guessed_attribute(apply, [0], [0.2, 0.8])
  weights = np.array([[0.0, 9.0], [0.0, 0.0]])
  records = Example(np.full((2, 2), 7), np.array([1, 0]))
  assert guess(weights, records).tolist() == [1, 0]
  # A model that looks rows up takes integers alone, and gets them for guesses that are integers.
  rows = np.array([[0.0, 0.0], [0.0, 3.0]])
  looked_up = guessed_attribute(lambda w, x: w[x[:, 0]], [0], [0, 1])
  assert looked_up(rows, Example(np.full((2, 1), 7), np.array([1, 0]))).tolist() == [1, 0]


def test_the_attribute_itself_is_never_read():
  weights = np.random.default_rng(0).normal(size=(4, 2))
  guess = guessed_attribute(lambda w, x: x @ w, [1, 2], [[0, 1], [1, 0]])
  x = np.random.default_rng(1).normal(size=(9, 4))
  other = x.copy()
  other[:, 1:3] = 99.0
  y = np.arange(9) % 2
  assert np.array_equal(guess(weights, Example(x, y)), guess(weights, Example(other, y)))
  assert x[0, 1] != 99.0


@pytest.mark.slow
def test_intervals_of_the_advantage_are_exact():
  """Each record counts once a side, by a model of that side; both rates at 97.5 %."""
  n = 40
  held = np.zeros((4, n), bool)
  held[:2] = True
  truth = np.arange(n) % 2
  guesses = np.where(held, truth[None], 1 - truth[None])
  found = attribute_advantage(guesses, held, truth)
  assert (found.right_with, found.num_with, found.right_without) == (n, n, 0)
  low = 0.0125 ** (1 / n)
  np.testing.assert_allclose(found.interval, (2 * low - 1, 1.0), atol=1e-9)
  chance = np.random.default_rng(0)
  misses = 0
  for _ in range(200):
    one = attribute_advantage(chance.integers(0, 2, (4, n)), held, truth)
    misses += not one.interval[0] <= 0 <= one.interval[1]
  assert misses <= 20


def test_bad_attributes_are_one_line():
  refused = lambda words: pytest.raises(UserError, match=words)
  apply = lambda w, x: x @ w
  records = Example(np.zeros((2, 3)), np.array([0, 1]))
  with refused(r"columns: must lie in \[0, 3\)"):
    guessed_attribute(apply, [3], [0, 1])(np.zeros((3, 2)), records)
  with refused("with V >= 2"):
    guessed_attribute(apply, [0], [1.0])
  with refused("prior: must be 2 shares"):
    guessed_attribute(apply, [0], [0, 1], prior=[0.5, 0.6])
  with refused("columns="):
    guessed_attribute(apply, [], [0, 1])
  some = np.eye(2, dtype=bool)
  with refused("record 0 is held by all models or by none"):
    attribute_advantage(np.zeros((2, 2)), np.ones((2, 2), bool), [0, 1])
  with refused("truth: must be integers"):
    attribute_advantage(np.zeros((2, 2)), some, [0, 1, 1])
  with refused("included: must be bool"):
    attribute_advantage(np.zeros((2, 2)), some[:1], [0, 1])

"""Losses of one example: against Optax, by hand, and in the ways they can be misused."""

import itertools

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpjax import losses, sampling
from dpjax.types import Batch, Example
from tests.refuses import refuses


def linear(params, x):
  return x @ params


def identity(params, x):
  del params
  return x


LOGITS = hnp.arrays(np.float32, 4, elements=st.floats(-50, 50, width=32))


@pytest.mark.slow
@hypothesis.given(LOGITS, st.integers(0, 3))
def test_cross_entropy_equals_optax(logits, label):
  loss = losses.softmax_cross_entropy(identity)(None, Example(logits, label))
  expected = optax.softmax_cross_entropy_with_integer_labels(jnp.array(logits), label)
  np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cases(long=[0])
@pytest.mark.parametrize("logits", [[1e30, -1e30, 0.0], [-1e30, -1e30, -1e30]])
def test_cross_entropy_of_extreme_logits_is_finite(logits):
  loss_fn = losses.softmax_cross_entropy(linear)
  example = Example(jnp.array([1.0]), 0)
  loss, grad = jax.jit(jax.value_and_grad(loss_fn))(jnp.array([logits]), example)
  assert np.isfinite(loss) and np.isfinite(grad).all()


def test_cross_entropy_gradient_is_softmax_minus_one_hot():
  grad = jax.jit(jax.grad(losses.softmax_cross_entropy(linear)))(
    jnp.log(jnp.array([[1.0, 3.0]])), Example(jnp.ones(1), 1)
  )
  np.testing.assert_allclose(grad, [[0.25, -0.25]], atol=1e-6)


def test_p20_reduction_is_in_float32_for_bfloat16_logits():
  """In bfloat16 the loss at ln 1000 would be off by up to 2 %."""
  uniform = lambda params, x: jnp.zeros((1, 1000), jnp.bfloat16)
  loss = losses.softmax_cross_entropy(uniform)(None, Example(jnp.zeros(2), 7))
  assert loss.dtype == jnp.float32 and loss.shape == ()
  np.testing.assert_allclose(loss, np.log(1000), rtol=1e-6)


@pytest.mark.slow
def test_losses_are_vmapped_and_differentiated_over_a_batch():
  batch = Example(jnp.eye(3), jnp.array([0, 1, 2]))
  per_example = jax.vmap(
    jax.grad(losses.softmax_cross_entropy(linear)), in_axes=(None, Example(0, 0, None))
  )(jnp.zeros((3, 3)), batch)
  for i in range(3):  # example i touches only its own row of the weights
    expected = np.zeros((3, 3))
    expected[i] = 1 / 3 - np.eye(3)[i]
    np.testing.assert_allclose(per_example[i], expected, atol=1e-6)


def test_a_label_beyond_the_logits_is_nan_not_a_clamped_class():
  loss = losses.softmax_cross_entropy(identity)(None, Example(jnp.zeros(3), 3))
  assert np.isnan(loss)


@pytest.mark.parametrize(
  ("apply", "y", "field"),
  [
    (nn.Dense(3), 0, "apply"),
    (lambda p, x: x[0], 0, "apply"),
    (lambda p, x: jnp.zeros((2, 3)), 0, "apply"),
    (identity, jnp.array([0, 1]), "example.y"),
    (identity, jnp.float32(0), "example.y"),
  ],
)
def test_misuse_of_cross_entropy_is_refused(apply, y, field):
  with refuses(field):
    losses.softmax_cross_entropy(apply)(None, Example(jnp.zeros(3), y))


@pytest.mark.parametrize(
  "loss", [losses.softmax_cross_entropy, losses.mean_squared_error, losses.next_token]
)
def test_what_is_no_example_is_named(loss):
  for wrong in ((jnp.zeros(3), 0), jnp.zeros(3), {"x": jnp.zeros(3), "y": 0}):
    with refuses("example"):
      loss(identity)(None, wrong)


@hypothesis.given(LOGITS, LOGITS)
@hypothesis.settings(max_examples=30)
def test_mean_squared_error_is_the_mean(x, y):
  loss = losses.mean_squared_error(identity)(None, Example(x, y))
  np.testing.assert_allclose(loss, np.mean((x - y) ** 2), rtol=1e-4, atol=1e-5)


def test_mean_squared_error_takes_one_number_and_never_broadcasts():
  loss_fn = losses.mean_squared_error(linear)
  example = Example(jnp.array([1.0, 2.0]), jnp.float32(1.0))
  assert loss_fn(jnp.ones((2, 1)), example) == 4.0  # (3 - 1)^2
  with refuses("example.y"):
    loss_fn(jnp.ones((2, 3)), example)
  with refuses("example.y"):
    loss_fn(jnp.ones((2, 3)), Example(example.x, jnp.ones((3, 1))))


def bigram(params, tokens):
  """Logits of the next token from a table [V, V] of the last one."""
  return params[tokens]


PADDED_LOSS = jax.jit(losses.next_token(bigram, padding_id=0))


@pytest.mark.slow
def test_next_token_by_hand():
  table = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
  example = Example(jnp.array([0, 1, 1, 0]), 0)
  expected = -np.mean(np.log([0.5, 0.75, 0.25]))  # 0 -> 1, 1 -> 1, 1 -> 0
  np.testing.assert_allclose(losses.next_token(bigram)(table, example), expected, rtol=1e-6)


@hypothesis.given(st.lists(st.integers(1, 4), min_size=2, max_size=6))
@hypothesis.settings(max_examples=30)
def test_p07_padding_does_not_change_the_loss(tokens):
  table = np.random.default_rng(0).normal(size=(5, 5))
  padded = jnp.array(tokens + [0] * (9 - len(tokens)))  # one shape: compiled once
  loss = PADDED_LOSS(jnp.asarray(table, jnp.float32), Example(padded, 0))
  log_probs = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
  np.testing.assert_allclose(loss, -np.mean(log_probs[tokens[:-1], tokens[1:]]), rtol=1e-4)


def test_p07_a_sequence_of_padding_costs_nothing_and_has_no_gradient():
  loss_fn = losses.next_token(bigram, padding_id=0)
  both = jax.jit(jax.value_and_grad(loss_fn))
  loss, grad = both(jnp.ones((2, 2)), Example(jnp.zeros(4, int), 0))
  assert loss == 0 and (np.asarray(grad) == 0).all()


@pytest.mark.cases(long=[2])
@pytest.mark.parametrize(
  ("x", "field"),
  [
    (jnp.zeros(4), "example.x"),
    (jnp.zeros((2, 4), int), "example.x"),
    (jnp.zeros(1, int), "example.x"),
  ],
)
def test_misuse_of_next_token_is_refused(x, field):
  with refuses(field):
    losses.next_token(bigram)(jnp.ones((2, 2)), Example(x, 0))


@pytest.mark.slow
def test_tokens_are_weighted_within_their_own_example():
  """Several sequences, padding and weights, against a loop over tokens."""
  rng = np.random.default_rng(0)
  table, tokens = rng.normal(size=(5, 5)), rng.integers(1, 5, (3, 6))
  tokens[1, 3:], tokens[2] = 0, 0
  log_probs = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
  weight = np.array([9.0, 0.5, 0.0, 2.0, 1.0])  # by target; the padding's is ignored
  pairs = [(a, b) for row in tokens for a, b in itertools.pairwise(row) if b != 0]
  costs = np.array([-log_probs[pair] for pair in pairs])
  shares = np.array([weight[b] for _, b in pairs])
  weights = lambda targets: jnp.asarray(weight, jnp.float32)[targets]
  expected = {
    ("mean", None): costs.mean(),
    ("sum", None): costs.sum(),
    ("mean", weights): (costs * shares).sum() / shares.sum(),
    ("sum", weights): (costs * shares).sum(),
  }
  params, example = jnp.asarray(table, jnp.float32), Example(jnp.asarray(tokens), 0)
  for (reduction, own), value in expected.items():
    options = dict(padding_id=0, sequences=True, reduction=reduction, weights=own)
    loss = losses.next_token(bigram, **options)(params, example)
    np.testing.assert_allclose(loss, value, rtol=1e-5)


@pytest.mark.slow
def test_an_example_is_not_divided_by_the_tokens_of_others():
  """One person's gradient is the same beside a long text and beside a short one."""
  loss_fn = losses.next_token(bigram, padding_id=0)
  grads = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, Example(0, 0, None))))
  own, short, long = [1, 2, 3, 0, 0], [2, 1, 0, 0, 0], [3, 1, 2, 1, 3]
  beside = [Example(jnp.array([own, other]), jnp.zeros(2)) for other in (short, long)]
  first, second = (grads(jnp.eye(4), batch)[0] for batch in beside)
  np.testing.assert_array_equal(first, second)


def test_unknown_reductions_and_weights_of_another_shape_are_refused():
  with refuses("reduction", value="batch"):
    losses.next_token(bigram, reduction="batch")
  odd = losses.next_token(bigram, weights=lambda targets: jnp.ones(3))
  with refuses("weights"):
    odd(jnp.eye(4), Example(jnp.array([1, 2, 3, 1, 2]), 0))


@pytest.mark.parametrize(
  "weights",
  [{0: 0.1, 1: 1.0}, (0.1, -1.0), (0.1, np.nan), (0.1, np.inf), 0.5, "ab", [[0.1], [1]]],
)
def test_class_weights_that_no_example_may_have_are_refused(weights):
  """-1 made each step raise the loss of its class, and NaN left its examples out, both silently."""
  with refuses("class_weights"):
    losses.softmax_cross_entropy(linear, class_weights=weights)


def test_class_weights_come_from_any_sequence_of_numbers():
  example = Example(np.ones(2, np.float32), 1)
  for weights in ((1, 0.5), np.float16([1, 0.5]), jnp.array([1, 0.5])):
    loss = losses.softmax_cross_entropy(linear, class_weights=weights)
    np.testing.assert_allclose(loss(jnp.ones((2, 2)), example), np.log(2) / 2, rtol=1e-6)


@pytest.mark.parametrize(
  ("loss", "y"),
  [
    (losses.softmax_cross_entropy(linear), 1),
    (losses.softmax_cross_entropy(linear, class_weights=[1, 2]), 1),
    (losses.sigmoid_cross_entropy(linear), [0, 1]),
    (losses.mean_squared_error(linear), [0, 1]),
  ],
)
@pytest.mark.parametrize("reduction", ["", "mean", "sum"])
def test_no_loss_counts_on_promotion(loss, y, reduction):
  example = Example(jnp.ones(3), jnp.array(y))
  if reduction:
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), example)
    loss, example = (
      sampling.user_loss(loss, reduction=reduction),
      Batch(rows, jnp.array([1, 0]) > 0),
    )
  free = jax.grad(loss)(jnp.ones((3, 2)), example)
  with jax.numpy_dtype_promotion("strict"):
    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones((3, 2)), example), free)

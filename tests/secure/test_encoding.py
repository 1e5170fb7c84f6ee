"""Messages as integers and back: exact sums, no wrap-around, whatever a message holds."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.secure.encoding import Encoding, from_vector, to_vector
from tests.refuses import refuses

_VALUES = st.floats(-20, 20, width=32)


@functools.partial(jax.jit, static_argnums=0)  # one program is cheaper than its operations
def _encode(encoding, messages, weights, mask):
  return encoding.encode(messages, weights, mask)


@functools.partial(jax.jit, static_argnums=0)
def _mean(encoding, sent):
  return encoding.mean(encoding.add(sent))


@pytest.mark.cases(long=["8-100"])
@pytest.mark.parametrize(("bits", "clients"), [(8, 100), (16, 3), (31, 3), (32, 1)])
def test_as_many_clients_as_were_promised_never_wrap(bits, clients):
  encoding = Encoding(clients, largest_value=2.0, bits=bits)
  values = np.array([2.0, -2.0, 1e9, -1e9], np.float32)
  messages, ones = np.tile(values, (clients, 1)), np.ones(clients, np.float32)
  mean = _mean(encoding, _encode(encoding, messages, ones, ones > 0))
  np.testing.assert_allclose(mean, [2.0, -2.0, 2.0, -2.0], rtol=1e-6)


def test_one_client_more_does_wrap():
  """The bound is not loose: with twice the clients the sum is another number."""
  encoding = Encoding(3, largest_value=2.0, bits=8)
  sent = _encode(encoding, np.ones((7, 1)), np.ones(7), np.ones(7, bool))
  assert abs(float(_mean(encoding, sent)[0]) - 1.0) > 0.5


@pytest.mark.slow
@hypothesis.given(
  messages=st.lists(st.lists(_VALUES, min_size=3, max_size=3), min_size=4, max_size=4),
  weights=st.lists(st.floats(2.0**-20, 2, width=32), min_size=4, max_size=4),
  same=st.booleans(),
  bits=st.sampled_from([8, 12, 16, 24, 32]),
  clients=st.sampled_from([4, 30, 100]),
)
@hypothesis.settings(max_examples=200)
def test_the_mean_is_that_of_the_clipped_messages_to_its_bound(
  messages, weights, same, bits, clients
):
  """Whatever the weights are; with weights of 1 the bound is half a step."""
  encoding = Encoding(clients, largest_value=8.0, bits=bits)
  messages = np.array(messages[:1] * 4 if same else messages, np.float32)
  weights = np.array(weights[:1] * 4 if same else weights, np.float32)
  sent = _encode(encoding, messages, weights, np.ones(4, bool))
  clipped = np.clip(messages.astype(np.float64), -8, 8)
  public = np.minimum(weights.astype(np.float64), 1.0)
  expected = np.average(clipped, axis=0, weights=public)
  found = np.asarray(_mean(encoding, sent))
  assert np.abs(found - expected).max() <= encoding.error_bound(weights)
  assert np.abs(found).max() <= 8.0 * (1 + 1e-6)
  ones = encoding.error_bound(np.ones(clients))
  assert ones <= encoding.resolution / 2 + 8.0 * 2.0**-20


def test_the_error_of_small_weights_is_near_its_bound():
  """Ten clients of one example in a hundred: the bound is not loose."""
  encoding = Encoding(100, largest_value=1.0, bits=16)
  weights = np.full(10, 0.01, np.float32)
  sent = _encode(encoding, np.full((10, 1), 0.5), weights, np.ones(10, bool))
  error = abs(float(_mean(encoding, sent)[0]) - 0.5)
  assert 0.99 * encoding.error_bound(weights) <= error <= encoding.error_bound(weights)


def test_a_small_weight_is_not_rounded_to_nothing():
  encoding = Encoding(100, largest_value=1.0, bits=16)
  sent = _encode(encoding, np.ones((3, 1)), np.full(3, 1e-6), np.ones(3, bool))
  assert float(_mean(encoding, sent)[0]) == 1.0


@pytest.mark.cases(long=["nan"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_message_that_is_not_finite_sends_zeros_of_weight_zero(bad):
  encoding = Encoding(3)
  messages = {"a": np.array([[1.0], [bad], [3.0]]), "b": np.ones((3, 2))}
  sent = _encode(encoding, messages, np.ones(3), np.ones(3, bool))
  rows = jax.tree.map(lambda leaf: np.asarray(leaf[1]).tolist(), sent)
  assert rows.values == {"a": [0], "b": [0, 0]} and rows.weight == 0
  assert _mean(encoding, sent)["a"][0] == 2.0


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_a_weight_that_is_no_weight_counts_for_nothing(weight):
  sent = _encode(Encoding(2), np.ones((1, 2)), np.array([weight]), np.ones(1, bool))
  assert int(sent.weight[0]) == 0 and not np.asarray(sent.values).any()


def test_a_weight_above_one_counts_one():
  encoding = Encoding(2)
  heavy = _encode(encoding, np.ones((1, 2)), np.array([1e6]), np.ones(1, bool))
  one = _encode(encoding, np.ones((1, 2)), np.ones(1), np.ones(1, bool))
  np.testing.assert_array_equal(heavy.values, one.values)
  np.testing.assert_array_equal(heavy.weight, one.weight)


def test_padding_and_nobody_are_zero():
  encoding = Encoding(2)
  sent = _encode(encoding, np.ones((2, 3)), np.ones(2), np.zeros(2, bool))
  assert not np.asarray(_mean(encoding, sent)).any()


@pytest.mark.cases(long=["32"])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_vector_and_its_tree_are_the_same(bits):
  encoding = Encoding(3, bits=20)
  messages = {"a": np.arange(6.0).reshape(3, 2, 1), "b": -np.ones((3, 2), jnp.bfloat16)}
  sent = _encode(encoding, messages, np.ones(3), np.ones(3, bool))
  rows = [jax.tree.map(lambda leaf: leaf[i], sent) for i in range(3)]
  total = sum(to_vector(row, bits) for row in rows)
  found = from_vector(total, rows[0])
  wanted = _mean(encoding, sent)
  jax.tree.map(np.testing.assert_array_equal, jax.jit(encoding.mean)(found), wanted)


@pytest.mark.cases(long=[2, 3])
@pytest.mark.parametrize(
  ("arguments", "field"),
  [
    ({"max_clients": 0}, "max_clients"),
    ({"max_clients": 200, "bits": 8}, "bits"),
    ({"max_clients": 2, "bits": 64}, "bits"),
    ({"max_clients": 2, "largest_value": 0.0}, "largest_value"),
  ],
)
def test_what_is_wrong_is_one_line(arguments, field):
  with refuses(field):
    Encoding(**arguments)


def test_complex_messages_are_one_line():
  encoding = Encoding(max_clients=2, largest_value=1.0)
  with refuses("messages"):
    encoding.encode(jnp.ones((2, 3), jnp.complex64), jnp.ones(2), jnp.ones(2, bool))

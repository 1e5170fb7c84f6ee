"""Messages as integers and back: exact sums, no wrap-around, whatever a message holds."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.secure import Encoding
from dpjax.secure.encoding import from_vector, to_vector
from dpjax.validate import UserError

_VALUES = st.floats(-20, 20, width=32)


@functools.partial(jax.jit, static_argnums=0)  # one program is cheaper than its operations
def _encode(encoding, messages, weights, mask):
  return encoding.encode(messages, weights, mask)


@functools.partial(jax.jit, static_argnums=0)
def _mean(encoding, sent):
  return encoding.mean(encoding.add(sent))


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


@hypothesis.given(
  messages=st.lists(st.lists(_VALUES, min_size=3, max_size=3), min_size=4, max_size=4),
  weights=st.lists(st.floats(0.125, 1, width=32), min_size=4, max_size=4),
)
@hypothesis.settings(max_examples=50, deadline=None)
def test_the_mean_is_that_of_the_clipped_messages_to_half_a_step(messages, weights):
  encoding = Encoding(4, largest_value=8.0, bits=24)
  messages, weights = np.array(messages, np.float32), np.array(weights, np.float32)
  sent = _encode(encoding, messages, weights, np.ones(4, bool))
  clipped = np.clip(messages.astype(np.float64), -8, 8)
  expected = np.average(clipped, axis=0, weights=weights.astype(np.float64))
  error = np.abs(np.asarray(_mean(encoding, sent)) - expected).max()
  assert error <= 4 * encoding.resolution / weights.sum() + 1e-5


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


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ({"max_clients": 0}, "max_clients=0"),
    ({"max_clients": 200, "bits": 8}, "bits=8: .* must be > max_clients=200"),
    ({"max_clients": 2, "bits": 64}, "bits=64"),
    ({"max_clients": 2, "largest_value": 0.0}, "largest_value=0.0"),
  ],
)
def test_what_is_wrong_is_one_line(arguments, words):
  with pytest.raises(UserError, match=words):
    Encoding(**arguments)

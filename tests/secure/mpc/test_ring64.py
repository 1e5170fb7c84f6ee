"""Fixed point and products in Z_2^64, against Python's integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.secure.mpc import ring64
from tests.refuses import refuses

_M = 2**64
_EXTREMES = st.sampled_from(
  [0, 1, 2**63 - 1, 2**63, _M - 1, 2**21, 2**22 - 1, 2**43, 2**44]
)
_WORDS = st.integers(0, _M - 1) | _EXTREMES
_SHAPE = st.tuples(*[st.integers(0, 4)] * 3)


def _matrix(draw, rows, columns):
  words = draw(st.lists(_WORDS, min_size=rows * columns, max_size=rows * columns))
  return np.array(words, np.uint64).reshape(rows, columns)


def _by_integers(x, y):
  rows = [[sum(int(a) * int(b) for a, b in zip(r, c)) % _M for c in y.T] for r in x]
  return np.array(rows, np.uint64).reshape(len(x), y.shape[1])


@settings(max_examples=40)
@given(st.data())
def test_products_of_matrices_are_those_of_integers_modulo_2_to_the_64(data):
  m, k, n = data.draw(_SHAPE)
  x, y = _matrix(data.draw, m, k), _matrix(data.draw, k, n)
  assert (ring64.matmul(x, y) == _by_integers(x, y)).all()


@settings(max_examples=40)
@given(st.data())
def test_the_digits_are_exact_for_any_words(data):
  """The compiled route, which small products do not take; one shape, so one compilation."""
  x, y = _matrix(data.draw, 3, 4), _matrix(data.draw, 4, 2)
  with ring64.jax.enable_x64(True):
    found = np.asarray(ring64._by_digits(x, y))
  assert (found == _by_integers(x, y)).all()


@pytest.mark.cases(long=["9223372036854775808"])
@pytest.mark.parametrize(
  "word", [2**63, _M - 1, 2**21, (2**21) * (1 + 2**22), 2**63 - 2**21]
)
def test_deep_sums_of_the_largest_digits_stay_exact(word):
  """2^21 is the digit of largest size; 4,100 of them are more than one float64 sum may take."""
  x = np.full((10, 4100), word, np.uint64)
  assert (ring64.matmul(x, x.T) == 4100 * word * word % _M).all()


@given(st.floats(-131071, 131071), st.integers(0, 18))
def test_what_is_encoded_is_decoded_to_half_a_unit(x, frac_bits):
  word = ring64.encode(x, frac_bits)
  assert abs(ring64.decode(word, frac_bits) - x) <= 2.0 ** -(frac_bits + 1)


@pytest.mark.parametrize("x", [131072.0, -131072.0, np.nan, [0.0, np.inf], 1e300])
def test_numbers_whose_products_would_leave_the_ring_are_refused(x):
  with refuses("x"):
    ring64.encode(x)


@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda: ring64.encode("a"), "x"),
    (lambda: ring64.encode(1j), "x"),
    (lambda: ring64.encode(1.0, 25), "frac_bits"),
    (
      lambda: ring64.matmul(np.zeros((2, 3), np.uint64), np.zeros((2, 3), np.uint64)),
      "matmul",
    ),
  ],
)
def test_what_makes_no_sense_is_one_line(call, field):
  with refuses(field) as error:
    call()
  assert "\n" not in str(error.value)


@pytest.mark.cases(long=["int8", "bool"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "bool"])
def test_any_real_type_is_taken_and_empty_arrays(dtype):
  x = ring64.jnp.ones((2, 0, 3), dtype), ring64.jnp.ones((2,), dtype)
  assert [ring64.decode(ring64.encode(leaf)).tolist() for leaf in x] == [
    [[], []],
    [1.0, 1.0],
  ]

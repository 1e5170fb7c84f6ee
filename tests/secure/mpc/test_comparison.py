"""Signs of shared values: exact for every word, and what is opened for them is uniform."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.secure import mpc
from dpjax.secure.mpc import comparison, private_values
from tests.refuses import refuses

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")

_EDGES = (0, 1, -1, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**31, -(2**32), 12345678901)
_UNIT = 2.0**-18


def _words(x, program, seed=0):
  """Both parties' outputs on shares of words, added up."""
  words = np.asarray(x, np.int64).view(np.uint64)
  mask = private_values.split(np.zeros(words.shape), seed=1)[0]
  ran = mpc.run(program, (mask,), (words - mask,), seed=seed)
  return jax.tree.map(np.add, *ran.outputs), ran


def _values(x, program, **settings):
  x = np.asarray(x, float)
  zero, one = private_values.split(x, seed=1)
  return private_values.join(*mpc.run(program, (zero,), (one,), seed=0).outputs, **settings)


@settings(max_examples=30)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from(_EDGES), max_size=6))
def test_a_sign_is_exact_for_any_word(words):
  x = np.array(words, np.int64)
  found, _ = _words(x, comparison.signs)
  assert (found.bit == (x >= 0)).all()
  assert (found.part.view(np.int64) == np.where(x >= 0, x, 0)).all()


def test_signs_of_many_words_near_each_other():
  rng = np.random.default_rng(0)
  x = np.concatenate([rng.integers(-(2**63), 2**63, 20000), rng.integers(-3, 4, 20000)])
  found, ran = _words(x, comparison.signs)
  assert (found.bit == (x >= 0)).all() and (found.part.view(np.int64) == x * (x >= 0)).all()
  assert ran.spent[0].bytes_sent == 43 * len(x) and ran.spent[0].rounds == 8
  assert ran.spent[0].dealt == {"sign": 1}


def test_a_wrong_bit_of_the_dealer_shows(monkeypatch):
  """So the tests above can fail."""
  monkeypatch.setattr(comparison, "shuffle_bits", lambda words: words)
  found, _ = _words(np.arange(-50, 50), comparison.signs)
  assert not (found.bit == (np.arange(-50, 50) >= 0)).all()


@given(st.integers(0, 63))
def test_the_shuffle_reads_a_places_digits_backwards(place):
  to = int(f"{place:06b}"[::-1], 2)
  word = np.array([1 << place], np.uint64)
  assert comparison.shuffle_bits(word)[0] == 1 << to
  assert (comparison.shuffle_bits(comparison.shuffle_bits(word)) == word).all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 1, 2)])
def test_shapes(shape):
  x = np.full(shape, -0.75)
  assert (_values(x, comparison.relu) == 0 * x).all() and (
    _values(-x, comparison.relu) == -x
  ).all()


def test_the_sigmoid_of_secureml():
  x = np.array([-1e4, -0.5, -0.25, 0.0, 0.3, 0.5, 0.7, 1e4])
  found = _values(x, comparison.sigmoid)
  assert np.max(abs(found - np.clip(x + 0.5, 0, 1))) <= _UNIT


@pytest.mark.parametrize("classes", [1, 2, 5, 10])
def test_argmax_is_that_of_numpy(classes):
  x = np.random.default_rng(classes).integers(-3, 4, (40, classes))  # with ties
  found = _values(x, comparison.argmax, frac_bits=0)
  assert (found == x.argmax(-1)).all()


def test_a_reciprocal_over_its_whole_range():
  x = np.concatenate([np.geomspace(2**-6, 2**12, 200), [2**-6, 2**12, 1.0]])
  found = _values(
    x, lambda party, x: comparison.reciprocal(party, x, low=2**-6, high=2**12)
  )
  assert np.all(abs(found - 1 / x) < 2**-15 * np.maximum(1, 1 / x**2))


def test_the_normalized_relu_is_that_of_secureml():
  x = np.array([[1.0, -2.0, 3.0, 0.0], [-1.0, -1.0, -1.0, -1.0], [100.0, 300.0, 0.5, 9.0]])
  positive = np.maximum(x, 0)
  exact = positive / (positive.sum(1, keepdims=True) + 2**-6)
  assert np.max(abs(_values(x, comparison.normalized_relu) - exact)) < 2e-3


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("program", "field"),
  [
    (lambda party, x: comparison.argmax(party, x[:, :0]), "argmax"),
    (
      lambda party, x: comparison.reciprocal(party, x, low=0.0, high=1.0),
      "low",
    ),
    (
      lambda party, x: comparison.reciprocal(party, x, low=2.0, high=1.0),
      "low",
    ),
  ],
)
def test_what_makes_no_sense_is_one_line(program, field):
  with refuses(field):
    _values(np.ones((2, 2)), program)

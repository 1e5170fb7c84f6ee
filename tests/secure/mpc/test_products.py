"""Shares, Beaver products and truncation: right, uniform, and with every triple used once."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax.secure import mpc
from dpjax.secure.mpc import private_values, products, ring64
from dpjax.secure.mpc.links import PeerFailed
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.secure.mpc import programs

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")

_F = 18
_UNIT = 2.0**-_F


def _run(program, *values, **settings):
  """What both parties find of a program on shares of these values."""
  zero, one = private_values.split(values, frac_bits=settings.get("frac_bits", _F), seed=5)
  return mpc.run(program, zero, one, **({"seed": 0} | settings))


def _joined(program, *values, frac_bits=_F, **settings):
  outputs = _run(program, *values, frac_bits=frac_bits, **settings).outputs
  return private_values.join(*outputs, frac_bits=frac_bits)


# --- sharing


_TREE = {
  "w": np.linspace(-9, 9, 6).reshape(2, 3),
  "b": np.float32(-0.5),
  "none": np.ones((0, 4)),
}


def test_a_tree_is_split_and_joined():
  zero, one = private_values.split(_TREE)
  back = private_values.join(zero, one)
  assert jax.tree.structure(back) == jax.tree.structure(_TREE)
  for found, leaf in zip(jax.tree.leaves(back), jax.tree.leaves(_TREE)):
    assert found.shape == leaf.shape and np.all(abs(found - leaf) <= _UNIT / 2)


@pytest.mark.cases(quick=["-131071.0"], long=...)
@pytest.mark.parametrize("value", [0.0, 1.0, -131071.0])
def test_one_partys_shares_are_uniform_whatever_they_hide(value):
  for tree in private_values.split(np.full(20000, value), seed=1):
    assert programs.looks_uniform(tree.tobytes())


def test_the_uniformity_test_rejects_a_planted_bias():
  (share, _), rng = private_values.split(np.zeros(20000), seed=1), np.random.default_rng(0)
  lit = rng.random(20000) < 0.1  # one place is stuck in one word of ten
  stuck = share | (lit.astype(np.uint64) << np.uint64(40))
  assert not programs.looks_uniform(stuck.tobytes())
  assert not programs.looks_uniform((share % np.uint64(2**64 - 2**59)).tobytes())


def test_two_splits_share_no_mask_and_a_seed_says_simulation():
  draws = [private_values.split(np.zeros(4))[0] for _ in range(2)]
  assert not (draws[0] == draws[1]).any()
  same = [private_values.split(np.zeros(4), seed=3)[0] for _ in range(2)]
  assert (same[0] == same[1]).all() and "SIMULATION" in private_values.split.__doc__


def test_an_input_reaches_both_and_a_result_only_who_asks():
  def program(party, mine, theirs):
    first, second = (mine, theirs) if party.number == 0 else (theirs, mine)
    x = mpc.share(party, first, owner=0)
    y = mpc.share(party, second, owner=1)
    return mpc.reveal(party, jax.tree.map(np.add, x, y), to=1)

  like = jax.ShapeDtypeStruct((2,), float)
  ran = mpc.run(
    program, ([np.array([1.0, 2.0])], [like]), ([np.array([0.5, -4.0])], [like])
  )
  assert ran.outputs[0] is None and ran.outputs[1][0].tolist() == [1.5, -2.0]


# --- products

_NUMBERS = st.floats(-256, 256) | st.sampled_from([0.0, -1.0, 256.0, -256.0, _UNIT])


@pytest.mark.parametrize("truncation", ["masked", "local"])
@settings(max_examples=25)
@given(st.lists(st.tuples(_NUMBERS, _NUMBERS), max_size=5))
def test_a_product_is_that_of_the_floats(truncation, pairs):
  x, y = np.array(pairs, float).reshape(-1, 2).T
  found = _joined(mpc.multiply, x, y, truncation=truncation)
  bound = (abs(x) + abs(y)) * _UNIT / 2 + 2 * _UNIT
  assert found.shape == x.shape and np.all(abs(found - x * y) <= bound)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3)])
def test_products_of_any_shape(shape):
  x = np.full(shape, -1.5)
  assert np.allclose(_joined(mpc.multiply, x, x), 2.25 + 0 * x, atol=_UNIT)


@pytest.mark.cases(long=[3])
@pytest.mark.parametrize("sizes", [(3, 5, 2), (0, 3, 2), (3, 0, 2), (8, 200, 100)])
def test_a_product_of_matrices_with_its_bias(sizes):
  rng = np.random.default_rng(sum(sizes))
  m, k, n = sizes
  x, y, bias = rng.normal(size=(m, k)), rng.normal(size=(k, n)), rng.normal(size=n)
  found = _joined(lambda party, x, y, b: mpc.matmul(party, x, y, bias=b), x, y, bias)
  assert np.all(abs(found - (x @ y + bias)) < 2.0 ** -(_F - 6))


def test_public_numbers_are_added_without_a_triple():
  program = lambda party, x: mpc.add(party, x, np.array([1.0, 2.0]))
  assert np.allclose(_joined(program, np.array([4.0, -4.0])), [5.0, -2.0], atol=2 * _UNIT)


def test_a_triple_serves_one_product():
  def twice(party, x):
    triple = party.supply.deal("elementwise", x.shape)
    products.beaver(party, x, x, triple, np.multiply)
    products.beaver(party, x, x, triple, np.multiply)

  with pytest.raises(UserError, match="correlation=0: was used already"):
    _run(twice, np.ones(2))


def test_no_two_correlations_are_alike():
  def program(party):
    return [party.supply.deal("elementwise", (2,)).use() for _ in range(3)]

  for dealt in mpc.run(program, seed=0).outputs:
    words = np.concatenate([np.concatenate(parts) for parts in dealt])
    assert len(np.unique(words)) == len(words)


def test_a_triple_of_another_shape_and_operands_that_do_not_fit_are_one_line():
  def other(party, x):
    return products.beaver(party, x, x, party.supply.deal("elementwise", (3,)), np.multiply)

  for program, line in (
    (other, "triple"),
    (lambda party, x: mpc.multiply(party, x, x[:1]), "multiply"),
    (lambda party, x: mpc.matmul(party, x[None], x[None]), "matmul"),
  ):
    with refuses(line) as error:
      _run(program, np.ones(2))
    assert "\n" not in str(error.value)


def test_what_is_no_share_is_refused_before_it_is_sent():
  """Values that nobody shared, and words that JAX cuts to 32 bits."""
  for wrong in (np.ones(2), jax.numpy.ones(2, "uint32")):
    for program in (
      lambda party, x: mpc.multiply(party, wrong, x),
      lambda party, x: mpc.relu(party, wrong),
      lambda party, x: mpc.reveal(party, wrong, to=0),
    ):
      with refuses("shares"):
        _run(program, np.ones(2))
  with refuses("shares"):
    private_values.join(np.ones(2), np.ones(2))


def test_parties_whose_programs_differ_end_with_one_line():
  def program(party, x):
    return mpc.multiply(party, x[party.number :], x[party.number :])

  with pytest.raises(PeerFailed, match="sent 32 bytes where 16 were due|sent 16 bytes"):
    _run(program, np.ones(2))


def test_a_run_is_repeated_bit_for_bit_by_its_seed_only():
  def shares(seed):
    return _run(mpc.multiply, np.ones(3), np.ones(3), seed=seed).outputs[0]

  assert (shares(1) == shares(1)).all()
  assert not (shares(1) == shares(2)).any() and not (shares(None) == shares(None)).any()


# --- truncation


def test_local_truncation_never_failed_in_400_000_products_and_is_off_by_a_unit():
  x = np.random.default_rng(0).uniform(-8, 8, 400_000)
  found = _joined(mpc.multiply, x, np.ones_like(x), truncation="local")
  assert np.max(abs(found - x)) <= 2 * _UNIT


def test_in_a_ring_of_32_bits_it_fails_so_the_test_above_can():
  rng, f = np.random.default_rng(0), 13
  x = (
    np.rint(rng.uniform(-8, 8, 100_000) * 2.0 ** (2 * f)).astype(np.int64).astype(np.uint32)
  )
  mask = rng.integers(0, 2**32, x.shape, dtype=np.uint32)
  first, second = mask >> f, -(-(x - mask) >> f)
  error = abs((first + second).view(np.int32) - x.view(np.int32) / 2.0**f)
  failed = np.mean(error > 2)
  assert 0.055 < failed < 0.07  # mean |x| 2^26 / 2^32: 6.25 %
  assert abs(failed - np.mean(abs(x.view(np.int32) / 2.0**32))) < 0.003


def test_the_failure_rate_of_local_truncation_is_what_is_stated():
  """|x| / 2^64 of the word x: a number of 2^62 words fails one time in four."""
  x = np.full(20_000, 2**62 - 1, np.uint64)
  mask = private_values.split(np.zeros(x.shape), seed=4)[0]
  ran = mpc.run(products.truncate, (mask, 9), (x - mask, 9), seed=0, truncation="local")
  found = np.add(*ran.outputs).view(np.int64) / 2.0**53
  assert abs(np.mean(abs(found - 1) > 1e-3) - 0.25) < 0.015


@pytest.mark.parametrize("bits", [1, 18, 30, 62])
def test_masked_truncation_never_fails_even_at_the_edge_and_is_unbiased(bits):
  edge = np.array([-(2**62), 2**62 - 1, 0, 1, -1, 2**61 + 12345], np.int64)
  x = np.tile(edge, 4000)
  zero, _ = private_values.split(np.zeros(x.shape), seed=2)
  ran = mpc.run(products.truncate, (zero, bits), (x.view(np.uint64) - zero, bits), seed=0)
  up = np.add(*ran.outputs).view(np.int64) - (x >> bits)
  assert set(np.unique(up)) <= {0, 1}
  remainder = (edge & ((1 << bits) - 1)) / 2.0**bits
  assert np.all(abs(up.reshape(-1, len(edge)).mean(0) - remainder) < 0.04)


def test_x64_stays_as_the_user_has_it():
  x = np.ones((64, 64))
  _run(mpc.matmul, x, x)
  assert jax.numpy.ones(1).dtype == "float32" and ring64._SMALL < 64**3

"""Slots under CKKS: exact scales, one line for what cannot be, no key at the server."""

import numpy as np
import pytest

from dpjax.secure.homomorphic import ckks
from dpjax.secure.homomorphic.ckks import Chain, SecretKeys, SlotEvaluator
from dpjax.validate import UserError
from tests.refuses import refuses

_CHAIN = Chain(levels=3, scale_bits=36, end_bits=50)


@pytest.fixture(scope="module")
def keys():
  pytest.importorskip("tenseal", reason="needs TenSEAL: pip install -e '.[he]'")
  return SecretKeys(_CHAIN, rotations=[1, 2, 8])


@pytest.fixture(scope="module")
def server(keys):
  return SlotEvaluator(_CHAIN, keys.public)


def _numbers(seed=0):
  return np.random.default_rng(seed).uniform(-1, 1, _CHAIN.slots)


def _read(keys, server, cipher):
  return keys.decrypt(server.dump(cipher))


def test_products_in_a_row_stay_exact_whatever_the_primes(keys, server):
  """TenSEAL's vectors, which force the scale, are off by 1e-5 of the value there."""
  x = _numbers()
  first = server.load(keys.encrypt(x))
  got, want = first, x
  for left in (2, 1, 0):
    got = server.products([(got, server.lower(first, server.level(got)))])
    want = want * x
    assert server.level(got) == left
    assert np.abs(_read(keys, server, got) - want).max() < 60 * _CHAIN.error


def test_one_product_is_off_by_what_the_chain_says(keys, server):
  x = _numbers()
  cipher = server.load(keys.encrypt(x))
  error = _read(keys, server, server.weighted_sum([(cipher, 1.0)])) - x
  assert 0.3 * _CHAIN.error < error.std() < 3 * _CHAIN.error


def test_sums_rotations_and_plain_factors(keys, server):
  x, y = _numbers(1), _numbers(2)
  a, b = server.load(keys.encrypt(x)), server.load(keys.encrypt(y))
  near = lambda cipher, want: np.testing.assert_allclose(
    _read(keys, server, cipher), want, atol=1e-4
  )
  near(server.plus(server.add(a, b), 0.5), x + y + 0.5)
  near(server.rotate(a, 8), np.roll(x, -8))
  near(server.weighted_sum([(a, y), (b, 2.0), (a, 0.0)]), x * y + 2 * y)
  near(server.products([(a, b), (a, a)]), x * y + x * x)
  near(server.fold(a, 1, 4), sum(np.roll(x, -k) for k in range(4)))
  assert server.rotate(a, 0) is a and server.lower(a, 3) is a


def test_another_key_reads_nothing(keys):
  cipher = keys.encrypt(np.ones(4))
  assert np.abs(SecretKeys(_CHAIN).decrypt(cipher)[:4]).min() > 10


def test_equal_numbers_are_other_bytes_which_look_random(keys):
  one, two = (keys.encrypt(np.zeros(4)) for _ in range(2))
  assert one != two and len(one) < _CHAIN.degree * 8 * 4  # seeded: half a ciphertext
  counts = np.bincount(np.frombuffer(one[-20000:], np.uint8), minlength=256)
  assert counts.max() < 4 * counts.mean()


def test_the_server_holds_no_secret_key(keys, server):
  held = repr(vars(server)) + repr(vars(server._coder))
  assert "SecretKey" not in held and "Decryptor" not in held and "Encryptor" not in held
  assert "SecretKey" not in repr(keys.public._fields)


def test_weights_of_zero_make_zeros(keys, server):
  cipher = server.load(keys.encrypt(np.full(2, 100.0)))
  answer = keys.decrypt(
    server.dump(server.weighted_sum([(cipher, 0.0), (cipher, np.zeros(2))]))
  )
  np.testing.assert_allclose(answer[:2], 0.0, atol=1e-4)


@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda k, s: k.encrypt(np.ones(5000)), "values"),
    (lambda k, s: k.encrypt(np.array([np.nan])), "values"),
    (lambda k, s: s.load(b"no ciphertext"), "message"),
    (lambda k, s: s.weighted_sum([]), "weights"),
    (lambda k, s: k.encrypt(np.array([1e300])), "ckks"),
    (
      lambda k, s: k.encrypt(np.ones(1), level=4),
      "level",
    ),
    (lambda k, s: k.encrypt(np.ones(1), level=-1), "level"),
    (lambda k, s: k.encrypt(np.ones((2, 2))), "values"),
    (
      lambda k, s: s.rotate(s.load(k.encrypt(np.ones(1))), 5),
      "ckks",
    ),
    (
      lambda k, s: s.add(*(s.load(k.encrypt(np.ones(1), level=n)) for n in (0, 1))),
      "ckks",
    ),
    (lambda k, s: s.load(None), "message"),
    (
      lambda k, s: s.products([(s.load(k.encrypt(np.ones(1), level=0)),) * 2]),
      "levels",
    ),
  ],
)
def test_what_cannot_be_is_one_line(keys, server, call, field):
  with refuses(field) as caught:
    call(keys, server)
  assert "\n" not in str(caught.value)


def test_a_ciphertext_of_another_chain_is_refused(keys, server):
  other = SecretKeys(Chain(levels=2, scale_bits=36, end_bits=50))
  with refuses("message"):
    server.load(other.encrypt(np.ones(3)))


@pytest.mark.parametrize(
  ("numbers", "field"),
  [
    ({"levels": 9}, "levels"),
    ({"levels": 0}, "levels"),
    ({"levels": 3, "scale_bits": 60}, "scale_bits"),
    ({"levels": 3, "end_bits": 42}, "end_bits"),
  ],
)
def test_a_chain_that_is_not_secure_or_holds_no_number_is_refused(numbers, field):
  with refuses(field):
    Chain(**numbers)


def test_every_chain_is_within_the_standard():
  for levels in range(1, 8):
    chain = Chain(levels=levels)
    assert sum(chain.bits) <= ckks.MOST_BITS[chain.degree]


def test_without_the_library_one_line_names_the_extra(monkeypatch):
  def missing(extra="he"):
    raise UserError(f"needs tenseal, not there: pip install -e '.[{extra}]'")

  monkeypatch.setattr(ckks, "library", missing)
  ckks._sealapi.cache_clear()
  ckks._context.cache_clear()
  with pytest.raises(UserError, match=r"needs tenseal, .* pip install -e '\.\[he\]'"):
    SecretKeys(_CHAIN)

"""Sums of ciphertexts, by a server that cannot read them."""

import math
import sys

import numpy as np
import pytest

from dpjax.secure import sums
from dpjax.secure.sums import homomorphic_sums
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.secure.sums import parties

pytest.importorskip("tenseal", reason="needs the extra 'he'")


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("length", [3, 4096, 5000])
def test_bfv_sums_are_exact_modulo_the_ring(bits, length):
  vectors = parties.vectors(4, length, bits)
  vectors[0][:] = 2**bits - 1  # wraps around with anybody
  drops = sums.Drops(frozenset({3}), frozenset(), frozenset({0}))
  summed = sums.BfvSum(bits=bits).sum(vectors, drops)
  oracle = sums.PlainSum(bits=bits).sum(vectors, drops)
  np.testing.assert_array_equal(summed.total, oracle.total)
  assert summed.total.dtype == oracle.total.dtype and summed.survivors == (0, 1, 2)
  limbs, ciphertexts = bits // 32, math.ceil(length * (bits // 32) / 4096)
  assert summed.cost.operations in (4 * ciphertexts, 4 * limbs * math.ceil(length / 4096))


@pytest.mark.parametrize("bits", [32, 64])
def test_who_decrypts_does_not_see_how_many_numbers_are_negative(monkeypatch, bits):
  """It knows its own message. So of three clients it would know the signs of both others."""
  decrypt, seen = homomorphic_sums.KeyHolder.decrypt, []

  def watched(holder, ciphers, num_rows):
    seen.append(decrypt(holder, ciphers, num_rows))
    return seen[-1]

  monkeypatch.setattr(homomorphic_sums.KeyHolder, "decrypt", watched)
  for rows in ([[5, 2, -5], [-2, 0, -5], [-2, 0, 0]], [[1, 2, -10], [0] * 3, [0] * 3]):
    vectors = {who: np.array(row).astype(f"uint{bits}") for who, row in enumerate(rows)}
    total = sums.BfvSum(bits=bits).sum(vectors).total
    assert total.view(f"int{bits}").tolist() == [1, 2, -10]
  np.testing.assert_array_equal(*seen)
  assert seen[0][0].tolist() == [1, 2, -10] and not seen[0][1:].any()


def test_the_plaintext_modulus_is_above_every_sum_and_fits_the_ring_of_the_scheme():
  for most, (degree, modulus) in homomorphic_sums.BFV_PARAMETERS.items():
    assert modulus > most * (2**32 - 1) and modulus % (2 * degree) == 1
    assert all(pow(a, modulus - 1, modulus) == 1 for a in (2, 3, 5, 7, 11))  # prime: Fermat
  with refuses("num_clients", value=10001):
    homomorphic_sums.bfv_keys(10_001)


@pytest.mark.parametrize("most", list(homomorphic_sums.BFV_PARAMETERS))
def test_the_noise_has_room_for_so_many_additions(most):
  """Of the largest entries: 2^k copies by k doublings, whose noise is even added up in phase."""
  keys = homomorphic_sums.bfv_keys(most)
  holder, server = homomorphic_sums.KeyHolder(keys), homomorphic_sums.AddingServer(keys)
  entry = np.full(3, 2**32 - 1, np.uint64)
  server.add(holder.encrypt([entry]))
  for _ in range(int(math.log2(most))):
    server.add(server.total())
  copies = 2 ** int(math.log2(most))
  modulus = homomorphic_sums.BFV_PARAMETERS[most][1]
  found = [int(x) % modulus for x in holder.decrypt(server.total(), 1)[0]]
  assert found == [copies * (2**32 - 1)] * 3


@pytest.mark.parametrize(
  "make", [lambda: homomorphic_sums.bfv_keys(3), homomorphic_sums.ckks_keys]
)
def test_the_server_holds_no_secret_key(make):
  keys = make()
  holder, server = homomorphic_sums.KeyHolder(keys), homomorphic_sums.AddingServer(keys)
  server.add(holder.encrypt([np.arange(3)]))
  with pytest.raises(ValueError, match="doesn't hold a secret_key"):
    server.sums[0].decrypt()
  assert not server._context.has_secret_key() and len(keys.public) < len(keys.secret)


def test_two_encryptions_of_one_vector_differ():
  holder = homomorphic_sums.KeyHolder(homomorphic_sums.bfv_keys(3))
  (one,), (two,) = (holder.encrypt([np.zeros(3, np.uint64)]) for _ in range(2))
  assert one != two


@pytest.mark.parametrize("n", [2, 30])
def test_ckks_sums_are_right_to_1e_7(n):
  rng = np.random.default_rng(0)
  vectors = {who: rng.uniform(-50, 50, 300) for who in range(n)}
  total = sums.CkksSum().sum(vectors).total
  assert np.abs(total - sum(vectors.values())).max() < 1e-7
  large = {who: np.full(3, 2.0**14 / n) for who in range(n)}
  assert np.abs(sums.CkksSum().sum(large).total - 2.0**14).max() < 1e-7


def test_numbers_that_ckks_cannot_hold_are_refused():
  vectors = {1: np.array([0.0]), 2: np.array([2.0**13 + 1])}
  with refuses("vectors"):
    sums.CkksSum().sum(vectors)
  with refuses("vectors"):
    sums.CkksSum().sum({1: np.array([np.nan]), 2: np.array([1.0])})
  with refuses("vectors[2]"):
    sums.CkksSum().sum({1: np.array([1.0]), 2: np.array([1], np.uint32)})


def test_somebody_must_be_left_to_decrypt_and_enough_to_be_summed():
  vectors = parties.vectors(3)
  everybody = frozenset(range(3))
  with refuses("drops"):
    sums.BfvSum().sum(vectors, sums.Drops(before_unmasking=everybody))
  with refuses("min_survivors", value=3):
    sums.BfvSum(min_survivors=3).sum(vectors, sums.Drops(before_upload=frozenset({0})))


def test_without_the_extra_one_line_names_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "tenseal", None)
  with pytest.raises(UserError, match=r"needs tenseal, .* pip install -e '\.\[he\]'"):
    sums.BfvSum().sum(parties.vectors(3))


def test_bytes_are_those_of_ciphertexts():
  cost = sums.BfvSum().sum(parties.vectors(3, 4096)).cost
  assert (
    60_000 < cost.client_bytes < 600_000
  )  # two polynomials of 4096 x 2 primes, and keys
  assert cost.server_bytes > 3 * 60_000 and cost.expansions == 0

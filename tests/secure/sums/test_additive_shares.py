"""Additive shares: exact, uniform but for all together, and no patience with the silent."""

import numpy as np
import pytest
from scipy import stats

from dpjax.secure import sums
from dpjax.secure.sums import additive_shares, messages
from tests.refuses import refuses
from tests.secure.sums import parties

_BOTH = ("additive_sharing", "additive_servers")


def _p_uniform(words):
  counts = np.bincount(np.ascontiguousarray(words).view(np.uint8).ravel(), minlength=256)
  return stats.chisquare(counts).pvalue


@pytest.mark.parametrize("name", _BOTH)
@pytest.mark.parametrize("bits", [32, 64])
def test_sums_are_exact(name, bits):
  vectors = parties.vectors(6, bits=bits)
  drops = sums.Drops(before_sharing=frozenset({1}), before_unmasking=frozenset({2}))
  summed = sums.by_name(name, bits=bits).sum(vectors, drops)
  oracle = sums.PlainSum(bits=bits).sum(vectors, drops)
  np.testing.assert_array_equal(summed.total, oracle.total)
  assert summed.survivors == oracle.survivors == (0, 2, 3, 4, 5)


@pytest.mark.parametrize("count", [2, 5])
def test_all_shares_but_one_are_uniform_and_independent(count):
  """Of a vector that is anything but uniform; with the last one the sum is there again."""
  vector = np.full(4000, 7, np.uint32)
  shares = additive_shares.split(vector, count)
  total = np.zeros_like(vector)
  for left_out in range(count):
    rest = [share for i, share in enumerate(shares) if i != left_out]
    assert all(_p_uniform(share) > 1e-8 for share in rest)
    added = np.zeros_like(vector)
    for share in rest:
      added += share
    assert _p_uniform(added) > 1e-8
  for share in shares:
    total += share
  np.testing.assert_array_equal(total, vector)


def test_a_biased_source_is_caught():
  """Shares drawn below 2^31, as by a generator of signed integers."""
  rng = np.random.default_rng(0)
  biased = lambda size: bytes(
    b & 0x7F if i % 4 == 3 else b for i, b in enumerate(rng.bytes(size))
  )
  shares = additive_shares.split(np.full(4000, 7, np.uint32), 3, biased)
  assert _p_uniform(shares[0]) < 1e-9


def test_one_silent_client_ends_the_sum_among_clients_and_not_among_servers():
  vectors = parties.vectors(4)
  drops = sums.Drops(before_upload=frozenset({3}))
  with refuses("additive_sharing"):
    sums.AdditiveSharing().sum(vectors, drops)
  assert sums.AdditiveServers().sum(vectors, drops).survivors == (0, 1, 2)


def test_traffic_grows_with_the_square_of_the_clients():
  cost = {n: sums.AdditiveSharing().sum(parties.vectors(n, 100)).cost for n in (5, 10)}
  each = messages.size(1, 400)
  for n, one in cost.items():
    assert one.expansions == n * (n - 1)
    assert one.client_bytes == (2 * (n - 1) + 1) * each and one.server_bytes == n * each
  servers = sums.AdditiveServers(num_servers=3).sum(parties.vectors(5, 100)).cost
  assert servers.client_bytes == 3 * each and servers.expansions == 10
  assert servers.server_bytes == (15 + 4) * each
  with refuses("num_servers", value=1):
    sums.AdditiveServers(num_servers=1)

"""Shares modulo 2^bits: exact, and uniform for colluders, by counting every outcome."""

import itertools
from collections import Counter

import numpy as np
import pytest

from dpjax.secure.sums import galois_shares
from dpjax.secure.sums.galois_shares import Sharing
from tests.refuses import refuses


def _irreducible(degree, exponents):
  """Whether no polynomial of lower degree divides it modulo 2."""
  whole = (1 << degree) + sum(1 << exponent for exponent in exponents)

  def remainder(a, b):
    while a.bit_length() >= b.bit_length():
      a ^= b << (a.bit_length() - b.bit_length())
    return a

  return all(remainder(whole, b) for b in range(2, 1 << (degree // 2 + 1)))


def test_every_polynomial_is_irreducible():
  for degree, exponents in galois_shares.POLYNOMIALS.items():
    assert _irreducible(degree, exponents), degree
  assert not _irreducible(4, (2, 0))


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_differences_of_points_have_inverses(degree):
  points = galois_shares._points(range(2**degree), degree)
  differences = (points[1:, None] - points[None, :]).reshape(-1, degree)
  units = differences[differences.any(axis=1)]
  products = galois_shares.multiply(units, galois_shares.invert(units))
  assert (products[:, 0] == 1).all() and not products[:, 1:].any()
  # X^d is minus the lower terms, by Python's integers.
  exponents = galois_shares.POLYNOMIALS[degree]
  power = np.zeros(degree, np.uint64)
  power[1] = 1
  x = power
  for _ in range(degree - 1):
    power = galois_shares.multiply(power, x)
  assert power.astype(np.int64).tolist() == [-(i in exponents) for i in range(degree)]


@pytest.mark.parametrize(
  ("num_shares", "colluding", "packed", "length", "bits"),
  [(5, 2, 1, 7, 32), (4, 1, 3, 1, 64), (3, 2, 1, 12, 32), (7, 2, 3, 50, 32)],
)
def test_any_shares_that_are_enough_give_the_sum(
  num_shares, colluding, packed, length, bits
):
  rng = np.random.default_rng(0)
  vectors = rng.integers(0, 2**bits, (3, length), dtype=f"uint{bits}")
  settings = {"num_members": num_shares, "colluding": colluding, "packed": packed}
  sharing = Sharing(**settings)
  shared = [sharing.split(vector) for vector in vectors]
  total = [sum(parts[1:], parts[0]) for parts in zip(*shared)]
  words = sharing.share_words(length)
  assert {share.shape for share in total} == {(words,)}
  expected = vectors[0] + vectors[1] + vectors[2]
  for count in range(colluding + packed, num_shares + 1):
    for places in itertools.combinations(range(num_shares), count):
      held = {place: total[place] for place in places}
      found = sharing.combine(held, length=length)
      np.testing.assert_array_equal(found, expected)


def _all_draws(modulus, count):
  """Yields entropy that gives every sequence of `count` words below the modulus, once."""
  for words in itertools.product(range(modulus), repeat=count):
    yield lambda size, words=words: np.array(words, np.uint32).tobytes()


@pytest.mark.parametrize(
  ("modulus", "num_shares", "colluding", "packed"),
  [(4, 3, 1, 1), (2, 3, 2, 1), (4, 3, 2, 1), (2, 4, 1, 2), (2, 5, 2, 2)],
)
def test_shares_of_colluders_are_uniform_whatever_the_secret_is(
  modulus, num_shares, colluding, packed
):
  """Modulo 2 and 4, into which the ring modulo 2^32 maps: every draw, every set of colluders."""
  sharing = Sharing(num_members=num_shares, colluding=colluding, packed=packed)
  degree = sharing.degree
  secrets = [
    np.zeros(degree * packed, np.uint32),
    np.arange(degree * packed, dtype=np.uint32),
  ]
  draws = list(_all_draws(modulus, degree * colluding))
  for secret in secrets:
    outcomes = [sharing.split(secret % modulus, entropy=entropy) for entropy in draws]
    for places in itertools.combinations(range(num_shares), colluding):
      views = Counter(
        tuple(int(word) % modulus for place in places for word in shares[place])
        for shares in outcomes
      )
      # Each of all views once: the distribution is uniform, and so the same for each secret.
      assert len(views) == len(draws) and set(views.values()) == {1}


def test_one_share_more_than_colluding_tells_of_the_secret():
  """So the count above is no count of something that always holds."""
  draws = list(_all_draws(2, 2))
  seen = []
  for secret in ([0, 0], [1, 0]):
    shares = [
      Sharing(num_members=3, colluding=1).split(np.array(secret, np.uint32), entropy=e)
      for e in draws
    ]
    seen.append(Counter(tuple(int(w) % 2 for p in (0, 1) for w in s[p]) for s in shares))
  assert not set(seen[0]) & set(seen[1])


def test_a_sum_of_shares_does_not_count_how_often_entries_wrapped():
  """A prime field would: -1 + 1 and 0 + 0 are 2^32 and 0 there."""
  sharing = Sharing(num_members=3, colluding=1)
  sums = []
  for pair in ([2**32 - 1, 1], [0, 0]):
    parts = [sharing.split(np.array([n], np.uint32)) for n in pair]
    held = {place: parts[0][place] + parts[1][place] for place in range(3)}
    sums.append(sharing.combine(held, length=1))
  np.testing.assert_array_equal(sums[0], sums[1])


def test_a_wrong_share_is_seen_where_there_is_one_more_than_needed():
  sharing = Sharing(num_members=5, colluding=2)
  shares = sharing.split(np.arange(6, dtype=np.uint32))
  for place in range(5):
    wrong = [share.copy() for share in shares]
    # The top bit alone, which a check modulo 2 would miss.
    wrong[place][3] ^= np.uint32(2**31)
    with refuses("shares"):
      sharing.combine(dict(enumerate(wrong)), length=6)
  # Just as many as needed fit whatever they are: the total is another one, and nothing shows it.
  few = {place: wrong[place] for place in (0, 1, 4)}
  assert not np.array_equal(sharing.combine(few, length=6), np.arange(6, dtype=np.uint32))


@pytest.mark.parametrize(
  ("settings", "field"),
  [
    ({"num_members": 3, "colluding": 3}, "colluding"),
    ({"num_members": 3, "colluding": 0}, "colluding"),
    ({"num_members": 3, "colluding": 1, "packed": 0}, "packed"),
    ({"num_members": 2000, "colluding": 1}, "num_members"),
    ({"num_members": 3, "colluding": 2, "packed": 2}, "num_members"),
  ],
)
def test_settings_that_cannot_be_are_one_line(settings, field):
  with refuses(field) as caught:
    Sharing(**settings)
  assert "\n" not in str(caught.value)
  with refuses("shares"):
    Sharing(num_members=5, colluding=2).combine({0: np.zeros(3, np.uint32)}, length=2)

"""What a secure sum promises: the exact sum, and nothing else to anybody."""

import dataclasses
import itertools
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpjax.secure import sums
from dpjax.secure.sums import primitives, protocols, secagg_client, secagg_server
from dpjax.secure.sums.interface import bits_needed
from dpjax.secure.sums.messages import OVERHEAD
from dpjax.secure.sums.terms import neighbours
from dpjax.validate import UserError, Verbatim
from tests.refuses import refuses
from tests.secure.sums import parties

pytest.importorskip("cryptography", reason="needs the extra 'secure'")
pytest.importorskip("Crypto", reason="needs the extra 'secure'")

_SECRET = ("secagg", "secagg_plus")


def _protocol(name, n=7, t=4, bits=32, **others):
  """t survivors of n are enough for all of them."""
  own = {"secagg_plus": {"corrupt": 0.1, "dropout_share": (n - t) / n}}.get(name, {})
  return sums.by_name(name, bits=bits, min_survivors=t, **own, **others)


def _plain(vectors, survivors):
  return sum((vectors[who] for who in survivors[1:]), vectors[survivors[0]].copy())


# --- 1: exact sums


@pytest.mark.parametrize("name", _SECRET)
@pytest.mark.parametrize("phase", sums.Drops._fields)
@pytest.mark.parametrize("dropping", [0, 1, 3])
def test_p36_the_sum_is_exact_whoever_falls_silent_when(name, phase, dropping):
  """0, 1 and n - t drop-outs, in each phase."""
  vectors = parties.vectors(7, bits=64)
  gone = frozenset(range(2, 2 + dropping))
  summed = _protocol(name, bits=64).sum(vectors, sums.Drops(**{phase: gone}))
  left = [who for who in vectors if who not in gone or phase == "before_unmasking"]
  assert summed.survivors == tuple(left)
  assert summed.total.dtype == np.uint64
  np.testing.assert_array_equal(summed.total, _plain(vectors, left))


def test_signed_sums_are_exact_too():
  drops = sums.Drops(frozenset({0}), frozenset({6}), frozenset())
  vectors = parties.vectors(7)
  summed = _protocol("secagg", t=5, signed=True).sum(vectors, drops)
  np.testing.assert_array_equal(summed.total, _plain(vectors, [1, 2, 3, 4, 5]))


@st.composite
def _sums(draw):
  n = draw(st.integers(2, 7))
  where = [draw(st.sampled_from([None, *range(3)])) for _ in range(n)]
  drops = [frozenset(i for i in range(n) if where[i] == phase) for phase in range(3)]
  fewest = draw(st.integers(2, n))
  bits, length = draw(st.sampled_from([32, 64])), draw(st.integers(1, 9))
  return n, fewest, bits, length, sums.Drops(*drops), draw(st.integers(0, 99))


@settings(max_examples=25)
@given(_sums(), st.sampled_from(_SECRET))
def test_a_sum_is_the_plain_one_or_refused(case, name):
  n, fewest, bits, length, drops, seed = case
  vectors = parties.vectors(n, length, bits, seed)
  protocol = _protocol(name, n, fewest, bits)
  left = n - sum(map(len, drops))
  if left < fewest:
    with pytest.raises(UserError):
      protocol.sum(vectors, drops)
    return
  if name == "secagg_plus":  # its graph decides beside the numbers
    try:
      summed = protocol.sum(vectors, drops)
    except UserError:
      return
  else:
    summed = protocol.sum(vectors, drops)
  oracle = sums.PlainSum(bits=bits).sum(vectors, drops)
  np.testing.assert_array_equal(summed.total, oracle.total)
  assert summed.survivors == oracle.survivors


@pytest.mark.parametrize(
  "protocol",
  [
    (sums.SecAgg(min_survivors=2), 2),
    (sums.SecAgg(min_survivors=3, signed=True), 3),
    (sums.SecAggPlus(), 3),
  ],
  ids=["plain", "signed", "plus"],
)
def test_every_pattern_of_silence_gives_the_sum_or_one_line_and_so_does_a_simulation(
  protocol,
):
  """Three clients, each silent before one of three phases or never; two of them must stay, or all
  three where keys are signed or the share of drop-outs is 0.2."""
  real, least = protocol
  simulated = dataclasses.replace(real, simulated=True)
  vectors = {who: np.array([who, 2**32 - 1], np.uint32) for who in (0, 7, 2**32 - 2)}
  given = 0
  for silent in itertools.product(range(4), repeat=3):
    phase = lambda k, silent=silent: frozenset(
      who for who, place in zip(vectors, silent) if place == k
    )
    drops = sums.Drops(phase(1), phase(2), phase(3))
    if silent.count(0) < least:
      for refusing in (real, simulated):
        with refuses("min_survivors"):
          refusing.sum(vectors, drops)
      continue
    uploading = [
      who for who in vectors if who not in drops.before_sharing | drops.before_upload
    ]
    summed, beside = real.sum(vectors, drops), simulated.sum(vectors, drops)
    expected = np.sum([vectors[who] for who in uploading], axis=0, dtype=np.uint32)
    np.testing.assert_array_equal(summed.total, expected)
    np.testing.assert_array_equal(beside.total, expected)
    assert summed.survivors == beside.survivors == tuple(uploading)
    assert summed.cost._replace(seconds=0) == beside.cost._replace(seconds=0)
    given += 1
  assert given == {2: 10, 3: 1}[least]


def test_each_vector_is_looked_up_once_in_order():
  seen = []

  class Lazy(dict):
    def __getitem__(self, who):
      seen.append(who)
      return super().__getitem__(who)

  vectors = Lazy(parties.vectors(5))
  _protocol("secagg", 5, 3).sum(vectors, sums.Drops(before_upload=frozenset({1})))
  assert seen == [0, 2, 3, 4]


def test_p36_no_two_sums_share_a_mask():
  terms, vectors = parties.terms(4, 3), parties.vectors(4)
  one, two = (parties.play(terms, vectors).messages for _ in range(2))
  assert not [message for message in one if one[message] == two[message]]


def test_without_the_extra_one_line_names_it(monkeypatch):
  primitives.library.cache_clear()
  monkeypatch.setitem(sys.modules, "cryptography", None)
  with pytest.raises(
    UserError, match=r"needs cryptography, .* pip install -e '\.\[secure\]'"
  ):
    sums.SecAgg().sum(parties.vectors(3))
  assert sums.SecAgg(simulated=True).sum(parties.vectors(3)).survivors == (0, 1, 2)


# --- 2: an end without a leak


@pytest.mark.parametrize("phase", ["envelopes", "masked", "revealed"])
def test_p36_with_fewer_than_t_the_sum_ends_and_nothing_is_unmasked(phase):
  silent, messages = {phase: {0, 1, 2, 3}}, {}
  with refuses("min_survivors", value=4):
    parties.play(parties.terms(7, 4), parties.vectors(7), silent=silent, messages=messages)
  revealing = [who for kind, who in messages if kind == "revealed"]
  assert revealing == ([4, 5, 6] if phase == "revealed" else [])  # t - 1 shares, or none


def test_fewer_than_t_shares_do_not_give_the_seed():
  seed = bytes(range(16))
  shares = primitives.split(seed, 4, 7)
  assert primitives.combine(dict(enumerate(shares[:4]))) == seed
  assert all(
    primitives.combine({i: shares[i] for i in three}) != seed
    for three in itertools.combinations(range(7), 3)
  )


# --- 3: what the server sees


def _p_uniform(words):
  """p of a chi-square test that all bytes of integers are uniform."""
  counts = np.bincount(np.ascontiguousarray(words).view(np.uint8).ravel(), minlength=256)
  return stats.chisquare(counts).pvalue


def _masked(played, who):
  data = played.messages["masked", who][OVERHEAD + 4 :]
  return np.frombuffer(data, np.uint32)


_LENGTH = 4000


def _without_own_masks(played):
  """[n, d]: what is left of the masked vectors when the server has rebuilt all own masks."""
  terms, rows = played.server.terms, []
  for who in terms.clients:
    row = _masked(played, who).copy()
    seed = played.members[who].own_seed  # which the server rebuilds from shares
    primitives.add_streams(row, [(secagg_client.own_stream(terms, who, seed), False)])
    rows.append(row)
  return np.stack(rows)


def _played(length=_LENGTH, degree=None):
  count, threshold = (5, 3) if degree is None else (9, 3)
  terms = parties.terms(count, threshold, length=length, degree=degree)
  small = {who: np.full(length, who, np.uint32) for who in range(count)}  # far from uniform
  return parties.play(terms, small)


def test_a_masked_vector_is_uniform():
  played = _played()
  for who in range(5):
    assert _p_uniform(_masked(played, who)) > 1e-8
  together = np.concatenate([_masked(played, who) for who in range(5)])
  assert _p_uniform(together) > 1e-8


@pytest.mark.parametrize("degree", [None, 4])
def test_what_the_server_unmasks_is_uniform_but_for_the_sum_of_all(degree):
  """It rebuilds each own mask. Sums of some clients are then still masked by their
  neighbours; a pair without a mask between two parts (planted) would be seen."""
  played = _played(degree=degree)
  rows = _without_own_masks(played)
  n = len(rows)
  some = [[0], [n - 1], [0, 1], [1, 3], [*range(n - 1)], [*range(1, n)]]
  for who in some:
    assert _p_uniform(rows[who].sum(axis=0, dtype=np.uint32)) > 1e-8
  assert _p_uniform(rows.sum(axis=0, dtype=np.uint32)) < 1e-9  # the sum itself
  np.testing.assert_array_equal(rows.sum(axis=0, dtype=np.uint32), sum(range(n)))


def test_the_view_with_other_vectors_of_one_sum_looks_the_same():
  """The simulator: who knows the sum alone makes a view of the same law."""
  real = _without_own_masks(_played())
  terms = parties.terms(5, 3, length=_LENGTH)
  others = parties.vectors(5, _LENGTH, seed=3)
  others[4] = (10 - sum(others[who].astype(np.int64) for who in range(4))).astype(np.uint32)
  simulated = _without_own_masks(parties.play(terms, others))
  np.testing.assert_array_equal(
    *(r.sum(axis=0, dtype=np.uint32) for r in (real, simulated))
  )
  for a, b in zip(real, simulated):
    assert stats.ks_2samp(a, b).pvalue > 1e-8
  plain = np.full(_LENGTH, 3, np.uint32)
  assert stats.ks_2samp(plain, simulated[3]).pvalue < 1e-9


def test_who_listens_on_the_wire_learns_the_sum_as_the_server_does():
  """Messages are not encrypted to the server: only noise, or a private channel, hides the sum."""
  terms = parties.terms(4, 3)
  heard = parties.play(terms, parties.vectors(4), silent={"masked": {2}})
  listener = secagg_server.start(terms)
  for kind in ("keys", "envelopes", "masked", "revealed"):
    for who in range(4):
      if (kind, who) in heard.messages:
        listener, _ = listener.receive(heard.messages[kind, who], who)
    listener, _ = listener.close()
  np.testing.assert_array_equal(listener.result().total, heard.total)


def test_the_tests_of_uniformity_reject_a_planted_bias():
  rng = np.random.default_rng(5)
  good = rng.integers(0, 2**32, _LENGTH, dtype=np.uint32)
  biased = good & np.uint32(0xFFFFFFF7)  # one bit of 32 is never set
  shorter = good % np.uint32(2**32 - 2**29)  # an eighth of the range is missing
  assert _p_uniform(good) > 1e-8
  assert _p_uniform(biased) < 1e-9 and _p_uniform(shorter) < 1e-9


def test_p36_masks_that_lack_their_sign_are_caught(monkeypatch):
  """A planted bug: everybody adds."""
  add = primitives.add_streams
  monkeypatch.setattr(
    primitives,
    "add_streams",
    lambda v, streams: add(v, [(key, True) for key, _ in streams]),
  )
  vectors = parties.vectors(5)
  summed = _protocol("secagg", 5, 3).sum(vectors)
  assert not np.array_equal(summed.total, _plain(vectors, [*range(5)]))


# --- 4: colluders


def _fix(monkeypatch, seed):
  """Shamir's polynomials from a seed, too."""
  from Crypto.Protocol import SecretSharing

  monkeypatch.setattr(SecretSharing, "rng", parties.seeded(seed))


@pytest.mark.parametrize("gone", [set(), {4}])
def test_t_minus_1_colluders_and_the_server_learn_the_sum_of_the_rest(monkeypatch, gone):
  """Clients 0 and 1 and the server know all but two or three clients' secrets. For ANY shift
  of the vectors of 2 and 3 that keeps their sum there is a stream between the two that makes
  everything the colluders and the server ever see the same, byte for byte; a uniform stream
  takes both values with equal probability, so the view says nothing beyond the sum."""
  terms = parties.terms(5, 3)
  vectors = parties.vectors(5)
  entropy = lambda who: parties.seeded(100 + who)
  silent = {"masked": gone}

  def view():
    _fix(monkeypatch, 7)
    return parties.play(terms, vectors, silent=silent, entropy=entropy)

  real = view()
  two, three = real.members[2], real.members[3]
  private = secagg_client.mask_key(terms, 2, two.mask_seed)
  between = secagg_client.pair_stream(terms, 2, private, 3, two.roster[3][32:64])
  shift = np.array([1, 2**31, 77, 0, 2**32 - 5], np.uint32)
  vectors[2], vectors[3] = vectors[2] + shift, vectors[3] - shift
  other = view()
  assert real.messages["masked", 2] != other.messages["masked", 2]  # the same stream: seen

  add = primitives.add_streams

  def shifted(vector, streams):
    add(vector, streams)
    for key, plus in streams:
      if key == between:  # the stream is the old one less the shift
        vector += -shift if plus else shift

  monkeypatch.setattr(primitives, "add_streams", shifted)
  other = view()
  assert other.messages == real.messages and other.told == real.told
  assert [other.members[who] == real.members[who] for who in (0, 1)] == [True, True]
  np.testing.assert_array_equal(real.total, other.total)
  assert three.terms == terms


def test_the_colluders_shares_fit_any_seed():
  """t - 1 shares are those of every secret: for each there is a share that completes them."""
  shares = primitives.split(bytes(range(16)), 3, 5)
  guesses = set()
  for last in range(40):
    forged = bytes([last]) + shares[2][1:]
    guesses.add(primitives.combine({0: shares[0], 1: shares[1], 2: forged}))
  assert len(guesses) == 40


# --- 6, 8: the modulus, the cohort


def test_a_sum_that_could_wrap_around_is_refused():
  vectors = {who: np.full(3, 2**16 - 1, np.uint32) for who in range(4)}
  assert sums.SecAgg(largest=2**30 - 1).largest == 2**30 - 1
  np.testing.assert_array_equal(
    sums.SecAgg(largest=2**30 - 1).sum(vectors).total, 4 * (2**16 - 1)
  )
  with refuses("bits", value=32):
    sums.SecAgg(largest=2**30).sum(vectors)
  with refuses("vectors[0]"):
    sums.SecAgg(largest=255).sum(vectors)
  assert bits_needed(4, 2**30) == 33 and bits_needed(4, 2**30 - 1) == 32


@pytest.fixture(params=protocols.PROTOCOLS)
def name(request):
  """Each protocol whose library is there."""
  if request.param == "bfv":
    pytest.importorskip("tenseal", reason="needs the extra 'he'")
  return request.param


def test_nobody_is_summed_alone(name):
  one = {5: np.zeros(3, np.uint32)}
  with refuses("num_clients", value=1):
    sums.by_name(name).sum(one)
  with refuses("min_survivors", value=1):
    sums.by_name(name, min_survivors=1)
  two = {**one, 6: np.zeros(3, np.uint32)}
  with pytest.raises(UserError):
    sums.by_name(name).sum(two, sums.Drops(before_upload=frozenset({6})))


def test_vectors_that_do_not_fit_are_refused(name):
  protocol = sums.by_name(name)
  odd = {
    "shape": np.zeros(4, np.uint32),
    "type": np.zeros(3, np.int32),
    "width": np.zeros(3, np.uint64),
  }
  # As many clients as a committee has members.
  others = {who: np.zeros(3, np.uint32) for who in range(1, 6)}
  for vector in odd.values():
    with refuses("vectors[9]"):
      protocol.sum(others | {9: vector})
  with refuses("client", value=-1):
    protocol.sum({-1: odd["shape"], 2: odd["shape"]})
  two = {1: odd["shape"], 2: odd["shape"]}
  with refuses("drops"):
    protocol.sum(two, sums.Drops(frozenset({3})))
  with refuses("drops", value=frozenset({1})):
    protocol.sum(two, frozenset({1}))
  with refuses("drops.before_upload", value=1):
    protocol.sum(two, sums.Drops(before_upload=1))
  with refuses("vectors", value=Verbatim("list")):
    protocol.sum([odd["shape"]] * 2)


# --- 7: costs


def test_memory_does_not_grow_with_the_number_of_clients():
  length = 200_000
  vector_bytes = 4 * length

  class Made(dict):
    def __getitem__(self, who):
      return np.full(length, who, np.uint32)

  def peak(n):
    tracemalloc.start()
    _protocol("secagg", n, 2).sum(Made.fromkeys(range(n)))
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return top

  peak(3)
  few, many = peak(3), peak(12)
  assert many < few + vector_bytes and many < 9 * vector_bytes


def test_in_a_graph_everybody_has_degree_neighbours_and_they_agree():
  terms = parties.terms(11, 3, degree=4)
  near = {who: neighbours(terms, who) for who in terms.clients}
  assert {len({*ids} - {who}) for who, ids in near.items()} == {4}
  assert all(who in near[other] for who, ids in near.items() for other in ids)
  again = parties.terms(11, 3, degree=4, session=bytes(16))
  assert near != {who: neighbours(again, who) for who in again.clients}

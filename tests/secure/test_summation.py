"""A secure mean in rounds: one argument, one result for every execution and protocol."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import federated, secure
from dpjax.secure import sums
from dpjax.secure.encoding import Encoding
from dpjax.secure.summation import RoundRefused, check_survivors, uploading
from dpjax.secure.sums import AdditiveServers, Drops, PlainSum
from dpjax.secure.sums.interface import NO_DROPS
from tests.refuses import refuses

_LOSS = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
_ROWS = [[0.5, 1.0], [-3.0, 2.5], [7.0, -1.0], [0.25, 0.0], [2.0, 2.0]]
_COHORT = federated.from_batches([np.array([row], np.float32) for row in _ROWS])
_ENCODING = Encoding(8)


def _rounds(
  aggregator, *, map_clients=None, count=2, cohort=_COHORT, make=federated.fed_avg, **told
):
  algorithm = secure.forgiving(
    make(
      _LOSS,
      optax.sgd(0.5),
      aggregator=aggregator,
      map_clients=map_clients,
      key=jax.random.key(0),
    ),
    **told,
  )
  state = algorithm.init(jnp.zeros(2), 5)
  for _ in range(count):
    state, info = algorithm.round(state, cohort)
  return state, info


def _secure(protocol=None, **options):
  protocol = PlainSum() if protocol is None else protocol
  return secure.secure_mean(protocol, _ENCODING, **options)


def test_it_drops_in_by_one_argument_and_costs_half_a_step_of_the_grid():
  plain, _ = _rounds(federated.weighted_mean())
  state, _ = _rounds(_secure())
  np.testing.assert_allclose(state.params, plain.params, atol=4 * _ENCODING.resolution)
  assert np.any(np.asarray(state.params) != 0)


@pytest.mark.parametrize(("count", "field"), [(1, "survivors"), (5, "max_clients")])
def test_messages_that_no_sum_may_hold_are_refused_without_a_round_too(count, field):
  """Five clients of a sum for four: their ones wrapped around to a mean of 0, and nobody saw."""
  aggregator = secure.secure_mean(PlainSum(), Encoding(4, largest_value=1.0, bits=8))
  ones = jnp.ones((count, 1))
  state = aggregator.init(ones[0])
  with refuses(field):
    aggregator.update(ones, np.ones(count, bool), state)
  mean = jax.jit(aggregator.update)(ones, np.ones(count, bool), state)[0]
  assert np.isnan(mean).all()  # cannot raise
  assert aggregator.update(jnp.ones((6, 1)), np.arange(6) < 4, state)[0] == 1.0


@pytest.mark.cases(quick=[2], long=...)
@pytest.mark.parametrize(
  "run",
  [
    functools.partial(federated.vmap_clients, clients_per_block=2),
    functools.partial(federated.pmap_clients, num_devices=1),
    lambda: federated.process_clients(federated.loop_clients()),
  ],
)
def test_every_execution_gives_the_same_bits(run):
  loop, _ = _rounds(_secure(), map_clients=federated.loop_clients())
  other, _ = _rounds(_secure(), map_clients=run())
  np.testing.assert_array_equal(other.params, loop.params)


@pytest.mark.cases(long=["32"])
@pytest.mark.parametrize("bits", [32, 64])
def test_the_protocol_and_the_simulation_are_equal_bit_for_bit(bits):
  simulated, _ = _rounds(_secure())
  real, info = _rounds(_secure(AdditiveServers(bits=bits)))
  np.testing.assert_array_equal(real.params, simulated.params)
  assert float(info.clients.upload_bits[0]) >= 2 * bits * 3  # two numbers, a weight; twice


def test_a_committee_gives_the_same_bits_and_nan_counts_as_nothing():
  pytest.importorskip("cryptography", reason="needs the extra 'secure'")
  rows = [*_ROWS[:4], [np.nan, 2.0]]
  cohort = federated.from_batches([np.array([row], np.float32) for row in rows])
  simulated, _ = _rounds(_secure(), cohort=cohort)
  real, info = _rounds(_secure(sums.Committee()), cohort=cohort)
  np.testing.assert_array_equal(real.params, simulated.params)
  assert np.isfinite(real.params).all() and np.any(np.asarray(real.params) != 0)
  # Shares of five clients for five members, and the keys and the sums.
  assert float(info.clients.upload_bits[0]) >= 8 * 10 * 12


@pytest.mark.parametrize("seed", [1])
def test_they_are_equal_where_clients_drop_out_too(seed):
  dropout = secure.Dropout(prob=0.5, seed=seed)
  found = [
    _rounds(_secure(protocol, dropout=dropout), count=4)
    for protocol in (PlainSum(), AdditiveServers())
  ]
  np.testing.assert_array_equal(found[0][0].params, found[1][0].params)
  assert found[0][1].num_clients == found[1][1].num_clients
  full, _ = _rounds(_secure(), count=4)
  assert np.any(np.asarray(full.params) != np.asarray(found[0][0].params))


def test_the_mean_is_of_those_who_uploaded():
  dropout = secure.Dropout(prob=0.5, seed=1)
  drops = dropout.drops(0, range(5))
  kept = uploading(range(5), drops)
  assert 2 <= len(kept) < 5
  state, info = _rounds(_secure(dropout=dropout), count=1)
  wanted = 0.5 * np.mean([_ROWS[i] for i in kept], axis=0)
  np.testing.assert_allclose(state.params, wanted, atol=1e-6)
  assert info.num_clients == len(kept)


@pytest.mark.parametrize(
  "protocol", [PlainSum(min_survivors=6), AdditiveServers(min_survivors=6)]
)
def test_a_round_with_too_few_changes_nothing_but_its_number(protocol):
  reports = []
  state, info = _rounds(_secure(protocol), count=3, refused=reports.append)
  assert not np.asarray(state.params).any()
  assert int(state.round) == 3 and int(state.aggregator) == 3 and info.num_clients == 0
  assert [words.partition(",")[0] for words in reports] == [
    f"round {n} was refused" for n in (1, 2, 3)
  ]


def test_without_forgiving_it_is_one_line():
  algorithm = federated.fed_avg(
    _LOSS,
    optax.sgd(0.5),
    aggregator=_secure(PlainSum(min_survivors=6)),
    key=jax.random.key(0),
  )
  with pytest.raises(RoundRefused, match="survivors=5: must be >= min_survivors=6"):
    algorithm.round(algorithm.init(jnp.zeros(2)), _COHORT)


@pytest.mark.cases(long=[1])
@pytest.mark.parametrize("protocol", [PlainSum(), AdditiveServers()])
def test_memories_of_those_who_dropped_out_stay_what_they_were(protocol):
  """SCAFFOLD: the control of a client moves where its message counted, and nowhere else."""
  dropout = secure.Dropout(prob=0.5, seed=1)
  make = functools.partial(
    federated.scaffold, server_tx=optax.sgd(1.0), client_learning_rate=0.5, num_clients=5
  )
  state, _ = _rounds(_secure(protocol, dropout=dropout), count=1, make=make)
  moved = np.any(np.asarray(jax.tree.leaves(state.memories.all())[0]) != 0, axis=1)
  assert np.flatnonzero(moved).tolist() == uploading(range(5), dropout.drops(0, range(5)))


def test_a_client_that_sends_nan_is_left_out():
  rows = [np.array([[1.0, 1.0]]), np.array([[np.nan, 1.0]]), np.array([[3.0, 3.0]])]
  cohort = federated.from_batches([row.astype(np.float32) for row in rows])
  for protocol in (PlainSum(), AdditiveServers()):
    state, _ = _rounds(_secure(protocol), count=1, cohort=cohort)
    np.testing.assert_allclose(state.params, [1.0, 1.0], atol=1e-6)


def test_more_clients_than_the_modulus_was_sized_for_are_refused():
  aggregator = secure.secure_mean(PlainSum(), Encoding(4))
  with refuses("max_clients", value=4):
    _rounds(aggregator)


def test_an_encoding_wider_than_the_modulus_is_refused():
  class Narrow(NamedTuple):
    bits: int = 16
    name: str = "narrow"

  with refuses("bits", value=32):
    secure.secure_mean(Narrow(), _ENCODING)


def test_a_protocol_that_sums_others_is_found_out():
  class Wrong(AdditiveServers):
    def sum(self, vectors, drops=NO_DROPS):
      found = super().sum(vectors, drops)
      return found._replace(survivors=found.survivors[:-1])

  with refuses("survivors"):
    _rounds(_secure(Wrong()))


def test_phases_of_dropping_out_are_what_they_say():
  drops = Drops(frozenset({0}), frozenset({1}), frozenset({2}))
  assert uploading(range(4), drops) == [2, 3]
  check_survivors(PlainSum(), [2, 3, 4], drops)
  with pytest.raises(RoundRefused, match="survivors=1"):
    check_survivors(PlainSum(), [2, 3], drops)


def test_secagg_itself_gives_the_bits_of_its_simulation_and_its_costs():
  pytest.importorskip("cryptography")
  pytest.importorskip("Crypto")
  dropout = secure.Dropout(prob=0.5, seed=1)
  protocol = sums.SecAgg(min_survivors=2)
  both = (protocol, dataclasses.replace(protocol, simulated=True))
  runs = [_rounds(_secure(one, dropout=dropout)) for one in both]
  np.testing.assert_array_equal(runs[0][0].params, runs[1][0].params)
  bits = [np.asarray(info.clients.upload_bits) for _, info in runs]
  np.testing.assert_array_equal(*bits)
  assert len(bits[0]) < 5 and bits[0][0] > 8 * 4 * 3


def test_a_protocol_that_stands_no_drop_out_refuses_the_round():
  dropout = secure.Dropout(prob=0.5, seed=1)
  assert dropout.drops(0, range(5)).before_upload
  state, _ = _rounds(_secure(sums.AdditiveSharing(), dropout=dropout), count=1)
  assert not np.asarray(state.params).any() and int(state.round) == 1


def _seen(monkeypatch, run):
  """What a server gets of one round, [d + 1] signed."""
  totals, made = [], AdditiveServers.sum
  spied = lambda self, *args: (totals.append(made(self, *args)), totals[-1])[1]
  monkeypatch.setattr(AdditiveServers, "sum", spied)
  run()
  return totals[0].total


@pytest.mark.cases(long=["64"])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_total_does_not_count_those_who_sent_negative_numbers(monkeypatch, bits):
  """With few bits in use, residues modulo 2^few would: they are of the protocol's modulus."""
  protocol, encoding = AdditiveServers(bits=bits), Encoding(8, bits=12)
  aggregator = secure.secure_mean(protocol, encoding)
  total = _seen(monkeypatch, lambda: _rounds(aggregator, count=1))
  signed = total.astype(np.int64) if bits == 64 else total.view(np.int32)
  assert np.abs(signed).max() < 2**11  # of the sum itself, not 2^12 times a count


@pytest.mark.parametrize("protocol", [PlainSum(), AdditiveServers()], ids=lambda p: p.name)
def test_coordinates_beyond_the_encoding_are_counted(protocol):
  """Only the clients whose message counts; the sum is that of the cut messages."""
  rows = [[0.5, 50.0], [-30.0, 90.0], [np.nan, 90.0], [2.0, -1.0]]
  cohort = federated.from_batches([np.array([row], np.float32) for row in rows])
  state, info = _rounds(secure.secure_mean(protocol, _ENCODING), cohort=cohort, count=1)
  assert int(info.coordinates_cut) == 3 and int(info.num_clients) == 3
  assert int(info.left_out) == 1
  cut = np.clip(np.array([rows[0], rows[1], rows[3]]) / 2, -8, 8).mean(0)
  np.testing.assert_allclose(state.params, cut, atol=1e-5)

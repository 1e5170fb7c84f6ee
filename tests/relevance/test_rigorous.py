"""The proofs of rigorous mode: sensitivities, scales, ledger (T17), shuffling (T16), and what
is refused. T14 (Gaussian multipliers) is in tests/core/mechanisms/test_additive.py, T15 (PLD of
Laplace vectors) and T18 (noise multipliers of DP-SGD) in tests/core/accounting."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import accounting, mechanisms
from dpjax.accounting import shuffle
from dpjax.mechanisms.additive import gaussian_delta
from dpjax.relevance import rigorous
from dpjax.relevance.rigorous import StageCharge
from dpjax.relevance.settings import Rigorous
from tests.refuses import refuses

_BETA = np.array([0.1, 0.15, 0.3, 0.45])


# --- refusals


@pytest.mark.parametrize(
  ("fields", "field"),
  [
    ({"labels": "raw"}, "rigorous.labels"),
    ({"rel_noise": "entropy"}, "rigorous.rel_noise"),
    ({"draw": "batch"}, "rigorous.draw"),
    ({"draw": "run"}, "rigorous.draw"),
    ({"draw": "record_fresh"}, "rigorous.draw"),
    ({"features": "gaussian"}, "rigorous.shuffle"),
    ({"features": "laplace_pld"}, "rigorous.shuffle"),
    ({"rel_norm": "raw"}, "rigorous.rel_norm"),
  ],
)
def test_rigorous_mode_refuses_by_name(fields, field):
  with refuses(field):
    Rigorous(**fields)


def test_fresh_noise_is_accepted_when_it_is_paid_for():
  assert Rigorous(draw="record_fresh", compose_fresh=True).compose_fresh


# --- T17: the ledger


def test_t17_split_is_the_maximum_and_unsplit_the_sum():
  charge = lambda where, e, d=0.0: StageCharge("s", where, e, d, "")
  assert rigorous.total([charge("D1", 0.5, 1e-6), charge("D2", 2.0)]) == (2.0, 1e-6)
  assert rigorous.total([charge("all", 0.5, 1e-6), charge("all", 2.0, 1e-6)]) == (2.5, 2e-6)
  parts = [charge("D1", 0.5), charge("D1", 0.75), charge("D2", 1.0)]
  assert rigorous.total(parts)[0] == 1.25


def test_the_split_is_by_index_alone_and_covers_everything_once():
  first, second = rigorous.split_by_hash(2000, 0.3)
  assert sorted([*first, *second]) == list(range(2000))
  assert abs(len(first) / 2000 - 0.3) < 0.05
  longer, _ = rigorous.split_by_hash(3000, 0.3)
  np.testing.assert_array_equal(longer[longer < 2000], first)  # no record moves


# --- stage B


@pytest.mark.long
@pytest.mark.parametrize(
  ("relation", "delta", "scale"),
  [("replace_one", 0.0, 0.04), ("add_or_remove_one", 0.0, 0.02)],
)
def test_the_noise_of_the_relevance_has_the_stated_scale(relation, delta, scale):
  drawn = rigorous.noisy_relevance(
    jax.random.key(0), np.zeros(20_000), num_records=100, epsilon=0.5, delta=delta,
    neighboring_relation=relation,
  )  # fmt: skip
  assert np.abs(drawn).mean() == pytest.approx(scale, rel=0.03)


@pytest.mark.slow
def test_the_gaussian_relevance_uses_the_l2_sensitivity():
  drawn = rigorous.noisy_relevance(
    jax.random.key(0), np.zeros(20_000), num_records=100, epsilon=0.5, delta=1e-5
  )
  sigma = math.sqrt(2) / 100 * mechanisms.analytic_noise_multiplier(0.5, 1e-5)
  assert drawn.std() == pytest.approx(sigma, rel=0.03)


# --- stage C


@given(seed=st.integers(0, 2**32 - 1), clip=st.floats(0.02, 2.0))
@settings(max_examples=60)
def test_c2_no_pair_of_records_costs_more_than_epsilon(seed, clip):
  rng = np.random.default_rng(seed)
  how = Rigorous(features="laplace_clipped", clip=clip)
  channels = int(rng.choice([1, 3]))
  beta = rng.dirichlet(np.ones(16))
  x = (rng.random((2, 4, 4, channels)) < rng.random((2, 1, 1, 1))).astype(np.float32)
  kept = rigorous.clip_records(x, beta, how).astype(np.float64)
  drawn = rigorous.feature_noise(beta, how, epsilon=1.3, channels=channels)
  difference = np.abs(kept[0] - kept[1]).sum(axis=-1).ravel()
  assert (difference / drawn.scales).sum() <= 1.3 * (1 + 1e-9)


def test_c2_the_bound_is_attained():
  beta, how = np.full(16, 1 / 16), Rigorous(features="laplace_clipped", clip=0.25)
  x = np.zeros((2, 4, 4, 1), np.float32)
  x[0, 0], x[1, 3] = 1, 1  # weighted norms 1/4 on disjoint places
  kept = rigorous.clip_records(x, beta, how)
  drawn = rigorous.feature_noise(beta, how, epsilon=1.3, channels=1)
  spent = (np.abs(kept[0] - kept[1]).ravel() / drawn.scales).sum()
  assert spent == pytest.approx(1.3, rel=1e-4)


@given(seed=st.integers(0, 2**32 - 1), clip=st.floats(0.02, 1.0))
@settings(max_examples=40)
def test_c4_no_pair_of_records_is_further_apart_than_the_multiplier(seed, clip):
  rng = np.random.default_rng(seed)
  how = Rigorous(features="gaussian", clip=clip, shuffle=False, delta=1e-5)
  beta = rng.dirichlet(np.ones(16))
  kept = rigorous.clip_records(rng.random((2, 4, 4, 3)).astype(np.float32), beta, how)
  drawn = rigorous.feature_noise(beta, how, epsilon=1.5, channels=3)
  squares = (kept[0].astype(np.float64) - kept[1]).__pow__(2).sum(axis=-1).ravel()
  distance = math.sqrt((squares / drawn.scales**2).sum())
  assert gaussian_delta(1 / max(distance, 1e-6), 1.5) <= 1e-5 * (1 + 1e-6)


def test_c3_matches_the_accountant_and_beats_the_pure_scale():
  """T15 in the convention of this room: 49 entries in [0, 1], scale 24.5, 1e-5 -> 1.038."""
  event = rigorous.laplace_vector_event([24.5], [49])
  spent = accounting.epsilon(event, delta=1e-5, neighboring_relation="replace_one")
  assert spent == pytest.approx(1.038, abs=2e-3)
  how = Rigorous(features="laplace_pld", shuffle=False, delta=1e-5)
  drawn = rigorous.feature_noise(np.full(49, 1 / 49), how, epsilon=2.0, channels=1)
  assert np.ptp(drawn.scales) == 0 and drawn.scales[0] < 24.5
  again = rigorous.laplace_vector_event(drawn.scales, [1] * 49)
  spent = accounting.epsilon(again, delta=1e-5, neighboring_relation="replace_one")
  assert 1.98 < spent <= 2.0


def test_c3_with_uneven_shares_stays_within_its_epsilon():
  how = Rigorous(features="laplace_pld", shuffle=False, delta=1e-5)
  drawn = rigorous.feature_noise(_BETA, how, epsilon=2.0, channels=3)
  event = rigorous.laplace_vector_event(drawn.scales, [3] * len(_BETA))
  spent = accounting.epsilon(event, delta=1e-5, neighboring_relation="replace_one")
  assert 1.9 < spent <= 2.0
  order = np.argsort(_BETA)
  assert (np.diff(drawn.scales[order]) <= 0).all()  # more relevant, less noise


# --- public transformations


def test_pooling_averages_records_and_adds_shares_up():
  x = np.arange(36.0, dtype=np.float32).reshape(1, 6, 6, 1)
  pooled = rigorous.pool(x, 4)  # one block from the middle
  assert pooled.shape == (1, 1, 1, 1) and pooled.item() == x[0, 1:5, 1:5].mean()
  shares = np.full(36, 1 / 36)
  np.testing.assert_allclose(
    rigorous.pooled_shares(shares, (6, 6, 1), 2), np.full(9, 1 / 9)
  )
  assert rigorous.pool(np.ones((2, 5)), 4).shape == (2, 5)


# --- T16: shuffling


@pytest.mark.cases(quick=["7.64-2.0"], long=...)
@pytest.mark.parametrize(("local", "numeric"), [(4.0, 0.189), (5.68, 0.5), (7.64, 2.0)])
def test_t16_the_numeric_bound(local, numeric):
  spent = lambda epsilon: shuffle.amplified_delta(
    local_epsilon=local, num_reports=60_000, epsilon=epsilon
  )
  assert spent(numeric * 1.01) <= 1e-5 < spent(numeric * 0.99)


@pytest.mark.cases(slow=["8.0-7.73"], long=...)
@pytest.mark.parametrize(("local", "numeric"), [(7.0, 1.143), (8.0, 7.73)])
def test_t16_epsilon_after_shuffling(local, numeric):
  found = rigorous.shuffled_epsilon(local, 60_000, 1e-5)
  assert found == pytest.approx(numeric, rel=2e-3)


@pytest.mark.parametrize(("local", "closed"), [(2.0, 0.218), (4.0, 0.611)])
def test_t16_the_closed_form(local, closed):
  found = shuffle.amplified_epsilon(local_epsilon=local, num_reports=60_000, delta=1e-5)
  assert found == pytest.approx(closed, abs=1e-3)


@pytest.mark.slow
def test_t16_the_inverse_is_on_the_private_side():
  found = rigorous.local_epsilon_for(1.5, 60_000, 1e-5)
  assert found == pytest.approx(7.35, abs=0.01)
  spent = shuffle.amplified_delta(local_epsilon=found, num_reports=60_000, epsilon=1.5)
  assert spent <= 1e-5


def test_few_records_are_no_crowd():
  assert rigorous.shuffled_epsilon(3.0, 10, 1e-5) == 3.0
  assert rigorous.local_epsilon_for(1.0, 2, 1e-5) == 1.0


def test_a_charge_needs_a_known_place_and_finite_numbers():
  good = StageCharge("B", "D1", 0.1, 0.0, "")
  with refuses("records", value="D3"):
    dataclasses.replace(good, records="D3")
  with refuses("epsilon", value=float("inf")):
    dataclasses.replace(good, epsilon=math.inf)


def test_norms_of_many_features_are_added_up_in_float64():
  """In float32 a sum over 224 x 224 features was 1.3e-5 too small, and so was epsilon."""
  d = 224 * 224
  beta, x = np.full(d, 1 / d), np.full((1, d), 0.7, np.float32)
  kept = rigorous.clip_records(x, beta, Rigorous(features="laplace_clipped", clip=0.25))
  assert np.abs(kept.astype(np.float64)) @ beta <= 0.25 * rigorous._SLACK

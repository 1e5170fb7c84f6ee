"""Noise inside the sum: its law, its price, and who is refused."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import accounting, federated, secure
from dpjax.accounting.event_kinds.kind import ORDERS, kind_of
from dpjax.accounting.event_kinds.skellam import SkellamDpEvent
from dpjax.secure.distributed_noise import SkellamSum, skellam_mean
from dpjax.secure.encoding import Encoding
from dpjax.secure.summation import secure_mean
from dpjax.secure.sums import AdditiveServers, BfvSum, PlainSum
from tests.refuses import refuses

_KEY = jax.random.key(3)
_DELTA = 1e-5


def _sized(**changes):
  given = {
    "noise_multiplier": 1.0,
    "l2_clip_norm": 1.0,
    "dim": 50,
    "bits": 16,
    "max_clients": 8,
    "min_survivors": 4,
  }
  return SkellamSum.sized(**{**given, **changes})


@hypothesis.given(
  vector=st.lists(st.floats(-1e6, 1e6), min_size=50, max_size=50),
  bits=st.sampled_from([8, 12, 16]),
)
@hypothesis.settings(max_examples=30)
def test_p38_no_message_is_longer_than_the_sensitivity_after_rounding(vector, bits):
  mechanism = _sized(bits=bits)
  rounded = mechanism.encode(np.random.default_rng(0), np.array(vector), _KEY)
  assert math.sqrt(float(rounded @ rounded)) <= mechanism.l2_sensitivity
  assert mechanism.l2_sensitivity > mechanism.scale * mechanism.l2_clip_norm


def test_the_noise_of_the_fewest_survivors_is_what_is_charged():
  mechanism = _sized(noise_multiplier=1.5)
  rng = np.random.default_rng(0)
  draws = np.concatenate([
    sum(mechanism.share(rng) for _ in range(4)) for _ in range(400)
  ])  # fmt: skip
  assert draws.var() == pytest.approx(mechanism.event.variance, rel=0.03)
  assert mechanism.noise_multiplier == pytest.approx(1.5)
  at_once = np.concatenate([mechanism.share(rng, 4) for _ in range(400)])
  assert at_once.var() == pytest.approx(mechanism.event.variance, rel=0.03)
  half = draws[::2] / math.sqrt(2)  # the test rejects half the variance
  assert half.var() != pytest.approx(mechanism.event.variance, rel=0.03)


def test_the_curve_is_that_of_the_published_bound_at_the_next_whole_order():
  event = _sized().event
  variance, square = event.variance, event.l2_sensitivity**2
  for order, bound in zip(ORDERS, kind_of(event).rdp(event), strict=True):
    a = math.ceil(order)
    more = ((2 * a - 1) * square + 6 * event.l1_sensitivity) / (4 * variance**2)
    more = min(more, 3 * event.l1_sensitivity / (2 * variance))
    assert bound == pytest.approx(a * square / (2 * variance) + more, rel=1e-12)


def test_replacing_costs_twice_the_sensitivity():
  event = _sized().event
  double = SkellamDpEvent(
    event.variance, 2 * event.l2_sensitivity, 2 * event.l1_sensitivity
  )
  by = lambda one, relation: accounting.epsilon(
    one, delta=_DELTA, neighboring_relation=relation, accountant="rdp"
  )
  assert (
    by(event, "replace_one") == by(double, "replace_special") > by(event, "replace_special")
  )


@pytest.mark.parametrize(
  ("asked", "field"),
  [
    ({"neighboring_relation": "add_or_remove_one", "accountant": "rdp"}, "event"),
    ({"neighboring_relation": "replace_special", "accountant": "pld"}, "event"),
  ],
)
def test_what_nobody_has_proved_is_refused(asked, field):
  with refuses(field):
    accounting.epsilon(_sized().event, delta=_DELTA, **asked)


def test_no_sampling_amplifies_it():
  event = accounting.poisson_sampled_event(_sized().event, sampling_prob=0.1)
  with refuses("event"):
    accounting.epsilon(
      event, delta=_DELTA, neighboring_relation="replace_special", accountant="rdp"
    )


def test_an_event_goes_through_a_ledger_and_back():
  event = _sized().event
  ledger = accounting.Ledger().charge(
    event,
    num_steps=3,
    l2_clip_norm=1.0,
    neighboring_relation="replace_special",
    noise_key_id="a",
    first_step=0,
  )
  assert accounting.Ledger.from_json(ledger.to_json()) == ledger
  text = accounting.privacy_statement(
    event, delta=_DELTA, neighboring_relation="replace_special", accountants=("rdp",)
  )
  assert "Skellam noise on integers" in text


# --- against central Gaussian noise


@pytest.mark.slow
def test_at_16_bits_the_error_is_within_5_percent_of_central_gaussian_noise():
  """d = 4096, 100 clients, equal epsilon by one accountant under one relation."""
  dim, clients, rng = 4096, 100, np.random.default_rng(0)
  mechanism = _sized(dim=dim, max_clients=clients, min_survivors=clients)
  asked = {"delta": _DELTA, "neighboring_relation": "replace_special", "accountant": "rdp"}
  epsilon = accounting.epsilon(mechanism.event, **asked)
  gaussian = accounting.calibrate_noise_multiplier(
    accounting.gaussian_event, epsilon=epsilon, **asked
  )
  vectors = rng.standard_normal((clients, dim))
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  aggregator = skellam_mean(PlainSum(min_survivors=clients), mechanism, seed=5)
  messages = {"w": jnp.asarray(vectors, jnp.float32)}
  mean, _ = aggregator.update(messages, np.ones(clients, bool), jnp.int32(0))
  error = clients * (np.asarray(mean["w"]) - vectors.mean(axis=0))
  ratio = math.sqrt(float(np.mean(error**2))) / gaussian
  assert ratio == pytest.approx(1.0, abs=0.05)
  coarse = _sized(dim=dim, max_clients=clients, min_survivors=clients, bits=9)
  assert accounting.epsilon(coarse.event, **asked) > 1.2 * epsilon  # rounding is charged


# --- rounds


def _mean(protocol, mechanism, messages, *, state=0, weights=None, seed=1):
  aggregator = skellam_mean(protocol, mechanism, seed=seed)
  mask = np.ones(len(messages), bool)
  return np.asarray(aggregator.update(messages, mask, jnp.int32(state), weights)[0])


def _messages(count=5, dim=50):
  return np.random.default_rng(1).standard_normal((count, dim)).astype(np.float32)


def test_without_noise_it_is_the_mean_of_the_clipped_messages(monkeypatch):
  monkeypatch.setattr(SkellamSum, "share", lambda self, rng, shares=1: 0 * _zeros(self))
  mechanism, messages = _sized(bits=24), _messages()
  weights = np.array([1.0, 0.5, 0.0, 1.0, 1.0])
  found = _mean(PlainSum(min_survivors=4), mechanism, messages, weights=weights)
  weighted = messages * weights[:, None]
  norms = np.linalg.norm(weighted, axis=1, keepdims=True)
  clipped = weighted / np.maximum(norms, 1.0)
  np.testing.assert_allclose(found, clipped.mean(axis=0), atol=2 / mechanism.scale)


def _zeros(mechanism):
  return np.zeros(mechanism.padded_dim, np.int64)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_protocol_gives_the_simulation_bit_for_bit_but_for_whose_noise_it_is(
  monkeypatch, bits
):
  """With noise that is a function of nothing, both are the same integers."""
  fixed = lambda self, rng, shares=1: shares * (np.arange(self.padded_dim) - 30)
  monkeypatch.setattr(SkellamSum, "share", fixed)
  mechanism, messages = _sized(), _messages()
  found = [
    _mean(protocol, mechanism, messages)
    for protocol in (PlainSum(min_survivors=4), AdditiveServers(min_survivors=4, bits=bits))
  ]
  np.testing.assert_array_equal(*found)


@pytest.mark.cases(long=[0])
@pytest.mark.parametrize(
  "protocol", [PlainSum(min_survivors=4), AdditiveServers(min_survivors=4)]
)
def test_noise_is_that_of_all_survivors_whoever_draws_it(protocol):
  mechanism = _sized(noise_multiplier=2.0, dim=1024)
  found = np.concatenate([
    5 * _mean(protocol, mechanism, np.zeros((5, 1024), np.float32), state=i)
    for i in range(4)
  ])  # fmt: skip
  assert found.std() == pytest.approx(2.0 * math.sqrt(5 / 4), rel=0.05)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_a_client_of_nonsense_still_adds_its_noise_and_no_more_than_its_bound(bad):
  mechanism = _sized()
  messages = np.zeros((4, 50), np.float32)
  messages[2, 3] = bad
  found = 4 * _mean(PlainSum(min_survivors=4), mechanism, messages)
  assert np.isfinite(found).all() and np.linalg.norm(found) < 3 * math.sqrt(50)


def test_rounds_and_clients_have_streams_of_their_own():
  mechanism, messages = _sized(), np.zeros((4, 50), np.float32)
  draws = [
    _mean(PlainSum(min_survivors=4), mechanism, messages, state=t) for t in (0, 0, 1)
  ]
  np.testing.assert_array_equal(draws[0], draws[1])
  assert abs(np.corrcoef(draws[0], draws[2])[0, 1]) < 0.5
  other = _mean(PlainSum(min_survivors=4), mechanism, messages, seed=2)
  assert np.any(draws[0] != other)


_LOSS = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)


def _trained(protocol, mechanism, *, clients=5, rounds=3):
  aggregator = skellam_mean(protocol, mechanism, seed=7)
  cohort = federated.from_batches([np.full((1, 50), 0.1, np.float32)] * clients)
  algorithm = secure.forgiving(
    federated.fed_avg(_LOSS, optax.sgd(0.5), aggregator=aggregator, key=_KEY)
  )
  state = algorithm.init(jnp.zeros(50))
  for _ in range(rounds):
    state, info = algorithm.round(state, cohort)
  return state, info


@pytest.mark.cases(long=[0])
@pytest.mark.parametrize(
  "protocol", [PlainSum(min_survivors=4), AdditiveServers(min_survivors=4)]
)
def test_it_drops_into_an_algorithm_by_one_argument(protocol):
  state, info = _trained(protocol, _sized(noise_multiplier=0.02))
  assert float(jnp.mean(state.params)) == pytest.approx(0.1 * (1 - 0.5**3), abs=0.01)
  assert info.num_clients == 5


def test_p37_with_too_few_survivors_nothing_is_released():
  for clients in (3, 4):
    state, info = _trained(PlainSum(min_survivors=4), _sized(), clients=clients)
    assert bool(np.any(np.asarray(state.params))) == (clients == 4)
    assert int(state.round) == 3 and info.num_clients == (clients if clients == 4 else 0)
  with refuses("survivors", value=3):
    _mean(PlainSum(min_survivors=4), _sized(), _messages(3))


@pytest.mark.parametrize(
  ("make", "field"),
  [
    (
      lambda: skellam_mean(PlainSum(min_survivors=3), _sized(), seed=0),
      "min_survivors",
    ),
    (
      lambda: skellam_mean(BfvSum(min_survivors=4), _sized(), seed=0),
      "protocol",
    ),
    (lambda: _sized(bits=40), "bits"),
    (lambda: _sized(bits=8, max_clients=200), "bits"),
    (lambda: _sized(max_clients=3), "max_clients"),
    (lambda: _sized(noise_multiplier=0.0), "noise_multiplier"),
    (
      lambda: skellam_mean(PlainSum(min_survivors=4), _sized(), seed=0).init(jnp.zeros(3)),
      "dim",
    ),
  ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(make, field):
  with refuses(field) as caught:
    make()
  assert "\n" not in str(caught.value)


def test_a_client_that_also_sends_noise_of_its_own_is_refused():
  # Emptied, it would send noise in place of zeros. With a client clip of 10 and noise of 3, what is
  # (4.38, 1e-5) for zeros would have delta .0097 at 4.38.
  def wrap(client):
    return federated.client_noise(client, l2_clip_norm=10.0, noise_multiplier=0.3)

  with refuses("client"):
    federated.fed_avg(
      lambda w, x: jnp.sum((w - x) ** 2),
      optax.sgd(0.1),
      aggregator=skellam_mean(PlainSum(min_survivors=4), _sized(), seed=0),
      wrap=wrap,
      key=_KEY,
    )


def test_the_epsilon_of_a_plan_does_not_stand_beside_other_noise():
  """At noise 5 the plan's epsilon is below .5. The shares add a hundredth of the clip norm."""
  plan = dpjax.Plan(dpjax.PoissonSampler(0.5, capacity=9), 5.0, 1.0, 4.0, 2, delta=1e-3)
  quiet = skellam_mean(PlainSum(min_survivors=4), _sized(noise_multiplier=0.01), seed=0)
  assert plan.epsilon() < 0.5 and quiet.private
  for aggregator in (quiet, secure_mean(PlainSum(), Encoding(4))):
    with refuses("plan"):
      aggregator.drawn_by(plan)
    assert aggregator.drawn_by(dataclasses.replace(plan, noise_multiplier=0.0)).plan


def test_p21_a_sum_that_wraps_is_rarer_than_its_bound():
  """All clients in one direction at the bound, many rounds: never beyond half the modulus."""
  mechanism = _sized(bits=12, max_clients=8, min_survivors=8)
  rng, vector, most = np.random.default_rng(0), np.zeros(50), 0
  vector[0] = 1.0
  for i in range(100):
    key = jax.random.fold_in(_KEY, i)
    encoded = sum(
      mechanism.encode(rng, vector, key) + mechanism.share(rng) for _ in range(8)
    )
    most = max(most, int(np.abs(encoded).max()))
  assert most < 2**11 and mechanism.wrap_probability < 1e-4
  assert most > 2**8  # the modulus is not far too large


@pytest.mark.parametrize("clients", [7, 10, 50, 333])
@pytest.mark.parametrize("noise", [0.3, 1.7, 2.2145642444655276, 33.0])
def test_the_noise_of_all_clients_is_within_what_the_sampler_draws(clients, noise):
  for fewest in (2, clients // 2, clients):
    found = _sized(
      bits=32, max_clients=clients, min_survivors=fewest, noise_multiplier=noise
    )
    for shares in range(fewest, clients + 1):  # rounding went beyond it at some
      assert found.noise.share_variance * shares <= 2**32
  found.share(np.random.default_rng(0), clients)


def test_messages_beyond_floats_send_zeros_and_say_nothing(recwarn):
  mechanism = _sized(l2_clip_norm=1e38, dim=4096)
  with refuses("vector"):
    mechanism.encode(np.random.default_rng(0), np.full(4096, 1j), _KEY)
  sent = mechanism.encode(np.random.default_rng(0), np.full(4096, 1e38), _KEY)
  assert not sent.any()  # the rotation of it is no float32
  mean = skellam_mean(PlainSum(min_survivors=4), _sized(dim=2), seed=1)
  messages = jnp.array([[1.0, 1.0]] * 3 + [[jnp.inf, 0.0]])
  weights = jnp.array([1.0, 0.0, jnp.nan, jnp.inf])
  assert np.isfinite(
    mean.update(messages, np.ones(4, bool), jnp.int32(0), weights)[0]
  ).all()
  assert not recwarn.list  # a warning would tell that somebody sent one


def test_more_clients_than_the_modulus_has_room_for_are_refused():
  mean = skellam_mean(PlainSum(min_survivors=4), _sized(dim=2), seed=1)
  with refuses("num_clients", value=9):
    mean.update(jnp.ones((9, 2)), np.ones(9, bool), jnp.int32(0))


@pytest.mark.cases(long=["64"])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_server_gets_a_function_of_the_noisy_sum_alone(monkeypatch, bits):
  """Not the number of clients whose noisy integers are negative, coordinate by coordinate."""
  totals, made = [], AdditiveServers.sum
  spied = lambda self, *args: (totals.append(made(self, *args)), totals[-1])[1]
  monkeypatch.setattr(AdditiveServers, "sum", spied)
  _mean(AdditiveServers(min_survivors=4, bits=bits), _sized(bits=12), _messages())
  total = totals[0].total
  signed = total.astype(np.int64) if bits == 64 else total.view(np.int32)
  assert np.abs(signed).max() < 2**11

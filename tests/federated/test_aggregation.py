"""Means of clients: what one client can do to them, and the noise they carry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpjax import accounting, federated, transforms
from dpjax.federated import (
  aggregation,
  central,
  client_noise,
  compressed,
  dp_mean,
  drive,
  from_batches,
  local_training,
  weighted_mean,
)
from dpjax.federated.client import Received
from dpjax.federated.execution.client_loop import loop_clients
from dpjax.federated.execution.context import Context
from dpjax.gradients import Automatic, Clip
from dpjax.mechanisms import ChannelStatistics
from dpjax.transforms.clip_scale import clip_scale
from tests import plans
from tests.refuses import refuses

_NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def _tx(noise_multiplier=0.0, l2_clip_norm=1.5, normalize_by=4.0, seed=0):
  return transforms.clip_and_noise(
    l2_clip_norm=l2_clip_norm,
    noise_multiplier=noise_multiplier,
    normalize_by=normalize_by,
    key=jax.random.key(seed),
  )


_plan = functools.partial(
  plans.of, 40, noise_multiplier=2.0, l2_clip_norm=0.5, normalize_by=10.0, num_steps=3,
  delta=1e-3, unit="user",
)  # fmt: skip


_AGGREGATOR = dp_mean(_tx(), l2_clip_norm=1.5)
_UPDATE = jax.jit(
  lambda m, mask, w: _AGGREGATOR.update(m, mask, _AGGREGATOR.init(None), w)[0]
)


@settings(max_examples=60)
@given(
  st.lists(_NUMBERS, min_size=3, max_size=3),
  st.one_of(_NUMBERS, st.sampled_from([1e6, -1e6, 0.0])),
)
def test_p23_one_client_moves_nothing_beyond_its_bound(message, weight):
  """Whatever it sends and however much it claims to weigh: at most C / normalize_by."""
  rng = np.random.default_rng(0)
  messages = np.asarray(rng.normal(size=(4, 3)), np.float32)
  weights = np.ones(4, np.float32)
  messages[3], weights[3] = message, weight
  mask = np.ones(4, bool)
  with_it = np.asarray(_UPDATE(messages, mask, weights))
  without = np.asarray(_UPDATE(messages, np.arange(4) < 3, weights))
  assert np.linalg.norm(with_it - without) <= 1.5 / 4.0 * (1 + 1e-5)
  assert np.isfinite(with_it).all()


def test_p23_the_plain_mean_has_no_such_bound():
  messages, weights = jnp.array([[1.0], [9.0]]), jnp.array([1.0, 1e6])
  found, _ = weighted_mean().update(messages, jnp.ones(2, bool), (), weights)
  assert float(found[0]) > 8.9


def test_p1_a_client_that_sends_nan_contributes_exactly_nothing():
  messages = {
    "a": jnp.array([[1.0], [jnp.nan], [3.0]]),
    "b": jnp.array([2.0, 5.0, jnp.inf]),
  }
  for aggregator in (weighted_mean(), dp_mean(_tx(), l2_clip_norm=1.5)):
    state = aggregator.init(jax.tree.map(lambda leaf: leaf[0], messages))
    whole, _ = aggregator.update(messages, jnp.ones(3, bool), state)
    alone, _ = aggregator.update(messages, jnp.array([True, False, False]), state)
    jax.tree.map(np.testing.assert_array_equal, whole, alone)


@pytest.mark.slow
def test_the_stacked_and_the_streamed_private_mean_are_one():
  rng = np.random.default_rng(1)
  messages = {"w": jnp.asarray(rng.normal(size=(5, 3)) * 2, jnp.float32)}
  weights = jnp.array([1.0, 0.5, 0.0, 1.0, 2.0])
  mask = jnp.array([True, True, True, False, True])
  streamed = dp_mean(_tx(noise_multiplier=1.0), l2_clip_norm=1.5)
  stacked = dp_mean(_tx(noise_multiplier=1.0))
  state = streamed.init({"w": jnp.zeros(3)})
  a, after_a = streamed.update(messages, mask, state, weights)
  b, after_b = stacked.update(messages, mask, state, weights)
  np.testing.assert_allclose(a["w"], b["w"], rtol=1e-5)
  assert int(after_a.inner.draws) == int(after_b.inner.draws) == 1


@pytest.mark.slow
def test_parts_add_up_to_the_whole():
  """What loop, blocks and devices rely on."""
  rng = np.random.default_rng(2)
  messages, weights = jnp.asarray(rng.normal(size=(6, 4))), jnp.asarray(rng.random(6))
  for aggregator in (weighted_mean(), dp_mean(_tx(), l2_clip_norm=1.5)):
    state, mask = aggregator.init(messages[0]), jnp.ones(6, bool)
    parts = [
      aggregator.partial(state, messages[i : i + 2], weights[i : i + 2], mask[:2])
      for i in (0, 2, 4)
    ]
    summed = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    whole, _ = aggregator.update(messages, mask, state, weights)
    np.testing.assert_allclose(aggregator.finish(summed, state)[0], whole, rtol=1e-5)


@pytest.mark.slow
def test_p5_p6_the_noise_is_that_of_the_plan_and_the_divisor_is_public():
  aggregator = central(_plan(), jax.random.key(3))
  state = aggregator.init({"delta": jnp.zeros(20_000)})
  for count in (1, 7):  # clients that send 0
    zero = {"delta": jnp.zeros((count, 20_000))}
    found, _ = aggregator.update(zero, jnp.ones(count, bool), state)
    sample, std = np.asarray(found["delta"]), 2.0 * 0.5 / 10.0
    assert stats.kstest(sample / std, "norm").pvalue > 1e-3
    assert stats.kstest(sample / (std * 0.9), "norm").pvalue < 1e-6


@pytest.mark.slow
def test_p8_no_clients_still_means_noise():
  aggregator = central(_plan(), jax.random.key(3))
  state = aggregator.init({"delta": jnp.zeros(100)})
  nobody = {"delta": jnp.zeros((0, 100))}
  found, after = aggregator.update(nobody, jnp.zeros(0, bool), state)
  assert np.std(found["delta"]) > 0.05 and int(after.inner.draws) == 1


@pytest.mark.parametrize("name", ["streamed", "stacked", "mean"])
def test_a_mask_or_weights_of_another_length_are_one_line(name):
  clip = 0.5 if name == "streamed" else Clip(0.5, transforms.AdaptiveClipping())
  private = central(_plan(l2_clip_norm=clip), jax.random.key(0))
  aggregator = weighted_mean() if name == "mean" else private
  messages, state = {"delta": jnp.ones((4, 2))}, aggregator.init({"delta": jnp.zeros(2)})
  for mask, weights, match in (
    (np.ones(3, bool), None, "mask.shape"),
    (np.ones(4, bool), np.ones(5), "weights"),
  ):
    with refuses(match) as caught:
      aggregator.update(messages, mask, state, weights)
    assert "\n" not in str(caught.value)


@pytest.mark.cases(slow=["scheduled"], long=...)
@pytest.mark.parametrize("clip", ["adaptive", "scheduled"])
def test_a_norm_that_changes_is_streamed_too(clip):
  """Parts of messages, padding among them, are the whole at the transform: the same updates
  and the same norms, round after round, NaN and an empty cohort included."""
  adaptive = transforms.AdaptiveClipping(count_noise_std=1.0)
  clips = {
    "adaptive": Clip(1.0, adaptive),
    "scheduled": Clip(1.0, schedule=(1.0, 0.5, 0.2)),
  }
  plan = _plan(l2_clip_norm=clips[clip])
  streamed = central(plan, jax.random.key(0))
  stacked = dp_mean(plan.transform(jax.random.key(0)))
  rng = np.random.default_rng(3)
  messages = {"w": jnp.asarray(rng.normal(size=(6, 3)), jnp.float32).at[1].set(jnp.nan)}
  weights, mask = jnp.array([1.0, 1.0, 0.5, 0.0, 2.0, 1.0]), jnp.arange(6) != 4
  state = other = streamed.init({"w": jnp.zeros(3)})
  for round in range(3):
    held = mask & (round != 1)  # nobody in the second
    parts = [
      streamed.partial(state, {"w": messages["w"][rows]}, weights[rows], held[rows])
      for rows in (slice(0, 2), slice(2, 6))
    ]
    update, state = streamed.finish(jax.tree.map(jnp.add, *parts), state)
    expected, other = stacked.update(messages, held, other, weights)
    np.testing.assert_allclose(update["w"], expected["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(clip_scale(state), clip_scale(other))
  assert float(clip_scale(state)) != 1.0


@pytest.mark.parametrize(
  "rule", [transforms.AdaptiveClipping(count_noise_std=1.0), transforms.SlackClipping()]
)
def test_an_emptied_client_is_one_term_away_from_what_it_was(rule):
  """Under replace_special sum and query, in units of their noise, move by 1 / z together."""
  plan = _plan(l2_clip_norm=Clip(1.0, rule))
  aggregator = central(plan, jax.random.key(0))
  state = aggregator.init(jnp.zeros(2))
  sums = lambda x, weight: aggregator.partial(
    state, jnp.array([[x, 0.0]]), jnp.array([weight]), jnp.ones(1, bool)
  )
  (total, query), (none, nothing) = sums(9.0, 1.0), sums(0.0, 0.0)
  std, divisor = plan.noise_multiplier, plan.normalize_by
  unit = rule.query_unit(std, divisor)
  moved = (
    np.hypot(np.linalg.norm(total - none), np.linalg.norm(unit * (query - nothing))) / std
  )
  assert moved <= (1 + 1e-6) / rule.combined_noise_multiplier(std, divisor)


@pytest.mark.parametrize(
  ("clip", "wrap"),
  [
    (1.0, lambda client: client_noise(client, l2_clip_norm=5.0, noise_multiplier=0.3)),
    (1.0, lambda client: compressed(_noisy(client), drive())),
    (Clip(1.0, Automatic()), lambda client: _noisy(client)),
    (Clip(1.0, schedule=(1.0,) * 5 + (0.5,)), lambda client: _noisy(client)),
  ],
  ids=["longer", "coded", "automatic", "shorter later"],
)
def test_an_emptied_client_that_sends_noise_is_one_clip_norm_away_or_refused(clip, wrap):
  """Of the first two, it and its twin were 1.93 and 1.67 clip norms apart, and 1 was accounted."""
  loss_fn = lambda w, x: jnp.sum(w * x)
  zero = {"neighboring_relation": "replace_special"}

  def made(plan, wrap):
    aggregator = central(plan, jax.random.key(0))
    key = jax.random.key(1)
    return federated.fed_avg(loss_fn, optax.sgd(0.1), None, aggregator, key=key, wrap=wrap)

  with refuses("neighboring_relation", value="replace_special"):
    made(_plan(l2_clip_norm=clip, **zero), wrap)
  # A flat clip moves two messages no further apart; and a client that is removed sends nothing.
  made(_plan(l2_clip_norm=1.0, **zero), _noisy)
  made(_plan(l2_clip_norm=clip), wrap)


def _noisy(client):
  return client_noise(client, l2_clip_norm=1.0, noise_multiplier=1.0)


def test_adaptive_clipping_plugs_in_unchanged():
  """Its norm finds the quantile."""
  adaptive = transforms.AdaptiveClipping(target_quantile=0.5, learning_rate=0.5)
  plan = _plan(l2_clip_norm=Clip(1.0, adaptive), noise_multiplier=0.0, num_steps=40)
  aggregator = central(plan, jax.random.key(0))
  assert aggregator.partial is not None  # no cohort is stacked
  messages = {"delta": 0.1 * jnp.arange(1.0, 11.0)[:, None] * jnp.ones((10, 1))}
  state, update = aggregator.init({"delta": jnp.zeros(1)}), jax.jit(aggregator.update)
  for _ in range(40):
    _, state = update(messages, jnp.ones(10, bool), state)
  assert 0.4 < float(clip_scale(state)) < 0.7  # half of 0.1 .. 1.0


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"l2_clip_norm": {"delta": 1.0}}, "l2_clip_norm"),
    ({"slices": 2}, "slices"),
    # They clip the two vectors of one row, and a client has many: "one user" would be untrue.
    ({"statistics": ChannelStatistics(normalize_by=10.0), "unit": "example"}, "unit"),
  ],
)
def test_plans_that_make_no_sense_for_clients_are_refused(changes, field):
  with refuses(field):
    central(_plan(**changes), jax.random.key(0))


def test_a_bound_that_the_noise_does_not_cover_is_refused():
  aggregator = dp_mean(_tx(l2_clip_norm=1.0), l2_clip_norm=2.0)
  with refuses("l2_clip_norm"):
    aggregator.update(jnp.ones((2, 3)), jnp.ones(2, bool), aggregator.init(None))


def _noisy_messages(ids, key=0, width=4_000, scale=100.0):
  loss_fn = lambda w, x: jnp.sum(w * x)
  client = client_noise(
    local_training(loss_fn, optax.sgd(scale)), l2_clip_norm=0.5, noise_multiplier=3.0
  )
  cohort = from_batches([np.ones((1, width), np.float32)] * len(ids))
  cohort = cohort._replace(ids=np.array(ids))
  received = Received(jnp.zeros(width))
  context = Context(received, None, None, jax.random.key(key), None)
  run = loop_clients()(client, None)
  return np.asarray(run(context, cohort).sent.message["delta"])


def test_p17_client_noise_has_its_std_and_no_two_clients_share_it():
  messages = _noisy_messages([0, 1, 5])
  clipped = -0.5 / np.sqrt(4_000)  # of norm 0.5, all coordinates alike
  noise = messages - clipped
  assert stats.kstest(noise.ravel() / 1.5, "norm").pvalue > 1e-3
  assert stats.kstest(noise.ravel() / 1.35, "norm").pvalue < 1e-6
  assert np.abs(np.corrcoef(noise)[np.triu_indices(3, 1)]).max() < 0.08
  again = _noisy_messages([0, 1, 5], key=1)
  assert np.abs(np.corrcoef(messages[0], again[0])[0, 1]) < 0.08


@pytest.mark.cases(long=[1])
@pytest.mark.parametrize(
  ("field", "value"), [("l2_clip_norm", 0.0), ("noise_multiplier", -1.0)]
)
def test_wrong_client_noise_is_named(field, value):
  options = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, field: value}
  client = local_training(lambda w, x: jnp.sum(w * x), optax.sgd(1.0))
  with refuses(field, value=value):
    aggregation.client_noise(client, **options)


def test_what_clients_say_costs_twice_the_clip_norm_and_rounds_compose():
  """Replace-one: the noise of one event is relative to the sensitivity, 2 C."""
  one = accounting.epsilon(accounting.gaussian_event(2.5), delta=1e-5)
  assert aggregation.local_epsilon(5.0, 1e-5) == pytest.approx(one, rel=1e-3)
  assert aggregation.local_epsilon(10.0, 1e-5, 4) == pytest.approx(one, rel=1e-3)

"""Poisoned rounds: what a lie does is known in closed form, and to the aggregators unchanged."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import attacks, federated
from dpjax.attacks import poisoning
from dpjax.attacks.roc import with_interval
from dpjax.data import from_arrays
from dpjax.federated.client import Received
from dpjax.validate import UserError
from tests import plans
from tests.published import poisoning_grid

_CLIENTS, _WIDTH = 8, 3
_WORK = federated.LocalWork(batch_size=None)


def _quadratic(w, example):
  return 0.5 * jnp.sum((w - example.x) ** 2)


def _points(rows):
  """One record for each client."""
  x = np.asarray(rows, np.float32)
  dataset = from_arrays(x, np.zeros(len(x), int), num_classes=2)
  return dpjax.data.Federation(dataset, np.arange(len(x))[:, None])


_plan = functools.partial(
  plans.of, 16, prob=1.0, noise_multiplier=0.0, l2_clip_norm=0.5, normalize_by=_CLIENTS,
  num_steps=1, unit="user",
)  # fmt: skip


def _after(rows, aggregator, attackers=(), factor=1.0, make=federated.fed_avg):
  """The server after one round from 0, in which each client walks all the way to its record."""
  algorithm = lambda **lies: make(
    _quadratic, optax.sgd(1.0), aggregator=aggregator, key=jax.random.key(0), **lies
  )
  return np.asarray(
    poisoning.poisoned_training(
      algorithm,
      attacks.scaled_update(factor),
      attackers,
      federation=_points(rows),
      work=_WORK,
      params=jnp.zeros(_WIDTH),
      rng=0,
    )
  )


def _mean(plan=None):
  return federated.weighted_mean().drawn_by(plan or _plan())


@pytest.mark.slow
def test_a_scaled_update_replaces_the_model_under_the_mean_exactly():
  """k of n clients who send n / k times what they learned, where the others have converged."""
  wanted, attackers = np.array([3.0, -2.0, 7.0]), [1, 4]
  rows = np.zeros((_CLIENTS, _WIDTH))
  rows[attackers] = wanted
  found = _after(rows, _mean(), attackers, factor=_CLIENTS / 2)
  np.testing.assert_allclose(found, wanted, rtol=1e-6)
  np.testing.assert_allclose(_after(rows, _mean()), wanted * 2 / _CLIENTS, rtol=1e-6)


@pytest.mark.slow
def test_the_rest_of_the_round_is_that_of_the_run():
  """Nobody attacks, or with factor 1: bit for bit what the algorithm does by itself."""
  rows = np.random.default_rng(0).normal(size=(_CLIENTS, _WIDTH))
  plain = federated.fed_avg(
    _quadratic, optax.sgd(1.0), aggregator=_mean(), key=jax.random.key(0)
  )
  state = plain.init(jnp.zeros(_WIDTH))
  for cohort in plain.cohorts(_points(rows), _WORK, rng=0):
    state, _ = plain.round(state, cohort)
  for attackers, factor in (((), 50.0), ((0, 3), 1.0)):
    found = _after(rows, _mean(), attackers, factor)
    np.testing.assert_array_equal(found, np.asarray(state.params))


@pytest.mark.cases(long=["1000000.0"], slow=...)
@pytest.mark.parametrize("factor", [-1e6, pytest.param(1e6, marks=pytest.mark.long)])
def test_user_level_privacy_bounds_a_scaled_update_by_its_clip(factor):
  """k attackers move the noisy mean by exactly k C / normalize_by, whatever their factor."""
  plan = _plan(noise_multiplier=1.0)
  private = federated.central(plan, jax.random.key(7))
  rows = np.zeros((_CLIENTS, _WIDTH))
  quiet = _after(rows, private)
  rows[:2, 0] = 1.0
  moved = _after(rows, private, [0, 1], factor) - quiet
  np.testing.assert_allclose(moved, [np.sign(factor) * 2 * 0.5 / _CLIENTS, 0, 0], atol=1e-6)


_NAMES = ("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")


@pytest.mark.long
def test_krum_ignores_what_the_mean_follows():
  """That each aggregator bounds any message is federated/test_breakdown.py's."""
  rows = np.random.default_rng(1).normal(size=(_CLIENTS, _WIDTH))
  against = poisoning_grid.defences(_plan(), num_byzantine=2, trim=0.25, num_selected=5)
  assert tuple(against) == _NAMES
  far = lambda aggregator: np.abs(_after(rows, aggregator, [2, 5], factor=1e4)).max()
  honest = np.abs(np.delete(rows, [2, 5], axis=0)).max()
  assert far(against["krum"].aggregator) <= honest < 100 * honest < far(_mean())


@pytest.mark.slow
def test_every_algorithm_that_takes_a_client_is_attacked_by_the_same_wrapper():
  prox = functools.partial(federated.fed_prox, mu=0.5)
  adam = functools.partial(federated.fed_avg, server_tx=federated.fed_opt("adam", 0.1))
  rows = np.ones((_CLIENTS, _WIDTH))
  for make in (prox, adam):
    honest, lied = (_after(rows, _mean(), [0, 1], f, make) for f in (1.0, -9.0))
    assert np.all(honest > 0) and np.all(lied < 0)


def _digits(num_clients=12):
  train, test = dpjax.data.load("digits")
  train = train.subset(slice(0, 720))
  parts = dpjax.data.partition.iid(train.y, num_clients=num_clients, seed=0)
  return dpjax.data.Federation(train, parts), test


def test_poison_reaches_the_records_of_attackers_alone():
  federation, _ = _digits()
  lies = poisoning.poison_rows(federation, attacks.backdoor(3), [4])
  flips = poisoning.poison_rows(federation, attacks.label_flip(1, 7), [4])
  for place in range(federation.num_clients):
    truth = federation.client(place)
    changed = [not np.array_equal(held.client(place).y, truth.y) for held in (lies, flips)]
    assert changed == [place == 4] * 2
    same_x = np.array_equal(lies.client(place).x, truth.x)
    assert same_x == (place != 4) and np.array_equal(flips.client(place).x, truth.x)
  assert not (flips.client(4).y == 1).any()
  assert np.mean(lies.client(4).y == 3) >= 0.5


@functools.cache
def _backdoor(name):
  """(accuracy, success with 2 of 12 attackers, without) on digits."""
  federation, test = _digits()
  plan = _plan(
    sampler=dpjax.PoissonSampler(sampling_prob=1.0, capacity=16),
    normalize_by=12,
    num_steps=12,
  )
  model = dpjax.zoo.networks.build("linear", num_classes=10)
  loss_fn = dpjax.losses.softmax_cross_entropy(model.apply)
  defence = poisoning_grid.defences(plan, num_byzantine=2, trim=0.2)[name]

  def train(aggregator, attack, attackers):
    return poisoning.poisoned_training(
      lambda **lies: federated.fed_avg(
        loss_fn, optax.sgd(0.5), aggregator=aggregator, key=jax.random.key(0), **lies
      ),
      attack,
      attackers,
      federation=federation,
      work=federated.LocalWork(batch_size=20, epochs=2),
      params=model.init(jax.random.key(1), jnp.zeros((1, 8, 8, 1))),
      rng=0,
    )

  trigger = poisoning.Trigger(size=2)
  return poisoning_grid.poisoning_grid(
    {"backdoor": attacks.backdoor(0, trigger=trigger, factor=6.0)},
    {name: defence},
    [2 / 12],
    train=train,
    apply=model.apply,
    test=test,
    num_clients=12,
    seed=0,
  )[0]


@pytest.mark.long
def test_a_backdoor_goes_through_the_mean_and_is_said_to():
  found = _backdoor("mean").outcome
  assert found.success.rate > 0.8 and found.clean_success.rate < 0.1
  assert found.fails and found.beyond and found.verdict().startswith("FAILS")
  assert "its breakdown point is 0" in found.verdict()


@pytest.mark.long
def test_a_backdoor_of_few_does_not_go_through_the_median():
  found = _backdoor("median").outcome
  assert found.success.rate < 0.1 and found.accuracy.rate > 0.85
  assert not found.beyond and "not shown to fail" in found.verdict()


@pytest.mark.long
def test_the_table_has_what_was_measured():
  text = poisoning_grid.poisoning_table([_backdoor("mean"), _backdoor("median")])
  header, _, row, honest = text.splitlines()
  assert header == "| attack | attackers | mean | median |"
  assert row.startswith("| backdoor | 2 of 12 |") and row.count("FAILS*") == 1
  assert honest.startswith("| none | 0 of 12 | 0.9")


def test_verdicts_compare_exact_intervals():
  counts = (None, with_interval(90, 100), None, with_interval(92, 100), None)
  one = poisoning.PoisoningOutcome(1, *counts)
  assert not one.fails and not one.beyond
  assert one._replace(accuracy=with_interval(40, 100)).fails == "accuracy falls"
  misled = one._replace(success=with_interval(30, 100), clean_success=with_interval(5, 100))
  assert misled.fails == "victims are misled"
  assert one._replace(num_attackers=5, tolerates=4).beyond


def test_bad_attacks_are_one_line():
  federation, test = _digits()
  refused = lambda words: pytest.raises(UserError, match=words)
  with refused("target=4: must be another class than source=4"):
    attacks.label_flip(4, 4)
  with refused("target=10: must be an integer in \\[0, 9\\]"):
    poisoning.poison_rows(federation, attacks.label_flip(4, 10), [0])
  with refused("target=12"):
    poisoning.poison_rows(federation, attacks.backdoor(12), [0])
  with refused("factor=0"):
    attacks.scaled_update(0.0)
  with refused("factor=nan"):
    attacks.scaled_update(float("nan"))
  with refused("trigger.size=8"):
    poisoning.poison_rows(
      federation, attacks.backdoor(1, trigger=poisoning.Trigger(size=8)), [0]
    )
  with refused("attackers: must lie in \\[0, 12\\)"):
    poisoning.poison_rows(federation, attacks.label_flip(1, 7), [12])
  with refused("must be distinct places"):
    poisoning.poison_rows(federation, attacks.label_flip(1, 7), [1, 1])
  with refused("fraction=1.0"):
    poisoning.choose_attackers(10, 1.0, seed=0)
  only_sevens = test.subset(test.y == 7)
  with refused("holds no record that could be called target=7"):
    attacks.backdoor(7).victims(only_sevens)


@pytest.mark.slow
def test_bad_runs_are_one_line():
  refused = lambda words: pytest.raises(UserError, match=words)
  client = federated.local_training(_quadratic, optax.sgd(1.0))
  plain = federated.fed_avg(_quadratic, optax.sgd(1.0), key=jax.random.key(0))
  state = plain.init(jnp.zeros(_WIDTH))
  with refused("memory=attacker_memory"):
    poisoning.recruit(state, [0])
  with refused("needs memory=lambda"):
    poisoning.scaled_messages(client, 2.0).init(Received(jnp.zeros(2)), None, 1, None)
  with refused("promises an epsilon"):
    poisoning_grid.defences(_plan(noise_multiplier=1.0), num_byzantine=1, trim=0.1)
  with refused("rounds to no attacker"):
    poisoning_grid.poisoning_grid(
      {"a": attacks.scaled_update(2.0)},
      poisoning_grid.defences(_plan(), num_byzantine=1, trim=0.1),
      [0.01],
      train=lambda *_: None,
      apply=lambda *_: None,
      test=None,
      num_clients=10,
      seed=0,
    )
  with refused("outcomes: must hold"):
    poisoning_grid.poisoning_table([])
  with refused("num_byzantine=3: 8 clients"):
    krum = dataclasses.replace(_plan(), num_steps=1)
    _after(np.zeros((_CLIENTS, _WIDTH)), federated.krum(3).drawn_by(krum), [0])

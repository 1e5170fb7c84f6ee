"""Silos that keep their own records private: what they draw, what they add, what it costs."""

import dataclasses
import functools
import itertools
import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats

from dpjax import federated, noise
from dpjax.auditing.games import silos as games
from dpjax.auditing.games.game import play
from dpjax.data import Dataset, Federation, from_arrays
from dpjax.federated.silos import Attendance, Silos
from dpjax.key_uses import KeyUse, key_for
from dpjax.training import dp_sgd
from dpjax.types import Batch, Example
from dpjax.validate import UserError
from tests import plans
from tests.refuses import refuses

_LOSS = lambda w, example: 0.5 * jnp.sum((w - example.x) ** 2)
_KEY = jax.random.key(7)
_RATE = 0.5


_plan = functools.partial(plans.of, 16, num_steps=8, normalize_by=4.0)


def _federation(*sizes, width=2):
  x = np.random.default_rng(0).normal(size=(sum(sizes), width)).astype(np.float32)
  data = from_arrays(x, np.zeros(len(x), np.int32), num_classes=1)
  return Federation(data, np.split(np.arange(len(x)), np.cumsum(sizes)[:-1]))


def _key_of(silo, round):
  """The key of a silo's noise in a round."""
  of_round = jax.random.fold_in(key_for(KeyUse.CLIENTS, _KEY), round)
  return key_for(KeyUse.SILO_NOISE, jax.random.fold_in(of_round, silo))


def _run(silos, federation, make=None, *, width=2, rounds=None, **common):
  make = make or (lambda **own: federated.fed_avg(_LOSS, optax.sgd(_RATE), **own))
  algorithm = make(silos=silos, key=_KEY, **common)
  states = [algorithm.init(jnp.zeros(width), federation.num_clients)]
  cohorts = list(itertools.islice(algorithm.cohorts(federation, rng=3), rounds))
  for cohort in cohorts:
    states.append(algorithm.round(states[-1], cohort)[0])
  return states, cohorts


def test_one_silo_alone_is_central_dp_sgd_of_its_plan():
  plan = _plan(num_steps=3)
  federation = _federation(12)
  (_, after), (cohort,) = _run(Silos((plan,), num_rounds=1), federation)
  init, step = dp_sgd(_LOSS, plan, optax.sgd(_RATE), noise_key=_key_of(0, 0))
  state = init(jnp.zeros(2))
  (batches,) = cohort.batches
  for rows, mask in zip(batches.examples, batches.mask):
    state, _ = step(state, Batch(federation.dataset[rows], mask))
  np.testing.assert_allclose(after.params, state.params, rtol=1e-6)


def test_no_hook_of_a_silo_sees_what_raw_records_decide():
  """A message of `num_seen` told the number of records at a claimed epsilon of 0."""
  seen = []

  def message(received, local):
    seen.append(local)
    return {"delta": jnp.zeros(2)}, local.memory

  def adjust(gradient, received, local):
    seen.append(local)
    return gradient

  hooks = {"message": message, "adjust": adjust}
  make = lambda **own: federated.fed_avg(_LOSS, optax.sgd(_RATE), **hooks, **own)
  _run(Silos((_plan(num_steps=1),), num_rounds=1), _federation(3), make)
  assert {(local.loss_sum, local.num_seen) for local in seen} == {(None, None)}


# FedBN, whose parameters have two parts, has a loop of its own in test_fed_bn.py.
@pytest.mark.parametrize("name", sorted({*games.ALGORITHMS} - {"fed_bn"}))
def test_every_algorithm_follows_a_loop_in_float64(name):
  """Each silo's steps by NumPy, with the noise of its key; three silos of unequal plans."""
  plans = (
    _plan(num_steps=8, noise_multiplier=0.5),
    _plan(num_steps=4, prob=1.0, normalize_by=8.0),
    _plan(num_steps=4, noise_multiplier=3.0),
  )
  federation = _federation(12, 8, 3)
  silos = Silos(plans, num_rounds=2, attendance=Attendance(absent=0.3, seed=1))
  assert [silos.attendance.of(t, 3)[0].tolist() for t in range(2)] == [
    [True, True, False],
    [True, True, True],
  ]
  make = {
    "fed_avg": None,
    "fed_prox": lambda **own: federated.fed_prox(_LOSS, optax.sgd(_RATE), mu=0.3, **own),
    "scaffold": lambda **own: federated.scaffold(
      _LOSS, optax.sgd(_RATE), client_learning_rate=_RATE, num_clients=3, **own
    ),
    "mr_mtl": lambda **own: federated.mr_mtl(_LOSS, optax.sgd(_RATE), lam=0.3, **own),
  }[name]
  states, cohorts = _run(silos, federation, make)
  x = np.asarray(federation.dataset.x, np.float64)
  server, control = np.zeros(2), np.zeros(2)
  own = np.zeros((3, 2))  # c_k of SCAFFOLD, w_k of MR-MTL
  for round, cohort in enumerate(cohorts):
    deltas, changes = [], []
    for place, silo in enumerate(cohort.ids.tolist()):
      plan = plans[silo]
      w = own[silo].copy() if name == "mr_mtl" else server.copy()
      batches = cohort.batches[place]
      state = noise.gaussian.init(_key_of(silo, round))
      for rows, mask in zip(batches.examples, batches.mask):
        grads = w - x[rows[mask]]
        norms = np.linalg.norm(grads, axis=1, keepdims=True)
        total = (grads / np.maximum(norms, 1)).sum(axis=0)
        drawn, state = noise.add_gaussian(state, jnp.zeros(2), plan.noise_multiplier)
        gradient = (total + np.asarray(drawn, np.float64)) / plan.normalize_by
        pull = {"fed_prox": 0.3 * (w - server), "mr_mtl": 0.3 * (w - server)}
        gradient += pull.get(name, control - own[silo] if name == "scaffold" else 0)
        w = w - _RATE * gradient
      deltas.append(w - server)
      if name == "scaffold":
        changes.append(-deltas[-1] / (_RATE * len(batches.mask)) - control)
        own[silo] += changes[-1]
      if name == "mr_mtl":
        own[silo] = w
    server = server + np.mean(deltas, axis=0)
    if changes:
      control = control + len(changes) / 3 * np.mean(changes, axis=0)
  np.testing.assert_allclose(states[-1].params, server, atol=1e-5)
  if states[-1].memories is not None:
    np.testing.assert_allclose(states[-1].memories.all(), own, atol=1e-5)


@pytest.mark.parametrize("execution", [federated.loop_clients, federated.vmap_clients])
def test_an_empty_draw_is_a_step_with_noise(execution):
  """Without its noise, a server would see that the batch is empty."""
  federation = Federation(_federation(3).dataset, [np.arange(0), np.arange(3)])
  silos = Silos((_plan(num_steps=1), _plan(num_steps=1)), num_rounds=1)
  algorithm = federated.fed_avg(
    _LOSS,
    optax.sgd(_RATE),
    silos=silos,
    key=_KEY,
    map_clients=execution(),
    aggregator=games._all_messages(),
  )
  (cohort,) = algorithm.cohorts(federation, rng=0)
  assert not cohort.batches[0].mask.any()
  state, _ = algorithm.round(algorithm.init(jnp.zeros(2)), cohort)
  drawn, _ = noise.add_gaussian(noise.gaussian.init(_key_of(0, 0)), jnp.zeros(2), 1.0)
  sent = state.aggregator["delta"][0]
  np.testing.assert_allclose(sent, -_RATE * np.asarray(drawn) / 4, rtol=1e-6)


def _p_value_of_noise(kind):
  """The chance of a sum of squares that is so far from that of the plan's noise."""
  plan = _plan(num_steps=1, noise_multiplier=2.0)
  count, width = 64, 8
  silos = kind((plan,) * count, num_rounds=1)
  federation = Federation(_federation(1, width=width).dataset, [np.arange(0)] * count)
  (_, state), _ = _run(
    silos,
    federation,
    width=width,
    aggregator=games._all_messages(),
    map_clients=federated.vmap_clients(clients_per_block=count),
  )
  unit = state.aggregator["delta"] * plan.normalize_by / (_RATE * plan.noise_multiplier)
  chi2 = float(np.sum(np.asarray(unit, np.float64) ** 2))
  below = stats.chi2.cdf(chi2, count * width)
  return 2 * min(below, 1 - below)


class _Halved(Silos):
  def noise(self):
    numbers = super().noise()
    return numbers._replace(std=numbers.std / 2)


def test_the_noise_of_messages_is_that_of_the_plan():
  assert _p_value_of_noise(Silos) > 1e-3
  assert _p_value_of_noise(_Halved) < 1e-6


def test_each_silo_round_and_step_has_noise_of_its_own():
  keys = [_key_of(silo, round) for silo in range(3) for round in range(3)]
  words = {np.asarray(jax.random.key_data(key)).tobytes() for key in keys}
  assert len(words) == 9
  plan = _plan(num_steps=2)
  federation = Federation(_federation(1).dataset, [np.arange(0)] * 2)
  aggregator = games._all_messages()
  states, _ = _run(Silos((plan,) * 2, num_rounds=2), federation, aggregator=aggregator)
  sent = np.concatenate([state.aggregator["delta"] for state in states[1:]])
  assert len(np.unique(sent)) == sent.size


def test_silos_draw_independently():
  silos = Silos((_plan(num_steps=40),) * 2, num_rounds=1)
  (cohort,) = silos.cohorts(_federation(12, 12), rng=5)
  one, other = (batches.mask for batches in cohort.batches)
  assert (one.sum(axis=1) != other.sum(axis=1)).any()
  (again,) = silos.cohorts(_federation(12, 12), rng=5)
  assert (again.batches[1].examples == cohort.batches[1].examples).all()


def _composed(*runs, delta):
  """Epsilon by dp_accounting alone, of (sampling_prob, noise multiplier, steps)."""
  losses = [
    pld.from_gaussian_mechanism(
      z, sampling_prob=q, value_discretization_interval=1e-3
    ).self_compose(steps)
    for q, z, steps in runs
  ]
  total = losses[0]
  for loss in losses[1:]:
    total = total.compose(loss)
  return total.get_epsilon_for_delta(delta)


def test_epsilon_of_each_silo_and_of_several_by_dp_accounting_alone():
  runs = [(0.5, 1.0, 4), (0.25, 2.0, 8), (0.5, 1.5, 4)]
  plans = [_plan(prob=q, noise_multiplier=z, num_steps=t) for q, z, t in runs]
  silos = Silos(plans, num_rounds=4)
  left = 0.95 * plans[0].delta  # the rest is for draws above capacity
  each = [_composed(run, delta=left) for run in runs]
  assert silos.epsilons() == pytest.approx(each, rel=1e-3)
  assert silos.epsilon() == max(silos.epsilons())
  # A person in two silos: the two that cost most. More of delta is for draws above capacity.
  two = [_composed(a, b, delta=left) for a, b in itertools.combinations(runs, 2)]
  together = Silos(plans, num_rounds=4, max_silos=2).epsilon()
  assert max(two) <= together * (1 + 1e-3) and together == pytest.approx(max(two), rel=0.02)
  assert together < Silos(plans, num_rounds=4, max_silos=3).epsilon()


def test_a_silo_that_is_away_pays_nothing_and_comes_back():
  plan = _plan(num_steps=10)
  attendance = Attendance(absent=0.5, seed=3)
  silos = Silos((plan,) * 3, num_rounds=10, attendance=attendance)
  federation = _federation(8, 8, 8)
  make = lambda **own: federated.mr_mtl(_LOSS, optax.sgd(_RATE), lam=0.1, **own)
  states, _ = _run(silos, federation, make)
  here = np.array([attendance.of(t, 3)[0] for t in range(10)])
  assert silos.num_steps() == tuple(here.sum(axis=0)) and not here.all()
  assert silos.epsilons() == pytest.approx(
    [plan.epsilon(steps=int(count)) for count in here.sum(axis=0)]
  )
  for t, (before, after) in enumerate(itertools.pairwise(states)):
    moved = (before.memories.all() != after.memories.all()).any(axis=1)
    assert moved.tolist() == here[t].tolist()
  returns = [any(~column[:-1] & column[1:]) for column in here.T]
  assert any(returns)


def test_a_lost_message_is_charged_and_does_not_count():
  plan = _plan(num_steps=6)
  lost = Attendance(lost=0.5, seed=1)
  silos = Silos((plan,) * 2, num_rounds=6, attendance=lost)
  assert silos.num_steps() == (6, 6)
  arrives = np.array([lost.of(t, 2)[1] for t in range(6)])
  both = np.flatnonzero(~arrives.any(axis=1))
  assert both.size
  states, _ = _run(silos, _federation(8, 8))
  for t in both:
    np.testing.assert_array_equal(states[t].params, states[t + 1].params)


def test_mr_mtl_without_a_pull_is_training_alone():
  plan = _plan(num_steps=4)
  federation = _federation(12, 8)
  make = lambda **own: federated.mr_mtl(_LOSS, optax.sgd(_RATE), lam=0.0, **own)
  states, _ = _run(Silos((plan,) * 2, num_rounds=2), federation, make)
  others = dataclasses.replace(federation, indices=[federation.indices[0], np.arange(0)])
  alone, _ = _run(Silos((plan,) * 2, num_rounds=2), others, make)
  own, same = (run[-1].memories.rows([0]) for run in (states, alone))
  np.testing.assert_allclose(own, same, rtol=1e-6)


def test_a_record_that_is_not_finite_counts_as_zero():
  federation = _federation(12, 8)
  silos = Silos((_plan(num_steps=2, prob=1.0),) * 2, num_rounds=1)
  algorithm = federated.fed_avg(_LOSS, optax.sgd(_RATE), silos=silos, key=_KEY)
  (cohort,) = algorithm.cohorts(federation, rng=0)
  x = np.array(federation.dataset.x)
  x[3] = math.nan
  state, info = algorithm.round(
    algorithm.init(jnp.zeros(2)), cohort._replace(data=Example(x, cohort.data.y))
  )
  assert np.isfinite(state.params).all() and int(info.num_clients) == 2


def test_an_empty_record_of_a_silo_counts_as_zero():
  """Under replace_special a record is exchanged for an empty one: one clip norm apart, not two."""
  federation = _federation(4)
  present = np.array([True, True, False, True])
  emptied = dataclasses.replace(federation.dataset, present=present)
  federation = dataclasses.replace(federation, dataset=emptied)
  silos = Silos((_plan(prob=1.0, num_steps=2),), num_rounds=1)
  (cohort,) = silos.cohorts(federation, rng=3)
  (batches,) = cohort.batches
  assert batches.mask.sum() == 6 and 2 not in batches.examples[batches.mask]


def test_what_is_refused():
  plan = _plan()
  with refuses("num_rounds", value=0):
    Silos((plan,), num_rounds=0)
  with refuses("plans"):
    Silos((), num_rounds=1)
  with refuses("plans[0]"):
    Silos((plan,), num_rounds=3)  # 8 steps
  with refuses("plans[1]"):
    Silos((plan, _plan(l2_clip_norm=2.0)), num_rounds=1)
  with refuses("plans[0]"):
    Silos((_plan(slices=2),), num_rounds=1)
  with refuses("sizes"):
    Silos((plan,), num_rounds=1, sizes=(3, 4))
  with refuses("absent", value=1.0):
    Attendance(absent=1.0)
  silos = Silos((plan, plan), num_rounds=2)
  with refuses("max_silos", value=3):
    dataclasses.replace(silos, max_silos=3)
  with refuses("max_silos", value=10):
    Silos((plan,) * 20, num_rounds=1, max_silos=10)
  with refuses("plans"):
    silos.cohorts(_federation(3), rng=0)
  with pytest.raises(UserError, match="^silo '0': capacity=16"):
    silos.cohorts(_federation(500, 3), rng=0)
  lines = np.zeros((6, 3, 4), np.int32)  # each row is all of one user
  data = Dataset(lines, np.zeros(6, np.int32), "lines", 9, "train", 9)
  of_users = Federation(data, np.split(np.arange(6), 2))
  with pytest.raises(UserError, match="^silo '0': unit='example'"):
    silos.cohorts(of_users, rng=0)
  with pytest.raises(UserError, match="^silo '0': data=Dataset"):
    Silos((_plan(unit="user"),) * 2, num_rounds=2).cohorts(_federation(3, 3), rng=0)
  with refuses("aggregator"):
    federated.fed_avg(
      _LOSS,
      optax.sgd(1.0),
      aggregator=federated.central(_plan(unit="user"), _KEY),
      silos=silos,
      key=_KEY,
    )
  by_hand = federated.from_batches([np.ones((3, 2)), np.ones((3, 2))])
  algorithm = federated.fed_avg(_LOSS, optax.sgd(1.0), silos=silos, key=_KEY)
  with refuses("silo", value=0):
    algorithm.round(algorithm.init(jnp.zeros(2)), by_hand)


# --- games


def _refuted(kind, algorithms=None, *, num_draws=1500):
  (first, *_) = games.games(kind, algorithms)
  return any(result.refuted for result in play(first, num_draws=num_draws))


class _NoiseOfTheMean(Silos):
  """Planted bug: noise for a mean of records, added to their sum."""

  def noise(self):
    numbers = super().noise()
    return numbers._replace(std=numbers.std * numbers.scale / 2)


class _TrueSizes(Silos):
  """Planted bug: the divisor is the number of records that a silo really holds."""

  def cohorts(self, federation, work=None, **options):
    sizes = federation.sizes
    object.__setattr__(self, "real", np.maximum(sizes, 1))
    return super().cohorts(federation, work, **options)

  def noise(self):
    numbers = super().noise()
    real = getattr(self, "real", 2.0)
    return numbers._replace(scale=numbers.scale * 0 + np.float32(1 / real))


def _leaky_scaffold(**common):
  """Planted bug: a control variate of exact clipped gradients."""
  silos = common["silos"]
  algorithm = games.ALGORITHMS["scaffold"]

  class Leaky(Silos):
    def noisy(self, summed, local):
      exact = silos.plans[0].normalize_by ** -1
      return jax.tree.map(
        # The noise of the model's step stays; that of one coordinate's control is forgotten.
        lambda noisy, total: noisy.at[0].set(total[0] * exact),
        super().noisy(summed, local),
        summed.total,
      )

  return algorithm(**{**common, "silos": Leaky(silos.plans, silos.num_rounds)})


@pytest.mark.slow
def test_the_game_accepts_silos():
  assert not _refuted(Silos)


@pytest.mark.long
@pytest.mark.parametrize("name", list(games.ALGORITHMS))
def test_every_algorithm_passes_its_games(name):
  for game in games.games(Silos, {name: games.ALGORITHMS[name]}):
    assert not any(result.refuted for result in play(game, num_draws=3000)), game.case


@pytest.mark.slow
@pytest.mark.parametrize("kind", [_NoiseOfTheMean, _TrueSizes])
def test_the_game_catches_planted_bugs(kind):
  assert _refuted(kind)


@pytest.mark.slow
def test_the_game_catches_a_control_variate_without_noise():
  assert _refuted(Silos, {"scaffold": _leaky_scaffold})


def test_the_event_of_a_silo_is_that_of_its_plan():
  plan = _plan()
  assert isinstance(plan.step_event(0), dpa.PoissonSampledDpEvent)


def test_batches_of_another_round_and_rounds_beyond_the_plans_are_refused():
  federation = _federation(12, 8)
  silos = Silos((_plan(num_steps=2), _plan(num_steps=2)), num_rounds=2)
  algorithm = federated.fed_avg(_LOSS, optax.sgd(_RATE), silos=silos, key=_KEY)
  start = algorithm.init(jnp.zeros(2))
  first, second = algorithm.cohorts(federation, rng=3)
  # Both would get the noise of round 0, so their difference would be that of the exact sums.
  with refuses("cohort"):
    algorithm.round(start, second)
  state, _ = algorithm.round(start, first)
  with refuses("cohort"):
    algorithm.round(state, first)
  state, _ = algorithm.round(state, second)
  for late in (first, first._replace(drawn=None)):
    with refuses("num_rounds"):
      algorithm.round(state, late)
  (other,) = Silos((_plan(num_steps=1),) * 2, num_rounds=1).cohorts(federation, rng=3)
  with refuses("cohort"):
    algorithm.round(start, other)
  plain = federated.fed_avg(_LOSS, optax.sgd(_RATE), key=_KEY)
  with refuses("aggregator"):
    plain.round(plain.init(jnp.zeros(2)), first)

"""Clients who agree: the lies of the papers by loops, and through whole rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from dpjax import attacks, federated
from dpjax.attacks import collusion
from dpjax.attacks.poisoning import poisoned_training
from tests.attacks import test_poisoning as rounds
from tests.refuses import refuses

_N, _D = 9, 4


def _sent(seed=0, attackers=(2, 5), missing=(7,)):
  """(messages, mask, rows of the honest): attackers are marked, one client is padding."""
  rows = np.random.default_rng(seed).normal(1.0, 1.0, (_N, _D)).astype(np.float32)
  honest = np.setdiff1d(np.arange(_N), [*attackers, *missing])
  rows[list(attackers)] = np.nan
  mask = ~np.isin(np.arange(_N), missing)
  return {"a": jnp.asarray(rows[:, :1]), "b": jnp.asarray(rows[:, 1:])}, mask, rows[honest]


def _told(attack, messages, mask):
  """What an attacker sends: through an aggregator that returns all messages."""
  every = federated.weighted_mean()._replace(
    init=lambda message: (), update=lambda sent, mask, state, weights=None: (sent, state)
  )
  lied = collusion.colluding(every, attack)
  found, _ = lied.update(messages, jnp.asarray(mask), lied.init(None))
  return np.concatenate([np.asarray(leaf) for leaf in jax.tree.leaves(found)], axis=1)


@pytest.mark.cases(slow=["1.7"], long=...)
@pytest.mark.parametrize("z", [None, 1.7])
def test_alie_is_the_mean_less_z_deviations(z):
  messages, mask, honest = _sent()
  lie = _told(collusion.alie(z), messages, mask)
  n, m = 8, 2
  chosen = stats.norm.ppf((n - m - (n // 2 + 1 - m)) / (n - m)) if z is None else z
  expected = honest.mean(0) - chosen * honest.std(0)
  np.testing.assert_allclose(lie[2], expected, rtol=1e-5)
  np.testing.assert_array_equal(lie[2], lie[5])
  np.testing.assert_array_equal(lie[[0, 1, 3, 4, 6, 8]], honest)  # nobody else's changed


@pytest.mark.cases(slow=["sign"], long=...)
@pytest.mark.parametrize("direction", collusion.DIRECTIONS)
def test_min_max_goes_as_far_as_no_distance_gives_it_away(direction):
  messages, mask, honest = _sent()
  lie = _told(collusion.min_max(direction), messages, mask)[5].astype(np.float64)
  most = max(np.linalg.norm(a - b) for a in honest for b in honest)
  reached = lambda lie: max(np.linalg.norm(lie - one) for one in honest)
  assert reached(lie) == pytest.approx(most, rel=1e-5)
  mean = honest.mean(0)
  ways = {"std": honest.std(0), "unit": mean, "sign": np.sign(mean)}
  against = (mean - lie) @ ways[direction]
  assert against == pytest.approx(
    np.linalg.norm(mean - lie) * np.linalg.norm(ways[direction]), rel=1e-5
  )
  assert reached(mean + 1.01 * (lie - mean)) > most


@pytest.mark.parametrize("direction", collusion.DIRECTIONS)
def test_min_sum_goes_as_far_as_no_sum_of_distances_gives_it_away(direction):
  messages, mask, honest = _sent()
  lie = _told(collusion.min_sum(direction), messages, mask)[5].astype(np.float64)
  reached = lambda lie: sum(np.sum((lie - one) ** 2) for one in honest)
  most = max(reached(one) for one in honest)
  assert reached(lie) == pytest.approx(most, rel=1e-5)
  mean = honest.mean(0)
  ways = {"std": honest.std(0), "unit": mean, "sign": np.sign(mean)}
  against = (mean - lie) @ ways[direction]
  assert against == pytest.approx(
    np.linalg.norm(mean - lie) * np.linalg.norm(ways[direction]), rel=1e-5
  )
  assert reached(mean + 1.01 * (lie - mean)) > most


@pytest.mark.parametrize(
  "attack", [collusion.alie(), collusion.min_max(), collusion.min_sum()]
)
def test_without_honest_clients_or_attackers_messages_stay_finite(attack):
  messages, mask, _ = _sent(attackers=tuple(range(_N)), missing=())
  assert np.isfinite(_told(attack, messages, mask)).all()
  messages, mask, honest = _sent(attackers=(), missing=())
  np.testing.assert_array_equal(_told(attack, messages, mask), honest)


def _after(rows, aggregator, attack, attackers):
  """The server after one round in which each client walks all the way to its record."""
  algorithm = lambda **lies: federated.fed_avg(
    rounds._quadratic,
    optax.sgd(1.0),
    aggregator=aggregator,
    key=jax.random.key(0),
    **lies,
  )
  return np.asarray(
    poisoned_training(
      algorithm,
      attack,
      attackers,
      federation=rounds._points(rows),
      work=rounds._WORK,
      params=jnp.zeros(rounds._WIDTH),
      rng=0,
    )
  )


_ROWS = np.random.default_rng(1).normal(3.0, 1.0, (8, rounds._WIDTH)).astype(np.float32)
_HONEST = np.delete(_ROWS, [2, 5], axis=0)


@pytest.mark.slow
def test_a_round_takes_the_lie():
  """Eight clients, two of whom agree: the mean is exactly theirs and the others'."""
  attack = collusion.alie(1.5)
  found = _after(_ROWS, collusion.colluding(rounds._mean(), attack), attack, [2, 5])
  lie = _HONEST.mean(0) - 1.5 * _HONEST.std(0)
  np.testing.assert_allclose(found, (_HONEST.sum(0) + 2 * lie) / 8, rtol=1e-5)


@pytest.mark.long
def test_a_lie_that_keeps_to_honest_distances_moves_multi_krum_further():
  """What is far off is dropped; the lie is not."""
  krum = federated.krum(2, num_selected=5).drawn_by(rounds._plan())
  off = []
  for attack in (attacks.scaled_update(-5.0), collusion.min_max()):
    moved = _after(_ROWS, collusion.colluding(krum, attack), attack, [2, 5])
    off.append(np.linalg.norm(moved - _HONEST.mean(0)))
  assert off[1] > 1.5 * off[0]


@pytest.mark.long
def test_privacy_bounds_colluders_by_its_clip():
  plan = rounds._plan(noise_multiplier=1.0)
  private = federated.central(plan, jax.random.key(7))
  rows = np.zeros((8, rounds._WIDTH))
  quiet = _after(rows, private, attacks.scaled_update(1.0), [])
  rows[3:, 0] = 50.0
  attack = collusion.alie(1e6)
  moved = _after(rows, collusion.colluding(private, attack), attack, [0, 1]) - quiet
  assert np.linalg.norm(moved) <= 8 * 0.5 / 8 + 1e-5


def test_an_aggregator_that_is_not_told_is_refused():
  rows = np.zeros((8, rounds._WIDTH))
  with refuses("algorithm") as caught:
    _after(rows, rounds._mean(), collusion.alie(), [0])
  assert "\n" not in str(caught.value)
  hidden = rounds._mean()._replace(through=lambda run: run)
  with refuses("aggregator"):
    collusion.colluding(hidden, collusion.alie())
  for call, words in (
    (lambda: collusion.alie(0.0), "z"),
    (lambda: collusion.min_max("up"), "direction"),
    (lambda: collusion.min_sum("up"), "direction"),
  ):
    with refuses(words):
      call()

"""GNMax and Confident-GNMax: their distribution, their events, halved noise."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpjax import accounting, mechanisms
from dpjax.accounting.event_kinds.elements import merged_parts
from dpjax.auditing.games import game
from dpjax.auditing.games import mechanisms as games
from dpjax.mechanisms import teacher_votes
from dpjax.validate import UserError
from tests.refuses import refuses

_DRAWS = 20_000


def _share(labels, label):
  return float(np.mean(np.asarray(labels) == label))


@pytest.mark.slow
def test_the_label_has_the_chance_of_the_larger_noisy_count():
  std = 3.0
  counts = jnp.tile(jnp.array([4, 1]), (_DRAWS, 1))
  labels = mechanisms.GNMax(std=std)(jax.random.key(0), counts)
  exact = stats.norm.cdf(3 / (math.sqrt(2) * std))
  error = 4 * math.sqrt(exact * (1 - exact) / _DRAWS)
  assert abs(_share(labels, 0) - exact) < error
  # Noise of half or twice the size is told apart.
  for wrong in (std / 2, 2 * std):
    assert abs(_share(labels, 0) - stats.norm.cdf(3 / (math.sqrt(2) * wrong))) > error


@pytest.mark.slow
def test_a_check_has_the_chance_of_its_noisy_threshold_and_hides_the_label():
  mechanism = mechanisms.ConfidentGNMax(threshold=5.0, check_std=2.0, std=0.1)
  counts = jnp.tile(jnp.array([4, 0]), (_DRAWS, 1))
  labels = mechanism(jax.random.key(1), counts)
  exact = stats.norm.sf((5 - 4) / 2.0)
  error = 4 * math.sqrt(exact * (1 - exact) / _DRAWS)
  assert abs(_share(labels, 0) - exact) < error
  assert _share(labels, teacher_votes.UNANSWERED) == 1 - _share(labels, 0)
  # The noise of the label is not that of the check: an answer is right though noise is large.
  loud = mechanisms.ConfidentGNMax(threshold=0.0, check_std=100.0, std=0.1)
  labels = np.asarray(loud(jax.random.key(2), counts))
  assert set(labels) == {0, -1} and 0.4 < np.mean(labels == 0) < 0.6


def test_a_clear_vote_is_answered_and_an_even_one_is_not():
  counts = jnp.array([[9, 0, 1], [0, 1, 9], [4, 3, 3]])
  confident = mechanisms.ConfidentGNMax(threshold=6.0, check_std=1e-3, std=1e-3)
  assert confident(jax.random.key(0), counts).tolist() == [0, 2, teacher_votes.UNANSWERED]
  plain = mechanisms.GNMax(std=1e-3)
  assert plain(jax.random.key(0), counts).tolist() == [0, 2, 0]


def test_no_more_queries_are_answered_than_are_accounted():
  # Unless a limit is named, the event is that of a label for each query: all may get one.
  mechanism = mechanisms.ConfidentGNMax(threshold=6.0, check_std=1e-3, std=1e-3)
  counts = jnp.array([[9, 0, 1], [4, 3, 3], [0, 1, 9], [0, 9, 1]])
  key = jax.random.key(0)
  assert mechanism(key, counts).tolist() == [0, -1, 2, 1]
  assert mechanism(key, counts, most_answers=2).tolist() == [0, -1, 2, -1]
  assert mechanism(key, counts.reshape(2, 2, 3), most_answers=1).tolist() == [
    [0, -1],
    [-1, -1],
  ]
  assert mechanism.event(num_checks=4) == mechanism.event(num_checks=4, most_answers=4)
  with refuses("most_answers", value=5):
    mechanism.event(num_checks=4, most_answers=5)


def test_events_count_checks_and_answers():
  mechanism = mechanisms.ConfidentGNMax(threshold=200.0, check_std=150.0, std=40.0)
  event = mechanism.event(num_checks=640, most_answers=286)
  (part,) = merged_parts(event)
  precision = 640 / 150**2 + 286 * 2 / 40**2
  assert part.noise_multiplier == pytest.approx(precision**-0.5)
  # By replacing a record one vote moves, as by adding one: nothing doubles.
  swap = dataclasses.replace(mechanism, neighboring_relation="replace_one")
  event_of_swap = swap.event("replace_one", num_checks=640, most_answers=286)
  epsilons = [
    accounting.epsilon(given, delta=1e-5, neighboring_relation=relation)
    for given, relation in ((event, "add_or_remove_one"), (event_of_swap, "replace_one"))
  ]
  assert epsilons[0] == pytest.approx(epsilons[1], rel=1e-3)
  # Two parts change where a record chooses its teacher and is replaced: twice the shift.
  twice = mechanism.event("replace_one", num_checks=640, most_answers=286)
  assert (
    accounting.epsilon(twice, delta=1e-5, neighboring_relation="replace_one")
    > 1.9 * (epsilons[0])
  )
  with refuses("neighboring_relation"):
    swap.event("add_or_remove_one")


def test_the_noise_that_is_solved_for_costs_the_epsilon():
  std = teacher_votes.std_for(
    epsilon=1.97, delta=1e-5, num_answers=286, num_checks=640, check_std=150.0
  )
  mechanism = mechanisms.ConfidentGNMax(200.0, 150.0, std)
  event = mechanism.event(num_checks=640, most_answers=286)
  assert accounting.epsilon(event, delta=1e-5) == pytest.approx(1.97, rel=2e-4)
  with refuses("check_std", value=1.0):
    teacher_votes.std_for(
      epsilon=1.97, delta=1e-5, num_answers=1, num_checks=640, check_std=1.0
    )


@pytest.mark.slow
def test_halved_noise_is_refuted():
  class Half(mechanisms.GNMax):
    def __call__(self, key, counts):
      return mechanisms.GNMax(self.std / 2, self.neighboring_relation)(key, counts)

  (played, *_) = games.GAMES["GNMax"](Half)
  assert any(result.refuted for result in game.play(played, num_draws=12_000))
  (honest, *_) = games.GAMES["GNMax"](mechanisms.GNMax)
  assert not any(result.refuted for result in game.play(honest, num_draws=12_000))


@pytest.mark.parametrize(
  "counts",
  [np.array([1.0, math.nan]), np.array([math.inf, 0.0]), np.zeros(()), np.zeros(1)],
)
@pytest.mark.parametrize(
  "mechanism", [mechanisms.GNMax(1.0), mechanisms.ConfidentGNMax(1.0, 1.0, 1.0)]
)
def test_votes_that_are_none_are_refused(mechanism, counts):
  with pytest.raises(UserError):
    mechanism(jax.random.key(0), counts)


def test_a_nan_that_nobody_sees_is_no_answer():
  traced = jax.jit(mechanisms.GNMax(1.0))
  assert int(traced(jax.random.key(0), jnp.array([1.0, jnp.nan]))) == -1

"""The bound itself: true for honest mechanisms, above the claim of broken ones."""

import numpy as np
import pytest

from dpjax.auditing.games.game import (
  Claim,
  Game,
  frequency,
  held_out_bound,
  learn_bins,
  linear,
  play,
)
from dpjax.auditing.lower_bounds import Scores, epsilon_from_mu
from dpjax.validate import UserError


def _laplace(epsilon, claim, adversary):
  def outputs(world, seed, n):
    return np.random.default_rng([world, seed]).laplace(world * epsilon, 1.0, (n, 1))

  return Game("0, 1", "any", (Claim(claim, 0.0),), outputs, adversary)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("adversary", [linear, learn_bins])
def test_half_the_noise_is_seen_and_all_of_it_is_not(epsilon, adversary):
  assert not play(_laplace(epsilon, epsilon, adversary), num_draws=6000)[0].refuted
  assert play(_laplace(epsilon, epsilon / 2, adversary), num_draws=6000)[0].refuted


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_a_curve_is_refuted_where_it_is_weakest(mu):
  def outputs(world, seed, n):
    return np.random.default_rng([world, seed]).normal(world * mu, 1.0, (n, 1))

  def refuted(claimed):
    curve = tuple(Claim(epsilon_from_mu(claimed, d), d) for d in (1e-5, 0.01, 0.1))
    game = Game("0, 1", "any", curve, outputs, linear)
    return any(r.refuted for r in play(game, num_draws=6000))

  assert not refuted(mu) and refuted(mu / 2)


@pytest.mark.slow
def test_the_bound_exceeds_a_true_epsilon_as_rarely_as_it_says():
  rng, epsilon, runs = np.random.default_rng(0), 1.0, 400
  above = 0
  for _ in range(runs):
    draw = lambda: Scores(rng.laplace(epsilon, 1, 300), rng.laplace(0, 1, 300))
    bound = held_out_bound(draw(), draw(), delta=0.0, confidence=0.9)
    above += bound > epsilon
  assert above <= 0.1 * runs


def test_what_one_input_alone_gives_is_seen_from_either_side():
  for inside, outside in ((0.0, np.nan), (np.nan, 0.0)):
    outputs = lambda world, seed, n: np.full((n, 1), inside if world else outside)
    for adversary in (linear, learn_bins):
      game = Game("", "any", (Claim(1.0, 0.0),), outputs, adversary)
      assert play(game, num_draws=600)[0].refuted


@pytest.mark.parametrize(("refused", "seen"), [([0], True), ([1], True), ([0, 1], False)])
def test_a_refusal_of_one_neighbour_is_seen_and_of_both_is_not(refused, seen):
  def outputs(world, seed, n):
    if world in refused:
      raise UserError("x: refused")
    return np.zeros((n, 2))

  game = Game("", "any", (Claim(1.0, 0.0),), outputs, frequency)
  assert play(game, num_draws=600)[0].refuted == seen


def test_the_same_seed_gives_the_same_bound_and_another_another():
  bounds = [
    play(_laplace(1.0, 1.0, linear), num_draws=900, seed=s)[0].epsilon_lower
    for s in (0, 0, 1)
  ]
  assert bounds[0] == bounds[1] != bounds[2]

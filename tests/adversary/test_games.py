"""Every game: the honest subject is not refuted, a broken twin is, and so is a NaN.

Keys are fixed. The long form, with more draws, is `python -m launch.audit --all`.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import dpjax.federated
from dpjax import mechanisms, secure
from dpjax.accounting.discrete import DistributedNoise
from dpjax.auditing.games import federated as federated_games
from dpjax.auditing.games import game as game_module
from dpjax.auditing.games import mechanisms as mechanism_games
from dpjax.auditing.games import registry
from dpjax.auditing.games import secure as secure_games
from dpjax.auditing.games.game import CONFIDENCE, Claim, Game, linear, play
from dpjax.secure.distributed_noise import SkellamSum
from dpjax.validate import UserError
from tests.adversary import plants, twins

_DRAWS = {
  "mechanisms": 3000,
  "samplers": 1500,
  "transforms": 3000,
  "federated": 3000,
  "silos": 3000,
  "relevance": 3000,
  "secure": 3000,
  "plans": 2000,
  "training": 2000,
  "vertical": 3000,
  "shares": 3000,
  "accounting": 3000,
}
# half of the noise is missing
_PLANTED = {
  **_DRAWS,
  "samplers": 2400,
  "federated": 6000,
  "silos": 6000,
  "plans": 6000,
  "accounting": 6000,
}
_SUBJECTS = [
  pytest.param(package, name, id=f"{package}.{name}")
  for package, name in registry.subjects()
]


def _remembered(game):
  """The same game, which makes each draw once."""
  return dataclasses.replace(game, outputs=functools.cache(game.outputs))


def _with_nan(game):
  """The same game where the second input comes out as NaN."""

  def outputs(world, seed, n):
    drawn = np.asarray(game.outputs(0, seed, n), float)
    return np.full_like(drawn, np.nan) if world else drawn

  return dataclasses.replace(game, outputs=outputs)


def _enough(game, package):
  """Draws of a package, or more where they could show no epsilon above the smallest claim."""
  draws = _DRAWS[package]
  # As many draws as e^epsilon, several times, show an epsilon at a confidence of .999.
  smallest = min(claim.epsilon for claim in game.claims)
  return max(draws, int(20 * np.exp(min(smallest, 10.0)) / game.draws))


def _is_refused(game):
  try:
    game.outputs(0, 1, 8)
  except UserError:
    return True
  return False


def _broken(results):
  return [
    f"{r.game.case}: {r.epsilon_lower:.3g} > {r.claim.epsilon:.3g} at delta {r.claim.delta:g}"
    for r in results
    if r.refuted
  ]


@pytest.mark.cases(
  quick=["shares.OutputNoise"],
  slow=[
    *("mechanisms.LeastSquares", "mechanisms.ClassSums", "mechanisms.GNMax"),
    *("mechanisms.ConfidentGNMax", "samplers.KOutOfTSampler", "accounting.BudgetLedger"),
    *("samplers.WithReplacementSampler", "samplers.BoundedContributionSampler"),
    "transforms.scale_then_privatize",
  ],
  long=...,
)
@pytest.mark.parametrize(("package", "name"), _SUBJECTS)
def test_the_claim_stands(package, name):
  games = [_remembered(game) for game in registry.games(package, name)]
  assert games and len({game.case for game in games}) == len(games)
  found = [r for g in games for r in play(g, num_draws=_DRAWS[package])]
  assert not _broken(found)
  assert all(r.confidence == CONFIDENCE for r in found)
  played = [game for game in games if not _is_refused(game)]
  assert played
  for game in played:  # and each of them can fail
    assert _broken(play(_with_nan(game), num_draws=_enough(game, package))), game.case


@pytest.mark.cases(
  quick=[
    *("mechanisms.LeastSquares", "mechanisms.ClassSums", "mechanisms.GNMax"),
    *("shares.OutputNoise", "relevance.features:laplace_pld"),
  ],
  slow=[
    *(
      "mechanisms.ConfidentGNMax",
      "samplers.KOutOfTSampler",
      "samplers.WithReplacementSampler",
    ),
    *("samplers.BoundedContributionSampler", "transforms.scale_then_privatize"),
    "relevance.features:laplace_clipped",
  ],
  long=...,
)
@pytest.mark.parametrize(("package", "name"), _SUBJECTS)
def test_a_broken_twin_is_refuted(package, name):
  strongest = plants.games(package, name)[0]
  assert _broken(play(strongest, num_draws=_PLANTED[package]))


_OTHERS = {"dp_mean", "central", "client_noise", "federated"}
_ALGORITHMS = sorted({*federated_games.GAMES} - _OTHERS)


@pytest.mark.cases(slow=["fed_avg"], long=...)
@pytest.mark.parametrize("name", _ALGORITHMS)
def test_draws_at_once_are_those_of_rounds_as_users_run_them(name, monkeypatch):
  games = registry.games("federated", name)
  played = [game for game in games if not _is_refused(game)]
  at_once = [[game.outputs(world, 3, 5) for world in range(2)] for game in played]
  monkeypatch.setattr(federated_games, "_at_once", federated_games._one_by_one)
  ordinary = lambda *_: dpjax.federated.vmap_clients()
  monkeypatch.setattr(federated_games, "_draws_at_once", ordinary)
  played = [g for g in registry.games("federated", name) if not _is_refused(g)]
  one_by_one = [[game.outputs(world, 3, 5) for world in range(2)] for game in played]
  np.testing.assert_allclose(at_once, one_by_one, rtol=1e-5, atol=1e-6)


_PLANTS = {"honest": None, **twins.PLANTS}


@pytest.mark.cases(slow=["twice"], long=...)
@pytest.mark.parametrize("plant", _PLANTS)
def test_draws_of_whitening_at_once_are_those_of_the_mechanism(plant):
  broken = functools.partial(twins.BrokenMechanism, mechanisms.Whitening, "Whitening")
  numbers = {
    "normalize_by": 2.0,
    "noise_multiplier": 2.0,
    "clip_norms": (1.0, 2.0, 3.0, 4.0, 5.0),
    "num_directions": 3,
  }
  made = mechanisms.Whitening(**numbers)
  if plant != "honest":
    made = broken(_PLANTS[plant], numbers)
  x = np.random.default_rng(0).normal(size=(3, 2, 2)).astype(np.float32)
  quick = mechanism_games.at_once(mechanism_games.spreads, made, (x, x))(1, 5, 4)
  keys = jax.random.split(jax.random.fold_in(jax.random.key(5), 1), 4)
  # The broken one calls `after` itself.
  one = made if plant != "honest" else lambda key, x: made.after(key, x, None)
  slow = [jax.tree.leaves(one(key, x)) for key in keys]
  rows = [np.concatenate([np.ravel(leaf) for leaf in leaves]) for leaves in slow]
  np.testing.assert_allclose(quick, rows, rtol=2e-5, atol=2e-5)


def test_draws_at_once_are_not_believed_where_users_would_see_others():
  keys = jax.random.split(jax.random.key(0), 40)
  users = lambda key: [jax.random.normal(key, (2,))]
  found = federated_games._as_users(users, keys, [np.zeros((40, 2))])
  np.testing.assert_array_equal(found[0], [users(key)[0] for key in keys])
  quick = [np.asarray(jax.vmap(users)(keys)[0])]
  calls = []

  def counted(key):
    calls.append(key)
    return users(key)

  np.testing.assert_allclose(
    federated_games._as_users(counted, keys, quick)[0], quick[0], rtol=1e-6
  )
  assert len(calls) == federated_games._ONE_BY_ONE


def test_all_calls_of_a_game_make_equally_many_draws_and_none_twice():
  asked = []

  def outputs(world, seed, n):
    asked.append(n)
    return np.random.default_rng([world, seed]).normal(size=(n, 1))

  claim = (Claim(1.0, 0.0),)
  made = Game("0, 1", "replace_one", claim, outputs, linear, at_once=64)
  drawn = game_module._draw(made, 0, 0, 150)
  assert drawn.shape == (150, 1) and len(np.unique(drawn)) == 150
  assert asked == [64, 64, 64]
  game_module._draw(made, 0, 0, 5)
  assert asked[-1] == 8


@pytest.mark.cases(long=[2])
@pytest.mark.parametrize("claim", [Claim(4.0, 1e-5), Claim(2.0, 0.1), Claim(0.5, 0.0)])
def test_so_many_draws_have_a_ceiling_clearly_above_the_claim_and_fewer_do_not(claim):
  count = game_module.draws_to_refute(claim, most=50_000)
  above = claim.epsilon + game_module._CLEARLY
  assert game_module.ceiling(count, delta=claim.delta) > above
  assert game_module.ceiling(count - 1, delta=claim.delta) <= above


# Where rounding may make a vector of norm .5 nine times as long, and upwards sixteen times.
_COARSE = SkellamSum(0.5, 64, 1.0, 12, 3, DistributedNoise(23.3, 2))


@pytest.mark.long
@pytest.mark.parametrize(
  ("mechanism", "broken"),
  [(None, plants.sized_for_more_clients(4)), (_COARSE, plants.rounded_up)],
  ids=["half the noise", "rounding is not charged"],
)
def test_little_that_is_missing_inside_a_secure_sum_shows_in_many_draws(mechanism, broken):
  for kind in (secure.skellam_mean, broken):
    first = secure_games.skellam_games(kind, mechanism)[0]
    found = play(dataclasses.replace(first, draws=1.0), num_draws=5_000)
    assert bool(_broken(found)) == (kind is broken)

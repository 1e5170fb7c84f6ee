"""Every game: the honest subject is not refuted, a broken twin is, and so is a NaN.

Keys are fixed. The long form, with more draws, is `python -m launch.audit --all`.
"""

import dataclasses
import functools

import numpy as np
import pytest

import dpjax.federated
from dpjax import secure
from dpjax.accounting.discrete import DistributedNoise
from dpjax.auditing.games import CONFIDENCE, play, registry
from dpjax.auditing.games import federated as federated_games
from dpjax.auditing.games import secure as secure_games
from dpjax.validate import UserError
from tests.adversary import plants

_DRAWS = {
  "mechanisms": 3000,
  "samplers": 1500,
  "transforms": 3000,
  "federated": 3000,
  "relevance": 3000,
  "secure": 3000,
  "plans": 2000,
  "training": 2000,
  "vertical": 3000,
  "accounting": 3000,
}
_PLANTED = {**_DRAWS, "samplers": 2400, "federated": 6000}  # half of the noise is missing
# Broken in the same place as another one.
_ALIKE = {
  *("fed_sgd", "fed_prox", "fed_adam", "fed_yogi", "fed_adagrad", "apfl"),
  *("scale_by_dp_adam", "method:tempered", "method:dp_adam", "method:dpdligdo"),
}
# Made of what other rooms play: by hand, but for the quickest.
_COMPOSED = {"plans", "training", "vertical", "accounting"}
_QUICK = {"PrivateStatistics", "BudgetLedger"}


def _subjects(slow=()):
  long = lambda room, name: name in slow or (room in _COMPOSED and name not in _QUICK)
  marks = lambda room, name: [pytest.mark.long] if long(room, name) else []
  return [
    pytest.param(room, name, id=f"{room}.{name}", marks=marks(room, name))
    for room, name in registry.subjects()
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


def _is_refused(game):
  try:
    game.outputs(0, 1, 8)
  except UserError:
    return True
  return False


def _broken(results):
  return [
    f"{r.game.name}: {r.epsilon_lower:.3g} > {r.claim.epsilon:.3g} at delta {r.claim.delta:g}"
    for r in results
    if r.refuted
  ]


@pytest.mark.parametrize(("room", "name"), _subjects())
def test_the_claim_stands(room, name):
  games = [_remembered(game) for game in registry.games(room, name)]
  assert games and len({game.name for game in games}) == len(games)
  found = [r for g in games for r in play(g, num_draws=_DRAWS[room])]
  assert not _broken(found)
  assert all(r.confidence == CONFIDENCE for r in found)
  played = [game for game in games if not _is_refused(game)]
  assert played
  for game in played:  # and each of them can fail
    assert _broken(play(_with_nan(game), num_draws=_DRAWS[room])), game.name


@pytest.mark.parametrize(("room", "name"), _subjects(slow=_ALIKE))
def test_a_broken_twin_is_refuted(room, name):
  strongest = plants.games(room, name)[0]
  assert _broken(play(strongest, num_draws=_PLANTED[room]))


_OTHERS = {"dp_mean", "central", "client_noise", "federated"}
_ALGORITHMS = sorted({*federated_games.GAMES} - _OTHERS)


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


# Where rounding may make a vector of norm .5 nine times as long, and upwards sixteen times.
_COARSE = secure.SkellamSum(0.5, 64, 1.0, 12, 3, DistributedNoise(23.3, 2))


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

"""Every broken twin is refuted by its own row, and the same code without the fault is not.

All of them, in a quarter of an hour: `python -m pytest -m "" tests/adversary/test_twins.py`.
"""

import numpy as np
import pytest

from dpjax.auditing.games import game, registry
from dpjax.auditing.games.game import CONFIDENCE, play
from tests import pages
from tests.adversary import twins

# All games are played with the first number of draws, then with the next, until one game refutes.
_DRAWS = (3_000, 12_000, 48_000)

_TWINS = [pytest.param(twin, id=twin.name) for twin in twins.twins()]
# Its twins are played in every run of the tests; all others by hand.
_QUICK_ROW = "relevance.features:laplace"


def _results(twin, draws, *, sound=False):
  """Yields the results of the twin's own games, by more and more draws."""
  games = twin.games(sound=sound)
  # A union bound over all plays: otherwise one of many plays could refute a sound twin by chance.
  confidence = 1 - (1 - CONFIDENCE) / (len(games) * len(draws))
  for seed, count in enumerate(draws):
    for each in games:
      yield from play(each, num_draws=count, seed=seed, confidence=confidence)


@pytest.mark.cases(quick=[f"{_QUICK_ROW}, {plant}" for plant in ("clip", "key")], long=...)
@pytest.mark.parametrize("twin", _TWINS)
def test_its_row_refutes_a_broken_twin(twin):
  played = []
  for result in _results(twin, _DRAWS):
    played.append((result.epsilon_lower, result.claim.epsilon, result.ceiling))
    if result.refuted:
      break
  else:
    pytest.fail(f"no game refutes it: (bound, claim, ceiling) {played}")
  bound, claim, ceiling = played[-1]
  assert claim < bound <= ceiling


@pytest.mark.cases(quick=[f"{_QUICK_ROW}, {plant}" for plant in twins.PLANTS], long=...)
@pytest.mark.parametrize("twin", _TWINS)
def test_the_same_code_without_the_fault_stands(twin):
  refuted = [result for result in _results(twin, [2000], sound=True) if result.refuted]
  assert not refuted


def test_every_row_has_each_twin_or_a_reason():
  found = set(twins.twins())
  for package, subject in registry.subjects():
    for plant in twins.PLANTS:
      twin = twins.BrokenTwin(package, subject, plant)
      assert (twin in found) != bool(twins.reason(twin)), twin.name
  rows = {f"{package}.{subject}" for package, subject in registry.subjects()}
  assert {name for name, _ in twins.NOT_PLANTED} <= rows
  assert set(twins.PACKAGES) == set(registry.PACKAGES) and set(twins.SOUND) == set(
    twins.PLANTS
  )


def test_the_last_table_has_every_row_and_each_can_be_refuted():
  rows = pages.tables().entries("audits/table.csv")
  subjects = {f"{package}.{subject}" for package, subject in registry.subjects()}
  assert {row["what"] for row in rows} == subjects
  # Of each row some claims, not all: a delta of 1e-5 needs more draws than a table has.
  refutable = {row["what"] for row in rows if "CANNOT REFUTE" not in row["ceiling"]}
  assert refutable == subjects


def test_differences_that_come_again_are_seen_and_those_of_fresh_noise_are_not():
  noise = np.random.default_rng(0).standard_normal((2, 4000, 2))
  fresh = game.repeats(noise[0], noise[1])
  assert not fresh(noise[1]).any()
  again = noise[..., :1] + [[[0.0, 0.0]], [[0.0, 1.0]]]  # one draw for both entries
  score = game.repeats(again[0], again[1])
  assert score(again[0]).max() < 0 < score(again[1]).min()

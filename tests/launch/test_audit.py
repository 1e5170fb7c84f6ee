"""launch.audit: rows as they end, resumable, exit codes, one-line mistakes."""

import json

import jax
import numpy as np
import pytest

from dpjax.auditing.games import game, registry
from dpjax.auditing.games.game import Claim, Game, linear
from dpjax.experiments.checks import long_games
from tests import commands
from tests.refuses import refuses


def _laplace(claim):
  def outputs(world, seed, n):
    return np.random.default_rng([world, seed]).laplace(world, 1.0, (n, 1))

  return [Game("0, 1", "replace_one", (Claim(claim, 0.0),), outputs, linear)]


@pytest.fixture
def toys(monkeypatch):
  """A registry of a true claim and a false one; and how often each was played."""
  played = []
  found = {"honest": 1.2, "broken": 0.3}

  def make(claim):
    played.append(next(name for name in found if found[name] == claim))
    return _laplace(claim)

  package = registry.Package(lambda: found, dict.fromkeys(found, make), {"x": "none"})
  monkeypatch.setattr(registry, "PACKAGES", {"toys": package})
  registry.subjects.cache_clear()
  yield played
  registry.subjects.cache_clear()


def test_rows_bounds_and_what_is_refuted(toys, tmp_path):
  rows = long_games.run(long_games.Settings(minutes=0.01), tmp_path)
  assert [row["what"] for row in rows] == ["toys.honest", "toys.broken"]
  assert [long_games.nearest(row)["refuted"] for row in rows] == [False, True]
  assert "toys.broken (0, 1): epsilon >= " in long_games.refuted_claims(rows)[0]
  found = json.loads((tmp_path / "result.json").read_text())
  assert found["rows"][1]["games"][0]["epsilon_claimed"] == 0.3
  assert found["versions"]["jax"] and found["no_claim"] == {"toys.x": "none"}
  table = (tmp_path / "table.md").read_text().splitlines()
  assert table[2].startswith("| toys.honest | 1.2 | 0 | replace_one | proved | 0.")
  assert len((tmp_path / "table.csv").read_text().splitlines()) == 3


def test_each_bound_stands_beside_the_one_that_perfect_guesses_would_show(toys, tmp_path):
  rows = long_games.run(long_games.Settings(minutes=0.01), tmp_path)
  games = [game for row in rows for game in row["games"]]
  assert all(
    game["epsilon_lower"] < game["ceiling"] and game["can_refute"] for game in games
  )
  assert long_games.idle(rows) == [] and all(row["can_refute"] for row in rows)
  games[0].update(epsilon_claimed=9.5, can_refute=False)
  assert "CANNOT REFUTE |" in long_games.table(rows).splitlines()[2]
  assert long_games.idle(rows)[0].endswith("at delta 0, the claim is 9.5")


def test_a_stopped_audit_goes_on_with_what_is_left(toys, tmp_path, monkeypatch):
  settings, subject = long_games.Settings(minutes=0.01), long_games._subject

  def stopping(package, name, *rest):
    if name == "broken":
      raise KeyboardInterrupt
    return subject(package, name, *rest)

  monkeypatch.setattr(long_games, "_subject", stopping)
  with pytest.raises(KeyboardInterrupt):
    long_games.run(settings, tmp_path)
  assert "toys.honest" in (tmp_path / "table.md").read_text()
  monkeypatch.setattr(long_games, "_subject", subject)
  toys.clear()
  assert len(long_games.run(settings, tmp_path)) == 2 and toys == ["broken"]
  toys.clear()
  assert len(long_games.run(settings, tmp_path)) == 2 and toys == []


def test_another_audit_is_not_overwritten(toys, tmp_path):
  long_games.run(long_games.Settings(minutes=0.01, only="honest"), tmp_path)
  with refuses("out"):
    long_games.run(long_games.Settings(minutes=0.01), tmp_path)
  (tmp_path / "result.json").write_text("[]")
  with refuses("out"):
    long_games.run(long_games.Settings(minutes=0.01), tmp_path)
  other = tmp_path / "sweep"
  other.mkdir()
  (other / "table.md").write_text("of a sweep")
  with refuses("out", value=other):
    long_games.run(long_games.Settings(minutes=0.01), other)
  assert (other / "table.md").read_text() == "of a sweep"


@pytest.mark.parametrize("wrong", [{"minutes": 0}, {"seed": -1}, {"only": "nobody"}])
def test_wrong_settings_are_named(wrong):
  ((field, value),) = wrong.items()
  with refuses(field, value=value):
    long_games.Settings(**wrong)


def test_every_seed_that_may_be_given_makes_a_key():
  def outputs(world, seed, n):
    return np.asarray(jax.random.normal(jax.random.key(seed), (n, 1)))

  made = Game("0, 1", "replace_one", (Claim(1.0, 0.0),), outputs, linear)
  for seed in (0, 10**13, 2**62 - 1 + 1_000_000):
    assert game._draw(made, 0, seed, 3).shape == (3, 1)


def _launch(*arguments):
  return commands.run("launch.audit", *arguments)


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
  out = f"--out={tmp_path / 'audit'}"
  done = _launch("--only=RandomizedResponse", "--minutes=0.02", out)
  assert done.returncode == 0, done.stderr
  assert "| mechanisms.RandomizedResponse | " in done.stdout
  assert (tmp_path / "audit" / "table.md").read_text() in done.stdout
  assert "give --all, or --only" in commands.refusal(_launch(out))

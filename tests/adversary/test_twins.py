"""Every broken twin is refuted by its own row, and the same code without the fault is not.

The long form is `python -m launch.audit --all --twins`; its table is results/audits/twins.csv.
"""

import json

import numpy as np
import pytest

from dpjax.auditing.games import game, registry, twins
from dpjax.experiments.checks import broken_twins
from dpjax.validate import UserError
from tests import commands, tables

# Quick enough for every run of the tests; all others are played by hand.
_QUICK = {"samplers.PoissonSampler", "relevance.features:laplace"}


def _twins():
  marks = lambda twin: (
    [] if f"{twin.package}.{twin.subject}" in _QUICK else [pytest.mark.long]
  )
  return [pytest.param(twin, id=twin.name, marks=marks(twin)) for twin in twins.twins()]


@pytest.mark.parametrize("twin", _twins())
def test_its_row_refutes_a_broken_twin(twin):
  row = broken_twins.attacked(twin)
  assert row["refuted"], broken_twins.missed([row])
  assert row["epsilon_claimed"] < row["epsilon_lower"] <= row["ceiling"]


@pytest.mark.parametrize("twin", _twins())
def test_the_same_code_without_the_fault_stands(twin):
  row = broken_twins.attacked(twin, draws=[2000], sound=True)
  assert not row["refuted"], row


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


def test_the_last_table_has_every_twin_and_each_is_refuted():
  rows = tables.entries("audits/twins.csv")
  assert {f"{row['what']}, {row['plant']}" for row in rows} == {
    t.name for t in twins.twins()
  }
  assert [row for row in rows if row["refuted"] != "True"] == []


def test_the_last_table_has_every_row_and_each_can_be_refuted():
  rows = tables.entries("audits/table.csv")
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


def test_a_missed_twin_ends_in_one_line_and_a_stopped_run_goes_on(tmp_path, monkeypatch):
  settings = broken_twins.TwinSettings(only="labels:randomized_response")
  with monkeypatch.context() as patch:
    attacked = broken_twins.attacked
    patch.setattr(
      broken_twins,
      "attacked",
      lambda twin, *, seed: attacked(twin, seed=seed, draws=[300], sound=True),
    )
    rows = broken_twins.run(settings, tmp_path)
  assert len(broken_twins.missed(rows)) == len(rows) == 3
  assert "randomized_response, noise: epsilon >= " in broken_twins.missed(rows)[0]
  found = json.loads((tmp_path / "twins.json").read_text())
  assert found["missed"] == broken_twins.missed(rows)
  found["rows"] = found["rows"][:-1]  # stopped before the last one
  (tmp_path / "twins.json").write_text(json.dumps(found))
  again = broken_twins.run(settings, tmp_path)
  assert again[:-1] == rows[:-1] and len(again) == 3
  with pytest.raises(UserError, match="holds twins of other settings"):
    broken_twins.run(broken_twins.TwinSettings(), tmp_path)


def test_from_the_command_line():
  refused = commands.refusal(
    commands.run("launch.audit", "--all", "--twins", "--minutes=1")
  )
  assert "minutes=1.0: is of the claims" in refused

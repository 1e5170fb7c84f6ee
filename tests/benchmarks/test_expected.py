"""The interval of one more run: its coverage, which runs count, and what is still to be made."""

import numpy as np
import pytest

from benchmarks import expected
from benchmarks.expected import Run


def test_nineteen_of_twenty_further_scores_lie_in_the_interval():
  rng = np.random.default_rng(0)
  scores = rng.normal(0.5, 0.02, (4000, 11))
  inside = [
    low <= row[-1] <= high for row in scores for low, high in [expected.interval(row[:-1])]
  ]
  assert np.mean(inside) == pytest.approx(0.95, abs=0.012)


def test_a_share_is_cut_and_an_error_is_not():
  assert expected.interval([0.98, 1.0])[1] == 1.0
  assert expected.interval([54.0, 56.0], share=False)[1] > 56


def test_runs_of_the_newest_content_count_and_rows_survive(tmp_path):
  old = [Run("quickstart", "old", 0.1, 1.0, "2026-01-01")]
  new = [Run("quickstart", "new", score, 2.5, "2026-11-29") for score in (0.9, 0.92, 0.94)]
  expected.write(tmp_path, old + new)
  assert expected.read(tmp_path) == old + new
  (row,) = expected.summary(old + new)
  assert (row.runs, row.epsilon, row.day) == (3, 2.5, "2026-11-29")
  assert row.mean == pytest.approx(0.92) and row.sd == pytest.approx(0.02)
  assert expected.summary(new[:1]) == []  # one run has no spread
  assert (tmp_path / "expected.csv").read_text().count("\n") == 2


def test_each_config_runs_before_any_runs_again(monkeypatch):
  monkeypatch.setattr(
    expected,
    "CONFIGS",
    {name: expected.Config("train", runs=2) for name in ("quickstart", "diabetes")},
  )
  assert expected.missing([]) == ["quickstart", "diabetes"] * 2
  digest = expected._digest("quickstart")
  done = [
    Run("quickstart", digest, 0.9, 3.0, "2026-11-29"),
    Run("diabetes", "edited", 5.0, 3.0, ""),
  ]
  assert expected.missing(done) == ["diabetes", "quickstart", "diabetes"]


def test_every_config_is_one_of_its_launcher():
  for name in expected.CONFIGS:
    content = expected._content(name)
    assert expected.kind.command_of(content) == expected.CONFIGS[name].launcher

"""Reports: the numbers in the tables, and what the pictures say about an epsilon."""

from __future__ import annotations

import csv
import sys

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from dpjax import accounting
from dpjax.experiments.run import report, writers
from dpjax.experiments.sweeps import curve, curves
from dpjax.experiments.sweeps.sweep import Sweep
from dpjax.validate import UserError
from tests.refuses import refuses

PRIVATE = {
  "epsilon_kind": "proved",
  "epsilon": 0.99,
  "delta": 1e-5,
  "neighboring_relation": "add_or_remove_one",
  "unit": "example",
}


@pytest.fixture
def figures(monkeypatch, every_report_is_drawn):
  """Every figure that is saved."""
  saved = []
  save = Figure.savefig
  monkeypatch.setattr(
    Figure, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k))[1]
  )
  return saved


def _table(path):
  with path.open() as file:
    return list(csv.DictReader(file))


def _note(figure):
  """What stands above the panels, on one line."""
  return " ".join(figure._suptitle.get_text().split())


def _is_png(path):
  return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def _run(workdir, *, epsilon):
  with writers.MetricsWriter(workdir, tensorboard=False) as metrics:
    for step in (10, 20):
      metrics.write(step, {"test_accuracy": step / 100})
      metrics.write(step, {"not_private/train_loss": 2.0} | epsilon(step))


def _result(workdir, **changes):
  result = dict.fromkeys(writers.RESULT_KEYS, 0) | PRIVATE
  names = {"dataset": "digits", "method": "dp_sgd", "test_accuracy": 0.2}
  writers.write_result(workdir, result | names | changes)


def test_train_report_states_the_epsilon_and_its_meaning(tmp_path, figures):
  _run(tmp_path, epsilon=lambda step: {"epsilon": step / 20})
  _result(tmp_path)
  report.train_report(tmp_path)
  assert _is_png(tmp_path / "report.png")
  assert _table(tmp_path / "report.csv")[1] == {
    "step": "20",
    "test_accuracy": "0.2",
    "not_private/train_loss": "2.0",
    "epsilon": "1.0",
  }
  (figure,) = figures
  accuracy, epsilon = figure.axes
  assert list(accuracy.lines[0].get_ydata()) == [0.1, 0.2]
  assert list(epsilon.lines[0].get_ydata()) == [0.5, 1.0]
  title = epsilon.get_title(loc="left")
  words = " ".join(title.split())
  assert "1e-05" in words and "add or remove one example" in words and "proved" in words
  assert (
    "matplotlib.pyplot" not in sys.modules
    or not sys.modules["matplotlib.pyplot"].get_fignums()
  )


def test_epsilon_is_drawn_between_evaluations_of_a_run_that_cannot_abort(tmp_path, figures):
  step = accounting.gaussian_event(10.0)
  spent = dict(zip((10, 20), accounting.epsilon_curve(step, (10, 20), delta=1e-5)))
  _run(tmp_path, epsilon=lambda step: {"epsilon": spent[step]})
  charge = {
    "num_steps": 20, "l2_clip_norm": 1.0, "neighboring_relation": "add_or_remove_one",
    "noise_key_id": "key", "first_step": 0,
  }  # fmt: skip
  ledger = accounting.Ledger().charge(step, **charge).to_json()
  _result(tmp_path, epsilon=spent[20], accountant="pld", ledger=ledger, wall_seconds=1e4)
  report.train_report(tmp_path)
  drawn = {x for line in figures[0].axes[1].lines for x in line.get_xdata()}
  assert {5, 10, 15, 20} <= drawn


def test_train_report_without_an_epsilon(tmp_path, figures):
  _run(tmp_path, epsilon=lambda step: {"epsilon": float("inf")})
  none = {"epsilon": None, "epsilon_kind": "none", "method": "sgd", "delta": None}
  _result(tmp_path, **none)
  report.train_report(tmp_path)
  (axes,) = figures[0].axes
  assert "not private" in axes.get_title(loc="left")


def test_train_report_of_an_unfinished_or_empty_run(tmp_path, figures):
  with pytest.raises(UserError, match=r"metrics\.jsonl"):
    report.train_report(tmp_path)
  _run(tmp_path, epsilon=lambda step: {"epsilon": 1.0})
  report.train_report(tmp_path)
  assert len(figures[0].axes) == 2


def _rows(accuracy=lambda epsilon, seed: epsilon / 10 + seed / 100, seeds=(0, 1, 2)):
  return [
    PRIVATE
    | {
      "privacy.epsilon": e,
      "epsilon": e - 0.01,
      "test_accuracy": accuracy(e, s),
      "seed": s,
    }
    for e in (4.0, 1.0)
    for s in seeds
  ]


def _report(rows, folder, *, title="", **axes):
  rows = [row | {"label": "", "variant": ""} for row in rows]
  curves.Curves(Sweep(**axes)).write(folder, rows, title=title, last=False)


def test_sweep_report_means_and_extremes(tmp_path, figures):
  references = [("A 2021", 2.93, 0.2), ("B 2021", 3.0, 0.2)]  # almost on top of each other
  _report(_rows(), tmp_path, references=references, title="t")
  assert _is_png(tmp_path / "curve.png")
  first, second = _table(tmp_path / "curve.csv")
  assert (first["privacy.epsilon"], second["privacy.epsilon"]) == ("1.0", "4.0")
  assert first["seeds"] == "3" and float(first["test_accuracy_mean"]) == pytest.approx(0.11)
  assert float(first["test_accuracy_min"]) == pytest.approx(0.1)
  assert float(first["test_accuracy_max"]) == pytest.approx(0.12)
  assert first["epsilon"] == "0.99" and first["delta"] == "1e-05"
  assert first["neighboring_relation"] == "add_or_remove_one" and first["unit"] == "example"
  (axes,) = figures[0].axes
  assert axes.get_xscale() == "log" and axes.get_xlabel() == "privacy budget epsilon"
  note = _note(figures[0])
  assert "proved, delta = 1e-05, add or remove one example" in note
  assert "min to max" in note
  texts = figures[0].legends[0].get_texts()
  assert {"A 2021 (2.93: 0.2)", "B 2021 (3: 0.2)"} <= {text.get_text() for text in texts}
  boxes = [text.get_window_extent() for text in texts]
  assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_one_seed_has_no_interval(tmp_path, figures):
  _report(_rows(seeds=(0,)), tmp_path)
  axes = figures[0].axes[0]
  assert "one seed" in _note(figures[0])
  assert not axes.collections  # error bars are line collections


def test_series_are_lines_of_their_own(tmp_path, figures):
  rows = [row | {"model.name": name} for name in ("mlp", "cnn") for row in _rows()]
  _report(rows, tmp_path, series="model.name")
  assert [row["model.name"] for row in _table(tmp_path / "curve.csv")] == ["mlp"] * 2 + [
    "cnn"
  ] * 2
  assert len(figures[0].axes[0].containers) == 2


def test_a_run_without_privacy_is_never_drawn_at_its_configs_epsilon(tmp_path, figures):
  sgd = {
    "epsilon_kind": "none",
    "epsilon": None,
    "privacy.epsilon": 1.0,
    "test_accuracy": 0.99,
  }
  _report([*_rows(), sgd], tmp_path)
  table = _table(tmp_path / "curve.csv")
  assert table[0]["privacy.epsilon"] == "" and table[0]["test_accuracy_mean"] == "0.99"
  assert [row["seeds"] for row in table] == ["1", "3", "3"]
  axes = figures[0].axes[0]
  labels = axes.get_legend_handles_labels()[1]
  assert "without privacy" in labels
  (level,) = [line for line in axes.lines if line.get_label() == "without privacy"]
  assert set(level.get_xdata()) == {0, 1}  # from one side of the axes to the other


def test_what_an_epsilon_means_fits_into_the_picture(tmp_path, figures):
  long = "the same, random allocation, not private"
  other = {"neighboring_relation": "replace_special", "series": "another"}
  rows = [row | {"series": long} for row in _rows()] + [row | other for row in _rows()]
  _report(rows, tmp_path, series="series")
  (figure,) = figures
  titles = [axes.get_title(loc="left") for axes in figure.axes]
  assert titles == ["add or remove one example", "replace one example by an empty one"]
  figure.draw_without_rendering()
  for text in [figure._suptitle, *figure.findobj(Text)]:
    box = text.get_window_extent()
    assert not text.get_text() or (box.x0 >= 0 and box.x1 <= figure.bbox.x1), text


def test_an_epsilon_of_mixed_meaning_says_so(tmp_path):
  rows = _rows(seeds=(0, 1))
  rows[0]["epsilon_kind"] = "claimed"
  kinds = {row["privacy.epsilon"]: row["epsilon_kind"] for row in curve.summarize(
    rows, x="privacy.epsilon", y="test_accuracy")}  # fmt: skip
  assert kinds == {4.0: "claimed / proved", 1.0: "proved"}


def test_another_axis_is_linear_and_a_missing_key_named(tmp_path, figures):
  rows = [row | {"num_steps": 10 * (1 + row["seed"])} for row in _rows()]
  _report(rows, tmp_path, x="num_steps")
  assert figures[0].axes[0].get_xscale() == "linear"
  with refuses("accuracy_of_test", value=None):
    _report(rows, tmp_path, y="accuracy_of_test")


def test_no_finished_run_still_writes_the_files(tmp_path):
  _report([], tmp_path)
  assert _is_png(tmp_path / "curve.png") and _table(tmp_path / "curve.csv") == []


@pytest.mark.parametrize("lost", [None, "inf", "-inf", float("nan"), float("inf")])
def test_runs_that_diverged_are_counted_and_in_no_mean(tmp_path, figures, lost):
  rows = _rows(accuracy=lambda e, seed: 0.5 if seed else lost)
  rows += [row | {"privacy.epsilon": 9.0} for row in _rows(accuracy=lambda *_: lost)[:3]]
  rows += [row | {"epsilon_kind": "none"} for row in _rows(accuracy=lambda *_: lost)[:1]]
  _report(rows, tmp_path)
  found = {row["privacy.epsilon"]: row for row in _table(tmp_path / "curve.csv")}
  assert [(row["seeds"], row["not_finite"]) for row in found.values()] == [
    ("1", "1"), ("3", "1"), ("3", "1"), ("3", "3")
  ]  # fmt: skip
  assert found["1.0"]["test_accuracy_mean"] == "0.5"
  assert found["9.0"]["test_accuracy_mean"] == "nan"
  (axes,) = figures[0].axes
  assert list(axes.lines[0].get_xdata()) == [1.0, 4.0]
  assert "not drawn: 6 " in _note(figures[0])
  cells = (tmp_path / "table.md").read_text()
  assert ".5000 (.5000-.5000; 1 of 3 not finite)" in cells and "| not finite |" in cells


def test_a_run_without_a_position_is_left_out(tmp_path):
  rows = [row | {"test_loss": None if row["seed"] else 1.0} for row in _rows()]
  _report(rows, tmp_path, x="test_loss")
  assert [row["test_loss"] for row in _table(tmp_path / "curve.csv")] == ["1.0"]

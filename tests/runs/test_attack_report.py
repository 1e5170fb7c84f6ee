"""The picture of attacks: files, their numbers, and curves that hold nothing."""

import csv

import numpy as np
import pytest

from dpjax import attacks, pictures
from dpjax.attacks import allowed
from dpjax.experiments.kinds.attack import curves as attack_report
from dpjax.experiments.kinds.attack import members, table
from dpjax.experiments.plots import csv_tables, redraw
from tests.refuses import refuses


def _found(shift, n=400):
  truth = np.arange(2 * n) < n
  scores = np.random.default_rng(0).standard_normal(2 * n) + shift * truth
  return attacks.measure(scores, truth)


def test_picture_points_and_table(tmp_path):
  found = {"loss": _found(0.1), "lira": _found(2.0)}
  attack_report.roc_report(tmp_path, found, line=allowed.by_mu(1.0), title="$x$ a target")
  assert (tmp_path / "roc.png").read_bytes().startswith(b"\x89PNG")
  assert (tmp_path / "attacks.md").read_text() == attacks.table(found)
  with (tmp_path / "roc.csv").open() as file:
    rows = [row for row in csv.DictReader(file) if row["attack"] == "lira"]
  points = np.array([[float(row["fpr"]), float(row["tpr"])] for row in rows])
  assert (np.diff(points[:, 0]) > 0).all() and points[-1].tolist() == [1, 1]
  for rate in found["lira"].rates:
    assert points[points[:, 0] <= rate.fpr][-1, 1] == pytest.approx(rate.tpr)


def test_the_allowed_rate_stands_beside_the_measured_one(tmp_path):
  found = {"lira": _found(2.0)}
  attack_report.roc_report(tmp_path, found, allowed={0.01: 0.03341, 0.1: 0.5})
  head, _, row = (tmp_path / "attacks.md").read_text().splitlines()
  cells = dict(zip(head.split(" | "), row.split(" | ")))
  assert cells["allowed TPR at 1 % FPR |"] == "0.0335 |"  # rounded up, never down
  assert not any("10 %" in name for name in cells)  # a rate that was not measured


def test_the_allowed_rate_is_of_the_line_or_of_the_attacked_run():
  line = allowed.by_mu(1.0)
  found = members._row(_found(2.0), line, True, members._allowed_tpr(line, {}))
  assert found["tpr_at_fpr"]["0.01"]["allowed_tpr"] == line([0.01])[0]
  promised = members._allowed_tpr(None, {"tpr_at_fpr_0.01": 0.03})
  found = members._row(_found(2.0), None, True, promised)
  assert found["tpr_at_fpr"]["0.01"]["allowed_tpr"] == 0.03
  assert found["tpr_at_fpr"]["0.001"]["allowed_tpr"] is None
  # A claim of a larger deployment allows nothing for those whose data were used, and is no alarm.
  deployed = {"epsilon_kind": "claimed", "epsilon": 1.0, "epsilon_of_this_run": 9.0}
  assert not members._allowed_tpr(None, deployed | {"tpr_at_fpr_0.01": 0.03})
  assert not table.is_above(deployed | {"epsilon_lower_indicative": 2.0})


def _picture(folder, **allowed_by):
  """The axes and the legend of the picture of an attack that tells nothing."""
  constant = attacks.measure(np.zeros(10), np.arange(10) < 5)
  attack_report.roc_report(folder, {"none": constant}, **allowed_by)
  read = [csv_tables.read(folder / "roc.csv")]
  figure = redraw.figure(read, redraw.NOTHING, pictures.PAGE, [])
  (axes,) = figure.axes
  return axes, [text.get_text() for text in figure.legends[0].get_texts()]


def test_allowed_rates_without_a_line_are_marked(tmp_path):
  axes, names = _picture(tmp_path, allowed={0.01: 0.03, 0.1: 0.5})
  marks = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "*"]
  assert marks == [[[0.01, 0.03]], [[0.1, 0.5]]]
  assert names == ["none", "guessing", "allowed by the guarantee"]


def test_axes_are_logarithmic_and_show_all_curves(tmp_path):
  line = allowed.by_epsilon(1.0, 1e-5)
  axes, names = _picture(tmp_path, line=line, allowed={0.01: 0.03})
  assert axes.get_xscale() == axes.get_yscale() == "log"
  assert names == ["none", "guessing", "allowed: epsilon = 1 at delta = 1e-05"]
  drawn = axes.lines[-1].get_xydata()
  assert drawn[0, 0] == pytest.approx(0.1)
  np.testing.assert_allclose(drawn[:, 1], line(np.minimum(drawn[:, 0], 1.0)))


def test_runs_that_differ_in_their_seed_are_one_row(tmp_path):
  facts = dict.fromkeys(
    ("epsilon", "delta", "neighboring_relation", "unit", "test_accuracy")
  )
  facts |= {"task": "of a user", "attack": "a", "epsilon_kind": "none"}
  result = lambda defence, success: (
    facts
    | {
      "defence": defence,
      "rows": [
        {
          "method": "m",
          "success": success,
          "low": 0.0,
          "high": 1.0,
          "finds": "",
          "verdict": "FAILS",
        }
      ],
    }
  )
  results = [result("none", 0.2), result("none", 0.6), result("noise", 0.1)]
  table.write(tmp_path, results, picture=False)
  with open(tmp_path / "attacks.csv") as lines:
    several, alone = csv.DictReader(lines)
  assert (several["runs"], several["low"], several["high"]) == ("2", "0.2", "0.6")
  assert float(several["success"]) == pytest.approx(0.4)
  assert float(several["sd"]) == pytest.approx(0.08**0.5) and several["verdict"].endswith(
    "2 runs"
  )
  assert (alone["success"], alone["high"], alone["runs"]) == ("0.1", "1.0", "")
  with open(tmp_path / "runs.csv") as lines:
    assert [row["success"] for row in csv.DictReader(lines)] == ["0.2", "0.6", "0.1"]


def test_no_attack_is_refused(tmp_path):
  with refuses("leakages"):
    attack_report.roc_report(tmp_path, {})

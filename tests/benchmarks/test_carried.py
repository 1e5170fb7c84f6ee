"""Means over the runs of data that packages carry."""

import math

from benchmarks import carried


def test_a_point_is_the_mean_of_its_own_runs():
  scores = [(1.0, 0.5, 0.25), (1.0, 0.75, 0.75), (math.inf, 1.0, 1.0)]
  rows = [
    {
      "line": "all applicants",
      "privacy.epsilon": e,
      "test_auroc": y,
      "auroc_yes": z,
      "auroc_no": 0,
    }
    for e, y, z in scores
  ]
  points = carried.points_of(carried.DATA["mortgages"], rows)
  held = [
    (p["line"], p["privacy.epsilon"], p["seeds"], p["mean"], p["max"]) for p in points
  ]
  assert held[:2] == [
    ("all applicants", 1.0, 2, 0.625, 0.75),
    ("black applicants", 1.0, 2, 0.5, 0.75),
  ]
  assert held[3] == ("all applicants", None, 1, 1.0, 1.0)
  assert math.isclose(points[0]["sd"], 0.25 / math.sqrt(2))

"""Figure 9: the draws follow their laws, and the figure says what a record would get."""

import csv
import json
import math

import numpy as np
import pytest
from scipy import stats

from dpjax.experiments.sweeps import noise_histograms
from tests.refuses import refuses


@pytest.mark.slow
def test_the_figure_has_the_draws_of_its_laws(tmp_path):
  result = noise_histograms.run(tmp_path, num_draws=20_000)
  assert json.loads((tmp_path / "result.json").read_text()) == result
  with (tmp_path / "figure_9.csv").open(newline="") as file:
    rows = list(csv.DictReader(file))
  edges = np.array([float(row["from"]) for row in rows] + [float(rows[-1]["to"])])
  scale = {"Laplace": stats.laplace(scale=1.0)}
  for name, factor in (("paper's", math.sqrt(2 * math.log(1250))), ("proved", 2.5747)):
    scale[f"Gaussian, {name.replace('paper', 'the paper')}"] = stats.norm(scale=factor)
  for found in result["noises"]:
    counts = np.array([int(row[found["name"]]) for row in rows])
    shares = {
      name: np.diff(distribution.cdf(edges)) for name, distribution in scale.items()
    }
    # The distance of histograms: small to the noise's own law, large to both others.
    distance = {n: np.abs(counts / 20_000 - share).sum() for n, share in shares.items()}
    assert distance.pop(found["name"]) < 0.1 < min(distance.values()) / 2
    assert found["share_within_1"] == pytest.approx(
      float(np.diff(scale[found["name"]].cdf([-1, 1]))[0]), abs=0.015
    )
  assert (tmp_path / "figure_9.png").read_bytes()[:4] == b"\x89PNG"


def test_the_noise_of_a_record_is_counted_by_its_own_norm():
  laplace, paper, proved = noise_histograms.figure_noises(784)
  assert laplace.deviation < proved.deviation < paper.deviation
  assert laplace.of_a_record == pytest.approx(784 * math.sqrt(2))
  assert proved.of_a_record == pytest.approx(28 * proved.deviation)


def test_wrong_arguments_are_one_line(tmp_path):
  with refuses("num_draws", value=1):
    noise_histograms.run(tmp_path, num_draws=1)
  with refuses("num_features", value=0):
    noise_histograms.figure_noises(0)
  # Its result.json would take the place of a run's.
  (tmp_path / "result.json").write_text("a run's")
  for folder in (tmp_path, "~/figure"):
    with refuses("figure_9", value=folder):
      noise_histograms.run(folder, num_draws=2)

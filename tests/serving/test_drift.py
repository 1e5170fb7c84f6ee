"""PSI by hand, public bins, noise that is charged, and alarms that fire only on drift."""

import math

import numpy as np
import pytest

from dpjax import data
from dpjax.experiments.run.model_inputs import ModelInputs
from dpjax.serving import drift, references
from dpjax.serving.drift import Bins
from dpjax.serving.journal import ServiceJournal
from dpjax.validate import UserError
from tests.refuses import refuses


def _inputs(**changes):
  facts = {
    "shape": (4,), "dtype": "float32", "num_classes": 3, "vocab_size": None, "target": None,
    "labels": ("a", "b", "c"), "unit_range": False, "declaration": None,
  }  # fmt: skip
  return ModelInputs(**(facts | changes))


def test_psi_is_the_sum_by_hand():
  now, before = [30, 50, 20], [10, 60, 30]
  # (.3 - .1) ln 3 + (.5 - .6) ln(5 / 6) + (.2 - .3) ln(2 / 3)
  wanted = 0.2 * math.log(3) - 0.1 * math.log(5 / 6) - 0.1 * math.log(2 / 3)
  assert drift.psi(now, before, pseudo_count=0) == pytest.approx(wanted, rel=1e-12)
  shifted = [(30.5, 10.5), (50.5, 60.5), (20.5, 30.5)]
  wanted = sum((p - q) / 101.5 * math.log(p / q) for p, q in shifted)
  assert drift.psi(now, before) == pytest.approx(wanted, rel=1e-12)
  assert drift.psi(now, before) == pytest.approx(drift.psi(before, now))


@pytest.mark.parametrize(
  ("now", "before"),
  [
    ([1, 2], [1, 2, 3]),
    ([], []),
    ([math.nan, 1], [1, 1]),
    ([math.inf, 1], [1, 1]),
    ([[1]], [[1]]),
  ],
)
def test_psi_of_no_histogram_is_refused(now, before):
  with pytest.raises(UserError):
    drift.psi(now, before)


def test_an_empty_bin_and_noise_below_zero_are_finite():
  assert 1 < drift.psi([0, 100], [100, 0]) < 20
  assert drift.psi([-7.0, 100.0], [0.0, 100.0]) == 0.0
  assert drift.psi([0, 0], [0, 0]) == 0.0


_LAWS = {
  "equal": np.full(10, 0.1),
  "two": np.array([0.5, 0.5]),
  "rare": np.array([0.9, 0.05, 0.03, 0.01, 0.005, 0.005]),
  "many": np.full(40, 0.025),
}


def _share_of_alarms(law, other, num_rows, scale, pairs, seed):
  """Returns the share of pairs of a reference of `law` and a window of `other` that are above the
  bound."""
  rng = np.random.default_rng(seed)
  noise = lambda k: rng.laplace(0.0, scale, k)
  added = drift.pseudo_count_of(scale, scale)
  found = 0
  for number in range(pairs):
    reference = rng.multinomial(num_rows, law) + noise(len(law))
    window = rng.multinomial(num_rows, other) + noise(len(law))
    bound = drift.by_chance(
      window,
      reference,
      num_rows=num_rows,
      reference_scale=scale,
      window_scale=scale,
      seed=number,
    )
    found += drift.psi(window, reference, pseudo_count=added) > bound
  return found / pairs


@pytest.mark.parametrize("scale", [0.0, 4.0])
def test_chance_exceeds_its_bound_in_few_windows_and_drift_in_most(scale):
  assert _share_of_alarms(_LAWS["equal"], _LAWS["equal"], 50, scale, 60, 0) == 0
  drifted = np.linspace(1, 19, 10) / 100
  assert _share_of_alarms(_LAWS["equal"], drifted, 800, scale, 60, 0) > 0.9


@pytest.mark.long
@pytest.mark.parametrize("scale", [0.0, 4.0])
@pytest.mark.parametrize("law", _LAWS)
def test_chance_exceeds_its_bound_in_fewer_than_one_of_1000_windows(law, scale):
  """At a share of 1/2000, 5 or more of 2,000 pairs have a chance of .004."""
  share = _share_of_alarms(_LAWS[law], _LAWS[law], 50, scale, 2000, 1)
  assert share * 2000 <= 4


def test_rows_fall_into_their_bins():
  x = np.array([[0.0, 0.5, 1.0, 0.2], [0.9, 0.9, 0.9, 0.9]], np.float32)
  answers = np.array([2, 0])
  bins = [
    drift.predicted_bins(_inputs()),
    drift.bins_of("x[2]:0.95,1.5", _inputs()),
    drift.bins_of("mean:0.5", _inputs()),
  ]
  counts = drift.exact_counts(bins, x, answers)
  assert {name: found.tolist() for name, found in counts.items()} == {
    "predicted": [1, 0, 1],
    "x[2]:0.95,1.5": [1, 1, 0],
    "mean:0.5": [1, 1],
  }


def test_columns_of_a_table_have_their_declared_bins():
  declared = {
    "columns": {"sex": {"values": ["f", "m"]}, "age": {"lower": 0, "upper": 120}},
    "target": {"column": "ill", "values": ["no", "yes"]},
    "split": {"test_share": 0.5},
  }
  inputs = _inputs(shape=(3,), declaration=declared, unit_range=True, num_classes=2)
  sex, age = drift.bins_of("sex", inputs), drift.bins_of("age:18,65", inputs)
  x = np.array([[0, 1, 0.1], [1, 0, 0.5], [0, 1, 1.0]], np.float32)  # ages 12, 60, 120
  assert sex.of(x, x).tolist() == [1, 0, 1] and age.of(x, x).tolist() == [0, 1, 2]
  assert drift.bins_of("age", inputs).size == 10
  for text, words in (
    ("agee", "drift_inputs"),
    ("sex:1", "drift_inputs"),
    ("age:2,1", "drift_inputs"),
  ):
    with refuses(words):
      drift.bins_of(text, inputs)


@pytest.mark.parametrize(
  "text",
  ["x[4]", "x[0,0]", "x[-1]", "x[]", "x[0]", "mean", "mean:nan", "x[0]:", "x[0]:1,1"],
)
def test_bins_that_are_not_public_or_not_there_are_refused(text):
  """`x[0]` and `mean` have no public bounds here, so they need edges."""
  with refuses("drift_inputs"):
    drift.bins_of(text, _inputs())


def test_answers_of_a_regression_are_in_its_units():
  bins = drift.predicted_bins(
    _inputs(target=data.Interval(0, 100), num_classes=1, labels=())
  )
  assert bins.of(np.zeros((3, 4)), np.array([5.0, 55.0, 100.0])).tolist() == [0, 5, 9]
  with refuses("drift"):
    drift.predicted_bins(_inputs(target=data.Labels(("a", "b", "c"))))


@pytest.mark.slow
def test_noise_has_the_scale_of_its_epsilon_and_covers_all_bins():
  """Two histograms under replace_one: each gets half of epsilon, sensitivity 2."""
  bins = [Bins("a", num_classes=500), Bins("b", num_classes=500)]
  counts = {"a": np.full(500, 10), "b": np.full(500, 20)}
  noisy, scale = drift.noisy_counts(counts, bins, epsilon=1.0, relation="replace_one")
  assert scale == 2 / (1.0 / 2)
  noise = np.concatenate([np.array(noisy["a"]) - 10, np.array(noisy["b"]) - 20])
  # Mean absolute value of 1,000 Laplace numbers: scale +- scale / sqrt(1000).
  assert abs(np.abs(noise).mean() - scale) < 5 * scale / math.sqrt(1000)
  # Laplace, not Gaussian: kurtosis 6 - 3 (a normal law has 0).
  assert np.mean(noise**4) / np.mean(noise**2) ** 2 > 4
  again, _ = drift.noisy_counts(counts, bins, epsilon=1.0, relation="replace_one")
  assert again["a"] != noisy["a"]
  _, scale = drift.noisy_counts(counts, bins, epsilon=1.0, relation="add_or_remove_one")
  assert scale == 2.0


# --- references


def _bins(run):
  return [drift.predicted_bins(run.inputs), drift.bins_of("mean", run.inputs)]


def test_exact_training_counts_are_refused_unless_they_are_asked_for(
  runs, tmp_path, capsys
):
  bins = _bins(runs[0])
  with ServiceJournal(tmp_path) as journal:
    with refuses("reference"):
      references.make("training", runs[0], bins, lambda: journal)
    with refuses("reference"):
      references.make("training", runs[0], bins, lambda: journal, epsilon=1.0, exact=True)
    with refuses("reference_epsilon"):
      references.make("stream", runs[0], bins, lambda: journal, epsilon=1.0)
    with refuses("reference"):
      references.make("train", runs[0], bins, lambda: journal)
    exact = references.make("training", runs[0], bins, lambda: journal, exact=True)
  assert "does not hold" in capsys.readouterr().err
  train = data.load("digits")[0].x[:200]
  answers = runs[0].classes(runs[0](train))
  assert exact.counts["predicted"] == np.bincount(answers, minlength=10).tolist()
  assert sum(exact.counts["mean"]) == 200


def test_a_noisy_reference_is_charged_once_and_before_its_noise(runs, tmp_path):
  bins = _bins(runs[0])
  with ServiceJournal(tmp_path) as journal:
    first = references.make("training", runs[0], bins, lambda: journal, epsilon=0.5)
  assert first.source == "noised" and first.epsilon == 0.5 and first.scale == 2 / 0.5
  with ServiceJournal(tmp_path) as journal:
    kinds = [line["kind"] for line in journal.lines]
    assert kinds == ["reference_charge", "reference"]
    assert journal.lines[0]["neighboring_relation"] == "add_or_remove_one"
    again = references.make("training", runs[0], bins, lambda: journal, epsilon=0.5)
  # A restart takes the same noise: a second draw would be a second release.
  assert again.counts == first.counts and again.epsilon == 0.5
  with ServiceJournal(tmp_path) as journal:
    # Other bins, or another model, are another release.
    other = references.make("training", runs[0], bins[:1], lambda: journal, epsilon=0.25)
  assert other.epsilon == 0.75
  with ServiceJournal(tmp_path) as journal:
    assert (
      references.make("training", runs[1], bins, lambda: journal, epsilon=0.5).epsilon
      == 0.5
    )


def test_counts_over_other_edges_are_of_other_bins(runs, tmp_path):
  """As many bins of one name, once for dark and once for bright images: each PSI was wrong."""
  dark, bright = (drift.bins_of(f"mean:{edge}", runs[0].inputs) for edge in (0.2, 0.6))
  with ServiceJournal(tmp_path) as journal:
    references.make("training", runs[0], [dark], lambda: journal, epsilon=0.5)
  with ServiceJournal(tmp_path) as journal:
    assert (
      references.make("training", runs[0], [bright], lambda: journal, epsilon=0.5).epsilon
      == 1.0
    )
  x = np.full((3, 8, 8, 1), 0.4, np.float32)
  counts = drift.exact_counts([dark, bright], x, np.zeros(3))
  assert [count.tolist() for count in counts.values()] == [[0, 3], [3, 0]]


def test_a_charge_without_its_noise_is_spent(runs, tmp_path):
  """Killed between the charge and the noise: nobody knows what was drawn."""
  bins = _bins(runs[0])
  with ServiceJournal(tmp_path) as journal:
    references.make("training", runs[0], bins, lambda: journal, epsilon=0.5)
    path = journal.path
  path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
  with ServiceJournal(tmp_path) as journal:
    assert (
      references.make("training", runs[0], bins, lambda: journal, epsilon=0.5).epsilon
      == 1.0
    )


def test_references_of_users_are_refused(runs, tmp_path):
  run = runs[0]
  before = run.result
  try:
    run.result = before | {"unit": "user"}
    with (
      ServiceJournal(tmp_path) as journal,
      refuses("reference"),
    ):
      references.make("training", run, _bins(run), lambda: journal, epsilon=1.0)
  finally:
    run.result = before


def test_public_data_and_released_counts_are_free(runs, tmp_path):
  bins = _bins(runs[0])
  path = tmp_path / "released.json"
  path.write_text(
    '{"predicted": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "mean": [1,1,1,1,1,1,1,1,1,1]}'
  )
  images = tmp_path / "images.npz"
  rows = {"x": np.full((70, 8, 8, 1), 0.5, np.float32), "y": np.arange(70) % 10}
  halves = {f"{n}_{part}": v for n, v in rows.items() for part in ("train", "test")}
  np.savez(images, num_classes=10, **halves)
  public = references.make(f"public:{images}", runs[0], bins, None)
  held = references.make(str(path), runs[0], bins, None)
  assert references.make("stream", runs[0], bins, None) is None
  path.write_text('{"predicted": [1, 2]}')
  for wrong in (str(path), str(tmp_path / "missing.json"), "public:missing"):
    with refuses("reference", value=wrong):
      references.make(wrong, runs[0], bins, None)
  assert (public.epsilon, held.epsilon) == (0.0, 0.0)
  assert sum(public.counts["predicted"]) == 70 and held.counts["predicted"][9] == 10


def test_a_runs_own_data_are_no_public_reference(runs):
  """Its exact training rows were counted, and /health said that they had cost nothing."""
  bins = _bins(runs[0])
  for name in ("public:digits", "public:digits:1.0"):
    with refuses("reference", value=name):
      references.make(name, runs[0], bins, None)

"""Evaluation: equal to the plain formula, masked, compiled once, and honest about NaN."""

import itertools

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import special, stats
from sklearn import calibration
from sklearn import metrics as oracle

from dpjax import data, metrics
from dpjax.types import Example
from dpjax.validate import Verbatim
from tests.refuses import refuses


def linear(params, x):
  return x.reshape(x.shape[0], -1) @ params


def make(n, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(n, 2, 2, 1))
  return data.from_arrays(x, rng.integers(0, 3, n), num_classes=3)


PARAMS = jax.random.normal(jax.random.key(0), (4, 3))


def test_what_holds_no_labels_is_named():
  with refuses("dataset"):
    metrics.accuracy(linear, PARAMS, (np.ones((2, 4)), np.ones(2, int)))


def test_types_are_never_promoted_by_themselves():
  free = metrics.accuracy(linear, PARAMS, make(9))
  with jax.numpy_dtype_promotion("strict"):
    assert metrics.accuracy(linear, PARAMS, make(9)) == free


@hypothesis.given(st.integers(1, 20), st.sampled_from([1, 3, 8]))
@hypothesis.settings(max_examples=25)
def test_p07_padded_batches_equal_the_plain_formula(n, batch_size):
  d = make(n, seed=n)
  # In NumPy, which compiles nothing for each n.
  logits = linear(np.asarray(PARAMS), np.asarray(d.x)).astype(np.float64)
  log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  result = metrics.evaluate(linear, PARAMS, d, batch_size=batch_size)
  assert result["accuracy"] == np.mean(logits.argmax(axis=1) == d.y)
  np.testing.assert_allclose(result["loss"], -np.mean(log_probs[range(n), d.y]), rtol=1e-5)
  assert metrics.accuracy(linear, PARAMS, d, batch_size=batch_size) == result["accuracy"]


def test_p33_traced_once_over_sizes_repeats_and_both_functions():
  traces = []

  def counted(params, x):
    traces.append(x.shape)
    return linear(params, x)

  for n in (3, 8, 20):
    metrics.accuracy(counted, PARAMS, make(n), batch_size=8)
    metrics.evaluate(counted, PARAMS * 2, make(n, seed=1), batch_size=8)
  assert traces == [(8, 2, 2, 1)]


def test_p33_a_bound_method_is_one_apply():
  class Model:
    traces = 0

    def apply(self, params, x):
      self.traces += 1
      return linear(params, x)

  model = Model()
  for _ in range(3):
    metrics.accuracy(model.apply, PARAMS, make(5))
  assert model.traces == 1


def test_p07_padding_is_masked_even_where_the_model_fails_on_it():
  """Rows of zeros make this model NaN; the real rows must not notice."""

  def normalised(params, x):
    return (x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ params

  d = Example(np.eye(3, dtype=np.float32), np.array([0, 1, 2]))
  result = metrics.evaluate(normalised, 5 * jnp.eye(3), d, batch_size=8)
  assert result["accuracy"] == 1.0 and np.isfinite(result["loss"])


def test_nan_logits_count_as_wrong_although_argmax_says_zero():
  broken = lambda params, x: jnp.full((x.shape[0], 3), jnp.nan) + params
  d = Example(np.zeros((4, 1), np.float32), np.zeros(4, int))
  result = metrics.evaluate(broken, 0.0, d)
  assert result["accuracy"] == 0.0 and np.isnan(result["loss"])


def test_bfloat16_logits_are_summed_in_float32():
  d = Example(np.zeros((400, 1), np.float32), np.zeros(400, int))
  half = lambda params, x: jnp.zeros((x.shape[0], 1000), jnp.bfloat16) + params
  loss = metrics.evaluate(half, jnp.bfloat16(0), d)["loss"]
  np.testing.assert_allclose(loss, np.log(1000), rtol=1e-6)


@pytest.mark.slow
@hypothesis.given(st.integers(0, 2**31 - 1), st.integers(1, 40), st.integers(2, 5))
@hypothesis.settings(max_examples=20)
def test_confusion_counts_each_class_against_the_rest(seed, n, num_classes):
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(n, num_classes)).astype(np.float32)
  logits[rng.random(n) < 0.2, 0] = np.nan
  labels = rng.integers(num_classes, size=n)
  data = Example(logits, labels)
  counted = metrics.confusion(lambda params, x: x, None, data, batch_size=7)
  answers = [-1 if np.isnan(row).any() else int(np.argmax(row)) for row in logits]
  for k, found in enumerate(counted.one_against_rest()):
    pairs = [(label == k, answer == k) for label, answer in zip(labels, answers)]
    wanted = [pairs.count((True, True)), pairs.count((False, False))]
    wanted += [pairs.count((False, True)), pairs.count((True, False))]
    assert found.tolist() == wanted
  errors = []
  for row, label, answer in zip(logits.astype(np.float64), labels, answers):
    shares = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    wanted = np.arange(num_classes) == label
    errors.append(2.0 if answer < 0 else np.sum((shares - wanted) ** 2))
  assert counted.squared_error == pytest.approx(np.mean(errors), rel=1e-5)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_scores_by_class_are_those_of_scikit_learn(num_classes, seed):
  """With ties among the scores, and unequal classes."""
  rng = np.random.default_rng(seed)
  x = rng.integers(-2, 3, (80, 4)).astype(np.float32)
  y = np.minimum(rng.geometric(0.6, 80) - 1, num_classes - 1)
  y[:num_classes] = range(num_classes)
  weights = rng.integers(-2, 3, (4, num_classes)).astype(np.float32) / 4
  rows = data.from_arrays(x, y, num_classes=num_classes)
  found = metrics.evaluate_classes(linear, weights, rows, batch_size=32)
  logits = x.astype(np.float64) @ weights
  shares = special.softmax(logits, axis=1)  # keeps ties
  said = logits.argmax(axis=1)
  which = [1] if num_classes == 2 else range(num_classes)
  for name, score in (
    ("auroc", oracle.roc_auc_score),
    ("average_precision", oracle.average_precision_score),
  ):
    wanted = np.mean([score(y == k, shares[:, k]) for k in which])
    assert found[name] == pytest.approx(wanted, abs=1e-9), name
  assert found["balanced_accuracy"] == pytest.approx(
    oracle.balanced_accuracy_score(y, said)
  )
  wanted = oracle.recall_score(y, said, average=None)
  np.testing.assert_allclose(found["recall_by_class"], wanted)
  np.testing.assert_array_equal(found["confusion"], oracle.confusion_matrix(y, said))
  assert found["largest_class"] == np.bincount(y).max() / 80
  assert found["loss"] == pytest.approx(oracle.log_loss(y, shares), rel=1e-6)
  always = np.tile(np.bincount(y) / 80, (80, 1))
  assert found["class_shares_loss"] == pytest.approx(oracle.log_loss(y, always))
  low, high = found["auroc_interval"]
  assert 0 < low < found["auroc"] < high < 1
  loss = metrics.evaluate(linear, weights, rows)["loss"]
  assert loss == pytest.approx(oracle.log_loss(y, shares), rel=1e-5)


def _rated(healthy, ill):
  """Ratings 1, 2, ... of so many, as (scores, positive)."""
  scores = np.concatenate(
    [np.repeat(np.arange(len(counts)), counts) for counts in (healthy, ill)]
  )
  return scores, np.arange(sum(healthy) + sum(ill)) >= sum(healthy)


def test_the_interval_of_an_auroc_has_the_published_standard_error():
  """CT images of Hanley and McNeil 1982: .8932, standard error .0307 (roctab of Stata)."""
  rated = _rated([33, 6, 6, 11, 2], [3, 2, 2, 11, 33])
  area = metrics.auroc(*rated)
  assert area == pytest.approx(0.8932, abs=5e-5)
  low, high = special.logit(metrics.auroc_interval(*rated))
  std = (high - low) / 2 / stats.t.ppf(0.975, 50) * area * (1 - area)
  assert std == pytest.approx(0.0307, abs=5e-5)
  assert (low + high) / 2 == pytest.approx(special.logit(area))


@pytest.mark.parametrize(
  ("healthy", "ill", "wanted"),
  [
    ([10], [0, 20], [0.025**0.1, 1]),  # ten pairs without a common example
    ([0, 10], [20], [0, 1 - 0.025**0.1]),
    ([4], [4], [0.025**0.25 / 2, 1 - 0.025**0.25 / 2]),
    ([5], [0, 1], [0, 1]),
  ],
)
def test_the_interval_has_a_width_where_all_pairs_compare_alike(healthy, ill, wanted):
  assert metrics.auroc_interval(*_rated(healthy, ill)) == pytest.approx(wanted)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("shift", [0.5, 2.5])
def test_the_interval_of_an_auroc_holds_it_in_95_percent(num_classes, shift):
  """Scores of a class are normal, and that of its own examples is higher by `shift`."""
  rng = np.random.default_rng(1)
  truth, met = special.ndtr(shift / np.sqrt(2)), []
  for _ in range(200):
    y = np.repeat(np.arange(num_classes), 15)
    x = rng.normal(size=(len(y), num_classes)) + shift * np.eye(num_classes)[y]
    columns = [(x[:, k], y == k) for k in range(num_classes)]
    low, high = metrics._auroc_interval(columns if num_classes > 2 else columns[1:])
    met.append(low <= truth <= high)
  assert 0.91 <= np.mean(met) <= 0.99


@pytest.mark.parametrize("few", [2, 3, 5, 10])
@pytest.mark.parametrize("share", [0.7, 0.95])
def test_the_interval_of_an_auroc_holds_it_of_few_examples(few, share):
  # Of five positives and a normal quantile it missed the AUROC in up to 18 %.
  rng = np.random.default_rng(3)
  positive = np.arange(60) < few
  scores = rng.normal(size=(60, 60)) + np.sqrt(2) * special.ndtri(share) * positive
  met = [
    low <= share <= high
    for low, high in (metrics.auroc_interval(row, positive) for row in scores)
  ]
  assert np.mean(met) >= 0.95


@pytest.mark.parametrize("seed", range(5))
def test_the_calibration_error_is_that_of_scikit_learns_curve(seed):
  rng = np.random.default_rng(seed)
  shares = rng.dirichlet([0.5] * 3, 200)
  y = rng.integers(0, 3, 200)
  sure, right = shares.max(axis=1), shares.argmax(axis=1) == y
  truth, said = calibration.calibration_curve(right, sure, n_bins=15)
  counts = np.histogram(sure, np.linspace(0, 1, 16))[0]
  wanted = np.sum(np.abs(truth - said) * counts[counts > 0]) / 200
  assert metrics.calibration_error(shares, y) == pytest.approx(wanted, abs=1e-12)
  assert metrics.calibration_error(np.eye(3)[y], y) == 0


def test_a_missing_class_and_nan_logits_are_not_hidden():
  rows = data.from_arrays(np.eye(2), [0, 0], num_classes=2)
  alone = metrics.evaluate_classes(lambda p, x: x, None, rows)
  assert np.isnan(alone["auroc"]) and np.isnan(alone["average_precision"])
  assert alone["auroc_interval"] == [0, 1] and alone["class_shares_loss"] == 0
  assert alone["balanced_accuracy"] == 0.5 and np.isnan(alone["recall_by_class"][1])
  rows = data.from_arrays(np.eye(2), [0, 1], num_classes=2)
  broken = metrics.evaluate_classes(
    lambda p, x: jnp.asarray(x).at[0].set(jnp.nan), None, rows
  )
  assert broken["recall_by_class"] == [0.0, 1.0] and np.isnan(broken["auroc"])
  assert np.isnan(broken["calibration_error"]) and np.sum(broken["confusion"]) == 1


@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda: metrics.auroc([], []), "scores"),
    (lambda: metrics.auroc_interval([0.5], [True, False]), "scores"),
    (lambda: metrics.average_precision([0.5], [True, False]), "scores"),
    (lambda: metrics.calibration_error([0.5], [1]), "shares"),
    (lambda: metrics.calibration_error([[0.5, 0.5]], [1], num_bins=0), "num_bins"),
  ],
)
def test_wrong_scores_are_refused(call, field):
  with refuses(field):
    call()


def test_tokens_are_evaluated_too():
  d = data.from_arrays(np.array([[1, 0], [2, 0]]), [1, 0], num_classes=3)
  assert metrics.accuracy(lambda table, x: table[x[:, 0]], jnp.eye(3), d) == 0.5


def test_only_aggregates_come_out():
  result = metrics.evaluate(linear, PARAMS, make(7))
  assert set(result) == {"accuracy", "loss"}
  assert all(type(value) is float for value in result.values())


@pytest.mark.parametrize(
  ("dataset", "field"),
  [
    (Example(np.zeros((0, 2)), np.zeros(0, int)), "dataset.y"),
    (Example(np.zeros((2, 2)), np.zeros(3, int)), "dataset.x.shape"),
    (Example(np.zeros((2, 2)), np.zeros(2)), "dataset.y"),
    (Example(np.zeros((2, 2)), np.zeros((2, 1), int)), "dataset.y"),
  ],
)
def test_data_that_cannot_be_evaluated(dataset, field):
  with refuses(field):
    metrics.accuracy(linear, PARAMS, dataset)


def test_wrong_outputs_and_batch_size():
  with refuses("apply"):
    metrics.accuracy(lambda params, x: x, None, make(3), batch_size=4)
  with refuses("batch_size", value=0):
    metrics.accuracy(linear, PARAMS, make(3), batch_size=0)


@pytest.mark.parametrize(
  "score", ["accuracy", "evaluate_classes", "evaluate_regression", "evaluate_labels"]
)
def test_a_model_in_place_of_its_apply_is_refused(score):
  with refuses("apply", value=Verbatim("Dense")):
    getattr(metrics, score)(nn.Dense(3), PARAMS, make(3))


def test_no_refusal_shows_how_many_rows_there_are():
  for wrong in (np.zeros(4321), np.zeros((4321, 2), int)):
    with refuses("dataset.y") as caught:
      metrics.accuracy(linear, PARAMS, Example(np.zeros((4321, 2)), wrong))
    assert "4321" not in str(caught.value)


def test_an_unhashable_apply_is_refused():
  class Callable:
    __hash__ = None

    def __call__(self, params, x):
      return linear(params, x)

  with refuses("apply"):
    metrics.accuracy(Callable(), PARAMS, make(3))


def test_next_token_metrics_against_a_loop_and_padding_is_left_out():
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, 5, (7, 6))
  tokens[2, 3:] = 0
  table = jnp.asarray(rng.normal(size=(5, 5)), jnp.float32)
  apply = lambda params, x: params[x]
  data = Example(x=tokens, y=np.zeros(7, int))
  log_probs = np.asarray(jax.nn.log_softmax(table))
  pairs = [(a, b) for row in tokens for a, b in itertools.pairwise(row) if b != 0]
  losses = [-log_probs[a, b] for a, b in pairs]
  hits = [log_probs[a].argmax() == b for a, b in pairs]
  got = metrics.evaluate_next_token(apply, table, data, batch_size=3)
  assert got["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
  assert got["accuracy"] == pytest.approx(np.mean(hits))
  assert got["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
  blocks = Example(x=np.pad(tokens, ((0, 1), (0, 0))).reshape(4, 2, 6), y=np.zeros(4, int))
  assert metrics.evaluate_next_token(apply, table, blocks, batch_size=3) == pytest.approx(
    got
  )

"""The three leakage scores: exact where they must be, falling with the batch, above their null."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import data
from dpjax.attacks.leakage import dense_leakage, distance_correlation, recovered_leakage
from dpjax.attacks.views import gradient_view
from dpjax.types import Example
from tests.refuses import refuses


def _of_batches(net, digits, batch, count=24):
  """First-layer gradients [N, d, m] of a net on digits, and the batches [N, B, d]."""
  x, y = digits
  view = jax.jit(gradient_view(net.loss, net.params))
  rows = (
    np.random.default_rng(batch).permutation(len(x))[: count * batch].reshape(count, batch)
  )
  seen = [view(Example(x[row], y[row])) for row in rows]
  return np.stack([g["params"]["dense_0"]["kernel"] for g in seen]), np.asarray(x[rows])


@pytest.fixture(scope="module")
def digits(net):
  """Middle 4x4 pixels of the embedded digits, three classes."""
  train, _ = data.load("digits")
  x, y = np.asarray(train.x), np.asarray(train.y)
  kept = y < net.classes
  return jnp.asarray(x[kept, 2:6, 2:6].reshape(-1, *net.shape)), jnp.asarray(y[kept])


@pytest.mark.long
def test_one_record_is_shown_exactly_and_a_batch_less_and_less(net, digits):
  found = {b: dense_leakage(*_of_batches(net, digits, b)) for b in (1, 4, 16)}
  assert found[1].score == pytest.approx(1.0, abs=1e-5)
  # All of these records are found, but others, that were not tried, may not be.
  low, high = found[1].interval
  assert 0.5 < low < 0.99 and high == pytest.approx(1.0, abs=1e-5)
  assert 1 > found[4].score > found[16].score
  for leak in found.values():
    assert leak.p_value < 0.01 and leak.score > leak.null.max()
    low, high = leak.interval
    assert low <= leak.score <= high


def test_the_interval_of_a_mean_score_holds_it_of_three_records():
  # Percentiles of a bootstrap missed the mean over many records in a quarter of cases.
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3_000, 30))
  recovered = x + rng.normal(size=x.shape)
  whole = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(x, recovered)])
  met = []
  for start in range(0, 300, 3):
    three = slice(start, start + 3)
    low, high = recovered_leakage(x[three], recovered[three], num_null=1).interval
    met.append(low <= whole <= high)
  assert np.mean(met) >= 0.95


def test_the_interval_allows_for_records_that_were_not_seen():
  # Of eight, all are found in two of five cases; Student's interval then had no length.
  rng = np.random.default_rng(0)
  met = []
  for _ in range(60):
    x = rng.normal(size=(8, 30))
    found = np.where(rng.random((8, 1)) < 0.9, x, rng.normal(size=x.shape))
    low, high = recovered_leakage(x, found, num_null=1).interval
    met.append(low <= 0.9 <= high)
  assert np.mean(met) >= 0.95


@pytest.mark.slow
def test_pairs_that_do_not_belong_together_are_no_leak(net, digits):
  kernels, x = _of_batches(net, digits, 1)
  other = dense_leakage(kernels, np.roll(x, 1, axis=0))
  assert other.p_value > 0.05 and other.score < 0.95


def test_reconstructions_are_scored_by_their_correlation(net, digits):
  x = np.asarray(digits[0][:30])
  rng = np.random.default_rng(0)
  half = x + x.std() * rng.standard_normal(x.shape)
  none = rng.standard_normal(x.shape)
  scores = [recovered_leakage(x, found) for found in (x, half, none)]
  assert scores[0].score == pytest.approx(1.0) and scores[0].p_value < 0.01
  assert 0.4 < scores[1].score < 0.95 and scores[1].p_value < 0.01
  assert abs(scores[2].score) < 0.25 and scores[2].p_value > 0.01


def test_distance_correlation_sees_what_correlation_does_not():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((60, 2))
  squares, alone = x**2, rng.standard_normal((60, 2))
  assert distance_correlation(squares, x).p_value < 0.02
  assert distance_correlation(alone, x).p_value > 0.05


def test_the_corrected_score_is_around_zero_in_many_dimensions():
  """The plain one would be near 1 for independent data of 500 dimensions."""
  rng = np.random.default_rng(1)
  leak = distance_correlation(rng.standard_normal((30, 500)), rng.random((30, 400)))
  assert abs(leak.score) < 0.3 and leak.interval is None
  assert abs(leak.null.mean()) < 0.1 and leak.null.shape == (200,)


def test_distance_correlation_equals_its_definition():
  """U-centred sums written out for one small table."""
  rng = np.random.default_rng(2)
  a, b = rng.standard_normal((6, 2)), rng.standard_normal((6, 3))

  def centred(rows):
    n = len(rows)
    away = np.array([[np.linalg.norm(p - q) for q in rows] for p in rows])
    table = np.zeros((n, n))
    for i in range(n):
      for j in range(n):
        if i != j:
          mean = away[i].sum() / (n - 2) + away[:, j].sum() / (n - 2)
          table[i, j] = away[i, j] - mean + away.sum() / ((n - 1) * (n - 2))
    return table

  first, second = centred(a), centred(b)
  ratio = (first * second).sum() / np.sqrt((first**2).sum() * (second**2).sum())
  expected = np.sign(ratio) * np.sqrt(abs(ratio))
  assert distance_correlation(a, b, num_null=1).score == pytest.approx(expected)


def test_errors_are_one_line():
  x = np.random.default_rng(0).random((4, 2, 5))
  cases = [
    (lambda: dense_leakage(np.ones((4, 6, 3)), x), "kernels"),
    (lambda: dense_leakage(np.ones((2, 5, 3)), x[:2]), "records"),
    (lambda: dense_leakage(np.full((4, 5, 3), np.nan), x), "kernels"),
    (lambda: dense_leakage(np.ones((4, 5, 3)), x, num_null=0), "num_null"),
    (lambda: recovered_leakage(x, x[:3]), "recovered"),
    (lambda: distance_correlation(x[:3], x[:3]), "gradients"),
    (lambda: distance_correlation(np.ones((5, 2)), np.eye(5)), "gradients"),
  ]
  for call, field in cases:
    with refuses(field) as caught:
      call()
    assert "\n" not in str(caught.value)


@pytest.mark.cases(long=["8"])
@pytest.mark.parametrize("count", [3, 8])
def test_p_values_of_pairs_that_do_not_belong_together_are_p_values(count):
  """Of 3 records there are two derangements: with them alone a third of all would be 0.01."""
  rng, found = np.random.default_rng(0), []
  for seed in range(100):
    a, b = rng.normal(size=(2, count, 9))
    found.append(recovered_leakage(a, b, num_null=99, seed=seed).p_value)
  for level in (0.05, 0.2):  # four standard deviations
    most = level + 4 * np.sqrt(level * (1 - level) / len(found))
    assert np.mean(np.array(found) <= level) <= most


def test_scores_do_not_depend_on_the_scale():
  rng = np.random.default_rng(0)
  x, kernels = rng.normal(size=(6, 1, 8)), rng.normal(size=(6, 8, 3))
  plain = dense_leakage(kernels, x, num_null=9)
  for scale in (1e-200, 1e200):
    other = dense_leakage(scale * kernels, x, num_null=9)
    assert other.score == pytest.approx(plain.score) and other.p_value == plain.p_value
    far = distance_correlation(scale * kernels, x, num_null=9).score
    assert far == pytest.approx(distance_correlation(kernels, x, num_null=9).score)

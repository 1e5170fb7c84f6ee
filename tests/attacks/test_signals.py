"""Signals: one currency, whatever a user has; digits that survive; bad input in one line."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from dpjax.attacks import signals
from dpjax.types import Example
from tests.refuses import refuses

_RNG = np.random.default_rng(0)
_LOGITS = 4 * _RNG.standard_normal((3, 50, 5))  # [S, n, K]
_LABELS = _RNG.integers(0, 5, 50)


def _own(table):
  return np.take_along_axis(table, _LABELS[None, :, None], axis=-1)[..., 0]


def test_logits_confidences_and_losses_agree():
  p = _own(special.softmax(_LOGITS, axis=-1))
  expected = np.log(p / (1 - p))
  np.testing.assert_allclose(signals.log_odds(p), expected)
  np.testing.assert_allclose(signals.log_odds_of_losses(-np.log(p)), expected)
  np.testing.assert_allclose(signals.log_odds_of_logits(_LOGITS, _LABELS), expected)


def test_the_digits_near_one_survive_where_they_are_given():
  """1 - 1e-30 is 1 in floating point; its loss and its logits are not those of 1."""
  assert signals.log_odds_of_losses([1e-30])[0] == pytest.approx(np.log(1e30))
  found = signals.log_odds_of_logits([[69.0, 0.0]], [0])
  assert found[0] == pytest.approx(69.0)


def test_ends_are_finite_and_equal():
  ends = signals.log_odds([0.0, 1.0])
  np.testing.assert_allclose(ends, [-signals.LARGEST, signals.LARGEST])
  np.testing.assert_allclose(signals.log_odds_of_losses([np.inf, 0.0]), ends)
  np.testing.assert_allclose(
    signals.log_odds_of_logits([[-1e9, 0.0], [0, -np.inf]], [0, 0]), ends
  )


def test_a_model_is_asked_once_about_each_record_whatever_the_batch():
  x = _RNG.standard_normal((7, 3)).astype(np.float32)
  weights = _RNG.standard_normal((3, 4)).astype(np.float32)
  y, apply = np.arange(7) % 4, lambda params, x: x @ params
  expected = signals.log_odds_of_logits(x @ weights, y)
  for size in (1, 3, 7, 500):
    found = signals.log_odds_of_model(apply, batch_size=size)(weights, Example(x, y))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_saturated_model_is_told_apart_by_its_logits():
  apply = lambda params, x: jnp.stack([x[:, 0], jnp.zeros(len(x))], axis=1)
  records = Example(np.array([[40.0], [50.0]], np.float32), np.array([0, 0]))
  found = signals.log_odds_of_model(apply)(None, records)
  np.testing.assert_allclose(found, [40, 50])


def test_taylor_confidences_against_a_plain_loop():
  """Margin .6 and four terms, as RMIA's authors have it for CIFAR-10 (temperature 2)."""
  found = signals.soft_margin_taylor(_LOGITS[0], _LABELS)
  for row, label, value in zip(_LOGITS[0] / 2, _LABELS, found):
    series = lambda z: 1 + z + z**2 / 2 + z**3 / 6
    others = sum(series(z) for k, z in enumerate(row) if k != label)
    mine = series(row[label] - 0.6)
    assert value == pytest.approx(np.clip(mine / (mine + others), 1e-45, 1))


def test_a_label_that_the_model_does_not_know_is_not_scored():
  records = Example(np.ones((2, 3), np.float32), np.array([2, 3]))
  found = signals.log_odds_of_model(lambda params, x: x)(None, records)
  assert np.isfinite(found[0]) and np.isnan(found[1])
  none = Example(np.ones((0, 3), np.float32), np.zeros(0, int))
  assert signals.log_odds_of_model(lambda params, x: x)(None, none).shape == (0,)


@pytest.mark.cases(long=[8, 9, 10])
@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda: signals.log_odds([0.5, 1.1]), "confidences"),
    (lambda: signals.log_odds([0.5, np.nan]), "confidences"),
    (lambda: signals.log_odds("high"), "confidences"),
    (lambda: signals.log_odds([[0.5], [0.1, 0.2]]), "confidences"),
    (lambda: signals.log_odds_of_losses([-1.0]), "losses"),
    (lambda: signals.log_odds_of_logits([[1.0, 2.0]], [2]), "labels"),
    (lambda: signals.log_odds_of_logits([[1.0, 2.0]], [0.0]), "labels"),
    (
      lambda: signals.log_odds_of_logits([[1.0]], [0]),
      "logits",
    ),
    (lambda: signals.log_odds_of_logits([[1.0, 2.0]], [0, 1]), "logits"),
    (lambda: signals.soft_margin_taylor([[1.0, 2.0]], [0], temperature=0), "temperature"),
    (
      lambda: signals.log_odds_of_model(lambda params, x: x)(
        0, Example(np.ones((2, 1)), [0, 0])
      ),
      "apply",
    ),
  ],
)
def test_bad_input_is_one_line(call, field):
  with refuses(field):
    call()

"""Sums by class: exact sums, one record's move, the law of the noise, what counts as zero."""

import functools

import jax
import numpy as np
import pytest
from scipy import stats

from dpjax import accounting
from dpjax.auditing.games import game
from dpjax.auditing.games import mechanisms as games
from dpjax.mechanisms import ClassSums
from tests.adversary import twins
from tests.refuses import refuses

_UNIT = 2.0**-38


def _rows(count=7, width=5):
  return np.random.default_rng(0).normal(size=(count, width)) / 3


def test_sums_are_those_of_a_loop_over_clipped_rows_in_any_chunks():
  rows = _rows() * 3
  labels = np.array([0, 2, 2, 0, 1, 2, 0])
  mechanism = ClassSums(1.0, 4)
  exact = mechanism.exact([rows], labels)
  wanted = np.zeros((4, 5))
  for row, label in zip(rows, labels):
    wanted[label] += row / max(1.0, np.linalg.norm(row))
  assert np.allclose(exact * _UNIT, wanted, atol=7 * 2.0**-18)
  # Bit by bit, whatever stands beside a record.
  assert (mechanism.exact([rows[:3], rows[3:4], rows[4:]], labels) == exact).all()
  turned = mechanism.exact([rows[::-1]], labels[::-1])
  assert (turned == exact).all()


@pytest.mark.parametrize("size", [0.0, 1e-300, 0.3, 1.0, 1e300])
def test_no_record_moves_the_sums_by_more_than_the_bound(size):
  rng = np.random.default_rng(1)
  mechanism = ClassSums(1.0, 3)
  rows = _rows()
  labels = np.array([0, 1, 2, 0, 1, 2, 0])
  before = mechanism.exact([rows], labels)
  for label in (0, 1, 2, -1, 99):
    more = size * rng.normal(size=(1, 5))
    after = mechanism.exact([np.concatenate([rows, more])], np.append(labels, label))
    moved = np.linalg.norm((after - before) * _UNIT)
    assert moved <= 1.0
    # A long record of a known class fills the bound.
    if size > 1 and 0 <= label < 3:
      assert moved > 1 - 1e-4
  # A record and its opposite in one class reach 2, the bound of replace_one.
  long = np.full((1, 5), 9.0)
  apart = mechanism.exact([long], np.array([1])) - mechanism.exact([-long], np.array([1]))
  swap = ClassSums(1.0, 3, neighboring_relation="replace_one")
  assert 2 - 1e-4 < np.linalg.norm(apart * _UNIT) <= swap.l2_sensitivity == 2.0


def test_the_noise_is_gaussian_of_the_stated_std_and_not_of_another():
  mechanism = ClassSums(2.0, 2, feature_norm=3.0)
  rows = np.zeros((1, 4000))
  released = mechanism(jax.random.key(3), rows, np.array([0]))
  noise = released.ravel() / mechanism.std
  assert mechanism.std == 6.0
  assert stats.kstest(noise, "norm").pvalue > 1e-3
  assert stats.kstest(noise / 0.9, "norm").pvalue < 1e-6
  other = mechanism(jax.random.key(4), rows, np.array([0]))
  assert np.mean(other != released) > 0.9


def test_the_event_is_that_of_the_relation():
  alone = ClassSums(3.0, 2)
  swap = ClassSums(3.0, 2, neighboring_relation="replace_one")
  assert alone.event() == accounting.gaussian_event(3.0)
  epsilon = lambda event, relation: accounting.epsilon(
    event, delta=1e-5, neighboring_relation=relation
  )
  # Both have noise of three sensitivities.
  assert epsilon(swap.event("replace_one"), "replace_one") == pytest.approx(
    epsilon(alone.event(), "add_or_remove_one"), rel=1e-6
  )
  with refuses("neighboring_relation"):
    swap.event()


@pytest.mark.slow
def test_a_tenth_of_the_noise_is_refuted():
  tenth = functools.partial(twins.BrokenMechanism, ClassSums, "ClassSums")
  played = games.GAMES["ClassSums"](
    lambda **settings: tenth(twins.PLANTS["noise"], settings)
  )[0]
  assert any(result.refuted for result in game.play(played, num_draws=3000))
  honest = games.GAMES["ClassSums"](ClassSums)[0]
  assert not any(result.refuted for result in game.play(honest, num_draws=3000))


def test_nan_and_nobody_count_as_zero():
  mechanism = ClassSums(1.0, 2)
  rows = np.array([[0.5, 0.0], [np.nan, 0.1], [np.inf, 0.0]])
  exact = mechanism.exact([rows], np.array([0, 0, 1]))
  assert np.allclose(exact * _UNIT, [[0.5, 0.0], [0.0, 0.0]], atol=1e-5)
  nobody = mechanism(jax.random.key(0), np.zeros((0, 3)), np.zeros(0, np.int32))
  assert nobody.shape == (2, 3) and np.any(nobody)


@pytest.mark.parametrize(
  "rows, labels, field",
  [
    (np.zeros((2, 3)), np.zeros(3, np.int32), "rows"),
    (np.zeros((3, 3)), np.zeros(2, np.int32), "rows"),
    (np.zeros(3), np.zeros(3, np.int32), "rows"),
    (np.zeros((2, 0)), np.zeros(2, np.int32), "rows"),
    (np.zeros((2, 3)), np.zeros(2), "labels"),
  ],
)
def test_other_shapes_are_refused_in_one_line(rows, labels, field):
  with refuses(field):
    ClassSums(1.0, 2)(jax.random.key(0), rows, labels)

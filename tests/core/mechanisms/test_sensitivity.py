"""Sensitivities: no pair of neighbours exceeds them, and some pair attains them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.accounting.proved import NeighboringRelation
from dpjax.mechanisms.sensitivity import (
  count_sensitivity,
  histogram_sensitivity,
  mean_sensitivity,
  sum_sensitivity,
  vector_sum_sensitivity,
)
from tests.refuses import refuses

_RELATIONS = [relation.value for relation in NeighboringRelation]
_number = st.floats(-100, 100)
_bounds = st.tuples(_number, _number).map(sorted).filter(lambda b: b[1] - b[0] > 1e-3)


def _neighbours(relation, values, new):
  """The last record added, exchanged for `new`, or exchanged for nothing (zero)."""
  if relation == "add_or_remove_one":
    return values, values[:-1]
  return values, [*values[:-1], new if relation == "replace_one" else 0.0]


@pytest.mark.cases(long=["replace_special"])
@pytest.mark.parametrize("relation", _RELATIONS)
@given(
  bounds=_bounds,
  shares=st.lists(st.floats(0, 1), min_size=2, max_size=6),
  new=st.floats(0, 1),
)
def test_p9_no_neighbours_move_a_sum_further(relation, bounds, shares, new):
  low, high = bounds
  scaled = lambda share: min(max(low + share * (high - low), low), high)
  one, other = _neighbours(relation, [scaled(s) for s in shares], scaled(new))
  moved = abs(math.fsum(one) - math.fsum(other))
  bound = sum_sensitivity(low, high, neighboring_relation=relation)
  assert moved <= bound * (1 + 1e-9) + 1e-9
  if relation != "add_or_remove_one":
    mean = mean_sensitivity(low, high, num_records=len(one), neighboring_relation=relation)
    assert mean == pytest.approx(bound / len(one))


@pytest.mark.parametrize("relation", _RELATIONS)
@pytest.mark.parametrize("low, high", [(0, 1), (-3, 1), (2, 5), (-5, -2)])
def test_p9_some_neighbours_attain_the_sum(relation, low, high):
  moves = []
  for old in (low, high):
    for new in (low, high):
      one, other = _neighbours(relation, [0.0, float(old)], float(new))
      moves.append(abs(sum(one) - sum(other)))
  bound = sum_sensitivity(low, high, neighboring_relation=relation)
  assert max(moves) == bound


@pytest.mark.parametrize("relation", _RELATIONS)
def test_p9_histograms_attain_their_bounds(relation):
  moves = []
  for old, new in ((0, 1), (1, 0), (0, 0)):
    counts = np.bincount([0, old], minlength=3)
    if relation == "replace_one":
      other = np.bincount([0, new], minlength=3)
    else:  # an empty record is counted nowhere
      other = np.bincount([0], minlength=3)
    moves.append(counts - other)
  for order, p in (("l1", 1), ("l2", 2)):
    bound = histogram_sensitivity(order, neighboring_relation=relation)
    assert max(np.linalg.norm(move, p) for move in moves) == pytest.approx(bound)


@given(norm=st.floats(1e-3, 1e3), angle=st.floats(0, 2 * math.pi))
def test_p9_replacing_a_vector_moves_a_sum_by_twice_the_norm(norm, angle):
  old = norm * np.array([1.0, 0.0])
  new = norm * np.array([math.cos(angle), math.sin(angle)])
  add = vector_sum_sensitivity(norm)
  replace = vector_sum_sensitivity(norm, neighboring_relation="replace_one")
  assert np.linalg.norm(old) <= add * (1 + 1e-12)
  assert np.linalg.norm(old - new) <= replace * (1 + 1e-12)
  assert np.linalg.norm(old + old) == pytest.approx(replace)


def test_a_count_moves_by_one():
  for relation in _RELATIONS:
    assert count_sensitivity(relation) == 1


def test_the_mean_age_of_document_003_is_not_one_over_n():
  assert mean_sensitivity(0, 100, num_records=500) == 100 / 500
  with refuses("neighboring_relation"):
    mean_sensitivity(0, 100, num_records=500, neighboring_relation="add_or_remove_one")


@pytest.mark.cases(long=[6, 7, 8])
@pytest.mark.parametrize(
  "call, field",
  [
    (lambda: sum_sensitivity(math.nan, 1), "lower"),
    (lambda: sum_sensitivity(0, math.inf), "upper"),
    (lambda: sum_sensitivity(1, 1), "upper"),
    (lambda: sum_sensitivity(0, "1"), "upper"),
    (lambda: mean_sensitivity(0, 1, num_records=0), "num_records"),
    (lambda: vector_sum_sensitivity(-1.0), "norm_bound"),
    (lambda: vector_sum_sensitivity(math.nan), "norm_bound"),
    (lambda: histogram_sensitivity("l3"), "order"),
    (lambda: count_sensitivity("add_or_remove"), "neighboring_relation"),
  ],
)
def test_bad_input_is_one_line(call, field):
  with refuses(field) as info:
    call()
  assert "\n" not in str(info.value)

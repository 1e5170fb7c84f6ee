"""What a population costs, in a process of its own."""

import pytest

from benchmarks import population_cost
from tests.refuses import refuses


@pytest.mark.long
def test_memory_of_a_device_does_not_follow_the_population():
  few, many = (population_cost.measure(n, "disk", rounds=20) for n in (20, 5000))
  assert few.device_bytes == many.device_bytes
  assert (few.touched, many.touched) == (20, 200)
  assert many.saved_bytes < 10 * 10 * 4e5 + 2e6  # ten cohorts, an index, parameters


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("arguments", "field"),
  [
    ((20, "tape", 20), "methods"),
    ((9, "disk", 20), "clients"),
    ((20, "disk", 19), "rounds"),
  ],
)
def test_a_wrong_argument_is_one_line(arguments, field):
  clients, method, rounds = arguments
  with refuses(field):
    population_cost.measure(clients, method, rounds=rounds)

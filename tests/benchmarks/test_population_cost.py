"""What a population costs, in a process of its own."""

import pytest

from benchmarks import population_cost
from dpjax.validate import UserError


@pytest.mark.long
@pytest.mark.slow
def test_memory_of_a_device_does_not_follow_the_population():
  few, many = (population_cost.measure(n, "disk", rounds=20) for n in (20, 5000))
  assert few.device_bytes == many.device_bytes
  assert (few.touched, many.touched) == (20, 200)
  assert many.saved_bytes < 10 * 10 * 4e5 + 2e6  # ten cohorts, an index, parameters


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ((20, "tape", 20), "methods='tape': must be one of memory, disk"),
    ((9, "disk", 20), "clients=9: must be an integer >= 10"),
    ((20, "disk", 19), "rounds=19: must be an integer >= 20"),
  ],
)
def test_a_wrong_argument_is_one_line(arguments, words):
  clients, method, rounds = arguments
  with pytest.raises(UserError, match=words):
    population_cost.measure(clients, method, rounds=rounds)

"""What is set aside of delta for aborts, and which data a capacity is enough for."""

import math
import types

import pytest

from dpjax.accounting import overflow
from dpjax.accounting.proved import ADD, REPLACE, ZERO
from tests.refuses import refuses

_EPSILONS = {  # delta -> epsilon, falling
  "constant": lambda left: 1.5,
  "of a pure mechanism": lambda left: 3.0 + 0 * left,
  "slow": lambda left: math.sqrt(math.log(1 / left)),
  "fast": lambda left: math.log(1 / left),
  # Only the whole delta gives a small epsilon, and less than the whole is left.
  "steep": lambda left: 0.5 if left >= 1e-5 else 2.5,
}


def _by_walking(epsilon_at, *, delta, log_abort_prob, least):
  """The first amount of the grid that covers aborts of this probability."""
  for rung in range(10_000):
    aside = least * overflow.LADDER**rung
    if aside >= delta:
      return None
    if (1 + math.exp(epsilon_at(delta - aside))) * math.exp(log_abort_prob) <= aside:
      return aside
  raise AssertionError("a ladder without end")


@pytest.mark.parametrize("abort_prob", [1e-9, 3e-8, 2.5e-7, 1e-6, 1.01e-6, 1e-5])
@pytest.mark.parametrize("name", _EPSILONS)
def test_it_is_the_first_amount_of_the_grid_that_is_enough(name, abort_prob):
  asked = []

  def epsilon_at(left):
    asked.append(left)
    assert left < 1e-5 and len(asked) < 1000
    return _EPSILONS[name](left)

  settings = {"delta": 1e-5, "log_abort_prob": math.log(abort_prob), "least": 1e-8}
  found = overflow.reserve_for_aborts(epsilon_at, **settings)
  wanted = _by_walking(_EPSILONS[name], **settings)
  assert found == (None if wanted is None else pytest.approx(wanted, rel=1e-12))
  if found is not None:
    assert (1 + math.exp(_EPSILONS[name](1e-5 - found))) * abort_prob <= found * (1 + 1e-9)


@pytest.mark.parametrize("above", [1.001, 1.005, 1.009])
def test_a_cost_between_two_amounts_takes_the_larger_one(above):
  """The cost lies above the first amount and below the second: the walk must go on."""
  asked = []

  def epsilon_at(left):
    asked.append(left)
    assert len(asked) < 10, "the walk stands still"
    return 0.0

  log_abort_prob = math.log(above * 1e-8 / 2)
  found = overflow.reserve_for_aborts(
    epsilon_at, delta=1e-5, log_abort_prob=log_abort_prob, least=1e-8
  )
  assert found == pytest.approx(1e-8 * overflow.LADDER)


def test_an_infinite_epsilon_ends_the_walk():
  settings = {"delta": 1e-5, "log_abort_prob": math.log(1e-9), "least": 1e-8}
  assert overflow.reserve_for_aborts(lambda left: math.inf, **settings) is None


class _Everyone:
  """Draws all records, so its capacity is enough for that many, and never for one more."""

  padded_batch_size = 100

  def __init__(self):
    self.fitted_for = []

  def log_overflow_prob(self, num_examples):
    return -math.inf if num_examples <= self.padded_batch_size else 0.0

  def fit_to(self, num_examples, *, log_overflow_prob):
    self.fitted_for.append(num_examples)
    return types.SimpleNamespace(padded_batch_size=num_examples)


# Relation, declared number, records in the data -> the field refused, if any, and the number of
# records for which a larger capacity is named. The capacity is 100, and a neighbour has one more.
@pytest.mark.parametrize(
  ("relation", "declared", "size", "field", "fitted_for"),
  [
    (ADD, None, 99, None, None),
    (ADD, None, 100, "capacity", None),  # the number is secret
    (ADD, 99, 99, None, None),
    (ADD, 99, 100, None, None),  # a neighbour of data of the declared size
    (ADD, 99, 101, "num_examples", None),
    (ADD, 99, 108, "num_examples", None),
    (ADD, 98, 99, None, None),
    (ADD, 98, 100, "num_examples", None),
    (ADD, 100, 99, None, None),
    (ADD, 100, 100, "capacity", 101),
    (ADD, 100, 101, "capacity", 101),
    (ADD, 100, 102, "num_examples", None),
    *((relation, None, 99, None, None) for relation in (REPLACE, ZERO)),
    *((relation, None, 100, "capacity", 101) for relation in (REPLACE, ZERO)),
    *((relation, 99, 100, "capacity", 101) for relation in (REPLACE, ZERO)),
    *((relation, 99, 101, "num_examples", None) for relation in (REPLACE, ZERO)),
  ],
)
def test_a_capacity_is_enough_for_the_neighbour_and_for_not_one_record_more(
  relation, declared, size, field, fitted_for
):
  sampler = _Everyone()
  run = types.SimpleNamespace(
    sampler=sampler, neighboring_relation=relation, delta=1e-5, log_allowed=-20.0
  )
  check = lambda: overflow.check_capacity(run, size, declared=declared, of_divisor=declared)
  if field is None:
    check()
  else:
    with refuses(field, value=100 if field == "capacity" else declared):
      check()
  assert sampler.fitted_for == ([] if fitted_for is None else [fitted_for])

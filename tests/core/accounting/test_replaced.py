"""One record replaced under random allocation: never below the exact integral, and near it."""

import math

import numpy as np
import pytest
from scipy import special

from dpjax import accounting
from dpjax.accounting import matrix, replaced
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from tests.refuses import refuses

_REPLACE = "replace_one"


def _pass(z, num_steps):
  noise = accounting.gaussian_event(z)
  return random_allocation_event(noise, num_steps=num_steps)


def _gaussian(mu, epsilon):
  far = special.ndtr(-epsilon / mu - mu / 2)
  return special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * far


def _exact(z, epsilon, other):
  """delta of 2 steps, a record of gradient 1 against one of gradient `other`, in the plane."""
  y, width = np.linspace(-10 * z, 10 * z, 1501, retstep=True)  # under the run without
  weight = np.exp(-y * y / (2 * z * z)) * width / (z * math.sqrt(2 * math.pi))
  ratio = lambda shift: np.exp((shift * y - shift**2 / 2) / z**2)
  excess = ratio(1.0)[:, None] + ratio(1.0)
  excess -= math.exp(epsilon) * (ratio(other)[:, None] + ratio(other))
  return float(weight @ np.maximum(excess, 0) @ weight) / 2


@pytest.mark.cases(slow=["2.0-rdp"], long=...)
@pytest.mark.parametrize(
  ("z", "accountant"),
  [
    (2.0, "pld"),
    pytest.param(0.8, "rdp", marks=pytest.mark.slow),
    pytest.param(0.8, "pld", marks=pytest.mark.slow),
    pytest.param(2.0, "rdp", marks=pytest.mark.slow),
  ],
)
def test_two_steps_are_never_below_the_integral(z, accountant):
  for epsilon in (0.2, 1.0, 3.0):
    found = accounting.delta(
      _pass(z, 2), epsilon=epsilon, neighboring_relation=_REPLACE, accountant=accountant
    )
    exact = max(_exact(z, epsilon, other) for other in (-1.0, -0.5, 0.0))
    assert exact <= found * 1.0001  # the integral's own error
    if accountant == "pld" and exact > 1e-4:
      assert found < 2.5 * exact


def test_a_tiny_delta_keeps_the_amplification_where_renyi_divergences_prove_it():
  """The smallest delta of PLD bounded this epsilon, too, which was then that of one sum: 16.2."""
  common = {"neighboring_relation": _REPLACE, "accountant": "rdp"}
  found = accounting.epsilon(_pass(1.0, 200), delta=1e-12, **common)
  removed = accounting.epsilon(_pass(1.0, 200), delta=1e-13, accountant="rdp")
  assert removed < found < 2.2 * removed


def test_one_step_is_the_gaussian_mechanism_of_two_clip_norms():
  found = accounting.delta(_pass(1.0, 1), epsilon=1.0, neighboring_relation=_REPLACE)
  assert _gaussian(2.0, 1.0) <= found < 1.001 * _gaussian(2.0, 1.0)


def test_two_ways_after_another_are_above_both_at_once():
  """Of Gaussians in closed form; a plant, d(e1) + d(e2) without e^e1, is below."""
  curve = lambda epsilons: [_gaussian(1.0, one) for one in epsilons]
  exact = _gaussian(2.0, 4.0)
  assert 2 * curve([2.0])[0] < exact <= replaced.delta_of_both(curve, 4.0) < 4 * exact


def test_many_steps_amplify_and_both_directions_of_the_question_agree():
  event = accounting.compose(_pass(2.0, 100), 2)
  ask = lambda event, relation: accounting.epsilon(
    event, delta=1e-6, neighboring_relation=relation
  )
  both = ask(event, _REPLACE)
  plain = accounting.compose(accounting.gaussian_event(2.0), 2)
  assert 2 * ask(event, "add_or_remove_one") < both < 0.5 * ask(plain, _REPLACE)
  back = accounting.delta(event, epsilon=both, neighboring_relation=_REPLACE)
  assert 0.3e-6 < back < 1.5e-6


def test_beside_other_noise_than_gaussian_it_is_refused():
  def beside(other, **more):
    event = matrix.join([_pass(2.0, 9), other])
    return accounting.epsilon(event, delta=1e-6, neighboring_relation=_REPLACE, **more)

  assert beside(accounting.gaussian_event(4.0)) > beside(accounting.gaussian_event(9.0))
  with refuses("event"):
    beside(pure_dp_event(0.1))
  best = repeat_and_select_event(_pass(2.0, 9), mean_trials=4)
  with refuses("event"):
    beside(best, accountant="rdp")

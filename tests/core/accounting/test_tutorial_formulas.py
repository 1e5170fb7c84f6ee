"""Formulas of popular tutorials claim too much; notebooks/formulas_of_tutorials.ipynb shows all."""

import math

import dp_accounting as dpa
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from scipy import stats

from dpjax import accounting

_DELTA = 1e-5


def _delta_of_gaussian(distance, epsilon):
  """Hockey-stick divergence of two normals of std 1 (Balle and Wang 2018, equation 6)."""
  far = math.exp(epsilon) * stats.norm.cdf(-distance / 2 - epsilon / distance)
  return stats.norm.cdf(distance / 2 - epsilon / distance) - far


@pytest.mark.cases(slow=["1.0-1000"])
@pytest.mark.parametrize("sigma, steps", [(10.0, 100), (20.0, 100), (1.0, 1000)])
def test_p24_the_smaller_of_two_terms_is_below_a_lower_bound(sigma, steps):
  """min(sqrt(2 T ln(1/d)) / sigma, T / sigma^2): the two terms ADD up to epsilon."""
  claimed = min(math.sqrt(2 * steps * math.log(1 / _DELTA)) / sigma, steps / sigma**2)
  # Rounded the other way, a PLD bounds the truth from below.
  low = pld_lib.from_gaussian_mechanism(
    sigma / math.sqrt(steps),
    pessimistic_estimate=False,
    value_discretization_interval=1e-3,
    use_connect_dots=False,
  )
  event = accounting.compose(accounting.gaussian_event(sigma), steps)
  true = accounting.epsilon(event, delta=_DELTA)
  assert 1.5 * claimed < low.get_epsilon_for_delta(_DELTA) <= true


@pytest.mark.parametrize("constant", [1.25, 1.7])
@pytest.mark.parametrize(
  "epsilon, holds", [(0.1, True), (1.0, True), (10.0, False), (20.0, False)]
)
def test_p24_the_gaussian_formula_is_false_for_a_large_epsilon(constant, epsilon, holds):
  sigma = math.sqrt(2 * math.log(constant / _DELTA)) / epsilon
  assert (_delta_of_gaussian(1 / sigma, epsilon) <= _DELTA) == holds
  true = accounting.epsilon(accounting.gaussian_event(sigma), delta=_DELTA)
  assert (true <= epsilon) == holds


def test_sampling_does_not_shrink_epsilon_in_proportion():
  """A response of epsilon 4 on a twentieth of the records: ln(1 + q (e^4 - 1)) = 1.30, not 0.2."""
  keep, q = 1 / (1 + math.exp(-4.0)), 0.05
  with_record = q * keep + (1 - q) * (1 - keep)
  true = math.log(with_record / (1 - keep))
  assert true == pytest.approx(math.log1p(q * math.expm1(4.0)))
  assert 4.0 * q < true / 6


def test_p14_a_fixed_size_and_a_poisson_sample_are_private_under_their_own_relations():
  """50 of 1,000, 100 rounds: the exact pair costs two thirds of the general bound."""
  oracle = dpa.rdp.RdpAccountant(
    neighboring_relation=dpa.NeighboringRelation.REPLACE_ONE
  ).compose(dpa.SampledWithoutReplacementDpEvent(1000, 50, dpa.GaussianDpEvent(1.0)), 100)
  # The event's multiplier is relative to the clip norm; an exchange moves a sum by twice that.
  step = accounting.fixed_size_event(
    accounting.gaussian_event(2.0), num_examples=1000, batch_size=50
  )
  run = accounting.compose(step, 100)
  options = {"delta": _DELTA, "neighboring_relation": "replace_one"}
  ours = accounting.epsilon(run, accountant="rdp", **options)
  assert 0.6 * oracle.get_epsilon(_DELTA) < ours < 0.7 * oracle.get_epsilon(_DELTA)


def test_noise_for_a_norm_that_nothing_is_clipped_to_hides_nothing():
  claimed = accounting.epsilon(accounting.gaussian_event(1.2), delta=_DELTA)
  assert _delta_of_gaussian(1.0 / 1.2, claimed) <= _DELTA * (1 + 1e-6)
  assert _delta_of_gaussian(3.0 / 1.2, claimed) > 0.01
  assert _delta_of_gaussian(100.0 / 1.2, claimed) > 0.99


def test_row_20_a_noise_schedule_fixed_in_advance_is_composed_step_by_step():
  """The order of loose and strict steps is free; the mean of their noise is not the cost."""

  def sampled(noise_multiplier):
    noise = accounting.gaussian_event(noise_multiplier)
    return accounting.poisson_sampled_event(noise, sampling_prob=0.05)

  def cost(events):
    return accounting.epsilon(dpa.ComposedDpEvent(events), delta=_DELTA)

  blocks = [accounting.compose(sampled(z), 50) for z in (0.8, 1.6)]
  mixed = cost(blocks)
  assert cost(blocks[::-1]) == pytest.approx(mixed, rel=1e-9)
  assert cost(blocks[1:] * 2) < mixed < cost(blocks[:1] * 2)
  assert mixed > 1.2 * cost([accounting.compose(sampled(1.2), 100)])
  unsampled = [accounting.gaussian_event(z) for z in (3.0, 4.0)]
  assert cost(unsampled) == pytest.approx(cost([accounting.gaussian_event(2.4)]))

"""Renyi DP of random allocation: exact integrals of one to three steps, both directions."""

import functools
import math

import numpy as np
import pytest

from dpjax import accounting
from dpjax.accounting import allocation_rdp as renyi
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event

_ORDERS = np.array([1.3, 2.0, 2.5, 3.0, 6.0])


def _exact(num_steps, shift, width):
  """(removed, added) by a sum over a grid of all steps' normals, for the rule's error falls
  faster than any power of its width."""
  z = np.arange(-12, 12 + 6 * shift, width)
  weight = np.exp(-z * z / 2) * width / math.sqrt(2 * math.pi)
  term = np.exp(shift * z - shift**2 / 2)
  ratio = functools.reduce(np.add.outer, [term] * num_steps) / num_steps
  weights = functools.reduce(np.multiply.outer, [weight] * num_steps)
  log = lambda power: math.log((weights * ratio**power).sum())
  return np.array([[log(a) / (a - 1), log(1 - a) / (a - 1)] for a in _ORDERS]).T


@pytest.mark.cases(long=["1.0-3-0.2"])
@pytest.mark.parametrize(("num_steps", "width"), [(1, 0.01), (2, 0.05), (3, 0.2)])
@pytest.mark.parametrize("shift", [0.4, 1.0])
def test_both_directions_are_the_integral_and_never_below_it(num_steps, width, shift):
  removed, added = _exact(num_steps, shift, width)
  own = renyi._removal_bounds(num_steps, shift, _ORDERS)
  whole = np.floor(_ORDERS) == _ORDERS
  np.testing.assert_allclose(own[whole], removed[whole], rtol=1e-9)
  assert (own >= removed * (1 - 1e-10)).all()  # between integers above it
  other = renyi._addition_bounds(num_steps, shift, _ORDERS - 1)
  np.testing.assert_allclose(other, added, rtol=1e-9)
  assert (other >= added * (1 - 1e-10)).all()
  both = renyi.allocation_rdp(num_steps, 1 / shift, orders=_ORDERS)
  assert (both >= np.maximum(removed, added) * (1 - 1e-10)).all()


def test_moments_that_are_too_small_are_found_out(monkeypatch):
  """A plant: a series whose coefficients lose a millionth."""
  honest = renyi._multiply
  monkeypatch.setattr(renyi, "_multiply", lambda a, b: honest(a, b) - 1e-6)
  removed, _ = _exact(2, 1.0, 0.05)
  assert (renyi._removal_bounds(2, 1.0, _ORDERS) < removed).any()


def test_the_second_moment_is_in_closed_form_at_many_steps():
  for num_steps in (10, 1000, 100_000):
    found = renyi.allocation_rdp(num_steps, 1.25, orders=[2.0])
    exact = math.log1p(math.expm1(0.64) / num_steps)
    assert exact <= found[0] < exact * (1 + 1e-6)


@pytest.mark.slow
def test_it_is_above_the_privacy_loss_distribution_and_amplifies():
  """The same pair, so Renyi DP can only lose; unamplified it would be far more."""
  one = random_allocation_event(accounting.gaussian_event(1.5), num_steps=50)
  event = accounting.compose(one, 5)
  pld = accounting.epsilon(event, delta=1e-6)
  rdp = accounting.epsilon(event, delta=1e-6, accountant="rdp")
  plain = accounting.compose(accounting.gaussian_event(1.5), 5)
  assert pld < rdp < 0.6 * accounting.epsilon(plain, delta=1e-6)


def test_little_noise_and_much_end_in_the_gaussian_mechanism_and_in_nothing():
  gaussian = _ORDERS / 2 / 0.02**2
  found = renyi.allocation_rdp(9, 0.02, orders=_ORDERS)
  np.testing.assert_allclose(found, gaussian, rtol=1e-12)
  assert renyi.allocation_rdp(9, 0.5, orders=_ORDERS)[2] <= 2.5 / 2 / 0.5**2
  assert (renyi.allocation_rdp(9, 1e4, orders=_ORDERS) < 1e-8).all()

"""Rho of zero-concentrated DP bounds every Renyi divergence, and is exact for Gaussian noise."""

import math

import dp_accounting as dpa
import numpy as np
import pytest

from dpjax import accounting
from dpjax.accounting.epsilon import epsilon_of_zcdp, zcdp
from dpjax.accounting.event_kinds.elements import accountable, rdp_of
from dpjax.accounting.event_kinds.kind import ORDERS
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.accounting.event_kinds.skellam import SkellamDpEvent
from dpjax.validate import UserError
from tests.refuses import refuses

_NOISE = dpa.GaussianDpEvent(3.0)
_EVENTS = {
  "gaussian": _NOISE,
  "laplace": dpa.LaplaceDpEvent(2.0),
  "pure": pure_dp_event(0.7),
  "poisson": accounting.poisson_sampled_event(_NOISE, sampling_prob=0.2),
  "fixed size": accounting.fixed_size_event(_NOISE, num_examples=50, batch_size=10),
  "allocation": random_allocation_event(_NOISE, num_steps=5),
}


@pytest.mark.parametrize("name", _EVENTS)
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_rho_bounds_the_renyi_curve(name, relation):
  event = accounting.compose(_EVENTS[name], 3)
  if name == "poisson" and relation == "replace_one":
    with pytest.raises(UserError, match="poisson_sampled with neighboring_relation"):
      zcdp(event, neighboring_relation=relation)
    return
  rho = zcdp(event, neighboring_relation=relation)
  if name == "allocation" and relation == "replace_one":
    assert rho == pytest.approx(4 * zcdp(event))
    return
  curve = rdp_of(accountable(event, relation, "rdp").parts)
  shares = (curve / np.array(ORDERS))[np.isfinite(curve)]
  assert (shares <= rho * (1 + 1e-9)).all()
  # Of the right size: at some order no less than a quarter is used.
  assert shares.max() > 0.25 * rho


def test_gaussian_noise_is_exact_and_rho_adds_up():
  both = dpa.ComposedDpEvent([accounting.compose(_NOISE, 9), dpa.GaussianDpEvent(1.0)])
  assert zcdp(both) == pytest.approx(9 / 18 + 0.5)
  double = zcdp(both, neighboring_relation="replace_one")
  assert double == pytest.approx(4 * zcdp(both))
  exact = dpa.get_epsilon_gaussian(1.0, 1e-6)
  assert exact < epsilon_of_zcdp(0.5, delta=1e-6) < 1.12 * exact


def test_the_ends_of_the_range_and_what_has_no_rho():
  assert zcdp(dpa.NonPrivateDpEvent()) == math.inf
  assert zcdp(dpa.NoOpDpEvent()) == 0
  assert epsilon_of_zcdp(0.0, delta=1e-5) == 0
  assert epsilon_of_zcdp(math.inf, delta=1e-5) == math.inf
  with refuses("rho", value=-1):
    epsilon_of_zcdp(-1, delta=1e-5)
  with refuses("event"):
    zcdp(SkellamDpEvent(100.0, 1.0, 1.0), neighboring_relation="replace_one")

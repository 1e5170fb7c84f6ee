"""The loss grid: every operation rounds towards a larger delta. Exact divergences judge."""

import math
import sys
from concurrent import futures

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld_lib

from dpjax import accounting
from dpjax.accounting import loss_grid, noise_profiles
from dpjax.accounting.epsilon import privacy_profile
from dpjax.accounting.event_kinds.kind import kind_of
from dpjax.accounting.loss_grid import Composition, LossMasses, Step, masses_of
from tests.core.accounting import loss_oracle


def _rows(*args):
  return [dict(zip(loss_oracle.FIELDS, row)) for row in loss_oracle.settings(*args)]


def test_no_epsilon_is_below_the_exact_one():
  """At the epsilons proved for delta, the exact delta of 40 digits is at most delta."""
  for row in _rows(10, 3):
    assert row["share_used"] <= 1, row
    # Where a loss is on the grid, or the run has many steps, the proof wastes next to nothing.
    if row["kind"] == "responses":
      assert row["share_used"] > 1 - 1e-3, row
    if row["kind"] == "gaussians":
      assert row["share_used"] > 0.99, row


@pytest.mark.long
def test_no_epsilon_is_below_the_exact_one_at_many_settings():
  for row in _rows(200, 11):
    assert row["share_used"] <= 1, row


def _forget_rounding(monkeypatch):
  monkeypatch.setattr(loss_grid, "UNIT", 0.0)
  monkeypatch.setattr(noise_profiles, "UNIT", 0.0)
  monkeypatch.setattr(loss_grid, "_norm", lambda *_: 0.0)


def _forget_the_wrapped_mass(monkeypatch):
  monkeypatch.setattr(loss_grid, "_RARE", 0.5)
  monkeypatch.setattr(Composition, "_mass_above", lambda self, loss: 0.0)


def _round_losses_down(monkeypatch):
  original = Step.__init__
  monkeypatch.setattr(
    Step,
    "__init__",
    lambda self, masses: original(self, masses._replace(lowest=masses.lowest - 1)),
  )


def _count_a_step_less(monkeypatch):
  original = loss_grid._power
  monkeypatch.setattr(
    loss_grid, "_power", lambda values, times: original(values, max(times - 1, 1))
  )


@pytest.mark.parametrize(
  "slip",
  [_forget_rounding, _forget_the_wrapped_mass, _round_losses_down, _count_a_step_less],
)
def test_an_optimistic_rounding_is_seen(slip, monkeypatch):
  slip(monkeypatch)
  rows = _rows(20, 5, ["responses"])
  assert any(row["share_used"] > 1 for row in rows)


@pytest.mark.parametrize("interval", [1e-3, 0.1])
@pytest.mark.parametrize("q, z", [(1e-4, 0.6), (0.3, 2.0)])
def test_masses_are_those_of_dp_accounting_but_for_rounding(q, z, interval):
  top = 0.5 / z**2 + 10 / z
  noise = noise_profiles.gaussian(1 / z)
  ours = loss_grid.connect(
    lambda epsilons: noise_profiles.removal_deltas(epsilons, sampling_prob=q, noise=noise),
    lambda epsilons: noise_profiles.addition_deltas(epsilons, sampling_prob=q, noise=noise),
    interval=interval,
    largest=top,
  )
  theirs = pld_lib.from_gaussian_mechanism(
    z, sampling_prob=q, value_discretization_interval=interval
  )
  epsilons = [0.0, 0.01, 0.3, 1.0, 2.5]
  np.testing.assert_allclose(
    loss_grid.pld_of(ours).get_delta_for_epsilon(epsilons),
    theirs.get_delta_for_epsilon(epsilons),
    rtol=1e-8,
    atol=1e-13,
  )
  for side in ours:
    # dp_accounting's masses have a sum of up to 1 + 1e-6 where losses are small.
    total = side.probs.sum() + side.infinity_mass
    assert 1 - 1e-15 <= total < 1 + 1e-13


def test_infinite_losses_add_up_and_are_never_forgotten():
  masses = LossMasses(0.1, -1, np.array([0.4, 0.0, 0.59]), 0.01)
  for times in (1, 2, 50):
    side = Composition([(Step(masses), times)])
    lost = 1 - 0.99**times
    assert side.epsilon(0.999 * lost) == math.inf
    assert lost <= side.deltas([1e6])[0] <= 1.01 * times * 0.01
  # No mass is finite.
  side = Composition([(Step(LossMasses(0.1, 0, np.zeros(3), 1.0)), 2)])
  assert side.epsilon(0.5) == math.inf and side.deltas([0.0, 9.0]).tolist() == [1, 1]


def test_deltas_and_epsilons_are_inverse_at_all_sizes():
  event = accounting.compose(
    accounting.poisson_sampled_event(accounting.gaussian_event(0.9), sampling_prob=0.01),
    500,
  )
  for delta in (1e-3, 1e-6, 1e-9, 1e-12):
    epsilon = accounting.epsilon(event, delta=delta)
    assert accounting.delta(event, epsilon=epsilon) == pytest.approx(delta, rel=1e-6)


def test_a_distribution_of_dp_accounting_is_taken_as_it_is():
  """A kind of one's own may return theirs: its masses compose as they would there."""
  theirs = pld_lib.from_laplace_mechanism(2.0, value_discretization_interval=1e-3)
  (masses,) = masses_of(theirs)
  side = Composition([(Step(masses), 30)])
  direct = theirs.self_compose(30).get_epsilon_for_delta(1e-5)
  assert side.epsilon(1e-5) == pytest.approx(direct, rel=1e-7)


@pytest.mark.parametrize(
  "event",
  [
    # Few large losses, whose tilted sums lie far above a small epsilon, and the other way round.
    accounting.compose(
      accounting.poisson_sampled_event(accounting.laplace_event(0.01), sampling_prob=1e-9),
      20,
    ),
    accounting.compose(
      accounting.poisson_sampled_event(accounting.gaussian_event(30), sampling_prob=1.0),
      1000,
    ),
    accounting.compose(accounting.laplace_event(10), 50),
  ],
  ids=["rare", "many", "bounded"],
)
def test_a_curve_never_rises_up_to_an_infinite_epsilon(event):
  epsilons = np.concatenate([[0], np.geomspace(1e-3, 1e4, 400), [1e300, math.inf]])
  deltas = privacy_profile(event)(epsilons)
  assert np.all(np.diff(deltas) <= 1e-13 + 1e-9 * deltas[:-1])
  assert 0 < deltas[-1] < 1e-12


def test_a_curve_keeps_few_cells_and_stays_the_same(monkeypatch):
  event = accounting.gaussian_event(10)
  (masses,) = kind_of(event).pld(event, 2.0**-10)
  step = Step(masses)
  epsilons = np.geomspace(1e-3, 30, 100)
  whole, small = (Composition([(step, 300)]) for _ in range(2))
  wanted = whole.deltas(epsilons)
  size = max(len(table.masses) for table in whole._tables.values())
  assert len(whole._tables) > 3
  monkeypatch.setattr(loss_grid, "_KEPT_CELLS", 2 * size)
  np.testing.assert_array_equal(small.deltas(epsilons), wanted)
  assert sum(len(table.masses) for table in small._tables.values()) <= 2 * size


def test_threads_share_a_step():
  """Also where there are more rates than images are kept."""
  step = Step(LossMasses(0.1, -1, np.array([0.5, 0.0, 0.5]), 0.0))
  image = lambda rate: loss_grid._image(step, rate, 16, np.float64).log_scale
  alone = [image(rate) for rate in range(40)]
  assert len(set(alone)) == 40

  def ask(number):
    rates = [(number + turn) % 40 for turn in range(100)]
    return [image(rate) for rate in rates] == [alone[rate] for rate in rates]

  before = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    with futures.ThreadPoolExecutor(8) as pool:
      assert all(pool.map(ask, range(8)))
  finally:
    sys.setswitchinterval(before)


def test_a_sampling_probability_near_1_loses_no_jump_of_laplace_noise():
  """There the loss of an added record is nearly constant where the noise's divergence jumps."""
  q, largest = 0.9999999999999859, 18.41121400680015
  epsilon = 18.411212610008864
  noise = noise_profiles.laplace(largest)
  (delta,) = noise_profiles.addition_deltas(
    np.array([epsilon]), sampling_prob=q, noise=noise
  )
  with mpmath.workdps(60):
    share = 1 + mpmath.expm1(-mpmath.mpf(epsilon)) / mpmath.mpf(q)
    inner = -mpmath.expm1((-mpmath.log(share) - mpmath.mpf(largest)) / 2)
    exact = mpmath.mpf(q) * mpmath.exp(mpmath.mpf(epsilon)) * share * inner
  assert 4e-11 < exact <= delta

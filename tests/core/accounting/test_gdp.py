"""The central limit: exact where nothing is sampled, close in its limit, false before."""

import math

import dp_accounting as dpa
import mpmath
import pytest
from scipy import stats

from dpjax import accounting
from dpjax.accounting import compose, gdp
from dpjax.accounting.event_kinds.elements import ClaimedDpEvent
from dpjax.accounting.proved import RELATIONS
from dpjax.validate import UserError
from tests.refuses import refuses


def _run(z, q, steps):
  step = accounting.gaussian_event(z)
  return compose(accounting.poisson_sampled_event(step, sampling_prob=q), steps)


def _one_step_delta(z, q, eps):
  """delta of ONE Poisson-sampled Gaussian: q times the Gaussian's own at ln(1 + (e^eps -
  1) / q), exactly (Balle, Barthe and Gaboardi 2018, theorem 8)."""
  inner = math.log1p(math.expm1(eps) / q)
  gaussian = stats.norm.cdf(0.5 / z - inner * z) - math.exp(inner) * stats.norm.cdf(
    -0.5 / z - inner * z
  )
  return q * gaussian


def test_counter_example_the_central_limit_is_below_the_truth():
  """LABELLED COUNTER-EXAMPLE: at its own epsilon the run leaks fifty times its delta."""
  for z, q, delta in ((0.7, 0.01, 1e-5), (0.6, 0.02, 1e-6)):
    claimed = gdp.approximate(_run(z, q, 1), delta=delta)
    assert claimed.epsilon_kind == "approximation"
    assert _one_step_delta(z, q, claimed.epsilon) > 50 * delta  # the truth, in closed form
    proved = accounting.epsilon(_run(z, q, 1), delta=delta)
    assert claimed.epsilon < 0.5 * proved
    assert _one_step_delta(z, q, proved) <= delta * (1 + 1e-6)


def test_many_steps_still_too_small_but_near():
  run = _run(1.1, 0.01, 4000)
  claimed = gdp.approximate(run, delta=1e-5)
  proved = accounting.epsilon(run, delta=1e-5)
  assert 0.85 * proved < claimed.epsilon < proved


def test_in_its_limit_it_is_right():
  run = _run(60.0, 0.5, 40_000)
  claimed = gdp.approximate(run, delta=1e-5)
  assert claimed.epsilon == pytest.approx(accounting.epsilon(run, delta=1e-5), rel=0.01)


@pytest.mark.parametrize("relation", RELATIONS)
def test_unsampled_gaussian_noise_is_exact_and_proved(relation):
  event = compose(dpa.GaussianDpEvent(8.0), 4)
  found = gdp.approximate(event, delta=1e-5, neighboring_relation=relation)
  sensitivity = 2 if relation == "replace_one" else 1
  assert found.mu == pytest.approx(sensitivity / 4)
  assert found.epsilon == pytest.approx(
    dpa.get_epsilon_gaussian(4 / sensitivity, 1e-5), rel=1e-6
  )
  assert found.epsilon_kind == "proved"


@pytest.mark.parametrize(
  ("mu", "delta"),
  [
    (1e-9, 6e-19),
    (1.7e-6, 1e-19),
    (5.9e-6, 1e-25),
    (9.3e-6, 3e-17),
    (0.5, 1e-5),
    (30.0, 1e-9),
  ],
)
def test_it_is_never_below_the_exact_epsilon(mu, delta):
  found = gdp.epsilon(mu, delta=delta)
  with mpmath.workdps(60):
    exact_mu, reached = mpmath.mpf(mu), mpmath.mpf(found)
    inside = mpmath.ncdf(exact_mu / 2 - reached / exact_mu)
    outside = mpmath.e**reached * mpmath.ncdf(-exact_mu / 2 - reached / exact_mu)
    assert inside - outside <= delta


def test_nothing_and_no_noise():
  assert gdp.approximate(dpa.NoOpDpEvent(), delta=1e-5).epsilon == 0
  without_noise = gdp.approximate(dpa.GaussianDpEvent(0.0), delta=1e-5)
  assert (without_noise.epsilon, without_noise.epsilon_kind) == (math.inf, "none")
  # exp(1 / z^2) is no float.
  assert gdp.approximate(_run(0.03, 0.1, 1), delta=1e-5) == without_noise


def test_what_an_event_claims_is_exact_and_not_proved():
  for event in (dpa.GaussianDpEvent(2.0), _run(1.0, 0.01, 10)):
    known = gdp.approximate(event, delta=1e-5)
    found = gdp.approximate(ClaimedDpEvent("Mine: my word", event), delta=1e-5)
    kind = {"proved": "claimed"}.get(known.epsilon_kind, known.epsilon_kind)
    assert found == known._replace(epsilon_kind=kind)


def test_it_never_stands_in_for_a_proof():
  """Nothing that prints a proved epsilon, and no calibration, takes it as accountant."""
  with refuses("accountant", value="gdp"):
    accounting.epsilon(_run(1.0, 0.01, 10), delta=1e-5, accountant="gdp")
  with refuses("accountant"):
    accounting.calibrate_noise_multiplier(
      dpa.GaussianDpEvent, epsilon=1.0, delta=1e-5, accountant="gdp"
    )
  with refuses("accountant"):
    accounting.Ledger().check(accounting.Budget(1.0, 1e-5), accountant="gdp")
  text = accounting.privacy_statement(
    _run(1.0, 0.01, 10),
    delta=1e-5,
    epsilon_kind="approximation",
    epsilons={"gdp": gdp.approximate(_run(1.0, 0.01, 10), delta=1e-5).epsilon},
  )
  assert "kind: approximation" in text and "proved" not in text.split("Charged")[0]


@pytest.mark.cases(quick=["event0-add_or_remove_one"], long=...)
@pytest.mark.parametrize(
  ("event", "relation"),
  [
    (dpa.LaplaceDpEvent(1.0), "add_or_remove_one"),
    (_run(1.0, 0.1, 3), "replace_one"),
    (dpa.SampledWithoutReplacementDpEvent(9, 2, dpa.GaussianDpEvent(1.0)), "replace_one"),
    (dpa.TruncatedSubsampledGaussianDpEvent(9, 0.1, 2, 1.0), "replace_special"),
  ],
)
def test_what_has_no_limit_is_refused(event, relation):
  with pytest.raises(UserError):
    gdp.approximate(event, delta=1e-5, neighboring_relation=relation)

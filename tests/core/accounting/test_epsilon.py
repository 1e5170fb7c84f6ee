"""Epsilon: closed forms, dp_accounting asked directly, relations, and refusals."""

import logging
import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import stats

from dpjax import accounting
from dpjax.accounting import compose, epsilon, epsilon_curve, proved
from dpjax.accounting.event_kinds import noisy_sum
from dpjax.accounting.event_kinds.truncated_poisson import truncated_poisson_event
from dpjax.validate import UserError
from tests.refuses import refuses

_RELATION = dpa.NeighboringRelation
_PLD, _RDP = dpa.pld.PLDAccountant, dpa.rdp.RdpAccountant

# Poisson, RDP, add/remove, delta 1e-5: (n, batch, steps, epsilon, noise multiplier), T18.
T18 = [
  (60_000, 600, 4000, 0.5, 4.931),
  (60_000, 600, 4000, 1.5, 1.928),
  (60_000, 600, 4000, 2.0, 1.552),
  (60_000, 600, 4000, 3.0, 1.186),
  (60_000, 600, 4000, 5.0, 0.906),
  (50_000, 1000, 3000, 2.0, 2.490),
  (50_000, 1000, 3000, 8.0, 0.978),
  (50_000, 1000, 3000, 12.0, 0.814),
]
_RUNS = [  # (noise multiplier, sampling probability, steps)
  (1.1, 0.01, 4000),
  (4.9, 0.01, 1000),
  (0.7, 0.02, 300),
  (2.0, 0.3, 50),
  (1.0, 1.0, 3),
]


def _run(noise_multiplier, sampling_prob, num_steps):
  step = accounting.gaussian_event(noise_multiplier)
  sampled = accounting.poisson_sampled_event(step, sampling_prob=sampling_prob)
  return compose(sampled, num_steps)


def _gaussian_delta(noise_multiplier, eps):
  """Balle and Wang 2018, arXiv:1805.06530, theorem 8, for sensitivity 1."""
  half, z = 1 / (2 * noise_multiplier), noise_multiplier
  return stats.norm.cdf(half - eps * z) - math.exp(eps) * stats.norm.cdf(-half - eps * z)


@pytest.mark.cases(
  quick=[
    "60000-600-4000-0.5-4.931",
    "60000-600-4000-1.5-1.928",
    "60000-600-4000-2.0-1.552",
  ],
  long=...,
)
@pytest.mark.parametrize("n, batch, steps, eps, sigma", T18)
def test_t18_the_published_table_and_back(n, batch, steps, eps, sigma):
  low, high = (
    epsilon(_run(z, batch / n, steps), delta=1e-5, accountant="rdp")
    for z in (sigma + 1e-3, sigma - 1e-3)
  )
  assert low < eps < high
  found = accounting.calibrate_noise_multiplier(
    lambda z: _run(z, batch / n, steps), epsilon=eps, delta=1e-5, accountant="rdp"
  )
  assert found == pytest.approx(sigma, abs=1e-3)


@pytest.mark.cases(quick=[1], long=...)
@pytest.mark.parametrize("run", _RUNS, ids=str)
def test_agrees_with_dp_accounting_asked_directly(run):
  event = _run(*run)
  direct = _PLD().compose(event).get_epsilon(1e-5)
  assert epsilon(event, delta=1e-5) == pytest.approx(direct, rel=1e-3)
  direct = _RDP().compose(event).get_epsilon(1e-5)
  assert epsilon(event, delta=1e-5, accountant="rdp") == pytest.approx(direct, rel=1e-9)


@pytest.mark.cases(quick=[1], long=...)
@pytest.mark.parametrize("run", _RUNS, ids=str)
def test_delta_is_the_inverse_and_agrees_with_dp_accounting(run):
  event = _run(*run)
  for accountant, direct in (("pld", _PLD()), ("rdp", _RDP())):
    eps = epsilon(event, delta=1e-5, accountant=accountant)
    back = accounting.delta(event, epsilon=eps, accountant=accountant)
    assert back == pytest.approx(1e-5, rel=2e-2)
    assert back == pytest.approx(direct.compose(event).get_delta(eps), rel=2e-2)


@pytest.mark.cases(quick=[1, 4], long=...)
@pytest.mark.parametrize("run", _RUNS, ids=str)
def test_pld_is_never_above_rdp(run):
  event = _run(*run)
  for delta in (1e-3, 1e-5, 1e-8):
    assert epsilon(event, delta=delta) <= epsilon(event, delta=delta, accountant="rdp")


@pytest.mark.cases(long=["0.01-0.05"])
@pytest.mark.parametrize("noise_multiplier", [0.05, 0.5, 1.0, 2.0, 10.0, 300.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-8])
def test_gaussian_closed_form(noise_multiplier, delta):
  found = epsilon(dpa.GaussianDpEvent(noise_multiplier), delta=delta)
  exact = dpa.get_epsilon_gaussian(noise_multiplier, delta)
  assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-3) + 1e-6
  if 0 < found < 50:
    assert delta * 0.98 <= _gaussian_delta(noise_multiplier, found) <= delta * (1 + 1e-6)


@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
@pytest.mark.parametrize("kind", [dpa.GaussianDpEvent, dpa.LaplaceDpEvent])
def test_p9_replacing_one_record_halves_the_noise(kind, accountant):
  """z is std / l2_clip_norm; replace_one has sensitivity 2 C, by BOTH accountants."""
  options = {"delta": 1e-5, "accountant": accountant}
  replaced = epsilon(kind(2.0), neighboring_relation="replace_one", **options)
  assert replaced == pytest.approx(epsilon(kind(1.0), **options), rel=1e-9)
  assert replaced > 1.5 * epsilon(kind(2.0), **options)
  special = epsilon(kind(2.0), neighboring_relation="replace_special", **options)
  assert special == epsilon(kind(2.0), **options)


def test_p9_replace_one_is_right_against_the_closed_form():
  event = compose(dpa.GaussianDpEvent(8.0), 4)  # as one Gaussian: 4 C; against 2 C: 2
  exact = dpa.get_epsilon_gaussian(2.0, 1e-5)
  for accountant, slack in (("pld", 1e-3), ("rdp", 0.15)):
    found = epsilon(
      event, delta=1e-5, neighboring_relation="replace_one", accountant=accountant
    )
    assert exact <= found <= exact * (1 + slack)
  # dp_accounting's own two readings, a factor of 2 apart: ours is PLD's
  as_pld = _PLD(_RELATION.REPLACE_ONE).compose(event).get_epsilon(1e-5)
  as_rdp = _RDP(neighboring_relation=_RELATION.REPLACE_ONE).compose(event).get_epsilon(1e-5)
  assert as_pld == pytest.approx(exact, rel=1e-3)
  assert as_rdp < 0.6 * exact


def test_p14_a_joining_record_pushes_another_one_out():
  step = accounting.fixed_size_event(
    accounting.gaussian_event(4.0), num_examples=1000, batch_size=10
  )
  event = compose(step, 100)
  for accountant in proved.ACCOUNTANTS:
    with pytest.raises(UserError, match="replace_special"):
      epsilon(
        event, delta=1e-5, neighboring_relation="replace_special", accountant=accountant
      )
    joined = epsilon(event, delta=1e-5, accountant=accountant)
    # The sum moves by two clip norms, so it is no Poisson sample of the same noise.
    assert joined > 1.5 * epsilon(_run(4.0, 0.01, 100), delta=1e-5, accountant=accountant)
    assert joined == epsilon(_run(2.0, 0.01, 100), delta=1e-5, accountant=accountant)
  found = epsilon(event, delta=1e-5, neighboring_relation="replace_one", accountant="rdp")
  halved = dpa.SampledWithoutReplacementDpEvent(1000, 10, dpa.GaussianDpEvent(2.0))
  direct = _RDP(neighboring_relation=_RELATION.REPLACE_ONE).compose(halved, 100)
  assert joined <= found < direct.get_epsilon(1e-5)


def test_a_fixed_size_batch_of_everything_is_the_gaussian():
  everything = accounting.fixed_size_event(
    accounting.gaussian_event(4.0), num_examples=10, batch_size=10
  )
  options = {"delta": 1e-5, "accountant": "rdp", "neighboring_relation": "replace_one"}
  gaussian = epsilon(dpa.GaussianDpEvent(4.0), **options)
  assert epsilon(everything, **options) == pytest.approx(gaussian, rel=1e-12)


@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
def test_p13_poisson_sampling_is_refused_under_replace_one(accountant):
  with refuses("event"):
    epsilon(
      _run(1.0, 0.1, 2),
      delta=1e-5,
      neighboring_relation="replace_one",
      accountant=accountant,
    )
  same = epsilon(
    _run(1.0, 0.1, 2),
    delta=1e-5,
    neighboring_relation="replace_special",
    accountant=accountant,
  )
  assert same == epsilon(_run(1.0, 0.1, 2), delta=1e-5, accountant=accountant)


def test_p26_laplace_closed_form():
  """Pure DP of 1 / b, and delta(eps) = 1 - e^((eps - 1/b) / 2); sampling is not ignored."""
  for b in (0.2, 1.0, 5.0):
    event = dpa.LaplaceDpEvent(b)
    assert epsilon(event, delta=1e-9) == pytest.approx(1 / b, rel=1e-6)
    exact = 1 / b + 2 * math.log1p(-1e-2)
    assert epsilon(event, delta=1e-2) == pytest.approx(max(0, exact), rel=1e-3)
    assert epsilon(event, delta=1e-9, accountant="rdp") >= 0.9 / b
    sampled = accounting.poisson_sampled_event(event, sampling_prob=0.01)
    amplified = math.log1p(0.01 * math.expm1(1 / b))
    found = epsilon(sampled, delta=1e-9)
    assert amplified * (1 - 1e-4) <= found <= amplified * (1 + 0.02)
    with refuses("event"):
      epsilon(sampled, delta=1e-9, accountant="rdp")


@pytest.mark.parametrize(
  "count, b, expected", [(784, 392, 0.236), (784, 70, 1.548), (49, 24.5, 1.038)]
)
def test_t15_composed_laplace(count, b, expected):
  event = compose(dpa.LaplaceDpEvent(b), count)
  assert epsilon(event, delta=1e-5) == pytest.approx(expected, abs=6e-4)
  assert epsilon(event, delta=1e-5, accountant="rdp") > expected


@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
def test_nothing_costs_nothing_and_no_noise_costs_everything(accountant):
  options = {"delta": 1e-5, "accountant": accountant}
  assert epsilon(dpa.NoOpDpEvent(), **options) == 0
  assert accounting.delta(dpa.NoOpDpEvent(), epsilon=0.0, accountant=accountant) == 0
  no_noise = [dpa.NonPrivateDpEvent(), _run(0.0, 0.01, 1), dpa.LaplaceDpEvent(0.0)]
  for event in no_noise:
    with_others = dpa.ComposedDpEvent([_run(1.0, 0.01, 3), event])
    assert epsilon(with_others, **options) == math.inf
    assert accounting.delta(with_others, epsilon=9.0, accountant=accountant) == 1


@pytest.mark.cases(long=["pld"])
@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
def test_monotone_in_noise_steps_probability_and_delta(accountant):
  def cost(z=1.0, q=0.02, steps=200, delta=1e-5):
    return epsilon(_run(z, q, steps), delta=delta, accountant=accountant)

  assert all(np.diff([cost(z=z) for z in (0.6, 0.8, 1.0, 2.0, 5.0)]) < 0)
  assert all(np.diff([cost(steps=n) for n in (1, 2, 50, 200, 201)]) > 0)
  assert all(np.diff([cost(q=q) for q in (0.002, 0.01, 0.02, 0.1, 1.0)]) > 0)
  assert all(np.diff([cost(delta=d) for d in (1e-8, 1e-6, 1e-4, 1e-2)]) < 0)


@pytest.mark.cases(long=["pld"])
@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
def test_the_curve_is_epsilon_after_each_number_of_steps(accountant):
  step = accounting.poisson_sampled_event(
    accounting.gaussian_event(1.1), sampling_prob=0.02
  )
  steps = [0, 1, 7, 100, 400]
  curve = epsilon_curve(step, steps, delta=1e-5, accountant=accountant)
  each = [epsilon(compose(step, n), delta=1e-5, accountant=accountant) for n in steps]
  assert curve.tolist() == each and curve[0] == 0


def test_a_wrong_number_of_steps_is_named_by_its_place_in_the_curve():
  with refuses("steps[1]", value=-1):
    epsilon_curve(dpa.GaussianDpEvent(4.0), [2, -1], delta=1e-5)


def test_the_curve_analyses_one_step_only_once(monkeypatch):
  calls = []
  original = noisy_sum.sample_pld
  counted = lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs)
  monkeypatch.setattr(noisy_sum, "sample_pld", counted)
  step = accounting.poisson_sampled_event(
    accounting.gaussian_event(1.2345), sampling_prob=0.0123
  )
  epsilon_curve(step, range(1, 9), delta=1e-5)
  assert len(calls) == 1


@pytest.mark.slow
def test_different_mechanisms_compose():
  """Against dp_accounting, and two halves of a run against the whole."""
  parts = [_run(1.0, 0.02, 100), compose(dpa.GaussianDpEvent(6.0), 5)]
  event = dpa.ComposedDpEvent([*parts, dpa.LaplaceDpEvent(3.0)])
  direct = _PLD().compose(event).get_epsilon(1e-5)
  assert epsilon(event, delta=1e-5) == pytest.approx(direct, rel=1e-3)
  direct = _RDP().compose(event).get_epsilon(1e-5)
  assert epsilon(event, delta=1e-5, accountant="rdp") == pytest.approx(direct, rel=1e-9)
  halves = dpa.ComposedDpEvent([_run(1.0, 0.02, 50), _run(1.0, 0.02, 50)])
  assert epsilon(halves, delta=1e-5) == epsilon(_run(1.0, 0.02, 100), delta=1e-5)


@pytest.mark.cases(long=["300000-2.0-1e-10"])
@pytest.mark.parametrize(
  "steps, noise_multiplier, delta",
  [(4000, 1.0, 1e-8), (4000, 1.0, 1e-11), (4000, 2.0, 2e-12), (300_000, 2.0, 1e-10)],
)
def test_fft_rounding_never_makes_epsilon_too_small(steps, noise_multiplier, delta):
  """At q = 1 - 2^-52 the closed form holds, but the composition goes through the FFT.

  By dp_accounting's transforms the second and the last case lie below it.
  """
  nearly_all = _run(noise_multiplier * math.sqrt(steps), 1 - 2.0**-52, steps)
  exact = dpa.get_epsilon_gaussian(noise_multiplier, delta)
  assert exact * (1 - 1e-9) <= epsilon(nearly_all, delta=delta) <= exact * 1.02


def test_a_delta_below_the_rounding_of_the_fft_is_refused():
  with refuses("delta", value=1e-13):
    epsilon(_run(1.0, 0.01, 4000), delta=1e-13)
  assert epsilon(_run(1.0, 0.01, 4000), delta=1e-13, accountant="rdp") > 5


def test_rdp_of_a_tiny_probability_is_not_rounded_to_zero():
  """Its divergence comes out negative; dp_accounting then claims epsilon 0."""
  event, delta = _run(1e6, 1e-3, 10**6), 1e-9
  assert _gaussian_delta(1e6, 0.0) > delta  # mu = q sqrt(T) / z: epsilon 0 is not true
  assert _RDP().compose(event).get_epsilon(delta) == 0
  assert epsilon(event, delta=delta, accountant="rdp") > 0


@pytest.mark.slow
@pytest.mark.parametrize("noise_of", [accounting.gaussian_event, accounting.laplace_event])
@pytest.mark.parametrize("prob", [5e-324, 1e-310, 1e-160, 1e-30, 0.01])
def test_no_probability_and_no_noise_overflows(noise_of, prob):
  """dp_accounting overflows there. A sample never costs more than all records."""
  for z in (1e-100, 1.2e-3, 2e-3, 0.05, 1.1, 1e100):
    noise = noise_of(z)
    step = accounting.poisson_sampled_event(noise, sampling_prob=prob)
    found, whole = (epsilon(each, delta=1e-6) for each in (step, noise))
    assert 0 <= found <= whole * (1 + 1e-9)


def test_little_laplace_noise_on_a_sample_costs_its_pure_epsilon():
  """e^(1 / z) overflows: the sum over all records stands for that over a sample."""
  event = accounting.poisson_sampled_event(
    accounting.laplace_event(1e-4), sampling_prob=0.01
  )
  assert 1e4 - 5 < epsilon(event, delta=1e-6) < 1e4 + 1


def test_a_truncated_sample_of_hardly_any_record_is_refused():
  noise = accounting.gaussian_event(1.0)
  with refuses("sampling_prob", value=1e-201):
    truncated_poisson_event(noise, sampling_prob=1e-201, num_examples=9, capacity=4)


def test_fine_and_coarse_grids_stay_upper_bounds():
  """Little loss in a step: below dp_accounting's fixed grid. Huge losses: quick, not 1e9
  points. Against the central limit (mu = q sqrt(T (e^(1/z^2) - 1))), 3 %."""
  z, q, steps = 60.0, 0.01, 4000
  event = _run(z, q, steps)
  mu = q * math.sqrt(steps * math.expm1(z**-2))
  found = epsilon(event, delta=1e-5)
  assert found == pytest.approx(dpa.get_epsilon_gaussian(1 / mu, 1e-5), rel=0.03)
  assert found < _PLD().compose(event).get_epsilon(1e-5)
  assert 1e4 < epsilon(_run(0.3, 0.5, 10_000), delta=1e-5) < 1e5


@pytest.mark.parametrize(
  "options",
  [
    {"delta": 0.0},
    {"delta": 1.0},
    {"delta": 1e-5, "accountant": "prv"},
    {"delta": 1e-5, "neighboring_relation": "swap"},
  ],
)
def test_bad_options_are_user_errors(options):
  with pytest.raises(UserError):
    epsilon(dpa.GaussianDpEvent(1.0), **options)


def test_warnings_about_excluded_orders_do_not_reach_the_user(caplog):
  with caplog.at_level(logging.WARNING, logger="absl"):
    epsilon(_run(0.51, 0.11, 10), delta=1e-5, accountant="rdp")
    assert not caplog.records
    _RDP().compose(_run(0.51, 0.11, 10))
    assert caplog.records  # the filter is gone again

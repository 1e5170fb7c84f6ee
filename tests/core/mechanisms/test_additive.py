"""Laplace and Gaussian noise: their laws both ways, calibration, events, bad input."""

import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpjax import accounting, mechanisms
from dpjax.mechanisms.additive import classic_noise_multiplier, gaussian_delta
from tests.refuses import refuses

_SIZE = 20_000
_LAPLACE = mechanisms.Laplace(epsilon=0.5, l1_sensitivity=3.0)  # scale 6
_GAUSSIAN = mechanisms.Gaussian(noise_multiplier=2.0, l2_sensitivity=3.0)  # std 6


@pytest.mark.cases(slow=["mechanism1-norm"], long=...)
@pytest.mark.parametrize("mechanism, law", [(_LAPLACE, "laplace"), (_GAUSSIAN, "norm")])
def test_the_law_is_the_stated_one_and_no_other(mechanism, law):
  value = jnp.full(3 * _SIZE, 100.0)
  sample = np.asarray(mechanism(jax.random.key(0), value)) - 100
  assert stats.kstest(sample / 6, law).pvalue > 1e-3
  for wrong in (2 / 3, 0.9, 1.1, 3 / 2):
    assert stats.kstest(sample / (6 * wrong), law).pvalue < 1e-6
  other = "norm" if law == "laplace" else "laplace"
  assert stats.kstest(sample / 6, other).pvalue < 1e-6


@pytest.mark.cases(slow=[1], long=...)
@pytest.mark.parametrize("mechanism", [_LAPLACE, _GAUSSIAN])
def test_p17_keys_decide_and_coordinates_are_independent(mechanism):
  draw = lambda seed: np.asarray(mechanism(jax.random.key(seed), jnp.zeros((2, _SIZE))))
  np.testing.assert_array_equal(draw(0), draw(0))
  (first, second), (third, _) = draw(0), draw(1)
  for a, b in ((first, second), (first, third)):
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(_SIZE)


@pytest.mark.cases(
  slow=["float16-mechanism1", "int32-mechanism0"],
  long=["bfloat16-mechanism0", "bfloat16-mechanism1", "float16-mechanism0"],
)
@pytest.mark.parametrize("mechanism", [_LAPLACE, _GAUSSIAN])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.float32])
def test_p20_noise_is_at_least_float32(mechanism, dtype):
  out = mechanism(jax.random.key(0), jnp.zeros(1000, dtype))
  assert out.dtype == jnp.float32
  assert np.unique(out).size > 500  # of a grid of 1/128 of the scale


@given(
  epsilon=st.floats(0.01, 10),
  moves=st.lists(st.floats(-5, 5), min_size=1, max_size=5),
  outputs=st.lists(st.floats(-50, 50), min_size=5, max_size=5),
)
def test_p26_laplace_is_pure_dp_for_the_l1_norm(epsilon, moves, outputs):
  moves, outputs = np.array(moves), np.array(outputs[: len(moves)])
  l1, l2 = np.abs(moves).sum(), np.linalg.norm(moves)
  if l1 < 1e-3:
    return
  scale = mechanisms.Laplace(epsilon, float(l1)).scale
  loss = lambda y, b: float(np.sum(np.abs(y - moves) - np.abs(y)) / b)
  assert abs(loss(outputs, scale)) <= epsilon * (1 + 1e-9)
  beyond = 100 * np.sign(moves) * -1.0
  assert loss(beyond, scale) == pytest.approx(epsilon)  # attained
  if l2 < 0.99 * l1:  # the L2 norm is the wrong one for this noise
    assert loss(beyond, mechanisms.Laplace(epsilon, float(l2)).scale) > epsilon * 1.009


def test_p26_one_laplace_event_covers_every_split_of_the_l1_norm():
  whole = mechanisms.Laplace(epsilon=1.0, l1_sensitivity=1.0).event()
  for shares in ((0.5, 0.5), (0.9, 0.1), (0.25,) * 4):
    composed = dpa.ComposedDpEvent([accounting.laplace_event(1 / s) for s in shares])
    for at in (0.0, 0.3, 0.7, 0.95):
      mine = accounting.delta(composed, epsilon=at)
      assert mine <= accounting.delta(whole, epsilon=at) * (1 + 1e-3)


@pytest.mark.parametrize(
  "epsilon, delta, z",
  [(1, 1e-3, 2.5747), (2, 1e-5, 1.9938), (8, 1e-3, 0.4800), (8, 1e-5, 0.6002)],
)
def test_t14_analytic_noise_multipliers(epsilon, delta, z):
  found = mechanisms.analytic_noise_multiplier(epsilon, delta)
  assert found == pytest.approx(z, abs=5e-5)


def test_t14_the_classic_one_is_larger_and_p24_has_no_value_beyond_one():
  for epsilon in (0.1, 0.5, 0.99):
    classic = classic_noise_multiplier(epsilon, 1e-3)
    assert classic > mechanisms.analytic_noise_multiplier(epsilon, 1e-3)
    assert classic * epsilon == pytest.approx(3.7765, abs=5e-5)
  for epsilon in (1.0, 5.0, 10.0):
    with refuses("epsilon"):
      classic_noise_multiplier(epsilon, 1e-5)
    with refuses("epsilon"):
      mechanisms.Gaussian.calibrated(
        epsilon=epsilon, delta=1e-5, l2_sensitivity=1.0, method="classic"
      )


@pytest.mark.cases(quick=["5.0-4.54"], long=...)
@pytest.mark.parametrize("epsilon, truly", [(5.0, 4.54), (10.0, 10.39), (20.0, 25.44)])
def test_p24_analytic_holds_where_the_classic_formula_fails(epsilon, truly):
  classic = math.sqrt(2 * math.log(1.25 / 1e-5)) / epsilon
  cost = lambda z: accounting.epsilon(accounting.gaussian_event(z), delta=1e-5)
  assert cost(classic) == pytest.approx(truly, rel=1e-3)
  assert (gaussian_delta(classic, epsilon) > 1e-5) == (truly > epsilon)
  mine = mechanisms.analytic_noise_multiplier(epsilon, 1e-5)
  assert cost(mine) == pytest.approx(epsilon, rel=1e-3)


@given(
  log_epsilon=st.floats(math.log(1e-3), math.log(50)),
  log_delta=st.floats(math.log(1e-12), math.log(0.5)),
)
def test_p25_calibration_lands_on_the_private_side(log_epsilon, log_delta):
  epsilon, delta = math.exp(log_epsilon), math.exp(log_delta)
  z = mechanisms.analytic_noise_multiplier(epsilon, delta)
  assert gaussian_delta(z, epsilon) <= delta
  assert gaussian_delta(z * (1 - 1e-6), epsilon) > delta


@given(z=st.floats(0.05, 50), epsilon=st.floats(0, 20))
def test_the_closed_form_is_the_hockey_stick_of_two_normals(z, epsilon):
  """By quadrature of max(0, p - e^eps q), which has one sign change."""
  cut = epsilon * z - 0.5 / z  # where the loss of N(0, 1) against N(1 / z, 1) is epsilon
  near = stats.norm.sf(cut)
  far = math.exp(epsilon + stats.norm.logsf(cut + 1 / z))
  exact = near - far
  assert gaussian_delta(z, epsilon) == pytest.approx(exact, abs=2e-14, rel=1e-6)


@pytest.mark.parametrize(
  "epsilon, delta", [(1e-12, 1e-18), (1e-6, 1e-9), (1e-3, 1e-15), (30.0, 1e-40)]
)
def test_p25_tiny_targets_stay_on_the_private_side(epsilon, delta):
  """Against 60 digits: float64 differences of nearly equal numbers could round to zero."""
  z = mechanisms.analytic_noise_multiplier(epsilon, delta)
  with mpmath.workdps(60):
    half, middle = 1 / (2 * mpmath.mpf(z)), mpmath.mpf(epsilon) * mpmath.mpf(z)
    far = mpmath.exp(mpmath.mpf(epsilon)) * mpmath.ncdf(-half - middle)
    exact = mpmath.ncdf(half - middle) - far
  assert 0 < exact <= delta * (1 + 1e-12)
  with refuses("epsilon"):
    mechanisms.analytic_noise_multiplier(1e-16, 1e-20)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_special"])
def test_p9_events_state_the_relation_of_the_sensitivity(relation):
  pure = mechanisms.Laplace(1.0, 2.0, relation)
  gaussian = mechanisms.Gaussian.calibrated(
    epsilon=2.0, delta=1e-5, l2_sensitivity=7.0, neighboring_relation=relation
  )
  cost = lambda m, under: accounting.epsilon(
    m.event(under), delta=1e-5, neighboring_relation=under
  )
  assert cost(gaussian, relation) == pytest.approx(2.0, rel=1e-3)
  assert cost(pure, relation) == pytest.approx(1.0, rel=1e-3)
  assert cost(pure, "replace_one") == pytest.approx(2.0, rel=1e-3)  # two hops
  assert cost(gaussian, "replace_one") > 4.0


def test_p9_a_replace_one_sensitivity_is_not_accounted_as_add_or_remove():
  pure = mechanisms.Laplace(1.0, 2.0, "replace_one")
  gaussian = mechanisms.Gaussian.calibrated(
    epsilon=2.0, delta=1e-5, l2_sensitivity=7.0, neighboring_relation="replace_one"
  )
  for mechanism, epsilon in ((pure, 1.0), (gaussian, 2.0)):
    event = mechanism.event("replace_one")
    found = accounting.epsilon(event, delta=1e-5, neighboring_relation="replace_one")
    assert found == pytest.approx(epsilon, rel=1e-3)
    for other in ("add_or_remove_one", "replace_special"):
      with refuses("neighboring_relation"):
        mechanism.event(other)
    with refuses("neighboring_relation"):
      mechanism.event()


@pytest.mark.long
def test_they_run_under_jit_and_vmap():
  keys = jax.random.split(jax.random.key(0), 3)
  for mechanism in (_LAPLACE, _GAUSSIAN):
    out = jax.jit(jax.vmap(mechanism))(keys, jnp.zeros((3, 5)))
    np.testing.assert_allclose(out[1], mechanism(keys[1], jnp.zeros(5)), rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(bad):
  for mechanism in (_LAPLACE, _GAUSSIAN):
    with refuses("value"):
      mechanism(jax.random.key(0), jnp.array([0.0, bad]))


_BAD = [0, -1.0, math.nan, math.inf, "1", None, True]


@pytest.mark.parametrize("bad", _BAD)
def test_bad_amounts_are_one_line(bad):
  calls = {
    "epsilon": lambda: mechanisms.Laplace(bad, 1.0),
    "l1_sensitivity": lambda: mechanisms.Laplace(1.0, bad),
    "noise_multiplier": lambda: mechanisms.Gaussian(bad, 1.0),
    "l2_sensitivity": lambda: mechanisms.Gaussian(1.0, bad),
    "delta": lambda: mechanisms.analytic_noise_multiplier(1.0, bad),
  }
  for field, call in calls.items():
    with refuses(field, value=bad) as info:
      call()
    assert "\n" not in str(info.value)


def test_bad_names_suggest_the_right_one():
  with refuses("method"):
    mechanisms.Gaussian.calibrated(
      epsilon=1.0, delta=1e-5, l2_sensitivity=1.0, method="analitic"
    )
  with refuses("neighboring_relation"):
    mechanisms.Laplace(1.0, 1.0, "add_remove")

"""DP-SGLD: its noise is the plan's, and samples at the temperature that is reported."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import transforms
from dpjax.transforms.dp_sgld import sgld_noise_multiplier, sgld_step_size, sgld_temperature
from tests.refuses import refuses


def test_step_size_temperature_and_noise_multiplier_are_one_relation():
  """The noise is that of DP-SGD with sigma = (L / (n C)) sqrt(2 tau / eta)."""
  n, batch, clip, tau, eta = 1000, 50, 0.7, 2.0, 1e-5
  z = sgld_noise_multiplier(
    temperature=tau,
    step_size=eta,
    num_examples=n,
    l2_clip_norm=clip,
    expected_batch_size=batch,
  )
  assert z == pytest.approx(50 / (1000 * 0.7) * (2 * 2.0 / 1e-5) ** 0.5)
  numbers = dict(mean_noise_std=z * clip / batch, num_examples=n)
  assert sgld_temperature(step_size=eta, **numbers) == pytest.approx(tau)
  assert sgld_step_size(temperature=tau, **numbers) == pytest.approx(eta)
  for num_examples in (0, -5):
    with refuses("num_examples"):
      sgld_step_size(temperature=tau, mean_noise_std=0.1, num_examples=num_examples)


def test_one_step_by_hand():
  tx = transforms.dp_sgld(0.01, mean_noise_std=0.5, num_examples=10, prior_precision=3.0)
  params, grads = {"w": jnp.array([2.0, -1.0])}, {"w": jnp.array([0.3, 0.1])}
  update, _ = tx.update(grads, tx.init(params), params)
  np.testing.assert_allclose(update["w"], [-0.01 * (3 + 6), -0.01 * (1 - 3)], rtol=1e-6)


def _chain_variance(step_size, noise_multiplier, n=20, width=4000, steps=400):
  """Stationary variance on U = n |theta|^2 / 2, many chains side by side."""
  private = dpjax.clip_and_noise(
    l2_clip_norm=1e3,
    noise_multiplier=noise_multiplier,
    normalize_by=n,
    key=jax.random.key(0),
  )
  std = noise_multiplier * 1e3 / n
  sgld = transforms.dp_sgld(step_size, mean_noise_std=std, num_examples=n)
  tx = optax.chain(private, sgld)

  def step(carry, _):
    theta, state = carry
    grads = jnp.broadcast_to(theta, (n, width))  # of |theta|^2 / 2, for each example
    update, state = tx.update(dpjax.wrap_grads(grads), state, theta, mask=jnp.ones(n, bool))
    return (theta + update, state), None

  start = jnp.zeros(width)
  (theta, _), _ = jax.jit(
    lambda: jax.lax.scan(step, (start, tx.init(start)), None, length=steps)
  )()
  return float(jnp.var(theta)), std


def test_the_chain_samples_at_the_reported_temperature():
  """Stationary variance of the Euler scheme on a quadratic: (tau / n) / (1 - h n / 2)."""
  n, h = 20, 0.002
  variance, std = _chain_variance(h, 2e-4)
  tau = sgld_temperature(step_size=h, mean_noise_std=std, num_examples=n)
  expected = tau / n / (1 - h * n / 2)
  assert variance == pytest.approx(expected, rel=0.1)  # std of the estimate: 2.2 %
  assert variance != pytest.approx(2 * expected, rel=0.1)  # noise counted twice


def test_it_adds_no_noise_of_its_own_and_refuses_to_run_without_the_plans():
  tx = transforms.dp_sgld(0.1, mean_noise_std=1.0, num_examples=5)
  zero = jnp.zeros(3)
  np.testing.assert_array_equal(tx.update(zero, tx.init(zero), zero)[0], 0)
  for bad in (0.0, -1.0, float("nan"), {"w": 1.0}):
    with refuses("mean_noise_std"):
      transforms.dp_sgld(0.1, mean_noise_std=bad, num_examples=5)
  with refuses("params", value=None):
    tx.update(zero, tx.init(zero))


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"step_size": 0.0}, "step_size"),
    ({"num_examples": 0}, "num_examples"),
    ({"temperature": float("inf")}, "temperature"),
  ],
)
def test_wrong_arguments_are_named(changes, field):
  options = dict(
    temperature=1.0,
    step_size=1.0,
    num_examples=1,
    l2_clip_norm=1.0,
    expected_batch_size=1.0,
  )
  with refuses(field):
    sgld_noise_multiplier(**{**options, **changes})

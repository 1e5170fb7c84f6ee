"""DP-Adam: Adam without noise, bit for bit; with noise, an unbiased second moment."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import transforms
from dpjax.transforms.dp_adam import scale_by_dp_adam
from tests.refuses import refuses

_PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}


def _grads(step):
  rng = np.random.default_rng(step)
  return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), _PARAMS)


@pytest.mark.cases(long=["0.0"])
@pytest.mark.parametrize("mean_noise_std", [0.0, {"w": 0.0, "b": 0.0}])
def test_without_noise_it_is_adam_bit_for_bit(mean_noise_std):
  schedule = optax.linear_schedule(0.1, 0.01, 4)
  pairs = [
    optax.adam(schedule),
    transforms.dp_adam(schedule, mean_noise_std=mean_noise_std),
  ]
  states = [tx.init(_PARAMS) for tx in pairs]
  for step in range(5):
    updates = [None, None]
    for i, tx in enumerate(pairs):
      updates[i], states[i] = tx.update(_grads(step), states[i], _PARAMS)
    jax.tree.map(np.testing.assert_array_equal, *updates)


def _after_private_steps(mean_noise_std, steps=200):
  """Adam's state after steps with a known signal under the noise of a plan."""
  signal = jnp.concatenate([jnp.zeros(20_000), jnp.full(20_000, 0.3)])
  private = dpjax.clip_and_noise(
    l2_clip_norm=1e3, noise_multiplier=1e-3, normalize_by=1, key=jax.random.key(0)
  )
  tx = optax.chain(private, scale_by_dp_adam(mean_noise_std=mean_noise_std))

  @jax.jit
  def run(state):
    step = lambda state, _: (
      tx.update(dpjax.wrap_grads(signal[None]), state, mask=jnp.ones(1, bool))[1],
      None,
    )
    return jax.lax.scan(step, state, None, length=steps)[0]

  return run(tx.init(signal))[1]


@pytest.mark.long
def test_p45_the_second_moment_is_unbiased_and_that_of_adam_is_not():
  state = _after_private_steps(1.0)
  v_hat = np.asarray(optax.tree.bias_correction(state.nu, 0.999, state.count), np.float64)
  for part, expected in ((slice(0, 20_000), 0.0), (slice(20_000, None), 0.09)):
    estimate = v_hat[part] - 1.0  # what the update takes the root of
    error = estimate.std() / np.sqrt(estimate.size)
    assert abs(estimate.mean() - expected) < 5 * error
    assert abs(v_hat[part].mean() - expected) > 100 * error  # biased by the noise
    half = v_hat[part] - 0.5**2
    assert abs(half.mean() - expected) > 100 * error  # half of the noise taken off


def test_p45_the_update_divides_by_the_signal_not_by_the_noise():
  tx = scale_by_dp_adam(mean_noise_std={"w": 3.0, "b": 12.0}, noise_floor=0.1)
  grads = {"w": jnp.full((3, 2), 5.0), "b": jnp.full(2, 13.0)}
  update, _ = tx.update(grads, tx.init(_PARAMS))
  np.testing.assert_allclose(update["w"], 5 / 4, rtol=1e-4)  # sqrt(25 - 9)
  np.testing.assert_allclose(update["b"], 13 / 5, rtol=1e-4)  # sqrt(169 - 144)


def test_where_noise_rules_the_floor_bounds_the_step():
  tx = scale_by_dp_adam(mean_noise_std=2.0, noise_floor=0.5)
  update, _ = tx.update(jnp.array([0.1, -1.9]), tx.init(jnp.zeros(2)))
  np.testing.assert_allclose(update, [0.1, -1.9], rtol=1e-5)  # / (0.5 * 2)


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  "options",
  [
    {"mean_noise_std": -1.0},
    {"mean_noise_std": float("inf")},
    {"mean_noise_std": 1.0, "b2": 1.0},
    {"mean_noise_std": 1.0, "noise_floor": -0.1},
  ],
)
def test_wrong_arguments_are_named(options):
  field = list(options)[-1]
  with refuses(field, value=options[field]):
    transforms.dp_adam(0.1, **options)

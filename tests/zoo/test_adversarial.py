"""The generator learns from released numbers alone; the critic is DP-SGD on pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import Batch
from dpjax.key_uses import KeyUse
from dpjax.zoo import recipes
from tests import plans
from tests.refuses import refuses

# What is folded into the noise key for the keys of pairs.
_PAIRS = KeyUse.PAIRS
_X = jnp.array([[0.5, 1.0], [-1.0, 0.25], [2.0, -0.5]])
_MASK = jnp.array([True, True, False])
_CRITIC = jnp.array([0.1, -0.2])
_GENERATOR = jnp.array([0.3, 0.4])


def _pair(generator, key, x):
  return x, generator + jax.random.normal(key, (2,))


def _critic_loss(critic, pair):
  real, made = pair
  return jnp.sum(critic * (made - real)) + jnp.sum(critic**2)


def _generator_loss(generator, critic, key):
  made = generator[None] + jax.random.normal(key, (5, 2))
  return -jnp.mean(made @ critic) + jnp.sum(generator**2)


def _both(plan, public=1):
  return recipes.adversarial(
    _critic_loss,
    _generator_loss,
    plan,
    pair=_pair,
    critic_tx=optax.sgd(0.5),
    generator_tx=optax.sgd(0.25),
    noise_key=jax.random.key(0),
    public_key=jax.random.key(public),
  )


@pytest.mark.slow
def test_two_steps_are_those_of_a_loop_over_single_examples():
  both = _both(plans.of_three())
  state = both.init(_CRITIC, _GENERATOR)
  critic = np.asarray(_CRITIC, np.float64)
  generator = np.asarray(_GENERATOR, np.float64)
  for step in range(2):
    state, _ = both.step(state, Batch(_X, _MASK))
    secret = jax.random.fold_in(jax.random.key(0), _PAIRS)
    pairs_key = jax.random.fold_in(secret, step)
    total = np.zeros(2)
    for key, x, is_real in zip(jax.random.split(pairs_key, 3), _X, _MASK):
      made = generator + np.asarray(jax.random.normal(key, (2,)), np.float64)
      gradient = made - np.asarray(x, np.float64) + 2 * critic
      total += is_real * gradient / max(1.0, np.linalg.norm(gradient))
    critic = critic - 0.5 * total / 2
    # d/dg of -mean((g + z) critic) + g^2, whatever z is.
    generator = generator - 0.25 * (-critic + 2 * generator)
    np.testing.assert_allclose(state.critic.params, critic, rtol=1e-5)
    np.testing.assert_allclose(state.generator, generator, rtol=1e-5)
  with refuses("batch.step", value=0):  # the critic's batches have their turns
    both.step(state, Batch(_X, _MASK, np.zeros((len(_X), 4), np.int32)))


@pytest.mark.slow
def test_the_generator_is_a_function_of_released_critics():
  """Other records with the same critic leave the same generator, bit for bit."""
  both = _both(plans.of_three(noise_multiplier=1.0))
  state = both.init(_CRITIC, _GENERATOR)
  after, _ = both.step(state, Batch(_X, _MASK))
  other, _ = both.step(state, Batch(-3 * _X, ~_MASK))
  assert not np.array_equal(after.critic.params, other.critic.params)
  _, generator_key = jax.random.split(jax.random.fold_in(jax.random.key(1), 0))
  for seen in (after, other):
    gradient = jax.grad(_generator_loss)(_GENERATOR, seen.critic.params, generator_key)
    np.testing.assert_array_equal(seen.generator, _GENERATOR - 0.25 * gradient)


@pytest.mark.slow
def test_both_networks_cost_the_critic_s_steps():
  plan = plans.of_three(noise_multiplier=1.0)
  both = _both(plan)
  state = both.init(_CRITIC, _GENERATOR)
  step = jax.jit(both.step)
  for _ in range(3):
    state, _ = step(state, Batch(_X, _MASK))
  assert plan.spent(state.critic).epsilon == plan.epsilon(steps=3)


@pytest.mark.slow
def test_steps_beyond_the_plan_leave_no_generator():
  both = _both(plans.of_three(noise_multiplier=1.0))
  state = both.init(_CRITIC, _GENERATOR)
  step = jax.jit(both.step)
  for _ in range(5):
    state, _ = step(state, Batch(_X, _MASK))
  assert np.isnan(state.generator).all()


def test_what_is_not_proved_is_refused():
  with refuses("plan.slices", value=2):
    _both(plans.of_three(slices=2))
  with refuses("public_key"):
    recipes.adversarial(
      _critic_loss,
      _generator_loss,
      plans.of_three(),
      pair=_pair,
      critic_tx=optax.sgd(1.0),
      generator_tx=optax.sgd(1.0),
      noise_key=jax.random.key(0),
      public_key=3,
    )


def _sign(key):
  return jnp.where(jax.random.bernoulli(key), 1.0, -1.0)


def _linear(pair, *, public=1, num_examples=16):
  """One step without noise: the critic ends at the sum of all pairs, each of -1 or 1."""
  plan = plans.of(num_examples, prob=1.0, noise_multiplier=0.0, normalize_by=1, num_steps=1)
  return recipes.adversarial(
    lambda critic, number: -critic * number,
    lambda generator, critic, key: -critic * generator,
    plan,
    pair=pair,
    critic_tx=optax.sgd(1.0),
    generator_tx=optax.sgd(1.0),
    noise_key=jax.random.key(0),
    public_key=jax.random.key(public),
  )


@pytest.mark.slow
def test_the_public_key_moves_no_pair():
  """Records made for known keys of their places: one that leaves would move all the others."""
  sums = []
  for public in (1, 2):
    both = _linear(lambda generator, key, x: x * _sign(key), public=public)
    # What the keys of places were when they followed from the public one.
    pairs_key, _ = jax.random.split(jax.random.fold_in(jax.random.key(public), 0))
    rows = jax.vmap(_sign)(jax.random.split(pairs_key, 16))
    state, _ = both.step(both.init(0.0, 0.0), Batch(rows, jnp.ones(16, bool)))
    signs = jax.vmap(_sign)(
      jax.random.split(
        jax.random.fold_in(jax.random.fold_in(jax.random.key(0), _PAIRS), 0), 16
      )
    )
    assert float(state.critic.params) == float(jnp.sum(rows * signs))
    sums.append(abs(float(state.critic.params)))
  # The attack reached 16, the sum of all.
  assert max(sums) < 16


def test_a_public_key_that_follows_from_the_noise_key_is_refused():
  for key in (jax.random.key(0), jax.random.fold_in(jax.random.key(0), 3)):
    with refuses("public_key"):
      recipes.adversarial(
        _critic_loss,
        _generator_loss,
        plans.of_three(),
        pair=_pair,
        critic_tx=optax.sgd(1.0),
        generator_tx=optax.sgd(1.0),
        noise_key=jax.random.key(0),
        public_key=key,
      )


def test_a_pair_that_sees_other_examples_is_refused():
  @jax.custom_batching.custom_vmap
  def centred(x):
    return x

  @centred.def_vmap
  def _(size, batched, x):
    return x - jnp.mean(x, axis=0), True

  both = _linear(lambda generator, key, x: centred(x))
  with refuses("pair"):
    both.step(both.init(0.0, 0.0), Batch(jnp.ones(16), jnp.ones(16, bool)))


def test_arrays_that_come_after_init_or_by_the_optimizer_are_refused():
  secret = jnp.arange(3.0)
  holder = [jnp.zeros(())]
  late = recipes.distillation(
    lambda teacher, x: teacher * x,
    lambda student, teacher, x: jnp.sum(student * holder[0]),
    plans.of_three(),
    inputs=lambda public, teacher, key: 1.0,
    teacher_tx=optax.sgd(1.0),
    student_tx=optax.sgd(1.0),
    noise_key=jax.random.key(0),
    public_key=jax.random.key(1),
  )
  state = late.init(0.0, jnp.zeros(3))
  holder[0] = secret
  with refuses("student_loss"):
    late.student_step(state)
  keeps = optax.GradientTransformation(
    lambda params: secret, lambda updates, state, params=None: (updates + state, state)
  )
  both = recipes.adversarial(
    _critic_loss,
    _generator_loss,
    plans.of_three(),
    pair=_pair,
    critic_tx=optax.sgd(1.0),
    generator_tx=keeps,
    noise_key=jax.random.key(0),
    public_key=jax.random.key(1),
  )
  with refuses("generator_loss"):
    both.init(_CRITIC, _GENERATOR)

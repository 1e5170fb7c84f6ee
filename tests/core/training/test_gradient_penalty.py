"""The penalty of WGAN-GP reads one pair; what a record moves is the clip norm, as before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dpjax import Batch, training
from dpjax.key_uses import KeyUse, key_for
from dpjax.zoo import recipes
from tests import plans
from tests.refuses import refuses

_X = jnp.array([[0.5, 1.0], [-1.0, 0.25], [2.0, -0.5]])
_MASK = jnp.array([True, True, False])
_CRITIC = jnp.array([0.9, -1.2])
_GENERATOR = jnp.array([0.3, 0.4])


def test_it_is_the_formula_and_so_is_its_gradient():
  """Of a x^2 / 2 + b x, whose gradient at x is a x + b."""
  real = np.array([1.0, 2.0])
  made = np.array([-1.0, 0.5])
  key = jax.random.key(3)
  share = float(jax.random.uniform(key, ()))
  at = share * real + (1 - share) * made

  def penalty(weights):
    score = lambda x: weights[0] * jnp.sum(x**2) / 2 + weights[1] * jnp.sum(x)
    return training.gradient_penalty(score, real, made, key)

  def expected(weights):
    return (np.linalg.norm(weights[0] * at + weights[1]) - 1) ** 2

  weights = np.array([0.7, -0.3])
  found, gradient = jax.value_and_grad(penalty)(jnp.asarray(weights, jnp.float32))
  np.testing.assert_allclose(found, expected(weights), rtol=1e-5)
  for place in range(2):
    step = np.eye(2)[place] * 1e-5
    slope = (expected(weights + step) - expected(weights - step)) / 2e-5
    np.testing.assert_allclose(gradient[place], slope, rtol=1e-4)


def test_a_flat_critic_has_a_penalty_of_1_and_a_finite_gradient():
  penalty = lambda w: training.gradient_penalty(
    lambda x: jnp.sum(w * x), jnp.ones(2), jnp.zeros(2), jax.random.key(0)
  )
  found, gradient = jax.value_and_grad(penalty)(jnp.zeros(2))
  assert found == 1 and np.isfinite(gradient).all()


def _pair(generator, key, x):
  return x, generator + jax.random.normal(key, (2,)), key


def _critic_loss(critic, pair):
  real, made, key = pair
  score = lambda x: jnp.sum(critic * x)
  return score(made) - score(real) + 10 * training.gradient_penalty(score, real, made, key)


def _generator_loss(generator, critic, key):
  return -jnp.sum(critic * (generator + jax.random.normal(key, (2,))))


def _both(critic_loss=_critic_loss, generator_loss=_generator_loss, **options):
  return recipes.adversarial(
    critic_loss,
    generator_loss,
    plans.of_three(),
    pair=_pair,
    critic_tx=optax.sgd(0.5),
    generator_tx=optax.sgd(0.25),
    noise_key=jax.random.key(0),
    public_key=jax.random.key(1),
    **options,
  )


def test_a_neighbour_moves_a_critic_with_a_penalty_by_the_clip_norm_at_most():
  both = _both(critic_steps=2)
  step = jax.jit(both.step)
  before = both.init(_CRITIC, _GENERATOR)
  state, _ = step(before, Batch(_X, _MASK))
  critic = np.asarray(_CRITIC, np.float64)
  # Keys of pairs are secret: they follow from the noise key.
  pairs_key = jax.random.fold_in(key_for(KeyUse.PAIRS, jax.random.key(0)), 0)
  norm = np.linalg.norm(critic)
  total = np.zeros(2)
  for key, x, counts in zip(jax.random.split(pairs_key, 3), _X, _MASK):
    made = np.asarray(_GENERATOR + jax.random.normal(key, (2,)), np.float64)
    # The gradient of w x is w everywhere.
    gradient = made - np.asarray(x, np.float64) + 20 * (norm - 1) * critic / norm
    total += counts * gradient / max(1.0, np.linalg.norm(gradient))
  np.testing.assert_allclose(state.critic.params, critic - 0.5 * total / 2, rtol=1e-5)
  for far in (1e6, -1e18, np.inf, np.nan):
    neighbour = Batch(_X.at[2].set(far), jnp.ones(3, bool))
    other, _ = step(before, neighbour)
    moved = 2 * (other.critic.params - state.critic.params) / 0.5
    assert np.linalg.norm(moved) <= 1.0 + 1e-5
  # The generator moves after every second step of the critic, and knows no more than before.
  np.testing.assert_array_equal(state.generator, _GENERATOR)
  second, _ = step(state, Batch(_X, _MASK))
  expected = _GENERATOR + 0.25 * second.critic.params
  np.testing.assert_allclose(second.generator, expected, rtol=1e-6)


class _Mixing(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(x))[..., 0]


def test_what_mixes_examples_is_refused():
  rows = jnp.ones((4, 2))
  with refuses("score"):
    training.gradient_penalty(lambda x: jnp.sum(x, axis=-1), rows, rows, jax.random.key(0))
  with refuses("generated"):
    training.gradient_penalty(jnp.sum, rows, rows[0], jax.random.key(0))
  mixing = _Mixing()
  variables = mixing.init(jax.random.key(0), rows)

  def critic_loss(params, pair):
    real, made, key = pair
    score = lambda x: mixing.apply(params, x[None], mutable=["batch_stats"])[0][0]
    return score(made) - score(real) + training.gradient_penalty(score, real, made, key)

  both = _both(critic_loss, lambda generator, critic, key: jnp.sum(generator))
  state = both.init(variables, _GENERATOR)
  with refuses("loss_fn"):
    both.step(state, Batch(_X, _MASK))


def test_a_generator_that_reads_private_rows_is_refused():
  reads = lambda generator, critic, key: jnp.mean(_X @ generator)
  with refuses("generator_loss"):
    _both(generator_loss=reads).init(_CRITIC, _GENERATOR)
  with refuses("critic_steps", value=0):
    _both(critic_steps=0)

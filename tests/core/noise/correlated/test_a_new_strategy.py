"""A noise strategy in a file of one's own: WORKSPACE.md, "How to add things". No file is edited."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import accounting
from tests import plans
from tests.refuses import refuses

_STEPS = 6
_STD = 1.3


@dataclasses.dataclass(frozen=True)
class LastStep:
  """C has 1 on its diagonal and 1/2 below it, so a row of C^{-1} z is z_t - (row before) / 2."""

  bands = 2
  toeplitz = True
  buffers = 1

  def multiply(self, x):
    x = np.asarray(x, np.float64)
    return x + 0.5 * np.concatenate([np.zeros_like(x[:1]), x[:-1]])

  def init(self, like):
    return jax.tree.map(jnp.zeros_like, like)

  def next(self, white, before):
    row = jax.tree.map(lambda z, b: z - 0.5 * b, white, before)
    return row, row


@dataclasses.dataclass(frozen=True)
class Forgetful(LastStep):
  """A wrong strategy: it adds less noise than its matrix says."""

  def next(self, white, before):
    return jax.tree.map(lambda z, b: 0.9 * z - 0.5 * b, white, before), white


@dataclasses.dataclass(frozen=True)
class Narrow(LastStep):
  """A wrong strategy: it says that its noise is white, so every sampler would take it."""

  bands = 1


@dataclasses.dataclass(frozen=True)
class Short(LastStep):
  """A wrong strategy: its diagonal is no unit, so its columns look ten times as short."""

  def multiply(self, x):
    return 0.1 * super().multiply(x)


class Unstated:
  """A strategy that does not say how many bands its noise has."""

  toeplitz, buffers = True, 1
  multiply, init, next = LastStep.multiply, LastStep.init, LastStep.next


_CYCLIC = dpjax.CyclicSampler(steps_per_pass=3, num_examples=12)
_ALL = dpjax.PoissonSampler(sampling_prob=1.0, capacity=12)


def _plan(strategy, sampler=_CYCLIC):
  return plans.of(
    sampler=sampler,
    noise_multiplier=_STD,
    num_steps=_STEPS,
    neighboring_relation="replace_special",
    noise_shape=dpjax.NoiseShape(correlation=strategy),
  )


def _white(strategy):
  """C times the noise of all steps, in units of its standard deviation: [steps, coordinates]."""
  plan = _plan(strategy)
  params = jnp.zeros(4000)
  tx = plan.transform(jax.random.key(3))
  nothing = dpjax.wrap_grads(jnp.zeros((2, 4000)), mask=True)

  def step(state, _):
    update, state = tx.update(nothing, state, params)
    return state, update

  _, noise = jax.jit(lambda s: jax.lax.scan(step, s, None, length=_STEPS))(tx.init(params))
  return strategy.multiply(np.asarray(noise)) * plan.normalize_by / _STD


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "sound"), [(LastStep(), True), (Forgetful(), False)])
def test_its_noise_is_white_behind_its_matrix(strategy, sound):
  covariance = np.cov(_white(strategy))
  # 4,000 coordinates: an entry of the covariance has a standard deviation of at most .023.
  assert (np.abs(covariance - np.eye(_STEPS)).max() < 0.1) == sound


def test_its_cost_is_that_of_its_matrix():
  # An example takes part in two steps, three apart: its columns do not touch, each 1.25 long.
  sensitivity = math.sqrt(2 * 1.25)
  gaussian = accounting.gaussian_event(_STD / sensitivity)
  expected = accounting.epsilon(
    gaussian, delta=1e-5, neighboring_relation="replace_special"
  )
  plan = _plan(LastStep())
  assert plan.epsilon() == pytest.approx(expected, rel=1e-6)
  assert plan.assumptions  # nobody proved that `next` is the inverse of `multiply`


def test_a_matrix_that_is_not_as_its_strategy_says_is_refused():
  """Of all records in every step, noise of two bands counted as white: six squared sensitivities
  where the matrix has more than twelve."""
  cost = np.sum(LastStep().multiply(np.ones((_STEPS, 1))) ** 2)
  assert cost == 1 + 5 * 1.5**2 > 2 * _STEPS
  for wrong, sampler in ((Narrow(), _ALL), (Unstated(), _ALL), (Short(), _CYCLIC)):
    with refuses("correlation"):
      _plan(wrong, sampler)
  with refuses("sampler"):
    _plan(LastStep(), _ALL)


@pytest.mark.slow
def test_a_training_loop_takes_it():
  plan = _plan(LastStep())
  x = np.ones((12, 2), np.float32)
  loss = lambda w, row: jnp.square(jnp.dot(w, row) - 1.0)
  tx = optax.chain(plan.transform(dpjax.new_key()), optax.sgd(0.1))
  w = jnp.zeros(2)
  state = tx.init(w)
  for batch in plan.batches(x):
    updates, state = tx.update(plan.clipped_grad(loss)(w, batch), state, w)
    w = optax.apply_updates(w, updates)
  assert plan.spent(state).steps == _STEPS and bool(jnp.isfinite(w).all())

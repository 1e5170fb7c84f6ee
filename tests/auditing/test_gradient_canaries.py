"""White-box canaries through a plan's own sampler, clipping and noise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import auditing
from dpjax.auditing.canaries import Canaries
from dpjax.auditing.gradient_canaries import CanarySums, sum_scores
from dpjax.auditing.lower_bounds import gdp_lower_bound
from dpjax.plan import Plan
from dpjax.sampling import PoissonSampler
from tests import plans
from tests.refuses import refuses


def _plan(planted, epsilon, m):
  """One Gaussian release on everybody."""
  return plans.of(
    m,
    prob=1.0,
    noise_multiplier=planted.noise_multiplier(epsilon),
    normalize_by=1,
    num_steps=1,
    delta=planted.delta,
  )


def _scores(planted, bug, epsilon, m=1000, seed=0):
  plan = _plan(planted, epsilon, m)
  transform = lambda key: planted.transform(bug, plan.noise_multiplier, key)
  return auditing.gradient_canaries(
    plan, num_canaries=m, seed=seed, key=jax.random.key(seed + 1), transform=transform
  )


def test_coins_that_all_fall_alike_and_odd_seeds_are_one_line(planted):
  coins = lambda seed: np.random.default_rng([seed, 0x0C01]).random(2) < 0.5
  alike = next(seed for seed in range(99) if len({*coins(seed)}) == 1)
  for seed, message in ((alike, "num_canaries"), (-1, "seed")):
    with refuses(message):
      _scores(planted, "none", 1.0, m=2, seed=seed)


def test_a_transform_that_returns_nan_is_not_audited(planted):
  """A guard returns it for what it refuses: all scores were 0, and nothing was refuted."""
  plan = _plan(planted, 1.0, 20)

  def nan(key):
    tx = plan.transform(key)
    return tx._replace(update=lambda g, s, p=None, **more: (p * jnp.nan, s))

  options = {"num_canaries": 20, "seed": 0, "key": jax.random.key(0)}
  with refuses("transform"):
    auditing.gradient_canaries(plan, transform=nan, **options)
  sums = CanarySums(jnp.full(2, jnp.nan))
  with refuses("state"):
    sum_scores(sums, Canaries(None, np.array([True, False]), "gradient"))


def test_canaries_give_what_ideal_gaussian_scores_give(planted):
  """The plan's machinery adds nothing and loses nothing: mean 1 against 0, std z."""
  found = _scores(planted, "none", 4.0)
  z = planted.noise_multiplier(4.0)
  for part, mean in ((found.inside, 1.0), (found.outside, 0.0)):
    assert abs(part.mean() - mean) < 5 * z / np.sqrt(part.size)
    assert abs(part.std() / z - 1) < 5 / np.sqrt(2 * part.size)


@pytest.mark.cases(long=["8.0"])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_a_sound_plan_is_not_refuted(planted, epsilon):
  for seed in range(5):
    found = _scores(planted, "none", epsilon, seed=seed)
    assert auditing.one_run(found, delta=planted.delta) <= epsilon
    assert auditing.one_run_fdp(found, delta=planted.delta) <= epsilon


@pytest.mark.cases(long=["2.0"])
@pytest.mark.parametrize("epsilon", [1.0, 2.0])
def test_clipping_removed_is_caught_in_one_run(planted, epsilon):
  found = _scores(planted, "clipping removed", epsilon)
  assert auditing.one_run(found, delta=planted.delta) > epsilon


def test_noise_halved_is_caught_in_one_run_by_gaussian_canaries(planted):
  """One release, orthogonal canaries: their scores are independent Gaussians, so the
  Gaussian bound is exact. The bound for any mechanism is too weak here, and says so."""
  found = _scores(planted, "noise halved", 4.0)
  assert gdp_lower_bound(found, delta=planted.delta) > 4.0
  assert auditing.one_run(found, delta=planted.delta) < 4.0


def test_clip_after_sum_hides_from_a_crowd_of_canaries(planted):
  """Five hundred canaries share one clip norm, each is drowned: only the likelihood ratio of
  one example against another catches it (test_likelihood.py)."""
  found = _scores(planted, "clip after sum", 1.0)
  assert gdp_lower_bound(found, delta=planted.delta) <= 1.0


@pytest.mark.long
def test_dp_sgd_at_epsilon_8_stays_at_or_below_the_proof():
  """Poisson sampling, 40 steps: the sampler, the padding and the noise of a real plan."""
  plan = Plan.calibrated(
    epsilon=8.0,
    delta=1e-5,
    sampler=PoissonSampler(sampling_prob=0.2, capacity=1001),
    num_steps=40,
    l2_clip_norm=1.0,
    normalize_by=200,
  )
  plan = plan.fitted(1000)
  found = auditing.gradient_canaries(plan, num_canaries=1000, seed=3, key=jax.random.key(0))
  bound = auditing.one_run(found, delta=plan.delta)
  assert 0.5 < bound <= plan.epsilon()
  unclipped = auditing.gradient_canaries(
    plan, num_canaries=1000, seed=3, key=jax.random.key(0),
    transform=dataclasses.replace(
      plan, l2_clip_norm=1e6, noise_multiplier=plan.noise_multiplier / 1e6
    ).transform,
  )  # fmt: skip
  assert auditing.one_run(unclipped, delta=plan.delta) > 1.5 * bound

"""A sound mechanism and three broken ones, all of them through the real `clip_and_noise`."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import gradients, transforms
from dpjax.auditing.likelihood import gaussian_log_ratio, trial_scores
from dpjax.mechanisms.additive import analytic_noise_multiplier

DELTA = 1e-5
_C = 1.0
_BIG = 1e6


def _sum_first(base):
  """Clips the sum of the batch, as code without per-example gradients does."""

  def update(grads, state, params=None, *, mask=None, **_):
    mask = jnp.asarray(mask)[:, None]
    total = jnp.sum(jnp.where(mask, grads.arrays, 0), axis=0)[None]
    total = gradients.wrap_grads(total)
    return base.update(total, state, params, mask=jnp.ones(1, bool))

  return optax.GradientTransformationExtraArgs(base.init, update)


def transform(bug, noise_multiplier, key):
  """The transform that claims `noise_multiplier` at clip norm 1, with a bug planted."""
  make = functools.partial(transforms.clip_and_noise, normalize_by=1, key=key)
  if bug == "noise halved":
    return make(l2_clip_norm=_C, noise_multiplier=noise_multiplier / 2)
  if bug == "clipping removed":
    return make(l2_clip_norm=_C * _BIG, noise_multiplier=noise_multiplier / _BIG)
  base = make(l2_clip_norm=_C, noise_multiplier=noise_multiplier)
  return _sum_first(base) if bug == "clip after sum" else base


def noise_multiplier(epsilon):
  """For one Gaussian release at DELTA."""
  return analytic_noise_multiplier(epsilon, DELTA)


def scores(bug, epsilon, num_trials, seed=0):
  """Scores of many noisy sums without and with one example.

  The example that is always there pulls one way with norm 1; the one in question pulls the
  other way with norm 10. Clipped one by one the sum moves by 1, clipped together by 2.
  """
  grads = gradients.wrap_grads(jnp.array([[-_C, 0.0], [10 * _C, 0.0]]))

  @jax.jit
  def sums(keys, mask):
    def one(key):
      tx = transform(bug, noise_multiplier(epsilon), key)
      return tx.update(grads, tx.init(jnp.zeros(2)), jnp.zeros(2), mask=mask)[0]

    return jax.vmap(one)(keys)

  def draw(which, rng, n):
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), n)
    return np.asarray(sums(keys, jnp.array([True, bool(which)])))

  score = gaussian_log_ratio([-_C, 0.0], [0.0, 0.0], 1.0)
  return trial_scores(draw, score, num_trials=num_trials, seed=seed)


@pytest.fixture(scope="session")
def planted():
  """`transform(bug, noise_multiplier, key)`, `scores(bug, epsilon, num_trials)`, ..."""
  return types.SimpleNamespace(
    transform=transform, scores=scores, noise_multiplier=noise_multiplier, delta=DELTA
  )

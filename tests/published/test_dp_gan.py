"""A small DP-GAN on MNIST beside one noisy embedding: what its images teach a classifier.

`python -m tests.published.test_dp_gan` writes results/synthesis/gan.csv;
`python -m pytest -m long tests/published/test_dp_gan.py` makes a short run of it.

Xie et al. 2018 (arXiv:1802.06739), with classes as inputs of both networks. Needs TFDS_DATA_DIR.
"""

import csv
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import dpjax
from dpjax import data
from dpjax.experiments.kinds.synthesis import sample_scores
from dpjax.zoo import recipes

_OUT = pathlib.Path(__file__).parents[2] / "results" / "synthesis" / "gan.csv"
_EPSILONS = (1.0, 8.0)
_NUM_CLASSES = 10
_NUM_LATENTS = 64
_NUM_SAMPLES = 10_000


class _Critic(nn.Module):
  @nn.compact
  def __call__(self, x, y):
    flat = x.reshape(*y.shape, -1)
    seen = jnp.concatenate([flat, 4 * jax.nn.one_hot(y, _NUM_CLASSES)], axis=-1)
    hidden = nn.leaky_relu(nn.Dense(128)(seen))
    return nn.Dense(1)(hidden)[..., 0]


class _Generator(nn.Module):
  @nn.compact
  def __call__(self, z, y):
    seen = jnp.concatenate([z, 4 * jax.nn.one_hot(y, _NUM_CLASSES)], axis=-1)
    hidden = nn.relu(nn.Dense(256)(seen))
    return nn.sigmoid(nn.Dense(784)(hidden)).reshape(*y.shape, 28, 28, 1)


_CRITIC = _Critic()
_GENERATOR = _Generator()


def _pair(params, key, example):
  z = jax.random.normal(key, (_NUM_LATENTS,))
  return example.x, _GENERATOR.apply(params, z, example.y), example.y


def _critic_loss(params, pair):
  real, made, y = pair
  looks_real = _CRITIC.apply(params, real[None], y[None])[0]
  looks_made = _CRITIC.apply(params, made[None], y[None])[0]
  return nn.softplus(-looks_real) + nn.softplus(looks_made)


def _draw(params, key, count):
  y = jnp.arange(count) % _NUM_CLASSES
  return _GENERATOR.apply(params, jax.random.normal(key, (count, _NUM_LATENTS)), y), y


def _generator_loss(params, critic, key):
  x, y = _draw(params, key, 200)
  return nn.softplus(-_CRITIC.apply(critic, x, y)).mean()


def scores(epsilon, *, epochs, seed=0):
  """Returns the row of one run: its guarantee, and the accuracy of two classifiers."""
  train, test = (part.read() for part in data.load("mnist"))
  plan = dpjax.Plan.for_data(
    train, batch_size=600, epochs=epochs, epsilon=epsilon, delta=1e-5, l2_clip_norm=1.0
  )
  both = recipes.adversarial(
    _critic_loss,
    _generator_loss,
    plan,
    pair=_pair,
    critic_tx=optax.adam(2e-3, b1=0.0),
    generator_tx=optax.adam(2e-3, b1=0.0),
    noise_key=jax.random.key(seed),
    public_key=jax.random.key(1000 + seed),
  )
  first_y = jnp.zeros(1, int)
  state = both.init(
    _CRITIC.init(jax.random.key(1), jnp.asarray(train.x[:1]), first_y),
    _GENERATOR.init(jax.random.key(2), jnp.zeros((1, _NUM_LATENTS)), first_y),
  )
  step = jax.jit(both.step, donate_argnums=0)
  began = time.monotonic()
  for batch in plan.batches(train, rng=seed):
    state, _ = step(state, batch)
  spent = plan.spent(state.critic)
  x, y = _draw(state.generator, jax.random.key(3), _NUM_SAMPLES)
  found = sample_scores.downstream(x, y, test.x, test.y)
  return {
    "method": "DP-GAN",
    "epsilon": epsilon,
    "delta": 1e-5,
    "neighboring_relation": "add_or_remove_one",
    "epsilon_computed": round(spent.epsilon, 5),
    "noise_multiplier": round(plan.noise_multiplier, 4),
    "num_steps": plan.num_steps,
    "seed": seed,
    "seconds": round(time.monotonic() - began, 1),
    **{f"test_{name}": round(value, 4) for name, value in found.items()},
  }


@pytest.mark.long
@pytest.mark.skipif("TFDS_DATA_DIR" not in os.environ, reason="needs MNIST")
def test_images_of_a_short_run_teach_more_than_chance():
  row = scores(8.0, epochs=10)
  assert row["epsilon_computed"] <= 8.0
  assert row["test_accuracy"] > 0.3


def main():
  """Writes the table."""
  rows = []
  for epsilon in _EPSILONS:
    rows.append(scores(epsilon, epochs=30))
    print(rows[-1], flush=True)
  with open(_OUT, "w", newline="", encoding="utf-8") as file:
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
  main()

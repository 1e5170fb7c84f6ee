"""Runs private synthesis by two networks: a critic under DP-SGD trains a generator."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dpjax import closed_over, training
from dpjax.accounting.text import paragraph
from dpjax.experiments.config import common
from dpjax.experiments.kinds.synthesis.config import SynthesisConfig, WassersteinGan
from dpjax.experiments.kinds.synthesis.sampled_run import SampledRun, Samples
from dpjax.experiments.run import guarantee, left_out
from dpjax.experiments.run.experiment import Phase, every
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.key_uses import KeyUse, key_for
from dpjax.plan import Plan
from dpjax.types import Array
from dpjax.zoo import recipes

# Weight of the one-hot class beside pixels or latents, so that no network ignores the class.
_CLASS_WEIGHT = 2.0


class ImageCritic(nn.Module):
  """Network from images and their classes to a score: higher means more like real images."""

  hidden: int
  num_classes: int

  @nn.compact
  def __call__(self, x: Array, y: Array) -> Array:
    classes = _CLASS_WEIGHT * jax.nn.one_hot(y, self.num_classes)
    seen = jnp.concatenate([x.reshape(*y.shape, -1), classes], axis=-1)
    return nn.Dense(1)(nn.leaky_relu(nn.Dense(self.hidden)(seen)))[..., 0]


class ImageGenerator(nn.Module):
  """Network from random numbers and classes to images in [0, 1]."""

  hidden: int
  num_classes: int
  shape: tuple[int, ...]

  @nn.compact
  def __call__(self, latents: Array, y: Array) -> Array:
    classes = _CLASS_WEIGHT * jax.nn.one_hot(y, self.num_classes)
    seen = jnp.concatenate([latents, classes], axis=-1)
    hidden = nn.relu(nn.Dense(self.hidden)(seen))
    pixels = nn.Dense(int(np.prod(self.shape)))(hidden)
    return nn.sigmoid(pixels).reshape(*y.shape, *self.shape)


class CriticRun(SampledRun):
  """Holds the parts of one run: plan, critic, generator and their training."""

  def __init__(self, config: SynthesisConfig, train: Any, test: Any, random: RunKeys):
    method = config.method
    assert isinstance(method, WassersteinGan)
    super().__init__(config, train, test, random)
    self.plan = Plan.for_data(
      train,
      epsilon=config.epsilon,
      delta=config.delta,
      batch_size=method.batch_size,
      epochs=method.epochs,
      l2_clip_norm=method.l2_clip_norm,
      neighboring_relation=config.neighboring_relation,
    )
    why = ", the steps of the critic, or no generator learns"
    common.at_most(config, "method.critic_steps", self.plan.num_steps, why)
    self.critic = ImageCritic(method.critic_hidden, train.num_classes)
    self.generator = ImageGenerator(config.hidden, train.num_classes, train.x.shape[1:])
    optimizer = optax.adam(config.learning_rate, b1=0.0)
    self.both = recipes.adversarial(
      self.critic_loss,
      self.generator_loss,
      self.plan,
      pair=self.pair,
      critic_tx=optimizer,
      generator_tx=optimizer,
      noise_key=random.noise,
      public_key=key_for(KeyUse.PUBLIC_STEPS, random.init),
      critic_steps=method.critic_steps,
    )

  def draw(self, params: Any, key: Array, y: Array) -> Array:
    """Returns one image for each class in `y`, with axes [*y.shape, H, W, C]."""
    latents = jax.random.normal(key, (*y.shape, self.config.num_latents))
    return jnp.asarray(self.generator.apply(params, latents, y))

  def pair(self, params: Any, key: Array, example: Any) -> Any:
    """Returns (a record's image, a generated image of its class, the class, a key)."""
    latents_key, between_key = jax.random.split(key)
    made = self.draw(params, latents_key, example.y)
    return example.x, made, example.y, between_key

  def critic_loss(self, params: Any, pair: Any) -> Array:
    """Returns the loss of WGAN-GP for one pair."""
    real, made, y, key = pair

    def score(x: Array) -> Array:
      return self.critic.apply(params, x[None], y[None])[0]

    penalty = training.gradient_penalty(score, real, made, key)
    return score(made) - score(real) + self.config.method.penalty * penalty

  def generator_loss(self, params: Any, critic: Any, key: Array) -> Array:
    """Returns minus the critic's mean score of generated images of all classes."""
    count = self.config.per_class * self.train.num_classes
    y = jnp.arange(count) % self.train.num_classes
    return -jnp.mean(jnp.asarray(self.critic.apply(critic, self.draw(params, key, y), y)))

  def init(self) -> Any:
    """Returns the state before the first step."""
    critic_key, generator_key = jax.random.split(self.first_key())
    y = jnp.zeros(1, jnp.int32)
    latents = jnp.zeros((1, self.config.num_latents))
    return self.both.init(
      self.critic.init(critic_key, jnp.zeros((1, *self.generator.shape)), y),
      self.generator.init(generator_key, latents, y),
    )

  def draw_samples(self, state: Any) -> Samples:
    """Draws samples of all classes. The classes' numbers of samples differ by at most 1."""
    draw = functools.partial(self.draw, state.generator)
    return self.drawn_of_classes(np.arange(self.train.num_classes), draw)

  def phase(self) -> Phase:
    """Returns the phase that trains critic and generator."""
    config = self.config
    plan = self.plan
    # `Plan.for_data` has refused data whose number of records is secret and not declared.
    num_records = self.stated_size
    assert num_records is not None
    note = (
      "Only the critic reads records, and each of its steps is accounted. The generator reads the "
      "critic. It, its samples and every classifier of samples cost nothing more."
    )
    promised = guarantee.of_plan(plan, num_records, budget=config.epsilon_budget)
    return Phase(
      num_steps=plan.num_steps,
      init=self.init,
      step=closed_over.jitted(self.both.step, donate_argnums=0),
      draws=lambda start: plan.batches(self.present, rng=self.random.sampler, start=start),
      released=lambda state: {
        "critic": state.critic.params,
        "generator": state.generator,
      },
      evaluate=self.scores,
      write=self.write,
      guarantee=guarantee.add_note(promised, paragraph(note)),
      row_at=functools.partial(every, config.eval_every, plan.num_steps),
      steps_are="steps of the critic",
      arrivals=None if config.release else left_out.of_step,
      planned=lambda: {
        "task": "synthesis",
        "dataset": config.data.name,
        "method": "wgan_gp",
        "noise_multiplier": plan.noise_multiplier,
        "batch_size": config.method.batch_size,
        "l2_clip_norm": config.method.l2_clip_norm,
        "updates": plan.num_steps // config.method.critic_steps,
      },
      describe=self.describe,
    )

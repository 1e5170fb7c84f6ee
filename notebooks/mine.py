"""Your own parts of a run, without a change of dpjax: a model, a loss, data, an optimizer, a
sampler, a client, an aggregator. From the folder of this file:

  python -m launch.train --config=../configs/quickstart.py --workdir=../runs/mine \\
    --config.model.name=mine:Net --config.model.options='{"width": 48}' \\
    --config.loss=mine:focal_loss --config.optimizer.rule=mine:lion \\
    --config.optimizer.learning_rate=0.01

`dpjax/experiments/config/user_code.py` says how each is called and what is promised then.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import data, federated, losses, sampling


class Net(nn.Module):
  """A linen module whose every example stands alone: x [B, ...] -> logits [B, K]."""

  num_classes: int
  width: int = 32

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(self.width)(x.reshape(x.shape[0], -1))
    return nn.Dense(self.num_classes)(nn.gelu(x))


def focal_loss(apply, gamma: float = 1.0):
  """(1 - p)^gamma times the cross-entropy of ONE example."""
  cross_entropy = losses.softmax_cross_entropy(apply)

  def loss(params, example):
    nats = cross_entropy(params, example)
    return (1 - jnp.exp(-nats)) ** gamma * nats

  return loss


def small_digits():
  """(train, test): the digits 0 to 4, whose number is public."""
  train, test = data.load("digits")
  small = lambda part: dataclasses.replace(part.subset(part.y < 5), num_classes=5)
  return small(train), small(test)


def lion(learning_rate):
  """An Optax optimizer; it sees nothing but the noisy mean gradient."""
  return optax.lion(learning_rate)


@dataclasses.dataclass(frozen=True)
class Halves(sampling.Sampler):
  """Step t takes the t-th half of a fixed order, and claims no epsilon: `event` is None."""

  num_examples: int
  sampling_prob: float

  @property
  def padded_batch_size(self):
    return -(-self.num_examples // 2)

  def event(self, inner):
    return None

  def draw(self, num_examples, *, seed, step):
    return np.arange(step % 2, num_examples, 2)


def poisson(num_examples, sampling_prob):
  """One of dpjax's samplers, with its own event; its capacity is fitted to delta."""
  return sampling.PoissonSampler(sampling_prob=sampling_prob, capacity=num_examples + 1)


def signs(loss_fn, client_tx, *, weighting, **options):
  """A client whose local steps follow the signs of the gradient. Its message is clipped like any
  other."""
  adjust = lambda gradient, received, local: jax.tree.map(jnp.sign, gradient)
  return federated.local_training(loss_fn, client_tx, weighting=weighting, adjust=adjust)


def averaging(loss_fn, client_tx, **options):
  """A whole federated algorithm: for runs without privacy."""
  return federated.fed_avg(loss_fn, client_tx, **options)


def middle():
  """An aggregator: the median of the clients' messages."""
  return federated.median()

"""Models of a user's own, whose training draws random numbers or statistics of a batch."""

import flax.linen as nn


class Dropped(nn.Module):
  """Needs a key for each example in training, and none in evaluation."""

  num_classes: int

  @nn.compact
  def __call__(self, x, train: bool = True):
    x = nn.Dropout(0.3, deterministic=not train)(x.reshape(x.shape[0], -1))
    return nn.Dense(self.num_classes, name="head")(x)


class Deterministic(nn.Module):
  """The other of Flax's two words for it."""

  num_classes: int

  @nn.compact
  def __call__(self, x, deterministic):
    x = nn.Dropout(0.3)(x.reshape(x.shape[0], -1), deterministic=deterministic)
    return nn.Dense(self.num_classes, name="head")(x)


class Always(nn.Module):
  """Cannot be evaluated without a key."""

  num_classes: int

  @nn.compact
  def __call__(self, x):
    x = nn.Dropout(0.3, deterministic=False)(x.reshape(x.shape[0], -1))
    return nn.Dense(self.num_classes)(x)


class BatchNormalised(nn.Module):
  """Statistics of a batch."""

  num_classes: int

  @nn.compact
  def __call__(self, x, train: bool = False):
    x = nn.BatchNorm(use_running_average=not train)(x.reshape(x.shape[0], -1))
    return nn.Dense(self.num_classes)(x)

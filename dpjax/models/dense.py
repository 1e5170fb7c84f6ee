"""Linear softmax regression and the multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from dpjax import trees, validate
from dpjax.models import activations
from dpjax.types import DType


def dense_layers(
  x: jax.Array,
  sizes: Sequence[int],
  num_classes: int,
  activation: activations.Activation,
  dtype: DType | None,
  dropout: float = 0.0,
  train: bool = False,
  *,
  zero_head: bool = False,
) -> jax.Array:
  """Applies layers `dense_i` and the linear `head` to flattened x [B, ...]. Returns logits
  [B, num_classes] of at least float32. Call this function in a module's `__call__`, so that the
  layers belong to the module. With `zero_head` the head starts from zeros."""
  x = x.reshape(x.shape[0], -1)
  for i, width in enumerate(sizes):
    layer = nn.Dense(width, dtype=dtype, name=f"dense_{i}")
    x = activations.activation_fn(activation)(layer(x))
    if dropout:
      x = nn.Dropout(dropout, deterministic=not train)(x)
  start = nn.initializers.zeros if zero_head else nn.linear.default_kernel_init
  head = nn.Dense(num_classes, dtype=dtype, kernel_init=start, name="head")
  return trees.at_least_float32(head(x))


class Mlp(nn.Module):
  """Fully connected network: [B, ...] -> logits [B, num_classes].

  Inputs are flattened. `features` holds the hidden widths. `dtype` is the compute dtype; parameters
  and logits stay at least float32. `dropout` is the share of hidden values that a training step
  drops: `apply(params, x, train=True, rngs={"dropout": key})`. `zero_head` starts the last layer
  from zeros. A linear model then has no random weights to unlearn, which helps if noise allows
  only few steps.

  >>> import jax.numpy as jnp
  >>> model = Mlp(features=(16,), num_classes=3)
  >>> params = model.init(jax.random.key(0), jnp.zeros((1, 4)))
  >>> trees.size(params)  # 4*16 + 16 + 16*3 + 3
  131
  >>> model.apply(params, jnp.zeros((2, 4))).shape
  (2, 3)
  """

  num_classes: int
  features: Sequence[int] = (128,)
  activation: activations.Activation = "tanh"
  dtype: Any = None
  dropout: float = 0.0
  zero_head: bool = False

  def __post_init__(self):
    validate.integer_at_least(1, num_classes=self.num_classes)
    validate.share(dropout=self.dropout)
    validate.integer_at_least(1, **validate.entries(features=self.features))
    activations.activation_fn(self.activation)
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    return dense_layers(
      x,
      self.features,
      self.num_classes,
      self.activation,
      self.dtype,
      self.dropout,
      train,
      zero_head=self.zero_head,
    )


class Linear(Mlp):
  """Multinomial logistic regression: [B, ...] -> logits [B, num_classes].

  >>> import jax.numpy as jnp
  >>> trees.size(Linear(num_classes=3).init(jax.random.key(0), jnp.zeros((1, 2, 2))))
  15
  """

  features: Sequence[int] = ()

"""Linear softmax regression and the multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from dpjax import trees, validate
from dpjax.models import activations


class Mlp(nn.Module):
  """Fully connected network: [B, ...] -> logits [B, num_classes].

  Inputs are flattened. `features` are the hidden widths, `dtype` the compute dtype
  (parameters and logits stay at least float32).

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

  def __post_init__(self):
    validate.integer_at_least(1, num_classes=self.num_classes)
    for width in self.features:
      validate.integer_at_least(1, features=width)
    activations.activation_fn(self.activation)
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    activation = activations.activation_fn(self.activation)
    x = x.reshape(x.shape[0], -1)
    for i, width in enumerate(self.features):
      x = activation(nn.Dense(width, dtype=self.dtype, name=f"dense_{i}")(x))
    logits = nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x)
    return trees.at_least_float32(logits)


class Linear(Mlp):
  """Multinomial logistic regression: [B, ...] -> logits [B, num_classes].

  >>> import jax.numpy as jnp
  >>> trees.size(Linear(num_classes=3).init(jax.random.key(0), jnp.zeros((1, 2, 2))))
  15
  """

  features: Sequence[int] = ()

"""Small networks on scattering features (Tramèr and Boneh 2021).

Their input is the feature map [B, h, w, C] of `scattering_features`, computed once for
the whole data set. The features are standardised within each example, which uses no
statistic of the data set and so costs no privacy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.models import convnet
from dpjax.models.dense import dense_layers
from dpjax.validate import UserError


def group_standardize(
  x: jax.Array, num_groups: int | None, epsilon: float = 1e-5
) -> jax.Array:
  """Brings each group of channels of each example to zero mean and unit variance.

  This is GroupNorm without learnt scale or offset: [B, h, w, C] -> [B, h, w, C]. A group is
  C / num_groups consecutive channels at all positions. num_groups=None leaves x as it is.
  `epsilon` is added to the variance before its square root.

  Raises:
    UserError: num_groups does not divide C.

  >>> group_standardize(jnp.array([1.0, 3.0]).reshape(1, 1, 1, 2), 1, 0.0).ravel().tolist()
  [-1.0, 1.0]
  """
  if num_groups is None:
    return x
  validate.integer_at_least(1, num_groups=num_groups)
  if x.shape[-1] % num_groups:
    raise UserError(
      f"must divide the {x.shape[-1]} channels", field="num_groups", value=num_groups
    )
  groups = trees.at_least_float32(x).reshape(*x.shape[:3], num_groups, -1)
  centred = groups - groups.mean(axis=(1, 2, 4), keepdims=True)
  # Groups are centred before they are squared, since mean(x^2) - mean(x)^2 would cancel.
  variance = jnp.square(centred).mean(axis=(1, 2, 4), keepdims=True)
  return (centred * jax.lax.rsqrt(variance + epsilon)).reshape(x.shape)


# The jitted function is cached: a server standardises many small blocks, and a new function would
# compile again for each.
@functools.cache
def _standardizer(num_groups: int) -> Callable[[np.ndarray], jax.Array]:
  # Examples are taken one at a time. If all were taken at once, their number could change rounding.
  def alone(x: jax.Array) -> jax.Array:
    return group_standardize(x[None], num_groups)[0]

  each = jax.jit(functools.partial(jax.lax.map, alone))

  def standardize(x: np.ndarray) -> jax.Array:
    # A single example runs as two: the compiler unrolls a loop of one iteration, and the unrolled
    # code may round differently.
    return each(np.concatenate([x, x]))[:1] if len(x) == 1 else each(x)

  return standardize


def standardized_features(
  features: np.ndarray,
  num_groups: int | None,
  *,
  batch_size: int = 1000,
  in_place: bool = False,
) -> np.ndarray:
  """Applies `group_standardize` to a whole data set in chunks: [n, h, w, C] -> [n, h, w, C].

  Each example is standardised once, instead of in every step that draws it. The head is then built
  with num_groups=None. `in_place` overwrites `features`, which may take gigabytes.

  Guarantee: a row of the result is a function of the same row of `features` alone. This holds bit
  for bit, whatever the number of rows.

  >>> x = np.random.default_rng(0).random((3, 2, 2, 4), np.float32)
  >>> wanted = group_standardize(x, 2)
  >>> bool(np.allclose(standardized_features(x, 2, batch_size=2), wanted))
  True
  """
  if num_groups is None:
    return features
  out = features if in_place else np.empty_like(features)
  standardize = _standardizer(num_groups)
  for start in range(0, len(features), batch_size):
    out[start : start + batch_size] = standardize(features[start : start + batch_size])
  return out


class ScatterLinear(nn.Module):
  """A linear model on scattering features, which it standardises: [B, h, w, C] -> logits.

  `num_groups=27` is what Tramèr and Boneh (2021) used where they normalised per example.

  >>> model, x = ScatterLinear(num_classes=10), jnp.zeros((1, 7, 7, 81))
  >>> trees.size(jax.eval_shape(model.init, jax.random.key(0), x))  # 3969*10 + 10
  39700
  """

  num_classes: int
  num_groups: int | None = 27
  dtype: Any = None

  def __post_init__(self):
    validate.integer_at_least(1, num_classes=self.num_classes)
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    convnet.check_images(x)
    x = group_standardize(x, self.num_groups)
    return dense_layers(x, (), self.num_classes, "relu", self.dtype)


class ScatterCnn(nn.Module):
  """A small CNN on scattering features, which it standardises: [B, h, w, C] -> logits.

  The default is Tramèr and Boneh's network for MNIST and Fashion-MNIST. It has 3x3 convolutions of
  16 channels (stride 2) and 32 channels, a dense layer of 32, and the head.
  `ScatterCnn.cifar10()` is their network for CIFAR-10.

  >>> model, x = ScatterCnn(num_classes=10), jnp.zeros((1, 7, 7, 81))
  >>> trees.size(jax.eval_shape(model.init, jax.random.key(0), x))
  33066
  """

  num_classes: int
  num_groups: int | None = 27
  filters: Sequence[int] = (16, 32)
  strides: Sequence[int] = (2, 1)
  pool_after: Sequence[int] = ()
  dense_sizes: Sequence[int] = (32,)
  activation: Any = "tanh"
  dtype: Any = None

  @classmethod
  def cifar10(cls, *, num_classes: int = 10, **options) -> ScatterCnn:
    """Builds the CIFAR-10 network: two 3x3 convolutions of 64 channels, with a pool after the
    first, and the head. It has 187,210 parameters for 8x8x243 features."""
    preset: dict[str, Any] = {
      "filters": (64, 64),
      "strides": (),
      "dense_sizes": (),
      "pool_after": (1,),
    }
    return cls(num_classes, **(preset | options))

  def setup(self):
    self.network = convnet.ConvNet(
      num_classes=self.num_classes,
      filters=self.filters,
      strides=self.strides,
      pool_after=self.pool_after,
      dense_sizes=self.dense_sizes,
      activation=self.activation,
      dtype=self.dtype,
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    convnet.check_images(x)
    return self.network(group_standardize(x, self.num_groups))

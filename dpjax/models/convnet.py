"""Convolutional networks for private training: small, bounded activations, no BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dpjax import validate
from dpjax.models import activations
from dpjax.models.dense import dense_layers
from dpjax.models.pooling import max_pool
from dpjax.validate import UserError


def check_images(x: jax.Array) -> None:
  """Raises UserError unless x is [batch, height, width, channels]."""
  if x.ndim != 4:
    raise UserError(
      "must be [batch, height, width, channels]", field="x.shape", value=x.shape
    )


def resize(x: jax.Array, size: int | None) -> jax.Array:
  """Resizes each image and gives it three colours: [b, H, W, 1 or 3] -> [b, size, size, 3].

  A `size` of None leaves height and width as they are. Raises UserError unless the images have one
  or three colours.

  >>> resize(jnp.zeros((1, 4, 4, 1)), 8).shape
  (1, 8, 8, 3)
  """
  b, height, width, colours = x.shape
  if colours not in (1, 3):
    raise UserError("must have one or three colours", field="x.shape", value=x.shape)
  if size is not None and (height, width) != (size, size):
    x = jax.image.resize(x, (b, size, size, colours), "bilinear")
  # A grey image gets the same values in all three colours.
  return jnp.broadcast_to(x, (*x.shape[:3], 3))


def check_pairs(**named: Sequence[int]) -> None:
  """Raises UserError unless each value is two integers >= 1."""
  for name, values in named.items():
    if len(values) != 2:
      raise UserError("must be two integers, one per convolution", field=name, value=values)
  validate.integer_at_least(1, **validate.entries(**named))


class Cnn(nn.Module):
  """The usual MNIST network of private training, with two convolutions: images -> logits.

  The first convolution has 16 channels, 8x8 kernels, stride 2 and SAME padding. The second has 32
  channels, 4x4 kernels, stride 2 and VALID padding. A 2x2 max-pool of stride 1 follows each
  convolution. Then come a dense layer of 32 and the head. There are 26,010 parameters for 28x28x1
  images and 10 classes (Papernot et al. 2021, table 1). Images below 13x13 need smaller kernels or
  strides.

  >>> import jax.numpy as jnp
  >>> from dpjax import trees
  >>> model, x = Cnn(num_classes=10), jnp.zeros((1, 28, 28, 1))
  >>> trees.size(jax.eval_shape(model.init, jax.random.key(0), x))
  26010
  """

  num_classes: int
  features: Sequence[int] = (16, 32)
  kernel_sizes: Sequence[int] = (8, 4)
  strides: Sequence[int] = (2, 2)
  hidden: int = 32
  activation: activations.Activation = "tempered_sigmoid"
  dtype: Any = None

  def __post_init__(self):
    validate.integer_at_least(1, num_classes=self.num_classes, hidden=self.hidden)
    check_pairs(
      features=self.features, kernel_sizes=self.kernel_sizes, strides=self.strides
    )
    activations.activation_fn(self.activation)
    super().__post_init__()

  def _check_size(self, x: jax.Array) -> None:
    check_images(x)
    _, kernel = self.kernel_sizes
    first, second = self.strides
    # Length of the shorter side after the first convolution (SAME) and a pool of stride 1.
    size = -(-min(x.shape[1:3]) // first) - 1
    if size < kernel or (size - kernel) // second < 1:
      raise UserError(
        f"too small for kernel_sizes={tuple(self.kernel_sizes)}, strides={tuple(self.strides)}; "
        "8x8 images suit (3, 3) and (1, 1)",
        field="x.shape",
        value=x.shape,
      )

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    self._check_size(x)
    activation = activations.activation_fn(self.activation)
    layers = zip(self.features, self.kernel_sizes, self.strides, ("SAME", "VALID"))
    for i, (width, size, stride, padding) in enumerate(layers):
      conv = nn.Conv(
        width, (size,) * 2, (stride,) * 2, padding, dtype=self.dtype, name=f"conv_{i}"
      )
      x = max_pool(activation(conv(x)), stride=1)
    hidden = (self.hidden,)
    return dense_layers(x, hidden, self.num_classes, self.activation, self.dtype)


class ConvNet(nn.Module):
  """SAME convolutions, 2x2 max-pools after some of them, dense layers: images -> logits.

  Convolution i + 1 has `filters[i]` channels and stride `strides[i]` (1 if `strides` is empty). A
  pool of stride 2 follows each convolution whose number, from 1, is in `pool_after`. Then come
  dense layers of `dense_sizes` and a linear head. Images may have any size.

  >>> import jax.numpy as jnp
  >>> from dpjax import trees
  >>> model = ConvNet(num_classes=2, filters=(4,), pool_after=(1,))
  >>> params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 7, 7, 1)))
  >>> trees.size(params)  # 3*3*4 + 4 and 4*4*4*2 + 2
  170
  """

  num_classes: int
  filters: Sequence[int] = ()
  pool_after: Sequence[int] = ()
  dense_sizes: Sequence[int] = ()
  kernel_size: int = 3
  strides: Sequence[int] = ()
  activation: activations.Activation = "tanh"
  dtype: Any = None

  def __post_init__(self):
    sizes = dict(num_classes=self.num_classes, kernel_size=self.kernel_size)
    validate.integer_at_least(1, **sizes)
    sizes = validate.entries(
      filters=self.filters, dense_sizes=self.dense_sizes, strides=self.strides
    )
    validate.integer_at_least(1, **sizes)
    self._check_positions()
    activations.activation_fn(self.activation)
    super().__post_init__()

  def _check_positions(self) -> None:
    count = len(self.filters)
    if self.strides and len(self.strides) != count:
      raise UserError(
        f"must have one entry per filter ({count})", field="strides", value=self.strides
      )
    if not set(self.pool_after) <= set(range(1, count + 1)):
      raise UserError(f"must be in 1..{count}", field="pool_after", value=self.pool_after)

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    check_images(x)
    activation = activations.activation_fn(self.activation)
    strides = self.strides or (1,) * len(self.filters)
    for i, (width, stride) in enumerate(zip(self.filters, strides)):
      kernel = (self.kernel_size,) * 2
      conv = nn.Conv(width, kernel, (stride,) * 2, dtype=self.dtype, name=f"conv_{i}")
      x = activation(conv(x))
      x = max_pool(x) if i + 1 in self.pool_after else x
    return dense_layers(x, self.dense_sizes, self.num_classes, self.activation, self.dtype)


class CifarCnn(ConvNet):
  """The CIFAR-10 network of Papernot et al. (2021, table 2): images -> logits.

  Six 3x3 SAME convolutions have 32, 32, 64, 64, 128 and 128 channels. A pool follows every second
  convolution. Then come a dense layer of 128 and the head. There are 550,570 parameters for 32x32x3
  images and 10 classes.
  """

  filters: Sequence[int] = (32, 32, 64, 64, 128, 128)
  pool_after: Sequence[int] = (2, 4, 6)
  dense_sizes: Sequence[int] = (128,)
  activation: activations.Activation = "tempered_sigmoid"


_THREE_POOLS: dict[str, Any] = {"pool_after": (1, 2, 3)}


class RadpCnn(ConvNet):
  """The networks of Kang and Wang (2024, table 2): images -> logits.

  The paper prints "kernels 4x4, 8x8, 16x16". These numbers are taken as numbers of filters here:
  they double from layer to layer, and kernels of these sizes would exceed the pooled image. All
  kernels are 3x3 SAME. Use relu for the network whose relevance is propagated.

  >>> import jax.numpy as jnp
  >>> from dpjax import trees
  >>> model, x = RadpCnn.mnist(), jnp.zeros((1, 28, 28, 1))
  >>> trees.size(jax.eval_shape(model.init, jax.random.key(0), x))
  10058
  """

  @classmethod
  def mnist(cls, *, num_classes: int = 10, **options) -> RadpCnn:
    """Builds the MNIST network: 4, 8 and 16 filters, each with a pool, then a dense layer of 32.
    It has 10,058 parameters for 28x28x1 images."""
    preset = {"filters": (4, 8, 16), "dense_sizes": (32,), **_THREE_POOLS}
    return cls(num_classes, **(preset | options))

  @classmethod
  def fashion_mnist(cls, *, num_classes: int = 10, **options) -> RadpCnn:
    """Builds the Fashion-MNIST network: 16, 32 and 64 filters, each with a pool, then a dense layer
    of 128. It has 155,786 parameters for 28x28x1 images."""
    preset = {"filters": (16, 32, 64), "dense_sizes": (128,), **_THREE_POOLS}
    return cls(num_classes, **(preset | options))

  @classmethod
  def cifar10(cls, *, num_classes: int = 10, **options) -> RadpCnn:
    """Builds the CIFAR-10 network: 8, 16, 32, 64 and 128 filters, pools after the first three
    convolutions, then dense layers of 256 and 128. It has 657,114 parameters for 32x32x3 images."""
    preset = {
      "filters": (8, 16, 32, 64, 128),
      "dense_sizes": (256, 128),
      **_THREE_POOLS,
    }
    return cls(num_classes, **(preset | options))

"""Wide residual networks for private training, after De et al. (2022).

BatchNorm is replaced by GroupNorm, which stays within one example. The convolution kernels are
standardised, which made training with noise more accurate there.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype
from jax import lax

from dpjax import trees, validate
from dpjax.models import activations, convnet
from dpjax.models.dense import dense_layers
from dpjax.standard_kernels import standardize_kernel
from dpjax.validate import UserError


class WsConv(nn.Module):
  """SAME convolution of NHWC images with a standardised kernel, a learnt gain and a bias."""

  features: int
  kernel_size: int = 3
  stride: int = 1
  dtype: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
    kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
    gain = self.param("gain", nn.initializers.ones, (self.features,))
    bias = self.param("bias", nn.initializers.zeros, (self.features,))
    kernel = standardize_kernel(kernel, gain)
    x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
    out = lax.conv_general_dilated(
      x, kernel, (self.stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return out + bias.reshape(1, 1, 1, -1)


class WideResNet(nn.Module):
  """WRN-depth-width with GroupNorm and standardised kernels: images -> logits.

  After a convolution of 16 channels come three stages of (depth - 4) / 6 blocks each, with 16, 32
  and 64 times `width` channels. A block applies (activation, GroupNorm, conv 3x3) twice, and adds a
  skip path. In the first block of a stage the skip path is (activation, GroupNorm, conv 1x1). Then
  come activation, GroupNorm, the mean over positions and a linear head. Order and normalisation are
  from De et al. (2022), "Unlocking high-accuracy differentially private image classification
  through scale". WRN-16-4 has 2,753,818 parameters, WRN-40-4 has 8,961,306. Images may have any
  size.

  >>> model = WideResNet(depth=10, width=1, num_classes=10)
  >>> image = jax.ShapeDtypeStruct((1, 32, 32, 3), "float32")
  >>> shapes = jax.eval_shape(model.init, jax.random.key(0), image)
  >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
  78938
  """

  num_classes: int
  depth: int = 16
  width: int = 4
  num_groups: int = 16
  activation: activations.Activation = "relu"
  dtype: Any = None

  def __post_init__(self):
    sizes = dict(width=self.width, num_classes=self.num_classes)
    validate.integer_at_least(1, **sizes, num_groups=self.num_groups)
    validate.integer_at_least(10, depth=self.depth)
    if (self.depth - 4) % 6:
      raise UserError(
        "must be 6 n + 4, such as 10, 16, 28 or 40", field="depth", value=self.depth
      )
    if 16 % self.num_groups:
      raise UserError("must divide 16", field="num_groups", value=self.num_groups)
    activations.activation_fn(self.activation)
    super().__post_init__()

  def _normalize(self, x: jax.Array, name: str) -> jax.Array:
    norm = nn.GroupNorm(self.num_groups, epsilon=1e-5, dtype=self.dtype, name=name)
    return norm(activations.activation_fn(self.activation)(x))

  def _conv(self, x: jax.Array, name: str, features: int, stride=1, size=3) -> jax.Array:
    return WsConv(features, size, stride, self.dtype, name=f"{name}_conv")(x)

  def _block(self, x: jax.Array, name: str, features: int, stride: int, first: bool):
    skip = x
    if first:
      normed = self._normalize(x, f"{name}_skip_norm")
      skip = self._conv(normed, f"{name}_skip", features, stride, size=1)
    x = self._conv(self._normalize(x, f"{name}_norm_0"), f"{name}_0", features, stride)
    x = self._conv(self._normalize(x, f"{name}_norm_1"), f"{name}_1", features)
    return x + skip

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    convnet.check_images(x)
    x = self._conv(x, "first", 16)
    for stage in range(3):
      for i in range((self.depth - 4) // 6):
        stride = 2 if stage and not i else 1
        name = f"stage_{stage}_block_{i}"
        x = self._block(x, name, 16 * 2**stage * self.width, stride, first=not i)
    # A mean over all positions needs at least float32.
    x = trees.at_least_float32(self._normalize(x, "final_norm")).mean(axis=(1, 2))
    return dense_layers(x, (), self.num_classes, self.activation, self.dtype)

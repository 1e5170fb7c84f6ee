"""Residual networks whose batch norm is frozen, and their weights by torchvision's names.

Batch norm mixes examples in training, so no model of dpjax has it. Here its published mean and
variance are constants: they are folded into the convolution before it, which then has a bias
(He et al. 2016, arXiv:1512.03385). Training changes kernels and biases, never statistics.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dpjax import trees, validate
from dpjax.models import convnet
from dpjax.types import Params
from dpjax.validate import UserError, about
from dpjax.zoo.networks import public_trunks, weight_files
from dpjax.zoo.networks.weight_files import Origin, Path

_PASSED_OVER = re.compile(r".*\.num_batches_tracked")
_NORM_EPSILON = 1e-5  # epsilon of torchvision's batch norms
_BOTTLENECK = 4  # number of a block's outputs / inner width of the block


class ResNet(nn.Module):
  """Residual network without norms: images [B, H, W, C] -> logits [B, num_classes].

  The default is ResNet-18; ResNet-50 has depths=(3, 4, 6, 3) and bottleneck=True. Load its
  weights with `load_resnet`: random weights would need norms to keep activations in scale. The
  model resizes each image to `image_size`; 0 leaves it as it is. It expects pixels in [0, 1]. It
  subtracts (.485, .456, .406) and divides by (.229, .224, .225), as torchvision does.

  >>> model = ResNet(num_classes=3, depths=(1, 1), features=4, image_size=0)
  >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
  >>> trees.size(shapes)
  1835
  """

  num_classes: int
  depths: Sequence[int] = (2, 2, 2, 2)
  features: int = 64
  bottleneck: bool = False
  image_size: int = 224
  dtype: Any = None

  def __post_init__(self):
    validate.integer_at_least(1, num_classes=self.num_classes, features=self.features)
    validate.integer_at_least(0, image_size=self.image_size)
    if not isinstance(self.bottleneck, bool):
      raise UserError("must be true or false", field="bottleneck", value=self.bottleneck)
    if not self.depths:
      raise UserError("must have an entry", field="depths", value=self.depths)
    validate.integer_in(1, 100, **validate.entries(depths=self.depths))
    super().__post_init__()

  def _conv(
    self, x: jax.Array, name: str, features: int, size: int, stride: int = 1
  ) -> jax.Array:
    around = [(size // 2, size // 2)] * 2
    return nn.Conv(features, (size, size), stride, around, dtype=self.dtype, name=name)(x)

  def _block(self, x: jax.Array, name: str, features: int, stride: int) -> jax.Array:
    outputs = features * (_BOTTLENECK if self.bottleneck else 1)
    skip = x
    if stride != 1 or x.shape[-1] != outputs:
      skip = self._conv(x, f"{name}_skip", outputs, 1, stride)
    if self.bottleneck:
      x = nn.relu(self._conv(x, f"{name}_conv1", features, 1))
      # torchvision's ResNets have the stride in the 3x3 convolution, not in the 1x1 before it.
      x = nn.relu(self._conv(x, f"{name}_conv2", features, 3, stride))
      x = self._conv(x, f"{name}_conv3", outputs, 1)
    else:
      x = nn.relu(self._conv(x, f"{name}_conv1", features, 3, stride))
      x = self._conv(x, f"{name}_conv2", outputs, 3)
    return nn.relu(x + skip)

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    convnet.check_images(x)
    x = convnet.resize(x, self.image_size or None)
    x = public_trunks.scale_as_imagenet(x)
    x = nn.relu(self._conv(x, "first", self.features, 7, 2))
    # torch pads a pool by -inf on both sides. SAME padding could pad one side only.
    around: Any = ((1, 1), (1, 1))
    x = nn.max_pool(x, (3, 3), (2, 2), around)
    for stage, depth in enumerate(self.depths):
      for i in range(depth):
        stride = 2 if stage and not i else 1
        x = self._block(x, f"stage_{stage}_block_{i}", self.features * 2**stage, stride)
    # A mean over all positions needs at least float32.
    x = trees.at_least_float32(x).mean(axis=(1, 2))
    return trees.at_least_float32(
      nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x)
    )


def load_resnet(path: str | os.PathLike[str], model: ResNet, params: Params) -> Params:
  """Loads the parameters of `model` from a safetensors file of torchvision's ResNet.

  Args:
    path: file of F32, F16 or BF16 tensors with torchvision's names (`layer1.0.conv1.weight`).
      Running means and variances are folded into the convolutions.
    params: first parameters of the model. The last layer keeps them if the file has no last layer
      for this number of classes.

  Raises:
    UserError: the file is missing or is no safetensors file; its norms have no running statistics,
      so they are no batch norms; a tensor is missing, unknown, of another shape or type, or not
      finite; the library is not installed. The message is one line.
  """
  with about("path", os.fspath(path)):
    held, _ = weight_files.read(path, str, _PASSED_OVER)
    if "bn1.weight" in held and not any("running_" in name for name in held):
      raise UserError(
        "its norms have no running_mean, so they are no batch norms (GroupNorm?); a "
        "ResNet here takes frozen batch norms alone"
      )
    sources = _sources(model)
    image = jnp.zeros((1, 32, 32, 3))
    wanted = weight_files.shapes(model, image)
    return weight_files.parameters(held, sources, wanted, params)


def _fold(layer: str, convolution: str, norm: str) -> dict[Path, Origin]:
  kernel = weight_files.folded_kernel(f"{convolution}.weight", norm, _NORM_EPSILON)
  return {
    (layer, "kernel"): kernel,
    (layer, "bias"): weight_files.folded_bias(norm, _NORM_EPSILON),
  }


def _sources(model: ResNet) -> dict[Path, Origin]:
  sources = {
    **_fold("first", "conv1", "bn1"),
    (weight_files.HEAD, "kernel"): weight_files.linear("fc.weight"),
    (weight_files.HEAD, "bias"): weight_files.same("fc.bias"),
  }
  inner = 3 if model.bottleneck else 2
  for stage, depth in enumerate(model.depths):
    for i in range(depth):
      block = f"stage_{stage}_block_{i}"
      theirs = f"layer{stage + 1}.{i}"
      for j in range(1, inner + 1):
        sources |= _fold(f"{block}_conv{j}", f"{theirs}.conv{j}", f"{theirs}.bn{j}")
      # Basic blocks of the first stage keep their width, so their skip has no convolution.
      if not i and (stage or model.bottleneck):
        skip = f"{theirs}.downsample"
        sources |= _fold(f"{block}_skip", f"{skip}.0", f"{skip}.1")
  return sources

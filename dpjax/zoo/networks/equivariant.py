"""Convolutional networks that rotate and mirror with their images (Cohen & Welling 2016).

A feature map of a group G of turns and mirrors is [B, H, W, C * |G|]. It has one channel for every
feature and every element of G, with the element varying fastest. All elements share a layer's
weights. So turning the image turns the maps and permutes their channels, up to rounding. There are
fewer parameters with larger gradients, which suits noise (Hölzl et al. 2023, arXiv 2301.13104).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jax import lax

from dpjax import validate
from dpjax.models import activations, convnet
from dpjax.models.dense import dense_layers
from dpjax.models.pooling import max_pool
from dpjax.types import DType
from dpjax.validate import UserError
from dpjax.zoo.networks.scatter_heads import group_standardize

# Maps each group's name to its elements: (quarter turns, whether the image is mirrored first).
GROUPS: dict[str, tuple[tuple[int, bool], ...]] = {
  "C1": ((0, False),),  # no symmetry: an ordinary network of the same shape
  "C4": tuple((turns, False) for turns in range(4)),
  "D4": tuple((turns, mirrored) for mirrored in (False, True) for turns in range(4)),
}


def act(x, turns: int, mirrored: bool, axes: tuple[int, int] = (0, 1)):
  """Applies a group element g to an array: (g x)(p) = x(g^-1 p).

  If `mirrored`, x is first mirrored along axes[1]. Then x is turned by `turns` quarter turns.

  >>> act(np.array([[1, 2], [3, 4]]), 1, True).tolist()
  [[1, 3], [2, 4]]
  """
  module = np if isinstance(x, np.ndarray) else jnp
  x = module.flip(x, axes[1]) if mirrored else x
  return module.rot90(x, turns, axes)


@functools.cache
def left_quotients(group: str) -> np.ndarray:
  """Returns a table [|G|, |G|], whose entry (g, h) is the index of the element g^-1 h.

  Row g says how the element g permutes the maps of the group.

  >>> left_quotients("C4")[1].tolist()  # a quarter turn back
  [3, 0, 1, 2]
  """
  elements = GROUPS[group]
  # Nine different numbers distinguish all elements of a group.
  probe = np.arange(9).reshape(3, 3)
  seen = {act(probe, *h).tobytes(): i for i, h in enumerate(elements)}
  products = [[seen[act(act(probe, *h), *g).tobytes()] for h in elements] for g in elements]
  # Entry (g, h) is the index of the element k for which g k = h.
  return np.argsort(np.array(products), axis=1)


class GroupConv(nn.Module):
  """Convolution whose weights are shared over a group, with `features` maps per group element.

  Images are padded with zeros. The output is [B, H / stride, W / stride, features * |G|].

  Args:
    lifting: True if the input is an image, [B, H, W, C]; False if it is a map of the group,
      [B, H, W, C * |G|].
    stride: 1, with an odd kernel size, or 2, with an even kernel size and even H and W. So kernels
      are centred on their outputs.

  Guarantee: if an element of the group turns or mirrors the image, the output is turned or mirrored
  in the same way and permuted, up to rounding. The kernel of an element g is the kernel of the
  identity, acted on by g.

  >>> x = jnp.zeros((1, 4, 4, 1))
  >>> layer = GroupConv(2, group="C4", lifting=True)
  >>> shapes = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
  >>> shapes["kernel"].shape, layer.apply(layer.init(jax.random.key(0), x), x).shape
  ((3, 3, 1, 2), (1, 4, 4, 8))
  """

  features: int
  group: str = "D4"
  lifting: bool = False
  kernel_size: int = 3
  stride: int = 1
  dtype: DType | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    order = len(GROUPS[self.group])
    _check_centred(self.kernel_size, self.stride, x.shape)
    shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
    kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
    bias = self.param("bias", nn.initializers.zeros, (self.features,))
    x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
    kernel = shared_kernel(kernel, self.group, self.lifting)
    # This padding is equal on both sides, and gives H / stride outputs.
    pad = (self.kernel_size - self.stride) // 2
    out = lax.conv_general_dilated(
      x, kernel, (self.stride,) * 2, ((pad, pad),) * 2,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    # The group element varies fastest along the channels, so all maps of a feature share a bias.
    return out + jnp.repeat(bias, order).reshape(1, 1, 1, -1)


def shared_kernel(kernel: jax.Array, group: str, lifting: bool) -> jax.Array:
  """Expands a kernel to the kernels of all group elements.

  Args:
    kernel: [k, k, C, K] if `lifting`, else [k, k, C * |G|, K].

  Returns:
    [k, k, C, K * |G|] if `lifting`, else [k, k, C * |G|, K * |G|].

  >>> shared_kernel(jnp.arange(4.0).reshape(2, 2, 1, 1), "C4", True)[0, 0, 0].tolist()
  [0.0, 1.0, 3.0, 2.0]
  """
  elements = GROUPS[group]
  size, _, inputs, outputs = kernel.shape
  maps = kernel.reshape(size, size, -1, 1 if lifting else len(elements), outputs)
  turned = [act(maps, *element) for element in elements]
  if not lifting:
    # Turning the image permutes its maps, so the kernel's inputs are permuted in the same way.
    turned = [each[:, :, :, order] for each, order in zip(turned, left_quotients(group))]
  stacked = jnp.stack(turned, axis=-1)  # [k, k, C, |G| or 1, K, |G|]
  return stacked.reshape(size, size, inputs, outputs * len(elements))


def _check_centred(kernel_size: int, stride: int, shape: tuple[int, ...]) -> None:
  if (kernel_size - stride) % 2:
    raise UserError(
      f"must be {'odd' if stride == 1 else 'even'} with stride {stride}, else "
      "no output lies at its middle and turns are not exact",
      field="kernel_size",
      value=kernel_size,
    )
  _check_even(shape, stride)


def _check_even(shape: tuple[int, ...], stride: int) -> None:
  if any(side % stride for side in shape[1:3]):
    raise UserError(
      "a side is odd where it is halved, so turns are not exact; sides must be "
      "multiples of 2 to the number of halvings",
      field="x.shape",
      value=shape,
    )


class EquivariantCnn(nn.Module):
  """A small CNN whose layers rotate and mirror with the image: images -> logits.

  The first convolution lifts images to maps of the group. All other convolutions take maps of the
  group. Convolution i + 1 has `filters[i]` features and stride `strides[i]`. A 2x2 max-pool follows
  convolution j if j is in `pool_after`. Then come the maximum over the group, the mean over
  positions, and a linear head. If an element of the group acts on the image, the logits stay the
  same up to rounding. With `invariant=False` the head gets all positions instead of their mean, and
  the logits may depend on the orientation.

  Args:
    group: "D4" (turns and mirrors), "C4" (turns), "C1" (no symmetry: an ordinary network).
    first_kernel: size of the lifting kernel, odd for stride 1 and even for stride 2. The other
      kernels are 3x3, or 4x4 with stride 2.
    num_groups: number of groups of channels. Before each activation, each group is standardised
      over positions and the whole symmetry group, in each example alone; None: no
      normalisation.

  Raises:
    UserError: a size is out of range; a side is odd where it is halved; a kernel is not centred; a
      group of channels does not hold whole features. The last three would break the symmetry.

  >>> from dpjax import trees
  >>> model, x = EquivariantCnn(num_classes=10), jnp.zeros((1, 32, 32, 3))
  >>> trees.size(jax.eval_shape(model.init, jax.random.key(0), x))
  14890
  """

  num_classes: int
  group: str = "D4"
  filters: Sequence[int] = (8, 8, 16)
  strides: Sequence[int] = (2, 1, 1)
  pool_after: Sequence[int] = (1, 2)
  first_kernel: int = 6
  num_groups: int | None = 4
  invariant: bool = True
  activation: activations.Activation = "tanh"
  dtype: Any = None

  def __post_init__(self):
    sizes = dict(num_classes=self.num_classes, first_kernel=self.first_kernel)
    validate.integer_at_least(1, **sizes)
    validate.one_of(GROUPS, group=self.group)
    if not self.filters or len(self.strides) != len(self.filters):
      raise UserError(
        f"must have one entry per convolution, one at least, as strides={self.strides!r}",
        field="filters",
        value=self.filters,
      )
    sizes = validate.entries(filters=self.filters, strides=self.strides)
    validate.integer_at_least(1, **sizes)
    if self.num_groups is not None:
      validate.integer_at_least(1, num_groups=self.num_groups)
      if any(width % self.num_groups for width in self.filters):
        raise UserError(
          f"must divide each of filters={self.filters!r}, so that a feature and its "
          "images under the group are normalised together",
          field="num_groups",
          value=self.num_groups,
        )
    if max(self.strides) > 2:
      raise UserError("must be 1 or 2", field="strides", value=self.strides)
    if not set(self.pool_after) <= set(range(1, len(self.filters) + 1)):
      raise UserError(
        f"must be in 1..{len(self.filters)}", field="pool_after", value=self.pool_after
      )
    activations.activation_fn(self.activation)
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    convnet.check_images(x)
    activation = activations.activation_fn(self.activation)
    for i, (width, stride) in enumerate(zip(self.filters, self.strides)):
      size = 2 + stride if i else self.first_kernel
      conv = GroupConv(width, self.group, not i, size, stride, self.dtype, name=f"conv_{i}")
      x = activation(group_standardize(conv(x), self.num_groups))
      if i + 1 in self.pool_after:
        _check_even(x.shape, 2)
        x = max_pool(x)
    # Turning the image only moves the maxima over the group to other positions, so their mean
    # stays.
    x = x.reshape(*x.shape[:3], -1, len(GROUPS[self.group])).max(axis=-1)
    x = x.mean(axis=(1, 2)) if self.invariant else x
    return dense_layers(x, (), self.num_classes, self.activation, self.dtype)

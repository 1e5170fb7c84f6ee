"""Vision transformers, and their weights by the names of timm and of Hugging Face.

The architecture is that of Dosovitskiy et al. (2021, arXiv:2010.11929): patches, a class token,
learnt positions, pre-LayerNorm blocks with GELU by erf, and a linear head on the class token.
Nothing mixes examples.
"""

from __future__ import annotations

import os
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.models import convnet
from dpjax.types import Params
from dpjax.validate import UserError, about
from dpjax.zoo.networks import weight_files
from dpjax.zoo.networks.transformer import Block, check_sizes
from dpjax.zoo.networks.weight_files import Origin, Path, of_dense, of_norm, same

# Names of the pooler's tensors in Hugging Face's ViTModel. A classifier has no pooler.
_PASSED_OVER = re.compile(r"pooler\.dense\.(weight|bias)")
_HF_PREFIX = "vit."


class VisionTransformer(nn.Module):
  """Vision transformer: images [B, H, W, C] -> logits [B, num_classes].

  The default is ViT-Ti/16 at 224x224. The model resizes each image to `image_size`, and copies a
  grey image to three colours. Published weights need the pixel range that they were trained with,
  mostly [-1, 1]: `dpjax.data.preprocess.center`. `norm_epsilon` is 1e-6 in timm, and 1e-12 in
  Hugging Face's configs.

  Raises:
    UserError: the input is not images [B, H, W, 1 or 3]; a size is out of range; `patch_size` does
      not divide `image_size`; `num_heads` does not divide `features`.

  >>> model = VisionTransformer(
  ...   num_classes=3, image_size=8, patch_size=4, num_layers=1, num_heads=2, features=8
  ... )
  >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
  >>> shapes["params"]["positions"].shape  # a class token and 2x2 patches
  (1, 5, 8)
  """

  num_classes: int
  image_size: int = 224
  patch_size: int = 16
  num_layers: int = 12
  num_heads: int = 3
  features: int = 192
  mlp_features: int | None = None  # None: four times `features`
  norm_epsilon: float = 1e-6
  dtype: Any = None

  def __post_init__(self):
    check_sizes(
      self,
      num_classes=self.num_classes,
      image_size=self.image_size,
      patch_size=self.patch_size,
    )
    if self.image_size % self.patch_size:
      raise UserError(
        f"must be a multiple of patch_size={self.patch_size}",
        field="image_size",
        value=self.image_size,
      )
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    convnet.check_images(x)
    x = convnet.resize(x, self.image_size)
    patch = (self.patch_size, self.patch_size)
    embed = nn.Conv(self.features, patch, patch, "VALID", dtype=self.dtype, name="embed")
    x = embed(x)
    x = x.reshape(x.shape[0], -1, self.features)
    init = nn.initializers.normal(0.02)
    token = self.param("class_token", init, (1, 1, self.features)).astype(x.dtype)
    x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.features)), x], 1)
    positions = self.param("positions", init, (1, x.shape[1], self.features))
    x = x + positions.astype(x.dtype)
    width = self.mlp_features or 4 * self.features
    sizes = (self.num_heads, self.dtype, self.norm_epsilon, width)
    for i in range(self.num_layers):
      x = Block(*sizes, causal=False, name=f"block_{i}")(x)
    x = nn.LayerNorm(self.norm_epsilon, dtype=self.dtype, name="final_norm")(x[:, 0])
    return trees.at_least_float32(
      nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x)
    )


def load_vit(
  path: str | os.PathLike[str], model: VisionTransformer, params: Params
) -> Params:
  """Loads the parameters of `model` from a safetensors file of a vision transformer.

  Args:
    path: file of F32, F16 or BF16 tensors, with timm's names (`blocks.0.attn.qkv.weight`) or
      Hugging Face's (`vit.encoder.layer.0.attention.attention.query.weight`).
    params: first parameters of the model. The last layer keeps them if the file has no last layer
      for this number of classes.

  Raises:
    UserError: the file is missing or is no safetensors file; a tensor is missing, unknown, of
      another shape or type, or not finite; the library is not installed. The message is one line.
  """

  def bare(name: str) -> str:
    return name.removeprefix(_HF_PREFIX)

  with about("path", os.fspath(path)):
    held, _ = weight_files.read(path, bare, _PASSED_OVER)
    is_hf = any(name.startswith(("embeddings.", "encoder.")) for name in held)
    sources = _hf_origins(model) if is_hf else _timm_origins(model)
    image = jnp.zeros((1, model.image_size, model.image_size, 3))
    wanted = weight_files.shapes(model, image)
    return weight_files.parameters(held, sources, wanted, params)


def _timm_origins(model: VisionTransformer) -> dict[Path, Origin]:
  sources = {
    ("class_token",): same("cls_token"),
    ("positions",): same("pos_embed"),
    ("embed", "kernel"): weight_files.convolution("patch_embed.proj.weight"),
    ("embed", "bias"): same("patch_embed.proj.bias"),
    **of_norm(("final_norm",), "norm"),
    **of_dense((weight_files.HEAD,), "head"),
  }
  for i in range(model.num_layers):
    block = f"block_{i}"
    theirs = f"blocks.{i}"
    sources |= of_norm((block, "attention_norm"), f"{theirs}.norm1")
    sources |= of_norm((block, "mlp_norm"), f"{theirs}.norm2")
    sources |= of_dense((block, "attention", "query_key_value"), f"{theirs}.attn.qkv")
    sources |= of_dense((block, "attention", "out"), f"{theirs}.attn.proj")
    sources |= of_dense((block, "mlp_in"), f"{theirs}.mlp.fc1")
    sources |= of_dense((block, "mlp_out"), f"{theirs}.mlp.fc2")
  return sources


def _hf_origins(model: VisionTransformer) -> dict[Path, Origin]:
  patches = "embeddings.patch_embeddings.projection"
  sources = {
    ("class_token",): same("embeddings.cls_token"),
    ("positions",): same("embeddings.position_embeddings"),
    ("embed", "kernel"): weight_files.convolution(f"{patches}.weight"),
    ("embed", "bias"): same(f"{patches}.bias"),
    **of_norm(("final_norm",), "layernorm"),
    **of_dense((weight_files.HEAD,), "classifier"),
  }
  for i in range(model.num_layers):
    block = f"block_{i}"
    theirs = f"encoder.layer.{i}"
    inner = f"{theirs}.attention.attention"
    mixed = [f"{inner}.{part}" for part in ("query", "key", "value")]
    sources |= of_norm((block, "attention_norm"), f"{theirs}.layernorm_before")
    sources |= of_norm((block, "mlp_norm"), f"{theirs}.layernorm_after")
    sources |= of_dense((block, "attention", "query_key_value"), *mixed)
    sources |= of_dense((block, "attention", "out"), f"{theirs}.attention.output.dense")
    sources |= of_dense((block, "mlp_in"), f"{theirs}.intermediate.dense")
    sources |= of_dense((block, "mlp_out"), f"{theirs}.output.dense")
  return sources

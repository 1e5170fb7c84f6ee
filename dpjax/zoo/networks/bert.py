"""BERT as a classifier of texts, and its weights by Hugging Face's names.

The architecture is that of Devlin et al. (2019, arXiv:1810.04805): embeddings of tokens,
positions and segments, post-LayerNorm blocks with GELU by erf, and a tanh layer on the first
token. Nothing mixes examples.
"""

from __future__ import annotations

import os
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.types import Params
from dpjax.validate import about
from dpjax.zoo.networks import weight_files
from dpjax.zoo.networks.transformer import Attention, check_sizes, check_tokens
from dpjax.zoo.networks.weight_files import Origin, Path, of_dense, of_norm, same

PADDING_TOKEN = 0  # [PAD] of every published vocabulary of BERT
_PASSED_OVER = re.compile(r"embeddings\.position_ids|cls\..*")
_PREFIX = "bert."
# Endings of tensor names in files converted from TensorFlow, each with today's ending.
_EARLIER = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}


class BertBlock(nn.Module):
  """Post-LayerNorm block: norm(x + attention(x)), then norm(x + mlp(x))."""

  num_heads: int
  mlp_features: int
  norm_epsilon: float
  dtype: Any = None

  @nn.compact
  def __call__(self, x: jax.Array, present: jax.Array) -> jax.Array:
    attention = Attention(self.num_heads, self.dtype, causal=False, name="attention")
    norm = nn.LayerNorm(self.norm_epsilon, dtype=self.dtype, name="attention_norm")
    x = norm(x + attention(x, present))
    hidden = nn.Dense(self.mlp_features, dtype=self.dtype, name="mlp_in")(x)
    hidden = nn.gelu(hidden, approximate=False)
    hidden = nn.Dense(x.shape[-1], dtype=self.dtype, name="mlp_out")(hidden)
    return nn.LayerNorm(self.norm_epsilon, dtype=self.dtype, name="mlp_norm")(x + hidden)


def encode(bert: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Applies the layers of BERT inside the `__call__` of a module.

  Args:
    bert: module with the size fields of `Bert`. The layers become its submodules.
    tokens: token ids [B, T].

  Returns:
    (outputs of the last block [B, T, features], mask [B, T] that is True for the first token and
    for every token that is not padding)
  """
  init = nn.initializers.normal(0.02)
  embed = nn.Embed(
    bert.vocab_size, bert.features, dtype=bert.dtype, embedding_init=init, name="embed"
  )
  x = embed(tokens)
  positions = bert.param("positions", init, (bert.max_length, bert.features))
  segments = bert.param("segments", init, (bert.num_segments, bert.features))
  x = x + (positions[None, : tokens.shape[1]] + segments[None, :1]).astype(x.dtype)
  x = nn.LayerNorm(bert.norm_epsilon, dtype=bert.dtype, name="embed_norm")(x)
  # The first token always counts as present. Otherwise the softmax of an all-padding row is NaN.
  present = (tokens != PADDING_TOKEN) | (jnp.arange(tokens.shape[1]) == 0)[None]
  width = bert.mlp_features or 4 * bert.features
  for i in range(bert.num_layers):
    name = f"block_{i}"
    block = BertBlock(bert.num_heads, width, bert.norm_epsilon, bert.dtype, name=name)
    x = block(x, present)
  return x, present


class Bert(nn.Module):
  """BERT with a linear head on the pooled first token: tokens [B, T] -> logits [B, num_classes].

  The default is BERT-tiny (two layers of width 128). Tokens are ids in the vocabulary of the
  weights, and the first token is [CLS]. Attention ignores tokens 0, [PAD], except at the first
  position. All tokens are of the first segment. There is no dropout.

  Raises:
    UserError: a size is out of range; tokens are not integers of shape [B, T] with
      T <= max_length.

  >>> model = Bert(num_classes=3, vocab_size=11, num_layers=1, features=8, max_length=4)
  >>> tokens = jnp.array([[1, 2, 0]])
  >>> params = jax.eval_shape(model.init, jax.random.key(0), tokens)
  >>> jax.eval_shape(model.apply, params, tokens).shape
  (1, 3)
  """

  num_classes: int
  vocab_size: int = 30522
  num_layers: int = 2
  num_heads: int = 2
  features: int = 128
  mlp_features: int | None = None  # None: four times `features`
  max_length: int = 512
  num_segments: int = 2
  norm_epsilon: float = 1e-12
  dtype: Any = None

  def __post_init__(self):
    check_sizes(
      self,
      num_classes=self.num_classes,
      vocab_size=self.vocab_size,
      max_length=self.max_length,
      num_segments=self.num_segments,
    )
    super().__post_init__()

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    check_tokens(tokens, self.max_length)
    x, _ = encode(self, tokens)
    pooled = nn.Dense(self.features, dtype=self.dtype, name="pooler")(x[:, 0])
    head = nn.Dense(self.num_classes, dtype=self.dtype, name="head")
    return trees.at_least_float32(head(jnp.tanh(pooled)))


def load_bert(path: str | os.PathLike[str], model: Bert, params: Params) -> Params:
  """Loads the parameters of `model` from a safetensors file of Hugging Face's BERT.

  Args:
    path: file of F32, F16 or BF16 tensors. Their names may begin with "bert.". Heads of
      pretraining (`cls.`) are skipped.
    params: first parameters of the model. The last layer keeps them if the file has no last layer
      for this number of classes.

  Raises:
    UserError: the file is missing or is no safetensors file; a tensor is missing, unknown, of
      another shape or type, or not finite; the library is not installed. The message is one line.
  """

  def bare(name: str) -> str:
    for ending, later in _EARLIER.items():
      if name.endswith(ending):
        name = name.removesuffix(ending) + later
    return name.removeprefix(_PREFIX)

  with about("path", os.fspath(path)):
    held, _ = weight_files.read(path, bare, _PASSED_OVER)
    wanted = weight_files.shapes(model, jnp.zeros((1, 1), jnp.int32))
    return weight_files.parameters(held, sources(model), wanted, params)


def sources(model: Any) -> dict[Path, Origin]:
  """Returns the `Origin` of each parameter, by path, in the tensors of Hugging Face's BERT."""
  origins = {
    ("embed", "embedding"): same("embeddings.word_embeddings.weight"),
    ("positions",): same("embeddings.position_embeddings.weight"),
    ("segments",): same("embeddings.token_type_embeddings.weight"),
    **of_norm(("embed_norm",), "embeddings.LayerNorm"),
    **of_dense(("pooler",), "pooler.dense"),
    **of_dense((weight_files.HEAD,), "classifier"),
  }
  for i in range(model.num_layers):
    block = f"block_{i}"
    theirs = f"encoder.layer.{i}"
    mixed = [f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")]
    origins |= of_dense((block, "attention", "query_key_value"), *mixed)
    origins |= of_dense((block, "attention", "out"), f"{theirs}.attention.output.dense")
    origins |= of_norm((block, "attention_norm"), f"{theirs}.attention.output.LayerNorm")
    origins |= of_dense((block, "mlp_in"), f"{theirs}.intermediate.dense")
    origins |= of_dense((block, "mlp_out"), f"{theirs}.output.dense")
    origins |= of_norm((block, "mlp_norm"), f"{theirs}.output.LayerNorm")
  return origins

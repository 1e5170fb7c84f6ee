"""A decoder-only transformer, small enough to read and to train privately."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dpjax import trees, validate
from dpjax.validate import UserError


class Attention(nn.Module):
  """Multi-head self-attention, [B, T, D] -> [B, T, D], causal or over all positions.

  `present` [B, T] is True for positions that may be attended to, at least one in each row. None
  allows all positions.
  """

  num_heads: int
  dtype: Any = None
  causal: bool = True

  @nn.compact
  def __call__(self, x: jax.Array, present: jax.Array | None = None) -> jax.Array:
    length, width = x.shape[1:]
    heads = (*x.shape[:2], self.num_heads, width // self.num_heads)
    mixed = nn.Dense(3 * width, dtype=self.dtype, name="query_key_value")(x)
    query, key, value = (part.reshape(heads) for part in jnp.split(mixed, 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * heads[-1] ** -0.5
    # The softmax is computed in float32 or wider, whatever the type of the products.
    scores = trees.at_least_float32(scores)
    if self.causal:
      past = jnp.tril(jnp.ones((1, 1, length, length), bool))
      scores = jnp.where(past, scores, -jnp.inf)
    if present is not None:
      scores = jnp.where(present[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
    return nn.Dense(width, dtype=self.dtype, name="out")(out)


class Block(nn.Module):
  """Pre-LayerNorm block: x + attention(norm(x)), then x + mlp(norm(x)).

  With `causal`, it is GPT-2's block, whose GELU is approximated by tanh, else the exact one of a
  vision transformer.
  """

  num_heads: int
  dtype: Any
  norm_epsilon: float
  mlp_features: int
  causal: bool = True

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    norm = lambda name: nn.LayerNorm(self.norm_epsilon, dtype=self.dtype, name=name)
    attention = Attention(self.num_heads, self.dtype, self.causal, name="attention")
    x = x + attention(norm("attention_norm")(x))
    mlp_in = nn.Dense(self.mlp_features, dtype=self.dtype, name="mlp_in")
    hidden = nn.gelu(mlp_in(norm("mlp_norm")(x)), approximate=self.causal)
    return x + nn.Dense(x.shape[-1], dtype=self.dtype, name="mlp_out")(hidden)


def check_tokens(tokens: jax.Array, max_length: int) -> None:
  """Raises UserError unless tokens are integers [batch, length], of at most `max_length`."""
  if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
    kind = f"{tokens.dtype} of shape {tokens.shape}"
    raise UserError(f"must be integers [batch, length], got {kind}", field="tokens")
  if tokens.shape[1] > max_length:
    raise UserError(
      f"length must be <= max_length={max_length}", field="tokens.shape", value=tokens.shape
    )


def check_sizes(model: Any, **counts: int) -> None:
  """Raises UserError for sizes that a stack of attention blocks cannot have.

  Args:
    model: model with num_layers, num_heads, features, norm_epsilon and maybe mlp_features.
    counts: further fields of the model that must be at least 1.
  """
  validate.integer_at_least(1, **counts, num_heads=model.num_heads, features=model.features)
  validate.integer_in(1, 1000, num_layers=model.num_layers)
  validate.positive(norm_epsilon=model.norm_epsilon)
  mlp_features = getattr(model, "mlp_features", None)
  if mlp_features is not None:
    validate.integer_at_least(1, mlp_features=mlp_features)
  if model.features % model.num_heads:
    raise UserError(
      "must be a multiple of num_heads", field="features", value=model.features
    )


class Transformer(nn.Module):
  """Decoder-only language model: tokens [B, T] int -> logits [B, T, vocab_size].

  The logits at position t depend on tokens 0..t only (causal mask). Positions are learnt.
  LayerNorm precedes attention and MLP (Radford et al. 2019). With `tie_embeddings` the output
  matrix is the token embedding. GPT-2 has `norm_epsilon=1e-5` (`load_gpt2`). With
  `dtype="bfloat16"` activations are bfloat16, and parameters and logits are float32. With `remat`
  the backward pass computes each block again instead of storing its activations (Chen et al. 2016,
  arXiv:1604.06174), with the same results.

  Raises:
    UserError: a size is out of range; tokens are not integers of shape [B, T] with
      T <= max_length.

  >>> sizes = dict(num_layers=1, num_heads=2, features=8, max_length=4)
  >>> model = Transformer(vocab_size=11, **sizes)
  >>> tokens = jnp.array([[1, 2, 3]])
  >>> params = jax.eval_shape(model.init, jax.random.key(0), tokens)
  >>> jax.eval_shape(model.apply, params, tokens).shape
  (1, 3, 11)
  >>> trees.size(params)  # (11 + 4) * 8 embeddings, 12 * 64 + 13 * 8 a block, 2 * 8 norm
  1008
  """

  vocab_size: int
  num_layers: int = 4
  num_heads: int = 4
  features: int = 256
  max_length: int = 128
  tie_embeddings: bool = True
  dtype: Any = None
  norm_epsilon: float = 1e-6
  remat: bool = False

  def __post_init__(self):
    check_sizes(self, vocab_size=self.vocab_size, max_length=self.max_length)
    if not isinstance(self.remat, bool):
      raise UserError("must be true or false", field="remat", value=self.remat)
    super().__post_init__()

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    check_tokens(tokens, self.max_length)
    # Standard deviation of GPT-2's initial weights.
    init = nn.initializers.normal(0.02)
    embed = nn.Embed(
      self.vocab_size, self.features, dtype=self.dtype, embedding_init=init, name="embed"
    )
    positions = self.param("positions", init, (self.max_length, self.features))
    x = embed(tokens)
    x = x + positions[None, : tokens.shape[1]].astype(x.dtype)
    block = nn.remat(Block) if self.remat else Block
    sizes = (self.num_heads, self.dtype, self.norm_epsilon, 4 * self.features)
    for i in range(self.num_layers):
      x = block(*sizes, name=f"block_{i}")(x)
    x = nn.LayerNorm(self.norm_epsilon, dtype=self.dtype, name="final_norm")(x)
    head = nn.Dense(self.vocab_size, use_bias=False, dtype=self.dtype, name="head")
    logits = embed.attend(x) if self.tie_embeddings else head(x)
    return trees.at_least_float32(logits)

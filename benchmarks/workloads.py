"""What the gradient benchmark runs: losses, parameters and batches of synthetic data.

Speed does not depend on the values, so inputs are random; each workload is a function of
the platform alone, because an accelerator is measured at larger batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dpjax import losses, models, trees
from dpjax.types import Example, LossFn, Params
from dpjax.zoo import networks


class Workload(NamedTuple):
  """One loss with its parameters and a batch."""

  loss_fn: LossFn
  params: Any
  batch: Example  # leaves [B, ...]

  @property
  def stacked_bytes(self) -> int:
    """Memory of the per-example gradients that the vmap route stacks, in float32."""
    return 4 * trees.size(self.params) * len(self.batch.y)


class LstmClassifier(nn.Module):
  """Tokens [B, T] -> logits [B, num_classes]: embedding, one LSTM under scan, linear."""

  vocab_size: int
  num_classes: int
  features: int = 256

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = nn.Embed(self.vocab_size, self.features, name="embed")(tokens)
    states: Any = nn.RNN(nn.OptimizedLSTMCell(self.features), name="lstm")(x)
    return nn.Dense(self.num_classes, name="head")(states[:, -1])


class VitBlock(nn.Module):
  """Pre-LayerNorm encoder block."""

  num_heads: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    width = x.shape[-1]
    attention = nn.MultiHeadDotProductAttention(self.num_heads, name="attention")
    x = x + attention(nn.LayerNorm(name="attention_norm")(x))
    hidden = nn.Dense(4 * width, name="mlp_in")(nn.LayerNorm(name="mlp_norm")(x))
    return x + nn.Dense(width, name="mlp_out")(nn.gelu(hidden))


class Vit(nn.Module):
  """Vision transformer, images [B, H, W, C] -> logits; ViT-Tiny at the defaults
  (Dosovitskiy et al. 2021, Touvron et al. 2021), patches of `patch` pixels."""

  num_classes: int
  patch: int = 4
  num_layers: int = 12
  num_heads: int = 3
  features: int = 192

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    size = (self.patch, self.patch)
    init = nn.initializers.normal(0.02)
    x = nn.Conv(self.features, size, size, "VALID", name="patches")(x)
    x = x.reshape(x.shape[0], -1, self.features)
    token = self.param("class_token", init, (1, 1, self.features))
    x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
    x = x + self.param("positions", init, (1, *x.shape[1:]))
    for i in range(self.num_layers):
      x = VitBlock(self.num_heads, name=f"block_{i}")(x)
    return nn.Dense(self.num_classes, name="head")(nn.LayerNorm(name="final_norm")(x)[:, 0])


def _apply(model: nn.Module) -> Any:
  """Without the mutable collections that its type allows for."""
  return model.apply


def _images(model: nn.Module, shape: tuple[int, ...], batch_size: int) -> Workload:
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.random((batch_size, *shape)), jnp.float32)
  y = jnp.asarray(rng.integers(0, 10, batch_size), jnp.int32)
  params = model.init(jax.random.key(0), x[:1])
  return Workload(losses.softmax_cross_entropy(_apply(model)), params, Example(x, y))


def _tokens(batch_size: int, length: int, vocab_size: int) -> jax.Array:
  tokens = np.random.default_rng(0).integers(0, vocab_size, (batch_size, length))
  return jnp.asarray(tokens, jnp.int32)


def _gpt(batch_size: int, *, tie_embeddings: bool) -> Workload:
  model = networks.Transformer(vocab_size=1024, tie_embeddings=tie_embeddings)
  tokens = _tokens(batch_size, 128, 1024)
  params = model.init(jax.random.key(0), tokens[:1])
  batch = Example(tokens, jnp.zeros(batch_size, jnp.int32))
  return Workload(losses.next_token(_apply(model)), params, batch)


def _lstm(batch_size: int) -> Workload:
  model = LstmClassifier(vocab_size=1024, num_classes=10)
  tokens = _tokens(batch_size, 64, 1024)
  params = model.init(jax.random.key(0), tokens[:1])
  batch = Example(tokens, jnp.arange(batch_size, dtype=jnp.int32) % 10)
  return Workload(losses.softmax_cross_entropy(_apply(model)), params, batch)


def with_lora(loss_fn: LossFn, frozen: Params, *, rank: int, key: jax.Array) -> tuple:
  """Low-rank adapters on the dense kernels (Hu et al. 2022): W + A B, W frozen.

  Returns:
    (loss of the new parameters, the new parameters): a dict with "adapters" (A [K, rank]
    and B [rank, P] for each kernel) and "embed", the token embedding, trained as it is.
  """
  paths = jax.tree_util.tree_leaves_with_path(frozen)
  flat = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
  kernels = {name: leaf for name, leaf in flat.items() if "kernel" in name}
  embed = next(name for name in flat if "embed" in name)
  unit = jax.nn.initializers.normal(1.0)
  adapters = {
    name: {
      "a": 0.02 * unit(jax.random.fold_in(key, i), (leaf.shape[0], rank)),
      "b": jnp.full((rank, leaf.shape[1]), 0.01),
    }
    for i, (name, leaf) in enumerate(kernels.items())
  }

  def merged(params):
    def merge(path, leaf):
      name = jax.tree_util.keystr(path)
      if name == embed:
        return params["embed"]
      pair = params["adapters"].get(name)
      return leaf + pair["a"] @ pair["b"] if pair else leaf

    return jax.tree_util.tree_map_with_path(merge, frozen)

  params = {"adapters": adapters, "embed": flat[embed]}
  return (lambda params, example: loss_fn(merged(params), example)), params


def _gpt_lora(batch_size: int) -> Workload:
  base = _gpt(batch_size, tie_embeddings=True)
  loss_fn, params = with_lora(base.loss_fn, base.params, rank=8, key=jax.random.key(1))
  return Workload(loss_fn, params, base.batch)


class Experts(nn.Module):
  """Mixture of experts, [B, ...] -> logits: each example goes to one of `num_experts` MLPs
  of its layer (top-1 routing of Fedus et al. 2022), whose weights are gathered by index."""

  num_classes: int
  num_experts: int
  features: int = 64
  hidden: int = 128
  num_layers: int = 2

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init = nn.initializers.lecun_normal(batch_axis=0)
    x = nn.Dense(self.features, name="project")(x.reshape(x.shape[0], -1))
    for i in range(self.num_layers):
      probs = jax.nn.softmax(nn.Dense(self.num_experts, name=f"router_{i}")(x))
      sizes = (self.num_experts, self.features, self.hidden)
      into = self.param(f"into_{i}", init, sizes)
      back = self.param(f"back_{i}", init, (sizes[0], *sizes[:0:-1]))
      x = x + jax.vmap(_expert, in_axes=(0, 0, None, None))(x, probs, into, back)
    return nn.Dense(self.num_classes, name="head")(x)


def _expert(x: jax.Array, probs: jax.Array, into: jax.Array, back: jax.Array) -> jax.Array:
  chosen = jnp.argmax(probs)
  return probs[chosen] * (nn.relu(x @ into[chosen]) @ back[chosen])


def _mlp(width: int, batch_size: int) -> Workload:
  model = models.Mlp(num_classes=10, features=(width, width))
  return _images(model, (28, 28, 1), batch_size)


def _by_platform(platform: str) -> dict[str, Callable[[], Workload]]:
  cpu = platform == "cpu"
  f = functools.partial
  scattered = networks.ScatterCnn(num_classes=10, num_groups=None)
  linear = networks.ScatterLinear(num_classes=10, num_groups=None)
  return {
    "small_cnn": f(_images, models.Cnn(num_classes=10), (28, 28, 1), 256 if cpu else 2048),
    "cifar_cnn": f(
      _images, models.CifarCnn(num_classes=10), (32, 32, 3), 128 if cpu else 1024
    ),
    "scatter_linear": f(_images, linear, (7, 7, 81), 4096 if cpu else 32768),
    "scatter_cnn": f(_images, scattered, (7, 7, 81), 1024 if cpu else 8192),
    "mlp": f(_mlp, 1024, 256 if cpu else 2048),
    "wide_mlp": f(_mlp, 4096, 512 if cpu else 4096),
    "gpt": f(_gpt, 16 if cpu else 128, tie_embeddings=False),
    "gpt_lora": f(_gpt_lora, 16 if cpu else 128),
    "few_experts": f(_images, Experts(10, 2), (8, 8, 1), 64 if cpu else 1024),
    "experts": f(_images, Experts(10, 16), (8, 8, 1), 64 if cpu else 1024),
    "lstm": f(_lstm, 64 if cpu else 512),
    "vit": f(_images, Vit(num_classes=10), (32, 32, 3), 64 if cpu else 512),
    "wrn": f(
      _images, networks.WideResNet(num_classes=10), (32, 32, 3), 64 if cpu else 1024
    ),
  }


NAMES = tuple(_by_platform("cpu"))


def build(name: str, platform: str) -> Workload:
  """The workload of one of `NAMES` at the size for "cpu", or for an accelerator."""
  return _by_platform(platform)[name]()


def resized(work: Workload, batch_size: int) -> Workload:
  """Returns the workload with so many examples: the first ones, or all of them again."""
  rows = np.arange(batch_size) % len(work.batch.y)
  return work._replace(batch=jax.tree.map(lambda leaf: leaf[rows], work.batch))

"""PyTorch twins of the benchmark's workloads, and Opacus's clipped gradients of them.

A twin has the layers, shapes and number of parameters of its workload; the values are
PyTorch's own. Written as Opacus serves it best: attention from linear layers, which have
the fastest rules there, positions and class tokens as embeddings, since Opacus knows no
bare parameters. PyTorch and Opacus are imported when a twin is built: they are peers to
compare with (`pip install -e '.[bench]'`), not dependencies.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpjax.types import Example

METHODS = ("torch", "opacus", "opacus_ghost")  # the ordinary gradient; hooks; ghost norms
_EXTRA_PARAMS = {"lstm": 4 * 256}  # DPLSTM has two bias vectors where flax has one
_CANNOT = {
  "gpt_lora": "skipped: Opacus refuses tied weights and parameters that are combined",
  "few_experts": "skipped: Opacus has no rule for parameters that are indexed",
  "experts": "skipped: Opacus has no rule for parameters that are indexed",
  "wrn": "skipped: Opacus has no rule for standardised kernels",
}


class Twin(NamedTuple):
  """A PyTorch model with its batch."""

  model: Any
  inputs: Any  # [B, ...]
  losses: Callable[[Any], Any]  # outputs [B, ...] -> [B]


def why_not(name: str, method: str) -> str:
  """Why a method is not run on a workload; "" where it is."""
  needed = ("torch",) if method == "torch" else ("torch", "opacus")
  if any(importlib.util.find_spec(package) is None for package in needed):
    return "not installed"
  return _CANNOT.get(name, "")


def build(name: str, batch: Example, num_params: int) -> Twin:
  """The twin of a workload on its batch.

  Raises:
    RuntimeError: the numbers of parameters differ.
  """
  import torch  # pyright: ignore[reportMissingImports]

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  # TF32 on a card, as JAX multiplies there.
  torch.set_float32_matmul_precision("high")
  torch.manual_seed(0)
  model, losses = _TWINS[name](torch)
  count = sum(p.numel() for p in model.parameters())
  if count != num_params + _EXTRA_PARAMS.get(name, 0):
    raise RuntimeError(f"{name}: the twin has {count} parameters, not {num_params}")
  device = "cuda" if torch.cuda.is_available() else "cpu"
  x, y = (torch.from_numpy(np.array(part)).to(device) for part in (batch.x, batch.y))
  if x.is_floating_point() and x.ndim == 4:
    x = x.permute(0, 3, 1, 2).contiguous()
  target = (x if name == "gpt" else y).long()
  inputs = x if x.is_floating_point() else x.long()
  return Twin(model.to(device), inputs, lambda outputs: losses(torch, outputs, target))


def step(twin: Twin, method: str) -> Callable[[], Any]:
  """A function that computes the (clipped) sum of gradients once."""
  return {"torch": _ordinary, "opacus": _hooks, "opacus_ghost": _ghost}[method](twin)


def _finish(twin: Twin) -> None:
  import torch  # pyright: ignore[reportMissingImports]

  if twin.inputs.is_cuda:
    torch.cuda.synchronize()


def _ordinary(twin: Twin) -> Callable[[], Any]:
  def run():
    twin.model.zero_grad(set_to_none=True)
    twin.losses(twin.model(twin.inputs)).sum().backward()
    _finish(twin)

  return run


def _sgd(twin: Twin, optimizer: Any) -> Any:
  import torch  # pyright: ignore[reportMissingImports]

  return optimizer(
    torch.optim.SGD(twin.model.parameters(), lr=0.1),
    noise_multiplier=0.0,
    max_grad_norm=1.0,
    expected_batch_size=len(twin.inputs),
    loss_reduction="sum",
  )


def _hooks(twin: Twin) -> Callable[[], Any]:
  from opacus.grad_sample import GradSampleModule  # pyright: ignore[reportMissingImports]
  from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]

  model = GradSampleModule(twin.model, loss_reduction="sum")
  optimizer = _sgd(twin, DPOptimizer)

  def run():
    optimizer.zero_grad(set_to_none=True)
    twin.losses(model(twin.inputs)).sum().backward()
    optimizer.clip_and_accumulate()
    _finish(twin)

  return run


def _ghost(twin: Twin) -> Callable[[], Any]:
  from opacus import grad_sample, optimizers  # pyright: ignore[reportMissingImports]
  from opacus.utils.fast_gradient_clipping_utils import (  # pyright: ignore
    DPTensorFastGradientClipping,
  )

  model = grad_sample.GradSampleModuleFastGradientClipping(
    twin.model, loss_reduction="sum", max_grad_norm=1.0, use_ghost_clipping=True
  )
  optimizer = _sgd(twin, optimizers.DPOptimizerFastGradientClipping)

  def run():
    optimizer.zero_grad(set_to_none=True)
    losses = twin.losses(model(twin.inputs))
    DPTensorFastGradientClipping(model, optimizer, losses, loss_reduction="sum").backward()
    _finish(twin)

  return run


def _classes(torch: Any, logits: Any, target: Any) -> Any:
  return torch.nn.functional.cross_entropy(logits, target, reduction="none")


def _next_tokens(torch: Any, logits: Any, tokens: Any) -> Any:
  """Mean over the positions that have a next token, [B]."""
  logits = logits[:, :-1].transpose(1, 2)
  losses = torch.nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none")
  return losses.mean(dim=1)


def _small_cnn(torch: Any) -> tuple:
  nn = torch.nn
  layers = (
    *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1)),
    *(nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1)),
    *(nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
  )
  return nn.Sequential(*layers), _classes


def _cifar_cnn(torch: Any) -> tuple:
  nn = torch.nn
  layers = []
  channels = 3
  for width in (32, 64, 128):
    for _ in range(2):
      layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh()]
      channels = width
    layers.append(nn.MaxPool2d(2))
  layers += [nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10)]
  return nn.Sequential(*layers), _classes


def _scatter_cnn(torch: Any) -> tuple:
  nn = torch.nn
  layers = (
    *(nn.Conv2d(81, 16, 3, 2, padding=1), nn.Tanh(), nn.Conv2d(16, 32, 3, padding=1)),
    *(nn.Tanh(), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
  )
  return nn.Sequential(*layers), _classes


def _scatter_linear(torch: Any) -> tuple:
  return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3969, 10)), _classes


def _mlp(width: int) -> Callable[[Any], tuple]:
  def make(torch: Any) -> tuple:
    nn = torch.nn
    hidden = (nn.Linear(784, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10)), _classes

  return make


def _block(torch: Any, width: int, heads: int, causal: bool, activation: Any) -> Any:
  """Pre-LayerNorm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""
  nn = torch.nn

  class Block(nn.Module):
    def __init__(self):
      super().__init__()
      self.first = nn.LayerNorm(width)
      self.second = nn.LayerNorm(width)
      self.mixed = nn.Linear(width, 3 * width)
      self.out = nn.Linear(width, width)
      wide = nn.Linear(width, 4 * width)
      self.mlp = nn.Sequential(wide, activation, nn.Linear(4 * width, width))

    def attention(self, x):
      size, length = x.shape[:2]
      mixed = self.mixed(x).view(size, length, 3, heads, width // heads)
      query, key, value = mixed.permute(2, 0, 3, 1, 4)
      scores = query @ key.transpose(-1, -2) / math.sqrt(width // heads)
      if causal:
        past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~past, -math.inf)
      mixed = (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(size, length, width)
      return self.out(mixed)

    def forward(self, x):
      x = x + self.attention(self.first(x))
      return x + self.mlp(self.second(x))

  return Block()


def _indices(torch: Any, x: Any, length: int) -> Any:
  """0..length - 1 for each example of x, as an embedding of positions wants them."""
  return torch.arange(length, device=x.device).repeat(len(x), 1)


def _gpt(torch: Any) -> tuple:
  nn = torch.nn

  class Gpt(nn.Module):
    def __init__(self):
      super().__init__()
      self.embed = nn.Embedding(1024, 256)
      self.positions = nn.Embedding(128, 256)
      gelu = nn.GELU(approximate="tanh")
      self.blocks = nn.Sequential(*(_block(torch, 256, 4, True, gelu) for _ in range(4)))
      self.norm = nn.LayerNorm(256)
      self.head = nn.Linear(256, 1024, bias=False)

    def forward(self, tokens):
      x = self.embed(tokens) + self.positions(_indices(torch, tokens, tokens.shape[1]))
      return self.head(self.norm(self.blocks(x)))

  return Gpt(), _next_tokens


def _vit(torch: Any) -> tuple:
  nn = torch.nn

  class Vit(nn.Module):
    def __init__(self):
      super().__init__()
      self.patches = nn.Conv2d(3, 192, 4, 4)
      self.token = nn.Embedding(1, 192)
      self.positions = nn.Embedding(65, 192)
      gelu = nn.GELU(approximate="tanh")
      self.blocks = nn.Sequential(*(_block(torch, 192, 3, False, gelu) for _ in range(12)))
      self.norm = nn.LayerNorm(192)
      self.head = nn.Linear(192, 10)

    def forward(self, images):
      patches = self.patches(images).flatten(2).transpose(1, 2)
      token = self.token(_indices(torch, images, 1))
      x = torch.cat([token, patches], dim=1) + self.positions(_indices(torch, images, 65))
      return self.head(self.norm(self.blocks(x))[:, 0])

  return Vit(), _classes


def _lstm(torch: Any) -> tuple:
  from opacus.layers import DPLSTM  # pyright: ignore[reportMissingImports]

  nn = torch.nn

  class Lstm(nn.Module):
    def __init__(self):
      super().__init__()
      self.embed = nn.Embedding(1024, 256)
      self.lstm = DPLSTM(256, 256, batch_first=True)
      self.head = nn.Linear(256, 10)

    def forward(self, tokens):
      return self.head(self.lstm(self.embed(tokens))[0][:, -1])

  return Lstm(), _classes


_TWINS: dict[str, Callable[[Any], tuple]] = {
  "small_cnn": _small_cnn,
  "cifar_cnn": _cifar_cnn,
  "scatter_cnn": _scatter_cnn,
  "scatter_linear": _scatter_linear,
  "mlp": _mlp(1024),
  "wide_mlp": _mlp(4096),
  "gpt": _gpt,
  "lstm": _lstm,
  "vit": _vit,
}

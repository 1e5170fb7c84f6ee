"""ViT, ResNet and BERT: what a file holds is what the model computes with.

The oracles are the architectures as their papers and published code have them, in NumPy and
float64, from the tensors of the file by their published names. A file has the real layout with
tiny sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from dpjax.zoo import networks

pytest.importorskip("safetensors")
from safetensors.numpy import save_file

from tests.refuses import refuses

_WIDTH = 8
_HEADS = 2
_LAYERS = 2
_CLASSES = 3
_VIT = networks.VisionTransformer(
  num_classes=_CLASSES,
  image_size=8,
  patch_size=4,
  num_layers=_LAYERS,
  num_heads=_HEADS,
  features=_WIDTH,
  mlp_features=12,
)
_BERT = networks.Bert(
  num_classes=_CLASSES,
  vocab_size=11,
  num_layers=_LAYERS,
  num_heads=_HEADS,
  features=_WIDTH,
  mlp_features=12,
  max_length=6,
)
_BASIC = networks.ResNet(num_classes=_CLASSES, depths=(1, 2), features=4, image_size=0)
_BOTTLENECK = _BASIC.clone(bottleneck=True, depths=(1, 1), features=2)
_RNG = np.random.default_rng(0)
_IMAGES = _RNG.random((3, 8, 8, 3)).astype(np.float32)
_LARGE = _RNG.random((3, 13, 13, 3)).astype(np.float32)
_TOKENS = np.array([[1, 5, 3, 9, 2], [4, 2, 7, 0, 0], [0, 0, 0, 0, 0]])

Tensors = dict[str, np.ndarray]


def _draw(*shape: int) -> np.ndarray:
  return _RNG.normal(size=shape, scale=0.5).astype(np.float32)


def _dense_of(name: str, inputs: int, outputs: int) -> Tensors:
  return {f"{name}.weight": _draw(outputs, inputs), f"{name}.bias": _draw(outputs)}


def _norm_of(name: str, width: int = _WIDTH) -> Tensors:
  return {f"{name}.weight": 1 + _draw(width), f"{name}.bias": _draw(width)}


# --- files, by their published names


def _timm() -> Tensors:
  tensors = {
    "cls_token": _draw(1, 1, _WIDTH),
    "pos_embed": _draw(1, 5, _WIDTH),
    "patch_embed.proj.weight": _draw(_WIDTH, 3, 4, 4),
    "patch_embed.proj.bias": _draw(_WIDTH),
    **_norm_of("norm"),
    **_dense_of("head", _WIDTH, _CLASSES),
  }
  for i in range(_LAYERS):
    block = f"blocks.{i}"
    tensors |= _norm_of(f"{block}.norm1") | _norm_of(f"{block}.norm2")
    tensors |= _dense_of(f"{block}.attn.qkv", _WIDTH, 3 * _WIDTH)
    tensors |= _dense_of(f"{block}.attn.proj", _WIDTH, _WIDTH)
    tensors |= _dense_of(f"{block}.mlp.fc1", _WIDTH, 12)
    tensors |= _dense_of(f"{block}.mlp.fc2", 12, _WIDTH)
  return tensors


def _hugging_face(timm: Tensors) -> Tensors:
  """The same weights by the names of Hugging Face's ViTForImageClassification."""
  renamed = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
  }
  inner = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
  }
  for i in range(_LAYERS):
    layer = f"vit.encoder.layer.{i}"
    renamed |= {f"blocks.{i}.{a}": f"{layer}.{b}" for a, b in inner.items()}
  tensors = {}
  for name, array in timm.items():
    owner, dot, part = name.rpartition(".")
    if ".attn.qkv" in name:
      layer = f"vit.encoder.layer.{owner.split('.')[1]}.attention.attention"
      for which, third in zip(("query", "key", "value"), np.split(array, 3)):
        tensors[f"{layer}.{which}.{part}"] = np.ascontiguousarray(third)
    elif name in renamed:
      tensors[renamed[name]] = array
    else:
      tensors[f"{renamed[owner]}{dot}{part}"] = array
  return tensors


def _conv_of(name: str, norm: str, inputs: int, outputs: int, size: int) -> Tensors:
  return {
    f"{name}.weight": _draw(outputs, inputs, size, size),
    **_norm_of(norm, outputs),
    f"{norm}.running_mean": _draw(outputs),
    f"{norm}.running_var": np.abs(_draw(outputs)) + 0.01,
    f"{norm}.num_batches_tracked": np.full((), 7, np.int64),
  }


def _torchvision(model: networks.ResNet) -> Tensors:
  tensors = _conv_of("conv1", "bn1", 3, model.features, 7)
  inputs = model.features
  for stage, depth in enumerate(model.depths):
    width = model.features * 2**stage
    outputs = 4 * width if model.bottleneck else width
    for i in range(depth):
      block = f"layer{stage + 1}.{i}"
      sizes = [(inputs, width, 3), (width, outputs, 3)]
      if model.bottleneck:
        sizes = [(inputs, width, 1), (width, width, 3), (width, outputs, 1)]
      for j, size in enumerate(sizes, 1):
        tensors |= _conv_of(f"{block}.conv{j}", f"{block}.bn{j}", *size)
      if inputs != outputs:
        skip = f"{block}.downsample"
        tensors |= _conv_of(f"{skip}.0", f"{skip}.1", inputs, outputs, 1)
      inputs = outputs
  return tensors | _dense_of("fc", inputs, _CLASSES)


def _bert() -> Tensors:
  tensors = {
    "bert.embeddings.word_embeddings.weight": _draw(11, _WIDTH),
    "bert.embeddings.position_embeddings.weight": _draw(6, _WIDTH),
    "bert.embeddings.token_type_embeddings.weight": _draw(2, _WIDTH),
    "bert.embeddings.position_ids": np.arange(6)[None],
    "cls.predictions.bias": _draw(11),
    **_norm_of("bert.embeddings.LayerNorm"),
    **_dense_of("bert.pooler.dense", _WIDTH, _WIDTH),
    **_dense_of("classifier", _WIDTH, _CLASSES),
  }
  for i in range(_LAYERS):
    layer = f"bert.encoder.layer.{i}"
    for part in ("query", "key", "value"):
      tensors |= _dense_of(f"{layer}.attention.self.{part}", _WIDTH, _WIDTH)
    tensors |= _dense_of(f"{layer}.attention.output.dense", _WIDTH, _WIDTH)
    tensors |= _norm_of(f"{layer}.attention.output.LayerNorm")
    tensors |= _dense_of(f"{layer}.intermediate.dense", _WIDTH, 12)
    tensors |= _dense_of(f"{layer}.output.dense", 12, _WIDTH)
    tensors |= _norm_of(f"{layer}.output.LayerNorm")
  return tensors


# --- oracles


class _Numpy:
  """Layers of torch in float64, by the names of a file."""

  def __init__(self, tensors: Tensors):
    self.held = {name: np.asarray(array, np.float64) for name, array in tensors.items()}

  def dense(self, x: np.ndarray, name: str) -> np.ndarray:
    return x @ self.held[f"{name}.weight"].T + self.held[f"{name}.bias"]

  def norm(self, x: np.ndarray, name: str, epsilon: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return unit * self.held[f"{name}.weight"] + self.held[f"{name}.bias"]

  def batch_norm(self, x: np.ndarray, name: str) -> np.ndarray:
    mean = self.held[f"{name}.running_mean"]
    variance = self.held[f"{name}.running_var"]
    unit = (x - mean) / np.sqrt(variance + 1e-5)
    return unit * self.held[f"{name}.weight"] + self.held[f"{name}.bias"]

  def conv(self, x: np.ndarray, name: str, stride: int, padding: int) -> np.ndarray:
    weight = self.held[f"{name}.weight"]
    size = weight.shape[2]
    edge = (padding, padding)
    x = np.pad(x, ((0, 0), edge, edge, (0, 0)))
    count = (x.shape[1] - size) // stride + 1
    out = np.zeros((len(x), count, count, len(weight)))
    for i in range(count):
      for j in range(count):
        row = i * stride
        column = j * stride
        patch = x[:, row : row + size, column : column + size]
        out[:, i, j] = np.einsum("bhwc,kchw->bk", patch, weight)
    return out


def _gelu(x: np.ndarray) -> np.ndarray:
  return x * (1 + special.erf(x / np.sqrt(2))) / 2


def _attention(query, key, value, present=None) -> np.ndarray:
  outs = []
  thirds = (np.split(part, _HEADS, axis=-1) for part in (query, key, value))
  for q, k, v in zip(*thirds):
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    if present is not None:
      scores = np.where(present[:, None], scores, -np.inf)
    outs.append(special.softmax(scores, axis=-1) @ v)
  return np.concatenate(outs, axis=-1)


def _vit_oracle(tensors: Tensors, images: np.ndarray) -> np.ndarray:
  t = _Numpy(tensors)
  bias = t.held["patch_embed.proj.bias"]
  patches = t.conv(images, "patch_embed.proj", 4, 0) + bias
  x = patches.reshape(len(images), -1, _WIDTH)
  token = np.broadcast_to(t.held["cls_token"], (len(x), 1, _WIDTH))
  x = np.concatenate([token, x], axis=1) + t.held["pos_embed"]
  for i in range(_LAYERS):
    block = f"blocks.{i}"
    mixed = t.dense(t.norm(x, f"{block}.norm1", 1e-6), f"{block}.attn.qkv")
    x = x + t.dense(_attention(*np.split(mixed, 3, axis=-1)), f"{block}.attn.proj")
    hidden = _gelu(t.dense(t.norm(x, f"{block}.norm2", 1e-6), f"{block}.mlp.fc1"))
    x = x + t.dense(hidden, f"{block}.mlp.fc2")
  return t.dense(t.norm(x, "norm", 1e-6)[:, 0], "head")


def _resnet_oracle(tensors: Tensors, images: np.ndarray) -> np.ndarray:
  t = _Numpy(tensors)
  relu = lambda x: np.maximum(x, 0)

  def normed(x, name, norm, stride=1):
    padding = tensors[f"{name}.weight"].shape[2] // 2
    return t.batch_norm(t.conv(x, name, stride, padding), norm)

  x = (images - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
  x = relu(normed(x, "conv1", "bn1", 2))
  around = ((0, 0), (1, 1), (1, 1), (0, 0))
  padded = np.pad(x, around, constant_values=-np.inf)
  count = (padded.shape[1] - 3) // 2 + 1
  cells = [
    [padded[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((1, 2)) for j in range(count)]
    for i in range(count)
  ]
  x = np.stack([np.stack(row, 1) for row in cells], 1)
  blocks = sorted({name.rsplit(".conv", 1)[0] for name in tensors if ".conv" in name})
  for block in blocks:
    stride = 2 if block[5] != "1" and block.endswith(".0") else 1
    deep = f"{block}.conv3.weight" in tensors
    skip = x
    if f"{block}.downsample.0.weight" in tensors:
      skip = normed(x, f"{block}.downsample.0", f"{block}.downsample.1", stride)
    x = relu(normed(x, f"{block}.conv1", f"{block}.bn1", 1 if deep else stride))
    x = normed(x, f"{block}.conv2", f"{block}.bn2", stride if deep else 1)
    if deep:
      x = normed(relu(x), f"{block}.conv3", f"{block}.bn3")
    x = relu(x + skip)
  return t.dense(x.mean((1, 2)), "fc")


def bert_layers(tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
  """Outputs [B, T, width] of the last block, in float64."""
  t = _Numpy(tensors)
  part = lambda name: t.held[f"bert.embeddings.{name}_embeddings.weight"]
  x = part("word")[tokens] + part("position")[: tokens.shape[1]] + part("token_type")[0]
  x = t.norm(x, "bert.embeddings.LayerNorm", 1e-12)
  present = tokens != 0
  present[:, 0] = True
  for i in range(_LAYERS):
    layer = f"bert.encoder.layer.{i}"
    names = (f"{layer}.attention.self.{part}" for part in ("query", "key", "value"))
    seen = _attention(*(t.dense(x, name) for name in names), present)
    out = f"{layer}.attention.output"
    x = t.norm(x + t.dense(seen, f"{out}.dense"), f"{out}.LayerNorm", 1e-12)
    hidden = _gelu(t.dense(x, f"{layer}.intermediate.dense"))
    out = f"{layer}.output"
    x = t.norm(x + t.dense(hidden, f"{out}.dense"), f"{out}.LayerNorm", 1e-12)
  return x


def _bert_oracle(tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
  t = _Numpy(tensors)
  x = bert_layers(tensors, tokens)
  return t.dense(np.tanh(t.dense(x[:, 0], "bert.pooler.dense")), "classifier")


@dataclasses.dataclass(frozen=True)
class _Case:
  model: Any
  load: Callable[..., Any]
  tensors: Tensors
  x: np.ndarray
  logits: np.ndarray  # the oracle's
  head: str


def _cases() -> dict[str, _Case]:
  timm = _timm()
  vit = _vit_oracle(timm, _IMAGES)
  bert = _bert()
  cases = {
    "timm": _Case(_VIT, networks.load_vit, timm, _IMAGES, vit, "head"),
    "hugging_face": _Case(
      _VIT, networks.load_vit, _hugging_face(timm), _IMAGES, vit, "classifier"
    ),
    "bert": _Case(
      _BERT, networks.load_bert, bert, _TOKENS, _bert_oracle(bert, _TOKENS), "classifier"
    ),
  }
  for name, model in (("basic", _BASIC), ("bottleneck", _BOTTLENECK)):
    tensors = _torchvision(model)
    logits = _resnet_oracle(tensors, _LARGE)
    cases[name] = _Case(model, networks.load_resnet, tensors, _LARGE, logits, "fc")
  return cases


CASES = _cases()


def _begun(model: Any, x: np.ndarray) -> Any:
  """First parameters without a compilation: zeros."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.asarray(x[:1]))
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)


def _loaded(case: _Case, tmp_path, tensors: Tensors, model: Any = None) -> Any:
  path = tmp_path / "model.safetensors"
  save_file(tensors, path)
  model = case.model if model is None else model
  return case.load(path, model, _begun(model, case.x))


@pytest.mark.cases(quick=["hugging_face"], long=...)
@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_logits_of_its_architecture(name, tmp_path):
  case = CASES[name]
  params = _loaded(case, tmp_path, case.tensors)
  logits = jax.jit(case.model.apply)(params, jnp.asarray(case.x))
  scale = np.abs(case.logits).max()
  np.testing.assert_allclose(logits, case.logits, rtol=2e-4, atol=2e-4 * scale)
  # The inputs differ in their logits, so the comparison is of more than biases.
  assert np.ptp(case.logits, axis=0).min() > 0.01 * scale


@pytest.mark.cases(slow=["bert", "timm", "basic", "bottleneck"])
@pytest.mark.parametrize("name", CASES)
def test_a_head_of_other_classes_or_none_begins_afresh(name, tmp_path):
  case = CASES[name]
  without = {n: a for n, a in case.tensors.items() if not n.startswith(f"{case.head}.")}
  model = case.model.clone(num_classes=5)
  for tensors in (case.tensors, without):
    params = _loaded(case, tmp_path, tensors, model)["params"]
    assert params["head"]["kernel"].shape[1] == 5
    assert not np.any(params["head"]["kernel"]) and np.any(jax.tree.leaves(params)[0])


_ODD = {
  "timm": ("blocks.1.mlp.fc1.bias", "blocks.0.attn.qkv.weight"),
  "hugging_face": (
    "vit.encoder.layer.1.attention.attention.key.bias",
    "vit.encoder.layer.0.attention.attention.query.weight",
  ),
  "bert": (
    "bert.encoder.layer.1.output.LayerNorm.bias",
    "bert.encoder.layer.0.attention.self.value.weight",
  ),
  "basic": ("layer2.1.bn2.running_var", "layer1.0.conv1.weight"),
  "bottleneck": ("layer1.0.downsample.1.bias", "layer2.0.conv3.weight"),
}


@pytest.mark.cases(slow=["bert", "hugging_face", "timm"])
@pytest.mark.parametrize("name", CASES)
def test_a_file_of_another_model_is_refused_in_one_line(name, tmp_path):
  case = CASES[name]
  missing, bent = _ODD[name]
  without = {n: a for n, a in case.tensors.items() if n != missing}
  nan = np.full_like(case.tensors[bent], np.nan)
  for tensors in (
    without,
    case.tensors | {"odd.weight": _draw(2)},  # unknown
    case.tensors | {bent: _draw(7)},  # of another shape
    case.tensors | {bent: nan},
    case.tensors | {bent: np.zeros((2, 2), np.int64)},
  ):
    with refuses("path") as error:
      _loaded(case, tmp_path, tensors)
    assert "\n" not in str(error.value)


def test_norms_that_are_no_batch_norms_are_refused(tmp_path):
  case = CASES["basic"]
  without = {n: a for n, a in case.tensors.items() if "running_" not in n}
  with refuses("path"):
    _loaded(case, tmp_path, without)
  # A variance below -epsilon has no root, and no frozen norm has one.
  negative = {"bn1.running_var": -np.ones(4, np.float32)}
  with refuses("path"):
    _loaded(case, tmp_path, case.tensors | negative)


def test_names_of_earlier_files_of_bert(tmp_path):
  case = CASES["bert"]
  earlier = {}
  for name, array in case.tensors.items():
    name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    earlier[name.replace("LayerNorm.bias", "LayerNorm.beta")] = array
  assert earlier.keys() != case.tensors.keys()
  params = _loaded(case, tmp_path, earlier)
  jax.tree.map(np.testing.assert_array_equal, params, _loaded(case, tmp_path, case.tensors))
  # With both names in one file, nothing says which is meant.
  with refuses("path"):
    _loaded(case, tmp_path, case.tensors | earlier)


@pytest.mark.slow
def test_padding_and_what_follows_it_moves_nothing():
  params = jax.tree.map(
    lambda leaf: jnp.asarray(_draw(*leaf.shape)), _begun(_BERT, _TOKENS)
  )
  apply = jax.jit(_BERT.apply)
  short = apply(params, jnp.array([[1, 5, 3]]))
  padded = apply(params, jnp.array([[1, 5, 3, 0, 0, 0]]))
  np.testing.assert_allclose(short, padded, rtol=1e-5, atol=1e-6)
  with refuses("tokens.shape"):
    jax.eval_shape(_BERT.apply, params, jnp.ones((1, 7), jnp.int32))

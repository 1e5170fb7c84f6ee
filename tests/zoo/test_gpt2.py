"""GPT-2's layout: what a file holds is what the model computes with.

The oracle is GPT-2 from its paper and its published code, in NumPy and float64.
"""

from __future__ import annotations

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.zoo import networks
from dpjax.zoo.networks.gpt2 import save_gpt2

pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file

from tests.refuses import refuses

_LAYERS, _HEADS, _WIDTH, _LENGTH, _VOCAB = 2, 2, 8, 6, 11
_SIZES = dict(num_layers=_LAYERS, num_heads=_HEADS, features=_WIDTH, max_length=_LENGTH)
_MODEL = networks.Transformer(vocab_size=_VOCAB, norm_epsilon=1e-5, **_SIZES)
_TOKENS = np.random.default_rng(1).integers(0, _VOCAB, (3, _LENGTH))


def _tensors(seed=0):
  """As Hugging Face's GPT2LMHeadModel saves them; spread wide, so that gelu, softmax and the
  epsilon of the norms (of a nearly constant row of wte) all matter."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  found = {"wte.weight": draw(_VOCAB, _WIDTH), "wpe.weight": 1e-3 * draw(_LENGTH, _WIDTH)}
  found["wte.weight"][:4] *= 2e-3  # variance near epsilon
  norm = lambda name: {f"{name}.weight": 1 + draw(_WIDTH), f"{name}.bias": draw(_WIDTH)}
  dense = lambda name, n, m: {f"{name}.weight": draw(n, m), f"{name}.bias": draw(m)}
  for i in range(_LAYERS):
    found |= norm(f"h.{i}.ln_1") | norm(f"h.{i}.ln_2")
    found |= dense(f"h.{i}.attn.c_attn", _WIDTH, 3 * _WIDTH)
    found |= dense(f"h.{i}.attn.c_proj", _WIDTH, _WIDTH)
    found |= dense(f"h.{i}.mlp.c_fc", _WIDTH, 4 * _WIDTH)
    found |= dense(f"h.{i}.mlp.c_proj", 4 * _WIDTH, _WIDTH)
  return found | norm("ln_f")


def _gpt2(t, tokens, epsilon=1e-5):
  """Logits [B, T, V] by the published code of GPT-2 (openai/gpt-2, src/model.py)."""
  t = {name: np.asarray(value, np.float64) for name, value in t.items()}
  dense = lambda x, name: x @ t[f"{name}.weight"] + t[f"{name}.bias"]

  def norm(x, name):
    centered = x - x.mean(-1, keepdims=True)
    unit = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon)
    return unit * t[f"{name}.weight"] + t[f"{name}.bias"]

  def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

  gelu = lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
  x = t["wte.weight"][tokens] + t["wpe.weight"][: tokens.shape[1]]
  for i in range(_LAYERS):
    mixed = dense(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
    q, k, v = np.split(mixed, 3, axis=-1)
    heads = [np.split(part, _HEADS, axis=-1) for part in (q, k, v)]
    outs = []
    for qh, kh, vh in zip(*heads):
      scores = qh @ kh.transpose(0, 2, 1) / np.sqrt(qh.shape[-1])
      scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
      outs.append(softmax(scores) @ vh)
    x = x + dense(np.concatenate(outs, -1), f"h.{i}.attn.c_proj")
    hidden = gelu(dense(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"))
    x = x + dense(hidden, f"h.{i}.mlp.c_proj")
  return norm(x, "ln_f") @ t["wte.weight"].T


def _written(tmp_path, tensors, **metadata):
  path = tmp_path / "model.safetensors"
  save_file(tensors, path, metadata=metadata or None)
  return path


def _close(params, tensors):
  ours = jax.jit(_MODEL.apply)(params, jnp.asarray(_TOKENS))
  wanted = _gpt2(tensors, _TOKENS)
  # float32 against float64, where rows are nearly constant
  np.testing.assert_allclose(ours, wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())
  return np.abs(ours - wanted).max() / np.abs(wanted).max()


@pytest.mark.slow
def test_a_file_gives_the_logits_of_gpt2(tmp_path):
  tensors = _tensors()
  error = _close(networks.load_gpt2(_written(tmp_path, tensors), _MODEL), tensors)
  other = np.abs(_gpt2(tensors, _TOKENS, epsilon=1e-6) - _gpt2(tensors, _TOKENS)).max()
  assert other / np.abs(_gpt2(tensors, _TOKENS)).max() > 10 * error  # it can tell epsilons


def test_prefix_buffers_tied_head_and_half_precision(tmp_path):
  tensors = _tensors()
  half = {n: np.asarray(jnp.asarray(a, jnp.bfloat16)) for n, a in tensors.items()}
  files = {f"transformer.{name}": a for name, a in half.items()}
  files["transformer.h.0.attn.bias"] = np.ones((1, 1, _LENGTH, _LENGTH), bool)
  files["transformer.h.1.attn.masked_bias"] = np.float32(-1e4).reshape(1)
  files["lm_head.weight"] = half["wte.weight"].copy()
  params = networks.load_gpt2(_bfloat16(tmp_path, files), _MODEL)
  expected = networks.load_gpt2(
    _written(tmp_path, {n: a.astype(np.float32) for n, a in half.items()}), _MODEL
  )
  jax.tree.map(np.testing.assert_array_equal, params, expected)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  single = {n: a.astype(np.float16) for n, a in tensors.items()}
  held = networks.load_gpt2(_written(tmp_path, single), _MODEL)["params"]["positions"]
  np.testing.assert_array_equal(held, single["wpe.weight"].astype(np.float32))


def _bfloat16(tmp_path, tensors):
  """The format written by hand: a length, names and places as JSON, bytes."""
  kinds = {"bfloat16": "BF16", "float32": "F32", "bool": "BOOL"}
  ends = itertools.accumulate((a.nbytes for a in tensors.values()), initial=0)
  header = {
    name: {
      "dtype": kinds[str(a.dtype)],
      "shape": a.shape,
      "data_offsets": [end, end + a.nbytes],
    }
    for (name, a), end in zip(tensors.items(), ends)
  }
  text = json.dumps(header).encode()
  path = tmp_path / "half.safetensors"
  body = b"".join(a.tobytes() for a in tensors.values())
  path.write_bytes(len(text).to_bytes(8, "little") + text + body)
  return path


def test_ids_that_leave_zero_to_the_padding_give_the_same_logits(tmp_path):
  tensors = _tensors()
  path = _written(tmp_path, tensors)
  wide = _MODEL.clone(vocab_size=_VOCAB + 1)
  params = networks.load_gpt2(path, wide, first_id=1)
  ours = jax.jit(wide.apply)(params, jnp.asarray(_TOKENS + 1))
  wanted = _gpt2(tensors, _TOKENS)
  np.testing.assert_allclose(
    ours[..., 1:], wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max()
  )
  # The padding has the embedding of the last word.
  np.testing.assert_array_equal(ours[..., 0], ours[..., -1])
  save_gpt2(tmp_path / "again.safetensors", wide, params, first_id=1)
  again = load_file(tmp_path / "again.safetensors")
  assert again.keys() == tensors.keys()
  for name, array in tensors.items():
    np.testing.assert_array_equal(again[name], array)
  with refuses("path"):
    networks.load_gpt2(path, wide)


@pytest.mark.long
def test_what_is_saved_is_read_again_and_is_in_their_layout(tmp_path):
  for tied in (True, False):
    model = _MODEL.clone(tie_embeddings=tied, num_layers=1)
    params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(_TOKENS))
    path = tmp_path / f"{tied}.safetensors"
    save_gpt2(path, model, params)
    jax.tree.map(np.testing.assert_array_equal, networks.load_gpt2(path, model), params)
    assert load_file(path)["h.0.attn.c_attn.weight"].shape == (_WIDTH, 3 * _WIDTH)
    assert ("lm_head.weight" in load_file(path)) is not tied
  with refuses("path"):
    networks.load_gpt2(
      tmp_path / "True.safetensors", _MODEL.clone(num_heads=4, num_layers=1)
    )
  with refuses("params"):
    save_gpt2(tmp_path / "x", _MODEL, params)
  with pytest.raises(OSError, match="cannot be written"):
    save_gpt2(tmp_path / "no" / "x", model, params)


@pytest.mark.parametrize("name", ["num_heads", "norm_epsilon"])
def test_what_a_file_says_of_itself_may_be_anything(name, tmp_path):
  save_file(_tensors(), tmp_path / "odd.safetensors", metadata={name: "two"})
  with refuses("path"):
    networks.load_gpt2(tmp_path / "odd.safetensors", _MODEL)


def _nan(tensors):
  tensors["ln_f.bias"] = np.full(_WIDTH, np.nan, np.float32)


_FAULTS = {
  "lacks h.1.mlp.c_fc.bias": lambda t: t.pop("h.1.mlp.c_fc.bias"),
  "has unknown h.2.ln_1.bias": lambda t: t.update({"h.2.ln_1.bias": t["ln_f.bias"]}),
  r"c_fc.weight is of shape \(32, 8\), the model wants \(8, 32\)": lambda t: t.update(
    {"h.0.mlp.c_fc.weight": t["h.0.mlp.c_fc.weight"].T.copy()}
  ),
  "wpe.weight is F64, must be one of": lambda t: t.update({"wpe.weight": np.ones((6, 8))}),
  "values that are not finite": _nan,
  "lm_head.weight is not wte.weight": lambda t: t.update(
    {"lm_head.weight": 2 * t["wte.weight"]}
  ),
  "holds a tensor twice": lambda t: t.update({"transformer.ln_f.bias": t["ln_f.bias"]}),
}


@pytest.mark.parametrize("message", _FAULTS)
def test_a_file_of_another_model_is_refused_in_one_line(message, tmp_path):
  tensors = _tensors()
  _FAULTS[message](tensors)
  with refuses("path") as caught:
    networks.load_gpt2(_written(tmp_path, tensors), _MODEL)
  assert "\n" not in str(caught.value)


def test_no_file_no_safetensors_and_no_gpt2_are_refused_in_one_line(tmp_path):
  (tmp_path / "odd").write_bytes(b"\x80\x04pickle")
  for name, message in (("none", "path"), ("odd", "path")):
    with refuses(message) as caught:
      networks.load_gpt2(tmp_path / name, _MODEL)
    assert "\n" not in str(caught.value)
  path = _written(tmp_path, _tensors())
  with refuses("norm_epsilon", value=1e-06):
    networks.load_gpt2(path, _MODEL.clone(norm_epsilon=1e-6))

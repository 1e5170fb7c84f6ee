"""GPT-2's weights in a safetensors file, with Hugging Face's names and layout.

A file is read, never executed. The architecture (Radford et al. 2019) is `Transformer`'s with
`norm_epsilon=1e-5`: pre-LayerNorm, learnt positions, GELU by tanh, scores / sqrt(head width).
The products of GPT-2 ("Conv1D") are [in, out], as linen's kernels are.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dpjax.types import Params
from dpjax.validate import UserError, about
from dpjax.zoo.networks import weight_files
from dpjax.zoo.networks.transformer import Transformer

NORM_EPSILON = 1e-5
# Names of tensors that hold the causal mask, which is not a weight.
_BUFFERS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_HEAD = "lm_head.weight"
_TIED = "wte.weight"
_NORMS = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
_PRODUCTS = {
  "attn.c_attn": ("attention", "query_key_value"),
  "attn.c_proj": ("attention", "out"),
  "mlp.c_fc": ("mlp_in",),
  "mlp.c_proj": ("mlp_out",),
}


def load_gpt2(
  path: str | os.PathLike[str], model: Transformer, *, first_id: int = 0
) -> Params:
  """Loads the parameters of `model`, float32, from a safetensors file of GPT-2's layout.

  Names may begin with "transformer."; buffers of the causal mask are skipped. With tied
  embeddings the file may hold an `lm_head.weight` only if it equals `wte.weight`.

  Args:
    path: file of F32, F16 or BF16 tensors, as in https://huggingface.co/openai-community/gpt2.
    model: model with norm_epsilon=1e-5; its sizes decide which names and shapes are wanted.
    first_id: id that the model uses for the file's first word; 1 if the tokenizer keeps 0 for
      padding. Lower ids get the embedding of the file's last word, the end of text in GPT-2.

  Raises:
    UserError: the file is missing or is no safetensors file; a tensor is missing, unknown, of
      another shape or type, or not finite; the model has another norm_epsilon or number of heads
      than the file; the library is not installed. The message is one line.

  >>> sizes = dict(num_layers=12, num_heads=12, features=768, max_length=1024)
  >>> model = Transformer(vocab_size=50257, norm_epsilon=1e-5, **sizes)
  >>> load_gpt2("gpt2.safetensors", model)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: path='gpt2.safetensors': No such file or directory
  """
  if model.norm_epsilon != NORM_EPSILON:
    raise UserError(
      f"must be {NORM_EPSILON!r}, as GPT-2's is",
      field="norm_epsilon",
      value=model.norm_epsilon,
    )
  with about("path", os.fspath(path)):
    held, said = weight_files.read(path, _bare, _BUFFERS)
    _check_model(model, said)
    names = _names(model)
    # A tied head only repeats the embedding.
    if _HEAD in held and _HEAD not in names:
      head = held.pop(_HEAD)
      if not np.array_equal(head, held.get(_TIED, ())):
        raise UserError(f"{_HEAD} is not {_TIED}; it needs tie_embeddings=False")
    wanted = _shapes(model)
    weight_files.check_names(held, names)
    for name in (_TIED, _HEAD):
      if first_id and name in names and held[name].ndim == 2:
        held[name] = np.concatenate([held[name][-1:]] * first_id + [held[name]])
    flat = {ours: _as_ours(held[name], ours) for name, ours in names.items()}
    for name, ours in names.items():
      if flat[ours].shape != wanted[ours]:
        shape = _as_ours(np.broadcast_to(np.float32(0), wanted[ours]), ours).shape
        have = f"{name} is of shape {held[name].shape}"
        raise UserError(f"{have}, the model wants {shape}")
      weight_files.finite(flat[ours], name)
    return {"params": traverse_util.unflatten_dict(jax.tree.map(jnp.asarray, flat))}


def save_gpt2(
  path: str | os.PathLike[str], model: Transformer, params: Params, *, first_id: int = 0
) -> None:
  """Writes the parameters of `model` in float32, so that `load_gpt2` and Hugging Face's GPT-2 can
  read them. Metadata hold the number of heads and the epsilon of the norms.

  Args:
    first_id: the model's id that becomes id 0 of the file, as in `load_gpt2`. Lower ids are left
      out.

  Raises:
    UserError: the parameters are of another model; the library is not installed.
    OSError: the file cannot be written.
  """
  names = _names(model)
  wanted = _shapes(model)
  held: Any = params
  flat: Any = traverse_util.flatten_dict(dict(held["params"]) if "params" in held else {})
  if {name: np.shape(leaf) for name, leaf in flat.items()} != wanted:
    raise UserError(
      "must be those of the model, {'params': ...} as init gives them", field="params"
    )
  tensors = {
    name: np.ascontiguousarray(_as_ours(np.asarray(flat[ours], np.float32), ours))
    for name, ours in names.items()
  }
  for name in (_TIED, _HEAD):
    if name in tensors:
      tensors[name] = np.ascontiguousarray(tensors[name][first_id:])
  said = {"format": "pt", "num_heads": str(model.num_heads)}
  said["norm_epsilon"] = repr(float(model.norm_epsilon))
  library = weight_files.library()
  try:
    library.numpy.save_file(tensors, os.fspath(path), metadata=said)
  # safetensors raises this error for a full disk, for example.
  except library.SafetensorError as error:
    raise OSError(f"{os.fspath(path)}: cannot be written ({error})") from error


def _bare(name: str) -> str:
  return name.removeprefix("transformer.")


def _check_model(model: Transformer, said: dict[str, str]) -> None:
  for name in ("num_heads", "norm_epsilon"):
    ours = getattr(model, name)
    if name in said and _number(said[name]) != ours:
      raise UserError(f"was made with {name}={said[name]}, the model has {ours!r}")


def _number(text: str) -> float:
  """Returns a text of the metadata as a number, or NaN if it is no number. NaN equals nothing."""
  try:
    return float(text)
  except ValueError:
    return math.nan


def _shapes(model: Transformer) -> dict[tuple[str, ...], tuple[int, ...]]:
  return weight_files.shapes(model, jnp.zeros((1, 1), jnp.int32))


def _names(model: Transformer) -> dict[str, tuple[str, ...]]:
  """Returns a dictionary from Hugging Face's tensor names to dpjax's paths."""
  names: dict[str, tuple[str, ...]] = {
    _TIED: ("embed", "embedding"),
    "wpe.weight": ("positions",),
    "ln_f.weight": ("final_norm", "scale"),
    "ln_f.bias": ("final_norm", "bias"),
  }
  if not model.tie_embeddings:
    names[_HEAD] = ("head", "kernel")
  for i in range(model.num_layers):
    block = f"block_{i}"
    for theirs, ours in _NORMS.items():
      names[f"h.{i}.{theirs}.weight"] = (block, ours, "scale")
      names[f"h.{i}.{theirs}.bias"] = (block, ours, "bias")
    for theirs, path in _PRODUCTS.items():
      names[f"h.{i}.{theirs}.weight"] = (block, *path, "kernel")
      names[f"h.{i}.{theirs}.bias"] = (block, *path, "bias")
  return names


def _as_ours(array: np.ndarray, ours: tuple[str, ...]) -> np.ndarray:
  """Converts an array to float32. The head's kernel is also transposed, since files hold it as
  [out, in]. The function serves both loading and saving."""
  array = array.astype(np.float32)
  return array.T if ours[0] == "head" else array

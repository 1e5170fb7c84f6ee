"""Reads first parameters from a safetensors file in the layout of a published model, or from a
checkpoint of Flax or Orbax by the model's own names."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from dpjax import validate, weight_folders
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import saved
from dpjax.types import Params
from dpjax.validate import UserError
from dpjax.zoo import networks
from dpjax.zoo.networks import checkpoint_files, gpt2

# Maps a model to the function that loads its published layouts. GPT-2 has a different loader.
_LOADERS = {"vit": "load_vit", "resnet": "load_resnet", "bert": "load_bert"}


def check(config: TrainConfig) -> None:
  """Raises UserError if the config reads or writes safetensors weights, and its model does not
  support this."""
  named = config.pretrained
  file = named if named is not None and named.endswith(".safetensors") else None
  name = config.model.name
  if file is not None and not config.safetensors and name in _LOADERS:
    return
  asked = {"pretrained": file, "safetensors": config.safetensors}
  field = next((name for name, value in asked.items() if value), None)
  if field is None:
    return
  if name != "transformer":
    others = f", or one of {', '.join(_LOADERS)}" if file and not config.safetensors else ""
    raise UserError(
      f"needs model.name='transformer'{others}, not {name!r}",
      field=field,
      value=asked[field],
    )
  epsilon = config.model.options.get("norm_epsilon")
  if epsilon != gpt2.NORM_EPSILON:
    raise UserError(
      f"needs model.options.norm_epsilon={gpt2.NORM_EPSILON!r}, as GPT-2 has it, not {epsilon!r}",
      field=field,
      value=asked[field],
    )


def load(
  config: TrainConfig,
  path: str,
  model: nn.Module,
  params: Params,
  tokenizer: Mapping[str, Any] | None,
) -> Params:
  """Returns the weights of a file or folder for the config's model.

  Args:
    path: a file, or a folder with a checkpoint.
    params: the first parameters of the model.
    tokenizer: `Dataset.tokenizer` of the run's data.
  """
  if not path.endswith(".safetensors") and not weight_folders.is_checkpoint(path):
    return saved.first_params(config.pretrained, params)
  if not path.endswith(".safetensors"):
    with validate.about("pretrained", config.pretrained):
      arrays, fresh = checkpoint_files.read(path, params)
      return saved.in_place_of(params, arrays, fresh)
  try:
    if config.model.name in _LOADERS:
      return getattr(networks, _LOADERS[config.model.name])(path, model, params)
    assert isinstance(model, networks.Transformer)
    return networks.load_gpt2(path, model, first_id=_first_id(tokenizer))
  except UserError as error:
    raise error.of(field="pretrained", value=path) from error


def _first_id(tokenizer: Mapping[str, Any] | None) -> int:
  """Returns the data's token for id 0 of the tokenizer's file; 0 without a tokenizer. Row 0 of
  the embeddings in a file of weights belongs to this token."""
  return 0 if tokenizer is None else tokenizer["first_id"]


def write(
  model: networks.Transformer,
  whole: Params,
  path: pathlib.Path,
  tokenizer: Mapping[str, Any] | None,
) -> None:
  """Writes all weights of a language model, with token ids as in the tokenizer's own file."""
  gpt2.save_gpt2(path, model, whole, first_id=_first_id(tokenizer))

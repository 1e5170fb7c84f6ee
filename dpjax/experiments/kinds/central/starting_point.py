"""Chooses the first parameters of a run, and the part that is trained: all, last layer, adapters.

The weights must not depend on the private data; nothing here can check that.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from dpjax import names, training, validate
from dpjax.experiments.config import choices, common
from dpjax.experiments.kinds.central.config import (
  AllWeights,
  Head,
  HeadFirst,
  LowRank,
  TrainConfig,
)
from dpjax.experiments.kinds.central.tasks import Task
from dpjax.experiments.run import saved
from dpjax.key_uses import KeyUse, key_for
from dpjax.types import LossFn, Params
from dpjax.validate import UserError
from dpjax.zoo import networks

SAVED_AS = "model.safetensors"
# Maps a model to the function that loads its published layouts. GPT-2 has a different loader.
_LOADERS = {"vit": "load_vit", "resnet": "load_resnet", "bert": "load_bert"}


class Trained(NamedTuple):
  """Holds the parameters that steps change, and the model as a function of these parameters."""

  params: Params  # at step 0
  loss: Callable[[Any], LossFn]  # apply -> the loss; for adapters the argument is ignored
  apply: Callable[[Params, Any], Any]  # (params, x [B, ...]) -> outputs
  whole: Callable[[Params], Params]  # (params) -> all weights of the model


def check(config: TrainConfig) -> None:
  """Raises UserError if `pretrained` or `trainable` is wrong, or does not fit the rest of the
  config; loads no data."""
  if config.pretrained is not None or config.safetensors:
    _check_file(config)
  trainable = config.trainable
  if isinstance(trainable, HeadFirst) and trainable.steps >= config.num_steps:
    raise UserError(
      f"must be < num_steps={config.num_steps}; with trainable='head' the last "
      "layer alone is trained in all of them",
      field="trainable.steps",
      value=trainable.steps,
    )
  audited = config.audit is not None and config.audit.kind == "gradient"
  if audited and not isinstance(trainable, AllWeights):
    name = choices.name_of(config, "trainable")
    raise UserError(
      f"must be another where trainable={name!r}, which trains some weights "
      "alone: the canaries' own would be left out",
      field="audit.kind",
      value="gradient",
    )
  if not isinstance(trainable, AllWeights):
    name = choices.name_of(config, "trainable")
    why = (
      f" where trainable={name!r}, whose frozen weights nobody has laid out over devices"
    )
    common.only(config, "mesh", [None], why)


def _check_file(config: TrainConfig) -> None:
  """Raises UserError if the file of weights does not exist, or if the model does not fit the
  safetensors file that is to be read or written."""
  # os.path is used, since pathlib raises for names that are too long for a file.
  if config.pretrained is not None:
    path = names.weights_file(config.pretrained)
    if not os.path.exists(path):
      inside = "" if path == config.pretrained else " as params.npz in this folder"
      raise UserError(
        f"there is no such file{inside} (looked in {os.getcwd()})",
        field="pretrained",
        value=config.pretrained,
      )
  _check_safetensors(config)


def _check_safetensors(config: TrainConfig) -> None:
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
  from dpjax.zoo.networks import gpt2  # few runs read or write its layout

  epsilon = config.model.options.get("norm_epsilon")
  if epsilon != gpt2.NORM_EPSILON:
    raise UserError(
      f"needs model.options.norm_epsilon={gpt2.NORM_EPSILON!r}, as GPT-2 has it, not {epsilon!r}",
      field=field,
      value=asked[field],
    )


def load(
  config: TrainConfig,
  model: Any,
  params: Params,
  tokenizer: Mapping[str, Any] | None,
) -> Params:
  """Returns the weights of the config's file `pretrained` for a model like `params`.

  It is a params.npz, a safetensors file in the layout of a published model, or a checkpoint of Flax
  or Orbax by the model's own names.

  Args:
    params: the first parameters of the model.
    tokenizer: `Dataset.tokenizer` of the run's data.
  """
  assert config.pretrained is not None
  path = names.weights_file(config.pretrained)
  if path.endswith(".safetensors"):
    try:
      if config.model.name in _LOADERS:
        return getattr(networks, _LOADERS[config.model.name])(path, model, params)
      return networks.load_gpt2(path, model, first_id=_first_id(tokenizer))
    except UserError as error:
      raise error.of(field="pretrained", value=path) from error
  from dpjax import weight_folders  # few runs start from weights

  if not weight_folders.is_checkpoint(path):
    return saved.first_params(config.pretrained, params)
  from dpjax.zoo.networks import checkpoint_files

  with validate.about("pretrained", config.pretrained):
    arrays, fresh = checkpoint_files.read(path, params)
    return saved.in_place_of(params, arrays, fresh)


def _first_id(tokenizer: Mapping[str, Any] | None) -> int:
  """Returns the data's token for id 0 of the tokenizer's file; 0 without a tokenizer. Row 0 of
  the embeddings in a file of weights belongs to this token."""
  return 0 if tokenizer is None else tokenizer["first_id"]


def trainable_part(
  config: TrainConfig, task: Task, model: Any, params: Params, key: jax.Array
) -> Trained:
  """Returns what is trained: all weights, the last layer, or adapters of some matrices.

  Args:
    params: parameters of the whole model.
    key: key of the initial parameters. It depends on the seed alone, so it is public.
  """
  trainable = config.trainable
  if isinstance(trainable, LowRank):
    return _with_adapters(trainable, task, model, params, key)
  if not isinstance(trainable, AllWeights):
    _check_head(config, params)
  if not isinstance(trainable, Head):
    return Trained(params, task.loss, model.apply, lambda whole: whole)
  # The other layers are constants of the loss, so they have no gradient to clip.
  layers = params["params"]
  whole = lambda head: {**params, "params": {**layers, **head["params"]}}
  apply = lambda head, x, **key: model.apply(whole(head), x, **key)
  return Trained({"params": {saved.HEAD: layers[saved.HEAD]}}, task.loss, apply, whole)


def _with_adapters(
  trainable: LowRank, task: Task, model: Any, params: Params, key: jax.Array
) -> Trained:
  key = key_for(KeyUse.ADAPTERS, key)
  try:
    adapted = training.lora(
      params, trainable.pattern, rank=trainable.rank, alpha=trainable.alpha, key=key
    )
  except UserError as error:
    if error.field in ("pattern", "rank"):
      raise error.within("trainable") from error
    raise UserError(
      str(error), field="trainable.pattern", value=trainable.pattern
    ) from error
  loss = lambda _: adapted.apply(task.loss(model.apply))
  apply = lambda adapters, x: model.apply(adapted.merge(adapters), x)
  return Trained(adapted.trainable, loss, apply, adapted.merge)


def _check_head(config: TrainConfig, params: Params) -> None:
  layers = params.get("params", {})
  name = choices.name_of(config, "trainable")
  if saved.HEAD not in layers:
    raise UserError(
      f"needs a model whose last layer is {saved.HEAD!r}; those of "
      f"model.name={config.model.name!r} are {validate.join_words(map(repr, layers), 120)}",
      field="trainable",
      value=name,
    )


def first_steps(config: TrainConfig) -> int:
  """Returns the number of first steps that train only the last layer; 0 unless "head_first"."""
  return config.trainable.steps if isinstance(config.trainable, HeadFirst) else 0


def write(
  config: TrainConfig,
  model: Any,
  whole: Params,
  folder: pathlib.Path,
  tokenizer: Mapping[str, Any] | None,
) -> None:
  """Writes model.safetensors if the config asks for it: all weights of a language model, with token
  ids as in the tokenizer's own file. Adapters are merged into their matrices."""
  if config.safetensors:
    from dpjax.zoo.networks import gpt2  # few runs write its layout

    gpt2.save_gpt2(folder / SAVED_AS, model, whole, first_id=_first_id(tokenizer))


def facts(config: TrainConfig) -> dict[str, Any]:
  """Returns facts of the trained part for result.json; {} if every weight is trained."""
  trainable = config.trainable
  if isinstance(trainable, LowRank):
    return {"trainable": f"lora, rank {trainable.rank}, {trainable.pattern}"}
  if isinstance(trainable, HeadFirst):
    return {"trainable": f"head first, {trainable.steps} steps"}
  return {} if isinstance(trainable, AllWeights) else {"trainable": "head"}

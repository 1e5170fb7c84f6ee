"""Checks of fields that several kinds of config share; `rules` checks single fields."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from dpjax import names, validate
from dpjax.experiments.config import choices, fields, rules
from dpjax.experiments.config.common import read_if
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.central.config import (
  AnyDataConfig,
  ModelConfig,
  NetworkConfig,
)
from dpjax.validate import UserError, Verbatim
from dpjax.zoo import networks
from dpjax.zoo.datasets import published
from dpjax.zoo.datasets.registry import takes_declaration
from dpjax.zoo.networks import registry
from dpjax.zoo.networks.registry import check_options


def only(config: Any, path: str, allowed: Iterable[Any], why: str) -> None:
  """Raises UserError unless a field has one of these values, all that other fields leave to it.

  Args:
    path: dotted name of the field; the values of a choice are given by their names.
    why: end of the message.

  >>> from dpjax.experiments.kinds.central.config import DataConfig
  >>> only(DataConfig(center=True), "center", [False], " for tokens")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: center=True: must be false for tokens
  """
  *sections, name = path.split(".")
  value = choices.name_of(functools.reduce(getattr, sections, config), name)
  values = list(allowed)
  if value not in values:
    words = (repr(each) if isinstance(each, str) else str(each).lower() for each in values)
    raise UserError(f"must be {' or '.join(words)}{why}", field=path, value=value)


def at_most(config: Any, path: str, most: float, why: str = "") -> None:
  """Raises UserError for a field above the most that other fields or the data allow.

  >>> from dpjax.experiments.kinds.central.config import DataConfig
  >>> at_most(DataConfig(limit=3), "limit", 2, ", the examples")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: limit=3: must be at most 2, the examples
  """
  value = fields.get(config, path)
  if value is not None and value > most:
    raise UserError(f"must be at most {most}{why}", field=path, value=value)


def data(config: AnyDataConfig) -> None:
  """Raises UserError for a user's data function that cannot be found."""
  if names.is_path(config.name):
    names.find(config.name, "data.name")


def data_read(config: AnyDataConfig, *, of_leaf: bool = False) -> None:
  """Raises UserError for fields that data of this name do not have.

  Whether data are text may be known only after loading.

  Args:
    of_leaf: whether a folder was written by LEAF, so that it may hold text.
  """
  declared = takes_declaration(config.name) and not of_leaf
  # Published data are images, tables, or texts of a length that their loader fixes.
  is_published = config.name.partition(":")[0] in published.PUBLISHED
  is_file = config.name.endswith(".npz") or declared
  text = not (is_published or is_file or names.is_path(config.name))
  with within("data"):
    in_folder = published.lies_in_folder(config.name)
    read_if(config, in_folder, "data that lie in a folder", "data_dir")
    read_if(config, text, "a text of tensorflow-datasets", "max_length")
    kinds = "a table, a text file or a folder of images"
    read_if(config, declared, kinds, "declaration")


def sections(config: Any) -> None:
  """Raises UserError for sections `data` and `model` that are wrong, or do not fit each other.

  >>> from dpjax.experiments.kinds.central.config import DataConfig, TrainConfig
  >>> sections(TrainConfig(data=DataConfig(center=True), model=ModelConfig("patches_linear")))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: data.center=True: must be false, for the features of ...
  """
  data(config.data)
  model(config.model)
  if registry.entry(config.model.name).in_unit_range:
    why = f", for the features of model.name={config.model.name!r} are of images in [0, 1]"
    only(config, "data.center", [False], why)


def model(config: NetworkConfig, section: str = "model") -> None:
  """Raises UserError for an unknown model or option, or a value with which no model can be built.

  A user's model is built, and so checked, only when data are loaded.
  """
  for option, value in config.options.items():
    _check_written(value, f"{section}.options.{option}")
  with of_model(config, section):
    check_options(config.name, config.options)
    if not names.is_path(config.name):
      if config.options.get("dtype") is not None:
        # The bound on clipped sums is tested for these types of activations (tests/core/gradients).
        validate.one_of(("float32", "bfloat16", "float16"), dtype=config.options["dtype"])
      networks.build(config.name, num_classes=2, **config.options)
  if not isinstance(config, ModelConfig):
    return
  features = registry.entry(config.name).features
  with within(section):
    read_if(config, features is not None, "a model on features", "mirrored")
    scattering = features == "scattering"
    read_if(config, scattering, "a model on scattering features", "colours")


@contextlib.contextmanager
def of_model(config: NetworkConfig, section: str = "model") -> Iterator[None]:
  """Makes errors about a model point to the field of its option, or else to its name.

  >>> with of_model(ModelConfig("mlp", {"features": [0]})):
  ...   raise UserError("must be an integer >= 1", field="features", value=0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: model.options.features=0: must be an integer >= 1
  """
  try:
    yield
  except UserError as error:
    name = error.field.partition("[")[0]
    if name == "model":
      raise error.of(field=f"{section}.name") from error
    if name.split(".")[0] == section:
      raise
    if name == "options":
      raise error.within(section) from error
    if name in config.options:
      raise error.within(f"{section}.options") from error
    raise UserError(str(error), field=f"{section}.name", value=config.name) from error


def _check_written(value: Any, name: str) -> None:
  """Raises UserError for values that config.json cannot hold unchanged.

  config.json would hold the text of any other object. Runs with two objects of the same text would
  then count as one run.
  """
  if isinstance(value, dict) and all(isinstance(key, str) for key in value):
    for key, entry in value.items():
      _check_written(entry, f"{name}.{key}")
  elif isinstance(value, (list, tuple)):
    for index, entry in enumerate(value):
      _check_written(entry, f"{name}[{index}]")
  # JSON has no NaN and no infinity: two runs with NaN and with none would count as one run.
  elif type(value) not in (bool, int, float, str, type(None)) or (
    isinstance(value, float) and not math.isfinite(value)
  ):
    shown = " ".join(repr(value).split())
    raise UserError(
      "must be a finite number, text, true, false or none, or a list or dict (with "
      "names) of these",
      field=name,
      value=Verbatim(f"{shown:.60}"),
    )


def steps(name: str, num_steps: int, privacy: Any) -> None:
  """Raises UserError for too many steps or rounds, if noise differs or is correlated over them.

  Args:
    name: name of the field that holds `num_steps`.
    num_steps: number of steps or rounds; `rules.MOST_SHAPED` is the largest accepted one.
    privacy: settings with the method and noise levels.
  """
  shaped = hasattr(privacy, "strategy") or bool(getattr(privacy, "noise_levels", ()))
  if shaped:
    validate.integer_in(1, rules.MOST_SHAPED, **{name: num_steps})

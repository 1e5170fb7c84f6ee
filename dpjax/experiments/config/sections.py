"""The sections `data` and `model` of configs of every kind, which check themselves, and load."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from dpjax import data, names, validate
from dpjax.experiments.config import common, rules
from dpjax.experiments.config.common import COUNT, read_if
from dpjax.experiments.config.naming import within
from dpjax.names import is_path
from dpjax.validate import UserError, Verbatim
from dpjax.zoo import networks
from dpjax.zoo.datasets import published
from dpjax.zoo.datasets.registry import takes_declaration
from dpjax.zoo.networks import registry
from dpjax.zoo.networks.registry import COLOURS

# Fields of the sections that are arguments of `dpjax.data.load`.
_LOADED = ("data_dir", "declaration", "num_classes", "num_examples", "max_length")


@dataclasses.dataclass
class AnyDataConfig(common.Section):
  """The data of a run of any kind; see `dpjax.data.load`."""

  name: Annotated[
    str,
    "digits | random_process | mnist | fashion_mnist | cifar10 | any TFDS name | FILE.npz | "
    "FILE.csv | FILE.parquet | FILE.txt | FOLDER/ | package.module:name",
  ] = "digits"
  data_dir: Annotated[
    str | None, "where TFDS data lie; none: TFDS_DATA_DIR or its default"
  ] = None
  declaration: Annotated[
    str | None,
    "of a table, a text file or a folder of images: TOML or JSON file of what is public about "
    "it; none: beside it, FILE.toml, or FOLDER/declaration.toml",
  ] = None
  limit: Annotated[int | None, COUNT, "use only the first n training examples"] = None
  num_classes: Annotated[
    int | None, COUNT, "public; for data that do not declare it themselves"
  ] = None

  def check(self, section: str) -> None:
    """Raises UserError for a user's data function that cannot be found, and for fields that data of
    this name do not have."""
    if is_path(self.name):
      names.find(self.name, f"{section}.name")
    with within(section):
      in_folder = published.lies_in_folder(self.name)
      read_if(self, in_folder, "data that lie in a folder", "data_dir")
      kinds = "a table, a text file or a folder of images"
      read_if(self, takes_declaration(self.name), kinds, "declaration")

  def load(self, **more: Any) -> tuple[Any, Any]:
    """Loads (train, test), preprocessed by public constants only; errors name the fields of `data`.

    Args:
      more: other arguments of `dpjax.data.load`.
    """
    asked = {name: getattr(self, name) for name in _LOADED if hasattr(self, name)}
    with within("data", of=self):
      train, test = data.load(self.name, **asked, **more)
    return self.preprocess(train, test)

  def preprocess(self, train: data.Dataset, test: data.Dataset) -> tuple[Any, Any]:
    """Returns loaded (train, test), with the first `limit` examples of train.

    Neighbouring data sets are compared AFTER the limit, where removing a row leaves one row less.
    (Before the limit, removing a row would let another one in, so two rows would differ.) The limit
    is declared as the number of examples. A limit above the declared number is refused, since the
    run treats the limit as the public number.
    """
    if self.limit is None:
      return train, test
    known = train.nominal_size
    if known is None and self.limit <= len(train) + 1:
      # These data may lack one row that a neighbour has, so the limit may exceed their number by 1.
      known = self.limit
    if self.limit > (len(train) if known is None else known):
      raise UserError(
        f"must be at most the number of training examples of data.name={self.name!r}, or none",
        field="data.limit",
        value=self.limit,
      )
    return train.subset(slice(0, self.limit)).declared(self.limit), test


@dataclasses.dataclass
class ExamplesConfig(AnyDataConfig):
  """The data of a run whose guarantee is for one example."""

  num_examples: Annotated[
    int | None,
    COUNT,
    "public: a constant near the number of training examples, used in its place where one "
    "example more or less is hidden; for data that do not declare it themselves",
  ] = None


@dataclasses.dataclass
class InputsConfig(AnyDataConfig):
  """The data of a run whose model may read images, rows or texts."""

  center: Annotated[
    bool, "(x - 0.5) / 0.5: public constants, nothing estimated from data"
  ] = False
  max_length: Annotated[
    int, rules.between(1, rules.MOST_TOKENS), "text: bytes kept of each example"
  ] = 256

  def preprocess(self, train: data.Dataset, test: data.Dataset) -> tuple[Any, Any]:
    with within("data"):
      read_if(self, train.vocab_size is not None, "text", "max_length")
    if self.center:
      if train.vocab_size is not None:
        raise UserError("must be false for tokens", field="data.center", value=True)
      train = data.preprocess.center(train)
      test = data.preprocess.center(test)
    return super().preprocess(train, test)


@dataclasses.dataclass
class DataConfig(InputsConfig, ExamplesConfig):
  """The data of a run of `launch.train`; see `dpjax.data.load`."""


@dataclasses.dataclass
class NetworkConfig(common.Section):
  """The model of a run on its inputs as they are; see `dpjax.zoo.networks.build`."""

  name: Annotated[str, "launch.list models; or package.module:name"] = "mlp"
  options: Annotated[dict[str, Any], "of the model, each one more name"] = (
    dataclasses.field(default_factory=dict)
  )

  def settle(self, before: NetworkConfig, changes: Iterable[str]) -> Any:
    """Returns the config of a model that was chosen by its name: without the options and settings
    of the model `before` that it does not take, unless they are among the `changes`. Of a user's
    model it takes none."""
    is_users = is_path(self.name)
    if self.name == before.name or not (is_users or self.name in registry.MODELS):
      return self
    taken = set() if is_users else {*registry.options(self.name)}
    taken |= {path.removeprefix("options.") for path in changes}
    if "options" in changes:
      taken |= {*self.options}
    options = {name: value for name, value in self.options.items() if name in taken}
    return dataclasses.replace(self, options=options)

  def check(self, section: str) -> None:
    """Raises UserError for an unknown model or option, or a value with which no model can be built.

    A user's model is built, and so checked, only when data are loaded.
    """
    for option, value in self.options.items():
      _check_written(value, f"{section}.options.{option}")
    with self.naming(section):
      registry.check_options(self.name, self.options)
      if not is_path(self.name):
        if self.options.get("dtype") is not None:
          # The bound on clipped sums is tested for these types of activations
          # (tests/core/gradients).
          validate.one_of(("float32", "bfloat16", "float16"), dtype=self.options["dtype"])
        networks.build(self.name, num_classes=2, **self.options)

  @contextlib.contextmanager
  def naming(self, section: str = "model") -> Iterator[None]:
    """Makes errors about a model point to the field of its option, or else to its name.

    >>> with NetworkConfig("mlp", {"features": [0]}).naming():
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
      if name in self.options:
        raise error.within(f"{section}.options") from error
      raise UserError(str(error), field=f"{section}.name", value=self.name) from error


@dataclasses.dataclass
class ModelConfig(NetworkConfig):
  """The model of a run, on its inputs or on features of them; see `dpjax.zoo.networks.build`."""

  mirrored: Annotated[bool, "of features: averaged with those of the mirror image"] = False
  colours: Annotated[
    str,
    rules.among(COLOURS),
    "of scattering features; opponent: light and two differences",
  ] = "rgb"

  def settle(self, before: NetworkConfig, changes: Iterable[str]) -> ModelConfig:
    settled = super().settle(before, changes)
    if settled is self:
      return self
    features = None if is_path(self.name) else registry.entry(self.name).features
    usual = ModelConfig()
    if not (features or "mirrored" in changes):
      settled.mirrored = usual.mirrored
    if not (features == "scattering" or "colours" in changes):
      settled.colours = usual.colours
    return settled

  def check(self, section: str) -> None:
    super().check(section)
    features = registry.entry(self.name).features
    with within(section):
      read_if(self, features is not None, "a model on features", "mirrored")
      scattering = features == "scattering"
      read_if(self, scattering, "a model on scattering features", "colours")


def check_range(inputs: InputsConfig, model: ModelConfig) -> None:
  """Raises UserError for centred images, where a model takes features of images in [0, 1].

  >>> check_range(DataConfig(center=True), ModelConfig("patches_linear"))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: data.center=True: must be false, for the features of ...
  """
  if inputs.center and registry.entry(model.name).in_unit_range:
    raise UserError(
      f"must be false, for the features of model.name={model.name!r} are of images in [0, 1]",
      field="data.center",
      value=True,
    )


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

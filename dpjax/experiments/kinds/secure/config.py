"""Typed configuration of one secure computation. A table of computations is a sweep of them.

`task` says what is computed, and holds all that this computation reads: `task.protocol` adds the
vectors of a sum, and `task.train` is a config of `launch.train`, for the model that answers about
encrypted images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from dpjax import validate
from dpjax.experiments.config import common, rules
from dpjax.experiments.config.choices import Choice
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central import embeddings
from dpjax.experiments.kinds.central.config import DataConfig, TrainConfig
from dpjax.secure import sums
from dpjax.secure.homomorphic import ckks
from dpjax.secure.homomorphic.inference import LAYOUTS
from dpjax.secure.mpc import output_noise, ring64, secureml
from dpjax.secure.sums import interface, primitives, protocols
from dpjax.secure.sums.homomorphic_sums import CkksSum
from dpjax.secure.vertical import alignment
from dpjax.validate import UserError

TABLES = ("diabetes", "breast_cancer")  # scikit-learn's
# Largest number of rows that are predicted.
_MOST_ROWS = 10_000


PROTOCOLS = {**protocols.PROTOCOLS, "ckks": CkksSum}  # the last adds fractions


# Functions that raise UserError if the libraries of ciphers, of private set intersection, or of
# homomorphic encryption are not installed.
_CIPHERS = primitives.library
_INTERSECTION = alignment.library
_CIPHERTEXTS = ckks.library


class _Task(rules.Checked):
  """A computation: its settings, the module that carries it out, and the libraries it needs."""

  module: ClassVar[str]
  needs: ClassVar[tuple[Callable[[], object], ...]] = ()

  def check_library(self) -> None:
    """Raises UserError if a library that the computation needs is not installed."""
    for library in self.needs:
      library()


@dataclasses.dataclass(frozen=True)
class SumTask(_Task):
  """Clients' random integers (fractions with CKKS), added by `protocol`."""

  protocol: Annotated[interface.SumProtocol, Choice(PROTOCOLS), "who adds the vectors"] = (
    dataclasses.field(default_factory=sums.SecAgg, kw_only=True)
  )

  num_clients: Annotated[int, rules.between(2, interface.MOST_CLIENTS), "a vector each"] = (
    10
  )
  length: Annotated[
    int, rules.between(1, interface.MOST_ENTRIES), "entries of a vector"
  ] = 1000
  entry_bits: Annotated[int, rules.between(1, 63), "entries are below 2^entry_bits"] = 20
  silent: Annotated[int, "clients who fall silent once they have shared their keys"] = 0
  module: ClassVar[str] = "vector_sums"

  def __post_init__(self):
    super().__post_init__()
    validate.integer_in(0, self.num_clients - 1, silent=self.silent)

  def check_library(self) -> None:
    self.protocol.check_library()


@dataclasses.dataclass(frozen=True)
class RegressTask(_Task):
  """`secure.homomorphic.regression` on a table of scikit-learn."""

  table: Annotated[str, rules.among(TABLES), "of scikit-learn"] = "diabetes"
  num_features: Annotated[
    int | None, rules.between(1, 64), "the table's first columns; none: all"
  ] = None
  num_predicted: Annotated[
    int, rules.between(1, _MOST_ROWS), "rows that are encrypted again, to be predicted"
  ] = 50
  ridge: Annotated[float, rules.POSITIVE, "penalty of the weights"] = 0.1
  tolerance: Annotated[float, rules.OPEN_UNIT, "of the solution, relative"] = 1e-5
  most_refreshes: Annotated[
    int, rules.between(0, rules.MOST_RUNS), "of ciphertexts, by who holds the key"
  ] = 2
  module: ClassVar[str] = "encrypted_table"
  needs = (_CIPHERTEXTS,)


@dataclasses.dataclass(frozen=True)
class InferTask(_Task):
  """`secure.homomorphic.inference` by the model of `train`, on the first test images."""

  train: TrainConfig = dataclasses.field(default_factory=TrainConfig, kw_only=True)

  num_images: Annotated[
    int, rules.between(1, rules.MOST_STEPS), "how many are asked about"
  ] = 1000
  layout: Annotated[
    str,
    rules.among(LAYOUTS),
    "packed: several images in a ciphertext; pixels: thousands of images, a ciphertext for "
    "each pixel",
  ] = "packed"
  module: ClassVar[str] = "encrypted_images"
  needs = (_CIPHERTEXTS,)


@dataclasses.dataclass(frozen=True)
class TrainTask(_Task):
  """`secure.mpc.secureml`: two parties train a model on shares, a dealer helps."""

  dataset: Annotated[
    str,
    rules.among(("breast_cancer", "digits", "mnist")),
    "breast_cancer: one output; the others: one for each class",
  ] = "breast_cancer"
  hidden: Annotated[
    tuple[int, ...], "widths of the hidden layers; none: logistic regression"
  ] = ()
  activation: Annotated[str, "of hidden layers: relu | square"] = "relu"
  output: Annotated[str, "of `secureml.Recipe`"] = "sigmoid"
  learning_rate: Annotated[float, "of every step"] = 0.5
  epochs: Annotated[int, rules.between(1, rules.MOST_EPOCHS), "of the training rows"] = 10
  batch_size: Annotated[int, rules.between(1, 2**16), "rows of a step"] = 64
  truncation: Annotated[
    str,
    rules.among(("masked", "local")),
    "masked: never fails; local: SecureML's own, which fails with a probability",
  ] = "masked"
  num_predicted: Annotated[
    int, rules.between(1, _MOST_ROWS), "test rows that are predicted on shares"
  ] = 100
  module: ClassVar[str] = "two_parties"
  needs = (_CIPHERS,)

  def __post_init__(self):
    super().__post_init__()
    validate.integer_in(1, 2**16, **validate.entries(hidden=self.hidden))
    secureml.Recipe(self.activation, self.output, self.learning_rate)


@dataclasses.dataclass(frozen=True)
class NoisyModelTask(_Task):
  """`secure.mpc.OutputNoise`: logistic regression on shares. The weights are opened with noise of
  both parties."""

  dataset: Annotated[
    str,
    rules.among(("breast_cancer", "digits")),
    "whose columns have declared ranges; breast_cancer: one output; digits: one for each class",
  ] = "breast_cancer"
  epsilon: Annotated[float, rules.POSITIVE, "of the opened weights, under replace_one"] = (
    1.0
  )
  delta: Annotated[float, rules.OPEN_UNIT, "far below 1 / n"] = 1e-5
  feature_norm: Annotated[float, rules.POSITIVE, "owners clip their rows to it"] = 3.0
  l2_penalty: Annotated[
    float, rules.POSITIVE, "of weights and bias; without one nothing is proved"
  ] = 0.3
  num_steps: Annotated[
    int,
    rules.between(1, output_noise.MOST_STEPS),
    "with all rows in each, from weights of 0",
  ] = 50
  learning_rate: Annotated[
    float | None, "over the number of rows a power of two; none: the largest that is proved"
  ] = None
  frac_bits: Annotated[int, rules.between(4, ring64.MOST_FRAC_BITS), "of fixed point"] = 18
  diagnostics: Annotated[bool, "compare with the model without noise: NOT private"] = False
  module: ClassVar[str] = "noisy_model"
  needs = (_CIPHERS,)


@dataclasses.dataclass(frozen=True)
class ColumnsTask(NoisyModelTask):
  """`noisy_model` of two parties with different columns of the same users. Party a also holds the
  labels. The parties find their shared users by private set intersection."""

  first_columns: Annotated[
    int, rules.between(1, 2**16), "columns of party a; party b holds the others"
  ] = 10
  shared: Annotated[
    float, rules.OPEN_UNIT, "share of the training rows whose people both parties hold"
  ] = 0.8
  module: ClassVar[str] = "aligned_columns"
  needs = (_CIPHERS, _INTERSECTION)


@dataclasses.dataclass(frozen=True)
class TransferTask(_Task):
  """`secure.vertical.transfer`: one party's labels teach another party, which has few labels."""

  dataset: Annotated[
    str,
    rules.among(("digits", "mnist", "fashion_mnist")),
    "whose left halves the source holds, and whose right halves the target",
  ] = "digits"
  num_source: Annotated[
    int, rules.between(2, 2**20), "people of the source, with labels"
  ] = 900
  num_shared: Annotated[
    int, rules.between(1, 2**20), "of them, whom the target holds too"
  ] = 200
  num_labelled: Annotated[
    int, rules.between(1, 2**20), "other people of the target, whose labels it knows"
  ] = 20
  num_steps: Annotated[
    int, rules.between(1, rules.MOST_STEPS), "of both parties, with all rows in each"
  ] = 300
  learning_rate: Annotated[float, rules.POSITIVE, rules.IN_FLOAT32, "of AdamW"] = 0.01
  alignment: Annotated[
    float,
    rules.POSITIVE,
    rules.IN_FLOAT32,
    "weight of the distance of two embeddings of one person",
  ] = 1.0
  module: ClassVar[str] = "shared_people"
  needs = (_INTERSECTION,)

  def __post_init__(self):
    super().__post_init__()
    validate.integer_in(1, self.num_source, num_shared=self.num_shared)


TASKS = {
  "sum": SumTask,
  "regress": RegressTask,
  "infer": InferTask,
  "train": TrainTask,
  "noisy_model": NoisyModelTask,
  "columns": ColumnsTask,
  "transfer": TransferTask,
}


@dataclasses.dataclass
class SecureConfig(WithChoices):
  """Configuration of a secure computation."""

  task: Annotated[Any, Choice(TASKS), "what is computed"] = "sum"
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None

  @property
  def is_private(self) -> bool:
    """Whether the run draws noise from its keys; `OutputNoise` draws from the operating system."""
    return isinstance(self.task, InferTask) and self.task.train.is_private

  @property
  def data(self) -> DataConfig:
    """Returns a `data` section that names the data of the computation; "drawn" for a sum."""
    if isinstance(self.task, InferTask):
      return self.task.train.data
    names_of_data = (getattr(self.task, name, None) for name in ("table", "dataset"))
    return DataConfig(name=next((name for name in names_of_data if name), "drawn"))


def check(config: SecureConfig) -> None:
  """Raises UserError if the config of one computation is wrong; loads no data."""
  common.check_types(config)
  task = config.task
  if isinstance(task, SumTask):
    _check_sum(task)
  if isinstance(task, InferTask):
    with within("task.train", holds_config=True):
      _check_train(task.train)
  if isinstance(task, TrainTask):
    layers = bool(task.hidden)
    common.read_if(config, layers, "hidden layers (task.hidden)", "task.activation")
  needed = "a private model (--config.task.train.privacy)"
  common.read_if(config, config.is_private, needed, "noise_seed")


def _check_sum(task: SumTask) -> None:
  bits = task.protocol.bits
  if task.entry_bits > bits:
    raise UserError(
      f"must be at most {bits}, as task.protocol.bits={bits}",
      field="task.entry_bits",
      value=task.entry_bits,
    )
  least = task.protocol.min_survivors
  if least > task.num_clients:
    raise UserError(
      f"must be at most {task.num_clients}, as task.num_clients={task.num_clients}",
      field="task.protocol.min_survivors",
      value=least,
    )
  with within("task.protocol"):
    task.protocol.check_clients(task.num_clients)
  with within("task"):
    task.protocol.check_dropouts(silent=task.silent)
    most = task.protocol.most_silent(task.num_clients)
    validate.integer_in(0, most, silent=task.silent)


def _check_train(train: TrainConfig) -> None:
  central.Central(train).check()
  common.read_if(
    train, False, "launch.train itself", "seed", "noise_seed", *TrainConfig.where
  )
  common.only(train, "audit", ["none"], "; audit a run of launch.train")
  common.only(train, "release", [False], "; this is a rehearsal")
  embeddings.refuse(train)
  common.only(train, "trainable", ["all"], ", whose weights are encrypted")
  common.only(train, "model.name", ["mlp"], "")
  options = train.model.options
  if options.get("activation") != "square":
    raise UserError(
      "must be 'square', all that a ciphertext can be put through",
      field="model.options.activation",
      value=options.get("activation"),
    )
  if len(options.get("features", (128,))) != 1:
    raise UserError(
      "must be one hidden layer",
      field="model.options.features",
      value=options["features"],
    )

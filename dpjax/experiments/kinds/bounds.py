"""The bounds of the fields that several kinds of config share: type first, then range."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from dpjax import accounting, gradients, models, names, validate
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.validate import UserError, Verbatim

LOSSES = ("auto",)  # of both kinds of runs
SCHEDULES = ("constant", "cosine", "linear")
ACCOUNTANTS = ("", *accounting.ACCOUNTANTS)  # "": the tightest that is proved
_FLOAT32 = np.finfo(np.float32)
# Numbers that size a loop or an array, so that a slip of the keyboard is not a run without end.
MOST_STEPS = 10**8  # of a run; rounds, epochs
MOST_SHAPED = (
  10**6
)  # steps whose noise has a plan of its own for each: correlated, or levels
MOST_EPOCHS = 10**4  # of a client in a round, or of a net without noise
MOST_CLIENTS = 10**7
MOST_THREADS = 1024
MOST_VIEWS = 1024  # of one example
MOST_RUNS = 10**5  # of one sweep, or one experiment
MOST_DRAWS = 10**7  # attacks of an audit
_MOST_TOKENS = 10**6  # of an example
_MOST_PASSES = 10**9  # steps until each example was drawn once, 1 / sampling_prob
_F = TypeVar("_F", bound=Callable[..., Any])


def typed(config: Any) -> None:
  """Raises unless every field has the type of its annotation; NaN is never a number.

  >>> typed(OptimizerConfig(learning_rate="a lot"))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: config.learning_rate='a lot': must be a number
  """
  fields.check(config, type(config), "config")


def names_fields(call: _F) -> _F:
  """`call(config, ...)` with errors that name fields of the config by their dotted names,
  also where a lower room raised them about an argument."""

  @functools.wraps(call)
  def told(config: Any, *args: Any, **kwargs: Any) -> Any:
    try:
      return call(config, *args, **kwargs)
    except UserError as error:
      raise dotted(error, config) from error

  return told  # type: ignore[return-value]


@contextlib.contextmanager
def within(room: str) -> Iterator[None]:
  """Errors name fields of that room of the config.

  >>> with within("train"):
  ...   raise UserError("must be >= 0", field="seed", value=-1)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: train.seed=-1: must be >= 0
  """
  try:
    yield
  except UserError as error:
    raise error.within(room) from error


@contextlib.contextmanager
def renamed(config: Any, **field_of: str) -> Iterator[None]:
  """Errors about an argument name the field that gives it, where that has another name.

  >>> with renamed(TrainConfig(memory_budget_gb=1e-6), memory_budget="memory_budget_gb"):
  ...   raise UserError("must be >= 2900 bytes", field="memory_budget", value=1000)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: memory_budget_gb=1e-06: must be >= 2900 bytes
  """
  try:
    yield
  except UserError as error:
    if error.field not in field_of:
      raise
    name = field_of[error.field]
    raise error.of(field=name, value=fields.get(config, name)) from error


def dotted(error: UserError, config: Any) -> UserError:
  """Returns the error with the dotted name of the one field that has its name and its value.

  The error as it is, where no field has both, or more than one.

  >>> from dpjax.experiments.kinds.central.config import PrivacyConfig
  >>> error = UserError("must be in (0, 1)", field="delta", value=2.0)
  >>> print(dotted(error, TrainConfig(privacy=PrivacyConfig(delta=2.0))))
  privacy.delta=2.0: must be in (0, 1)
  >>> print(dotted(error, TrainConfig()))
  delta=2.0: must be in (0, 1)
  """
  paths = [
    leaf.path
    for leaf in fields.leaves(config)
    if error.is_about(leaf.path.rpartition(".")[2], leaf.value)
  ]
  return error.of(field=paths[0]) if len(paths) == 1 else error


def named(room: str, config: Any, *names: str) -> dict[str, Any]:
  """The fields of a room ("": of the config itself) by their dotted names, those at None,
  and those that a chosen value has not, left out.

  >>> named("data", DataConfig(limit=3), "limit", "data_dir")
  {'data.limit': 3}
  """
  dot = "." if room else ""
  found = {f"{room}{dot}{name}": getattr(config, name, None) for name in names}
  return {name: value for name, value in found.items() if value is not None}


def data(config: DataConfig) -> None:
  """Raises UserError for a number of examples, bytes or classes below one."""
  counts = ("limit", "num_classes", "num_examples", "num_users")
  validate.integer_at_least(1, **named("data", config, *counts))
  validate.integer_in(1, _MOST_TOKENS, **named("data", config, "max_length"))
  if names.is_path(config.name):
    names.find(config.name, "data.name")


def limit(config: DataConfig, num_examples: int) -> None:
  """Raises UserError for a limit that leaves all of that many examples."""
  if config.limit is not None and config.limit > num_examples:
    raise UserError(
      f"must be <= {num_examples}, the training examples of data.name={config.name!r}, "
      "or none",
      field="data.limit",
      value=config.limit,
    )


def model(config: ModelConfig, room: str = "model") -> None:
  """Raises UserError for a model or an option that does not exist, or a value of one of ours
  that suits no data; a user's own model is built when there are data."""
  names.one_of(models.names(), **{f"{room}.name": config.name})
  for option, value in config.options.items():
    _written(value, f"{room}.options.{option}")
  validate.one_of(models.COLOURS, **{f"{room}.colours": config.colours})
  models.check_options(config.name, config.options, prefix=f"{room}.options.")
  if config.options.get("dtype") is not None and not names.is_path(config.name):
    # of activations: those for which the bound of clipped sums is shown (tests/gradients)
    validate.one_of(
      ("float32", "bfloat16", "float16"),
      **{f"{room}.options.dtype": config.options["dtype"]},
    )
  if not names.is_path(config.name):
    with of_model(config, room):
      models.build(config.name, num_classes=2, **config.options)


@contextlib.contextmanager
def of_model(config: ModelConfig, room: str = "model") -> Iterator[None]:
  """Errors of a model name its options as fields, and else the model itself.

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
    if name.split(".")[0] == room or name == "model":
      raise
    if name == "options":
      raise error.within(room) from error
    if name in config.options:
      raise error.within(f"{room}.options") from error
    raise UserError(str(error), field=f"{room}.name", value=config.name) from error


def _written(value: Any, name: str) -> None:
  """Raises UserError for what config.json would not hold as it is: objects are told by their
  words there, and two of them may share those, and so their noise."""
  if isinstance(value, dict) and all(isinstance(key, str) for key in value):
    for key, entry in value.items():
      _written(entry, f"{name}.{key}")
  elif isinstance(value, (list, tuple)):
    for index, entry in enumerate(value):
      _written(entry, f"{name}[{index}]")
  elif type(value) not in (bool, int, float, str, type(None)):
    told = " ".join(repr(value).split())
    raise UserError(
      "must be a number, text, true, false or none, or a list or dict (with "
      "names) of these",
      field=name,
      value=Verbatim(f"{told:.60}"),
    )


def in_float32(name: str, value: Any) -> None:
  """Raises UserError for a positive number that float32 turns into 0 or infinity."""
  low = float(_FLOAT32.tiny)
  high = float(_FLOAT32.max)
  if isinstance(value, (int, float)) and value > 0 and not low <= value <= high:
    raise UserError(
      f"must be in [{low:.3g}, {high:.3g}], the range of float32", field=name, value=value
    )


def optimizer(config: OptimizerConfig, room: str = "optimizer") -> None:
  """Raises UserError for a rate, a momentum or a penalty outside its range."""
  validate.positive(**named(room, config, "learning_rate"))
  own = lambda *names: named(f"{room}.rule", config.rule, *names)
  validate.share(**own("momentum"))
  others = own("weight_decay", "noise_floor", "prior_precision")
  validate.non_negative(**others)
  for name, value in (others | named(room, config, "learning_rate")).items():
    in_float32(name, value)
  validate.one_of(SCHEDULES, **named(room, config, "schedule"))


def privacy(config: Any) -> None:
  """Raises UserError for what both kinds of runs promise, and how they clip."""
  positive = ("epsilon", "epsilon_budget", "l2_clip_norm")
  validate.positive(**named("privacy", config, *positive))
  in_float32("privacy.l2_clip_norm", config.l2_clip_norm)
  validate.non_negative(**named("privacy", config, "noise_multiplier"))
  if isinstance(config.clipping, gradients.ClipRule):
    config.clipping.check(config.l2_clip_norm)
  validate.open_unit(**named("privacy", config, "delta"))
  validate.one_of(ACCOUNTANTS, **named("privacy", config, "accountant"))
  validate.integer_in(1, MOST_SHAPED, **named("privacy.ftrl", config.ftrl, "separation"))
  if getattr(config, "sampling_prob", 1) < 1 / _MOST_PASSES:
    raise UserError(
      f"must be in [{1 / _MOST_PASSES:g}, 1]",
      field="privacy.sampling_prob",
      value=config.sampling_prob,
    )


def steps(name: str, num_steps: int, privacy: Any) -> None:
  """Raises UserError for a number of steps or rounds without end."""
  shaped = privacy.method == "dp_ftrl" or bool(getattr(privacy, "noise_levels", ()))
  validate.integer_in(1, MOST_SHAPED if shaped else MOST_STEPS, **{name: num_steps})


def training(config: TrainConfig) -> None:
  """Raises UserError for a number of a central run outside its range."""
  data(config.data)
  model(config.model)
  names.one_of((*LOSSES, "contrastive"), loss=config.loss)
  privacy(config.privacy)
  optimizer(config.optimizer)
  validate.one_of(gradients.METHODS, grad_method=config.grad_method)
  validate.probability(**named("privacy", config.privacy, "sampling_prob"))
  validate.positive(**named("privacy", config.privacy, "clip_schedule_final"))
  low = validate.MIN_FACTOR
  high = validate.MAX_FACTOR
  if not low <= config.privacy.clip_schedule_final <= high:
    raise UserError(
      f"must be in [{low:g}, {high:g}]",
      field="privacy.clip_schedule_final",
      value=config.privacy.clip_schedule_final,
    )
  validate.integer_at_least(1, **named("privacy", config.privacy, "capacity"))
  counts = ("slices", "eval_every", "checkpoint_every", "microbatch_size")
  validate.integer_at_least(1, **named("", config, *counts))
  steps("num_steps", config.num_steps, config.privacy)
  validate.integer_in(1, MOST_VIEWS, augmult=config.augmult)
  validate.integer_at_least(0, seed=config.seed)
  validate.positive(**named("", config, "memory_budget_gb"))
  if config.mesh is not None:
    gradients.mesh_of(config.mesh)
  validate.open_unit(**named("", config, "ema_decay"))

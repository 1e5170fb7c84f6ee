"""Every kind of run in one table. A kind's modules are imported when a config of it is to run."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dpjax.experiments.run.experiment import C, Experiment
from dpjax.types import Config
from dpjax.validate import UserError, Verbatim

if TYPE_CHECKING:
  from dpjax.parallel.targets import Machine

_E = TypeVar("_E", bound=type[Experiment[Any]])


class Several(Generic[C]):
  """All runs that one config describes, such as the rows of a table."""

  def __init__(self, config: C):
    self.config = config

  def check(self) -> None:
    """Raises UserError if a run would be refused, as far as this is known without data."""
    raise NotImplementedError

  def run(self, workdir: str) -> list[dict[str, Any]]:
    """Carries out the runs that have no result yet. Returns a row for each run."""
    raise NotImplementedError

  def plan(self, workdir: str, target: Machine | None = None) -> str:
    """Returns the plan of all runs as text, for a launcher's --dry_run."""
    raise UserError(
      "--dry_run=True: would be ignored, it needs a config of runs of many steps"
    )

  def report(self, workdir: str, rows: list[dict[str, Any]]) -> str:
    """Returns what a launcher prints at the end."""
    raise NotImplementedError

  def alarm(self, rows: list[dict[str, Any]]) -> str:
    """Returns one line about a promise that an attack has refuted; "" if there is none."""
    del rows
    return ""


@dataclasses.dataclass(frozen=True)
class Kind:
  """A type of config, and what a command does with it.

  Attributes:
    config: class of the configs, as "module:Name".
    experiment: its `Experiment`, for one run; "" if its configs describe several runs only.
    several: its `Several`; "" if a config describes one run.
  """

  config: str
  experiment: str | type[Experiment[Any]] = ""
  several: str = ""

  @property
  def config_class(self) -> type:
    return _found(self.config)

  def whole(self, config: Any) -> Experiment[Any] | Several[Any]:
    """Returns all that a command runs with a config: several runs if its kind has such configs."""
    return _found(self.several or self.experiment)(config)

  def check(self, config: Any) -> None:
    """Raises UserError for a config whose run, or one of whose runs, would be refused."""
    self.whole(config).check()


def _ours(config: str, experiment: str = "", several: str = "") -> Kind:
  home = "dpjax.experiments"
  return Kind(*(path and f"{home}.{path}" for path in (config, experiment, several)))


# Name of the command -> its kind. A kind of a user's own has its config's name (`register`).
KINDS: dict[str, Kind] = {
  "train": _ours("kinds.central.config:TrainConfig", "kinds.central.build:Central"),
  "federate": _ours("kinds.federated.config:FedConfig", "kinds.federated.build:Federated"),
  "pate": _ours("kinds.pate.config:PateConfig", "kinds.pate.build:Pate"),
  "distill": _ours(
    "kinds.distillation.config:DistillationConfig",
    "kinds.distillation.build:Distillation",
  ),
  "synthesize": _ours(
    "kinds.synthesis.config:SynthesisConfig", "kinds.synthesis.build:PrivateSynthesis"
  ),
  "relevance": _ours(
    "kinds.relevance.config:RelevanceConfig",
    "kinds.relevance.build:Relevance",
    "sweeps.experiment:Curves",
  ),
  "attack": _ours(
    "kinds.attack.config:AttackConfig",
    "kinds.attack.build:Attack",
    "sweeps.attack_table:AttackTable",
  ),
  "secure": _ours(
    "kinds.secure.config:SecureConfig",
    "kinds.secure.build:SecureComputation",
    "sweeps.secure_table:SecureTable",
  ),
  "sweep": _ours("sweeps.grid:SweepConfig", several="sweeps.grid:Sweep"),
}


def _found(path: str | type) -> Any:
  if isinstance(path, type):
    return path
  home, _, name = path.partition(":")
  return getattr(importlib.import_module(home), name)


def _path(of: type) -> str:
  return f"{of.__module__}:{of.__qualname__}"


def register(config: type) -> Callable[[_E], _E]:
  """Makes the decorated `Experiment` the kind of run of a config's class."""

  def decorator(experiment: _E) -> _E:
    KINDS[config.__name__] = Kind(_path(config), experiment)
    return experiment

  return decorator


def command_of(config: Config) -> str:
  """Returns the name in `KINDS` of the kind of a config.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> command_of(TrainConfig())
  'train'
  """
  path = _path(type(config))
  for name, kind in KINDS.items():
    if kind.config == path:
      return name
  raise UserError(
    "must be of a kind of run; the experiment of your own says it by "
    "@dpjax.experiments.run.kind.register(its config)",
    field="config",
    value=Verbatim(type(config).__name__),
  )


def of(config: Config) -> Kind:
  """Returns the kind of a config."""
  return KINDS[command_of(config)]


def experiment_of(config: Config) -> Experiment[Any]:
  """Returns one run of a config."""
  kind = of(config)
  if not kind.experiment:
    raise UserError(
      "describes several runs", field="config", value=Verbatim(type(config).__name__)
    )
  return _found(kind.experiment)(config)

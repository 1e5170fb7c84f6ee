"""Every kind of run in one table, and what several runs of a kind write together. A kind's modules
are imported when a config of it is to run."""

from __future__ import annotations

import dataclasses
import pathlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dpjax import names
from dpjax.experiments.config.naming import naming
from dpjax.experiments.run import guarantee
from dpjax.experiments.run.experiment import Experiment
from dpjax.types import Config
from dpjax.validate import UserError, Verbatim

_E = TypeVar("_E", bound=type[Experiment[Any]])
_HOME = "dpjax.experiments."


class Table:
  """What several runs of one kind write together; here nothing.

  Attributes:
    unreleased: reason why the runs are not released, so that their costs are not summed; "": they
      are released.
    writes: names of the files of `write`, for the last line of a launcher.
  """

  unreleased = ""
  writes = ""

  def alone(self, config: Any) -> str | None:
    """Returns the label of a config that is run without others, as a table of one row; None: it is
    one run in its own folder."""
    return None

  def facts(self, label: str, config: Any) -> dict[str, Any]:
    """Returns entries of a run's row that its label and its config determine."""
    return {"label": label}

  def missing(self, config: Any) -> str:
    """Returns one line on what must be installed before a run can begin; "" if nothing."""
    return ""

  def check_data(self, config: Any, data: Any) -> None:
    """Raises UserError if what is to be written cannot come from such runs. It is called once,
    before the first run begins."""

  def keep(self, config: Any, result: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a run's row from its result; here all."""
    return result

  def tell(self, row: dict[str, Any]) -> str:
    """Returns one line about a finished run."""
    return guarantee.summary(row)

  def write(
    self, folder: pathlib.Path, rows: Sequence[dict[str, Any]], *, title: str, last: bool
  ) -> None:
    """Writes files about the finished runs. It is called after each run; `last`: all have run."""

  def read(self, folder: pathlib.Path) -> str:
    """Returns what a launcher prints of the written files."""
    return ""

  def alarm(self, rows: Sequence[dict[str, Any]]) -> str:
    """Returns one line about a promise that an attack has refuted; "" if there is none."""
    return ""


@dataclasses.dataclass(frozen=True)
class Kind:
  """A type of config, and what a command does with it.

  Each class is named as "module:Name" in `dpjax.experiments`, or is the class itself.

  Attributes:
    config: class of the configs.
    experiment: its `Experiment`, for one run; None if its configs describe several runs only.
    table: its `Table`, which several of its runs write; None: a sweep draws curves.
    prefix: beginning of the default name of a run's folder.
  """

  config: str | type
  experiment: str | type | None
  table: str | None = None
  prefix: str = ""

  @property
  def config_class(self) -> type:
    return _found(self.config)

  def its_table(self) -> Table | None:
    """Returns what several of its runs write together; None: curves."""
    return None if self.table is None else _found(self.table)()


# Name of the command -> its kind. A kind of a user's own has its config's name (`register`).
KINDS: dict[str, Kind] = {
  "train": Kind("kinds.central.config:TrainConfig", "kinds.central.build:Central"),
  "federate": Kind(
    "kinds.federated.config:FedConfig", "kinds.federated.build:Federated", prefix="fed_"
  ),
  "pate": Kind("kinds.pate.config:PateConfig", "kinds.pate.config:Pate", prefix="pate_"),
  "distill": Kind(
    "kinds.distillation:DistillationConfig",
    "kinds.distillation:Distillation",
    prefix="distill_",
  ),
  "synthesize": Kind(
    "kinds.synthesis.config:SynthesisConfig",
    "kinds.synthesis.build:PrivateSynthesis",
    prefix="synthesis_",
  ),
  "relevance": Kind(
    "kinds.relevance.config:RelevanceConfig",
    "kinds.relevance.build:Relevance",
    table="kinds.relevance.table:ClaimsTable",
  ),
  "attack": Kind(
    "kinds.attack.config:AttackConfig",
    "kinds.attack.config:Attack",
    table="kinds.attack.table:AttackTable",
    prefix="attack_",
  ),
  "secure": Kind(
    "kinds.secure.config:SecureConfig",
    "kinds.secure.config:SecureComputation",
    table="kinds.secure.table:SecureTable",
    prefix="secure_",
  ),
  "sweep": Kind("sweeps.sweep:Sweep", None, prefix="sweep_"),
}


def _found(part: Any) -> Any:
  return pkgutil.resolve_name(f"{_HOME}{part}") if isinstance(part, str) else part


def register(config: type) -> Callable[[_E], _E]:
  """Makes the decorated `Experiment` the kind of run of a config's class."""

  def decorator(experiment: _E) -> _E:
    KINDS[config.__name__] = Kind(config, experiment)
    return experiment

  return decorator


def command_of(config: Config) -> str:
  """Returns the name in `KINDS` of the kind of a config.

  >>> from dpjax.experiments.kinds.central.config import TrainConfig
  >>> command_of(TrainConfig())
  'train'
  """
  its = type(config)
  path = names.path_of(its).removeprefix(_HOME)
  for name, kind in KINDS.items():
    if kind.config in (its, path):
      return name
  raise UserError(
    "must be of a kind of run; an experiment of your own says it by "
    "@dpjax.experiments.run.kind.register(its config)",
    field="config",
    value=Verbatim(its.__name__),
  )


def of(config: Config) -> Kind:
  """Returns the kind of a config."""
  return KINDS[command_of(config)]


def experiment_of(config: Config) -> Experiment[Any]:
  """Returns one run of a config."""
  experiment = _found(of(config).experiment)
  if experiment is None:
    name = type(config).__name__
    raise UserError(
      "describes several runs, which get_configs() of its file yields",
      field="config",
      value=Verbatim(name),
    )
  return experiment(config)


def check(config: Config) -> None:
  """Raises UserError for a config whose run would be refused, whatever its data are."""
  with naming(config):
    experiment_of(config).check()

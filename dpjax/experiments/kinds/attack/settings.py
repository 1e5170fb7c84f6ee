"""What an attack of `launch.attack` is: a frozen dataclass of its settings, which carries it out.

A row of `config.ATTACKS` gives it a name. A user's own attack is named by its import path,
`--config.attack=mine:FirstClass --config.attack.guess=3`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dpjax import validate
from dpjax.experiments.config import common
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import (
  FedConfig,
  algorithm_of,
  algorithms_that,
)
from dpjax.experiments.run.experiment import Phase
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.experiments.kinds.attack.config import AttackConfig

Row = dict[str, Any]


class MeasuredAttack(NamedTuple):
  """Holds the outcome of an attack.

  The table of attacks has `result["rows"]`, each with method, share (what was counted, of what),
  finds, success, low and high (its interval), verdict, and further columns.
  """

  scores: dict[str, Any]  # arrays, for attack.npz
  result: dict[str, Any]  # fields of result.json, `test_accuracy` and `rows` among them
  write: Callable[[pathlib.Path], None] = lambda folder: None  # writes further files


@dataclasses.dataclass(frozen=True)
class Trained:
  """What an attack on the model of one training prepares: the run, and what else it needs."""

  run: central.Run

  @property
  def guarantee(self) -> Guarantee:
    return self.run.guarantee


@dataclasses.dataclass(frozen=True)
class AttackSettings:
  """Base of all attacks. Fields are settings, and have defaults; class attributes describe it.

  Attributes:
    section: the kind of run that is attacked: "train" or "federate".
    task: task named in result.json.
    of_text: whether a language model is attacked, in place of a classifier.
    unread: fields of the attacked config that have no effect on what the attack sees.
  """

  section: ClassVar[str]
  task: ClassVar[str]
  of_text: ClassVar[bool] = False
  unread: ClassVar[tuple[str, ...]] = ()

  def check_target(self, target: Any) -> None:
    """Raises UserError if a run of this config cannot be attacked so; loads no data. The error
    names the field as the target does."""

  def prepare(self, config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys) -> Any:
    """Returns what is attacked, an object with the `guarantee` of the attacked run."""
    raise NotImplementedError

  def phase(self, config: AttackConfig, attacked: Any) -> Phase:
    """Returns the phase that attacks it; here the training of `launch.train`, whose model
    `measure` attacks.

    It has no guarantee: result.json states that of the attacked run (`config.privacy_fields`).
    """
    trained = central.phase(config.train, attacked.run)
    return dataclasses.replace(trained, guarantee=None)

  def measure(self, config: AttackConfig, attacked: Any, state: Any) -> MeasuredAttack:
    """Returns the outcome, from the last state of the phase."""
    raise NotImplementedError


def check_dealt(train: TrainConfig) -> None:
  """Raises UserError for a target of an attack that chooses the records which are trained on.
  Statistics of all records would reveal those that are left out."""
  if hasattr(train.privacy, "normalization"):
    why = ": shadow models of this attack would share statistics of one half"
    common.only(train, "privacy.normalization", ["per_example"], why)


def check_algorithm(federate: FedConfig, fact: str, why: str) -> None:
  """Raises UserError unless this field of `described.AlgorithmFacts` is true of the attacked
  algorithm, and clients send messages of users."""
  if not getattr(algorithm_of(federate), fact):
    known = algorithms_that(lambda row: getattr(row, fact))
    common.only(federate, "algorithm", known, f", {why}")
  if federate.protects_records:
    raise UserError(
      "must be another: what is sent by silos is attacked by launch.audit --only=silos",
      field="privacy",
      value="records",
    )


def check_rising(least: int, **named: tuple[int, ...]) -> None:
  """Raises UserError unless each is rising integers of at least `least`, one or more."""
  for name, values in named.items():
    sizes = validate.several(**{name: values})
    if not sizes or list(sizes) != sorted({*sizes}):
      raise UserError("must hold some, each more than before", field=name, value=values)
    for size in sizes:
      validate.integer_at_least(least, **{name: size})


def counted_row(counts: Row, method: str, share: str, finds: str, **columns: Any) -> Row:
  """Returns a row of the table whose success is the rate count / total, with its interval."""
  low, high = counts["interval"]
  success = counts["count"] / counts["total"]
  row = {"method": method, "share": share, "finds": finds, "success": success}
  return row | {"low": low, "high": high, **columns}


def rate(counts: Row) -> str:
  """Returns count / total as text.

  >>> rate({"count": 1, "total": 2})
  '0.500'
  """
  return f"{counts['count'] / counts['total']:.3f}"

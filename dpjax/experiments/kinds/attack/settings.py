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
from dpjax.experiments.kinds.central import build as central
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
    wants: field of `federated.described.AlgorithmFacts` that must be true of the attacked
      algorithm; "": none.
    wants_because: reason for `wants`, put after a comma in the error message.
    deals_records: whether the attack chooses the records that are trained on. Statistics of all
      records would then reveal the records that are left out.
    of_text: whether a language model is attacked, in place of a classifier.
    unread: fields of the attacked config that have no effect on what the attack sees.
  """

  section: ClassVar[str]
  task: ClassVar[str]
  wants: ClassVar[str] = ""
  wants_because: ClassVar[str] = ""
  deals_records: ClassVar[bool] = False
  of_text: ClassVar[bool] = False
  unread: ClassVar[tuple[str, ...]] = ()

  @property
  def colludes(self) -> bool:
    """Whether the attackers see the messages of honest clients."""
    return False

  def prepare(self, config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys) -> Any:
    """Returns what is attacked, an object with the `guarantee` of the attacked run."""
    raise NotImplementedError

  def phase(self, config: AttackConfig, attacked: Any) -> Phase:
    """Returns the phase that attacks it; here the training of `launch.train`, whose model
    `measured` attacks.

    It has no guarantee: result.json states that of the attacked run (`build.promised`).
    """
    trained = central.phase(config.train, attacked.run)
    return dataclasses.replace(trained, guarantee=None)

  def measured(self, config: AttackConfig, attacked: Any, state: Any) -> MeasuredAttack:
    """Returns the outcome, from the last state of the phase."""
    raise NotImplementedError


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

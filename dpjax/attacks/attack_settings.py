"""Base classes for the attacks of `launch.attack`: their settings, and what their runs read.

An attack of `launch.attack` is a frozen dataclass that derives from one of these classes. All its
fields have defaults. A row of `registry.ATTACKS` gives it a name. A user's own attack is named by
its import path, `--config.attack=mine:SignFlip --config.attack.factor=3`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from dpjax import validate

if TYPE_CHECKING:
  from dpjax.attacks.poisoning import Poisoning

_RUNS = "dpjax.experiments.kinds.attack"


@dataclasses.dataclass(frozen=True)
class AttackSettings:
  """Base of all attack settings. Class attributes describe the attack; fields are its
  settings.

  Attributes:
    section: the part of the config that is attacked: "train" or "federate".
    module: full name of the module with the functions `prepare`, `phase` and `measured`, as in
      `dpjax.experiments.kinds.attack.poisoned_rounds`. An attack on the model of one training needs
      no `phase`; see `copies` there.
    task: task named in result.json. For a task that is not dpjax's, the result of `measured` holds
      the rows of the task's table as `rows`.
    wants: field of `federated.described.AlgorithmFacts` that must be true of the attacked
      algorithm.
    wants_because: reason for `wants`, put after a comma in the error message.
    colludes: whether the attackers see the messages of honest clients.
    deals_records: whether the attack chooses the records that are trained on. Statistics of all
      records would then reveal the records that are left out.
    of_text: whether a language model is attacked, in place of a classifier.
    unread: fields of the attacked config that have no effect on what the attack sees.
  """

  section: ClassVar[str]
  module: ClassVar[str]
  task: ClassVar[str]
  wants: ClassVar[str] = "plain_client"
  wants_because: ClassVar[str] = "whose clients are inverted"
  colludes: ClassVar[bool] = False
  deals_records: ClassVar[bool] = False
  of_text: ClassVar[bool] = False
  unread: ClassVar[tuple[str, ...]] = ()


@dataclasses.dataclass(frozen=True)
class PoisoningSettings(AttackSettings):
  """Base of the settings of attacks that poison federated rounds; see `attacks.poisoning`.

  Args:
    fraction: fraction of the clients that attack. The seed decides which clients attack.

  An attack of this kind defines `method` and its own settings, and nothing else:

  >>> from dpjax import attacks
  >>> @dataclasses.dataclass(frozen=True)
  ... class SignFlip(PoisoningSettings):
  ...   factor: float = 1.0
  ...   def method(self):
  ...     return attacks.scaled_update(-self.factor)
  >>> SignFlip(factor=3.0).method().factor
  -3.0
  """

  fraction: float = 0.2
  section: ClassVar[str] = "federate"
  module: ClassVar[str] = f"{_RUNS}.poisoned_rounds"
  task: ClassVar[str] = "poisoning"
  wants: ClassVar[str] = "wraps_clients"
  wants_because: ClassVar[str] = "whose clients can lie"

  def __post_init__(self):
    validate.share(fraction=self.fraction)
    self.method()

  def method(self) -> Poisoning:
    """Returns the attack for `attacks.poisoning.poisoned_training`, made from these settings."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class CollusionSettings(PoisoningSettings):
  """Base of the settings of attackers who agree, and know what honest clients send.

  See `attacks.collusion`.
  """

  colludes: ClassVar[bool] = True

"""Poisoning of federated rounds: trains the federation honestly, then under attack."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dpjax import attacks, validate
from dpjax.attacks import collusion, poisoning
from dpjax.attacks.poisoning import (
  Poisoning,
  PoisoningOutcome,
  Trigger,
  choose_attackers,
  measure_poisoning,
  poisoned_training,
)
from dpjax.attacks.roc import with_interval
from dpjax.experiments.config import common, user_code
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.settings import (
  AttackSettings,
  MeasuredAttack,
  Row,
  check_algorithm,
  counted_row,
  rate,
)
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated.config import (
  FedConfig,
  ServerNoise,
  aggregation_of,
)
from dpjax.experiments.run import pieces
from dpjax.experiments.run.experiment import Phase
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.federated import Aggregator
from dpjax.types import Params
from dpjax.validate import UserError

_NOTES = {  # name of privacy -> how its epsilon is limited under attack
  "local": "binds honest clients; an attacker sends what it likes, without noise",
  "distributed": "binds honest clients; an attacker adds to the sum what it likes",
}
_SIMULATED = "is of a larger deployment, not of this run"


class Poisoned(NamedTuple):
  """Holds a federated run, the attack on it, and the clients that attack."""

  run: federated.FedRun
  attack: Poisoning
  attackers: np.ndarray  # indices of clients

  @property
  def guarantee(self) -> Guarantee:
    return self.run.guarantee


@dataclasses.dataclass(frozen=True)
class PoisoningSettings(AttackSettings):
  """Base of attacks that poison federated rounds; see `attacks.poisoning`.

  The federation is trained without attackers, then under attack.

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
  task: ClassVar[str] = "poisoning"

  def __post_init__(self):
    validate.share(fraction=self.fraction)
    self.method()

  def check_target(self, target: FedConfig) -> None:
    check_algorithm(target, "wraps_clients", "whose clients can lie")
    if getattr(self.method(), "collude", None) is not None:
      why = " for attackers who see the messages of honest clients"
      common.only(target, "secure_sum", ["none"], why)

  def method(self) -> Poisoning:
    """Returns the attack for `attacks.poisoning.poisoned_training`, made from these settings."""
    raise NotImplementedError

  def prepare(
    self, config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys
  ) -> Poisoned:
    """Returns the attacked run and its attackers. The choice of attackers does not depend on the
    defence, so all defences face the same attackers.

    Raises UserError if `attack.fraction` rounds to no attacker, if the data lack the attack's
    labels, or if the trigger does not fit the records.
    """
    run = federated.assemble(config.federate, loaded, random)
    count = run.federation.num_clients
    attackers = choose_attackers(count, self.fraction, seed=config.seed)
    if not len(attackers):
      raise UserError(
        f"rounds to no attacker of {count} clients",
        field="attack.fraction",
        value=self.fraction,
      )
    attack = self.method()
    if not isinstance(attack, Poisoning):
      name = name_of(config, "attack")
      raise user_code.wrong(
        "attack", name, "of method() an attacks.poisoning.Poisoning", attack
      )
    try:  # before anything is trained
      poisoning.poison_rows(run.federation, attack, attackers)
      _measure(run, attack, run.params)
    except UserError as error:
      field = error.field.removeprefix("trigger.")
      raise error.of(field=field).within("attack") from error
    return Poisoned(run, attack, attackers)

  def phase(self, config: AttackConfig, attacked: Poisoned) -> Phase:
    """Returns a phase of two steps: one trains a model without attackers, one with attackers."""
    del config
    run = attacked.run
    nobody = np.zeros(0, np.int64)

    def fill(state: Arrays, index: int) -> None:
      params = train(attacked, attacked.attackers if index else nobody)
      counts = _measure(run, attacked.attack, params)
      pairs = [(0, 0) if count is None else (count.count, count.total) for count in counts]
      state["counts"][index] = pairs

    def accuracy(state: Arrays) -> dict[str, float]:
      right, total = np.asarray(state["counts"])[:, 0].T
      known = total > 0
      return {
        "accuracy": float(np.mean(right[known] / total[known])) if any(known) else 0.0
      }

    # The axes are (without, with attackers), (accuracy, success), and (count, total).
    empty = lambda: {"counts": np.zeros((2, 2, 2), np.int32)}
    return pieces.fill_pieces(2, empty, fill, name="models", evaluate=accuracy)

  def measure(
    self, config: AttackConfig, attacked: Poisoned, state: Mapping[str, Any]
  ) -> MeasuredAttack:
    """Returns accuracy and success with and without attackers, and the verdict on the defence."""
    counts = np.asarray(state["counts"])
    (clean, clean_success), (accuracy, success) = (
      [with_interval(int(n), int(total)) if total else None for n, total in model]
      for model in counts
    )
    assert accuracy is not None and clean is not None  # there always are test records
    run, federate = attacked.run, config.federate
    # None: the server clips each message instead, or the user defined the aggregator.
    tolerates = None
    aggregation = aggregation_of(federate)
    if aggregation is not None and not isinstance(federate.privacy, ServerNoise):
      options = dataclasses.asdict(federate.aggregator)
      tolerates = aggregation.tolerates(int(federate.clients_per_round), **options)
    outcome = PoisoningOutcome(
      len(attacked.attackers), tolerates, accuracy, success, clean, clean_success
    )
    facts = lambda counts: None if counts is None else counts._asdict()
    # How the epsilon of this run is limited. A method without an entry in `_NOTES` gets a note only
    # if the guarantee is of a larger deployment.
    usual_note = _SIMULATED if run.guarantee.is_of_deployment else ""
    result = {
      "test_accuracy": accuracy.rate,
      "poisoning": name_of(config, "attack"),
      "num_attackers": outcome.num_attackers,
      "num_clients": run.num_clients,
      "tolerates": tolerates,
      "accuracy": facts(accuracy),
      "clean_accuracy": facts(clean),
      "victims_misled": facts(success),
      "clean_victims_misled": facts(clean_success),
      "verdict": outcome.verdict(private=run.plan.is_private),
      "epsilon_note": _NOTES.get(name_of(federate, "privacy"), usual_note),
    }
    result["rows"] = [_table_row(result)]
    return MeasuredAttack({"counts": counts, "attackers": attacked.attackers}, result)


@dataclasses.dataclass(frozen=True)
class LabelFlip(PoisoningSettings):
  """`attacks.label_flip`. The fields are its arguments."""

  source: int = 1
  target: int = 7
  factor: float = 1.0

  def method(self) -> Poisoning:
    """Returns the attack `label_flip` with these arguments."""
    return attacks.label_flip(self.source, self.target, factor=self.factor)


@dataclasses.dataclass(frozen=True)
class ScaledUpdate(PoisoningSettings):
  """`attacks.scaled_update`. The field is its argument."""

  factor: float = -5.0

  def method(self) -> Poisoning:
    """Returns the attack `scaled_update` with this factor."""
    return attacks.scaled_update(self.factor)


@dataclasses.dataclass(frozen=True)
class Backdoor(PoisoningSettings):
  """`attacks.backdoor`. The fields `size` and `value` are those of its `Trigger`."""

  target: int = 0
  size: int = 3
  value: float = 1.0
  share: float = 0.5
  factor: float = 1.0

  def method(self) -> Poisoning:
    """Returns the attack `backdoor` with these arguments."""
    trigger = Trigger(size=self.size, value=self.value)
    return attacks.backdoor(
      self.target, trigger=trigger, share=self.share, factor=self.factor
    )


@dataclasses.dataclass(frozen=True)
class LittleIsEnough(PoisoningSettings):
  """Settings of `alie`. If `z` is None, the round's clients and attackers determine it."""

  z: float | None = None

  def method(self) -> Poisoning:
    """Returns the attack `alie` with this z."""
    return collusion.alie(self.z)


@dataclasses.dataclass(frozen=True)
class MinMax(PoisoningSettings):
  """Settings of `min_max`. The direction is "std", "unit" or "sign"."""

  direction: str = "std"

  def method(self) -> Poisoning:
    """Returns the attack `min_max` with this direction."""
    return collusion.min_max(self.direction)


@dataclasses.dataclass(frozen=True)
class MinSum(MinMax):
  """Settings of `min_sum`. The direction is "std", "unit" or "sign"."""

  def method(self) -> Poisoning:
    """Returns the attack `min_sum` with this direction."""
    return collusion.min_sum(self.direction)


def _measure(run: federated.FedRun, attack: Poisoning, params: Params) -> Any:
  return measure_poisoning(run.apply, params, attack, run.test)


def train(attacked: Poisoned, attackers: np.ndarray) -> Params:
  """Returns the parameters after all rounds, with these attackers among the clients.

  An attacker changes its message last, after the noise and compression that all clients apply.
  """
  run = attacked.run

  def colluding(aggregator: Aggregator) -> Aggregator:
    return collusion.colluding(aggregator, attacked.attack)

  def algorithm(wrap: Any, memory: Any) -> Any:
    del memory  # `lying` adds the attackers' memory to the client's memory

    def lying(wrapping: federated.Wrapping) -> federated.Wrapping:
      keeps = wrapping["memory"] or (lambda params: None)
      return {
        "wrap": lambda client: wrap(wrapping["wrap"](client)),
        "memory": lambda params: poisoning.attacker_memory(keeps(params)),
      }

    return federated.make_algorithm(run, lying, before=colluding)

  return poisoned_training(
    algorithm,
    attacked.attack,
    attackers,
    federation=run.federation,
    work=run.work,
    params=run.params,
    rng=run.random.sampler,
  )


def _table_row(result: Row) -> Row:
  """Returns a row whose success is the share of misled victims. For an attack without
  victims it is the share of misclassified test records."""
  right, clean = result["accuracy"], result["clean_accuracy"]
  misled = result["victims_misled"]
  text = f"accuracy {rate(right)} ({rate(clean)} unattacked)"
  if misled is None:
    share = "wrong, of the test records"
    wrong = [1 - end for end in reversed(right["interval"])]
    misled = right | {"count": right["total"] - right["count"], "interval": wrong}
  else:
    share = "misled, of the victims"
    unattacked = rate(result["clean_victims_misled"])
    text = f"misled {rate(misled)} ({unattacked} unattacked), {text}"
  text += f"; {result['num_attackers']} of {result['num_clients']} clients attack"
  # Share of the accuracy that remains under attack. Both counts are of the same test records.
  ratio = right["count"] / clean["count"] if clean["count"] else None
  return counted_row(
    misled, result["poisoning"], share, text,
    verdict=result["verdict"], accuracy_ratio=ratio,
  )  # fmt: skip

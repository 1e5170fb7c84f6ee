"""Runs the poisoning of federated rounds: trains the federation honestly, then under attack."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dpjax.attacks import collusion, poisoning, roc
from dpjax.attacks.poisoning import Poisoning, choose_attackers, poisoned_training
from dpjax.attacks.robustness import PoisoningOutcome, measure_poisoning
from dpjax.attacks.roc import Counted
from dpjax.experiments.config import user_code
from dpjax.experiments.config.fields import name_of
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.members import MeasuredAttack
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated.config import ServerNoise, aggregation_of
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
  tolerates: int | None  # how many attackers in a cohort the aggregator tolerates
  note: str  # remark on the guarantee

  @property
  def guarantee(self) -> Guarantee:
    return self.run.guarantee


def prepare(config: AttackConfig, loaded: tuple[Any, Any], random: RunKeys) -> Poisoned:
  """Returns the attacked run and its attackers. The choice of attackers does not depend on the
  defence, so all defences face the same attackers.

  Raises UserError if `attack.fraction` rounds to no attacker, if the data lack the attack's labels,
  or if the trigger does not fit the records.
  """
  run = federated.assemble(config.federate, loaded, random)
  settings = config.attack
  count = run.federation.num_clients
  attackers = choose_attackers(count, settings.fraction, seed=config.seed)
  if not len(attackers):
    raise UserError(
      f"rounds to no attacker of {count} clients",
      field="attack.fraction",
      value=settings.fraction,
    )
  attack = settings.method()
  if not isinstance(attack, Poisoning):
    name = name_of(config, "attack")
    raise user_code.wrong(
      "attack", name, "of method() an attacks.poisoning.Poisoning", attack
    )
  try:  # before anything is trained
    poisoning.poisoned(run.federation, attack, attackers)
    _measured(run, attack, run.params)
  except UserError as error:
    field = error.field.removeprefix("trigger.")
    raise error.of(field=field).within("attack") from error
  # The note says how the epsilon of this run is limited. A method without an entry in `_NOTES` gets
  # a note only if the guarantee is simulated.
  usual_note = _SIMULATED if run.guarantee.kind == "simulated" else ""
  return Poisoned(
    run=run,
    attack=attack,
    attackers=attackers,
    tolerates=_tolerates(config),
    note=_NOTES.get(name_of(config.federate, "privacy"), usual_note),
  )


def _tolerates(config: AttackConfig) -> int | None:
  """Returns how many attackers in a cohort the aggregator tolerates.

  Returns None if the server clips each message instead, or if the user defined the aggregator.
  """
  federate = config.federate
  if isinstance(federate.privacy, ServerNoise):
    return None
  aggregation = aggregation_of(federate)
  if aggregation is None:
    return None
  options = dataclasses.asdict(federate.aggregator)
  return aggregation.tolerates(int(federate.clients_per_round), **options)


def _measured(run: federated.FedRun, attack: Poisoning, params: Params) -> Any:
  return measure_poisoning(run.apply, params, attack, run.test)


# --- the phase


def phase(config: AttackConfig, attacked: Poisoned) -> Phase:
  """Returns a phase of two steps: one trains a model without attackers, one with attackers."""
  del config
  run = attacked.run
  nobody = np.zeros(0, np.int64)

  def measure(state: Arrays, index: int) -> None:
    params = trained(attacked, attacked.attackers if index else nobody)
    counts = _measured(run, attacked.attack, params)
    pairs = [(0, 0) if count is None else (count.count, count.total) for count in counts]
    state["counts"][index] = pairs

  def accuracy(state: Arrays) -> dict[str, float]:
    right, total = np.asarray(state["counts"])[:, 0].T
    known = total > 0
    return {"accuracy": float(np.mean(right[known] / total[known])) if any(known) else 0.0}

  # The axes are (without, with attackers), (accuracy, success), and (count, total).
  empty = lambda: {"counts": np.zeros((2, 2, 2), np.int32)}
  return pieces.filled(2, empty, measure, name="models", evaluate=accuracy)


def trained(attacked: Poisoned, attackers: np.ndarray) -> Params:
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


# --- results


def measured(
  config: AttackConfig, attacked: Poisoned, state: Mapping[str, Any]
) -> MeasuredAttack:
  """Returns accuracy and success with and without attackers, and the verdict on the defence."""
  counts = np.asarray(state["counts"])
  (clean, clean_success), (accuracy, success) = (
    [roc.counted(int(n), int(total)) if total else None for n, total in model]
    for model in counts
  )
  name = name_of(config, "attack")
  outcome = PoisoningOutcome(
    name,
    name_of(config.federate, "aggregator"),
    len(attacked.attackers),
    attacked.run.num_clients,
    attacked.tolerates,
    accuracy,  # pyright: ignore[reportArgumentType]  # there always are test records
    success,
    clean,  # pyright: ignore[reportArgumentType]
    clean_success,
  )
  result = {
    "test_accuracy": outcome.accuracy.rate,
    "poisoning": name,
    "num_attackers": outcome.num_attackers,
    "num_clients": outcome.num_clients,
    "tolerates": outcome.tolerates,
    "accuracy": _counts_or_none(outcome.accuracy),
    "clean_accuracy": _counts_or_none(outcome.clean_accuracy),
    "victims_misled": _counts_or_none(success),
    "clean_victims_misled": _counts_or_none(clean_success),
    "verdict": verdict(outcome, private=attacked.run.plan.is_private),
    "epsilon_note": attacked.note,
  }
  held = {"counts": counts, "attackers": attacked.attackers}
  return MeasuredAttack(held, result)


def _counts_or_none(counted: Counted | None) -> dict[str, Any] | None:
  return None if counted is None else counted._asdict()


def verdict(outcome: PoisoningOutcome, *, private: bool = False) -> str:
  """Returns the verdict on a defence.

  A defence claims nothing if there are more attackers than its breakdown point. The verdict then
  names both numbers.

  Args:
    outcome: accuracy and success, with and without attackers.
    private: whether the server adds noise for a user's epsilon, which bounds the effect of one
      client.

  >>> ten, none = roc.counted(10, 10), roc.counted(0, 10)
  >>> verdict(PoisoningOutcome("flip", "mean", 2, 9, 0, ten, ten, ten, none))
  'FAILS: victims are misled (2 attackers, its breakdown point is 0)'
  >>> still = PoisoningOutcome("flip", "dp", 2, 9, None, ten, none, ten, none)
  >>> verdict(still, private=True)
  'not shown to fail (epsilon bounds one client, 2 attack)'
  """
  fell = outcome.accuracy.interval[1] < outcome.clean_accuracy.interval[0]
  what = "accuracy falls" if fell else "victims are misled"
  word = f"FAILS: {what}" if outcome.fails else "not shown to fail"
  count = outcome.num_attackers
  if outcome.beyond:
    return f"{word} ({count} attackers, its breakdown point is {outcome.tolerates})"
  return f"{word} (epsilon bounds one client, {count} attack)" if private else word

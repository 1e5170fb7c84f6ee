"""Typed configuration of an attack on a run. A table of attacks is a sweep of such configs.

The attacked run has a config of the public launchers. `train` is a config of `launch.train`: its
model is copied or inverted, or its members are inferred. `federate` is a config of
`launch.federate`: messages of its clients are inverted, or some clients poison its rounds. So a
defence is one flag: `--config.target.privacy.epsilon=8`, `--config.target.compression=top_k`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

from dpjax.attacks import registry
from dpjax.attacks.attack_settings import AttackSettings
from dpjax.experiments.config import common, fields
from dpjax.experiments.config.fields import Choice, WithChoices
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.attack.run_settings import CopyByAnswers as CopyByAnswers
from dpjax.experiments.kinds.attack.run_settings import DenseFirst as DenseFirst
from dpjax.experiments.kinds.attack.run_settings import Membership as Membership
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central import embeddings
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated.config import (
  FedConfig,
  Records,
  algorithm_of,
  algorithms_that,
)
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.loop import Phase
from dpjax.validate import UserError
from dpjax.zoo.networks.registry import entry

# Maps each attack's name to its settings. A new attack needs a row of `registry.ATTACKS`, and no
# line here.
ATTACKS = {row.word: row.find_settings() for row in registry.ATTACKS if row.word}


TARGETS: dict[str, type] = {"train": TrainConfig, "federate": FedConfig}


@dataclasses.dataclass
class AttackConfig(WithChoices):
  """Configuration of an attack on a run."""

  target: Annotated[
    TrainConfig | FedConfig, Choice(TARGETS), "the run that is attacked"
  ] = dataclasses.field(default_factory=TrainConfig)
  attack: Annotated[
    Any,
    Choice(ATTACKS, base=AttackSettings),
    "or package.module:Class of an AttackSettings of your own",
  ] = "membership"
  beside: Annotated[str, "what others published of it, for a column of the table"] = ""
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None
  where: ClassVar[tuple[str, ...]] = ("beside",)  # changes nothing of the run

  @property
  def data(self) -> Any:
    """Returns the settings `data` of the attacked run."""
    return self.target.data

  @property
  def model(self) -> Any:
    """Returns the settings `model` of the attacked run."""
    return self.target.model

  @property
  def train(self) -> TrainConfig:
    """Returns the target of an attack on a run of `launch.train`."""
    assert isinstance(self.target, TrainConfig)
    return self.target

  @property
  def federate(self) -> FedConfig:
    """Returns the target of an attack on a run of `launch.federate`."""
    assert isinstance(self.target, FedConfig)
    return self.target


def check(config: AttackConfig) -> None:
  """Raises UserError if the config of one attack is wrong; loads no data."""
  common.typed(config)
  _check_attack(config)
  target = config.target
  name = fields.name_of(config, "attack")
  bounds.only(config, "target", [config.attack.section], f" for attack={name!r}")
  with within("target", holds_config=True):
    if isinstance(target, FedConfig):
      # An attack that trains rounds checks their cohorts when it assembles them.
      federated.check(target, draws_cohorts=False)
      _check_federate(target, config.attack)
      launched, own = "launch.federate", (*_OF_ROUNDS, *config.attack.unread)
    else:
      central.check(target)
      _check_train(target, config.attack)
      launched, own = "launch.train", _OF_STEPS
      # This run has no guarantee to compare with a budget: its own run was accounted.
      if getattr(config.attack, "target", None) is not None:
        own += ("privacy.epsilon_budget",)
    common.read_if(target, False, f"a run of {launched} itself", *own)
  common.read_if(
    config, target.is_private, "a private target (--config.target.privacy)", "noise_seed"
  )


def _check_attack(config: AttackConfig) -> None:
  """Raises UserError if the class of the settings lacks a required part, such as a task."""
  attack = type(config.attack)
  name = fields.name_of(config, "attack")
  facts = {"section": ("train", "federate"), "wants": ("plain_client", "wraps_clients", "")}
  for fact, choices in facts.items():
    if getattr(attack, fact, None) not in choices:
      raise UserError(
        f"must be a class whose {fact} is {' or '.join(map(repr, choices))}",
        field="attack",
        value=name,
      )
  if not isinstance(getattr(attack, "task", None), str):
    raise UserError("must be a class with a task", field="attack", value=name)
  parts_of(config)


class AttackParts(NamedTuple):
  """Holds the three functions of the module that implements an attack."""

  prepare: Callable[..., Any]  # (config, data, keys) -> what is attacked
  measured: Callable[..., Any]  # (config, what is attacked, last state) -> `MeasuredAttack`
  # (config, what is attacked) -> the `Phase` that attacks it. A module without it gets `trained`.
  phase: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Trained:
  """What an attack on the model of one training prepares: the run, and what else it needs."""

  run: central.Run

  @property
  def guarantee(self) -> Guarantee:
    return self.run.guarantee


def trained(config: AttackConfig, attacked: Trained) -> Phase:
  """Returns the training phase of `launch.train`, without a guarantee.

  result.json states the guarantee of the attacked run separately (`build.promised`).
  """
  return central.phase(config.train, attacked.run)._replace(guarantee=None)


def parts_of(config: AttackConfig) -> AttackParts:
  """Returns the functions that carry out the attack.

  Raises:
    UserError: the module of the attack cannot be imported, or lacks one of the functions.
  """
  name = fields.name_of(config, "attack")
  wanted = "must name, as module, one with prepare, phase and measured"
  try:
    module = importlib.import_module(type(config.attack).module)
  except (AttributeError, ImportError, ValueError) as error:
    raise UserError(wanted, field="attack", value=name) from error
  usual = {"phase": trained} if config.attack.section == "train" else {}
  parts: list[Any] = [
    getattr(module, part, usual.get(part)) for part in AttackParts._fields
  ]
  if None in parts:
    raise UserError(wanted, field="attack", value=name)
  return AttackParts(*parts)


def _check_train(train: TrainConfig, attack: Any) -> None:
  if attack.deals_records and hasattr(train.privacy, "normalization"):
    why = ": shadow models of this attack would share statistics of one half"
    bounds.only(train, "privacy.normalization", ["per_example"], why)
  bounds.only(train, "audit", ["none"], ", the attack deals the records")
  bounds.only(train, "release", [False], ", an attack trains many models")
  if entry(train.model.name).is_language != attack.of_text:
    wanted = "must be a language model" if attack.of_text else "must classify records"
    raise UserError(wanted, field="model.name", value=train.model.name)
  embeddings.refuse(train)
  bounds.only(train, "trainable", ["all"], ", an attack trains whole models")


def _check_federate(federate: FedConfig, attack: Any) -> None:
  bounds.only(federate, "audit", ["none"], ", this run is attacked")
  if attack.wants and not getattr(algorithm_of(federate), attack.wants):
    known = algorithms_that(lambda row: getattr(row, attack.wants))
    bounds.only(federate, "algorithm", known, f", {attack.wants_because}")
  if attack.wants and isinstance(federate.privacy, Records):
    raise UserError(
      "must be another: what is sent by silos is attacked by launch.audit --only=silos",
      field="privacy",
      value="records",
    )
  if attack.colludes:
    why = " for attackers who see the messages of honest clients"
    bounds.only(federate, "secure_sum", ["none"], why)
  if entry(federate.model.name).is_language:
    raise UserError(
      "must take images or numbers",
      field="model.name",
      value=federate.model.name,
    )


# Fields of the attacked run that do not affect what an attacker sees.
_SEEDS = ("seed", "noise_seed")
_OF_STEPS = ("eval_every", "checkpoint_every", "diagnostics", *_SEEDS, *TrainConfig.where)
_OF_ROUNDS = ("eval_every", "checkpoint_every", "targets", "stop_at_accuracy")
_OF_ROUNDS += ("diagnostics", "release", *_SEEDS, *FedConfig.where)

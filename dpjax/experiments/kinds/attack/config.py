"""Typed configuration of an attack on a run, and of a table of attacks (`sweeps.attack_table`).

The attacked run has a config of the public launchers. `train` is a config of `launch.train`: its
model is copied or inverted, or its members are inferred. `federate` is a config of
`launch.federate`: messages of its clients are inverted, or some clients poison its rounds. So a
defence is one flag: `--config.train.privacy.epsilon=8`, `--config.federate.compression=top_k`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

from dpjax.attacks import registry
from dpjax.attacks.attack_settings import AttackSettings
from dpjax.experiments.config import common, fields
from dpjax.experiments.config import unread as unread_lib
from dpjax.experiments.config.fields import Choice, WithChoices
from dpjax.experiments.kinds import bounds, unused
from dpjax.experiments.kinds.attack.run_settings import CopyByAnswers as CopyByAnswers
from dpjax.experiments.kinds.attack.run_settings import DenseFirst as DenseFirst
from dpjax.experiments.kinds.attack.run_settings import Membership as Membership
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central import embeddings
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated import unused as fed_unused
from dpjax.experiments.kinds.federated.config import (
  FedConfig,
  algorithm_of,
  algorithms_that,
)
from dpjax.validate import UserError
from dpjax.zoo.networks.registry import is_language

# Maps each attack's name to its settings. A new attack needs a row of `registry.ATTACKS`, and no
# line here.
ATTACKS = {row.word: row.find_settings() for row in registry.ATTACKS if row.word}


@dataclasses.dataclass
class AttackConfig(WithChoices):
  """Configuration of an attack on a run, or of a table of attacks.

  `rows` maps a label to the fields that differ from this config, by dotted name, such as
  {"membership, none": {"train.privacy.method": "sgd"}, "DLG, top-k": {"attack": "dlg",
  "federate.compression": "top_k"}}. Without rows, this config is the only row. In a label, the text
  before the last comma names the attack in the table, and the text after it the defence. `beside`
  maps labels to results that others have published. The table shows them in a separate column.
  """

  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
  federate: FedConfig = dataclasses.field(default_factory=FedConfig)
  attack: Annotated[
    Any,
    Choice(ATTACKS, base=AttackSettings),
    "or package.module:Class of an AttackSettings of your own",
  ] = "membership"
  rows: Annotated[
    dict[str, dict[str, Any]], "label to the fields that differ; none: one row"
  ] = dataclasses.field(default_factory=dict)
  beside: Annotated[dict[str, str], "label to what others published"] = dataclasses.field(
    default_factory=dict
  )
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None
  title: Annotated[str, "of the table"] = ""
  of_table: ClassVar[tuple[str, ...]] = ("rows", "beside", "title")  # not of a run

  @property
  def data(self) -> Any:
    """Returns the settings `data` of the attacked section."""
    return attacked_config(self).data

  @property
  def model(self) -> Any:
    """Returns the settings `model` of the attacked section."""
    return attacked_config(self).model


def attacked_config(config: AttackConfig) -> TrainConfig | FedConfig:
  """Returns the config of the run that is attacked."""
  return getattr(config, config.attack.section)


def other(config: AttackConfig) -> str:
  """Returns the name of the section that this attack does not read."""
  return "federate" if config.attack.section == "train" else "train"


@bounds.names_fields
def check(config: AttackConfig) -> None:
  """Raises UserError if the config of one attack is wrong; loads no data."""
  bounds.typed(config)
  _check_attack(config)
  # An attack that trains rounds checks their cohorts when it assembles them.
  of_messages = functools.partial(federated.check, draws_cohorts=False)
  checks = {"train": central.check, "federate": of_messages}
  with bounds.within(config.attack.section):
    checks[config.attack.section](attacked_config(config))
  if config.attack.section == "train":
    _check_train(config.train)
    normalized = fields.name_of(config.train.privacy, "normalization")
    if config.attack.deals_records and normalized != "per_example":
      raise UserError(
        f"must be 'per_example' for attack={fields.name_of(config, 'attack')!r}, whose shadow "
        "models would share statistics of one half",
        field="train.privacy.normalization",
        value=normalized,
      )
  else:
    _check_federate(config.federate, config.attack)
  unread_lib.refuse(config, {other(config): "an attack on it"} | _unread(config))


def unread(config: AttackConfig) -> unread_lib.Unused:
  """Returns {field that one attack does not read: condition under which it would be read}.

  The fields are of the attacked run. The whole section that is not attacked is one more field.

  >>> unread(AttackConfig())["train.audit.score"]
  'audit.enabled'
  """
  section = config.attack.section
  of_run = (
    unused.of_training(config.train)
    if section == "train"
    else fed_unused.of_federation(config.federate)
  )
  reasons = {other(config): "an attack on it"} | _unread(config)
  return reasons | unread_lib.within(section, of_run)


def _check_attack(config: AttackConfig) -> None:
  """Raises UserError if the class of the settings lacks a required part, such as a task."""
  attack = type(config.attack)
  name = fields.name_of(config, "attack")
  facts = {"section": ("train", "federate"), "wants": ("plain_client", "wraps_clients")}
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
  phase: Callable[..., Any]  # (config, what is attacked) -> the `Phase` that attacks it
  measured: Callable[..., Any]  # (config, what is attacked, last state) -> `MeasuredAttack`


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
  parts: list[Any] = [getattr(module, part, None) for part in AttackParts._fields]
  if None in parts:
    raise UserError(wanted, field="attack", value=name)
  return AttackParts(*parts)


def _check_train(train: TrainConfig) -> None:
  if train.audit.enabled:
    raise UserError(
      "must be false, the attack deals the records", field="train.audit.enabled", value=True
    )
  if train.release:
    raise UserError(
      "must be false, an attack trains many models", field="train.release", value=True
    )
  if is_language(train.model.name):
    raise UserError(
      "must classify records", field="train.model.name", value=train.model.name
    )
  embeddings.refuse(train, "train")
  trainable = fields.name_of(train, "trainable")
  if trainable != "all":
    shown = f"train.trainable={trainable!r}"
    raise UserError(f"{shown}: must be 'all', an attack trains whole models")


def _check_federate(federate: FedConfig, attack: Any) -> None:
  algorithm = algorithm_of(federate)
  if not getattr(algorithm, attack.wants):
    known = algorithms_that(lambda row: getattr(row, attack.wants))
    raise UserError(
      f"must be {known}, {attack.wants_because}",
      field="federate.algorithm",
      value=algorithm.name,
    )
  summed = fields.name_of(federate, "secure_sum")
  if attack.colludes and summed != "none":
    raise UserError(
      "must be 'none' for attackers who see the messages of honest clients",
      field="federate.secure_sum",
      value=summed,
    )
  if is_language(federate.model.name):
    raise UserError(
      "must take images or numbers",
      field="federate.model.name",
      value=federate.model.name,
    )


# Fields of the attacked run that are those of the attack itself.
_SEEDS = ("seed", "noise_seed")


def _unread(config: AttackConfig) -> unread_lib.Unused:
  """Returns the fields of the attacked section that do not affect what an attacker sees."""
  if config.attack.section == "train":
    names = ("eval_every", "checkpoint_every", "diagnostics", *_SEEDS, *TrainConfig.where)
    # This run has no guarantee to compare with a budget: the target was accounted in its own run.
    if getattr(config.attack, "target", None) is not None:
      names += ("privacy.epsilon_budget",)
    needs = unread_lib.needs(False, "a run of launch.train itself", *names)
  else:
    names = ("eval_every", "checkpoint_every", "targets", "stop_at_accuracy")
    names += ("diagnostics", "release", *_SEEDS, "audit", *FedConfig.where)
    names += config.attack.unread
    needs = unread_lib.needs(False, "a run of launch.federate itself", *names)
  private = attacked_config(config).is_private
  return unread_lib.within(config.attack.section, needs) | unread_lib.needs(
    private, f"a private {config.attack.section}.privacy.method", "noise_seed"
  )

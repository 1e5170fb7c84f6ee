"""One attack on a run, from an `AttackConfig`; the settings of the attack carry it out. A table of
attacks is a sweep of such configs.

The attacked run has a config of the public launchers. `train` is a config of `launch.train`: its
model is copied or inverted, or its members are inferred. `federate` is a config of
`launch.federate`: messages of its clients are inverted, or some clients poison its rounds. So a
defence is one flag: `--config.target.privacy.epsilon=8`, `--config.target.compression=top_k`.

A step trains one group of models or inverts one message, for example, so an interrupted attack can
resume. The result states the guarantee of the attacked run, not of the attack.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

from dpjax import names
from dpjax.accounting import Ledger
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config import choices, common
from dpjax.experiments.config.choices import Choice, name_of
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.attack.settings import AttackSettings
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central import embeddings
from dpjax.experiments.kinds.central.build import Central
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated.build import Federated
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import guarantee as guarantee_lib
from dpjax.experiments.run import loop
from dpjax.experiments.run.experiment import Experiment, Outcome, Story
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.validate import UserError
from dpjax.zoo.networks.registry import entry

_HERE = "dpjax.experiments.kinds.attack"
# Each attack's name, and the class that carries it out; its module is imported when it is chosen.
ATTACKS = {
  "membership": f"{_HERE}.members:Membership",
  "fed_membership": f"{_HERE}.fed_members:FedMembership",
  "text_extraction": f"{_HERE}.written_text:WrittenText",
  "dlg": f"{_HERE}.inversion:DlgInversion",
  "cosine": f"{_HERE}.inversion:CosineInversion",
  "dense_first": f"{_HERE}.inversion:DenseFirst",
  "imprint": f"{_HERE}.inversion:Imprint",
  "fishing": f"{_HERE}.inversion:Fishing",
  "class_inversion": f"{_HERE}.class_pictures:ClassSearch",
  "extraction": f"{_HERE}.copies:CopyByAnswers",
  "label_flip": f"{_HERE}.poisoned_rounds:LabelFlip",
  "scaled_update": f"{_HERE}.poisoned_rounds:ScaledUpdate",
  "alie": f"{_HERE}.poisoned_rounds:LittleIsEnough",
  "min_max": f"{_HERE}.poisoned_rounds:MinMax",
  "min_sum": f"{_HERE}.poisoned_rounds:MinSum",
  "backdoor": f"{_HERE}.poisoned_rounds:Backdoor",
}
TARGETS: dict[str, type] = {"train": TrainConfig, "federate": FedConfig}


@dataclasses.dataclass
class AttackConfig(WithChoices):
  """Configuration of an attack on a run."""

  target: Annotated[
    TrainConfig | FedConfig, Choice(TARGETS), "the run that is attacked"
  ] = dataclasses.field(default_factory=TrainConfig)
  attack: Annotated[
    Any,
    Choice(ATTACKS, choices.users_of(AttackSettings)),
    "or package.module:Class of an AttackSettings of your own",
  ] = "membership"
  beside: Annotated[str, "what others published of it, for a column of the table"] = ""
  seed: common.Seed = 0
  noise_seed: common.NoiseSeed = None
  where: ClassVar[tuple[str, ...]] = ("beside",)  # changes nothing of the run

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


def _check_attack(config: AttackConfig) -> None:
  """Raises UserError if the class of the settings lacks a required part, such as a task."""
  attack: Any = type(config.attack)
  section = getattr(attack, "section", None)
  own = ("prepare", "measure", *(["phase"] if section == "federate" else []))
  lacks = [part for part in own if getattr(attack, part) is getattr(AttackSettings, part)]
  if section not in TARGETS or not isinstance(getattr(attack, "task", None), str) or lacks:
    raise UserError(
      "must be a class with a section ('train' or 'federate'), a task, prepare, measure and, for "
      "'federate', phase",
      field="attack",
      value=choices.name_of(config, "attack"),
    )


def _check_train(train: TrainConfig, *, of_text: bool) -> None:
  common.only(train, "audit", ["none"], ", the attack deals the records")
  common.only(train, "release", [False], ", an attack trains many models")
  if entry(train.model.name).is_language != of_text:
    wanted = "must be a language model" if of_text else "must classify records"
    raise UserError(wanted, field="model.name", value=train.model.name)
  embeddings.refuse(train)
  common.only(train, "trainable", ["all"], ", an attack trains whole models")


def _check_federate(federate: FedConfig) -> None:
  common.only(federate, "audit", ["none"], ", this run is attacked")
  if entry(federate.model.name).is_language:
    raise UserError(
      "must take images or numbers",
      field="model.name",
      value=federate.model.name,
    )


def unread(config: AttackConfig) -> tuple[str, ...]:
  """Returns the fields of the attacked run that have no effect on what an attacker sees."""
  target, attack = config.target, config.attack
  names = ("eval_every", "checkpoint_every", "diagnostics", "seed", "noise_seed")
  names += ("safetensors", *target.where)
  if isinstance(target, FedConfig):
    more = ("targets", "stop_at_accuracy", "fine_tune_epochs", "release", *attack.unread)
    return names + more
  # A finished run was accounted, so there is no guarantee to compare with a budget.
  is_finished = getattr(attack, "target", None) is not None
  return names + (("privacy.epsilon_budget",) if is_finished else ())


class Attack(Experiment[AttackConfig]):
  """One attack."""

  def check(self) -> None:
    config = self.config
    common.check_types(config)
    _check_attack(config)
    target = config.target
    name = choices.name_of(config, "attack")
    common.only(config, "target", [config.attack.section], f" for attack={name!r}")
    with within("target", holds_config=True):
      if isinstance(target, FedConfig):
        # An attack that trains rounds checks their cohorts when it assembles them.
        federated.check(target, draws_cohorts=False)
        _check_federate(target)
      else:
        central.Central(target).check()
        _check_train(target, of_text=config.attack.of_text)
      config.attack.check_target(target)
      launched = f"a run of launch.{config.attack.section} itself"
      common.read_if(target, False, launched, *unread(config))
    common.read_if(
      config, target.is_private, "a private target (--config.target.privacy)", "noise_seed"
    )

  @functools.cached_property
  def attacked(self) -> Central | Federated:
    """Returns the run that is attacked."""
    attacked: Any = experiment_of(self.config.target)
    return attacked

  @property
  def is_private(self) -> bool:
    return self.attacked.is_private

  def data(self) -> tuple[Any, Any]:
    """Loads (training data, test data) of the attacked run, in memory and with features."""
    attacked: Any = self.attacked.config
    if isinstance(attacked, TrainConfig):
      attacked = dataclasses.replace(attacked, resident=True)
    with within("target", of=attacked):
      return loop.load(attacked)

  def data_key(self) -> Any:
    return self.attacked.data_key()

  def check_data(self, data: Any) -> None:
    if not self.config.attack.of_text:
      needs_classes(data[0], "target.data.name", self.config.target.data.name)

  def weights(self) -> dict[str, str]:
    config = self.config
    files = {
      "target.pretrained": getattr(config.target, "pretrained", None),
      "attack.target": getattr(config.attack, "target", None),
    }
    # The target of a label flip is a class, no file.
    return {
      field: names.weights_sha256(file, field)
      for field, file in files.items()
      if isinstance(file, str) and file
    }

  def train(self, data: Any, keys: RunKeys) -> Story:
    config = self.config
    attack = config.attack
    with within("target", of=config.target):
      attacked = attack.prepare(config, data, keys)
      attacked.guarantee.check_budget(Ledger())
    trained = yield attack.phase(config, attacked)
    measured = attack.measure(config, attacked, trained.state)
    num_steps = self.attacked.num_steps
    stated = guarantee_lib.as_repeatable(attacked.guarantee, config.noise_seed)
    result = {
      **privacy_fields(stated, num_steps),
      "task": attack.task,
      "attack": name_of(config, "attack"),
      "dataset": config.target.data.name,
      "model": config.target.model.name,
      "method": name_of(self.attacked.config, "privacy"),
      "num_steps": num_steps,
      **measured.result,
    }
    of_run = self.weights().get("attack.target")
    # A report of the attacked run finds the attacks on it by this digest.
    result |= {} if of_run is None else {ATTACKED: of_run}
    return Outcome(
      measured.scores, lambda folder: result, measured.write, saved_as="attack.npz"
    )


# Key of result.json: SHA-256 of the params.npz of a finished run that was attacked.
ATTACKED = "attacked_sha256"


def privacy_fields(guarantee: Guarantee, num_steps: int) -> dict[str, Any]:
  """Returns the privacy fields of result.json, for the attacked run after all its steps."""
  if guarantee.kind == "none":
    return guarantee.facts(Ledger(), 0.0)
  guarantee.warn()
  ledger = Ledger()
  if guarantee.is_of_deployment:  # it also states the epsilon of its own small cohorts
    ledger = guarantee.charge(ledger, range(num_steps), noise_key_id="attacked")
  return guarantee.facts(ledger, guarantee.curve(num_steps))

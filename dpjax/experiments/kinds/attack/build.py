"""One attack, from an `AttackConfig`; the settings of the attack carry it out.

A step trains one group of models or inverts one message, for example, so an interrupted attack can
resume. The result states the guarantee of the attacked run, not of the attack.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from dpjax import names
from dpjax.accounting import Ledger
from dpjax.data.target_kinds import needs_classes
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.attack.config import AttackConfig, check
from dpjax.experiments.kinds.central.build import Central
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.build import Federated
from dpjax.experiments.run import guarantee as guarantee_lib
from dpjax.experiments.run import loop
from dpjax.experiments.run.experiment import Experiment, Outcome, Story
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.run.run_keys import RunKeys


class Attack(Experiment[AttackConfig]):
  """One attack."""

  def check(self) -> None:
    check(self.config)

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

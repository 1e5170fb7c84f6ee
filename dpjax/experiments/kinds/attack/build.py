"""Builds the job of one attack from an `AttackConfig`. The phase of the job comes from the module
that the attack names.

A step trains one group of models or inverts one message, for example, so an interrupted attack can
resume. The result states the guarantee of the attacked run, not of the attack.
"""

from __future__ import annotations

import functools
from typing import Any

from dpjax import data as data_lib
from dpjax import names
from dpjax.accounting import Ledger
from dpjax.experiments.config.fields import name_of, to_dict
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.attack.config import (
  AttackConfig,
  AttackParts,
  check,
  parts_of,
)
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import guarantee as guarantee_lib
from dpjax.experiments.run.guarantee import Guarantee
from dpjax.experiments.run.loop import Job, RunOutcome, Schedule, TrainPhase
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.validate import UserError

LOADERS = {"train": central.load_resident, "federate": federated.load_data}


def load_data(config: AttackConfig) -> tuple[Any, Any]:
  """Loads (training data, test data) of the attacked run."""
  loaded = named(config, LOADERS[config.attack.section], config.target)
  data_lib.needs_classes(loaded[0], "launch.attack")
  return loaded


def named(config: AttackConfig, call: Any, *args: Any) -> Any:
  """Returns the result of `call(*args)`.

  In a UserError about a field of the attacked run, the name of the section is put before the field.
  """
  try:
    return call(*args)
  except UserError as error:
    known = error.field.partition(".")[0] in to_dict(config.target)
    raise (error.within("target") if known else error) from error


@bounds.names_fields
def build(config: AttackConfig, loaded: tuple[Any, Any] | None = None) -> Job:
  """Builds the job of one attack, from a config without rows.

  Args:
    loaded: result of `load_data`, to share it between runs; None: it is loaded.

  Raises UserError if the config is wrong, or has rows or published results.
  """
  check(config)
  for name in ("rows", "beside"):
    if getattr(config, name):
      raise UserError(
        "must be empty for one attack; it is of a table of several", field=name
      )
  read = functools.cache(lambda: load_data(config) if loaded is None else loaded)
  parts = parts_of(config)

  def start(random: RunKeys) -> Schedule:
    attacked = named(config, parts.prepare, config, read(), random)
    named(config, attacked.guarantee.check_budget, Ledger())
    return functools.partial(_schedule, config, parts, attacked)

  return Job(
    config=config,
    seed=config.seed,
    data_name=config.data.name,
    data=lambda: data_lib.digest(read()[0]),
    start=start,
    private=config.target.is_private,
    noise_seed=config.noise_seed,
    weights=functools.partial(_weights, config),
  )


def _weights(config: AttackConfig) -> dict[str, str]:
  """Returns the SHA-256 of each file of weights that the attack reads, by field."""
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


def _schedule(
  config: AttackConfig, parts: AttackParts, attacked: Any, train_phase: TrainPhase
) -> RunOutcome:
  state = train_phase(parts.phase(config, attacked)).state
  measured = parts.measured(config, attacked, state)
  attacked_run = config.target
  num_steps = (
    attacked_run.num_rounds
    if isinstance(attacked_run, FedConfig)
    else attacked_run.num_steps
  )
  result = {
    **promised(guarantee_lib.repeated(attacked.guarantee, config.noise_seed), num_steps),
    "task": config.attack.task,
    "attack": name_of(config, "attack"),
    "dataset": config.data.name,
    "model": config.model.name,
    "method": name_of(attacked_run, "privacy"),
    "num_steps": num_steps,
    **measured.result,
  }
  return RunOutcome(
    measured.scores, lambda folder: result, measured.write, saved_as="attack.npz"
  )


def promised(guarantee: Guarantee, num_steps: int) -> dict[str, Any]:
  """Returns the privacy fields of result.json, for the attacked run after all its steps."""
  if guarantee.kind == "none":
    return guarantee.facts(Ledger(), 0.0)
  guarantee.warn()
  ledger = Ledger()
  for step in range(num_steps if guarantee.kind == "simulated" else 0):
    ledger = ledger.charge(  # a simulation also states the epsilon of its own small cohorts
      guarantee.step_event(step),
      l2_clip_norm=guarantee.l2_bound,
      neighboring_relation=guarantee.relation,
      noise_key_id="attacked",
      first_step=step,
    )
  return guarantee.facts(ledger, guarantee.curve(num_steps))

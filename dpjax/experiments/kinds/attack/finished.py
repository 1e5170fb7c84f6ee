"""Builds the config of an attack on a finished run, central or federated, from its folder alone.

In the folder, config.json names data, model and training, params.npz holds the target's parameters,
and result.json states the guarantee. Shadow models are trained with the run's config.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.run_settings import FedMembership, Membership
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import workdir, writers
from dpjax.validate import UserError

# Fields that do not decide what shadow models learn, such as those of evaluation and release. They
# get defaults.
_OF_RUN = ("eval_every", "checkpoint_every", "diagnostics", "seed", "noise_seed", "release")
_OF_RUN += (*TrainConfig.where, "privacy.epsilon_budget", "safetensors")
_OF_RUN += ("targets", "stop_at_accuracy", "fine_tune_epochs", *FedConfig.where)


def attack_on(folder: str | os.PathLike, *, num_shadows: int = 16) -> AttackConfig:
  """Returns the config of membership inference on the model in the folder of a run.

  Of a federated run that protects users, and dealt its data to them, the membership of clients is
  inferred; of other runs, that of records.

  Args:
    folder: folder of a finished run of `launch.train` or `launch.federate`.
    num_shadows: number of shadow models, each trained on half of all records, or clients.

  Raises:
    UserError: `folder` holds no such run. Or the run is not finished, has no
      params.npz. Or the run was audited (so canaries are among
      its records), or its files were changed.
  """
  path = pathlib.Path(folder)
  odd = functools.partial(UserError, field="run", value=str(folder)[-100:])
  if not path.is_dir():
    raise odd(
      "must be the folder of a run of launch.train or launch.federate; there is none"
    )
  run = _config(path, odd)
  if not (path / writers.RESULT).exists():
    raise odd(f"is not finished: it has no {writers.RESULT}; run its command again")
  if not (path / workdir.PARAMS).exists():
    raise odd(f"has no {workdir.PARAMS}, so there is no model to attack")
  try:
    workdir.finished(path, run)
  except UserError as error:
    raise error.of(field="run") from error
  if run.audit is not None:
    raise odd(
      "was trained with canaries (audit='canaries'), so its members are not its data; its "
      "result.json has a bound of its own"
    )
  usual = type(run)()
  there = {leaf.path for leaf in fields.leaves(run)}
  unread = {"privacy.epsilon_budget": None}
  shadowed = {
    name: unread[name] if name in unread else fields.get(usual, name)
    for name in _OF_RUN
    if name in there
  }
  target = str(path / workdir.PARAMS)
  if isinstance(run, TrainConfig):
    attack = Membership(num_shadows=num_shadows, target=target)
  else:
    attack = FedMembership(num_shadows=num_shadows, target=target, unit=_unit(run))
    # A run that stopped at an accuracy did fewer rounds.
    shadowed["num_rounds"] = writers.read_json(path / writers.RESULT)["num_steps"]
  return AttackConfig(target=fields.replace_all(run, shadowed), attack=attack)


def _unit(run: FedConfig) -> str:
  """Returns whose membership in a federated run is inferred."""
  return (
    "client" if run.protects_users and hasattr(run.partition, "num_clients") else "record"
  )


def _config(path: pathlib.Path, odd: Callable[[str], UserError]) -> TrainConfig | FedConfig:
  file = path / workdir.CONFIG
  held: Any = writers.read_json(file) if file.exists() else None
  if not isinstance(held, dict):
    raise odd(f"has no {workdir.CONFIG} of a run")
  of_rounds = "num_rounds" in held and "partition" in held
  if not of_rounds and ("num_steps" not in held or "curves" in held or "rows" in held):
    raise odd(
      f"is no run of launch.train or launch.federate; its {workdir.CONFIG} is another kind's"
    )
  try:
    return fields.from_dict(FedConfig if of_rounds else TrainConfig, held)
  except UserError as error:
    reason = f"{error!s:.100}"
    raise odd(f"was written by another version of dpjax: {reason}") from error

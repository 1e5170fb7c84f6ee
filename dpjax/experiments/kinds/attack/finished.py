"""Builds the config of an attack on a finished run, central or federated, from its folder alone.

In the folder, config.json names data, model and training, params.npz holds the target's parameters,
and result.json states the guarantee. Shadow models are trained with the run's config.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

from dpjax.experiments.config import choices, fields
from dpjax.experiments.kinds.attack.config import AttackConfig, unread
from dpjax.experiments.kinds.attack.fed_members import FedMembership
from dpjax.experiments.kinds.attack.members import Membership
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import workdir, writers
from dpjax.validate import UserError


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
  target = str(path / workdir.PARAMS)
  shadowed: dict[str, Any] = {}
  if isinstance(run, TrainConfig):
    attack = Membership(num_shadows=num_shadows, target=target)
  else:
    deals = hasattr(run.partition, "num_clients")
    unit = "client" if run.protects_users and deals else "record"
    attack = FedMembership(num_shadows=num_shadows, target=target, unit=unit)
    # A run that stopped at an accuracy did fewer rounds.
    shadowed["num_rounds"] = writers.read_json(path / writers.RESULT)["num_steps"]
  config = AttackConfig(target=run, attack=attack)
  there = {leaf.path for leaf in choices.leaves(run)}
  # What decides nothing that shadow models learn gets its default.
  for name in there.intersection([*unread(config), "release"]):
    budget = name == "privacy.epsilon_budget"
    shadowed[name] = None if budget else fields.get(type(run)(), name)
  return dataclasses.replace(config, target=fields.replace_all(run, shadowed))


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

"""Builds the config of an attack on a finished run, central or federated, from its folder alone.

In the folder, config.json names data, model and training, params.npz holds the target's parameters,
and result.json states the guarantee. Shadow models are trained with the run's config.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from typing import Any

from dpjax import validate
from dpjax.experiments.config import choices, fields
from dpjax.experiments.kinds.attack.config import AttackConfig, unread
from dpjax.experiments.kinds.attack.fed_members import FedMembership
from dpjax.experiments.kinds.attack.members import Membership
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import finished, workdir, writers
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
  launched = "launch.train or launch.federate"
  if not path.is_dir():
    raise odd(f"must be the folder of a run of {launched}; there is none")
  run = finished.config_of(path, "run")
  if not isinstance(run, TrainConfig | FedConfig):
    raise odd(f"is no run of {launched}, but of another kind")
  if not (path / writers.RESULT).exists():
    raise odd(f"is not finished: it has no {writers.RESULT}; run its command again")
  if not (path / workdir.PARAMS).exists():
    raise odd(f"has no {workdir.PARAMS}, so there is no model to attack")
  with validate.about("run", str(folder)[-100:]):
    # Shadow models start from the very weights from which the target started.
    workdir.check_weights(run, workdir.finished_result(path, run) or {})
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
    unit = "client" if run.protects_users and run.is_dealt else "record"
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

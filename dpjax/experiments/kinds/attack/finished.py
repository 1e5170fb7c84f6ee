"""Builds the config of an attack on a finished run of `launch.train`, from its folder alone.

In the folder, config.json names data, model and training, params.npz holds the target's parameters,
and result.json states the guarantee. Shadow models are trained with the run's config.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.run_settings import Membership
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import workdir, writers
from dpjax.validate import UserError

# Fields that do not decide what shadow models learn, such as those of evaluation and release. They
# get defaults.
_OF_RUN = ("eval_every", "checkpoint_every", "diagnostics", "seed", "noise_seed", "release")
_OF_RUN += (*TrainConfig.where, "privacy.epsilon_budget", "safetensors")


def attack_on(folder: str | os.PathLike, *, num_shadows: int = 16) -> AttackConfig:
  """Returns the config of membership inference on the model in a folder of `launch.train`.

  Args:
    folder: folder of a finished run.
    num_shadows: number of shadow models, each trained on half of all records.

  Raises:
    UserError: `folder` holds no run of `launch.train`. Or the run is not finished, has no
      params.npz. Or the run was audited (so canaries are among
      its records), or its files were changed.
  """
  path = pathlib.Path(folder)
  at = f"run={str(folder)[-100:]!r}"
  if not path.is_dir():
    raise UserError(f"{at}: must be the folder of a run of launch.train; there is none")
  train = _config(path, at)
  if not (path / writers.RESULT).exists():
    raise UserError(
      f"{at}: is not finished: it has no {writers.RESULT}; run its command again"
    )
  if not (path / workdir.PARAMS).exists():
    raise UserError(f"{at}: has no {workdir.PARAMS}, so there is no model to attack")
  try:
    workdir.finished(path, train)
  except UserError as error:
    raise error.of(field="run") from error
  if train.audit is not None:
    raise UserError(
      f"{at}: was trained with canaries (audit='canaries'), so its members are not its data; "
      "its result.json has a bound of its own"
    )
  usual = TrainConfig()
  there = {leaf.path for leaf in fields.leaves(train)}
  shadowed = {name: fields.get(usual, name) for name in _OF_RUN if name in there}
  target = Membership(num_shadows=num_shadows, target=str(path / workdir.PARAMS))
  return AttackConfig(target=fields.replace_all(train, shadowed), attack=target)


def _config(path: pathlib.Path, at: str) -> TrainConfig:
  file = path / workdir.CONFIG
  held: Any = writers.read_json(file) if file.exists() else None
  if not isinstance(held, dict):
    raise UserError(f"{at}: has no {workdir.CONFIG} of a run of launch.train")
  if "num_rounds" in held:
    raise UserError(
      f"{at}: is a run of launch.federate, whose members are clients; must be one of launch.train"
    )
  if "num_steps" not in held or "curves" in held or "rows" in held:
    raise UserError(
      f"{at}: is no run of launch.train; its {workdir.CONFIG} is another kind's"
    )
  try:
    return fields.from_dict(TrainConfig, held)
  except UserError as error:
    reason = f"{error!s:.100}"
    raise UserError(f"{at}: was written by another version of dpjax: {reason}") from error

"""Switches of a command line over a config of whichever kind; see `runs.switches`.

Of a config of several runs, a field is dropped where none of its runs reads it any more. Fields
that its rows, variants or curves set are never dropped: they say what is compared. Where a switch
leaves one of them without a reader, one line says which of the file's columns must be given, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpjax.experiments.config.ignored import WouldBeIgnored
from dpjax.experiments.kinds.attack import config as attack
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.secure import config as secure
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.unused import (
  Unused,
  of_federation,
  of_training,
  reason,
  within,
)
from dpjax.experiments.run import switches
from dpjax.experiments.sweeps import (
  attack_table,
  engine,
  experiment,
  grid,
  labelled,
  secure_table,
  unused,
)
from dpjax.validate import UserError

# Fields that hold what the runs of a config differ in.
_COLUMNS: dict[type, tuple[str, ...]] = {
  RelevanceConfig: ("curves",),
  grid.SweepConfig: ("variants", "grid"),
  AttackConfig: ("rows",),
  SecureConfig: ("rows",),
}
_CHECKS: dict[type, Callable[[Any], object]] = {
  TrainConfig: central.check,
  FedConfig: federated.check,
  RelevanceConfig: experiment.points,
  grid.SweepConfig: grid.points,
  AttackConfig: attack_table.points,
  SecureConfig: secure_table.points,
}


def settled(before: Any, steps: Sequence[tuple[str, Any]]) -> tuple[Any, str]:
  """(the config of a command line without what its switches leave unread, a line that says so).

  Args:
    before: the config of the file.
    steps: (field, config from this field on), in the order in which they were set.

  Raises:
    UserError: one line: a switch makes a field of the file's rows, variants or curves meaningless.

  >>> from dpjax.experiments.kinds.central.config import PrivacyConfig
  >>> file = TrainConfig(privacy=PrivacyConfig(l2_clip_norm=0.1, epsilon=3.0))
  >>> plain = TrainConfig(privacy=PrivacyConfig(l2_clip_norm=0.1, epsilon=3.0, method="sgd"))
  >>> config, line = settled(file, [("privacy.method", plain)])
  >>> config == TrainConfig(privacy=PrivacyConfig(method="sgd"))
  True
  >>> print(line)
  privacy.method='sgd': takes no epsilon, l2_clip_norm; the file's values are dropped
  """
  if not steps:
    return before, ""
  config, line = steps[-1][1], ""
  # What is wrong with a value is told where the run checks it.
  with contextlib.suppress(UserError):
    unread = _unread(config)
    table = unread(before)
    given = {*switches.set_paths(before)}
    was_read = lambda path: path in given and reason(path, table) is None
    config, dropped = switches.settled(
      config, [path for path, _ in steps], unread, was_read
    )
    line = switches.told(before, steps, dropped, unread)
  _check(before, config, [path for path, _ in steps], dropped=bool(line))
  return config, line


def _unread(config: Any) -> Callable[[Any], Unused]:
  if isinstance(config, TrainConfig):
    return of_training
  if isinstance(config, FedConfig):
    return of_federation
  if isinstance(config, RelevanceConfig):
    return unused.of_curves
  if isinstance(config, grid.SweepConfig):
    return _of_sweep
  if isinstance(config, AttackConfig):
    return _of_attacks
  if isinstance(config, SecureConfig):
    return lambda table: _of_rows(table, secure_table.alone_as(table), secure.unread)
  return lambda other: {}


def _of_sweep(config: grid.SweepConfig) -> Unused:
  """What its runs do not read, or set themselves."""
  axes = {**config.grid, "seed": config.seeds}
  runs = engine.spread(
    config.base,
    config.variants or {"": {}},
    lambda base: axes,
    name="grid",
    where="variants",
  )
  unread = grid.unread_of(config.base)
  tables = [unread(run.config) | dict.fromkeys(run.changes, "a run's own") for run in runs]
  return unused.of_sweep(config) | within("base", _of_all(config.base, tables))


def _of_attacks(config: AttackConfig) -> Unused:
  found = _of_rows(config, attack_table.alone_as(config), attack.unread)
  labels = config.rows or {attack_table.alone_as(config): {}}
  strange = any(label not in labels for label in config.beside)
  return found | ({"beside": "a row of that name"} if strange else {})


def _of_rows(config: Any, alone: str, unread: Callable[[Any], Unused]) -> Unused:
  tables = [unread(run) for _, run in labelled.runs_of(config, alone)]
  return _of_all(config, tables)


def _of_all(config: Any, tables: Sequence[Mapping[str, str]]) -> Unused:
  """Fields that every one of the tables holds."""
  found = {path: [reason(path, dict(table)) for table in tables] for path in
           switches.all_paths(config)}  # fmt: skip
  return {
    path: str(reasons[0]) for path, reasons in found.items() if reasons and all(reasons)
  }


def _check(before: Any, config: Any, explicit: Sequence[str], *, dropped: bool) -> None:
  """Raises UserError where the run would, so that an error stands alone, without the line; and
  where a switch makes a field of the file's own columns meaningless."""
  check = _CHECKS.get(type(config))
  columns = [name for name in _COLUMNS.get(type(config), ()) if getattr(config, name)]
  columns = [] if {path.partition(".")[0] for path in explicit} & {*columns} else columns
  if check is None or not (dropped or columns):
    return
  try:
    check(config)
  except WouldBeIgnored as error:
    faults = error.fields()
    asked = any(path.removeprefix("base.") in faults for path in explicit)
    if not columns or asked or not _is_whole(before):
      raise
    raise UserError(
      f"leaves without a reader what the file's {' and '.join(columns)} set "
      f"({faults[0]:.80}); give "
      f"{' and '.join(f'--config.{name}' for name in columns)}, too",
      field=f"{', '.join(explicit):.80}",
    ) from error


def _is_whole(config: Any) -> bool:
  """Whether the runs of the file itself are accepted."""
  try:
    _CHECKS[type(config)](config)
  except UserError:
    return False
  return True

"""Switches on a command line, for configs of any kind; see `experiments.run.switches`.

Of a config of several runs, a field is dropped where none of its runs reads it any more. Fields
that its rows, variants or curves set are never dropped: they say what is compared. Where a switch
leaves one of them without a reader, one line says which of the file's columns must be given, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from dpjax.experiments.config.ignored import WouldBeIgnored
from dpjax.experiments.config.unread import Unused, reason
from dpjax.experiments.run import switches
from dpjax.experiments.run.kind import Kind
from dpjax.validate import UserError


def settled(before: Any, steps: Sequence[tuple[str, Any]], kind: Kind) -> tuple[Any, str]:
  """Returns (the config of a command line without fields that its switches leave unread, a
  line that says so).

  Args:
    before: the config of the file.
    steps: (field, config from this field on), in the order in which they were set.
    kind: kind of the config.

  Raises:
    UserError: one line: a switch makes a field of the file's rows, variants or curves meaningless.

  >>> from dpjax.experiments.kinds.central.config import PrivacyConfig, TrainConfig
  >>> from dpjax.experiments.kinds.central.kind import CENTRAL
  >>> file = TrainConfig(privacy=PrivacyConfig(l2_clip_norm=0.1, epsilon=3.0))
  >>> plain = TrainConfig(privacy=PrivacyConfig(l2_clip_norm=0.1, epsilon=3.0, method="sgd"))
  >>> config, line = settled(file, [("privacy.method", plain)], CENTRAL)
  >>> config == TrainConfig(privacy=PrivacyConfig(method="sgd"))
  True
  >>> print(line)
  privacy.method='sgd': takes no epsilon, l2_clip_norm; the file's values are dropped
  """
  if not steps:
    return before, ""
  config = steps[-1][1]
  line = ""
  # The run's own check reports wrong values.
  with contextlib.suppress(UserError):
    unread = kind.unread
    table = unread(before)
    given = {*switches.set_paths(before)}
    was_read = lambda path: path in given and reason(path, table) is None
    config, dropped = switches.settled(
      config, [path for path, _ in steps], unread, was_read
    )
    line = switches.told(before, steps, dropped, unread)
  _check(before, config, [path for path, _ in steps], kind, dropped=bool(line))
  return config, line


def of_all(config: Any, tables: Sequence[Mapping[str, str]]) -> Unused:
  """Returns the fields that every one of the tables holds."""
  found = {path: [reason(path, dict(table)) for table in tables] for path in
           switches.all_paths(config)}  # fmt: skip
  return {
    path: str(reasons[0]) for path, reasons in found.items() if reasons and all(reasons)
  }


def _check(
  before: Any, config: Any, explicit: Sequence[str], kind: Kind, *, dropped: bool
) -> None:
  """Raises UserError where the run would, so that the error stands without the line. Also
  raises where a switch makes a field of the file's own columns meaningless."""
  columns = [name for name in kind.columns if getattr(config, name)]
  columns = [] if {path.partition(".")[0] for path in explicit} & {*columns} else columns
  if not (dropped or columns):
    return
  try:
    kind.check(config)
  except WouldBeIgnored as error:
    faults = error.fields()
    asked = any(path.removeprefix("base.") in faults for path in explicit)
    if not columns or asked or not _is_whole(before, kind):
      raise
    raise UserError(
      f"leaves without a reader what the file's {' and '.join(columns)} set "
      f"({faults[0]:.80}); give "
      f"{' and '.join(f'--config.{name}' for name in columns)}, too",
      field=f"{', '.join(explicit):.80}",
    ) from error


def _is_whole(config: Any, kind: Kind) -> bool:
  """Whether the file's own runs are valid."""
  try:
    kind.check(config)
  except UserError:
    return False
  return True

"""Switches of a config: a field that a switch leaves unread goes back to its default.

A switch is a field that decides which other fields are read, such as `privacy.method`. If a
command line or a table row sets a switch, the run may no longer read some fields of the config.
`settled` resets these fields. So one flag makes the non-private twin of a private run.

A field that a run reads is never reset. The tables of `unused` must say that the changed config
does not read the field, before the reset and after it. So every epsilon follows from the fields in
config.json, and no default takes effect by itself. Three cases are still refused: an unread field
that was set together with the switch, a config that contradicts itself without a switch, and a
combination that nobody has proved.

In a config of several runs, a field is dropped if none of its runs reads it any more. Fields that
its rows, variants or curves set are never dropped: they say what is compared. If a switch leaves
such a field unread, an error says which of the file's columns must be given, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.config.ignored import WouldBeIgnored
from dpjax.experiments.config.unread import Unused, reason
from dpjax.experiments.run.kind import Kind
from dpjax.validate import UserError

# Dotted name of the dict whose keys count as fields.
_OPTIONS = "model.options"


def settled(
  config: Any,
  explicit: Iterable[str],
  unread: Callable[[Any], Unused],
  was_read: Callable[[str], bool],
) -> tuple[Any, list[str]]:
  """Resets every field that a switch left unread. Returns (the new config, the dotted names of the
  reset fields).

  Args:
    config: config with the switch.
    explicit: the switch and all fields that were set together with it. These, and fields in them,
      are kept.
    unread: function from a config to the fields that its run does not read.
    was_read: function that says whether a field was read before the switch. A field that was not
      read is kept, so that the run is refused.

  >>> from dpjax.experiments.kinds import unused
  >>> from dpjax.experiments.kinds.central.config import PrivacyConfig, TrainConfig
  >>> plain = TrainConfig(privacy=PrivacyConfig(method="sgd", l2_clip_norm=0.1))
  >>> result = settled(plain, ["privacy.method"], unused.of_training, lambda path: True)
  >>> result[0] == TrainConfig(privacy=PrivacyConfig(method="sgd")), result[1]
  (True, ['privacy.l2_clip_norm'])
  """
  asked = dict.fromkeys(explicit, "")
  dropped = list[str]()
  now = config
  while True:
    table = unread(now)
    choices = [
      path
      for path in set_paths(now)
      if path not in dropped
      and reason(path, table) is not None
      and reason(path, asked) is None
      and was_read(path)
    ]
    if not choices:
      break
    # The loop repeats, because a field may lose its only reader when another field is reset.
    now = _at_default(now, choices)
    dropped += choices
  # A run must not read a default that a reset put in. If it would read one, the config is returned
  # unchanged, so that the run is refused.
  table = unread(now)
  kept = (path for path in dropped if not path.rpartition(".")[0].endswith(_OPTIONS))
  if any(reason(path, table) is None for path in kept):
    return config, []
  return now, dropped


def set_paths(config: Any) -> Iterator[str]:
  """Yields the dotted names of the fields that are set, and of each option of a model.

  >>> from dpjax.experiments.kinds.central.config import ModelConfig, TrainConfig
  >>> list(set_paths(TrainConfig(model=ModelConfig("mlp", {"features": (8,)}), seed=3)))
  ['model.options', 'model.options.features', 'seed']
  """
  for path, (value, _) in fields.set_fields(config).items():
    yield path
    if path.endswith(_OPTIONS) and isinstance(value, dict):
      yield from (f"{path}.{key}" for key in value)


def all_paths(config: Any) -> list[str]:
  """Returns the dotted names of all fields, and of the options that are set."""
  return list(
    dict.fromkeys([*(leaf.path for leaf in fields.leaves(config)), *set_paths(config)])
  )


def _at_default(config: Any, paths: Iterable[str]) -> Any:
  """Returns a copy of a config in which the fields at `paths` have the defaults of their class."""
  # A section is reset before its fields, since its default may lack them.
  for path in sorted(paths, key=lambda path: path.count(".")):
    parent, _, key = path.rpartition(".")
    if parent.endswith(_OPTIONS):
      options = fields.get(config, parent)
      others = {name: value for name, value in options.items() if name != key}
      config = fields.replace(config, parent, others)
      continue
    empty = _empty_section(config, path)
    leaf = next((leaf for leaf in fields.leaves(config) if leaf.path == path), None)
    if empty is not None:
      config = fields.replace(config, empty, None)
    # A field without a leaf needs no reset: the reset of its section removed it.
    elif leaf is not None:
      config = fields.replace(config, path, leaf.default)
  return config


def _empty_section(config: Any, path: str) -> str | None:
  """Returns the shortest section of a dotted name that is None by default; None: there is no such
  section."""
  names = path.split(".")
  usual = type(config)()
  for count in range(1, len(names)):
    usual = getattr(usual, names[count - 1], usual)
    if usual is None:
      return ".".join(names[:count])
  return None


def summary(
  before: Any,
  steps: Sequence[tuple[str, Any]],
  dropped: Iterable[str],
  unread: Callable[[Any], Unused],
) -> str:
  """Reports in one line the dropped fields and the switch of each field; "" if no field is dropped.

  Args:
    before: config of the file.
    steps: pairs (field, config after this field was set), in the order in which fields were set.
    dropped: dropped fields, as `settled` returns them.
    unread: function from a config to the fields that its run does not read.
  """
  tables = [unread(before), *(unread(config) for _, config in steps)]
  causes: dict[str, list[str]] = {}
  for path in dropped:
    at = [
      index
      for index in range(len(steps))
      if reason(path, tables[index]) is None and reason(path, tables[index + 1]) is not None
    ]
    # If no switch alone made the field unread, another reset did. Such a field is reported with the
    # first switch.
    causes.setdefault(steps[at[-1] if at else 0][0], []).append(path)
  for path in _lost(before, steps):
    causes.setdefault(path.rpartition(".")[0], []).append(path)
  parts = []
  for switch, paths in causes.items():
    value = repr(fields.get(steps[-1][1], switch))
    # The section that the fields share with the switch is not repeated.
    section = switch.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    dropped_names = ", ".join(path.removeprefix(prefix) for path in paths)
    parts.append(f"{switch}={value:.60}: takes no {dropped_names}")
  return f"{'; '.join(parts)}; the file's values are dropped" if parts else ""


def _lost(before: Any, steps: Sequence[tuple[str, Any]]) -> list[str]:
  """Returns the set fields of the values that switches replaced, unless the new values have these
  fields, too."""
  if not steps:
    return []
  there = {leaf.path for leaf in fields.leaves(steps[-1][1])}
  known = {leaf.path for leaf in fields.leaves(before)}
  # `fields.leaves` yields a choice itself, then the fields of its value.
  switches = {path for path, _ in steps} & known
  return [
    path
    for path in fields.set_fields(before)
    if path not in there and path.rpartition(".")[0] in switches
  ]


# --- a command line and a config of any kind


def of_command_line(
  before: Any, steps: Sequence[tuple[str, Any]], kind: Kind
) -> tuple[Any, str]:
  """Returns (config, line): the config of a command line, in which unread fields are reset, and a
  line that lists these fields.

  Args:
    before: config of the file.
    steps: pairs (field, config after this field was set), in the order in which fields were set.
    kind: kind of the config.

  Raises:
    UserError: one line: a switch makes a field of the file's rows, variants or curves meaningless.

  >>> from dpjax.experiments.kinds.central.config import PrivacyConfig, TrainConfig
  >>> from dpjax.experiments.run.kind import KINDS
  >>> file = TrainConfig(privacy=PrivacyConfig(l2_clip_norm=0.1, epsilon=3.0))
  >>> plain = TrainConfig(privacy=PrivacyConfig(l2_clip_norm=0.1, epsilon=3.0, method="sgd"))
  >>> config, line = of_command_line(file, [("privacy.method", plain)], KINDS["train"])
  >>> config == TrainConfig(privacy=PrivacyConfig(method="sgd"))
  True
  >>> print(line)
  privacy.method='sgd': takes no epsilon, l2_clip_norm; the file's values are dropped
  """
  if not steps:
    return before, ""
  config = steps[-1][1]
  line = ""
  # An error in a value is ignored here, since the check of the run reports it.
  with contextlib.suppress(UserError):
    unread = kind.unread
    table = unread(before)
    paths_set = {*set_paths(before)}
    was_read = lambda path: path in paths_set and reason(path, table) is None
    config, dropped = settled(config, [path for path, _ in steps], unread, was_read)
    line = summary(before, steps, dropped, unread)
  _check(before, config, [path for path, _ in steps], kind, dropped=bool(line))
  return config, line


def unread_by_all(config: Any, tables: Sequence[Mapping[str, str]]) -> Unused:
  """Returns the fields of a config that none of its runs reads, each with the reason of one run.

  Args:
    tables: for each run, the fields that it does not read, with the reason.
  """
  reasons_of = {path: [reason(path, dict(table)) for table in tables] for path in
           all_paths(config)}  # fmt: skip
  return {
    path: str(reasons[0])
    for path, reasons in reasons_of.items()
    if reasons and all(reasons)
  }


def _check(
  before: Any, config: Any, explicit: Sequence[str], kind: Kind, *, dropped: bool
) -> None:
  """Raises UserError for a config whose run would be refused, before the line of dropped fields is
  printed. If a switch makes the columns of the file meaningless, the error says so. Without dropped
  fields and without columns, nothing is checked."""
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
  """Returns whether `kind.check` accepts a config."""
  try:
    kind.check(config)
  except UserError:
    return False
  return True

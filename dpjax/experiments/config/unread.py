"""Tables of settings that nothing reads, and the one-line error that refuses them.

A table maps a dotted field, or a whole section, to the condition under which it would be read. A
field at its default, or an optional field at None, counts as not set.
"""

from __future__ import annotations

from typing import Any

from dpjax.experiments.config import fields
from dpjax.validate import UserError

Unused = dict[str, str]  # dotted field, or group of fields -> what it would need


def needs(condition: bool, what: str, *fields: str) -> Unused:
  """Returns the table {field: what} if the condition is false, else {}.

  >>> needs(False, "text", "data.max_length")
  {'data.max_length': 'text'}
  """
  return {} if condition else dict.fromkeys(fields, what)


def reason(path: str, unused: Unused) -> str | None:
  """Returns the condition that a field needs; None if it is read.

  >>> reason("audit.kind", {"audit": "audit"}), reason("audits", {"audit": "audit"})
  ('audit', None)
  """
  names = path.split(".")
  prefixes = (".".join(names[:count]) for count in range(len(names), 0, -1))
  return next((unused[prefix] for prefix in prefixes if prefix in unused), None)


def within(section: str, unused: Unused) -> Unused:
  """Returns the table with the section's name before each field.

  >>> within("train", {"seed": "a run of its own"})
  {'train.seed': 'a run of its own'}
  """
  return {f"{section}.{path}": what for path, what in unused.items()}


def refuse(config: Any, unused: Unused, name: str = "") -> None:
  """Raises UserError for the first field that is set and would be ignored.

  >>> import dataclasses
  >>> config = dataclasses.make_dataclass("Config", [("num_steps", int, 200)])(3)
  >>> refuse(config, {"num_steps": "more"})
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: num_steps=3: would be ignored, it needs more; leave it at 200
  """
  for path, (value, default) in fields.set_fields(config).items():
    what = reason(path, unused)
    if what is not None:
      raise UserError(
        f"would be ignored, it needs {what}",
        field=f"{name}{path}",
        value=value,
        hint=f"leave it at {default!r}",
      )

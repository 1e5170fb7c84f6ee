"""Alarms of a service: each is a number beyond its bound. Changes are written to the journal."""

from __future__ import annotations

from typing import Any

from dpjax.serving.journal import ServiceJournal


class Alarms:
  """The alarms that are raised now.

  Args:
    journal: journal that gets each change of a level.

  >>> import tempfile
  >>> with tempfile.TemporaryDirectory() as folder, ServiceJournal(folder) as journal:
  ...   alarms = Alarms(journal)
  ...   alarms.report("accuracy", "alarm", value=0.5, bound=0.8)
  ...   alarms.report("latency p99 ms", "", value=3.0, bound=200.0)
  >>> alarms.raised
  {'accuracy': {'level': 'alarm', 'value': 0.5, 'bound': 0.8}}
  """

  def __init__(self, journal: ServiceJournal):
    self.raised: dict[str, dict[str, Any]] = {}
    self._journal = journal

  def report(self, name: str, level: str, value: float, bound: float) -> None:
    """Raises an alarm, changes its level, or clears it.

    Args:
      name: name of the quantity, such as "accuracy".
      level: "warning" or "alarm"; "": the value is within its bound.
      value: the measured number. bound: the number that it is compared with.
    """
    before = self.raised.get(name, {}).get("level", "")
    if level:
      self.raised[name] = {"level": level, "value": value, "bound": bound}
    else:
      self.raised.pop(name, None)
    # Only changes are written: an alarm that stays would fill the journal.
    if level != before:
      self._journal.write(
        "alarm", name=name, level=level or "clear", value=value, bound=bound
      )

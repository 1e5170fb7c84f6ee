"""Alarms of a service: each is a number beyond its bound. Changes are written to the journal."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from dpjax.serving.journal import ServiceJournal


class Alarms:
  """Holds the alarms that are raised now, and writes each change to the journal.

  Args:
    journal: journal of the service.

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

  def restore(self, lines: Sequence[Mapping[str, Any]], names: Container[str]) -> None:
    """Raises the alarms that earlier starts have raised and not cleared.

    Args:
      lines: lines of the journal, oldest first.
      names: names of the quantities that this start reports. An alarm of another quantity would
        never be cleared.
    """
    for line in lines:
      if line["kind"] != "alarm" or line["name"] not in names:
        continue
      if line["level"] == "clear":
        self.raised.pop(line["name"], None)
      else:
        alarm = {name: line[name] for name in ("level", "value", "bound")}
        self.raised[line["name"]] = alarm

  def report(self, name: str, level: str, value: float, bound: float) -> None:
    """Raises an alarm, changes its level, or clears it.

    Args:
      name: name of the quantity, such as "accuracy".
      level: "warning" or "alarm", or "" if the value is within its bound.
      value: measured number.
      bound: number that the value is compared with.
    """
    before = self.raised.get(name, {}).get("level", "")
    if level:
      self.raised[name] = {"level": level, "value": value, "bound": bound}
    else:
      self.raised.pop(name, None)
    # Only changes of the level are written, since an alarm that lasts would fill the journal.
    if level != before:
      self._journal.write(
        "alarm", name=name, level=level or "clear", value=value, bound=bound
      )

"""What several runs of one kind write together, for those kinds that write more than curves."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from dpjax.experiments.run import guarantee


class Table:
  """What several runs of one kind write together; here nothing.

  Attributes:
    unreleased: reason why the runs are not released, so that their costs are not summed; "": they
      are released.
    writes: names of the files of `write`, for the last line of a launcher.
  """

  unreleased = ""
  writes = ""

  def alone(self, config: Any) -> str | None:
    """Returns the label of a config that is run without others, as a table of one row; None: it is
    one run in its own folder."""
    return None

  def facts(self, label: str, config: Any) -> dict[str, Any]:
    """Returns entries of a run's row that its label and its config determine."""
    return {"label": label}

  def missing(self, config: Any) -> str:
    """Returns one line on what must be installed before a run can begin; "" if nothing."""
    return ""

  def check_data(self, config: Any, data: Any) -> None:
    """Raises UserError if what is to be written cannot come from such runs. It is called once,
    before the first run begins."""

  def keep(self, config: Any, result: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a run's row from its result; here all."""
    return result

  def tell(self, row: dict[str, Any]) -> str:
    """Returns one line about a finished run."""
    return guarantee.summary(row)

  def write(
    self, folder: pathlib.Path, rows: Sequence[dict[str, Any]], *, title: str, last: bool
  ) -> None:
    """Writes files about the finished runs. It is called after each run; `last`: all have run."""

  def read(self, folder: pathlib.Path) -> str:
    """Returns what a launcher prints of the written files."""
    return ""

  def alarm(self, rows: Sequence[dict[str, Any]]) -> str:
    """Returns one line about a promise that an attack has refuted; "" if there is none."""
    return ""

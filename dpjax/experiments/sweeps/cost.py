"""The total cost of the runs of a grid: the sum of their epsilons, if the sum is valid."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from dpjax.accounting import upper
from dpjax.experiments.config import choices
from dpjax.experiments.kinds.federated.config import NATURAL
from dpjax.experiments.run import guarantee, writers

Row = dict[str, Any]


def charge(rows: list[Row]) -> dict[str, Any]:
  """Returns upper bounds on epsilon and delta of releasing all finished runs together, in a dict.

  Basic composition (Dwork and Roth 2014, theorem 3.16): runs that are (epsilon_i, delta_i)-DP
  each are (sum epsilon_i, sum delta_i)-DP together. So is any choice among them. This needs
  independent randomness, one neighbouring relation and one unit.

  epsilon and delta are None if no run has finished, or if the sum is not valid: relations or units
  differ, or a run has no guarantee, or only one for a larger deployment ("simulated"). They are
  also None if runs with user-level privacy have different data or users: the records of one user
  may belong to several users of another run. And they are None if several runs have a `noise_seed`:
  their noise is not independent.

  A run that has finished counts, also if its row says that it failed afterwards.

  Runs on different data are summed, too, because a person may have a record in each data set.

  >>> run = {"status": "done", "epsilon": 1.0, "delta": 0.25, "epsilon_kind": "proved",
  ...        "neighboring_relation": "add_or_remove_one", "unit": "example"}
  >>> total = charge([run, run, {"status": "failed"}])
  >>> total["runs"], total["epsilon"], total["delta"], total["epsilon_kind"]
  (2, 2.0, 0.5, 'proved')
  """
  done = [row for row in rows if _is_there(row)]
  kinds = {row["epsilon_kind"] for row in done}
  meanings = {(row["neighboring_relation"], row["unit"]) for row in done}
  # With several partitions into users, a user of one run need not be a user of another run.
  # Nor need a person with one record in each of several silos have one in each silo of another.
  owns = any(row.get("unit_owns_records") for row in done)
  dealt = len(_populations(rows)) > 1 and owns
  failed = [text for row in done for text in row.get("failed_assumptions") or ()]
  # Runs of one seed and one noise_seed draw the same noise, whatever their settings are.
  shared = failed.count(guarantee.REPEATED) > 1
  # Basic composition needs one relation, one unit, and an epsilon that holds for every run itself.
  if not done or kinds & {"none", "simulated"} or len(meanings) > 1 or dealt or shared:
    return {"runs": len(done), "epsilon": None, "delta": None, "epsilon_kind": "none"}
  relation, unit = meanings.pop()
  return {
    "runs": len(done),
    # `fsum` rounds only once, so the sum does not depend on the order of the runs.
    "epsilon": math.fsum(row["epsilon"] for row in done),
    "delta": math.fsum(row["delta"] for row in done),
    "epsilon_kind": "claimed" if "claimed" in kinds else "proved",
    "neighboring_relation": relation,
    "unit": unit,
    "failed_assumptions": list(dict.fromkeys(failed)),
  }


def _is_there(row: Row) -> bool:
  """Returns whether the run of a row has finished, so that its model is on the disk."""
  return row["status"] == "done" or "epsilon_kind" in row


def _populations(rows: list[Row]) -> set[str | None]:
  return {row.get("population") for row in rows if _is_there(row)}


def population(config: Any) -> str:
  """Describes the data of a run, and for a federated run how records form users.

  Two runs with equal descriptions protect the same units: the same records, or the same users.
  """
  return population_of(choices.to_dict(config))


def population_of(held_fields: Mapping[str, Any]) -> str:
  """Returns the `population` of a config that is given as a dict, such as config.json holds."""
  data = held_fields.get("data") or {}
  held = {name: data.get(name) for name in ("name", "data_dir", "limit")}
  partition = held_fields.get("partition")
  if partition is not None:
    # In a natural partition the data determine the users, so its other settings, such as a limit
    # of examples, are left out.
    users = (partition["name"], partition.get("client_id"))
    natural = partition["name"] in NATURAL
    held["partition"] = ":".join(filter(None, users)) if natural else partition
  return json.dumps(writers.plain(held))


def statement(rows: list[Row], others: int = 0) -> str:
  """Explains what the epsilons of a sweep guarantee, and what they do not guarantee.

  Args:
    rows: rows of `engine.run`.
    others: number of finished runs in the same folder that are not part of the sweep any more.
  """
  total = charge(rows)
  text = (
    f"Each epsilon holds for its own run alone. Picking the best of these {total['runs']} "
    "runs, or reporting them side by side, is itself a query on the private data. "
    f"{_bound(total, len(_populations(rows)))} Runs that have not finished are not in "
    "it: release nothing of them."
  )
  if others:
    text += (
      f" The folder holds {others} further finished runs of another grid, also left out."
    )
  return text


def _bound(total: dict[str, Any], num_data_sets: int) -> str:
  if total["epsilon"] is None:
    return (
      "For all of them together no finite epsilon is known: none has finished, a run "
      "promises none, their neighbouring relations or units differ, the records of one "
      "user are dealt to other users in another run, or noise_seed repeats their noise."
    )
  epsilon = upper(total["epsilon"])
  delta = upper(total["delta"])
  failed = guarantee.names_of(total["failed_assumptions"])
  claim = f"; nothing is proved; fails or is assumed: {failed}" if failed else ""
  overlap = (
    f" They are on {num_data_sets} data sets, which may overlap: that is the bound for "
    "somebody with one record in each of them."
  )
  return (
    f"All of them together are at most (epsilon = {epsilon}, delta = {delta})-private by "
    f"basic composition ({total['epsilon_kind']}, {total['neighboring_relation']}, per "
    f"{total['unit']}{claim}).{overlap if num_data_sets > 1 else ''}"
  )

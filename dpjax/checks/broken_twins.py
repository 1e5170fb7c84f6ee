"""Plays the broken twins of every row of `launch.audit`, against that row's own games: `--twins`.

An audit that nothing can fail is worth nothing. Each row of the table is one subject with one
fault (`dpjax.auditing.games.twins`), and says which game refuted it, and by how much. Games are
played in the order of the row, with few draws at first; the significance of 0.1 % is divided
among all of them, so a sound subject would pass for broken once in a thousand rows at most.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from dpjax import validate
from dpjax.accounting import lower, upper
from dpjax.auditing.games import CONFIDENCE, Result, play, registry, twins
from dpjax.runs import provenance, writers
from dpjax.validate import UserError

RESULT, CSV = "twins.json", "twins.csv"
DRAWS = (3_000, 12_000, 48_000)  # of each game in turn, as long as nothing is refuted


@dataclasses.dataclass(frozen=True)
class TwinSettings:
  """Which twins are played.

  Args:
    only: a room, a subject or room.subject; "" for all.
    seed: of all draws.
  """

  only: str = ""
  seed: int = 0

  def __post_init__(self) -> None:
    validate.integer_at_least(0, seed=self.seed)
    if self.seed >= 2**62:
      raise UserError(f"seed={hex(self.seed)[:20]}: must be below 2**62")
    registry.subjects(self.only)  # refuses a name that there is not


def run(settings: TwinSettings, out: str | os.PathLike) -> list[dict[str, Any]]:
  """Plays what is left to play, writes after each twin, and returns all rows.

  Raises:
    UserError: `out` holds twins of other settings or versions.
  """
  path = pathlib.Path(out)
  done = _resumed(settings, path)
  todo = twins.twins(settings.only)
  with writers.progress(len(todo), len(done), "twins") as bar:
    for twin in todo:
      if twin.name in done:
        continue
      done[twin.name] = attacked(twin, seed=settings.seed)
      _write(settings, done, path)
      bar.update(1, last=twin.name)
  _write(settings, done, path)
  return list(done.values())


def attacked(
  twin: twins.BrokenTwin,
  *,
  seed: int = 0,
  draws: Sequence[int] = DRAWS,
  sound: bool = False,
) -> dict[str, Any]:
  """Returns the row of one twin: the first game that refutes it, else the nearest one.

  Args:
    draws: of each game, in turn; the significance is divided among them.
    sound: plays the same code without the fault, which must not be refuted.

  >>> attacked(twins.BrokenTwin("mechanisms", "Laplace", "noise"), draws=[900])["refuted"]
  True
  """
  started = time.perf_counter()
  games = twin.games(sound=sound)
  confidence = 1 - (1 - CONFIDENCE) / (len(games) * len(draws))
  nearest: Result | None = None
  for turn, count in enumerate(draws):
    for game in games:
      found = play(game, num_draws=count, seed=seed + turn, confidence=confidence)
      nearest = max([*found, *([nearest] if nearest else [])], key=_nearness)
      if nearest.refuted:
        break
    if nearest is not None and nearest.refuted:
      break
  assert nearest is not None
  return {
    "what": f"{twin.room}.{twin.subject}",
    "plant": twin.plant,
    "refuted": nearest.refuted,
    "case": nearest.game.case,
    "neighboring_relation": nearest.game.relation,
    "epsilon_claimed": nearest.claim.epsilon,
    "delta": nearest.claim.delta,
    "epsilon_lower": nearest.epsilon_lower,
    "ceiling": nearest.ceiling,
    "draws": nearest.num_draws,
    "seconds": time.perf_counter() - started,
  }


def _nearness(result: Result) -> tuple[bool, float]:
  return result.refuted, result.epsilon_lower / max(result.claim.epsilon, 1e-9)


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
  """Returns each twin that no game refuted, in words."""
  return [
    f"{row['what']}, {row['plant']}: epsilon >= {lower(row['epsilon_lower'])} of the claimed "
    f"{upper(row['epsilon_claimed'])} at delta {upper(row['delta'])}; {row['draws']} draws "
    f"show at most {lower(row['ceiling'])}"
    for row in rows
    if not row["refuted"]
  ]


# --- files


def _stated(settings: TwinSettings) -> dict[str, Any]:
  return {"settings": dataclasses.asdict(settings), "versions": provenance.versions()}


def _resumed(settings: TwinSettings, path: pathlib.Path) -> dict[str, dict[str, Any]]:
  file = path / RESULT
  if not file.exists():
    return {}
  try:
    found = json.loads(file.read_text())
    same = {key: found[key] for key in ("settings", "versions")} == _stated(settings)
    rows = {f"{row['what']}, {row['plant']}": row for row in found["rows"]}
  except (ValueError, KeyError, TypeError):
    raise UserError(f"out={path}: {RESULT} there is not that of broken twins") from None
  if not same:
    raise UserError(
      f"out={path}: holds twins of other settings or versions; choose another folder"
    )
  return rows


def _write(settings: TwinSettings, done: dict[str, Any], path: pathlib.Path) -> None:
  rows = list(done.values())
  writers.write_json(
    path / RESULT,
    {
      **_stated(settings),
      "device": provenance.device(),
      "confidence": CONFIDENCE,
      "missed": missed(rows),
      "not_planted": {
        f"{row}, {plant}": why for (row, plant), why in twins.NOT_PLANTED.items()
      },
      "rows": rows,
    },
  )
  writers.replace_file(path / CSV, _csv(rows).encode())


_COLUMNS = {
  "what": str,
  "plant": str,
  "refuted": str,
  "case": str,
  "neighboring_relation": str,
  "epsilon_claimed": upper,
  "delta": upper,
  "epsilon_lower": lower,
  "ceiling": lower,
  "draws": str,
  "seconds": "{:.1f}".format,
}


def _csv(rows: Sequence[dict[str, Any]]) -> str:
  """One line per twin."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  writer.writerow(_COLUMNS)
  for row in rows:
    writer.writerow([written(row[name]) for name, written in _COLUMNS.items()])
  return text.getvalue()

"""The long form of all games for `launch.audit`, with a table that is written after each
subject.

Each row of the table is one subject, and shows the game that came nearest to its claim. The
significance of 0.1 % is divided among the subject's games and their claims, so all bounds of a
row hold together at 99.9 %. A pass is evidence, not a proof.

The ceiling of a bound is the bound of an equal number of draws whose outputs always differ. A claim
above its ceiling CANNOT be refuted, whatever is broken. So every game gets at least 10,000 draws,
and up to 25,000 where a claim needs them. Claims that need more draws need a larger `minutes`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from dpjax import files, markdown, validate
from dpjax.accounting import upper
from dpjax.accounting.text import lower
from dpjax.auditing.games import registry
from dpjax.auditing.games.game import CONFIDENCE, Game, Result, draws_to_refute, play
from dpjax.experiments.checks import many_models
from dpjax.experiments.run import provenance, report, writers
from dpjax.experiments.run.workdir import check_own
from dpjax.validate import UserError, Verbatim

RESULT = "result.json"
TABLE = "table.md"
CSV = "table.csv"
# Number of draws that measure the speed of a game. They are not part of its result.
PILOT = 600
# Smallest number of draws of one game, even if `minutes` is too short for them.
LEAST = 10_000
# Largest number of draws of one game that are worth spending to make a claim refutable.
AFFORDED = 25_000
# Largest number of draws of one game.
MOST = 200_000
_YEAR = 366 * 24 * 60  # minutes
# Share of the time that is planned for draws which count.
_GAMES_MINUTES = 0.9


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of an audit.

  Args:
    minutes: approximate time for all games together. Games take longer if they need it for `LEAST`
      draws.
    only: name of a package, of a subject, or package.subject; "" for all.
    seed: seed of all draws.
  """

  minutes: float = 10.0
  only: str = ""
  seed: int = 0

  def __post_init__(self) -> None:
    validate.positive(minutes=self.minutes)
    if self.minutes > _YEAR:
      raise UserError(
        f"must be at most {_YEAR}, a year", field="minutes", value=self.minutes
      )
    validate.integer_at_least(0, seed=self.seed)
    if self.seed >= 2**62:
      value = Verbatim(hex(self.seed)[:20])
      raise UserError("must be below 2**62", field="seed", value=value)
    registry.subjects(self.only)


def _name(package: str, subject: str) -> str:
  return f"{package}.{subject}"


def run(settings: Settings, out: str | os.PathLike) -> list[dict[str, Any]]:
  """Plays the games that have no row yet, writes all rows after each subject, and returns them.

  Raises:
    UserError: `out` can be no folder, or holds another file, or an audit with other settings or
      versions.
  """
  validate.folder(out=out)
  path = pathlib.Path(out)
  # An audit of final models has the same folder by default.
  check_own(path, RESULT, many_models.RESULT, field="out")
  rows = _rows_so_far(settings, path / RESULT)
  subjects = registry.subjects(settings.only)
  seconds = settings.minutes * 60 / len(subjects)
  with writers.Progress(len(subjects), len(rows), "audit") as bar:
    for package, subject in subjects:
      name = _name(package, subject)
      if name in rows:
        continue
      bar.update(0, now=name)
      rows[name] = _subject(package, subject, seconds, settings.seed)
      _write(settings, path, list(rows.values()))
      bar.update(1)
  _write(settings, path, list(rows.values()))
  return list(rows.values())


def _rows_so_far(settings: Settings, file: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Returns the rows already in a file, by their `what`; an empty dict if there is no file."""
  if not file.exists():
    return {}
  try:
    stored = json.loads(file.read_text())
    same = stored["settings"] == dataclasses.asdict(settings) and provenance.same_libraries(
      stored["versions"]
    )
    rows = {row["what"]: row for row in stored["rows"]}
  # The file is no JSON, or JSON of another layout.
  except (ValueError, KeyError, TypeError):
    raise UserError(
      f"{file.name} there is not that of an audit", field="out", value=file.parent
    ) from None
  if not same:
    raise UserError(
      "holds an audit with other settings or versions; choose another folder",
      field="out",
      value=file.parent,
    )
  return rows


def _subject(package: str, subject: str, seconds: float, seed: int) -> dict[str, Any]:
  started = time.perf_counter()
  games = registry.games(package, subject)
  confidence = 1 - (1 - CONFIDENCE) / len(games)
  each = seconds / len(games)
  results = [r for game in games for r in _play(game, each, seed, confidence)]
  minutes = (time.perf_counter() - started) / 60
  return {
    "what": _name(package, subject),
    "kind": "proved",
    "minutes": minutes,
    "can_refute": any(result.can_refute for result in results),
    "games": [_facts(result) for result in results],
  }


def _play(game: Game, seconds: float, seed: int, confidence: float) -> list[Result]:
  """Returns the results of as many draws as the time allows, but at least `_least` and at most
  `MOST`."""
  draws = round(PILOT / game.draws)
  # The first play compiles, so it is not timed.
  play(game, num_draws=draws, seed=seed + 1_000_000)
  started = time.perf_counter()
  play(game, num_draws=draws, seed=seed + 1_000_001)
  speed = draws / max(time.perf_counter() - started, 1e-3)
  wanted = round(speed * seconds * _GAMES_MINUTES)
  most = round(MOST / game.draws)
  return play(
    game,
    # The number of draws is fixed in advance. If it depended on the results, the test would be
    # invalid.
    num_draws=min(max(wanted, round(_least(game, confidence) / game.draws)), most),
    seed=seed,
    confidence=confidence,
  )


def _least(game: Game, confidence: float) -> int:
  """Returns the number of draws, at least `LEAST`, with which each claim can be refuted. Claims
  that need more than `AFFORDED` are ignored."""
  each = 1 - (1 - confidence) / len(game.claims)
  needed = [draws_to_refute(claim, most=AFFORDED, confidence=each) for claim in game.claims]
  return max(LEAST, *(count or LEAST for count in needed))


def _facts(result: Result) -> dict[str, Any]:
  return {
    "case": result.game.case,
    "neighboring_relation": result.game.relation,
    "epsilon_claimed": result.claim.epsilon,
    "delta": result.claim.delta,
    "epsilon_lower": result.epsilon_lower,
    "draws": result.num_draws,
    "refuted": result.refuted,
    "ceiling": result.ceiling,
    "can_refute": result.can_refute,
  }


def nearest(row: dict[str, Any]) -> dict[str, Any]:
  """Returns a row's game with the largest ratio of lower bound to claim, refuted claims first."""
  ratio = lambda g: g["epsilon_lower"] / max(g["epsilon_claimed"], 1e-9)
  return max(row["games"], key=lambda g: (g["refuted"], ratio(g)))


def refuted_claims(rows: Sequence[dict[str, Any]]) -> list[str]:
  """Returns each claim that a game refuted, in words."""
  return [
    f"{row['what']} ({g['case']}): epsilon >= {lower(g['epsilon_lower'])} at delta "
    f"{upper(g['delta'])}, {g['neighboring_relation']}, above the claimed "
    f"{upper(g['epsilon_claimed'])}"
    for row in rows
    for g in row["games"]
    if g["refuted"]
  ]


def idle(rows: Sequence[dict[str, Any]]) -> list[str]:
  """Returns, in words, each claim that could not be refuted since there were too few draws."""
  return [
    f"{row['what']} ({g['case']}): {g['draws']} draws show at most epsilon >= "
    f"{lower(g['ceiling'])} at delta {upper(g['delta'])}, the claim is "
    f"{upper(g['epsilon_claimed'])}"
    for row in rows
    for g in row["games"]
    if not g["can_refute"]
  ]


# --- files


def _write(settings: Settings, path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  writers.write_json(
    path / RESULT,
    {
      "settings": dataclasses.asdict(settings),
      "versions": provenance.versions(),
      "device": provenance.device(),
      "confidence": CONFIDENCE,
      "refuted": refuted_claims(rows),
      "cannot_refute": idle(rows),
      "no_claim": {
        _name(package, name): why
        for package, known in registry.PACKAGES.items()
        for name, why in known.no_claim.items()
      },
      "rows": rows,
    },
  )
  files.replace_file(path / TABLE, table(rows).encode())
  # The CSV has a row for every game. The Markdown table has one for each subject: the game that
  # came nearest to its claim.
  columns = (*_COLUMNS, "case")
  every: list[dict[str, Any]] = [
    dict(zip(columns, (*_cells(row, game), game["case"])))
    for row in rows
    for game in row["games"]
  ]
  report.write_csv(path / CSV, every, columns)


_COLUMNS = (
  "what",
  "claim: epsilon",
  "delta",
  "relation",
  "kind",
  "strongest lower bound (99.9 %)",
  "draws",
  "minutes",
  "ceiling",
)


def _cells(row: dict[str, Any], game: dict[str, Any]) -> list[str]:
  return [
    row["what"],
    upper(game["epsilon_claimed"]),
    f"{upper(game['delta'])}",
    game["neighboring_relation"],
    row["kind"],
    lower(game["epsilon_lower"]) + (" REFUTED" if game["refuted"] else ""),
    str(game["draws"]),
    f"{row['minutes']:.1f}",
    lower(game["ceiling"]) + ("" if game["can_refute"] else " CANNOT REFUTE"),
  ]


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Returns the Markdown table of subjects.

  >>> game = {"case": "0, 1", "neighboring_relation": "replace_one", "delta": 0.0,
  ...   "epsilon_claimed": 1.0, "epsilon_lower": 0.9, "draws": 99, "refuted": False,
  ...   "ceiling": 2.0, "can_refute": True}
  >>> row = {"what": "x.y", "kind": "proved", "minutes": 0.5, "games": [game]}
  >>> print(table([row]).splitlines()[2])
  | x.y | 1 | 0 | replace_one | proved | 0.9 | 99 | 0.5 | 2 |
  """
  body = [_cells(row, nearest(row)) for row in rows]
  return markdown.table(_COLUMNS, body)

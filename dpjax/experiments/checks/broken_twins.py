"""`launch.audit --twins`: broken twins of every subject, played against the subject's own games.

The games are only worth something if they can find faults. Each row of the table is one subject
with one fault (`dpjax.auditing.games.twins`), and names the game that refuted it. Games are played
in their order, with few draws at first. The significance of 0.1 % is divided among all plays of a
subject's games, so at most one sound subject in a thousand would be called broken.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from dpjax.accounting import lower, upper
from dpjax.auditing.games import CONFIDENCE, Result, play, twins
from dpjax.experiments.checks import resumable
from dpjax.experiments.run import provenance, report, writers

RESULT = "twins.json"
CSV = "twins.csv"
# All games are played with the first number of draws, then with the next, until one game refutes.
DRAWS = (3_000, 12_000, 48_000)


@dataclasses.dataclass(frozen=True)
class TwinSettings:
  """Selection of the twins to play.

  Args:
    only: name of a package, of a subject, or package.subject; "" for all.
    seed: seed of all draws.
  """

  only: str = ""
  seed: int = 0

  def __post_init__(self) -> None:
    resumable.check_asked(self.only, self.seed)


def run(settings: TwinSettings, out: str | os.PathLike) -> list[dict[str, Any]]:
  """Plays the twins that have no row yet, writes all rows after each twin, and returns them.

  Raises:
    UserError: `out` holds twins of other settings or versions.
  """
  path = pathlib.Path(out)
  name_of = lambda row: f"{row['what']}, {row['plant']}"
  done = resumable.resumed(
    settings, path / RESULT, what="broken twins", holds="twins of", name_of=name_of
  )
  todo = {
    twin.name: functools.partial(attacked, twin, seed=settings.seed)
    for twin in twins.twins(settings.only)
  }
  write = functools.partial(_write, settings, path)
  return resumable.played(todo, done, write=write, label="twins")


def attacked(
  twin: twins.BrokenTwin,
  *,
  seed: int = 0,
  draws: Sequence[int] = DRAWS,
  sound: bool = False,
) -> dict[str, Any]:
  """Returns the row of one twin, with the first game that refutes it. If no game does, the row has
  the game with the largest ratio of lower bound to claim.

  Args:
    draws: numbers of draws. All games are played with the first number, then with the next. The
      significance is divided among all plays.
    sound: whether to play the same code without the fault, which must not be refuted.

  >>> attacked(twins.BrokenTwin("mechanisms", "Laplace", "noise"), draws=[900])["refuted"]
  True
  """
  started = time.perf_counter()
  games = twin.games(sound=sound)
  # A union bound over all plays: otherwise one of many plays could refute a sound twin by chance.
  confidence = 1 - (1 - CONFIDENCE) / (len(games) * len(draws))
  nearest: Result | None = None
  for turn, count in enumerate(draws):
    for game in games:
      results = play(game, num_draws=count, seed=seed + turn, confidence=confidence)
      shown = results if nearest is None else [*results, nearest]
      # A result that refutes comes first. Others are compared by their ratio of lower bound to
      # claim.
      nearest = max(
        shown, key=lambda r: (r.refuted, r.epsilon_lower / max(r.claim.epsilon, 1e-9))
      )
      if nearest.refuted:
        break
    if nearest is not None and nearest.refuted:
      break
  assert nearest is not None
  return {
    "what": f"{twin.package}.{twin.subject}",
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


def _write(settings: TwinSettings, path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  writers.write_json(
    path / RESULT,
    {
      **resumable.stated(settings),
      "device": provenance.device(),
      "confidence": CONFIDENCE,
      "missed": missed(rows),
      "not_planted": {
        f"{row}, {plant}": why for (row, plant), why in twins.NOT_PLANTED.items()
      },
      "rows": rows,
    },
  )
  cells = [{name: text(row[name]) for name, text in _COLUMNS.items()} for row in rows]
  report.write_csv(path / CSV, cells, header=list(_COLUMNS))


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

"""The audits and attacks that were made on a finished run, as a report tells them."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from dpjax.accounting.text import lower, percent, upper
from dpjax.auditing.lower_bounds import METHODS
from dpjax.experiments.board.document import Block, Paragraph, Table
from dpjax.experiments.kinds.attack.config import ATTACKED
from dpjax.experiments.run import finished, workdir, writers
from dpjax.experiments.run.finished import Finished
from dpjax.validate import UserError

NONE = (
  "No audit and no attack on this model was found, neither in its folder nor beside it. A proof "
  "does not need one. A claim without one is untested."
)
FOUND_LITTLE = "An attack that finds little proves nothing: a better one may come."


def attacks_on(run: Finished, more: Iterable[str | os.PathLike] = ()) -> list[Finished]:
  """Returns the finished attacks on a run's params.npz: those in folders beside the run, and more.

  An attack belongs to the run if it names the digest of the very file.

  Raises:
    UserError: a folder of `more` holds no finished attack on this run.
  """
  model = (run.result.get(workdir.FILES) or {}).get(workdir.PARAMS)
  found = dict[pathlib.Path, Finished]()
  for folder in more:
    path = pathlib.Path(folder)
    attack = finished.read(path, "attacks")
    if not attack.is_attack or model is None or attack.result.get(ATTACKED) != model:
      raise finished.odd(path, "must be an attack on this run", "attacks")
    found[path.resolve()] = attack
  beside: list[pathlib.Path] = []
  with contextlib.suppress(OSError):
    beside = sorted(run.path.resolve().parent.iterdir())
  for path in beside:
    # Whatever lies beside the run may be no run at all.
    with contextlib.suppress(UserError, OSError):
      if model is not None and (path / writers.RESULT).is_file() and path not in found:
        held: Any = writers.read_json(path / writers.RESULT)
        if isinstance(held, dict) and held.get(ATTACKED) == model:
          found[path] = finished.read(path)
  return [found[path] for path in sorted(found)]


def blocks(run: Finished, attacks: list[Finished]) -> list[Block]:
  """Returns what a report says of audits and attacks."""
  audit = run.result.get("audit")
  told: list[Block] = [] if audit is None else _of_audit(run.result, audit)
  if attacks:
    head = ("folder", "attack", "members found, of 100", "as if epsilon were", "verdict")
    told.append(
      Paragraph(
        "Members found: where 1 of 100 others is accused wrongly, by the best method."
      )
    )
    told.append(Table(head, [_row(attack) for attack in attacks]))
  return [*told, Paragraph(FOUND_LITTLE)] if told else [Paragraph(NONE)]


def _of_audit(result: Mapping[str, Any], audit: Mapping[str, Any]) -> list[Block]:
  claimed = audit.get("epsilon_claimed", result["epsilon"])
  stated = "" if claimed is None else f" the stated epsilon of {upper(claimed)}"
  if "bounds" in audit:
    return _of_several(result, audit, stated)
  indicative = METHODS[audit["method"]].indicative
  proof = audit["refuted"] and not str(audit["verdict"]).startswith("ALARM")
  word = "REFUTES" if proof else "raises an ALARM about" if audit["refuted"] else ""
  told = (
    f"An audit {word or 'does not refute'}{stated}." if stated else "A run was audited."
  )
  put = "clients" if "adversary_sees" in audit else "records"
  least = f"epsilon is at least {lower(audit['epsilon_audited_lower'])}"
  sure = (
    f"With {percent(audit['confidence'])} confidence, {least}."
    if not indicative
    else f"If {put} were independent, as in one training they are not, {least}: this is an "
    "indication, without confidence."
  )
  ceiling = audit.get("ceiling")
  most = (
    f" Perfect guesses would have shown {lower(ceiling['epsilon_lower'])}, so no larger epsilon "
    "could have been noticed."
    if ceiling
    else ""
  )
  return [
    Paragraph(
      f"{told} It put {audit.get('num_canaries', 'several')} made-up {put} into the training by "
      "tossing coins, and then guessed the coins from what the run released."
    ),
    Paragraph(f"{sure}{most}"),
  ]


def _of_several(
  result: Mapping[str, Any], audit: Mapping[str, Any], stated: str
) -> list[Block]:
  """Returns what a report says of the attacks of a relevance run, which each have a bound."""
  word = "REFUTE" if audit["refuted"] else "do not refute"
  told = f"Attacks {word}{stated}." if stated else "A run was attacked."
  if not audit.get("can_refute", True):
    told += " Perfect attacks of this kind could not have refuted it either."
  least = lower(result["epsilon_audited_lower"])
  rows = [
    [bound["what"], bound["target"], f"{lower(bound['epsilon_lower'])} or more"]
    for bound in audit["bounds"].values()
  ]
  return [
    Paragraph(
      f"{told} With {percent(audit['confidence'])} confidence, all bounds below hold, so the total "
      f"epsilon is at least {least}."
    ),
    Table(("attack", "on which epsilon", "epsilon is"), rows),
  ]


def _row(attack: Finished) -> list[str]:
  result = attack.result
  best = result.get("strongest") or {}
  verdicts = {method["verdict"] for method in (result.get("attacks") or {}).values()}
  bound = result.get("epsilon_lower_indicative")
  return [
    attack.path.name,
    f"{result['attack']}: {best.get('method', '')}".rstrip(": "),
    f"{100 * best['tpr']:.1f}" if best else "",
    "" if bound is None else f"{lower(bound)} or more",
    "; ".join(sorted(verdicts)),
  ]

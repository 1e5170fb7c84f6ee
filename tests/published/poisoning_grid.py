"""A grid of poisonings and defences in Python, as a table; `launch.attack` makes one of configs.

A defence FAILS if its accuracy falls or the attack's success rises beyond chance: the exact
interval with attackers does not overlap the one without attackers. Else the defence is not shown to
fail, which proves nothing. A `*` marks a cell with more attackers than the aggregator is made for:
there the aggregator guarantees nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax import markdown, validate
from dpjax.attacks.collusion import colluding
from dpjax.attacks.poisoning import (
  Poisoning,
  PoisoningOutcome,
  choose_attackers,
  measure_poisoning,
)
from dpjax.data import Dataset
from dpjax.federated import aggregators, described
from dpjax.federated.aggregation import Aggregator
from dpjax.metrics import Apply
from dpjax.plan import Plan
from dpjax.types import Params
from dpjax.validate import UserError


class Defence(NamedTuple):
  """An aggregator, and how many arbitrary clients of n it tolerates."""

  aggregator: Aggregator
  # Function from the number n of messages to the number of clients that are tolerated. None: the
  # aggregator bounds each message but ignores none, as a clipped mean does.
  tolerates: Callable[[int], int] | None


def breakdown_points(*, num_byzantine: int, trim: float) -> dict[str, Callable[[int], int]]:
  """Returns a function for each aggregator: how many arbitrary clients of n it tolerates.

  >>> points = breakdown_points(num_byzantine=2, trim=0.25)
  >>> {name: most(9) for name, most in points.items()}
  {'mean': 0, 'median': 4, 'trimmed_mean': 2, 'krum': 2, 'geometric_median': 4}
  """
  numbers = {"num_byzantine": num_byzantine, "trim": trim}
  return {
    name: functools.partial(row.tolerates, **_options(row, numbers))
    for name, row in described.aggregators().items()
  }


def _options(row: described.AggregatorFacts, numbers: dict[str, Any]) -> dict[str, Any]:
  """Returns the options of this aggregator: the given numbers, and defaults for the others."""
  return {name: numbers.get(name, usual) for name, usual in row.options.items()}


def defences(
  plan: Plan, *, num_byzantine: int, trim: float, num_selected: int | None = None
) -> dict[str, Defence]:
  """Returns the aggregators of `dpjax.federated` without privacy, for the cohorts of `plan`.

  Args:
    plan: a plan that guarantees no epsilon (noise_multiplier=0).
    num_byzantine: number f of arbitrary clients that Krum assumes.
    trim: share of the values that the trimmed mean cuts off at either end.
    num_selected: number of messages that multi-Krum selects, such as n - f; None: no multi-Krum.

  >>> from dpjax.sampling import PoissonSampler
  >>> plan = Plan(sampler=PoissonSampler(sampling_prob=1.0, capacity=9), noise_multiplier=0.0,
  ...   l2_clip_norm=1.0, normalize_by=9, num_steps=1, delta=1e-5)
  >>> rows = defences(plan, num_byzantine=2, trim=0.25, num_selected=7)
  >>> {name: defence.tolerates(9) for name, defence in rows.items()}
  {'mean': 0, 'median': 4, 'trimmed_mean': 2, 'krum': 2, 'multi_krum': 2, 'geometric_median': 4}
  """
  most = breakdown_points(num_byzantine=num_byzantine, trim=trim)
  numbers = {"num_byzantine": num_byzantine, "trim": trim}
  rows: dict[str, Defence] = {}
  for name, row in described.aggregators().items():
    rows[name] = Defence(row.make(**_options(row, numbers)), most[name])
    if name == "krum" and num_selected is not None:
      several = aggregators.krum(num_byzantine, num_selected=num_selected)
      rows["multi_krum"] = Defence(several, most[name])
  drawn = lambda row: row._replace(aggregator=row.aggregator.drawn_by(plan))
  return {name: drawn(row) for name, row in rows.items()}


class Cell(NamedTuple):
  """What one attack did to one defence."""

  attack: str
  defence: str
  num_clients: int
  outcome: PoisoningOutcome

  @property
  def line(self) -> str:
    one = self.outcome
    what = f"accuracy {one.accuracy.rate:.3f} ({one.clean_accuracy.rate:.3f} unattacked)"
    if one.success is not None and one.clean_success is not None:
      what += f", success {one.success.rate:.3f} ({one.clean_success.rate:.3f})"
    who = f"{one.num_attackers} of {self.num_clients} clients attack"
    return f"{self.defence} against {self.attack}: {one.verdict()}; {what}; {who}"


Train = Callable[[Aggregator, Poisoning, np.ndarray], Params]


def poisoning_grid(
  attacks: Mapping[str, Poisoning],
  against: Mapping[str, Defence],
  fractions: Sequence[float],
  *,
  train: Train,
  apply: Apply,
  test: Dataset,
  num_clients: int,
  seed: int,
  tell: Callable[[str], None] = lambda line: None,
) -> list[Cell]:
  """Runs every attack against every defence, at every fraction of attackers, and without attackers.

  Args:
    train: `(aggregator, attack, attackers) -> parameters`, as by `poisoned_training`. If attackers
      collude, the aggregator that it gets is already `colluding`.
    fractions: fractions of the clients that attack, each > 0. A fraction beyond what an
      aggregator tolerates runs, too, and its verdict says so.
    seed: seed of the choice of attackers.
    tell: function that is called with each verdict as soon as it is known.

  Raises UserError for nothing to run, or a fraction that rounds to no attacker.
  """
  several = {
    "attacks": attacks,
    "against": against,
    "fractions": validate.several(fractions=fractions),
  }
  for name, entries in several.items():
    if not entries:
      raise UserError("must hold at least one entry", field=name)
  groups = [choose_attackers(num_clients, share, seed=seed) for share in fractions]
  if not all(map(len, groups)):
    raise UserError(
      "rounds to no attacker in one place", field="fractions", value=tuple(fractions)
    )
  nobody = np.zeros(0, np.int64)
  outcomes = []
  for defence, (aggregator, tolerates) in against.items():
    # Without attackers all attacks are the same, so the first one stands for all.
    first = next(iter(attacks.values()))
    honest = train(colluding(aggregator, first), first, nobody)
    for name, attack in attacks.items():
      clean = measure_poisoning(apply, honest, attack, test)
      for attackers in groups:
        params = train(colluding(aggregator, attack), attack, attackers)
        measured = measure_poisoning(apply, params, attack, test)
        most = None if tolerates is None else tolerates(num_clients)
        outcome = PoisoningOutcome(len(attackers), most, *measured, *clean)
        outcomes.append(Cell(name, defence, num_clients, outcome))
        tell(outcomes[-1].line)
  return outcomes


def poisoning_table(outcomes: Sequence[Cell]) -> str:
  """Returns a Markdown table: a row for each attack and number of attackers, a column per defence.

  A cell is accuracy / success (success without attackers). FAILS marks an outcome that `fails`,
  and `*` marks more attackers than the aggregator is made for.
  """
  if not outcomes:
    raise UserError("must hold at least one", field="outcomes")
  columns = list(dict.fromkeys(cell.defence for cell in outcomes))
  rows: dict[tuple[str, str], dict[str, str]] = {}
  honest: dict[str, str] = {}
  for cell in outcomes:
    outcome = cell.outcome
    who = f"{outcome.num_attackers} of {cell.num_clients}"
    text = f"{outcome.accuracy.rate:.3f}"
    if outcome.success is not None and outcome.clean_success is not None:
      text += f" / {outcome.success.rate:.3f} ({outcome.clean_success.rate:.3f})"
    if outcome.fails:
      text += " FAILS"
    if outcome.beyond:
      text += "*"
    rows.setdefault((cell.attack, who), {})[cell.defence] = text
    honest[cell.defence] = f"{outcome.clean_accuracy.rate:.3f}"
  rows[("none", f"0 of {outcomes[0].num_clients}")] = honest
  lines = [[*key, *(row.get(name, "") for name in columns)] for key, row in rows.items()]
  return markdown.table(["attack", "attackers", *columns], lines)

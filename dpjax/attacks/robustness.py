"""Effects of poisoning on each aggregator: a grid of attacks and defences, as a table.

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

from dpjax import markdown, metrics, validate
from dpjax.attacks.collusion import colluding
from dpjax.attacks.poisoning import Poisoning, choose_attackers
from dpjax.attacks.roc import Counted, counted
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


class PoisoningOutcome(NamedTuple):
  """Result of one attack against one defence."""

  attack: str
  defence: str
  num_attackers: int
  num_clients: int
  tolerates: int | None  # attackers that the defence is made for; None as in `Defence`
  accuracy: Counted  # on the untouched test records
  success: Counted | None  # victims that are called what the attacker wants
  # Accuracy and success of this defence without attackers.
  clean_accuracy: Counted
  clean_success: Counted | None

  @property
  def beyond(self) -> bool:
    """Whether there are more attackers than the defence tolerates."""
    return self.tolerates is not None and self.num_attackers > self.tolerates

  @property
  def fails(self) -> bool:
    """Whether the attack had an effect that exceeds the uncertainty of the test records."""
    fell = self.accuracy.interval[1] < self.clean_accuracy.interval[0]
    if self.success is None or self.clean_success is None:
      return fell
    return fell or self.success.interval[0] > self.clean_success.interval[1]

  @property
  def verdict(self) -> str:
    """A line to print. It may say that a defence fails, but never that a defence holds."""
    word = "FAILS" if self.fails else "not shown to fail"
    what = f"accuracy {self.accuracy.rate:.3f} ({self.clean_accuracy.rate:.3f} unattacked)"
    if self.success is not None and self.clean_success is not None:
      what += f", success {self.success.rate:.3f} ({self.clean_success.rate:.3f})"
    who = f"{self.num_attackers} of {self.num_clients} clients attack"
    if self.beyond:
      who += f", beyond its breakdown point of {self.tolerates}"
    return f"{self.defence} against {self.attack}: {word}; {what}; {who}"


def measure_poisoning(
  apply: Apply, params: Params, attack: Poisoning, test: Dataset
) -> tuple[Counted, Counted | None]:
  """Returns (accuracy on the test records, success on the attack's victims among them).

  Success is None for an attack without victims.

  Raises UserError if there is no test record, or none that could be a victim.
  """
  right = lambda part: counted(
    round(metrics.accuracy(apply, params, part) * len(part)), len(part)
  )
  return right(test), None if attack.victims is None else right(attack.victims(test))


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
) -> list[PoisoningOutcome]:
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
        who = (name, defence, len(attackers), num_clients, most)
        outcomes.append(PoisoningOutcome(*who, *measured, *clean))
        tell(outcomes[-1].verdict)
  return outcomes


def poisoning_table(outcomes: Sequence[PoisoningOutcome]) -> str:
  """Returns a Markdown table: a row for each attack and number of attackers, a column per defence.

  A cell is accuracy / success (success without attackers). FAILS marks an outcome that `fails`,
  and `*` marks more attackers than the aggregator is made for.

  >>> ten = counted(10, 10)
  >>> who = ("flip", "mean", 2, 9, 0)  # 2 of 9 clients, where the mean stands up to none
  >>> print(poisoning_table([PoisoningOutcome(*who, ten, ten, ten, counted(0, 10))]))
  | attack | attackers | mean |
  | --- | --- | --- |
  | flip | 2 of 9 | 1.000 / 1.000 (0.000) FAILS* |
  | none | 0 of 9 | 1.000 |
  <BLANKLINE>
  """
  if not outcomes:
    raise UserError("must hold at least one", field="outcomes")
  columns = list(dict.fromkeys(outcome.defence for outcome in outcomes))
  rows: dict[tuple[str, str], dict[str, str]] = {}
  honest: dict[str, str] = {}
  for outcome in outcomes:
    who = f"{outcome.num_attackers} of {outcome.num_clients}"
    text = f"{outcome.accuracy.rate:.3f}"
    if outcome.success is not None and outcome.clean_success is not None:
      text += f" / {outcome.success.rate:.3f} ({outcome.clean_success.rate:.3f})"
    if outcome.fails:
      text += " FAILS"
    if outcome.beyond:
      text += "*"
    rows.setdefault((outcome.attack, who), {})[outcome.defence] = text
    honest[outcome.defence] = f"{outcome.clean_accuracy.rate:.3f}"
  rows[("none", f"0 of {outcomes[0].num_clients}")] = honest
  lines = [[*key, *(row.get(name, "") for name in columns)] for key, row in rows.items()]
  return markdown.table(["attack", "attackers", *columns], lines)

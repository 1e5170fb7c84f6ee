"""What several runs cost together: a guarantee for everything that they released.

A sum of epsilons overstates what runs on the same records cost. Their privacy losses compose to
less. The ledger in result.json has the event of every step that ran, so the losses are known. A run
whose epsilon does not follow from its ledger is added as it is stated: basic composition (Dwork and
Roth 2014, theorem 3.16). So is every run of a sweep. The result is also the cost of choosing the
best of the runs.
"""

from __future__ import annotations

import dataclasses
import decimal
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting as dpa

from dpjax import accounting, validate
from dpjax.accounting import overflow
from dpjax.accounting.event_kinds.elements import accountable
from dpjax.accounting.proved import ACCOUNTANTS
from dpjax.experiments.config import choices
from dpjax.experiments.kinds.federated.config import NATURAL
from dpjax.experiments.run import guarantee, writers
from dpjax.validate import UserError

Row = dict[str, Any]
_TOLD = 3  # largest number of runs that a message names


@dataclasses.dataclass(frozen=True)
class FinishedRun:
  """Guarantee of a finished run, with the event from which the guarantee follows.

  Args:
    name: folder of the run.
    epsilon, delta: guarantee that the run's result states.
    epsilon_kind: "proved" or "claimed".
    relation, unit: neighbouring relation, and what counts as one record: "example" or "user".
    unit_owns_records: whether a unit has several records, as a user has.
    population: text that names the data and how they form records; see `sweeps.cost.population`.
    failed_assumptions: assumptions of a claim that fail or cannot be checked.
    event: event of all steps that ran; None if the stated epsilon does not follow from the ledger.
    abort_prob: bound on the probability that the run aborts on a batch above the capacity.
    full_prob: bound on the probability that the other records fill a batch up to the capacity.
    noise_keys: fingerprints of the run's noise keys.
  """

  name: str
  epsilon: float
  delta: float
  epsilon_kind: str = "proved"
  relation: str = "add_or_remove_one"
  unit: str = "example"
  unit_owns_records: bool = False
  population: str = ""
  failed_assumptions: tuple[str, ...] = ()
  event: dpa.DpEvent | None = None
  abort_prob: float = 0.0
  full_prob: float = 0.0
  noise_keys: frozenset[str] = frozenset()


class Together(NamedTuple):
  """The guarantee of several runs: (epsilon, delta) for all that they released.

  (`sum_epsilon`, `sum_delta`) is the guarantee by basic composition. `added` names the runs whose
  stated epsilon and delta were added. `accountant` composed the other runs; "" if there are none.
  """

  epsilon: float
  delta: float
  sum_epsilon: float
  sum_delta: float
  epsilon_kind: str
  relation: str
  unit: str
  accountant: str
  added: tuple[str, ...]
  failed_assumptions: tuple[str, ...]


def together(runs: Sequence[FinishedRun], *, delta: float | None = None) -> Together:
  """Returns the guarantee of everything that several runs released.

  Guarantee: all releases together are (epsilon, delta)-private for a record in the data of each
  run. It holds if no run's config was decided by what another one released, and no two runs share
  noise. The runs may overlap in time: privacy losses of fixed mechanisms compose concurrently
  (Vadhan and Zhang 2023, arXiv:2207.08335). If a release did decide a later config, quote
  `sum_epsilon` and `sum_delta`: basic composition also holds for epsilons that are chosen on the
  way (Rogers et al. 2016, arXiv:1605.08294).

  Args:
    delta: delta of all runs together. None takes the largest delta of the composed runs, plus the
      deltas of the added runs; or the sum of all deltas, if fewer than two runs are composed, or
      if the smaller delta does not cover the aborts, or gives more than the sum of epsilons.

  Raises:
    UserError: no run; runs that share a noise key, whose relations, units or users differ, or whose
      deltas sum to 1 or more; a delta outside (0, 1), or that the added runs or aborts use up.

  >>> loss = lambda multiplier: accounting.compose(accounting.gaussian_event(multiplier), 1)
  >>> one = FinishedRun("a", 1.9931, 1e-5, event=loss(2.0), noise_keys=frozenset({"a"}))
  >>> both = together([one, dataclasses.replace(one, name="b", noise_keys=frozenset({"b"}))])
  >>> round(both.epsilon, 2), round(both.sum_epsilon, 2), both.sum_delta
  (2.94, 3.99, 2e-05)
  """
  _check(runs)
  if delta is not None:
    validate.open_unit(delta=delta)
  epsilon, whole, accountant, added = _epsilon(runs, delta)
  if whole >= 1:
    raise UserError(
      "is the sum of their deltas, and promises nothing; name fewer runs, or give --delta",
      field="delta",
      value=whole,
    )
  kinds = {run.epsilon_kind for run in runs}
  return Together(
    epsilon=epsilon,
    delta=whole,
    sum_epsilon=math.fsum(run.epsilon for run in runs),
    sum_delta=_sum_of_deltas(runs),
    epsilon_kind="claimed" if "claimed" in kinds else "proved",
    relation=runs[0].relation,
    unit=runs[0].unit,
    accountant=accountant,
    added=tuple(run.name for run in added),
    failed_assumptions=tuple(
      dict.fromkeys(text for run in runs for text in run.failed_assumptions)
    ),
  )


def _sum_of_deltas(runs: Iterable[FinishedRun]) -> float:
  """Returns the sum of deltas as they are written, so that three of 1e-5 are 3e-5."""
  return float(sum(decimal.Decimal(repr(run.delta)) for run in runs))


def _check(runs: Sequence[FinishedRun]) -> None:
  """Raises UserError for runs that have no common guarantee."""
  if not runs:
    raise UserError("must name at least one finished run", field="runs", value=[])
  without = [run.name for run in runs if run.epsilon_kind not in ("proved", "claimed")]
  if without:
    raise UserError(f"{without[0]} has no epsilon for what it ran", field="runs")
  for what, of in (("neighbouring relations", "relation"), ("units", "unit")):
    held = {getattr(run, of): run.name for run in runs}
    if len(held) > 1:
      shown = ", ".join(f"{name!r} of {at}" for name, at in sorted(held.items())[:_TOLD])
      raise UserError(f"have different {what}, so no common epsilon: {shown}", field="runs")
  owned = any(run.unit_owns_records for run in runs)
  if owned and len({run.population for run in runs}) > 1:
    raise UserError(
      f"deal records differently, so a {runs[0].unit} of one run is not that of another: no common "
      "epsilon",
      field="runs",
    )
  owners: dict[str, str] = {}
  for run in runs:
    for key in run.noise_keys:
      if key in owners:
        raise UserError(
          f"{owners[key]} and {run.name} have one noise key, as a run and its copy or two with one "
          "noise_seed have, so nothing is proved of both; train one of them again in a new folder",
          field="runs",
        )
      owners[key] = run.name


def _epsilon(
  runs: Sequence[FinishedRun], delta: float | None
) -> tuple[float, float, str, Sequence[FinishedRun]]:
  """Returns (epsilon, delta, accountant, runs that are added as they are stated)."""
  everything = _sum_of_deltas(runs)
  summed = math.fsum(run.epsilon for run in runs)
  for accountant in ACCOUNTANTS:
    composed, stated = _composable(runs, accountant)
    # A single run costs what it states, although its ledger may show a little less. Only at another
    # delta the ledger is needed.
    if len(composed) < (2 if delta is None else 1):
      continue
    spent = _sum_of_deltas(stated)
    # With little noise aborts may need more than the largest delta.
    wholes = [spent + max(run.delta for run in composed), everything]
    for whole in wholes if delta is None else [delta]:
      epsilon = _composed_epsilon(composed, whole - spent, accountant)
      if epsilon is None:
        continue
      total = epsilon + math.fsum(run.epsilon for run in stated)
      # The sum of epsilons holds at the sum of deltas. So it is no alternative if a smaller delta
      # was asked for.
      if total <= summed or (delta is not None and whole < everything):
        return total, whole, accountant, stated
  whole = everything if delta is None else delta
  if whole < everything:
    raise UserError(
      "is too small for what is added as stated, or for aborts on large batches; the sum of the "
      f"runs' own is {everything:.6g}",
      field="delta",
      value=whole,
    )
  return summed, whole, "", runs


def _events(runs: Iterable[FinishedRun]) -> list[dpa.DpEvent]:
  return [run.event for run in runs if run.event is not None]


def _composable(
  runs: Sequence[FinishedRun], accountant: str
) -> tuple[list[FinishedRun], list[FinishedRun]]:
  """Returns (runs that the accountant composes with each other, all other runs).

  A run is composed if the accountant knows its event together with the events kept before it."""
  kept: list[FinishedRun] = []
  others: list[FinishedRun] = []
  for run in runs:
    known = run.event is not None
    try:
      if known:
        accountable(dpa.ComposedDpEvent(_events([*kept, run])), run.relation, accountant)
    except UserError:
      known = False
    (kept if known else others).append(run)
  return kept, others


def _composed_epsilon(
  runs: Sequence[FinishedRun], delta: float, accountant: str
) -> float | None:
  """Returns epsilon at `delta`, with aborts accounted for; None if aborts cost too much, or if the
  accountant knows no finite epsilon at so small a delta."""
  event = dpa.ComposedDpEvent(_events(runs))

  def at(left: float) -> float:
    return accounting.epsilon(
      event, delta=left, neighboring_relation=runs[0].relation, accountant=accountant
    )

  if delta <= 0:
    return None
  try:
    asides = _asides(runs, at, delta)
    found = min((at(delta - aside) for aside in asides if aside < delta), default=None)
  except UserError:
    return None
  return found if found is not None and math.isfinite(found) else None


def _asides(
  runs: Sequence[FinishedRun], at: Callable[[float], float], delta: float
) -> Iterator[float]:
  """Yields parts of delta, each of which is enough for all aborts."""
  aborts = math.fsum(run.abort_prob for run in runs)
  if not aborts:
    yield 0.0
    return
  # An abort costs more at a larger epsilon, so the sum of what single runs reserve is not enough.
  ladder = overflow.reserve_for_aborts(
    at,
    delta=delta,
    log_abort_prob=math.log(aborts),
    least=overflow.OVERFLOW_SHARE * delta,
  )
  if ladder is not None:
    yield ladder
  # If the other records fill no batch, no run aborts, with or without the protected record. The
  # chance of a full batch does not depend on this record. So it is added to delta once, at any
  # epsilon.
  yield math.fsum(run.full_prob for run in runs)


def statement(runs: Sequence[FinishedRun], total: Together) -> str:
  """Returns in words what is guaranteed for all runs together, and under which conditions."""
  many = len(runs) > 1
  failed = guarantee.names_of(total.failed_assumptions)
  # Basic composition also holds if a release decided a later config.
  by = ", if no run's config was decided by what another one released"
  by = (by if total.accountant else ", by basic composition") if many else ""
  parts = [
    f"{f'All {len(runs)} runs together are' if many else 'The run is'} (epsilon = "
    f"{accounting.upper(total.epsilon)}, delta = {accounting.upper(total.delta)})-private "
    f"({total.epsilon_kind}, {total.relation}, per {total.unit}){by}.",
  ]
  if many and total.accountant:
    parts.append(
      f"If one was, quote the sum: epsilon = {accounting.upper(total.sum_epsilon)}, delta = "
      f"{accounting.upper(total.sum_delta)}."
    )
  if failed:
    parts.append(f"Nothing is proved; fails or is assumed: {failed}.")
  if len({run.population for run in runs}) > 1:
    parts.append(
      "They read different data, which may overlap: this is the bound for somebody with one "
      "record in each. It does not cover a record that another run tests on, or has in its "
      "public pool."
    )
  if total.accountant and total.added:
    shown = ", ".join(total.added[:_TOLD]) + (", ..." if len(total.added) > _TOLD else "")
    parts.append(f"Added as stated, not composed: {shown}.")
  parts.append(
    "Each run's own privacy_statement says against whom, and what is not covered: values named "
    "not_private, test data, audits and diagnostics."
  )
  if many:
    parts.append(
      "Runs that did not finish, or are not named, are not in it: release nothing of them."
    )
  return " ".join(parts)


def runs_of(rows: Iterable[Row]) -> list[FinishedRun]:
  """Returns the guarantees of the finished runs of a sweep's rows. A run that has finished counts,
  also if its row says that it failed afterwards: what it trained is on the disk."""
  runs = []
  for row in rows:
    if row["status"] != "done" and "epsilon_kind" not in row:
      continue
    failed = tuple(row.get("failed_assumptions") or ())
    runs.append(
      FinishedRun(
        name=str(row.get("name", "")),
        epsilon=writers.number(row["epsilon"]),
        delta=row["delta"] or 0.0,
        epsilon_kind=row["epsilon_kind"],
        relation=row["neighboring_relation"],
        unit=row["unit"],
        unit_owns_records=bool(row.get("unit_owns_records")),
        population=row.get("population") or "",
        failed_assumptions=failed,
        # Runs of one seed and one noise_seed draw the same noise, whatever their settings are.
        noise_keys=frozenset({guarantee.REPEATED} & {*failed}),
      )
    )
  return runs


def charge(rows: Iterable[Row]) -> dict[str, Any]:
  """Returns upper bounds on epsilon and delta of releasing all finished runs of a sweep, in a dict.
  They are None if no run has finished, or if the runs have no common guarantee (`together`).

  >>> run = {"status": "done", "epsilon": 1.0, "delta": 0.25, "epsilon_kind": "proved",
  ...        "neighboring_relation": "add_or_remove_one", "unit": "example"}
  >>> total = charge([run, run, {"status": "failed"}])
  >>> total["runs"], total["epsilon"], total["delta"], total["epsilon_kind"]
  (2, 2.0, 0.5, 'proved')
  """
  runs = runs_of(rows)
  try:
    total = together(runs)
  except UserError:
    return {"runs": len(runs), "epsilon": None, "delta": None, "epsilon_kind": "none"}
  return {
    "runs": len(runs),
    "epsilon": total.epsilon,
    "delta": total.delta,
    "epsilon_kind": total.epsilon_kind,
    "neighboring_relation": total.relation,
    "unit": total.unit,
    "failed_assumptions": list(total.failed_assumptions),
  }


def statement_of_sweep(rows: Iterable[Row], others: int = 0) -> str:
  """Explains what the epsilons of a sweep guarantee, and what they do not guarantee.

  Args:
    rows: rows of `engine.run`.
    others: number of finished runs in the same folder that are not part of the sweep any more.
  """
  runs = runs_of(rows)
  text = (
    f"Each epsilon holds for its own run alone. Picking the best of these {len(runs)} "
    "runs, or reporting them side by side, is itself a query on the private data. "
  )
  try:
    text += statement(runs, together(runs))
  except UserError as error:
    text += f"For all of them together no finite epsilon is known: {error.must}."
  if others:
    text += (
      f" The folder holds {others} further finished runs of another grid, also left out."
    )
  return text


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

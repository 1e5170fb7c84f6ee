"""The cost of several finished runs together, from their folders alone.

A sum of epsilons overstates what runs on the same records cost. Their privacy losses compose to
less. The ledger in result.json has the event of every step that ran, so the losses are known. A run
whose epsilon does not follow from its ledger is added as it is stated: basic composition (Dwork and
Roth 2014, theorem 3.16). The result is also the cost of choosing the best of the runs.
"""

from __future__ import annotations

import dataclasses
import decimal
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dp_accounting as dpa

from dpjax import accounting, validate
from dpjax.accounting import overflow
from dpjax.accounting.event_kinds.elements import accountable, mechanism_of, merged_parts
from dpjax.accounting.proved import ACCOUNTANTS, RELATIONS
from dpjax.experiments.run import finished, guarantee, writers
from dpjax.experiments.run.finished import odd
from dpjax.experiments.sweeps import cost
from dpjax.validate import UserError

# Relative difference that other versions of NumPy or SciPy may make to the epsilon of a ledger.
_ROUNDING = 1e-6
_TOLD = 3  # largest number of folders that a message names
# Largest number of steps of a ledger that is composed, which takes minutes. A longer run is added
# as it is stated.
_MOST_STEPS = 10_000_000


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


def read(folders: Iterable[str]) -> list[FinishedRun]:
  """Reads finished runs of any kind from their folders.

  Args:
    folders: folders of runs, or of sweeps, whose finished runs all count.

  Raises:
    UserError: no such folder, no finished run in it, or a folder named twice; a result of an
      attack, without epsilon or of another config.json; an edited ledger.
  """
  paths: dict[pathlib.Path, str] = {}
  for folder in folders:
    for path in _runs_in(folder):
      where = path.resolve()
      if where in paths:
        raise UserError("is named twice", field="runs", value=str(path))
      paths[where] = str(path)
  return [_read(pathlib.Path(path)) for path in paths.values()]


def _runs_in(folder: str) -> list[pathlib.Path]:
  path = pathlib.Path(folder)
  # Path("") would be the current folder.
  if not folder or not path.is_dir():
    raise UserError(
      "must be folders of finished runs; there is none", field="runs", value=folder
    )
  if (path / writers.RESULT).exists():
    return [path]
  points = sorted((path / "points").glob(f"*/{writers.RESULT}"))
  if not points:
    raise UserError(
      f"holds no finished run: there is no {writers.RESULT}, nor one in points/",
      field="runs",
      value=folder,
    )
  return [point.parent for point in points]


def _read(path: pathlib.Path) -> FinishedRun:
  run = finished.read(path)
  if run.is_attack:
    raise odd(
      path,
      "is an attack: its epsilon is that of the attacked run, and what it shows has none",
    )
  with finished.as_runs_write(path):
    return _understand(*run)


def _understand(
  path: pathlib.Path, config: dict[str, Any], result: dict[str, Any]
) -> FinishedRun:
  kind = result.get("epsilon_kind")
  if kind not in ("proved", "claimed"):
    raise odd(path, f"has no epsilon for what it ran (epsilon_kind={kind!r:.20})")
  delta = _number(path, result, "delta")
  if delta >= 1:
    raise odd(path, f"has delta={accounting.upper(delta)}, which promises nothing")
  relation: Any = result.get("neighboring_relation")
  if relation not in RELATIONS:
    raise odd(path, f"has no neighbouring relation ({relation!r:.30})")
  data = config.get("data")
  if not isinstance(data, dict):
    # Some kinds of run have no section `data` in their config. Their result names the data set.
    data = {
      "name": result.get("dataset"),
      "data_dir": config.get("data_dir"),
      "limit": None,
    }
  stated = FinishedRun(
    name=str(path),
    epsilon=_number(path, result, "epsilon"),
    delta=delta,
    epsilon_kind=kind,
    relation=relation,
    unit=_printable(result.get("unit")),
    unit_owns_records=bool(result.get("unit_owns_records")),
    population=cost.population_of({**config, "data": data}),
    failed_assumptions=tuple(map(_printable, result.get("failed_assumptions") or ())),
  )
  return _with_ledger(path, stated, result)


def _printable(value: Any) -> str:
  # JSON may hold half of a pair of surrogates, which no terminal prints.
  return str(value).encode(errors="replace").decode()


def _number(path: pathlib.Path, result: Mapping[str, Any], name: str) -> float:
  value: Any = result.get(name)
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not is_number or not 0 <= value < math.inf:
    raise odd(path, f"has {name}={value!r:.40}, which must be finite and >= 0")
  return float(value)


def _with_ledger(
  path: pathlib.Path, stated: FinishedRun, result: Mapping[str, Any]
) -> FinishedRun:
  """Returns `stated` with the noise keys of its ledger, and with the event of the steps that ran if
  the stated epsilon follows from this event."""
  held = result.get("ledger")
  if not isinstance(held, dict) or not stated.delta:
    return stated
  try:
    ledger = accounting.Ledger.from_json(held)
    relations = {charge.neighboring_relation for charge in ledger.charges} - {""}
  except UserError as error:
    raise odd(path, f"its ledger cannot be read ({error!s:.80})") from error
  if relations - {stated.relation}:
    raise odd(path, "its ledger has another neighbouring relation than its result")
  by: Any = result.get("accountant")
  keys = frozenset(charge.noise_key_id for charge in ledger.charges)
  known = dataclasses.replace(stated, noise_keys=keys)
  if by not in ACCOUNTANTS or not 0 < ledger.num_steps <= _MOST_STEPS:
    return known
  left = guarantee.delta_of_ledger(result)
  left = _number(path, {"accounted_delta": left}, "accounted_delta")
  if not 0 < left <= stated.delta:
    return known
  ran = ledger.epsilon(left, neighboring_relation=stated.relation, accountant=by)
  if not math.isclose(ran, stated.epsilon, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
    return known
  # The rest of delta is reserved for aborts. They cost (1 + e^epsilon) times their probability;
  # see `accounting.overflow`.
  abort_prob = (stated.delta - left) / (1 + math.exp(min(stated.epsilon, 700.0)))
  event = ledger.event()
  full_prob = _full_prob(event, abort_prob, num_steps=ledger.num_steps)
  return dataclasses.replace(known, event=event, abort_prob=abort_prob, full_prob=full_prob)


def _full_prob(event: dpa.DpEvent, abort_prob: float, *, num_steps: int) -> float:
  """Returns a bound on the chance that the other records fill a batch: 0 without aborts, 1 if no
  bound is known.

  One more record is in a full batch with the sampling probability q, independently of the others,
  and then the run aborts. So the chance of a full batch is at most abort_prob / q.
  """
  if not abort_prob:
    return 0.0
  sampled = [
    (bare, times)
    for part, times in merged_parts(event).items()
    if isinstance(bare := mechanism_of(part), dpa.PoissonSampledDpEvent)
  ]
  # Every step must be Poisson-sampled. All other parts of the event are then releases without
  # batches.
  if sum(times for _, times in sampled) < num_steps:
    return 1.0
  return min(1.0, abort_prob / min(part.sampling_probability for part, _ in sampled))


def _check(runs: Sequence[FinishedRun]) -> None:
  """Raises UserError for runs that have no common guarantee."""
  if not runs:
    raise UserError("must name at least one finished run", field="runs", value=[])
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
  parts = [
    f"{f'All {len(runs)} runs together are' if many else 'The run is'} (epsilon = "
    f"{accounting.upper(total.epsilon)}, delta = {accounting.upper(total.delta)})-private "
    f"({total.epsilon_kind}, {total.relation}, per {total.unit})"
    + (", if no run's config was decided by what another one released." if many else "."),
  ]
  if many:
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
  if many and total.added:
    shown = ", ".join(total.added[:_TOLD]) + (", ..." if len(total.added) > _TOLD else "")
    parts.append(f"Added as stated, not composed: {shown}.")
  parts.append(
    "Each run's own privacy_statement says against whom, and what is not covered: values named "
    "not_private, test data, audits and diagnostics."
  )
  if many:
    parts.append("Runs that did not finish, or are not named, are not in it.")
  return " ".join(parts)

"""Finished runs by their folders, with the events of their ledgers: for `launch.account --runs`."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import dp_accounting as dpa

from dpjax import accounting
from dpjax.accounting.event_kinds.elements import mechanism_of, merged_parts
from dpjax.accounting.proved import ACCOUNTANTS, RELATIONS
from dpjax.experiments.run import finished, guarantee, writers
from dpjax.experiments.run.finished import odd
from dpjax.experiments.sweeps import cost
from dpjax.experiments.sweeps.cost import FinishedRun
from dpjax.validate import UserError

# Relative difference that other versions of NumPy or SciPy may make to the epsilon of a ledger.
_ROUNDING = 1e-6
# Largest number of steps of a ledger that is composed, which takes minutes. A longer run is added
# as it is stated.
_MOST_STEPS = 10_000_000


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

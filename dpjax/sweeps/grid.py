"""A sweep: one training run per point of a grid and per seed, a curve, and what it costs.

A sweep can be killed at any moment and started again: finished points are kept, the
interrupted one resumes, and the curve is redrawn after each. The base is a central run
(`TrainConfig`) or a federated one (`FedConfig`).

The runs of one sweep do not share randomness, though they may share a seed: every run
derives its noise and batches from its whole config and its data (`build.streams`). What they
cost together is their sum, on whichever data they ran: see `charge`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dpjax import validate
from dpjax.accounting import by_name, upper
from dpjax.runs import bounds, fields, provenance, writers
from dpjax.runs import workdir as owner
from dpjax.runs.central.config import TrainConfig
from dpjax.runs.federated.config import FedConfig
from dpjax.sweeps import curve, table, unused
from dpjax.validate import UserError

Row = dict[str, Any]
Config = TrainConfig | FedConfig
TrainFn = Callable[..., Row]  # (config, workdir, *, data) -> the content of result.json
LoadFn = Callable[[Any], Any]  # (config) -> (train, test)
# Kept of a federated result, beside RESULT_KEYS.
_FEDERATED_KEYS = (
  "rounds_to_accuracy",
  "num_clients",
  "clients_per_round",
  "heterogeneity",
  "not_private/heterogeneity",
)


@dataclasses.dataclass
class SelectionConfig:
  """Private selection in place of a whole sweep; see `sweeps/tuning.py`."""

  enabled: bool = False
  mean_trials: float = 10.0  # mean of the random number of runs
  shape: float = 1.0  # of its law: 1 geometric, 0 logarithmic, else neg. binomial
  better: str = "max"  # of `y`: max | min


@dataclasses.dataclass
class SweepConfig:
  """A whole sweep: every combination of the grid's values, once per seed.

  Fields are dotted names of the base's type (a TrainConfig, or a FedConfig for runs over
  clients), such as "privacy.epsilon". `x` and `series` are such names or keys of a result;
  `y` is a key of a result. A reference is (label, x, accuracy) of a published result, drawn
  beside the curve.

  A variant is a name and the fields that it sets together, such as a method with the
  learning rate that suits it; the whole grid is run for each. series="variant" draws one
  line for each.
  """

  base: TrainConfig | FedConfig = dataclasses.field(default_factory=TrainConfig)
  grid: dict[str, list] = dataclasses.field(default_factory=dict)
  variants: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
  references: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
  x: str = "privacy.epsilon"
  y: str = "test_accuracy"
  series: str | None = None  # one line per value of this field
  title: str = ""
  selection: SelectionConfig = dataclasses.field(default_factory=SelectionConfig)


class Point(NamedTuple):
  """One run of a sweep."""

  name: str  # folder name: readable, unique, the same in every process
  config: Any  # a Config
  overrides: dict[str, Any]  # dotted field -> value, and "seed" -> the sweep's seed


def points(config: SweepConfig) -> list[Point]:
  """The runs of a sweep, in grid order, variants outermost and seeds innermost.

  Raises:
    UserError: empty grid, unknown field, ill-typed or repeated value, repeated seed; a
      field that a run, or all of them, would ignore.

  >>> sweep = SweepConfig(grid={"privacy.epsilon": [1, 2]}, seeds=[0, 1])
  >>> [point.name[:16] for point in points(sweep)][:3]
  ['epsilon=1_seed=0', 'epsilon=1_seed=1', 'epsilon=2_seed=0']
  """
  _check(config)
  grid = {path: list(values) for path, values in config.grid.items()}
  axes = [[(path, value) for value in values] for path, values in grid.items()]
  axes.append([("seed", seed) for seed in config.seeds])
  count = math.prod(map(len, axes)) * max(1, len(config.variants))
  if count > bounds.MOST_RUNS:
    raise UserError(f"grid: has {count} runs; must be at most {bounds.MOST_RUNS}")
  chosen = [dict(choice) for choice in itertools.product(*axes)]
  bases = {
    name: _replaced(config.base, fixed, f"variants[{name!r}]")
    for name, fixed in config.variants.items()
  } or {"": config.base}
  found = [_point(base, c, name) for name, base in bases.items() for c in chosen]
  unused.refuse(config, found)
  return found


def run_sweep(
  config: SweepConfig,
  workdir: str | os.PathLike,
  train_fn: TrainFn,
  load_fn: LoadFn | None = None,
) -> list[Row]:
  """Runs what is left of a sweep; after each run writes sweep.json, curve.csv, curve.png.

  Args:
    config: the sweep.
    workdir: each run has its folder in `workdir`/points/.
    train_fn: `train(config, workdir, *, data=None)`, which resumes by itself and returns
      the content of result.json.
    load_fn: loads the data of a config; called once for all runs that share data and
      model (the model may choose the features). None: the runs load their own.

  Also written: table.md, the same numbers for a person.

  Returns:
    One row per point, in the order of `points`: name, status ("done" or "failed"), error,
    the point's fields, and the keys of its result.

  Raises:
    UserError: a fault of the sweep itself, before anything runs. A UserError of one run is
      recorded in its row, and the sweep goes on. Another process at work in the folder.
  """
  workdir, found = pathlib.Path(workdir), points(config)
  _check_positions(config, found)
  workdir.mkdir(parents=True, exist_ok=True)
  with writers.alone_in(workdir):
    return _run_all(config, workdir, found, train_fn, load_fn)


def _run_all(
  config: SweepConfig,
  workdir: pathlib.Path,
  found: list[Point],
  train_fn: TrainFn,
  load_fn: LoadFn | None,
) -> list[Row]:
  rows: dict[str, Row] = {}
  load = LastData(load_fn)
  for count, point in enumerate(_grouped(found), start=1):
    rows[point.name] = _run(config, point, workdir / "points" / point.name, train_fn, load)
    print(f"[{count}/{len(found)}] {_told(rows[point.name], config.y)}", flush=True)
    _save(config, workdir, [rows[p.name] for p in found if p.name in rows], found)
  print(writers.read_json(workdir / "sweep.json")["statement"], flush=True)
  return [rows[point.name] for point in found]


def charge(rows: list[Row]) -> dict[str, Any]:
  """An upper bound on what the release of all finished runs together reveals.

  Basic composition (Dwork and Roth 2014, theorem 3.16): independent runs that are
  (epsilon_i, delta_i) each are (sum epsilon_i, sum delta_i) together, and so is any choice
  among them. It holds for runs with independent randomness, one neighbouring relation and
  one unit; otherwise, and where a run promises nothing (or only for a larger deployment:
  "simulated"), epsilon and delta are None.

  Runs on different data are summed too, as for somebody who has one record in each data set:
  that no record is in two of them is never assumed. Users whose records are dealt anew for
  each run have no such sum: what one run hides as one user belongs to many users of another.
  There epsilon and delta are None.

  >>> run = {"status": "done", "epsilon": 1.0, "delta": 0.25, "epsilon_kind": "proved",
  ...        "neighboring_relation": "add_or_remove_one", "unit": "example"}
  >>> total = charge([run, run, {"status": "failed"}])
  >>> total["runs"], total["epsilon"], total["delta"], total["epsilon_kind"]
  (2, 2.0, 0.5, 'proved')
  """
  done = [row for row in rows if row["status"] == "done"]
  kinds = {row["epsilon_kind"] for row in done}
  meanings = {(row["neighboring_relation"], row["unit"]) for row in done}
  dealt = len(_populations(done)) > 1 and any(row["unit"] == "user" for row in done)
  if not done or kinds & {"none", "simulated"} or len(meanings) > 1 or dealt:
    return {"runs": len(done), "epsilon": None, "delta": None, "epsilon_kind": "none"}
  relation, unit = meanings.pop()
  return {
    "runs": len(done),
    "epsilon": math.fsum(row["epsilon"] for row in done),
    "delta": math.fsum(row["delta"] for row in done),
    "epsilon_kind": "claimed" if "claimed" in kinds else "proved",
    "neighboring_relation": relation,
    "unit": unit,
  }


def _populations(rows: list[Row]) -> set[str | None]:
  return {row.get("population") for row in rows}


def _population(config: Any) -> str:
  """Whose data a run is on, and for a federated one what makes them one user; where two are
  equal, so are the units that are hidden."""
  held = {name: getattr(config.data, name) for name in ("name", "data_dir", "limit")}
  part = getattr(config, "partition", None)
  if part is not None:  # roles are the same users, however many of them are left out
    natural = part.name == "shakespeare"
    held["partition"] = part.name if natural else dataclasses.asdict(part)
  return json.dumps(writers.plain(held))


def statement(rows: list[Row], others: int = 0) -> str:
  """What the epsilons of a sweep do and do not promise, for a person to read.

  Args:
    rows: of `run_sweep`.
    others: finished runs in the same folder that are not part of the sweep any more.
  """
  total = charge(rows)
  text = (
    f"Each epsilon holds for its own run alone. Picking the best of these {total['runs']} "
    "runs, or reporting them side by side, is itself a query on the private data. "
    f"{_bound(total)}{_overlap(rows, total)} Unfinished and failed runs are not in it: "
    "release nothing of them."
  )
  if others:
    text += (
      f" The folder holds {others} further finished runs of another grid, also left out."
    )
  return text


def _bound(total: dict[str, Any]) -> str:
  if total["epsilon"] is None:
    return (
      "For all of them together no finite epsilon is known: none has finished, a run "
      "promises none, their neighbouring relations or units differ, or the records of one "
      "user are dealt to other users in another run."
    )
  epsilon, delta = upper(total["epsilon"]), upper(total["delta"])
  return (
    f"All of them together are at most (epsilon = {epsilon}, delta = {delta})-private by "
    f"basic composition ({total['epsilon_kind']}, {total['neighboring_relation']}, per "
    f"{total['unit']})."
  )


def _overlap(rows: list[Row], total: dict[str, Any]) -> str:
  count = len(_populations([row for row in rows if row["status"] == "done"]))
  if total["epsilon"] is None or count < 2:
    return ""
  return (
    f" They are on {count} data sets, which may overlap: that is the bound for somebody with "
    "one record in each of them."
  )


def _check(config: SweepConfig) -> None:
  bounds.typed(config)
  _check_selection(config)
  if not (config.grid or config.variants):
    raise UserError("grid={}: must name at least one field, or give variants")
  _check_variants(config)
  for path, values in config.grid.items():
    if not isinstance(values, (list, tuple)) or not values:
      raise UserError(f"grid[{path!r}]={values!r}: must be a list of at least one value")
    _unique(values, f"grid[{path!r}]")
  if "seed" in config.grid:
    raise UserError("grid['seed']: give the seeds as seeds=[...]")
  if not config.seeds:
    raise UserError("seeds=[]: must hold at least one seed")
  for seed in config.seeds:
    validate.integer_at_least(0, seeds=seed)
  _unique(config.seeds, "seeds")
  for path in _config_axes(config):
    fields.get(config.base, path, name="x" if path == config.x else "series")


def _check_selection(config: SweepConfig) -> None:
  law = config.selection
  validate.positive(**{"selection.mean_trials": law.mean_trials})
  if not 1 <= law.mean_trials <= bounds.MOST_RUNS:
    raise UserError(
      f"selection.mean_trials={law.mean_trials!r}: must be in [1, {bounds.MOST_RUNS}]"
    )
  validate.non_negative(**{"selection.shape": law.shape})
  validate.one_of(("max", "min"), **{"selection.better": law.better})
  if config.selection.enabled and not isinstance(config.base, TrainConfig):
    raise UserError(
      "selection.enabled=True: base must be a TrainConfig; a private selection among "
      "federated runs is not charged here"
    )


def _check_variants(config: SweepConfig) -> None:
  for name, fixed in config.variants.items():
    twice = [path for path in fixed if path in config.grid or path == "seed"]
    if twice:
      raise UserError(f"variants[{name!r}]: sets {twice[0]!r}, which the grid varies")
  if config.series == "variant" and not config.variants:
    raise UserError("series='variant': there are no variants")


def _check_positions(config: SweepConfig, found: list[Point]) -> None:
  """Raises UserError for an x that is known beforehand to place a run nowhere."""
  if config.x == "variant":
    raise UserError(
      "x='variant': must be a number; series='variant' draws one line for each"
    )
  for point in found if config.x in _config_axes(config) else ():
    value = fields.get(point.config, config.x)
    private = point.config.privacy.method != "none"  # others are drawn without a position
    if (value is not None and not isinstance(value, str | bool)) or not private:
      continue
    raise UserError(
      f"x={config.x!r}: must be a number in every run; it is {value!r} in {point.name}"
    )


def _unique(values: Any, name: str) -> None:
  repeated = [value for index, value in enumerate(values) if value in values[:index]]
  if repeated:
    raise UserError(f"{name}: {repeated[0]!r} comes twice; each must be different")


def _replaced(config: Any, chosen: dict[str, Any], name: str) -> Any:
  for path, value in chosen.items():
    config = fields.replace(config, path, value, name=name)
  return config


def _point(base: Any, chosen: dict[str, Any], variant: str = "") -> Point:
  config = _replaced(base, chosen, "grid")
  values = {"variant": variant} if variant else {}
  values |= {path: fields.get(config, path) for path in chosen}
  digest = hashlib.sha256(
    json.dumps(writers.plain(dataclasses.asdict(config)), sort_keys=True).encode()
  )
  words = "_".join(
    f"{path.split('.')[-1]}={_word(value)}" for path, value in values.items()
  )
  safe = re.sub(r"[^A-Za-z0-9.=_-]+", "-", words)[:80]
  name = f"{safe}_{digest.hexdigest()[:8]}"
  return Point(name, config, values)


def _word(value: Any) -> str:
  return f"{value:g}" if isinstance(value, float) else str(value)


def _grouped(found: list[Point]) -> Iterator[Point]:
  """The points, those that share data next to each other: data are prepared once."""
  keys = list(dict.fromkeys(_data_key(point.config) for point in found))
  yield from sorted(found, key=lambda point: keys.index(_data_key(point.config)))


def _data_key(config: Any) -> str:
  held = dataclasses.asdict(config)
  rooms = [held[room] for room in ("data", "model", "partition") if room in held]
  return json.dumps(writers.plain(rooms))


class LastData:
  """`load_fn` with a memory of one: the data of the last config asked for."""

  def __init__(self, load_fn: LoadFn | None):
    self._load_fn, self._key, self._data = load_fn, "", None

  def __call__(self, config: Any) -> Any:
    if self._load_fn is None:
      return None
    if self._key != _data_key(config):
      self._key, self._data = "", None  # free the old data before the new come
      self._data = self._load_fn(config)
      self._key = _data_key(config)
    return self._data


def _run(
  config: SweepConfig, point: Point, folder: pathlib.Path, train_fn: TrainFn, load: LoadFn
) -> Row:
  row = {"name": point.name, "status": "done", "error": None}
  row["population"] = _population(point.config)
  axes = {path: fields.get(point.config, path) for path in _config_axes(config)}
  try:
    result = _finished(point, folder)
    # A run that remembers its data compares them itself, also when it has ended.
    if result is None or (folder / "checkpoints").is_dir():
      result = _train(point, folder, train_fn, load)
  except UserError as error:
    line = " ".join(str(error).split())
    return {**row, **axes, **point.overrides, "status": "failed", "error": line}
  _check_keys(config, result)
  wanted = (*writers.RESULT_KEYS[:-1], *_FEDERATED_KEYS)  # not versions
  wanted = (*wanted, config.x, config.y, config.series)
  kept = {key: result[key] for key in wanted if key in result}
  return {**row, **kept, **axes, **point.overrides}


def _check_keys(config: SweepConfig, result: Row) -> None:
  """Raises unless what is to be drawn is a field of the config or a key of the result."""
  drawn = {"x": config.x, "y": config.y, "series": config.series}
  of_config = {*_config_axes(config), "variant" if config.variants else None, None}
  for name, key in drawn.items():
    if name == "y" or key not in of_config:
      validate.one_of(result, **{name: key})
  for key in (config.y, *({config.x} - of_config)):
    curve.numeric(result, key)


def _config_axes(config: SweepConfig) -> list[str]:
  """Those of x and series that name a field of the base, not a key of the result."""
  known = {field.name for field in dataclasses.fields(config.base)}
  return [
    path for path in (config.x, config.series) if path and ("." in path or path in known)
  ]


def _finished(point: Point, folder: pathlib.Path) -> Row | None:
  """The result of a point that has run to its end with this very config."""
  if not (folder / owner.CONFIG).exists():
    return None
  owner.known(folder, point.config)
  return owner.finished(folder, point.config)


def _train(point: Point, folder: pathlib.Path, train_fn: TrainFn, load: LoadFn) -> Row:
  result = train_fn(point.config, folder, data=load(point.config))
  if not (folder / writers.RESULT).exists():  # of a `train_fn` that writes none
    owner.claim(folder, point.config)
    owner.write_result(folder, point.config, result)
  return writers.read_json(folder / writers.RESULT)  # as a later start will see it


def _save(
  config: SweepConfig, workdir: pathlib.Path, rows: list[Row], found: list[Point]
) -> None:
  names = {point.name for point in found}
  results = (workdir / "points").glob(f"*/{writers.RESULT}")
  others = sum(path.parent.name not in names for path in results)
  data = {
    "title": config.title,
    "config": dataclasses.asdict(config),
    "points": len(found),
    "statement": statement(rows, others),
    "all_runs_together": charge(rows),
    "versions": provenance.versions(),
    "device": provenance.device(),
    "rows": rows,
  }
  writers.write_json(workdir / "sweep.json", data)
  done = [row for row in rows if row["status"] == "done"]
  curve.sweep_report(
    done, workdir, x=config.x, y=config.y, series=config.series,
    references=config.references, title=config.title,
  )  # fmt: skip
  table.write(done, workdir, x=config.x, y=config.y, series=config.series)


def _told(row: Row, y: str) -> str:
  if row["status"] == "failed":
    return f"{row['name']}: failed: {row['error']}"
  private = row["epsilon_kind"] != "none"
  epsilon = f"epsilon = {upper(row['epsilon'])}" if private else "no epsilon"
  value = by_name(y, curve.numeric(row, y))
  return f"{row['name']}: {y} = {value}, {epsilon}{writers.took(row)}"

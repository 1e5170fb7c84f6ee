"""A sweep: one training run for each grid point and seed, a curve, and the total cost.

`engine` runs a sweep. The base is a central run (`TrainConfig`) or a federated run (`FedConfig`).

Private runs of one sweep share no noise and no batches, though they may share a seed: each draws
its keys from the operating system (`run.run_keys`). The cost of all runs together is the sum of
their costs, also if they ran on different data: see `cost.charge`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from dpjax import pictures, validate
from dpjax.experiments.config import common, fields, rules
from dpjax.experiments.config.fields import Choice, WithChoices
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import kind as kind_lib
from dpjax.experiments.run import loop, writers
from dpjax.experiments.run.kind import Several
from dpjax.experiments.sweeps import curve, curve_picture, engine, table
from dpjax.experiments.sweeps.engine import LoadFn, Point, Row
from dpjax.validate import UserError, Verbatim

if TYPE_CHECKING:
  from dpjax.parallel.targets import Machine

TrainFn = Callable[..., Row]  # (config, workdir, *, data) -> the content of result.json
# Entries of a result that a row keeps in addition to RESULT_KEYS, if the result has them. Only
# federated runs have the last five.
_MORE_KEYS = (
  "failed_assumptions",
  "epsilon_audited_lower",
  "rounds_to_accuracy",
  "num_clients",
  "clients_per_round",
  "heterogeneity",
  "not_private/heterogeneity",
)


@dataclasses.dataclass
class Selection:
  """Private selection in place of a whole sweep; see `experiments/sweeps/tuning.py`."""

  mean_trials: Annotated[
    float,
    rules.within_range(1, rules.MOST_RUNS),
    "mean of the random number of runs",
  ] = 10.0
  shape: Annotated[
    float,
    rules.NON_NEGATIVE,
    "of that number: 1 geometric, 0 logarithmic, else negative binomial",
  ] = 1.0
  better: Annotated[str, rules.among(("max", "min")), "of `y`"] = "max"


@dataclasses.dataclass
class SweepConfig(WithChoices):
  """A whole sweep: every combination of the grid's values, once for each seed.

  Keys of `grid` are dotted names of fields of the base (a TrainConfig, or a FedConfig for runs over
  clients), such as "privacy.epsilon". `x` and `series` are dotted names, too, or keys of a result;
  `y` is a key of a result. A reference is (label, x, accuracy) of a published result, drawn beside
  the curve. A reference at epsilon 0 is a model that saw no private data, drawn as a horizontal
  line.

  A variant is a name and the fields that it sets together, such as a method with the
  learning rate that suits it. The whole grid is run for each variant. series="variant" draws one
  line for each variant. Variants whose names are equal up to " @ " share a line: the part after
  " @ " may name an epsilon, for which the variant has suitable settings.

  If `privacy.epsilon` is inf, in the grid or in a variant, the run has clipping but no noise. It
  has no guarantee, and is drawn as a horizontal line if x is an epsilon.
  """

  base: TrainConfig | FedConfig = dataclasses.field(default_factory=TrainConfig)
  grid: dict[str, list] = dataclasses.field(default_factory=dict)
  variants: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
  references: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
  x: str = "privacy.epsilon"
  y: str = "test_accuracy"
  series: str | None = None  # one line for each value of this field or key
  title: str = ""
  selection: Annotated[
    Selection | None,
    Choice({"none": type(None), "best": Selection}),
    "release the best run alone, at a cost of its own",
  ] = None


def points(config: SweepConfig) -> list[Point]:
  """Returns the runs of a sweep in grid order: seeds vary fastest, and variants slowest.

  Raises:
    UserError: an empty grid, an unknown field, an ill-typed or repeated value, a repeated seed; a
      run that would be refused, as far as this is known without its data; two equal runs.

  >>> sweep = SweepConfig(grid={"privacy.epsilon": [1, 2]}, seeds=[0, 1])
  >>> [point.name[:16] for point in points(sweep)][:3]
  ['epsilon=1_seed=0', 'epsilon=1_seed=1', 'epsilon=2_seed=0']
  """
  _check(config)
  axes = {**config.grid, "seed": config.seeds}
  kind = kind_lib.of(config.base)
  all_points = engine.expand(
    config.base, config.variants or {"": {}}, lambda base: axes, _point,
    check=kind.check, name="grid", where="variants",
  )  # fmt: skip
  _check_alike(all_points)
  return all_points


def placed(config: SweepConfig) -> list[Point]:
  """Returns the `points` of a sweep that draws a curve, after a check of their x values. If x is a
  key of a result, the values are not known yet.

  Raises:
    UserError: the errors of `points`; x is "variant", or is no number in a private run.
  """
  all_points = points(config)
  _check_positions(config, all_points)
  return all_points


def _check_alike(all_points: list[Point]) -> None:
  """Raises UserError for two identical runs, whose names and folders are equal."""
  names = collections.Counter(point.name for point in all_points)
  twice = [name for name, count in names.items() if count > 1]
  if twice:
    raise UserError(
      f"{twice[0]} is there twice: the same run; vary the seed, or leave one out",
      field="grid",
    )


def _point(variant: str, config: Any, chosen: dict[str, Any]) -> Point:
  values: dict[str, Any] = {"variant": variant} if variant else {}
  values |= {path: fields.get(config, path) for path in chosen}
  if getattr(config.privacy, "epsilon", None) == math.inf:
    # The row keeps infinity as its epsilon. The config expresses it as clipping without noise.
    values["privacy.epsilon"] = math.inf
    without_noise = {"privacy.epsilon": None, "privacy.noise_multiplier": 0.0}
    config = fields.replace_all(config, without_noise, name="grid")
  held = json.dumps(writers.plain(fields.to_dict(config)), sort_keys=True)
  # The words of two runs may be equal, or cut. The digest gives each run a different folder.
  digest = hashlib.sha256(held.encode()).hexdigest()[:8]
  words = "_".join(
    f"{path.split('.')[-1]}={_word(value)}" for path, value in values.items()
  )
  safe = re.sub(r"[^A-Za-z0-9.=_-]+", "-", words)[:80]
  return Point(f"{safe}_{digest}", config, values)


def _lines(config: SweepConfig, rows: list[Row]) -> tuple[list[Row], str | None]:
  """Returns (rows, the key whose values tell lines apart). Variants of one line get the same name.

  If runs that differ in more than the seed would form one point, each setting gets a separate line.
  """
  varied = [name for name in ("variant", *config.grid) if name != config.x]
  named = [
    {**row, "variant": row["variant"].split(" @ ")[0]} for row in rows if "variant" in row
  ]
  named = named or rows
  settings = collections.defaultdict(set)
  setting_texts = [
    ", ".join(_word(row[name]) for name in varied if name in row) for row in rows
  ]
  for row, setting in zip(named, setting_texts):
    place = row.get(config.x) if row.get("epsilon_kind") != "none" else None
    settings[repr((row.get(config.series or ""), place))].add(setting)
  if max(map(len, settings.values()), default=0) < 2:
    return named, config.series
  return [
    {**row, "setting": setting} for row, setting in zip(rows, setting_texts)
  ], "setting"


def _word(value: Any) -> str:
  return f"{value:g}" if isinstance(value, float) else str(value)


def run_sweep(
  config: SweepConfig,
  workdir: str | os.PathLike,
  train_fn: TrainFn,
  load_fn: LoadFn | None = None,
  *,
  num_processes: int = 1,
  only: str | None = None,
) -> list[Row]:
  """Runs the remaining points of a sweep; writes sweep.json, curve.csv, curve.png and table.md.

  After the last run, curve.pdf and curve.svg are also written, for a paper.

  Args:
    config: config of the sweep.
    workdir: folder of the sweep; the folders of the runs are in `workdir`/points/.
    train_fn: function `train(config, workdir, *, data=None)`, which resumes an interrupted run and
      returns the content of result.json.
    load_fn: function that loads the data of a config. It is called once for all runs with the same
      data, partition, model and normalization. None: each run loads its data.
    num_processes: number of runs at a time, each in a process of this machine, for runs that leave
      cores idle. Each process loads the data, and `train_fn` and `load_fn` must be picklable
      (`experiments/sweeps/side_by_side.py`).
    only: pattern, such as "CNN @ *", of the names of variants or runs that are run now. Earlier
      runs are drawn, too. None: all runs.

  Returns:
    Rows of `engine.run`. Rows of finished runs also hold keys of the result, x and series.

  Raises:
    UserError: an error in the sweep itself, before any run; also the errors of `engine.run`.
  """
  if config.selection is not None:
    raise UserError(
      "its runs are chosen by tuning.run_selection", field="selection", value="best"
    )
  all_points = placed(config)
  train = functools.partial(_train, train_fn)
  load = load_fn or _no_data
  kept = functools.partial(_kept, config)
  draw = functools.partial(_draw, config)
  grid = engine.Grid(config, all_points, train, load, kept, draw, config.y, only=only)
  rows = engine.run(grid, pathlib.Path(workdir), num_processes=num_processes)
  finished = [row for row in rows if row["status"] == "done"]
  if finished:
    # These files are written only at the end, since three files of a picture take three times as
    # long as one file.
    shown, series = _lines(config, finished)
    axes: dict[str, Any] = {"x": config.x, "y": config.y, "series": series}
    groups = curve.summarize(shown, **axes)
    drawn = curve_picture.figure(
      groups, **axes, references=config.references, title=config.title
    )
    pictures.save(drawn, pathlib.Path(workdir) / "curve.pdf", also=(".svg",))
  return rows


def _train(train_fn: TrainFn, point: Point, folder: pathlib.Path, data: Any) -> Row:
  return train_fn(point.config, folder, data=data)


def _no_data(config: Any) -> None:
  """Loads nothing and returns None, so that each run loads its data."""


def _draw(config: SweepConfig, folder: pathlib.Path, rows: list[Row]) -> None:
  rows, series = _lines(config, rows)
  drawn = {"x": config.x, "y": config.y, "series": series}
  references = config.references
  title = config.title
  curve.sweep_report(rows, folder, **drawn, references=references, title=title)
  table.write(rows, folder, **drawn)


def _check(config: SweepConfig) -> None:
  common.typed(config)
  _check_selection(config)
  if not (config.grid or config.variants):
    raise UserError(
      "must name at least one field, or give variants", field="grid", value={}
    )
  _check_variants(config)
  for path, values in config.grid.items():
    if not isinstance(values, (list, tuple)) or not values:
      raise UserError(
        "must be a list of at least one value", field=f"grid[{path!r}]", value=values
      )
    _unique(values, f"grid[{path!r}]")
  if "seed" in config.grid:
    raise UserError("give the seeds as seeds=[...]", field="grid['seed']")
  if not config.seeds:
    raise UserError("must hold at least one seed", field="seeds", value=[])
  for seed in config.seeds:
    validate.integer_at_least(0, seeds=seed)
  _unique(config.seeds, "seeds")
  for path in _config_axes(config):
    fields.get(config.base, path, name="x" if path == config.x else "series")


def _check_selection(config: SweepConfig) -> None:
  if config.selection is None:
    return
  rules.check(config.selection, prefix="selection.")
  if not isinstance(config.base, TrainConfig):
    raise UserError(
      "base must be a TrainConfig; a private selection among federated runs is "
      "not accounted here",
      field="selection",
      value="best",
    )
  drawn = ("x", "series", "title", "references")
  bounds.read_if(config, False, "a sweep that draws a curve", *drawn)
  bounds.read_if(config, False, "a sweep; a selection draws its seeds", "seeds")


def _check_variants(config: SweepConfig) -> None:
  if getattr(config.base.privacy, "epsilon", None) == math.inf:
    raise UserError(
      "must be finite; the grid or a variant may be not",
      field="base.privacy.epsilon",
      value=Verbatim("inf"),
    )
  for name, fixed in config.variants.items():
    # If the grid replaced a whole value, fields that a variant set inside it would be lost.
    varied = {"seed", *config.grid}
    twice = [
      path for path in fixed if any(f"{path}.".startswith(f"{one}.") for one in varied)
    ]
    if twice:
      raise UserError(
        f"sets {twice[0]!r}, which the grid varies", field=f"variants[{name!r}]"
      )
  if config.series == "variant" and not config.variants:
    raise UserError("there are no variants", field="series", value="variant")


def _check_positions(config: SweepConfig, all_points: list[Point]) -> None:
  """Raises UserError if x is known before the runs, but is no number. Only runs without a guarantee
  may have no x."""
  if config.x == "variant":
    raise UserError(
      "must be a number; series='variant' draws one line for each",
      field="x",
      value="variant",
    )
  for point in all_points if config.x in _config_axes(config) else ():
    value = fields.get(point.config, config.x)
    # Runs without a guarantee need no x: on an axis of epsilon, they are drawn as horizontal lines.
    has_epsilon = getattr(point.config.privacy, "noise_multiplier", 0) != 0
    needed = value is not None or has_epsilon
    if not needed or (isinstance(value, int | float) and not isinstance(value, bool)):
      continue
    raise UserError(
      f"must be a number in every run; it is {value!r} in {point.name}",
      field="x",
      value=config.x,
    )


def _unique(values: Any, name: str) -> None:
  repeated = [value for index, value in enumerate(values) if value in values[:index]]
  if repeated:
    raise UserError(f"{repeated[0]!r} comes twice; each must be different", field=name)


def _kept(config: SweepConfig, point: Point, result: Row) -> Row:
  """Returns the entries of a row from a result. Raises UserError if a value for the picture is
  missing."""
  axes = {path: fields.get(point.config, path) for path in _config_axes(config)}
  drawn = {"x": config.x, "y": config.y, "series": config.series}
  varied = {*axes, *point.overrides, None}
  for name, key in drawn.items():
    if name == "y" or key not in varied:
      validate.one_of(result, **{name: key})
  for key in (config.y, *({config.x} - varied)):
    curve.numeric(result, key)
  wanted = (*writers.RESULT_KEYS[:-1], *_MORE_KEYS, *drawn.values())  # not versions
  audited = {"refuted": result["audit"]["refuted"]} if "audit" in result else {}
  return {key: result[key] for key in wanted if key in result} | audited | axes


def _config_axes(config: SweepConfig) -> list[str]:
  """Returns those of `x` and `series` that name a field of the base config, not a key of a
  result."""
  known = {field.name for field in dataclasses.fields(config.base)}
  return [
    path for path in (config.x, config.series) if path and ("." in path or path in known)
  ]


class Sweep(Several[SweepConfig]):
  """All runs of a sweep."""

  def check(self) -> None:
    points(self.config)

  def run(self, workdir: str) -> list[Row]:
    if self.config.selection is not None:
      raise UserError("is for launch.sweep", field="selection", value="best")
    return run_sweep(self.config, workdir, loop.train, loop.load)

  def report(self, workdir: str, rows: list[Row]) -> str:
    return f"wrote {workdir}/curve.png (.pdf, .svg), curve.csv, table.md, sweep.json"

  def plan(self, workdir: str, target: Machine | None = None) -> str:
    # Imported here, because most runs are not dry runs.
    from dpjax.experiments.sweeps import rehearsal

    return rehearsal.report(self.config, workdir)

  def alarm(self, rows: list[Row]) -> str:
    refuted = [row["name"] for row in rows if row.get("refuted")]
    return f"audit: claims are REFUTED: {', '.join(refuted)}" if refuted else ""

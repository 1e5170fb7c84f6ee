"""A sweep: a list of named configs, each run once or once for each seed.

The config file of a sweep defines `get_configs()`, which yields (name, config) of each run. What
users may want to change by a flag stands in the config that the file's `get_config()` returns,
such as a `Sweep`; `get_configs` then takes it. `engine` carries the runs out.

Private runs of one sweep share no noise and no batches, though they may share a seed: each draws
its keys from the operating system (`run.run_keys`). The cost of all runs together is the sum of
their costs, also if they ran on different data: see `cost.charge`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from dpjax import validate
from dpjax.accounting.tuning import MOST_SHAPE
from dpjax.experiments.config import common, fields, rules
from dpjax.experiments.config.choices import Choice
from dpjax.experiments.config.fields import WithChoices
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import kind as kinds
from dpjax.experiments.run.experiment import no_plan
from dpjax.experiments.run.kind import Table
from dpjax.experiments.sweeps import curves, engine
from dpjax.experiments.sweeps.engine import Point, Row
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.parallel.targets import Machine

# A config file's runs: (name, config), in order.
Named = Iterable[tuple[str, Any]]
# Longest name of a folder in bytes; most file systems allow 255.
_LONGEST = 200
PICTURES = ("lines", "points")
# Fields of a sweep that only a curve reads.
_OF_CURVE = ("x", "y", "series", "picture", "references")


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
    rules.within_range(0, MOST_SHAPE),
    "of that number: 1 geometric, 0 logarithmic, else negative binomial",
  ] = 1.0
  better: Annotated[str, rules.among(("max", "min")), "of `y`"] = "max"


@dataclasses.dataclass
class Sweep(WithChoices):
  """What a sweep's `get_configs(sweep)` reads, and how its curve is drawn.

  A file's own parameters are fields of a dataclass that derives from this one; each field is a
  flag. `x` and `series` are dotted names of fields of every run's config, such as
  "privacy.epsilon", or keys of a result; `y` is a key of a result. series="variant" draws a line
  for each name, up to " @ ": the runs "CNN @ 1" and "CNN @ 2" are points of the line "CNN".

  A reference is (label, x, y) of a published result, drawn beside the curve. A reference at epsilon
  0 is a model that saw no private data, drawn as a horizontal line.
  """

  base: Annotated[Any, "config from which the runs differ, of any kind of run"] = (
    dataclasses.field(default_factory=TrainConfig)
  )
  epsilons: Annotated[
    list[float],
    rules.each(rules.FieldRule(validate.positive_or_inf, "> 0")),
    "budgets of the curve; Infinity: clipped, without noise",
  ] = dataclasses.field(default_factory=list)
  seeds: Annotated[
    list[int] | None,
    rules.each(rules.at_least(0)),
    "each config runs with each of them; none: with its own",
  ] = None
  x: Annotated[str, "field or result on the axis"] = "privacy.epsilon"
  y: Annotated[str, "result that is drawn"] = "test_accuracy"
  series: Annotated[str | None, "a line for each of its values"] = None
  picture: Annotated[str, rules.among(PICTURES), "lines over x, or a row for each name"] = (
    "lines"
  )
  references: Annotated[list[tuple[str, float, float]], "published: label, x, y"] = (
    dataclasses.field(default_factory=list)
  )
  title: Annotated[str, "of the picture"] = ""
  selection: Annotated[
    Selection | None,
    Choice({"none": type(None), "best": Selection}),
    "release the best run alone, at a cost of its own",
  ] = None

  def __post_init__(self):
    if not dataclasses.is_dataclass(self.base) or isinstance(self.base, type):
      raise UserError(
        "must be a config; a flag sets one of its fields, as --config.base.seed=1",
        field="base",
        value=self.base,
      )


def list_configs(named: Named) -> list[tuple[str, Any]]:
  """Returns what a file yields, each config as it is when it is yielded: a file may change one
  config from run to run, and yield it again. Of too many runs one more than allowed is returned.

  >>> def runs(config):
  ...   for config.num_steps in (1, 2):
  ...     yield "run", config
  >>> [run.num_steps for _, run in list_configs(runs(TrainConfig()))]
  [1, 2]
  """
  return [copy.deepcopy(entry) for entry in itertools.islice(named, rules.MOST_RUNS + 1)]


def points(named: Named, config: Any = None) -> list[Point]:
  """Returns the runs of a sweep in order, all of them checked; seeds vary fastest.

  A run whose `privacy.epsilon` is infinite clips without noise. It has no guarantee.

  Args:
    named: (name, config) of each run.
    config: the `Sweep`, or what else the file's `get_config()` returned; None: nothing.

  Raises:
    UserError: no run, or too many; two runs of one name; a run that would be refused, as far as
      this is known without its data. An error in a field of the sweep's base names this field.

  >>> [point.name for point in points([("epsilon 2", TrainConfig())], Sweep(seeds=[0, 1]))]
  ['epsilon-2_seed=0', 'epsilon-2_seed=1']
  """
  if isinstance(config, Sweep):
    common.check_types(config)
    _check_lists(config)
  asked = config.seeds if isinstance(config, Sweep) else None
  seeds: list[Any] = [None] if asked is None else asked
  # Runs are counted before they are checked: a mistyped loop may ask for billions of runs.
  entries = list_configs(named)
  count = len(entries) * len(seeds)
  if not 1 <= count <= rules.MOST_RUNS:
    empty = "" if entries or not isinstance(config, Sweep) else _empty_lists(config)
    raise UserError(
      f"has {count} runs; must be at least 1, at most {rules.MOST_RUNS}",
      field="get_configs",
      hint=f"empty: {empty}" if empty else "",
    )
  runs: list[Point] = []
  for entry in entries:
    if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str):
      raise UserError(
        "must yield (name, config) of each run", field="get_configs", value=entry
      )
    name, run = entry
    try:
      run = _without_noise(run)
      kinds.check(run)
    except UserError as error:
      raise _place(error, name, run, config) from error
    facts = {"label": name, "variant": name.split(" @ ")[0]}
    for seed in seeds:
      its = run if seed is None else fields.replace(run, "seed", seed)
      runs.append(Point(_folder(name, seed), its, facts | {"seed": its.seed}))
  _check_alike(runs)
  return runs


def _empty_lists(config: Sweep) -> str:
  """Returns the flags of a sweep's lists of values that are empty."""
  flags = {
    f"--config.{field.name}": getattr(config, field.name)
    for field in dataclasses.fields(config)
    if field.name != "references"
  }
  return ", ".join(flag for flag, value in flags.items() if value in ([], ()))


def _check_lists(config: Sweep) -> None:
  """Raises UserError for a seed or an epsilon that comes twice, and for no seed at all."""
  if config.seeds == []:
    raise UserError(
      "must hold a seed, or be none: each config with its own", field="seeds", value=[]
    )
  for field in ("seeds", "epsilons"):
    values = getattr(config, field) or []
    for index, value in enumerate(values):
      if value in values[:index]:
        raise UserError(
          f"{value!r} comes twice; each must be different", field=field, value=values
        )


def _check_alike(runs: list[Point]) -> None:
  names = [run.name for run in runs]
  twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
  if twice is not None:
    raise UserError(
      f"{twice} is there twice: names of runs, and of their folders, must differ",
      field="get_configs",
    )


def _without_noise(config: Any) -> Any:
  """Returns the config; an infinite epsilon becomes clipping without noise."""
  if getattr(getattr(config, "privacy", None), "epsilon", None) != math.inf:
    return config
  return fields.replace_all(
    config, {"privacy.epsilon": None, "privacy.noise_multiplier": 0.0}
  )


def _place(error: UserError, name: str, run: Any, config: Any) -> UserError:
  """Returns the error of a run, with the field that the user set: one of the sweep's base, or of
  this run alone."""
  base = config.base if isinstance(config, Sweep) else config
  # An entry of a list is of the list's field.
  field = error.field.partition("[")[0]
  if field and type(base) is type(run):
    try:
      if fields.get(base, field) == fields.get(run, field):
        is_sweep = isinstance(config, Sweep)
        return error.within("base", holds_config=True) if is_sweep else error
    except UserError:
      pass  # the field is of a value that one of the two lacks
  return error.at(name)


def _folder(name: str, seed: int | None) -> str:
  """Returns the name of a run's folder: readable, and the same in every process.

  >>> _folder("DLG, top-k", None), _folder("CNN @ 0.5", 1)
  ('dlg-top-k', 'cnn-0.5_seed=1')
  """
  words = engine.slug(name)
  if not words or len(words.encode()) > _LONGEST or not name.isprintable():
    raise UserError(
      f"names a run and its folder: must be words on one line, of at most {_LONGEST} bytes",
      field="get_configs",
      value=name,
    )
  return words if seed is None else f"{words}_seed={seed}"


class Runs:
  """All runs of a sweep, or the one run of a kind that writes a table.

  Args:
    named: (name, config) of each run; None: `config` is the only run.
    config: what the file's `get_config()` returned; None: the file has none.
    title: title of what is written, if the config has none.
  """

  def __init__(self, named: Named | None, config: Any = None, *, title: str = ""):
    self.config = config
    self.alone = named is None
    if named is None:
      table = kinds.of(config).its_table() or Table()
      named = [(table.alone(config) or kinds.command_of(config), config)]
    self.points = points(named, config)
    sweep = config if isinstance(config, Sweep) else Sweep()
    self.title = getattr(config, "title", "") or title
    several = {type(point.config) for point in self.points}
    its_table = kinds.of(self.points[0].config).its_table() if len(several) == 1 else None
    self.table = its_table or curves.Curves(sweep)
    if its_table is not None:
      words = f"runs of which a curve is drawn; these write {its_table.writes}"
      common.read_if(sweep, False, words, *_OF_CURVE)
    self.points = [
      point._replace(facts=point.facts | self.table.facts(point.label, point.config))
      for point in self.points
    ]
    if isinstance(self.table, curves.Curves) and sweep.selection is None:
      curves.check(sweep, self.points)

  def run(self, workdir: str | pathlib.Path, only: str | None = None) -> list[Row]:
    """Carries out the runs that have no result yet. Returns a row for each run."""
    if isinstance(self.config, Sweep) and self.config.selection is not None:
      raise UserError(
        "its runs are chosen by tuning.run_selection", field="selection", value="best"
      )
    return engine.run(self, pathlib.Path(workdir), only)

  def plan(
    self, workdir: str, target: Machine | None = None, only: str | None = None
  ) -> str:
    """Returns the plan of all runs as text, for a launcher's --dry_run."""
    if not all(kinds.experiment_of(point.config).plans for point in self.points):
      raise no_plan()
    if target is not None:
      raise UserError("is for one run, not for several", field="target", value=target.text)
    # Imported here, because most runs are not dry runs.
    from dpjax.experiments.sweeps import rehearsal

    return rehearsal.report(self, workdir, only=only)

  def report(self, workdir: str) -> str:
    """Returns what a launcher prints at the end."""
    written = self.table.read(pathlib.Path(workdir))
    return f"{written}wrote {workdir}/{self.table.writes}, {engine.FILE}"


def run(
  named: Named | None,
  workdir: str | pathlib.Path,
  config: Any = None,
  *,
  title: str = "",
  only: str | None = None,
) -> list[Row]:
  """Carries out the runs of a sweep that have no result yet; see `engine.run`.

  Args:
    named, config, title: as of `Runs`.
    only: pattern of the names of the runs that are run now; None: all.

  >>> import tempfile
  >>> small = TrainConfig(num_steps=2, eval_every=2)
  >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SLOW, +ELLIPSIS
  ...   (row,) = run([("small", small)], folder)
  [1/1] small: test_accuracy = ..., epsilon=2 (proved, ...
  Each epsilon holds for its own run alone. ...
  >>> row["status"]  # doctest: +SLOW
  'done'
  """
  return Runs(named, config, title=title).run(workdir, only)

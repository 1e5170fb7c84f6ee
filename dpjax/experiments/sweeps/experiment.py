"""Experiments of `dpjax.relevance`: every curve at every epsilon with every seed, as a grid.

Runs with the same data and net share model 1 of the paper and the relevance of that model. The
duration of the first such run includes the time to compute them. A run's folder holds a digest of
its data, so that a folder never mixes runs on different data.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpjax.experiments.config import fields, rules
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.relevance import build
from dpjax.experiments.kinds.relevance.build import Relevance
from dpjax.experiments.kinds.relevance.config import (
  RelevanceConfig,
  alone,
  check,
  check_curves,
  check_run,
  curves_of,
)
from dpjax.experiments.kinds.relevance.methods import NoDp
from dpjax.experiments.run import guarantee, loop, run_keys, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.run.kind import Several, Table
from dpjax.experiments.sweeps import claims, engine, panels
from dpjax.experiments.sweeps.engine import Point, Row
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.parallel.targets import Machine


@bounds.names_fields
def points(config: RelevanceConfig) -> list[Point]:
  """Returns every run of an experiment, ordered by seed. All runs are checked before the first run
  begins.

  >>> config = RelevanceConfig(epsilons=[1.0, 2.0], num_seeds=2)
  >>> [point.name for point in points(config)]
  ['radp-eps1-seed0', 'radp-eps2-seed0', 'radp-eps1-seed1', 'radp-eps2-seed1']
  """
  check(config)
  check_curves(config)
  all_points = list(_points(alone(config), curves_of(config)))
  if len({point.name for point in all_points}) < len(all_points):
    raise UserError("two labels or two epsilons give runs of the same name", field="curves")
  # Runs are ordered by seed, so that an interrupted experiment can compare its curves.
  return sorted(all_points, key=lambda point: point.config.seed)


def _points(
  base: RelevanceConfig, curves: Mapping[str, Mapping[str, Any]]
) -> Iterator[Point]:
  """Yields the run of each curve, at each of its epsilons, with each of its seeds."""
  whole = {
    label: fields.replace_all(base, changes, name=f"config.curves[{label!r}]")
    for label, changes in curves.items()
  }
  count = sum(len(curve.epsilons) * curve.num_seeds for curve in whole.values())
  if count > rules.MOST_RUNS:
    raise UserError(
      f"has {count} runs; must be at most {rules.MOST_RUNS}",
      field="num_seeds, with curves and epsilons,",
    )
  for label, curve in whole.items():
    # A curve may set other epsilons and seeds than the experiment, so it is checked, too.
    check(curve)
    for epsilon in curve.epsilons:
      for seed in range(curve.seed, curve.seed + curve.num_seeds):
        its = {"epsilons": [epsilon], "seed": seed, "num_seeds": 1}
        run = fields.replace_all(curve, its)
        name = f"{engine.slug(label)}-eps{epsilon:g}-seed{seed}"
        # An error names its run, since an experiment has many.
        try:
          check_run(run)
        except UserError as error:
          raise error.at(name) from error
        facts = {"variant": label, "epsilon_target": epsilon, "seed": seed}
        yield Point(name, run, facts)


class _Experiment(Table):
  """What the runs of an experiment write together."""

  writes = "claims.md, claims.csv, report.png, report.csv"

  def __init__(self, config: RelevanceConfig, subfolder: str = "points"):
    self.config = config
    self.subfolder = subfolder

  def tell(self, row: Row) -> str:
    return f"test_accuracy={row['test_accuracy']:.4f}, {guarantee.summary(row)}"

  def write(
    self, folder: pathlib.Path, rows: Sequence[Row], *, title: str, last: bool
  ) -> None:
    _draw(self.config, self.subfolder, folder, list(rows))


@bounds.names_fields
def run_all(config: RelevanceConfig, workdir: pathlib.Path | str) -> list[Row]:
  """Carries out the remaining runs and returns a row for each run, which holds its whole result.

  A single run lies in `workdir` itself. Several runs lie in `workdir`/points/NAME, and sweep.json
  in `workdir`; more runs may be added later. `workdir` also gets report.png and .csv (both metrics
  by epoch) and claims.csv and .md (claimed and proved epsilons, refuted claims, and accuracy).

  Raises:
    UserError: a wrong config, a folder of another config or of other data, or a folder in which
      another process is at work; nothing is overwritten. An error of one of several runs is
      recorded in its row, and the other runs go on.
  """
  workdir = pathlib.Path(workdir)
  all_points = points(config)
  if len(all_points) == 1:
    # A single run uses the folder of the experiment, so it stores the experiment's config.
    point = all_points[0]
    experiment = Relevance(point.config, curve=_curve(point), whole=config)
    row = engine.head(point) | loop.run(experiment, workdir)
    build.forget(workdir)
    table = _Experiment(config, "")
    table.write(workdir, [row], title="", last=True)
    print(engine.summary(row, table), flush=True)
    return [row]
  check_folders(all_points, workdir)
  return engine.run(
    all_points, _Experiment(config), workdir, settings=config, title=config.title,
    train=_train, load=lambda config: {},
  )  # fmt: skip


def _curve(point: Point) -> str:
  return point.facts["variant"].split(" @ ")[0]


def _draw(
  config: RelevanceConfig, subfolder: str, workdir: pathlib.Path, rows: list[Row]
) -> None:
  if rows:
    folders = [workdir / subfolder / row["name"] if subfolder else workdir for row in rows]
    panels.draw(workdir, config, rows, list(map(writers.read_metrics, folders)))
    claims.write(workdir, rows)


def check_folders(all_points: list[Point], workdir: pathlib.Path) -> None:
  """Raises UserError, before any run, if a run's folder holds another config or other data."""
  folders = {point.name: engine.folder(workdir, point.name) for point in all_points}
  over = all((folder / writers.RESULT).exists() for folder in folders.values())
  load = engine.LastData(lambda config: {})
  for point in engine.grouped(all_points):
    held = owner.known(folders[point.name], point.config)
    # If `held` is {}, an earlier version stored no digest of the data. Then no run may be added:
    # the check passes only if all runs have finished.
    if held or (held is not None and not over):
      digest = build.data_digest(point.config, load(point.config))
      run_keys.check_data(held, digest, name=point.config.data.name, workdir=workdir)


def _train(point: Point, folder: pathlib.Path, shared: dict[Any, Any]) -> Row:
  """Trains a run, or copies an earlier run without privacy that differs only in its epsilon."""
  done = shared.setdefault("no_dp", {})
  alike = repr(dataclasses.replace(point.config, epsilons=[]))
  over = (folder / writers.RESULT).exists()
  if not over and isinstance(point.config.method, NoDp) and alike in done:
    result = _copied(done[alike], folder, point)
  else:
    experiment = Relevance(point.config, curve=_curve(point))
    result = loop.run(experiment, folder, data=shared)
    build.forget(folder)
  done[alike] = folder
  return result


def _copied(source: pathlib.Path, folder: pathlib.Path, point: Point) -> Row:
  """Copies the run without privacy to the folder of another epsilon."""
  owner.claim(folder, point.config)
  # The copy makes no random draws, so it must not hold the keys of the original.
  held = run_keys.without_keys(owner.remembered(source) or {})
  owner.remember(folder, held, before=owner.remembered(folder))
  for name in (writers.METRICS, owner.PARAMS):
    shutil.copy(source / name, folder / name)
  result = writers.read_json(source / writers.RESULT)
  result |= {"epsilon_target": point.config.epsilons[0], "copied_from": source.name}
  return owner.write_result(folder, point.config, result)


class Curves(Several[RelevanceConfig]):
  """All runs of an experiment: every curve at every epsilon with every seed."""

  def check(self) -> None:
    points(self.config)

  def run(self, workdir: str) -> list[Row]:
    return run_all(self.config, workdir)

  def plan(self, workdir: str, target: Machine | None = None) -> str:
    # Imported here, because most runs are not dry runs.
    from dpjax.experiments.sweeps import rehearsal

    return rehearsal.report_relevance(self.config, workdir)

  def report(self, workdir: str, rows: list[Row]) -> str:
    return f"wrote {workdir}/claims.md, claims.csv, report.png, report.csv"

  def alarm(self, rows: list[Row]) -> str:
    for row in rows:
      if claims.verdict([row]) == "PROOF REFUTED":
        summary = engine.summary(row, _Experiment(self.config))
        return f"audit: a proved epsilon is refuted: {summary}"
    return ""

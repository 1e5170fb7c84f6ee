"""Runs an experiment of `dpjax.relevance`: each point to result.json, then report and table.

Points that differ only in what follows model 1 of the paper share it (its seconds count for
the first of them). A point that has its result.json is not run again, and one that was cut
off goes on where it was, so the same command goes on where it was stopped. Which data a point
had is remembered in its folder, so that points on other data are not mixed with it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

from dpjax.runs import bounds, loop, streams, unused, writers
from dpjax.runs import workdir as owner
from dpjax.runs.relevance import build, pictures, table
from dpjax.runs.relevance import unused as relevance_unused
from dpjax.runs.relevance.config import Point, RelevanceConfig, points


@bounds.names_fields
def run_all(config: RelevanceConfig, workdir: pathlib.Path | str) -> list[dict[str, Any]]:
  """Every point, in order; returns their results.

  A single point lives in `workdir` itself, several in `workdir`/points/NAME. Written beside
  them: report.png and .csv (both metrics by epoch, a column of panels per epsilon), and
  claims.csv and .md (what is claimed, proved and refuted, and the accuracy).

  Raises:
    UserError: a wrong config, missing data, a folder of another config or of other data, one
      where another process is at work; nothing is overwritten. A folder of several points
      may get more seeds.
  """
  workdir = pathlib.Path(workdir)
  todo = points(config)
  loaded: dict[Any, Any] = {}
  if not (workdir / owner.CONFIG).exists():
    for point in todo:  # data that are missing or wrong must not claim the folder
      train, _ = build.load_data(point.config, loaded)
      unused.refuse(point.config, relevance_unused.of_dataset(train))
  known = _before(config, workdir)
  fresh = len(todo) == 1 and not (workdir / owner.CONFIG).exists()
  owner.claim(workdir, known)
  with writers.alone_in(workdir), owner.given_back(workdir, fresh=fresh):
    if known != config:
      writers.write_json(workdir / owner.CONFIG, writers.plain(dataclasses.asdict(config)))
    return _run_all(config, workdir, todo, loaded)


def _before(config: RelevanceConfig, workdir: pathlib.Path) -> RelevanceConfig:
  """The config with the number of seeds that the folder's had, if that was smaller.

  A single point lives in the folder itself, so its folder cannot grow.
  """
  if not (workdir / owner.CONFIG).exists():
    return config
  num_seeds = writers.read_json(workdir / owner.CONFIG).get("num_seeds")
  if not isinstance(num_seeds, int) or not 1 <= num_seeds < config.num_seeds:
    return config
  fewer = dataclasses.replace(config, num_seeds=num_seeds)
  return fewer if len(points(fewer)) > 1 else config


def _run_all(
  config: RelevanceConfig, workdir: pathlib.Path, todo: list[Point], loaded: dict[Any, Any]
) -> list[dict[str, Any]]:
  alone = len(todo) == 1
  folders = [(p, workdir if alone else workdir / "points" / p.name) for p in todo]
  _check_data(workdir, folders, loaded)
  whose = config if alone else None
  results = [run_point(point, folder, loaded, whose) for point, folder in folders]
  pictures.report(workdir, config, folders, results)
  table.write(workdir, results)
  if not alone:
    writers.write_json(workdir / "results.json", results)
  return results


def _check_data(
  workdir: pathlib.Path, points: list[tuple[Point, pathlib.Path]], loaded: dict
) -> None:
  """Raises UserError, before anything runs, where points that were run had other data."""
  over = all((folder / writers.RESULT).exists() for _, folder in points)
  for point, folder in points:
    held = owner.remembered(folder)
    if held or (
      held is not None and not over
    ):  # {}: of an earlier version, so not added to
      digest = build.data_digest(point.config, loaded)
      streams.check_data(held, digest, name=point.config.data.name, workdir=workdir)


def run_point(
  point: Point, workdir: pathlib.Path, loaded: dict, folder_of: Any = None
) -> dict[str, Any]:
  """One run, or what is left of it; `folder_of` as for `build.build`."""
  done = loaded.setdefault("no_dp", {})  # folders by what decides them: not by epsilon
  alike = repr(dataclasses.replace(point.config, epsilons=[]))
  over = (workdir / writers.RESULT).exists()
  if not over and point.config.method == "no_dp" and alike in done:
    result = _copied(done[alike], workdir, point)
  else:
    result = loop.run(build.build(point, loaded, folder_of=folder_of), workdir)
    build.forget(workdir)
  done[alike] = workdir
  return result


def _copied(source: pathlib.Path, workdir: pathlib.Path, point: Point) -> dict[str, Any]:
  """The run without privacy, for another panel."""
  owner.claim(workdir, point.config)
  held = streams.without_keys(owner.remembered(source) or {})
  owner.remember(workdir, held, before=owner.remembered(workdir))
  for name in (writers.METRICS, owner.PARAMS):
    shutil.copy(source / name, workdir / name)
  result = writers.read_json(source / writers.RESULT)
  result |= {"epsilon_target": point.epsilon, "copied_from": source.name}
  return owner.write_result(workdir, point.config, result)

"""Runs an experiment of `dpjax.relevance`: each point to result.json, then report and table.

Points that differ only in what follows model 1 of the paper share it (its seconds count for
the first of them). A point that has its result.json is not run again, so the same command
goes on where it was stopped; a point that was cut off starts afresh. The raw noise of
rigorous mode comes from the operating system and is never written down.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import secrets
import shutil
import time
from typing import Any

import jax
import numpy as np

from dpjax import data as data_lib
from dpjax import models, noise, relevance, trees
from dpjax.accounting import delta_warning
from dpjax.experiment import (
  bounds,
  build,
  provenance,
  relevance_audit,
  relevance_report,
  relevance_table,
  relevance_unused,
  run,
  unused,
  writers,
)
from dpjax.experiment.config import ModelConfig
from dpjax.experiment.relevance_config import Point, RelevanceConfig, points
from dpjax.validate import UserError

_TEMPERED = "tempered_sigmoid"
_LATER = {"private": ("relevance_pool",)}  # as in `build`: earlier runs keep their noise


def run_all(config: RelevanceConfig, workdir: pathlib.Path | str) -> list[dict[str, Any]]:
  """Every point, in order; returns their results.

  A single point lives in `workdir` itself, several in `workdir`/points/NAME. Written beside
  them: report.png and .csv (both metrics by epoch, a column of panels per epsilon), and
  claims.csv and .md (what is claimed, proved and refuted, and the accuracy).

  Raises:
    UserError: a wrong config, missing data, a foreign folder, one where another process is
      at work; nothing is overwritten. A folder of several points may get more seeds.
  """
  workdir = pathlib.Path(workdir)
  todo = points(config)
  loaded: dict[Any, Any] = {}
  if not (workdir / run.CONFIG).exists():
    for point in todo:  # data that are missing or wrong must not claim the folder
      train, _ = _data(point.config, loaded)
      unused.refuse(point.config, relevance_unused.of_dataset(train))
  known = _before(config, workdir)
  run.claim_workdir(workdir, known)
  with writers.alone_in(workdir):
    if known != config:
      writers.write_json(workdir / run.CONFIG, writers.plain(dataclasses.asdict(config)))
    return _run_all(config, workdir, todo, loaded)


def _before(config: RelevanceConfig, workdir: pathlib.Path) -> RelevanceConfig:
  """The config with the number of seeds that the folder's had, if that was smaller.

  A single point lives in the folder itself, so its folder cannot grow.
  """
  if not (workdir / run.CONFIG).exists():
    return config
  num_seeds = writers.read_json(workdir / run.CONFIG).get("num_seeds")
  if not isinstance(num_seeds, int) or not 1 <= num_seeds < config.num_seeds:
    return config
  fewer = dataclasses.replace(config, num_seeds=num_seeds)
  return fewer if len(points(fewer)) > 1 else config


def _run_all(
  config: RelevanceConfig, workdir: pathlib.Path, todo: list[Point], loaded: dict[Any, Any]
) -> list[dict[str, Any]]:
  folder = lambda point: workdir if len(todo) == 1 else workdir / "points" / point.name
  results = []
  for point in todo:
    if len(todo) > 1:
      run.claim_workdir(folder(point), point.config)
    results.append(run_point(point, folder(point), loaded))
  relevance_report.report(workdir, config, [(p, folder(p)) for p in todo], results)
  relevance_table.write(workdir, results)
  if len(todo) > 1:
    writers.write_json(workdir / "results.json", results)
  return results


def run_point(point: Point, workdir: pathlib.Path, loaded: dict) -> dict[str, Any]:
  """One run; its result.json if it is there already."""
  done = loaded.setdefault("no_dp", {})  # folders by what decides them: not by epsilon
  alike = repr(dataclasses.replace(point.config, epsilons=[]))
  if (workdir / writers.RESULT).exists():
    result = writers.read_json(workdir / writers.RESULT)
  elif point.config.method == "no_dp" and alike in done:
    result = _copied(done[alike], workdir, point)
  else:
    result = _run(point, workdir, loaded)
  done[alike] = workdir
  return result


def _run(point: Point, workdir: pathlib.Path, loaded: dict) -> dict[str, Any]:
  config = point.config
  train, test = _data(config, loaded)
  started = time.monotonic()
  with (
    writers.MetricsWriter(workdir) as metrics,
    writers.progress(config.num_epochs, 0, point.name) as bar,
  ):
    job = make_job(config, train, test, loaded, _recorder(metrics, bar))
    outcome = relevance.run(config.method, config.mode, job)
  result = _result(point, outcome, train, started, workdir)
  if config.audit.enabled:
    result |= relevance_audit.facts(config, job, outcome)
  result["wall_seconds"] = round(time.monotonic() - started, 3)
  _warn(outcome, len(train))
  _save(workdir, outcome)
  relevance_report.pictures(workdir, outcome, config.lrp)
  writers.write_result(workdir, result)
  return result


def _copied(source: pathlib.Path, workdir: pathlib.Path, point: Point) -> dict[str, Any]:
  """The run without privacy, for another panel."""
  for name in (writers.METRICS, "params.npz"):
    shutil.copy(source / name, workdir / name)
  result = writers.read_json(source / writers.RESULT)
  result |= {"epsilon_target": point.epsilon, "copied_from": source.name}
  writers.write_result(workdir, result)
  return result


def _recorder(metrics: writers.MetricsWriter, bar: writers.Progress) -> relevance.OnEpoch:
  def on_epoch(epoch: int, scores: dict[str, float]) -> None:
    metrics.write(epoch, {"epoch": epoch, **scores})
    bar.update(1, accuracy=scores["test_accuracy"])

  return on_epoch


def _data(config: RelevanceConfig, loaded: dict) -> tuple[Any, Any]:
  key = (config.data.name, config.data.data_dir, config.data.limit)
  if key not in loaded:
    train, test = data_lib.load(config.data.name, data_dir=config.data.data_dir)
    if train.x.dtype != np.float32 or train.x.min() < 0 or train.x.max() > 1:
      raise UserError(f"data.name={config.data.name!r}: must be images in [0, 1]")
    if config.data.limit is not None:
      bounds.limit(config.data, len(train))
      train = train.subset(slice(0, config.data.limit))
    loaded[key] = train, test
  return loaded[key]


def make_job(
  config: RelevanceConfig, train: Any, test: Any, loaded: dict, on_epoch: Any = None
) -> relevance.Job:
  """The job of a point's config."""
  public = None
  if config.public_data is not None:
    other = dataclasses.replace(
      config, data=dataclasses.replace(config.data, name=config.public_data)
    )
    public = _data(other, loaded)[0]
  return relevance.Job(
    epsilon=config.epsilons[0],
    train=train,
    test=test,
    nets=_nets(config, train.num_classes),
    streams=streams(config),
    training=_training(config),
    lrp=config.lrp,
    paper=config.paper,
    rigorous=config.rigorous,
    private=config.private,
    adlm=config.adlm,
    public=public,
    relevance_records=config.relevance_records,
    on_epoch=on_epoch,
    memo=loaded.setdefault("memo", {}),
  )


def _training(config: RelevanceConfig) -> relevance.Training:
  """Field by field by name: one that both have cannot be left out."""
  names = (field.name for field in dataclasses.fields(relevance.Training))
  return relevance.Training(**{name: getattr(config, name) for name in names})


def _nets(config: RelevanceConfig, num_classes: int) -> relevance.Nets:
  reduced = config.method == "radp" and config.mode == "rigorous"
  second = config.rigorous_model if reduced and config.rigorous_model else config.model
  return relevance.Nets(
    first=_build(config.model, num_classes, config.activation_1),
    second=_build(second, num_classes, config.activation),
    body=_build(config.model, config.adlm.hidden, config.activation),
    tempered=_build(config.model, num_classes, _TEMPERED),
  )


def _build(model: ModelConfig, num_classes: int, activation: str) -> Any:
  options = dict(model.options)
  if "activation" in models.options(model.name):
    options = {"activation": activation, **options}
  return models.build(model.name, num_classes=num_classes, **options)


def is_released(config: RelevanceConfig) -> bool:
  """Whether the noise comes from the operating system."""
  rigorous = config.method == "radp" and config.mode == "rigorous"
  return rigorous and not config.rigorous.seeded_noise


def streams(config: RelevanceConfig) -> relevance.Streams:
  """Streams that depend on the seed and on everything else in the config (two runs never
  share their noise); in rigorous mode, fresh entropy unless `seeded_noise` is set."""
  plain = dataclasses.asdict(config)
  plain["data"].pop("data_dir")
  plain.pop("audit")
  build.drop_defaults(plain, dataclasses.asdict(RelevanceConfig()), _LATER)
  digest = hashlib.sha256(repr(sorted(plain.items())).encode()).digest()
  key = build.bound_key(config.seed, digest)
  secret = int.from_bytes(digest[16:], "big")
  if is_released(config):
    key, secret = noise.secure.new_key(), secrets.randbits(256)
  return relevance.Streams(jax.random.key(config.seed), key, config.seed, secret)


def _result(
  point: Point, outcome: relevance.Outcome, train: Any, started: float, workdir: Any
) -> dict[str, Any]:
  config = point.config
  curve = writers.read_metrics(workdir)
  last = curve[-1]
  return {
    "task": "classification",
    "dataset": config.data.name,
    "model": config.model.name,
    "method": config.method,
    "mode": config.mode if config.method == "radp" else None,
    "curve": point.curve,
    "epsilon_target": point.epsilon,
    **outcome.privacy.to_json(),
    "test_accuracy": last["test_accuracy"],
    "test_loss": last["test_loss"],
    "best_epoch_test_accuracy": max(row["test_accuracy"] for row in curve),
    "best_epoch_test_loss": min(row["test_loss"] for row in curve),
    "num_steps": outcome.num_steps,
    "num_epochs": config.num_epochs,
    "num_examples": len(train),
    "seed": config.seed,
    "noise_from_seed": not is_released(config),
    "num_parameters": trees.size(outcome.params),
    "params_sha256": trees.sha256(outcome.params),
    "wall_seconds": round(time.monotonic() - started, 3),
    "device": provenance.device(),
    "versions": provenance.versions(),
  }


def _save(workdir: pathlib.Path, outcome: relevance.Outcome) -> None:
  """The model, one array per path, and the maps by their names."""
  leaves = jax.tree_util.tree_leaves_with_path(outcome.params)
  arrays: dict[str, Any] = {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
    for path, leaf in leaves
  }
  np.savez(workdir / "params.npz", **arrays)
  if outcome.maps:
    np.savez(workdir / "maps.npz", **outcome.maps)  # type: ignore[arg-type]


def _warn(outcome: relevance.Outcome, num_examples: int) -> None:
  found = outcome.privacy
  if found.delta:
    warning = delta_warning(found.delta, num_examples)
    if warning:
      writers.warn(warning)

"""Runs an experiment of `dpjax.relevance`: each point to result.json, then report and table.

Points that differ only in what follows model 1 of the paper share it (its seconds count for
the first of them). A point that has its result.json is not run again, so the same command
goes on where it was stopped; a point that was cut off starts afresh. The raw noise of
rigorous mode comes from the operating system and is never written down. What is written is
which data a point had (`checkpoints/data.json` in its folder, as secret as the data), so that
points on other data are not mixed with it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import secrets
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import data as data_lib
from dpjax import models, noise, relevance, trees
from dpjax.accounting import delta_warning
from dpjax.runs.central import build
from dpjax.runs import provenance
from dpjax.runs.relevance import audit
from dpjax.runs.relevance import pictures
from dpjax.runs.relevance import table
from dpjax.runs.relevance import unused as relevance_unused
from dpjax.runs.central import run
from dpjax.runs import unused
from dpjax.runs import writers
from dpjax.runs import streams as streams_lib
from dpjax.runs.central.config import ModelConfig
from dpjax.runs.relevance.config import Point, RelevanceConfig, points
from dpjax.validate import UserError

_TEMPERED = "tempered_sigmoid"


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
  if not (workdir / run.CONFIG).exists():
    for point in todo:  # data that are missing or wrong must not claim the folder
      train, _ = _data(point.config, loaded)
      unused.refuse(point.config, relevance_unused.of_dataset(train))
  known = _before(config, workdir)
  fresh = len(todo) == 1 and not (workdir / run.CONFIG).exists()
  run.claim_workdir(workdir, known)
  with writers.alone_in(workdir), run.given_back(workdir, fresh=fresh):
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
  _check_data(workdir, [(point, folder(point)) for point in todo], loaded)
  results = []
  for point in todo:
    if len(todo) > 1:
      run.claim_workdir(folder(point), point.config)
    results.append(run_point(point, folder(point), loaded))
  pictures.report(workdir, config, [(p, folder(p)) for p in todo], results)
  table.write(workdir, results)
  if len(todo) > 1:
    writers.write_json(workdir / "results.json", results)
  return results


def _check_data(
  workdir: pathlib.Path, points: list[tuple[Point, pathlib.Path]], loaded: dict
) -> None:
  """Raises UserError, before anything runs, where points that were run had other data."""
  done = [folder for _, folder in points if (folder / writers.RESULT).exists()]
  for point, folder in points:
    held = streams_lib.held(folder)
    if held is None and folder in done and len(done) < len(points):
      held = {}  # an earlier version's: what it ran on is not known, so nothing is added
    if held is not None:
      digest = data_digest(point.config, loaded)
      streams_lib.check_data(held, digest, name=point.config.data.name, workdir=workdir)


def data_digest(config: RelevanceConfig, loaded: dict) -> bytes:
  """Of all that a point trains on: the private data, and the public ones of model 1."""
  train, public = _data(config, loaded)[0], _public(config, loaded)
  key = ("digest", id(train), id(public))  # `loaded` holds them, so the ids stay theirs
  if key not in loaded:
    digests = map(data_lib.digest, [train] if public is None else [train, public])
    loaded[key] = streams_lib.joined(*digests)
  return loaded[key]


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
  streams_lib.hold(workdir, data_digest(config, loaded))
  started = time.monotonic()
  with (
    writers.MetricsWriter(workdir) as metrics,
    writers.progress(config.num_epochs, 0, point.name) as bar,
  ):
    job = make_job(config, train, test, loaded, _recorder(metrics, bar))
    outcome = relevance.run(config.method, config.mode, job)
  result = _result(point, outcome, train, started, workdir)
  if config.audit.enabled:
    result |= audit.facts(config, job, outcome)
  result["wall_seconds"] = round(time.monotonic() - started, 3)
  _warn(outcome, len(train))
  _save(workdir, outcome)
  pictures.pictures(workdir, outcome, config.lrp)
  writers.write_result(workdir, result)
  return result


def _copied(source: pathlib.Path, workdir: pathlib.Path, point: Point) -> dict[str, Any]:
  """The run without privacy, for another panel."""
  held = streams_lib.held(source)
  if held is not None:
    streams_lib.hold(workdir, bytes.fromhex(held[streams_lib.DATA]))
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
  key = tuple(dataclasses.asdict(config.data).values())
  if key not in loaded:
    train, test = data_lib.load(
      config.data.name, data_dir=config.data.data_dir, num_classes=config.data.num_classes
    )
    if train.x.dtype != np.float32 or train.x.min() < 0 or train.x.max() > 1:
      raise UserError(f"data.name={config.data.name!r}: must be images in [0, 1]")
    loaded[key] = build.limited(train, config.data), test
  return loaded[key]


def _public(config: RelevanceConfig, loaded: dict) -> Any:
  """The data of a public model 1, or None."""
  if config.public_data is None:
    return None
  other = dataclasses.replace(
    config, data=dataclasses.replace(config.data, name=config.public_data)
  )
  return _data(other, loaded)[0]


def make_job(
  config: RelevanceConfig, train: Any, test: Any, loaded: dict, on_epoch: Any = None
) -> relevance.Inputs:
  """The job of a point's config: what another curve of the experiment reads is left out."""
  read = relevance.reads(config.method, config.mode, config.rigorous)
  first = jnp.zeros_like(train.x[:1])  # refused before anything is trained or spent
  net = _build(config.model, train.num_classes, config.activation_1)
  jax.eval_shape(lambda: build.init_params(config.model, net, jax.random.key(0), first))
  return relevance.Inputs(
    epsilon=config.epsilons[0],
    train=train,
    test=test,
    nets=_nets(config, train.num_classes),
    streams=streams(config, data_digest(config, loaded)),
    training=_training(config),
    lrp=config.lrp,
    paper=config.paper,
    rigorous=config.rigorous,
    private=config.private,
    adlm=config.adlm,
    public=_public(config, loaded) if "public" in read else None,
    relevance_records=config.relevance_records if "relevance_records" in read else None,
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


def streams(config: RelevanceConfig, data: bytes) -> relevance.Streams:
  """Streams of the seed, of everything else in the config and of the data (two runs never
  share their noise); in rigorous mode, fresh entropy unless `seeded_noise` is set.

  The order of batches depends on seed and data alone, so that runs that differ in what
  follows model 1 can share it. In rigorous mode it must NOT depend on the data, for the model
  that is released depends on it.

  Args:
    data: `data_digest`.
  """
  if is_released(config):
    fresh = noise.secure.new_key(), secrets.randbits(64), secrets.randbits(256)
    return relevance.Streams(jax.random.key(config.seed), *fresh)
  fields = dataclasses.asdict(config)
  fields["data"].pop("data_dir")
  fields.pop("audit")
  named = streams_lib.config_digest("relevance", fields)
  keys = streams_lib.keys(config.seed, named, data)
  return relevance.Streams(keys.init, keys.first, keys.order, keys.sampler)


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

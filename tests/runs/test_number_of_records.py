"""A game: two data sets one record, or one user, apart are built by every published config, every
sampler and every kind of run. Plan, promise and what is written outside checkpoints are equal.

Under add_or_remove_one the number of records is a secret. Whoever sees the scale of the noise
would count them, if a divisor or a probability followed it (arXiv 2605.15648).
"""

import contextlib
import dataclasses
import importlib
import json
import pathlib
from unittest import mock

import numpy as np
import pytest

from configs import quickstart
from configs.fed import quickstart as fed_quickstart
from dpjax import accounting, data, relevance, sampling
from dpjax.data import published
from dpjax.plan import Plan
from dpjax.runs import dry_run, loop, streams
from dpjax.runs.attack import build as attack_build
from dpjax.runs.attack.config import AttackConfig
from dpjax.runs.central import build, facts, normalization, privacy
from dpjax.runs.central.config import TrainConfig
from dpjax.runs.federated import build as federate_build
from dpjax.runs.federated import facts as federate_facts
from dpjax.runs.federated import privacy as federate_privacy
from dpjax.runs.federated.config import FedConfig
from dpjax.runs.relevance import build as relevance_build
from dpjax.runs.relevance.config import RelevanceConfig
from dpjax.schema import fields
from dpjax.sweeps import attack_table, experiment, grid
from dpjax.validate import UserError
from tests.runs import descriptions

_ROOT = pathlib.Path(__file__).resolve().parents[2] / "configs"
_ADD = "add_or_remove_one"
_USERS = 3_400  # of the federation of files that a config names
_NEAR = (-1, 0, 1)


def _published():
  """Name -> run: of every published config, those of its sweeps, tables and curves included."""
  found = {}
  for path in sorted(_ROOT.rglob("*.py")):
    name = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
    module = importlib.import_module(f"configs.{name}")
    if not hasattr(module, "get_config"):
      continue
    config = module.get_config()
    for label, run in _runs_of(config):
      found[f"{name} {label}".strip()] = run
  return found


def _runs_of(config):
  """(label, run) of a config: one of each line of variants."""
  tables = {
    grid.SweepConfig: grid,
    AttackConfig: attack_table,
    RelevanceConfig: experiment,
  }
  if type(config) not in tables:
    return [("", config)] if isinstance(config, (TrainConfig, FedConfig)) else []
  lines = {}
  for point in tables[type(config)].points(config):
    label = str(point.overrides.get("variant", "")).split(" @ ")[0]
    run = point.config
    if isinstance(run, AttackConfig):
      run = attack_build.room(run)
    lines.setdefault(label, run)
  return lines.items()


_RUNS = _published()


# --- data of zeros, of any size, that take no memory


def _shape(config):
  """Of an example of the data that a config names, as its model takes it."""
  name = config.data.name
  text = {"shakespeare_roles": (16, 64), "shakespeare": (80,)}
  if name.startswith("shakespeare"):
    return text.get(name, (64,)), np.int32
  if name == "imdb_reviews":
    return (config.data.max_length,), np.int32
  side, depth = (32, 3) if name in ("cifar10", "random_process") else (28, 1)
  side = 8 if name == "digits" else side
  if "scatter" in config.model.name:
    return (side // 4, side // 4, 81 * depth), np.float32
  return (side, side, depth), np.float32


def _zeros(config, count, nominal):
  shape, dtype = _shape(config)
  x = np.broadcast_to(np.zeros(shape, dtype), (count, *shape))
  is_text = dtype == np.int32
  classes = 256 if is_text else config.data.num_classes or 10
  made = data.Dataset(
    x=x,
    y=np.zeros(count, np.int32),
    name=config.data.name,
    num_classes=classes,
    split="train",
    vocab_size=256 if is_text else None,
    nominal_size=nominal,
  )
  return made


def _declared(config):
  """How many examples there are said to be."""
  known = {"random_process": 32_000, "imdb_reviews": 25_000}
  name = config.data.name
  return config.data.limit or known.get(name) or published.nominal_size(name) or 20_000


# --- what is built


@contextlib.contextmanager
def _fast():
  """Calibration and models that take no time; see `descriptions`."""
  with descriptions.fast(), mock.patch.object(normalization, "released", lambda *_: None):
    yield


def _stated(stated, steps):
  """Everything that a promise says before its run."""
  found = [stated.kind, stated.delta, stated.relation, stated.unit, stated.accountant]
  found += [stated.statement(steps), stated.curve(steps), stated.accounted_delta]
  found += [stated.l2_bound, stated.num_records, stated.failed_assumptions]
  return [*found, stated.step_event(0), stated.remaining_event(0)]


def _central(config, count):
  """Plan, promise and planned result of a run on so many records, of those that it declares."""
  train = _zeros(config, count, _declared(config))
  random = build.streams(config, bytes(32))
  run = build.assemble(config, (train, train), random)
  if not run.promise.relation == _ADD:
    return None
  rates = [float(run.schedule(step)) for step in (0, 1, config.num_steps - 1)]
  run.plan.batches(run.train, rng=0)  # is not refused
  found = [run.plan, _stated(run.promise, config.num_steps), facts.planned(config, run)]
  return repr([*found, rates, run.noise])


def _federated(config, count):
  """The same of a run over so many users."""
  dealt = getattr(config.partition, "num_clients", None)
  declared = _declared_users(config)
  train = _zeros(config, 2 * declared + 4, None)
  rows = np.arange(2 * count).reshape(count, 2)
  nominal = declared if dealt is None else None
  federation = data.Federation(train, list(rows), nominal_users=nominal)
  random = federate_build.streams(config, bytes(32))
  run = federate_build.assemble(config, (federation, train), random)
  if not run.promise.relation == _ADD:
    return None
  drawn = run.algorithm.cohorts(run.federation, run.work, rng=0)
  next(drawn)  # is not refused
  found = [run.plan, _stated(run.promise, config.num_rounds)]
  return repr([*found, federate_facts.planned(config, run)])


def _declared_users(config):
  dealt = getattr(config.partition, "num_clients", None)
  return dealt or config.data.num_users or 1_019


def _of_relevance(config, count):
  """The inputs of a method: its plans are made of their size alone."""
  train = _zeros(config, count, _declared(config))
  random = streams.derived(config.seed, bytes(32), bytes(32))
  job = relevance_build.make_job(config, train, train.subset(slice(0, 2)), {}, random)
  from dpjax.relevance import gradient_methods

  if config.method not in relevance_build.unused.PLAN:
    return None
  if config.private.neighboring_relation != _ADD:
    return None
  return repr([job.size, gradient_methods.make_plan(job, job.size, job.epsilon)])


def _differing(config):
  """What is built of one record less, as many as declared, and one more; None where neighbours
  have as many records."""
  if isinstance(config, FedConfig):
    describe, declared = _federated, _declared_users(config)
  elif isinstance(config, RelevanceConfig):
    describe, declared = _of_relevance, _declared(config)
  else:
    describe, declared = _central, _declared(config)
  found = [describe(config, declared + more) for more in _NEAR]
  return found if found[0] is not None else None


@pytest.mark.parametrize("name", _RUNS)
def test_a_record_more_or_less_changes_no_plan_of_a_published_run(name):
  with _fast():
    found = _differing(_RUNS[name])
  if found is not None:
    assert found[0] == found[1] == found[2]

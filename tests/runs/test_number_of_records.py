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
from dpjax.relevance import gradient_methods
from dpjax.runs import dry_run, loop, streams
from dpjax.runs.attack import build as attack_build
from dpjax.runs.attack.config import AttackConfig
from dpjax.runs.central import build, facts, normalization, privacy
from dpjax.runs.central.config import ModelConfig, TrainConfig
from dpjax.runs.federated import build as federate_build
from dpjax.runs.federated import facts as federate_facts
from dpjax.runs.federated import privacy as federate_privacy
from dpjax.runs.federated.config import FedConfig
from dpjax.runs.relevance import build as relevance_build
from dpjax.runs.relevance import unused as relevance_unused
from dpjax.runs.relevance.config import RelevanceConfig
from dpjax.schema import fields
from dpjax.sweeps import attack_table, experiment, grid
from dpjax.validate import UserError
from tests.runs import descriptions

_ROOT = pathlib.Path(__file__).resolve().parents[2] / "configs"
_ADD = "add_or_remove_one"


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
  """Of an example of the data that a config names; images are small."""
  name = config.data.name
  if name.startswith("shakespeare"):
    text = {"shakespeare_roles": (16, 64), "shakespeare": (80,)}
    return text.get(name, (64,)), np.int32
  depth = 3 if name in ("cifar10", "random_process") else 1
  return (8, 8, depth), np.float32


def _small(config):
  """The same run of a linear model, where its data are images: no plan follows from a model."""
  if config.data.name.startswith("shakespeare"):
    return config
  changes = {"model": ModelConfig(name="linear")}
  if isinstance(config, RelevanceConfig):
    changes["rigorous_model"] = None
  return dataclasses.replace(config, **changes)


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
  name = config.data.name
  known = 32_000 if name == "random_process" else published.nominal_size(name)
  return config.data.limit or known or 20_000


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
  if config.method not in relevance_unused.PLAN:
    return None
  if config.private.neighboring_relation != _ADD:
    return None
  train = _zeros(config, count, _declared(config))
  random = streams.derived(config.seed, bytes(32), bytes(32))
  job = relevance_build.make_job(config, train, train.subset(slice(0, 2)), {}, random)
  plan = gradient_methods.make_plan(job, job.size, job.epsilon)
  plan.batches(job.train, rng=0)  # is not refused
  return repr([job.size, plan])


def _differing(config):
  """What is built of one record less, as many as declared, and one more; None where neighbours
  have as many records."""
  if isinstance(config, FedConfig):
    describe, declared = _federated, _declared_users(config)
  elif isinstance(config, RelevanceConfig):
    describe, declared = _of_relevance, _declared(config)
  else:
    describe, declared = _central, _declared(config)
  usual = describe(config, declared)
  if usual is None:
    return None
  return [describe(config, declared - 1), usual, describe(config, declared + 1)]


@pytest.mark.parametrize("name", _RUNS)
def test_a_record_more_or_less_changes_no_plan_of_a_published_run(name):
  with _fast():
    found = _differing(_small(_RUNS[name]))
  if found is not None:
    assert found[0] == found[1] == found[2]


# --- every sampler beside what else a plan is made of

_SAMPLERS = [*privacy.SAMPLERS, *privacy.ftrl.SAMPLERS]
_CENTRAL = {
  "alone": {},
  "adaptive": {"privacy.clipping": "adaptive"},
  "per layer": {"privacy.clipping": "per_layer"},
  "levels": {"privacy.noise_levels": [1.5, 0.5]},
  "clip schedule": {"privacy.clip_schedule": "linear"},
  "slices": {"slices": 2},
  "statistics": {"privacy.normalization": "private_statistics"},
  "whitening": {"privacy.normalization": "private_whitening"},
  "dp_sgld": {"optimizer.rule": "dp_sgld"},
  "dp_adam": {"optimizer.rule": "dp_adam"},
  "rdp": {"privacy.accountant": "rdp"},
  "a limit": {"data.limit": 400},
  "all records": {"privacy.sampling_prob": 1.0},
  "release": {"release": True},
}
_FED = {
  "alone": {},
  "adaptive": {"privacy.clipping": "adaptive"},
  "both": {"privacy.method": "both"},
  "simulated": {"privacy.simulated_cohort": 100, "privacy.simulated_clients": 10_000},
  "scaffold": {"algorithm": "scaffold"},
  "fed_nova": {"algorithm": "fed_nova"},
  "mime_lite": {"algorithm": "mime_lite"},
  "all users": {"clients_per_round": 100.0},
  "release": {"release": True},
}


def _cells(table, samplers):
  """(sampler, changes) of every cell."""
  for sampler in samplers:
    for name, changes in table.items():
      yield pytest.param(sampler, changes, id=f"{sampler}-{name}")


def _chosen(config, sampler, changes):
  """The config with a sampler, wherever it is named; None: they do not go together."""
  correlated = sampler in privacy.ftrl.SAMPLERS
  own = {"privacy.method": "dp_ftrl", "privacy.ftrl.sampler": sampler}
  chosen = own if correlated else {"privacy.sampler": sampler}
  return fields.replace_all(config, {**chosen, **changes})


def _played(config):
  """Builds it three times; skips what is refused for other reasons."""
  with _fast():
    try:
      describe = _federated if isinstance(config, FedConfig) else _central
      declared = _declared_users(config) if describe is _federated else _declared(config)
      describe(config, declared)
    except UserError as error:
      assert not str(error).startswith(("data.num_examples", "data.num_users"))
      pytest.skip(f"refused: {error}")
    found = _differing(config)
  if found is None:
    pytest.skip("neighbours have as many records")
  assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("sampler", "changes"), _cells(_CENTRAL, _SAMPLERS))
def test_a_record_more_or_less_changes_no_plan_of_any_sampler(sampler, changes):
  base = {"privacy.sampling_prob": 0.25, "privacy.epsilon": None, "num_steps": 8}
  base |= {"privacy.noise_multiplier": 2.0}
  config = fields.replace_all(_small(quickstart.get_config()), base)
  _played(_chosen(config, sampler, changes))


_FED_SAMPLERS = [*federate_privacy.SAMPLERS, *privacy.ftrl.SAMPLERS]


@pytest.mark.parametrize(("sampler", "changes"), _cells(_FED, _FED_SAMPLERS))
def test_a_user_more_or_less_changes_no_plan_of_any_sampler(sampler, changes):
  base = {"privacy.noise_multiplier": 2.0, "privacy.epsilon": None, "num_rounds": 8}
  config = fields.replace_all(_small(fed_quickstart.get_config()), base)
  _played(_chosen(config, sampler, changes))


# --- real runs of seconds

_RUN = {
  "model.name": "linear",
  "model.options": {},
  "privacy.epsilon": None,
  "privacy.noise_multiplier": 2.0,
  "eval_every": 2,
  "checkpoint_every": 2,
  "diagnostics": False,
}
# What noise and time decide, in result.json and in a row of metrics.
_DECIDED = ("test_accuracy", "test_loss", "params_sha256", "run_sha256", "wall_seconds")
_DECIDED += ("rounds_to_accuracy", "ledger", "final_l2_clip_norm", "l2_clip_norm")
_FIXED = ("params.npz", "config.json")  # files whose size no noise decides


def _digits(count):
  """So many records, which are said to be 300."""
  train, test = data.load("digits")
  return train.subset(slice(0, count)).declared(300), test.subset(slice(0, 40))


def _left(config, loaded, folder):
  """What a run leaves outside its checkpoints, but for what noise and time decide."""
  result = loop.train(config, folder, data=loaded)
  told = {key: value for key, value in result.items() if key not in _DECIDED}
  rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  metrics = [
    {key: None if key in _DECIDED else value for key, value in row.items()} for row in rows
  ]
  paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
  inside = [path.relative_to(folder) for path in paths]
  names = [
    str(path.parent / "events") if "tfevents" in path.name else str(path)
    for path in inside
    if "checkpoints" not in path.parts
  ]
  sizes = {name: (folder / name).stat().st_size for name in _FIXED}
  ledger = result.get("ledger")
  return json.dumps(
    [sorted(result), told, metrics, names, sizes, ledger], default=str, sort_keys=True
  ), (folder / "config.json").read_text()


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("sampler", ["poisson", "random_allocation"])
def test_a_record_more_or_less_is_in_no_file(tmp_path, release, sampler):
  changes = {"num_steps": 4, "privacy.sampling_prob": 0.25, "privacy.sampler": sampler}
  config = fields.replace_all(quickstart.get_config(), {**_RUN, **changes})
  if release:
    config = fields.replace_all(config, {"release": True, "diagnostics": True})
  left = [_left(config, _digits(n), tmp_path / str(n)) for n in (299, 300, 301)]
  assert left[0] == left[1] == left[2]


@pytest.mark.parametrize("release", [False, True])
def test_a_user_more_or_less_is_in_no_file(tmp_path, release):
  changes = {"num_rounds": 4, "clients_per_round": 5.0, "partition.num_clients": 20}
  config = fields.replace_all(fed_quickstart.get_config(), {**_RUN, **changes})
  if release:
    config = fields.replace_all(config, {"release": True, "diagnostics": True})
  train, test = _digits(300)
  rows = np.array_split(np.arange(300), 21)
  left = []
  for users in (19, 20, 21):
    federation = data.Federation(train, rows[:users])
    left.append(_left(config, (federation, test), tmp_path / str(users)))
  assert left[0] == left[1] == left[2]

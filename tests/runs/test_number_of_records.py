"""A game: two data sets one record, or one user, apart are built by every published config, every
sampler and every kind of run. Plan, guarantee and what is written outside checkpoints are equal.

Under add_or_remove_one the number of records is a secret. Whoever sees the scale of the noise
would count them, if a divisor or a probability followed it (arXiv 2605.15648).
"""

import contextlib
import dataclasses
import hashlib
import json
import math
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest

from configs import quickstart
from configs.fed import quickstart as fed_quickstart
from configs.pate import quickstart as pate
from configs.synthesis import quickstart as synthesis
from dpjax import accounting, data
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central import (
  build,
  facts,
  normalization,
  one_release,
  privacy,
)
from dpjax.experiments.kinds.central.config import LeastSquares, ModelConfig, TrainConfig
from dpjax.experiments.kinds.federated import build as federate_build
from dpjax.experiments.kinds.federated import facts as federate_facts
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.relevance import build as relevance_build
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.kinds.relevance.methods import NoisyGradients, RadpRigorous
from dpjax.experiments.run import loop, run_keys
from dpjax.experiments.sweeps.sweep import Sweep
from dpjax.mechanisms import class_sums
from dpjax.relevance import gradient_methods
from dpjax.sampling.registry import used_for
from dpjax.validate import UserError
from dpjax.zoo.datasets import published
from tests.refuses import refuses
from tests.runs import published_runs

_ADD = "add_or_remove_one"


_KINDS = (TrainConfig, FedConfig, Sweep, AttackConfig, RelevanceConfig)
_PUBLISHED = {
  name: config
  for name, config in published_runs.configs().items()
  if type(config) in _KINDS
}


def _runs_of(name):
  """The runs of a published file: the first of each line of a sweep."""
  config = _PUBLISHED[name]
  if not isinstance(config, (Sweep, AttackConfig)):
    return [config]
  runs = published_runs.first_of_lines(name)
  # A sweep trains without noise where epsilon is infinite.
  runs = [
    run for run in runs if getattr(getattr(run, "privacy", None), "epsilon", 1) != math.inf
  ]
  if isinstance(config, AttackConfig):
    runs = runs[:1]
  return [run.target if isinstance(run, AttackConfig) else run for run in runs]


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
  if isinstance(getattr(config, "method", None), RadpRigorous):
    changes["method"] = dataclasses.replace(config.method, reduced_model=None)
  small = dataclasses.replace(config, **changes)
  directions = "privacy.directions"
  if getattr(small, "privacy", None) and isinstance(small.privacy, LeastSquares):
    small = fields.replace(small, directions, 20)  # pixels are fewer than features
  return small


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


_PARAMS = {}


class _Remembered(NamedTuple):
  """A model whose parameters are drawn once for each shape and key."""

  module: Any

  def __getattr__(self, name):
    return getattr(self.module, name)

  def init(self, key, x):
    if isinstance(key, jax.core.Tracer):  # who asks for the shapes alone
      return self.module.init(key, x)
    what = repr((self.module, x.shape, jax.random.key_data(key).tolist()))
    if what not in _PARAMS:
      _PARAMS[what] = self.module.init(key, x)
    return _PARAMS[what]


def _spent(event, **options):
  """A number that depends on all that an epsilon would depend on."""
  text = repr((event, sorted(options.items())))
  word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
  return 1.0 + word / 2**32


@contextlib.contextmanager
def _fast():
  """Calibration and models that take no time, and depend on all that they depend on."""
  make = build.make_model
  with (
    mock.patch.object(
      accounting, "calibrate_noise_multiplier", lambda make, **how: _spent(make(1.5), **how)
    ),
    mock.patch.object(accounting, "epsilon", _spent),
    mock.patch.object(
      accounting,
      "privacy_statement",
      lambda *given, **how: repr((given, sorted(how.items()))),
    ),
    mock.patch.object(build, "make_model", lambda *a, **k: _Remembered(make(*a, **k))),
    mock.patch.object(normalization, "release", lambda *_: None),
  ):
    yield


def _stated(stated, steps):
  """Everything that a guarantee says before its run."""
  found = [stated.kind, stated.delta, stated.relation, stated.unit, stated.accountant]
  found += [stated.statement(steps), stated.curve(steps), stated.accounted_delta]
  found += [stated.l2_bound, stated.num_records, stated.failed_assumptions]
  return [*found, stated.step_event(0), stated.remaining_event(0)]


def _central(config, count):
  """Plan, guarantee and planned result of a run on so many records, of those that it declares."""
  train = _zeros(config, count, _declared(config))
  random = build.Central(config).new_keys()
  if isinstance(config.privacy, LeastSquares):
    work = one_release.phase(config, (train, train), random)
    assert work.guarantee.relation == _ADD
    return repr([*_stated(work.guarantee, 1), work.planned()])
  run = build.assemble(config, (train, train), random)
  if run.guarantee.relation != _ADD:
    return None
  rates = [float(run.schedule(step)) for step in (0, 1, config.num_steps - 1)]
  run.plan.batches(run.train, rng=0)  # is not refused
  found = [
    run.plan,
    _stated(run.guarantee, config.num_steps),
    facts.planned_facts(config, run),
  ]
  return repr([*found, rates, run.noise])


def _federated(config, count):
  """The same of a run over so many users."""
  dealt = getattr(config.partition, "num_clients", None)
  declared = _declared_users(config)
  train = _zeros(config, 2 * declared + 4, None)
  rows = np.arange(2 * count).reshape(count, 2)
  sizes = getattr(config.privacy, "num_examples", ())
  sizes = sizes or getattr(config.partition, "sizes", None)
  if sizes:  # hides a record of a silo: the first silo has one less, or one more
    train = _zeros(config, sum(sizes) + 4, None)
    ends = np.cumsum(sizes) + count - declared
    rows = np.split(np.arange(ends[-1]), ends[:-1])
  nominal = declared if dealt is None else None
  federation = data.Federation(
    train, list(rows), nominal_users=nominal, nominal_sizes=sizes or None
  )
  random = build.Central(config).new_keys()
  run = federate_build.assemble(config, (federation, train), random)
  if run.guarantee.relation != _ADD:
    return None
  drawn = run.algorithm.cohorts(run.federation, run.work, rng=0)
  next(drawn)  # is not refused
  found = [run.plan, _stated(run.guarantee, config.num_rounds)]
  return repr([*found, federate_facts.planned_facts(run)])


def _declared_users(config):
  dealt = getattr(config.partition, "num_clients", None)
  row = published.PUBLISHED.get(config.data.name)
  known = row.num_users if row else None
  return dealt or config.data.num_users or known or 1_019


def _of_relevance(config, count):
  """The inputs of a method: its plans are made of their size alone."""
  if not isinstance(config.method, NoisyGradients):
    return None
  if config.method.neighboring_relation != _ADD:
    return None
  train = _zeros(config, count, _declared(config))
  random = run_keys.draw(config.seed, noise_seed=0)
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


def _check_plans(runs):
  for run in runs:
    with _fast():
      found = _differing(_small(run))
    if found is not None:
      assert found[0] == found[1] == found[2]


@pytest.mark.cases(
  quick=[
    "attack.extraction_digits",
    "attack.membership_cifar10",
    "attack.poisoning_digits",
    "attack.quickstart",
    "breast_cancer",
    "cifar10_cnn",
    "sweeps.mnist_algorithms",
    "sweeps.mnist_cnn",
    "sweeps.mnist_curves",
    "sweeps.movie_reviews",
    "sweeps.secure_sums_mnist",
  ],
  long=...,
)
@pytest.mark.parametrize("name", _PUBLISHED)
def test_a_record_more_or_less_changes_no_plan_of_a_published_run(name):
  """The first run of each file."""
  _check_plans(_runs_of(name)[:1])


@pytest.mark.long
@pytest.mark.parametrize(
  "name", [name for name, config in _PUBLISHED.items() if type(config) in _KINDS[2:]]
)
def test_a_record_more_or_less_changes_no_plan_of_another_line(name):
  _check_plans(_runs_of(name)[1:])


# --- every sampler beside what else a plan is made of

_CORRELATED = used_for("correlated noise")
_SAMPLERS = [*used_for("examples"), *_CORRELATED]
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
  "both": {"privacy": "both"},
  "simulated": {"privacy.simulated_cohort": 100, "privacy.simulated_clients": 10_000},
  "scaffold": {"algorithm": "scaffold"},
  "fed_nova": {"algorithm": "fed_nova"},
  "mime_lite": {"algorithm": "mime_lite"},
  "all users": {"clients_per_round": 100.0},
  "release": {"release": True},
}


def _cells(table, samplers, only_white=()):
  """(sampler, changes) of every cell; the first row and the first column are no long tests.

  Of `only_white`, correlated noise has no field.
  """
  for sampler in samplers:
    for name, changes in table.items():
      if sampler in _CORRELATED and name in only_white:
        continue
      long = sampler != "poisson" and name != "alone"
      marks = [pytest.mark.long] if long else []
      yield pytest.param(sampler, changes, id=f"{sampler}-{name}", marks=marks)


def _chosen(config, sampler, changes):
  """The config with a sampler, wherever it is named."""
  correlated = sampler in _CORRELATED
  own = {"privacy": "dp_ftrl", "privacy.sampler": sampler}
  chosen = own if correlated else {"privacy.sampler": sampler}
  return fields.replace_all(fields.replace_all(config, chosen), changes)


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


@pytest.mark.cases(
  slow=[
    *("with_replacement-alone", "poisson-levels", "poisson-dp_sgld", "poisson-per layer"),
    *("poisson-clip schedule", "poisson-dp_adam", "poisson-a limit", "poisson-all records"),
  ]
)
@pytest.mark.parametrize(("sampler", "changes"), _cells(_CENTRAL, _SAMPLERS))
def test_a_record_more_or_less_changes_no_plan_of_any_sampler(sampler, changes):
  base = {"privacy.sampling_prob": 0.25, "privacy.epsilon": None, "num_steps": 8}
  base |= {"privacy.noise_multiplier": 2.0}
  config = fields.replace_all(_small(quickstart.get_config()), base)
  _played(_chosen(config, sampler, changes))


_FED_SAMPLERS = [*used_for("clients"), *_CORRELATED]


@pytest.mark.cases(
  slow=[
    *("poisson-both", "poisson-scaffold", "poisson-mime_lite", "poisson-release"),
    "poisson-all users",
  ]
)
@pytest.mark.parametrize(
  ("sampler", "changes"), _cells(_FED, _FED_SAMPLERS, only_white=("adaptive", "simulated"))
)
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
_DECIDED += ("rounds_to_accuracy", "ledger", "final_l2_clip_norm", "versions")
# digests of parameters and pictures, which hold noise
_DECIDED += ("files_sha256",)
_FIXED = ("params.npz", "config.json")  # files whose size no noise decides


def _digits(count):
  """So many records, which are said to be 300."""
  train, test = data.load("digits")
  return train.subset(slice(0, count)).declared(300), test.subset(slice(0, 40))


def _left(config, loaded, folder):
  """What a run leaves outside its checkpoints, but for what noise and time decide."""
  result = loop.train(config, folder, data=loaded)
  undecided = {key: value for key, value in result.items() if key not in _DECIDED}
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
  ledger = json.loads(json.dumps(result["ledger"]))
  for charge in ledger["charges"]:
    charge.pop("noise_key_id")  # of a release: from the operating system
  return json.dumps(
    [sorted(result), undecided, metrics, names, sizes, ledger], default=str, sort_keys=True
  ), (folder / "config.json").read_text()


@pytest.mark.long
@pytest.mark.parametrize("release", [False, True])
def test_a_record_more_or_less_is_in_no_file(tmp_path, release):
  changes = {"num_steps": 4, "privacy.sampling_prob": 0.25}
  config = fields.replace_all(fields.replace_all(quickstart.get_config(), _RUN), changes)
  if release:
    config = fields.replace_all(config, {"release": True, "diagnostics": True})
  left = [_left(config, _digits(n), tmp_path / str(n)) for n in (299, 301)]
  assert left[0] == left[1]


@pytest.mark.long
@pytest.mark.parametrize("release", [False, True])
def test_a_user_more_or_less_is_in_no_file(tmp_path, release):
  changes = {"num_rounds": 4, "clients_per_round": 5.0, "partition.num_clients": 20}
  config = fields.replace_all(
    fields.replace_all(fed_quickstart.get_config(), _RUN), changes
  )
  if release:
    config = fields.replace_all(config, {"release": True, "diagnostics": True})
  train, test = _digits(300)
  rows = np.array_split(np.arange(300), 21)
  left = []
  for users in (19, 21):
    federation = data.Federation(train, rows[:users])
    left.append(_left(config, (federation, test), tmp_path / str(users)))
  assert left[0] == left[1]


# --- recipes: what is left where the private parts are equal


def _samples():
  config = fields.replace_all(
    synthesis.get_config(),
    {"num_samples": 50, "method.num_steps": 50, "num_latents": 4, "hidden": 8},
  )
  exact = class_sums.ClassSums.exact
  nothing = lambda *given: 0 * exact(*given)
  return config, mock.patch.object(class_sums.ClassSums, "exact", nothing)


def _votes():
  """Votes of teachers without any record, since each part takes its first two alone."""
  changes = {"num_teachers": 5, "teacher_capacity": 2, "std": 1.0, "num_queries": 5}
  changes |= {"num_pool": 20, "pool_is_public": True, "num_neighbors": 3}
  changes |= {"num_components": 5, "num_student_components": 5}
  return fields.replace_all(pate.get_config(), changes), contextlib.nullcontext()


def _files(config, loaded, folder):
  """What a run leaves outside checkpoints, but for what time decides, or what is not private."""
  result = loop.train(config, folder, data=loaded)
  timed = ("wall_seconds", "versions", "starts", "run_sha256", "files_sha256")
  kept = {
    name: value
    for name, value in result.items()
    if name not in timed and not name.startswith("not_private/")
  }
  left = {
    str(path.relative_to(folder)): path.read_bytes()
    for path in folder.iterdir()
    if path.is_file() and path.name != "result.json" and path.stem.split(".")[0] != "report"
  }
  return left | {"result": kept}


@pytest.mark.long
@pytest.mark.parametrize("relation", [_ADD, "replace_one"])
@pytest.mark.parametrize("kind", [_samples, _votes])
def test_a_record_that_no_release_shows_is_in_no_byte(tmp_path, kind, relation):
  """Neighbours whose released numbers are equal leave equal files: nothing beside the releases
  follows from the records."""
  config, equal = kind()
  config = fields.replace_all(config, {"noise_seed": 1, "neighboring_relation": relation})
  train, test = _digits(299)
  if relation == _ADD:
    other = _digits(300)[0]
  else:
    x, y = train.x.copy(), train.y.copy()
    x[-1], y[-1] = 1.0, (y[-1] + 1) % 10
    other = dataclasses.replace(train, x=x, y=y)
  with equal:
    left = [
      _files(config, (rows, test), tmp_path / str(place))
      for place, rows in enumerate((train, other))
    ]
  assert left[0] == left[1]


# --- what is declared, and what is refused


def _own(count, **declared):
  x, y = np.zeros((count, 2, 2, 1), np.float32), np.zeros(count, np.int64)
  return data.from_arrays(x, y, num_classes=2, **declared)


def _plain(**changes):
  base = {**_RUN, "num_steps": 2, "privacy.sampling_prob": 0.25, "data.center": False}
  return fields.replace_all(fields.replace_all(quickstart.get_config(), base), changes)


def _assembled(config, train):
  with _fast():
    return build.assemble(config, (train, train))


def test_own_data_without_a_declared_number_are_refused_in_one_line_that_says_both_ways():
  with pytest.raises(UserError) as caught:
    _assembled(_plain(), _own(100))
  text = str(caught.value)
  assert "--config.data.num_examples=N" in text and len(text) < 300 and "\n" not in text
  assert "--config.privacy.neighboring_relation=replace_special" in text
  assert "100" not in text  # a secret, also where an error is kept


@pytest.mark.parametrize("way", ["config", "arrays"])
def test_a_declared_number_decides_the_plan(way):
  declared = {"nominal_size": 120} if way == "arrays" else {}
  config = _plain(**({"data.num_examples": 120} if way == "config" else {}))
  run = _assembled(config, _own(100, **declared))
  assert run.plan.normalize_by == 0.25 * 120 and run.guarantee.num_records == 120
  assert "The declared number of 120 examples" in " ".join(run.plan.statement(120).split())


def test_a_relation_that_fixes_the_number_needs_no_other():
  config = _plain(**{"privacy.neighboring_relation": "replace_special"})
  run = _assembled(config, _own(100, nominal_size=120))
  assert run.plan.normalize_by == 0.25 * 100 and run.guarantee.num_records == 100
  text = " ".join(run.plan.statement(100).split())
  assert "The number of examples (100) is the same in neighbouring data sets" in text


def test_both_relations_cost_the_same():
  config = _plain(**{"data.num_examples": 100})
  special = fields.replace(config, "privacy.neighboring_relation", "replace_special")
  plans = [privacy.make_plan(one, 100) for one in (config, special)]
  assert plans[0].epsilon() == plans[1].epsilon()


@pytest.mark.parametrize("count", [50, 99, 100, 101])
def test_data_near_the_declared_number_are_served(count):
  run = _assembled(_plain(**{"data.num_examples": 100}), _own(count))
  run.plan.batches(run.train, rng=0)


def test_data_far_from_the_declared_number_are_refused():
  with refuses("data.num_examples", value=100):
    _assembled(_plain(**{"data.num_examples": 100}), _own(49))
  run = _assembled(_plain(**{"data.num_examples": 100}), _own(1000))
  with refuses("num_examples"):
    run.plan.batches(run.train, rng=0)


def test_published_data_declare_their_own():
  assert data.load("digits")[0].nominal_size == len(
    published.PUBLISHED["digits"].load()()[0]
  )
  assert data.load("digits", num_examples=1437)[0].nominal_size == 1437
  with refuses("num_examples", value=1000):
    data.load("digits", num_examples=1000)


def test_a_limit_declares_itself_and_a_part_keeps_what_was_declared():
  train, _ = build.load_data(_plain(**{"data.limit": 100}))
  assert train.nominal_size == 100 and train.subset(slice(0, 99)).nominal_size == 100
  less = _own(99)
  assert _plain(**{"data.limit": 100}).data.preprocess(less, less)[0].nominal_size == 100
  with pytest.raises(UserError, match="data.limit=101: must be at most"):
    _plain(**{"data.limit": 101}).data.preprocess(less, less)


def test_an_npz_may_declare_it(tmp_path):
  arrays = {"x_train": np.eye(12), "y_train": np.arange(12) % 2, "num_classes": 2}
  arrays |= {"x_test": np.eye(12)[:4], "y_test": [0, 1, 0, 1]}
  np.savez(tmp_path / "own.npz", num_examples=15, **arrays)
  assert data.load(tmp_path / "own.npz")[0].nominal_size == 15
  with refuses("num_examples", value=12):
    data.load(tmp_path / "own.npz", num_examples=12)


def test_the_game_can_be_lost():
  """A plan that follows the true number is found, by the game and by launch.check."""
  follow = lambda config, train: len(train)
  config = _plain(**{"data.limit": 300})
  with mock.patch.object(privacy, "public_size", follow), _fast():
    found = _differing(config)
  assert found is not None and found[0] != found[1] != found[2]


def test_launch_check_finds_a_plan_that_follows_the_true_number():
  config = _plain(**{"data.limit": 300})
  assert of_config.size_of_data(of_config.subject(config)).passed
  follow = lambda config, train: len(train)
  with mock.patch.object(privacy, "public_size", follow):
    row = of_config.size_of_data(of_config.subject(config))
  assert row.passed is False and "plan" in row.detail

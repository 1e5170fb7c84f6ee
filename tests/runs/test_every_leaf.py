"""Every field of every config: a change of it changes what is built or run, or is refused.

No list of fields is kept here: `leaf_walk` finds them, and other values for them.
"""

import copy
import dataclasses
import pickle
import re
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest

from dpjax.experiments.config import fields
from dpjax.experiments.config import unread as unread_lib
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import ModelConfig, TrainConfig
from dpjax.experiments.kinds.distillation import config as distillation
from dpjax.experiments.kinds.distillation.config import DistillationConfig
from dpjax.experiments.kinds.federated import build as federate_build
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.pate import config as pate
from dpjax.experiments.kinds.pate.config import PateConfig
from dpjax.experiments.kinds.relevance import build as relevance_build
from dpjax.experiments.kinds.relevance import unused as relevance_unused
from dpjax.experiments.kinds.relevance.config import RelevanceAuditConfig, RelevanceConfig
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.synthesis import config as synthesis
from dpjax.experiments.kinds.synthesis.config import SynthesisConfig
from dpjax.experiments.run import checkpoint, loop, run_keys, writers
from dpjax.experiments.sweeps import attack_table, experiment, grid, secure_table, tuning
from dpjax.plan import Plan
from dpjax.sampling import PoissonSampler
from dpjax.validate import UserError
from tests.runs import descriptions, leaf_walk, published_runs, relevance_description

_CONFIGS = published_runs.configs()


def _of(kind):
  return {name: config for name, config in _CONFIGS.items() if isinstance(config, kind)}


def _runs():
  """Parameters for every published run: its config, and its line if the config is a sweep."""
  for name, config in _of((TrainConfig, FedConfig, grid.SweepConfig)).items():
    is_sweep = isinstance(config, grid.SweepConfig)
    for line in published_runs.lines(config) if is_sweep else [None]:
      yield pytest.param(name, line, id=f"{name} {line or ''}".strip())


def _check(config):
  (federate_build if isinstance(config, FedConfig) else build).check(config)


def _described(config):
  federated = isinstance(config, FedConfig)
  return (descriptions.federated_run if federated else descriptions.training_run)(config)


def _silent(config, describe, check):
  """Field -> values that are accepted, none of which changes the description."""
  before, silent = describe(config), {}
  for path, hint, value in leaf_walk.leaves(config):
    unchanged = []
    for other in leaf_walk.candidates(config, path, hint, value, check):
      found = _attempt(lambda: describe(fields.replace(config, path, other)))
      if found is not None and found != before:
        break
      unchanged += [] if found is None else [other]
    else:
      if unchanged:
        silent[path] = unchanged
  return silent


def _attempt(make):
  """What it returns; None where it is refused in one line."""
  try:
    return make()
  except UserError as error:
    assert str(error) and "\n" not in str(error)
    return None


# --- what shows only when it runs: files and their cadence


def _small(config):
  """The config as a run of a second, with its own settings of how it is run."""
  small = {"data.name": "digits", "data.limit": 60, "model.name": "linear"}
  if isinstance(config, FedConfig):
    small |= {"data.limit": 400, "partition": "iid"}  # others want their own data, or more
    small |= {"data.num_classes": None, "data.data_dir": None, "data.num_users": None}
  small |= {"model.options": {}, "eval_every": 2, "checkpoint_every": 2}
  if config.privacy.method not in ("sgd", "none"):  # calibration takes longer than the run
    small |= {"privacy.epsilon": None, "privacy.noise_multiplier": 1.0}
  if isinstance(config, FedConfig):
    small |= {"num_rounds": 4, "partition.num_clients": 12, "clients_per_round": 4.0}
    small |= {"local.epochs": 5}  # .6 after two rounds: a run may end at an accuracy
  else:
    small |= {"num_steps": 4, "model.mirrored": False, "model.colours": "rgb"}
  if config.privacy.method == "least_squares":
    # A release has no steps, and refuses fields of them; digits have 64 numbers.
    small = {n: v for n, v in small.items() if n not in ("num_steps", "eval_every")}
    small.pop("checkpoint_every")
    small |= {"privacy.least_squares.directions": 20}
  return fields.replace_all(config, small)


def _one_noise_for_all():
  """Other noise, which every run draws, is no sign that a field is read."""
  drawn = run_keys.drawn

  def alike(seed, *, noise_seed=None, **how):
    return drawn(seed, noise_seed=noise_seed or 0, **how)

  return mock.patch.object(run_keys, "drawn", alike)


# The ledger and `run_sha256` name the run by a digest of its whole config.
_OF_ONE_RUN = (
  "wall_seconds", "versions", "device", "ledger", "run_sha256", "files_sha256",
)  # fmt: skip


def _ran(config, workdir):
  """What a run leaves behind: its result, its metrics, its files, and when it was saved."""
  saved = []
  kind = checkpoint.Checkpoints
  save = lambda self, step, *args: (saved.append(step), original(self, step, *args))
  original = kind.save
  with mock.patch.object(kind, "save", save), _one_noise_for_all():
    result = loop.train(config, workdir)
  kept = {key: value for key, value in result.items() if key not in _OF_ONE_RUN}
  columns = [sorted(row) for row in writers.read_metrics(workdir)]
  files = sorted(path.name for path in workdir.iterdir())
  return repr((kept, columns, files, saved))


_SHOWN = {}  # (kind of run, field) -> whether a real run showed a change of it


def _shows(config, path, values, folder):
  """Whether a real run of seconds differs in what it leaves, or is refused at its start."""
  key = (type(config), path)
  if key not in _SHOWN:
    small = _small(config)
    before = _ran(small, folder / "before")
    runs = (
      _attempt(lambda: _ran(fields.replace(small, path, v), folder / f"{i}"))
      for i, v in enumerate(values)
    )
    _SHOWN[key] = any(found != before for found in runs)
  return _SHOWN[key]


@pytest.mark.cases(long=["mnist_whitened"])
@pytest.mark.parametrize("name", _CONFIGS)
def test_a_published_config_can_be_sent_to_another_process(name):
  config = _CONFIGS[name]
  assert pickle.loads(pickle.dumps(config)) == config
  assert copy.deepcopy(config) == config


@pytest.mark.long
@pytest.mark.parametrize(("name", "line"), _runs())
def test_every_field_of_a_published_run_changes_it_or_is_refused(name, line, tmp_path):
  """Of a sweep the last run of each line."""
  config = _CONFIGS[name]
  if line is not None:
    config = published_runs.ends(config, -1)[line]
  with descriptions.fast():
    silent = _silent(config, _described, _check)
  for path, values in silent.items():
    folder = tmp_path / path
    folder.mkdir()
    assert _shows(config, path, values, folder), f"{path}={values!r} is ignored"


def _choices():
  """(config, field, word): the default configs with one choice that is not the default."""
  for kind in (TrainConfig, FedConfig):
    for path, hint, value in leaf_walk.leaves(kind()):
      words = leaf_walk.choices(kind(), path, _check) if leaf_walk.takes_words(hint) else []
      for word in words:
        if word and word != value and not path.startswith("model"):
          yield pytest.param(kind, path, word, id=f"{kind.__name__}-{path}-{word}")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "path", "word"), _choices())
def test_every_field_beside_every_choice_changes_the_run_or_is_refused(
  kind, path, word, tmp_path
):
  config = fields.replace(kind(), path, word)
  with descriptions.fast():
    if _attempt(lambda: _described(config)) is None:
      pytest.skip("needs other settings, too")
    silent = _silent(config, _described, _check)
  for field, values in silent.items():
    folder = tmp_path / field
    folder.mkdir()
    assert _shows(kind(), field, values, folder), f"{field}={values!r} is ignored"


# --- sweeps


@pytest.mark.long
@pytest.mark.parametrize("name", ["sweeps.fed_user_level", "sweeps.correlated_noise"])
def test_ends_of_lines_are_those_of_the_whole_sweep(name):
  firsts, lasts = {}, {}
  for point in grid.points(_CONFIGS[name]):
    firsts.setdefault(published_runs.line(point), point.config)
    lasts[published_runs.line(point)] = point.config
  assert published_runs.ends(_CONFIGS[name], 0) == firsts
  assert published_runs.ends(_CONFIGS[name], -1) == lasts


def _points(config):
  return repr([(point.overrides, point.config) for point in grid.points(config)])


def _swept(config, workdir):
  """What a sweep of runs that take no time leaves behind."""
  values = {name: 0.5 for name in writers.RESULT_KEYS} | {"num_steps": 3, "seed": 1}
  names = {"epsilon_kind": "proved", "unit": "example", "task": "t", "versions": {}}
  names |= {"neighboring_relation": "add_or_remove_one", "params_sha256": "0"}

  def train(config, folder, *, data=None):
    folder.mkdir(parents=True)
    (folder / "params.npz").write_bytes(b"")
    scores = {}
    if isinstance(config, TrainConfig):  # ties would hide which of two scores is preferred
      scores = {"test_accuracy": 1 / (1 + config.optimizer.learning_rate)}
    return {**values, **names, **scores, "dataset": config.data.name, "method": "m"}

  if config.selection.enabled:
    with mock.patch.object(tuning.secrets, "randbits", lambda bits: 4):
      plan_fn = lambda config, data: (_plan(config, data), ())
      found = tuning.run_selection(config, workdir, train, lambda _: None, plan_fn)
  else:
    found = grid.run_sweep(config, workdir, train)
  contents = [path.read_bytes() for path in sorted(workdir.glob("*.[cpm]*"))]
  trials = len(list(workdir.glob("trials/*")))
  return repr((found, contents, trials))


def _plan(config, data):
  del data
  return Plan(
    sampler=PoissonSampler(prob=0.01, capacity=100),
    noise_multiplier=2.0,
    l2_clip_norm=1.0,
    normalize_by=10,
    num_steps=config.num_steps,
    delta=1e-5,
  )


def _of_few_points(config):
  """The sweep with two values of each field and two seeds: each change checks all points."""
  few = {path: values[:2] for path, values in config.grid.items()}
  return dataclasses.replace(config, grid=few, seeds=config.seeds[:2])


@pytest.mark.long
@pytest.mark.parametrize("name", _of(grid.SweepConfig))
def test_every_field_of_a_published_sweep_changes_it_or_is_refused(name, tmp_path):
  config = _of_few_points(_CONFIGS[name])
  silent = _silent(config, _points, grid.points)
  before = _swept(config, tmp_path / "before")
  for path, values in silent.items():
    runs = (
      _attempt(lambda: _swept(fields.replace(config, path, v), tmp_path / f"{path}{i}"))
      for i, v in enumerate(values)
    )
    assert any(found != before for found in runs), f"{path}={values!r} is ignored"


# --- the checks themselves


@pytest.mark.long
def test_a_field_that_nothing_reads_is_found():
  """The walk is not blind: a build that drops a field is caught at that field."""
  config = _CONFIGS["quickstart"]
  blind = lambda c: _described(fields.replace(c, "optimizer.rule.momentum", 0.9))
  with descriptions.fast():
    silent = _silent(config, blind, _check)
  assert "optimizer.rule.momentum" in silent and "optimizer.learning_rate" not in silent


_GRID = {"optimizer.learning_rate": [0.1, 0.2]}  # a sweep without one is refused for that
_DEFAULTS = [TrainConfig(), FedConfig(), RelevanceConfig(), grid.SweepConfig(grid=_GRID)]
_DEFAULTS += [AttackConfig(), SecureConfig(), PateConfig(), SynthesisConfig()]
_DEFAULTS += [DistillationConfig()]


@pytest.mark.cases(
  quick=["SweepConfig", "PateConfig", "SynthesisConfig", "DistillationConfig"], long=...
)
@pytest.mark.parametrize("config", _DEFAULTS, ids=lambda config: type(config).__name__)
def test_no_value_of_any_field_ends_in_a_traceback(config):
  """Wrong types, NaN and, but for coordinates, infinite and negative numbers: one line that
  names the whole field and speaks of no type of Python's."""
  for path, hint, value in leaf_walk.leaves(config):
    if path.startswith("base."):  # a run's own fault, recorded in its row
      continue
    for wrong in leaf_walk.nonsense(path, hint, value):
      with pytest.raises(UserError) as caught:
        _any_check(leaf_walk.forced(config, path, wrong))
        pytest.fail(f"{path}={wrong!r} was accepted")
      _names(path, wrong, str(caught.value))


def _names(path, value, text):
  assert path in text, (path, value, text)
  assert "\n" not in text and not re.search(r"typing\.|<class|of type", text), text


def _with_choices(kind, chosen):
  """The default config, or with each choice that it has, beside what each is refused for."""
  if not chosen:
    yield kind(), None
    return
  for path, hint, _value in leaf_walk.leaves(kind()):
    words = leaf_walk.choices(kind(), path, _check) if leaf_walk.takes_words(hint) else []
    for word in words if not path.startswith(("model", "data")) else ():
      config = fields.replace(kind(), path, word)
      yield config, _refusal(config)


def _refusal(config):
  try:
    _described(config)
  except UserError as error:
    return str(error)
  return None


@pytest.mark.cases(slow=["False-TrainConfig"], long=...)
@pytest.mark.parametrize("kind", [TrainConfig, FedConfig])
@pytest.mark.parametrize("chosen", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_error_of_a_lower_room_names_the_field(kind, chosen):
  """Extreme values of every number under every choice: whatever is raised while the run is
  checked and built, for this value and not for the default, names the field."""
  with descriptions.fast():
    for config, before in _with_choices(kind, chosen):
      for path, hint, _ in leaf_walk.leaves(config):
        for extreme in leaf_walk.extremes(hint):
          message = _refusal(leaf_walk.forced(config, path, extreme))
          if message not in (None, before) and not _of_another(message, path, config):
            _names(path, extreme, message)


def _of_another(text, path, config):
  """Whether the error names other fields that do not go with this one: the first of those
  that were wrong from the beginning, or a number that this one is measured against."""
  named = re.match(r"([a-z_]+(?:\.[a-z_]+)+|[a-z_]+)=", text)
  known = {leaf.path for leaf in fields.leaves(config)}
  return bool(named) and named[1] in known and named[1] != path


@pytest.mark.cases(slow=["TrainConfig"], long=...)
@pytest.mark.parametrize("kind", [TrainConfig, FedConfig, RelevanceConfig])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_number_in_any_field_is_checked_or_refused(kind, data):
  numeric = [
    path for path, hint, _ in leaf_walk.leaves(kind()) if leaf_walk.is_number(hint)
  ]
  path = data.draw(st.sampled_from(numeric))
  number = st.one_of(st.floats(), st.integers(-50, 50), st.booleans())
  value = data.draw(number)
  try:
    _any_check(leaf_walk.forced(kind(), path, value))
  except UserError as error:
    assert "\n" not in str(error)
    return
  assert not isinstance(value, bool) and value == value
  assert value >= 0 or path == "lrp.low"


def _any_check(config):
  if isinstance(config, grid.SweepConfig):
    return grid.points(config)
  if isinstance(config, RelevanceConfig):
    return experiment.points(config)
  if isinstance(config, AttackConfig):
    return attack_table.points(config)
  if isinstance(config, SecureConfig):
    return secure_table.points(config)
  if isinstance(config, PateConfig):
    return pate.check(config)
  if isinstance(config, DistillationConfig):
    return distillation.check(config)
  if isinstance(config, SynthesisConfig):
    return synthesis.check(config)
  return _check(config)


# --- experiments with relevance


def _relevance():
  """One experiment for each way to use the methods that a published config has."""
  found, seen = {}, set()
  for name, config in _of(RelevanceConfig).items():
    for label, changes in (config.curves or {"": {}}).items():
      curve = fields.replace_all(config, changes)
      used = relevance_unused.of(curve)
      unread = tuple(sorted(path for path in used if not path.startswith("data.")))
      ways = (curve.method, curve.mode, unread)
      if ways not in seen:
        seen.add(ways)
        found[f"{name} {label}".strip()] = _alone(curve, used)
  return found


def _alone(curve, used):
  """A curve as an experiment of its own, small: what only its neighbours read is dropped."""
  small = {"curves": {}, "num_seeds": 1, "num_epochs": 2, "batch_size": 12}
  small |= {"model": ModelConfig("mlp", {"features": (3,)}), "epsilons": [8.0]}
  small |= {"relevance_records": 15, "audit": RelevanceAuditConfig()}
  defaults = {leaf.path: leaf.value for leaf in fields.leaves(RelevanceConfig())}
  curve = fields.replace_all(curve, small)
  for path in fields.set_fields(curve):
    if unread_lib.reason(path, used) is not None:
      curve = _reset(curve, path, defaults)
  return curve


def _reset(curve, path, defaults):
  if path.startswith("rigorous_model"):
    return dataclasses.replace(curve, rigorous_model=None)
  return fields.replace(curve, path, defaults[path])


_EXPERIMENTS = _relevance()


_QUICK = ("radp.quickstart_proved",)  # the others take half a minute each


@pytest.mark.long
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name in _QUICK else [pytest.mark.long])
    for name in _EXPERIMENTS
  ],
)
def test_every_field_of_a_relevance_method_changes_it_or_is_refused(name, tmp_path):
  config = _EXPERIMENTS[name]
  silent = _silent(config, relevance_description.run, experiment.points)
  before = _wrote(config, tmp_path / "before") if silent else None
  for path, values in silent.items():
    runs = (
      _attempt(lambda: _wrote(fields.replace(config, path, v), tmp_path / f"{path}{i}"))
      for i, v in enumerate(values)
    )
    assert any(found != before for found in runs), f"{path}={values!r} is ignored"


def _wrote(config, workdir):
  """The files of an experiment, but for what differs between any two runs of one config."""
  load = lambda config, _: relevance_description.loaded(config)
  with mock.patch.object(relevance_build, "load_data", load), _one_noise_for_all():
    results = experiment.run_all(config, workdir)
  kept = [{k: v for k, v in r.items() if k not in _OF_ONE_RUN} for r in results]
  reports = [workdir / name for name in ("report.png", "report.csv", "claims.md")]
  return repr((kept, [path.read_bytes() for path in reports]))

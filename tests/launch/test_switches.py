"""One flag means one flag: a switch over any published config runs, or one line names what lacks.

`leaf_walk` finds the switches: every field that takes words, and the words that its refusal offers.
"""

import contextlib
import functools
import importlib
import json
import pathlib
import re
from unittest import mock

import pytest

from configs import mnist_cnn
from configs.attack import quickstart as attacks
from configs.radp import proved_mnist
from configs.sweeps import quickstart as sweep
from dpjax.experiments.config import fields, unread
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import DataConfig, PrivacyConfig, TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.run import kind as kinds
from dpjax.experiments.run import switches, writers
from dpjax.experiments.sweeps import (
  attack_table,
  engine,
  experiment,
  grid,
  secure_table,
)
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.runs import descriptions, leaf_walk

_ROOT = pathlib.Path(__file__).resolve().parents[2] / "configs"
_DESCRIBED = {
  TrainConfig: descriptions.training_run,
  FedConfig: descriptions.federated_run,
}


def _published():
  for path in sorted(_ROOT.rglob("*.py")):
    name = ".".join(path.relative_to(_ROOT.parent).with_suffix("").parts)
    module = importlib.import_module(name)
    if hasattr(module, "get_config"):
      yield name.removeprefix("configs."), module.get_config()


_CONFIGS = dict(_published())


def _command(config, **flags):
  """What a command line with these flags runs: (config, line)."""
  steps, now = [], config
  for path, text in flags.items():
    path = path.replace("__", ".")
    now = fields.override(now, path, text)
    steps.append((path, now))
  return switches.of_command_line(config, steps, kinds.of(config))


def _again(config):
  """The config that its config.json says."""
  held = json.loads(json.dumps(writers.plain(fields.to_dict(config))))
  return fields.from_dict(type(config), held)


@functools.cache
def _words(name, path):
  """What the refusal of a nonsense word offers."""
  config = _CONFIGS[name]
  return leaf_walk.choices(config, path, kinds.of(config).check)


def _walk(name):
  """(field, word) of every switch of a published config."""
  for path, hint, value in leaf_walk.leaves(_CONFIGS[name]):
    if leaf_walk.takes_words(hint):
      for word in _words(name, path):
        if word and word != value:
          yield path, word


def _faults(error):
  """Fields that an error calls ignored."""
  # Nothing between the two holds ": ", after which an error of a sweep's run names its field.
  return re.findall(r"([\w.]+)=(?:(?!: |;).)*: would be ignored", error)


def _switch(name, path, word):
  """The switch alone; what it drops changes nothing that runs."""
  config, check = _CONFIGS[name], kinds.of(_CONFIGS[name]).check
  try:
    found, line = _command(config, **{path: word})
    check(found)
  except UserError as error:
    text = str(error)
    assert "\n" not in text and all(path.endswith(one) for one in _faults(text)), text
    return
  assert not line or ("\n" not in line and line.endswith("are dropped"))
  # What config.json says is the same run, without a line.
  if type(config) in _DESCRIBED:
    again = _again(found)
    assert fields.to_dict(again) == fields.to_dict(found)
    assert switches.of_command_line(again, [(path, again)], kinds.of(again)) == (
      again,
      "",
    )
    if line:
      _same(fields.override(config, path, word), found)


# Written down by a run, and read by none of its parts.
_TOLD = {
  "privacy.delta": ("none", "sgd"),
  "local.epochs": ("fed_sgd",),
  "weighting": ("scaffold", "median", "trimmed_mean", "krum", "geometric_median"),
}


def _same(undropped, dropped):
  """The values that are dropped are in nothing that is built; where the run is refused for
  them, there is nothing to compare."""
  describe = _DESCRIBED[type(dropped)]
  chosen = {dropped.privacy.method}
  if isinstance(dropped, FedConfig):
    names = (fields.get(dropped, path) for path in ("algorithm", "aggregator"))
    chosen |= {name.partition("(")[0] for name in names}
  for path, names in _TOLD.items():
    if chosen & {*names}:
      undropped = fields.replace(undropped, path, fields.get(dropped, path))
  with (
    descriptions.fast(),
    mock.patch.object(unread, "refuse"),
    contextlib.suppress(UserError),
  ):
    before = describe(undropped)
    assert describe(dropped) == before


_QUICK = ("mnist_cnn", "fed.quickstart", "secure.secureml_mnist")


@pytest.mark.slow
@pytest.mark.parametrize("name", _QUICK)
def test_a_switch_of_a_published_config_runs_or_names_what_lacks(name):
  for path, word in _walk(name):
    _switch(name, path, word)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*_CONFIGS} - {*_QUICK}))
def test_a_switch_of_any_published_config_runs_or_names_what_lacks(name):
  for path, word in _walk(name):
    _switch(name, path, word)


# --- what a flag drops, keeps, and is refused


def _refused(field, config, **flags):
  with refuses(field) as caught:
    found, _ = _command(config, **flags)
    kinds.of(found).check(found)
  return str(caught.value)


def test_the_twin_without_privacy_is_one_flag():
  private = PrivacyConfig(
    epsilon=3.0, l2_clip_norm=0.1, delta=1e-6, accountant="rdp", clipping="automatic"
  )
  config, line = _command(TrainConfig(privacy=private), privacy__method="sgd")
  build.check(config)
  assert config == TrainConfig(privacy=PrivacyConfig(method="sgd"))
  assert line == (
    "privacy.method='sgd': takes no epsilon, delta, l2_clip_norm, clipping, accountant; the "
    "file's values are dropped"
  )


def test_what_the_same_command_asks_for_is_refused_by_name():
  config = mnist_cnn.get_config()
  field = "privacy.noise_multiplier"
  text = _refused(field, config, privacy__method="sgd", privacy__noise_multiplier="1")
  assert _faults(text) == [field]


def test_a_file_that_contradicts_itself_is_refused_beside_any_flag():
  config = TrainConfig(privacy=PrivacyConfig(method="sgd", l2_clip_norm=0.1))
  field = "privacy.l2_clip_norm"
  assert _faults(_refused(field, config, seed="3")) == [field]
  assert _faults(_refused(field, config, optimizer__rule="adam")) == [field]


@pytest.mark.parametrize(
  ("sampler", "capacity"), [("fixed_size", None), ("truncated_poisson", 300)]
)
def test_a_capacity_stays_where_the_other_sampler_reads_it(sampler, capacity):
  relation = {"fixed_size": "replace_one"}.get(sampler, "replace_special")
  file = TrainConfig(privacy=PrivacyConfig(capacity=300, epsilon=4.0, l2_clip_norm=0.2))
  config, line = _command(
    file, privacy__sampler=sampler, privacy__neighboring_relation=relation
  )
  assert config.privacy.capacity == capacity and ("capacity" in line) == (capacity is None)
  assert (config.privacy.epsilon, config.privacy.l2_clip_norm) == (4.0, 0.2)


def test_statistics_of_the_inputs_are_not_dropped():
  """Without them the model would be trained on other inputs, and nobody would know."""
  field = "privacy.normalization"
  text = _refused(field, _CONFIGS["cifar10_scatter_linear"], privacy__method="sgd")
  assert text.startswith(
    "privacy.normalization='private_statistics': must be 'per_example'"
  )


def test_a_release_is_not_dropped():
  file = TrainConfig(release=True)
  assert _refused("release", file, privacy__method="sgd").startswith("release=True: needs")


def test_a_default_that_comes_into_force_is_no_drop():
  """A table that calls a field unread before the reset and read after it drops nothing."""
  file = TrainConfig(seed=3, num_steps=7)
  table = lambda config: {} if config.seed == 0 else {"seed": "luck"}
  assert switches.settled(file, ["num_steps"], table, lambda path: True) == (file, [])


def test_options_of_another_model_are_dropped():
  file = mnist_cnn.get_config()
  file.model.options = {"features": (8,)}
  file.model.name = "mlp"
  config, line = _command(file, model__name="linear")
  assert config.model.options == {}
  assert (
    line == "model.name='linear': takes no options.features; the file's values are dropped"
  )


def test_data_of_images_take_no_length():
  file = TrainConfig(data=DataConfig(name="imdb_reviews", max_length=64))
  config, line = _command(file, data__name="mnist")
  assert config.data.max_length == DataConfig().max_length and "max_length" in line


def test_an_audit_that_is_switched_off_takes_its_settings_along():
  file = fields.replace_all(TrainConfig(), {"audit.enabled": True, "audit.num_canaries": 9})
  config, line = _command(file, audit__enabled="false")
  assert config == TrainConfig() and "audit.enabled=False: takes no num_canaries" in line


# --- tables


def test_a_variant_drops_what_it_does_not_read_of_its_base():
  base = TrainConfig(privacy=PrivacyConfig(l2_clip_norm=0.2))
  methods = ["dp_sgd", "sgd"]
  for columns in (
    {"grid": {"privacy.method": methods}},
    {"variants": {name: {"privacy.method": name} for name in methods}},
  ):
    private, plain = grid.points(grid.SweepConfig(base=base, **columns))
    assert private.config.privacy.l2_clip_norm == 0.2 and private.dropped == ()
    assert plain.config.privacy == PrivacyConfig(method="sgd")
    assert plain.dropped == ("privacy.l2_clip_norm",)


def test_a_variant_is_refused_what_it_sets_itself():
  variants = {"a": {}, "b": {"privacy.method": "sgd", "privacy.l2_clip_norm": 0.2}}
  with refuses("variant"):
    grid.points(grid.SweepConfig(variants=variants))


def test_a_switch_that_a_grid_contradicts_names_the_grid():
  text = _refused("base.privacy.method", sweep.get_config(), base__privacy__method="sgd")
  assert "base.privacy.method" in text and "give --config." in text
  assert _faults(text) == []


def test_rows_that_are_gone_take_along_what_only_they_read():
  config, line = _command(attacks.get_config(), rows="{}")
  attack_table.points(config)
  assert fields.set_fields(config.federate) == {} and line.startswith(
    "rows={}: takes no federate."
  )
  assert config.train == attacks.get_config().train
  config, _ = _command(proved_mnist.get_config(), curves="{}")
  experiment.points(config)


def test_a_row_drops_what_it_does_not_read_of_its_table():
  rows = {"a": {}, "b": {"task": "regress"}}
  table = SecureConfig(protocol={"name": "secagg", "bits": 64}, rows=rows)
  kept, dropped = secure_table.points(table)
  assert kept.dropped == () and dropped.dropped == ("protocol.bits",)


def test_runs_say_once_what_they_drop(capsys):
  variants = {name: {"privacy.method": name} for name in ("dp_sgd", "sgd")}
  base = TrainConfig(privacy=PrivacyConfig(l2_clip_norm=0.2))
  engine.tell_dropped(grid.points(grid.SweepConfig(base=base, variants=variants)))
  line = capsys.readouterr().err
  assert line.startswith("note: ") and line.count("\n") == 1
  assert "takes no privacy.l2_clip_norm" in line

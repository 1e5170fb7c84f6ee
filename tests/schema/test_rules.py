"""Rules and help that stand beside the fields of a config."""

import dataclasses
import subprocess
import sys
from typing import Annotated

import pytest

from dpjax.experiments.config import choices, fields, rules
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from tests.refuses import refuses

_CONFIGS = (TrainConfig, FedConfig)


def _ruled(kind):
  return [
    pytest.param(kind, leaf.path, id=f"{kind.__name__}.{leaf.path}")
    for leaf in choices.leaves(kind())
    if any(rule.words in _OUTSIDE for rule in _rules(kind, leaf.path))
  ]


def _rules(kind, path):
  (leaf,) = (leaf for leaf in choices.leaves(kind()) if leaf.path == path)
  return [entry for entry in leaf.type.attached if isinstance(entry, rules.FieldRule)]


# words of a rule -> a value that breaks it
_OUTSIDE = {
  ">= 0": -1,
  ">= 1": 0,
  "> 0": 0,
  "in (0, 1]": 0,
  "in [1e-09, 1]": 0,
  "in [1e-06, 1e+06]": 0,
  "in (0, 1)": 1,
}


@pytest.mark.parametrize(("kind", "path"), [case for k in _CONFIGS for case in _ruled(k)])
def test_a_value_beyond_a_rule_names_its_field(kind, path):
  words = [rule.words for rule in _rules(kind, path)]
  outside = next(_OUTSIDE[word] for word in words if word in _OUTSIDE)
  config = fields.replace(kind(), path, outside)
  with refuses(path):
    rules.check(config)


@pytest.mark.parametrize("kind", _CONFIGS)
def test_the_defaults_keep_the_rules(kind):
  rules.check(kind())


@pytest.mark.parametrize("kind", _CONFIGS)
def test_every_field_of_a_run_has_help(kind):
  sections = {field.name for field in dataclasses.fields(kind)}
  without = {
    row.path
    for row in rules.describe(kind())
    if not row.help and row.path.split(".")[0] in sections
  }
  # The numbers of a chosen value are described with that value, by launch.list.
  chosen = ("privacy.strategy.", "partition.", "optimizer.rule.", "_optimizer.rule.")
  assert {path for path in without if not any(part in path for part in chosen)} == set()


def test_rules_of_a_union_and_of_its_members_are_found():
  @dataclasses.dataclass
  class Settings:
    count: Annotated[
      Annotated[int, rules.at_least(1)] | None, rules.between(0, 9), "words"
    ] = 1

  (row,) = rules.describe(Settings())
  assert (row.values, row.help) == ("in [0, 9], >= 1", "words")


def test_none_breaks_no_rule_and_sections_name_the_whole_path():
  config = TrainConfig(ema_decay=None)
  config.privacy.epsilon_budget = -1.0
  with refuses("train.privacy.epsilon_budget", value=-1.0):
    rules.check(config, prefix="train.")


def _launched(*arguments):
  command = [sys.executable, "-m", "launch.train", *arguments]
  return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_help_lists_every_field():
  printed = _launched("--help").stdout
  for leaf in choices.leaves(TrainConfig()):
    assert f"  {leaf.path}=" in printed, leaf.path


@pytest.mark.slow
def test_a_printed_config_is_a_command_line_of_it():
  changed = ("--config.privacy.epsilon=3", "--config.privacy.clipping=automatic")
  printed = _launched(*changed, "--print_config")
  assert printed.returncode == 0, printed.stderr
  lines = printed.stdout.splitlines()
  assert "--config.privacy.epsilon=3.0" in lines
  config = TrainConfig()
  for line in lines:
    path, _, text = line.removeprefix("--config.").partition("=")
    config = fields.override(config, path, text.strip("'"))
  again = [f"--config.{leaf.path}={leaf.value!r}" for leaf in choices.leaves(config)]
  assert len(again) == len(lines)
  assert config.privacy.clipping.gamma == 0.01 and config.privacy.epsilon == 3.0


@pytest.mark.slow
def test_every_field_is_printed_as_a_flag_infinity_too():
  command = [sys.executable, "-m", "launch.sweep", "--print_config", "--workdir=/tmp/none"]
  command += ["--config=configs/sweeps/mnist_curves.py"]
  printed = subprocess.run(command, capture_output=True, text=True, check=False)
  assert printed.returncode == 0, printed.stderr
  lines = printed.stdout.splitlines()
  assert "--config.epsilons='[0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 1e999]'" in lines
  assert all(line.startswith("--config.") for line in lines)


@pytest.mark.slow
def test_a_field_with_a_space_ends_in_one_line():
  ended = _launched("--config.a b=1")
  assert ended.returncode == 2 and ended.stderr.count("\n") == 1
  assert "--config.a b" in ended.stderr

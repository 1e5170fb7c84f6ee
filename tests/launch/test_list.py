"""launch.list: what the tables hold, all of it, in a line each."""

import dataclasses
import pathlib
import re

import pytest

from dpjax.experiments import catalogue
from dpjax.experiments.config.choices import types_of
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated import config as federated
from dpjax.experiments.kinds.secure.config import SecureConfig
from launch import list as launcher
from tests import commands
from tests.refuses import refuses

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _choices(config):
  """(name of the class and field, table) of every choice, rooms included."""
  for field, (hint, found, _) in types_of(config).items():
    if found is not None:
      yield f"{config.__name__}.{field}", found.table
    elif dataclasses.is_dataclass(hint):
      yield from _choices(hint)


@pytest.mark.parametrize(
  "config", [TrainConfig, federated.FedConfig, AttackConfig, SecureConfig]
)
def test_every_choice_of_a_config_has_a_topic(config):
  listed = [set(s.rows()) for sections in launcher.TOPICS.values() for s in sections]
  found = dict(_choices(config))
  assert found
  for where, table in found.items():
    assert set(table) in listed, f"{where} has no topic"


@pytest.mark.parametrize("topic", launcher.TOPICS)
def test_every_entry_says_in_one_line_what_it_is(topic):
  for section in launcher.TOPICS[topic]:
    rows = section.rows()
    assert rows and section.where
    for name, words in rows.items():
      assert words and words[0] != "[" and "\n" not in name + words, (topic, name, words)


def test_an_entry_that_a_table_gets_later_is_listed(monkeypatch):
  def noisy_mean():
    """The mean, and noise."""

  assert "noisy" not in launcher.page(("aggregators",))
  monkeypatch.setitem(federated.AGGREGATORS, "noisy", federated.settings(noisy_mean))
  assert "  noisy             The mean, and noise.\n" in launcher.page(("aggregators",))


def test_configs_are_all_that_the_repository_holds():
  found = launcher.configs()
  for path in (_ROOT / "configs").rglob("*.py"):
    own = "def get_config(" in path.read_text()
    assert own == (path.relative_to(_ROOT).as_posix() in found), path
  assert all("[launch." in words for words in found.values()), found


def test_commands_are_those_of_the_page_of_launchers():
  page = (_ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
  commands_of_page = {f"python -m {name}" for name in re.findall(r"launch\.\w+", page)}
  assert set(launcher.launchers()) == commands_of_page


def test_an_unknown_topic_names_the_nearest():
  with refuses("topic", value="atacks"):
    launcher.page(("atacks",))
  assert catalogue.sentence(None) == ""


def test_topics_are_words_of_the_command_line():
  done = commands.run("launch.list", "clippings", "accountants")
  assert done.returncode == 0, done.stderr
  assert "automatic" in done.stdout
  assert "pld  proves: bounded_contribution, gaussian," in done.stdout
  assert "models:" not in done.stdout
  done = commands.run("launch.list", "atacks")
  assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)

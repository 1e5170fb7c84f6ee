"""Parts in a package outside dpjax, each one file, named from a config and run by launchers.

A sampler (sampling/test_a_new_sampler.py) and a clipping rule (gradients/test_rules.py) have
tests of their own.
"""

import dataclasses
import json
from typing import ClassVar

import pytest

from configs.attack import poisoning_digits
from dpjax import attacks
from dpjax.experiments.config import choices, fields
from dpjax.experiments.kinds.attack import config as attack_config
from dpjax.experiments.kinds.attack import table
from dpjax.experiments.kinds.attack.poisoned_rounds import PoisoningSettings
from dpjax.experiments.kinds.attack.settings import AttackSettings
from tests import commands, own_folder
from tests.refuses import refuses

_PARTS = {
  "nets": own_folder.NET,
  "sets": own_folder.CORNERS,
  "algorithms": '''
from dpjax import federated


def local(loss_fn, client_tx, *, weighting, **options):
  """Local training, as ONE client does it."""
  return federated.local_training(loss_fn, client_tx, weighting=weighting)
''',
  "lies": '''
import dataclasses

from dpjax import attacks
from dpjax.experiments.kinds.attack.poisoned_rounds import PoisoningSettings


@dataclasses.dataclass(frozen=True)
class SignFlip(PoisoningSettings):
  """Sends the opposite of what was learnt."""

  factor: float = 1.0

  def method(self):
    return attacks.scaled_update(-self.factor)
''',
  "guesses": '''
import dataclasses
from typing import ClassVar

import numpy as np

from dpjax.experiments.kinds.attack.settings import AttackSettings, MeasuredAttack
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.run import pieces


@dataclasses.dataclass(frozen=True)
class FirstClass(AttackSettings):
  """Guesses that every record is of one class."""

  guess: int = 0
  section: ClassVar[str] = "train"
  task: ClassVar[str] = "guessing"

  def prepare(self, config, loaded, random):
    return central.assemble(config.train, loaded, random)

  def phase(self, config, attacked):
    """One piece: how many records are of that class."""

    def count(state, index):
      state["right"][index] = np.sum(np.asarray(attacked.test.y) == self.guess)

    empty = lambda: {"right": np.zeros(1, np.int64)}
    return pieces.fill_pieces(1, empty, count, name="guesses")

  def measure(self, config, attacked, state):
    right, total = int(state["right"][0]), len(attacked.test)
    row = {
      "method": "first class", "finds": f"{right} of {total}", "success": right / total,
      "low": 0.0, "high": 1.0, "share": "guessed, of records", "verdict": "a guess",
    }
    result = {"rows": [row], "test_accuracy": right / total}
    return MeasuredAttack({"right": np.array([right])}, result)
''',
}
_CONFIG = """
import dataclasses

from configs.attack import poisoning_digits


def get_config():
  return poisoning_digits.get_config()
"""
_GUESS = """
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import DataConfig, ModelConfig, TrainConfig


def get_config():
  return AttackConfig(
    attack="outside.guesses:FirstClass",
    target=TrainConfig(
      data=DataConfig(name="outside.sets:corners"),
      model=ModelConfig(name="outside.nets:Net"),
      num_steps=2,
    ),
  )
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
  """A folder with the package `outside` and a config of one attack."""
  folder = tmp_path_factory.mktemp("project")
  (folder / "outside").mkdir()
  (folder / "outside" / "__init__.py").write_text("")
  for name, text in _PARTS.items():
    (folder / "outside" / f"{name}.py").write_text(text)
  (folder / "one_attack.py").write_text(_CONFIG)
  (folder / "one_guess.py").write_text(_GUESS)
  return folder


@pytest.mark.slow
def test_an_algorithm_a_model_and_data_run_under_privacy(outside):
  done = commands.run(
    "launch.federate",
    f"--config={commands.ROOT}/configs/fed/quickstart.py",
    f"--workdir={outside}/run",
    "--config.algorithm=outside.algorithms:local",
    "--config.model.name=outside.nets:Net",
    '--config.model.options={"width": 5}',
    "--config.data.name=outside.sets:corners",
    "--config.data.center=false",
    "--config.partition.num_clients=10",
    "--config.clients_per_round=4",
    "--config.num_rounds=2",
    cwd=outside,
  )
  assert done.returncode == 0, done.stderr
  result = json.loads((outside / "run" / "result.json").read_text())
  assert result["method"] == "dp_outside.algorithms:local"
  assert result["num_parameters"] == 3 * 5 + 5 + 5 * 3 + 3
  assert result["epsilon_kind"] == "proved"


def _attacked(outside, config, *flags):
  done = commands.run(
    "launch.attack",
    f"--config={config}.py",
    f"--workdir={outside}/{config}",
    *flags,
    cwd=outside,
  )
  assert done.returncode == 0, done.stderr
  saved = json.loads((outside / config / "sweep.json").read_text())
  (result,) = saved["rows"]
  return done.stdout, result | {"config": saved["config"]}


@pytest.mark.slow
def test_a_poisoning_is_settings_with_a_method(outside):
  message, result = _attacked(
    outside,
    "one_attack",
    "--config.attack=outside.lies:SignFlip",
    "--config.attack.factor=9",
    "--config.attack.fraction=0.25",
    "--config.target.num_rounds=2",
    "--config.target.local.epochs=1",
  )
  assert result["attack"] == "outside.lies:SignFlip" and result["task"] == "poisoning"
  assert result["accuracy"]["count"] < result["clean_accuracy"]["count"]
  assert result["config"]["attack"] == {
    "name": "outside.lies:SignFlip", "fraction": 0.25, "factor": 9.0,
  }  # fmt: skip
  assert "outside.lies:SignFlip" in message


@pytest.mark.slow
def test_an_attack_may_bring_its_own_work_and_rows(outside):
  message, result = _attacked(outside, "one_guess", "--config.attack.guess=3")
  assert result["task"] == "guessing" and result["rows"][0]["success"] == 0.0
  assert "| first class |" in message and "| a guess |" in message


def test_launch_list_says_what_takes_a_part(outside):
  parts = {
    "outside.nets:Net": "A dense layer of its own width. [options: width] (--config.model.name)",
    "outside.lies:SignFlip": "Sends the opposite of what was learnt. "
    "[fraction=0.2, factor=1.0] (--config.attack of launch.attack)",
    "outside.algorithms:local": "(--config.algorithm of launch.federate)",
    "outside.sets:corners": "The corners of a triangle, again and again. (--config.data.name,",
  }
  done = commands.run("launch.list", *parts, cwd=outside)
  assert done.returncode == 0, done.stderr
  for path, words in parts.items():
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"  {path}")]
    assert words in line
  refused = commands.run("launch.list", "outside.nets:Nat", cwd=outside)
  assert "has no 'Nat' (did you mean 'Net'?)" in commands.refusal(refused)


@dataclasses.dataclass(frozen=True)
class Mild(PoisoningSettings):
  factor: float = 1.0

  def method(self):
    return attacks.scaled_update(self.factor)


@dataclasses.dataclass(frozen=True)
class NoMethod(PoisoningSettings):
  def method(self):
    return "lie"


@dataclasses.dataclass
class NotFrozen:
  factor: float = 1.0


class NoDataclass(Mild):
  size: int = 3


@dataclasses.dataclass(frozen=True)
class NoSection(AttackSettings):
  def prepare(self, config, loaded, random):
    return None

  def measure(self, config, attacked, state):
    return None


@dataclasses.dataclass(frozen=True)
class NoPhase(NoSection):
  section: ClassVar[str] = "federate"
  task: ClassVar[str] = "nothing"


def _with(name, **changes):
  config = poisoning_digits.get_config()
  return fields.replace_all(config, {"attack": f"{__name__}:{name}", **changes})


@pytest.mark.parametrize(
  ("name", "field"),
  [
    ("NotFrozen", "config.attack"),
    ("NoDataclass", "config.attack"),
    ("Milt", "config.attack"),
    ("NoSection", "attack"),
    ("NoPhase", "attack"),
  ],
)
def test_another_class_is_refused_in_one_line(name, field):
  with refuses(field, value=f"{__name__}:{name}"):
    attack_config.Attack(_with(name)).check()


def test_settings_are_read_as_those_of_dpjax(tmp_path):
  config = _with("Mild", **{"attack.factor": 2})
  assert config.attack == Mild(factor=2.0)
  held = json.loads(json.dumps(choices.to_dict(config)))
  assert fields.from_dict(type(config), held) == config
  again = fields.override(config, "attack", f"{__name__}:Mild")
  assert again.attack.factor == 2.0  # a name keeps the numbers that were set
  assert fields.get(config, "attack") == f"{__name__}:Mild(factor=2.0)"
  with refuses("config.attack.factr"):
    fields.replace(config, "attack.factr", 3)


def test_rows_of_a_result_are_those_of_the_table():
  row = {"method": "m", "finds": "f", "success": 0.5, "verdict": "v"}
  result = {"task": "guessing", "rows": [row], "attack": "a", "defence": "b"}
  facts = ("epsilon", "epsilon_kind", "delta", "neighboring_relation", "unit")
  (found,) = table.rows_of([result | dict.fromkeys(facts) | {"test_accuracy": 0.5}])
  assert found["method"] == "m" and found["attack"] == "a"
  # The epsilon of a table names what a claim rests on.
  claim = {"epsilon": 1.0, "epsilon_kind": "claimed", "delta": 1e-5, "unit": "example"}
  claim |= {"neighboring_relation": "replace_one", "failed_assumptions": ["Mine: a word"]}
  (claimed,) = table.rows_of([result | claim | {"test_accuracy": 0.5}])
  for word in ("1", "claimed", "1e-05", "replace one example", "Mine"):
    assert word in table.markdown([claimed])

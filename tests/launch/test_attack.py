"""launch.attack from the command line: what a user types, right and wrong."""

import csv
import functools
import importlib
import pathlib

import pytest

from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.sweeps.sweep import Runs
from launch import config_flag
from tests import commands

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_CONFIGS = [
  p
  for p in sorted((_ROOT / "configs/attack").glob("*.py"))
  if p.stem not in ("__init__", "common")
]
_TINY = """
from configs.attack import quickstart
from dpjax.experiments.config import fields

def get_configs():
  rows = dict(quickstart.get_configs(quickstart.get_config()))
  small = {"target.num_steps": 6, "target.data.limit": 60, "target.model.name": "linear"}
  small |= {"target.model.options": {}, "attack.num_shadows": 6}
  yield "membership, epsilon 8", fields.replace_all(rows["membership, epsilon 8"], small)
  small = {"target.data.limit": 4, "target.partition.num_clients": 4}
  for defence, beside in (("none", ".82 / 76 %"), ("quantised", "")):
    label = f"dense layer first, {defence}"
    yield label, fields.replace_all(rows[label], small | {"beside": beside})
"""
_launch = functools.partial(commands.run, "launch.attack")


@pytest.mark.slow
def test_a_table_is_written_resumed_and_says_what_fails(tmp_path):
  (tmp_path / "tiny.py").write_text(_TINY)
  order = (f"--config={tmp_path / 'tiny.py'}", f"--workdir={tmp_path / 'run'}")
  done = _launch(*order)
  assert done.returncode == 0, done.stderr
  assert "| dense layer first | none | inversion | 4 of 4" in done.stdout
  assert "- membership, epsilon 8: strongest of 6: " in done.stdout
  assert "FAILS: 4 of 4" in done.stdout and "| .82 / 76 % |" in done.stdout
  with open(tmp_path / "run" / "attacks.csv") as file:
    rows = list(csv.DictReader(file))
  methods = [row["method"] for row in rows]
  inferred = ["confidence", "loss", "lira_fixed", "bavaria", "rmia", "rmia_tuned"]
  assert methods == [*inferred, "inversion", "inversion"]
  assert {row["epsilon_kind"] for row in rows[:6]} == {"proved"}
  assert float(rows[0]["epsilon"]) <= 8.0 and rows[6]["epsilon"] == ""
  assert (tmp_path / "run" / "attacks.png").stat().st_size > 5000
  before = {
    p: p.stat().st_mtime_ns for p in (tmp_path / "run").glob("points/*/result.json")
  }
  again = _launch(*order)
  assert again.returncode == 0 and again.stdout == done.stdout and len(before) == 3
  assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (
      ["--alone", "--config.attack=membership", "--config.attack.num_shadows=1"],
      "num_shadows=1: must be",
    ),
    (["--config.target.compression=zip"], "compression='zip': must be one of"),
    (["--alone", "--only=x"], "--only='x': would be ignored; it needs several runs"),
    (["--only=x"], "only='x': must be a pattern of one of membership, none"),
    (["--run=runs/x", "--only=x"], "--only='x': would be ignored"),
    (["--run=runs/x", "--workdir="], "--workdir='': must be the name of a directory"),
  ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, words):
  done = _launch(f"--workdir={tmp_path / 'run'}", *arguments)
  assert words in commands.refusal(done)
  assert not (tmp_path / "run").exists()


@pytest.mark.cases(
  quick=[
    "extraction_digits",
    "fishing_cifar10",
    "gradient_inversion_cifar10",
    "rogue_server_cifar10",
  ],
  long=...,
)
@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_every_published_config_is_ready_to_run(path):
  module = importlib.import_module(f"configs.attack.{path.stem}")
  base = config_flag.load(str(path), AttackConfig)
  found = Runs(module.get_configs(base), base).points
  assert found and f"--config=configs/attack/{path.name}" in path.read_text()

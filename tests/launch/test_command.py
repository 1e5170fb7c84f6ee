"""`dpjax NAME`, and commands that a sweep prints for a job array."""

import json
import pathlib
import shlex
import tomllib

import pytest

import dpjax
from launch import command
from tests import commands

_SWEEP = (
  "--config=configs/sweeps/quickstart.py",
  "--config.epsilons=[2,4]",
  "--config.seeds=[0]",
  "--config.base.num_steps=3",
)


def test_every_launcher_is_a_command_and_help_is_one_screen():
  files = (commands.ROOT / "launch").glob("*.py")
  launchers = {path.stem for path in files if "app.run(main" in path.read_text()}
  assert launchers == set(command.COMMANDS)
  shown = commands.run("launch.command", "--help")
  assert shown.returncode == 0 and len(shown.stdout.splitlines()) <= 24
  assert all(f"  {name} " in shown.stdout for name in launchers)
  assert max(map(len, shown.stdout.splitlines())) <= 80


def test_a_command_is_its_launcher():
  ours = commands.run("launch.command", "list", "optimizers")
  theirs = commands.run("launch.list", "optimizers")
  assert ours.returncode == 0 and ours.stdout == theirs.stdout
  assert "lion" in ours.stdout and "muon" in ours.stdout


@pytest.mark.parametrize("arguments", [[], ["trian"], ["--config=a.py"]])
def test_an_unknown_command_is_one_line(arguments):
  line = commands.refusal(commands.run("launch.command", *arguments))
  assert "must be one of train, federate" in line
  assert ("did you mean 'train'?" in line) == (arguments == ["trian"])


def test_the_package_has_the_command_and_says_that_it_is_typed():
  project = tomllib.loads((commands.ROOT / "pyproject.toml").read_text())
  module, function = project["project"]["scripts"]["dpjax"].split(":")
  assert module == command.__name__ and callable(getattr(command, function))
  assert (pathlib.Path(dpjax.__file__).parent / "py.typed").exists()
  assert "py.typed" in project["tool"]["setuptools"]["package-data"]["dpjax"]


def test_printed_commands_are_this_one_for_each_run(tmp_path):
  folder = tmp_path / "a sweep"
  done = commands.run("launch.sweep", *_SWEEP, f"--workdir={folder}", "--print_commands")
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert len(lines) == 2 and not folder.exists()
  for line, name in zip(lines, ("epsilon-2_seed=0", "epsilon-4_seed=0")):
    python, dash, module, *flags = shlex.split(line)
    assert (python, dash, module) == ("python", "-m", "launch.sweep")
    assert flags == [*_SWEEP, f"--workdir={folder}", f"--only={name}"]
  line = commands.refusal(
    commands.run(
      "launch.sweep", *_SWEEP, f"--workdir={folder}", "--print_commands", "--dry_run"
    )
  )
  assert "--dry_run" in line


@pytest.mark.long
def test_a_sweep_collects_what_its_printed_commands_left(tmp_path):
  arguments = (*_SWEEP, f"--workdir={tmp_path}/sweep")
  lines = commands.run("launch.sweep", *arguments, "--print_commands").stdout.splitlines()
  _, _, module, *flags = shlex.split(lines[0])
  alone = commands.run(module, *flags)
  assert alone.returncode == 0, alone.stderr
  (folder,) = (tmp_path / "sweep" / "points").iterdir()
  before = (folder / "result.json").stat().st_mtime_ns
  done = commands.run("launch.sweep", *arguments)
  assert done.returncode == 0, done.stderr
  rows = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["rows"]
  assert [row["status"] for row in rows] == ["done", "done"]
  assert (folder / "result.json").stat().st_mtime_ns == before

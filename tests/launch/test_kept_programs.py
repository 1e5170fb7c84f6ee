"""Launchers keep compiled programs in the user's cache."""

import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest

_SAID = "import launch, os; print(os.environ.get('JAX_COMPILATION_CACHE_DIR'))"


def _folder(tmp_path, **variables):
  env = {**os.environ, "HOME": str(tmp_path), **variables}
  for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
    if name not in variables:
      env.pop(name, None)
  ran = subprocess.run(
    [sys.executable, "-W", "error", "-c", _SAID], env=env, capture_output=True, text=True
  )
  assert ran.returncode == 0, ran.stderr
  assert not ran.stderr
  return ran.stdout.strip()


def test_they_lie_in_a_folder_that_others_cannot_read(tmp_path):
  folder = pathlib.Path(_folder(tmp_path))
  assert folder == tmp_path / ".cache" / "dpjax" / "programs"
  assert stat.S_IMODE(folder.stat().st_mode) == 0o700
  assert _folder(tmp_path) == str(folder)


def test_the_users_own_folders_go_before(tmp_path):
  mine = str(tmp_path / "mine")
  assert _folder(tmp_path, JAX_COMPILATION_CACHE_DIR=mine) == mine
  assert _folder(tmp_path, JAX_COMPILATION_CACHE_DIR="") == ""
  assert _folder(tmp_path, XDG_CACHE_HOME=mine).startswith(mine)


def test_a_folder_that_others_can_write_is_not_used(tmp_path):
  folder = pathlib.Path(_folder(tmp_path))
  for mode in (0o770, 0o707):
    folder.chmod(mode)
    assert _folder(tmp_path) == "None"
  folder.chmod(0o700)
  assert _folder(tmp_path) == str(folder)


def test_without_a_home_nothing_is_kept(tmp_path):
  (tmp_path / "file").write_text("")
  assert _folder(tmp_path, HOME=str(tmp_path / "file")) == "None"


# Runs a config twice, on data of the same shapes, and prints the programs that the second run adds.
_TWICE = """
import dataclasses, importlib, json, os, pathlib, sys
import numpy as np
from dpjax.experiments.config import fields
from dpjax.experiments.run import loop
from dpjax.zoo.datasets import digits
module, changes = sys.argv[1], json.loads(sys.argv[2])
config = fields.replace_all(importlib.import_module(module).get_config(), changes)
kept = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
programs = lambda: {path.name for path in kept.glob("*-cache")}
load = digits.load_digits
loop.train(config, sys.argv[3] + "/one")
first = programs()
turned = lambda held: dataclasses.replace(held, x=1 - np.asarray(held.x))
digits.load_digits = lambda: tuple(map(turned, load()))
loop.train(config, sys.argv[3] + "/other")
print(len(first), sorted(programs() - first))
"""
_SMALL = {"num_steps": 2, "eval_every": 2, "checkpoint_every": 2}
_RELEVANCE = {"num_epochs": 1, "data.limit": 200}
_TWO_RUNS = {
  "train": ("configs.quickstart", _SMALL | {"augmentation": "shift"}),
  "federate": (
    "configs.fed.quickstart",
    {"num_rounds": 2, "eval_every": 2, "checkpoint_every": 2, "privacy": "local"},
  ),
  # Their plain jitted functions held noise keys, and rows of people.
  "relevance": ("configs.radp.quickstart", {"method": "adlm", **_RELEVANCE}),
  "secure": ("configs.secure.transfer", {}),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", _TWO_RUNS)
def test_programs_hold_no_keys_and_no_examples(kind, tmp_path):
  """Else a run with other keys, on other data of the same shapes, would have other programs."""
  module, changes = _TWO_RUNS[kind]
  ran = subprocess.run(
    [sys.executable, "-c", _TWICE, module, json.dumps(changes), str(tmp_path)],
    env={
      **os.environ,
      "JAX_ENABLE_COMPILATION_CACHE": "true",
      "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    },
    capture_output=True,
    text=True,
  )
  assert ran.returncode == 0, ran.stderr[-3000:]
  count, added = ran.stdout.strip().splitlines()[-1].split(maxsplit=1)
  assert int(count) > 5 and added == "[]"


@pytest.mark.slow
def test_a_spoilt_folder_costs_no_run(tmp_path):
  """A program that was cut off, or is none, is compiled again."""
  code = "import launch, jax; print(float(jax.jit(lambda x: x * 3 + 1)(2.0)))"
  env = {
    **os.environ,
    "XDG_CACHE_HOME": str(tmp_path),
    "JAX_ENABLE_COMPILATION_CACHE": "true",
  }
  env.pop("JAX_COMPILATION_CACHE_DIR", None)

  def run():
    return subprocess.run(
      [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )

  first = run()
  programs = list(tmp_path.rglob("*-cache"))
  assert first.stdout == "7.0\n" and programs
  for spoilt in (b"", b"no program", None):
    for path in programs:
      path.write_bytes(path.read_bytes()[:-40] if spoilt is None else spoilt)
    again = run()
    assert (again.stdout, again.returncode, again.stderr) == ("7.0\n", 0, "")


_RUN = ["--config.num_steps=2", "--config.noise_seed=3", "--config.release=false"]


@pytest.mark.slow
def test_kept_programs_change_no_bit(tmp_path):
  made = []
  for number, kept in enumerate(["true", "true", "false"]):
    folder = tmp_path / str(number)
    subprocess.run(
      [sys.executable, "-m", "launch.train", *_RUN, f"--workdir={folder}"],
      env={
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_ENABLE_COMPILATION_CACHE": kept,
      },
      check=True,
      capture_output=True,
    )
    made.append((folder / "params.npz").read_bytes())
    assert any((tmp_path / "programs").iterdir())
  assert made[0] == made[1] == made[2]

"""Launchers where JAX has no device, and with models that are no linen modules: one line each."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests import commands

_ROOT = pathlib.Path(__file__).resolve().parents[2]

_COMMANDS = {
  "train": ["--config=configs/quickstart.py"],
  "federate": ["--config=configs/fed/quickstart.py"],
  "relevance": ["--config=configs/radp/quickstart.py"],
  "attack": ["--config=configs/attack/quickstart.py"],
  "secure": ["--config=configs/secure/quickstart.py"],
  "sweep": ["--config=configs/sweeps/ablations_cifar10.py"],
  "check": ["--config=configs/quickstart.py"],
}


def _launch(name, *arguments, **environment):
  command = [sys.executable, "-m", f"launch.{name}", *arguments]
  path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
  inherited = {**os.environ, "PYTHONPATH": path}
  return subprocess.run(
    command,
    capture_output=True,
    text=True,
    cwd=_ROOT,
    env=inherited | environment,
    check=False,
  )


def _one_line(done):
  lines = done.stderr.strip().splitlines()
  assert done.returncode == 2 and len(lines) == 1, done.stderr
  assert lines[0].startswith("error: ") and len(lines[0]) < 310
  return lines[0]


@pytest.mark.cases(slow=["federate"], long=...)
@pytest.mark.parametrize(
  "name",
  [
    name if name == "sweep" else pytest.param(name, marks=pytest.mark.slow)
    for name in _COMMANDS
  ],
)
def test_a_platform_that_is_not_there_is_one_line(name, tmp_path):
  workdir = [] if name == "check" else [f"--workdir={tmp_path}"]
  done = _launch(name, *_COMMANDS[name], *workdir, JAX_PLATFORMS="nonsense")
  message = _one_line(done)
  assert message.startswith("error: JAX_PLATFORMS=nonsense: JAX finds no such device")
  assert not [*tmp_path.rglob("*.json")]


@pytest.mark.cases(slow=[2], long=...)
@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--dry_run"], ["many"]])
def test_a_tpu_or_gpu_that_is_not_there_is_one_line(more, tmp_path):
  many = ["--coordinator=127.0.0.1:39123", "--num_processes=1", "--process_id=0"]
  arguments = [*_COMMANDS["train"], f"--workdir={tmp_path}"]
  arguments += many if "many" in more else more
  message = _one_line(_launch("train", *arguments, JAX_PLATFORMS="rocm"))
  assert "JAX_PLATFORMS=rocm: JAX finds no such device on this machine" in message


_OWN = """
from flax import nnx

class Net(nnx.Module):
  def __init__(self, *, num_classes, rngs=None):
    self.layer = nnx.Linear(64, num_classes, rngs=nnx.Rngs(0))

class NeedsRngs(nnx.Module):
  def __init__(self, num_classes, rngs):
    pass

class Plain:
  def __init__(self, num_classes):
    self.text = "long " * 1000

def made(num_classes):
  return Net(num_classes=num_classes)

def function(num_classes):
  return lambda params, x: x

def words(num_classes):
  return Plain(num_classes)
"""
_NOT_LINEN = ("must return a linen module", "clipped_grad in a notebook")


@pytest.mark.parametrize(
  ("launcher", "model", "words"),
  [
    ("train", "Plain", _NOT_LINEN),
    *(
      pytest.param(launcher, model, words, marks=pytest.mark.slow)
      for launcher, model, words in (
        ("train", "function", _NOT_LINEN),
        ("train", "words", _NOT_LINEN),
        ("train", "Net", ("'Net' object is not callable",)),
        ("train", "NeedsRngs", ("must have parameters",)),
        ("train", "made", ("must take an argument rngs",)),
        ("federate", "Net", ("'Net' object is not callable",)),
        ("federate", "made", ("must take an argument rngs",)),
        # Relevance is propagated through linen's layers alone.
        ("relevance", "Net", _NOT_LINEN),
      )
    ),
  ],
)
def test_a_model_that_is_no_linen_module_is_one_line(launcher, model, words, tmp_path):
  (tmp_path / "own_nets.py").write_text(_OWN)
  # Unlike the platform, which JAX reads as it is imported, own code needs no fresh interpreter.
  done = commands.run(
    f"launch.{launcher}",
    *_COMMANDS[launcher],
    f"--workdir={tmp_path / 'run'}",
    f"--config.model.name=own_nets:{model}",
    "--config.model.options={}",
    env=os.environ | {"PYTHONPATH": str(tmp_path)},
  )
  message = _one_line(done)
  assert f"own_nets:{model}" in message and all(word in message for word in words)

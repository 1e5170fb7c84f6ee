"""Freed memory is used again, and a user's own choice of an allocator is left alone."""

import json
import os
import platform
import subprocess
import sys

import pytest

from dpjax.experiments.kinds.central.config import ModelConfig, TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.parallel import allocator
from launch import app

_NAME, _VERSION = platform.libc_ver()
_TAKES = _NAME == "glibc" and [int(part) for part in _VERSION.split(".")[:2]] >= [2, 35]
needs_glibc = pytest.mark.skipif(not _TAKES, reason="nothing is set without glibc 2.35")
_PAGES = 5 * 2**27 / os.sysconf("SC_PAGE_SIZE")  # of the blocks that are freed below

_FAULTS = """
import ctypes, json, resource, sys
from dpjax.parallel import allocator

getattr(ctypes.CDLL(None), "prctl", lambda *a: 0)(41, 1, 0, 0, 0)  # no huge pages: faults count

def faults():
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

took = allocator.keep_freed_memory() if sys.argv[1] == "kept" else None
b"x" * 2**27  # 128 MiB, once
before = faults()
for _ in range(5):
  b"x" * 2**27
print(json.dumps([took, faults() - before]))
"""

_LARGE = """
import json
import numpy as np
from dpjax.parallel import allocator
from dpjax.experiments.run.provenance import process_memory

took = allocator.keep_freed_memory()
before = process_memory("VmSize")
held = np.empty(3 * 2**27)  # 3 GiB, never touched
during = process_memory("VmSize")
del held
print(json.dumps([took, during - before, process_memory("VmSize") - before]))
"""


_BACK = """
import json
from dpjax.parallel import allocator
from dpjax.experiments.run.provenance import process_memory

took = allocator.keep_freed_memory()
held = [b"x" * 2**27 for _ in range(4)]
del held
before = process_memory("VmRSS")
allocator.give_back()
print(json.dumps([took, before - process_memory("VmRSS")]))
"""


def _run(program, *arguments, **variables):
  chosen = allocator.chosen_by_user()
  env = {name: value for name, value in os.environ.items() if name not in chosen}
  command = [sys.executable, "-c", program, *arguments]
  done = subprocess.run(command, capture_output=True, text=True, env=env | variables)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.mark.slow
@needs_glibc
def test_a_block_that_was_freed_is_used_again():
  returned, kept = (_run(_FAULTS, method) for method in ("returned", "kept"))
  assert kept[0] is True
  assert returned[1] > 0.5 * _PAGES and kept[1] < 0.02 * _PAGES


@pytest.mark.slow
@needs_glibc
def test_what_is_kept_can_be_given_back():
  took, less = _run(_BACK)
  assert took and less > 2**28


@pytest.mark.slow
@needs_glibc
def test_what_is_large_goes_back_to_the_system():
  took, during, after = _run(_LARGE)
  assert took and during >= 3 * 2**30 and after < 2**28


@pytest.mark.cases(quick=["MALLOC_ARENA_MAX"], long=...)
@pytest.mark.parametrize(
  "variables",
  [
    {"GLIBC_TUNABLES": ""},
    {"MALLOC_ARENA_MAX": "4"},
    {"MALLOC_CONF": "background_thread:true"},
    {"LD_PRELOAD": ""},
  ],
  ids=lambda variables: next(iter(variables)),
)
def test_who_has_chosen_keeps_the_choice(variables):
  took, faults = _run(_FAULTS, "kept", **variables)
  assert took is False and (faults > 0.5 * _PAGES or not _TAKES)


@pytest.fixture
def asked(monkeypatch):
  """How often a launcher has asked for it."""
  calls = []
  monkeypatch.setattr(allocator, "keep_freed_memory", lambda: calls.append(1))
  return calls


@pytest.mark.parametrize(
  ("models", "kept"),
  [(["cnn", "scatter_linear"], 1), (["cnn", "mlp"], 0), (["of-nobody"], 0), ([], 0)],
)
def test_launchers_keep_it_for_wide_features_alone(models, kept, asked):
  app.prepare_memory(TrainConfig(model=ModelConfig(name=name)) for name in models)
  assert len(asked) == kept


def test_clients_steps_are_small(asked):
  app.prepare_memory([FedConfig(model=ModelConfig(name="scatter_linear"))])
  assert not asked


_LAUNCHED = """
import sys
import jax
from dpjax.parallel import allocator
from launch import app, {launcher} as launcher

def asked():
  jax.config.update("jax_num_cpu_devices", 1)  # refused once JAX has its devices and threads
  sys.exit("asked in time")

allocator.keep_freed_memory = asked
sys.argv = ["launcher", *{arguments!r}]
app.run(launcher.main)
"""


@pytest.mark.long
@pytest.mark.parametrize(
  ("launcher", "arguments"),
  [
    ("train", ["--config=configs/mnist_scatter_linear.py", "--workdir={}"]),
    ("train", ["--config=configs/mnist_scatter_linear.py", "--workdir={}", "--dry_run"]),
    ("sweep", ["--config=configs/sweeps/mnist_curves.py", "--workdir={}"]),
    ("check", ["--config=configs/mnist_scatter_linear.py"]),
  ],
)
def test_it_is_asked_for_before_jax_has_its_threads(launcher, arguments, tmp_path):
  given = [argument.format(tmp_path / "run") for argument in arguments]
  program = _LAUNCHED.format(launcher=launcher, arguments=given)
  command = [sys.executable, "-c", program]
  done = subprocess.run(command, capture_output=True, text=True, cwd=app.ROOT)
  assert done.stderr.strip().endswith("asked in time"), done.stderr

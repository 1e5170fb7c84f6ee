"""Freed memory is used again, and a user's own choice of an allocator is left alone."""

import json
import os
import platform
import subprocess
import sys

import pytest

from dpjax import allocator
from launch import app

_GLIBC = platform.libc_ver()[0] == "glibc"
needs_glibc = pytest.mark.skipif(not _GLIBC, reason="without glibc nothing is set")

_FAULTS = """
import json, resource, sys
from dpjax import allocator

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
from dpjax import allocator
from dpjax.runs.provenance import process_memory

took = allocator.keep_freed_memory()
before = process_memory("VmSize")
held = np.empty(3 * 2**27)  # 3 GiB, never touched
during = process_memory("VmSize")
del held
print(json.dumps([took, during - before, process_memory("VmSize") - before]))
"""


def _run(program, *arguments, **variables):
  taken_out = ("GLIBC_TUNABLES", "LD_PRELOAD")
  env = {
    name: value
    for name, value in os.environ.items()
    if name not in taken_out and not name.startswith("MALLOC_")
  }
  command = [sys.executable, "-c", program, *arguments]
  done = subprocess.run(command, capture_output=True, text=True, env=env | variables)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@needs_glibc
def test_a_block_that_was_freed_is_used_again():
  returned, kept = (_run(_FAULTS, method) for method in ("returned", "kept"))
  assert kept[0] is True
  assert returned[1] > 50_000 * (4096 / os.sysconf("SC_PAGE_SIZE"))  # each page, each time
  assert kept[1] < returned[1] / 20


@needs_glibc
def test_what_is_large_goes_back_to_the_system():
  took, during, after = _run(_LARGE)
  assert took and during >= 3 * 2**30 and after < 2**28


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
  assert took is False and (faults > 50_000 or not _GLIBC)


@pytest.mark.parametrize(
  ("models", "kept"),
  [(["cnn", "scatter_linear"], 1), (["cnn", "mlp"], 0), (["of-nobody"], 0), ([], 0)],
)
def test_launchers_keep_it_for_wide_features_alone(models, kept, monkeypatch):
  calls = []
  monkeypatch.setattr(allocator, "keep_freed_memory", lambda: calls.append(1))
  app.prepare_memory(models)
  assert len(calls) == kept

"""No noise key is a constant of a compiled program, which JAX may keep in a cache on disk."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

_RUN = """
import json, pathlib, sys
from dpjax.experiments.run import loop, run_keys
from tests.runs import test_pate, test_synthesis

held = {}
stored = run_keys.to_meta

def noted(data, random=None, **more):
  if random is not None:
    held[name] = run_keys.to_json(random)["noise"]
  return stored(data, random, **more)

run_keys.to_meta = noted
for module in (test_pate, test_synthesis):
  name = module.__name__
  loop.train(module._config(), pathlib.Path(sys.argv[1]) / name)
print(json.dumps(held))
"""


@pytest.mark.long
def test_compiled_programs_hold_no_noise_key(tmp_path):
  programs = tmp_path / "programs"
  flags = f"--xla_dump_to={programs} --xla_dump_hlo_as_text"
  ran = subprocess.run(
    [sys.executable, "-c", _RUN, str(tmp_path)],
    env={**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"},
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
  )
  assert ran.returncode == 0, ran.stderr[-2000:]
  keys = json.loads(ran.stdout.splitlines()[-1])
  assert len(keys) == 2
  text = "\n".join(path.read_text() for path in programs.glob("*before_optimizations.txt"))
  assert "constant(" in text
  found = []
  for name, key in keys.items():
    words = np.frombuffer(bytes.fromhex(key), np.uint32)
    if re.search(r",\s*".join(map(str, words)), text):
      found.append(name)
  assert not found

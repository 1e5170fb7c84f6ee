"""No key and no example is a constant of a compiled program, which JAX keeps in a cache on disk."""

import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from dpjax.experiments.run import loop

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


@pytest.mark.cases(slow=["quickstart"], long=...)
@pytest.mark.parametrize("config", ["quickstart", "fed.quickstart", "pate.quickstart"])
def test_compiled_programs_hold_no_examples(config, tmp_path, captured_constants):
  config = importlib.import_module(f"configs.{config}").get_config()
  short = {"num_steps": 2, "num_rounds": 2}
  names = {field.name for field in dataclasses.fields(config)}
  loop.train(
    dataclasses.replace(config, **{k: v for k, v in short.items() if k in names}),
    tmp_path,
  )


@pytest.fixture
def captured_constants():
  """Makes a program with a constant of more than 4 kB an error; a hundred digits are 25."""
  before = jax.config.jax_captured_constants_warn_bytes
  jax.config.update("jax_captured_constants_warn_bytes", 4096)
  yield
  jax.config.update("jax_captured_constants_warn_bytes", before)


def test_a_program_that_holds_examples_is_seen(captured_constants):
  examples = jax.random.normal(jax.random.key(0), (100, 64))
  with pytest.warns(UserWarning, match="constants were captured"):
    jax.jit(lambda w: (examples @ w).sum())(jax.numpy.ones(64))

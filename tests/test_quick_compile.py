"""What `quick_compile` asks of XLA, and of whom it asks it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir

from tests import quick_compile

_OPTION = "jax_disable_most_optimizations"


def _asked(backend):
  options = compiler.get_compile_options(1, 1, backend=backend)
  return dict(options.env_option_overrides)


@pytest.mark.parametrize("is_quick", [True, False])
def test_programs_that_users_would_compile_are_compiled_as_theirs(is_quick):
  before = jax.config.read(_OPTION)
  jax.config.update(_OPTION, is_quick)
  try:
    asked = _asked(jax.devices("cpu")[0].client)
  finally:
    jax.config.update(_OPTION, before)
  assert asked == (quick_compile._FLAGS if is_quick else {})


def test_another_compiler_is_asked_for_nothing_of_it():
  assert not _asked(None)


def test_flags_of_a_program_are_those():
  devices, *rest = quick_compile.xla_flags(8).split()
  assert devices == "--xla_force_host_platform_device_count=8"
  emitters = ["--xla_cpu_use_fusion_emitters=false"]
  assert [flag for flag in rest if flag not in emitters] == [
    "--xla_cpu_parallel_codegen_split_count=1"
  ]


def test_a_shared_context_changes_no_program(monkeypatch):
  lower = lambda: jax.jit(lambda x: jnp.sin(x) @ x + 2.5).lower(jnp.ones((3, 3))).as_text()
  shared = [lower(), lower()]
  assert len({mlir.make_ir_context() for _ in range(10)}) <= 2
  monkeypatch.setattr(mlir, "make_ir_context", mlir.make_ir_context.__wrapped__)
  assert lower() == shared[0] == shared[1]


@pytest.mark.slow
def test_a_program_of_its_own_takes_the_flags():
  """XLA ends a process whose XLA_FLAGS it does not know."""
  program = "import jax; print(len(jax.devices()))"
  flags = {"XLA_FLAGS": quick_compile.xla_flags(2), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, "-c", program], env=os.environ | flags, capture_output=True, text=True
  )
  assert done.stdout == "2\n", done.stderr

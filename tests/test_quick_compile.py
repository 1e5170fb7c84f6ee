"""What `quick_compile` asks of XLA, and of whom it asks it."""

import inspect

import jax
import pytest
from jax._src import compiler

from dpjax.run_code import packages
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


def test_to_a_run_it_is_no_code_of_the_user():
  file = inspect.unwrap(compiler.get_compile_options).__code__.co_filename
  assert compiler.get_compile_options.__code__.co_filename == file
  assert packages.owner(file) == "installed"


def test_flags_of_a_program_are_those():
  text = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
  devices = "--xla_force_host_platform_device_count=8"
  assert quick_compile.xla_flags(8) == f"{devices} {text}"

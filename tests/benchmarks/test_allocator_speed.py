"""What is measured is the same training; what would be ignored or fails is told in a line."""

import platform

import pytest

from dpjax.benchmarks import allocator_speed
from dpjax.validate import UserError
from tests import commands

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


@needs_glibc
def test_both_methods_train_the_same_parameters():
  returned, kept = allocator_speed.measure("small", repeats=1)
  assert (returned.method, kept.method) == allocator_speed.METHODS
  assert returned.params_sha256 == kept.params_sha256
  assert returned.ratio == 1 and kept.ratio == kept.step_s / returned.step_s
  assert min(returned.peak_bytes, kept.peak_bytes) > 6e7  # of the data alone


@needs_glibc
def test_where_nothing_can_be_kept_nothing_is_claimed(monkeypatch):
  monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
  with pytest.raises(UserError, match="workloads=small: failed: .*user has set it"):
    allocator_speed.measure("small", repeats=1)


def test_wrong_arguments_end_in_a_line():
  with pytest.raises(UserError, match="workloads="):
    allocator_speed.measure("broad")
  done = commands.run("launch.benchmark", "--suite=allocator", "--methods=kept")
  assert done.returncode == 2 and "--methods=['kept']: would be ignored" in done.stderr

"""What is measured is the same training; what would be ignored or fails is told in a line."""

import pytest

from benchmarks import allocator_speed
from dpjax.parallel import allocator
from tests import commands
from tests.refuses import refuses
from tests.test_allocator import needs_glibc


@pytest.fixture(autouse=True)
def _nothing_is_chosen(monkeypatch):
  for name in allocator.chosen_by_user():
    monkeypatch.delenv(name)


@pytest.mark.long
@needs_glibc
@pytest.mark.slow
def test_both_methods_train_the_same_parameters():
  returned, kept = allocator_speed.measure("wide", repeats=1)
  assert (returned.method, kept.method) == allocator_speed.METHODS
  assert returned.params_sha256 == kept.params_sha256
  assert returned.ratio == 1 and kept.ratio == kept.step_s / returned.step_s
  assert min(returned.peak_bytes, kept.peak_bytes) > 3e8  # of the data alone


def test_where_a_user_has_chosen_nothing_is_measured(monkeypatch):
  monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
  with refuses("MALLOC_ARENA_MAX", value="2"):
    allocator_speed.measure("small", repeats=1)


def test_wrong_arguments_end_in_a_line():
  with refuses("workloads", value="broad"):
    allocator_speed.measure("broad")
  line = commands.refusal(commands.run("benchmarks", "allocator", "--methods=kept"))
  assert line.startswith("error: --methods: ")

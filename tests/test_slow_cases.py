"""The measured list of slow cases names tests that exist."""

import pytest

from tests import slow_cases


def _tests():
  return sorted({name.partition("[")[0] for name in slow_cases.marks()})


def test_every_kept_test_exists_and_has_a_case_that_ci_runs():
  long = {name for name, mark in slow_cases.marks().items() if mark == "long"}
  for test in slow_cases.KEPT:
    path, name = test.split("::")
    source = (slow_cases.LIST.parent.parent / path).read_text()
    assert f"def {name}(" in source and test not in long, test


@pytest.mark.parametrize("path", sorted({name.partition("::")[0] for name in _tests()}))
def test_every_listed_test_exists(path):
  source = (slow_cases.LIST.parent.parent / path).read_text()
  listed = [name for name in _tests() if name.startswith(f"{path}::")]
  gone = [
    name
    for name in listed
    if f"{name.rpartition('::')[2].rpartition('.')[2]}" not in source
  ]
  assert gone == []  # write the list again

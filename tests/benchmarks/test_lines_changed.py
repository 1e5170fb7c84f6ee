"""The table of existing scripts counts what stands in them, and dpjax's are private."""

import sys

import pytest

from benchmarks import lines_changed
from tests import pages

_FOLDER = lines_changed._FOLDER


def test_the_table_counts_the_scripts_of_now():
  kept = {row["script"]: row for row in pages.tables().entries("peers/lines_changed.csv")}
  assert {*kept} == {path.stem for path in _FOLDER.glob("*.py")}
  for name, row in kept.items():
    own = lines_changed.lines(_FOLDER / f"{name}.py")
    before = lines_changed.lines(_FOLDER / f"{name.partition('_')[0]}_ordinary.py")
    counted = (len(own), *lines_changed.changed(before, own))
    assert counted == (int(row["lines"]), int(row["new"]), int(row["gone"]))


@pytest.mark.long
@pytest.mark.parametrize("name", ["nnx_dpjax", "equinox_dpjax"])
def test_an_existing_script_learns_within_its_budget(name):
  found = lines_changed.measured(name, sys.executable, runs=1)
  assert found.accuracy > 0.8 and 2.9 < float(found.epsilon) <= 3

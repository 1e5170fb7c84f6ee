"""Sets made by a program are what they say, in memory and in files; steps are timed on both."""

import numpy as np
import pytest

from benchmarks import data_speed
from dpjax import data
from dpjax.experiments.kinds.central import build
from tests import commands


@pytest.mark.cases(quick=["arrays"], long=...)
@pytest.mark.parametrize("kind", data_speed.KINDS)
def test_a_set_is_the_same_wherever_it_lies(kind, tmp_path, monkeypatch):
  monkeypatch.setattr(data_speed, "_SHARD", 40)  # several files
  monkeypatch.setattr(data_speed, "_CHUNK", 30)
  config = data_speed.make(tmp_path, kind, 100)
  build.Central(config).check()  # what it times is a run that is not refused
  found = [
    build.load_data(data_speed._placed(config, place)) for place in ("memory", "files")
  ]
  for held, read in zip(*found):
    assert held.in_memory and not read.in_memory
    assert data.digest(held) == data.digest(read) and len(np.unique(held.y)) == 10
  assert [len(part) for part in found[0]] == [100, 1000]
  before = sorted(tmp_path.rglob("*"))
  assert data_speed.make(tmp_path, kind, 100) == config  # made once
  assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.long
@pytest.mark.parametrize("kind", data_speed.KINDS)
def test_steps_are_timed_and_memory_is_that_of_a_run(kind, tmp_path):
  entries = data_speed.measure(tmp_path, kind, [600], repeats=1)
  assert [(one.kind, one.records, one.place) for one in entries] == [
    (kind, 600, "memory"),
    (kind, 600, "files"),
  ]
  for one in entries:
    assert one.step_s > 0 and one.peak_rss_bytes > 10**8
  data_speed.write(entries, tmp_path)
  assert (tmp_path / "data.csv").read_text().count("\n") == 3


def test_the_folder_is_asked_for():
  done = commands.run("benchmarks", "data")
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert "folder: must be given" in done.stderr

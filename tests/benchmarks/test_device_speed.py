"""A step is measured over the meshes that are asked for, in one command."""

import csv

import pytest

from benchmarks import device_speed
from dpjax.parallel.collectives import collectives
from tests import commands


@pytest.mark.slow
def test_the_command_measures_a_mesh_and_says_that_it_is_virtual(tmp_path, small_run):
  flags = ["devices", "--cpu_devices=2", "--mesh=data:2", "--repeats=1"]
  flags += [f"--configs={small_run}", f"--out={tmp_path}"]
  done = commands.run("benchmarks", *flags)
  assert done.returncode == 0, done.stderr
  assert device_speed.NOTE in done.stdout
  with open(tmp_path / "devices.csv") as file:
    (row,) = csv.DictReader(file)
  assert (row["mesh"], row["num_devices"], row["virtual"]) == ("data:2", "2", "True")
  # the sum of 65 x 10 weights in float32, and a few scalars
  assert 4 * 650 <= int(row["sent_bytes"]) < 4 * 650 + 100


def test_a_mesh_that_does_not_fit_is_one_line():
  done = commands.run("benchmarks", "devices", "--mesh=data:4096")
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert "mesh='data:4096': needs 4096 devices" in done.stderr


def test_what_is_sent_is_read_from_the_program():
  hlo = """
  %a = f32[8,3]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %b = (f32[], /*index=1*/pred[2]{0}) all-reduce-start(%c, %d), replica_groups={{0,1},{2,3}}
  %done = f32[4] all-reduce-done(%b)
  %e = u32[1,2]{1,0} collective-permute(%f), source_target_pairs={{0,1}}
  %g = f32[3]{0} fusion(%all-reduce.1), kind=kLoop
  """
  found = collectives(hlo)
  assert [each.kind for each in found] == ["all-gather", "all-reduce", "collective-permute"]
  assert [each.group for each in found] == [4, 2, None]
  assert [each.num_bytes for each in found] == [96, 6, 8]

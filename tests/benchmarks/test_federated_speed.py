"""The federated benchmark measures rounds that do the same thing as the floor."""

import csv

import jax
import numpy as np
import pytest

from benchmarks import federated_speed, fedjax_peer
from dpjax.zoo import networks
from tests.federated import programs
from tests.refuses import refuses


@pytest.fixture
def tiny(monkeypatch):
  build = networks.build
  monkeypatch.setattr(
    networks, "build", lambda name, **options: build("linear", num_classes=10)
  )


_THERE = ["fedjax"] if fedjax_peer.is_installed() else []


@pytest.mark.long
@pytest.mark.parametrize(
  "method", ["loop", "threads", "vmap", "pmap", "shard_map", *_THERE]
)
def test_the_floor_and_the_others_do_the_same_work(tiny, method):
  steps = 1 if method == "fedjax" else 2  # it shuffles
  work = federated_speed.build("mlp", num_clients=3, steps=steps, batch_size=4)
  floor, other = federated_speed._floor(work)(), federated_speed._runner(work, method)()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), floor, other
  )


@pytest.mark.long
def test_entries_have_ratios_and_files_are_written(tiny, tmp_path):
  entries = federated_speed.measure("mlp", ["loop"], num_clients=2, steps=1, repeats=2)
  assert [entry.method for entry in entries] == ["floor", "loop"]
  assert entries[0].ratio == 1.0
  assert entries[1].ratio == entries[1].median_s / entries[0].median_s
  entries += federated_speed.scaling("mlp", "loop", [1, 2], repeats=1)
  entries += federated_speed.beside("mlp", ["loop"], [1, 4], repeats=1)
  assert [(e.data_mb, e.num_clients) for e in entries[-2:]] == [(1, 40), (4, 40)]
  assert entries[-1].ratio == entries[-1].median_s / entries[-2].median_s
  federated_speed.write(entries, tmp_path)
  with open(tmp_path / "federated.csv") as file:
    assert [row["num_clients"] for row in csv.DictReader(file)] == [
      "2",
      "2",
      "1",
      "2",
      "40",
      "40",
    ]
  assert (tmp_path / "federated.png").read_bytes().startswith(b"\x89PNG")
  assert "4 MB" in federated_speed.table(entries)


_EIGHT = """
import sys
sys.path.insert(0, ".")
from dpjax.zoo import networks
build = networks.build
networks.build = lambda name, **options: build("linear", num_classes=10)
from benchmarks import federated_speed as benchmark
measure = benchmark.measure
benchmark.measure = lambda name, methods, repeats: measure(
  name, methods, num_clients=11, steps=1, repeats=1)
from benchmarks import __main__ as command
command.main()
"""


@pytest.mark.long
def test_pmap_is_timed_over_eight_devices_of_a_cpu(tmp_path):
  arguments = ["federated", "--workloads=mlp", "--cpu_devices=8"]
  program = programs.start(
    ["-c", _EIGHT, *arguments, f"--out={tmp_path / 'out'}"], tmp_path, "eight"
  )
  try:
    assert program.code() == 0, program.err.read_text()[-3000:]
  finally:
    programs.stop([program])
  with open(tmp_path / "out" / "federated.csv") as file:
    rows = {row["method"]: row for row in csv.DictReader(file)}
  assert list(rows) == federated_speed.default_methods()
  assert {"loop", "threads", "vmap", "pmap", "shard_map"} <= set(rows)
  assert rows["pmap"]["num_devices"] == rows["shard_map"]["num_devices"] == "8"
  assert rows["vmap"]["num_devices"] == "1"
  assert all(float(row["ratio"]) > 0 for row in rows.values())


@pytest.mark.parametrize(
  ("count", "field"),
  [(0, "cpu_devices"), (8, "cpu_devices")],
)
def test_devices_that_cannot_be_made_are_one_line(count, field):
  assert jax.local_device_count() == 1  # JAX runs
  with refuses(field) as caught:
    federated_speed.use_cpu_devices(count)
  assert "\n" not in str(caught.value)


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("arguments", "field"),
  [
    (dict(name="mpl", methods=["loop"]), "workloads"),
    (dict(name="mlp", methods=["loop", "pool"]), "methods"),
    (dict(name="mlp", methods=["loop"], num_clients=0), "num_clients"),
    pytest.param(
      dict(name="mlp", methods=["fedjax"]),
      "methods",
      marks=pytest.mark.skipif(fedjax_peer.is_installed(), reason="FedJAX is there"),
    ),
  ],
)
def test_mistakes_are_one_line(arguments, field):
  with refuses(field):
    federated_speed.measure(**arguments)

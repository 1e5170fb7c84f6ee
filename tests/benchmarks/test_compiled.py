"""Gradients compiled for machines that are not here: a CPU takes the place of the devices."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import compiled, workloads
from dpjax.parallel import targets
from dpjax.types import Example
from tests.refuses import refuses


@pytest.fixture
def on_cpu(monkeypatch):
  monkeypatch.setattr(targets, "_check_installed", lambda platform, version: None)
  monkeypatch.setattr(targets, "_devices", lambda target: tuple(jax.devices("cpu")[:1]))


def _tiny(name, platform):
  assert platform != "cpu"
  loss_fn = lambda w, example: jnp.sum(example.x @ w)
  batch = Example(jnp.ones((32, 8)), jnp.zeros(32, jnp.int32))
  return workloads.Workload(loss_fn, jnp.ones((8, 4)), batch)


def test_what_is_in_the_file_is_not_compiled_again(tmp_path, on_cpu, monkeypatch):
  monkeypatch.setattr(workloads, "build", _tiny)
  wanted = (["mlp"], ["vmap"], ["gpu:h100:1"])
  plain, stacked = compiled.measure(*wanted, out=tmp_path)
  assert (plain.method, stacked.method) == ("ordinary", "vmap")
  # The gradients of all examples, and the batch, are in memory.
  assert plain.argument_bytes >= 4 * 32 * 8 and stacked.held_bytes > plain.held_bytes
  assert plain.roofline_s == max(plain.flops / 495e12, plain.memory_bytes / 3352e9)
  assert compiled.ratios([plain, stacked])[0] == dict.fromkeys(
    ("bytes_ratio", "memory_ratio", "roofline_ratio"), 1.0
  )
  monkeypatch.setattr(compiled, "entry", None)
  assert compiled.measure(*wanted, out=tmp_path) == [plain, stacked]


@pytest.mark.parametrize(
  ("names", "methods", "machines", "field"),
  [
    (["mpl"], ["auto"], ["gpu:h100:1"], "workloads"),
    (["mlp"], ["ghost"], ["gpu:h100:1"], "methods"),
    (["mlp"], ["auto"], ["gpu:h100"], "target"),
  ],
)
def test_a_slip_is_told_before_anything_is_compiled(names, methods, machines, field):
  with refuses(field):
    compiled.check(names, methods, machines)

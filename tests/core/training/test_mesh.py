"""One batch over eight devices: the sums of one device, its noise bit for bit, its ledger.

What eight devices do is asked of one program, `mesh_program`.
"""

import jax
import numpy as np
import pytest

from dpjax import gradients
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import workdir, writers
from tests import commands
from tests.core.training import mesh_program
from tests.refuses import refuses

_MESHES = ("data:8", "data:4,model:2")


def _program(*arguments):
  return commands.on_eight_devices("-m", "tests.core.training.mesh_program", *arguments)


@pytest.fixture(scope="module")
def on_devices():
  return _program()


def _close(found, wanted):
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _idle(params):
  """The weights of columns that are 0 for everybody: their gradients are 0, so they are the
  sum of the noise, step by step. [bias [4], kernel [6, 4]]"""
  return np.asarray(params[1])[: mesh_program.IDLE]


# --- the same run


@pytest.mark.cases(slow=[1], long=...)
@pytest.mark.parametrize("mesh", _MESHES)
def test_p19_eight_devices_have_the_sums_and_the_very_noise_of_one(on_devices, mesh):
  one, many = on_devices["steps"]["None"], on_devices["steps"][mesh]
  _close(many["params"], one["params"])
  _close(many["info"], one["info"])
  np.testing.assert_array_equal(_idle(many["params"]), _idle(one["params"]))
  assert np.all(_idle(one["params"]) != 0) and many["noise"] == one["noise"]
  assert many["scores"]["accuracy"] == one["scores"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", _MESHES)
def test_draws_ledger_and_streams_do_not_know_the_mesh(on_devices, mesh):
  """27 rows over 8 devices are 32: who was drawn stays, and padding is nobody."""
  one, many = on_devices["steps"]["None"], on_devices["steps"][mesh]
  for name in ("drawn", "digest", "epsilon"):
    assert many[name] == one[name]
  assert one["rows on a device"] == [32, 6] and many["rows on a device"][0] in (4, 8)


@pytest.mark.slow
def test_a_loop_that_begins_from_constants_has_the_sum_of_one_device(on_devices):
  for one, many in on_devices["loops"].values():
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_with_other_devices_as_if_nothing_were(on_devices):
  """8 -> 1 -> 4 x 2 devices by checkpoints, in the middle of a run."""
  moved, one = on_devices["steps"]["moved"], on_devices["steps"]["None"]
  _close(moved["params"], one["params"])
  np.testing.assert_array_equal(_idle(moved["params"]), _idle(one["params"]))
  assert moved["noise"] == one["noise"]


@pytest.mark.slow
def test_parameters_and_what_has_their_shape_lie_over_the_model_axis(on_devices):
  whole = on_devices["steps"]["data:8"]["lies"]
  assert all(shape == there for shape, there in whole)
  halves = on_devices["steps"]["data:4,model:2"]["lies"]
  split = [[shape, there] for shape, there in halves if shape]
  # The four words of the key lie whole on each device.
  split.remove([[4], [4]])
  assert split and all(there in ([2], [6, 2]) for _, there in split)


# --- what the compiled program sends


def _faults(exchanged, shapes, group):
  """What is wrong with the exchanges of a step over an axis `data` of `group` devices, where
  the parameters on each device have these shapes."""
  across = [(kind, arrays) for kind, arrays, size in exchanged if size in (group, None)]
  joined = [array for kind, arrays in across if kind in _REDUCTIONS for array in arrays]
  sums = [tuple(shape) for _, shape in joined if shape]
  faults = [f"{kind} {arrays}" for kind, arrays in across if kind not in _REDUCTIONS]
  if sorted(sums) != sorted(shapes):
    faults.append(f"sums {sums}")
  return faults


_REDUCTIONS = ("all-reduce", "reduce-scatter")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "group", "shapes"),
  [("data:8", 8, [(4,), (6, 4)]), ("data:4,model:2", 4, [(2,), (6, 2)])],
)
def test_a_step_reduces_the_clipped_sum_once_and_gathers_no_example(
  on_devices, mesh, group, shapes
):
  exchanged = on_devices["steps"][mesh]["exchanged"]
  assert not _faults(exchanged, shapes, group), exchanged
  leaf = ["f32", list(shapes[0])]
  assert sum(leaf in arrays for _, arrays, _ in exchanged) == 1


@pytest.mark.slow
def test_the_checks_catch_noise_by_device_a_second_sum_and_a_gather(on_devices):
  plants = on_devices["plants"]
  noisy, sent, one = (plants[name]["total"] for name in ("noise", "sent", "one"))
  with pytest.raises(AssertionError):
    _close(noisy, one)
  _close(sent, one)  # nothing but its exchanges is wrong with it
  faults = "".join(_faults(plants["sent"]["exchanged"], [(3,)], 8))
  assert "all-gather" in faults and "sums [(3,), (3,)]" in faults
  assert not _faults(plants["noise"]["exchanged"], [(3,)], 8)


# --- whole runs, and every kind of noise and clipping: by hand


@pytest.fixture(scope="module")
def more():
  return _program("more")


@pytest.mark.long
def test_a_run_of_the_launcher_that_changes_its_devices(more):
  moved, straight = more["runs"]["moved"], more["runs"]["straight"]
  for name in ("epsilon", "ledger", "num_steps", "test_accuracy"):
    assert moved[name] == straight[name]
  _close(moved["params"], straight["params"])
  np.testing.assert_array_equal(_idle(moved["params"]), _idle(straight["params"]))
  assert moved["mesh"] == "data:4,model:2" and straight["mesh"] is None
  assert moved["device"].startswith("8 x cpu, data:4,model:2")
  assert straight["device"].startswith("1 x cpu")


@pytest.mark.long
def test_every_kind_of_noise_and_clipping_over_a_mesh(more):
  for name, found in more["kinds"].items():
    for mesh in _MESHES:
      for key in ("params", "ema"):
        _close(found[mesh][key], found["None"][key])
      _close(found[mesh]["info"], found["None"]["info"])
      kinds = {(kind, size) for kind, _, size in found[mesh]["exchanged"]}
      axis = 8 if mesh == "data:8" else 4
      assert ("all-gather", axis) not in kinds and ("all-gather", None) not in kinds, name


# --- on one device: what is refused, and what a folder knows


@pytest.mark.parametrize(
  ("mesh", "told"),
  [
    ("data:4096", "mesh='data:4096': needs 4096 devices, this process has"),
    ("data:64,model:64", "mesh='data:64,model:64': needs 4096 devices, this process has"),
    ("model:2", "mesh='model:2': must be such as 'data:4' or 'data:4,model:2'"),
    ("data:0", "mesh='data:0': must be such as"),
    ("", "mesh='': must be such as"),
    ("data:2,data:2", "mesh='data:2,data:2': must be such as"),
  ],
)
def test_a_mesh_that_does_not_fit_is_one_line(mesh, told):
  with refuses("mesh", value=mesh) as caught:
    build.Central(TrainConfig(mesh=mesh)).check()
  assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
  "mesh",
  [
    lambda: jax.make_mesh((1,), ("batch",)),
    lambda: jax.make_mesh((1,), ("model",)),
    lambda: jax.sharding.Mesh([jax.devices()[:1]], ("data", "data")),
    lambda: "data:1",
  ],
)
def test_a_mesh_of_other_axes_is_refused_by_the_library(mesh):
  with refuses("mesh"):
    gradients.clipped_grad(lambda w, x: w * x, l2_clip_norm=1.0, mesh=mesh())


def test_a_folder_takes_its_run_back_on_other_devices(tmp_path):
  here, there = TrainConfig(), TrainConfig(mesh="data:1")
  assert workdir.config_digest(here) == workdir.config_digest(there)
  workdir.claim(tmp_path, here)
  workdir.recall_for(tmp_path, there)
  nothing = dict.fromkeys(writers.RESULT_KEYS) | {"epsilon_kind": "none"}
  written = workdir.write_result(tmp_path, there, nothing)
  assert workdir.finished_result(tmp_path, here) == written
  with refuses("workdir") as caught:
    workdir.recall_for(tmp_path, TrainConfig(num_steps=7))
  assert "num_steps" in str(caught.value)

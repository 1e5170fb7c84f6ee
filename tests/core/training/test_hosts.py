"""Central training over two processes with four devices each is that of one device.

What they do is asked of one program, `hosts_program`; this process is the one device.
"""

import json
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import dpjax
from dpjax import parallel as processes
from dpjax.gradients.device_mesh import mesh_of
from dpjax.parallel import exchanges
from tests.core.training import hosts_program, mesh_program
from tests.federated import programs
from tests.refuses import refuses


def _program(folder, *more):
  port = str(programs.free_port())
  command = [
    sys.executable,
    "-m",
    "tests.core.training.hosts_program",
    port,
    str(folder),
    *more,
  ]
  done = subprocess.run(command, cwd=programs.ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-3000:]
  return [json.loads((folder / f"{index}.json").read_text()) for index in (0, 1)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
  """(folder of the runs, what each process found)."""
  folder = tmp_path_factory.mktemp("hosts")
  assert mesh_program.until(None, None, folder / "one", copies={2: folder / "down"})
  found = _program(folder)
  assert mesh_program.until(None, None, folder / "up")
  return folder, found


def _params(folder):
  with np.load(folder / "params.npz") as params:
    return {name: params[name] for name in params}


def _result(folder):
  return json.loads((folder / "result.json").read_text())


@pytest.mark.cases(slow=["down"], long=...)
@pytest.mark.parametrize("name", ["up", "down"])
def test_p19_two_hosts_have_the_sums_the_very_noise_and_the_ledger_of_one(outcomes, name):
  """Down: begun on one device, ended on eight; up: from those ended on one again."""
  folder, _ = outcomes
  one, many = _params(folder / "one"), _params(folder / name)
  for leaf in one:
    np.testing.assert_allclose(many[leaf], one[leaf], rtol=1e-5, atol=1e-6)
  idle = lambda params: params["params/head/kernel"][: mesh_program.IDLE]
  np.testing.assert_array_equal(idle(many), idle(one))  # their weights see noise alone
  assert np.all(idle(one) != 0)
  one, many = _result(folder / "one"), _result(folder / name)
  for fact in ("epsilon", "noise_multiplier", "ledger", "num_steps", "test_accuracy"):
    assert many[fact] == one[fact], fact


@pytest.mark.slow
def test_each_process_gathers_its_own_rows_and_nothing_is_sent(outcomes):
  _, found = outcomes
  first, second = (process["rows"] for process in found)
  assert not {*first} & {*second} and len(first) == len(second) == 16
  rows = [row for _, row in sorted((int(k), row) for k, row in (first | second).items())]
  whole = mesh_program.dataset().x[hosts_program.ROWS]
  np.testing.assert_array_equal(rows, np.pad(whole, ((0, 5), (0, 0))))
  assert [process["sent"] for process in found] == [[], []]


@pytest.mark.slow
def test_one_result_and_one_writer(outcomes):
  folder, (first, second) = outcomes
  assert first["ended"] == second["ended"] == _result(folder / "down")
  assert first["ended"]["device"].startswith("8 x cpu, data:4,model:2, 2 processes")


_REFUSED = {
  "no mesh": "mesh=None: must be such as 'data:8', over devices of all 2 processes",
  "odd mesh": "mesh='data:3': has 3 devices, which must be a multiple of the 2 processes",
  "large mesh": "mesh='data:10': needs 5 devices of each process, process 0 has 4 (cpu)",
  "across": "mesh={'data': 1, 'model': 8}: 'model' must divide the 4 devices of a process",
  "half": "mesh={'data': 4}: must hold as many devices of each of the 2 processes, not [4, 0]",
  "release": "release=True: must be run by one process, not 2",
  "data": "data: differs between process 0 and process 1",
  "kind": "config=TrainConfig: must be run by one process, not 2",
  "plan": "dry_run: must be of one process, not 2",
  "sweep": "sweep: must be run by one process, not 2",
}


@pytest.mark.slow
def test_what_hosts_cannot_share_is_one_line_in_each(outcomes):
  folder, (first, second) = outcomes
  assert first["refused"] == second["refused"]
  assert first["refused"].keys() == _REFUSED.keys()
  for name, line in first["refused"].items():
    assert line.startswith(_REFUSED[name]) and "\n" not in line, (name, line)
  assert not (folder / "no").exists()


class _Device:
  platform = "cpu"

  def __init__(self, process_index):
    self.process_index = process_index


def test_a_host_with_fewer_devices_is_named(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "devices", lambda: [_Device(index) for index in (0, 0, 0, 1)])
  with refuses("mesh"):
    mesh_of("data:4")


def test_hosts_that_draw_batches_or_noise_of_their_own_are_refused(monkeypatch):
  """Of two fresh draws, a record can be in the rows of both hosts, and move the sum by 2 C."""
  sampler = dpjax.PoissonSampler(sampling_prob=0.5, capacity=4)
  numbers = {"noise_multiplier": 1.0, "l2_clip_norm": 1.0, "normalize_by": 2}
  plan = dpjax.Plan(sampler, num_steps=1, delta=1e-5, **numbers)
  rows = np.zeros((3, 1), np.float32)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with refuses("rng", value=None):
    plan.batches(rows)
  assert next(plan.batches(rows, rng=7)).mask.shape == (4,)

  def exchange(added, gathered):
    # What the second process gives to the nonce is zero, and its digests are others.
    return added, [np.stack([row, row + 1]) for row in gathered]

  monkeypatch.setattr(exchanges, "exchange", exchange)
  with refuses("noise_key"):
    dpjax.training.dp_sgd(
      lambda w, x: w @ x, plan, optax.sgd(1.0), noise_key=dpjax.new_key()
    )


def test_what_is_compared_between_processes_tells_nothing_later(monkeypatch):
  """The same data, compared twice: no digest is sent again."""
  sent = []
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  exchange = lambda added, gathered: (
    sent.append(gathered) or (added, np.array([gathered] * 2))
  )
  monkeypatch.setattr(processes.exchanges, "exchange", exchange)
  for _ in range(2):
    exchanges.same(data="secret")
  digests = [np.asarray(row).tobytes() for row in sent if row != ()]
  assert len({*digests}) == len(digests) == 2


@pytest.mark.long
def test_audits_and_every_kind_of_noise_and_clipping_over_hosts(tmp_path):
  found, one = _program(tmp_path, "more"), mesh_program.kinds([None])
  assert found[0] == found[1]
  audits = mesh_program.audited(None, tmp_path / "one")
  for kind, wanted in audits.items():
    audit = found[0]["audits"][kind]
    assert audit.keys() == wanted.keys()
    assert audit["epsilon_audited_lower"] == wanted["epsilon_audited_lower"]
  for name, kind in found[0]["kinds"].items():
    for mesh in kind:
      for key in ("params", "ema", "info"):
        for a, b in zip(kind[mesh][key], one[name]["None"][key], strict=True):
          np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

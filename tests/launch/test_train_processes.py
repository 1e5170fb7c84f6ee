"""launch.train as two processes is launch.train; by hand. What it is made of is quicker to ask:
`tests/core/training/test_hosts.py`, and for how processes are lost `tests/processes`."""

import json

import numpy as np
import pytest

from tests.federated import programs

_CONFIG = [
  "--config.num_steps=12",
  "--config.eval_every=6",
  "--config.checkpoint_every=3",
  "--config.noise_seed=0",
  "--config.privacy.accountant=rdp",
]


def _start(folder, name, workdir, *more):
  arguments = ["-m", "launch.train", f"--workdir={workdir}", *_CONFIG, *more]
  return programs.start(arguments, folder, name)


def _two(folder, workdir, meshes):
  where = [f"--coordinator=127.0.0.1:{programs.free_port()}", "--num_processes=2"]
  return [
    _start(
      folder, f"two{index}", workdir, *where, "--connect_timeout=200",
      f"--process_id={index}", f"--config.mesh={mesh}",
    )
    for index, mesh in enumerate(meshes)
  ]  # fmt: skip


@pytest.mark.long
def test_two_processes_give_the_result_of_one_and_process_0_writes(tmp_path):
  running = _two(tmp_path, tmp_path / "two", ["data:2", "data:2"])
  running.append(_start(tmp_path, "one", tmp_path / "one"))
  try:
    assert [program.code() for program in running] == [0, 0, 0], [
      program.err.read_text() for program in running
    ]
  finally:
    programs.stop(running)
  assert running[0].out.read_text().startswith("digits mlp: test_accuracy=")
  assert running[1].out.read_text() == running[1].err.read_text() == ""
  one, two = (
    json.loads((tmp_path / n / "result.json").read_text()) for n in ("one", "two")
  )
  for name in ("epsilon", "noise_multiplier", "ledger", "num_steps"):
    assert one[name] == two[name], name
  one, two = (np.load(tmp_path / name / "params.npz") for name in ("one", "two"))
  for name in one.files:
    np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_hosts_that_were_given_other_meshes_end_in_one_line_each(tmp_path):
  running = _two(tmp_path, tmp_path / "two", ["data:2", "data:4"])
  try:
    assert [program.code() for program in running] == [2, 2]
  finally:
    programs.stop(running)
  for program in running:
    (line,) = program.err.read_text().splitlines()
    assert "mesh: differs between process 0 and process 1" in line
  assert not (tmp_path / "two").exists()

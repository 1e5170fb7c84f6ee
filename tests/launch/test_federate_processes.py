"""launch.federate as several processes: one result, a killed process, resuming, mistakes."""

import functools
import json
import signal
import time

import numpy as np
import pytest
from absl import flags as absl_flags

from dpjax import data
from launch import main, peers
from tests.federated import programs
from tests.refuses import refuses

_CONFIG = [
  "--config.partition.num_clients=12",
  "--config.clients_per_round=5",
  "--config.num_rounds=60",
  "--config.local.epochs=1",
  "--config.eval_every=20",
  "--config.checkpoint_every=3",
  "--config.noise_seed=0",
]


def _start(folder, name, workdir, *more):
  arguments = ["-m", "launch.federate", f"--workdir={workdir}", *_CONFIG, *more]
  return programs.start(arguments, folder, name)


def _two(folder, workdir, *more):
  """Both processes of a run, started."""
  where = [f"--coordinator=127.0.0.1:{programs.free_port()}", "--num_processes=2"]
  options = [(*where, "--connect_timeout=200", f"--process_id={index}") for index in (0, 1)]
  name = f"{workdir.name}{time.monotonic_ns()}"
  return [
    _start(folder, f"{name}_{index}", workdir / str(index), *options[index], *more)
    for index in (0, 1)
  ]


def _ended(running):
  try:
    return [program.code() for program in running]
  finally:
    programs.stop(running)


def _latest(workdir):
  """The newest checkpoint of process 0, or 0."""
  names = (workdir / "0" / "checkpoints").glob("*")
  return max([int(path.name) for path in names if path.name.isdigit()], default=0)


def _kill_in_the_middle(folder, workdir, which):
  """Kills one of two when a new checkpoint is there; the exit code and stderr of the other."""
  before, running = _latest(workdir), _two(folder, workdir)
  try:
    while _latest(workdir) == before and running[which].process.poll() is None:
      time.sleep(0.02)
    running[which].process.send_signal(signal.SIGKILL)
    assert running[which].code() == -signal.SIGKILL, running[which].err.read_text()
    other = running[1 - which]
    code = other.code()
    # Where JAX aborts the process, a child of it says the last line.
    while "the same command" not in (said := other.err.read_text()):
      time.sleep(0.02)
    return code, said
  finally:
    programs.stop(running)


def _result(workdir):
  return json.loads((workdir / "result.json").read_text())


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
  """A run of one process and an uninterrupted one of two, started together."""
  folder = tmp_path_factory.mktemp("whole_runs")
  running = [_start(folder, "one", folder / "one"), *_two(folder, folder / "two")]
  assert _ended(running) == [0, 0, 0], [program.err.read_text() for program in running]
  return folder, running


@pytest.mark.long
def test_two_processes_give_the_result_of_one(whole_runs):
  folder, _ = whole_runs
  one, two = (np.load(folder / path / "params.npz") for path in ("one", "two/0"))
  for name in one.files:
    scale = np.abs(one[name]).max()  # sixty rounds, sums in another order
    np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-6 * scale)
  one, two = _result(folder / "one"), _result(folder / "two" / "0")
  for name in ("epsilon", "noise_multiplier", "ledger", "num_steps", "test_accuracy"):
    assert one[name] == two[name], name


@pytest.mark.long
def test_two_processes_have_the_keys_that_the_first_drew(tmp_path):
  """Each save compares their states. Another start of the run has other keys."""
  short = ("--config.num_rounds=6", "--config.noise_seed=none")
  runs = [_two(tmp_path, tmp_path / name, *short) for name in "ab"]
  for running in runs:
    assert _ended(running) == [0, 0], [program.err.read_text() for program in running]
  results = [_result(tmp_path / name / "0") for name in "ab"]
  assert [result["epsilon_kind"] for result in results] == ["proved"] * 2
  ids = {result["ledger"]["charges"][0]["noise_key_id"] for result in results}
  assert len(ids) == 2


@pytest.mark.slow
def test_only_process_0_writes_and_prints(whole_runs):
  folder, (_, first, second) = whole_runs
  assert not (folder / "two" / "1").exists()
  assert first.out.read_text().startswith("digits linear dp_fed_avg")
  assert second.out.read_text() == "" and second.err.read_text() == ""


def _finishes_as(whole_runs, workdir, folder):
  """Both processes started again end with what an uninterrupted run has."""
  assert 0 < _latest(workdir) < 60
  running = _two(folder, workdir)
  assert _ended(running) == [0, 0], [program.err.read_text() for program in running]
  resumed, expected = _result(workdir / "0"), _result(whole_runs / "two" / "0")
  assert resumed["params_sha256"] == expected["params_sha256"]
  assert resumed["ledger"] == expected["ledger"]
  metrics = [path / "0" / "metrics.jsonl" for path in (workdir, whole_runs / "two")]
  assert metrics[0].read_bytes() == metrics[1].read_bytes()


@pytest.mark.long
def test_a_killed_process_ends_the_other_and_the_run_resumes(whole_runs, tmp_path):
  workdir = tmp_path / "killed"
  code, said = _kill_in_the_middle(tmp_path, workdir, 1)
  assert code in (1, -signal.SIGABRT), said
  line = said.splitlines()[-1]
  assert line.startswith("error: process 0 of 2: lost ") and "the same command" in line
  assert f"round {_latest(workdir)} is saved" in line
  _finishes_as(whole_runs[0], workdir, tmp_path)


@pytest.mark.long
def test_the_coordinator_may_die_too(whole_runs, tmp_path):
  """JAX may be first to notice, and abort; it may come again and again."""
  workdir = tmp_path / "killed"
  for _ in range(2):
    code, said = _kill_in_the_middle(tmp_path, workdir, 0)
    assert code in (1, -signal.SIGABRT), said
    line = said.splitlines()[-1]
    assert line.startswith("error: process 1 of 2: lost ") and "the same command" in line
  _finishes_as(whole_runs[0], workdir, tmp_path)


@pytest.mark.long
def test_mistakes_are_one_line(tmp_path):
  cases = {
    "--coordinator: must be given with --num_processes=2": [
      "--num_processes=2", "--process_id=0",
    ],
  }  # fmt: skip
  running = [
    _start(tmp_path, str(place), tmp_path / "run", *options)
    for place, options in enumerate(cases.values())
  ]
  assert _ended(running) == [2] * len(cases)
  for program, words in zip(running, cases):
    lines = program.err.read_text().splitlines()
    assert len(lines) == 1 and words in lines[0], lines
  assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_processes_that_hold_other_data_end_in_one_line_without_a_digest(tmp_path):
  """One pixel of one record, with the same config: each would send its own sums."""
  rng = np.random.default_rng(0)
  x, y = rng.random((60, 4, 4, 1)).astype(np.float32), rng.integers(0, 3, 60)
  digests = []
  for name in "01":
    (tmp_path / name).mkdir()
    path, x[7, 1, 1, 0] = tmp_path / name / "mine.npz", float(name)
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y, num_classes=3)
    digests.append(data.digest(data.load(path)[0]).hex())
  where = [f"--coordinator=127.0.0.1:{programs.free_port()}", "--num_processes=2"]
  running = [
    _start(
      tmp_path, f"data_{name}", tmp_path / "run", *where, "--connect_timeout=200",
      f"--process_id={name}", "--config.data.name=mine.npz",
      f"--config.data.data_dir={tmp_path / name}",
    )
    for name in "01"
  ]  # fmt: skip
  assert _ended(running) == [2, 2], [program.err.read_text() for program in running]
  for program in running:
    (line,) = program.err.read_text().splitlines()
    assert "data: differs between process 0 and process 1" in line
    assert not any(digest[:8] in line for digest in digests)
  assert len({*digests}) == 2 and not (tmp_path / "run").exists()


@pytest.fixture
def flags(monkeypatch):
  """The flags of `peers` alone."""
  values = absl_flags.FlagValues()
  monkeypatch.setattr(peers.flags, "FLAGS", values)
  for define in ("DEFINE_string", "DEFINE_integer", "DEFINE_list", "DEFINE_float"):
    real = getattr(absl_flags, define)
    bound = functools.partial(real, flag_values=values)
    monkeypatch.setattr(peers.flags, define, bound)
  main.define_processes()
  return lambda *given: values(["launch", *given])


def test_the_flags_say_who_this_process_is(flags):
  flags()
  assert peers.options() is None
  flags("--coordinator=h:1", "--num_processes=2", "--process_id=1", "--local_devices=0,3")
  assert peers.options() == peers.Options("h:1", 2, 1, 60.0, 30.0, [0, 3])


@pytest.mark.parametrize(
  ("given", "field", "value"),
  [
    (["--coordinator=h:1"], "num_processes", None),
    (["--coordinator=h:1", "--num_processes=2"], "process_id", None),
    (["--process_id=0"], "coordinator", None),
    (
      ["--coordinator=h:1", "--num_processes=2", "--process_id=0", "--local_devices=x"],
      "local_devices",
      "x",
    ),
  ],
)
def test_flags_that_do_not_fit(flags, given, field, value):
  flags(*given)
  with refuses(field, value=value):
    peers.options()


def test_the_last_line_tells_what_the_files_hold(tmp_path):
  saved = functools.partial(peers.saved_words, str(tmp_path), "round")
  assert saved(owner=True) == "nothing is saved"
  assert saved(owner=False) == "process 0 knows what is saved"
  (tmp_path / "checkpoints").mkdir()
  for name in ("3.npz", "6.npz", ".9.npz.1.tmp"):
    (tmp_path / "checkpoints" / name).touch()
  assert "round 6 is saved" in saved(owner=True)

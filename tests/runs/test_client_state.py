"""What clients keep, in runs: memory or disk is one run; a kill costs nothing but time."""

import functools
from unittest import mock

import jax
import numpy as np
import optax
import pytest

from dpjax import federated
from dpjax.experiments.run import checkpoint, loop
from dpjax.parallel.client_states import Memory, OnDisk
from tests.federated import problems
from tests.refuses import refuses
from tests.runs.test_federate import _NONE, _config


def _scaffold(**overrides):
  return _config(**{**_NONE, "algorithm": "scaffold", **overrides})


class _Killed(BaseException):
  """As kill -9: only files are left."""


def _killing(at):
  """Dies when the rows of this step are written and its index is not."""
  write = checkpoint.Checkpoints._write

  def killed(self, step, *rest):
    if step == at:
      raise _Killed
    return write(self, step, *rest)

  return mock.patch.object(checkpoint.Checkpoints, "_write", killed)


def _rounds():
  """(a first state, a round, the cohorts of all rounds): SCAFFOLD, five of nine clients."""
  made = federated.scaffold(
    problems.quadratic, optax.sgd(0.1), client_learning_rate=0.1, num_clients=9,
    key=jax.random.key(0),
  )  # fmt: skip
  rng = np.random.default_rng(5)
  ids = [rng.choice(9, 5, replace=False) for _ in range(6)]
  cohort = federated.from_batches(problems.ragged((2, 2, 2, 2, 2)), batch_size=2)
  init = made.init({"w": np.zeros(3, np.float32)}, num_clients=9)
  return init, made.round, [cohort._replace(ids=each) for each in ids]


def _went(state, one_round, cohorts, folder, *, on_disk):
  """From the newest checkpoint on; (the last state, bytes of rows at each step)."""
  checkpoints = checkpoint.Checkpoints(
    folder, memory=functools.partial(Memory, on_disk=on_disk)
  )
  state, sizes = checkpoints.begin(state), []
  if checkpoints.latest is not None:
    state, _ = checkpoints.restore(state)
  for step in range(checkpoints.latest or 0, len(cohorts)):
    state, _ = one_round(state, cohorts[step])
    checkpoints.save(step + 1, state, {})
    rows = (folder / "checkpoints" / "clients").glob("*.rows")
    sizes.append(sum(path.stat().st_size for path in rows))
  return state, sizes


def _bits(state):
  leaves = jax.tree.leaves((state.params, state.server, state.memories.all()))
  return [np.asarray(leaf).tobytes() for leaf in leaves]


@pytest.mark.long
def test_killed_between_rows_and_checkpoint_it_goes_on_elsewhere_bit_for_bit(tmp_path):
  """Its folder is moved, and its states lie where they did not: memory, disk, memory. Each
  checkpoint writes the rows of its own cohort."""
  init, one_round, cohorts = _rounds()
  whole, sizes = _went(init, one_round, cohorts, tmp_path / "whole", on_disk=False)
  assert np.diff(sizes).tolist() == [5 * 12] * 5  # five clients' float32 [3]
  for number, at in enumerate((2, 3, 5)):
    with _killing(at), pytest.raises(_Killed):
      _went(init, one_round, cohorts, tmp_path / str(number), on_disk=number % 2 == 0)
    (tmp_path / str(number)).rename(tmp_path / str(number + 1))
  found, _ = _went(init, one_round, cohorts, tmp_path / "3", on_disk=True)
  assert isinstance(found.memories, OnDisk)
  assert _bits(found) == _bits(whole)


@pytest.mark.long
@pytest.mark.parametrize("first", ["disk", "memory"])
def test_a_run_goes_on_where_its_states_did_not_lie(first, tmp_path):
  whole = loop.train(_scaffold(), tmp_path / "whole")
  with _killing(4), pytest.raises(_Killed):
    loop.train(_scaffold(client_state=first), tmp_path / "a")
  other = {"disk": "memory", "memory": "disk"}[first]
  again = loop.train(_scaffold(client_state=other), tmp_path / "a")
  assert again["params_sha256"] == whole["params_sha256"]
  finished = loop.train(_scaffold(client_state=first), tmp_path / "a")
  assert finished["run_sha256"] == again["run_sha256"]


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"client_state": "tape"}, "client_state"),
    (
      {"algorithm": "fed_avg", "client_state": "disk"},
      "client_state",
    ),
    ({"memory_budget_gb": 0.0}, "memory_budget_gb"),
    ({"memory_budget_gb": 1.0}, "memory_budget_gb"),
  ],
)
def test_a_wrong_setting_is_one_line(changes, field, tmp_path):
  with refuses(field):
    loop.train(_scaffold(**changes), tmp_path / "run")
  assert not (tmp_path / "run" / "config.json").exists()

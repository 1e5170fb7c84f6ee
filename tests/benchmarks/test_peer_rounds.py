"""Rounds beside pfl-research and Flower: the same weights, and a row where one is absent."""

import os
import sys

import jax
import numpy as np
import optax
import pytest

from benchmarks import federated_speed, peer_rounds, peer_worker
from dpjax import federated, trees
from tests.refuses import refuses

_SMALL = peer_rounds.Setup(clients=3, cohort=3, examples=8, batch=4, side=8, rows=24)
_PYTHON = os.environ.get("DPJAX_PEER_PYTHON", sys.executable)


def test_the_published_model_has_its_parameters():
  x = np.zeros((1, 32, 32, 3), np.float32)
  shapes = jax.eval_shape(peer_rounds.SimpleCnn().init, jax.random.key(0), x)
  assert trees.size(shapes) == 1_626_442


@pytest.mark.slow
def test_a_peer_that_is_absent_is_a_row(monkeypatch, tmp_path):
  (tmp_path / "peer.py").write_text('print("a greeting\\n@{\\"missing\\": \\"pfl\\"}")')
  monkeypatch.setattr(peer_rounds, "_WORKER", tmp_path / "peer.py")
  first, second = peer_rounds.measure(["pfl", "flower"], repeats=1, setup=_SMALL)
  assert first.median_s is None and "no pfl" in first.note
  table = federated_speed.table([first, second])
  assert table.splitlines()[-2].startswith("pfl: not installed for ")


@pytest.mark.slow
def test_a_peer_that_dies_says_its_last_word(monkeypatch, tmp_path):
  (tmp_path / "peer.py").write_text('raise SystemExit("out of memory")')
  monkeypatch.setattr(peer_rounds, "_WORKER", tmp_path / "peer.py")
  with pytest.raises(RuntimeError, match="out of memory"):
    peer_rounds.measure(["pfl"], setup=_SMALL)
  with refuses("methods", value="fedml"):
    peer_rounds.measure(["fedml"])


def test_turns_take_orders(monkeypatch, capsys, tmp_path):
  orders = iter(["round\n", f"weights {tmp_path}/w.npz\n"])
  monkeypatch.setattr(sys, "stdin", orders)
  turns = peer_worker.Turns({"parameters": 1})
  weights = lambda: {"0.bias": np.ones(2)}
  assert turns.next(weights) and not turns.next(weights)
  said = capsys.readouterr().out.splitlines()
  assert said[0] == '@{"parameters": 1}' and said[1].startswith('@{"seconds": ')
  assert np.load(tmp_path / "w.npz")["0.bias"].tolist() == [1, 1]


@pytest.mark.long
@pytest.mark.parametrize("name", peer_rounds.PEERS)
def test_a_round_of_a_peer_gives_our_weights(name, tmp_path):
  """From the same first weights on the same clients in the order of their rows.

  DPJAX_PEER_PYTHON names another Python that has the peers."""
  work = peer_rounds.load(_SMALL)
  peer_rounds.write_load(work, tmp_path)
  try:
    with peer_rounds.Peer(name, work, tmp_path, _PYTHON) as peer:
      before = peer.weights(tmp_path / "before.npz")
      assert peer.round() > 0
      after = peer.weights(tmp_path / "after.npz")
  except peer_rounds.Absent as absent:
    pytest.skip(str(absent))
  dataset = work.federation.dataset
  own = [dataset[rows] for rows in work.federation.indices]
  cohort = federated.from_batches(own, batch_size=_SMALL.batch)
  fed_avg = federated.fed_avg(work.loss_fn, optax.sgd(_SMALL.rate), key=jax.random.key(0))
  state, _ = fed_avg.round(fed_avg.init(work.params), cohort)
  expected = peer_rounds.as_torch(state.params, _SMALL)
  first = peer_rounds.as_torch(work.params, _SMALL)
  for leaf, value in expected.items():
    np.testing.assert_array_equal(before[leaf], first[leaf])
    np.testing.assert_allclose(after[leaf], value, atol=1e-4, rtol=0)
  moved = max(np.abs(expected[leaf] - first[leaf]).max() for leaf in expected)
  assert moved > 1e-2  # so that standing still would be seen

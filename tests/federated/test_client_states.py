"""What clients keep between rounds: in memory, on disk, and from one kill to the next."""

import os
import pathlib
import shutil
import tempfile
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dpjax.parallel import client_states, row_journal
from dpjax.parallel.client_states import ClientStates, Keeper, OnDisk
from dpjax.parallel.row_journal import Journal
from tests.refuses import refuses

_N = 5
_OWN = {
  "c": np.array([[0.5, -0.0], [np.nan, 1e-45]], np.float32),
  "alpha": np.float32(0.25),
  "seen": np.array([True, False, True]),
  "none": np.zeros((0, 2), np.float32),
}
_ROW = sum(leaf.nbytes for leaf in _OWN.values())


def _states():
  return ClientStates(_OWN, _N)


def _rows(ids, number):
  """Rows that no other (client, number) has; every bit of them matters."""
  word = lambda who: np.uint32(1000 * number + who)
  return {
    "c": np.stack([np.full((2, 2), word(who)).view(np.float32) for who in ids]),
    "alpha": np.array([number + who / 8 for who in ids], np.float32),
    "seen": np.array([[number % 2, who % 2, 1] for who in ids], bool),
    "none": np.zeros((len(ids), 0, 2), np.float32),
  }


def _same(found, wanted):
  assert {k: (v.dtype, v.shape, v.tobytes()) for k, v in found.items()} == {
    k: (v.dtype, v.shape, v.tobytes()) for k, v in wanted.items()
  }


class _Oracle:
  """What every client keeps, as arrays [N, ...]."""

  def __init__(self):
    self.all = {k: np.repeat(v[None], _N, axis=0) for k, v in _OWN.items()}

  def replaced(self, ids, rows):
    after = _Oracle()
    after.all = {k: v.copy() for k, v in self.all.items()}
    for name, leaf in after.all.items():
      leaf[ids] = rows[name]
    return after


_TOUCHED = st.lists(st.integers(0, _N - 1), min_size=1, max_size=3, unique=True)


@pytest.mark.parametrize("on_disk", [False, True])
def test_states_are_values_on_disk_as_in_memory(on_disk, tmp_path):
  """Every earlier state stays what it was; clients that nobody touched cost nothing."""
  states, oracle = _states(), _Oracle()
  if on_disk:
    states = OnDisk(states, Journal(tmp_path / "rows", states.row_bytes))
  rng, made = np.random.default_rng(0), []
  for number in range(9):
    made.append((states, oracle))
    ids = rng.choice(_N, 2, replace=False)
    rows = _rows(ids, number)
    states, oracle = states.replace_rows(ids, rows), oracle.replaced(ids, rows)
  for state, wanted in made:
    _same(state.all(), wanted.all)
    _same(state.rows([3, 1]), {k: v[[3, 1]] for k, v in wanted.all.items()})
  assert made[0][0].touched.tolist() == [] and len(made[1][0].touched) == 2
  assert "4" not in repr(states)  # who was drawn is no message


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_that_were_saved_and_not_committed_are_not_restored(on_disk, tmp_path):
  """In memory as on disk: the index is all that counts."""
  keeper = Keeper(tmp_path / "rows", _states(), on_disk=on_disk)
  first = keeper.begun.replace_rows([1], _rows([1], 1))
  index = keeper.save(first)
  keeper.commit()
  keeper.save(
    first.replace_rows([2], _rows([2], 2))
  )  # and the checkpoint was never written
  restored = keeper.restore(index)
  assert restored.touched.tolist() == [1]
  _same(restored.all(), first.all())


def test_rows_that_were_there_before_go_to_disk_too(tmp_path):
  states = _states().replace_rows([2], _rows([2], 7))
  _same(OnDisk(states, Journal(tmp_path, _ROW)).all(), states.all())
  keeper = Keeper(tmp_path / "k", states, on_disk=False)
  index = keeper.save(keeper.begun)
  found = Keeper(tmp_path / "k", _states(), on_disk=True).restore(index)
  _same(found.all(), states.all())


# --- one run, killed wherever it writes


class _Killed(BaseException):
  """Nothing of the process is left but its files: rows are written without buffers."""


class _Run:
  """A run with checkpoints, in a folder; what a checkpoint holds beside rows is kept here."""

  def __init__(self, folder, on_disk, segment_rows=3):
    self.folder, self.segment = folder, segment_rows * _ROW
    self.steps = []  # the newest two: (index, oracle)
    self.start(on_disk)

  def start(self, on_disk):
    how = {"on_disk": on_disk, "segment_bytes": self.segment}
    self.keeper = Keeper(self.folder, _states(), **how)
    self.states, self.oracle = self.keeper.begun, _Oracle()
    if self.steps:
      index, self.oracle = self.steps[-1]
      self.states = self.keeper.restore(index)
    _same(self.states.all(), self.oracle.all)

  def touch(self, ids, number):
    rows = _rows(ids, number)
    self.states = self.states.replace_rows(ids, rows)
    self.oracle = self.oracle.replaced(ids, rows)
    _same(self.states.all(), self.oracle.all)

  def save(self):
    index = self.keeper.save(self.states)
    self.steps = [*self.steps, (index, self.oracle)][-row_journal.KEPT :]  # one rename
    self.keeper.commit()

  def check_steps(self):
    """Both checkpoints can be gone on from."""
    for index, oracle in self.steps:
      _same(OnDisk(_states(), Journal(self.folder, _ROW), index).all(), oracle.all)

  def num_rows(self):
    return sum(path.stat().st_size for path in self.folder.glob("*.rows")) // _ROW


_EVENTS = st.lists(
  st.one_of(
    _TOUCHED,
    st.just("save"),
    st.tuples(st.just("kill"), st.integers(0, 12), st.booleans()),
  ),
  min_size=4,
  max_size=16,
)


def _die_at(count):
  """Dies at the count-th write, half done, or at the count-th removal or fsync."""
  left = [count]

  def counted(call, before=lambda *_: None):
    def dying(*args, **kwargs):
      left[0] -= 1
      if left[0] < 0:
        before(*args)
        raise _Killed
      return call(*args, **kwargs)

    return dying

  write, half = os.pwrite, lambda file, data, at: write(file, data[: len(data) // 2], at)
  return (
    mock.patch.object(os, "pwrite", counted(os.pwrite, half)),
    mock.patch.object(os, "fsync", counted(os.fsync)),
    mock.patch.object(pathlib.Path, "unlink", counted(pathlib.Path.unlink)),
  )


def _played(run, events):
  dying, on_disk = None, False
  for number, event in enumerate(events):
    if event == "save" or isinstance(event, list):
      patches = () if dying is None else _die_at(dying)
      try:
        for patch in patches:
          patch.start()
        run.save() if event == "save" else run.touch(np.array(event), number)
      except _Killed:
        mock.patch.stopall()
        run.start(on_disk)
      finally:
        mock.patch.stopall()
      dying = None
    else:
      _, dying, on_disk = event
      if dying > 9:  # between two of its steps
        dying = None
        run.start(on_disk)
    run.check_steps()


@hypothesis.settings(max_examples=60, database=None, derandomize=True)
@hypothesis.given(events=_EVENTS, on_disk=st.booleans())
def test_a_run_killed_at_any_write_goes_on_from_its_checkpoint(events, on_disk):
  """On disk, in memory, and in turns; the step before the newest stays whole, too."""
  folder = pathlib.Path(tempfile.mkdtemp())
  try:
    _played(_Run(folder, on_disk), events)
  finally:
    shutil.rmtree(folder)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_checkpoint_writes_what_changed_and_files_stay_bounded(on_disk, tmp_path):
  run, rng = _Run(tmp_path, on_disk), np.random.default_rng(1)
  for number in range(30):
    before = run.num_rows()
    with mock.patch.object(os, "pwrite", side_effect=os.pwrite) as writes:
      run.touch(rng.choice(_N, 2, replace=False), number)
      run.save()
    assert 2 <= writes.call_count <= 4  # two new rows, and what is moved
    assert run.num_rows() <= before + writes.call_count
    run.check_steps()
    # twice what either checkpoint names, and the file that is written to
    assert run.num_rows() <= 2 * 2 * _N + 3
  with mock.patch.object(os, "pwrite", side_effect=os.pwrite) as writes:
    run.save()
  assert writes.call_count == 0


@pytest.mark.parametrize("on_disk", [False, True])
def test_files_of_which_little_is_left_are_written_together(on_disk, tmp_path):
  """One client of each file is never drawn again, the others always are."""
  states = ClientStates(np.zeros(2, np.int16), 100)
  keeper = Keeper(tmp_path, states, on_disk=on_disk, segment_bytes=4 * 4)
  states = keeper.begun
  for number in range(3, 40):
    states = states.replace_rows([0, 1, 2, number], np.full((4, 2), number))
    index = keeper.save(states)
    keeper.commit()
    rows = sum(path.stat().st_size for path in tmp_path.glob("*.rows")) // 4
    assert rows <= 2 * len(states.touched) + 3 * 4  # files open, and of the step before
  found = Keeper(tmp_path, ClientStates(np.zeros(2, np.int16), 100), on_disk=on_disk)
  wanted = [39, 39, 39, *range(3, 40), *[0] * 60]
  assert found.restore(index).all()[:, 1].tolist() == states.all()[:, 0].tolist() == wanted


def test_a_run_that_is_stopped_again_and_again_leaves_no_files_behind(tmp_path):
  run = _Run(tmp_path, on_disk=True)
  for number in range(30):
    run.touch(np.array([number % 2]), number)
    run.save()
    run.touch(np.array([3]), 100 + number)  # never saved
    run.start(on_disk=bool(number % 2))
  assert run.num_rows() <= 2 * 2 * 3 + 3


def _edited(path):
  data = bytearray(path.read_bytes())
  data[5] ^= 1
  path.write_bytes(data)


_DAMAGE = {
  "edited": _edited,
  "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
  "gone": lambda path: path.unlink(),
  "another's": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
}


@pytest.mark.parametrize("how", _DAMAGE)
@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_that_are_not_what_was_written_are_one_line(how, on_disk, tmp_path):
  run = _Run(tmp_path, on_disk)
  run.touch(np.array([1]), 1)
  run.save()
  (path,) = tmp_path.glob("*.rows")
  _DAMAGE[how](path)
  with refuses("checkpoint") as caught:
    run.start(on_disk)
  assert "\n" not in str(caught.value) and "client 1" not in str(caught.value)


def test_every_file_that_was_written_is_synced(tmp_path):
  """Rows of one step may lie in several files."""
  run, synced = _Run(tmp_path, on_disk=True, segment_rows=2), []
  run.touch(np.arange(_N), 1)
  note = lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}"))
  with mock.patch.object(os, "fsync", note):
    run.save()
  assert {pathlib.Path(path).name for path in synced} >= {
    f"00000{i}.rows" for i in (1, 2, 3)
  }


def test_a_full_disk_takes_nothing_away(tmp_path):
  run = _Run(tmp_path, on_disk=True)
  run.touch(np.array([1, 2]), 1)
  run.save()
  full = mock.patch.object(os, "pwrite", side_effect=OSError(28, "No space left on device"))
  with full, pytest.raises(OSError, match="No space"):
    run.touch(np.array([1]), 2)
  _same(run.states.all(), run.oracle.all)
  run.check_steps()


def test_what_a_memory_costs_is_what_was_touched():
  """A million clients that nobody has drawn are no memory to speak of."""
  own = {"w": np.zeros(10**6, np.float32)}
  states = ClientStates(own, 10**6).replace_rows([3], {"w": np.ones((1, 10**6))})
  assert states.rows([2, 3])["w"].sum(axis=1).tolist() == [0, 10**6]
  assert client_states.ClientStates(own, 10**6).row_bytes == 4 * 10**6

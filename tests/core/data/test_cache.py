"""Features on disk: whole or not there, their owner's alone, and never another run's."""

import os

import numpy as np
import pytest

from dpjax.data import cache
from tests.refuses import refuses

_KEY = cache.key(b"data", "settings")
_ROWS = np.arange(60, dtype=np.float32).reshape(10, 3, 2)


class Made:
  """Counts how often features are computed."""

  def __init__(self, rows=_ROWS):
    self.rows, self.count, self.told = rows, 0, []

  def __call__(self):
    self.count += 1
    yield from np.array_split(self.rows, 3)

  def found(self, folder, key=_KEY):
    return cache.rows(folder, key, self.rows.shape, self, self.told.append)


def _files(folder):
  return sorted(folder.glob("*.features"))


def test_features_are_computed_once_and_read_by_place(tmp_path):
  folder, made = tmp_path / "kept", Made()
  first, again = made.found(folder), made.found(folder)
  assert made.count == 1 and len(_files(folder)) == 1
  for rows in (first, again):
    np.testing.assert_array_equal(rows[np.array([7, 2, 2])], _ROWS[[7, 2, 2]])
    np.testing.assert_array_equal(rows[:], _ROWS)
  assert "read from" in made.told[-1]


def test_only_the_owner_reads_it_and_no_name_tells_what_it_is(tmp_path):
  folder, made = tmp_path / "kept", Made()
  made.found(folder)
  assert folder.stat().st_mode & 0o777 == 0o700
  for path in folder.iterdir():
    assert path.stat().st_mode & 0o777 == 0o600
    assert _KEY.hex()[:4] not in path.name
  first = _files(folder)[0].name
  _files(folder)[0].unlink()
  made.found(folder)
  assert _files(folder)[0].name != first  # random: nothing of the data


def test_a_folder_that_others_may_read_is_refused(tmp_path):
  folder = tmp_path / "kept"
  folder.mkdir(mode=0o755)
  with refuses("DPJAX_CACHE_DIR"):
    Made().found(folder)
  (tmp_path / "file").write_text("")
  with refuses("DPJAX_CACHE_DIR"):
    Made().found(tmp_path / "file")


@pytest.mark.parametrize("other", ["key", "shape"])
def test_other_data_or_settings_have_their_own(tmp_path, other):
  made = Made()
  made.found(tmp_path / "kept")
  more = Made(_ROWS[:8] if other == "shape" else _ROWS + 1)
  key = cache.key(b"data", "others") if other == "key" else _KEY
  np.testing.assert_array_equal(more.found(tmp_path / "kept", key)[:], more.rows)
  assert more.count == 1 and len(_files(tmp_path / "kept")) == 2


def _cut(path):
  path.write_bytes(path.read_bytes()[:-4])


def _flip(path):
  content = bytearray(path.read_bytes())
  content[-2] ^= 1
  path.write_bytes(content)


def _empty(path):
  path.write_bytes(b"")


def _another_version(path):
  path.write_bytes(path.read_bytes().replace(b"features 1", b"features 0"))


@pytest.mark.parametrize("damage", [_cut, _flip, _empty, _another_version])
def test_what_is_damaged_is_computed_again(tmp_path, damage):
  made = Made()
  made.found(tmp_path / "kept")
  damage(_files(tmp_path / "kept")[0])
  np.testing.assert_array_equal(made.found(tmp_path / "kept")[:], _ROWS)
  assert made.count == 2
  if damage in (_cut, _flip):
    assert "damaged" in made.told[-1] and len(_files(tmp_path / "kept")) == 1


def test_a_run_that_is_stopped_leaves_nothing_that_is_read(tmp_path):
  def stopped():
    yield _ROWS[:4]
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    cache.rows(tmp_path / "kept", _KEY, _ROWS.shape, stopped)
  assert not _files(tmp_path / "kept")
  left = tmp_path / "kept" / "killed.partial"  # of a process that had no time to tidy up
  left.write_bytes(b"half")
  made = Made()
  made.found(tmp_path / "kept")
  assert not left.exists() and "killed.partial" in made.told[0]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(cache, "_write", full)
  with refuses("DPJAX_CACHE_DIR") as refused:
    Made().found(tmp_path / "kept")
  assert "\n" not in str(refused.value)
  assert [path.name for path in (tmp_path / "kept").iterdir()] == ["lock"]


def test_a_file_without_a_name_holds_the_same_and_leaves_nothing(tmp_path, monkeypatch):
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  rows = cache.unnamed_rows(_ROWS.shape, Made())
  assert not list(tmp_path.iterdir())  # so nothing is left, however the process ends
  np.testing.assert_array_equal(rows[:], _ROWS)
  padded = rows[np.array([2, 3, 7, 0, 0])]
  np.testing.assert_array_equal(padded, _ROWS[[2, 3, 7, 0, 0]])
  assert padded.ctypes.data % 64 == 0  # a CPU device takes it without a copy
  np.testing.assert_array_equal(rows[np.array([9, 1, 1, 5])], _ROWS[[9, 1, 1, 5]])


@pytest.mark.parametrize("why", ["full", "missing"])
def test_a_file_without_a_name_that_cannot_be_written_is_one_line(
  tmp_path, monkeypatch, why
):
  def full(*_):
    raise OSError(28, "No space left on device")

  where = tmp_path / "there"
  if why == "full":
    where.mkdir()
    monkeypatch.setattr(cache, "_write", full)
  monkeypatch.setenv("TMPDIR", str(where))
  with refuses("TMPDIR", value=where) as refused:
    cache.unnamed_rows(_ROWS.shape, Made())
  assert "\n" not in str(refused.value)
  assert why == "missing" or not list(where.iterdir())


def test_what_computes_features_fails_as_itself(tmp_path, monkeypatch):
  """An error of the images' disk is not one of the features' disk."""

  def broken():
    yield _ROWS[:4]
    raise OSError(5, "Input/output error")

  monkeypatch.setenv("TMPDIR", str(tmp_path))
  with pytest.raises(OSError, match="Input/output"):
    cache.unnamed_rows(_ROWS.shape, broken)
  with pytest.raises(OSError, match="Input/output"):
    cache.rows(tmp_path / "kept", _KEY, _ROWS.shape, broken)
  assert [path.name for path in (tmp_path / "kept").iterdir()] == ["lock"]


@pytest.mark.parametrize("made", [_ROWS[:4], np.concatenate([_ROWS, _ROWS])], ids=len)
def test_too_few_or_too_many_features_are_not_kept(tmp_path, monkeypatch, made):
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  with pytest.raises(AssertionError):
    cache.unnamed_rows(_ROWS.shape, lambda: [made])
  with pytest.raises(AssertionError):
    cache.rows(tmp_path / "kept", _KEY, _ROWS.shape, lambda: [made])
  assert [path.name for path in (tmp_path / "kept").iterdir()] == ["lock"]


def test_the_folder_is_named_by_the_environment(monkeypatch):
  monkeypatch.delenv(cache.VARIABLE, raising=False)
  assert cache.folder() is None
  monkeypatch.setenv(cache.VARIABLE, "~/kept")
  assert str(cache.folder()) == os.path.expanduser("~/kept")

"""Rows that lie in files are the array that they would be in memory; a batch reads a batch."""

import threading
import tracemalloc

import numpy as np
import pytest

from dpjax import data, plan, sampling
from dpjax.data import ahead, cache, rows
from dpjax.validate import UserError
from tests.refuses import refuses


class Numbers:
  """Row i is i, i, ...; counts what is read."""

  def __init__(self, count, width=3):
    self.count, self.width, self.reads = count, width, []

  def __len__(self):
    return self.count

  def read(self, places):
    assert (np.diff(places) > 0).all()  # ascending, distinct
    self.reads.append(len(places))
    return np.repeat(places[:, None], self.width, 1).astype(np.float32)


_WHICH = [
  slice(None),
  slice(2, 30, 5),
  slice(None, None, -1),
  np.array([3, 3, 0, 19, 0, -1]),
  np.arange(20) % 3 == 0,
  np.zeros(0, int),
  [],
  np.array([[0, 1], [5, 2]]),
  [[4]],
  7,
]


@pytest.mark.parametrize("which", _WHICH, ids=str)
def test_rows_are_indexed_as_an_array(which):
  lazy = rows.Rows(Numbers(20), (3,))
  held = Numbers(20).read(np.arange(20))
  np.testing.assert_array_equal(lazy[which], held[which])
  if isinstance(which, slice) or np.ndim(which) == 1:
    part = lazy.subset(which)
    np.testing.assert_array_equal(part[:], held[which])
    assert part.shape == held[which].shape and part.nbytes == held[which].nbytes
    np.testing.assert_array_equal(part.subset(slice(1, 3))[:], held[which][1:3])
  np.testing.assert_array_equal(lazy.then(lambda x: 2 * x)[which], 2 * held[which])


@pytest.mark.parametrize(
  "which", [20, np.array([-21]), np.ones(3, bool), (1, 2), 1.7, [0.5]]
)
def test_rows_that_are_not_there(which):
  with pytest.raises(IndexError):
    rows.Rows(Numbers(20), (3,))[which]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint64"])
def test_indices_may_have_a_type_that_holds_fewer_numbers_than_there_are_rows(dtype):
  which = np.array([3, 100, 3]).astype(dtype)
  lazy, held = rows.Rows(Numbers(70_000), (3,)), Numbers(70_000).read(np.arange(70_000))
  np.testing.assert_array_equal(lazy[which], held[which])


def test_rows_in_memory_lie_over_those_of_a_file():
  lazy, held = rows.Rows(Numbers(20), (3,)), Numbers(20).read(np.arange(20))
  which, by = np.array([11, 2, 19]), -np.ones((3, 3), np.float32) * [[1], [2], [3]]
  held[which] = by
  np.testing.assert_array_equal(lazy.replace_rows(which, by)[:], held)
  np.testing.assert_array_equal(
    lazy.replace_rows(which, by).subset(slice(2, 12))[:], held[2:12]
  )


@pytest.mark.slow
def test_a_poisson_batch_reads_that_batch_and_nothing_more():
  source, count = Numbers(200_000, 256), 200_000  # 200 MB, were it in memory
  dataset = data.in_files(source, np.zeros(count, int), num_classes=2)
  sampler = sampling.PoissonSampler(sampling_prob=1e-3, capacity=400)
  numbers = dict(l2_clip_norm=1.0, normalize_by=200.0, num_steps=4, delta=1e-5)
  batches = plan.Plan(sampler, 1.0, **numbers).batches(dataset, rng=3)
  source.reads.clear()
  tracemalloc.start()
  seen = [(batch.mask.sum(), batch.examples.x[batch.mask, 0]) for batch in batches]
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 10e6  # a draw over all records, and a batch
  for step, (size, taken) in enumerate(seen):
    drawn = sampler.draw(count, seed=3, step=step)
    np.testing.assert_array_equal(taken, drawn)
    assert source.reads[step] in (size, size + 1)  # padding is row 0, read once


def test_a_source_that_reads_into_one_memory_leaves_the_rows_before_as_they_were():
  class Reused:
    held = np.zeros((9, 2), np.float32)

    def __len__(self):
      return 9

    def read(self, places):
      self.held[: len(places)] = np.stack([places, places], axis=1)
      return self.held[: len(places)]

  dataset = data.in_files(Reused(), np.zeros(9, int), num_classes=2)
  before = dataset[np.array([1, 2])]
  dataset[np.array([7, 8])]
  np.testing.assert_array_equal(before.x, [[1, 1], [2, 2]])


@pytest.mark.parametrize(
  "change",
  [lambda x: x - x.mean(axis=0), lambda x: x[::-1], lambda x: x / x.max()],
  ids=["centered", "reversed", "scaled"],
)
def test_a_source_whose_rows_hold_something_of_others_is_refused(change):
  class Mixing:
    def __len__(self):
      return 9

    def read(self, places):
      return change(np.stack([places + 1, places + 2], axis=1).astype(np.float32))

  with refuses("x"):
    data.in_files(Mixing(), np.zeros(9, int), num_classes=2)


def test_a_source_that_draws_anew_is_refused():
  """Who knows the seed would see one record more in all that are read after it."""

  class Drawn(Numbers):
    generator = np.random.default_rng(0)

    def read(self, places):
      rows = super().read(places)
      return rows + self.generator.normal(size=rows.shape).astype(np.float32)

  with refuses("x"):
    data.in_files(Drawn(9), np.zeros(9, int), num_classes=2)


def test_the_digest_is_that_of_the_same_data_in_memory(monkeypatch):
  y = np.arange(50) % 2
  lazy = data.in_files(Numbers(50), y, num_classes=2)
  held = data.from_arrays(Numbers(50).read(np.arange(50)), y, num_classes=2)
  monkeypatch.setattr(rows, "CHUNK_BYTES", 100)  # several chunks
  assert data.digest(lazy) == data.digest(held) == data.digest(lazy.read())
  other = data.in_files(Numbers(50), 1 - y, num_classes=2)
  assert data.digest(other) != data.digest(held)
  changed = lazy.replace_rows(np.array([9]), held.subset(np.array([8])))
  assert data.digest(changed) != data.digest(held)


def test_what_needs_all_of_them_is_refused_in_one_line():
  lazy = data.in_files(Numbers(50), np.zeros(50, int), num_classes=2)
  for call in (np.asarray, np.stack, np.sum, list):
    with refuses("resident", value=False):
      call(lazy.x)


class Bad(Numbers):
  """Row 7 is not what it should be."""

  def __init__(self, value):
    super().__init__(20)
    self.value = value

  def read(self, places):
    found = super().read(places)
    found[places == 7] = self.value
    return found


def test_a_row_that_is_not_finite_is_refused_when_it_is_read():
  dataset = data.in_files(Bad(np.nan), np.zeros(20, int), num_classes=2)
  assert np.isfinite(dataset[:7].x).all()
  with refuses("x"):
    data.digest(dataset)  # which every run begins with


@pytest.mark.parametrize("count", [0, 19])
def test_labels_are_as_many_as_rows(count):
  with pytest.raises(UserError, match=r"y: must have shape \(n,\)"):
    data.in_files(Numbers(20), np.zeros(count, int), num_classes=2)


def test_a_source_without_rows_is_refused():
  with refuses("source"):
    data.in_files(Numbers(0), np.zeros(0, int), num_classes=2)


def test_a_label_beyond_the_classes_is_refused_at_once():
  with refuses("y"):
    data.in_files(Numbers(20), np.full(20, 2), num_classes=2)


# --- reading ahead


def _threads():
  return {thread.name for thread in threading.enumerate()}


def test_what_the_reader_raises_is_raised_in_its_turn():
  def items():
    yield from range(3)
    raise UserError("the disk is gone")

  before, found = _threads(), []
  with pytest.raises(UserError, match="the disk is gone"):
    for item in ahead.ahead(items()):
      found.append(item)
  assert found == [0, 1, 2] and _threads() == before


def test_one_is_made_ahead_in_another_thread_which_ends_when_it_is_closed():
  made, before, second = [], _threads(), threading.Event()

  def items():
    for i in range(100):
      made.append((i, threading.current_thread().name))
      if i == 1:
        second.set()
      yield i

  reader = ahead.ahead(items())
  assert next(reader) == 0 and second.wait(10)
  assert [i for i, _ in made] == [0, 1]
  assert {name for _, name in made} - before
  reader.close()
  assert len(made) == 2 and _threads() == before


# --- an unpacked .npz


def _write(folder, **changes):
  folder.mkdir(exist_ok=True)
  rng = np.random.default_rng(0)
  arrays = {
    "x_train": rng.integers(0, 256, (9, 4, 4, 3), np.uint8),
    "y_train": np.arange(9) % 3,
    "x_test": rng.integers(0, 256, (4, 4, 4, 3), np.uint8),
    "y_test": np.arange(4) % 3,
    "num_classes": 3,
  }
  for name, array in {**arrays, **changes}.items():
    np.save(folder / f"{name}.npy", array)
  np.savez(folder / "packed.npz", **{**arrays, **changes})


def _tokens():
  rng = np.random.default_rng(1)
  return {"x_train": rng.integers(0, 50, (9, 6)), "x_test": rng.integers(0, 50, (4, 6)),
          "vocab_size": 50}  # fmt: skip


def _floats():
  return {
    "x_train": np.random.default_rng(2).normal(size=(9, 5)).astype(">f8"),
    "x_test": np.ones((4, 5), np.float16),
  }


@pytest.mark.parametrize("changes", [dict, _tokens, _floats])
def test_a_folder_is_the_archive_unpacked(tmp_path, changes):
  _write(tmp_path, **changes())
  wanted = data.load(str(tmp_path / "packed.npz"))
  for resident in (True, False, None):
    found = data.load(f"{tmp_path}/", resident=resident)
    for part, whole in zip(found, wanted):
      assert part.in_memory == (resident is not False)
      assert data.digest(part) == data.digest(whole)
      assert part.num_classes == whole.num_classes and part.x.dtype == whole.x.dtype


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"x_train": np.asfortranarray(np.ones((9, 5)))}, "name"),
    ({"x_train": np.array([{}] * 9)}, "name"),
    (
      {"x_train": np.ones((8, 4, 4, 3), np.uint8)},
      "name",
    ),
    ({"x_train": np.ones((9, 2, 2, 3), np.uint8)}, "name"),
    ({"y_train": np.arange(9)}, "name"),
  ],
)
def test_a_folder_that_is_none_is_one_line(tmp_path, changes, field):
  _write(tmp_path, **changes)
  with refuses(field) as refused:
    data.load(f"{tmp_path}/", resident=False)
  assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_cut_short(tmp_path):
  _write(tmp_path)
  path = tmp_path / "x_train.npy"
  content = path.read_bytes()
  for kept, words in (
    (len(content) - 5, "name"),
    (20, "name"),
  ):
    path.write_bytes(content[:kept])
    with refuses(words):
      data.load(f"{tmp_path}/", resident=False)
  path.unlink()
  with refuses("name"):
    data.load(f"{tmp_path}/")
  with refuses("name"):
    data.load(f"{tmp_path}/nothing/")


def test_small_data_stay_in_memory_unless_asked():
  assert not rows.stay_in_files(10**6, None) and rows.stay_in_files(10**15, None)
  assert rows.stay_in_files(1, False) and not rows.stay_in_files(10**15, True)
  assert cache.VARIABLE == "DPJAX_CACHE_DIR"

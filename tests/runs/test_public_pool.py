"""A pool that may hold private records is refused, or the epsilon says whose word it rests on."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from dpjax import data
from dpjax.data import from_arrays
from dpjax.experiments.config.sections import ExamplesConfig
from dpjax.experiments.kinds import distillation, public_pool
from dpjax.experiments.kinds.distillation import DistillationConfig
from dpjax.experiments.kinds.pate.config import Pate, PateConfig
from dpjax.experiments.kinds.synthesis.config import SynthesisConfig
from dpjax.experiments.run import loop
from tests.refuses import refuses
from tests.runs.stops import stop_after

_SMALL = {
  DistillationConfig: {
    "num_pool": 40, "teacher_hidden": 4, "student_hidden": 4, "batch_size": 100, "epochs": 1,
  },
  PateConfig: {
    "num_pool": 40, "num_queries": 8, "num_teachers": 4, "num_components": 6,
    "num_student_components": 6, "eval_every": 8,
  },
}  # fmt: skip
_EXPERIMENT = {DistillationConfig: distillation.Distillation, PateConfig: Pate}
_KINDS = pytest.mark.parametrize("kind", list(_SMALL))


def _config(kind, **changes):
  return kind(**(_SMALL[kind] | changes))


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
  """A folder of images that a hash of their names splits; some are one image twice."""
  folder = tmp_path_factory.mktemp("data") / "scans"
  rng = np.random.default_rng(0)
  for label in ("a", "b"):
    (folder / label).mkdir(parents=True)
    for number in range(120):
      pixels = rng.integers(0, 256, (4, 4), np.uint8)
      for copy in range(2):
        Image.fromarray(pixels).save(folder / label / f"{number}_{copy}.png")
  (folder / "declaration.toml").write_text(
    'classes = ["a", "b"]\nheight = 4\nwidth = 4\nchannels = 1\nnum_examples = 300\n'
    "split = {test_share = 0.4, salt = 1}\n"
  )
  return f"{folder}/"


@pytest.mark.cases(slow=["PateConfig"], long=...)
@_KINDS
def test_a_split_of_somebodys_folder_is_no_public_pool(kind, scans, tmp_path):
  config = _config(kind, data=ExamplesConfig(scans))
  with refuses("pool_is_public", value=False) as caught:
    loop.train(config, tmp_path / "refused")
  assert "\n" not in str(caught.value) and not (tmp_path / "refused").exists()
  taken = dataclasses.replace(config, pool_is_public=True)
  result = loop.train(taken, tmp_path / "taken")
  assert result["epsilon_kind"] == "claimed"
  assert result["failed_assumptions"] == [public_pool._ASSUMED]
  words = " ".join(result["privacy_statement"].split())
  assert "it is assumed, not checked" in words


@pytest.mark.cases(slow=["PateConfig"], long=...)
@_KINDS
def test_the_test_set_of_a_published_data_set_is_a_public_pool(kind, tmp_path):
  result = loop.train(_config(kind), tmp_path / "run")
  assert result["epsilon_kind"] == "proved"
  words = " ".join(result["privacy_statement"].split())
  assert "40 examples of the test set of digits, a published data set" in words


@_KINDS
def test_a_pool_with_one_private_record_is_refused(kind, tmp_path):
  train, test = data.load("digits")
  config = _config(kind)
  # The same data set named twice; and one private record that is in the pool, among many.
  shared = train.replace_rows(np.array([700]), test.subset(np.array([39])))
  for private in (test.declared(360), shared):
    with refuses("pool_is_public") as caught:
      loop.train(config, tmp_path / "refused", data=(private, test))
    assert "\n" not in str(caught.value) and not (tmp_path / "refused").exists()
  # A private record among those that only score the student is in no pool.
  beside = train.replace_rows(np.array([700]), test.subset(np.array([40])))
  public_pool.check(config, beside, test)
  # An empty record keeps its place and holds nothing.
  present = np.arange(len(shared)) != 700
  public_pool.check(config, dataclasses.replace(shared, present=present), test)
  # Whose test set it is can no longer be seen in a part of it, or in arrays.
  for public in (test.subset(slice(0, 200)), from_arrays(test.x, test.y, num_classes=10)):
    with refuses("pool_is_public"):
      public_pool.check(config, train, public)


def test_minus_zero_and_zero_are_one_pixel():
  train, test = data.load("digits")
  held = np.where(test.x[:1] == 0, np.float32(-0.0), test.x[:1])
  copy = from_arrays(held, test.y[:1], num_classes=10)
  assert copy.x.tobytes() != test.x[:1].tobytes()
  with refuses("pool_is_public"):
    public_pool.check(_config(PateConfig), train.replace_rows(np.array([3]), copy), test)


@pytest.mark.slow
def test_a_joint_student_reads_no_pool(scans, tmp_path):
  config = _config(
    DistillationConfig, method="joint", data=ExamplesConfig(scans), student_rate=0.1
  )
  assert loop.train(config, tmp_path / "run")["epsilon_kind"] == "proved"
  train, public = config.data.load()
  digest = distillation.Distillation(config).digest((train, public))
  assert digest == data.digest(train)


@_KINDS
def test_two_pools_are_two_runs(kind):
  """A folder of one goes on with the other no more than with other records."""
  train, test = data.load("digits")
  config = _config(kind, pool_is_public=True)
  other = test.replace_rows(np.array([5]), test.subset(np.array([200])))
  digest = _EXPERIMENT[kind](config).digest
  digests = [digest((train, public)) for public in (test, other, test)]
  assert digests[0] == digests[2] != digests[1]
  # Rows that only score the student change nothing that is trained.
  scored = test.replace_rows(np.array([200]), test.subset(np.array([5])))
  assert digest((train, scored)) == digests[0]


@pytest.mark.cases(long=["DistillationConfig"])
@_KINDS
def test_a_run_goes_on_with_its_own_pool_alone(kind, tmp_path, monkeypatch):
  train, test = data.load("digits")
  config = _config(kind, pool_is_public=True)
  subfolder = {"subfolder": "queries"} if kind is PateConfig else {}
  stop_after(monkeypatch, 3, **subfolder)
  with pytest.raises(loop.Interrupted):
    loop.train(config, tmp_path / "run", data=(train, test))
  other = test.replace_rows(np.array([5]), test.subset(np.array([200])))
  with refuses("data.name", value="digits") as caught:
    loop.train(config, tmp_path / "run", data=(train, other))
  assert "\n" not in str(caught.value)


def _npz(path, **changes):
  rng = np.random.default_rng(0)
  x = rng.random((300, 4, 4, 1)).astype(np.float32)
  y = rng.integers(0, 2, 300)
  np.savez(path, x_train=x, y_train=y, x_test=x[:90], y_test=y[:90], **changes)
  return str(path)


@pytest.mark.cases(slow=["DistillationConfig"])
@pytest.mark.parametrize("kind", [DistillationConfig, PateConfig, SynthesisConfig])
def test_errors_of_the_data_name_this_configs_fields(kind, tmp_path):
  (tmp_path / "a.csv").write_text("a,b\n1,2\n")
  for name, field in (
    (_npz(tmp_path / "unnumbered.npz"), "data.num_classes"),
    (str(tmp_path / "none.npz"), "data.name"),
    (str(tmp_path / "a.csv"), "data.name"),
    ("no_such_data", "data.name"),
    ("no_such:module", "data.name"),
  ):
    with refuses(field) as caught:
      loop.train(kind(**_SMALL.get(kind, {}), data=ExamplesConfig(name)), tmp_path / "run")
    assert "\n" not in str(caught.value)
  with refuses("data.data_dir"):
    elsewhere = ExamplesConfig(data_dir="/x")
    loop.train(kind(**_SMALL.get(kind, {}), data=elsewhere), tmp_path / "run")
  with refuses("epsilon_budget", value=0.1):
    loop.train(kind(**_SMALL.get(kind, {}), epsilon_budget=0.1), tmp_path / "run")

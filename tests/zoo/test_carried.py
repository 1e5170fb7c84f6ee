"""Data sets that packages carry: made files in each format, and the packages where they are."""

import importlib.util
import io
import os
import tarfile

import numpy as np
import pytest

from dpjax import data
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated import build
from dpjax.zoo import datasets
from dpjax.zoo.datasets import carried, published, small_tables
from tests.refuses import refuses

_UTTERANCE = ":".join(["0.5,1.5,1.0,1.0,9.0,-9.0"] * 12)
_APPLICANT = '"{}",0.2,0.25,0.75,{},2,"no","no",{},"no",3.9,0,"{}","{}"'
_COLUMNS = "dir,hir,lvr,ccs,mcs,pbcr,dmi,self,single,uria,comdominiom,black,deny"


def _voices(folder):
  for split, labels in (("TRAIN", (1, 9)), ("TEST", (3,))):
    rows = [f"{_UTTERANCE}:{label}" for label in labels]
    text = "\n".join(["# a comment", "@data", *rows, ""])
    (folder / f"JapaneseVowels_{split}.ts").write_text(text)


def _smartwatch(folder, **changes):
  people = np.array([1, 1, 2, 9, 10])
  still = np.tile([1.0, 0, 0, 0, 0, 0], (50, 1))
  held = {
    "X": [still * (place + 1) for place in range(5)],
    "y": np.array([0, 6, 3, 3, 4]),
    "subject": people,
    "X_labels": ["ax"],
  }
  np.save(folder / "watch_dataset.npy", np.array(held | changes, object))


def _faces(folder):
  np.save(
    folder / "lfw_subset.npy", np.linspace(0, 1, 200)[:, None, None] * np.ones((25, 25))
  )


def _mortgages(folder, self="NA"):
  rows = [
    _APPLICANT.format(place, place % 6 + 1, '"no"', "yes", "no") for place in range(40)
  ]
  rows.append(_APPLICANT.format(40, 1, self, "no", "yes"))
  text = "\n".join([f'"",{_COLUMNS}', *rows]).encode()
  with tarfile.open(folder / "resources.tar.gz", "w:gz") as archive:
    member = tarfile.TarInfo(small_tables._HDMA)
    member.size = len(text)
    archive.addfile(member, io.BytesIO(text))


def _insurance(folder):
  rows = [
    f'"{place}",33,{place % 10},{"Yes" if place % 9 == 0 else "No"}' for place in range(40)
  ]
  lines = ['"","MOSTYPE","PPERSAUT","Purchase"', *rows]
  (folder / "Caravan.csv").write_text("\n".join(lines))


def _heart(folder):
  well = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"
  ill = "67,0,4,?,0,?,?,?,?,?,?,?,?,3"
  for hospital in small_tables._HOSPITALS:
    (folder / f"processed.{hospital}.data").write_text(f"{well}\n{ill}\n" * 8)


_MADE = {
  "voices": _voices,
  "smartwatch": _smartwatch,
  "faces": _faces,
  "mortgages": _mortgages,
  "insurance": _insurance,
  "heart": _heart,
}
_PACKAGES = {
  "voices": "aeon",
  "smartwatch": "seglearn",
  "faces": "skimage",
  "mortgages": "pydataset",
  "insurance": "ISLP",
}


@pytest.fixture
def made(tmp_path):
  for make in _MADE.values():
    make(tmp_path)
  return tmp_path


def test_voices_are_four_numbers_of_each_coefficient(made):
  train, test = data.load("voices", made)
  assert train.x.shape == (2, 48) and train.y.tolist() == [0, 8] and test.y.tolist() == [2]
  # Of .5, 1.5, 1, 1, 9, -9, halved and clipped to 1: mean, sd, first third, last third.
  expected = [4 / 6 / 2, 1.0, 0.5, 0.0]
  np.testing.assert_allclose(train.x[0, ::12], expected, rtol=1e-6)


def test_a_recording_is_a_record_and_two_people_are_unseen(made):
  train, test = data.load("smartwatch", made)
  assert (len(train), len(test), train.num_classes) == (3, 2, 7)
  np.testing.assert_array_equal(train.x[0], [1.0] + [0.0] * 11)
  federation, others = datasets.natural_federation("smartwatch", made)
  assert federation.client_ids == ("1", "2") and others.client_ids == ("10", "9")
  assert federation.sizes.tolist() == [2, 1] and federation.nominal_users == 8
  assert np.concatenate(federation.indices).tolist() == [0, 1, 2]
  with refuses("client_id", value="subject"):
    datasets.natural_federation("smartwatch", made, client_id="subject")
  short, _ = datasets.natural_federation("smartwatch", made, max_examples=1)
  assert short.sizes.tolist() == [1, 1]


def test_other_people_may_be_unseen(made):
  (train, people), (test, unseen) = carried.smartwatch_owners(made, unseen=(1, 2))
  assert people.tolist() == [9, 10] and unseen.tolist() == [1, 1, 2]
  assert (len(train), len(test)) == (2, 3)


class _Command:
  def __reduce__(self):
    return os.mkdir, (os.environ["MADE_BY_A_PICKLE"],)


def test_a_pickle_that_calls_a_function_is_refused(tmp_path, monkeypatch):
  monkeypatch.setenv("MADE_BY_A_PICKLE", str(tmp_path / "made"))
  _smartwatch(tmp_path, X_labels=_Command())
  with refuses("name", value="smartwatch"):
    data.load("smartwatch", tmp_path)
  assert not (tmp_path / "made").exists()


def test_faces_come_first_and_every_fifth_is_for_the_test(made):
  train, test = data.load("faces", made)
  assert train.x.shape == (160, 25, 25, 1) and len(test) == 40
  assert train.y[:80].all() and not train.y[80:].any() and test.y.sum() == 20
  shown = np.concatenate([train.x, test.x]).mean((1, 2, 3))
  np.testing.assert_allclose(np.sort(shown), np.linspace(0, 1, 200), atol=1e-6)


def test_of_mortgages_race_is_the_group_and_no_input(made):
  train, test = data.load("mortgages", made)
  assert len(train) + len(test) == 41 and train.x.shape[1] == 7 + 4 * 2
  assert test.groups.column == "black" and list(test.groups.names) == ["no", "yes"]
  assert len(test.groups.places) == len(test)
  # A score from 1 to 6 is an input from 0 to 1.
  assert set(np.round(train.x[:, 3] * 5).tolist()) <= {0, 1, 2, 3, 4, 5}


def test_of_insurance_the_row_number_is_no_input(made):
  train, test = data.load("insurance", made)
  assert train.x.shape[1] == 2 and len(train) + len(test) == 40
  np.testing.assert_allclose(train.x[:, 0], 33 / 41, rtol=1e-6)


def test_hospitals_of_the_heart_sets_are_clients(made):
  train, test = data.load("heart", made)
  assert len(train) + len(test) == 64 and {*train.y.tolist()} == {0, 1}
  federation, _ = datasets.natural_federation("heart", made)
  assert {*federation.client_ids} <= {*small_tables._HOSPITALS}
  assert len(federation) == len(train) and federation.nominal_users == 4
  with refuses("name", value="heart"):
    data.load("heart", made / "nowhere")


@pytest.mark.parametrize("name", _PACKAGES)
def test_without_the_package_one_line_says_how_to_get_it(name, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with refuses("name", value=name) as caught:
    data.load(name)
  line = str(caught.value)
  assert "\n" not in line and _PACKAGES[name] in line and "data" in line
  assert "pip install" in line


@pytest.mark.parametrize("name", [name for name in _MADE if name != "heart"])
def test_a_damaged_file_is_one_line(name, made):
  for path in made.iterdir():
    path.write_bytes(b"\x93nothing")
  with refuses("name", value=name):
    data.load(name, made)


@pytest.mark.parametrize("name", _PACKAGES)
def test_the_package_holds_what_is_published(name):
  if importlib.util.find_spec(_PACKAGES[name]) is None:
    pytest.skip(f"needs {_PACKAGES[name]}")
  train, test = data.load(name)
  assert len(train) == published.nominal_size(name) and len(test) > 0
  assert np.abs(train.x).max() <= 1 and len({*train.y.tolist()}) == train.num_classes


def test_the_federation_by_person_needs_no_field(made):
  from configs.fed import smartwatch

  config = fields.replace(smartwatch.get_config(), "data.data_dir", str(made))
  build.check(config)
  with refuses("partition.client_id"):
    build.check(fields.replace(config, "partition.client_id", "subject"))
  with refuses("partition.client_id", value=""):
    build.check(fields.replace_all(config, {"data.name": "a.npz"}))

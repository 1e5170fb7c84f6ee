"""Voices, a smartwatch and faces, which installed packages contain.

No package is imported: only its file is read. dpjax holds no copy. Scales are public constants,
chosen from what the numbers mean, not from the rows.
"""

from __future__ import annotations

import os
import pathlib
import pickle
from typing import Any

import numpy as np

from dpjax import optional
from dpjax.data.dataset import Dataset, from_arrays
from dpjax.validate import UserError, about, first_line, no_pipe
from dpjax.zoo.networks import packaged_files

Pair = tuple[Dataset, Dataset]
Folder = str | os.PathLike[str] | None
# Records with the owner of each: ((train, ids), (test, ids)).
Owned = tuple[tuple[Dataset, np.ndarray], tuple[Dataset, np.ndarray]]
# The people whose recordings are the test. A study would draw them; here they are the last two.
UNSEEN = (9, 10)
_EXERCISES = 7
# Units of the smartwatch: acceleration in g, turning in rad/s, three axes each.
_MEAN_SCALE = np.repeat([1.0, 2.0], 3)
_SD_SCALE = np.repeat([0.5, 2.0], 3)
_SPEAKERS = 9
# Cepstral coefficients of speech lie within 2.
_CEPSTRUM_SCALE = 2.0
_SIDE = 25  # pixels of a face
_FACES = 100
_TEST_EVERY = 5


def file_of(package: str, path: str, data_dir: Folder, name: str) -> pathlib.Path:
  """Returns the path of a file that a package contains.

  Args:
    package: name of the package, as it is imported.
    path: path of the file below the package's folder.
    data_dir: folder that holds the file in place of the package; None: the package.
    name: name of the data set, for errors.

  Raises:
    UserError: the package or the file is missing.
  """
  with about("name", name):
    folder = optional.folder(package) if data_dir is None else pathlib.Path(data_dir)
    held = folder / (path if data_dir is None else pathlib.Path(path).name)
    if not held.exists():
      raise UserError(f"there is no {held}; without data_dir it is that of {package}")
    no_pipe(held)
  return held


def load_voices(data_dir: Folder = None) -> Pair:
  """Loads 640 utterances of the vowels "ae" by nine Japanese men: who speaks? (Kudo 1999)

  An utterance is a series of 12 cepstral coefficients (of linear prediction). x, float32 [n, 48],
  holds their means and standard deviations, and the means over the first and the last third. So an
  example has as many numbers, whatever its length. The split is the published one: 270 to train,
  370 for the test.

  Source: UCI Machine Learning Repository, "Japanese Vowels" (M. Kudo, J. Toyama, M. Shimbo 1999,
  DOI 10.24432/C5NS47, CC BY 4.0), as the package aeon 1.6.0 (BSD-3) contains it.

  Args:
    data_dir: folder of JapaneseVowels_TRAIN.ts and JapaneseVowels_TEST.ts; None: that of aeon
      (`pip install --no-deps aeon==1.6.0`).

  Raises:
    UserError: a file is missing, or is no such file.
  """
  parts = []
  for split in ("train", "test"):
    path = file_of(
      "aeon",
      f"datasets/data/JapaneseVowels/JapaneseVowels_{split.upper()}.ts",
      data_dir,
      "voices",
    )
    with about("name", "voices"):
      series, labels = _series(path)
    x = np.stack([_summary(each) for each in series]) / _CEPSTRUM_SCALE
    parts.append(
      from_arrays(
        np.clip(x, -1, 1), labels, num_classes=_SPEAKERS, name="voices", split=split
      )
    )
  return parts[0], parts[1]


def _series(path: pathlib.Path) -> tuple[list[np.ndarray], np.ndarray]:
  """Returns ([12, T] of each utterance, speaker 0 to 8 of each). A line has a series for each
  coefficient, and the speaker, separated by colons."""
  series = []
  labels = []
  try:
    for line in path.read_text(encoding="utf-8").splitlines():
      if line.strip() and line[0] not in "#@":
        *channels, label = line.split(":")
        series.append(np.array([channel.split(",") for channel in channels], np.float64))
        labels.append(int(label) - 1)
  except (OSError, ValueError) as error:
    raise UserError(f"{path} cannot be read ({first_line(error)})") from error
  return series, np.array(labels)


def _summary(series: np.ndarray) -> np.ndarray:
  """Returns 4 numbers for each coefficient of a series [coefficients, T]."""
  third = max(1, series.shape[1] // 3)
  first = series[:, :third].mean(1)
  last = series[:, -third:].mean(1)
  return np.concatenate([series.mean(1), series.std(1), first, last])


def load_smartwatch(data_dir: Folder = None) -> Pair:
  """Loads 140 recordings of ten people with a smartwatch: which of seven exercises? (Burns 2018)

  A recording is a set of some 20 repetitions, at 50 Hz. x, float32 [n, 12], holds means and
  standard deviations of three accelerations and three rates of turning. One record is a recording,
  not a window of it, since windows of one recording are alike. The test holds the 28 recordings of
  two people (`UNSEEN`) of whom nothing is in the training.

  Source: D. Burns et al., "Shoulder physiotherapy exercise recognition", Physiological Measurement
  2018 (arXiv 1802.01489), as the package seglearn 1.2.5 (BSD-3) contains it.

  Args:
    data_dir: folder of watch_dataset.npy; None: that of seglearn (extra `data`).

  Raises:
    UserError: the file is missing, or is no such file.
  """
  (train, _), (test, _) = smartwatch_owners(data_dir)
  return train, test


def smartwatch_owners(data_dir: Folder = None, unseen: tuple[int, ...] = UNSEEN) -> Owned:
  """Returns ((train, people), (test, people)), the recordings of `load_smartwatch` with the person
  of each. Only the people `unseen` are in the test."""
  path = file_of("seglearn", "data/watch_dataset.npy", data_dir, "smartwatch")
  with about("name", "smartwatch"):
    held = _unpickle(path)
  x = np.stack(
    [
      np.concatenate([each.mean(0) / _MEAN_SCALE, each.std(0) / _SD_SCALE])
      for each in held["X"]
    ]
  )
  people = np.asarray(held["subject"])
  parts = []
  for split, mask in (
    ("train", ~np.isin(people, unseen)),
    ("test", np.isin(people, unseen)),
  ):
    dataset = from_arrays(
      np.clip(x[mask], -1, 1),
      held["y"][mask],
      num_classes=_EXERCISES,
      name="smartwatch",
      split=split,
    )
    parts.append((dataset, people[mask]))
  return parts[0], parts[1]


def _unpickle(path: pathlib.Path) -> dict[str, Any]:
  """Returns the dict in an .npy file of one object."""
  try:
    with path.open("rb") as stream:
      np.lib.format.read_magic(stream)
      np.lib.format.read_array_header_1_0(stream)
      held = packaged_files.Arrays(stream).load()
    held = held.item() if isinstance(held, np.ndarray) and held.size == 1 else held
    if not isinstance(held, dict) or {"X", "y", "subject"} - {*held}:
      raise UserError(f"{path} must hold a dict of X, y and subject")
  except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
    if isinstance(error, UserError):
      raise
    raise UserError(f"{path} cannot be read ({first_line(error)})") from error
  return held


def load_faces(data_dir: Folder = None) -> Pair:
  """Loads 100 faces of people in the news and 100 other pieces of these photographs (Huang 2007).

  x, float32 [n, 25, 25, 1], is grey in [0, 1]; y is 1 for a face. Every fifth picture is for the
  test. The order is that of the file, faces first: so data.limit=8 keeps eight faces.

  Source: "Labeled Faces in the Wild" (G. Huang et al. 2007), for research; the photographers hold
  the rights. The package scikit-image (BSD-3) contains the 200 pieces.

  Args:
    data_dir: folder of lfw_subset.npy; None: that of scikit-image (extra `data`).

  Raises:
    UserError: the file is missing, or is no such file.
  """
  path = file_of("skimage", "data/lfw_subset.npy", data_dir, "faces")
  with about("name", "faces"):
    try:
      pixels = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
      raise UserError(f"{path} cannot be read ({first_line(error)})") from error
    if pixels.shape[1:] != (_SIDE, _SIDE) or len(pixels) < _TEST_EVERY:
      raise UserError(f"{path} must hold pictures of {_SIDE} by {_SIDE} pixels")
  places = np.arange(len(pixels))
  is_test = places % _TEST_EVERY == _TEST_EVERY - 1
  labels = (places < _FACES).astype(np.int64)
  train, test = (
    from_arrays(
      pixels[mask][..., None], labels[mask], num_classes=2, name="faces", split=split
    )
    for split, mask in (("train", ~is_test), ("test", is_test))
  )
  return train, test

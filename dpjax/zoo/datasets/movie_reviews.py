"""Sentences of film reviews, and whether people found them positive.

There are 10,605 sentences of Rotten Tomatoes (Pang and Lee 2005). Twenty people rated each sentence
from -4 to 4 (Hutto and Gilbert 2014, ICWSM). The source package vaderSentiment 0.5 (MIT) holds the
sentences. Its texts are read, but its code is never run. This command gets it:

  pip download --no-deps --no-binary :all: --dest DIR vaderSentiment==0.5

The label is 1 where the mean rating is above 0. Every fifth sentence is in the test set. The file
has positive sentences first, so each split is shuffled, in a fixed order that depends on no text.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile

import numpy as np

from dpjax.data import text
from dpjax.data.dataset import Dataset, from_arrays
from dpjax.validate import UserError, about, first_line, no_pipe
from dpjax.zoo.datasets.prepared import data_root
from dpjax.zoo.datasets.published import PUBLISHED

INSTALL = "pip download --no-deps --no-binary :all: --dest DIR vaderSentiment==0.5"
LENGTH = 256  # bytes kept of a sentence; one in 4,000 is longer
_FILE = "vaderSentiment-0.5.zip"
_INNER = "vaderSentiment-0.5/additional_resources/hutto_ICWSM_2014.tar.gz"
_TEXTS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
_SHA256 = "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a"
_TEST_EVERY = 5


def load_movie_reviews(
  data_dir: str | os.PathLike[str] | None = None,
) -> tuple[Dataset, Dataset]:
  """Loads (train, test): x int32 [n, 256], bytes of sentences; y [n], 1 if positive, else 0.

  Args:
    data_dir: folder of vaderSentiment-0.5.zip. None: $TFDS_DATA_DIR, else ~/tensorflow_datasets.

  Raises:
    UserError: the file is missing, or is not that of version 0.5.

  >>> load_movie_reviews("/nowhere")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: name='movie_reviews': there is no ...
  """
  with about("name", "movie_reviews"):
    rows = parse(_content(data_dir))
  x = text.encode_text([sentence for _, sentence in rows], max_length=LENGTH)
  y = np.array([rating > 0 for rating, _ in rows], np.int32)
  is_test = np.arange(len(rows)) % _TEST_EVERY == 0
  parts = []
  for split, mask in (("train", ~is_test), ("test", is_test)):
    # Rows are shuffled, so that the first rows, which `data.limit` keeps, have both labels.
    places = np.random.default_rng(0).permutation(np.flatnonzero(mask))
    dataset = from_arrays(
      x[places],
      y[places],
      num_classes=2,
      vocab_size=text.VOCAB_SIZE,
      name="movie_reviews",
      split=split,
      nominal_size=PUBLISHED["movie_reviews"].num_examples if split == "train" else None,
    )
    parts.append(dataset)
  return parts[0], parts[1]


def parse(content: str) -> list[tuple[float, str]]:
  """Returns (mean rating, sentence) of each line.

  A line holds an id, the mean rating and the sentence, separated by tabs.

  >>> parse("1\\t2.5\\tA fine film.\\n2\\t-0.6\\tToo tepid\\n")
  [(2.5, 'A fine film.'), (-0.6, 'Too tepid')]
  """
  rows = []
  for line in content.splitlines():
    _, rating, sentence = line.split("\t", 2)
    rows.append((float(rating), sentence.strip()))
  return rows


def _content(data_dir: str | os.PathLike[str] | None) -> str:
  path = data_root(data_dir) / _FILE
  no_pipe(path)
  try:
    held = path.read_bytes()
  except OSError as error:
    raise UserError(
      f"there is no {path} ({error.strerror}); {INSTALL}, and give DIR as data_dir"
    ) from error
  # Only the file with the known digest is unpacked: another file could be malicious.
  if hashlib.sha256(held).hexdigest() != _SHA256:
    raise UserError(f"{path} must be the file of version 0.5; {INSTALL}")
  try:
    inner = zipfile.ZipFile(io.BytesIO(held)).read(_INNER)
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
      member = archive.extractfile(_TEXTS)
      assert member is not None
      return member.read().decode("latin-1")
  except (KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
    raise UserError(f"{path} cannot be read ({first_line(error)})") from error

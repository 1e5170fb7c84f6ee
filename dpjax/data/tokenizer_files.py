"""Tokens of a public tokenizer: a `tokenizer.json` of Hugging Face, or bytes.

A tokenizer must have been learnt from public text. A vocabulary that was learnt from private
lines reveals parts of these lines, and no epsilon of a run covers that. The file holds no code.
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

INSTALL = "pip install -e '.[lm]' in dpjax's clone"
# Largest number of bytes of a file. Tokenizers of published models have some 10 MB.
_MOST_BYTES = 2**28
# Largest token, since tokens are int32.
_LARGEST_TOKEN = 2**31 - 1
# Settings with which a tokenizer cuts a text at random: BPE-dropout (Provilkov et al. 2020), and
# subword regularization (Kudo 2018).
_RANDOM = ("dropout", "alpha")
# Exceptions that stop the program, and say nothing about a tokenizer.
_STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Tokenizer(NamedTuple):
  """A public map from texts to tokens.

  Args:
    ids: function from a text to its tokens, with special tokens such as [CLS], without padding.
    vocab_size: one more than the largest token; some smaller tokens may be unused.
    first_id: token of the file's id 0: 0 if id 0 is the padding token, else 1.
    path: path of the file; "" for bytes.
    sha256: digest of the file; "" for bytes.
  """

  ids: Callable[[str], list[int]]
  vocab_size: int
  first_id: int = 0
  path: str = ""
  sha256: str = ""

  @property
  def facts(self) -> dict[str, Any] | None:
    """Returns what is public of the tokenizer's file; None for bytes, which have no file."""
    named = {name: getattr(self, name) for name in ("path", "sha256", "vocab_size")}
    return {**named, "first_id": self.first_id} if self.path else None

  def rows(self, texts: list[str], length: int) -> np.ndarray:
    """Returns tokens int32 [n, length] of texts, cut at the end or padded with 0."""
    return text.pad([self.ids(line) for line in texts], length)


BYTES = Tokenizer(lambda line: list(line.encode()), text.VOCAB_SIZE)


def read(path: str | os.PathLike[str]) -> Tokenizer:
  """Reads a `tokenizer.json`.

  If id 0 of the file is a padding token, as BERT's [PAD] is, tokens are the ids of the file.
  Otherwise tokens are the ids plus 1, so that 0 is free for the padding.

  Raises:
    UserError: one line: a missing file; a file that is no tokenizer; a tokenizer that draws tokens
      at random, or gives tokens outside of its vocabulary; the library is not installed.
  """
  about = functools.partial(validate.about, "tokenizer", Verbatim(f"'{os.fspath(path)}'"))
  with about():
    content = _content(path)
    tokenizer = _parse(content)
  words = tokenizer.get_vocab(with_added_tokens=True)
  special = {
    token.content
    for token in tokenizer.get_added_tokens_decoder().values()
    if token.special
  }
  first = next((word for word, index in words.items() if index == 0), None)
  # Padding tokens contain "pad": [PAD] of BERT, <pad> of T5 and others.
  first_id = 0 if first in special and "pad" in str(first).lower() else 1

  # Some ids may be unused, so the size follows from the largest id, not from the number of words.
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
      # The message does not show the text: it is private, and messages end in logs.
      raise UserError(f"cannot read a text of these ({type(error).__name__})") from None
    # A file also states the ids of the special tokens around each text. They may lie outside of its
    # vocabulary. For such an id a model would read the embedding of another token.
    if max(tokens, default=0) >= size:
      raise UserError(f"gives a text tokens that are none of its {size}")
    return tokens

  # Errors that every text would raise are raised now, before any text is read.
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


def _parse(content: bytes) -> Any:
  """Returns the library's tokenizer of a file, with padding and truncation switched off.

  Raises:
    UserError: the errors of `read` that need no text: the content is no tokenizer, the tokenizer
      draws at random, or the library is not installed.
  """
  try:
    tokenizers = importlib.import_module("tokenizers")
  except ImportError as error:
    raise UserError(f"needs the library tokenizers; {INSTALL}") from error
  try:
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # `Tokenizer.rows` cuts and pads to the declared length. A length in the file is not used.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    words = tokenizer.get_vocab(with_added_tokens=True)
  # The library is in Rust: it raises plain Exceptions, and BaseExceptions for panics.
  except BaseException as error:
    if isinstance(error, _STOPS):
      raise
    raise UserError(f"is no tokenizer.json ({validate.first_line(error)})") from error
  if not words:
    raise UserError("has no words")
  # With random tokens, a text would differ at each read, and a resumed run would have other data.
  for name in _RANDOM:
    if getattr(tokenizer.model, name, None):
      raise UserError(f"draws tokens at random ({name}); must be without")
  return tokenizer

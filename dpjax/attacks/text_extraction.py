"""Lines of the training text that a language model writes by itself, and how to find them.

Carlini et al. 2021, "Extracting Training Data from Large Language Models" (arXiv:2012.07805). An
attacker lets the model write many lines and ranks them by a score. Lines of the training text
stand among the first.

| ranking      | score of a line, smallest first                           | what stands first    |
| ------------ | --------------------------------------------------------- | -------------------- |
| `perplexity` | log perplexity: mean loss of a token, in nats             | also what repeats    |
| `zlib`       | log perplexity / `zlib_entropy`                           | likely, not repeated |
| `lowercase`  | log perplexity / log perplexity of the line in lower case | capitals that matter |

`write_lines` lets a model write, `rank` sorts its lines, `find_extracted` finds the secrets among
the first. The attacker needs no format and no loss of a secret, in contrast to `attacks.exposure`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.attacks import signals
from dpjax.types import Array, HostArray, Params
from dpjax.validate import UserError

RANKINGS = ("perplexity", "zlib", "lowercase")
# A log perplexity of 0 (each token is certain) would make every score 0, whatever it is divided by.
_LEAST_NATS = 1e-6


def write_lines(
  apply: Callable[..., Array],
  params: Params,
  prompts: HostArray,
  *,
  length: int,
  key: Array,
  end: int,
  temperature: float = 1.0,
  top_k: int | None = None,
  padding_id: int = 0,
  batch_size: int = 500,
) -> np.ndarray:
  """Lets a language model write a line after each prompt: tokens int32 [n, length].

  Each token is drawn from the model's distribution of the next token, and never is the padding. A
  line ends at the first drawn `end`, which is kept; padding follows.

  Args:
    apply: causal model, tokens [B, T] -> logits [B, T, V].
    prompts: tokens [n, p] that all lines begin with, 1 <= p < length.
    length: number of tokens of a line.
    key: of the draws. Row i has a key of its own, so `batch_size` changes no line.
    end: token that ends a line.
    temperature: by which logits are divided; below 1 likely tokens become likelier.
    top_k: only the k likeliest tokens are drawn (and those as likely as the last of them); None:
      all.
    batch_size: number of lines that are written at once.

  >>> up = lambda params, tokens: 99.0 * jax.nn.one_hot(tokens + 1, 6)  # counts upwards
  >>> write_lines(up, None, np.array([[1], [3]]), length=5, key=jax.random.key(0), end=4)
  array([[1, 2, 3, 4, 0],
         [3, 4, 0, 0, 0]], dtype=int32)
  """
  first = np.asarray(prompts)
  if first.ndim != 2 or not len(first) or first.dtype.kind not in "iu":
    raise UserError("must be tokens [n, p]", field="prompts.shape", value=first.shape)
  validate.integer_in(1, length - 1, **{"prompts.shape[1]": first.shape[1]})
  validate.positive(temperature=temperature)
  validate.integer_at_least(1, batch_size=batch_size)
  if top_k is not None:
    validate.integer_at_least(1, top_k=top_k)
  begun = np.full((len(first), length), padding_id, np.int32)
  begun[:, : first.shape[1]] = first

  def drawn(key: Array, logits: Array) -> Array:
    scores = trees.at_least_float32(logits).at[padding_id].set(-jnp.inf) / temperature
    if top_k is not None:
      least = jax.lax.top_k(scores, min(top_k, len(scores)))[0][-1]
      scores = jnp.where(scores < least, -jnp.inf, scores)
    return jax.random.categorical(key, scores)

  @jax.jit
  def written(params: Params, tokens: Array, rows: Array) -> Array:
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)

    def add(place: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
      tokens, ended = state
      logits = apply(params, tokens[:, :-1])[:, place - 1]
      new = jax.vmap(drawn)(jax.vmap(jax.random.fold_in, (0, None))(keys, place), logits)
      new = jnp.where(ended, padding_id, new).astype(tokens.dtype)
      return tokens.at[:, place].set(new), ended | (new == end)

    none = jnp.zeros(len(tokens), bool)
    return jax.lax.fori_loop(first.shape[1], length, add, (tokens, none))[0]

  def batch(rows: np.ndarray) -> Array:
    return written(params, begun[rows], rows)

  return signals.by_parts(batch, len(begun), batch_size).astype(np.int32)


def zlib_entropy(text: bytes) -> int:
  """Returns the number of bits of a text after zlib's compression.

  >>> zlib_entropy(b"a" * 40) < zlib_entropy(b"the number of Tavu Mirelo is 471120.....")
  True
  """
  return 8 * len(zlib.compress(text))


def lower_case(tokens: HostArray) -> np.ndarray:
  """Returns tokens of bytes in which A to Z are a to z.

  >>> bytes(lower_case(np.frombuffer(b"Tavu 4", np.uint8))).decode()
  'tavu 4'
  """
  ids = np.asarray(tokens)
  return np.where((ids >= ord("A")) & (ids <= ord("Z")), ids + 32, ids).astype(ids.dtype)


def rank(
  texts: Sequence[bytes],
  log_perplexities: HostArray,
  *,
  by: str = "zlib",
  lowered: HostArray | None = None,
) -> np.ndarray:
  """Returns the places of different texts, most suspicious first; of equal texts the first one.

  Args:
    texts: n lines that a model wrote.
    log_perplexities: [n], the model's mean loss of a token, such as `attacks.sequence_losses` of
      `losses.next_token`.
    by: one of `RANKINGS`.
    lowered: [n], the same of the lines in lower case; read by "lowercase" alone.

  Raises UserError for a NaN, which would rank anywhere.

  >>> rank([b"aaaaaaaaaaaaaaaa", b"Tavu Mirelo 4711", b"aaaaaaaaaaaaaaaa"], [1.0, 1.1, 1.0])
  array([1, 0])
  """
  validate.one_of(RANKINGS, by=by)
  nats = np.maximum(_each(log_perplexities, "log_perplexities", texts), _LEAST_NATS)
  if by == "zlib":
    nats = nats / np.array([zlib_entropy(text) for text in texts], np.float64)
  elif by == "lowercase":
    nats = nats / np.maximum(_each(lowered, "lowered", texts), _LEAST_NATS)
  firsts = np.array(sorted({text: i for i, text in reversed([*enumerate(texts)])}.values()))
  return firsts[np.argsort(nats[firsts], kind="stable")]


def _each(values: HostArray | None, name: str, texts: Sequence[bytes]) -> np.ndarray:
  array = signals.numbers(name, np.zeros(0) if values is None else values)
  if array.shape != (len(texts),) or not len(texts):
    raise UserError(
      f"must hold a number for each of {len(texts)} texts",
      field=f"{name}.shape",
      value=array.shape,
    )
  return array


class Extracted(NamedTuple):
  """What stands among the first lines of a ranking."""

  first: int  # k: lines that the attacker looks at; fewer if the model wrote fewer
  lines: int  # how many of them begin with a secret
  secrets: tuple[int, ...]  # places of the secrets that they begin with

  @property
  def precision(self) -> float:
    """Share of the first lines that begin with a secret."""
    return self.lines / self.first


def find_extracted(
  ranked: Sequence[bytes], secrets: Sequence[bytes], *, first: int
) -> Extracted:
  """Returns which secrets stand at the beginning of one of the first lines.

  A line counts for the longest secret that it begins with. So an attacker who looks at k lines has
  k guesses, even where a secret begins with another one.

  Args:
    ranked: different lines, most suspicious first.
    secrets: texts that were planted.
    first: number k of lines that the attacker looks at.

  >>> secrets = [b"Mire 1234", b"Tavu 4711"]
  >>> find_extracted([b"Tavu 4711 and", b"see also", b"Mire 1234"], secrets, first=2)
  Extracted(first=2, lines=1, secrets=(1,))
  """
  validate.integer_at_least(1, first=first)
  seen = ranked[:first]
  if not seen:
    raise UserError("must hold at least one line", field="ranked")
  longest_first = sorted(range(len(secrets)), key=lambda i: -len(secrets[i]))
  found = [
    next((i for i in longest_first if line.startswith(secrets[i])), None) for line in seen
  ]
  named = [i for i in found if i is not None]
  return Extracted(len(seen), len(named), tuple(sorted({*named})))

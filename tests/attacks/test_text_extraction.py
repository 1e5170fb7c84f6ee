"""Extraction of training text: draws by their distribution, scores by a loop, a memoriser."""

import itertools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import attacks, losses
from dpjax.attacks import text_extraction
from tests.refuses import refuses

_V, _END = 12, 11
_SECRETS = [b"\x01\x02\x03\x04", b"\x05\x06\x07\x08"]
_LOGITS = jnp.linspace(0.0, 2.0, _V)


def _memoriser(params, tokens):
  """A model that continues its secrets, from the first token on, and ends after them."""
  after = (
    jnp.full(_V, _END).at[jnp.array([1, 2, 3, 5, 6, 7])].set(jnp.array([2, 3, 4, 6, 7, 8]))
  )
  return params * jax.nn.one_hot(after[tokens], _V)


def _untrained(params, tokens):
  return jnp.zeros((*tokens.shape, _V))


def _constant(params, tokens):
  return jnp.broadcast_to(params, (*tokens.shape, _V))


def _written(apply, params=None, **how):
  prompts = how.pop("prompts", np.arange(1, 11)[:, None])
  settings = {"length": 8, "key": jax.random.key(0), "end": _END, **how}
  return text_extraction.write_lines(apply, params, prompts, **settings)


def _texts(lines):
  return [bytes(row).rstrip(b"\0").rstrip(bytes([_END])) for row in lines.astype(np.uint8)]


def _found(apply, params, by):
  lines = _written(apply, params)
  nats = attacks.sequence_losses(losses.next_token(apply, padding_id=0), params, lines)
  texts = _texts(lines)
  ranked = [texts[i] for i in text_extraction.rank(texts, nats, by=by, lowered=nats)]
  return text_extraction.find_extracted(ranked, _SECRETS, first=10)


@pytest.mark.cases(quick=["zlib"], slow=...)
@pytest.mark.parametrize("by", text_extraction.RANKINGS)
def test_a_planted_memoriser_is_found_and_an_untrained_model_finds_none(by):
  assert _found(_memoriser, 99.0, by).secrets == (0, 1)
  assert _found(_untrained, None, by) == text_extraction.Extracted(10, 0, ())


@pytest.mark.slow
def test_tokens_are_drawn_from_the_models_distribution():
  one = np.ones((20_000, 1), np.int32)
  drawn = _written(_constant, _LOGITS, prompts=one, length=2, batch_size=10_000)[:, 1]
  seen = np.bincount(drawn, minlength=_V) / len(drawn)
  expected = np.exp(np.asarray(_LOGITS, np.float64))
  expected[0] = 0  # padding is never drawn
  expected /= expected.sum()
  assert np.all(np.abs(seen - expected) <= 5 * np.sqrt(expected / len(drawn)))
  # Temperature 1/2 squares the odds; the three likeliest are the last three.
  how = dict(prompts=one, length=2, batch_size=10_000, temperature=0.5, top_k=3)
  drawn = _written(_constant, _LOGITS, **how)[:, 1]
  odds = np.exp(2 * np.asarray(_LOGITS[-3:], np.float64))
  seen = np.bincount(drawn, minlength=_V)[-3:] / len(drawn)
  assert np.all(np.abs(seen - odds / odds.sum()) < 0.02) and drawn.min() == _V - 3


def test_a_line_ends_once_and_no_batch_size_changes_it():
  lines = _written(_constant, _LOGITS, length=20)
  np.testing.assert_array_equal(
    lines, _written(_constant, _LOGITS, length=20, batch_size=3)
  )
  for row in lines:
    ends = np.flatnonzero(row == _END)
    assert len(ends) <= 1
    after = ends[0] + 1 if len(ends) else len(row)
    assert np.all(row[after:] == 0) and np.all(row[:after] > 0)
  assert len({bytes(row[1:]) for row in lines}) > 5  # rows have keys of their own


@pytest.mark.cases(quick=["zlib"], slow=...)
@pytest.mark.parametrize("by", text_extraction.RANKINGS)
def test_scores_are_those_of_a_float64_loop(by):
  rng = np.random.default_rng(0)
  table = rng.normal(size=(256, 256)) * 2
  texts = [bytes(rng.integers(65, 123, size=9).astype(np.uint8)) for _ in range(30)]
  texts = [*texts, texts[3], b"A" * 9]

  def loss(text):
    nats = []
    for before, after in itertools.pairwise(text):
      row = table[before]
      nats.append(math.log(sum(math.exp(z) for z in row)) - row[after])
    return sum(nats) / len(nats)

  def score(text):
    below = {"perplexity": 1.0, "zlib": 8 * len(zlib.compress(text))}
    return loss(text) / (below[by] if by in below else loss(text.lower()))

  apply = lambda params, tokens: params[tokens]
  tokens = np.array([[*text] for text in texts])
  params = jnp.asarray(table, jnp.float32)
  each = lambda tokens: attacks.sequence_losses(losses.next_token(apply), params, tokens)
  lowered = each(text_extraction.lower_case(tokens))
  ranked = text_extraction.rank(texts, each(tokens), by=by, lowered=lowered)
  expected = sorted(
    (i for i in range(len(texts)) if i != 30), key=lambda i: score(texts[i])
  )
  assert ranked.tolist() == expected
  np.testing.assert_allclose(each(tokens), [loss(text) for text in texts], rtol=1e-5)


def test_a_certain_line_is_ranked_by_what_it_is_divided_by():
  texts = [b"a" * 40, b"the number of Tavu Mirelo is 471120.", b"so what"]
  assert text_extraction.rank(texts, [0.0, 0.0, 1.0]).tolist() == [1, 0, 2]


def test_what_is_first_is_counted_by_lines_and_by_secrets():
  ranked = [b"ab1", b"ab1 more", b"xx", b"say ab1", b"cd2"]
  found = text_extraction.find_extracted(ranked, [b"ab1", b"cd2"], first=4)
  assert found == text_extraction.Extracted(4, 2, (0,)) and found.precision == 0.5
  assert text_extraction.find_extracted(ranked, [b"ab1", b"cd2"], first=99).secrets == (
    0,
    1,
  )


def test_a_line_is_one_guess_where_a_secret_begins_with_another():
  found = text_extraction.find_extracted(
    [b"12 Ann Lee"], [b"12 Ann", b"12 Ann Lee"], first=1
  )
  assert found == text_extraction.Extracted(1, 1, (1,))


@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda: _written(_untrained, prompts=np.ones((2, 8), int)), "prompts.shape[1]"),
    (lambda: _written(_untrained, prompts=np.ones(2, int)), "prompts.shape"),
    (lambda: _written(_untrained, prompts=np.ones((2, 1))), "prompts.shape"),
    (lambda: _written(_untrained, temperature=0.0), "temperature"),
    (lambda: _written(_untrained, top_k=0), "top_k"),
    (lambda: text_extraction.rank([b"a"], [math.nan]), "log_perplexities"),
    (lambda: text_extraction.rank([b"a"], [1.0, 2.0]), "log_perplexities.shape"),
    (lambda: text_extraction.rank([b"a"], [1.0], by="lowercase"), "lowered.shape"),
    (lambda: text_extraction.rank([b"a"], [1.0], by="zip"), "by"),
    (lambda: text_extraction.find_extracted([], [b"a"], first=1), "ranked"),
    (lambda: text_extraction.find_extracted([b"a"], [b"a"], first=0), "first"),
  ],
)
def test_wrong_arguments_are_one_line(call, field):
  with refuses(field):
    call()

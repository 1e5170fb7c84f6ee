"""Bytes as tokens."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dpjax.data.text import encode_text
from tests.refuses import refuses


@hypothesis.given(
  st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"))),
  st.integers(1, 9),
)
def test_tokens_decode_to_the_head_of_the_bytes(texts, max_length):
  tokens = encode_text(texts, max_length=max_length)
  assert tokens.shape == (len(texts), max_length) and tokens.dtype == np.int32
  for row, text in zip(tokens, texts):
    assert bytes(row.astype(np.uint8)).rstrip(b"\0") == text.encode()[:max_length]


def test_str_and_its_bytes_give_the_same_tokens():
  a, b = encode_text(["é", "é".encode()], max_length=3)
  assert a.tolist() == b.tolist() == [195, 169, 0]


@pytest.mark.parametrize("bad", [[1], [None], [["a"]]])
def test_other_types_are_refused(bad):
  with refuses("texts"):
    encode_text(bad, max_length=3)


def test_half_a_surrogate_pair_is_no_text():
  with refuses("texts"):
    encode_text(["a", "b\ud800"], max_length=1)


def test_max_length_must_be_positive():
  with refuses("max_length", value=0):
    encode_text(["a"], max_length=0)

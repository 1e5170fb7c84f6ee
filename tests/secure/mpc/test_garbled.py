"""Yao's comparison: exact, blind, used once; and the oblivious transfer below it."""

import collections
import secrets
import sys

import pytest

from dpjax.secure.mpc import garbled, oblivious_transfer
from dpjax.validate import UserError
from tests.refuses import refuses

pytest.importorskip("Crypto", reason="needs pycryptodome: pip install -e '.[secure]'")
pytest.importorskip("cryptography", reason="pip install -e '.[secure]'")


def _compared(x, y, bits):
  """The circuit of labels alone, without the transfer, which is the slow part."""
  zeros, offset, table = garbled.garble(bits)
  values = [(n >> i) & 1 for n in (x, y) for i in range(bits)]
  labels = [zero ^ (offset * value) for zero, value in zip(zeros, values)]
  return garbled.evaluate(bits, table, labels)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_all_pairs_of_small_integers(bits):
  for x in range(2**bits):
    for y in range(2**bits):
      assert _compared(x, y, bits) == (x < y), (x, y)


@pytest.mark.parametrize("bits", [32, 64])
def test_large_integers_and_neighbours(bits):
  for _ in range(10):
    x = secrets.randbits(bits)
    for y in (secrets.randbits(bits), x, max(x - 1, 0), min(x + 1, 2**bits - 1)):
      assert _compared(x, y, bits) == (x < y), (x, y)


def test_the_whole_protocol_by_messages():
  for x, y in ((200, 201), (201, 200), (255, 255), (0, 255)):
    assert garbled.less(x, y, bits=8) == (x < y)


def test_one_and_gate_of_32_bytes_for_each_bit():
  offer = garbled.Garbler(5, bits=16).offer
  assert len(offer.garbled.tables) == 16
  assert offer.num_bytes == 16 * 32 + 64 + 16 * 16 + 64


def test_the_evaluator_sees_labels_that_say_nothing():
  """Its view of two inputs of the garbler has one law: the bit by which labels are told
  apart, and any other, is a fair coin, whatever is compared."""
  counts = collections.Counter()
  for value in (0, 15):
    for _ in range(200):
      zeros, offset, _ = garbled.garble(4)
      label = zeros[0] ^ (offset * (value & 1))
      counts.update({(value, place): label >> place & 1 for place in (0, 1, 77, 127)})
  assert all(60 < count < 140 for count in counts.values()), counts  # 100 +- 5.6 sd


def test_a_changed_table_or_label_is_an_error_and_never_a_wrong_answer():
  errors = 0
  for x, y in ((90, 91), (91, 90), (14, 200)):
    zeros, offset, table = garbled.garble(8)
    values = [(n >> i) & 1 for n in (x, y) for i in range(8)]
    labels = [zero ^ (offset * value) for zero, value in zip(zeros, values)]
    for gate in range(8):
      for half in (0, 1):
        entry = list(table.tables[gate])
        entry[half] ^= 1 << 64
        tables = (*table.tables[:gate], tuple(entry), *table.tables[gate + 1 :])
        try:
          changed = table._replace(tables=tables)
          assert garbled.evaluate(8, changed, labels) == (x < y)
        except UserError as error:
          assert "a table or a label was changed" in str(error)
          errors += 1
    for wire in range(16):
      wrong = [*labels[:wire], labels[wire] ^ 2, *labels[wire + 1 :]]
      with refuses("garbled"):
        garbled.evaluate(8, table, wrong)
    with refuses("garbled"):
      garbled.evaluate(8, table, labels[:-1])
  assert errors > 8  # a ciphertext is used in half of all evaluations


def test_a_garbled_circuit_is_used_once():
  garbler, evaluator = garbled.Garbler(3, bits=4), garbled.Evaluator(9, bits=4)
  points = evaluator.choose(garbler.offer)
  pairs = garbler.answer(points)
  with refuses("answer"):
    garbler.answer(garbled.Evaluator(1, bits=4).choose(garbler.offer))
  with refuses("choose"):
    evaluator.choose(garbler.offer)
  assert evaluator.less(pairs)
  with refuses("less"):
    garbled.Evaluator(9, bits=4).less(pairs)


def test_labels_of_another_circuit_are_refused():
  garbler, evaluator = garbled.Garbler(3, bits=4), garbled.Evaluator(9, bits=4)
  evaluator.choose(garbler.offer)
  other = garbled.Garbler(3, bits=4)
  pairs = other.answer(garbled.Evaluator(9, bits=4).choose(other.offer))
  with refuses("garbled"):
    evaluator.less(pairs)
  with refuses("sent"):
    evaluator.less(pairs[:3])


@pytest.mark.parametrize(("value", "bits"), [(-1, 4), (16, 4), (1.5, 4), (True, 4)])
def test_numbers_that_do_not_fit_are_one_line(value, bits):
  with refuses("x"):
    garbled.Garbler(value, bits=bits)
  with refuses("bits", value=0):
    garbled.Garbler(0, bits=0)


# --- oblivious transfer


def test_the_receiver_cannot_open_the_other_text():
  sender = oblivious_transfer.OtSender()
  receiver = oblivious_transfer.OtReceiver(sender.point, [0, 1, 1])
  pairs = [(secrets.token_bytes(16), secrets.token_bytes(16)) for _ in range(3)]
  sent = sender.answer(receiver.points, pairs)
  assert receiver.open(sent) == [pairs[0][0], pairs[1][1], pairs[2][1]]
  swapped = [(second, first) for first, second in sent]
  assert not set(receiver.open(swapped)) & {text for pair in pairs for text in pair}


def test_points_that_are_none_are_refused():
  sender = oblivious_transfer.OtSender()
  pair = [(b"a" * 16, b"b" * 16)]
  for point in (b"\0" * 64, b"\1" * 64, b"", sender.point + b"0"):
    with refuses("point"):
      sender.answer([point], pair)
  with refuses("points"):
    sender.answer([], pair)
  with refuses("text"):
    sender.answer([sender.point], [(b"abc", b"abc")])


def test_without_the_extra_it_is_one_line(monkeypatch):
  monkeypatch.setitem(sys.modules, "Crypto.PublicKey", None)
  with pytest.raises(UserError, match=r"pip install -e '\.\[secure\]'"):
    garbled.less(1, 2, bits=2)

"""Yao's garbled circuits for one comparison x < y, where one party holds x and the other y.

The garbler gives every wire of a circuit two random labels, one for each value. It encrypts every
AND gate so that one label of each input gives one label of the output. The evaluator gets the
labels of the garbler's input from the garbler, and those of its own input by oblivious transfer.
Then it goes through the circuit. It sees one label of each wire, but not the values of inner wires.

    garbler, evaluator = Garbler(x, bits=32), Evaluator(y, bits=32)
    pairs = garbler.answer(evaluator.choose(garbler.offer))
    evaluator.less(pairs)  # x < y

| party     | learns                                       |
| --------- | -------------------------------------------- |
| garbler   | nothing, unless the evaluator tells it       |
| evaluator | whether x < y                                |

The answer is exact for every x and y. All this holds for parties that follow the protocol: a
garbler that garbles another circuit is not caught. A table or a label that was changed on the way
gives an error, or is not used. XOR is free and NOT swaps labels. An AND is two ciphertexts of 16
bytes, and a comparison takes one AND for each bit. Labels come from the operating system's entropy.
Source: Yao 1986; point-and-permute, Beaver et al. 1990; free XOR, Kolesnikov and Schneider
2008; the circuit, Kolesnikov et al. 2009, figure 6; half gates, Zahur et al. 2015, figure 2.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dpjax import validate
from dpjax.secure.mpc import oblivious_transfer
from dpjax.secure.mpc.correlations import Unique
from dpjax.validate import UserError

MAX_BITS = 256


class GarbledCircuit(NamedTuple):
  """Tables and digests for the evaluator. They reveal no label that the evaluator lacks."""

  tables: tuple[tuple[int, int], ...]  # of each AND: the garbler's and the evaluator's half
  digests: tuple[bytes, bytes]  # of the two labels of the result


class Offer(NamedTuple):
  """The garbler's first message."""

  garbled: GarbledCircuit
  labels: tuple[int, ...]  # of the garbler's input bits
  point: bytes  # of the oblivious transfer

  @property
  def num_bytes(self) -> int:
    """Bytes of the message: 16 for a label or ciphertext, 32 for a digest, 64 for the point."""
    digests = sum(map(len, self.garbled.digests))
    tables = 32 * len(self.garbled.tables)
    return tables + digests + 16 * len(self.labels) + len(self.point)


def _compare(
  x: Sequence[int],
  y: Sequence[int],
  negated: Callable[[int], int],
  both: Callable[[int, int], int],
) -> int:
  """Returns the label of x < y from labels of all bits, lowest first; one AND for each bit.

  Let c be the result for the lower bits. Two bits x and y give y XOR ((x = y) AND (y XOR c)), which
  is c if x and y are equal, else y. So the highest bit that differs decides. XOR is free: its label
  is the XOR of both labels.

  Args:
    negated: function that returns the label of NOT.
    both: function that returns the label of AND.

  >>> _compare([1, 0, 1], [0, 1, 1], lambda a: a ^ 1, lambda a, b: a & b)  # 5 < 6
  1
  """
  carry = both(negated(x[0]), y[0])
  for x_bit, y_bit in zip(x[1:], y[1:]):
    carry = y_bit ^ both(negated(x_bit ^ y_bit), y_bit ^ carry)
  return carry


def garble(bits: int) -> tuple[list[int], int, GarbledCircuit]:
  """Returns (label of 0 of each input bit, x before y; the difference of a bit's two labels; the
  evaluator's part)."""
  # The lowest bit of the offset is 1, so the lowest bits of a wire's two labels differ.
  offset = secrets.randbits(128) | 1
  zeros = [secrets.randbits(128) for _ in range(2 * bits)]
  tables: list[tuple[int, int]] = []

  def both(a: int, b: int) -> int:
    label, table = _garbled_and(a, b, offset, len(tables))
    tables.append(table)
    return label

  # NOT exchanges the two labels of a wire; the evaluator keeps its label.
  end = _compare(zeros[:bits], zeros[bits:], lambda a: a ^ offset, both)
  return zeros, offset, GarbledCircuit(tuple(tables), (_digest(end), _digest(end ^ offset)))


def _garbled_and(a: int, b: int, offset: int, index: int) -> tuple[int, tuple[int, int]]:
  """Returns (label of 0 of the result, table), by a AND b = (a AND r) XOR (a AND (b XOR r)).

  r is the last bit of b's label of 0.
  """
  hashes_a = _hash(a, 2 * index), _hash(a ^ offset, 2 * index)
  hashes_b = _hash(b, 2 * index + 1), _hash(b ^ offset, 2 * index + 1)
  of_garbler = hashes_a[0] ^ hashes_a[1] ^ (offset if b & 1 else 0)
  of_evaluator = hashes_b[0] ^ hashes_b[1] ^ a
  label = hashes_a[0] ^ (of_garbler if a & 1 else 0)
  label ^= hashes_b[0] ^ ((of_evaluator ^ a) if b & 1 else 0)
  return label, (of_garbler, of_evaluator)


def evaluate(bits: int, garbled: GarbledCircuit, labels: Sequence[int]) -> bool:
  """Returns whether x < y, from one label of each input bit, x before y.

  Raises UserError for another number of labels or tables, or if they lead to no label of a result.
  """
  if (len(labels), len(garbled.tables)) != (2 * bits, bits):
    raise UserError("is not of this circuit, or a label is missing", field="garbled")
  known = [*labels, *(part for table in garbled.tables for part in table)]
  if not all(isinstance(part, int) and 0 <= part < 1 << 128 for part in known):
    raise UserError("a table or a label is no text of 16 bytes", field="garbled")
  tables = iter(enumerate(garbled.tables))

  def both(a: int, b: int) -> int:
    # Half gates: the last bits of the two labels choose what is added.
    index, (of_garbler, of_evaluator) = next(tables)
    label = _hash(a, 2 * index) ^ (of_garbler if a & 1 else 0)
    return label ^ _hash(b, 2 * index + 1) ^ ((of_evaluator ^ a) if b & 1 else 0)

  # For NOT the garbler has exchanged the labels' meanings.
  digest = _digest(_compare(labels[:bits], labels[bits:], lambda a: a, both))
  if digest not in garbled.digests:
    raise UserError(
      "a table or a label was changed; the circuit has no result", field="garbled"
    )
  return bool(garbled.digests.index(digest))


class Garbler(Unique):
  """The party with x, for one comparison."""

  def __init__(self, x: int, *, bits: int):
    """Raises UserError unless x is an integer in [0, 2^bits)."""
    bits_of_x = _bits("x", x, bits)
    zeros, offset, garbled = garble(bits)
    self._theirs = [(zero, zero ^ offset) for zero in zeros[bits : 2 * bits]]
    self._sender = oblivious_transfer.OtSender()
    labels = tuple(zero ^ (offset if bit else 0) for zero, bit in zip(zeros, bits_of_x))
    self.offer = Offer(garbled, labels, self._sender.point)  # message 1

  def answer(self, points: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Returns message 3: both labels of each bit of y, encrypted. The evaluator opens one of two.

    Raises UserError for a second call: with labels of two inputs, a garbled circuit hides nothing.
    """
    pairs = [(_bytes(zero), _bytes(one)) for zero, one in self._theirs]
    return self._sender.answer(points, pairs)


class Evaluator:
  """The party with y. It learns whether x < y."""

  def __init__(self, y: int, *, bits: int):
    """Raises UserError unless y is an integer in [0, 2^bits)."""
    self._bits_of_y = _bits("y", y, bits)
    self._offer: Offer | None = None

  def choose(self, offer: Offer) -> list[bytes]:
    """Returns message 2, from which the garbler learns nothing about y. Raises UserError
    for a second offer."""
    if self._offer is not None:
      raise UserError(
        "this evaluator has an offer; every comparison needs a new one", field="choose"
      )
    self._receiver = oblivious_transfer.OtReceiver(offer.point, self._bits_of_y)
    self._offer = offer
    return self._receiver.points

  def less(self, pairs: Sequence[tuple[bytes, bytes]]) -> bool:
    """Returns whether x < y. Raises UserError for a wrong message, or one out of order."""
    if self._offer is None:
      raise UserError("must come after choose", field="less")
    opened = [int.from_bytes(text, "big") for text in self._receiver.open(pairs)]
    labels = [*self._offer.labels, *opened]
    return evaluate(len(self._bits_of_y), self._offer.garbled, labels)


def less(x: int, y: int, *, bits: int) -> bool:
  """Returns whether x < y, with both parties in this process.

  >>> less(1_000_000, 1_000_001, bits=20), less(7, 7, bits=3)
  (True, False)
  """
  garbler = Garbler(x, bits=bits)
  evaluator = Evaluator(y, bits=bits)
  return evaluator.less(garbler.answer(evaluator.choose(garbler.offer)))


def _bits(name: str, value: int, bits: int) -> list[int]:
  validate.integer_in(1, MAX_BITS, bits=bits)
  validate.integer_in(0, 2**bits - 1, **{name: value})
  return [int(value) >> place & 1 for place in range(bits)]


def _bytes(label: int) -> bytes:
  return label.to_bytes(16, "big")


def _hash(label: int, index: int) -> int:
  """Returns 128 bits of SHA-256 as a random oracle. Each half gate has its own index."""
  hashed = oblivious_transfer.digest(b"gate", _bytes(label), index.to_bytes(4, "big"))
  return int.from_bytes(hashed[:16], "big")


def _digest(label: int) -> bytes:
  return oblivious_transfer.digest(b"output", _bytes(label))

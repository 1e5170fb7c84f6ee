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
from collections.abc import Sequence
from typing import NamedTuple

from dpjax import validate
from dpjax.secure.mpc import oblivious_transfer
from dpjax.secure.mpc.correlations import Unique
from dpjax.validate import UserError

MAX_BITS = 256


class Gate(NamedTuple):
  """A gate on one or two earlier wires. Its result is the next wire."""

  kind: str  # xor, and, not
  a: int
  b: int = 0


class Circuit(NamedTuple):
  """A circuit. Wires are numbered in this order: inputs of the garbler, inputs of the evaluator,
  one for each gate."""

  num_garbler: int
  num_evaluator: int
  gates: tuple[Gate, ...]
  outputs: tuple[int, ...]


class GarbledCircuit(NamedTuple):
  """Tables and digests for the evaluator. They reveal no label that the evaluator lacks."""

  tables: tuple[tuple[int, int], ...]  # of each AND: the garbler's and the evaluator's half
  outputs: tuple[tuple[bytes, bytes], ...]  # digests of the two labels of each output


class Offer(NamedTuple):
  """The garbler's first message."""

  garbled: GarbledCircuit
  labels: tuple[int, ...]  # of the garbler's input bits
  point: bytes  # of the oblivious transfer

  @property
  def num_bytes(self) -> int:
    """Bytes of the message: 16 for a label or ciphertext, 32 for a digest, 64 for the point."""
    tables = 32 * len(self.garbled.tables) + 64 * len(self.garbled.outputs)
    return tables + 16 * len(self.labels) + len(self.point)


def comparison(bits: int) -> Circuit:
  """Returns a circuit for x < y of two unsigned integers, lowest bit first, with `bits` ANDs.

  Let c be the result for the lower bits. Two bits x and y give y XOR ((x = y) AND (y XOR c)), which
  is c if x and y are equal, else y. So the highest bit that differs decides.

  >>> [gate.kind for gate in comparison(2).gates]
  ['not', 'and', 'xor', 'not', 'xor', 'and', 'xor']
  """
  validate.integer_in(1, MAX_BITS, bits=bits)
  gates: list[Gate] = []

  def wire(kind: str, a: int, b: int = 0) -> int:
    gates.append(Gate(kind, a, b))
    return 2 * bits + len(gates) - 1

  carry = wire("and", wire("not", 0), bits)
  # The loop goes up from the lowest bit. If x and y differ, y decides, otherwise the result so far.
  for x, y in zip(range(1, bits), range(bits + 1, 2 * bits)):
    same = wire("not", wire("xor", x, y))
    carry = wire("xor", y, wire("and", same, wire("xor", y, carry)))
  return Circuit(bits, bits, tuple(gates), (carry,))


def garble(circuit: Circuit) -> tuple[list[int], int, GarbledCircuit]:
  """Returns (label of 0 of each wire, the difference of a wire's two labels, the
  evaluator's part)."""
  # The lowest bit of the offset is 1, so the lowest bits of a wire's two labels differ.
  offset = secrets.randbits(128) | 1
  num_inputs = circuit.num_garbler + circuit.num_evaluator
  zeros = [secrets.randbits(128) for _ in range(num_inputs)]
  tables = []
  for gate in circuit.gates:
    a = zeros[gate.a]
    b = zeros[gate.b]
    if gate.kind == "xor":
      # Free XOR: no table, and the labels of 0 and 1 again differ by the offset.
      zeros.append(a ^ b)
    elif gate.kind == "not":
      # NOT exchanges the two labels of a wire; the evaluator keeps its label.
      zeros.append(a ^ offset)
    else:
      label, table = _garbled_and(a, b, offset, len(tables))
      zeros.append(label)
      tables.append(table)
  ends = [zeros[wire] for wire in circuit.outputs]
  outputs = tuple((_digest(zero), _digest(zero ^ offset)) for zero in ends)
  return zeros, offset, GarbledCircuit(tuple(tables), outputs)


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


def evaluate(
  circuit: Circuit, garbled: GarbledCircuit, labels: Sequence[int]
) -> tuple[int, ...]:
  """Returns the output bits from one label of each input, the garbler's first.

  Raises UserError for another number of labels or tables, or if they lead to no label of an output.
  """
  wanted = circuit.num_garbler + circuit.num_evaluator
  num_ands = sum(gate.kind == "and" for gate in circuit.gates)
  sizes = len(labels), len(garbled.tables), len(garbled.outputs)
  if sizes != (wanted, num_ands, len(circuit.outputs)):
    raise UserError("is not of this circuit, or a label is missing", field="garbled")
  known = [*labels, *(part for table in garbled.tables for part in table)]
  if not all(isinstance(part, int) and 0 <= part < 1 << 128 for part in known):
    raise UserError("a table or a label is no text of 16 bytes", field="garbled")
  values = list(labels)
  tables = iter(enumerate(garbled.tables))
  for gate in circuit.gates:
    a = values[gate.a]
    b = values[gate.b]
    if gate.kind == "and":
      # Half gates: the last bits of the two labels choose what is added.
      index, (of_garbler, of_evaluator) = next(tables)
      value = _hash(a, 2 * index) ^ (of_garbler if a & 1 else 0)
      value ^= _hash(b, 2 * index + 1) ^ ((of_evaluator ^ a) if b & 1 else 0)
      values.append(value)
    else:
      # XOR needs no table. For NOT the garbler has exchanged the labels' meanings.
      values.append(a ^ b if gate.kind == "xor" else a)
  bits = []
  for wire, digests in zip(circuit.outputs, garbled.outputs):
    # The garbler sent two digests for each output, of the label of 0 and of the label of 1.
    digest = _digest(values[wire])
    if digest not in digests:
      raise UserError(
        "a table or a label was changed; the circuit has no result", field="garbled"
      )
    bits.append(digests.index(digest))
  return tuple(bits)


class Garbler(Unique):
  """The party with x, for one comparison."""

  def __init__(self, x: int, *, bits: int):
    """Raises UserError unless x is an integer in [0, 2^bits)."""
    circuit = comparison(bits)
    bits_of_x = _bits("x", x, bits)
    zeros, offset, garbled = garble(circuit)
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
    self._circuit = comparison(bits)
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
    return bool(evaluate(self._circuit, self._offer.garbled, labels)[0])


def less(x: int, y: int, *, bits: int) -> bool:
  """Returns whether x < y, with both parties in this process.

  >>> less(1_000_000, 1_000_001, bits=20), less(7, 7, bits=3)
  (True, False)
  """
  garbler = Garbler(x, bits=bits)
  evaluator = Evaluator(y, bits=bits)
  return evaluator.less(garbler.answer(evaluator.choose(garbler.offer)))


def _bits(name: str, value: int, bits: int) -> list[int]:
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

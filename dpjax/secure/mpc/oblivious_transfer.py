"""Oblivious transfer: from each pair of texts a receiver gets the one it chose, unseen by
the sender.

The sender does not learn the choice, and the receiver does not learn the other text. This is Chou
and Orlandi's "simplest" protocol on NIST P-256, whose group pycryptodome computes (extra `secure`):

| message | who      | is                                               |
| ------- | -------- | ------------------------------------------------ |
| 1       | sender   | A = aG                                           |
| 2       | receiver | B = bG, or bG + A where it chose the second text |
| 3       | sender   | both texts, under keys of aB and of a(B - A)     |

The receiver's key is that of bA, which is aB or a(B - A). The protocol is secure for parties that
follow it, under the computational Diffie-Hellman assumption with SHA-256 as a random oracle.
Secrets come from the operating system's entropy. A point off the curve or at infinity is refused.
The group has prime order, so every other point is valid.
Source: Chou and Orlandi 2015, The Simplest Protocol for Oblivious Transfer, section 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from dpjax import optional
from dpjax.secure.mpc.correlations import Unique
from dpjax.validate import UserError

TEXT_BYTES = 16
POINT_BYTES = 64


class OtSender(Unique):
  """The sender of one transfer. It gives one `answer`, with the pairs of texts.

  >>> sender = OtSender()
  >>> receiver = OtReceiver(sender.point, [0, 1])
  >>> pairs = [(b"a" * 16, b"b" * 16), (b"c" * 16, b"d" * 16)]
  >>> receiver.open(sender.answer(receiver.points, pairs))
  [b'aaaaaaaaaaaaaaaa', b'dddddddddddddddd']
  """

  def __init__(self):
    self._key = library().generate(curve="P-256")
    self.point = _encode(self._key.pointQ)  # message 1
    self._answered = False

  def answer(
    self, points: Sequence[bytes], pairs: Sequence[tuple[bytes, bytes]]
  ) -> list[tuple[bytes, bytes]]:
    """Returns message 3: each pair of 16-byte texts, under two keys of which the receiver
    knows one.

    Raises UserError for a second answer: a receiver who chooses again would get both texts of a
    pair. Also raises it for invalid points, and for a number of points other than that of pairs.
    """
    if self._answered:
      raise UserError(
        "this sender has answered; every transfer needs a new one", field="answer"
      )
    if len(points) != len(pairs):
      raise UserError(
        f"{len(points)}; must be one for each of {len(pairs)} pairs", field="points"
      )
    public_point = self._key.pointQ
    theirs = [_decode(point) for point in points]
    # The answer counts only now: an error in a point reveals nothing, so another answer is allowed.
    self._answered = True
    sent = []
    shift = -(public_point * self._key.d)
    for index, (point, encoded, pair) in enumerate(zip(theirs, points, pairs)):
      first = point * self._key.d
      seeds = (first, first + shift)  # aB, and a(B - A) = aB - aA
      keys = [_key(index, self.point, encoded, seed) for seed in seeds]
      sent.append((_xor(pair[0], keys[0]), _xor(pair[1], keys[1])))
    return sent


class OtReceiver:
  """The receiver, who chooses one text of each pair."""

  def __init__(self, sender_point: bytes, choices: Sequence[int]):
    theirs = _decode(sender_point)
    curve = library()
    keys = [curve.generate(curve="P-256") for _ in choices]
    # Both candidates are computed, so that timing does not depend on the choice.
    candidates = [(key.pointQ, key.pointQ + theirs) for key in keys]
    self._choices = [int(bool(choice)) for choice in choices]
    self.points = [_encode(pair[c]) for pair, c in zip(candidates, self._choices)]
    self._keys = [
      _key(i, sender_point, point, theirs * key.d)
      for i, (point, key) in enumerate(zip(self.points, keys))
    ]

  def open(self, sent: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """Returns the chosen texts. Raises UserError unless there is one pair for each choice."""
    if len(sent) != len(self._choices):
      raise UserError(f"{len(sent)} pairs; must be {len(self._choices)}", field="sent")
    if any(len(pair) != 2 for pair in sent):
      raise UserError("must be pairs of texts", field="sent")
    chosen = zip(sent, self._choices, self._keys)
    return [_xor(pair[choice], key) for pair, choice, key in chosen]


def library() -> Any:
  """Returns pycryptodome's module of elliptic curves. Raises UserError if it is not installed."""
  with optional.require_extra("secure"):
    from Crypto.PublicKey import ECC
  return ECC


def digest(*parts: bytes) -> bytes:
  """Returns the SHA-256 [32] of parts and their lengths, so no two lists are hashed as one text."""
  return hashlib.sha256(
    b"".join(len(part).to_bytes(4, "big") + part for part in parts)
  ).digest()


def _key(index: int, first: bytes, second: bytes, shared: Any) -> bytes:
  parts = (index.to_bytes(4, "big"), first, second, _encode(shared))
  return digest(b"dpjax oblivious transfer", *parts)[:TEXT_BYTES]


def _xor(text: bytes, key: bytes) -> bytes:
  if not isinstance(text, bytes) or len(text) != TEXT_BYTES:
    kind = len(text) if isinstance(text, bytes) else type(text).__name__
    raise UserError(f"of {kind} bytes; must be of {TEXT_BYTES}", field="text")
  return bytes(a ^ b for a, b in zip(text, key))


def _encode(point: Any) -> bytes:
  return int(point.x).to_bytes(32, "big") + int(point.y).to_bytes(32, "big")


def _decode(message: bytes) -> Any:
  """Decodes a point. Raises UserError for one off the curve, at infinity, or of another
  length."""
  if not isinstance(message, bytes) or len(message) != POINT_BYTES:
    raise UserError("of the other party is none of the curve P-256", field="point")
  x = int.from_bytes(message[:32], "big")
  y = int.from_bytes(message[32:], "big")
  try:
    point = library().EccPoint(x, y, curve="P-256")
  except ValueError:
    point = None
  if point is None or point.is_point_at_infinity():
    raise UserError("of the other party is none of the curve P-256", field="point")
  return point

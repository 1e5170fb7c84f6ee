"""Messages between the parties of a secure sum: bytes of one layout, validated when read.

A message is a header and records. The header states the kind, session, sender, number of records
and bytes of each record. A record is an id and bytes; all records have equally many bytes. Ids
ascend, so none occurs twice. `read` checks all sizes before it reads a record. Any fault is a
`UserError`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from dpjax.validate import UserError

# Id of the server as a sender. No client may have it.
SERVER = 2**32 - 1
KINDS = (
  "keys",  # client: its public keys
  "roster",  # server: the keys of a client's neighbours
  "envelopes",  # client: sealed shares, by the neighbour that each is for
  "forwarded",  # server: sealed shares, by the neighbour that each is from
  "masked",  # client: its masked vector
  "survivors",  # server: whose masked vectors came (1), and whose did not (0)
  "agreed",  # client: its signature of the survivors
  "signatures",  # server: all clients' signatures
  "revealed",  # client: shares of the seeds of survivors' own masks and absent clients' mask keys
  "shares",  # client: a sealed share for each member of a committee
  "sums",  # member: the sum of the shares that it was sent
)
# Magic with version, kind, session, sender, number of records, bytes of each record.
_HEADER = struct.Struct("<8sB16sIII")
_MAGIC = b"dpjxsum1"
# Bytes of a message's header, and of the id of a record.
OVERHEAD = _HEADER.size
ID = 4
Records = dict[int, memoryview]  # of a message, by id


def size(count: int, record_bytes: int) -> int:
  """Returns the number of bytes of a message with `count` records of `record_bytes` bytes.

  >>> len(write("masked", bytes(16), 7, {7: b"1234"})) == size(1, 4)
  True
  """
  return OVERHEAD + count * (ID + record_bytes)


def write(kind: str, session: bytes, sender: int, records: Mapping[int, bytes]) -> bytes:
  """Serialises a message. Its records must have one size, and are sorted by id."""
  sizes = {len(record) for record in records.values()} or {0}
  (each,) = sizes
  head = (_MAGIC, KINDS.index(kind), session, sender, len(records), each)
  parts = [_HEADER.pack(*head)]
  for who in sorted(records):
    parts += [who.to_bytes(ID, "little"), records[who]]
  return b"".join(parts)


def read(data: bytes, kind: str, session: bytes, record_bytes: int, sender: int) -> Records:
  """Parses a message of this kind and session. Returns its records by id.

  Args:
    sender: id of the party that sent the message, as the transport knows it.

  Raises:
    UserError: the data are no message, or one of another kind, session, size or sender; or its ids
      do not ascend. No part of the message is returned.

  >>> read(b"hello", "keys", bytes(16), 96, 7)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: keys: 5 bytes that are no message of a secure sum
  """
  if len(data) < OVERHEAD or data[: len(_MAGIC)] != _MAGIC:
    raise UserError(f"{len(data)} bytes that are no message of a secure sum", field=kind)
  _, code, of, stated, count, each = _HEADER.unpack_from(data)
  if code >= len(KINDS) or KINDS[code] != kind:
    said = KINDS[code] if code < len(KINDS) else code
    raise UserError(f"expected from {name(sender)}, who sent {said}", field=kind)
  if of != session:
    raise UserError(f"from {name(sender)} is of another session", field=kind)
  # The sizes are checked before any record is read, since a sender may claim any size.
  if (count and each != record_bytes) or len(data) != size(count, each):
    raise UserError(
      f"from {name(sender)} is of the wrong length ({len(data)} bytes; "
      f"{size(count, record_bytes)} for {count} records)",
      field=kind,
    )
  if stated != sender:
    raise UserError(f"from {name(sender)}, who says to be {name(stated)}", field=kind)
  view = memoryview(data)
  records: Records = {}
  last = -1
  for start in range(OVERHEAD, len(data), ID + each):
    who = int.from_bytes(data[start : start + ID], "little")
    if who <= last:
      raise UserError(
        f"from {name(sender)} names {name(who)} twice or out of order", field=kind
      )
    records[who] = view[start + ID : start + ID + each]
    last = who
  return records


def kind(data: bytes) -> str:
  """Returns the kind that a message states, or "" for other bytes. Nothing else is validated.

  >>> kind(write("sums", bytes(16), 7, {})), kind(b"hello")
  ('sums', '')
  """
  place = len(_MAGIC)
  code = data[place] if len(data) > place and data[:place] == _MAGIC else len(KINDS)
  return KINDS[code] if code < len(KINDS) else ""


def name(who: int) -> str:
  """Returns the name of a party for error messages."""
  return "the server" if who == SERVER else f"client {who}"

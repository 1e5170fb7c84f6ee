"""Entity alignment: finds the ids that two parties share, by private set intersection.

The protocol is that of the library `openmined-psi` (extra `vertical`): elliptic-curve
Diffie-Hellman. Each id is hashed to a point, which is raised to both parties' secret
exponents. So equal ids give equal points, and the points of other ids look random.

| party     | learns                                                    |
| --------- | --------------------------------------------------------- |
| a, asks   | the shared ids, how many ids b has                        |
| b, serves | how many ids a has, and the shared ids, as a tells them   |
| others    | nothing but sizes, if the connection is encrypted         |

This holds for parties that follow the protocol. A party that lies about its own ids learns which
of them the other holds: private set intersection hides nothing from guesses. That an entity is
shared is itself a fact about it, and no differential privacy is claimed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax import optional
from dpjax.validate import UserError


class Alignment(NamedTuple):
  """The entities that both parties hold, in an order that tells nothing of either party's rows."""

  ids: tuple[str, ...]  # sorted
  rows_a: np.ndarray  # [n] rows of party a: ids_a[rows_a[i]] == ids[i]
  rows_b: np.ndarray  # [n] rows of party b
  bytes_a: int  # sent by party a
  bytes_b: int


def align(ids_a: Sequence[str], ids_b: Sequence[str]) -> Alignment:
  """Returns the shared ids of two parties, and each party's rows of these entities.

  The result is exact: b's set is sent uncompressed. A compressed set could give false matches. Both
  parties run in this process, on keys made fresh for the call. Their messages are serialised, and
  their bytes are counted.

  Ids are equal where their UTF-8 is: "A" is not "a", and "é" as one character is not "e" with an
  accent after it. Bring both parties' ids to one form first (`unicodedata.normalize`).

  Raises:
    UserError: no list of strings, an id that comes twice or has no UTF-8, or the library is not
      installed.

  >>> align(["ann", "ann"], ["bob"])
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: ids_a: 'ann' comes twice; an id must name one row
  """
  places_a = _places(ids_a, "ids_a")
  places_b = _places(ids_b, "ids_b")
  # A column of a table is indexed by labels, a list by places. So the ids become lists.
  ids_a = list(ids_a)
  ids_b = list(ids_b)
  psi = library()
  client, server = (party.CreateWithNewKey(True) for party in (psi.client, psi.server))
  setup = server.CreateSetupMessage(0.0, len(ids_a), ids_b, psi.DataStructure.RAW)
  request = client.CreateRequest(ids_a).SerializeToString()
  response = server.ProcessRequest(_parse(psi.Request, request)).SerializeToString()
  sent = setup.SerializeToString()
  places = client.GetIntersection(
    _parse(psi.ServerSetup, sent), _parse(psi.Response, response)
  )
  # Ids are sorted, so that the order reveals nothing about the order of either party's rows.
  ids = tuple(sorted(str(ids_a[place]) for place in places))
  return Alignment(
    ids=ids,
    rows_a=np.array([places_a[name] for name in ids], np.int64),
    rows_b=np.array([places_b[name] for name in ids], np.int64),
    bytes_a=len(request) + sum(len(name.encode()) for name in ids),
    bytes_b=len(sent) + len(response),
  )


def _places(ids: Sequence[str], name: str) -> dict[str, int]:
  # Arrays and columns of tables are taken, too. A string, a set and a mapping have no rows.
  if isinstance(ids, str | bytes | Mapping) or not hasattr(ids, "__getitem__"):
    raise UserError(f"must be a list of strings, not {type(ids).__name__}", field=name)
  axes = getattr(ids, "ndim", 1)
  if axes != 1:
    raise UserError(f"must have one axis, not {axes}", field=name)
  places: dict[str, int] = {}
  for place, entity in enumerate(ids):
    if not isinstance(entity, str):
      raise UserError(f"must hold strings, got {entity!r:.80}", field=name)
    try:
      entity.encode()
    except UnicodeEncodeError as error:
      raise UserError(
        f"{entity!a:.80} has no UTF-8, by which ids are compared", field=name
      ) from error
    if entity in places:
      raise UserError(f"{entity!r} comes twice; an id must name one row", field=name)
    places[entity] = place
  return places


def library() -> Any:
  """Returns the package of private set intersection. Raises UserError if it is not installed."""
  with optional.require_extra("vertical"):
    import private_set_intersection.python as psi  # pyright: ignore[reportMissingImports]
  return psi


def _parse(kind: Any, message: bytes) -> Any:
  """Returns the message as the other side parses it from the bytes."""
  out = kind()
  out.ParseFromString(message)
  return out

"""What all secure sums have in common: what goes in, what comes out, and the base of protocols.

Integer vectors go in; their sum modulo 2^bits and its cost come out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from dpjax import validate
from dpjax.validate import UserError, Verbatim, several

MOST_CLIENTS = 10_000
MOST_ENTRIES = 2**28
# Largest client id: an id has 32 bits in a message, and the largest of all is the server's.
LAST_ID = 2**32 - 2


class Cost(NamedTuple):
  """Cost of one sum; bytes are those of the serialised messages."""

  client_bytes: int  # largest number of bytes that one client sent and received together
  server_bytes: int  # all bytes that the server sent and received
  expansions: int = 0  # streams of masks expanded, by all parties
  operations: int = 0  # key agreements, encryptions and decryptions, by all parties
  seconds: float = 0.0


class Drops(NamedTuple):
  """Clients that drop out, by phase."""

  before_sharing: frozenset[int] = frozenset()  # after they have sent their keys, if any
  before_upload: frozenset[int] = frozenset()  # after they have shared their keys
  before_unmasking: frozenset[int] = frozenset()  # their vectors count


class Summed(NamedTuple):
  """Total, survivors and cost of one sum."""

  total: np.ndarray  # [d] uint32 or uint64: sum of the survivors' vectors modulo 2^bits
  survivors: tuple[int, ...]  # clients whose vectors are in the total, ascending
  cost: Cost


NO_DROPS = Drops()


def bits_needed(num_clients: int, largest: int) -> int:
  """Returns the fewest bits that hold any sum of `num_clients` integers in [0, largest].

  >>> bits_needed(100, 2**20 - 1)
  27
  """
  validate.integer_at_least(1, num_clients=num_clients)
  validate.integer_at_least(0, largest=largest)
  return max(1, (int(num_clients) * int(largest)).bit_length())


def dtype_of(bits: int) -> np.dtype:
  """Returns uint32 or uint64; its arithmetic is modulo 2^bits."""
  return np.dtype(f"uint{bits}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumProtocol:
  """A protocol that adds the vectors of named clients. Each class says what it hides.

  Args:
    bits: bits of the modulus, 32 or 64.
    min_survivors: fewest vectors in a sum; with fewer it is refused and nothing is revealed.
    largest: bound on every entry. A larger entry is refused. A cohort whose sum could wrap around
      is refused before vectors are read. None: sums may wrap around, as some encodings intend.

  Raises:
    UserError: other bits, `min_survivors` below two, or a `largest` beyond the modulus.
  """

  bits: int = 32
  min_survivors: int = 2
  largest: int | None = None
  _name: ClassVar[str]
  # What the protocol hides, and from whom; a report says it.
  hides: ClassVar[str] = "see its class"
  # Whether a client may fall silent between its keys or shares and its vector.
  survives_dropouts: ClassVar[bool] = True

  def __post_init__(self) -> None:
    if type(self.bits) is not int or self.bits not in (32, 64):
      raise UserError("must be 32 or 64", field="bits", value=self.bits)
    validate.integer_in(2, MOST_CLIENTS, min_survivors=self.min_survivors)
    if self.largest is not None:
      validate.integer_in(1, 2**self.bits - 1, largest=self.largest)

  @property
  def name(self) -> str:
    """Name of the protocol."""
    return self._name

  @property
  def dtype(self) -> np.dtype:
    """Type of every vector and of the total."""
    return dtype_of(self.bits)

  @property
  def is_simulated(self) -> bool:
    """Whether vectors are added in the clear, so that anything else may form the total instead."""
    return False

  @property
  def min_clients(self) -> int:
    """Fewest clients of a sum of which none drops out."""
    return self.min_survivors

  def check_clients(self, num_clients: int) -> None:
    """Raises UserError if a sum of so many clients cannot be."""

  def most_silent(self, num_clients: int) -> int:
    """Returns how many clients may send keys and no vector without a refusal, whoever they are."""
    return num_clients - self.min_survivors if self.survives_dropouts else 0

  @classmethod
  def check_dropouts(cls, **dropouts: float) -> None:
    """Raises UserError, which names the argument, if one is not 0 and no client may fall silent."""
    for name, value in dropouts.items():
      if value and not cls.survives_dropouts:
        raise UserError(
          "must be 0: a sum of which a share is missing is refused", field=name, value=value
        )

  def check_library(self) -> None:
    """Raises UserError if a library that the protocol needs is not installed."""

  def sum(self, vectors: Mapping[int, np.ndarray], drops: Drops = NO_DROPS) -> Summed:
    """Returns the sum over the clients of `vectors` that do not drop out before upload.

    Args:
      vectors: [d] unsigned integers below 2^bits, by client id. A vector is looked up at most
        once, in ascending order of ids, and is not kept. So a mapping may compute each vector when
        it is read.
      drops: clients that fall silent, by phase.

    Raises:
      UserError: fewer than `min_survivors` clients are left, there are fewer than two clients at
        all, vectors have different lengths or types, a library is missing, or what the protocol
        itself refuses. Nothing beyond the sum is then revealed.
    """
    start = time.perf_counter()
    # A missing library is reported before any vector is read.
    self.check_library()
    there, read = admit(self, vectors, drops)
    summed = self._add(there, read)
    seconds = time.perf_counter() - start
    return summed._replace(cost=summed.cost._replace(seconds=seconds))

  def _add(self, there: Present, read: Reader) -> Summed:
    """Returns the sum over the clients in `there.uploading`, whose vectors `read` returns."""
    raise NotImplementedError


class Present(NamedTuple):
  """Ids of the clients in each phase, ascending. Each phase is a subset of the phase before."""

  named: tuple[int, ...]
  sharing: tuple[int, ...]
  uploading: tuple[int, ...]  # clients whose vectors count
  unmasking: tuple[int, ...]


def present(
  protocol: SumProtocol, vectors: Mapping[int, np.ndarray], drops: Drops
) -> Present:
  """Returns the clients that are left in each phase.

  Raises:
    UserError: fewer than two clients, invalid ids, drops of an unknown client or of one client
      twice, or a sum that could wrap around. The protocol itself refuses too few survivors.
  """
  if not isinstance(vectors, Mapping):
    must = "must be a mapping of clients' numbers to their vectors, such as a dict"
    raise UserError(must, field="vectors", value=Verbatim(type(vectors).__name__))
  if not isinstance(drops, Drops):
    must = "must be a Drops, such as Drops(before_upload=frozenset({3}))"
    raise UserError(must, field="drops", value=drops)
  ids = list(vectors)
  validate.integer_in(2, MOST_CLIENTS, num_clients=len(ids))
  for who in ids:
    validate.integer_in(0, LAST_ID, client=who)
  phases = {f"drops.{phase}": clients for phase, clients in drops._asdict().items()}
  gone = [who for name, clients in phases.items() for who in several(**{name: clients})]
  if len(gone) != len({*gone}) or not {*gone} <= {*ids}:
    raise UserError(
      "must name clients of the sum, each once", field="drops", value=sorted(gone, key=repr)
    )
  needed = 0 if protocol.largest is None else bits_needed(len(ids), protocol.largest)
  if needed > protocol.bits:
    raise UserError(
      f"{len(ids)} entries of up to largest={protocol.largest} need a modulus "
      f"of {needed} bits, or the sum wraps around",
      field="bits",
      value=protocol.bits,
    )
  named = tuple(sorted(map(int, ids)))
  sharing = tuple(who for who in named if who not in drops.before_sharing)
  uploading = tuple(who for who in sharing if who not in drops.before_upload)
  unmasking = tuple(who for who in uploading if who not in drops.before_unmasking)
  return Present(named, sharing, uploading, unmasking)


def admit(
  protocol: SumProtocol, vectors: Mapping[int, np.ndarray], drops: Drops
) -> tuple[Present, Reader]:
  """Returns (clients of each phase, reader of the vectors of those who upload).

  Raises:
    UserError: as `present` and `Reader`, or fewer than `min_survivors` clients upload.

  >>> vectors = {who: np.zeros(2, np.uint32) for who in range(3)}
  >>> admit(SumProtocol(min_survivors=3), vectors, Drops(before_upload=frozenset({1})))
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: min_survivors=3: only 2 clients are left before upload; ...
  """
  there = present(protocol, vectors, drops)
  if len(there.uploading) < protocol.min_survivors:
    raise UserError(
      f"only {len(there.uploading)} clients are left before upload; nothing was revealed",
      field="min_survivors",
      value=protocol.min_survivors,
    )
  return there, Reader(protocol, vectors, there.uploading)


class LazyVectors(Mapping[int, np.ndarray]):
  """Clients' vectors, computed when they are read, so that no two need be in memory at once."""

  def __init__(self, clients: Iterable[int], make: Callable[[int], np.ndarray]):
    self._clients = dict.fromkeys(sorted(clients))
    self._make = make

  def __getitem__(self, client: int) -> np.ndarray:
    if client not in self._clients:
      raise KeyError(client)
    return self._make(client)

  def __iter__(self) -> Iterator[int]:
    return iter(self._clients)

  def __len__(self) -> int:
    return len(self._clients)


class Reader:
  """Looks up vectors, and checks that all have one length and type.

  Call it once for each of `ids`, in their order. The constructor reads the first vector, since all
  must have its length. Vectors that were returned are not kept.
  """

  def __init__(
    self, protocol: SumProtocol, vectors: Mapping[int, np.ndarray], ids: tuple[int, ...]
  ):
    self._protocol = protocol
    self._vectors = vectors
    self._first = ids[0]
    self._held = np.asarray(vectors[ids[0]])
    if self._held.ndim != 1 or not 1 <= len(self._held) <= MOST_ENTRIES:
      raise UserError(
        f"must be a vector of 1 to {MOST_ENTRIES} entries, is of shape {self._held.shape}",
        field=f"vectors[{ids[0]}]",
      )
    self.length = len(self._held)

  def __call__(self, who: int) -> np.ndarray:
    """Returns the vector of a client, [d].

    Raises:
      UserError: a vector of another length than the first, of another type than `bits` says, or
        with an entry above `largest`.
    """
    first = who == self._first
    vector = np.asarray(self._held if first else self._vectors[who])
    # The first vector is returned only once, so it need not be kept.
    if first:
      self._held = np.zeros(0)
    wanted = self._protocol.dtype
    if vector.shape != (self.length,) or vector.dtype != wanted:
      raise UserError(
        f"must be {self.length} entries of {wanted}, is {vector.dtype} of "
        f"shape {vector.shape}",
        field=f"vectors[{who}]",
      )
    largest = self._protocol.largest
    if largest is not None and int(vector.max()) > largest:
      raise UserError(f"has an entry above largest={largest}", field=f"vectors[{who}]")
    return vector

"""Terms that all parties of a secure sum know in advance, and the graph of neighbours.

SecAgg masks each vector pairwise with all other clients. SecAgg+ masks it with `degree` of them, in
a random regular graph. Clients stand on a ring, in the order of a hash of session and id. The
session is drawn once: who draws several could choose a client's neighbours, and so lies. Each
client is joined to the next degree / 2 clients on either side.

`graph_parameters` finds degree and threshold for a fraction `corrupt` of clients in league with the
server and a fraction `dropout` that falls silent. Both guarantees hold for any such clients.

- Secrecy, with probability 1 - 2^-security_bits. No two gaps of degree / 2 lost or corrupt clients
  cut the ring into two parts: a cut would reveal the sum of each part. No client has `threshold`
  corrupt neighbours: they could rebuild its secrets.
- Success of the sum, with probability 1 - 2^-failure_bits. Each client has `threshold` surviving
  neighbours.

Source: Bell, Bonawitz, Gascon, Lepoint and Raykova 2020, "Secure Single-Server Aggregation
with (Poly)Logarithmic Overhead", section 3 (honest-but-curious server). security_bits 40 and
failure_bits 20 are those of Google's published implementation.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from dpjax import validate
from dpjax.secure.sums import interface, messages
from dpjax.secure.sums.primitives import SECRET_BYTES
from dpjax.validate import UserError, Verbatim

# Bytes of the public keys of channel and mask, and of the commitment to the own mask's seed.
KEY_BYTES = 96
SIGNATURE_BYTES = 64
# Bytes of two shares and of the cipher's tag.
SEALED_BYTES = 2 * SECRET_BYTES + 16
REVEALED_BYTES = 1 + SECRET_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumTerms:
  """The public terms of one sum, which all parties know in advance.

  Args:
    session: 16 bytes that no other sum has, so that messages of another sum are refused.
    clients: ids of the clients, ascending.
    min_survivors: fewest vectors in a sum.
    length: d, the number of entries of each vector.
    bits: bits of the modulus.
  """

  session: bytes
  clients: tuple[int, ...]
  min_survivors: int
  length: int
  bits: int = 32

  def __post_init__(self) -> None:
    interface.SumProtocol(bits=self.bits, min_survivors=self.min_survivors)
    count = len(self.clients)
    validate.integer_in(2, interface.MOST_CLIENTS, num_clients=count)
    validate.integer_in(1, interface.MOST_ENTRIES, length=self.length)
    if not isinstance(self.session, bytes) or len(self.session) != 16:
      raise UserError("must be 16 bytes", field="session", value=self.session)
    for who in self.clients:
      validate.integer_in(0, interface.LAST_ID, client=who)
    # Ids become plain ints: keys are bound to the text of an id, and NumPy writes another text.
    object.__setattr__(self, "clients", tuple(map(int, self.clients)))
    if list(self.clients) != sorted({*self.clients}):
      raise UserError("must be ids in ascending order, each once", field="clients")
    if self.min_survivors > count:
      raise UserError(
        f"must be <= the {count} clients of a sum",
        field="min_survivors",
        value=self.min_survivors,
      )

  @property
  def dtype(self) -> np.dtype:
    """Type of the words of all messages, and of the total."""
    return np.dtype(f"<u{self.bits // 8}")

  def context(self, purpose: bytes, *ids: int) -> bytes:
    """Returns a key's purpose, session and ids in bytes, so that no two purposes share a key."""
    return b"|".join([b"dpjax secure sum 1", purpose, self.session, repr(ids).encode()])

  def record_bytes(self, kind: str) -> int:
    """Returns the number of bytes of one record in a message of this kind."""
    raise NotImplementedError

  def size(self, kind: str, count: int) -> int:
    """Returns the number of bytes of a message of this kind with `count` records."""
    return messages.size(count, self.record_bytes(kind))

  def write(self, kind: str, sender: int, records: Mapping[int, bytes]) -> bytes:
    """Serialises a message of this sum (`messages.write`)."""
    return messages.write(kind, self.session, sender, records)

  def read(self, kind: str, data: bytes, sender: int) -> messages.Records:
    """Parses a message of this sum, and returns its records (`messages.read`)."""
    return messages.read(data, kind, self.session, self.record_bytes(kind), sender)

  def check_client(self, me: int) -> None:
    """Raises UserError for a client that the terms do not name."""
    if me not in self.clients:
      raise UserError(
        f"is not among the {len(self.clients)} of the terms", field="client", value=me
      )

  def check_vector(self, vector: np.ndarray | None) -> np.ndarray:
    """Returns the vector. Raises UserError for anything but `length` entries of `dtype`."""
    shape = getattr(vector, "shape", None)
    if vector is None or shape != (self.length,) or vector.dtype != self.dtype:
      raise UserError(f"must be {self.length} entries of {self.dtype}", field="vector")
    return vector


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms(SumTerms):
  """The public terms of one sum by SecAgg or SecAgg+.

  Args:
    threshold: t, the number of shares that rebuild a secret.
    degree: number of neighbours of each client; None: all others (SecAgg).
    directory: Ed25519 public keys [32] in the order of `clients`, from somebody whom all
      trust, against a server that lies. It requires degree None and t > 2 / 3 of the clients,
      for which the protocol is proved. None: no signatures.
  """

  threshold: int
  degree: int | None = None
  directory: tuple[bytes, ...] | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    count = len(self.clients)
    if self.degree is not None:
      validate.integer_in(2, count, degree=self.degree)
    most = count if self.degree is None else self.degree + 1
    validate.integer_in(2, most, threshold=self.threshold)
    self._check_graph(count)

  def _check_graph(self, count: int) -> None:
    if self.degree is not None and self.degree not in range(2, count - 1, 2):
      raise UserError(
        f"must be an even number in [2, {count - 2}], or None for all",
        field="degree",
        value=self.degree,
      )
    if self.directory is None:
      return
    if self.degree is not None:
      raise UserError(
        "is proved for all clients as neighbours, not for a degree", field="directory"
      )
    if len(self.directory) != count or any(len(key) != 32 for key in self.directory):
      raise UserError(
        "must hold one public key of 32 bytes for each client", field="directory"
      )
    if 3 * self.threshold <= 2 * count:
      raise UserError(
        f"must be above two thirds of the {count} clients against a server that "
        "lies (Bonawitz et al. 2017, section 6)",
        field="threshold",
        value=self.threshold,
      )

  def record_bytes(self, kind: str) -> int:
    keys = KEY_BYTES + (SIGNATURE_BYTES if self.directory else 0)
    return {
      "keys": keys,
      "roster": keys,
      "envelopes": SEALED_BYTES,
      "forwarded": SEALED_BYTES,
      "masked": self.length * self.bits // 8,
      "survivors": 1,
      "agreed": SIGNATURE_BYTES,
      "signatures": SIGNATURE_BYTES,
      "revealed": REVEALED_BYTES,
    }[kind]

  @property
  def fewest(self) -> int:
    """Smallest number of clients with which the sum can succeed."""
    return max(self.min_survivors, self.threshold)


def neighbours(terms: Terms, who: int) -> tuple[int, ...]:
  """Returns the clients with which a client shares masks, ascending."""
  return _graph(terms.session, terms.clients, terms.degree)[who]


def holders(terms: Terms, who: int, there: Collection[int]) -> tuple[int, ...]:
  """Returns the holders of a client's shares: itself and its neighbours that are `there`."""
  return tuple(
    sorted({who, *(other for other in neighbours(terms, who) if other in there)})
  )


@functools.lru_cache(maxsize=8)
def _graph(
  session: bytes, clients: tuple[int, ...], degree: int | None
) -> dict[int, tuple[int, ...]]:
  if degree is None:
    return {who: tuple(x for x in clients if x != who) for who in clients}
  place = lambda who: hashlib.sha256(session + who.to_bytes(4, "little")).digest()
  ring = sorted(clients, key=place)
  half = degree // 2
  around = [offset for offset in range(-half, half + 1) if offset]
  return {
    who: tuple(sorted(ring[(at + offset) % len(ring)] for offset in around))
    for at, who in enumerate(ring)
  }


# --- parameters of SecAgg+


def graph_parameters(
  num_clients: int,
  *,
  corrupt: float,
  dropout: float,
  security_bits: float = 40,
  failure_bits: float = 20,
) -> tuple[int | None, int]:
  """Returns (degree, threshold): the smallest degree with this module's guarantees, and its
  smallest threshold. Degree None means all others; it is returned if no smaller degree works.

  Args:
    corrupt: largest fraction of the clients that tell the server all they know.
    dropout: largest fraction of the clients that falls silent.

  Raises:
    UserError: fractions outside [0, 1), or fewer than two clients that are honest and stay.

  >>> graph_parameters(100, corrupt=0.05, dropout=0.33)
  (28, 6)
  """
  validate.integer_in(2, interface.MOST_CLIENTS, num_clients=num_clients)
  validate.share(corrupt=corrupt, dropout=dropout)
  validate.positive(security_bits=security_bits, failure_bits=failure_bits)
  bad, gone = (largest_part(f, num_clients) for f in (corrupt, dropout))
  if bad + gone > num_clients - 2:
    raise UserError(
      f"with dropout={dropout:g} fewer than two of {num_clients} clients are "
      "honest and there",
      field="corrupt",
      value=Verbatim(f"{corrupt:g}"),
    )
  # Secrecy can be lost in two ways, so each of them gets half of the probability: one bit more.
  chances = (security_bits + 1, failure_bits)
  for degree in range(2, num_clients - 1, 2):
    if _log2_cut(num_clients, degree, bad + gone) < -(security_bits + 1):
      threshold = _threshold(num_clients, degree, bad, gone, chances)
      if threshold is not None:
        return degree, threshold
  # With all clients as neighbours, any threshold above the number of corrupt clients is safe.
  return None, max(2, bad + 1)


def largest_part(fraction: float, num_clients: int) -> int:
  """Returns the largest number of clients that is at most this fraction of all."""
  # Adding 1e-9 corrects rounding: 0.29 * 100 is 28.999999999999996 in floats.
  return math.floor(fraction * num_clients + 1e-9)


def _log2_choose(n: int, k: int) -> float:
  parts = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
  return parts / math.log(2)


def _log2_cut(num_clients: int, degree: int, lost: int) -> float:
  """Returns log2 of a bound on the probability that two gaps of degree / 2 lost clients cut the
  ring (union bound over pairs of gaps)."""
  if degree > lost:
    return -math.inf
  pairs = math.log2(num_clients) + math.log2(num_clients - degree - 1) - 1
  at_the_gaps = _log2_choose(num_clients - degree, lost - degree)
  return pairs + at_the_gaps - _log2_choose(num_clients, lost)


def _counts(num_clients: int, marked: int, drawn: int) -> Iterator[float]:
  """Yields the probabilities of 0, 1, ..., `drawn` marked clients among `drawn` clients.

  They are drawn without replacement (hypergeometric).
  """
  # Logarithms are used, since the binomial coefficients may exceed the range of floats.
  whole = _log2_choose(num_clients, drawn)
  for k in range(drawn + 1):
    if k > marked or drawn - k > num_clients - marked:
      yield 0.0
    else:
      log_unmarked = _log2_choose(num_clients - marked, drawn - k)
      yield 2 ** (_log2_choose(marked, k) + log_unmarked - whole)


def corrupt_and_staying(
  num_clients: int, corrupt: int, staying: int, drawn: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (P[more than k corrupt], P[fewer than k staying]) among randomly drawn clients.

  Args:
    num_clients: number of clients, of whom `corrupt` are corrupt and `staying` stay to the end.
    drawn: number of clients drawn without replacement.

  Returns:
    Two arrays [drawn + 1] over k = 0, 1, ... (hypergeometric tails).
  """
  of_corrupt = np.array([*_counts(num_clients, corrupt, drawn)])
  of_staying = np.array([*_counts(num_clients, staying, drawn)])
  # Each tail is the sum of its terms. For a tail of 2^-40, 1 minus the other tail would lose most
  # digits to rounding.
  above = np.append(np.cumsum(of_corrupt[:0:-1])[::-1], 0.0)
  below = np.append(0.0, np.cumsum(of_staying[:-1]))
  return above, below


def _threshold(
  num_clients: int, degree: int, bad: int, gone: int, chances: tuple[float, float]
) -> int | None:
  """Returns the smallest threshold for graphs of this degree, or None if there is none.

  P[some client has `threshold` or more corrupt neighbours] is at most 2^-chances[0].
  P[some client has fewer than `threshold` surviving neighbours] is at most 2^-chances[1].
  """
  corrupt_above, staying_below = corrupt_and_staying(
    num_clients, bad, num_clients - gone, degree
  )
  safe = np.flatnonzero(num_clients * corrupt_above <= 2 ** -chances[0])
  threshold = max(2, int(safe[0]) + 1)
  if threshold > degree or num_clients * staying_below[threshold] > 2 ** -chances[1]:
    return None
  return threshold

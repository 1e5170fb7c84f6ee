"""SecAgg and SecAgg+ in one process: the real clients, server and messages, joined in memory.

| variant            | masks against          | hides from                                       |
| ------------------ | ---------------------- | ------------------------------------------------ |
| `SecAgg`           | all others             | server and t - 1 clients, honest-but-curious     |
| `SecAgg(signed)`   | all others             | the same, and a server that lies, together with  |
|                    |                        | fewer than 2t - n of the clients (t > 2n / 3)    |
| `SecAggPlus`       | k random neighbours    | server and a fraction of clients, honest-but-    |
|                    |                        | curious, except with probability 2^-40           |

Only the sum of the honest clients' vectors is revealed. A server is honest-but-curious if it
follows the protocol. Without signatures, a server that lies has two attacks:

- It tells two groups of t clients different lists of survivors, and so gets both secrets of a
  client. A test carries this out. If 2 t > n + colluders, there are no two such groups.
- It hands out keys of its own making.

Signatures end both attacks, unless 2t - n or more clients sign two lists for the server (n / 3 are
always too few; t - 1 are enough where t < n). The server can always leave out any clients, down to
`min_survivors`.

No variant checks a client's vector. One dishonest client can make the sum any number. If too few
of its shares fit together, the sum is refused. If others cannot open its envelopes, they fall
silent. The client learns nothing by that, but fewer vectors may be in the sum.

A sum with simulated=True has the same total, refusals and costs, but NO secrecy: the server sees
every vector. It is for many rounds, in the time of a plain sum. Formulas count the messages, mask
streams and key agreements; `Cost.seconds` are those of the simulation.

With many clients, most of SecAgg's time goes into Shamir's shares: n^2 t steps in Python, whatever
the length of the vectors. SecAgg+ takes a tenth of that time; results/secure/sums.md has numbers.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from dpjax import validate
from dpjax.secure.sums import dialogue, primitives, secagg_client, secagg_server
from dpjax.secure.sums.interface import Present, Reader, Summed, SumProtocol
from dpjax.secure.sums.secagg_costs import going_on, predict_cost
from dpjax.secure.sums.terms import Terms, graph_parameters, largest_part


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Masked(SumProtocol):
  """What SecAgg and SecAgg+ have in common."""

  simulated: bool = False

  @property
  def name(self) -> str:
    return f"simulated {self._name}" if self.simulated else self._name

  @property
  def is_simulated(self) -> bool:
    return self.simulated

  def check_library(self) -> None:
    if not self.simulated:
      primitives.library()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecAgg(_Masked):
  """SecAgg of Bonawitz et al. 2017; the threshold t of shares is `min_survivors`.

  Clients may drop out at any time. The sum of those who uploaded is exact if t clients stay
  until the end; with fewer it is refused. The server may collude with t - 1 clients. A server may
  also lie about survivors. Without colluders it still opens no single vector if t is above half of
  the clients, and if it hands out the right keys.

  Args:
    simulated: True: vectors are added in the clear (see the module).
    signed: True: keys and survivors are signed and compared (figure 4, underlined parts). This is
      for a server that lies together with fewer than 2t - n clients. `sum` requires t > 2n / 3.

  Raises:
    UserError: as `SumProtocol`.

  >>> from dpjax.secure.sums import Drops
  >>> vectors = {who: np.array([who, 2**32 - 1], np.uint32) for who in range(4)}
  >>> summed = SecAgg(min_survivors=3).sum(vectors, Drops(before_upload=frozenset({1})))
  >>> summed.total, summed.survivors
  (array([         5, 4294967293], dtype=uint32), (0, 2, 3))
  """

  signed: bool = False

  _name: ClassVar[str] = "secagg"
  hides: ClassVar[str] = "each vector from the server and fewer than min_survivors clients"

  def terms(self, clients: Sequence[int], length: int) -> Terms:
    """Returns the terms of a new sum, without a directory of signing keys."""
    return Terms(
      session=secrets.token_bytes(16),
      clients=tuple(clients),
      threshold=self.min_survivors,
      min_survivors=self.min_survivors,
      length=length,
      bits=self.bits,
    )

  def check_clients(self, num_clients: int) -> None:
    if self.signed:
      # More than two thirds, as `Terms` with a directory require.
      least = 2 * num_clients // 3 + 1
      validate.integer_in(least, num_clients, min_survivors=self.min_survivors)

  def _add(self, there: Present, read: Reader) -> Summed:
    self.check_clients(len(there.named))
    terms = self.terms(there.named, read.length)
    if self.simulated:
      return simulate(terms, there, read, signed=self.signed)
    keys: dict[int, bytes] = {}
    if self.signed:
      keys = {who: secrets.token_bytes(32) for who in there.named}
      directory = tuple(primitives.signing_public_key(key) for key in keys.values())
      terms = dataclasses.replace(terms, directory=directory)
    return run(terms, there, read, keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecAggPlus(_Masked):
  """SecAgg+ of Bell et al. 2020: masks and shares among O(log n) neighbours
  (`terms.graph_parameters`).

  Server and clients are honest-but-curious. With more corrupt clients than stated, the server may
  learn the sum of a part of the clients. With more silent clients than stated, the sum is refused,
  since it could reveal the sum of a part, too. For a small cohort no sparse graph is safe. The
  graph is then complete, and this is SecAgg.

  Args:
    simulated: True: vectors are added in the clear (see the module).
    corrupt: largest fraction of the clients that tell the server all they know.
    dropout_share: largest fraction of the clients that falls silent.

  Raises:
    UserError: as `SumProtocol`, or fractions outside [0, 1).
  """

  corrupt: float = 0.1
  dropout_share: float = 0.2

  def __post_init__(self) -> None:
    super().__post_init__()
    validate.share(corrupt=self.corrupt, dropout_share=self.dropout_share)

  _name: ClassVar[str] = "secagg_plus"
  hides: ClassVar[str] = "each vector from the server and a fraction of the clients"

  def terms(self, clients: Sequence[int], length: int) -> Terms:
    """Returns the terms of a new sum with a random session, which determines the neighbours."""
    count = len(clients)
    degree, threshold = graph_parameters(
      count, corrupt=self.corrupt, dropout=self.dropout_share
    )
    staying = count - largest_part(self.dropout_share, count)
    return Terms(
      session=secrets.token_bytes(16),
      clients=tuple(clients),
      threshold=threshold,
      # With more drop-outs than stated the graph may be disconnected, so the sum is refused.
      min_survivors=max(self.min_survivors, staying),
      length=length,
      bits=self.bits,
      degree=degree,
    )

  def check_clients(self, num_clients: int) -> None:
    self.terms(range(num_clients), length=1)

  def most_silent(self, num_clients: int) -> int:
    return num_clients - self.terms(range(num_clients), length=1).fewest

  def _add(self, there: Present, read: Reader) -> Summed:
    terms = self.terms(there.named, read.length)
    return (simulate if self.simulated else run)(terms, there, read)


def simulate(terms: Terms, there: Present, read: Reader, *, signed: bool = False) -> Summed:
  """Returns a sum on given terms, and its cost by formula. Vectors are added in the clear."""
  there = going_on(terms, there)
  total = np.zeros(read.length, f"uint{terms.bits}")
  for who in there.uploading:
    total += read(who)
  # With a directory the threshold is checked and messages are longer. No signature is made.
  if signed:
    terms = dataclasses.replace(terms, directory=(bytes(32),) * len(terms.clients))
  return Summed(total, there.uploading, predict_cost(terms, there))


def run(
  terms: Terms,
  there: Present,
  read: Callable[[int], np.ndarray],
  signing_keys: Mapping[int, bytes] | None = None,
) -> Summed:
  """Runs one sum on given terms, with all parties in this process (`dialogue.run`).

  Args:
    signing_keys: Ed25519 private keys by client, if the terms have a directory.
  """
  clients = {
    who: secagg_client.start(terms, who, signing_key=(signing_keys or {}).get(who))
    for who in terms.clients
  }
  return dialogue.run(secagg_server.start(terms), clients, there, read)

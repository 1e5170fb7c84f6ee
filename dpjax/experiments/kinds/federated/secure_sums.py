"""The secure sum of a federated run: its protocol, encoding and report."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax

from dpjax import secure, validate
from dpjax.secure import sums
from dpjax.secure.encoding import BITS
from dpjax.secure.sums.galois_shares import Sharing
from dpjax.secure.sums.interface import SumProtocol
from dpjax.secure.sums.simulated import Simulated
from dpjax.secure.sums.terms import largest_part
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class NoSecureSum:
  """The server sees every message."""


@dataclasses.dataclass(frozen=True)
class SharesAmongClients:
  """`secure.sums.AdditiveSharing`: the server gets only the sum of the messages. No client may drop
  out between sharing and upload.

  Args:
    bits: bits of each integer of the sum; the protocol may use more.
    largest_value: coordinates of messages are clipped to this absolute value.
    threshold: smallest number of clients in a sum, as a share of `clients_per_round`; at least two
      clients. A round with fewer clients is refused, and changes nothing.
    simulated: whether integers are added without a protocol. This is fast, and hides nothing from
      whoever runs it. False: the protocol runs in every round, with its cryptography.
  """

  bits: int = 32
  largest_value: float = 8.0
  threshold: float = 0.5
  simulated: bool = True
  kind: ClassVar[str] = "additive_sharing"
  dropout_prob: ClassVar[float] = 0.0

  def __post_init__(self):
    validate.integer_in(*BITS, bits=self.bits)
    validate.positive(largest_value=self.largest_value)
    validate.probability(threshold=self.threshold)
    validate.share(dropout_prob=self.dropout_prob)

  def min_survivors(self, clients_per_round: float) -> int:
    """Returns the smallest number of clients that a sum may have; at least 2.

    >>> PairwiseMasks(threshold=0.5).min_survivors(9), PairwiseMasks().min_survivors(1)
    (5, 2)
    """
    # A sum over one client would show the message of that client.
    return max(2, math.ceil(self.threshold * clients_per_round))

  def settings(self) -> dict[str, Any]:
    """Returns arguments of the protocol that other protocols do not have; here none."""
    return {}

  def protocol(self, clients_per_round: float) -> SumProtocol:
    """Returns the protocol that adds the vectors, or a simulation of it if `simulated`."""
    least = self.min_survivors(clients_per_round)
    protocol = sums.by_name(self.kind, min_survivors=least, **self.settings())
    if not self.simulated:
      return protocol
    # Masks cancel in the sum, so adding in the clear gives the same integers.
    masked = isinstance(protocol, (sums.SecAgg, sums.SecAggPlus))
    return Simulated(protocol) if masked else sums.PlainSum(min_survivors=least)

  def check_cohort(self, clients_per_round: float) -> None:
    """Does nothing here. Subclasses raise UserError if too few clients are in a round."""

  def dropout(self, seed: int) -> secure.Dropout:
    """Returns the simulation that decides which clients drop out of a round."""
    return secure.Dropout(prob=self.dropout_prob, seed=seed)


@dataclasses.dataclass(frozen=True)
class PairwiseMasks(SharesAmongClients):
  """`secure.sums.SecAgg`. Masks of pairs of clients cancel in the sum.

  Args:
    dropout_prob: chance that a client drops out in a round. Who drops out is public: it follows
      from the seed.
  """

  dropout_prob: float = 0.0  # type: ignore[misc]  # a field here
  kind: ClassVar[str] = "secagg"


@dataclasses.dataclass(frozen=True)
class SharesForServers(PairwiseMasks):
  """`secure.sums.AdditiveServers`: two servers that do not collude."""

  kind: ClassVar[str] = "additive_servers"


@dataclasses.dataclass(frozen=True)
class SharesForCommittee(PairwiseMasks):
  """`secure.sums.Committee`: some clients of each round add up the shares of the other clients.

  In a simulated committee any number of members may fall silent. With `simulated=false`, a round
  with too few members left is refused, and changes nothing.

  Args:
    num_members: number of members of the committee, drawn from the clients of each round.
    colluding: number of members who may tell the server all they know.
    packed: number of secrets in one polynomial; shares are that many times shorter.
  """

  num_members: int = 5
  colluding: int = 2
  packed: int = 1
  kind: ClassVar[str] = "committee"

  def __post_init__(self):
    super().__post_init__()
    Sharing(num_members=self.num_members, colluding=self.colluding, packed=self.packed)

  def min_survivors(self, clients_per_round: float) -> int:
    """Returns the smallest number of clients that a sum may have; at least `num_members`."""
    return max(self.num_members, super().min_survivors(clients_per_round))

  def settings(self) -> dict[str, Any]:
    """Returns arguments of the protocol that other protocols do not have."""
    return {
      "num_members": self.num_members,
      "colluding": self.colluding,
      "packed": self.packed,
    }

  def check_cohort(self, clients_per_round: float) -> None:
    """Raises UserError if a round has fewer clients than the committee has members."""
    if self.num_members > clients_per_round:
      raise UserError(
        f"must be <= clients_per_round={clients_per_round!r}, who are its members",
        field="secure_sum.num_members",
        value=self.num_members,
      )


@dataclasses.dataclass(frozen=True)
class SparseMasks(PairwiseMasks):
  """`secure.sums.SecAggPlus`. Masks of neighbours in a sparse graph of clients cancel in the sum.

  Args:
    corrupt: largest fraction of corrupt clients that the graph of masks is made for.
    dropout_share: largest fraction of dropouts that the graph of masks is made for.
  """

  corrupt: float = 0.1
  dropout_share: float = 0.2
  kind: ClassVar[str] = "secagg_plus"

  def __post_init__(self):
    super().__post_init__()
    validate.share(corrupt=self.corrupt, dropout_share=self.dropout_share)

  def settings(self) -> dict[str, Any]:
    """Returns arguments of the protocol that other protocols do not have."""
    return {"corrupt": self.corrupt, "dropout": self.dropout_share}

  def check_cohort(self, clients_per_round: float) -> None:
    """Raises UserError if corrupt clients and dropouts leave fewer than two honest clients."""
    most = int(clients_per_round)
    bad, gone = (largest_part(f, most) for f in (self.corrupt, self.dropout_share))
    if bad + gone > most - 2:
      raise UserError(
        f"with secure_sum.dropout_share={self.dropout_share!r} fewer than two of "
        f"clients_per_round={clients_per_round!r} are honest and there",
        field="secure_sum.corrupt",
        value=self.corrupt,
      )


@dataclasses.dataclass(frozen=True)
class SharedKey(PairwiseMasks):
  """`secure.sums.BfvSum`: ciphertexts under one key of all clients; the server must not collude
  with any client."""

  kind: ClassVar[str] = "bfv"


SECURE_SUMS: dict[str, type] = {
  "none": NoSecureSum,
  "additive_sharing": SharesAmongClients,
  "additive_servers": SharesForServers,
  "committee": SharesForCommittee,
  "secagg": PairwiseMasks,
  "secagg_plus": SparseMasks,
  "bfv": SharedKey,
}


def facts(chosen: Any, name: str, clients_per_round: float) -> dict[str, Any]:
  """Returns the part of result.json on the secure sum; {} without a secure sum."""
  if isinstance(chosen, NoSecureSum):
    return {}
  fields = dataclasses.asdict(chosen)
  least = chosen.min_survivors(clients_per_round)
  return {"secure_sum": {"protocol": name, **fields, "min_survivors": least}}


def in_words(result: dict[str, Any]) -> str:
  """Returns words on the secure sum of a result, for its printed line; "" without a secure sum.

  >>> in_words({"secure_sum": {"protocol": "secagg", "simulated": True}})
  ', secure sum secagg (SIMULATED: added in the clear)'
  """
  sums_facts = result.get("secure_sum")
  if sums_facts is None:
    return ""
  how = "SIMULATED: added in the clear" if sums_facts["simulated"] else "its protocol ran"
  return f", secure sum {sums_facts['protocol']} ({how})"


def check(chosen: SharesAmongClients, clients: float) -> None:
  """Raises UserError if the clients or the processes of a run do not fit its secure sum.

  Args:
    clients: `clients_per_round`.
  """
  if clients < 2:
    raise UserError(
      "must be >= 2 with a secure_sum: the sum over one client is its message",
      field="clients_per_round",
      value=clients,
    )
  if not chosen.simulated and jax.process_count() > 1:
    raise UserError(
      f"must be run by one process, not {jax.process_count()}: each would draw "
      "masks of its own",
      field="secure_sum.simulated",
      value=False,
    )
  chosen.check_cohort(clients)

"""The secure sum of a federated run: its protocol, encoding and report."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Annotated, Any, ClassVar

import jax

from dpjax import secure
from dpjax.experiments.config import rules
from dpjax.experiments.config.naming import within
from dpjax.secure import sums
from dpjax.secure.encoding import BITS
from dpjax.secure.sums.interface import SumProtocol
from dpjax.secure.sums.protocols import PROTOCOLS
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class NoSecureSum:
  """The server sees every message."""


@dataclasses.dataclass(frozen=True)
class SecureSum(rules.Checked):
  """A sum of which the server sees the result alone. Subclasses add a protocol's own numbers."""

  bits: Annotated[
    int, rules.between(*BITS), "of each integer of the sum; the protocol may use more"
  ] = 32
  largest_value: Annotated[
    float, rules.POSITIVE, "coordinates of messages are clipped to this absolute value"
  ] = 8.0
  threshold: Annotated[
    float,
    rules.PROBABILITY,
    "smallest number of clients in a sum, as a share of clients_per_round; two at least; a round "
    "with fewer is refused, and changes nothing",
  ] = 0.5
  dropout_prob: Annotated[
    float, rules.SHARE, "chance that a client drops out in a round; who does is public"
  ] = 0.0
  simulated: Annotated[
    bool,
    "integers are added without a protocol: fast, and hides nothing from whoever runs it; no "
    "member of a committee is lost; false: the protocol runs in every round",
  ] = True
  of: ClassVar[type[SumProtocol]]  # the protocol

  def __post_init__(self):
    super().__post_init__()
    self.of.check_dropouts(dropout_prob=self.dropout_prob)
    self._protocol()

  def _protocol(self, **settings: int) -> SumProtocol:
    """Returns the protocol with its own numbers."""
    own = {field.name: getattr(self, field.name) for field in _own_fields(self.of)}
    return self.of(**own, **settings)

  def min_survivors(self, clients_per_round: float) -> int:
    """Returns the smallest number of clients that a sum may have; at least 2.

    >>> chosen = SECURE_SUMS["secagg"](threshold=0.5)
    >>> chosen.min_survivors(9), chosen.min_survivors(1)
    (5, 2)
    """
    # A sum over one client would show the message of that client.
    return max(self._protocol().min_clients, math.ceil(self.threshold * clients_per_round))

  def protocol(self, clients_per_round: float) -> SumProtocol:
    """Returns the protocol that adds the vectors, or a simulation of it if `simulated`."""
    least = self.min_survivors(clients_per_round)
    if not self.simulated:
      return self._protocol(min_survivors=least)
    # Masks cancel in the sum, so adding in the clear gives the same integers.
    if issubclass(self.of, sums.SecAgg | sums.SecAggPlus):
      return self._protocol(min_survivors=least, simulated=True)
    return sums.PlainSum(min_survivors=least)

  def check_cohort(self, clients_per_round: float) -> None:
    """Raises UserError if the protocol has no sum of so many clients."""
    with within("secure_sum"):
      self._protocol().check_clients(int(clients_per_round))

  def dropout(self, seed: int) -> secure.Dropout:
    """Returns the simulation that decides which clients drop out of a round."""
    return secure.Dropout(prob=self.dropout_prob, seed=seed)

  def __reduce__(self) -> Any:
    # Pickle finds no class of `_section` by its name.
    (name,) = (name for name, kind in SECURE_SUMS.items() if kind is type(self))
    return _again, (name, dataclasses.asdict(self))


def _own_fields(protocol: type[SumProtocol]) -> list[dataclasses.Field[Any]]:
  """Returns the fields of a protocol that a federated run does not decide by itself."""
  # In a run that simulates all clients nobody could verify a signature for anybody else.
  decided = {field.name for field in dataclasses.fields(SumProtocol)}
  decided |= {"signed", "simulated"}
  return [field for field in dataclasses.fields(protocol) if field.name not in decided]


def _section(protocol: type[SumProtocol]) -> type:
  """Returns the `SecureSum` by a protocol, with the protocol's own fields."""
  hints = typing.get_type_hints(protocol)
  own = [
    (field.name, hints[field.name], dataclasses.field(default=field.default))
    for field in _own_fields(protocol)
  ]
  namespace = {"of": protocol, "__doc__": protocol.__doc__, "__module__": __name__}
  return dataclasses.make_dataclass(
    protocol.__name__, own, bases=(SecureSum,), namespace=namespace, frozen=True
  )


def _again(name: str, values: dict[str, Any]) -> SecureSum:
  return SECURE_SUMS[name](**values)


SECURE_SUMS: dict[str, type] = {"none": NoSecureSum} | {
  name: _section(kind) for name, kind in PROTOCOLS.items() if kind is not sums.PlainSum
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


def check(chosen: SecureSum, clients: float) -> None:
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

"""Runs secure sums: a protocol adds clients' random integers, compared with the plain sum."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Annotated, Any

import numpy as np

from dpjax import validate
from dpjax.experiments.config import rules
from dpjax.experiments.config.choices import Choice, to_dict
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.secure.task import Computed, Measuring, SecureTask, once
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.secure import sums
from dpjax.secure.sums import Drops, PlainSum, interface, protocols
from dpjax.secure.sums.homomorphic_sums import CkksSum
from dpjax.secure.sums.interface import LazyVectors
from dpjax.validate import UserError

PROTOCOLS = {**protocols.PROTOCOLS, "ckks": CkksSum}  # the last adds fractions


def clients_vectors(task: SumTask, seed: int) -> LazyVectors:
  """Returns the clients' vectors. They are drawn on request, so that memory does not grow with the
  number of clients."""

  def draw(who: int) -> np.ndarray:
    # Each client has its own generator, so that any vector can be drawn again alone.
    drawn = np.random.default_rng([seed, who])
    numbers = drawn.integers(0, 2**task.entry_bits, task.length, dtype=np.uint64)
    dtype = task.protocol.dtype
    # CKKS adds fractions in [0, 1).
    return numbers / 2.0**task.entry_bits if dtype.kind == "f" else numbers.astype(dtype)

  return LazyVectors(range(task.num_clients), draw)


def _error(total: np.ndarray, wanted: Any) -> float:
  """Returns the largest error of an entry of the sum. Between integers modulo 2^bits, the error is
  the shorter of two distances."""
  want = np.asarray(wanted, total.dtype)
  if total.dtype.kind == "f":
    return float(np.abs(total - want).max())
  # One of the two unsigned differences is the distance. The other difference wraps around.
  return float(np.minimum(total - want, want - total).max())


@dataclasses.dataclass(frozen=True)
class SumTask(SecureTask):
  """Clients' random integers (fractions with CKKS), added by `protocol`."""

  protocol: Annotated[interface.SumProtocol, Choice(PROTOCOLS), "who adds the vectors"] = (
    dataclasses.field(default_factory=sums.SecAgg, kw_only=True)
  )

  num_clients: Annotated[int, rules.between(2, interface.MOST_CLIENTS), "a vector each"] = (
    10
  )
  length: Annotated[
    int, rules.between(1, interface.MOST_ENTRIES), "entries of a vector"
  ] = 1000
  entry_bits: Annotated[int, rules.between(1, 63), "entries are below 2^entry_bits"] = 20
  silent: Annotated[int, "clients who fall silent once they have shared their keys"] = 0

  def __post_init__(self):
    super().__post_init__()
    validate.integer_in(0, self.num_clients - 1, silent=self.silent)

  def check_library(self) -> None:
    self.protocol.check_library()

  def check(self) -> None:
    bits = self.protocol.bits
    if self.entry_bits > bits:
      raise UserError(
        f"must be at most {bits}, as task.protocol.bits={bits}",
        field="task.entry_bits",
        value=self.entry_bits,
      )
    least = self.protocol.min_survivors
    if least > self.num_clients:
      raise UserError(
        f"must be at most {self.num_clients}, as task.num_clients={self.num_clients}",
        field="task.protocol.min_survivors",
        value=least,
      )
    with within("task.protocol"):
      self.protocol.check_clients(self.num_clients)
    with within("task"):
      self.protocol.check_dropouts(silent=self.silent)
      most = self.protocol.most_silent(self.num_clients)
      validate.integer_in(0, most, silent=self.silent)

  def load(self) -> str:
    """Returns a description of the random vectors, since a sum reads no data."""
    held = to_dict(self)
    return repr({name: value for name, value in held.items() if name != "protocol"})

  def digest(self, loaded: str) -> bytes:
    """Returns the digest of the description from `load`. It does not cover the seed."""
    return hashlib.sha256(f"dpjax drawn {loaded}".encode()).digest()

  def execute(self, loaded: str, random: RunKeys, seed: int) -> Measuring:
    """Returns the outcome of a single secure sum: its total, its costs and its error. The last
    `task.silent` clients drop out."""
    del loaded, seed
    vectors = clients_vectors(self, random.order)
    staying = range(self.num_clients - self.silent)
    drops = Drops(before_upload=frozenset(range(len(staying), self.num_clients)))
    dtype = vectors[0].dtype
    like = {
      "total": np.zeros(self.length, dtype),
      "cost": np.zeros(4, np.int64),
      "seconds": np.zeros(1),
      "survivors": np.zeros(1, np.int64),
    }

    def add() -> Arrays:
      try:
        summed = self.protocol.sum(vectors, drops)
      except UserError as error:
        # Without them the same sum may be allowed, and no other field says who drops out.
        if not self.silent:
          raise
        raise UserError(str(error), field="task.silent", value=self.silent) from error
      return {
        "total": np.asarray(summed.total),
        "cost": np.array(summed.cost[:4], np.int64),
        "seconds": np.array([summed.cost.seconds]),
        "survivors": np.array([len(summed.survivors)], np.int64),
      }

    summed = yield once(add, like, "sums")
    state = {name: np.asarray(value) for name, value in summed.state.items()}
    error = _error(state["total"], sum(vectors[who] for who in staying))
    client, server, expansions, operations = (int(n) for n in state["cost"])
    silent = f", {self.silent} silent" if self.silent else ""
    return Computed(
      protocol=self.protocol.name,
      sizes=f"{self.num_clients} clients x {self.length} entries{silent}",
      seconds=float(state["seconds"][0]),
      # The bytes are halved, since a message counts at both ends. The result is an upper bound,
      # since `client` is the largest number of bytes of a client.
      num_bytes=(self.num_clients * client + server) // 2,
      error=error,
      error_is="largest, of an entry of the sum",
      found=f"sum of {state['survivors'][0]} vectors",
      hides=(PlainSum if self.protocol.is_simulated else self.protocol).hides,
      num_steps=1,
      params={"total": state["total"]},
      more={
        "client_bytes": client,
        "server_bytes": server,
        "mask_expansions": expansions,
        "public_key_operations": operations,
        "num_clients": self.num_clients,
        "num_survivors": int(state["survivors"][0]),
      },
    )

"""Runs secure sums: a protocol adds clients' random integers, compared with the plain sum."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from dpjax.experiments.config.choices import to_dict
from dpjax.experiments.kinds.secure.build import Computed, Measuring, once
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.secure.sums import Drops, PlainSum
from dpjax.secure.sums.interface import LazyVectors
from dpjax.validate import UserError


def clients_vectors(config: SecureConfig, seed: int) -> LazyVectors:
  """Returns the clients' vectors. They are drawn on request, so that memory does not grow with the
  number of clients."""
  task = config.task

  def draw(who: int) -> np.ndarray:
    # Each client has its own generator, so that any vector can be drawn again alone.
    drawn = np.random.default_rng([seed, who])
    numbers = drawn.integers(0, 2**task.entry_bits, task.length, dtype=np.uint64)
    dtype = task.protocol.dtype
    # CKKS adds fractions in [0, 1).
    return numbers / 2.0**task.entry_bits if dtype.kind == "f" else numbers.astype(dtype)

  return LazyVectors(range(task.num_clients), draw)


def load_data(config: SecureConfig) -> str:
  """Returns a description of the random vectors, since a sum reads no data."""
  held = to_dict(config.task)
  return repr({name: value for name, value in held.items() if name != "protocol"})


def data_digest(loaded: str) -> bytes:
  """Returns the digest of the description from `load_data`. It does not cover the seed."""
  return hashlib.sha256(f"dpjax drawn {loaded}".encode()).digest()


def execute(config: SecureConfig, loaded: str, random: RunKeys) -> Measuring:
  """Returns the outcome of a single secure sum: its total, its costs and its error. The last
  `task.silent` clients drop out."""
  del loaded
  task = config.task
  vectors = clients_vectors(config, random.order)
  staying = range(task.num_clients - task.silent)
  drops = Drops(before_upload=frozenset(range(len(staying), task.num_clients)))
  dtype = vectors[0].dtype
  like = {
    "total": np.zeros(task.length, dtype),
    "cost": np.zeros(4, np.int64),
    "seconds": np.zeros(1),
    "survivors": np.zeros(1, np.int64),
  }

  def add() -> Arrays:
    try:
      summed = task.protocol.sum(vectors, drops)
    except UserError as error:
      # Without them the same sum may be allowed, and no other field says who drops out.
      if not task.silent:
        raise
      raise UserError(str(error), field="task.silent", value=task.silent) from error
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
  silent = f", {task.silent} silent" if task.silent else ""
  return Computed(
    protocol=task.protocol.name,
    sizes=f"{task.num_clients} clients x {task.length} entries{silent}",
    seconds=float(state["seconds"][0]),
    # The bytes are halved, since a message counts at both ends. The result is an upper bound, since
    # `client` is the largest number of bytes of a client.
    num_bytes=(task.num_clients * client + server) // 2,
    error=error,
    error_is="largest, of an entry of the sum",
    found=f"sum of {state['survivors'][0]} vectors",
    hides=(PlainSum if task.protocol.is_simulated else task.protocol).hides,
    num_steps=1,
    params={"total": state["total"]},
    more={
      "client_bytes": client,
      "server_bytes": server,
      "mask_expansions": expansions,
      "public_key_operations": operations,
      "num_clients": task.num_clients,
      "num_survivors": int(state["survivors"][0]),
    },
  )


def _error(total: np.ndarray, wanted: Any) -> float:
  """Returns the largest error of an entry of the sum. Between integers modulo 2^bits, the error is
  the shorter of two distances."""
  want = np.asarray(wanted, total.dtype)
  if total.dtype.kind == "f":
    return float(np.abs(total - want).max())
  # One of the two unsigned differences is the distance. The other difference wraps around.
  return float(np.minimum(total - want, want - total).max())

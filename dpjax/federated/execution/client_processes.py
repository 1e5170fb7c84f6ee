"""A cohort divided among the processes of JAX's multi-process runtime, on one or many machines.

Each process runs its share of the cohort with an execution of its own (`loop`, `vmap`, or
`shard_map` or `pmap` over its own devices). The partial sums are added over the processes once.
Every process computes everything else from equal inputs: who takes part, each client's key, the
noise and the server's optimizer. All processes draw the same noise from one key and add it to the
same sum, so it counts once. All processes hold equal parameters after each round. A run checks
this with `parallel.exchanges.same` where it saves them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from dpjax.federated.cohort import Cohort, bucket, pad
from dpjax.federated.execution.context import (
  Context,
  MapClients,
  Mapped,
  Remembered,
  Run,
  pad_memories,
)
from dpjax.parallel.exchanges import exchange


def deal(num_examples: np.ndarray, num_processes: int) -> list[np.ndarray]:
  """Deals the places of a cohort to processes in turn, clients with the most examples first.

  >>> [places.tolist() for places in deal(np.array([1, 9, 5, 7, 0]), 2)]
  [[1, 2, 4], [0, 3]]
  """
  # Clients are dealt from the largest to the smallest, so that processes have nearly equal work.
  order = np.argsort(-np.asarray(num_examples), kind="stable")
  return [np.sort(order[i::num_processes]) for i in range(num_processes)]


def _in_one(parts: tuple[Remembered, ...], like: Any, size: int) -> Any:
  """Merges the client states of a share by place into one tree, with leaves [size, ...].

  `like` has leaves of the same shapes behind the first axis.
  """
  whole = jax.tree.map(
    lambda leaf: np.zeros((size, *leaf.shape[1:]), leaf.dtype), jax.device_get(like)
  )
  for part in parts:
    for into, rows in zip(jax.tree.leaves(whole), jax.tree.leaves(part.memories)):
      into[part.places[part.mask]] = np.asarray(rows)[part.mask]
  return whole


def _run_share(of_silos: bool, run: Run, context: Context, cohort: Cohort) -> Mapped:
  """Runs this process's share of the cohort, and combines the results of all."""
  if jax.process_count() == 1:
    return run(context, cohort)
  shares = deal(cohort.num_examples, jax.process_count())
  mine = shares[jax.process_index()]
  # All processes exchange arrays of one shape. The first share has the most clients.
  size = max(1, bucket(len(shares[0])))
  held = pad(jax.tree.map(lambda leaf: np.asarray(leaf)[mine], context.memories), size)
  share = cohort._replace(
    ids=np.asarray(cohort.ids)[mine],
    num_examples=np.asarray(cohort.num_examples)[mine],
    batches=[cohort.batches[place] for place in mine],
  )
  mapped = run(context._replace(memories=held), share)
  sent, info = pad((mapped.sent, mapped.info), size)
  # A silo's client state comes with the numbers of its noise, and is returned without.
  kept = _in_one(mapped.memories, held[0] if of_silos else held, size)
  sums, gathered = exchange(mapped.sums, (sent, kept, info))
  back = np.argsort(np.concatenate(shares))

  def in_order(leaf: np.ndarray) -> np.ndarray:  # [P, size, ...] -> [C, ...]
    rows = [leaf[i, : len(places)] for i, places in enumerate(shares)]
    return np.concatenate(rows)[back]

  sent, memories, info = jax.tree.map(in_order, gathered)
  return Mapped(sums, sent, pad_memories(memories, cohort.size), info)


def process_clients(inner: MapClients) -> MapClients:
  """Runs each process's share of the cohort with `inner`, and adds the sums once.

  Args:
    inner: the execution within a process: `loop_clients()`, `vmap_clients()`,
      `shard_map_clients()` or `pmap_clients()` over the process's own devices.

  Every process must hold the same state and call `round` with the same cohort, even an empty one.
  A process without a client adds zero. Clients' infos and the state that they keep (SCAFFOLD) are
  gathered in the order of the cohort. So are their messages, if the aggregator needs all of them.
  The result is that of one process, up to the order of the sum. With one process it is `inner`
  itself.

  Raises:
    PeerLost: another process is gone (raised by `round`).
  """
  return lambda client, partial: functools.partial(
    _run_share, client.silos is not None, inner(client, partial)
  )

"""A cohort spread over the processes of JAX's multi-process runtime, on one machine or many.

Each process runs its share of the cohort with an execution of its own (`loop`, `vmap`, `shard_map`
over its own devices); the partial sums are added over the processes once. Everything else
is computed by every process from equal inputs: who takes part, each client's key, the noise
(drawn from the one key that all hold, so added once, as everywhere), the server's optimizer.
So all processes hold equal parameters after each round, which `same` checks.

All exchange between processes is in this file, on one mesh of one device per process. Every
process must make the same calls in the same order; where one is gone, the others get
`PeerLost`. `meeting` is how processes find each other.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax.federated.cohort import Cohort, bucket, padded
from dpjax.federated.execution import (
  Context,
  MapClients,
  Mapped,
  Remembered,
  Run,
  all_remembered,
)
from dpjax.types import ArrayTree
from dpjax.validate import UserError

_AXIS = "processes"


class PeerLost(Exception):
  """Another process is gone, or cannot be reached; this one cannot go on alone."""


def is_first() -> bool:
  """Whether this process is the one that writes."""
  return jax.process_index() == 0


# --- what goes between processes


@functools.cache
def _sharding(spread: bool) -> NamedSharding:
  """Over one device of each process: one row each, or everything on all."""
  of = lambda index: next(d for d in jax.devices() if d.process_index == index)
  mesh = Mesh(np.array([of(index) for index in range(jax.process_count())]), (_AXIS,))
  return NamedSharding(mesh, PartitionSpec(_AXIS) if spread else PartitionSpec())


@functools.cache
def _program() -> Any:
  add = lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype)
  combine = lambda added, gathered: (jax.tree.map(add, added), gathered)
  return jax.jit(combine, out_shardings=_sharding(False))


def _spread(leaf: Any) -> jax.Array:
  row = np.asarray(leaf)[None]
  shape = (jax.process_count(), *row.shape[1:])
  return jax.make_array_from_process_local_data(_sharding(True), row, shape)


def exchange(added: ArrayTree, gathered: ArrayTree) -> tuple[Any, Any]:
  """(the sum of `added` over processes, `gathered` with a leading axis of processes).

  Leaves are NumPy arrays, of the same shapes and dtypes in every process; the results are
  too, and are the same in every process.

  Raises:
    PeerLost: a process did not take part.
  """
  spread = jax.tree.map(_spread, (added, gathered))
  try:
    whole = _program()(*spread)
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), whole)
  except (ValueError, jax.errors.JaxRuntimeError) as error:  # what gloo and NCCL end in
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    raise PeerLost(reason) from error


def largest(number: int) -> int:
  """The largest of the processes' numbers, in all of them."""
  if jax.process_count() == 1:
    return number
  return int(np.max(exchange((), np.int32(number))[1]))


def same(**named: str) -> None:
  """Raises UserError in all processes unless all give the same texts.

  >>> same(config="learning_rate=0.1")
  """
  if jax.process_count() == 1:
    return
  digest = lambda text: np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
  _, rows = exchange((), [digest(text) for text in named.values()])
  for name, found in zip(named, rows):
    odd = [i for i, row in enumerate(found) if np.any(row != found[0])]
    if odd:
      raise UserError(
        f"{name}: differs between process 0 and process {odd[0]}; all processes need the "
        "same command, data, software and kind of device"
      )


def _from_first(data: bytes) -> bytes:
  """The bytes of process 0 in all processes; what others give is ignored."""
  length = int(exchange((), np.int32(len(data)))[1][0])
  row = np.zeros(bucket(length), np.uint8)
  if is_first():
    row[:length] = np.frombuffer(data, np.uint8)
  return exchange(row, ())[0].tobytes()[:length]


def on_first(call: Callable[[], Any]) -> Any:
  """`call()` in process 0 alone; its result, JSON data, in all processes.

  A UserError or OSError of the call is raised in process 0 and, as a UserError of the same
  text, in the others.

  >>> on_first(lambda: {"epsilon": 2.0})
  {'epsilon': 2.0}
  """
  if jax.process_count() == 1:
    return call()
  if not is_first():
    answer = json.loads(_from_first(b""))
    if "error" in answer:
      raise UserError(answer["error"])
    return answer["result"]
  try:
    result = call()
  except (UserError, OSError) as error:
    _from_first(json.dumps({"error": str(error)}).encode())
    raise
  _from_first(json.dumps({"result": result}, default=lambda x: x.item()).encode())
  return result


def arrays_from_first(tree: ArrayTree) -> Any:
  """The arrays of process 0, bit for bit, in all processes.

  Args:
    tree: arrays of the same shapes and dtypes in every process; keys as `key_data`.
  """
  if jax.process_count() == 1:
    return tree
  bits = lambda leaf: np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
  mine = jax.tree.map(
    lambda leaf: bits(leaf) if is_first() else np.zeros_like(bits(leaf)), tree
  )
  return jax.tree.map(
    lambda leaf, row: row.view(np.asarray(leaf).dtype).reshape(np.shape(leaf)),
    tree,
    exchange(mine, ())[0],
  )


# --- a cohort over processes


def deal(num_examples: np.ndarray, num_processes: int) -> list[np.ndarray]:
  """Places of the cohort for each process: those with the most examples are dealt first.

  >>> [places.tolist() for places in deal(np.array([1, 9, 5, 7, 0]), 2)]
  [[1, 2, 4], [0, 3]]
  """
  order = np.argsort(-np.asarray(num_examples), kind="stable")
  return [np.sort(order[i::num_processes]) for i in range(num_processes)]


def _in_one(parts: tuple[Remembered, ...], like: Any, size: int) -> Any:
  """What a share keeps, by place, leaves [size, ...]; `like`: leaves [any, ...]."""
  whole = jax.tree.map(
    lambda leaf: np.zeros((size, *leaf.shape[1:]), leaf.dtype), jax.device_get(like)
  )
  for part in parts:
    for into, rows in zip(jax.tree.leaves(whole), jax.tree.leaves(part.memories)):
      into[part.places[part.mask]] = np.asarray(rows)[part.mask]
  return whole


def _run_share(run: Run, context: Context, cohort: Cohort) -> Mapped:
  """`run` on this process's share of the cohort, and what all of them found."""
  if jax.process_count() == 1:
    return run(context, cohort)
  shares = deal(cohort.num_examples, jax.process_count())
  mine = shares[jax.process_index()]
  size = max(1, bucket(len(shares[0])))  # the first is the longest
  held = padded(jax.tree.map(lambda leaf: np.asarray(leaf)[mine], context.memories), size)
  share = cohort._replace(
    ids=np.asarray(cohort.ids)[mine],
    num_examples=np.asarray(cohort.num_examples)[mine],
    batches=[cohort.batches[place] for place in mine],
  )
  mapped = run(context._replace(memories=held), share)
  sent, info = padded((mapped.sent, mapped.info), size)
  kept = _in_one(mapped.memories, held, size)
  sums, gathered = exchange(mapped.sums, (sent, kept, info))
  back = np.argsort(np.concatenate(shares))

  def in_order(leaf: np.ndarray) -> np.ndarray:  # [P, size, ...] -> [C, ...]
    rows = [leaf[i, : len(places)] for i, places in enumerate(shares)]
    return np.concatenate(rows)[back]

  sent, memories, info = jax.tree.map(in_order, gathered)
  return Mapped(sums, sent, all_remembered(memories, cohort.size), info)


def process_clients(inner: MapClients) -> MapClients:
  """Each process runs its share of the cohort with `inner`; the sums are added once.

  Args:
    inner: the execution within a process: `loop_clients()`, `vmap_clients()`,
      `shard_map_clients()` or `pmap_clients()` over the process's own devices.

  Every process must hold the same state and call `round` with the same cohort, the empty
  one included: a process without a client takes part in the sum with zero. Clients' infos,
  what they keep (SCAFFOLD) and, for aggregators that need all of them, their messages are
  gathered in the order of the cohort. The result is that of one process, up to the order of
  the sum; with one process it is `inner` itself.

  Raises:
    PeerLost: by `round`, where another process is gone.
  """
  return lambda client, partial: functools.partial(_run_share, inner(client, partial))

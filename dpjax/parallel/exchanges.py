"""Exchanges of arrays between the processes of a run, on one machine or on many.

Exchanges run on a mesh of one device per process, over JAX's multi-process runtime. Every process
must make the same calls in the same order. If a process is gone, the others raise `PeerLost`.
`runtime` starts it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax.types import ArrayTree
from dpjax.validate import UserError, first_line

MOST_PROCESSES = 4096


_AXIS = "processes"


class PeerLost(Exception):
  """Raised when another process is gone, or is out of reach; this process cannot go on alone."""


def is_first() -> bool:
  """Returns whether this is process 0, the only process that writes files."""
  return jax.process_index() == 0


@functools.cache
def _sharding(spread: bool) -> NamedSharding:
  """Returns a sharding over one device of each process.

  If `spread`, each device holds one row; otherwise every device holds the whole array.
  """
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
  """Sums the arrays `added` over the processes, and gathers `gathered` from all processes.

  Leaves are NumPy arrays, of the same shapes and dtypes in every process.

  Returns:
    (sum of `added`, `gathered` with a leading axis of processes): NumPy arrays, the same in every
    process.

  Raises:
    PeerLost: a process did not take part.
  """
  spread = jax.tree.map(_spread, (added, gathered))
  try:
    whole = _program()(*spread)
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), whole)
  # gloo and NCCL raise these errors if a process is gone.
  except (ValueError, jax.errors.JaxRuntimeError) as error:
    raise PeerLost(first_line(error)) from error


def largest(number: int) -> int:
  """Returns the largest number that a process gave, in every process. Numbers must fit int32."""
  if jax.process_count() == 1:
    return number
  return int(np.max(exchange((), np.int32(number))[1]))


def _bytes(data: bytes) -> np.ndarray:
  return np.frombuffer(data, np.uint8)


def same(**named: str) -> None:
  """Raises UserError in all processes unless all give the same texts.

  Processes send digests, not the texts. Process 0 draws a random nonce for each call, which every
  digest covers. Without a nonce, anyone who reads a digest later could confirm a guess of the text.

  >>> same(config="learning_rate=0.1")
  """
  if jax.process_count() == 1:
    return
  nonce = exchange(_bytes(secrets.token_bytes(32) if is_first() else bytes(32)), ())[0]
  digest = lambda text: _bytes(hashlib.sha256(nonce.tobytes() + text.encode()).digest())
  _, rows = exchange((), [digest(text) for text in named.values()])
  for name, values in zip(named, rows):
    odd = [i for i, row in enumerate(values) if np.any(row != values[0])]
    if odd:
      raise UserError(
        f"differs between process 0 and process {odd[0]}; all processes need the "
        "same command, data, software and kind of device",
        field=name,
      )


def _from_first(data: bytes) -> bytes:
  """Returns the bytes of process 0 in all processes; bytes of the others are ignored."""
  length = int(exchange((), np.int32(len(data)))[1][0])
  # The length is padded to a power of two: few shapes need few compilations.
  row = np.zeros(1 << length.bit_length(), np.uint8)
  if is_first():
    row[:length] = _bytes(data)
  return exchange(row, ())[0].tobytes()[:length]


def on_first(call: Callable[..., Any], *args: Any) -> Any:
  """Calls `call(*args)` in process 0 alone, and returns its JSON result in all processes.

  An error of the call is raised in process 0 and, as a UserError, in the others; one of the
  operating system as an OSError of the same number.

  >>> on_first(dict, [("epsilon", 2.0)])
  {'epsilon': 2.0}
  """
  if jax.process_count() == 1:
    return call(*args)
  if not is_first():
    answer = json.loads(_from_first(b""))
    if "errno" in answer:
      raise OSError(*answer["errno"])
    if "error" in answer:
      raise UserError.of_facts(answer["error"])
    return answer["result"]
  try:
    result = call(*args)
  # The others wait for an answer, so an error must reach them, too.
  except Exception as error:
    if isinstance(error, OSError) and error.errno and not isinstance(error, UserError):
      at = [str(error.filename)] if error.filename else []
      answer: Any = {"errno": [error.errno, str(error.strerror), *at]}
    else:
      sent = error if isinstance(error, UserError) else UserError(first_line(error))
      answer = {"error": sent.facts()}
    _from_first(json.dumps(answer).encode())
    raise
  _from_first(json.dumps({"result": result}, default=lambda x: x.item()).encode())
  return result


def arrays_from_first(tree: ArrayTree) -> Any:
  """Returns the arrays of process 0, bit for bit, in all processes.

  Args:
    tree: arrays of the same shapes and dtypes in every process. Give keys as `key_data`.
  """
  if jax.process_count() == 1:
    return tree
  bits = lambda leaf: np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)
  # Process 0 gives its bytes and the others zeros, so the sum is an exact broadcast.
  mine = jax.tree.map(
    lambda leaf: bits(leaf) if is_first() else np.zeros_like(bits(leaf)), tree
  )
  return jax.tree.map(
    lambda leaf, row: row.view(np.asarray(leaf).dtype).reshape(np.shape(leaf)),
    tree,
    exchange(mine, ())[0],
  )

"""Many clients at once: blocks padded to common shapes, under `vmap`, and over devices.

This is the only file with pmap in it.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax import trees, validate
from dpjax.federated.client import ClientAlgorithm
from dpjax.federated.cohort import Cohort, LocalBatches, bucket
from dpjax.federated.execution import context as shared
from dpjax.federated.execution.context import Context, MapClients, Mapped, Partial, Run
from dpjax.gradients import loss_checks
from dpjax.validate import UserError

# No client can name it, and so sum over others in its step.
_AXIS = f"devices {secrets.token_hex(16)}"
_BLOCK = 32  # most clients of one block on one device


class _Block(NamedTuple):
  """Clients padded to common shapes; every leaf [K, ...]."""

  places: np.ndarray  # in the cohort, to put the results back
  who: np.ndarray
  n: np.ndarray
  mask: np.ndarray  # False: no client
  batches: LocalBatches  # leaves [K, S, B, ...]


def _blocks(cohort: Cohort, size: int) -> Iterator[_Block]:
  """Blocks of `size` clients, those with the most steps first: like is padded to like."""
  steps = np.array([len(batches.mask) for batches in cohort.batches], np.int64)
  order = np.argsort(-steps, kind="stable")
  for start in range(0, len(order), size):
    yield _block(cohort, order[start : start + size], size)


def _block(cohort: Cohort, places: np.ndarray, size: int) -> _Block:
  members = [cohort.batches[place] for place in places]
  num_steps = max(1, bucket(max(len(member.mask) for member in members)))
  width = max(member.mask.shape[1] for member in members)
  members += [jax.tree.map(np.zeros_like, members[0])] * (size - len(places))
  padded = [member.padded(num_steps, width) for member in members]
  indices = np.concatenate([places, np.full(size - len(places), places[0])])
  return _Block(
    places=indices,
    who=np.asarray(cohort.ids)[indices].astype(np.int32),
    n=np.asarray(cohort.num_examples)[indices].astype(np.int32),
    mask=np.arange(size) < len(places),
    batches=jax.tree.map(lambda *leaves: np.stack(leaves), *padded),
  )


def _run_block(
  client: ClientAlgorithm, partial: Partial, context: Context, memories: Any, block: _Block
) -> Any:
  """(sums or messages, memories, info) of a block: one `scan` over steps, under vmap."""

  def one(memory: Any, who: Any, n: Any, batches: LocalBatches) -> Any:
    def body(local: Any, batch: LocalBatches) -> Any:
      new, works = shared.step(client, context, local, batch), jnp.any(batch.mask)
      return jax.tree.map(lambda a, b: jnp.where(works, a, b), new, local), None

    local = shared.begin(client, context, memory, who, n)
    local, _ = jax.lax.scan(body, local, batches)
    return client.finish(context.received, local)

  each = (memories, block.who, block.n, block.batches)
  loss_checks.check_client(one, *each)  # once for each shape
  sent, memories, info = jax.vmap(one)(*each)
  return shared.collected(partial, context.state, sent, block.mask), memories, info


class _Blocks:
  """What `vmap_clients` and `pmap_clients` share: cutting into blocks, adding up."""

  def __init__(
    self,
    client: ClientAlgorithm,
    partial: Partial,
    run_block: Callable[[Context, Any, _Block], Any],
    size: Callable[[int], int],  # clients -> clients in a block
    sharding: NamedSharding | None = None,
  ):
    self.partial, self._run_block, self._size = partial, run_block, size
    self._nobody, self._placed = shared.nobody(client, partial), shared.Placed(sharding)
    self._add, self._rows = jax.jit(trees.add), jax.jit(shared.row)

  def __call__(self, context: Context, cohort: Cohort) -> Mapped:
    nothing = self._nobody(context)
    sums, kept, rows, places = nothing.sums, [], [], []
    memories, context = context.memories, self._placed(context._replace(memories=None))
    for block in _blocks(cohort, self._size(cohort.size)):
      held = self._rows(memories, block.places)
      collected, remembered, info = self._run_block(context, held, block)
      if self.partial is not None:
        sums, collected = self._add(sums, collected), None
      found = jax.device_get((collected, info))
      rows.append(jax.tree.map(lambda leaf: np.asarray(leaf)[block.mask], found))  # noqa: B023
      places.append(block.places[block.mask])
      if remembered is not None:
        kept.append(shared.Remembered(block.places, block.mask, remembered))
    if not rows:
      return nothing
    back = np.argsort(np.concatenate(places))
    sent, info = jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *rows)
    return Mapped(sums, sent, tuple(kept), info)


def vmap_clients(*, clients_per_block: int | None = None) -> MapClients:
  """Blocks of clients in one program each.

  Args:
    clients_per_block: None for the whole cohort, up to 32.
  """
  if clients_per_block is not None:
    validate.integer_at_least(1, clients_per_block=clients_per_block)
  size = lambda count: clients_per_block or bucket(min(max(count, 1), _BLOCK))

  def bind(client: ClientAlgorithm, partial: Partial) -> Run:
    run_block = jax.jit(functools.partial(_run_block, client, partial))
    return _Blocks(client, partial, run_block, size)

  return bind


def _devices(num_devices: int | None) -> list[Any]:
  devices = jax.local_devices()
  if num_devices is None:
    return devices
  validate.integer_at_least(1, num_devices=num_devices)
  if num_devices > len(devices):
    raise UserError(
      f"num_devices={num_devices}: this process has {len(devices)} "
      f"({devices[0].platform}); must be <= {len(devices)}"
    )
  return devices[:num_devices]


def pmap_clients(
  *, num_devices: int | None = None, clients_per_device: int | None = None
) -> MapClients:
  """Blocks of devices x clients: vmap on each device, then one `psum` over the devices.

  The server's parameters, the keys and the aggregator's state go to every device once a
  round, the data set once in all (`in_axes=None` of arrays that are there already); the sum
  comes back once (`out_axes=None`), so that whatever is added to it afterwards, noise above
  all, is added once.

  Args:
    num_devices: of this process; None for all.
    clients_per_device: in a block; None for an equal share of the cohort, up to 32.

  Raises:
    UserError: more devices than there are.
  """
  devices = _devices(num_devices)
  if clients_per_device is not None:
    validate.integer_at_least(1, clients_per_device=clients_per_device)

  def size(count: int) -> int:
    share = -(-max(count, 1) // len(devices))
    return len(devices) * (clients_per_device or bucket(min(share, _BLOCK)))

  def bind(client: ClientAlgorithm, partial: Partial) -> Run:
    def on_device(context: Context, memories: Any, block: _Block) -> Any:
      collected, *rest = _run_block(client, partial, context, memories, block)
      if partial is not None:
        collected = jax.lax.psum(collected, _AXIS)
      return collected, *rest

    mapped = jax.pmap(
      on_device,
      axis_name=_AXIS,
      in_axes=(None, 0, 0),
      out_axes=(0 if partial is None else None, 0, 0),
      devices=devices,
    )

    def run_block(context: Context, memories: Any, block: _Block) -> Any:
      spread = lambda leaf: leaf.reshape(len(devices), -1, *leaf.shape[1:])
      flat = lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:])
      collected, *rest = mapped(context, *jax.tree.map(spread, (memories, block)))
      whole = flat if partial is None else np.asarray  # a sum is the same on all
      return jax.tree.map(whole, collected), *jax.tree.map(flat, rest)

    everywhere = NamedSharding(Mesh(np.array(devices), (_AXIS,)), PartitionSpec())
    return _Blocks(client, partial, run_block, size, everywhere)

  return bind

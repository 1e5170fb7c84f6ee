"""Blocks of clients over several devices: `pmap`, and jit + `shard_map`.

The host gathers the rows of each device's own clients and sends each row once per block. So time
and memory of a round do not depend on the data of clients outside the cohort. The server's
parameters, the keys and the aggregator's state go to every device once a round.

Only this file uses pmap. JAX just maintains pmap, and implements it by shard_map. Both executions
give the same numbers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpjax import validate
from dpjax.federated.client import ClientAlgorithm
from dpjax.federated.cohort import bucket
from dpjax.federated.execution.client_blocks import (
  MOST,
  MOST_BYTES,
  Blocks,
  ByteBudget,
  ClientBlock,
  Dispatch,
  run_block,
)
from dpjax.federated.execution.context import Context, MapClients, Partial, Run
from dpjax.noise.gaussian import CLIENTS
from dpjax.parallel import made_for
from dpjax.validate import UserError

# The axis has a random name. A client that knew the name could sum over other clients.
_AXIS = f"{CLIENTS}{secrets.token_hex(16)}"
_SAME = PartitionSpec()
_APART = PartitionSpec(_AXIS)


def _devices(num_devices: int | None) -> list[Any]:
  devices = made_for.local_devices()
  if num_devices is None:
    return devices
  validate.integer_at_least(1, num_devices=num_devices)
  if num_devices > len(devices):
    raise UserError(
      f"this process has {len(devices)} ({devices[0].platform}); must be <= {len(devices)}",
      field="num_devices",
      value=num_devices,
    )
  return devices[:num_devices]


OnDevice = Callable[[Context, Any, ClientBlock], Any]  # runs the clients of one device
Tree = Callable[[Any], Any]


def _over_devices(
  parallel: Callable[[OnDevice, PartitionSpec, Mesh], tuple[Any, Tree, Tree]],
  num_devices: int | None,
  clients_per_device: int | None,
  memory_budget: float,
) -> MapClients:
  """Returns the execution by one of JAX's two ways to run a function on every device.

  Args:
    parallel: (function of one device, spec of its sums or messages, mesh) -> (function of all
      devices, function that sends its arguments, function that fetches its results).
  """
  mesh = Mesh(np.array(_devices(num_devices)), (_AXIS,))
  everywhere = NamedSharding(mesh, _SAME)
  if clients_per_device is not None:
    validate.integer_at_least(1, clients_per_device=clients_per_device)
  validate.positive(memory_budget=memory_budget)

  def size(count: int) -> int:
    # A device's number of clients is rounded up to one of few sizes. Missing clients are padding.
    share = -(-max(count, 1) // mesh.size)
    return mesh.size * (clients_per_device or bucket(min(share, MOST)))

  def bind(client: ClientAlgorithm, partial: Partial) -> Run:
    def on_device(context: Context, memories: Any, block: ClientBlock) -> Any:
      collected, *per_client = run_block(client, partial, context, memories, block)
      if partial is not None:
        # The program sums over devices, so that one sum leaves them, and not one for each device.
        collected = jax.lax.psum(collected, _AXIS)
      return collected, *per_client

    program, send, fetch = parallel(on_device, _APART if partial is None else _SAME, mesh)
    budget = ByteBudget(memory_budget, mesh.size)
    apart = NamedSharding(mesh, _APART)
    way = Dispatch(program, size, everywhere, send, fetch, budget, apart)
    return Blocks(client, partial, way)

  return bind


def pmap_clients(
  *,
  num_devices: int | None = None,
  clients_per_device: int | None = None,
  memory_budget: float = MOST_BYTES,
) -> MapClients:
  """Blocks of devices x clients: vmap on each device, then one `psum` over the devices.

  Each device is sent the rows of its own clients, block by block. Once a round it is sent the
  server's parameters, the keys and the aggregator's state. The sum is the same on all devices
  (`out_axes=None`). One copy of it is fetched once a round.

  Args:
    num_devices: number of devices of this process to use; None for all.
    clients_per_device: number of clients of a block on each device; None for an equal share of the
      cohort, up to 32.
    memory_budget: as in `vmap_clients`, over all devices together. The smallest block has one
      client per device, padded to the largest. So a client over the budget takes its bytes on every
      device.

  Raises:
    UserError: this process has fewer devices than `num_devices`.
  """

  def parallel(on_device: OnDevice, collected: PartitionSpec, mesh: Mesh) -> Any:
    apart = NamedSharding(mesh, _APART)
    spread = lambda leaf: leaf.reshape(mesh.size, -1, *leaf.shape[1:])
    flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
    mapped = jax.pmap(
      on_device,
      axis_name=_AXIS,
      in_axes=(None, 0, 0),
      out_axes=(None if collected == _SAME else 0, 0, 0),
      devices=list(mesh.devices.flat),
    )
    send = lambda tree: jax.device_put(jax.tree.map(spread, tree), apart)
    return mapped, send, lambda tree: jax.tree.map(flat, jax.device_get(tree))

  return _over_devices(parallel, num_devices, clients_per_device, memory_budget)


def shard_map_clients(
  *,
  num_devices: int | None = None,
  clients_per_device: int | None = None,
  memory_budget: float = MOST_BYTES,
) -> MapClients:
  """Maps over clients as `pmap_clients` does, by jit and `shard_map`.

  Blocks and numbers are the same, in arrays [K, ...] that are sharded over clients.

  Args:
    num_devices, clients_per_device, memory_budget: as in `pmap_clients`.

  Raises:
    UserError: this process has fewer devices than `num_devices`.
  """

  def parallel(on_device: OnDevice, collected: PartitionSpec, mesh: Mesh) -> Any:
    sharded = jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=(_SAME, _APART, _APART),
      out_specs=(collected, _APART, _APART),
      # With `check_vma`, JAX would sum gradients with respect to shared parameters over the
      # devices, and so mix clients.
      check_vma=False,
    )
    send = lambda tree: jax.device_put(tree, NamedSharding(mesh, _APART))
    return jax.jit(sharded), send, jax.device_get

  return _over_devices(parallel, num_devices, clients_per_device, memory_budget)

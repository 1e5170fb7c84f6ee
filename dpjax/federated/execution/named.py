"""Executions by the name that a config gives; `auto` goes by the platform."""

from __future__ import annotations

from dpjax import validate
from dpjax.federated.execution.client_blocks import MOST_BYTES, vmap_clients
from dpjax.federated.execution.client_devices import pmap_clients, shard_map_clients
from dpjax.federated.execution.client_loop import loop_clients
from dpjax.federated.execution.context import MapClients
from dpjax.parallel import made_for
from dpjax.validate import UserError

NAMES = ("auto", "loop", "vmap", "pmap", "shard_map")
_OVER_DEVICES = {"pmap": pmap_clients, "shard_map": shard_map_clients}


def auto_clients(*, num_threads: int | None = 1) -> MapClients:
  """Returns the loop on a CPU (with `num_threads`). On other platforms, returns vmap for one device
  and shard_map for several."""
  if made_for.platform() == "cpu":
    return loop_clients(num_threads=num_threads)
  return shard_map_clients() if len(made_for.local_devices()) > 1 else vmap_clients()


def by_name(
  name: str,
  *,
  num_devices: int | None = None,
  num_threads: int | None = None,
  memory_budget_gb: float | None = None,
) -> MapClients:
  """Returns the execution of a name. Raises UserError for an argument that is not for this name.

  Args:
    name: one of NAMES.
    num_devices: number of devices, for "pmap" and "shard_map"; None: all.
    num_threads: number of threads, for "loop", and for "auto" on a CPU; None: one for each core.
    memory_budget_gb: largest size of a block's examples in 1e9 bytes, for "vmap", "pmap" and
      "shard_map"; None: 1.

  >>> by_name("pmpa")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: execution='pmpa': must be one of ... (did you mean 'pmap'?)
  """
  check(
    name,
    num_devices=num_devices,
    num_threads=num_threads,
    memory_budget_gb=memory_budget_gb,
  )
  budget = MOST_BYTES if memory_budget_gb is None else memory_budget_gb * 1e9
  if name in _OVER_DEVICES:
    return _OVER_DEVICES[name](num_devices=num_devices, memory_budget=budget)
  if name == "vmap":
    return vmap_clients(memory_budget=budget)
  make = auto_clients if name == "auto" else loop_clients
  return make(num_threads=num_threads)


def check(
  name: str,
  *,
  num_devices: int | None = None,
  num_threads: int | None = None,
  memory_budget_gb: float | None = None,
) -> None:
  """Raises UserError where `by_name` would for any machine; it starts no device."""
  validate.one_of(NAMES, execution=name)
  if num_devices is not None and name not in _OVER_DEVICES:
    raise UserError(
      f"is for execution='pmap' or 'shard_map', not {name!r}",
      field="num_devices",
      value=num_devices,
    )
  if num_threads is not None and name not in ("auto", "loop"):
    raise UserError(
      f"is for execution='loop', not {name!r}", field="num_threads", value=num_threads
    )
  blocks = ("vmap", *_OVER_DEVICES)
  if memory_budget_gb is not None and name not in blocks:
    raise UserError(
      f"is for execution={' or '.join(map(repr, blocks))}, not {name!r}",
      field="memory_budget_gb",
      value=memory_budget_gb,
    )

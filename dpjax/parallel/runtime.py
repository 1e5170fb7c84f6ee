"""Start of JAX's multi-process runtime, which also finds processes that died or hang.

Nothing here is encrypted or authenticated, and neither is JAX's runtime: use trusted networks only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax

from dpjax import validate
from dpjax.parallel import exchanges
from dpjax.validate import UserError, Verbatim, first_line


class Address(NamedTuple):
  """Host and port at which a program listens."""

  host: str
  port: int


def address(text: str, field: str = "coordinator") -> Address:
  """Parses "HOST:PORT"; an IPv6 host may stand in brackets.

  Args:
    field: name of the argument that holds the text, for the error.

  Raises:
    UserError: another form, or a port that is not in [1, 65535].

  >>> address("10.0.0.1:9000")
  Address(host='10.0.0.1', port=9000)
  """
  host, _, port = str(text).rpartition(":")
  host = host.strip("[]")
  # At most six digits are converted, as a port may be given with thousands of digits.
  if not host or not port.isdecimal() or not 0 < int(port[:6]) < 65536 or len(port) > 6:
    raise UserError("must be HOST:PORT, as 10.0.0.1:9000", field=field, value=text)
  return Address(host, int(port))


def start(
  coordinator: str,
  *,
  num_processes: int,
  process_id: int,
  timeout: float = 60.0,
  peer_timeout: float = 30.0,
  local_devices: Sequence[int] | None = None,
  same: Mapping[str, str] = MappingProxyType({}),
) -> None:
  """Joins the processes of a run. Call it before any device is used.

  JAX ends this process with a stack trace if the others do not come, if two have one number, and
  later if one dies, or gives no sign of life for `peer_timeout` seconds.

  Args:
    coordinator: "HOST:PORT" of process 0, where JAX's coordination service listens.
    num_processes: number of processes, of which this one is `process_id`, from 0.
    timeout: seconds to wait for the others.
    peer_timeout: seconds without a sign of life after which a process counts as dead.
    local_devices: ids of this process's accelerators; None: all of this machine. On a CPU only
      the number of ids matters.
    same: texts by name, such as `config`, which must be equal in all processes.

  Raises:
    UserError: a bad argument; JAX cannot start; the processes differ in a text, or in JAX.
    PeerLost: a process has died meanwhile.
  """
  host, _ = address(coordinator)
  validate.integer_in(1, exchanges.MOST_PROCESSES, num_processes=num_processes)
  validate.integer_in(0, num_processes - 1, process_id=process_id)
  for name, seconds in (("connect_timeout", timeout), ("peer_timeout", peer_timeout)):
    # JAX counts in whole seconds.
    if not 1 <= seconds < 2**31:
      raise UserError("must be >= 1 second", field=name, value=Verbatim(f"{seconds:g}"))
  if local_devices is not None and len(local_devices) > 1:
    jax.config.update("jax_num_cpu_devices", len(local_devices))
  # JAX's preemption service would catch SIGTERM, which the run's own loop handles.
  jax.config.update("jax_enable_preemption_service", False)
  loopback = host in ("localhost", "::1") or host.startswith("127.")
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      local_device_ids=local_devices,
      initialization_timeout=int(timeout),
      heartbeat_timeout_seconds=int(peer_timeout),
      shutdown_timeout_seconds=int(peer_timeout),
      # By default the service would listen to all networks.
      coordinator_bind_address=coordinator if loopback else None,
    )
  except (RuntimeError, ValueError) as error:
    raise UserError(
      f"JAX's runtime does not start there ({first_line(error)})",
      field="coordinator",
      value=Verbatim(coordinator),
    ) from error
  exchanges.same(**same, jax=jax.__version__)

"""Says for which machine a `with` block builds its programs: the present one, or an absent one.

Code that builds a program asks here, not JAX, for its platform and its devices. `targets`
describes the absent machines, and compiles for them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
  from dpjax.parallel.targets import Machine

_CURRENT: contextvars.ContextVar[Machine | None] = contextvars.ContextVar(
  "target", default=None
)


def current() -> Machine | None:
  """Returns the absent machine that this block compiles for, or None for the present machine."""
  return _CURRENT.get()


@contextlib.contextmanager
def compiling_for(target: Machine | None) -> Iterator[None]:
  """Makes `current`, `platform` and `local_devices` answer for this target within the block.

  A target of None changes nothing.

  Functions that were traced before keep their trace, so build them inside the block.

  >>> from dpjax.parallel import targets
  >>> with compiling_for(targets.parse("gpu:h100:8")):
  ...   platform()
  'gpu'
  """
  token = _CURRENT.set(_CURRENT.get() if target is None else target)
  try:
    yield
  finally:
    _CURRENT.reset(token)


def platform() -> str:
  """Returns "cpu", "gpu" or "tpu": the platform that programs are built for here.

  Inside `compiling_for` this is the target's platform, otherwise that of JAX's default device."""
  target = _CURRENT.get()
  if target is not None:
    return target.chip.platform
  # The config is asked first: it may let a machine with an accelerator compute on its CPU. Programs
  # depend on the platform: the CPU's compiler drops operations that others keep, such as barriers.
  config: Any = jax.config
  device = config.jax_default_device
  if device is None:
    return jax.default_backend()
  return device if isinstance(device, str) else device.platform


def local_devices() -> list[Any]:
  """Returns the devices that the programs of this block are made for: those of this process,
  or all of a target."""
  target = _CURRENT.get()
  return jax.local_devices() if target is None else target.devices()

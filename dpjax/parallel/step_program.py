"""The program of a run's step, lowered for the devices of `made_for.compiling_for`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from dpjax.parallel.made_for import local_devices


class StepProgram(NamedTuple):
  """The program that a step of a run calls, lowered for the devices of a target.

  Attributes:
    lowered: result of `jax.jit(f).lower(...)`.
    calls: number of times that a step calls the program.
    num_parameters: number of parameters that the run releases.
    rows: number of examples that a device gets in a call; 0 if it gets clients.
    data_bytes: bytes on each device beside the arguments, such as those of the data set.
  """

  lowered: Any
  calls: int = 1
  num_parameters: int = 0
  rows: int = 0
  data_bytes: int = 0


class Reached(Exception):
  """Raised in place of calling a step's program, when the program is lowered for a target."""

  def __init__(self, program: StepProgram):
    super().__init__("a step's program was lowered")
    self.program = program


def on_device(tree: Any) -> Any:
  """Returns the shape and dtype of each array of a tree, placed on the first local device.

  Inside `compiling_for` that is the first device of the target.
  """
  device = jax.sharding.SingleDeviceSharding(local_devices()[0])
  return place_shapes(tree, lambda leaf: device)


def place_shapes(tree: Any, sharding: Callable[[Any], Any]) -> Any:
  """Returns the shape and dtype of each leaf, with the sharding that `sharding(leaf)` returns.

  Args:
    tree: tree of arrays or of `jax.ShapeDtypeStruct`.
  """

  def shape(leaf: Any) -> jax.ShapeDtypeStruct:
    # `typeof` accepts all that JAX takes: a number, a NumPy array, a key.
    kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding(leaf))

  return jax.tree.map(shape, tree)

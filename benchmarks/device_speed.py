"""The step of a training run over meshes of devices: time, compilation, traffic, memory.

  python -m benchmarks devices --cpu_devices=8 --configs=configs/mnist_cnn.py \\
    --mesh=data:1 --mesh=data:8 --mesh=data:4,model:2

It writes devices.csv. Devices made of one CPU (--cpu_devices) are called virtual.

All steps are compiled first and then timed in turns. What is sent is read from the compiled
program; the memory is what the compiler has planned for one device. Devices that are made of one
CPU share its cores: there the numbers show that the program is right, not how fast a mesh is.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from benchmarks import entries as entries_file
from benchmarks import federated_speed, options
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.gradients.device_mesh import mesh_of
from dpjax.gradients.ghost.explain import aligned
from dpjax.parallel.collectives import collectives

NOTE = (
  "virtual: devices made of one CPU, which share its cores; no measure of accelerators."
)


class Entry(NamedTuple):
  """One mesh for one config."""

  config: str
  mesh: str
  num_devices: int
  virtual: bool  # made of one CPU
  median_s: float  # of one physical batch
  examples_per_s: float  # expected ones
  compile_s: float
  sent_bytes: int  # by one device for one physical batch
  device_bytes: int  # held by one device at most, as compiled


def default_meshes() -> list[str]:
  """1, 2, 4, ... devices, and all."""
  most = jax.local_device_count()
  counts = {2**k for k in range(most.bit_length()) if 2**k <= most} | {most}
  return [f"data:{count}" for count in sorted(counts)]


class _Stepper:
  """A step compiled for a mesh, and a batch that is there."""

  def __init__(self, config: TrainConfig, mesh: str, loaded: Any):
    config = dataclasses.replace(config, mesh=mesh)
    self.num_devices = mesh_of(mesh).size
    self.run = build.assemble(config, loaded)
    phase = build.phase(config, self.run)
    draws = phase.draws(0)  # while it is held, its steps have batches
    self.batch = next(iter(next(iter(draws))))
    self.state, step = phase.init(), jax.jit(self.run.algorithm.step, donate_argnums=0)
    began = time.perf_counter()
    self.step = step.lower(self.state, self.batch).compile()
    self.compile_s = time.perf_counter() - began

  def seconds(self) -> float:
    began = time.perf_counter()
    self.state, info = self.step(self.state, self.batch)
    jax.block_until_ready((self.state.params, info))
    seconds = time.perf_counter() - began
    # The same rows stand for the next batch. With the number of the last one updates were NaN.
    origin = self.batch.origin + np.array([1, 0, 0, 0], np.int32)
    self.batch = jax.block_until_ready(self.batch._replace(origin=origin))
    return seconds

  def device_bytes(self) -> int:
    held: Any = self.step.memory_analysis()
    parts = held.argument_size_in_bytes + held.output_size_in_bytes
    return parts - held.alias_size_in_bytes + held.temp_size_in_bytes

  def sent_bytes(self) -> int:
    exchanges = collectives(self.step.as_text() or "")
    return sum(each.num_bytes for each in exchanges if self.num_devices > 1)


def measure(
  name: str, config: TrainConfig, meshes: Sequence[str], *, repeats: int = 5
) -> list[Entry]:
  """One config: a step on each mesh to warm up, then `repeats` of each in turns.

  Raises:
    UserError: a mesh that does not fit the devices.
  """
  loaded = build.load_data(config)
  steppers = {mesh: _Stepper(config, mesh, loaded) for mesh in meshes}
  times: dict[str, list[float]] = {mesh: [] for mesh in meshes}
  for _ in range(1 + repeats):
    for mesh, stepper in steppers.items():
      times[mesh].append(stepper.seconds())
  return [_entry(name, mesh, steppers[mesh], times[mesh][1:]) for mesh in meshes]


def _entry(name: str, mesh: str, stepper: _Stepper, times: list[float]) -> Entry:
  plan = stepper.run.plan
  median = statistics.median(times)
  return Entry(
    config=name,
    mesh=mesh,
    num_devices=stepper.num_devices,
    virtual=stepper.num_devices > 1 and jax.default_backend() == "cpu",
    median_s=median,
    examples_per_s=plan.normalize_by / plan.slices / median,
    compile_s=stepper.compile_s,
    sent_bytes=stepper.sent_bytes(),
    device_bytes=stepper.device_bytes(),
  )


def table(entries: Sequence[Entry]) -> str:
  """Aligned text, one line per entry.

  >>> entry = Entry("mnist_cnn", "data:8", 8, True, 0.1, 6000.0, 5.0, 100_000, 2_000_000)
  >>> print(table([entry]).splitlines()[1])
  mnist_cnn  data:8  8 virtual  100.0      6000          5.0        0.100    2.0
  """
  names = ("config", "mesh", "devices", "ms / step", "examples / s", "compile s")
  lines: list[list[str]] = [[*names, "MB sent", "MB held"]]
  for e in entries:
    devices = f"{e.num_devices}{' virtual' if e.virtual else ''}"
    times = f"{1e3 * e.median_s:.1f}", f"{e.examples_per_s:.0f}", f"{e.compile_s:.1f}"
    sizes = f"{e.sent_bytes / 1e6:.3f}", f"{e.device_bytes / 1e6:.1f}"
    lines.append([e.config, e.mesh, devices, *times, *sizes])
  notes = [NOTE] if any(entry.virtual for entry in entries) else []
  return "\n".join([aligned(lines), *notes])


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/devices.csv."""
  entries_file.write(out / "devices.csv", entries)


def define() -> None:
  """Defines the flags."""
  options.define_configs()
  options.define_cpu_devices()
  flags.DEFINE_multi_string(
    "mesh", [], "Such as data:8, or data:4,model:2 (default: 1, 2, 4, ... and all devices)."
  )
  options.define_repeats()


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  configs = options.configs()
  if values.cpu_devices is not None:
    federated_speed.use_cpu_devices(values.cpu_devices)
  meshes = values.mesh or default_meshes()
  # Meshes are checked before any timing, since an error in the last one would waste the minutes
  # spent on the others.
  for mesh in meshes:
    mesh_of(mesh)
  for name, config in configs.items():
    yield name, measure(name, config, meshes, repeats=values.repeats)

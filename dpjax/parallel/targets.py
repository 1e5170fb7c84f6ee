"""Compiles for machines that are absent, such as `tpu:v5e:2x4` or `gpu:h100:8`.

XLA compiles for a chip that is absent. So a program's memory, its exchanges and its work are known
before anybody rents the chip; its running time is not. `CHIPS` holds the published figures of
each chip.

  pip install -e '.[targets]'   # libtpu; JAX's CUDA plugin and nvcc, without driver or libraries

Nothing runs on such devices. JAX's default device stays that of this machine, and arrays are made
there. Only what is lowered for a target's devices is compiled for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.experimental import topologies

from dpjax.parallel.made_for import compiling_for as compiling_for
from dpjax.parallel.made_for import current as current
from dpjax.parallel.made_for import local_devices as local_devices
from dpjax.parallel.made_for import platform as platform
from dpjax.parallel.step_program import Reached as Reached
from dpjax.parallel.step_program import StepProgram as StepProgram
from dpjax.parallel.step_program import on_device as on_device
from dpjax.parallel.step_program import place_shapes as place_shapes
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.parallel.programs import ProgramCounts

INSTALL = "pip install -e '.[targets]' in dpjax's clone"
_FORM = re.compile(r"(tpu):(\w+):(\d+(?:x\d+){1,2})|(gpu):(\w+):([1-9]\d{0,4})", re.ASCII)
_GPUS_PER_HOST = 8
_GIB = 2**30
# Variables for libtpu. Without the first it asks the cloud which machine it runs on.
_QUIET = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TF_CPP_MIN_LOG_LEVEL": "3",
  # No chip is used, so several processes may compile at once.
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Without a GPU no kernel can be timed, so autotuning is off. Triton's matrix products, which
# then have no known tiling, are off, too.
_GPU_OPTIONS = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}


class Chip(NamedTuple):
  """Published figures of one accelerator chip; its peaks are those without sparsity.

  Attributes:
    platform: "tpu" or "gpu".
    device: name of the chip in JAX.
    memory_bytes: size of its memory in bytes.
    flops_bfloat16: peak of matrix products in bfloat16, in flops per second.
    flops_float32: the same for float32 operands at JAX's default precision, which rounds them:
      to bfloat16 on a TPU, to TF32 on a GPU.
    bandwidth: bytes that its memory transfers per second.
    source: page with the figures.
    card: figures of a GPU for the compiler; None for a TPU.
  """

  platform: str
  device: str
  memory_bytes: int
  flops_bfloat16: float
  flops_float32: float
  bandwidth: float
  source: str
  card: dict[str, Any] | None = None

  @property
  def usable_bytes(self) -> int:
    """Bytes of memory that JAX takes by default.

    On a GPU they are three quarters of the memory; XLA_CLIENT_MEM_FRACTION changes this share.
    On a TPU they are all but .25 GiB, which libtpu keeps for itself.
    """
    if self.platform == "gpu":
      return self.memory_bytes * 3 // 4
    return self.memory_bytes - _GIB // 4


def _tpu(device: str, memory: float, flops: float, bandwidth: float, page: str) -> Chip:
  source = f"https://docs.cloud.google.com/tpu/docs/{page}"
  return Chip("tpu", device, int(memory * _GIB), flops, flops, bandwidth, source)


_HOPPER = {
  "shared_memory_per_core": 233472,
  "shared_memory_per_block_optin": 232448,
  "core_count": 132,
  "fpus_per_core": 128,
  "l2_cache_size": 52428800,
  "clock_rate_ghz": 1.98,
  "capability": (9, 0),
}
_AMPERE = {
  "shared_memory_per_core": 167936,
  "shared_memory_per_block_optin": 166912,
  "core_count": 108,
  "fpus_per_core": 64,
  "l2_cache_size": 41943040,
  "clock_rate_ghz": 1.41,
  "capability": (8, 0),
}

CHIPS = {
  "v5e": _tpu("TPU v5 lite", 16, 197e12, 819e9, "v5e"),
  "v5p": _tpu("TPU v5", 95, 459e12, 2765e9, "v5p"),
  "v6e": _tpu("TPU v6 lite", 32, 918e12, 1638e9, "v6e"),
  "a100": Chip(
    "gpu",
    "NVIDIA A100-SXM4-80GB",
    85100068864,
    312e12,
    156e12,
    2039e9,
    "https://www.nvidia.com/en-us/data-center/a100/",
    _AMPERE,
  ),
  "h100": Chip(
    "gpu",
    "NVIDIA H100 80GB HBM3",
    84942979072,
    989e12,
    495e12,
    3352e9,
    "https://www.nvidia.com/en-us/data-center/h100/",
    _HOPPER,
  ),
  "h200": Chip(
    "gpu",
    "NVIDIA H200 141GB HBM3e",
    151397597184,
    989e12,
    495e12,
    4800e9,
    "https://www.nvidia.com/en-us/data-center/h200/",
    _HOPPER,
  ),
}


@dataclasses.dataclass(frozen=True)
class Machine:
  """A machine of equal chips. `parse` makes it from text.

  Attributes:
    text: text that `parse` was given.
    name: name of its chip, a key of `CHIPS`.
    sizes: number of TPUs along each axis of their network, or (number of GPUs,).
  """

  text: str
  name: str
  sizes: tuple[int, ...]

  @property
  def chip(self) -> Chip:
    return CHIPS[self.name]

  @property
  def num_devices(self) -> int:
    return math.prod(self.sizes)

  def devices(self) -> list[Any]:
    """Returns its devices. Programs can be compiled for them, but nothing runs on them.

    Raises:
      UserError: the compiler is not installed, is for another version of JAX, or knows no such
        machine.
    """
    _check_installed(self.chip.platform, jax.__version__)
    return list(_devices(self))


class NotFitting(Exception):
  """Raised when the compiler refuses a program that needs more memory than a device has.

  Attributes:
    wanted: bytes that the program would need; None if the compiler does not say it.
  """

  def __init__(self, wanted: float | None):
    super().__init__("more memory than a device has")
    self.wanted = wanted


class Compiled(NamedTuple):
  """Figures of a compiled program on one device; sizes in bytes, as the compiler states them."""

  counts: ProgramCounts
  arguments: int
  outputs: int
  aliased: int  # bytes of the outputs that take the place of arguments
  temporaries: int
  code: int
  # XLA's own counts. They include elementwise operations and fast memory, count each loop once,
  # and exist for TPUs alone.
  compiler_flops: float | None = None
  compiler_bytes: float | None = None

  @property
  def held(self) -> int:
    """Bytes that a device holds at most."""
    return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

  def seconds(self, chip: Chip) -> float:
    """Returns the seconds of the program by the roofline model (Williams et al. 2009).

    This is the larger of flops / peak and bytes / bandwidth, by the chip's published figures. It
    is no measured time, and leaves out exchanges between devices and kernel launches.
    """
    wide = self.counts.flops - self.counts.narrow_flops
    products = self.counts.narrow_flops / chip.flops_bfloat16 + wide / chip.flops_float32
    return max(products, self.counts.memory_bytes / chip.bandwidth)


def parse(text: str) -> Machine:
  """Returns the machine that a text names: a TPU by the sides of its slice, GPUs by their number.

  Raises:
    UserError: text of another form, or a chip that `CHIPS` does not have.

  >>> parse("tpu:v5e:2x4").num_devices, parse("gpu:h100:8").chip.device
  (8, 'NVIDIA H100 80GB HBM3')
  >>> parse("tpu:v5e")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: target='tpu:v5e': must be such as 'tpu:v5e:2x4' or 'gpu:h100:8'
  """
  match = _FORM.fullmatch(text)
  if not match:
    raise UserError(
      "must be such as 'tpu:v5e:2x4' or 'gpu:h100:8'", field="target", value=text
    )
  platform, name, sizes = [part for part in match.groups() if part is not None]
  known = [key for key, chip in CHIPS.items() if chip.platform == platform]
  if name not in known:
    raise UserError(f"must name a chip of {', '.join(known)}", field="target", value=text)
  return Machine(text, name, tuple(int(size) for size in sizes.split("x")))


def _check_installed(platform: str, version: str) -> None:
  """Raises UserError of one line unless the compiler for this version of JAX is installed."""
  packages = ("libtpu",) if platform == "tpu" else ("jax-cuda12-plugin", "jax-cuda12-pjrt")
  wanted = version
  if platform == "tpu":
    # The extra `jax[tpu]` pins the libtpu that JAX was tested with, such as libtpu==0.0.42.*.
    pins = [pin for pin in importlib.metadata.requires("jax") or () if "libtpu" in pin]
    numbers = re.search(r"libtpu==([\d.]*\d)", pins[0]) if pins else None
    wanted = numbers[1] if numbers else ""
  for package in packages:
    try:
      present = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      raise UserError(
        f"needs {package}, which is not installed; {INSTALL}", field="target"
      ) from None
    if not f"{present}.".startswith(f"{wanted}." if wanted else ""):
      raise UserError(
        f"{package} is {present}, and JAX {version} needs {wanted}; {INSTALL}",
        field="target",
      )


def card(chip: Chip) -> str:
  """Returns the description of a GPU for XLA's compiler, a protocol buffer in text format."""
  figures = dict(chip.card or {})
  major, minor = figures.pop("capability")
  common = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "memory_bandwidth": int(chip.bandwidth),
    "device_memory_size": chip.memory_bytes,
  }
  lines = [f"  {name}: {value}" for name, value in (common | figures).items()]
  lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
  inner = "\n".join(lines)
  return (
    f"gpu_device_info {{\n{inner}\n}}\n"
    'platform_name: "CUDA"\n'
    "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
    f'device_description_str: "{chip.device}"\n'
  )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
  """Discards what native code writes to stderr.

  Both compilers warn, in many lines, that the machine is absent.
  """
  kept = os.dup(2)
  nothing = os.open(os.devnull, os.O_WRONLY)
  try:
    os.dup2(nothing, 2)
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nothing)


@functools.cache
def _devices(target: Machine) -> tuple[Any, ...]:
  for name, value in _QUIET.items():
    os.environ.setdefault(name, value)
  options: dict[str, Any] = {}
  sizes = target.sizes
  layout = "x".join(map(str, sizes))
  if target.chip.platform == "gpu":
    hosts, remainder = divmod(target.num_devices, _GPUS_PER_HOST)
    if remainder and hosts:
      raise UserError(
        f"must be at most {_GPUS_PER_HOST} GPUs, or a multiple of them",
        field="target",
        value=target.text,
      )
    # Numbers of partitions, of hosts in each partition, and of GPUs in each host.
    options["topology"] = f"1x{hosts}x{_GPUS_PER_HOST}" if hosts else f"1x1x{layout}"
    options["target_config"] = card(target.chip)
    name = ""
    platform = "cuda"
  else:
    name = f"{target.name}:{layout}"
    platform = "tpu"
    # A flat slice of up to 8 chips is one host. By default libtpu would assume hosts of 2x2 chips.
    if target.num_devices <= 8 and len(sizes) == 2:
      options["chips_per_host_bounds"] = [*sizes, 1]
    elif target.num_devices == 1:
      options["chips_per_host_bounds"] = [1, 1, 1]
  try:
    with _silence():
      described = topologies.get_topology_desc(name, platform=platform, **options)
  except Exception as error:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    raise UserError(
      f"the compiler knows no such machine ({first:.160})",
      field="target",
      value=target.text,
    ) from error
  return tuple(described.devices)


# --- compiled programs


def compile_for(lowered: Any, target: Machine) -> Compiled:
  """Compiles a program that was lowered for devices of a target, and returns its figures.

  Raises:
    NotFitting: the program needs more memory than a TPU has. The compiler for GPUs never refuses:
      compare `Compiled.held` with the card's memory.
  """
  gpu = target.chip.platform == "gpu"
  try:
    with _silence():
      program = lowered.compile(compiler_options=_GPU_OPTIONS if gpu else None)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    raise NotFitting(_bytes_wanted(str(error))) from error
  # Imported here, since a launcher that only checks a target's name counts no work.
  from dpjax.parallel.programs import count_work

  memory = program.memory_analysis()
  cost = program.cost_analysis() or {}
  return Compiled(
    counts=count_work(program.as_text()),
    arguments=memory.argument_size_in_bytes,
    outputs=memory.output_size_in_bytes,
    aliased=memory.alias_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    code=memory.generated_code_size_in_bytes,
    compiler_flops=cost.get("flops"),
    compiler_bytes=cost.get("bytes accessed"),
  )


def _bytes_wanted(message: str) -> float | None:
  """Reads the bytes that a refused program would need; None if the message has no number.

  >>> _bytes_wanted("Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.") / 2**30
  20.5
  """
  used = re.search(r"Used ([\d.]+)([KMGT])i?B? of", message)
  return float(used[1]) * 1024 ** ("KMGT".index(used[2]) + 1) if used else None

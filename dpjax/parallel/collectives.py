"""Collective operations between devices in a compiled program, read from its HLO text."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_LINE = re.compile(rf"= (?P<out>.+?) (?P<kind>{'|'.join(_KINDS)})(?:-start)?\((?P<rest>.*)")
_ARRAY = re.compile(r"\b([a-z]+[0-9]+|pred)\[([0-9,]*)\]")
_GROUPS = re.compile(r"replica_groups=(?:\[(\d+),(\d+)\]|\{\{([\d,]*)\})")
# The compiler for TPUs writes groups by names of axes: mesh['a'=4,'b'=2] {'a'}
_MESH = re.compile(r"replica_groups=mesh\[(?P<sizes>[^\]]*)\] \{(?P<axes>[^}]*)\}")


class Collective(NamedTuple):
  """A collective operation between devices, such as an all-reduce.

  Attributes:
    kind: name of the operation in HLO.
    arrays: (type, shape) of each result on each device.
    group: number of devices that exchange with one another. None: pairs, or not stated.
  """

  kind: str
  arrays: tuple[tuple[str, tuple[int, ...]], ...]
  group: int | None

  @property
  def size(self) -> int:
    """Number of entries of the results on each device."""
    return sum(math.prod(shape) for _, shape in self.arrays)

  @property
  def num_bytes(self) -> int:
    """Bytes of the results on each device."""
    return sum(math.prod(shape) * width(kind) for kind, shape in self.arrays)


def collectives(hlo: str) -> list[Collective]:
  """Lists the collective operations in `jax.jit(f).lower(...).compile().as_text()`.

  A collective operation inside a loop is listed once.

  >>> hlo = "%r = (f32[2,3]{1,0}, f32[]) all-reduce(%a, %b), replica_groups=[1,8]<=[8]"
  >>> collectives(hlo)[0].arrays, collectives(hlo)[0].group, collectives(hlo)[0].num_bytes
  ((('f32', (2, 3)), ('f32', ())), 8, 28)
  """
  return [_read(match) for match in map(_LINE.search, hlo.splitlines()) if match]


def _read(line: re.Match[str]) -> Collective:
  arrays = [
    (kind, tuple(int(size) for size in shape.split(",") if size))
    for kind, shape in _ARRAY.findall(line["out"])
  ]
  groups = _GROUPS.search(line["rest"])
  mesh = _MESH.search(line["rest"])
  group = None
  if groups:
    group = int(groups[2]) if groups[2] else len(groups[3].split(","))
  elif mesh:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh["sizes"]))
    axes = re.findall(r"'(\w+)'", mesh["axes"])
    group = math.prod(int(sizes[axis]) for axis in axes)
  return Collective(line["kind"], tuple(arrays), group)


def width(kind: str) -> int:
  """Returns the number of bytes of one number of an HLO type, at least 1.

  >>> [width(kind) for kind in ("bf16", "f32", "c64", "pred", "s4", "f8e4m3fn")]
  [2, 4, 8, 1, 1, 1]
  """
  bits = re.match(r"[a-z]+([0-9]+)", kind)
  return max(1, int(bits[1]) // 8) if bits else 1

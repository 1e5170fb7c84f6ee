"""What a compiled program sends between devices, read from its HLO text."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
_LINE = re.compile(rf"= (?P<out>.+?) (?P<kind>{'|'.join(_KINDS)})(?:-start)?\((?P<rest>.*)")
_ARRAY = re.compile(r"\b([a-z]+[0-9]+|pred)\[([0-9,]*)\]")
_GROUPS = re.compile(r"replica_groups=(?:\[(\d+),(\d+)\]|\{\{([\d,]*)\})")


class Collective(NamedTuple):
  """One exchange. A device holds `arrays` of it: (type, shape) each."""

  kind: str
  arrays: tuple[tuple[str, tuple[int, ...]], ...]
  group: int | None  # devices that exchange with one another; None: pairs, or not said

  @property
  def size(self) -> int:
    """Numbers on each device."""
    return sum(math.prod(shape) for _, shape in self.arrays)

  @property
  def num_bytes(self) -> int:
    """On each device."""
    return sum(math.prod(shape) * _width(kind) for kind, shape in self.arrays)


def collectives(hlo: str) -> list[Collective]:
  """Every exchange in `jax.jit(f).lower(...).compile().as_text()`, each once, also in a loop.

  >>> hlo = "%r = (f32[2,3]{1,0}, f32[]) all-reduce(%a, %b), replica_groups=[1,8]<=[8]"
  >>> collectives(hlo)[0].arrays, collectives(hlo)[0].group, collectives(hlo)[0].num_bytes
  ((('f32', (2, 3)), ('f32', ())), 8, 28)
  """
  return [_read(found) for found in map(_LINE.search, hlo.splitlines()) if found]


def _read(line: re.Match[str]) -> Collective:
  arrays = [
    (kind, tuple(int(size) for size in shape.split(",") if size))
    for kind, shape in _ARRAY.findall(line["out"])
  ]
  groups = _GROUPS.search(line["rest"])
  group = None
  if groups:
    group = int(groups[2]) if groups[2] else len(groups[3].split(","))
  return Collective(line["kind"], tuple(arrays), group)


def _width(kind: str) -> int:
  """Bytes of a number."""
  bits = re.sub(r"\D", "", kind)
  return max(1, int(np.ceil(int(bits) / 8))) if bits else 1

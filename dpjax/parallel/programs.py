"""Counts the work of a compiled program from its HLO text: products, memory, exchanges, loops.

XLA's own cost analysis does not exist for GPUs. Elsewhere it counts the body of a loop once, and a
TPU's small fast memory as if it were the large one. Here:

| what          | how it is counted                                                           |
| ------------- | --------------------------------------------------------------------------- |
| flops         | two per multiplication in matrix products and convolutions, without padding |
| memory bytes  | a kernel's operands (each once) and results, if they lie in device memory   |
| slices        | only the slice or the update, where a kernel slices or updates an array     |
| a loop        | its body times its trips; once if its trips are unknown (`unknown_loops`)   |
| a conditional | the branch with the fewest unknown loops; among equals, the largest number  |
|               | of memory bytes. Branches that return constants, or are rarely taken, are   |
|               | left out if there are others                                                |

Elementwise operations count as no flops: they run beside the matrix units, bound by memory.
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import NamedTuple

import numpy as np

from dpjax.branches import RARE
from dpjax.parallel.collectives import collectives, width

# Instructions that run no kernel. Those that end in "-done" or "-update" run none either: they
# end an operation that was counted at its start.
_FREE = {
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
  "partition-id", "replica-id", "opt-barrier", "optimization-barrier", "domain",
}  # fmt: skip
_CALLS = ("while", "conditional", "call", "async-start")
_ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*)?\{\s*$")
_LINE = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SLICES = ("dynamic-slice", "slice", "slice-start", "gather")
# Results of these begin with their operands, which are not written.
_RETURN_OPERANDS = ("slice-start", "all-gather-start", "collective-permute-start")


class ProgramCounts(NamedTuple):
  """The work of one call of a program on one device."""

  flops: float = 0.0  # of matrix products and convolutions
  narrow_flops: float = 0.0  # of these, those with operands of at most 16 bits
  memory_bytes: float = 0.0  # read from and written to the device's memory
  sent_bytes: float = 0.0  # results of exchanges between devices
  kernels: int = 0  # that run; in a loop, once per trip
  fusions: int = 0  # in the text, outside of other fusions
  loops: int = 0  # in the text
  unknown_loops: int = 0  # of these, those whose trips are unknown: counted as one trip

  def times(self, trips: int) -> ProgramCounts:
    """Returns the work of a body that runs `trips` times. Fusions and loops are counted once."""
    return self._replace(
      flops=self.flops * trips,
      narrow_flops=self.narrow_flops * trips,
      memory_bytes=self.memory_bytes * trips,
      sent_bytes=self.sent_bytes * trips,
      kernels=self.kernels * trips,
    )

  def plus(self, other: ProgramCounts) -> ProgramCounts:
    """Returns the sum of both counts, field by field."""
    return ProgramCounts._make(a + b for a, b in zip(self, other))


class _Array(NamedTuple):
  kind: str
  shape: tuple[int, ...]
  space: int  # 0: the device's memory; others: small fast ones of a TPU

  @property
  def num_bytes(self) -> int:
    return 0 if self.space else width(self.kind) * math.prod(self.shape)


class _Instruction(NamedTuple):
  name: str
  opcode: str
  arrays: tuple[_Array, ...]  # of the result
  operands: tuple[str, ...]
  inside: str  # the text between its parentheses: a constant's value, a parameter's number
  attributes: str
  text: str

  def callees(self, attribute: str) -> list[str]:
    """Returns the names of the computations that an attribute lists."""
    listed = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
    return re.findall(r"%?([\w.\-]+)", listed[1]) if listed else []


class _Computation(NamedTuple):
  instructions: dict[str, _Instruction]
  root: str

  def arrays_of(self, name: str) -> tuple[_Array, ...]:
    instruction = self.instructions.get(name)
    return instruction.arrays if instruction else ()

  def users(self, name: str) -> list[_Instruction]:
    return [each for each in self.instructions.values() if name in each.operands]

  def parameter(self, number: int) -> str | None:
    """Returns the name of parameter `number`, or None if there is none."""
    for each in self.instructions.values():
      if each.opcode == "parameter" and each.inside == str(number):
        return each.name
    return None


def _closing(text: str) -> int:
  """Returns the index after the parenthesis that closes the first one, or the text's length."""
  depth = 0
  for place, letter in enumerate(text):
    depth += (letter == "(") - (letter == ")")
    if depth == 0:
      return place + 1
  return len(text)


def _instruction(name: str, text: str) -> _Instruction:
  # The type of the result comes first. A layout holds parentheses, but no space, so the type ends
  # at a space. A tuple of types holds both, so it ends at its closing parenthesis.
  end = _closing(text) if text.startswith("(") else text.index(" ")
  result = text[:end]
  opcode, _, call = text[end:].strip().partition("(")
  call = f"({call}"
  end = _closing(call)
  inside = call[1 : end - 1]
  arrays = []
  for kind, shape, layout in _ARRAY.findall(result):
    space = re.search(r"S\((\d+)\)", layout)
    sizes = tuple(int(size) for size in shape.split(",") if size)
    arrays.append(_Array(kind, sizes, int(space[1]) if space else 0))
  # In some dialects each name follows its type. A type has brackets with commas, so these brackets
  # are removed first.
  names = re.sub(r"/\*.*?\*/|\[[^\]]*\]|\{[^}]*\}", "", inside).split(",")
  operands = tuple(part.split()[-1].lstrip("%") for part in names if part.strip())
  return _Instruction(name, opcode, tuple(arrays), operands, inside, call[end:], text)


def _parse(hlo: str) -> tuple[dict[str, _Computation], str]:
  """Returns (computations by name, the name of the entry computation)."""
  computations: dict[str, _Computation] = {}
  entry = ""
  current: dict[str, _Instruction] = {}
  name = ""
  for line in hlo.splitlines():
    head = _HEAD.match(line)
    if head:
      name = head["name"]
      current = {}
      entry = name if head["entry"] else entry
      computations[name] = _Computation(current, "")
      continue
    match = _LINE.match(line)
    if match and name:
      current[match["name"]] = _instruction(match["name"], match["rest"])
      if match["root"]:
        computations[name] = _Computation(current, match["name"])
  return computations, entry


# --- products


def _pairs(inputs: int, outputs: int, window: dict[str, int]) -> int:
  """Returns how many pairs of entries of a convolution's kernel and input meet along one axis.

  Padding and the holes of a dilated input do not count.
  """
  place = np.arange(outputs)[:, None] * window["stride"] - window["pad"]
  place = place + np.arange(window["size"])[None, :] * window["rhs_dilate"]
  hole = window["lhs_dilate"]
  return int(np.sum((place >= 0) & (place <= (inputs - 1) * hole) & (place % hole == 0)))


def _windows(attributes: str, axes: int) -> list[dict[str, int]]:
  """Returns the window of each spatial axis: size, stride, padding in front, and dilations."""
  text = re.search(r"\bwindow=\{([^}]*)\}", attributes)
  parts = dict(part.split("=") for part in text[1].split()) if text else {}
  default = {"size": 1, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
  windows = []
  for axis in range(axes):
    window = {}
    for name, value in default.items():
      window_size = parts[name].split("x")[axis] if name in parts else str(value)
      window[name] = int(window_size.split("_")[0])
    windows.append(window)
  return windows


def _convolution_flops(
  attributes: str, inputs: _Array, kernel: _Array, outputs: _Array
) -> float:
  """Returns the flops of a convolution of these shapes; 0 if `attributes` name no axes."""
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
  if labels is None:
    return 0.0
  of_input, of_kernel, of_output = labels.groups()
  axes = sorted(label for label in of_kernel if label.isdigit())
  count = 2.0 * kernel.shape[of_kernel.index("i")]
  count *= outputs.shape[of_output.index("b")] * outputs.shape[of_output.index("f")]
  for axis, window in zip(axes, _windows(attributes, len(axes))):
    size = inputs.shape[of_input.index(axis)]
    count *= _pairs(size, outputs.shape[of_output.index(axis)], window)
  return count


def _product_flops(each: _Instruction, operands: list[_Array]) -> float:
  """Returns the flops of a matrix product or convolution; 0 for other instructions.

  What the instruction calls is not counted.
  """
  target = re.search(r'custom_call_target="([^"]*)"', each.attributes)
  called = target[1] if target else ""
  if each.opcode == "dot":
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.attributes)
    axes = [int(axis) for axis in contracted[1].split(",") if axis] if contracted else []
  elif called.startswith("__cublas"):
    contracted = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', each.attributes)
    axes = [int(axis) for axis in json.loads(contracted[1])] if contracted else []
  elif each.opcode == "convolution":
    inputs, kernel = operands[:2]
    return _convolution_flops(each.attributes, inputs, kernel, each.arrays[0])
  elif called.startswith("__cudnn$conv"):
    # cuDNN's call is described by the axes of the forward convolution. Its result is the forward
    # convolution's input, kernel or output, so the arrays are put in that order.
    places = [*operands[:2], each.arrays[0]]
    order = {"Input": (2, 1, 0), "Filter": (0, 2, 1)}
    chosen = next((order[name] for name in order if called.endswith(name)), (0, 1, 2))
    inputs, kernel, outputs = (places[place] for place in chosen)
    return _convolution_flops(each.attributes, inputs, kernel, outputs)
  else:
    return 0.0
  contracted = math.prod(operands[0].shape[axis] for axis in axes)
  return 2.0 * math.prod(each.arrays[0].shape) * contracted


# --- the program


class _Reader:
  """The computations of one program. Counts of a computation are made once, and then kept."""

  def __init__(self, hlo: str):
    self.computations, self.entry = _parse(hlo)
    self.counted = functools.cache(self._count)

  def _count(self, name: str) -> ProgramCounts:
    """Returns the counts of a computation, with those of the computations that it calls."""
    computation = self.computations[name]
    total = ProgramCounts()
    for each in computation.instructions.values():
      total = total.plus(self._one(computation, each))
    return total

  def _one(self, computation: _Computation, each: _Instruction) -> ProgramCounts:
    if each.opcode == "while":
      return self._loop(computation, each)
    if each.opcode == "conditional":
      branches = each.callees("branch_computations")
      branches = branches or each.callees("true_computation") + each.callees(
        "false_computation"
      )
      return self._usual(branches)
    if each.opcode in _CALLS:
      names = each.callees("to_apply") + each.callees("calls")
      return functools.reduce(ProgramCounts.plus, map(self.counted, names), ProgramCounts())
    if each.opcode in _FREE or each.opcode.endswith(("-done", "-update")):
      return ProgramCounts()
    exchanged = collectives(f"%x = {each.text}")
    flops, narrow_flops = self._flops(computation, each)
    return ProgramCounts(
      flops=flops,
      narrow_flops=narrow_flops,
      memory_bytes=self._traffic(computation, each),
      sent_bytes=sum(exchange.num_bytes for exchange in exchanged),
      kernels=1,
      fusions=int(each.opcode == "fusion"),
    )

  def _usual(self, branches: list[str]) -> ProgramCounts:
    """Returns the counts of the branch that a conditional usually takes.

    This library writes two kinds of unusual branches. One returns constants, under a condition that
    never holds (`gradients.traced_values`). The other serves unusual examples alone, and says so in
    the names of its operations (`dpjax.branches`).
    """
    alive = [name for name in branches if self._depends(self.computations[name])]
    usual = [name for name in alive if not self._is_rare(name)]
    counts = [self.counted(name) for name in usual or alive or branches]
    if not counts:
      return ProgramCounts()
    # The branch with the fewest loops of unknown length is taken. Among equals, it is the branch
    # with the largest number of memory bytes.
    return min(counts, key=lambda count: (count.unknown_loops, -count.memory_bytes))

  def _is_rare(self, name: str) -> bool:
    """Returns whether a branch is marked as rarely taken, in the name of one of its operations."""
    computation = self.computations[name]
    for each in computation.instructions.values():
      # Of called computations only fusions are searched: a conditional has branches of its own.
      fused = each.callees("calls") if each.opcode == "fusion" else []
      if f"/{RARE}/" in each.attributes or any(map(self._is_rare, fused)):
        return True
    return False

  def _depends(self, computation: _Computation) -> bool:
    """Returns whether a computation's result depends on its parameters."""
    waiting = [computation.root]
    seen: set[str] = set()
    while waiting:
      name = waiting.pop()
      each = computation.instructions.get(name)
      if each is None or name in seen:
        continue
      if each.opcode == "parameter":
        return True
      seen.add(name)
      waiting.extend(each.operands)
    return False

  def _loop(self, computation: _Computation, each: _Instruction) -> ProgramCounts:
    (body,) = each.callees("body")
    trips = self._trips(each)
    inner = self.counted(body).times(1 if trips is None else trips)
    return inner.plus(ProgramCounts(loops=1, unknown_loops=int(trips is None)))

  def _trips(self, each: _Instruction) -> int | None:
    stated = _TRIPS.search(each.attributes)
    if stated:
      return int(stated[1])
    # The compiler for TPUs states no trips. JAX's loops of known length count from 0 by 1. They go
    # on while the count, a part of the carry, is below a constant.
    (condition,) = each.callees("condition")
    (body,) = each.callees("body")
    ends = self.computations[condition]
    root = ends.instructions.get(ends.root)
    if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
      return None
    count, limit = (ends.instructions.get(name) for name in root.operands)
    place = re.search(r"index=(\d+)", count.attributes) if count else None
    if limit is None or limit.opcode != "constant" or place is None:
      return None
    counted_up = self._counts_up(self.computations[body], int(place[1]))
    return int(limit.inside) if counted_up and limit.inside.isdigit() else None

  def _counts_up(self, body: _Computation, place: int) -> bool:
    """Returns whether the part of a loop's carry at this place grows by 1 in each turn."""
    root = body.instructions[body.root]
    if root.opcode != "tuple" or len(root.operands) <= place:
      return False
    after = body.instructions[root.operands[place]]
    while after.opcode in ("copy", "bitcast") and after.operands[0] in body.instructions:
      after = body.instructions[after.operands[0]]
    if after.opcode != "add":
      return False
    terms = [body.instructions.get(name) for name in after.operands]
    return any(term and term.opcode == "constant" and term.inside == "1" for term in terms)

  def _flops(self, computation: _Computation, each: _Instruction) -> tuple[float, float]:
    """Returns (flops, flops with operands of at most 16 bits), including fused instructions."""
    operands = [
      array for name in each.operands for array in computation.arrays_of(name)[:1]
    ]
    count = _product_flops(each, operands)
    narrow = count if operands and width(operands[0].kind) <= 2 else 0.0
    if each.opcode == "fusion":
      for name in each.callees("calls"):
        inner = self.computations[name]
        for part in inner.instructions.values():
          flops, narrow_flops = self._flops(inner, part)
          count += flops
          narrow += narrow_flops
    return count, narrow

  def _traffic(self, computation: _Computation, each: _Instruction) -> float:
    """Returns the number of bytes of device memory that an instruction reads and writes."""
    inner = None
    if each.opcode == "fusion":
      (name,) = each.callees("calls")
      inner = self.computations[name]
    # An operand that occurs twice, as in x @ x, is read once.
    shares: dict[str, float] = {}
    for place, operand in enumerate(each.operands):
      if inner is not None:
        parameter = inner.parameter(place)
        share = self._share(inner, parameter) if parameter else 1.0
      else:
        share = self._share_of(computation, each, operand, place)
      shares[operand] = max(share, shares.get(operand, 0.0))
    total = float(self._bytes_written(computation, each, inner))
    for operand, share in shares.items():
      total += share * sum(array.num_bytes for array in computation.arrays_of(operand))
    return total

  def _bytes_written(
    self, computation: _Computation, each: _Instruction, inner: _Computation | None
  ) -> float:
    results = each.arrays
    if each.opcode == "custom-call":
      # The first result is the output. The others are scratch memory, whose use is not known.
      results = results[:1]
    if each.opcode.startswith("copy-start"):
      # The results are (destination, source, token), and only the destination is written.
      results = results[:1]
    if each.opcode in _RETURN_OPERANDS:
      results = results[len(each.operands) :]
    size = sum(array.num_bytes for array in results)
    root = each if inner is None else inner.instructions.get(inner.root)
    place = computation if inner is None else inner
    if root is not None and root.opcode == "dynamic-update-slice":
      # The update is made in place, so only the bytes of the update are written.
      whole = math.prod(root.arrays[0].shape) or 1
      update = place.arrays_of(root.operands[1])
      return size * math.prod(update[0].shape) / whole if update else size
    return size

  def _share(self, inner: _Computation, parameter: str) -> float:
    """Returns the share of a parameter that a fusion reads: the sum over the parameter's users, at
    most 1."""
    users = inner.users(parameter)
    shares = []
    for user in users:
      if user.opcode == "fusion":
        (name,) = user.callees("calls")
        nested = self.computations[name]
        known = nested.parameter(user.operands.index(parameter))
        shares.append(self._share(nested, known) if known else 1.0)
      else:
        place = user.operands.index(parameter)
        shares.append(self._share_of(inner, user, parameter, place))
    return min(1.0, sum(shares))

  def _share_of(
    self, computation: _Computation, user: _Instruction, operand: str, place: int
  ) -> float:
    """Returns the share of an operand that one instruction reads.

    A slice reads the part that it returns. An update in place does not read the old array.
    """
    held = computation.arrays_of(operand)
    whole = math.prod(held[0].shape) if held else 0
    if place == 0 and whole and user.opcode in _SLICES:
      part = user.arrays[user.opcode in _RETURN_OPERANDS]
      return math.prod(part.shape) / whole
    if place == 0 and user.opcode == "dynamic-update-slice":
      return 0.0
    return 1.0


def count_work(hlo: str) -> ProgramCounts:
  """Returns the work of `jax.jit(f).lower(...).compile().as_text()`, on one device.

  Args:
    hlo: text of a compiled program for any platform.

  >>> import jax, jax.numpy as jnp
  >>> product = jax.jit(jnp.dot).lower(jnp.ones((8, 32)), jnp.ones((32, 16))).compile()
  >>> count_work(product.as_text()).flops == 2 * 8 * 32 * 16
  True
  """
  reader = _Reader(hlo)
  return reader.counted(reader.entry)

"""The forward pass of a feed-forward net, recorded as layers with a relevance rule.

`record` walks the jaxpr of `apply(params, x)`. A value that depends on the parameters alone is a
constant. An equation that depends on the input becomes a node of one of the kinds below, with
one exception: a function of single entries (an activation, however it is written). Its result
shares the *root* of its operand, and relevance passes to the root unchanged. Calls (jit, custom
derivatives, remat) are entered.

This relies on JAX's `jax.make_jaxpr`, and on the names of the primitives listed here; tests pin
them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax import jaxprs
from dpjax.types import Params
from dpjax.validate import UserError

Array = jax.Array


class NodeKind(enum.Enum):
  """The operation of a node on its data operands."""

  LINEAR = enum.auto()  # a weighted sum: dense, convolution, sum-pool
  BIAS = enum.auto()  # adds a constant
  SCALE = enum.auto()  # multiplies by a constant array
  MOVE = enum.auto()  # moves entries to other places, unchanged
  ADD = enum.auto()  # adds two branches
  WINNER = enum.auto()  # takes the maximum of several entries


# Primitives that call one jaxpr.
_CALLS = {*jaxprs.CALLS, *jaxprs.REMATS, "custom_jvp_call", "custom_vjp_call"}
_LINEAR = {
  "dot_general", "conv_general_dilated", "reduce_sum", "reduce_window_sum", "cumsum"
}  # fmt: skip
_MOVE = {
  "reshape", "transpose", "squeeze", "expand_dims", "slice", "rev", "broadcast_in_dim",
  "pad", "concatenate", "gather", "dynamic_slice", "split",
}  # fmt: skip
_WINNER = {"reduce_window_max", "reduce_max"}
_AFFINE_ENTRYWISE = {"add", "add_any", "sub", "mul", "div", "neg"}
_SAME = {
  "convert_element_type",
  "copy",
  "copy_p",
  "reduce_precision",
  "optimization_barrier",
}
_ACTIVATION = {
  "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "cbrt", "ceil", "clamp",
  "cos", "cosh", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
  "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "ne",
  "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt",
  "square", "stop_gradient", "tan", "tanh", "xor",
}  # fmt: skip
_WAY_OUT = (
  "relevance is propagated through dense, convolution, pooling, activation, reshape and add "
  "only; return the logits of such a net (no softmax, no normalisation across entries)"
)


@dataclasses.dataclass(eq=False)
class Cell:
  """A value of the forward pass, and how it depends on the input."""

  value: Any
  data: bool = False  # whether the value depends on the input
  node: Node | None = None  # node that made it; None: x, a constant, an entrywise function
  source: Cell | None = None  # the root, if the value is an entrywise function of it
  scale: Any = 1.0  # value == scale * root.value, unless nonlinear
  nonlinear: bool = False
  uses: int = 0

  @property
  def root(self) -> Cell:
    """Returns the cell that holds the relevance of this cell."""
    return self if self.source is None else self.source


@dataclasses.dataclass(eq=False)
class Node:
  """An equation of the forward pass that depends on the input and has a relevance rule."""

  kind: NodeKind
  name: str
  operands: tuple[Cell, ...]
  outs: tuple[Cell, ...]
  call: Callable[..., list[Any]]  # (*operand values) -> values

  @property
  def data(self) -> tuple[Cell, ...]:
    """Returns the operands that depend on the input."""
    return tuple(cell for cell in self.operands if cell.data)

  def of_data(self, *values: Array, change: Callable = lambda constant: constant) -> list:
    """Computes the results for other values of the data operands. `change` is applied to
    constants."""
    remaining = iter(values)
    return self.call(
      *(next(remaining) if cell.data else change(cell.value) for cell in self.operands)
    )


class Tape(NamedTuple):
  """A recorded forward pass: its input, its nodes in order, and its output."""

  x: Cell
  nodes: tuple[Node, ...]
  out: Cell


def record(apply: Callable[..., Array], params: Params, x: Array) -> Tape:
  """Records the forward pass of `apply(params, x)`, x [B, ...].

  Raises:
    UserError: relevance has no rule for an operation, whose primitive the message names; the result
      does not depend on x, or is not one array.

  >>> tape = record(lambda w, x: jnp.tanh(x @ w), jnp.ones((3, 2)), jnp.ones((1, 3)))
  >>> [node.kind.name for node in tape.nodes], tape.out.root is tape.nodes[0].outs[0]
  (['LINEAR'], True)
  """
  closed, shape = jax.make_jaxpr(apply, return_shape=True)(params, x)
  if not hasattr(shape, "shape"):
    raise UserError("must return one array of logits [B, K]", field="apply")
  leaves = jax.tree.leaves(params)
  cell = Cell(x, data=True)
  recorder = _Recorder()
  (out,) = recorder.walk(closed, [*map(Cell, leaves), cell])
  if not out.data:
    raise UserError("the logits do not depend on x", field="apply")
  # The output of the net counts as a use of its cell.
  out.uses += 1
  return Tape(cell, tuple(recorder.nodes), out)


class _Recorder:
  def __init__(self) -> None:
    self.nodes: list[Node] = []

  def walk(self, closed: Any, inputs: Sequence[Cell]) -> list[Cell]:
    """Evaluates a closed jaxpr on cells, and records everything that depends on the input."""
    constants = list(map(Cell, getattr(closed, "consts", ())))
    jaxpr = jaxprs.open_jaxpr(closed)
    return jaxprs.evaluate(jaxpr, constants, inputs, self._equation, literal=Cell)

  def _equation(self, eqn: Any, operands: list[Cell]) -> list[Cell]:
    if not any(cell.data for cell in operands):
      return [Cell(value) for value in jaxprs.results_of(eqn, _values(operands))]
    if eqn.primitive.name in _CALLS:
      return self._call(eqn, operands)
    for cell in operands:
      cell.uses += 1
    return self._first_order(eqn, operands)

  def _call(self, eqn: Any, operands: list[Cell]) -> list[Cell]:
    (body,) = jaxprs.inside(eqn)
    if not _is_activation(eqn, body, operands):
      return self.walk(body, operands)
    # An activation makes no node, whatever steps it has inside. Its result shares the root of its
    # operand.
    (cell,) = (operand for operand in operands if operand.data)
    cell.uses += 1
    (out,) = _Recorder().walk(body, [Cell(operand.value) for operand in operands])
    return [_entrywise(cell, out.value, nonlinear=True)]

  def _first_order(self, eqn: Any, operands: list[Cell]) -> list[Cell]:
    name = eqn.primitive.name
    call = lambda *values: jaxprs.results_of(eqn, values)
    values = call(*_values(operands))
    data = [cell for cell in operands if cell.data]
    if name in _SAME:
      return [_entrywise(data[0], values[0], data[0].nonlinear, data[0].scale)]
    same_root = len({id(cell.root) for cell in data}) == 1
    if name in _ACTIVATION and same_root and _same_shape(data, values[0]):
      return [_entrywise(data[0], values[0], nonlinear=True)]
    if name in _AFFINE_ENTRYWISE and same_root:
      cell = _affine(name, operands, data, values[0])
      if cell is not None:
        return [cell]
    return self._add(_kind(name, operands), name, operands, call, values)

  def _add(self, kind: NodeKind, name: str, operands: list, call: Any, values: Any) -> list:
    outs = tuple(Cell(value, data=True) for value in values)
    node = Node(kind, name, tuple(operands), outs, call)
    for out in outs:
      out.node = node
    self.nodes.append(node)
    return list(outs)


def _values(cells: Sequence[Cell]) -> list[Any]:
  return [cell.value for cell in cells]


def _same_shape(data: Sequence[Cell], value: Any) -> bool:
  return all(jnp.shape(cell.value) == jnp.shape(value) for cell in data)


def _entrywise(of: Cell, value: Any, nonlinear: bool, scale: Any = 1.0) -> Cell:
  return Cell(value, data=True, source=of.root, scale=scale, nonlinear=nonlinear)


def _affine(name: str, operands: list, data: list, value: Any) -> Cell | None:
  """Returns the cell of a sum, difference, product or quotient whose data operands share ONE root;
  None if the equation needs a node.

  A scalar factor keeps the root. After a nonlinearity, any scalar constant keeps the root, since
  the constant is part of the activation, as in (1 + tanh(x)) / 2.
  """
  # Several functions of one root make one function of it: x + x^3, or x * sigmoid(x).
  if len(data) > 1:
    return _entrywise(data[0], value, nonlinear=True)
  (cell,) = data
  factor = _scalar_factor(name, operands)
  if cell.nonlinear and (factor is not None or _scalars_only(operands)):
    return _entrywise(cell, value, nonlinear=True)
  if factor is None or not _same_shape(data, value):
    return None
  return _entrywise(cell, value, nonlinear=False, scale=cell.scale * factor)


def _scalars_only(operands: list[Cell]) -> bool:
  return all(cell.data or jnp.size(cell.value) == 1 for cell in operands)


def _scalar_factor(name: str, operands: list[Cell]) -> Any:
  """Returns the factor of an equation that multiplies by one number; else None."""
  if name == "neg":
    return -1.0
  if name not in ("mul", "div") or not _scalars_only(operands):
    return None
  constant = next(cell.value for cell in operands if not cell.data)
  if name == "mul":
    return jnp.reshape(constant, ())
  return 1 / jnp.reshape(constant, ()) if operands[0].data else None


def _kind(name: str, operands: list[Cell]) -> NodeKind:
  data = sum(cell.data for cell in operands)
  first = operands[0].data
  rules: tuple[tuple[bool, NodeKind], ...] = (
    (name in _LINEAR and data == 1 and (first or name == "dot_general"), NodeKind.LINEAR),
    (name in _MOVE and (first or name == "concatenate"), NodeKind.MOVE),
    (name in _WINNER or (name == "max" and data == 2), NodeKind.WINNER),
    (name in ("add", "add_any", "sub") and data == 1 and first, NodeKind.BIAS),
    (name in ("add", "add_any") and data == 1, NodeKind.BIAS),
    (name in ("add", "add_any", "sub") and data == 2, NodeKind.ADD),
    (name in ("mul", "div") and data == 1 and (first or name == "mul"), NodeKind.SCALE),
  )
  for holds, kind in rules:
    if holds:
      return kind
  raise UserError(
    f"no relevance rule for the primitive {name!r} here: {_WAY_OUT}", field="apply"
  )


def _is_activation(eqn: Any, body: Any, operands: list[Cell]) -> bool:
  """Returns whether a call is one nonlinear function of the entries of one operand."""
  data = [cell for cell in operands if cell.data]
  shape = jnp.shape(data[0].value)
  if len(data) != 1 or len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape != shape:
    return False
  names = {*jaxprs.primitives(body)} - _CALLS
  entrywise = _ACTIVATION | _AFFINE_ENTRYWISE | _SAME | {"broadcast_in_dim"}
  return names <= entrywise and bool(names & _ACTIVATION)

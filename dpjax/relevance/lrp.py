"""Layer-wise relevance propagation: the inputs that a net's answer depends on.

| layer                    | rule                                                          |
| ------------------------ | ------------------------------------------------------------- |
| dense, conv, sum-pooling | `rule`: epsilon, z_plus or alpha_beta (below)                 |
| the first such layer     | `input_rule`: the same, or z_box for inputs in a known box    |
| maximum                  | the largest entry takes all; equal ones share                 |
| max-pooling              | the same, but one of equal entries takes all                  |
| sum of two branches      | in proportion to what each contributes                        |
| activation, reshape, ... | unchanged                                                     |

A layer z = f(a) + b with f linear passes the relevance R of z to a as follows (Bach et al.
2015, "On pixel-wise explanations"; the eqs. are those of its section 2.2):

- epsilon: a * f^T(R / (z + e sign(z))), sign(0) = 1 (eq. 58). The bias keeps its share.
- alpha_beta: alpha (share of z+) - beta (share of z-), with alpha - beta = 1 (eq. 60). z+ and
  z- are the sums of positive and of negative contributions, without the bias. z_plus has
  alpha = 1. Where alpha_beta finds contributions of one sign only, they share all relevance.
- z_box, for inputs in [low, high]: x f^T s - low f+^T s - high f-^T s with
  s = R / (f(x) - f+(low) - f-(high)) (Montavon et al. 2017, the z^B rule). f+ has only the
  positive weights of f, and f- only the negative ones.

Nothing here is private: relevance is computed from raw examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.relevance import tape as tapes
from dpjax.relevance.tape import Cell, Node, NodeKind, Tape
from dpjax.types import Array, HostArray, Params
from dpjax.validate import UserError

RULES = ("epsilon", "z_plus", "alpha_beta")
INPUT_RULES = ("same", "z_box")
TARGETS = ("true_class", "predicted_class", "all_logits")
# Smallest divisor of a relative gap. It is smaller than any relevance that matters.
_TINY = 1e-9
Apply = Callable[[Params, Any], Array]


@dataclasses.dataclass(frozen=True)
class Lrp:
  """Settings of relevance propagation.

  Args:
    rule: rule of weighted layers and of sums of branches: "epsilon" | "z_plus" | "alpha_beta".
    input_rule: rule of the first weighted layer: "same" | "z_box" (inputs in [low, high]).
    target: start of the propagation: the logit of the "true_class", of the "predicted_class", or
      "all_logits".
    stabilizer: e of the epsilon rule, >= 0; a larger one smooths more, and conserves less.
    alpha: alpha of alpha_beta, >= 1; beta is alpha - 1.
    low, high: bounds of the inputs, for "z_box".

  >>> Lrp(rule="epsilo")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: rule='epsilo': must be one of ... (did you mean 'epsilon'?)
  """

  rule: str = "epsilon"
  input_rule: str = "same"
  target: str = "true_class"
  stabilizer: float = 1e-2
  alpha: float = 2.0
  low: float = 0.0
  high: float = 1.0

  def __post_init__(self) -> None:
    validate.one_of(RULES, rule=self.rule)
    validate.one_of(INPUT_RULES, input_rule=self.input_rule)
    validate.one_of(TARGETS, target=self.target)
    # Contributions are float32, which holds larger numbers as infinity.
    validate.number_in(0, 1e30, stabilizer=self.stabilizer)
    validate.number_in(1, 1e30, alpha=self.alpha)
    validate.finite(low=self.low, high=self.high)
    if not self.low < self.high:
      raise UserError(f"must be above low={self.low!r}", field="high", value=self.high)

  def weights(self, above: Array, below: Array) -> tuple[Any, Any]:
    """Returns (alpha, beta) for sums of positive and of negative contributions."""
    if self.rule == "z_plus":
      return 1.0, 0.0
    # If contributions of one sign are missing, the other sign gets all relevance.
    alpha = jnp.where(below == 0, 1.0, self.alpha)
    return jnp.where(above == 0, 0.0, alpha), jnp.where(above == 0, -1.0, alpha - 1)


class Relevance(NamedTuple):
  """Relevance of each example. NOT private."""

  scores: Array  # [B, *x.shape[1:]], the relevance of each input entry
  logits: Array  # [B, K]
  start: Array  # [B], the relevance that the propagation starts with


def relevance(apply: Apply, params: Params, x: Array, y: Array, how: Lrp) -> Relevance:
  """Computes the relevance of each entry of x [B, ...] for the logits [B, K] of `apply`.

  Args:
    y: [B] integer labels; used by target "true_class" only.

  Raises:
    UserError: an operation has no rule, and the message names it; `apply` does not return one
      array of logits [B, K], or they do not depend on x. All are raised while tracing.

  >>> w = jnp.array([[1.0, -1.0], [2.0, 0.0]])
  >>> how = Lrp(target="true_class", stabilizer=0.0)
  >>> scored = relevance(lambda w, x: x @ w, w, jnp.array([[1.0, 3.0]]), jnp.array([0]), how)
  >>> scored.scores.tolist(), scored.start.tolist()  # 1 * 1 + 3 * 2 = 7
  ([[1.0, 6.0]], [7.0])
  """
  x = trees.at_least_float32(jnp.asarray(x))
  recorded = tapes.record(apply, params, x)
  logits = recorded.out.value
  if jnp.ndim(logits) != 2 or logits.shape[0] != x.shape[0]:
    raise UserError(f"must return logits [B, K], got {jnp.shape(logits)}", field="apply")
  start = logits
  if how.target != "all_logits":
    # Relevance starts from the logit of one class.
    chosen = jnp.asarray(y) if how.target == "true_class" else jnp.argmax(logits, axis=1)
    start = logits * jax.nn.one_hot(chosen, logits.shape[1], dtype=logits.dtype)
  scores = _propagate(recorded, start, how)
  return Relevance(scores, logits, start.sum(axis=1))


def conservation_gap(scored: Relevance) -> Array:
  """Returns the gaps [B]: |sum of the scores - start| / max(|start|, 1e-9), where start is
  `scored.start`.

  A gap is the share of relevance that is lost or added. Biases and the stabilizer take some, and so
  does a sum without contributions of the sign that the rule needs.
  """
  total = scored.scores.reshape(scored.scores.shape[0], -1).sum(axis=1)
  return jnp.abs(total - scored.start) / jnp.maximum(jnp.abs(scored.start), _TINY)


def heat_map(scores: HostArray) -> np.ndarray:
  """Renders scores [H, W] or [H, W, C] as a picture [H, W, 3] in [0, 1]. Channels are
  summed. Red supports the class, blue opposes it, white is neutral.

  >>> heat_map(np.array([[1.0, -0.5, 0.0]])).tolist()
  [[[1.0, 0.0, 0.0], [0.5, 0.5, 1.0], [1.0, 1.0, 1.0]]]
  """
  scores = np.asarray(scores, np.float64)
  scores = scores.sum(axis=-1) if scores.ndim == 3 else scores
  scaled = scores / max(np.abs(scores).max(), 1e-30)
  fade = 1 - np.abs(scaled)
  red = np.where(scaled >= 0, 1.0, fade)
  blue = np.where(scaled <= 0, 1.0, fade)
  return np.stack([red, fade, blue], axis=-1)


class _Credits:
  """The relevance that has arrived at each cell so far."""

  def __init__(self) -> None:
    self._held: dict[int, Array] = {}

  def add(self, cell: Cell, relevance_of: Array) -> None:
    key = id(cell.root)
    self._held[key] = self._held[key] + relevance_of if key in self._held else relevance_of

  def take(self, cell: Cell) -> Array:
    return self._held.pop(id(cell), jnp.zeros_like(cell.value))


def _propagate(recorded: Tape, start: Array, how: Lrp) -> Array:
  credits = _Credits()
  done = set()
  credits.add(recorded.out, start)
  for node in reversed(recorded.nodes):
    # A weighted sum may already be processed, together with a bias after it.
    if id(node) in done:
      continue
    layer = _layer(node, recorded.x)
    done.update(map(id, layer.nodes))
    arrived = tuple(credits.take(out) for out in node.outs)
    for cell, handed in zip(layer.data, _hand_down(layer, arrived, how)):
      credits.add(cell, handed)
  return credits.take(recorded.x)


class _Layer(NamedTuple):
  """Nodes that form one layer: a single node, or a weighted sum and the nodes after it up to the
  last bias."""

  nodes: tuple[Node, ...]  # in the order of the forward pass
  scales: tuple[Any, ...]  # scalar factor on the result of each node
  # f if the layer reads f times entries of the network's input, in any arrangement; else None
  input_factor: Any | None

  @property
  def data(self) -> tuple[Cell, ...]:
    return self.nodes[0].data

  @property
  def kind(self) -> NodeKind:
    return self.nodes[0].kind


def _layer(node: Node, x: Cell) -> _Layer:
  """Returns the layer that ends with a node; a bias joins the weighted sum before it."""
  nodes = [node]
  scales = [1.0]
  while nodes[0].kind is not NodeKind.LINEAR and node.kind is NodeKind.BIAS:
    before = _only_before(nodes[0])
    if before is None:
      # The bias has no weighted sum before it, so it is a layer alone.
      nodes = [node]
      scales = [1.0]
      break
    scales.insert(0, nodes[0].data[0].scale)
    nodes.insert(0, before)
  return _Layer(tuple(nodes), tuple(scales), _factor_of_input(nodes[0].data[0], x))


def _only_before(node: Node) -> Node | None:
  """Returns the node before `node` if it can be in the same layer and only `node` uses its result;
  else None."""
  cell = node.data[0]
  before = cell.root.node
  if cell.nonlinear or before is None or cell.uses != 1 or cell.root.uses != 1:
    return None
  chained = before.kind in (NodeKind.LINEAR, NodeKind.BIAS, NodeKind.SCALE, NodeKind.MOVE)
  return before if chained and len(before.data) == len(before.outs) == 1 else None


def _factor_of_input(cell: Cell, x: Cell) -> Any | None:
  """Returns f if the values of a cell are f times moved entries of the input; else None."""
  factor = cell.scale
  while cell.root is not x and not cell.nonlinear:
    node = cell.root.node
    if node is None or node.kind is not NodeKind.MOVE or len(node.data) != 1:
      return None
    cell = node.data[0]
    factor = factor * cell.scale
  return None if cell.nonlinear else factor


def _hand_down(layer: _Layer, arrived: tuple[Array, ...], how: Lrp) -> tuple[Array, ...]:
  """Returns the relevance that each data operand of a layer gets from the layer's outputs."""
  node = layer.nodes[0]
  values = tuple(cell.value for cell in layer.data)
  # The derivative of a move, or of a maximum, shows where its entries came from.
  if layer.kind in (NodeKind.MOVE, NodeKind.WINNER):
    return jax.vjp(node.of_data, *values)[1](list(arrived))
  # A factor changes values, but not shares of relevance.
  if layer.kind is NodeKind.SCALE:
    return (arrived[0],)
  if layer.kind is NodeKind.LINEAR:
    return (_weighted(layer, values[0], arrived[0], how),)
  return _distribute(node, values, arrived[0], how)


def _distribute(
  node: Node, values: tuple[Array, ...], arrived: Array, how: Lrp
) -> tuple[Array, ...]:
  """Distributes relevance over the operands of a sum of branches, or to the operand of a lone bias.
  The contribution of an operand is its value, or minus its value if it is subtracted."""
  if node.kind is NodeKind.BIAS:
    parts: tuple[Array, ...] = (values[0],)
  else:
    parts = (values[0], -values[1] if node.name == "sub" else values[1])
  if how.rule == "epsilon":
    share = _ratio(arrived, _stabilize(node.outs[0].value, how.stabilizer))
    return tuple(_sum_like(part * share, value) for part, value in zip(parts, values))
  return tuple(
    _sum_like(_signed_share(part, parts, arrived, how), value)
    for part, value in zip(parts, values)
  )


def _signed_share(part: Array, parts: Any, arrived: Array, how: Lrp) -> Array:
  above: Any = sum(jnp.maximum(p, 0) for p in parts)
  below: Any = sum(jnp.minimum(p, 0) for p in parts)
  alpha, beta = how.weights(above, below)
  handed = jnp.maximum(part, 0) * _ratio(alpha * arrived, above)
  return handed - jnp.minimum(part, 0) * _ratio(beta * arrived, below)


def _sum_like(handed: Array, value: Array) -> Array:
  """Sums over the axes along which an operand was broadcast."""
  if handed.shape == value.shape:
    return handed
  axes = tuple(i for i, size in enumerate(value.shape) if size != handed.shape[i])
  return handed.sum(axis=axes, keepdims=True)


def _ratio(numerator: Array, denominator: Array) -> Array:
  # Without contributions, nothing is passed down.
  zero = denominator == 0
  return jnp.where(zero, 0, numerator / jnp.where(zero, 1, denominator))


def _stabilize(z: Array, stabilizer: float) -> Array:
  # sign(0) is 1 here, or a z of 0 would remain a divisor of 0.
  return z + stabilizer * jnp.where(z >= 0, 1.0, -1.0).astype(z.dtype)


def _weighted(layer: _Layer, a: Array, arrived: Array, how: Lrp) -> Array:
  if layer.input_factor is not None and how.input_rule == "z_box":
    return _z_box(layer, a, arrived, how)
  if how.rule == "epsilon":
    z = layer.nodes[-1].outs[0].value
    share = _ratio(arrived, _stabilize(z, how.stabilizer))
    return a * _transpose(lambda v: _linear(layer, v), a, share)
  return _alpha_beta(layer, a, arrived, how)


def _transpose(f: Callable[[Array], Array], a: Array, cotangent: Array) -> Array:
  return jax.vjp(f, a)[1](cotangent)[0]


def _linear(layer: _Layer, a: Array) -> Array:
  """Returns the output of the layer for operand a, without the layer's biases."""
  positive, negative = _parts(layer, a, split=False)
  return positive + negative


def _parts(layer: _Layer, a: Array, split: bool = True) -> tuple[Array, Array]:
  """Returns (f+(a), f-(a)): outputs of the layer with only its positive weights, and with only its
  negative weights. Without `split` they are (f(a), 0)."""
  node = layer.nodes[0]
  has_weights = len(node.operands) > 1
  if split and has_weights:
    (above,) = node.of_data(a, change=lambda w: jnp.maximum(w, 0))
    (below,) = node.of_data(a, change=lambda w: jnp.minimum(w, 0))
  else:
    (above,) = node.of_data(a)
    below = jnp.zeros_like(above)
  parts = _scale((above, below), layer.scales[0])
  for step, scale in zip(layer.nodes[1:], layer.scales[1:]):
    parts = _scale(_follow(step, parts), scale)
  return parts


def _scale(parts: tuple[Array, Array], factor: Any) -> tuple[Array, Array]:
  above, below = parts
  # A negative factor exchanges the positive and the negative part.
  up = jnp.maximum(factor, 0)
  down = jnp.minimum(factor, 0)
  return up * above + down * below, up * below + down * above


def _follow(step: Node, parts: tuple[Array, Array]) -> tuple[Array, Array]:
  if step.kind is NodeKind.BIAS:
    return parts
  if step.kind is NodeKind.MOVE:
    return step.of_data(parts[0])[0], step.of_data(parts[1])[0]
  # The remaining kind is SCALE. Such a node gives its factor if it is applied to ones.
  (factor,) = step.of_data(jnp.ones_like(parts[0]))
  return _scale(parts, factor)


def _alpha_beta(layer: _Layer, a: Array, arrived: Array, how: Lrp) -> Array:
  """Applies alpha_beta or z_plus, which split the weights and the inputs by sign."""
  above = lambda v: _parts(layer, v)[0]
  below = lambda v: _parts(layer, v)[1]
  plus = jnp.maximum(a, 0)
  minus = jnp.minimum(a, 0)
  sums = above(plus) + below(minus), above(minus) + below(plus)
  alpha, beta = how.weights(*sums)
  for_plus = _ratio(alpha * arrived, sums[0])
  for_minus = _ratio(beta * arrived, sums[1])
  rises = plus * _transpose(above, a, for_plus) + minus * _transpose(below, a, for_plus)
  if how.rule == "z_plus":
    return rises
  falls = minus * _transpose(above, a, for_minus) + plus * _transpose(below, a, for_minus)
  return rises - falls


def _z_box(layer: _Layer, x: Array, arrived: Array, how: Lrp) -> Array:
  above = lambda v: _parts(layer, v)[0]
  below = lambda v: _parts(layer, v)[1]
  whole = lambda v: _linear(layer, v)
  # The bounds are those of the input. A negative factor swaps them.
  ends = jnp.asarray(layer.input_factor, x.dtype) * jnp.asarray(
    [how.low, how.high], x.dtype
  )
  low = jnp.full_like(x, jnp.min(ends))
  high = jnp.full_like(x, jnp.max(ends))
  share = _ratio(arrived, whole(x) - above(low) - below(high))
  handed = x * _transpose(whole, x, share)
  handed = handed - low * _transpose(above, x, share)
  return handed - high * _transpose(below, x, share)

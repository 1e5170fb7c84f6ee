"""Losses of ONE example, built from a model's `apply(params, x [1, ...])`.

Each is a `dpjax.types.LossFn`: it sees one example and adds a batch axis of length 1, which
models expect. So no example can affect another's gradient. All reductions are in float32 or
wider, whatever type the model computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import trees, validate
from dpjax.types import Array, Example, LossFn, Params
from dpjax.validate import UserError, Verbatim

_INTEGERS = ("one integer", "integer tokens [T]", "integer tokens [m, T]")  # by rank
REDUCTIONS = ("mean", "sum")
Apply = Callable[[Params, Any], Array]  # (params, x [B, ...]) -> outputs [B, ...]


def _outputs(apply: Apply, params: Params, x: Any, rank: int, what: str) -> Array:
  """Returns apply's output for one example, without the batch axis: float32 or wider."""
  validate.apply_function(apply=apply)
  # A list of numbers becomes one array; each entry of a dict is an array by itself.
  alone = x if isinstance(x, dict) else jnp.asarray(x)
  batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], alone)
  outputs = apply(params, batch)
  if jnp.ndim(outputs) != rank or jnp.shape(outputs)[0] != 1:
    raise UserError(
      f"must return {what} for x of shape {trees.shapes(batch)}, got {jnp.shape(outputs)}",
      field="apply",
    )
  return trees.at_least_float32(outputs[0])


def _check_example(example: Any) -> None:
  """Raises UserError unless this is one example with x and y, such as an array or swapped
  arguments are not."""
  if not (hasattr(example, "x") and hasattr(example, "y")):
    raise UserError(
      "must be ONE dpjax.Example(x, y), as data sets of dpjax.data hold; of blocks of users: "
      "dpjax.sampling.user_loss(loss_fn); of other trees write a loss of your own",
      field="example",
      value=Verbatim(type(example).__name__),
    )


def _cross_entropy(logits: Array, labels: Array) -> Array:
  """Returns cross-entropies in nats, [...], of logits [..., K] and integer labels [...]."""
  picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - picked


def _integers(value: Any, name: str, rank: int) -> Array:
  array = jnp.asarray(value)
  if array.ndim != rank or not jnp.issubdtype(array.dtype, jnp.integer):
    raise UserError(
      f"must be {_INTEGERS[rank]} (a loss sees ONE example), got {array.dtype} "
      f"of shape {array.shape}",
      field=f"example.{name}",
    )
  return array


def softmax_cross_entropy(
  apply: Apply, *, class_weights: Sequence[float] | None = None
) -> LossFn:
  """Cross-entropy of one example's logits [1, K] with its integer label `example.y`.

  It is log sum_k exp(logits[k]) - logits[y] nats, in float32 or wider even if the model returns
  bfloat16. `dpjax.data` checks that labels are in [0, K); this loss does not.

  Args:
    class_weights: public constant of each class, [K], by which the loss of its examples is
      multiplied, before gradients are clipped. They cost no privacy. Weights that are computed from
      private labels would: every label changes all of them. Let the largest be 1: a gradient at the
      clip norm would be cut to the length that it had.

  Raises:
    UserError: weights that are no sequence of finite numbers >= 0. During tracing, if apply does
      not return [1, K], or y is not ONE integer (for example because a whole batch was passed), or
      there are not K weights.

  >>> loss = softmax_cross_entropy(lambda params, x: x @ params)  # logits = x
  >>> example = Example(x=jnp.log(jnp.array([1.0, 3.0])), y=1)
  >>> print(round(float(loss(jnp.eye(2), example)), 4))  # -log(3 / 4)
  0.2877
  """
  weights: Any = None
  if class_weights is not None:
    weights = np.asarray(class_weights)
    # With NaN no example of the class would count, and with -1 a step would raise its loss.
    right = weights.ndim == 1 and weights.dtype.kind in "iuf"
    if not (right and np.isfinite(weights).all() and (weights >= 0).all()):
      raise UserError(
        "must be a sequence of finite numbers >= 0, one for each class",
        field="class_weights",
        value=class_weights,
      )

  def loss(params: Params, example: Example) -> Array:
    _check_example(example)
    label = _integers(example.y, "y", 0)
    logits = _outputs(apply, params, example.x, 2, "logits [1, K]")
    nats = _cross_entropy(logits, label)
    if weights is None:
      return nats
    if logits.shape != weights.shape:
      raise UserError(
        f"must have one weight for each of {logits.shape[0]} classes",
        field="class_weights",
        value=class_weights,
      )
    return nats * jnp.asarray(weights, logits.dtype)[label]

  return loss


def sigmoid_cross_entropy(apply: Apply) -> LossFn:
  """Mean over the labels of the binary cross-entropy of one example, in nats.

  `example.y` holds 0 or 1 for each of K labels, [K]; apply returns one logit for each, [1, K].
  The mean is over labels of ONE example, so nothing is shared between examples.

  Raises:
    UserError: during tracing, if y does not have the shape [K] of one example's logits.

  >>> loss = sigmoid_cross_entropy(lambda params, x: x * params)  # logits = x
  >>> example = Example(x=jnp.log(jnp.array([3.0, 1.0])), y=jnp.array([1, 0]))
  >>> print(round(float(loss(jnp.float32(1), example)), 4))  # (log(4 / 3) + log 2) / 2
  0.4904
  """

  def loss(params: Params, example: Example) -> Array:
    _check_example(example)
    logits = _outputs(apply, params, example.x, 2, "logits [1, K]")
    labels = jnp.asarray(example.y)
    # Shapes must be equal: broadcasting one label to many logits would make another loss.
    if labels.shape != logits.shape:
      raise UserError(
        f"must hold 0 or 1 for each of {logits.shape[0]} logits, got shape {labels.shape}",
        field="example.y",
      )
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels.astype(logits.dtype)))

  return loss


def mean_squared_error(apply: Apply) -> LossFn:
  """Mean over the outputs of (apply(params, x) - y)^2, for one example.

  y has the shape of one output; if the output has one entry, y may be any array of one entry.
  Nothing else is broadcast.

  >>> loss = mean_squared_error(lambda params, x: params * x)
  >>> example = Example(x=jnp.array([1.0, 2.0]), y=jnp.array([1.0, 1.0]))
  >>> print(loss(jnp.float32(2.0), example))  # ((2 - 1)^2 + (4 - 1)^2) / 2
  5.0
  """

  def loss(params: Params, example: Example) -> Array:
    _check_example(example)
    validate.apply_function(apply=apply)
    outputs = apply(params, jnp.asarray(example.x)[None])
    target = jnp.asarray(example.y)
    same = jnp.shape(outputs) == (1, *target.shape)
    if not same and (jnp.size(outputs) != 1 or target.size != 1):
      raise UserError(
        f"shape {target.shape} must be that of one output: apply returned "
        f"{jnp.shape(outputs)}",
        field="example.y",
      )
    # Outputs and targets are flattened, so that neither is broadcast to the other's shape.
    outputs = trees.at_least_float32(jnp.asarray(outputs)).ravel()
    error = outputs - target.astype(outputs.dtype).ravel()
    return jnp.mean(error * error)

  return loss


def next_token(
  apply: Apply,
  *,
  padding_id: int | None = None,
  sequences: bool = False,
  reduction: str = "mean",
  weights: Callable[[Array], Array] | None = None,
) -> LossFn:
  """Cross-entropy of the tokens of one example, each predicted from those before it.

  An example is one sequence of tokens, `example.x` [T] (then m = 1), or m `sequences`. `apply` gets
  tokens [m, T - 1], returns logits [m, T - 1, V], and must be causal. `example.y` is unused.

  No loss is divided by anything that depends on other examples. Dividing by the tokens of the
  whole batch, as is usual without privacy, would let every example change the gradients of all
  others. Then no clip norm bounds the effect of one example. For a public divisor of the sum
  use `normalize_by` of a `Plan`.

  Args:
    padding_id: targets equal to it are left out; a loss without any other target is 0.
    sequences: whether an example is m sequences of one user, with `example.x` tokens [m, T].
    reduction: "mean" or "sum" over the tokens of the example. With "sum", long examples weigh
      more before clipping.
    weights: function of targets [m, T - 1] that returns their weights [m, T - 1], at least 0. It
      must use nothing but these targets. "mean" is then the weighted mean, sum of w * loss / sum of
      w.

  Raises:
    UserError: during tracing: tokens that are no integers or not of one example, fewer than 2
      in a sequence, weights or logits of another shape.

  >>> uniform = lambda params, tokens: jnp.zeros((*tokens.shape, 8)) + params  # doctest: +SLOW
  >>> print(round(float(next_token(uniform)(0.0, Example(jnp.arange(5), 0))), 4))  # log 8
  2.0794
  >>> loss = next_token(uniform, padding_id=0, reduction="sum")
  >>> print(round(float(loss(0.0, Example(jnp.array([5, 3, 7, 0]), 0))), 4))  # 2 log 8
  4.1589
  """
  validate.one_of(REDUCTIONS, reduction=reduction)

  def loss(params: Params, example: Example) -> Array:
    _check_example(example)
    tokens = _integers(example.x, "x", 2 if sequences else 1)
    if tokens.shape[-1] < 2:
      raise UserError(
        f"must hold at least 2 tokens, got {tokens.shape[-1]}", field="example.x"
      )
    tokens = tokens if sequences else tokens[None]
    logits = apply(params, tokens[:, :-1])
    targets = tokens[:, 1:]
    if jnp.ndim(logits) != 3 or jnp.shape(logits)[:2] != targets.shape:
      shapes = f"for x of shape {targets.shape}, got {jnp.shape(logits)}"
      wanted = "[m, T, V]" if sequences else "[1, T, V]"
      raise UserError(f"must return logits {wanted} {shapes}", field="apply")
    losses = _cross_entropy(trees.at_least_float32(jnp.asarray(logits)), targets)
    shares = _shares(targets, padding_id, weights).astype(losses.dtype)
    # A loss of weight 0 may be infinite, and 0 times infinity is NaN. So that loss is set to 0.
    total = jnp.sum(jnp.where(shares > 0, losses, 0) * shares)
    if reduction == "sum":
      return total
    weight = jnp.sum(shares)
    return total / jnp.where(weight > 0, weight, 1)

  return loss


def _shares(targets: Array, padding_id: int | None, weights: Any) -> Array:
  """Returns each target's weight in the loss, 0 for padding: [m, T - 1]."""
  kept = jnp.ones(targets.shape, bool) if padding_id is None else targets != padding_id
  if weights is None:
    return kept
  scale = jnp.asarray(weights(targets))
  if scale.shape != targets.shape:
    raise UserError(f"must be of shape {targets.shape}, got {scale.shape}", field="weights")
  return jnp.where(kept, trees.at_least_float32(scale), 0)

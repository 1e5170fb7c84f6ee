"""Leaks of a gradient that need no search: labels, and the input of a first dense layer.

Both attacks read the gradient of one layer, which is found by the name of its module. A FedAvg
message of one SGD step is the gradient times -learning_rate (`as_gradient`). Neither clipping nor
momentum protects the input: it is the ratio of two gradients, which no common factor changes.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dpjax import trees, validate
from dpjax.types import Array, ArrayTree, HostArray
from dpjax.validate import UserError


class NothingSent(UserError):
  """Error for a gradient that holds nothing of the examples."""


def check_seen(seen: ArrayTree) -> None:
  """Raises UserError unless every leaf holds finite real floating-point numbers.

  >>> check_seen({"delta": np.array([np.nan])})
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: seen['delta']: must be finite, holds 1 number that is NaN or infinite
  """
  leaves = jax.tree_util.tree_leaves_with_path(seen)
  if not leaves:
    raise UserError("must be a gradient or a message, holds no array", field="seen")
  for path, leaf in leaves:
    name = f"seen{jax.tree_util.keystr(path)}"
    array = np.asarray(leaf)
    if not np.issubdtype(array.dtype, np.floating) and array.dtype.name != "bfloat16":
      raise UserError(f"must be real floating-point numbers, is {array.dtype}", field=name)
    bad = int(np.sum(~np.isfinite(array.astype(np.float64))))
    if bad:
      are = "number that is" if bad == 1 else "numbers that are"
      raise UserError(f"must be finite, holds {bad} {are} NaN or infinite", field=name)


def as_gradient(
  message: ArrayTree, *, learning_rate: float, num_steps: int = 1
) -> ArrayTree:
  """Returns -message / (learning_rate * num_steps): the mean gradient of `num_steps` SGD steps.

  For one plain step it is the gradient at the parameters that the client received. For several
  steps it is near that gradient, with an error of the order of the learning rate.

  >>> as_gradient({"delta": np.array([-0.5])}, learning_rate=0.1)
  {'delta': array([5.])}
  """
  validate.positive(learning_rate=learning_rate)
  validate.integer_at_least(1, num_steps=num_steps)
  return trees.scale(message, -1.0 / (learning_rate * num_steps))


def dense_layer(seen: ArrayTree, layer: str, *, bias: str = "") -> dict[str, np.ndarray]:
  """Returns the leaves of the dense module `layer`, in float64: {"kernel": [d, m], "bias": [m]}.

  Args:
    bias: what the bias is needed for; "": it may be missing.

  Raises:
    UserError: no module or several have that name, the kernel is no matrix, or the bias is missing.

  >>> seen = {"params": {"head": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}}}
  >>> sorted(dense_layer(seen, "head"))
  ['bias', 'kernel']
  """
  check_seen(seen)
  leaves = jax.tree_util.tree_leaves_with_path(seen)
  parts = [trees.path_parts(path) for path, _ in leaves]
  modules = sorted({"/".join(part[:-1]) for part in parts if part[-1:] == ["kernel"]})
  matches = [module for module in modules if f"/{module}".endswith(f"/{layer}")]
  if len(matches) != 1:
    known = ", ".join(modules) or "none"
    raise UserError(
      f"must name one of the layers with a kernel: {known}", field="layer", value=layer
    )
  inside = {
    part[-1]: np.asarray(leaf, np.float64)
    for part, (_, leaf) in zip(parts, leaves)
    if "/".join(part[:-1]) == matches[0]
  }
  if inside["kernel"].ndim != 2:
    shape = inside["kernel"].shape
    raise UserError(
      f"must be dense, its kernel has shape {shape}", field="layer", value=layer
    )
  if bias and "bias" not in inside:
    raise UserError(f"must have a bias, {bias}", field="layer", value=layer)
  return inside


def first_dense(seen: ArrayTree, layer: str = "dense_0") -> np.ndarray:
  """Returns the input of a dense layer with a bias, from its gradient alone: [d], flattened.

  dL/dW = sum_i x_i delta_i^T and dL/db = sum_i delta_i. At batch size 1 every column of dL/dW is x
  times an entry of dL/db, so x = dL/dW dL/db / |dL/db|^2 exactly. This holds for any loss, any
  later layers, and any number of steps on the one example. For larger batches the result is a
  mixture of the inputs.

  Raises:
    UserError: no such layer, a layer without a bias, or a bias whose gradient is 0.

  >>> x, delta = np.array([1.0, 2.0]), np.array([0.5, -1.0, 0.0])
  >>> first_dense({"dense_0": {"kernel": np.outer(x, delta), "bias": delta}}).tolist()
  [1.0, 2.0]
  """
  dense = dense_layer(seen, layer, bias="by whose gradient is divided")
  kernel = dense["kernel"]
  bias = dense["bias"]
  # The bias is scaled by its largest entry, so that its squares do not underflow.
  bias = bias / (np.max(np.abs(bias)) or 1.0)
  if not bias.any():
    raise NothingSent(
      "the gradient of its bias is 0; nothing of x is in it", field="layer", value=layer
    )
  return kernel @ bias / (bias @ bias) / (np.max(np.abs(dense["bias"])))


def infer_labels(
  gradient: ArrayTree,
  *,
  batch_size: int,
  layer: str = "head",
  probabilities: HostArray | None = None,
) -> np.ndarray:
  """Infers the labels of a batch from the last layer's gradient under cross-entropy: [B], sorted.

  The bias has the gradient g, the mean of p_i - onehot(y_i). At batch size 1 the one negative entry
  of g marks the label, exactly and at any scale (iDLG, Zhao et al. 2020). For larger batches class
  k has B * (p_k - g_k) examples, but the mean probability p_k has to be guessed. So B labels are
  taken one by one. Each is the class with the largest number of examples left (after LLG, Wainakh
  et al. 2022). This is nearly exact while the model knows little; the scale of the gradient must be
  right.

  Without a bias, column k of the kernel's gradient is g_k times the features at batch size 1. The
  label's column is the one whose inner product with every other column is <= 0, for any features
  (iDLG). If two columns are so (two classes, or all others have probability 0), they differ in
  sign alone: the one with the smaller sum is taken, which is right for features that are not
  negative. For larger batches, sums over the kernel's rows replace g, for such features.

  Args:
    gradient: gradient of the mean loss (from a FedAvg message: `as_gradient`).
    batch_size: number B of examples.
    layer: name of the last layer.
    probabilities: [K], mean outputs of the model on data like the client's; None: 1 / K each.

  Raises:
    UserError: batch_size < 1, no such layer, or probabilities of another length.

  >>> infer_labels({"head": {"kernel": np.ones((1, 3)), "bias": np.array([0.2, -0.5, 0.3])}},
  ...   batch_size=1)
  array([1])
  """
  validate.integer_at_least(1, batch_size=batch_size)
  dense = dense_layer(gradient, layer)
  slope = dense["bias"] if "bias" in dense else dense["kernel"].sum(0)
  count = len(slope)
  mean = np.full(count, 1 / count) if probabilities is None else np.asarray(probabilities)
  if mean.shape != (count,):
    raise UserError(
      f"must be {count} numbers, got shape {mean.shape}", field="probabilities"
    )
  if batch_size == 1 and "bias" not in dense:
    # Columns are scaled by the largest entry, so that products neither under- nor overflow.
    kernel = dense["kernel"] / (np.max(np.abs(dense["kernel"])) or 1.0)
    products = kernel.T @ kernel
    # A class of probability 0 has a column of zeros, which no label has.
    empty = ~np.diag(products).astype(bool)
    np.fill_diagonal(products, -np.inf)
    worst = np.where(empty, np.inf, products.max(axis=1))
    likely = worst <= max(0.0, worst.min())
    return np.array([int(np.argmin(np.where(likely, slope, np.inf)))])
  if batch_size == 1:
    return np.array([int(np.argmin(slope))])
  left = batch_size * (mean - slope)
  labels = []
  for _ in range(batch_size):
    labels.append(int(np.argmax(left)))
    left[labels[-1]] -= 1
  return np.sort(np.array(labels))


def check_labels(labels: Array | HostArray, batch_size: int, num_classes: int) -> Any:
  """Returns labels as int32 [B]. Raises UserError unless each example has a label in 0 .. K - 1.

  >>> check_labels([3], 1, 3)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: labels: must be in 0..2 (num_classes=3), got 3
  """
  array = np.asarray(labels)
  if array.shape != (batch_size,) or not np.issubdtype(array.dtype, np.integer):
    raise UserError(
      f"must be {batch_size} integers, one for each example, got {array.dtype} "
      f"of shape {array.shape}",
      field="labels",
    )
  outside = array[(array < 0) | (array >= num_classes)]
  if outside.size:
    raise UserError(
      f"must be in 0..{num_classes - 1} (num_classes={num_classes}), got {outside[0]}",
      field="labels",
    )
  return array.astype(np.int32)

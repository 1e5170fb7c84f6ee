"""Views: what an adversary sees of a client or a training step, as a function of its examples.

A view is `examples -> message`. One function makes the true message, from true examples and the
client's key. With guessed examples it makes the message that an inversion differentiates. Clients
of `dpjax.federated` run unchanged, with their local steps, clipping, noise and compression.

| access                       | the message                                                  |
| ---------------------------- | ------------------------------------------------------------ |
| `gradient_view`              | the mean gradient of a batch, each example clipped or not    |
| `client_view`                | what a `ClientAlgorithm` sends after its local work          |

An adversary knows what is public: model, loss, optimizer, number of steps. It does not know the
key, so it simulates a client without noise. It cannot differentiate through rounded codes, so it
simulates a client without compression.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.federated.client import ClientAlgorithm, Received, mean_grad
from dpjax.federated.cohort import LocalBatches
from dpjax.gradients.clipping import clip_and_sum
from dpjax.types import Array, ArrayTree, Example, LossFn, Params
from dpjax.validate import UserError

# Function from examples, with leaves [B, ...], to the message. Labels are [B], or probabilities
# [B, K].
View = Callable[[Example], ArrayTree]


def soft_labels(loss_fn: LossFn) -> LossFn:
  """Returns the loss with labels that may also be a distribution [K]: sum_k y_k loss(k).

  For cross-entropy this is the usual form. It lets an attack search for labels; the network itself
  is still evaluated once. Integer labels keep their meaning.

  >>> loss = soft_labels(lambda w, example: w * example.y)
  >>> float(loss(1.0, Example(0.0, 2))), float(loss(1.0, Example(0.0, jnp.array([0.5, 0.5]))))
  (2.0, 0.5)
  """

  def loss(params: Params, example: Example) -> Array:
    if jnp.ndim(example.y) == 0:
      return loss_fn(params, example)
    labels = jnp.arange(jnp.shape(example.y)[0])
    each = jax.vmap(lambda label: loss_fn(params, example._replace(y=label)))(labels)
    return jnp.sum(jnp.asarray(example.y) * each)

  return loss


def _as_wide(params: Params, x: Any) -> Any:
  """Casts parameters to at least the precision of the examples, so float64 guesses stay float64."""
  wide = lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, x.dtype))
  return jax.tree.map(lambda leaf: wide(jnp.asarray(leaf)), params)


def gradient_view(
  loss_fn: LossFn, params: Params, *, l2_clip_norm: float | None = None
) -> View:
  """Returns a view: the gradient of a batch's mean loss, as a central step or FedSGD reveals it.

  Args:
    loss_fn: `(params, example) -> scalar`, for ONE example.
    params: parameters at which the gradient is taken.
    l2_clip_norm: clip norm of each example's gradient before the mean; None: not clipped.

  >>> view = gradient_view(lambda w, example: w * example.x, jnp.float32(0.0))
  >>> float(view(Example(jnp.array([1.0, 3.0]), jnp.array([0, 0]))))
  2.0
  """
  loss = soft_labels(loss_fn)
  if l2_clip_norm is not None:
    validate.positive(l2_clip_norm=l2_clip_norm)

  def view(examples: Example) -> ArrayTree:
    wide = _as_wide(params, examples.x)
    mask = jnp.ones(len(examples.x), bool)
    # Without clipping, the view is the function that the clients themselves call.
    if l2_clip_norm is None:
      return mean_grad(loss)(wide, examples, mask)[0]
    grads = jax.vmap(jax.grad(loss), (None, 0))(wide, examples)
    clipped = clip_and_sum(grads, jnp.zeros(len(mask)), mask, l2_clip_norm)
    return trees.scale(clipped.total, 1.0 / len(mask))

  return jax.jit(view)


def client_view(
  client: ClientAlgorithm,
  params: Params,
  batches: LocalBatches,
  *,
  extra: Any = None,
  memory: Any = None,
  key: Array | None = None,
) -> View:
  """Returns a view: the message of a client after its local work on the examples, step by step.

  Args:
    client: client of `dpjax.federated`, as algorithms such as `fed_avg` run it. If it is built from
      `soft_labels(loss_fn)`, it also takes distributions as labels.
    params: the server's parameters, which the client has received.
    batches: rows [S, b] of the client's examples, and their mask: `LocalWork.rows(...)`, or a
      cohort's. An attack may number the rows of the first epoch arbitrarily, but has to assume the
      order in later epochs.
    extra: anything else that the server has sent, such as SCAFFOLD's control variate.
    memory: the client's state from earlier rounds, which the attack has to assume.
    key: key of this client in this round; None: key 0, as for an adversary that does not know it.

  Raises:
    UserError: no local step, or rows that are no integers [S, b]. The view raises it for rows that
      are no places of its examples.

  >>> import optax
  >>> from dpjax.federated import local_training
  >>> client = local_training(lambda w, e: 0.5 * (w - e.x) ** 2, optax.sgd(0.5))
  >>> two_steps = LocalBatches(np.array([[0], [0]]), np.ones((2, 1), bool))
  >>> view = client_view(client, jnp.float32(0.0), two_steps)
  >>> view(Example(jnp.array([4.0]), jnp.array([0])))["delta"]  # 0 -> 2 -> 3
  Array(3., dtype=float32)
  """
  rows = np.asarray(batches.examples)
  mask = np.asarray(batches.mask)
  if (
    rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer) or rows.shape != mask.shape
  ):
    raise UserError(
      "must be rows [steps, batch] of the client's examples and a mask of that "
      f"shape, got {rows.dtype} {rows.shape} and {mask.shape}",
      field="batches",
    )
  if not mask.any():
    raise UserError("must hold at least one local step with an example", field="batches")
  largest = int(rows[mask].max())
  key = jax.random.key(0) if key is None else key

  def view(examples: Example) -> ArrayTree:
    count = examples.x.shape[0]
    if largest >= count or rows[mask].min() < 0:
      raise UserError(f"row {largest} must be below the {count} examples", field="batches")
    received = Received(_as_wide(params, examples.x), extra)
    local = client.init(received, memory, jnp.int32(count), key)
    for places, kept in zip(rows, mask):
      # Executors skip a step without examples, too.
      if kept.any():
        batch = jax.tree.map(operator.itemgetter(places), examples)  # leaves [b, ...]
        local = client.step(received, local, batch, jnp.asarray(kept))
    return client.finish(received, local)[0].message

  return jax.jit(view)


def all_at_once(count: int, *, num_steps: int = 1) -> LocalBatches:
  """Returns local steps that each use all examples: full-batch local training.

  >>> all_at_once(3).examples.tolist()
  [[0, 1, 2]]
  """
  validate.integer_at_least(1, count=count, num_steps=num_steps)
  rows = np.tile(np.arange(count, dtype=np.int32), (num_steps, 1))
  return LocalBatches(rows, np.ones(rows.shape, bool))

"""Federated transfer learning: two parties with different features, and few shared entities.

The source party has labels for its own rows. The target party has other features, other
rows, and hardly any labels. Each embeds its rows into one space, which is learnt through the
entities that both hold (`alignment.align`): their two embeddings are pulled together. The
source turns its labels into one direction for each class, Phi, and the target scores its own
rows by them (Liu et al. 2018, arXiv:1812.03337, here with many classes).

Labels and features stay where they are. At each step the source sends the embeddings of the shared
rows and Phi, and the target sends back their cotangents. This is not differentially private:
embeddings can be inverted, and Phi is a function of the labels.

Measured on digits: the source has left halves, the target right halves and 20 labels of its own
(test accuracy, mean of 5 seeds). If the source may tell the labels of the shared rows, accuracy is
better still:

| shared of 900 | target alone | transfer | labels of the shared rows told |
| ------------- | ------------ | -------- | ------------------------------ |
| 50            | .507         | .582     | .684                           |
| 100           | .507         | .696     | .773                           |
| 200           | .507         | .792     | .844                           |

The plain alternative is to start from a model trained elsewhere, and to train a part of it
(`training.part`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import validate
from dpjax.types import Algorithm, Array, Params
from dpjax.validate import UserError

Encoder = Callable[[Params, Array], Array]  # (params, x [B, ...]) -> embeddings [B, D]


class TransferParams(NamedTuple):
  """Parameters, each known to one party only."""

  source: Params
  target: Params


class TransferBatch(NamedTuple):
  """All data of both parties. Entry i of `source_shared` and of `target_shared_x` is one entity."""

  source_x: Array  # [n, ...] of the source
  source_y: Array  # [n] integers; never leave the source
  source_shared: Array  # [m] indices of shared rows in source_x
  target_shared_x: Array  # [m, ...] of the target, the same entities
  target_x: Array  # [k, ...] the target's own labelled rows, few
  target_y: Array  # [k]


class SourceMessage(NamedTuple):
  """Message of the source; the target returns cotangents of this shape."""

  shared: Array  # [m, D] embeddings
  directions: Array  # [K, D] Phi


class TransferState(NamedTuple):
  """Parameters and optimizer states of both parties."""

  params: TransferParams
  opt_states: TransferParams


class TransferInfo(NamedTuple):
  """Losses and bytes of a step. They are not differentially private: do not release them."""

  source_loss: Array
  target_loss: Array  # with the alignment term
  bytes_each_way: int


def class_directions(embeddings: Array, y: Array, num_classes: int) -> Array:
  """Returns Phi [K, D]: the mean embedding of each class; zero for a missing class.

  >>> class_directions(jnp.array([[1.0], [3.0], [5.0]]), jnp.array([0, 0, 2]), 3).tolist()
  [[2.0], [0.0], [5.0]]
  """
  members = jax.nn.one_hot(y, num_classes, dtype=embeddings.dtype)  # [n, K]
  return members.T @ embeddings / jnp.maximum(members.sum(axis=0), 1)[:, None]


def _cross_entropy(embeddings: Array, directions: Array, y: Array) -> Array:
  logits = embeddings @ directions.T
  return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def source_part(
  encode: Encoder, params: Params, batch: TransferBatch, num_classes: int
) -> tuple[Array, SourceMessage]:
  """Returns (loss of the source, its message), from the source's fields of the batch only."""
  embeddings = encode(params, batch.source_x)
  directions = class_directions(embeddings, batch.source_y, num_classes)
  loss = _cross_entropy(embeddings, directions, batch.source_y)
  return loss, SourceMessage(embeddings[batch.source_shared], directions)


def target_part(
  encode: Encoder,
  params: Params,
  message: SourceMessage,
  batch: TransferBatch,
  alignment: float,
) -> Array:
  """Returns the target's loss: cross-entropy of its few labels, plus `alignment` times the mean
  squared difference from the source's embeddings [m, D] of shared rows."""
  apart = encode(params, batch.target_shared_x) - message.shared
  labelled = encode(params, batch.target_x)
  loss = _cross_entropy(labelled, message.directions, batch.target_y)
  return loss + alignment * jnp.mean(apart * apart)


def transfer_gradient(
  encoders: tuple[Encoder, Encoder],
  params: TransferParams,
  batch: TransferBatch,
  *,
  num_classes: int,
  alignment: float,
) -> tuple[TransferParams, TransferInfo]:
  """Returns the gradient of the sum of both losses, and the `TransferInfo`.

  The gradient is exact. One message goes to the target, and its cotangents come back.
  """
  source = lambda p: source_part(encoders[0], p, batch, num_classes)
  (source_loss, message), pull = jax.vjp(source, params.source)
  target = lambda p, m: target_part(encoders[1], p, m, batch, alignment)
  compute = jax.value_and_grad(target, argnums=(0, 1))
  target_loss, (target_gradient, cotangents) = compute(params.target, message)
  (source_gradient,) = pull((jnp.ones_like(source_loss), cotangents))
  num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in message)
  info = TransferInfo(source_loss, target_loss, num_bytes)
  return TransferParams(source_gradient, target_gradient), info


def transfer_learning(
  encoders: tuple[Encoder, Encoder],
  tx: optax.GradientTransformation,
  *,
  num_classes: int,
  alignment: float = 1.0,
) -> Algorithm:
  """Returns (init, step) of federated transfer learning; each party runs its own copy of `tx`.

  `init(TransferParams)`, `step(state, TransferBatch) -> (state, TransferInfo)`. With
  alignment=0 nothing is learnt from the shared rows.

  Args:
    encoders: encoders of the source and of the target, into the same D dimensions.
    alignment: weight of the mean squared difference between the two embeddings [m, D].

  Raises:
    UserError: fewer than two classes, shared rows that do not pair up, or a negative alignment.
  """
  validate.integer_at_least(2, num_classes=num_classes)
  validate.non_negative(alignment=alignment)

  def init(params: TransferParams) -> TransferState:
    return TransferState(params, TransferParams(*map(tx.init, params)))

  def step(
    state: TransferState, batch: TransferBatch
  ) -> tuple[TransferState, TransferInfo]:
    pairs = (len(batch.source_shared), len(batch.target_shared_x))
    if pairs[0] != pairs[1]:
      raise UserError(
        f"shared rows must pair up, the source names {pairs[0]}, the target {pairs[1]}",
        field="batch",
      )
    gradients, info = transfer_gradient(
      encoders, state.params, batch, num_classes=num_classes, alignment=alignment
    )
    moved = [tx.update(*parts) for parts in zip(gradients, state.opt_states, state.params)]
    params = [
      optax.apply_updates(p, updates) for p, (updates, _) in zip(state.params, moved)
    ]
    kept = TransferParams(*(opt_state for _, opt_state in moved))
    return TransferState(TransferParams(*params), kept), info

  return Algorithm(init, step)


def target_logits(
  encoders: tuple[Encoder, Encoder],
  params: TransferParams,
  batch: TransferBatch,
  x: Array,
  *,
  num_classes: int,
) -> Array:
  """Returns scores [B, K] of the target's rows x [B, ...]; the source sends Phi once more."""
  _, message = source_part(encoders[0], params.source, batch, num_classes)
  return encoders[1](params.target, x) @ message.directions.T

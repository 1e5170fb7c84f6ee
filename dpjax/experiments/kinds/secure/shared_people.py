"""Runs federated transfer learning: labels of one party teach another party, which has few labels.

The source holds left halves of images and their labels. The target holds right halves, and labels
of a few other users. The parties find their shared users by private set intersection, and train
with `secure.vertical.transfer`. There is no noise, so no epsilon. The run measures the leakage: how
many labels of the shared users the target reads from the last message by a simple method.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import closed_over, validate
from dpjax import data as data_lib
from dpjax.experiments.config import common, rules
from dpjax.experiments.kinds.secure.task import Computed, Measuring, SecureTask, digest_of
from dpjax.experiments.run import pieces
from dpjax.experiments.run.experiment import Phase
from dpjax.experiments.run.pieces import Arrays
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.secure.vertical import alignment, transfer
from dpjax.types import Array, Params
from dpjax.validate import UserError

# Number of gradient steps in one step of the run. A checkpoint may follow each step of the run.
_CHUNK = 50
_HIDDEN = 64
_EMBEDDING = 16
_WEIGHT_DECAY = 1e-3
_HIDES = (
  "pixels and labels are not sent, but embeddings, class directions and their gradients are, in "
  "the clear: no epsilon, they can be inverted, and labels of the shared people are read from "
  "them; who is held by both is known to both"
)


class Halves(NamedTuple):
  """Holds both halves of every image. Row i of both halves belongs to one user."""

  source_x: np.ndarray  # [n, pixels of a left half]
  target_x: np.ndarray  # [n, pixels of a right half]
  y: np.ndarray  # [n]
  test_x: np.ndarray  # [m, pixels of a right half]
  test_y: np.ndarray  # [m]
  num_classes: int


def divide(
  task: TransferTask, loaded: Halves, seed: int
) -> tuple[transfer.TransferBatch, int]:
  """Returns (the users, divided between the parties, with aligned rows; bytes of the alignment).

  Raises:
    UserError: the data set has fewer users than the two parties should hold.
  """
  held = task.num_source + task.num_labelled
  num_rows = len(loaded.y)
  # At least two users must be left for the source.
  if task.num_labelled > num_rows - 2:
    raise UserError(
      f"must be at most {num_rows - 2}, as {task.dataset!r} has {num_rows} rows",
      field="task.num_labelled",
      value=task.num_labelled,
    )
  if held > num_rows:
    raise UserError(
      f"must be at most {num_rows - task.num_labelled}: {task.dataset!r} has {num_rows} rows, of "
      f"which task.num_labelled={task.num_labelled} are the target's own",
      field="task.num_source",
      value=task.num_source,
    )
  rng = np.random.default_rng(seed)
  of_source, labelled = np.split(rng.permutation(len(loaded.y))[:held], [task.num_source])
  # The target has another order, so that only the alignment reveals which rows belong together.
  of_target = rng.permutation(of_source[: task.num_shared])
  names = lambda rows: [f"person {row}" for row in rows]
  found = alignment.align(names(of_source), names(of_target))
  of_both = of_target[found.rows_b]
  batch = transfer.TransferBatch(
    source_x=jnp.asarray(loaded.source_x[of_source]),
    source_y=jnp.asarray(loaded.y[of_source]),
    source_shared=jnp.asarray(found.rows_a),
    target_shared_x=jnp.asarray(loaded.target_x[of_both]),
    target_x=jnp.asarray(loaded.target_x[labelled]),
    target_y=jnp.asarray(loaded.y[labelled]),
  )
  return batch, found.bytes_a + found.bytes_b


def _training(
  task: TransferTask, batch: transfer.TransferBatch, num_classes: int, key: jax.Array
) -> Phase:
  """Returns a phase in which each step takes several gradient steps of both parties."""
  init, step = transfer.transfer_learning(
    (_encode, _encode),
    _optimizer(task),
    num_classes=num_classes,
    alignment=task.alignment,
  )

  # The rows of people are arguments of the program, which may be kept on disk.
  @closed_over.jitted
  def steps(state: transfer.TransferState, count: Array) -> transfer.TransferState:
    body = lambda _, state: step(state, batch)[0]
    return jax.lax.fori_loop(0, count, body, state)

  def start() -> Arrays:
    first, second = jax.random.split(key)
    params = transfer.TransferParams(
      _encoder(first, batch.source_x.shape[1], _EMBEDDING),
      _encoder(second, batch.target_x.shape[1], _EMBEDDING),
    )
    return {"state": jax.tree.map(np.asarray, init(params)), "seconds": np.zeros(1)}

  def train(state: Arrays, place: int) -> None:
    count = min(_CHUNK, task.num_steps - place * _CHUNK)
    begun = time.monotonic()
    state["state"] = jax.tree.map(np.asarray, steps(state["state"], jnp.int32(count)))
    state["seconds"] += time.monotonic() - begun

  number = -(-task.num_steps // _CHUNK)
  return pieces.fill_pieces(number, start, train, name="transfer")


def _target_alone(
  task: TransferTask, batch: transfer.TransferBatch, num_classes: int, key: jax.Array
) -> Params:
  """Returns a classifier that the target trains alone, on its labelled rows."""
  tx = _optimizer(task)

  def loss(params: Params) -> Array:
    logits = _encode(params, batch.target_x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.target_y).mean()

  def body(_: Array, carry: tuple[Params, optax.OptState]) -> tuple[Params, optax.OptState]:
    params, opt_state = carry
    updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  params = _encoder(key, batch.target_x.shape[1], num_classes)
  train = closed_over.jitted(functools.partial(jax.lax.fori_loop, 0, task.num_steps, body))
  return train((params, tx.init(params)))[0]


def _optimizer(task: TransferTask) -> optax.GradientTransformation:
  return optax.adamw(task.learning_rate, weight_decay=_WEIGHT_DECAY)


def _encoder(key: jax.Array, inputs: int, outputs: int) -> Params:
  """Returns random parameters of a network with one hidden layer."""
  first, second = jax.random.split(key)
  return {
    # The factor 1.5 enlarges the kernel, since most pixels are near 0.
    "hidden": jax.random.normal(first, (inputs, _HIDDEN)) * (1.5 / inputs**0.5),
    "hidden_bias": jnp.zeros((1, _HIDDEN)),
    "out": jax.random.normal(second, (_HIDDEN, outputs)) / _HIDDEN**0.5,
    "out_bias": jnp.zeros((1, outputs)),
  }


def _encode(params: Params, x: Array) -> Array:
  """Returns embeddings or scores [B, outputs] of rows x [B, inputs]."""
  hidden = jnp.tanh(x @ params["hidden"] + params["hidden_bias"])
  return hidden @ params["out"] + params["out_bias"]


def _accuracy(scores: Array, y: np.ndarray) -> float:
  return float(np.mean(np.argmax(np.asarray(scores), axis=1) == y))


@dataclasses.dataclass(frozen=True)
class TransferTask(SecureTask):
  """`secure.vertical.transfer`: one party's labels teach another party, which has few labels."""

  needs = (alignment.library,)  # the module, which the field below hides in this class

  dataset: Annotated[
    str,
    rules.among(("digits", "mnist", "fashion_mnist")),
    "whose left halves the source holds, and whose right halves the target",
  ] = "digits"
  num_source: Annotated[
    int, rules.between(2, 2**20), "people of the source, with labels"
  ] = 900
  num_shared: Annotated[
    int, rules.between(1, 2**20), "of them, whom the target holds too"
  ] = 200
  num_labelled: Annotated[
    int, rules.between(1, 2**20), "other people of the target, whose labels it knows"
  ] = 20
  num_steps: Annotated[
    int, rules.between(1, rules.MOST_STEPS), "of both parties, with all rows in each"
  ] = 300
  learning_rate: Annotated[float, common.LearningRate, "of AdamW"] = 0.01
  alignment: Annotated[
    float,
    rules.POSITIVE,
    rules.IN_FLOAT32,
    "weight of the distance of two embeddings of one person",
  ] = 1.0

  def __post_init__(self):
    super().__post_init__()
    validate.integer_in(1, self.num_source, num_shared=self.num_shared)

  def load(self) -> Halves:
    """Loads the data set, and cuts its images in halves."""
    train, test = data_lib.load(self.dataset)
    middle = train.x.shape[2] // 2
    flat = lambda x: np.asarray(x, np.float32).reshape(len(x), -1)
    return Halves(
      flat(train.x[:, :, :middle]),
      flat(train.x[:, :, middle:]),
      np.asarray(train.y),
      flat(test.x[:, :, middle:]),
      np.asarray(test.y),
      train.num_classes,
    )

  def digest(self, loaded: Halves) -> bytes:
    """Returns the digest of the training data."""
    return digest_of(loaded.source_x, loaded.target_x, loaded.y)

  def execute(self, loaded: Halves, random: RunKeys, seed: int) -> Measuring:
    """Returns the outcome: trains both parties, then the target alone, and reads labels from the
    last message.

    Raises UserError if the data have too few users, or if the training diverges.
    """
    del seed
    batch, bytes_of_alignment = divide(self, loaded, random.order)
    num_classes = loaded.num_classes
    trained = (yield _training(self, batch, num_classes, random.init)).state
    params = trained["state"].params
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trained["state"])):
      raise UserError(
        f"diverges, with task.alignment={self.alignment:g}; must be smaller",
        field="task.learning_rate",
        value=self.learning_rate,
      )
    _, message = transfer.source_part(_encode, params.source, batch, num_classes)
    test_x = jnp.asarray(loaded.test_x)
    logits = _encode(params.target, test_x) @ message.directions.T
    alone = _encode(_target_alone(self, batch, num_classes, random.init), test_x)
    accuracy = _accuracy(logits, loaded.test_y)
    usual = _accuracy(alone, loaded.test_y)
    shared_y = np.asarray(batch.source_y)[np.asarray(batch.source_shared)]
    read = _accuracy(message.shared @ message.directions.T, shared_y)
    each_way = sum(leaf.size * leaf.dtype.itemsize for leaf in message)
    # The source sends one more message, for predictions.
    of_training = (2 * self.num_steps + 1) * each_way
    seconds = float(np.asarray(trained["seconds"])[0])
    return Computed(
      protocol="private set intersection, then embeddings in the clear",
      sizes=f"{len(batch.source_x)} and {len(shared_y) + len(batch.target_x)} people, "
      f"{len(shared_y)} of both, {len(batch.target_x)} labels of the target's own",
      seconds=seconds,
      num_bytes=of_training + bytes_of_alignment,
      error=0.0,
      error_is="none: messages carry the exact gradient",
      found=f"accuracy {accuracy:.4f}, the target alone {usual:.4f}; the target reads at least "
      f"{read:.0%} of the labels of the shared people",
      hides=_HIDES,
      num_steps=self.num_steps,
      params={"target": params.target, "directions": message.directions},
      more={
        "test_accuracy": accuracy,
        "accuracy_alone": usual,
        "labels_read": read,
        "shared_people": len(shared_y),
        "bytes_of_alignment": bytes_of_alignment,
      },
    )

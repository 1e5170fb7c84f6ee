"""Trains embeddings of public images with `loss='contrastive'`. Such a run is never private.

The outputs of the network are the embedding. A run that starts from such a network (`pretrained`)
has other outputs. So it takes all layers except the last one, which gets random weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import data, losses, metrics
from dpjax.experiments.config import choices
from dpjax.experiments.kinds.central.config import CONTRASTIVE as NAME
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.training.augment import AugmentFn
from dpjax.types import Array, Batch, Example, LossFn, Params
from dpjax.validate import UserError
from dpjax.zoo.recipes.contrastive import contrastive_loss, on_sphere

# Width of an embedding, as in Wang and Isola 2020.
WIDTH = 128
_WHY = "is a loss of a whole batch, in which every example moves the gradient of all others"


def check(config: TrainConfig) -> None:
  """Raises UserError for settings that a run with the contrastive loss cannot have."""
  if config.is_private:
    name = choices.name_of(config, "privacy")
    raise _refusal(
      f"needs privacy='sgd', not {name!r}: it {_WHY}, so no epsilon would hold"
    )
  if config.audit is not None:
    raise _refusal(f"needs audit='none': it {_WHY}")
  trainable = choices.name_of(config, "trainable")
  if trainable != "all":
    raise _refusal(f"needs trainable='all', not {trainable!r}")
  if config.augmentation == "none":
    raise _refusal("needs an augmentation, of which it compares two views")


def _refusal(must: str) -> UserError:
  return UserError(must, field="loss", value=NAME)


def refuse(config: TrainConfig) -> None:
  """Raises UserError for the contrastive loss, since the caller needs a loss of one example."""
  if config.loss == NAME:
    raise _refusal(f"must be another: it {_WHY}")


def loss(apply: losses.Apply) -> LossFn:
  """Returns a placeholder for the loss of one example, which refuses every call."""
  del apply

  def of_one_example(params: Params, example: Example) -> Array:
    raise _refusal(f"{_WHY}, and there is none of one example")

  return of_one_example


def evaluate(
  augment_fn: AugmentFn,
  apply: Callable[..., Any],
  params: Params,
  dataset: data.Dataset,
  *,
  batch_size: int = 500,
) -> dict[str, float]:
  """Returns {"accuracy", "loss"} of an embedding. Every call uses the same views.

  "accuracy" is how often the nearest other image has the same class. "loss" is the mean contrastive
  loss over batches.
  """
  scored = _compile(apply, augment_fn)
  # Every evaluation uses the same views, so that scores after different steps can be compared.
  keys = jax.random.split(jax.random.key(0), len(dataset.y))
  parts = []
  for start in range(0, len(dataset.y), batch_size):
    rows = slice(start, start + batch_size)
    parts.append(scored(params, np.asarray(dataset.x[rows]), keys[rows]))
  points = np.concatenate([np.asarray(embedded) for embedded, _ in parts])
  sizes = [len(embedded) for embedded, _ in parts]
  nats = np.average([float(nats) for _, nats in parts], weights=sizes)
  accuracy = metrics.nearest_neighbour_accuracy(points, dataset.y)
  return {"accuracy": accuracy, "loss": float(nats)}


# The cache is bounded, so that a long session frees old models.
@functools.lru_cache(maxsize=64)
def _compile(apply: Callable[..., Any], augment_fn: AugmentFn) -> Callable[..., Any]:
  @jax.jit
  def scored(params: Params, x: Array, keys: Array) -> tuple[Array, Array]:
    batch = Batch(Example(x, None), jnp.ones(len(x), bool))
    loss = contrastive_loss(apply, augment_fn, params, batch, keys)
    return on_sphere(apply(params, x)), loss

  return scored

"""Computes scattering features of images, and scales them without private statistics."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dpjax import data
from dpjax.experiments.kinds.central import features
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.validate import UserError
from dpjax.zoo import networks
from dpjax.zoo.networks.scatter_heads import standardized_features
from dpjax.zoo.networks.scattering import features_shape, scattering_chunks, typical_scales

_CODE = (
  "dpjax.zoo.networks.scattering", "dpjax.zoo.networks.scatter_heads", "dpjax.zoo.random_images",
  "dpjax.experiments.kinds.central.features", __name__,
)  # fmt: skip
# Number of examples standardised at a time. It is constant, since the shape decides the last bit.
_BLOCK = 1000


def describe_features(
  config: ModelConfig, dataset: data.Dataset, standardized: bool
) -> features.ComputedFeatures:
  """Returns a description of the scattering features of a data set; its `make` computes them.

  Args:
    standardized: whether each example is standardised by itself; if not, each channel is divided
      by its typical size.

  Raises:
    UserError: examples are no images, or "opponent" colours are asked of images without 3 channels.
  """
  features.check_images(dataset, "model.name", config.name)
  if config.colours == "opponent" and dataset.x.shape[-1] != 3:
    depth = dataset.x.shape[-1]
    raise UserError(
      f"needs images of 3 colours, not of {depth}", field="model.colours", value="opponent"
    )
  options: Any = {"num_classes": dataset.num_classes, **config.options}
  groups = networks.build(config.name, **options).num_groups if standardized else None
  shape = features_shape(dataset.x.shape)
  seen = {"mirrored": config.mirrored, "colours": config.colours}
  make = functools.partial(_blocks, dataset, groups, standardized, seen)
  return features.ComputedFeatures(
    shape, (shape, groups, standardized, *seen.values()), _CODE, make
  )


def _blocks(
  dataset: data.Dataset, groups: int | None, standardized: bool, seen: dict[str, Any]
) -> Iterator[np.ndarray]:
  """Yields the features of all examples, in order. Images in memory or in files give equal bits."""
  images = dataset.x.shape[1:]
  scales = None
  if not standardized:
    scales = typical_scales(images, colours=seen["colours"])
  for block in _regroup(scattering_chunks(dataset.x, **seen), _BLOCK):
    if scales is None:
      yield standardized_features(block, groups, in_place=True)
    else:
      block /= scales
      yield block


def _regroup(chunks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
  """Yields the rows of all chunks in arrays of `size` rows; the last array may have fewer."""
  held: list[np.ndarray] = []
  for chunk in chunks:
    held.append(chunk)
    while sum(map(len, held)) >= size:
      whole = np.concatenate(held)
      yield whole[:size].copy()
      held = [whole[size:]]
  remaining = np.concatenate(held) if held else np.zeros((0,))
  if len(remaining):
    yield remaining

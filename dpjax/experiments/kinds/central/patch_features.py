"""Computes features of patches. Their dictionary is learnt from images of random processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy

from dpjax import data
from dpjax.experiments.kinds.central import features
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.run import writers
from dpjax.zoo.datasets import random_process
from dpjax.zoo.networks import patches

_CODE = (
  "dpjax.zoo.networks.patches", "dpjax.models.pooling", "dpjax.zoo.datasets.random_process",
  "dpjax.zoo.random_images", "dpjax.experiments.kinds.central.features", __name__,
)  # fmt: skip
_PROCESSES = 64
_IMAGES = 125  # of each process


def describe_features(
  config: ModelConfig, dataset: data.Dataset, standardized: bool
) -> features.ComputedFeatures:
  """Returns a description of the features of a data set; its `make` computes them.

  Raises:
    UserError: no images, or images that are too small, too large, or of too many colours.
  """
  # Features of patches are always standardised.
  del standardized
  features.check_images(dataset, "model.name", config.name)
  shape = patches.patch_shape(dataset.x.shape)

  def make() -> Iterator[np.ndarray]:
    # Images are checked first, since learning takes minutes.
    patches.check_images(dataset.x)
    network = learned_network(tuple(dataset.x.shape[1:]))
    return patches.patch_chunks(dataset.x, network, mirrored=config.mirrored)

  # Matrix decompositions of NumPy and SciPy decide the last digits of the directions.
  libraries = (np.__version__, scipy.__version__)
  settings: tuple[Any, ...] = (shape, dataset.x.shape[1:], config.mirrored, *libraries)
  return features.ComputedFeatures(shape, settings, _CODE, make)


# The network is cached, since training and test data have the same shape, and learning takes some
# minutes.
@functools.lru_cache(maxsize=1)
def learned_network(shape: tuple[int, int, int]) -> patches.PatchNetwork:
  """Returns the network for images of a shape, learnt from random images of that shape."""
  random = np.random.Generator(np.random.PCG64(0))
  height, width, colours = shape
  blocks = []
  with writers.Progress(_PROCESSES, 0, "images of random processes") as bar:
    for _ in range(_PROCESSES):
      process = random_process.drawn_process(random, colours)
      blocks.append(random_process.images_of(process, random, _IMAGES, height, width))
      bar.update(1)
  line = "learns words and directions of patches from them, in some minutes"
  print(line, file=sys.stderr, flush=True)
  return patches.learned_patches(np.concatenate(blocks), words=patches.WORDS)

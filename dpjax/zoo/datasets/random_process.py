"""Images of random processes: public data for pre-training before private images.

Tang et al. (2023, "Differentially private image classification by learning priors from random
processes", arXiv 2306.06076) pre-train on images that no camera took. Baradad et al. (2021)
compare kinds of them. This module draws one kind: dead leaves with textures. Leaves fall on a
ground and cover each other; ground and leaves have textures of coloured noise. A class is one
process: the shape, size and number of leaves, the palette, and the slope and direction of the noise
spectrum. The task is to tell which process made an image (as Kataoka et al. 2020 do with fractals).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from dpjax import validate
from dpjax.data.dataset import Dataset, from_arrays
from dpjax.zoo import random_images

CLASSES = 64
PER_CLASS = 500
TEST_PER_CLASS = 50
_SEED = 0


class Process(NamedTuple):
  """Parameters of a class, which its images share. Other parameters are drawn for each image."""

  leaves: int  # number of leaves that fall on an image
  size: tuple[float, float]  # least and largest half width of a leaf, as a part of the side
  norm: (
    float  # p of the p-norm whose ball is a leaf: 1 a diamond, 2 an ellipse, 8 nearly a box
  )
  aspect: float  # length / width of a leaf, and of the grain of textures
  angle: float  # direction of the length of the grain, in radians
  slope: float  # amplitudes fall as 1 / frequency ** slope
  contrast: float  # factor of the texture, which is added to colours in [0, 1]
  palette: np.ndarray  # [3, C]: colours of ground and leaves


def drawn_process(random: np.random.Generator, channels: int) -> Process:
  """Draws the parameters of a class from fixed distributions.

  >>> drawn_process(np.random.default_rng(0), 3).palette.shape
  (3, 3)
  """
  between = lambda low, high: low + (high - low) * random.random()
  least = between(0.05, 0.2)
  return Process(
    leaves=int(random.integers(2, 13)),
    size=(least, least + between(0.05, 0.25)),
    norm=float(random.choice([1.0, 2.0, 8.0])),
    aspect=between(1.0, 3.0),
    angle=between(0.0, np.pi),
    slope=between(0.5, 2.5),
    contrast=between(0.05, 0.3),
    palette=random.random((3, channels)),
  )


def images_of(
  process: Process, random: np.random.Generator, count: int, height: int, width: int
) -> np.ndarray:
  """Draws images of one process, float32 [count, H, W, C] in [0, 1].

  >>> process = drawn_process(np.random.default_rng(0), 3)
  >>> images_of(process, np.random.default_rng(1), 2, 8, 8).shape
  (2, 8, 8, 3)
  """
  texture = process.contrast * random_images.random_phases(
    random, 2 * count, _falling(process, height, width)
  ).reshape(2, count, height, width, 1).astype(np.float32)
  x = _colours(process, random, count) + texture[0]
  for _ in range(process.leaves):
    covered = _leaf(process, random, count, height, width)[..., None]
    rolled = np.roll(texture[1], tuple(random.integers(0, (height, width))), axis=(1, 2))
    x = np.where(covered, _colours(process, random, count) + rolled, x)
  return np.clip(x, 0, 1)


def _falling(process: Process, height: int, width: int) -> np.ndarray:
  """Returns frequency ** slope, [H, W]: 1 / amplitude of a texture at each frequency.

  The component of a frequency along `angle` is first multiplied by `aspect`.
  """
  down = np.fft.fftfreq(height)[:, None]
  right = np.fft.fftfreq(width)
  cos = np.cos(process.angle)
  sin = np.sin(process.angle)
  along = cos * right + sin * down
  across = cos * down - sin * right
  frequency = np.hypot(process.aspect * along, across)
  # The constant part gets amplitude 0, so that a texture does not change the mean colour.
  frequency[0, 0] = np.inf
  return frequency**process.slope


def _colours(process: Process, random: np.random.Generator, count: int) -> np.ndarray:
  """Draws a slightly varied colour of the palette for each image: [count, 1, 1, C]."""
  chosen = process.palette[random.integers(len(process.palette), size=count)]
  changed = chosen + 0.2 * (random.random(chosen.shape) - 0.5)
  return changed[:, None, None].astype(np.float32)


def _leaf(
  process: Process, random: np.random.Generator, count: int, height: int, width: int
) -> np.ndarray:
  """Draws a leaf for each image, at a random position and angle. Returns the pixels that it covers:
  bool [count, H, W]."""
  centre = random.random((2, count, 1, 1))
  angle = 2 * np.pi * random.random((count, 1, 1))
  low, high = process.size
  half = low + (high - low) * random.random((count, 1, 1))
  down = (np.arange(height) / height)[:, None] - centre[0]  # [count, H, 1]
  right = np.arange(width) / width - centre[1]  # [count, 1, W]
  along = np.abs(np.cos(angle) * right + np.sin(angle) * down) / process.aspect
  across = np.abs(np.cos(angle) * down - np.sin(angle) * right)
  return along**process.norm + across**process.norm < half**process.norm


@functools.lru_cache(maxsize=1)
def load_random_process(
  shape: tuple[int, int, int] = (32, 32, 3),
  *,
  num_classes: int = CLASSES,
  per_class: int = PER_CLASS,
  test_per_class: int = TEST_PER_CLASS,
) -> tuple[Dataset, Dataset]:
  """Draws (train, test) of random processes: the same at every call, without anyone's data.

  The name "random_process" means the defaults here. For other sizes, name a function of yours:
  `data.name=mine:make`.

  Args:
    shape: shape (H, W, C) of an image.
    per_class: number of training images of each class.
    test_per_class: number of test images of each class.

  >>> train, test = load_random_process((8, 8, 1), num_classes=3, per_class=4)
  >>> train
  Dataset(random_process/train: 12 x (8, 8, 1) float32, 3 classes)
  """
  sizes = dict(num_classes=num_classes, per_class=per_class, test_per_class=test_per_class)
  validate.integer_at_least(1, **sizes)
  # PCG64 is named, since NumPy may change its default generator.
  random = np.random.Generator(np.random.PCG64(_SEED))
  height, width, channels = shape
  each = per_class + test_per_class
  images = []
  for _ in range(num_classes):
    process = drawn_process(random, channels)
    images.append(images_of(process, random, each, height, width))
  x = np.stack(images)  # [K, each, H, W, C]
  y = np.repeat(np.arange(num_classes), each).reshape(num_classes, each)

  def split(name: str, part: slice, count: int) -> Dataset:
    rows = (values[:, part].reshape(-1, *values.shape[2:]) for values in (x, y))
    return from_arrays(
      *rows,
      num_classes=num_classes,
      name="random_process",
      split=name,
      nominal_size=num_classes * count,
    )

  train = split("train", slice(per_class), per_class)
  return train, split("test", slice(per_class, None), test_per_class)


def load_published() -> tuple[Dataset, Dataset]:
  """Loads synthetic images of random processes in 64 classes: public, for training before private
  data."""
  return load_random_process()

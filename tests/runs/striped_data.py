"""Striped images as data sets of a user's own."""

import numpy as np

from dpjax import data

SYNTHETIC = f"{__name__}:synthetic"
OWN = f"{__name__}:own"


def _images(name, classes, count=80):
  """Stripes, whose direction and width are the class."""
  rng = np.random.default_rng(classes)
  y = np.arange(count) % classes
  phase = 2 * np.pi * rng.random(count)
  angle = np.pi * y / classes
  at = np.mgrid[:8, :8].reshape(2, 1, 64)
  waves = np.cos(
    at[0] * np.cos(angle)[:, None] + at[1] * np.sin(angle)[:, None] + phase[:, None]
  )
  x = (waves.reshape(count, 8, 8, 1) + 0.1 * rng.normal(size=(count, 8, 8, 1))) / 2
  images = data.from_arrays(
    x.astype(np.float32), y, num_classes=classes, name=name, nominal_size=count
  )
  return images, images


def synthetic():
  return _images("synthetic", 4)


def own():
  return _images("own", 3)

"""Synthetic images: the same at every call, of classes that differ."""

from __future__ import annotations

import numpy as np

from dpjax import data
from dpjax.zoo import random_images
from dpjax.zoo.datasets import published, random_process
from tests.refuses import refuses

_SMALL = dict(num_classes=4, per_class=20, test_per_class=5)


def _made():
  return random_process.load_random_process.__wrapped__((16, 16, 3), **_SMALL)


def test_images_are_the_same_at_every_call_and_in_range():
  (train, test), (again, _) = _made(), _made()
  np.testing.assert_array_equal(train.x, again.x)
  assert train.x.min() >= 0 and train.x.max() <= 1 and train.x.dtype == np.float32
  assert len(train) == 80 and len(test) == 20 and train.num_classes == 4
  assert (
    np.bincount(train.y).tolist() == [20] * 4 and np.bincount(test.y).tolist() == [5] * 4
  )
  assert len(np.unique(np.concatenate([train.x, test.x]).reshape(100, -1), axis=0)) == 100


def test_a_class_is_known_by_more_than_chance():
  train, test = _made()
  means = np.stack([train.x[train.y == k].mean(axis=(0, 1, 2)) for k in range(4)])
  nearest = np.square(test.x.mean(axis=(1, 2))[:, None] - means).sum(axis=2).argmin(axis=1)
  assert np.mean(nearest == test.y) > 0.5


def test_leaves_cover_the_ground():
  process = random_process.drawn_process(np.random.default_rng(0), 3)
  many, none = (
    random_process.images_of(
      process._replace(leaves=leaves, contrast=0.0), np.random.default_rng(1), 3, 16, 16
    )
    for leaves in (12, 0)
  )
  assert none.std(axis=(1, 2)).max() < 1e-4 and many.std(axis=(1, 2)).min() > 0.01


def test_a_spectrum_falls_as_it_is_told():
  falling = np.hypot(np.fft.fftfreq(32)[:, None], np.fft.fftfreq(32)) ** 2
  falling[0, 0] = np.inf
  images = random_images.random_phases(np.random.default_rng(0), 64, falling)
  power = np.square(np.abs(np.fft.fft2(images))).mean(axis=0)
  assert 8 < power[0, 2] / power[0, 4] < 32  # 2 ** (2 * 2) = 16


def test_it_has_a_name_and_no_folder():
  assert published.is_embedded("random_process")
  with refuses("name"):
    data.load("random_proces")
  with refuses("num_classes", value=0):
    random_process.load_random_process(num_classes=0)

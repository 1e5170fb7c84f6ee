"""Images from random numbers alone: for what must be known of images before any is seen."""

from __future__ import annotations

import numpy as np


def random_phases(
  random: np.random.Generator, count: int, falling: np.ndarray
) -> np.ndarray:
  """Images whose amplitudes are 1 / `falling` and whose phases are uniform: [count, H, W].

  Args:
    random: whose integers the phases are.
    falling: [H, W] by frequency, in the order of `np.fft.fftfreq`; infinite where there
      is nothing. Frequencies themselves give the spectrum of photographs (Field 1987).

  Returns:
    Of unit variance together, and of mean 0 each where falling[0, 0] is infinite.

  >>> falling = np.hypot(np.fft.fftfreq(4)[:, None], np.fft.fftfreq(4))
  >>> falling[0, 0] = np.inf
  >>> images = random_phases(np.random.default_rng(0), 2, falling)
  >>> images.shape, round(float(images.std()), 6), bool(abs(images.mean()) < 1e-9)
  ((2, 4, 4), 1.0, True)
  """
  turns = random.integers(2**16, size=(count, *falling.shape)) / 2**16
  images = np.fft.ifft2(np.exp(2j * np.pi * turns) / falling).real
  return images / images.std()

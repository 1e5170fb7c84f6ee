"""Images made of random numbers, for settings that must be chosen without looking at data."""

from __future__ import annotations

import numpy as np


def random_phases(
  random: np.random.Generator, count: int, falling: np.ndarray
) -> np.ndarray:
  """Draws images of random phases, with a mean power proportional to 1 / `falling`^2.

  Args:
    random: generator of the phases.
    falling: a number for each frequency [H, W], in the order of `np.fft.fftfreq`, equal for f and
      -f; infinite for frequencies to leave out. The absolute frequency as `falling` gives the
      spectrum of photographs (Field 1987).

  Returns:
    [count, H, W] of variance 1 over all; each image has mean 0 if falling[0, 0] is infinite.

  >>> falling = np.hypot(np.fft.fftfreq(4)[:, None], np.fft.fftfreq(4))
  >>> falling[0, 0] = np.inf
  >>> images = random_phases(np.random.default_rng(0), 2, falling)
  >>> images.shape, round(float(images.std()), 6), bool(abs(images.mean()) < 1e-9)
  ((2, 4, 4), 1.0, True)
  """
  turns = random.integers(2**16, size=(count, *falling.shape)) / 2**16
  images = np.fft.ifft2(np.exp(2j * np.pi * turns) / falling).real
  return images / images.std()

"""Hockey-stick divergences of two densities on a line, by quadrature."""

import math

import numpy as np

EPSILONS = np.array([0.0, 0.05, 0.3, 1.0, 2.5])
GRID = np.linspace(-26, 26, 4001)
COARSE = 1e-5  # of the quadrature over this grid


def deltas(one, other):
  """Hockey-stick divergence at `EPSILONS`, the worse direction, of densities on `GRID`."""
  return np.array([
    max(np.trapezoid(np.maximum(p - math.exp(e) * q, 0), GRID)
        for p, q in ((one, other), (other, one)))
    for e in EPSILONS
  ])  # fmt: skip


def at_ratios(profile, ratios):
  """A profile at likelihood ratios e^epsilon, rising, on both sides of 1, from its right half."""
  low, high = ratios[ratios < 1], ratios[ratios >= 1]
  mirrored = profile(-np.log(low[::-1]))[::-1]
  return np.concatenate([1 - low + low * mirrored, profile(np.log(high))])

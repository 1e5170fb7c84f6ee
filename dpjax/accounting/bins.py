"""Balls in bins with correlated noise: an epsilon that is proved, not simulated.

The noise is C^-1 w, with white noise w of multiplier z, and C lower triangular without negative
entries. Each example is in one of b bins, drawn once, uniformly. m_j = C (e_j + e_(j+b) + ..) is
the image of bin j, and G_ij = <m_i, m_j> / z^2. The likelihood ratio of the run with an example,
taken under the run without it, is

  L = mean_j exp(Y_j - G_jj / 2),  Y normal of covariance G,

and every divergence is E f(L) for a convex f (`random_allocation`).

1. Larger is worse (Kahane 1986): if G_ij <= H_ij for all i, j, diagonal included, E f(L) is no
   smaller for H. Proof: F(x_1, .., x_b) = E f(mean_j x_j exp(Y_j - H_jj / 2)) has no negative
   second derivative, mixed ones included. Along a path from G to H the derivative of E F is half
   the sum of (H - G)_ij E x_i x_j F_ij.
2. Adaptive runs: given the past, step t multiplies the terms by lognormals of covariance
   <u_i, u_j> / z^2. Here u_j is the sum, over the steps s <= t of bin j, of C_ts times the clipped
   gradient at s. As no C_ts is negative, <u_i, u_j> is at most the product of the two sums of
   C_ts. By 1., from the last step to the first, equal gradients of norm 1 are worst, whatever
   came before.
3. Bins g apart: let A = {0, g, 2 g, ..} hold floor(b / g) bins. Its b turns round the circle of
   bins cover every bin equally often. So a run is the mixture of b runs, each with its bins in one
   turn of A. By joint convexity its divergence is at most the largest of theirs.
4. Bins of one turn of A: let d be the largest G_jj, and c the largest G_ij with i, j at least g
   apart (round the circle). Then H_ij = c + (d - c) 1{i = j} is at least G_ij. For H, L is the
   product of exp(N - c / 2), N normal of variance c, and the mean of floor(b / g) independent
   lognormals of variance d - c. That is the likelihood ratio of one Gaussian sum of noise
   multiplier c^-1/2 and one pass of random allocation of (d - c)^-1/2. So the run costs no more
   than both composed.

Every g gives a bound. The best of several is taken; the choice looks at no data. If g is at least
the number of bands of C, then c = 0. Schuchardt and Kalinin (2026, arXiv:2601.21636) bound the
Renyi divergence of the same pair by dynamic programming and its loss by conditional composition;
Choquette-Choo et al. (2024, arXiv:2410.06266) simulate it (`monte_carlo`).
"""

from __future__ import annotations

from typing import Unpack

import dp_accounting as dpa
import numpy as np

from dpjax import validate
from dpjax.accounting.epsilon import Counting, epsilon
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.event_kinds.noisy_sum import gaussian_event
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.accounting.matrix import Strategy, turn_images

# Smallest c / d in step 4 of the proof, unless c is zero. A smaller ratio would need too fine a
# grid of losses.
_LEAST = 1e-6


def balls_in_bins_event(
  strategy: Strategy,
  *,
  noise_multiplier: float,
  num_steps: int,
  num_bins: int,
  spacing: int = 1,
) -> DpEvent:
  """Returns an event that bounds a run of `BallsInBinsSampler(num_bins)` with correlated noise.

  Args:
    strategy: matrix C of the correlated noise, without negative entries.
    noise_multiplier: multiplier of the white noise, std / l2_clip_norm.
    num_steps: number of steps of the whole run.
    num_bins: number of steps of one pass.
    spacing: number g of the proof, from 1 to num_bins. Every g gives a valid bound.

  Guarantee: the event costs at least as much as the run, even if the run stops early. This holds
  for adaptive runs, too (proof in the docstring of the module).

  >>> from dpjax.noise.correlated import BandedToeplitz
  >>> event = balls_in_bins_event(BandedToeplitz((1.0, 0.5)), noise_multiplier=2.0,
  ...   num_steps=8, num_bins=8, spacing=2)
  >>> event.events  # orthogonal images of squared norm 1.25
  [RandomAllocationDpEvent(num_steps=4, noise_multiplier=1.788...)]
  """
  validate.positive(noise_multiplier=noise_multiplier)
  validate.integer_at_least(1, num_steps=num_steps, num_bins=num_bins)
  validate.integer_in(1, num_bins, spacing=spacing)
  images = turn_images(strategy, num_steps, num_bins)  # [num_steps, <= num_bins]
  gram = images.T @ images
  far = np.abs(np.subtract.outer(np.arange(len(gram)), np.arange(len(gram))))
  # Bins lie on a circle: the last bin of a pass is next to the first bin of the following pass.
  far = np.minimum(far, num_bins - far) >= spacing
  largest = float(gram.diagonal().max())
  common = float(gram[far].max(initial=0.0))
  if spacing >= (strategy.bands or num_bins) or num_bins // spacing == 1:
    # Either images of bins that are `spacing` apart share no row, so they are orthogonal, or only
    # one bin is left.
    common = 0.0
  # Step 4 of the proof: a larger common part makes H larger, so the bound remains valid.
  common = min(largest, max(common, _LEAST * largest)) if common > 0 else 0.0
  parts = [_gaussian(noise_multiplier, common)] if common > 0 else []
  left = largest - common
  if left > 0:
    alone = _gaussian(noise_multiplier, left)
    parts.append(random_allocation_event(alone, num_steps=num_bins // spacing))
  return dpa.ComposedDpEvent(parts)


def _gaussian(noise_multiplier: float, cost: float) -> DpEvent:
  return gaussian_event(noise_multiplier / float(np.sqrt(cost)))


def balls_in_bins_proved(
  strategy: Strategy,
  *,
  delta: float,
  noise_multiplier: float,
  num_steps: int,
  num_bins: int,
  **counting: Unpack[Counting],
) -> float:
  """Returns the smallest epsilon that `balls_in_bins_event` proves over several spacings.

  Guarantee: an upper bound. Raises UserError as `epsilon` does.

  >>> from dpjax.noise.correlated import Independent
  >>> proved = balls_in_bins_proved(Independent(), noise_multiplier=2.0, num_steps=16,
  ...   num_bins=8, delta=1e-5)
  >>> 1.0 < proved < 2.96  # a Gaussian of 2 passes: 2.96
  True
  """
  validate.integer_at_least(1, num_bins=num_bins)
  spacings = {1 << power for power in range(num_bins.bit_length())}
  # Images of bins that are at least the number of bands apart are orthogonal: no part is common.
  spacings |= {min(strategy.bands or 1, num_bins)}
  # Several spacings can give the same event, which is then accounted only once.
  events = {
    repr(event): event
    for event in (
      balls_in_bins_event(
        strategy,
        noise_multiplier=noise_multiplier,
        num_steps=num_steps,
        num_bins=num_bins,
        spacing=spacing,
      )
      for spacing in sorted(spacings)
    )
  }
  return min(epsilon(event, delta=delta, **counting) for event in events.values())

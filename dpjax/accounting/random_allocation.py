"""Random allocation: each record in ONE of T steps, drawn uniformly; its privacy loss, proved.

One pass of T Gaussian sums, of noise multiplier z = 1 / s, a record in step J, uniform. Let Q
be the run without the record and P the one with it. Their likelihood ratio is

  L = dP/dQ = (X_1 + .. + X_T) / T,  X_t = exp(s_t Z_t - s_t^2 / 2),  Z_t normal under Q,

where s_t <= s is the norm of the record's clipped gradient at step t times s, and may depend on
earlier outputs. Every hockey-stick divergence is E_Q of a convex function of L: (L - a)_+ with
the record removed (P against Q), (1 - a L)_+ with it added (Q against P), a >= 0.

1. Given the past, X_t is lognormal with mean 1, and grows in convex order with s_t. Exchanging
   X_T, .., X_1, one after the other, for independent lognormals of s makes no divergence smaller:
   the pair of s is dominating, also for adaptive runs, so passes whose steps are drawn anew
   compose (Zhu, Dong and Wang 2022, arXiv:2106.08567, theorem 10).
2. Each X_t is spread onto a grid 0, h, 2 h, ..: what lies in a cell goes to its two ends with
   the mean kept. That is larger in convex order, so the divergences of the sum of the spread
   variables are upper bounds, for both directions and every a.
3. Beyond the grid: where the record is removed, a mass is spread to 0 and infinity, which keeps
   the mean: its share of P counts as lost (delta). Where it is added, what is beyond becomes the
   grid's last point, for (1 - a L)_+ falls in L. Both after every convolution.
4. log L is spread onto the accountant's grid of losses by 2. ("connect the dots").
5. Rounding: each convolution (FFT) adds its error bound to a total, in L1 (`_fft_error`), which
   is charged, doubled, as mass at infinite loss.

The observation 1. that the pair is that of T independent lognormals, and numerical accounting
by it, are Feldman and Shenfeld's (2025, arXiv:2502.08202; 2026, arXiv:2602.17284); T steps
without adaptivity were Choquette-Choo et al.'s (2024, arXiv:2410.06266) and Chua et al.'s
(2024) balls in bins. The discretisation here is our own: the convex order serves both
directions, and the sum is taken on a grid of L, not of log L, so FFTs do.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from scipy import fft, special

from dpjax import validate

_CELLS = (2**17, 2**20)  # least and most of the grid of L
_FINE = 0.1  # wanted width of a cell, in s: what it adds to the variance is lost in it
_TAIL = 7.0  # standard deviations of the loss that the grid has room for
_MOST_SHIFT = 4.0  # 1 / z from which on no amplification is claimed: nothing is left of it
_LEAST_SHIFT = 1e-3  # and up to which: cells would be coarser than the loss
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_CELL_ERROR = 1e-13  # relative, of one cell's mass at s = 1: quadrature and rounding
_UNIT = 2.0**-53


class _Law(NamedTuple):
  """Of the sum of `terms` spread variables: masses at 0, h, 2 h, .. [cells]."""

  terms: int
  without: np.ndarray  # under Q
  having: (
    np.ndarray | None
  )  # under P, where that is what is wanted; its rest is at infinity
  error: float  # in L1, of either


def allocation_pld(
  num_steps: int, noise_multiplier: float, *, interval: float, cells: int = 0
) -> pld_lib.PrivacyLossDistribution:
  """The privacy loss distribution of one pass: pessimistic at any interval, any cells.

  Args:
    num_steps: T of the pass.
    noise_multiplier: z, std / l2_clip_norm.
    interval: of the grid of losses.
    cells: of the grid of likelihood ratios, a power of two; 0: as many as are of use.

  Guarantee: dominates one pass, adaptive or not, under add_or_remove_one and
  replace_special; see the proof above. Where 1 / z is outside [.001, 4] no amplification
  is claimed: it is that of one Gaussian sum, of which a pass is the mixture.

  >>> pld = allocation_pld(200, 1.0, interval=4e-4, cells=2**16)
  >>> round(pld.get_epsilon_for_delta(1e-5), 2)
  0.39
  """
  validate.integer_at_least(1, num_steps=num_steps)
  validate.positive(noise_multiplier=noise_multiplier, interval=interval)
  shift = 1 / noise_multiplier
  if num_steps == 1 or not _LEAST_SHIFT <= shift <= _MOST_SHIFT:
    return pld_lib.from_gaussian_mechanism(
      noise_multiplier, value_discretization_interval=interval
    )
  width, law = _law(num_steps, shift, cells, removed=True)
  removed = _loss_of_removed(law, width / num_steps, interval)
  width, law = _law(num_steps, shift, cells, removed=False)
  added = _loss_of_added(law, width / num_steps, interval)
  return pld_lib.PrivacyLossDistribution(removed, added)


def _loss_of_removed(law: _Law, step: float, interval: float) -> pld_pmf.PLDPmf:
  """Of log L under P, L on the grid of `step`."""
  assert law.having is not None
  ratios = np.arange(1, len(law.having)) * step
  lowest, low, high = _spread(ratios, law.having[1:], interval, tilted=True)
  finite = _two_ends(low, high)
  lost = max(0.0, 1 - finite.sum()) + 2 * (law.error + 4 * _UNIT / interval)
  return pld_pmf.DensePLDPmf(interval, lowest, finite, min(1.0, lost), True)


def _loss_of_added(law: _Law, step: float, interval: float) -> pld_pmf.PLDPmf:
  """Of -log L under Q, L on the grid of `step`."""
  ratios = np.arange(1, len(law.without)) * step
  lowest, low, high = _spread(ratios, law.without[1:], interval, tilted=False)
  finite = _two_ends(low, high)
  lost = law.without[0] + 2 * (law.error + 4 * _UNIT / interval)
  top = lowest + len(finite) - 1
  return pld_pmf.DensePLDPmf(interval, -top, finite[::-1].copy(), min(1.0, lost), True)


def _spread(
  ratios: np.ndarray, masses: np.ndarray, interval: float, *, tilted: bool
) -> tuple[int, np.ndarray, np.ndarray]:
  """Masses [cells] of L moved to the ends of their cell of the grid exp(interval * i), the
  mean of L under Q kept: (first i, what is moved down by i, what is moved up by i).

  `tilted`: masses are P's, which are L times Q's.
  """
  cells = np.floor(np.log(ratios) / interval)
  below, above = np.exp(cells * interval), np.exp((cells + 1) * interval)
  up = np.clip((ratios - below) / (above - below), 0.0, 1.0)
  moved_up = masses * up * (above / ratios if tilted else 1.0)
  moved_down = masses * (1 - up) * (below / ratios if tilted else 1.0)
  places = (cells - cells[0]).astype(np.int64)
  length = int(places[-1]) + 1
  low = np.bincount(places, moved_down, length)
  return int(cells[0]), low, np.bincount(places, moved_up, length)


def _two_ends(low: np.ndarray, high: np.ndarray) -> np.ndarray:
  return np.append(low, 0.0) + np.append(0.0, high)


@functools.lru_cache(maxsize=4)
def _law(num_steps: int, shift: float, cells: int, *, removed: bool) -> tuple[float, _Law]:
  """(h, the law of X_1 + .. + X_T on 0, h, ..), by repeated squaring."""
  reach = _reach(num_steps, shift, removed=removed)
  if not cells:
    wanted = 2 ** math.ceil(math.log2(reach / (_FINE * shift)))
    cells = min(max(wanted, _CELLS[0]), _CELLS[1])
  width = reach / (cells - 1)
  one = _one_term(shift, width, cells, removed=removed)
  found = one
  for bit in bin(num_steps)[3:]:
    found = _added(found, found)
    found = _added(found, one) if bit == "1" else found
  return width, found


def _reach(num_steps: int, shift: float, *, removed: bool) -> float:
  """Where the grid ends: what lies beyond costs next to nothing, and is charged."""
  deviation = math.sqrt(num_steps * math.expm1(shift**2))
  if not removed:
    return min(4 * num_steps, num_steps + 20 * deviation)
  middle = num_steps + min(num_steps, 20 * deviation)
  return middle + 2 * math.exp(shift**2 / 2 + _TAIL * shift)


def _one_term(shift: float, width: float, cells: int, *, removed: bool) -> _Law:
  """X = exp(s Z - s^2 / 2), each cell's mass moved to the cell's ends with the mean kept."""
  up, down = np.zeros(cells - 1), np.zeros(cells - 1)
  first = min(cells - 1, math.ceil(4 * max(1.0, 1 / shift)))  # by closed form before it
  with np.errstate(divide="ignore"):
    edges = np.log(np.arange(first + 1) * width) / shift + shift / 2
  below = special.ndtr(edges)
  inside, mean = np.diff(below), np.diff(special.ndtr(edges - shift)) / width
  near, far = np.arange(first), np.arange(first, cells - 1)
  up[:first] = np.maximum(0.0, mean - near * inside)
  down[:first] = np.maximum(0.0, (near + 1) * inside - mean)
  for node, weight in zip((_NODES + 1) / 2, _WEIGHTS / 2):  # all terms are positive
    place = far + node
    z = np.log(place * width) / shift + shift / 2
    mass = weight * np.exp(-z * z / 2) / (math.sqrt(2 * math.pi) * shift * place)
    up[first:] += node * mass
    down[first:] += (1 - node) * mass
  masses = np.append(down, 0.0) + np.append(0.0, up)
  last = math.log((cells - 1) * width) / shift + shift / 2
  masses[0 if removed else -1] += special.ndtr(-last)  # what lies beyond the grid
  cancelled = 128 * _UNIT * float(((near + 1) * below[1:]).sum())
  having = masses * np.arange(cells) * width if removed else None
  return _Law(1, masses, having, _CELL_ERROR * max(1.0, 1 / shift) + cancelled)


def _added(left: _Law, right: _Law) -> _Law:
  """The law of the sum of two independent sums.

  Under P one of all terms, any with the same chance, is tilted; it is on the left or right.
  """
  terms, cells = left.terms + right.terms, len(left.without)
  image = lambda masses: np.asarray(fft.rfft(masses, 2 * cells))
  back = lambda image: np.maximum(0.0, np.asarray(fft.irfft(image, 2 * cells)))
  images = [image(left.without), image(right.without)]
  error = left.error + right.error + _fft_error(left, right)
  full = back(images[0] * images[1])
  without, beyond = full[:cells].copy(), full[cells:].sum()
  if left.having is None or right.having is None:
    without[-1] += beyond
    return _Law(terms, without, None, error)
  without[0] += beyond
  tilted = left.terms / terms * image(left.having) * images[1]
  tilted += right.terms / terms * images[0] * image(right.having)
  return _Law(terms, without, back(tilted)[:cells], error)


def _fft_error(left: _Law, right: _Law) -> float:
  """Bound on the L1 error of convolving two laws of mass <= 1 by FFT of length N.

  A transform errs by at most c = 8 log2(N) u in relative L2 (Higham 2002, Accuracy and
  Stability of Numerical Algorithms, theorem 24.2, has less than 5 log2(N) u for accurate
  twiddle factors). No entry of a transform of a law exceeds 1, so the result errs by at most
  3 c (|a| + |b|) in L2, and by sqrt(N) times that in L1.
  """
  length = 2 * len(left.without)
  pairs = [(left.without, right.without)]
  if left.having is not None and right.having is not None:
    pairs += [(left.having, right.without), (left.without, right.having)]
  norms = max(float(np.linalg.norm(a) + np.linalg.norm(b)) for a, b in pairs)
  return 24 * math.log2(length) * _UNIT * math.sqrt(length) * norms

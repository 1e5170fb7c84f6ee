"""Random allocation: each record in ONE of T steps, drawn uniformly; its privacy loss, proved.

One pass has T Gaussian sums of noise multiplier z = 1 / s. A record is in step J, drawn uniformly.
Let Q be the run without the record and P the one with it. Their likelihood ratio is

  L = dP/dQ = (X_1 + .. + X_T) / T,  X_t = exp(s_t Z_t - s_t^2 / 2),  Z_t normal under Q,

where s_t <= s is the norm of the record's clipped gradient at step t times s, and may depend on
earlier outputs. Every hockey-stick divergence is E_Q of a convex function of L: (L - a)_+ with
the record removed (P against Q), (1 - a L)_+ with it added (Q against P), a >= 0.

1. Given the past, X_t is lognormal with mean 1, and grows in convex order with s_t. Exchanging
   X_T, .., X_1, one after the other, for independent lognormals of s makes no divergence smaller.
   So the pair of s dominates, also for adaptive runs, and passes whose steps are drawn anew
   compose (Zhu, Dong and Wang 2022, arXiv:2106.08567, theorem 10).
2. Each X_t is spread onto a grid 0, h, 2 h, ..: what lies in a cell goes to its two ends with
   the mean kept. That is larger in convex order, so the divergences of the sum of the spread
   variables are upper bounds, for both directions and every a.
3. The sum is taken at once, as a power of a discrete Fourier transform, on a window of the
   grid, round a circle. What wraps onto a smaller loss is counted as lost (delta), by
   Chernoff's bound on the very masses; what wraps onto a larger one is pessimistic as it is.
   Mass of a term above a cap (`_Window`) is moved. With the record removed, this mass is spread to
   0 and infinity, which keeps the mean, and its share of P counts as lost. With the record added,
   this mass moves to the cap, since (1 - a L)_+ falls in L.
4. log L is spread onto the accountant's grid of losses as in 2. ("connect the dots").
5. Rounding: masses before the sum are raised by their relative error, for more mass is a
   larger divergence. The transforms' error is bounded in L1 (`_sum`) and added, doubled,
   as mass at infinite loss. They are taken in long double, where the machine has one.

Where a record is in k of T steps (`KOutOfTKind`), and all sets S of k steps are equally likely,

  L = sum over S of prod_(t in S) X_t / (T choose k),

and k passes of about T / k steps each dominate:

6. L is affine in each X_t with a slope >= 0, so 1. holds word by word.
7. Order the steps uniformly at random, cut them into k blocks, and take one uniform step of each.
   No step differs from another, so the set of these k steps is uniform, whatever the sizes of the
   blocks are. Hence L = E_B prod_j mean_(t in B_j) X_t, over random blocks B.
8. By Jensen's inequality E f(L) <= E_B E f(prod_j mean_(t in B_j) X_t) for each convex f. Given B
   the product is that of k independent passes, of one step out of |B_j| each.

Feldman and Shenfeld (2025, below) reduce k of T steps to k passes of floor(T / k) steps. Blocks of
unequal size use all steps: T mod k of them have one more. This bound is exact at k = 1 and k = T.
For other k the true cost is smaller, and nobody has proved by how much.

Feldman and Shenfeld (2025, arXiv:2502.08202; 2026, arXiv:2602.17284) observed 1., and account
numerically by the pair of T independent lognormals. T steps without adaptivity are the balls in
bins of Choquette-Choo et al. (2024, arXiv:2410.06266) and Chua et al. (2024). The discretisation
here is our own: the convex order serves both directions, and the sum is taken on a grid of L, not
of log L, so one FFT does.
"""

from __future__ import annotations

import bisect
import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import fft, special

from dpjax import validate
from dpjax.accounting import noise_profiles
from dpjax.accounting.loss_grid import LossMasses, connect
from dpjax.accounting.noise_profiles import UNIT

# Smallest and largest number of cells that is chosen automatically for the window of L.
_CELLS = (2**16, 2**20)
# Wanted width of a cell, in units of s = 1 / z. The variance that this width adds is negligible.
_FINE = 0.05
# Number of standard deviations of a term's loss that the window covers, for z >= 1 and for z < 1.
_TAILS = (8.0, 7.0)
# If 1 / z is above this, no amplification is claimed, since almost none is left.
_MOST_SHIFT = 4.0
# If 1 / z is below this, no amplification is claimed either: cells would be coarser than the loss.
_LEAST_SHIFT = 1e-3
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
# Bound on the relative error of one cell's mass at s = 1, from quadrature and rounding.
_CELL_ERROR = 1e-13
_LONG_UNIT = float(np.finfo(np.longdouble).eps) / 2


class _Masses(NamedTuple):
  """Masses of X_1 + .. + X_T on a grid, under P for a removed record, under Q for an added one.

  masses[i] is the mass at (first + i) * width."""

  width: float  # h
  first: int
  masses: np.ndarray  # [cells]
  lost: float  # mass that is to count as infinite loss


def allocation_pld(
  num_steps: int, noise_multiplier: float, *, interval: float, cells: int = 0
) -> list[LossMasses]:
  """Returns the privacy loss distribution of one pass, an upper bound at any interval and cells.

  Args:
    num_steps: number T of steps of the pass.
    noise_multiplier: z = std / l2_clip_norm.
    interval: distance between neighbouring losses of the grid.
    cells: number of cells of the grid of likelihood ratios, a power of two; 0 for an automatic
      choice.

  Guarantee: dominates one pass, adaptive or not, under add_or_remove_one and replace_special (proof
  in the docstring of the module). For 1 / z outside [.001, 4] no amplification is claimed. Then the
  result is the distribution of one Gaussian sum, whose cost a pass never exceeds.

  >>> from dpjax.accounting.loss_grid import pld_of
  >>> pld = allocation_pld(200, 1.0, interval=4e-4, cells=2**16)
  >>> round(pld_of(pld).get_epsilon_for_delta(1e-5), 2)
  0.39
  """
  validate.integer_at_least(1, num_steps=num_steps)
  validate.positive(noise_multiplier=noise_multiplier, interval=interval)
  shift = 1 / noise_multiplier
  if num_steps == 1 or not _LEAST_SHIFT <= shift <= _MOST_SHIFT:
    one_sum = noise_profiles.gaussian(shift)
    largest = shift**2 / 2 + 10 * shift
    return connect(
      lambda epsilons: one_sum(epsilons)[0], interval=interval, largest=largest
    )
  # The loss of a removed record is log L under P.
  term = _masses_of_sum(num_steps, shift, cells, removed=True)
  lowest, low, high = _spread(*_positive(term, num_steps), interval, tilted=True)
  lost = min(1.0, term.lost)
  removed = LossMasses(interval, lowest, _two_ends(low, high), lost)
  # The loss of an added record is -log L under Q, so its masses are in the reversed order.
  term = _masses_of_sum(num_steps, shift, cells, removed=False)
  lowest, low, high = _spread(*_positive(term, num_steps), interval, tilted=False)
  finite = _two_ends(low, high)
  lost = min(1.0, term.lost + (0.0 if term.first else float(term.masses[0])))
  top = lowest + len(finite) - 1
  added = LossMasses(interval, -top, finite[::-1].copy(), lost)
  return [removed, added]


def _positive(term: _Masses, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the likelihood ratios L > 0 of the window, [n], and their masses, [n]."""
  start = int(term.first == 0)
  ratios = (term.first + np.arange(start, len(term.masses))) * (term.width / num_steps)
  return ratios, term.masses[start:]


def _spread(
  ratios: np.ndarray, masses: np.ndarray, interval: float, *, tilted: bool
) -> tuple[int, np.ndarray, np.ndarray]:
  """Moves each mass of L to the two ends of its cell on the grid exp(interval * i).

  The mean of L under Q is kept. Masses are rounded up.

  Args:
    ratios: values of L, rising, [n].
    masses: masses of these values, [n].
    interval: distance of two neighbours of the grid of losses.
    tilted: whether masses are those of P, which are L times those of Q.

  Returns:
    The first i, and for each cell i from there on the masses moved to its lower and its upper end.
  """
  # More mass is a larger divergence, so rounding up is sound.
  masses = masses * (1 + 16 * UNIT / interval)
  cells = np.floor(np.log(ratios) / interval)
  below = np.exp(cells * interval)
  above = np.exp((cells + 1) * interval)
  # Linear weights keep the mean. At the ends of a cell, rounding may move a weight out of [0, 1].
  up = np.clip((ratios - below) / (above - below), 0.0, 1.0)
  moved_up = masses * up * (above / ratios if tilted else 1.0)
  moved_down = masses * (1 - up) * (below / ratios if tilted else 1.0)
  places = (cells - cells[0]).astype(np.int64)
  length = int(places[-1]) + 1
  low = np.bincount(places, moved_down, length)
  return int(cells[0]), low, np.bincount(places, moved_up, length)


def _two_ends(low: np.ndarray, high: np.ndarray) -> np.ndarray:
  return np.append(low, 0.0) + np.append(0.0, high)


class _Window(NamedTuple):
  """Window in which the sum is computed: `cells` cells of width h, from cell number `first` on.
  Terms are cut off at `cap` cells."""

  width: float
  first: int
  cells: int
  cap: int


@functools.lru_cache(maxsize=4)
def _masses_of_sum(num_steps: int, shift: float, cells: int, *, removed: bool) -> _Masses:
  """Returns the distribution of X_1 + .. + X_T, under P (`removed`) or Q."""
  window = _window(num_steps, shift, cells, removed=removed)
  term_masses, beyond = _one_term(shift, window.width, window.cap + 1, removed=removed)
  having = term_masses * np.arange(len(term_masses)) * window.width if removed else None
  masses, error = _sum(term_masses, having, num_steps, window.cells)
  # Mass beyond this edge wraps round the circle onto a smaller loss.
  edge = window.first + (window.cells if removed else 0)
  wrapped = _tail(term_masses, having, num_steps, edge, above=removed)
  # The circle of the transform starts at cell 0, but the window starts at cell `first`. So the
  # masses are rotated.
  start = window.first % window.cells
  return _Masses(
    window.width, window.first, np.roll(masses, -start), 2 * error + beyond + wrapped
  )


def _window(num_steps: int, shift: float, cells: int, *, removed: bool) -> _Window:
  """Returns a window that holds nearly all mass.

  Mass outside the window counts as a larger loss, so that every window gives an upper bound."""
  deviation = math.sqrt(num_steps * math.expm1(shift**2))
  if removed:
    tail = _TAILS[shift > 1]
    cap = math.exp(shift**2 / 2 + tail * shift)
    low = num_steps - 12 * deviation
    high = num_steps + min(num_steps, 20 * deviation) + 1.25 * cap
  else:
    cap = min(2.0 * num_steps, 1 + 8 * deviation)
    low = num_steps - 20 * deviation
    # `spread` is at least the standard deviation of a sum of T terms that are cut off at `cap`.
    place = math.log(cap) / shift + shift / 2
    second = math.exp(shift**2) * special.ndtr(place - 2 * shift)
    second += cap**2 * special.ndtr(-place)
    spread = math.sqrt(num_steps * min(second, math.expm1(shift**2)))
    high = min(num_steps * cap, num_steps + 20 * spread + cap)
  low = max(0.0, low)
  if not cells:
    # Powers of two make the transform fastest.
    wanted = 2 ** math.ceil(math.log2((high - low) / (_FINE * shift)))
    cells = min(max(wanted, _CELLS[0]), _CELLS[1])
  width = (high - low) / (cells - 4)
  return _Window(width, math.floor(low / width), cells, math.ceil(cap / width))


def _one_term(
  shift: float, width: float, cells: int, *, removed: bool
) -> tuple[np.ndarray, float]:
  """Discretises X = exp(s Z - s^2 / 2) under Q, and keeps the mean of each cell.

  Returns the masses at 0, h, .., (cells - 1) h, and a bound on the mass beyond the grid under P.
  For an added record this bound is 0."""
  up = np.zeros(cells - 1)
  down = np.zeros(cells - 1)
  # Near 0 the density changes within a cell, so closed forms are used. Further out these would lose
  # digits by cancellation, so a quadrature is used.
  first = min(cells - 1, math.ceil(4 * max(1.0, 1 / shift)))
  with np.errstate(divide="ignore"):
    edges = np.log(np.arange(first + 1) * width) / shift + shift / 2
  below = special.ndtr(edges)
  inside = np.diff(below)
  mean = np.diff(special.ndtr(edges - shift)) / width
  near = np.arange(first)
  far = np.arange(first, cells - 1)
  # The differences below lose digits, so a bound on their rounding is added.
  cancelled = 128 * UNIT * (near + 1) * below[1:]
  up[:first] = np.maximum(0.0, mean - near * inside) + cancelled
  down[:first] = np.maximum(0.0, (near + 1) * inside - mean) + cancelled
  # The quadrature adds positive terms alone, so nothing cancels.
  for node, weight in zip((_NODES + 1) / 2, _WEIGHTS / 2):
    place = far + node
    z = np.log(place * width) / shift + shift / 2
    mass = weight * np.exp(-z * z / 2) / (math.sqrt(2 * math.pi) * shift * place)
    up[first:] += node * mass
    down[first:] += (1 - node) * mass
  masses = np.append(down, 0.0) + np.append(0.0, up)
  last = math.log((cells - 1) * width) / shift + shift / 2
  # Mass beyond the grid is treated as in step 3 of the proof.
  masses[0 if removed else -1] += special.ndtr(-last)
  beyond = float(special.ndtr(shift - last)) if removed else 0.0
  return masses * (1 + _CELL_ERROR * max(1.0, 1 / shift)), 1.01 * beyond


def _sum(
  masses: np.ndarray, having: np.ndarray | None, num_steps: int, cells: int
) -> tuple[np.ndarray, float]:
  """Returns the masses of a sum of T terms, on a circle of `cells`, and a bound on their L1 error.

  Under P one term is tilted; it is each of the T terms with the same chance. `having` holds the
  masses of the tilted term, and is None under Q.

  With N cells and unit roundoff u, an entry of a transform of mass m errs by at most
  d = 8 log2(N) u m. This adds up at most log2(N) stages, each with a rounding of a few u
  (Higham 2002, Accuracy and Stability of Numerical Algorithms, 24.1, has a smaller d for accurate
  twiddle factors). The transform back has the same bound in L2 (theorem 24.2). A product of T
  entries of size at most a, each off by d, is off by T d (a + d)^(T - 1), and multiplying adds an
  error of 4 T u times the product. After Parseval, going from L2 to L1 costs a factor of sqrt(N).
  """
  # The sum is circular, so masses beyond the last cell are folded onto the first cells.
  folded = lambda masses: np.bincount(np.arange(len(masses)) % cells, masses, cells)
  long = lambda masses: np.asarray(fft.rfft(folded(masses).astype(np.longdouble)))
  off = 8 * math.log2(cells) * _LONG_UNIT * max(1.0, masses.sum())
  image = long(masses)
  sizes = np.abs(image).astype(np.float64)
  spread = np.exp((num_steps - 2 + (having is None)) * np.log(sizes + 2 * off))
  # Under P one term is tilted, so T - 1 other terms remain. Their power is taken by repeated
  # squaring, which rounds no more than T - 2 products one after the other.
  power = image
  for bit in bin(num_steps - (having is not None))[3:]:
    power = power * power
    power = power * image if bit == "1" else power
  if having is not None:
    power = power * long(having)
  sums = np.asarray(fft.irfft(power, cells)).astype(np.float64)
  each = num_steps * (off + 4 * _LONG_UNIT) * 1.01
  error = each * math.sqrt(2 * float((spread**2).sum()) / cells)
  error += off * float(np.linalg.norm(sums))
  # The masses are raised by the relative error of their rounding to double precision.
  rounded = 2 * UNIT
  return np.maximum(0.0, sums) * (1 + rounded), math.sqrt(cells) * error


def _tail(
  masses: np.ndarray, having: np.ndarray | None, num_steps: int, edge: int, *, above: bool
) -> float:
  """Returns Chernoff's upper bound on the mass of a sum at or above `edge` cells; below `edge` if
  not `above`."""
  if not above and edge <= 0:
    return 0.0
  # Distance of each value of a term from edge / T, in cells.
  places = np.arange(len(masses)) - edge / num_steps
  # Any rate gives a valid bound, so the best of several is taken. The largest rate keeps
  # exp within float64.
  rates = np.geomspace(1 / (edge + len(masses)), 600 / np.abs(places).max(), 25)

  @functools.cache
  def bound(place: int) -> float:
    weights = np.exp((rates[place] if above else -rates[place]) * places)
    # A sum of products takes one thread, where a dot product may wait for many.
    common = math.log(float((masses * weights).sum()))
    if having is None:
      return num_steps * common
    return (num_steps - 1) * common + math.log(float((having * weights).sum()))

  # The logarithm of the bound is convex in the rate, so bisection finds the best of the rates.
  rises = lambda place: bound(place) <= bound(place + 1)
  best = bisect.bisect_left(range(len(rates) - 1), True, key=rises)
  # The addend covers the rounding of T logarithms.
  return math.exp(min(0.0, bound(best) + 1e-9 * num_steps))

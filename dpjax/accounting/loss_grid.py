"""Privacy losses on a grid: from divergences to masses, and compositions of masses.

A mechanism gives upper bounds on its divergences at the points of the grid. `connect` turns them
into masses of losses. `Composition` adds up the losses of many steps, and gives epsilons.

Every operation errs on the side of a larger delta. In short (docs/design/loss_grid.md has the
proofs): for masses m of losses, m >= 0, on the real line and at infinity, let

  D(epsilon) = sum of m(loss) (1 - e^(epsilon - loss))_+.

If D is at least a mechanism's divergence at every real epsilon, then this also holds for sums of
losses and adaptive compositions. So masses may be raised, also above a sum of 1, and moved to
larger losses.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from scipy import fft, signal

from dpjax.accounting.noise_profiles import UNIT

# Function from epsilons >= 0, [k], to their deltas, [k]. The deltas are upper bounds that hold at
# once.
Profile = Callable[[Sequence[float] | np.ndarray], np.ndarray]
# Function from epsilons >= 0, rising, [n], to upper bounds on deltas there, [n].
Divergence = Callable[[np.ndarray], np.ndarray]

# Whether a search wants quick and loose bounds (`epsilon.coarse_grid`).
is_coarse = contextvars.ContextVar("is_coarse", default=False)

# --- masses


class LossMasses(NamedTuple):
  """Masses of a privacy loss distribution in one direction, on multiples of `interval`."""

  interval: float
  lowest: int  # the loss of probs[0] is lowest * interval
  probs: np.ndarray  # [n]
  infinity_mass: float

  @property
  def losses(self) -> np.ndarray:
    """Returns the privacy loss of each mass, [n], rising."""
    return (self.lowest + np.arange(len(self.probs))) * self.interval


def masses_of(pld: pld_lib.PrivacyLossDistribution) -> list[LossMasses]:
  """Returns the masses for removing a record, and those for adding one if they differ.

  A kind of your own may build its distribution with dp_accounting.
  """
  pmfs = [pld._pmf_remove] if pld._symmetric else [pld._pmf_remove, pld._pmf_add]
  dense = [pmf.to_dense_pmf() for pmf in pmfs]
  return [
    LossMasses(
      interval=pmf._discretization,
      lowest=int(pmf._lower_loss),
      probs=np.asarray(pmf._probs, float),
      infinity_mass=float(pmf._infinity_mass),
    )
    for pmf in dense
  ]


def pld_of(masses: Sequence[LossMasses]) -> pld_lib.PrivacyLossDistribution:
  """Returns the privacy loss distribution with these masses, in the form of `masses_of`.

  It composes with distributions of the same interval.

  >>> from dp_accounting.pld import privacy_loss_distribution as pld_lib
  >>> whole = pld_lib.from_laplace_mechanism(1.0, value_discretization_interval=0.1)
  >>> round(float(pld_of(masses_of(whole)).get_delta_for_epsilon(0.0)), 6)
  0.393469
  """
  pmfs = [
    pld_pmf.DensePLDPmf(
      part.interval, part.lowest, part.probs.copy(), part.infinity_mass, True
    )
    for part in masses
  ]
  return pld_lib.PrivacyLossDistribution(*pmfs)


# --- one step


def connect(
  removed: Divergence,
  added: Divergence | None = None,
  *,
  interval: float,
  largest: float,
  largest_added: float | None = None,
) -> list[LossMasses]:
  """Returns the privacy loss distribution of a mechanism, on a grid of `interval`.

  It is the masses for removing a record, and those for adding one if they differ.

  Guarantee: an upper bound at any interval, by connecting the dots (Doroshenko et al. 2022,
  arXiv:2207.04380).

  Args:
    removed: divergence of the mechanism with the record from that without it.
    added: divergence of the mechanism without the record; None if it is the same.
    interval: distance between neighbouring losses of the grid.
    largest: loss beyond which every loss of a removed record counts as infinite.
    largest_added: the same for an added record; default: `largest`.

  >>> from dpjax.accounting import noise_profiles
  >>> both = lambda epsilons: noise_profiles.gaussian(1.0)(epsilons)[0]
  >>> pld = connect(both, interval=1e-3, largest=10.0)
  >>> round(float(pld_of(pld).get_delta_for_epsilon(1.0)), 4)  # of a Gaussian of noise multiplier 1
  0.1269
  """
  up = _at_grid(removed, interval, largest)
  if added is None:
    return [_connect(up, up, interval)]
  down = _at_grid(added, interval, largest if largest_added is None else largest_added)
  return [_connect(up, down, interval), _connect(down, up, interval)]


def _at_grid(divergence: Divergence, interval: float, largest: float) -> np.ndarray:
  # One cell more holds losses that are rounded beyond the largest.
  deltas = divergence(np.arange(math.ceil(largest / interval) + 2) * interval)
  # Only the first of the zeros at the end matters.
  length = max(2, int(np.count_nonzero(deltas)) + 1)
  # Divergences fall, and rounding may break this.
  return np.maximum.accumulate(deltas[:length][::-1])[::-1]


def _connect(above: np.ndarray, below: np.ndarray, interval: float) -> LossMasses:
  """Returns masses whose D at h, 2 h, .. is `above`, and at -h, -2 h, .. follows from `below`.

  `below` holds divergences of the reversed pair: e^epsilon (D(-epsilon) - 1 + e^-epsilon).
  """
  # At a negative epsilon, delta is close to 1 - e^epsilon, a line in e^epsilon. A line has no mass
  # but at 0, so only the rest of delta is held, which keeps its digits.
  depths = np.arange(len(below))
  lower = (below * np.exp(-interval * depths) * (1 + 8 * UNIT))[::-1]
  start = max(above[0], below[0])
  above, lower = np.append(start, above[1:]), np.append(lower[:-1], start)
  lower = np.maximum.accumulate(lower)
  slope = 1 / math.expm1(interval)
  lowest = slope * (lower[1] - lower[0]) - lower[0] + 8 * UNIT * (1 + slope) * lower[1]
  zero = slope * (above[1] - above[0]) - (1 + slope) * (lower[-1] - lower[-2])
  zero += 1 + 16 * UNIT
  highest = (1 + slope) * (above[-2] - above[-1]) * (1 + 8 * UNIT)
  probs = np.concatenate(
    [[lowest], _inner(lower, slope), [zero], _inner(above, slope), [highest]]
  )
  # A mass below 0 comes from rounding alone. More mass is a larger divergence.
  return LossMasses(interval, 1 - len(lower), np.maximum(probs, 0.0), float(above[-1]))


def _inner(values: np.ndarray, slope: float) -> np.ndarray:
  """Returns the masses at the inner points of the grid, [n - 2], rounded up."""
  steps = np.diff(values)
  bends = np.diff(steps)
  # The difference of two numbers is exact if neither is more than twice the other.
  is_exact = 2 * np.minimum(values[1:], values[:-1]) >= np.maximum(values[1:], values[:-1])
  lost = np.where(is_exact, 0.0, np.abs(steps))
  rounding = 2 * (1 + slope) * (lost[:-1] + lost[1:])
  rounding += 4 * (np.abs(steps[:-1]) + slope * np.abs(bends))
  return slope * bends - steps[:-1] + UNIT * rounding


class Step:
  """The losses of one step in one direction, with what compositions of it share.

  The first and the last of its masses are above 0.
  """

  def __init__(self, masses: LossMasses):
    kept = np.flatnonzero(masses.probs > 0)
    first, last = (int(kept[0]), int(kept[-1])) if len(kept) else (0, 0)
    self.masses = masses._replace(
      lowest=masses.lowest + first, probs=masses.probs[first : last + 1]
    )
    # About 2,000 losses and their masses, which only help to choose rates and windows.
    masses = self.masses
    count = len(masses.probs)
    near = np.arange(-256, 257)
    far = np.unique((256 * np.exp(np.arange(1, 3000) / 128)).astype(np.int64))
    edges = np.concatenate([-far[::-1], near, far]) - masses.lowest
    edges = np.concatenate([[0], edges[(edges > 0) & (edges < count)]])
    probs = np.add.reduceat(masses.probs, edges)
    weighted = np.add.reduceat(masses.probs * masses.losses, edges)
    kept = probs > 0
    self.coarse = weighted[kept] / probs[kept], probs[kept]

  def log_moment(self, rate: float) -> float:
    """Returns an upper bound on log of the sum of p e^(rate loss)."""
    exponents = rate * self.masses.losses
    largest = float(exponents.max())
    total = float((self.masses.probs * np.exp(exponents - largest)).sum())
    widest = float(np.abs(exponents[[0, -1]]).max())
    return largest + math.log(total) + 2 * UNIT * (len(exponents) + widest + 16)


class _Image(NamedTuple):
  """Fourier transform of the masses p e^(rate loss) / e^log_scale, whose sum is about 1."""

  values: np.ndarray  # [length / 2 + 1]
  log_scale: float
  error: float  # bound on the error of each value


# The rows of a run ask for few rates and lengths, one after the other. An image may have millions
# of cells, so few are kept: as many as there are sides of the steps in `epsilon._steps_of`.
@functools.lru_cache(maxsize=32)
def _image(step: Step, rate: float, length: int, dtype: type) -> _Image:
  """Returns the Fourier transform of the tilted masses, on a circle of `length` cells."""
  masses = step.masses
  unit = float(np.finfo(dtype).eps) / 2
  # Rates and losses have few digits, so these products are exact.
  exponents = rate * masses.losses
  largest = float(exponents.max())
  log_scale = largest + math.log(float((masses.probs * np.exp(exponents - largest)).sum()))
  # Masses are rounded up: by the exponents, and by the sums of cells that fall on the same cell.
  exponents -= log_scale
  folds = len(exponents) // length + 1
  weights = masses.probs * np.exp(exponents)
  weights *= 1 + (8 + folds + np.abs(exponents)) * UNIT
  places = (masses.lowest + np.arange(len(weights))) % length
  circle = np.bincount(places, weights, length).astype(dtype)
  values = np.asarray(fft.rfft(circle))
  error = 8 * math.log2(length) * unit * float(weights.sum()) * (1 + 1e-9)
  return _Image(values, log_scale, error)


# --- many steps


class Composition:
  """The sum of the losses of many steps in one direction.

  Masses are tilted: they are multiplied by e^(rate loss), so that the sum lies where delta is
  asked for. Then the errors of the Fourier transforms are small beside delta, however small it is.
  """

  def __init__(self, parts: Sequence[tuple[Step, int]]):
    """Takes the step of each part, and how often it ran."""
    self._parts = parts
    self._interval = parts[0][0].masses.interval
    self._num_steps = least = most = 0
    grown = infinite = 0.0
    for step, times in parts:
      masses = step.masses
      self._num_steps += times
      least += times * masses.lowest
      most += times * (masses.lowest + len(masses.probs) - 1)
      # Rounded masses may have a sum above 1, which is itself rounded.
      total = float(masses.probs.sum()) + masses.infinity_mass
      grown += times * (math.log(max(total, 1.0)) + 64 * UNIT)
      infinite += times * masses.infinity_mass
    self._support = least, most
    self._infinite = infinite * math.exp(grown) * (1 + 1e-12)
    if self._infinite < 1:
      self._rates, self._log_moments = _log_moments(parts)
      positive = self._rates > 0
      # Rates above 0, [k], and at each a bound on log delta + rate epsilon.
      self._tilts = self._rates[positive][:-1]
      self._peaks = self._log_moments[positive][:-1] + _log_peaks(self._tilts)
      # The lowest cell of the circle for each of these rates, and its number of cells.
      circles = [self._window(float(rate))[:2] for rate in self._tilts]
      self._lowest, self._cells = np.array(circles, float).T
    self._tables: dict[float, _Table] = {}

  def epsilon(self, delta: float) -> float:
    """Returns an epsilon >= 0 at which delta is at most `delta`; inf if there is none."""
    if self._infinite >= min(delta, 1.0):
      return math.inf
    # Chernoff's bound gives an epsilon for each rate.
    about = max(0.0, float(((self._peaks - math.log(delta)) / self._tilts).min()))
    (rate,) = self._rates_near(np.array([about]))
    return self._table(float(rate)).epsilon(delta)

  def deltas(self, epsilons: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns upper bounds on delta at epsilons >= 0, [n]."""
    # Delta falls, so a bound at a smaller epsilon holds at a larger one. Beyond the largest loss
    # both are the mass at infinity. So even an infinite epsilon has a delta.
    beyond = max(0, self._support[1] + 1) * self._interval
    epsilons = np.minimum(np.asarray(epsilons, float), beyond)
    if self._infinite >= 1:
      return np.ones(len(epsilons))
    rates = self._rates_near(epsilons)
    deltas = np.empty(len(epsilons))
    for rate in np.unique(rates):
      chosen = rates == rate
      deltas[chosen] = self._table(float(rate)).deltas(epsilons[chosen])
    return deltas

  def _rates_near(self, epsilons: np.ndarray) -> np.ndarray:
    """Returns rates for deltas near `epsilons`, [n], which have few cells and a small error.

    The bound on the error is about 1e-13 for each step, times Chernoff's bound on delta.
    """
    bounds = self._peaks[:, None] - np.outer(self._tilts, epsilons)
    # Far smaller deltas need no digits.
    log_deltas = np.maximum(bounds.min(axis=0), math.log(_TINY))
    log_errors = bounds - log_deltas + math.log(1e-13 * self._num_steps)
    work = np.log(np.maximum(self._cells, _FEW))
    work[self._cells > max(_MANY, self._cells.min())] = math.inf
    work = work[:, None] + np.maximum(log_errors - math.log(_WANTED), 0.0) / 2
    # A circle knows nothing of the losses below it. Such a rate is the last that memory allows.
    work += 1e9 * np.greater.outer(self._lowest * self._interval, epsilons)
    return self._tilts[np.argmin(work, axis=0)]

  def masses(self) -> tuple[LossMasses, float]:
    """Returns the masses of the sum, and a bound on the rounding error of any delta of theirs.

    They are not tilted, so the transforms are taken in long double, where the machine has one.
    """
    table = self._new_table(0.0, np.longdouble)
    lost = min(1.0, table.lost)
    return LossMasses(self._interval, table.lowest, table.masses, lost), table.error

  def _table(self, rate: float) -> _Table:
    table = self._tables.get(rate)
    if table is None:
      table = self._new_table(rate, np.float64)
      # A curve asks for many rates, and a table may have millions of cells. The dict is replaced,
      # not changed, since another thread may read it.
      kept = {**self._tables, rate: table}
      while len(kept) > 1 and sum(len(each.masses) for each in kept.values()) > _KEPT_CELLS:
        del kept[next(iter(kept))]
      self._tables = kept
    return table

  def _new_table(self, rate: float, dtype: type) -> _Table:
    if self._num_steps == 1:
      single = self._parts[0][0].masses
      return _Table(
        single.probs, interval=self._interval, lowest=single.lowest, lost=self._infinite
      )
    lowest, length, edge = self._window(rate)
    # Mass beyond the edge comes round the circle to a smaller loss, so it counts as infinite.
    lost = self._infinite + self._mass_above(edge)
    log_scale = 0.0
    power = None
    log_size = np.zeros(length // 2 + 1)
    relative = np.zeros(length // 2 + 1)
    unit = float(np.finfo(dtype).eps) / 2
    for step, times in self._parts:
      image = _image(step, rate, length, dtype)
      log_scale += times * image.log_scale
      # Each factor is at most `size`, and errs by `image.error` and by 4 roundings of a product.
      size = np.abs(image.values).astype(np.float64) + 2 * image.error
      relative += times * (image.error + 4 * unit) / size
      log_size += times * np.log(size)
      raised = _power(image.values, times)
      power = raised if power is None else power * raised
    assert power is not None
    size = np.exp(log_size)
    # Errors are bounded in L2: by Parseval for the products, and for the transform itself.
    each = relative * 1.01 + 8 * math.log2(length) * unit
    error = math.sqrt(2 * float(((size * each) ** 2).sum()) / length)
    masses = np.asarray(fft.irfft(power, length)).astype(np.float64)
    masses = np.roll(np.maximum(masses, 0.0), -(lowest % length))
    # The error of delta is at most this, times e^(log_scale - rate epsilon).
    error *= _norm(rate, self._interval, length) * (1 + 1e-9)
    return _Table(
      masses,
      interval=self._interval,
      lowest=lowest,
      lost=lost,
      rate=rate,
      log_scale=log_scale,
      error=error,
    )

  def _window(self, rate: float) -> tuple[int, int, float]:
    """Returns the lowest cell of the circle, its number of cells, and the loss beyond its end.

    By Chernoff's bound the tilted mass on either side is about e^-30. It comes round the circle.
    Mass from below then counts as a larger loss. Mass from above counts as a smaller loss of a
    larger mass, and is counted once more as an infinite loss.
    """
    rates = self._rates
    own = float(np.interp(rate, rates, self._log_moments))
    # log E e^((r - rate) loss) of the tilted masses.
    moments = self._log_moments - own
    above, below = rates > rate, rates < rate
    top = float(((moments[above] + _RARE) / (rates[above] - rate)).min())
    bottom = float(((-moments[below] - _RARE) / (rate - rates[below])).max())
    least, most = self._support
    low = min(max(least, math.floor(bottom / self._interval) - 2), most - 1)
    high = max(min(most, math.ceil(top / self._interval) + 2), low + 1)
    # Transforms of such lengths are fast. They have few values, so that runs share them.
    rounded = math.ceil(2.0 ** (math.ceil(4 * math.log2(max(high - low + 1, 16))) / 4))
    length = int(fft.next_fast_len(rounded, real=True) or rounded)
    if length > most - least:
      low = least
    edge = low + length
    return low, length, edge * self._interval if edge <= most else math.inf

  def _mass_above(self, loss: float) -> float:
    if loss == math.inf:
      return 0.0
    above = self._rates > 0
    bounds = self._log_moments[above] - self._rates[above] * loss
    rate = float(self._rates[above][np.argmin(bounds)])
    exact = math.fsum(times * step.log_moment(rate) for step, times in self._parts)
    return math.exp(
      min(0.0, exact - rate * loss + 4 * UNIT * (abs(exact) + rate * abs(loss)))
    )


# Logarithm of the share of the tilted mass that is left out of the circle on either side.
_RARE = 30.0
# Relative error of delta that is as good as none.
_WANTED = 1e-10
# Number of cells below which transforms take no time, and number that memory allows.
_FEW = 2**15
_MANY = 2**24
# Number of cells in the tables that a composition keeps, each with three numbers.
_KEPT_CELLS = 2**24
# Delta below which only the size of an error matters.
_TINY = 1e-18


@dataclasses.dataclass(eq=False)
class _Table:
  """Tilted masses p e^(rate loss) / e^log_scale of a sum of losses, and deltas from them."""

  masses: np.ndarray  # tilted masses, [n], of the losses lowest * interval and up
  interval: float
  lowest: int
  lost: float  # mass that counts as infinite loss
  rate: float = 0.0
  log_scale: float = 0.0
  error: float = (
    0.0  # bound on that of a delta, in multiples of e^(log_scale - rate epsilon)
  )

  @functools.cached_property
  def _sums(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each place k the sums over j >= k of masses[j] e^-(rate (loss_j - loss_k)), and
    of masses[j] e^-((rate + 1) (loss_j - loss_k)), [n + 1]. The first is rounded up, the second
    down."""
    factor = math.exp(-self.rate * self.interval)
    upper = _decaying(self.masses, factor)
    lower = _decaying(self.masses, math.exp(-(self.rate + 1) * self.interval))
    # A mass loses three roundings in each place that it is carried down. `carried` is the sum over
    # j of (j - k) masses[j] e^-(rate (loss_j - loss_k)).
    carried = _decaying(upper[1:], factor) * factor
    rounding = 4 * UNIT * (carried + 4 * upper) * (1 + 8 * len(upper) * UNIT)
    return upper + rounding, np.maximum(lower - rounding, 0.0)

  def _log_factor(self, losses: np.ndarray) -> np.ndarray:
    """Returns the logarithm of e^log_scale e^-(rate loss), rounded up, [n]."""
    exponents = self.rate * losses
    rounding = 4 * UNIT * (abs(self.log_scale) + np.abs(exponents) + 4)
    return np.minimum(self.log_scale - exponents + rounding, 700.0)

  def deltas(self, epsilons: np.ndarray) -> np.ndarray:
    """Returns upper bounds on delta, [n]."""
    upper, lower = self._sums
    count = len(self.masses)
    # The first loss at or above epsilon.
    places = np.ceil(epsilons / self.interval) - self.lowest
    first = np.clip(places, 0, count).astype(np.int64)
    losses = (self.lowest + first) * self.interval
    gap = (losses - epsilons) * (1 + 4 * UNIT) + 4 * UNIT * losses
    inner = upper[first] - np.exp(-np.maximum(gap, 0.0)) * lower[first] * (1 - 4 * UNIT)
    finite = np.exp(self._log_factor(losses)) * np.maximum(inner, 0.0)
    total = finite + np.exp(self._log_factor(epsilons)) * self.error + self.lost
    # Below the lowest loss nothing is known.
    return np.where(places < 0, 1.0, np.minimum(total * (1 + 8 * UNIT), 1.0))

  def epsilon(self, delta: float) -> float:
    """Returns the smallest epsilon >= 0 on which `deltas` is at most `delta`, or inf."""
    least = max(0, self.lowest)
    low, high = least - 1, self.lowest + len(self.masses)
    at = lambda loss: float(self.deltas(np.array([loss]))[0])
    if at(high * self.interval) > delta:
      return math.inf
    while high - low > 1:
      middle = (low + high) // 2
      low, high = (low, middle) if at(middle * self.interval) <= delta else (middle, high)
    end = high * self.interval
    if high == least:
      return end
    # Between two losses, e^epsilon is a quotient of sums.
    start = low * self.interval
    upper, lower = (float(each[high - self.lowest]) for each in self._sums)
    factor, noise = np.exp(self._log_factor(np.array([end, start])))
    spare = (delta - self.lost - noise * self.error) / factor
    found = end
    if lower > 0 and spare < upper:
      found = min(max(end + math.log((upper - spare) / lower), start), end)
    # The quotient is rounded. So it is checked, and the end of the cell holds in any case.
    for digits in (14, 13, 12, 11):
      tried = found + 10.0**-digits * max(1.0, abs(found))
      if tried < end and at(tried) <= delta:
        return tried
    return end


def _decaying(masses: np.ndarray, factor: float) -> np.ndarray:
  """Returns the sums over j >= k of masses[j] factor^(j - k), [n + 1]."""
  sums = signal.lfilter([1.0], [1.0, -factor], masses[::-1])[::-1]
  return np.append(sums, 0.0)


def _power(values: np.ndarray, times: int) -> np.ndarray:
  """Returns values^times by repeated squaring, whose `times` factors are all rounded once."""
  power = np.zeros_like(values)
  with np.errstate(divide="ignore"):
    # Smaller powers are 0 in float64, and their size is in the bound on the error.
    kept = times * np.log(np.abs(values).astype(np.float64)) > -690
  base = values[kept]
  result = base
  for bit in bin(times)[3:]:
    result = result * result
    result = result * base if bit == "1" else result
  power[kept] = result
  return power


def _norm(rate: float, interval: float, length: int) -> float:
  """Returns a bound on the root of the sum of squares of g(x) = (1 - e^-x) e^(-rate x) over a grid.

  The integral of g^2 is 1 / (2 r (2 r + 1) (r + 1)), and g has one peak.
  """
  if not rate:
    return math.sqrt(length)
  integral = 0.5 / (rate * (2 * rate + 1) * (rate + 1))
  peak = math.exp(float(_log_peaks(np.array([rate]))[0]))
  return math.sqrt(integral / interval + peak**2)


def _log_peaks(rates: np.ndarray) -> np.ndarray:
  """Returns the logarithm of the largest (1 - e^-x) e^(-rate x) over x > 0, for rates > 0."""
  return -np.log1p(rates) - rates * np.log1p(1 / rates)


def _log_moments(parts: Sequence[tuple[Step, int]]) -> tuple[np.ndarray, np.ndarray]:
  """Returns rates, rising, and about log E e^(rate loss) of the sum of all losses at each, [k]."""
  variance = parts[0][0].masses.interval ** 2
  for step, times in parts:
    losses, probs = step.coarse
    mean = (probs * losses).sum() / probs.sum()
    variance += times * float((probs * (losses - mean) ** 2).sum())
  # Rates of the tail of the sum, and of the tail of one rare large loss.
  width = math.sqrt(variance)
  low = math.floor(math.log2(min(1.0, 1 / width))) - 6
  high = math.ceil(math.log2(max(1.0, 1 / width))) + 8
  positive = np.outer(2.0 ** np.arange(low, high + 1), [1.0, 1.25, 1.5, 1.75]).ravel()
  rates = np.concatenate([-positive[::-1], [0.0], positive])
  moments = np.zeros(len(rates))
  for step, times in parts:
    losses, probs = step.coarse
    exponents = np.outer(rates, losses) + np.log(probs)
    largest = exponents.max(axis=1)
    moments += times * (largest + np.log(np.exp(exponents - largest[:, None]).sum(axis=1)))
  return rates, moments

"""Checks that noise is Gaussian, and as large as accounted at every step. It must be independent of
the noise of all other steps, leaves, coordinates and keys.

Most statistics are z-scores, or p-values turned into z-scores, with fixed seeds. In a sound run,
each z-score reaches 6 with a chance of 2e-9.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy import special, stats

from dpjax.accounting.event_kinds.elements import mechanism_of
from dpjax.accounting.event_kinds.kind import kind_of
from dpjax.checks import noise_record
from dpjax.checks.noise_record import Record
from dpjax.checks.subject import (
  SEED,
  Row,
  Subject,
  Z,
  nan_first,
  not_applicable,
  row,
  z_of,
  z_of_squares,
)
from dpjax.noise import source
from dpjax.plan import Plan

# Bound on sqrt(n) * the distance of Kolmogorov and Smirnov; exceeded with a chance of 7e-6.
_KS = 2.5
# Number of values in a stretch of steps whose variance is tested.
_WINDOW = 2000
# Largest relative difference of two float32 numbers that count as equal.
_TOLERANCE = 1e-6
# Largest spacing of noise values, in standard deviations, that does not count as a grid. It is four
# times the spacing of float32 numbers near 1.
_SPACING = 2.0**-21
# Smallest number of values of a leaf that can tell two steps apart.
_LEAST_MARKED = 3


def _why_untested(plan: Plan) -> str:
  """Returns the reason why the noise of a plan is not tested."""
  if not plan.is_private:
    return "no noise is charged"
  return (
    "its event does not say which Gaussian noise it is about (EventKind.gaussian_noise)"
  )


def _accounted_multiplier(plan: Plan) -> float | None:
  """Returns the noise multiplier of the white noise in the accounting; None without such noise."""
  if not plan.is_private:
    return None
  if plan.noise_shape.by_step:
    # Events differ by step, so no event states the multiplier. `charges.agreement` tests epsilon.
    return plan.noise_multiplier
  whole = plan.step_event() if plan.steps_alike else plan.step_event(0)
  event = mechanism_of(whole if plan.statistics is None else plan.sum_event(0))
  multiplier = kind_of(event).gaussian_noise(event)
  rule = plan.l2_clip_norm.rule
  if multiplier is None or not rule.adapts:
    return multiplier
  # The accounted multiplier covers the noisy sum and the noisy query of an adaptive rule. Only the
  # multiplier of the sum is returned.
  return rule.sum_noise_multiplier(multiplier, plan.normalize_by)


def _variance_z(values: np.ndarray) -> float:
  return z_of_squares(np.sum(values**2), values.size)


def _distribution_deviations(
  recorded: Record, std: float, grid: float
) -> Iterator[tuple[float, str]]:
  leaves = [leaf / std for leaf in recorded.sampled]
  together = np.concatenate(leaves, axis=1)
  for whole in recorded.whole:
    yield _variance_z(whole / std), "a leaf"
  for leaf in leaves:
    for part in np.array_split(leaf, min(4, len(leaf))):
      yield _variance_z(part), "a leaf in a quarter of the run"
  # The variance is also tested in stretches of steps, with about two thousand values each.
  length = max(1, _WINDOW // max(1, together.shape[1]))
  for start in range(0, len(together), length):
    yield _variance_z(together[start : start + length]), "a stretch of steps"
  for sums in recorded.sums:
    if sums.shape[1]:
      # A component shared by all values of an axis is small in each, and large in their
      # sum.
      energy = np.sum((sums / std) ** 2, axis=0)
      yield z_of_squares(energy, len(sums)), "sums over an axis"
  # Mean, skewness and fourth moment are tested by the sums of powers of all values.
  values = np.concatenate([leaf.ravel() for leaf in recorded.whole]) / std
  powers = [float(np.sum(values**power)) for power in (1, 2, 3, 4)]
  yield _powers_z(powers, values.size)
  yield z_of_squares(np.sum(together**2, axis=1), together.shape[1]), "one step"
  yield from _every_value(recorded, grid / std)


def _every_value(recorded: Record, grid: float) -> Iterator[tuple[float, str]]:
  """Tests every value of white noise, not only a sample. No step, and no coordinate of a leaf, may
  have another variance than accounted.

  Rounding to a grid (in standard deviations) adds variance, and moves values by up to grid / 2.
  """
  times = len(recorded.steps)
  rounded = 1 + grid**2 / 12
  yield from _over_time(recorded, rounded)
  for energy, (by_place, near) in zip(recorded.energy or (), recorded.places or ()):
    size = by_place.size
    energy = energy / rounded
    by_place = by_place / rounded
    yield z_of_squares(energy, size), "a leaf at one step"
    for part in np.array_split(energy, min(4, times)):
      yield (
        z_of_squares(np.array([part.sum()]), size * len(part)),
        "all values in a quarter of the run",
      )
    ends = np.array([by_place.min(), by_place.max()], np.float64)
    yield z_of_squares(ends, times, size), "one coordinate over the run"
    chance = 2 * stats.norm.cdf(noise_record.NEAR + grid / 2) - 1
    often = stats.binom.sf(int(near.max()) - 1, times, chance)
    yield z_of(2 * float(often), size), "one coordinate, close to 0 too often"


def _over_time(recorded: Record, rounded: float) -> Iterator[tuple[float, str]]:
  """Tests that the mean square of the values of a step has no trend and no period over the run."""
  sizes = [by_place.size for by_place, _ in recorded.places or ()]
  if not sizes:
    return
  total = sum(sizes)
  energy = np.sum(np.stack(recorded.energy or []), axis=0) / rounded
  # The cube root of chi-squared is close to normal (Wilson and Hilferty 1931).
  normal = ((energy / total) ** (1 / 3) - (1 - 2 / (9 * total))) / math.sqrt(
    2 / (9 * total)
  )
  # An effect at one step recurs in every run of the plan, so adding the runs makes it stand out.
  # Without an effect, the scaled sums are standard normal.
  normal = normal.reshape(recorded.runs, -1).sum(axis=0) / math.sqrt(recorded.runs)
  if len(normal) < 16 or total < 16:
    return
  trend = np.arange(len(normal)) - (len(normal) - 1) / 2
  yield abs(float(normal @ trend)) / float(np.linalg.norm(trend)), "a trend of the size"
  power = np.abs(np.fft.rfft(normal)[1:-1]) ** 2 / len(normal)
  yield z_of(math.exp(-float(power.max())), power.size), "a period of the size"


def _powers_z(powers: Any, count: int) -> tuple[float, str]:
  """Returns z of the mean, skewness or fourth moment of N(0, 1) values, whichever is least likely,
  and its name. `powers`: sums of the first four powers of the values."""
  first, second, third, fourth = (float(power) for power in powers)
  # Sums of Hermite polynomials of the values are used, since such sums are uncorrelated.
  z_of = {
    "the mean": abs(first) / math.sqrt(count),
    "the skewness": abs(third - 3 * first) / math.sqrt(6 * count),
    "the fourth moment": abs(fourth - 6 * second + 3 * count) / math.sqrt(24 * count),
  }
  what = max(z_of, key=lambda name: nan_first((z_of[name], name)))
  return z_of[what], what


def _tail_deviations(seen: noise_record.Tails, grid: float) -> Iterator[tuple[float, str]]:
  """Tests that extremes, and counts beyond each threshold, match Gaussian noise.

  Noise that is cut off at a few standard deviations lacks its extremes.
  """
  yield _powers_z(seen.powers, seen.count)
  for sign, most in ((-1, -seen.lowest), (1, seen.highest)):
    # `none` is the chance that no value is beyond the extreme one. `z` is the chance that at least
    # one value is as extreme. Both allow for half a step of the grid.
    none = math.exp(-seen.count * float(stats.norm.sf(most + grid / 2)))
    z = -math.expm1(-seen.count * float(stats.norm.sf(most - grid / 2)))
    yield z_of(2 * min(none, z), 2), f"the {'largest' if sign > 0 else 'least'} value"
  for counts, side in zip(seen.beyond, ("below", "above")):
    for limit, count in zip(noise_record.THRESHOLDS, counts):
      few = seen.count * float(stats.norm.sf(limit + grid / 2))
      many = seen.count * float(stats.norm.sf(limit - grid / 2))
      p = min(stats.poisson.cdf(count, few), stats.poisson.sf(count - 1, many))
      yield z_of(2 * float(p)), f"values {side} {limit:g} standard deviations"


def noise_tails(subject: Subject) -> Row:
  """Tests that noise is not truncated: its tails match those of a Gaussian."""
  multiplier = _accounted_multiplier(subject.plan)
  if multiplier is None:
    return not_applicable(_why_untested(subject.plan))
  std = multiplier * subject.plan.l2_bound
  seen = noise_record.tails(subject, noise_record.test_keys(subject, 3))
  if seen is None:
    return not_applicable("correlated noise; its std and independence are tested")
  grid = source.grid_step(std) / std if subject.release else 0.0
  worst, what = max(_tail_deviations(seen, grid), key=nan_first)
  extremes = f"least {seen.lowest:.3g}, largest {seen.highest:.3g}"
  detail = f"largest z of {seen.count:.2g} values ({extremes} std): {what}"
  return row(worst, Z, detail)


def noise_std(subject: Subject) -> Row:
  """Tests that the noise is Gaussian with the accounted standard deviation, in every leaf
  and at every step."""
  multiplier = _accounted_multiplier(subject.plan)
  if multiplier is None:
    return not_applicable(_why_untested(subject.plan))
  std = multiplier * subject.plan.l2_bound
  (recorded,) = noise_record.records(subject, [noise_record.test_keys(subject, 0)])
  grid = source.grid_step(std) if subject.release else 0.0
  worst, where = max(_distribution_deviations(recorded, std, grid), key=nan_first)
  pooled = np.concatenate([leaf.ravel() for leaf in recorded.whole])
  # Each value is spread over its cell of the grid: the test assumes a continuous distribution.
  spread = np.random.default_rng(SEED).uniform(-grid / 2, grid / 2, pooled.size)
  distance: Any = stats.kstest((pooled + spread) / std, "norm")
  shape = float(distance.statistic) * math.sqrt(pooled.size)
  return row(
    max(worst / Z, shape / _KS, key=lambda x: nan_first((x, ""))),
    1.0,
    f"std {pooled.std():.5g} (charged {std:.5g}), worst z={worst:.1f} (<= {Z:g}) of "
    f"{where} in {_span(recorded)}, Kolmogorov-Smirnov {shape:.2f} (<= {_KS:g})",
  )


def _span(recorded: Record) -> str:
  steps = len(recorded.steps)
  coordinates = sum(x.shape[1] for x in recorded.sampled)
  skipped = f", {recorded.stepped_over} skipped" if recorded.stepped_over else ""
  return f"{steps} steps{skipped} x {coordinates} coordinates"


def _alike(a: np.ndarray, b: np.ndarray, skip: Callable | None = None) -> float:
  """Returns the z-score of the largest correlation between a row of `a` and a row of `b`.

  For Gaussian noise the p-value of one pair is exact; a union bound covers all pairs. The z-score
  is 0 if d < 3.

  Args:
    a: [n, d].
    b: [m, d].
    skip: (row numbers of `a` [n', 1], row numbers of `b` [1, m]) -> pairs to leave out; or None.
  """
  dimension = a.shape[1]
  worst = 0.0
  if dimension < 3 or not len(a) or not len(b):
    return 0.0
  unit = lambda x: (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
  a = unit(a)
  b = unit(b)
  for start in range(0, len(a), 512):
    seen = np.abs(a[start : start + 512] @ b.T)
    if skip is not None:
      mine = np.arange(start, start + len(seen))[:, None]
      seen[skip(mine, np.arange(len(b))[None])] = 0
    worst = max(worst, float(seen.max(initial=0.0)))
  # float32 may round a correlation to 1, for which t is infinite.
  worst = min(worst, 1 - 1e-7)
  t = worst * math.sqrt((dimension - 1) / (1 - worst**2))
  return z_of(2 * float(stats.t.sf(t, dimension - 1)), a.shape[0] * b.shape[0])


def _below(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
  return other <= mine


def _lag_z(rows: np.ndarray) -> float:
  """Returns the largest z-score of the autocorrelation of rows [T, k] over lags, with products
  summed over the coordinates. Lags with fewer than 200 products are left out."""
  times = len(rows)
  # T rows of zeros are added, since a Fourier transform joins the last row to the first.
  spectrum = np.fft.rfft(rows, 2 * times, axis=0)
  power = np.sum(np.abs(spectrum) ** 2, axis=1)
  shared = np.fft.irfft(power, 2 * times)[1:times]
  counts = (times - np.arange(1, times)) * rows.shape[1]
  scale = float(np.mean(rows**2))
  enough = counts >= 200
  return float(np.max(np.abs(shared / np.sqrt(counts))[enough] / scale, initial=0.0))


def _lowest_eigenvalue(rows: np.ndarray) -> float:
  """Returns a score that is large if the first T // 4 coordinates of rows [T, k] depend on each
  other linearly; 0 if these are fewer than two.

  The score is inversely proportional to the smallest eigenvalue of their correlation. It is `Z` if
  that eigenvalue is a third of its value for independent coordinates (Marchenko and Pastur 1967).
  """
  rows = rows[:, : len(rows) // 4]
  if rows.shape[1] < 2:
    return 0.0
  ratio = rows.shape[1] / len(rows)
  least = np.linalg.eigvalsh(rows.T @ rows / len(rows))[0] / float(np.mean(rows**2))
  alarm = (1 - math.sqrt(ratio)) ** 2 / 3
  return Z * alarm / max(float(least), 1e-12)


def _matches(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Returns [2]: the number of values of the shorter array that also occur in the longer one, and
  the number expected by chance. Both arrays must be sorted absolute values."""
  a, b = (a, b) if a.size >= b.size else (b, a)
  gap = _TOLERANCE * b
  hits = np.searchsorted(a, b + gap, "right") > np.searchsorted(a, b - gap, "left")
  std = math.sqrt(float(np.mean(a**2))) or 1.0
  density = 2 * stats.norm.pdf(b / std) / std  # of an absolute value
  chance = -np.expm1(-a.size * density * 2 * gap)
  return np.array([hits.sum(), chance.sum()])


def _matches_z(counts: np.ndarray) -> float:
  """Returns the z-score of the numbers [2] that `_matches` returns, or of sums of them."""
  # Chance hits are rare, so their number is nearly Poisson.
  return z_of(2 * float(stats.poisson.sf(int(counts[0]) - 1, max(counts[1], 1e-9))))


def _gaussian_sizes(values: np.ndarray) -> np.ndarray:
  """Returns the absolute values of N(0, 1) values, mapped to N(0, 1) again. Only the signs are
  lost."""
  size = np.abs(values)
  upper = special.ndtri(np.clip(2 * special.ndtr(-size), 1e-300, 1 - 1e-16))
  return -upper


def _dependences(
  mine: Record, other: Record, std: float, grid: float
) -> Iterator[tuple[float, str]]:
  """Yields z-scores of dependences between values at different places, steps and keys.

  Args:
    mine, other: noise under two keys.
    std: standard deviation of the noise.
    grid: step of the grid on which the noise lies. 0: there is none.
  """
  rows = np.concatenate(mine.sampled, axis=1)
  others = np.concatenate(other.sampled, axis=1)
  rng = np.random.default_rng(SEED)

  def sizes_of(values: np.ndarray) -> np.ndarray:
    # On a grid a share of the values is exactly 0, which would be an outlier among the sizes. So
    # each value is spread over its cell.
    spread = rng.uniform(-grid / 2, grid / 2, values.shape)
    return _gaussian_sizes((values + spread) / std)

  # Signs that are drawn anew hide a correlation, but not the correlation of absolute values.
  sizes = sizes_of(rows)
  other_sizes = sizes_of(others)
  yield _alike(sizes, sizes, _below), "sizes in steps"
  yield _alike(other_sizes, sizes), "sizes under keys"
  yield _alike(sizes.T, sizes.T, _below), "sizes of coordinates"
  for i, leaf in enumerate(mine.whole):
    if leaf.shape[1] >= 64:
      yield _lag_z(leaf.T), f"places in leaf {i}"
      yield _lag_z(sizes_of(leaf.T)), f"sizes at places in leaf {i}"
  yield _alike(rows, rows, _below), "steps"
  if not mine.stepped_over:
    yield _lag_z(rows), "steps"
  yield _alike(others, rows), "keys"
  yield _alike(rows.T, rows.T, _below), "coordinates"
  yield _lowest_eigenvalue(rows), "coordinates together"
  for i, sums in enumerate(mine.sums):
    other_leaves = [leaf for j, leaf in enumerate(mine.sampled) if j != i]
    other_leaves += [leaf for j, leaf in enumerate(mine.sums) if j != i]
    if other_leaves and sums.shape[1]:
      yield (
        _alike(sums.T, np.concatenate(other_leaves, axis=1).T),
        "leaves (sums over an axis)",
      )


def _ties(values: np.ndarray, std: float) -> float:
  """Returns the z-score of the number of equal absolute values, of which sound noise has few. It
  finds repeated values in a leaf, atoms, and noise on a grid."""
  sizes, often = np.unique(np.abs(values) / std, return_counts=True)
  count = values.size
  same = values.size - sizes.size
  expected = count**2 / 2 * _SPACING / math.sqrt(math.pi)
  pairs = z_of(2 * float(stats.poisson.sf(same - 1, max(expected, 1e-9))))
  # In sound noise of n values, about n^m / m! (spacing times density)^(m - 1) values occur m times.
  most = int(often.max())
  logarithm = most * math.log(count) - math.lgamma(most + 1)
  logarithm += (most - 1) * math.log(_SPACING * 2 * float(stats.norm.pdf(0)))
  return max(pairs, z_of(math.exp(min(0.0, logarithm))))


def _same_marks(a: Record, b: Record | None) -> float:
  """Returns infinity if two steps, of one run or of two, hold the same values in another order;
  else 0."""
  for i, marks in enumerate(a.marks or ()):
    if (a.places or [])[i][0].size < _LEAST_MARKED:
      continue
    rows = marks if b is None else np.concatenate([marks, (b.marks or [])[i]])
    rows = rows[np.argsort(rows[:, 0]), :3]
    close = np.abs(np.diff(rows, axis=0)) <= 4 * _TOLERANCE * np.abs(rows[1:])
    if close.all(axis=1).any():
      return math.inf
  return 0.0


def _copies(recorded: Record, std: float) -> Iterator[tuple[float, str]]:
  """Yields z-scores of values of a leaf at a step that occur again elsewhere, in any order and with
  any sign."""
  for block in noise_record.blocks(recorded):
    yield _ties(block.values, std), f"values within {block.name}"
  for i, leaf in enumerate(recorded.whole):
    yield _ties(leaf.ravel(), std), f"values of leaf {i}"
  pooled = np.concatenate([leaf.ravel() for leaf in recorded.whole])
  yield _ties(pooled, std), "any two values"
  # A small leaf that copies another one has too few values at one step to show it. So the matches
  # of two leaves are added over all steps.
  of_leaves: dict[tuple[int, int], np.ndarray] = collections.defaultdict(
    lambda: np.zeros(2)
  )
  for first, second in itertools.combinations(noise_record.blocks(recorded), 2):
    counts = _matches(first.values, second.values)
    yield _matches_z(counts), f"values of {first.name} and {second.name}"
    if first.step == second.step:
      of_leaves[first.leaf, second.leaf] += counts
  for leaves, counts in of_leaves.items():
    yield _matches_z(counts), "values of leaves {} and {} at equal steps".format(*leaves)


def _is_finite(recorded: Record) -> bool:
  return all(np.isfinite(leaf).all() for leaf in (*recorded.whole, *recorded.sampled))


def noise_independence(subject: Subject) -> Row:
  """Tests that no two steps, leaves, coordinates or keys share noise."""
  multiplier = _accounted_multiplier(subject.plan)
  if multiplier is None:
    return not_applicable(_why_untested(subject.plan))
  keys = [noise_record.test_keys(subject, number) for number in (0, 1)]
  mine, other = noise_record.records(subject, keys)
  # The measured std is used here, since noise of a wrong size fails another check.
  std = (
    math.sqrt(np.mean(np.concatenate([leaf.ravel() for leaf in mine.whole]) ** 2)) or 1.0
  )
  plain = mine
  # On a release's grid all values repeat, so copies are looked for in noise without a grid.
  if subject.release:
    (plain,) = noise_record.records(subject, [noise_record.plain_keys])
  # NaN would end the search for eigenvalues in an error.
  if not all(_is_finite(recorded) for recorded in (mine, other, plain)):
    return Row("", False, math.inf, Z, f"NaN or infinite values over {_span(mine)}")
  accounted = multiplier * subject.plan.l2_bound
  grid = source.grid_step(accounted) if subject.release else 0.0
  deviations = [*_dependences(mine, other, std, grid), *_copies(plain, std)]
  deviations.append(
    (_same_marks(plain, other if plain is mine else None), "steps, reordered")
  )
  worst, what = max(deviations, key=nan_first)
  return row(
    worst,
    Z,
    f"largest z of {len(deviations)} comparisons over {_span(mine)}, between {what}",
  )


CHECKS = {
  "noise as charged": noise_std,
  "noise has its tails": noise_tails,
  "noise independent": noise_independence,
}

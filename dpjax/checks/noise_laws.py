"""Checks of the noise: as large as charged at every step, Gaussian, of one mind with
nothing: not with other steps, however far, other leaves, other coordinates or other keys.

Every statistic is a z-score (or a p-value turned into one) with fixed seeds: 6 is reached
by a sound run with a chance of 2e-9 for each number looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import dp_accounting as dpa
import jax
import numpy as np
from scipy import stats

from dpjax import noise
from dpjax.checks import noise_record
from dpjax.checks.noise_record import Record
from dpjax.checks.subject import SEED, Row, Subject, not_applicable, row
from dpjax.passes import RandomAllocationDpEvent
from dpjax.plan import Plan

_Z = 6.0
_KS = 2.5  # sqrt(n) * distance; above it with a chance of 7e-6
_WINDOW = 2000  # values of a stretch of steps whose variance is looked at
_TOLERANCE = 1e-6  # relative: two float32 numbers that are one number


def _noise_multiplier(event: Any) -> float | None:
  """The Gaussian noise multiplier that the accountant was told of."""
  by_itself = dpa.GaussianDpEvent | dpa.TruncatedSubsampledGaussianDpEvent
  if isinstance(event, by_itself | RandomAllocationDpEvent):
    return event.noise_multiplier
  sampled = dpa.PoissonSampledDpEvent | dpa.SampledWithoutReplacementDpEvent
  return _noise_multiplier(event.event) if isinstance(event, sampled) else None


def _charged_multiplier(plan: Plan) -> float | None:
  """Of the white noise that the accountant was told of; None where there is none."""
  if not plan.is_private:
    return None
  if plan.noise_shape.by_step:
    return plan.noise_multiplier  # its charges are checked by `agreement`
  whole = plan.step_event() if plan.steps_alike else plan.step_event(0)
  charged = _noise_multiplier(whole if plan.statistics is None else plan.sum_event(0))
  rule = plan.l2_clip_norm.rule
  if charged is None or not rule.adapts:
    return charged
  # The sum's part of what is charged for sum and count.
  return (charged**-2 - (2 * rule.count_std(plan.normalize_by)) ** -2) ** -0.5


def _as_z(p: float, looked_at: int = 1) -> float:
  """The z-score of the smallest of `looked_at` p-values."""
  return float(stats.norm.isf(min(p * looked_at, 1.0) / 2))


def _energy_z(energy: np.ndarray, count: int, looked_at: int = 0) -> float:
  """z of the sum of squares that is least like that of `count` N(0, 1) values, of all these or
  of the `looked_at` of which these are the ends."""
  tails = np.minimum(stats.chi2.cdf(energy, count), stats.chi2.sf(energy, count))
  return _as_z(2 * float(np.min(tails)), looked_at or np.size(energy))


def _variance_z(values: np.ndarray) -> float:
  return _energy_z(np.sum(values**2), values.size)


def _stretches(rows: np.ndarray) -> Iterator[np.ndarray]:
  """[T, k] cut into stretches of steps with some two thousand values each."""
  length = max(1, _WINDOW // max(1, rows.shape[1]))
  for start in range(0, len(rows), length):
    yield rows[start : start + length]


def _law_deviations(
  recorded: Record, std: float, grid: float
) -> Iterator[tuple[float, str]]:
  leaves = [leaf / std for leaf in recorded.sampled]
  together = np.concatenate(leaves, axis=1)
  for whole in recorded.whole:
    yield _variance_z(whole / std), "a leaf"
  for leaf in leaves:
    for part in np.array_split(leaf, min(4, len(leaf))):
      yield _variance_z(part), "a leaf in a quarter of the run"
  for stretch in _stretches(together):
    yield _variance_z(stretch), "a stretch of steps"
  yield _energy_z(np.sum(together**2, axis=1), together.shape[1]), "one step"
  yield from _every_value(recorded, grid / std)


def _every_value(recorded: Record, grid: float) -> Iterator[tuple[float, str]]:
  """The same of every value of white noise, and not of the sample alone: no step, and no
  coordinate of any leaf, may lack what the others have.

  Rounding to a grid (in standard deviations) adds its variance, and what is near may be
  half a step farther.
  """
  times, rounded = len(recorded.steps), 1 + grid**2 / 12
  for energy, (by_place, near) in zip(recorded.energy or (), recorded.places or ()):
    size, energy, by_place = by_place.size, energy / rounded, by_place / rounded
    yield _energy_z(energy, size), "a leaf at one step"
    for part in np.array_split(energy, min(4, times)):
      yield (
        _energy_z(np.array([part.sum()]), size * len(part)),
        "all values in a quarter of the run",
      )
    ends = np.array([by_place.min(), by_place.max()], np.float64)
    yield _energy_z(ends, times, size), "one coordinate over the run"
    chance = 2 * stats.norm.cdf(noise_record.NEAR + grid / 2) - 1
    often = stats.binom.sf(int(near.max()) - 1, times, chance)
    yield _as_z(2 * float(often), size), "one coordinate, close to 0 too often"


def noise_std(subject: Subject) -> Row:
  """The noise has the standard deviation that is paid for, in every leaf and at every
  step, and is Gaussian."""
  name, multiplier = "noise as charged", _charged_multiplier(subject.plan)
  if multiplier is None:
    return not_applicable(name, "no noise is charged")
  std = multiplier * subject.plan.l2_bound
  (recorded,) = noise_record.records(subject, [noise_record.test_key(subject, 0)])
  grid = noise.source.grid_step(std) if subject.config.release else 0.0
  worst, where = max(_law_deviations(recorded, std, grid), key=_nan_first)
  pooled = np.concatenate([leaf.ravel() for leaf in recorded.whole])
  spread = np.random.default_rng(SEED).uniform(-grid / 2, grid / 2, pooled.size)
  distance: Any = stats.kstest((pooled + spread) / std, "norm")
  shape = float(distance.statistic) * math.sqrt(pooled.size)
  return row(
    name,
    max(worst / _Z, shape / _KS, key=lambda x: _nan_first((x, ""))),
    1.0,
    f"std {pooled.std():.5g} (charged {std:.5g}), worst z={worst:.1f} (<= {_Z:g}) of "
    f"{where} in {_span(recorded)}, Kolmogorov-Smirnov {shape:.2f} (<= {_KS:g})",
  )


def _span(recorded: Record) -> str:
  steps, coordinates = len(recorded.steps), sum(x.shape[1] for x in recorded.sampled)
  skipped = f", {recorded.stepped_over} skipped" if recorded.stepped_over else ""
  return f"{steps} steps{skipped} x {coordinates} coordinates"


def _nan_first(found: tuple[float, str]) -> tuple[bool, float]:
  """Sorts NaN above every number: it must never pass."""
  return not math.isfinite(found[0]), found[0]


def _alike(a: np.ndarray, b: np.ndarray, skip: Callable | None = None) -> float:
  """z of the most correlated pair of rows: a [n, d], b [m, d] -> exact for Gaussians.

  Args:
    skip: (row numbers of a [n', 1], of b [1, m]) -> pairs that are one row, or None.
  """
  dimension, worst = a.shape[1], 0.0
  if dimension < 3 or not len(a) or not len(b):
    return 0.0
  unit = lambda x: (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
  a, b = unit(a), unit(b)
  for start in range(0, len(a), 512):
    seen = np.abs(a[start : start + 512] @ b.T)
    if skip is not None:
      mine = np.arange(start, start + len(seen))[:, None]
      seen[skip(mine, np.arange(len(b))[None])] = 0
    worst = max(worst, float(seen.max(initial=0.0)))
  worst = min(worst, 1 - 1e-7)
  t = worst * math.sqrt((dimension - 1) / (1 - worst**2))
  return _as_z(2 * float(stats.t.sf(t, dimension - 1)), a.shape[0] * b.shape[0])


def _below(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
  return other <= mine


def _lag_z(rows: np.ndarray) -> float:
  """z of the most correlated lag, over all lags and coordinates: rows [T, k]."""
  times = len(rows)
  spectrum = np.fft.rfft(rows, 2 * times, axis=0)
  power = np.sum(np.abs(spectrum) ** 2, axis=1)
  shared = np.fft.irfft(power, 2 * times)[1:times]
  counts = (times - np.arange(1, times)) * rows.shape[1]
  scale = float(np.mean(rows**2))
  enough = counts >= 200
  return float(np.max(np.abs(shared / np.sqrt(counts))[enough] / scale, initial=0.0))


def _lowest_eigenvalue(rows: np.ndarray) -> float:
  """How far the least eigenvalue of the coordinates' correlation is below what independent
  ones have (Marchenko and Pastur 1967), in multiples of the alarm: rows [T, k]."""
  rows = rows[:, : len(rows) // 4]
  if rows.shape[1] < 2:
    return 0.0
  ratio = rows.shape[1] / len(rows)
  least = np.linalg.eigvalsh(rows.T @ rows / len(rows))[0] / float(np.mean(rows**2))
  alarm = (1 - math.sqrt(ratio)) ** 2 / 3
  return _Z * alarm / max(float(least), 1e-12)


def _matches(a: np.ndarray, b: np.ndarray) -> float:
  """z of the count of values of b that stand in a as well (sorted absolute values)."""
  gap = _TOLERANCE * b
  hits = np.searchsorted(a, b + gap, "right") > np.searchsorted(a, b - gap, "left")
  std = math.sqrt(float(np.mean(a**2))) or 1.0
  density = 2 * stats.norm.pdf(b / std) / std  # of an absolute value
  chance = -np.expm1(-a.size * density * 2 * gap)
  expected = float(chance.sum())
  # Poisson, as chance hits are rare: exact where few are expected
  return _as_z(2 * float(stats.poisson.sf(int(hits.sum()) - 1, max(expected, 1e-9))))


def _dependences(mine: Record, other: Record) -> Iterator[tuple[float, str]]:
  rows = np.concatenate(mine.sampled, axis=1)
  others = np.concatenate(other.sampled, axis=1)
  yield _alike(rows, rows, _below), "steps"
  if not mine.stepped_over:
    yield _lag_z(rows), "steps"
  yield _alike(others, rows), "keys"
  yield _alike(rows.T, rows.T, _below), "coordinates"
  yield _lowest_eigenvalue(rows), "coordinates together"
  for i, sums in enumerate(mine.sums):
    rest = [leaf for j, leaf in enumerate(mine.sampled) if j != i]
    rest += [leaf for j, leaf in enumerate(mine.sums) if j != i]
    if rest and sums.shape[1]:
      yield _alike(sums.T, np.concatenate(rest, axis=1).T), "leaves (sums over an axis)"


def _copies(recorded: Record) -> Iterator[tuple[float, str]]:
  """Values of one leaf at one step that come again elsewhere, in any order or sign."""
  for (first, a), (second, b) in itertools.combinations(noise_record.blocks(recorded), 2):
    large, small = (a, b) if a.size >= b.size else (b, a)
    yield _matches(large, small), f"values of {first} and {second}"


def noise_independence(subject: Subject) -> Row:
  """No two steps, leaves, coordinates or keys share noise."""
  name = "noise independent"
  if _charged_multiplier(subject.plan) is None:
    return not_applicable(name, "no noise is charged")
  keys = [noise_record.test_key(subject, number) for number in (0, 1)]
  mine, other = noise_record.records(subject, keys)
  plain = mine
  if subject.config.release:  # on its grid all values come again
    (plain,) = noise_record.records(subject, [jax.random.key(SEED)])
  found = [*_dependences(mine, other), *_copies(plain)]
  worst, what = max(found, key=_nan_first)
  return row(
    name,
    worst,
    _Z,
    f"largest z of {len(found)} comparisons over {_span(mine)}, between {what}",
  )


CHECKS = (noise_std, noise_independence)

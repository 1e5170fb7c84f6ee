"""Checks that batches follow the sampling scheme and the seed; records must not change others."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import dp_accounting as dpa
import jax
import numpy as np
from scipy import special, stats

from dpjax import sampling, trees
from dpjax.accounting.event_kinds.elements import mechanism_of
from dpjax.accounting.event_kinds.k_out_of_t import KOutOfTDpEvent
from dpjax.accounting.event_kinds.kind import kind_of
from dpjax.accounting.event_kinds.random_allocation import RandomAllocationDpEvent
from dpjax.checks.subject import (
  SEED,
  Row,
  Subject,
  Z,
  not_applicable,
  row,
  worst,
  z_of,
)

# Smallest and largest number of batches whose overlaps, two by two, are tested.
_DRAWS = (50, 400)
# Limit on rows x batches in these tests of overlaps. At least `_DRAWS[0]` batches are drawn even
# above it.
_INDICES = 40_000_000
# Largest number of examples of which all pairs are compared. With more examples, only neighbouring
# rows are compared.
_PAIRED = 2048
# Smallest number of batches in which rows are counted, for up to 20,000 rows. If the run has fewer,
# steps beyond its end are drawn, too.
_ROWS = 2000
# Limit on rows x steps that are drawn from a run. At least `_DRAWS[1]` steps, or `_DRAWS[0]`
# passes, are drawn even above it.
_REPEATS = 200_000_000
# Largest number of seeds that are compared with each other.
_SEEDS = 1500
# Limit on rows x seeds in the comparison of seeds. Forty seeds are compared even above it.
_SEED_INDICES = 4_000_000
# These seeds differ from SEED in low or in high bits, so that truncation of a seed is found.
_OTHER_SEEDS = (SEED + 1, SEED + (1 << 40), SEED + (1 << 100))


def _z(value: float, mean: float, variance: float) -> float:
  """Returns |value - mean| in standard errors. Without variance, it is 0 if value and mean are
  equal, else infinity."""
  if variance > 1e-12:
    return abs(value - mean) / math.sqrt(variance)
  return 0.0 if abs(value - mean) < 1e-9 else math.inf


@dataclasses.dataclass(frozen=True)
class _Expected:
  """Moments of a sampler's draws from n examples, derived from the accounted event."""

  n: int
  sampling_prob: float  # chance that one example is in a batch
  size_variance: float
  overlap_mean: float  # mean number of examples that batches t and t + 1 share
  overlap_variance: float  # T x variance of the mean overlap over T steps, for large T
  capacity: int | None = None  # larger draws are cut to this size; None: none are cut


def _expected_sizes(event: Any, n: int) -> _Expected | None:
  if isinstance(event, dpa.PoissonSampledDpEvent):
    q = event.sampling_probability
    overlaps = n * q**2 * (1 - q**2) + 2 * n * q**3 * (1 - q)
    return _Expected(n, q, n * q * (1 - q), n * q**2, overlaps)
  if isinstance(event, dpa.SampledWithoutReplacementDpEvent):
    # The event covers only a part of the data, so draws are not uniform over all examples.
    if event.source_dataset_size != n:
      return None
    b = event.sample_size
    m = event.source_dataset_size
    spread = b * (b / m) * (1 - b / m) * (m - b) / max(m - 1, 1)
    return _Expected(m, b / m, 0.0, b * b / m, spread)
  if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
    return _expected_truncated(event)
  return None


def _expected_truncated(event: dpa.TruncatedSubsampledGaussianDpEvent) -> _Expected:
  """Returns the moments if sizes are min(binomial, capacity), and batches of one size are equally
  likely."""
  n = event.dataset_size
  most = event.truncated_batch_size
  drawn = np.arange(n + 1)
  weight = stats.binom.pmf(drawn, n, event.sampling_probability)
  size = np.minimum(drawn, most)
  mean = float(weight @ size)
  square = float(weight @ size**2)
  variance = square - mean**2
  missing = mean - square / n
  spread = missing**2 / max(n - 1, 1) + (square**2 - mean**4) / n**2
  # Overlaps of steps t, t + 1 and of steps t + 1, t + 2 share a batch, so they are correlated.
  again = 2 * mean**2 * variance / n**2
  return _Expected(n, mean / n, variance, mean**2 / n, spread + again, most)


def _batch_deviations(
  draws: list[np.ndarray], distribution: _Expected
) -> Iterator[tuple[float, str]]:
  times = len(draws)
  n = distribution.n
  q = distribution.sampling_prob
  yield from _size_deviations([drawn.size for drawn in draws], distribution, "of batches")
  counts = np.bincount(np.concatenate(draws), minlength=n).astype(float)
  expected = times * q * (1 - q)
  fourth = 2 * expected**2 + expected * (1 - 6 * q * (1 - q))
  yield _z(float(np.mean((counts - times * q) ** 2)), expected, fourth / n), "turn-taking"
  # Given its size, a batch is uniform: early and late rows are equally likely.
  ranks = np.concatenate(draws) - (n - 1) / 2
  spread_of_size = (n * n * q - distribution.size_variance - (n * q) ** 2) / max(n - 1, 1)
  rank_variance = times * spread_of_size * (n * n - 1) / 12
  yield _z(float(ranks.sum()), 0.0, rank_variance), "place in the data"
  overlaps = [np.intersect1d(a, b).size for a, b in itertools.pairwise(draws)]
  mean_variance = distribution.overlap_variance / (times - 1)
  yield (
    _z(float(np.mean(overlaps)), distribution.overlap_mean, mean_variance),
    "overlap of batches",
  )


def _size_deviations(
  sizes: list[int], distribution: _Expected, where: str
) -> Iterator[tuple[float, str]]:
  seen = np.array(sizes, float)
  times = len(seen)
  variance = distribution.size_variance
  mean = distribution.n * distribution.sampling_prob
  yield _z(seen.mean(), mean, variance / times), f"mean size {where}"
  if times > 1:
    spread = 2 * variance**2 / (times - 1)
    yield _z(seen.var(ddof=1), variance, spread), f"variance of sizes {where}"


def _most(counts: np.ndarray, times: int, chance: float) -> float:
  """Returns the z-score of the largest of several Binomial(times, chance) counts, by a union
  bound."""
  p = float(stats.binom.sf(int(counts.max(initial=0)) - 1, times, chance))
  return z_of(p, max(1, counts.size))


def _fewest(counts: np.ndarray, times: int, chance: float) -> float:
  """Returns the z-score of the smallest of several Binomial(times, chance) counts, by a union
  bound."""
  p = float(stats.binom.cdf(int(counts.min(initial=times)), times, chance))
  return z_of(p, max(1, counts.size))


def _inclusion_matrix(draws: list[np.ndarray], n: int) -> np.ndarray:
  """Returns [T, n] float32: 1 where a draw contains a row, else 0."""
  taken = np.zeros((len(draws), n), np.float32)
  for member, drawn in zip(taken, draws):
    member[drawn] = 1
  return taken


def _pair_deviations(
  draws: list[np.ndarray], distribution: _Expected
) -> Iterator[tuple[float, str]]:
  """Tests that two rows occur together as often as the sampling scheme says."""
  n = distribution.n
  square = distribution.size_variance + (n * distribution.sampling_prob) ** 2
  chance = min(
    1.0, max(0.0, (square - n * distribution.sampling_prob) / max(1, n * (n - 1)))
  )
  yield from _together(draws, n, chance)


def _together(
  draws: list[np.ndarray], n: int, chance: float
) -> Iterator[tuple[float, str]]:
  """Tests that two rows are in one batch with probability `chance`."""
  times = len(draws)
  taken = _inclusion_matrix(draws, n)
  if n <= _PAIRED:
    together = np.triu(taken.T @ taken, 1)[np.triu_indices(n, 1)]
  else:
    together = np.sum(taken[:, 1:] * taken[:, :-1], axis=0)
  yield _most(together, times, chance), "two rows together"
  yield _fewest(together, times, chance), "two rows, never together"


def _run_deviations(
  subject: Subject, distribution: _Expected
) -> Iterator[tuple[float, str]]:
  """Tests the sizes of the run's batches, and that no row occurs too often or too rarely."""
  sizes = []
  counts = np.zeros(distribution.n, int)
  more = max(_DRAWS[1], _INDICES // max(distribution.n, 1))
  for drawn in _of_run(subject, distribution.n, at_least=min(more, _ROWS)):
    sizes.append(drawn.size)
    counts[drawn] += 1
  yield _most(counts, len(sizes), distribution.sampling_prob), "one row"
  yield _fewest(counts, len(sizes), distribution.sampling_prob), "one row, left out"
  yield _unlikely_size(sizes, distribution), "size of a batch"
  yield _missing_sizes(sizes, distribution), "no size beyond those that were seen"
  # Truncation of batches lowers the mean and the variance of sizes. Many draws are needed to see
  # it, more than can be compared in pairs.
  yield from _size_deviations(sizes, distribution, "in the run")


def _unlikely_size(sizes: list[int], distribution: _Expected) -> float:
  """Returns the z-score of the least likely size, which is the smallest or the largest one."""
  mean = distribution.n * distribution.sampling_prob
  most = np.array([min(sizes), max(sizes)])
  if distribution.size_variance < 1e-9:
    return 0.0 if (np.abs(most - mean) < 1e-6).all() else math.inf
  tails: list[Any] = [stats.binom.cdf(most[0], distribution.n, distribution.sampling_prob)]
  if distribution.capacity is None:
    tails.append(stats.binom.sf(most[1] - 1, distribution.n, distribution.sampling_prob))
  elif most[1] > distribution.capacity:
    tails.append(0.0)
  return z_of(float(min(tails)) * 2, len(sizes))


def _missing_sizes(sizes: list[int], distribution: _Expected) -> float:
  """Returns the z-score of the fact that no smaller, or no larger, size was seen.

  It finds batches that are cut or filled up far from the mean size, which hardly changes the mean
  and the variance of sizes.
  """
  if distribution.size_variance < 1e-9:
    return 0.0
  smaller = float(
    stats.binom.cdf(min(sizes) - 1, distribution.n, distribution.sampling_prob)
  )
  larger = float(stats.binom.sf(max(sizes), distribution.n, distribution.sampling_prob))
  if distribution.capacity is not None and max(sizes) >= distribution.capacity:
    # No size above the capacity exists.
    larger = 0.0
  # `log1p` is accurate for a small chance, where 1 - chance would be rounded to 1.
  log_p = len(sizes) * math.log1p(-min(max(smaller, larger), 1 - 1e-16))
  return z_of(2 * math.exp(log_p))


def _of_run(subject: Subject, n: int, at_least: int = 0) -> Iterator[np.ndarray]:
  """Yields the batches of the run, or as many as `_REPEATS` allows. If the run has fewer than
  `at_least` steps, further steps are drawn."""
  times = max(_steps_of_run(subject, n), at_least)
  return (np.asarray(subject.draw(n, seed=SEED, step=step)) for step in range(times))


def _steps_of_run(subject: Subject, n: int) -> int:
  return int(min(subject.plan.num_steps, max(_REPEATS // max(n, 1), _DRAWS[1])))


def _stretches(plan: Any, n: int) -> tuple[range, range]:
  """Returns two equally long ranges of steps: at the start and at the end of the plan. If the plan
  has fewer steps than both ranges, they go beyond its end."""
  each = int(np.clip(_INDICES // max(n, 1), *_DRAWS)) // 2
  late = max(each, plan.num_steps - each)
  return range(each), range(late, late + each)


def sampler_law(subject: Subject) -> Row:
  """Tests that batches follow the accounted sampling scheme: sizes, members, and
  independence, at the start and at the end of the run."""
  n = len(subject.train)
  if subject.plan.sampler.participation is not None:
    return _participation(subject, n)
  if isinstance(subject.plan.sampler, sampling.ShuffledSampler):
    return _once_an_epoch(subject, n)
  event: Any = mechanism_of(subject.plan.sum_event(0))
  if isinstance(event, RandomAllocationDpEvent):
    return _in_each_pass(subject, n, length=event.num_steps, times=1)
  if isinstance(event, KOutOfTDpEvent):
    length = event.num_steps
    return _in_each_pass(subject, n, length=length, times=event.num_selected)
  if isinstance(event, dpa.SampledWithReplacementDpEvent):
    return _independent_draws(subject, n, event.sample_size)
  distribution = _expected_sizes(event, n)
  if distribution is None:
    return _no_oftener(subject, n, event)
  deviations = []
  draws = []
  for steps in _stretches(subject.plan, n):
    drawn = _draws(subject, n, steps)
    deviations += _batch_deviations(drawn, distribution)
    draws += drawn
  deviations += [
    *_pair_deviations(draws, distribution),
    *_run_deviations(subject, distribution),
  ]
  twice = sum(d.size - np.unique(d).size for d in draws)
  deviations += [
    (math.inf if twice else 0.0, "repetitions"),
    (_most_alike(draws, n), "likeness"),
  ]
  return worst(deviations, f"{len(draws)} draws")


def _draws(subject: Subject, n: int, steps: Iterable[int]) -> list[np.ndarray]:
  return [np.asarray(subject.draw(n, seed=SEED, step=step)) for step in steps]


def _in_each_pass(subject: Subject, n: int, *, length: int, times: int) -> Row:
  """Tests that every example is in `times` of the `length` steps of each pass, and that all sets of
  steps are equally likely. In this scheme each step is a Poisson sample, and steps of different
  passes are independent."""
  passes = int(np.clip(_INDICES // max(n, 1), *_DRAWS))
  # With several steps for each example, drawing a late step of a pass takes as long as drawing all
  # steps of the pass before it.
  if times > 1:
    passes = int(np.clip(_REPEATS // max(n * length, 1), _DRAWS[0], passes))
  # One step of each pass is drawn, since the steps of one pass are not independent. Its place in
  # the pass changes from pass to pass.
  draws = _draws(subject, n, (turn * length + turn % length for turn in range(passes)))
  rate = times / length
  distribution = _expected_sizes(dpa.PoissonSampledDpEvent(rate, dpa.NoOpDpEvent()), n)
  assert distribution is not None
  deviations = [
    *_batch_deviations(draws, distribution),
    *_pair_deviations(draws, distribution),
  ]
  deviations.append((_most_alike(draws, n), "likeness"))
  # An example takes part in `times` steps of a pass. Consecutive ones form stretches, and a stretch
  # of r steps has r - 1 neighbouring pairs. So an example has `times` such pairs minus one for each
  # of its stretches. The number of stretches is hypergeometric (Wald and Wolfowitz 1940, "runs").
  # `following` is the mean number of pairs, and `spread` its variance.
  following = times * (times - 1) / length
  spread = following * (length - times + 1) * (length - times)
  spread /= max(1, length * (length - 1))
  for turn in (0, 1, passes):
    whole = _draws(subject, n, range(turn * length, (turn + 1) * length))
    counts = np.bincount(np.concatenate(whole), minlength=n)
    twice = sum(drawn.size - np.unique(drawn).size for drawn in whole)
    alike = not twice and np.array_equal(counts, np.full(n, times))
    often = "once" if times == 1 else f"{times} times"
    deviations.append((0.0 if alike else math.inf, f"every example {often} in pass {turn}"))
    pairs = sum(np.intersect1d(a, b).size for a, b in itertools.pairwise(whole))
    deviations.append((_z(pairs, n * following, n * spread), f"neighbours in pass {turn}"))
  return worst(deviations, f"{passes} passes of {length} steps")


def _independent_draws(subject: Subject, n: int, size: int) -> Row:
  """Tests that a batch is `size` draws, independent and uniform among all examples."""
  draws = _draws(subject, n, itertools.chain(*_stretches(subject.plan, n)))
  steps = len(draws)
  wrong = sum(drawn.size != size for drawn in draws)
  deviations = [(math.inf if wrong else 0.0, "size of a batch")]
  # How often an example is in a batch, [n] for each step. float32 holds these counts exactly.
  copies = [np.bincount(drawn, minlength=n).astype(np.float32) for drawn in draws]
  # Two draws are the same example with chance 1 / n. All pairs of draws are uncorrelated, also
  # pairs that share a draw, since every example is equally likely.
  alike = 1 / n
  variance = alike * (1 - alike)
  pairs = steps * size * (size - 1) / 2
  seen = sum(float(np.dot(held, held) - held.sum()) / 2 for held in copies)
  deviations.append((_z(seen, pairs * alike, pairs * variance), "copies in a batch"))
  pairs = (steps - 1) * size**2
  seen = sum(float(np.dot(*both)) for both in itertools.pairwise(copies))
  deviations.append((_z(seen, pairs * alike, pairs * variance), "overlap of batches"))
  ranks = np.concatenate(draws) - (n - 1) / 2
  rank_variance = steps * size * (n * n - 1) / 12
  deviations.append((_z(float(ranks.sum()), 0.0, rank_variance), "place in the data"))
  # Chance that two examples are both in a batch: 1 minus the chance that at least one is not.
  chance = 1 - 2 * (1 - 1 / n) ** size + max(0.0, 1 - 2 / n) ** size
  deviations += _together(draws, n, chance)
  deviations.append((_most_alike([np.unique(drawn) for drawn in draws], n), "likeness"))
  totals = np.zeros(n, int)
  count = 0
  for drawn in _of_run(subject, n, at_least=_ROWS):
    totals += np.bincount(drawn, minlength=n)
    count += size
  deviations.append((_most(totals, count, alike), "one row"))
  deviations.append((_fewest(totals, count, alike), "one row, left out"))
  return worst(deviations, f"{steps} draws")


def _no_oftener(subject: Subject, n: int, event: Any) -> Row:
  """Tests a sampler of unknown scheme. No step may draw an example twice, since the sum of both
  copies could exceed the clip norm. No example may occur more often than the event says."""
  if not subject.plan.is_private:
    return not_applicable("no epsilon is claimed")
  draws = _draws(subject, n, itertools.chain(*_stretches(subject.plan, n)))
  twice = sum(drawn.size - np.unique(drawn).size for drawn in draws)
  times = len(draws)
  chance = kind_of(event).sampling_prob(event)
  if chance is None:
    unsampled = isinstance(event, dpa.GaussianDpEvent)
    accounted = (
      "no sampling is charged" if unsampled else "how often an example comes is not tested"
    )
    detail = f"examples drawn again in the same step, of {times} steps; {accounted}"
    return row(twice, 0, detail)
  length = subject.plan.sampler.steps_per_event
  if length > 1:
    return _seldom_in_a_pass(subject, n, chance, length)
  counts = np.bincount(np.concatenate(draws), minlength=n)
  detail = (
    f"z of the example that came oftenest in {times} steps; charged: {chance:.4g} of them"
  )
  return row(math.inf if twice else _most(counts, times, chance), Z, detail)


def _seldom_in_a_pass(subject: Subject, n: int, chance: float, length: int) -> Row:
  """Tests that no example comes twice in a pass, nor in more passes than the event says."""
  deviations = []
  times = int(np.clip(_INDICES // max(n, 1), *_DRAWS))
  # Each place of a pass is tested by itself. With fixed blocks an example always has the same
  # place, so draws at other places would lower its share.
  for place in {0, length // 2, length - 1}:
    draws = _draws(subject, n, (turn * length + place for turn in range(times)))
    counts = np.bincount(np.concatenate(draws), minlength=n)
    deviations.append((_most(counts, times, chance), f"oftenest at place {place}"))
  for turn in (0, 1, times):
    whole = np.concatenate(_draws(subject, n, range(turn * length, (turn + 1) * length)))
    once = whole.size == np.unique(whole).size
    deviations.append((0.0 if once else math.inf, f"no example twice in pass {turn}"))
  charged = f"(charged: {chance:.4g} of the passes)"
  return worst(deviations, f"{times} passes of {length} steps {charged}")


def _overlap_moments(a: Any, b: Any, n: int) -> tuple[Any, Any]:
  """Returns mean and variance of the overlap of two uniform subsets of n examples, of sizes a and
  b."""
  mean = a * b / n
  return mean, mean * (1 - a / n) * (1 - b / n) * n / max(n - 1, 1)


def _most_alike(draws: list[np.ndarray], n: int) -> float:
  """Returns the z-score of the two batches that share the most examples for their sizes, by a union
  bound over all pairs of steps."""
  taken = _inclusion_matrix(draws, n)
  size = taken.sum(axis=1, dtype=np.float64)
  shared = (taken @ taken.T).astype(np.float64)
  mean, variance = _overlap_moments(size[:, None], size[None], n)
  z = np.where(variance > 1e-9, (shared - mean) / np.sqrt(np.maximum(variance, 1e-9)), 0)
  i, j = np.unravel_index(np.argmax(np.triu(z, 1)), z.shape)
  p = stats.hypergeom.sf(shared[i, j] - 1, n, int(size[i]), int(size[j]))
  return z_of(float(p), len(draws) ** 2 / 2)


def sampler_seed(subject: Subject) -> Row:
  """Tests that batches depend on the whole seed, and repeat within the run only where that is
  likely."""
  n = len(subject.train)
  plan = subject.plan
  if isinstance(plan.sampler, sampling.PoissonSampler) and plan.sampler.sampling_prob == 1:
    return not_applicable("every example takes part in every step")
  steps = np.unique(np.linspace(0, plan.num_steps - 1, _DRAWS[0]).astype(int)).tolist()
  # Copies of an example in a batch are dropped. Then all sets of one size are equally likely.
  drawn = lambda seed: [np.unique(subject.draw(n, seed=seed, step=t)) for t in steps]
  draws = drawn(SEED)
  again = all(map(np.array_equal, draws, drawn(SEED)))
  deviations = [(0.0 if again else math.inf, "one seed, two outcomes")]
  for seed in _OTHER_SEEDS:
    deviations.append((_shared_z(draws, drawn(seed), n), f"seeds {SEED} and {seed}"))
  deviations.append(_unused_bits(subject, draws, steps, n))
  deviations.append(_few_seeds(subject, steps, n))
  if plan.sampler.participation is None:
    batches = ([np.unique(drawn)] for drawn in _of_run(subject, n))
    again = _repeats(batches, n, _steps_of_run(subject, n))
    deviations.append((again, "steps with one batch"))
  return worst(deviations, "what two draws share")


def _unused_bits(
  subject: Subject, draws: list[np.ndarray], steps: list[int], n: int
) -> tuple[float, str]:
  """Returns (deviation, name). The deviation is infinite if flipping some bit of the seed changes
  no batch, else 0."""
  several = [i for i, drawn in enumerate(draws) if _ways(drawn.size, n) > 1][:8]
  same = lambda i, seed: np.array_equal(
    draws[i], np.unique(subject.draw(n, seed=seed, step=steps[i]))
  )
  width = subject.seed_bits
  idle = [
    bit
    for bit in range(width)
    if several and all(same(i, SEED ^ 1 << bit) for i in several)
  ]
  # With fewer than e^25 possible results, equal batches may be chance.
  if sum(_ways(draws[i].size, n) for i in several) < 25:
    return 0.0, "bits of the seed"
  return (math.inf if idle else 0.0), f"seeds that differ in bit {idle[:1]}"


def _few_seeds(subject: Subject, steps: list[int], n: int) -> tuple[float, str]:
  """Returns (deviation, name). The deviation is infinite if two of many seeds draw the same
  batches, as when seeds are taken modulo a small number; else it is 0."""
  times = int(np.clip(_SEED_INDICES // max(n, 1), 40, _SEEDS))
  rng = np.random.default_rng(SEED)
  width = subject.seed_bits
  seeds = (int.from_bytes(rng.bytes(width // 8), "little") for _ in range(times))
  draws = (
    [np.unique(subject.draw(n, seed=seed, step=t)) for t in steps[:2]] for seed in seeds
  )
  return _repeats(draws, n, times), f"two of {times} seeds"


def _repeats(draws: Iterable[list[np.ndarray]], n: int, times: int) -> float:
  """Returns infinity if two of `times` draws hold the same batches, else 0. Draws are compared only
  if the chance of that is below e^-21, about 1e-9."""
  seen: set[bytes] = set()
  for drawn in draws:
    if sum(_ways(each.size, n) for each in drawn) - 2 * math.log(times) < 21:
      continue
    name = hashlib.sha256(np.concatenate(drawn).astype(np.int64).tobytes()).digest()
    if name in seen:
      return math.inf
    seen.add(name)
  return 0.0


def _ways(size: int, n: int) -> float:
  """Returns the logarithm of the number of subsets of this size of n examples."""
  ways = special.gammaln(n + 1) - special.gammaln(size + 1)
  return float(ways - special.gammaln(n - size + 1))


def _shared_z(first: list[np.ndarray], other: list[np.ndarray], n: int) -> float:
  """Returns the z-score of the overlap between the batches of two seeds at the same steps, summed
  over the steps. It is infinite if all batches are equal."""
  shared = [np.intersect1d(a, b).size for a, b in zip(first, other)]
  moments = [_overlap_moments(a.size, b.size, n) for a, b in zip(first, other)]
  if all(map(np.array_equal, first, other)) and any(a.size for a in first):
    return math.inf
  mean, variance = (float(sum(column)) for column in zip(*moments))
  return _z(float(sum(shared)), mean, variance)


def _once_an_epoch(subject: Subject, n: int) -> Row:
  """Tests that no example occurs twice in an epoch. The accounting takes an epoch as one step on
  all data."""
  sampler: Any = subject.plan.sampler
  if sampler.num_examples is None:
    return not_applicable("no number of examples is public, so no epoch is charged")
  length = sampler.steps_per_epoch
  epochs = 3
  twice = 0
  for epoch in range(epochs):
    steps = range(epoch * length, (epoch + 1) * length)
    drawn = np.concatenate([subject.draw(n, seed=SEED, step=t) for t in steps])
    twice += drawn.size - np.unique(drawn).size
  return row(twice, 0, f"examples that came again within one of {epochs} epochs")


def _participation(subject: Subject, n: int) -> Row:
  """Tests that two steps with the same example are as far apart as the accounting assumes."""
  plan: Any = subject.plan
  apart, cyclic, prob = plan.sampler.participation
  times = int(min(plan.num_steps, max(3 * apart, _DRAWS[0])))
  last = np.full(n, -1)
  early = 0
  mean = 0.0
  for step in range(times):
    drawn = np.asarray(subject.draw(n, seed=SEED, step=step))
    gaps = step - last[drawn][last[drawn] >= 0]
    early += int((gaps < apart).sum() + (cyclic & (gaps % apart != 0)).sum())
    early += drawn.size - np.unique(drawn).size
    last[drawn] = step
    mean += drawn.size / times
  off = _z(mean, plan.normalize_by, n * prob / apart * (1 + 1e-9)) if cyclic else 0.0
  detail = f"examples that came back too early in {times} steps ({apart} apart); "
  return row(early + max(0.0, off - Z), 0, f"{detail}mean batch {mean:.5g}")


# Largest number of draws whose records are read together and in parts.
_READS = 64
# Number of records, over all draws, after which no more draws are read.
_RECORDS = 2048


def records_alone(subject: Subject) -> Row:
  """Tests that a record does not depend on the records read with it.

  Data that subtract the mean of a batch, or pad it to its longest record, let one example change
  the others before the loss sees them. So the records of a draw are read together, and again in two
  parts.
  """
  n = len(subject.train)
  changed = 0
  read = 0
  for drawn in itertools.islice(_of_run(subject, n, at_least=_READS), _READS):
    indices = np.asarray(drawn)[: _RECORDS // 8]
    if indices.size < 2 or read > _RECORDS:
      continue
    whole = _read(subject, indices)
    # Augmented data differ at every read, so this test does not apply.
    if _differ(whole, _read(subject, indices)).any():
      return not_applicable("the data give other records each time that they are read")
    parts = np.arange(indices.size) % 2 == 0
    for part in (parts, ~parts):
      alone = _read(subject, indices[part])
      changed += int(_differ([leaf[part] for leaf in whole], alone).sum())
    read += indices.size
  return row(changed, 0, f"records of {read} that others changed, of the rows drawn")


def _read(subject: Subject, indices: np.ndarray) -> list[np.ndarray]:
  """Returns the leaves of the records at `indices`, as arrays [len(indices), ...]. Keys become
  integers."""
  leaves = jax.tree.leaves(subject.train[indices])
  plain = [jax.random.key_data(leaf) if trees.is_key(leaf) else leaf for leaf in leaves]
  return [np.asarray(leaf)[: indices.size] for leaf in plain]


def _differ(some: list[np.ndarray], others: list[np.ndarray]) -> np.ndarray:
  """Returns which of n records differ in any bit, [n] bool."""
  if [leaf.shape for leaf in some] != [leaf.shape for leaf in others]:
    return np.ones(len(some[0]), bool)
  # Bytes are compared, since NaN does not equal itself, and -0 equals 0.
  rows = lambda leaf: np.ascontiguousarray(leaf).reshape(len(leaf), -1).view(np.uint8)
  pairs = [rows(a) != rows(b) for a, b in zip(some, others)]  # of each leaf: [n, bytes]
  return np.any([pair.any(axis=1) for pair in pairs], axis=0)


CHECKS = {
  "sampler as charged": sampler_law,
  "sampler from its seed": sampler_seed,
  "records read alone": records_alone,
}

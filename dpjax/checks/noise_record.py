"""A record of the noise of a run, over all of its steps.

A transform runs on empty sums for as many steps as the plan has. A sample of coordinates is kept
of each step, and every value of a few steps. So noise that fades late, or repeats after a thousand
steps, is found for a model of any size. In a long plan some steps are skipped. Only if its
transform has a large state, the late steps are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees
from dpjax.checks.subject import SEED, Subject
from dpjax.noise import source
from dpjax.plan import Plan
from dpjax.transforms.clip_scale import clip_scale
from dpjax.transforms.group_noise import group_stds
from dpjax.transforms.scale_then_privatize import coordinate_scales
from dpjax.types import Array, ArrayTree, ClippedSum, Params

# Noise values nearer to 0 than this, in standard deviations, are counted for each coordinate.
NEAR = 0.05
# Largest number of coordinates recorded in one step, over all leaves; 8 for each leaf if that is
# more.
COORDINATES = 512
# Every noise value of the first 4 steps is recorded, and of later steps up to this many values.
_VALUES = 300_000
# A short plan is repeated until its runs have this many steps together, or `_VALUES` values.
_LONGEST = 4000
# Number of values that are drawn before steps are skipped. Drawing them takes about ten seconds.
_WORK = 600_000_000
# Number of entries up to which the state of a transform counts as small. A small state holds little
# noise, if any.
_SMALL = 4096
# Largest number of steps that are all compared with each other, even if `_WORK` allows more. In
# longer plans some are skipped.
_LONG = 20_000
# Largest number of values of one leaf at one step that are compared with others.
_WHOLE = 50_000
# Number of values whose tails are counted, enough to see a cut at 4.5 standard deviations.
_TAIL = 10_000_000
_AT_ONCE = 2_000_000  # number of these values drawn in one call, unless one step has more
# Smallest number of values of a step that fill a processor. A batch of keys takes XLA twice as long
# to compile as one key, so keys of a larger model are drawn in turn.
_FILLED = 4096
# Values beyond these numbers of standard deviations are counted, below and above 0.
THRESHOLDS = (2.0, 3.0, 3.5, 4.0, 4.5, 5.0)
# Limit on pairs of blocks x values of a block. 2,000 values of a block are compared even above it.
_COMPARED = 200_000_000


class Record(NamedTuple):
  """Noise in units of the sum. Correlation, schedules and shares of layers are undone."""

  steps: np.ndarray  # [T] which steps these are, ascending
  sampled: list[np.ndarray]  # of each leaf that gets noise: [T, k] values of k coordinates
  sums: list[np.ndarray]  # of each such leaf: [T, s] sums over axes, by `_axis_sums`
  whole: list[np.ndarray]  # of each such leaf: [W, size] every value of the first W steps
  stepped_over: int  # steps that were skipped
  # This field and the next two are in standard deviations. They are None for correlated noise.
  energy: list[np.ndarray] | None  # of each such leaf: [T] sum of squares of all its values
  # For each leaf with noise: [size] sum of squares over the steps, and [size] number of steps at
  # which the absolute value is below NEAR standard deviations.
  places: list[tuple[np.ndarray, np.ndarray]] | None
  # For each leaf with noise: [T, 4] largest and smallest absolute value at a step, sum of squares,
  # and sum. The first three agree for two steps with the same values in any order and with any
  # signs.
  marks: list[np.ndarray] | None = None
  runs: int = 1  # number of runs of the plan that were joined, each under its own key


class Tails(NamedTuple):
  """Counts, extremes and sums of powers of noise values in standard deviations, over many runs of
  the plan and all leaves."""

  count: int  # number of values
  lowest: float
  highest: float
  beyond: np.ndarray  # [2, len(THRESHOLDS)] values below -threshold, and above it
  powers: np.ndarray  # [4] sums of x, x^2, x^3, x^4


def test_key(subject: Subject, number: int) -> jax.Array:
  """Returns a noise key of the run's type. The same `number` always gives the same key."""
  if not subject.release:
    return jax.random.key(SEED + number)
  return source.key_from_bytes(number.to_bytes(source.KEY_BYTES, "little"))


def test_keys(subject: Subject, number: int) -> Callable[[int], jax.Array]:
  """Returns run -> key: the keys of one record, different from those of every other record."""
  return lambda run: test_key(subject, number + 1000 * run)


def plain_keys(run: int) -> jax.Array:
  """Returns the key of a run whose noise is not rounded to a grid."""
  return jax.random.key(SEED + 1000 * run)


def records(subject: Subject, keys: Sequence[Callable[[int], jax.Array]]) -> list[Record]:
  """Returns the noise of a transform that runs on empty sums through the steps of the plan, and
  never further.

  If the plan has too many steps, some are left out. A short plan is run several times, each time
  with another key, up to `_LONGEST` steps or `_VALUES` values.

  Args:
    keys: for each record a function run -> key; all keys must be of one type.
  """
  steps = np.arange(subject.plan.num_steps)
  size = max(1, trees.size(subject.params))
  affordable = min(_LONG, _WORK // size + 4)
  if len(steps) > affordable:
    covered = walks(subject, keys[0](0))
    steps = _covering(len(steps)) if covered else steps[:affordable]
  wanted = max(4, min(_LONGEST, _VALUES // size + 1))
  # If noise differs by step, it is recorded in one run: joined runs would mix the steps.
  runs = 1 if subject.plan.noise_shape.by_step else -(-wanted // len(steps))
  whole = int(np.clip(_VALUES // size + 1, 4, runs * len(steps)))
  whole_of_run = min(whole, len(steps))
  program = ("runner", steps.tobytes(), whole_of_run)
  # Several checks need records, whose program takes seconds to compile.
  run = subject.once(program, lambda: _runner(subject, steps, whole_of_run))
  return [
    _join(
      [_undone(subject.plan, subject.params, steps, *run(key(i))) for i in range(runs)],
      whole,
    )
    for key in keys
  ]


def _join(runs: list[Record], whole: int) -> Record:
  """Joins several runs with different keys as if they were one long run."""
  first = runs[0]
  if len(runs) == 1:
    return first

  def rows(field: str) -> Any:
    if getattr(first, field) is None:
      return None
    return [np.concatenate(leaf) for leaf in zip(*(getattr(run, field) for run in runs))]

  kept = [leaf[:whole] for leaf in rows("whole")]
  places = None
  if first.places is not None:
    places = [
      (sum(squares for squares, _ in leaf), sum(near for _, near in leaf))
      for leaf in zip(*(run.places or [] for run in runs))
    ]
  total = sum(len(run.steps) for run in runs)
  return first._replace(
    steps=np.arange(total),
    sampled=rows("sampled"),
    sums=rows("sums"),
    whole=kept,
    energy=rows("energy"),
    marks=rows("marks"),
    places=places,
    runs=len(runs),
  )


def tails(subject: Subject, keys: Callable[[int], jax.Array]) -> Tails | None:
  """Returns the tails of many runs of the plan; None for correlated noise."""
  plan = subject.plan
  if plan.noise_shape.correlation is not None:
    return None
  size = max(1, trees.size(subject.params))
  steps = plan.num_steps
  together = int(np.clip(_AT_ONCE // size, 1, 64))
  calls = max(1, -(-_TAIL // (size * steps * together)))
  length = int(np.clip(-(-_TAIL // (size * together)), 1, steps))
  # `live` are the leaves that get noise. `scales` make their values standard normal.
  stds = _relative_stds(plan, subject.params)
  live = [i for i, std in enumerate(stds) if std]
  scales = [plan.normalize_by / _std(plan) / stds[i] for i in live]
  factors = jnp.asarray(_factors(plan, np.arange(length)), jnp.float32)
  limits = np.asarray(THRESHOLDS, np.float32)

  def tails_of_key(key):
    state, step = _updater(subject, key)

    def body(state, factor):
      drawn, state = step(state)
      parts = [drawn[i].ravel() * (unit / factor) for i, unit in zip(live, scales)]
      flat = jnp.concatenate(parts)
      powers = jnp.stack([jnp.sum(flat**power) for power in (1, 2, 3, 4)])
      below = jnp.stack([jnp.sum(flat < -limit) for limit in limits])
      above = jnp.stack([jnp.sum(flat > limit) for limit in limits])
      return state, (jnp.min(flat), jnp.max(flat), below, above, powers)

    return jax.lax.scan(body, state, factors)[1]

  # A power of 2 up to 64, which divides `together`.
  beside = min(64, 2 ** max(0, (_FILLED // size).bit_length() - 1))
  run = jax.jit(
    functools.partial(jax.lax.map, tails_of_key, batch_size=beside if beside > 1 else None)
  )
  parts = [
    run(jnp.stack([keys(call * together + i) for i in range(together)]))
    for call in range(calls)
  ]
  lowest, highest, below, above, powers = zip(*parts)
  add = lambda arrays: np.sum(
    [np.asarray(part, np.float64).sum(axis=(0, 1)) for part in arrays], axis=0
  )
  count = sum(int(np.size(jax.tree.leaves(subject.params)[i])) for i in live)
  return Tails(
    count * length * together * calls,
    float(np.min(lowest)),
    float(np.max(highest)),
    np.stack([add(below), add(above)]),
    add(powers),
  )


def _undone(
  plan: Plan, params: Any, steps: np.ndarray, sampled, sums, marks, places, whole
) -> Record:
  live = [std for std in _relative_stds(plan, params) if std]

  def undo(leaves, at):
    return [
      _whiten(plan, np.asarray(rows) * (plan.normalize_by / std), at)
      for rows, std in zip(leaves, live)
    ]

  first = steps[: len(whole[0])] if whole else steps
  skipped = int(steps[-1]) + 1 - len(steps)
  white = plan.noise_shape.correlation is None
  return Record(
    steps, undo(sampled, steps), undo(sums, steps), undo(whole, first), skipped,
    [np.asarray(leaf, np.float64)[:, 2] for leaf in marks] if white else None,
    [(np.asarray(x), np.asarray(near)) for x, near in places] if white else None,
    [np.asarray(leaf, np.float64) for leaf in marks] if white else None,
  )  # fmt: skip


def _covering(count: int) -> np.ndarray:
  """Returns steps below `count`, the last one included, among which every lag occurs. So noise with
  any period repeats among them."""
  # The first `stride` steps and every `stride`-th step have all numbers below `count` as
  # differences.
  stride = math.isqrt(count) + 1
  return np.unique([*range(min(stride, count)), *range(0, count, stride), count - 1])


def _relative_stds(plan: Plan, params: Any) -> list[float]:
  """Returns the noise std of each leaf, in units of clip norm times noise multiplier."""
  stds = group_stds(plan.l2_clip_norm, 1.0, plan.noise_shape.shares)
  spread = lambda std, group: jax.tree.map(lambda _: std / plan.l2_bound, group)
  return jax.tree.leaves(jax.tree.map(spread, stds, params))


def _std(plan: Plan) -> float:
  """Returns the std of the accounted noise on the sum, if leaves are not grouped; 1 without
  noise."""
  return plan.noise_multiplier * plan.l2_bound or 1.0


def _whiten(plan: Plan, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
  """Returns white noise [T, k]: the strategy matrix C times `rows`, each row then divided by its
  factor of the noise schedule."""
  rows = rows.astype(np.float64)
  if not rows.size:
    return rows
  shape = plan.noise_shape
  white = rows if shape.correlation is None else shape.correlation.multiply(rows)
  return white / _factors(plan, steps)[:, None]


def _factors(plan: Plan, steps: np.ndarray) -> np.ndarray:
  """Returns the factors [T] of the noise schedule at these steps; ones without a schedule."""
  return np.array(plan.noise_shape.schedule or np.ones(int(steps[-1]) + 1))[steps]


def update_to_bound(
  update_fn: Callable, summed: ClippedSum, state: ArrayTree, params: Params, mask: Array
):
  """Returns (update, next state) of a transform. The update is scaled back to a constant clip norm,
  or to constant scales of coordinates."""
  scale = clip_scale(state)
  scales = coordinate_scales(state)
  update, state = update_fn(summed, state, params, mask=mask)
  if scales is not None:
    return jax.tree.map(lambda leaf, s: leaf / s, update, scales), state
  return (update if scale is None else trees.scale(update, 1 / scale)), state


def _updater(subject: Subject, key: jax.Array):
  """Returns (state at step 0, state -> (noise leaves in units of the update, next state))."""
  tx = subject.transform(key)
  plan = subject.plan
  # A sum is at least float32, for every type of parameters.
  zeros = jax.tree.map(jnp.zeros_like, source.as_floats(subject.params))
  empty = jnp.zeros(1)
  bounds = plan.l2_clip_norm.group_bounds()
  nothing = ClippedSum(zeros, empty, empty, plan.l2_bound, bounds)

  def step(state):
    update, state = update_to_bound(
      tx.update, nothing, state, subject.params, jnp.zeros(1, bool)
    )
    return jax.tree.leaves(update), state

  return tx.init(subject.params), step


def walks(subject: Subject, key: jax.Array) -> bool:
  """Returns whether the transform's state is small, so that a skipped step costs almost nothing."""
  leaves = jax.tree.leaves(_updater(subject, key)[0])
  return sum(int(np.size(leaf)) for leaf in leaves if not trees.is_key(leaf)) <= _SMALL


def _places(leaves: list[Any]) -> list[np.ndarray]:
  """Returns the recorded coordinates of each leaf: its first ones, its last ones and random
  ones."""
  share = max(8, COORDINATES // max(1, len(leaves)))
  rng = np.random.default_rng(SEED)
  ends = share // 4
  return [
    np.arange(size)
    if size <= share
    else np.unique(
      [*range(ends), *range(size - ends, size), *rng.integers(0, size, share - 2 * ends)]
    )
    for size in (int(np.size(leaf)) for leaf in leaves)
  ]


def _axis_sums(leaf: jax.Array) -> jax.Array:
  """Returns sums [s] over each axis of a matrix or kernel, at most 16 for each, and over all axes.

  They are scaled to the variance of one value. A vector has no sums: s = 0."""
  if leaf.ndim < 2:
    return jnp.zeros(0)
  sums = [
    (leaf.sum(axis) / math.sqrt(max(1, leaf.shape[axis]))).ravel()[:16]
    for axis in range(leaf.ndim)
  ]
  return jnp.concatenate([*sums, leaf.sum().reshape(1) / math.sqrt(max(1, leaf.size))])


def _runner(subject: Subject, steps: np.ndarray, whole: int):
  """Returns key -> the parts of a `Record` for each leaf with noise: sampled values [T, k], sums
  [T, s], marks [T, 4], places, and every value [W, size]."""
  stds = _relative_stds(subject.plan, subject.params)
  live = [i for i, std in enumerate(stds) if std]
  shapes = [jax.tree.leaves(subject.params)[i] for i in live]
  places = _places(shapes)
  gaps = np.diff(steps, prepend=-1) - 1
  unit = subject.plan.normalize_by / _std(subject.plan)
  factors = _factors(subject.plan, steps)

  def scan_step(step, carry, inputs):
    state, kept, seen = carry
    gap, row, factor = inputs
    if gaps.any():
      # Only the state of a skipped step is used, so XLA draws only noise that the state needs.
      state = jax.lax.fori_loop(0, gap, lambda _, s: step(s)[1], state)
    drawn, state = step(state)
    leaves = [drawn[i] for i in live]
    kept = [all_rows.at[row].set(x.ravel()) for all_rows, x in zip(kept, leaves)]
    sampled = [leaf.ravel()[place] for leaf, place in zip(leaves, places)]
    unity = [leaf.ravel() * (unit / stds[i] / factor) for leaf, i in zip(leaves, live)]
    seen = [
      (energy + x**2, near + (jnp.abs(x) < NEAR)) for (energy, near), x in zip(seen, unity)
    ]
    sizes = [jnp.abs(x) for x in unity]
    marks = [
      jnp.stack([jnp.max(size), jnp.min(size), jnp.sum(size**2), jnp.sum(x)])
      for size, x in zip(sizes, unity)
    ]
    return (state, kept, seen), (sampled, [_axis_sums(leaf) for leaf in leaves], marks)

  @jax.jit
  def run(key):
    state, step = _updater(subject, key)
    kept = [jnp.zeros((whole + 1, np.size(leaf))) for leaf in shapes]
    # The last row takes values that are not kept.
    rows = np.minimum(np.arange(len(steps)), whole)
    none = [(jnp.zeros(np.size(x)), jnp.zeros(np.size(x), jnp.int32)) for x in shapes]
    inputs = (jnp.asarray(gaps), jnp.asarray(rows), jnp.asarray(factors, jnp.float32))
    carry = (state, kept, none)
    (_, kept, places), seen = jax.lax.scan(
      functools.partial(scan_step, step), carry, inputs
    )
    return (*seen, places, [all_rows[:whole] for all_rows in kept])

  return run


class NoiseBlock(NamedTuple):
  """Sorted absolute values of a leaf at a step."""

  leaf: int
  step: int
  values: np.ndarray

  @property
  def name(self) -> str:
    return f"leaf {self.leaf} at step {self.step}"


def blocks(recorded: Record) -> list[NoiseBlock]:
  """Returns a block for each leaf at each of the first 2 or 4 steps.

  From a large leaf, random values are taken."""
  rng = np.random.default_rng(SEED)
  times = 4 if len(recorded.whole) <= 12 else 2
  pairs = math.comb(len(recorded.whole) * times, 2)
  most = int(np.clip(_COMPARED // max(1, pairs), 2000, _WHOLE))

  def taken(values: np.ndarray) -> np.ndarray:
    return values if values.size <= most else rng.choice(values, most, replace=False)

  return [
    NoiseBlock(i, t, np.sort(np.abs(taken(values))))
    for i, leaf in enumerate(recorded.whole)
    for t, values in enumerate(leaf[:times])
  ]

"""Checks of releases and their accounting. Each update is the sum of its own step with noise,
divided by a public number; delta covers batches above the capacity; and canaries are guessed no
better than the claimed epsilon allows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import accounting, auditing, trees
from dpjax.auditing.lower_bounds import alarm_p_value
from dpjax.auditing.scores import Scores
from dpjax.checks import noise_record
from dpjax.checks.subject import BATCH, SEED, Row, Subject, Z, not_applicable, row, z_of
from dpjax.gradients.clipping import clip_and_sum
from dpjax.noise import source
from dpjax.plan import OVERFLOW_SHARE
from dpjax.sampling import PoissonSampler
from dpjax.types import ClippedSum
from dpjax.validate import UserError

# Number of steps that `own_sum` compares at least, for a model of any size, if the run has them.
_OWN_STEPS = 4
# Number of noise values that `own_sum` draws before it skips steps.
_OWN_WORK = 20_000_000
# Number of noise values that `own_sum` may draw where it skips steps of a transform with a large
# state. There a skipped step draws noise, too, if the state depends on this noise.
_SKIPPED_WORK = 200_000_000
# Lengths of the sums of two runs, in clip norms. Periods of 5 and 3 steps pair every length of one
# run with every length of the other.
_LENGTHS = ((1.0, 0.0, 0.5, 1.0, 0.1), (0.25, 1.0, 0.0))
_CANARIES = 1000


def overflow(subject: Subject) -> Row:
  """Tests that the share of delta for overflow covers (1 + e^epsilon) times the chance of a draw
  above the capacity in any step."""
  plan = subject.plan
  if not plan.can_overflow:
    return not_applicable("the batch size is fixed, or nothing is claimed")
  # A neighbouring data set may have one more record.
  each = plan.sampler.log_overflow_prob(len(subject.train) + 1)
  epsilon = plan.epsilon()
  share = math.exp(np.logaddexp(0.0, epsilon) + each + math.log(plan.num_steps))
  allowed = OVERFLOW_SHARE * plan.delta
  return row(share, allowed, f"delta for it, capacity {plan.sampler.padded_batch_size}")


def _own_steps(subject: Subject, key: jax.Array) -> np.ndarray:
  """Returns the steps that receive sums: all of the run, or as many as `_OWN_WORK` allows."""
  # Steps beyond the plan are not used, since the transform refuses them.
  count = subject.plan.num_steps
  affordable = max(_OWN_STEPS, _OWN_WORK // max(1, trees.size(subject.params)))
  if count <= affordable:
    return np.arange(count)
  work = count * trees.size(subject.params)
  if work > _SKIPPED_WORK and not noise_record.walks(subject, key):
    return np.arange(affordable)
  spread = np.linspace(0, count - 2, max(1, affordable // 4)).astype(int)
  first = range(max(_OWN_STEPS, affordable // 2))
  return np.unique([*first, *spread, *(spread + 1)])  # each with the next


def _offer(subject: Subject, number: int, step: Any) -> tuple[ClippedSum, Any]:
  """Returns (a random sum within the clip bound, mask) for a step of run `number`, 0 or 1. Each
  run has its own sequences of lengths of the sum, numbers of examples, norms and losses."""
  plan = subject.plan
  leaves = jax.tree.leaves(subject.params)
  length = min(plan.l2_bound, 1e6) / math.sqrt(max(1, trees.size(leaves)))
  length *= jnp.asarray(_LENGTHS[number])[step % len(_LENGTHS[number])]
  key = jax.random.fold_in(jax.random.key(SEED + 1 + number), step)
  keys = jax.random.split(key, len(leaves) + 1)
  drawn = [
    length * jnp.where(jax.random.bits(k, jnp.shape(p)) >> 31, jnp.float32(1), -1)
    for k, p in zip(keys, leaves)
  ]
  total = jax.tree.unflatten(jax.tree.structure(subject.params), drawn)
  seen = jax.random.bits(keys[-1], (2, BATCH)) * 2.0**-31 * min(plan.l2_bound, 1e6)
  mask = jnp.arange(BATCH) < (5 * step + (BATCH // 2 + 1) * number) % (BATCH + 1)
  bounds = plan.l2_clip_norm.group_bounds()
  summed = ClippedSum(total, seen[0], seen[1], plan.l2_bound, bounds, shortened=True)
  return summed, mask


def _excess_norms(subject: Subject, key: jax.Array, steps: np.ndarray) -> np.ndarray:
  """Returns norms [T] of (difference of two runs' updates) - (difference of their sums). The runs
  have one noise key, but different sums, batch sizes and parameters."""
  plan = subject.plan
  gaps = np.diff(steps, prepend=-1) - 1
  params = [jax.tree.map(lambda p, by=by: p * by, subject.params) for by in (1, -2)]
  frozen = lambda bound, group: trees.scale(group, float(bound > 0))

  def update(number, state, offered, mask):
    tx = subject.transform(key)
    return noise_record.update_to_bound(tx.update, offered, state, params[number], mask)

  def idle(number, state):
    offered, mask = _offer(subject, number, 0)
    nothing = dataclasses.replace(offered, total=trees.scale(offered.total, 0))
    return update(number, state, nothing, jnp.zeros_like(mask))[1]

  def scan_step(states, gap_and_step):
    gap, step = gap_and_step
    seen = []
    after = []
    for number, state in enumerate(states):
      # Only the state of a skipped step is used, so XLA draws only noise that the state needs.
      if gaps.any():
        state = jax.lax.fori_loop(0, gap, lambda _, s, k=number: idle(k, s), state)
      offered, mask = _offer(subject, number, step)
      out, state = update(number, state, offered, mask)
      wanted = jax.tree.map(frozen, plan.l2_clip_norm.norms, offered.total)
      seen.append((out, wanted))
      after.append(state)
    (a, sum_a), (b, sum_b) = seen
    off = jax.tree.map(
      lambda a, b, s, t: jnp.sum(((a - b) * plan.normalize_by - (s - t)) ** 2),
      a, b, sum_a, sum_b,
    )  # fmt: skip
    return after, jnp.sqrt(sum(jax.tree.leaves(off)))

  @jax.jit
  def run():
    states = [subject.transform(key).init(p) for p in params]
    inputs = jnp.asarray(gaps), jnp.asarray(steps)
    return jax.lax.scan(scan_step, states, inputs)[1]

  return np.asarray(run(), np.float64)


def _of_another_size(subject: Subject, key: jax.Array) -> Iterator[float]:
  """Yields how far the update of step 0 moves if the same sum comes from a batch without used rows,
  or from a batch of another size. Noise must not depend on the batch."""
  plan = subject.plan
  offered, _ = _offer(subject, 0, 0)
  sizes = (BATCH, BATCH, 1, max(2, plan.sampler.padded_batch_size))
  used = jnp.array([True, False, True, True])

  def update(size, taken):
    tx = subject.transform(key)
    seen = jnp.full(size, min(plan.l2_bound, 1e6) * 0.5)
    summed = dataclasses.replace(offered, norms=seen, losses=seen)
    state = tx.init(subject.params)
    mask = jnp.broadcast_to(taken, size)
    return noise_record.update_to_bound(tx.update, summed, state, subject.params, mask)[0]

  # All updates are one program: XLA compiles noise once that no batch enters.
  run = jax.jit(lambda used: [update(*of) for of in zip(sizes, used)])
  # The sum is the same each time, so any difference follows from the batch.
  first, *others = run(used)
  for other in others:
    off = jax.tree.map(
      lambda a, b: np.sum((np.asarray(a, float) - np.asarray(b, float)) ** 2),
      first, other,
    )  # fmt: skip
    yield plan.normalize_by * math.sqrt(sum(jax.tree.leaves(off)))


def own_sum(subject: Subject) -> Row:
  """Tests that every update is the sum of its step plus noise, divided by a public number. Noise
  must depend on neither sum nor batch, and no earlier sum may enter a later update."""
  plan = subject.plan
  # This is no key of a release, so the noisy sums are not rounded to a grid.
  key = jax.random.key(SEED)
  steps = _own_steps(subject, key)
  off = np.array([*_excess_norms(subject, key, steps), *_of_another_size(subject, key)])
  rounding = 1e-6 * plan.noise_multiplier * math.sqrt(trees.size(subject.params))
  worst = float(off.max()) if np.isfinite(off).all() else math.nan
  return row(
    worst / min(plan.l2_bound, 1e6),
    1e-2 + rounding,
    f"what one of {len(steps)} updates holds besides its own sum and noise, in clip norms",
  )


def divisor(subject: Subject) -> Row:
  """Tests that the divisor of the noisy sum is a public constant, whatever the number of
  examples."""
  plan = subject.plan
  key = jax.random.key(SEED)
  size = trees.size(subject.params)
  length = min(plan.l2_bound, 1.0) / math.sqrt(size)
  if not plan.l2_clip_norm.is_one_number:
    active = [c for c in plan.l2_clip_norm.group_bounds() if c]
    length = min(active) / math.sqrt(size)
  floats = source.as_floats(subject.params)
  grads = jax.tree.map(lambda p: jnp.full((BATCH, *jnp.shape(p)), length), floats)
  clipped = lambda mask: clip_and_sum(grads, jnp.zeros(BATCH), mask, plan.l2_clip_norm)
  term = clipped(jnp.arange(BATCH) < 1)
  unit = sum(np.sum(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(term.total))

  @jax.jit
  def update(mask):
    tx = subject.transform(key)
    state = tx.init(subject.params)
    return tx.update(clipped(mask), state, subject.params, mask=mask)[0]

  def seen(k):
    moved = jax.tree.map(
      lambda a, b: np.sum(np.asarray(a, np.float64) - np.asarray(b, np.float64)),
      update(jnp.arange(BATCH) < k),
      update(jnp.zeros(BATCH, bool)),
    )
    return float(sum(jax.tree.leaves(moved))) / unit * plan.normalize_by

  off = max(abs(seen(k) - k) for k in (1, BATCH))
  return row(off, 0.05, f"error of k / {plan.normalize_by:g} for k=1 and {BATCH}")


def white_box_audit(subject: Subject) -> Row:
  """Audits the run's own sampler, transform and steps with gradient canaries.

  The number of canaries that are guessed right must be likely under the claim. A bound on epsilon
  would pass nearly all: with 1,000 perfect guesses it is 5 at most. Canaries of Poisson batches and
  white noise are independent, which is all that `alarm_p_value` assumes. Where even guesses from
  sums without noise are likely, the check could not fail, and does not apply: of all canaries, or
  of the few that the steps draw.
  """
  plan = subject.plan
  if not plan.is_private or not isinstance(plan.sampler, PoissonSampler):
    return not_applicable("needs Poisson sampling and a claimed epsilon")
  if not plan.l2_clip_norm.is_one_number:
    return not_applicable("canaries have one clip norm, this plan one per layer")
  claim = plan.trade_off()
  # The transform refuses more rows in a batch than its plan draws from so many records.
  number = min(_CANARIES, len(subject.train))

  def can_fail(drawn: float) -> bool:
    return z_of(alarm_p_value(_without_noise(number, drawn), claim)) > Z

  if not can_fail(drawn=1.0):
    return not_applicable(f"under this claim, {number} canaries may all be guessed right")
  small = dataclasses.replace(plan.fitted(number), slices=1)
  try:
    scores = auditing.gradient_canaries(
      small,
      num_canaries=number,
      seed=SEED,
      key=noise_record.test_key(subject, 2),
      transform=subject.transform,
    )
  except UserError as error:
    if error.field != "transform":
      raise
    return row(math.nan, Z, str(error))
  p_value = alarm_p_value(scores, claim)
  detail = (
    f"z-score of the right guesses of {number} gradient canaries in one run, under the claimed "
    f"epsilon={accounting.upper(plan.epsilon())} (delta={accounting.upper(plan.delta)}, "
    f"{plan.neighboring_relation})"
  )
  found = row(z_of(p_value), Z, detail)
  # A canary that no step draws looks like one that is out. A wrong sampler may draw more, and fail.
  drawn = 1 - (1 - plan.sampler.sampling_prob) ** plan.num_steps
  if found.passed and not can_fail(drawn):
    return not_applicable(f"{plan.num_steps} steps draw too few of {number} canaries")
  return found


def _without_noise(number: int, drawn: float) -> Scores:
  """Returns scores of which a share `drawn` of the canaries that are in stands out, and all others
  are alike."""
  inside = number // 2
  seen = round(drawn * inside)
  alike = np.linspace(0.0, 1.0, inside - seen)
  return Scores(
    inside=np.concatenate([np.full(seen, 2.0), alike]),
    outside=np.linspace(0.0, 1.0, number - inside),
  )


CHECKS: dict[str, Callable[[Subject], Row]] = {
  "own sum and noise only": own_sum,
  "public divisor": divisor,
  "overflow fits delta": overflow,
  "white-box audit": white_box_audit,
}

"""Checks of the laws: the noise that is drawn, the batches that are drawn, what they cost,
and that no key serves twice. Every statistic is a z-score with fixed seeds: |z| <= 6 is
missed by a sound run with a chance of 2e-9."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from dpjax import accounting, auditing, gradients, noise, transforms, trees
from dpjax.experiment.check_types import BATCH, SEED, Row, Subject, not_applicable, row
from dpjax.experiment.config import TrainConfig, to_dict
from dpjax.plan import OVERFLOW_SHARE, Plan
from dpjax.sampling import PoissonSampler
from dpjax.types import ClippedSum, NeighboringRelation

_Z = 6.0
_KS = 2.5  # sqrt(n) * distance; above it with a chance of 7e-6
_VALUES = 300_000  # noise values to be drawn, at least
_DRAWS = (50, 400)  # batches to be drawn: fewest and most
_INDICES = 40_000_000  # of them, as many as this many coins allow
_CANARIES = 1000
_AUDIT_CONFIDENCE = (
  0.99  # much more is out of reach: at delta > 0 p-values end near m * delta
)
_EPSILON_SLACK = 0.01  # relative: two discretisations of one privacy loss


def _noise_multiplier(event: Any) -> float | None:
  """The Gaussian noise multiplier that the accountant was told of."""
  if isinstance(event, dpa.GaussianDpEvent | dpa.TruncatedSubsampledGaussianDpEvent):
    return event.noise_multiplier
  inner = getattr(event, "event", None)
  return None if inner is None else _noise_multiplier(inner)


def _charged_multiplier(plan: Plan) -> float | None:
  """Of the white noise that the accountant was told of; None where there is none."""
  if not plan.is_private:
    return None
  if plan.correlation is not None or plan.noise_schedule:
    return plan.noise_multiplier  # its charges are checked by `agreement`
  charged = _noise_multiplier(plan.step_event() if plan.steps_alike else plan.step_event(0))
  adaptive = _adaptive(plan)
  if adaptive is None or charged is None:
    return charged
  # The sum's part of what is charged for sum and count.
  return (charged**-2 - (2 * adaptive.count_std(plan.normalize_by)) ** -2) ** -0.5


def _adaptive(plan: Plan) -> transforms.AdaptiveClipping | None:
  return plan.clipping if isinstance(plan.clipping, transforms.AdaptiveClipping) else None


def _relative_stds(plan: Plan, params: Any) -> list[float]:
  """Noise of each leaf in units of the clip norm times the noise multiplier."""
  stds = transforms.group_stds(plan.l2_clip_norm, 1.0, plan.noise_shares)
  spread = lambda std, group: jax.tree.map(lambda _: std / plan.l2_bound, group)
  return jax.tree.leaves(jax.tree.map(spread, stds, params))


def _whitened(plan: Plan, rows: np.ndarray) -> np.ndarray:
  """[steps, size]: C times the rows, each divided by its factor of the schedule."""
  white = rows if plan.correlation is None else plan.correlation.multiply(rows)
  factors = np.array(plan.noise_schedule[: len(rows)] or np.ones(len(rows)))
  return white / factors[:, None]


def _key(subject: Subject, number: int) -> jax.Array:
  if not subject.config.release:
    return jax.random.key(SEED + number)
  return noise.secure.key_from_bytes(number.to_bytes(noise.secure.KEY_BYTES, "little"))


def _noise(subject: Subject, number: int, steps: int) -> list[np.ndarray]:
  """What the transform adds to nothing, in units of the sum, with correlation, schedules
  and shares undone: leaves [steps, size]. Frozen leaves, which get none, are left out."""
  tx = subject.transform(_key(subject, number))
  zeros = jax.tree.map(jnp.zeros_like, subject.params)
  empty = jnp.zeros(1)
  plan = subject.plan
  bounds = gradients.group_bounds(plan.l2_clip_norm)
  nothing = ClippedSum(zeros, empty, empty, plan.l2_bound, bounds)

  def step(state, _):
    scale = transforms.clip_scale(state)
    update, state = tx.update(nothing, state, subject.params, mask=jnp.zeros(1, bool))
    return state, update if scale is None else trees.scale(update, 1 / scale)

  _, drawn = jax.jit(lambda s: jax.lax.scan(step, s, None, length=steps))(tx.init(zeros))
  rows = [
    np.asarray(leaf, np.float64).reshape(steps, -1) * plan.normalize_by / std
    for leaf, std in zip(jax.tree.leaves(drawn), _relative_stds(plan, subject.params))
    if std
  ]
  return [_whitened(plan, leaf) for leaf in rows]


def _steps(subject: Subject) -> int:
  plan = subject.plan
  limited = plan.correlation is not None or plan.noise_schedule
  most = plan.num_steps if limited else 4000
  wanted = np.clip(_VALUES // max(1, trees.size(subject.params)) + 1, 4, 4000)
  return int(min(wanted, most))


def _variance_z(values: np.ndarray, std: float) -> float:
  """How far the second moment of N(0, std^2) values is off, in standard errors."""
  return abs(float(np.mean((values / std) ** 2)) - 1) * math.sqrt(values.size / 2)


def noise_std(subject: Subject) -> Row:
  """The noise has the standard deviation that is paid for, leaf by leaf, and is Gaussian."""
  name, multiplier = "noise as charged", _charged_multiplier(subject.plan)
  if multiplier is None:
    return not_applicable(name, "no noise is charged")
  std = multiplier * subject.plan.l2_bound
  leaves = _noise(subject, 0, _steps(subject))
  pooled = np.concatenate([leaf.ravel() for leaf in leaves])
  worst = max(_variance_z(values, std) for values in (*leaves, pooled))
  grid = noise.secure.grid_step(std) if subject.config.release else 0.0
  spread = np.random.default_rng(SEED).uniform(-grid / 2, grid / 2, pooled.size)
  distance: Any = stats.kstest((pooled + spread) / std, "norm")
  shape = float(distance.statistic) * math.sqrt(pooled.size)
  return row(
    name,
    max(worst / _Z, shape / _KS),
    1.0,
    f"std {pooled.std():.5g} (charged {std:.5g}), worst leaf z={worst:.1f} (<= {_Z:g}), "
    f"Kolmogorov-Smirnov {shape:.2f} (<= {_KS:g})",
  )


def _correlation_z(a: np.ndarray, b: np.ndarray) -> float:
  size = min(a.shape[-1], b.shape[-1])
  a, b = a[..., :size].ravel(), b[..., :size].ravel()
  scale = math.sqrt(float(np.mean(a**2)) * float(np.mean(b**2)))
  return abs(float(np.mean(a * b))) / max(scale, 1e-300) * math.sqrt(a.size)


def _pairs(leaves: list[np.ndarray], other: list[np.ndarray]) -> Iterator[tuple[str, Any]]:
  for leaf, same in zip(leaves, other):
    for lag in (1, 2, 3):
      yield "steps", (leaf[lag:], leaf[:-lag])
    yield "keys", (leaf, same)
    if leaf.shape[1] > 1:
      yield "coordinates", (leaf[:, 1:], leaf[:, :-1])
  for i, leaf in enumerate(leaves):
    for later in leaves[i + 1 :]:
      yield "leaves", (leaf, later)


def noise_independence(subject: Subject) -> Row:
  """No two steps, leaves, coordinates or keys share noise."""
  name = "noise independent"
  if _charged_multiplier(subject.plan) is None:
    return not_applicable(name, "no noise is charged")
  steps = _steps(subject)
  pairs = _pairs(_noise(subject, 0, steps), _noise(subject, 1, steps))
  found = [(_correlation_z(*pair), what) for what, pair in pairs]
  worst, what = max(found, key=lambda pair: (not math.isfinite(pair[0]), pair[0]))
  return row(
    name, worst, _Z, f"largest correlation z of {len(found)} pairs, between {what}"
  )


def _z(value: float, mean: float, variance: float) -> float:
  """|value - mean| in standard errors; where there is no variance, 0 or infinity."""
  if variance > 1e-12:
    return abs(value - mean) / math.sqrt(variance)
  return 0.0 if abs(value - mean) < 1e-9 else math.inf


@dataclasses.dataclass(frozen=True)
class _Law:
  """Moments of a sampler's draws from n examples, from the event that is charged."""

  n: int
  rate: float  # of one example
  size_variance: float
  overlap_mean: float  # |S_t and S_{t+1}|
  overlap_variance: float  # of the mean over many t, times their number


def _law(event: Any, n: int) -> _Law | None:
  if isinstance(event, dpa.PoissonSampledDpEvent):
    q = event.sampling_probability
    overlaps = n * q**2 * (1 - q**2) + 2 * n * q**3 * (1 - q)
    return _Law(n, q, n * q * (1 - q), n * q**2, overlaps)
  if isinstance(event, dpa.SampledWithoutReplacementDpEvent):
    b, m = event.sample_size, event.source_dataset_size
    spread = b * (b / m) * (1 - b / m) * (m - b) / max(m - 1, 1)
    return _Law(m, b / m, 0.0, b * b / m, spread)
  if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
    return _truncated_law(event)
  return None


def _truncated_law(event: dpa.TruncatedSubsampledGaussianDpEvent) -> _Law:
  """Sizes are min(binomial, capacity), members uniform given the size."""
  n, most = event.dataset_size, event.truncated_batch_size
  drawn = np.arange(n + 1)
  weight = stats.binom.pmf(drawn, n, event.sampling_probability)
  size = np.minimum(drawn, most)
  mean, square = float(weight @ size), float(weight @ size**2)
  variance, missing = square - mean**2, mean - square / n
  spread = missing**2 / max(n - 1, 1) + (square**2 - mean**4) / n**2
  again = 2 * mean**2 * variance / n**2  # neighbouring overlaps share a batch
  return _Law(n, mean / n, variance, mean**2 / n, spread + again)


def _law_deviations(draws: list[np.ndarray], law: _Law) -> Iterator[tuple[float, str]]:
  times, n, q = len(draws), law.n, law.rate
  sizes = np.array([d.size for d in draws], float)
  yield _z(sizes.mean(), n * q, law.size_variance / times), "mean batch size"
  spread = 2 * law.size_variance**2 / (times - 1)
  yield _z(sizes.var(ddof=1), law.size_variance, spread), "variance of the batch size"
  counts = np.bincount(np.concatenate(draws), minlength=n).astype(float)
  expected = times * q * (1 - q)
  fourth = 2 * expected**2 + expected * (1 - 6 * q * (1 - q))
  yield _z(float(np.mean((counts - times * q) ** 2)), expected, fourth / n), "turn-taking"
  # given its size, a batch is uniform: rows early and late in the data come alike
  ranks = np.concatenate(draws) - (n - 1) / 2
  spread_of_size = (n * n * q - law.size_variance - (n * q) ** 2) / max(n - 1, 1)
  rank_variance = times * spread_of_size * (n * n - 1) / 12
  yield _z(float(ranks.sum()), 0.0, rank_variance), "place in the data"
  overlaps = [np.intersect1d(a, b).size for a, b in itertools.pairwise(draws)]
  mean_variance = law.overlap_variance / (times - 1)
  yield _z(float(np.mean(overlaps)), law.overlap_mean, mean_variance), "overlap of batches"


def sampler_law(subject: Subject) -> Row:
  """Batches are drawn by the law that is charged: sizes, members, and no memory."""
  name, n = "sampler as charged", len(subject.train)
  if getattr(subject.plan.sampler, "participation", None) is not None:
    return _participation(subject, name, n)
  if getattr(subject.plan.sampler, "num_examples", None) and hasattr(
    subject.plan.sampler, "steps_per_epoch"
  ):
    return _once_an_epoch(subject, name, n)
  law = _law(subject.plan.step_event(0), n)
  if law is None:
    return not_applicable(name, "no sampling is charged")
  times = int(np.clip(_INDICES // max(n, 1), *_DRAWS))
  draws = [np.asarray(subject.draw(n, seed=SEED, step=t)) for t in range(times)]
  twice = sum(d.size - np.unique(d).size for d in draws)
  found = [*_law_deviations(draws, law), (math.inf if twice else 0.0, "repetitions")]
  worst, what = max(found)
  return row(name, worst, _Z, f"largest z of {len(found)} laws over {times} draws: {what}")


def _once_an_epoch(subject: Subject, name: str, n: int) -> Row:
  """No example comes twice in an epoch, which is charged as one step on all data."""
  sampler: Any = subject.plan.sampler
  length, epochs, twice = sampler.steps_per_epoch, 3, 0
  for epoch in range(epochs):
    steps = range(epoch * length, (epoch + 1) * length)
    drawn = np.concatenate([subject.draw(n, seed=SEED, step=t) for t in steps])
    twice += drawn.size - np.unique(drawn).size
  return row(name, twice, 0, f"examples that came again within one of {epochs} epochs")


def _participation(subject: Subject, name: str, n: int) -> Row:
  """The steps of one example are as far apart as its noise was paid for."""
  plan: Any = subject.plan
  apart, cyclic, prob = plan.sampler.participation
  times = int(min(plan.num_steps, max(3 * apart, _DRAWS[0])))
  last, early, mean = np.full(n, -1), 0, 0.0
  for step in range(times):
    drawn = np.asarray(subject.draw(n, seed=SEED, step=step))
    gaps = step - last[drawn][last[drawn] >= 0]
    early += int((gaps < apart).sum() + (cyclic & (gaps % apart != 0)).sum())
    early += drawn.size - np.unique(drawn).size
    last[drawn] = step
    mean += drawn.size / times
  off = _z(mean, plan.normalize_by, n * prob / apart * (1 + 1e-9)) if cyclic else 0.0
  detail = f"examples that came back too early in {times} steps ({apart} apart); "
  return row(name, early + max(0.0, off - _Z), 0, f"{detail}mean batch {mean:.5g}")


_RELATIONS = {
  NeighboringRelation.ADD_OR_REMOVE_ONE: dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
  NeighboringRelation.REPLACE_ONE: dpa.NeighboringRelation.REPLACE_ONE,
  NeighboringRelation.REPLACE_SPECIAL: dpa.NeighboringRelation.REPLACE_SPECIAL,
}


def _derived_epsilon(subject: Subject) -> float:
  """Epsilon from the sampler's and the noise's public fields, by dp_accounting alone."""
  plan, sampler = subject.plan, subject.plan.sampler
  if getattr(sampler, "participation", None) is not None:
    return _derived_from_matrix(plan)
  relation = _RELATIONS[NeighboringRelation(plan.neighboring_relation)]
  z, adaptive = plan.noise_multiplier, _adaptive(plan)
  if adaptive is not None:  # a count of sensitivity 1/2 is released as well
    z = (z**-2 + (2 * adaptive.count_std(plan.normalize_by)) ** -2) ** -0.5
  prob = getattr(sampler, "prob", None)
  if hasattr(sampler, "num_examples") and (prob or hasattr(sampler, "steps_per_epoch")):
    return _derived_by_size(plan, z, relation)
  if prob is not None:
    event = dpa.PoissonSampledDpEvent(prob, dpa.GaussianDpEvent(z))
  else:  # RDP reads the multiplier relative to the sensitivity, which is 2 C here
    fields: Any = sampler
    inner = dpa.GaussianDpEvent(z / 2)
    event = dpa.SampledWithoutReplacementDpEvent(
      fields.num_examples, fields.batch_size, inner
    )
  by_rdp = plan.accountant == "rdp" or prob is None
  accountant = (RdpAccountant if by_rdp else PLDAccountant)(neighboring_relation=relation)
  accountant.compose(event, plan.num_steps)
  return float(accountant.get_epsilon(plan.accounted_delta(plan.delta)))


def _derived_by_size(plan: Any, z: float, relation: Any) -> float:
  """The same for truncated Poisson samples and for shuffled epochs."""
  sampler, times = plan.sampler, plan.num_steps
  if hasattr(sampler, "prob"):
    event: Any = dpa.TruncatedSubsampledGaussianDpEvent(
      sampler.num_examples, sampler.prob, sampler.capacity, z
    )
    accountant = PLDAccountant(relation)
  else:  # sum of precisions of as many Gaussians as there are epochs, begun ones too
    times = -(-plan.num_steps // (sampler.num_examples // sampler.batch_size))
    sensitivity = 2 if plan.neighboring_relation == "replace_one" else 1
    event = dpa.GaussianDpEvent(z / sensitivity)
    accountant = RdpAccountant() if plan.accountant == "rdp" else PLDAccountant()
  accountant.compose(event, times)
  return float(accountant.get_epsilon(plan.accounted_delta(plan.delta)))


def _derived_from_matrix(plan: Any) -> float:
  """The same where participation is bounded, from the dense C."""
  correlation = plan.correlation or noise.correlated.Independent()
  matrix = noise.correlated.matrix(correlation, plan.num_steps)
  matrix /= np.array(plan.noise_schedule or np.ones(plan.num_steps))[:, None]
  apart, cyclic, prob = plan.sampler.participation
  turns = 1 if prob == 1 else -(-plan.num_steps // apart)
  if prob < 1:  # one column for each turn
    sensitivity = np.sqrt((matrix**2).sum(axis=0).max())
  else:
    sensitivity = accounting.sensitivity(matrix, min_sep=apart, cyclic=cyclic)
  halved = 2 if plan.neighboring_relation == "replace_one" else 1
  event: Any = dpa.GaussianDpEvent(plan.noise_multiplier / sensitivity / halved)
  event = event if prob == 1 else dpa.PoissonSampledDpEvent(prob, event)
  accountant = (RdpAccountant if plan.accountant == "rdp" else PLDAccountant)()
  accountant.compose(event, turns)
  return float(accountant.get_epsilon(plan.accounted_delta(plan.delta)))


def agreement(subject: Subject) -> Row:
  """Sampler, relation and accountant fit, and epsilon follows from the public fields."""
  name, plan = "accountant agrees", subject.plan
  if not plan.is_private:
    return not_applicable(name, "no epsilon is claimed")
  allowed = ", ".join(plan.sampler.relations)
  if plan.neighboring_relation not in plan.sampler.relations:
    why = f"{type(plan.sampler).__name__} is proved under {allowed or 'no relation'} only"
    return Row(name, False, math.inf, 0.0, f"{plan.neighboring_relation}: {why}")
  derived, claimed = _derived_epsilon(subject), plan.epsilon()
  off = abs(claimed - derived) / max(derived, 1e-12)
  shown = [accounting.upper(value, digits=5) for value in (claimed, derived)]
  detail = f"epsilon {shown[0]}, derived anew {shown[1]}, {plan.neighboring_relation}"
  return row(name, off, _EPSILON_SLACK, f"relative difference: {detail}")


def overflow(subject: Subject) -> Row:
  """A draw above the capacity is rare enough to be paid for by delta's share."""
  name, plan = "overflow fits delta", subject.plan
  log_prob = getattr(plan.sampler, "log_overflow_prob", None)
  if log_prob is None or not plan.is_private:
    return not_applicable(name, "the batch size is fixed, or nothing is claimed")
  each = log_prob(len(subject.train) + 1)  # the neighbour may have one more
  epsilon = plan.epsilon()
  share = math.exp(np.logaddexp(0.0, epsilon) + each + math.log(plan.num_steps))
  allowed = OVERFLOW_SHARE * plan.delta
  return row(name, share, allowed, f"delta for it, capacity {plan.sampler.slots}")


def divisor(subject: Subject) -> Row:
  """The noisy sum is divided by a public constant, however many examples took part."""
  plan, key = subject.plan, jax.random.key(SEED)
  size = trees.size(subject.params)
  length = min(plan.l2_bound, 1.0) / math.sqrt(size)
  if not isinstance(plan.l2_clip_norm, (int, float)):
    active = [c for c in jax.tree.leaves(plan.l2_clip_norm) if c]
    length = min(active) / math.sqrt(size)
  grads = jax.tree.map(lambda p: jnp.full((BATCH, *jnp.shape(p)), length), subject.params)

  one = jax.tree.map(lambda leaf: leaf[:1], grads)
  gamma = plan.gamma if plan.clipping == "automatic" else None
  term = gradients.clip_and_sum(
    one, jnp.zeros(1), jnp.ones(1, bool), plan.l2_clip_norm, gamma=gamma
  )
  unit = sum(np.sum(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(term.total))

  @jax.jit
  def update(mask):
    tx = subject.transform(key)
    state = tx.init(subject.params)
    return tx.update(grads, state, subject.params, mask=mask)[0]

  def seen(k):
    moved = jax.tree.map(
      lambda a, b: np.sum(np.asarray(a, np.float64) - np.asarray(b, np.float64)),
      update(jnp.arange(BATCH) < k),
      update(jnp.zeros(BATCH, bool)),
    )
    return float(sum(jax.tree.leaves(moved))) / unit * plan.normalize_by

  off = max(abs(seen(k) - k) for k in (1, BATCH))
  return row(
    "public divisor", off, 0.05, f"error of k / {plan.normalize_by:g} for k=1 and {BATCH}"
  )


def _changed(value: Any) -> Any:
  if isinstance(value, bool):
    return not value
  if isinstance(value, (int, float)):
    return value + 1
  if isinstance(value, dict):
    return {**value, "another": 1}
  return f"{value}_"


def _neighbours(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
  """The config with one field changed, for each field that decides what runs."""
  for name, value in to_dict(config).items():
    part = getattr(config, name)
    if not dataclasses.is_dataclass(part):
      yield name, dataclasses.replace(config, **{name: _changed(value)})
    elif name != "audit" or config.audit.enabled:
      for inner in value:
        if inner != "data_dir":  # where the data lie is no part of the run
          other = dataclasses.replace(part, **{inner: _changed(value[inner])})  # type: ignore
          yield f"{name}.{inner}", dataclasses.replace(config, **{name: other})


def _identities(random: Any) -> set[str]:
  keys = {noise.key_id(key) for key in (random.noise, random.example)}
  return {*keys, f"sampler {random.sampler}"}


def key_reuse(subject: Subject) -> Row:
  """Runs that differ in one field share neither noise, nor augmentation, nor batches."""
  random, config = subject.streams(subject.config), subject.config
  own = _identities(random)
  shared = [
    name for name, other in _neighbours(config)
    if not own.isdisjoint(_identities(subject.streams(other)))
  ]  # fmt: skip
  if len(own) < 3 or noise.key_id(random.init) in own:
    shared.append("one key for two purposes")
  if random.sampler.bit_length() < 64:
    shared.append("a sampler seed of fewer than 64 bits")
  if config.release:
    shared += _release_faults(subject, random)
  found = f" ({', '.join(shared[:3])})" if shared else ""
  return row(
    "no key serves twice", len(shared), 0, f"fields whose change keeps a key{found}"
  )


def _release_faults(subject: Subject, random: Any) -> Iterator[str]:
  if not _identities(random).isdisjoint(_identities(subject.streams(subject.config))):
    yield "release keys that follow from the config"
  if not all(noise.secure.is_secure(key) for key in (random.noise, random.example)):
    yield "release keys of fewer than 128 bits"


def white_box_audit(subject: Subject) -> Row:
  """Gradient canaries through the run's own sampler, transform and steps: what they prove
  stays below what is claimed."""
  name, plan = "white-box audit", subject.plan
  if not plan.is_private or not isinstance(plan.sampler, PoissonSampler):
    return not_applicable(name, "needs Poisson sampling and a claimed epsilon")
  if not isinstance(plan.l2_clip_norm, (int, float)):
    return not_applicable(name, "canaries have one clip norm, this plan one per layer")
  number = min(_CANARIES, len(subject.train))
  small = dataclasses.replace(plan, sampler=plan.fitted_sampler(number), slices=1)
  scores = auditing.gradient_canaries(
    small,
    num_canaries=number,
    seed=SEED,
    key=_key(subject, 2),
    transform=subject.transform,
  )
  found = auditing.one_run(scores, delta=plan.delta, confidence=_AUDIT_CONFIDENCE)
  detail = (
    f"epsilon that {number} gradient canaries in one run prove, with "
    f"{100 * _AUDIT_CONFIDENCE:g}% confidence, against the claim"
  )
  return row(name, found, plan.epsilon(), detail)


CHECKS: tuple[Callable[[Subject], Row], ...] = (
  divisor,
  noise_std,
  noise_independence,
  sampler_law,
  agreement,
  overflow,
  key_reuse,
  white_box_audit,
)

"""Checks of what is released and charged: nothing but the step's own sum and its noise,
divided by a public number; what the accountant says; that no key serves twice; and what
canaries prove."""

from __future__ import annotations

import dataclasses
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

from dpjax import accounting, auditing, data, gradients, noise, sampling, trees
from dpjax.checks import noise_record
from dpjax.checks.subject import BATCH, SEED, Row, Subject, not_applicable, row
from dpjax.plan import OVERFLOW_SHARE
from dpjax.runs.central.config import TrainConfig
from dpjax.sampling import PoissonSampler
from dpjax.schema.fields import to_dict
from dpjax.types import ClippedSum, NeighboringRelation

_OWN_STEPS = 4  # of a run whose sums are changed, at least
_OWN_WORK = 20_000_000  # values of such a run before steps are skipped
_LENGTHS = ((1.0, 0.0, 0.5, 1.0, 0.1), (0.25, 1.0, 0.0))  # of the sums, in clip norms
_CANARIES = 1000
_AUDIT_CONFIDENCE = (
  0.99  # much more is out of reach: at delta > 0 p-values end near m * delta
)
_EPSILON_SLACK = 0.01  # relative: two discretisations of one privacy loss


def _derived_epsilon(subject: Subject) -> float | None:
  """Epsilon from the sampler's and the noise's public fields, by dp_accounting alone; None
  where no second derivation is written here."""
  plan: Any = subject.plan
  accountant = RdpAccountant if plan.accountant == "rdp" else PLDAccountant
  relation = dpa.NeighboringRelation[NeighboringRelation(plan.neighboring_relation).name]
  if plan.sampler.participation is not None:
    counted, event, times = accountant(), *_event_of_matrix(plan)
  elif plan.sampler.law == "shuffled":  # a Gaussian for each epoch, begun ones too
    times = -(-plan.num_steps // (plan.sampler.num_examples // plan.sampler.batch_size))
    counted, event = accountant(), dpa.GaussianDpEvent(_multiplier(plan) / _exchanged(plan))
  elif plan.sampler.law in _SAMPLED:
    event, times = (
      _SAMPLED[plan.sampler.law](plan.sampler, _multiplier(plan)),
      plan.num_steps,
    )
    only = {"truncated_poisson": PLDAccountant, "fixed_size": RdpAccountant}
    accountant = only.get(plan.sampler.law, accountant)
    counted = accountant(neighboring_relation=relation)
  else:
    return None
  counted.compose(event, times)
  # a PLD of exchanged records reads multipliers relative to the clip norm
  by_norm = plan.sampler.law in _SAMPLED and accountant is PLDAccountant
  for level in _levels_before(plan):
    event = dpa.GaussianDpEvent(level * (_exchanged(plan) if by_norm else 1))
    counted.compose(event, len(plan.statistics.vectors))
  return float(counted.get_epsilon(plan.accounted_delta(plan.delta)))


_SAMPLED: dict[str, Callable[[Any, float], dpa.DpEvent]] = {
  "poisson": lambda s, z: dpa.PoissonSampledDpEvent(s.prob, dpa.GaussianDpEvent(z)),
  "truncated_poisson": lambda s, z: dpa.TruncatedSubsampledGaussianDpEvent(
    s.num_examples, s.prob, s.capacity, z
  ),
  # RDP reads the multiplier relative to the sensitivity, which is 2 C here
  "fixed_size": lambda s, z: dpa.SampledWithoutReplacementDpEvent(
    s.num_examples, s.batch_size, dpa.GaussianDpEvent(z / 2)
  ),
}


def _levels_before(plan: Any) -> list[float]:
  """Noise multipliers of the statistics that were released first, each of every vector,
  relative to the sensitivity."""
  found = plan.statistics
  if found is None:
    return []
  levels = [found.noise_multiplier / _exchanged(plan)]
  if not found.clip_norms:
    levels.append(-0.5 / float(stats.norm.ppf(1 / (1 + math.exp(found.median_epsilon)))))
  return levels


def _multiplier(plan: Any) -> float:
  z, rule = plan.noise_multiplier, plan.l2_clip_norm.rule
  if not rule.adapts:
    return z
  # a count of sensitivity 1/2 is released as well
  return (z**-2 + (2 * rule.count_std(plan.normalize_by)) ** -2) ** -0.5


def _exchanged(plan: Any) -> int:
  """The sensitivity in clip norms."""
  return 2 if plan.neighboring_relation == "replace_one" else 1


def _event_of_matrix(plan: Any) -> tuple[dpa.DpEvent, int]:
  """(event, how many) where participation is bounded, from the dense C."""
  shape = plan.noise_shape
  matrix = noise.correlated.matrix(shape.strategy, plan.num_steps)
  matrix /= np.array(shape.schedule or np.ones(plan.num_steps))[:, None]
  apart, cyclic, prob = plan.sampler.participation
  turns = 1 if prob == 1 else -(-plan.num_steps // apart)
  if prob < 1:  # one column for each turn
    sensitivity = np.sqrt((matrix**2).sum(axis=0).max())
  else:
    sensitivity = accounting.sensitivity(matrix, min_sep=apart, cyclic=cyclic)
  event = dpa.GaussianDpEvent(plan.noise_multiplier / sensitivity / _exchanged(plan))
  return (event if prob == 1 else dpa.PoissonSampledDpEvent(prob, event)), turns


def agreement(subject: Subject) -> Row:
  """Sampler, relation and accountant fit, and epsilon follows from the public fields."""
  name, plan = "accountant agrees", subject.plan
  if not plan.is_private:
    return not_applicable(name, "no epsilon is claimed")
  if sampling.assumption(plan.sampler):
    why = f"the event of {type(plan.sampler).__name__} is its author's; see its law"
    return not_applicable(name, why)
  relations = accounting.proved_for(plan.sampler.law).relations
  if plan.neighboring_relation not in relations:
    allowed = ", ".join(relations) or "no relation"
    why = f"{type(plan.sampler).__name__} is proved under {allowed} only"
    return Row(name, False, math.inf, 0.0, f"{plan.neighboring_relation}: {why}")
  derived, claimed = _derived_epsilon(subject), plan.epsilon()
  if derived is None:
    return not_applicable(name, f"sampler={plan.sampler.law} is not derived a second time")
  off = abs(claimed - derived) / max(derived, 1e-12)
  shown = [accounting.upper(value, digits=5) for value in (claimed, derived)]
  detail = f"epsilon {shown[0]}, derived anew {shown[1]}, {plan.neighboring_relation}"
  return row(name, off, _EPSILON_SLACK, f"relative difference: {detail}")


def overflow(subject: Subject) -> Row:
  """A draw above the capacity is rare enough to be paid for by delta's share."""
  name, plan = "overflow fits delta", subject.plan
  if not (plan.sampler.can_overflow and plan.is_private):
    return not_applicable(name, "the batch size is fixed, or nothing is claimed")
  # the neighbour may have one more
  each = plan.sampler.log_overflow_prob(len(subject.train) + 1)
  epsilon = plan.epsilon()
  share = math.exp(np.logaddexp(0.0, epsilon) + each + math.log(plan.num_steps))
  allowed = OVERFLOW_SHARE * plan.delta
  return row(name, share, allowed, f"delta for it, capacity {plan.sampler.slots}")


def _own_steps(subject: Subject, key: jax.Array) -> np.ndarray:
  """The steps at which sums go in: all of the run, or as many as can be afforded."""
  count = max(_OWN_STEPS, subject.plan.num_steps)
  affordable = max(_OWN_STEPS, _OWN_WORK // max(1, trees.size(subject.params)))
  if count <= affordable:
    return np.arange(count)
  if not noise_record.walks(subject, key):
    return np.arange(affordable)
  spread = np.linspace(0, count - 2, max(1, affordable // 4)).astype(int)
  return np.unique([*range(affordable // 2), *spread, *(spread + 1)])  # each with the next


def _offered(subject: Subject, number: int, step: Any) -> tuple[ClippedSum, Any]:
  """(a sum of random direction that clipping allows, mask): its length, the number of
  examples in it, their norms and losses are others in each of the two runs."""
  plan, leaves = subject.plan, jax.tree.leaves(subject.params)
  length = min(plan.l2_bound, 1e6) / math.sqrt(max(1, trees.size(leaves)))
  length *= jnp.asarray(_LENGTHS[number])[step % len(_LENGTHS[number])]
  key = jax.random.fold_in(jax.random.key(SEED + 1 + number), step)
  keys = jax.random.split(key, len(leaves) + 1)
  drawn = [
    length * jnp.where(jax.random.bits(k, jnp.shape(p)) >> 31, 1.0, -1.0)
    for k, p in zip(keys, leaves)
  ]
  total = jax.tree.unflatten(jax.tree.structure(subject.params), drawn)
  seen = jax.random.bits(keys[-1], (2, BATCH)) * 2.0**-31 * min(plan.l2_bound, 1e6)
  mask = jnp.arange(BATCH) < (5 * step + (BATCH // 2 + 1) * number) % (BATCH + 1)
  bounds = plan.l2_clip_norm.group_bounds()
  return ClippedSum(total, seen[0], seen[1], plan.l2_bound, bounds), mask


def _unasked(subject: Subject, key: jax.Array, steps: np.ndarray) -> np.ndarray:
  """[T] norm of what the updates of two runs with one noise key differ by, besides their
  sums: the same transform on other sums, other batch sizes and other parameters."""
  plan, gaps = subject.plan, np.diff(steps, prepend=-1) - 1
  params = [trees.scale(subject.params, factor) for factor in (1, -2)]
  frozen = lambda bound, group: trees.scale(group, float(bound > 0))

  def update(number, state, offered, mask):
    tx = subject.transform(key)
    return noise_record.updated(tx.update, offered, state, params[number], mask)

  def idle(number, state):
    offered, mask = _offered(subject, number, 0)
    nothing = dataclasses.replace(offered, total=trees.scale(offered.total, 0))
    return update(number, state, nothing, jnp.zeros_like(mask))[1]

  def one(states, gap_and_step):
    gap, step = gap_and_step
    seen, after = [], []
    for number, state in enumerate(states):
      if gaps.any():  # XLA draws no noise where only the state is used
        state = jax.lax.fori_loop(0, gap, lambda _, s, k=number: idle(k, s), state)
      offered, mask = _offered(subject, number, step)
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
    return jax.lax.scan(one, states, inputs)[1]

  return np.asarray(run(), np.float64)


def own_sum(subject: Subject) -> Row:
  """An update is its own step's sum and noise, over a public divisor, at every step of the
  run: the noise sees neither the sum nor the batch, no earlier sum comes again."""
  plan, key = subject.plan, jax.random.key(SEED)  # not on a release key's grid
  steps = _own_steps(subject, key)
  off = _unasked(subject, key, steps)
  rounding = 1e-6 * plan.noise_multiplier * math.sqrt(trees.size(subject.params))
  worst = float(off.max()) if np.isfinite(off).all() else math.nan
  return row(
    "own sum and noise only",
    worst / min(plan.l2_bound, 1e6),
    1e-2 + rounding,
    f"what one of {len(steps)} updates holds besides its own sum and noise, in clip norms",
  )


def divisor(subject: Subject) -> Row:
  """The noisy sum is divided by a public constant, however many examples took part."""
  plan, key = subject.plan, jax.random.key(SEED)
  size = trees.size(subject.params)
  length = min(plan.l2_bound, 1.0) / math.sqrt(size)
  if not plan.l2_clip_norm.is_one_number:
    active = [c for c in plan.l2_clip_norm.group_bounds() if c]
    length = min(active) / math.sqrt(size)
  grads = jax.tree.map(lambda p: jnp.full((BATCH, *jnp.shape(p)), length), subject.params)

  one = jax.tree.map(lambda leaf: leaf[:1], grads)
  term = gradients.clip_and_sum(one, jnp.zeros(1), jnp.ones(1, bool), plan.l2_clip_norm)
  unit = sum(np.sum(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(term.total))

  @jax.jit
  def update(mask):
    tx = subject.transform(key)
    state = tx.init(subject.params)
    offered = gradients.stacked(grads)
    return tx.update(offered, state, subject.params, mask=mask)[0]

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
  told = to_dict(config)
  elsewhere = (*config.where, "pretrained")  # a file, which must be there: its bytes decide
  for name, value in [(name, told[name]) for name in told if name not in elsewhere]:
    part = getattr(config, name)
    if not dataclasses.is_dataclass(part):
      yield name, dataclasses.replace(config, **{name: _changed(value)})
    elif name != "audit" or config.audit.enabled:
      for inner in (field.name for field in dataclasses.fields(part)):
        if inner != "data_dir":  # where the data lie is no part of the run
          other = dataclasses.replace(part, **{inner: _changed(value[inner])})  # type: ignore
          yield f"{name}.{inner}", dataclasses.replace(config, **{name: other})


def _identities(random: Any) -> set[str]:
  keys = {noise.key_id(key) for key in (random.noise, random.local)}
  return {*keys, f"sampler {random.sampler}"}


def key_reuse(subject: Subject) -> Row:
  """Runs that differ in one field share neither noise, nor augmentation, nor batches."""
  random, config = subject.streams(subject.config), subject.config
  own = _identities(random)
  shared = [
    name for name, other in _neighbours(config)
    if not own.isdisjoint(_identities(subject.streams(other)))
  ]  # fmt: skip
  fewer = data.digest(subject.train.subset(slice(1, None)))
  if not own.isdisjoint(_identities(subject.streams(config, fewer))):
    shared.append("one record of the data")
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
  if not all(noise.source.is_secure(key) for key in (random.noise, random.local)):
    yield "release keys of fewer than 128 bits"


def white_box_audit(subject: Subject) -> Row:
  """Gradient canaries through the run's own sampler, transform and steps: what they prove
  stays below what is claimed."""
  name, plan = "white-box audit", subject.plan
  if not plan.is_private or not isinstance(plan.sampler, PoissonSampler):
    return not_applicable(name, "needs Poisson sampling and a claimed epsilon")
  if not plan.l2_clip_norm.is_one_number:
    return not_applicable(name, "canaries have one clip norm, this plan one per layer")
  number = min(_CANARIES, len(subject.train))
  small = dataclasses.replace(plan, sampler=plan.fitted_sampler(number), slices=1)
  scores = auditing.gradient_canaries(
    small,
    num_canaries=number,
    seed=SEED,
    key=noise_record.test_key(subject, 2),
    transform=subject.transform,
  )
  found = auditing.one_run(scores, delta=plan.delta, confidence=_AUDIT_CONFIDENCE)
  detail = (
    f"epsilon that {number} gradient canaries in one run prove, with "
    f"{100 * _AUDIT_CONFIDENCE:g}% confidence, against the claim "
    f"(delta={accounting.upper(plan.delta)}, {plan.neighboring_relation})"
  )
  return row(name, found, plan.epsilon(), detail)


CHECKS: tuple[Callable[[Subject], Row], ...] = (
  own_sum,
  divisor,
  agreement,
  overflow,
  key_reuse,
  white_box_audit,
)

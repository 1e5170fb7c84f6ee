"""Silos that keep their own records private: a plan for each client, and noise before it sends.

The setting is inter-silo record-level differential privacy (Lowy and Razaviyayn 2021,
arXiv:2106.09779). A silo, such as a hospital, trusts nobody outside. In every local step it clips
the gradients of its records, adds the noise of its own `Plan`, and goes on from the noisy sum. So
each message, and all that the silo keeps, is a function of noisy sums and public numbers. The
guarantee is for ONE record of ONE silo, against the server and all other silos together.

Proof, for silo k: what it receives in a round is a function of messages that were sent before, and
of the data of other silos. Given these, the steps of a round are a Gaussian mechanism each, on rows
that the silo's sampler draws anew. So all steps of all rounds compose adaptively, to `plan.event`
of the steps that ran. A round in which the silo is away computes nothing, and costs nothing.

A person whose records lie in several silos: with one record in each of at most m silos, the steps
of these silos compose, too, whatever their order, since each depends on the others only by what was
sent. With `max_silos=m`, `Silos.epsilon()` is the largest epsilon of any m silos together. It says
nothing of a person with several records in one silo, or with records in more silos. For a guarantee
of a person across all silos at once, see Kato et al. 2023 (Uldp-FL, arXiv:2308.12210).

| case                               | what happens                                              |
| ---------------------------------- | --------------------------------------------------------- |
| a record with NaN or infinity      | contributes 0                                             |
| an empty draw                      | a step like any other, of noise alone                     |
| a silo without records             | the same; its message is noise                            |
| a silo that is away                | computes nothing, is not charged, and keeps what it had   |
| a message that is lost             | was computed, so it is charged; the mean leaves it out    |
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from dp_accounting import DpEvent

from dpjax import trees, validate
from dpjax.accounting import overflow
from dpjax.accounting.matrix import join
from dpjax.accounting.overflow import MayAbort
from dpjax.data import Federation
from dpjax.federated.client import Local
from dpjax.federated.cohort import Cohort, Drawn, LocalBatches, LocalWork
from dpjax.gradients import Flat
from dpjax.key_uses import KeyUse, key_for
from dpjax.noise import gaussian
from dpjax.noise.gaussian import state_at
from dpjax.noise.shape import WHITE
from dpjax.plan import Plan
from dpjax.sampling import FixedSizeSampler
from dpjax.sampling import batches as batches_lib
from dpjax.transforms.inputs import Conditions, open_gradients
from dpjax.types import ClippedSum, Example
from dpjax.validate import UserError

# Largest number of sets of silos whose steps are composed for one epsilon.
MOST_SETS = 1_000


class SiloNoise(NamedTuple):
  """Public numbers of the noise of one silo, or of K silos with leaves [K]."""

  std: Any  # standard deviation of the noise on a sum of clipped gradients
  scale: Any  # 1 / the divisor of a noisy sum


@dataclasses.dataclass(frozen=True)
class Attendance:
  """Which silos take part in a round, and whose message arrives. Both are public.

  Args:
    absent: chance that a silo is away for a round. It computes nothing, and is not charged.
    lost: chance that a silo which takes part computes its message in vain. It is charged.
    seed: seed of both draws, which do not depend on data.

  >>> Attendance().of(0, 3)
  (array([ True,  True,  True]), array([ True,  True,  True]))
  """

  absent: float = 0.0
  lost: float = 0.0
  seed: int = 0

  def __post_init__(self):
    validate.share(absent=self.absent, lost=self.lost)
    validate.integer_at_least(0, seed=self.seed)

  def of(self, round: int, num_silos: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns masks [K] of the silos that compute a message in this round, and of those whose
    message arrives."""
    # 4 separates these random streams from those of cohorts.
    stream = np.random.SeedSequence(self.seed, spawn_key=(4, round))
    draws = np.random.Generator(np.random.Philox(stream)).random((2, num_silos))
    here = draws[0] >= self.absent
    return here, here & (draws[1] >= self.lost)


@dataclasses.dataclass(frozen=True)
class Silos:
  """The plans of all silos, in the order of the federation's clients.

  Give it to an algorithm, such as `federated.fed_avg(..., silos=silos)`, and take the cohorts that
  the algorithm's `cohorts` yields.

  Args:
    plans: a plan for each silo: sampler of its records, noise, divisor, number of all its steps.
      They share clip norm, delta, neighbouring relation and accountant, so that one program serves
      all silos. Noise, divisor, sampler and steps may differ.
    num_rounds: number of rounds; each plan's steps are divided equally among them.
    sizes: declared number of records of each silo, constants that no record changes, for weights
      and for checks of capacity; () if none are declared: then weights must be uniform.
    attendance: which silos take part in which round.
    max_silos: largest number of silos that hold a record of one person, one in each at most.

  Guarantee: for one record of silo k, all messages of the silo, all models and all that silos keep
  are (epsilons()[k], delta)-private. The loss is of one example; the client's optimizer, the
  algorithm and the server may be any functions of noisy gradients.

  Raises:
    UserError: plans that differ in what they must share; a plan with an option that is not for
      silos; steps that are no multiple of `num_rounds`.

  >>> from dpjax import PoissonSampler
  >>> plan = Plan(sampler=PoissonSampler(sampling_prob=0.1, capacity=64), noise_multiplier=2.0,
  ...   l2_clip_norm=1.0, normalize_by=10, num_steps=20, delta=1e-5)
  >>> silos = Silos((plan, plan), num_rounds=10, max_silos=2)
  >>> silos.epsilons() == (plan.epsilon(),) * 2, silos.epsilon() > plan.epsilon()
  (True, True)
  """

  plans: Sequence[Plan]
  num_rounds: int
  sizes: Sequence[int] = ()
  attendance: Attendance = Attendance()
  max_silos: int = 1

  def __post_init__(self):
    object.__setattr__(self, "plans", tuple(self.plans))
    object.__setattr__(self, "sizes", tuple(self.sizes))
    validate.integer_at_least(1, num_rounds=self.num_rounds)
    if not self.plans:
      raise UserError("must hold a plan for each silo", field="plans")
    for place, plan in enumerate(self.plans):
      with validate.about(f"plans[{place}]"):
        self._check_plan(plan)
    if self.sizes and len(self.sizes) != len(self.plans):
      raise UserError(
        f"must be one for each of {len(self.plans)} silos", field="sizes", value=self.sizes
      )
    validate.integer_at_least(1, **validate.entries(sizes=self.sizes))
    count = len(self.plans)
    validate.integer_in(1, count, max_silos=self.max_silos)
    sets = math.comb(count, self.max_silos)
    if self.max_silos > 1 and sets > MOST_SETS:
      raise UserError(
        f"of {count} silos make {sets} sets, of which {MOST_SETS} are accounted for at most",
        field="max_silos",
        value=self.max_silos,
      )

  def _check_plan(self, plan: Plan) -> None:
    first = self.plans[0]
    shared = ("l2_clip_norm", "delta", "neighboring_relation", "accountant")
    for name in shared:
      if getattr(plan, name) != getattr(first, name):
        raise UserError(
          f"must be that of all silos, {getattr(first, name)!r}",
          field=name,
          value=getattr(plan, name),
        )
    clip = plan.l2_clip_norm
    usual = {
      "l2_clip_norm": clip.is_one_number and type(clip.rule) is Flat and not clip.schedule,
      "noise_shape": plan.noise_shape == WHITE,
      "slices": plan.slices == 1,
      "statistics": plan.statistics is None,
      "scaling": plan.scaling is None,
      "sampler": plan.sampler.period == 1 and plan.sampler.participation is None,
    }
    for name, is_usual in usual.items():
      if not is_usual:
        raise UserError(
          "must be that of plain DP-SGD for a silo: a constant clip norm, white noise, batches "
          "that are drawn anew and whole",
          field=name,
          value=getattr(plan, name),
        )
    if plan.num_steps % self.num_rounds:
      raise UserError(
        f"must be a multiple of num_rounds={self.num_rounds}",
        field="num_steps",
        value=plan.num_steps,
      )

  # --- what a silo does

  def noise(self) -> SiloNoise:
    """Returns the numbers of all silos' noise, leaves [K]."""
    stds = [plan.noise_multiplier * plan.l2_bound for plan in self.plans]
    # Without noise the bound may be infinite.
    stds = [0.0 if math.isnan(std) else std for std in stds]
    scales = [1.0 / plan.normalize_by for plan in self.plans]
    return SiloNoise(np.array(stds, np.float32), np.array(scales, np.float32))

  def noisy(self, summed: ClippedSum, local: Local) -> Any:
    """Returns the noisy mean gradient of a silo's step: (sum + noise) / divisor.

    Each (silo, round, step) has noise of its own: the key is the silo's in this round, and the draw
    is numbered by the step.
    """
    if local.silo is None:
      raise UserError("was lost by what wraps the client", field="silos")
    conditions = Conditions(rows=self.padded_batch_size)
    clip = self.plans[0].l2_clip_norm
    opened, sound = open_gradients(summed, local.params, None, clip, conditions)
    state = state_at(key_for(KeyUse.SILO_NOISE, local.key), local.num_steps)
    total, _ = gaussian.add_gaussian(state, opened.total, local.silo.std, sound=sound)
    return trees.scale(total, local.silo.scale)

  @property
  def padded_batch_size(self) -> int:
    """Number of rows of every batch, the same for all silos."""
    return max(plan.sampler.padded_batch_size for plan in self.plans)

  def steps_per_round(self, silo: int) -> int:
    """Returns the number of local steps of a silo in a round in which it takes part."""
    return self.plans[silo].num_steps // self.num_rounds

  @property
  def longest(self) -> int:
    """Largest number of steps of a silo in a round, to which the loop over clients pads all."""
    return max(map(self.steps_per_round, range(len(self.plans))))

  def fitted(self) -> Silos:
    """Returns these silos with the smallest capacities that delta allows for `sizes`."""
    plans = []
    for plan, size, allowed in zip(self.plans, self.sizes, self._log_allowed):
      sampler = plan.sampler
      if sampler.can_overflow:
        # A neighbour may have one record more.
        sampler = sampler.fit_to(size + 1, log_overflow_prob=allowed)
      plans.append(dataclasses.replace(plan, sampler=sampler))
    return dataclasses.replace(self, plans=plans)

  @functools.cached_property
  def _log_rarer(self) -> tuple[float, ...]:
    """Returns log of the factor by which draws of a silo above its capacity are rarer than its plan
    alone allows.

    With several silos for a person, epsilon is larger than for one, so aborts cost more of delta
    (`accounting.overflow`). The chance is smaller by as much, if epsilons add up at most.
    """
    if self.max_silos == 1:
      return (0.0,) * len(self.plans)
    alone = [plan.epsilon() for plan in self.plans]
    together = self.max_silos * max((e for e in alone if math.isfinite(e)), default=0.0)
    more = math.log(self.max_silos)
    rarer = []
    for epsilon in alone:
      beside = float(np.logaddexp(0.0, together) - np.logaddexp(0.0, epsilon))
      rarer.append(more + beside if math.isfinite(epsilon) else 0.0)
    return tuple(rarer)

  @property
  def _log_allowed(self) -> tuple[float, ...]:
    """Returns log of the largest allowed chance that one draw of a silo exceeds its capacity."""
    return tuple(
      float(plan.log_allowed - rarer) for plan, rarer in zip(self.plans, self._log_rarer)
    )

  def _check_capacity(self, silo: int, num_examples: int) -> None:
    plan = self.plans[silo]
    declared = self.sizes[silo] if self.sizes else None
    overflow.check_capacity(
      plan,
      num_examples,
      declared=declared,
      of_divisor=declared,
      log_rarer=self._log_rarer[silo],
    )

  def cohorts(
    self,
    federation: Federation,
    work: LocalWork | None = None,
    *,
    rng: int | None = None,
    start: int = 0,
  ) -> Iterator[Cohort]:
    """Yields the silos of rounds start, start + 1, ... with the batches that their samplers draw.

    The draw of a silo's step is a function of (rng, silo, round, step) and its number of records.

    Args:
      federation: its clients are the silos, in the order of `plans`.
      work: not read: the plans say how silos work.
      rng: integer seed of all samplers, 128 bits or more: epsilon counts on nobody knowing which
        records a step draws. None takes fresh bits, as for `cohort.cohorts`.

    Raises:
      UserError: a number of clients that is not that of plans; a row that is another unit than a
        plan's; a silo whose data its sampler does not fit, such as one with more records than its
        capacity is for.
    """
    del work
    # The samplers of all silos draw each step apart (`_check_plan`), as the first does.
    draws = batches_lib.draws_of(rng, start, self.plans[0].sampler, federation.num_clients)
    if federation.num_clients != len(self.plans):
      raise UserError(
        f"are {len(self.plans)}, and the federation has {federation.num_clients} clients",
        field="plans",
      )
    for place, plan in enumerate(self.plans):
      with naming(federation, place):
        plan.check_unit(federation.dataset)
        size = len(federation.indices[place])
        if isinstance(plan.sampler, FixedSizeSampler):
          plan.sampler.check_data(size)
        self._check_capacity(place, size)

    def generate() -> Iterator[Cohort]:
      seeds = [_seed_of(draws.seed, place) for place in range(len(self.plans))]
      for round in range(start, self.num_rounds):
        here, arrives = self.attendance.of(round, len(self.plans))
        ids = np.flatnonzero(here)
        drawn = (self._draw(federation, k, seeds[k], round) for k in ids.tolist())
        # A lost message has the weight of a client without examples.
        sizes = np.array(self.sizes or [1] * len(self.plans), np.int64) * arrives
        yield Cohort(
          ids=ids,
          num_examples=sizes[ids],
          batches=tuple(drawn),
          data=Example(federation.dataset.x, federation.dataset.y),
          drawn=Drawn(self, round, draws.run),
        )

    return generate()

  def _draw(self, federation: Federation, silo: int, seed: int, round: int) -> LocalBatches:
    """Returns the batches of a silo in a round, [S, B] row numbers of the whole data set."""
    held = federation.indices[silo]
    count = self.steps_per_round(silo)
    draws = []
    for step in range(round * count, (round + 1) * count):
      with naming(federation, silo):
        rows = batches_lib.draw_rows(
          self.plans[silo].sampler, len(held), seed=seed, step=step
        )
      draws.append(batches_lib.pad(rows, self.padded_batch_size))
    rows, mask = (np.stack(parts) for parts in zip(*draws))
    # A silo without records has no row of its own, and all of its batches are padding.
    numbers = held[rows] if len(held) else np.zeros_like(rows)
    # An empty record keeps its place, and contributes zero.
    if len(held) and federation.dataset.present is not None:
      mask &= federation.dataset.present[numbers]
    return LocalBatches(numbers.astype(np.int32), mask)

  @property
  def is_private(self) -> bool:
    """Whether any silo has a guarantee."""
    return any(plan.is_private for plan in self.plans)

  def check_cohort(self, cohort: Cohort, round: int) -> None:
    """Raises UserError for a cohort whose silos do not do what their plans account for in a round.

    The number of the round determines the noise, so batches of another round would get the noise of
    this one a second time; and rounds after the last are in no plan.
    """
    if round >= self.num_rounds:
      raise UserError(
        "were all done, and the plans account for no more", field="num_rounds",
        value=self.num_rounds,
      )  # fmt: skip
    drawn = cohort.drawn
    if drawn is not None and drawn.plan != self:
      raise UserError("was drawn by others than these silos", field="cohort")
    if drawn is not None and drawn.round != round:
      raise UserError(
        f"was drawn for round={drawn.round}, must be for round={round} of the state",
        field="cohort",
      )
    for place, batches in zip(np.asarray(cohort.ids).tolist(), cohort.batches):
      if place >= len(self.plans):
        raise UserError(f"has no plan, of {len(self.plans)}", field="silo", value=place)
      count, width = batches.mask.shape
      wanted = self.steps_per_round(place)
      if count != wanted or width > self.padded_batch_size:
        raise UserError(
          f"works on {count} batches of {width} rows, its plan accounts for {wanted} of at most "
          f"{self.padded_batch_size} in a round; take cohorts of Silos.cohorts",
          field="silo",
          value=place,
        )

  # --- what it costs

  def num_steps(self, rounds: int | None = None) -> tuple[int, ...]:
    """Returns the number of steps of each silo in the first `rounds` rounds (default: all)."""
    rounds = self.num_rounds if rounds is None else rounds
    there = np.zeros(len(self.plans), np.int64)
    for round in range(rounds):
      there += self.attendance.of(round, len(self.plans))[0]
    return tuple(int(n) * self.steps_per_round(k) for k, n in enumerate(there))

  def epsilons(self, steps: Sequence[int] | None = None) -> tuple[float, ...]:
    """Returns epsilon for one record of each silo, after so many steps of each.

    Args:
      steps: number of steps of each silo; None for those of `num_steps()`.
    """
    steps = self.num_steps() if steps is None else steps
    return tuple(_epsilon(plan, count) for plan, count in zip(self.plans, steps))

  def epsilon(self, steps: Sequence[int] | None = None) -> float:
    """Returns epsilon for a person with one record in each of at most `max_silos` silos.

    It is the largest epsilon of the composed steps of any `max_silos` silos.
    """
    return max(run.epsilon(steps=ran) for run, ran in self.held(steps))

  def held(self, steps: Sequence[int] | None = None) -> list[tuple[MayAbort, Any]]:
    """Returns pairs (run, its steps) of all that may read the records of one person: one pair for
    each set of `max_silos` silos. Sets that cost the same stand once."""
    steps = self.num_steps() if steps is None else steps
    if self.max_silos == 1:
      return [*dict.fromkeys(zip(self.plans, steps))]
    # Silos with equal plans and steps are interchangeable.
    every = [*zip(self.plans, steps, self._log_allowed)]
    kinds = [*dict.fromkeys(every)]
    sets = itertools.combinations(map(kinds.index, every), self.max_silos)
    runs: list[tuple[MayAbort, Any]] = []
    for chosen in sorted({tuple(sorted(numbers)) for numbers in sets}):
      plans, counts, allowed = zip(*(kinds[number] for number in chosen))
      runs.append((_Together(plans, allowed), counts))
    return runs


class _Together(MayAbort):
  """Several plans that one person's records are in; `steps` are counts of each plan's steps."""

  def __init__(self, plans: Sequence[Plan], log_allowed: Sequence[float]):
    self.delta = plans[0].delta
    self.neighboring_relation = plans[0].neighboring_relation
    self.accountant = plans[0].accountant
    self._plans = plans
    self._allowed = log_allowed

  def _counts(self, steps: Any) -> list[int]:
    return [plan.num_steps for plan in self._plans] if steps is None else [*steps]

  def event(self, steps: Any = None) -> DpEvent:
    pairs = zip(self._plans, self._counts(steps))
    return join([plan.event(count) for plan, count in pairs])

  def accounted_delta(self, delta: float, steps: Any = None) -> float:
    triples = zip(self._plans, self._counts(steps), self._allowed)
    chances = [
      allowed + math.log(count)
      for plan, count, allowed in triples
      if count and plan.can_overflow
    ]
    return self._left_by_aborts(delta, steps, chances)


@functools.lru_cache(maxsize=4096)
def _epsilon(plan: Plan, steps: int) -> float:
  # Silos often have equal plans, and each row of a run asks again.
  return plan.epsilon(steps=steps)


def _seed_of(rng: int, silo: int) -> int:
  """Returns the seed of a silo's sampler, 256 bits. Silos must draw independently."""
  # 3 separates these random streams from those of cohorts.
  words = np.random.SeedSequence(rng, spawn_key=(3, silo)).generate_state(8, np.uint32)
  return int.from_bytes(words.tobytes(), "little")


def naming(federation: Federation, silo: int) -> Any:
  """Returns a context whose errors name the silo."""
  return validate.about(f"silo {federation.client_ids[silo]!r}")

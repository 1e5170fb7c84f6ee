"""launch.check on samplers whose law is that of a pass, or their author's: what is charged is
tested where it can be, and what is said of the rest is true."""

import dataclasses
from typing import Any, ClassVar

import dp_accounting
import numpy as np
import pytest

import dpjax
from dpjax import accounting, sampling
from dpjax.accounting.event_kinds import kind
from dpjax.checks import batches, noise_distributions
from dpjax.checks.subject import Subject
from dpjax.sampling import draws, registry
from dpjax.sampling.samplers import SizedSampler
from dpjax.validate import UserError
from tests.refuses import refuses

_N = 60


@dataclasses.dataclass(frozen=True)
class PartSampler(SizedSampler):
  """Four of the first half: charged so, or as if drawn from all."""

  relations: ClassVar[tuple[str, ...]] = ("replace_one",)
  num_examples: int = _N
  pool: int = _N // 2
  charged: int = _N // 2

  @property
  def padded_batch_size(self):
    return 4

  def event(self, inner):
    return dp_accounting.SampledWithoutReplacementDpEvent(self.charged, 4, inner)

  def draw(self, num_examples, *, seed, step):
    return draws.generator(seed, step).permutation(self.pool)[:4]


def _subject(sampler, draw=None, **changes: Any):
  numbers = {"noise_multiplier": 2.0, "l2_clip_norm": 1.0, "num_steps": 100, "delta": 1e-5}
  plan = dpjax.Plan(**{**numbers, "sampler": sampler, "normalize_by": 4, **changes})
  needed = [f.name for f in dataclasses.fields(Subject) if f.default is dataclasses.MISSING]
  rest = dict.fromkeys(name for name in needed if name != "kept")
  return Subject(**{**rest, "plan": plan, "draw": draw or sampler.draw, "train": range(_N)})


def test_a_pass_of_random_allocation_is_tested():
  sampler = sampling.RandomAllocationSampler(steps_per_pass=5, capacity=_N)
  found = batches.sampler_law(_subject(sampler))
  assert found.passed and "passes of 5 steps" in found.detail
  again = lambda n, *, seed, step: sampler.draw(n, seed=seed, step=step % 5)
  poisson = sampling.PoissonSampler(sampling_prob=0.2, capacity=_N)
  for broken in (
    again,
    poisson.draw,
  ):  # one order for all passes; twice in a pass, or never
    assert not batches.sampler_law(_subject(sampler, broken)).passed


def test_several_steps_of_a_pass_are_tested():
  sampler = sampling.KOutOfTSampler(steps_per_pass=5, num_selected=2, capacity=_N)
  once = sampling.RandomAllocationSampler(steps_per_pass=5, capacity=_N)
  row = batches.sampler_law(_subject(sampler))
  assert row.passed and "passes of 5 steps" in row.detail
  assert batches.sampler_seed(_subject(sampler)).passed

  def same_sets(n, *, seed, step):
    return sampler.draw(n, seed=seed, step=step % 5)

  def neighbours(n, *, seed, step):
    # Each example in two steps of a pass, which follow each other.
    turn, place = divmod(step, 5)
    steps = (5 * turn + place, 5 * turn + (place + 1) % 5)
    return np.sort(np.concatenate([once.draw(n, seed=seed, step=t) for t in steps]))

  poisson = sampling.PoissonSampler(sampling_prob=0.4, capacity=_N)
  for broken in (same_sets, neighbours, poisson.draw, once.draw):
    assert not batches.sampler_law(_subject(sampler, broken)).passed


@pytest.mark.cases(slow=["False"], long=...)
@pytest.mark.parametrize("is_public", [True, False])
def test_draws_with_replacement_are_tested(is_public):
  sampler = sampling.WithReplacementSampler(8, _N, size_is_public=is_public)
  half = sampling.WithReplacementSampler(4, _N, size_is_public=is_public)
  without = sampling.FixedSizeSampler(8, _N, size_is_public=is_public)
  row = batches.sampler_law(_subject(sampler))
  assert row.passed and "statistics over 400 draws" in row.detail
  assert batches.sampler_seed(_subject(sampler)).passed

  def in_pairs(n, *, seed, step):
    return np.repeat(half.draw(n, seed=seed, step=step), 2)

  def twice(n, *, seed, step):
    return sampler.draw(n, seed=seed, step=step // 2)

  def of_a_part(n, *, seed, step):
    return sampler.draw(n, seed=seed, step=step) // 2

  for broken in (without.draw, half.draw, in_pairs, twice, of_a_part):
    assert not batches.sampler_law(_subject(sampler, broken)).passed
  few_seeds = batches.sampler_seed(
    _subject(sampler, lambda n, *, seed, step: sampler.draw(n, seed=seed % 1000, step=step))
  )
  assert not few_seeds.passed


def test_a_draw_of_a_part_is_held_to_what_it_is_charged():
  honest = batches.sampler_law(_subject(PartSampler()))
  assert honest.passed and "charged: 0.1333 of them" in honest.detail
  assert not batches.sampler_law(_subject(PartSampler(pool=15))).passed
  twice = lambda n, *, seed, step: np.full(4, step % _N)
  assert not batches.sampler_law(_subject(PartSampler(), twice)).passed


@dataclasses.dataclass(frozen=True)
class HalfDpEvent(dp_accounting.DpEvent):
  """A pass of sums, of which a record is in one, with probability 1/2."""

  noise_multiplier: float


class HalfKind(kind.EventKind):
  name = "half"
  event = HalfDpEvent
  relations = ("replace_special",)

  # A pass costs what the one step of a record costs, a Poisson sample of probability 1/2. Under
  # add_or_remove_one it does not: a record more would move the others to other blocks. So
  # `elements` must not return the Poisson sample, which is proved under both.
  def _step(self, part):
    noise = dp_accounting.GaussianDpEvent(part.noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(0.5, noise)

  def pld(self, part, interval):
    step = self._step(part)
    return kind.kind_of(step).pld(step, interval)

  def rdp(self, part):
    step = self._step(part)
    return kind.kind_of(step).rdp(step)

  def grid(self, part):
    step = self._step(part)
    return kind.kind_of(step).grid(step)

  def describe(self, part, unit):
    return f"a pass in which each {unit} is in one fixed step with probability 1/2"

  def gaussian_noise(self, part):
    return part.noise_multiplier

  def sampling_prob(self, part):
    return 0.5


@dataclasses.dataclass(frozen=True)
class RoundRobinSampler(SizedSampler):
  """Fixed blocks take turns; of a block each example is dropped with probability 1/2."""

  relations: ClassVar[tuple[str, ...]] = HalfKind.relations
  num_examples: int = _N
  steps_per_event: int = 5

  @property
  def padded_batch_size(self):
    return -(-self.num_examples // self.steps_per_event)

  def event(self, inner):
    return HalfDpEvent(inner.noise_multiplier)

  def event_at(self, step, inner):
    first = step % self.steps_per_event == 0
    return self.event(inner) if first else dp_accounting.NoOpDpEvent()

  def block(self, step):
    return np.array_split(np.arange(self.num_examples), self.steps_per_event)[step % 5]

  def draw(self, num_examples, *, seed, step):
    block = self.block(step)
    return block[draws.generator(seed, step).random(block.size) < 0.5]


@pytest.fixture
def round_robin():
  kind.every_kind()  # before the tables are held, since a file registers its kinds once
  tables = (kind.KINDS, kind._KIND_OF)
  held = [dict(table) for table in tables]
  kind.register(HalfKind())
  yield RoundRobinSampler()
  for table, before in zip(tables, held):
    table.clear()
    table.update(before)


def test_an_event_of_its_own_says_what_draws_and_noise_are_held_to(
  round_robin, monkeypatch
):
  found = batches.sampler_law(_subject(round_robin))
  assert found.passed and "charged: 0.5 of the passes" in found.detail
  keep = lambda n, *, seed, step: round_robin.block(step)
  again = lambda n, *, seed, step: round_robin.draw(n, seed=seed, step=step // 5 * 5)
  for broken in (keep, again):  # nobody is dropped; the first block in every step of a pass
    assert not batches.sampler_law(_subject(round_robin, broken)).passed
  plan = _subject(round_robin).plan
  half = sampling.PoissonSampler(0.5, _N).event(dp_accounting.GaussianDpEvent(2.0))
  passes = accounting.compose(half, plan.num_steps // 5)
  assert plan.epsilon() == accounting.epsilon(passes, delta=plan.delta)
  with refuses("event"):
    accounting.epsilon(plan.event(), delta=1e-5)
  assert noise_distributions._accounted_multiplier(plan) == 2.0
  for name in ("gaussian_noise", "sampling_prob"):
    monkeypatch.delattr(HalfKind, name)
  silent = batches.sampler_law(_subject(round_robin, keep))
  assert silent.passed and "how often an example comes is not tested" in silent.detail
  assert "gaussian_noise" in noise_distributions._why_untested(plan)


@pytest.mark.parametrize("name", registry.SCHEMES)
def test_the_event_of_every_sampler_says_its_noise(name):
  chosen = registry.SCHEMES[name].kind
  event = chosen(**chosen.small[0]).event(dp_accounting.GaussianDpEvent(2.0))
  assert kind.kind_of(event).gaussian_noise(event) == 2.0


def test_what_has_no_law_is_not_said_to_be_unsampled():
  silent = _subject(sampling.PoissonSampler(0.5, _N), noise_multiplier=0.0)
  assert batches.sampler_law(silent).detail == "no epsilon is claimed"


def test_what_cannot_count_a_sampler_names_the_sampler():
  with pytest.raises(UserError, match="PartSampler is proved only under"):
    _subject(PartSampler(), neighboring_relation="replace_special")
  truncated = sampling.TruncatedPoissonSampler(0.5, 8, _N)
  with pytest.raises(
    UserError, match="has no analysis of TruncatedPoissonSampler"
  ) as caught:
    _subject(truncated, accountant="rdp")
  assert (caught.value.field, caught.value.value) == ("accountant", "rdp")


def test_relations_that_the_event_does_not_have_are_refused(monkeypatch):
  monkeypatch.setattr(PartSampler, "relations", ("replace_special",))
  with pytest.raises(UserError, match="nobody accounts for the event of PartSampler"):
    _subject(PartSampler())


def test_an_event_without_relations_is_refused(monkeypatch):
  monkeypatch.setattr(PartSampler, "relations", ())
  with pytest.raises(UserError, match="states an event") as caught:
    _subject(PartSampler())
  assert caught.value.field == "sampler"

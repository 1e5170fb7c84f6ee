"""Statistics that are paid from the plan's budget: composed, charged, refused where unproved."""

import dataclasses
import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

from dpjax import JointPlan, Plan, accounting, gradients, mechanisms, sampling
from dpjax.accounting import matrix
from dpjax.experiments.run import guarantee
from dpjax.gradients import Clip
from dpjax.noise import NoiseShape, correlated
from tests.refuses import refuses

_N, _DELTA = 1000, 1e-5
_ADD, _ZERO, _REPLACE = "add_or_remove_one", "replace_special", "replace_one"
_RELATIONS = dpa.NeighboringRelation
# Higher orders would overflow in the sum of `_ByPair`, and are not the best ones here.
_ORDERS = [order for order in DEFAULT_RDP_ORDERS if order <= 64]


def _statistics(relation=_ADD, **options):
  given = {"noise_multiplier": 8.0, "clip_norms": (1.0, 1.0)} | options
  return mechanisms.ChannelStatistics(
    normalize_by=_N, neighboring_relation=relation, **given
  )


def _plan(sampler, relation=_ADD, **options):
  given = dict(
    noise_multiplier=4.0, l2_clip_norm=0.1, normalize_by=100, num_steps=20, delta=_DELTA
  )
  given["statistics"] = _statistics(relation)
  return Plan(sampler, neighboring_relation=relation, **given | options)


_POISSON = sampling.PoissonSampler(sampling_prob=0.1, capacity=_N + 1)


def _poisson(z):
  return dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(z))


def _half(z):
  return dpa.PoissonSampledDpEvent(0.5, dpa.GaussianDpEvent(z))


class _ByPair(RdpAccountant):
  """That of dp_accounting, with the pair that bounds an exchange in a subset of fixed size.

  dp_accounting has a general bound there (Wang, Balle and Kasiviswanathan 2019), which is up to
  four times as large.
  """

  def compose(self, event, count=1):
    if not isinstance(event, dpa.SampledWithoutReplacementDpEvent):
      return super().compose(event, count)
    prob = event.sample_size / event.source_dataset_size
    shift = 1 / event.event.noise_multiplier
    # By the trapezoidal rule, over the outputs that are likelier with the record (ratio > 1).
    x = np.linspace(shift / 2, shift * max(self.orders) + 12, 200_001)
    ratio = 1 - prob + prob * np.exp(shift * x - shift**2 / 2)
    density = np.exp(-(x**2) / 2)
    self._rdp = np.array([
      of_all + count * math.log1p(np.trapezoid(
        # In one exponent: the power alone would overflow.
        np.exp(order * np.log(ratio) - x**2 / 2)
        + density * (ratio ** (1 - order) - ratio - 1), x
      ) / math.sqrt(2 * math.pi)) / (order - 1)
      for order, of_all in zip(self.orders, self._rdp)
    ])  # fmt: skip
    return self


# (sampler, relation, accountant, one step, statistics as the accountant reads them)
_SOUND = {
  "poisson": (_POISSON, _ADD, PLDAccountant(), _poisson(4.0), 8.0),
  "poisson, rdp": (_POISSON, _ADD, RdpAccountant(), _poisson(4.0), 8.0),
  "truncated": (
    sampling.TruncatedPoissonSampler(sampling_prob=0.1, capacity=150, num_examples=_N),
    _ZERO,
    PLDAccountant(neighboring_relation=_RELATIONS.REPLACE_SPECIAL),
    dpa.TruncatedSubsampledGaussianDpEvent(_N, 0.1, 150, 4.0),
    8.0,
  ),
  "fixed size": (  # both sensitivities are 2 C: half of either multiplier
    sampling.FixedSizeSampler(batch_size=100, num_examples=_N),
    _REPLACE,
    _ByPair(_ORDERS, neighboring_relation=_RELATIONS.REPLACE_ONE),
    dpa.SampledWithoutReplacementDpEvent(_N, 100, dpa.GaussianDpEvent(2.0)),
    4.0,
  ),
}


@pytest.mark.cases(quick=[1], slow=[0], long=...)
@pytest.mark.parametrize("name", _SOUND)
def test_epsilon_is_that_of_both_composed_by_dp_accounting_alone(name):
  sampler, relation, accountant, step, level = _SOUND[name]
  by = "rdp" if isinstance(accountant, RdpAccountant) else "pld"
  plan = _plan(sampler, relation, accountant=by)
  accountant.compose(step, plan.num_steps)
  alone = accountant.get_epsilon(plan.accounted_delta(_DELTA))
  accountant.compose(dpa.GaussianDpEvent(level), 2)
  expected = accountant.get_epsilon(plan.accounted_delta(_DELTA))
  assert plan.epsilon() == pytest.approx(expected, rel=2e-3)
  assert plan.epsilon() > 1.05 * alone  # what a plan that forgets them would say


def test_random_allocation_composes_with_them():
  sampler = sampling.RandomAllocationSampler(steps_per_pass=10, capacity=_N + 1)
  plan = _plan(sampler)
  quiet = dataclasses.replace(plan, statistics=None)
  passes = accounting.compose(quiet.step_event(0), 2)
  both = dpa.ComposedDpEvent([dpa.GaussianDpEvent(8 / 2**0.5), passes])
  direct = accounting.epsilon(both, delta=plan.accounted_delta(_DELTA))
  assert plan.epsilon() == pytest.approx(direct, rel=1e-6)
  assert plan.epsilon() > 1.05 * quiet.epsilon()


@pytest.mark.slow
def test_p25_calibration_pays_for_both():
  given = dict(
    epsilon=2.0, delta=_DELTA, sampler=_POISSON, num_steps=20, l2_clip_norm=0.1,
    normalize_by=100,
  )  # fmt: skip
  plan = Plan.calibrated(statistics=_statistics(), **given)
  assert 1.99 < plan.epsilon() <= 2.0
  assert plan.noise_multiplier > 1.01 * Plan.calibrated(**given).noise_multiplier
  assert (
    dataclasses.replace(plan, statistics=_statistics(noise_multiplier=4.0)).epsilon() > 2
  )


class _OneKey(mechanisms.ChannelStatistics):
  """A plant: draws from the key itself."""

  def own_key(self, key):
    return key


@pytest.mark.cases(slow=["_OneKey-bands1"], long=...)
@pytest.mark.parametrize("bands", [None, (1.0, 0.5, 0.25)])
@pytest.mark.parametrize("kind", [mechanisms.ChannelStatistics, _OneKey])
def test_p17_one_key_for_statistics_and_steps_shares_no_noise(kind, bands):
  """split(key, 4)[2], whence a mean's noise came, is fold_in(key, 2), that of a step: the
  difference of two releases was the mean."""
  shape = NoiseShape(correlation=bands and correlated.BandedToeplitz(bands))
  statistics = kind(normalize_by=_N, noise_multiplier=8.0, clip_norms=(1.0, 1.0))
  sampler = sampling.BallsInBinsSampler(num_bins=10, capacity=_N) if bands else _POISSON
  plan = _plan(sampler, statistics=statistics, noise_shape=shape)
  key, zeros = jax.random.key(0), jnp.zeros((3, 400))
  means = plan.statistics.after(key, zeros, None)[:2]
  tx, rows = plan.transform(key), []
  grads = gradients.wrap_grads(zeros)
  update = jax.jit(lambda s: tx.update(grads, s, zeros[0], mask=jnp.zeros(3, bool)))
  state = tx.init(zeros[0])
  for _ in range(plan.num_steps):
    out, state = update(state)
    rows.append(np.asarray(out))
  white = correlated.matrix(shape.strategy, plan.num_steps) @ np.array(rows)
  seen = np.corrcoef(np.concatenate([np.asarray(means), white]))[:2, 2:]
  assert (np.abs(seen).max() > 0.99) == (kind is _OneKey), seen
  assert np.abs(seen).max() < 0.3 or kind is _OneKey


def test_what_costs_infinitely_much_does_so_after_each_step():
  sampler = sampling.BallsInBinsSampler(num_bins=10, capacity=16)
  plan = _plan(sampler, noise_multiplier=1e-30)
  before, *after = plan.epsilon_curve([0, 1, 10, 20]).tolist()
  assert 0 < before < math.inf and after == [math.inf] * 3
  assert plan.epsilon(steps=3) == math.inf


def test_they_are_paid_with_the_first_step_and_once():
  plan = _plan(_POISSON)
  assert not plan.steps_alike
  first, later = plan.step_event(0), plan.step_event(1)
  assert first.events[0].event == plan.statistics.event() and later == plan.sum_event(0)
  ledger, said = accounting.Ledger(), guarantee.of_plan(plan, _N)
  for step in range(plan.num_steps):
    ledger = ledger.charge(
      said.step_event(step), l2_clip_norm=0.1, neighboring_relation=_ADD,
      noise_key_id="a", first_step=step,
    )  # fmt: skip
  assert ledger == accounting.Ledger.from_json(ledger.to_json())
  assert said.epsilon_of(ledger) == pytest.approx(plan.epsilon(), rel=1e-6)
  assert len(ledger.charges) == 2
  rest = dpa.ComposedDpEvent([plan.event(1), plan.remaining_event(1)])
  assert accounting.epsilon(rest, delta=_DELTA) == pytest.approx(
    accounting.epsilon(plan.event(), delta=_DELTA)
  )


@pytest.mark.parametrize("noise_multiplier", [4.0, 0.0])
def test_what_was_released_before_the_first_step_is_in_what_was_spent(noise_multiplier):
  """Also of a plan whose steps have no noise: its statistics have."""
  plan = _plan(_POISSON, noise_multiplier=noise_multiplier)
  alone = accounting.epsilon(plan.statistics.event(), delta=_DELTA)
  spent = plan.spent(plan.transform(jax.random.key(0)).init(jnp.zeros(2)))
  assert spent.steps == 0 and spent.epsilon == plan.epsilon(steps=0) == alone > 0
  assert plan.epsilon_curve([0]).tolist() == [alone]
  if noise_multiplier:
    assert plan.privacy_profile(0)([alone])[0] >= 0.999 * _DELTA
    assert "Before the first step" in spent.statement
    assert f"Epsilon {accounting.upper(alone, digits=4)}"[:12] in spent.statement
    joint = JointPlan(parts={"train": plan, "more": _plan(_POISSON)}, delta=2 * _DELTA)
    both = joint.spent(accounting.Ledger())
    two = matrix.join([plan.statistics.event()] * 2)
    assert both.steps == 0
    assert both.epsilon == pytest.approx(
      accounting.epsilon(two, delta=2 * _DELTA), rel=1e-3
    )
    assert "train (0 of 20, its statistics)" in " ".join(both.statement.split())


def test_the_statement_names_them():
  words = " ".join(_plan(_POISSON).statement(_N).split())
  assert "1 x Gaussian noise of 5.65685 times the clip norm; 20 x" in words
  assert "Before the first step: mean and mean square of each channel" in words
  assert "other statistics fitted to the private data" in words
  assert "Before the first step" in _plan(_POISSON).statement(_N, 0)
  quiet = dataclasses.replace(_plan(_POISSON), statistics=None).statement(_N)
  assert "Before" not in quiet and "other statistics" not in quiet


_BANDS = correlated.BandedToeplitz((1.0, 0.5, 0.25))
# What a pass costs under `_BANDS`: the largest squared column of C, bands in a pass or fewer.
_COLUMN = 1 + 0.5**2 + 0.25**2
_CYCLIC = sampling.CyclicSampler(10, _N)
_IN_TURN = sampling.CyclicPoissonSampler(turn_prob=0.5, num_groups=5, capacity=_N)
_BINS = sampling.BallsInBinsSampler(num_bins=10, capacity=_N)

# (sampler, relation, strategy, one turn as if of sensitivity 1, turns in 20 steps)
_IN_PASSES = {
  "cyclic, exchanged": (_CYCLIC, _REPLACE, None, dpa.GaussianDpEvent(2.0), 2),
  "cyclic, emptied": (_CYCLIC, _ZERO, None, dpa.GaussianDpEvent(4.0), 2),
  "cyclic, bands": (_CYCLIC, _ZERO, _BANDS, dpa.GaussianDpEvent(4 / _COLUMN**0.5), 2),
  "groups in turn": (_IN_TURN, _ADD, None, _half(4.0), 4),
  "groups in turn, bands": (_IN_TURN, _ADD, _BANDS, _half(4 / _COLUMN**0.5), 4),
  "bins": (_BINS, _ADD, None, dpa.GaussianDpEvent(4.0), 2),
  "bins, bands": (_BINS, _ADD, _BANDS, dpa.GaussianDpEvent(4 / _COLUMN**0.5), 2),
}


@pytest.mark.cases(slow=["cyclic, bands-pld", "groups in turn-rdp"], long=[0, 6, 8])
@pytest.mark.parametrize("by", ["pld", "rdp"])
@pytest.mark.parametrize("name", _IN_PASSES)
def test_p25_dp_ftrl_composes_with_them(name, by):
  """The sums answer the data and what was released before them, whatever that was."""
  sampler, relation, bands, turn, turns = _IN_PASSES[name]
  shape = {} if bands is None else {"noise_shape": NoiseShape(correlation=bands)}
  plan = _plan(sampler, relation, accountant=by, **shape)
  accountant = {"pld": PLDAccountant, "rdp": RdpAccountant}[by]()
  accountant.compose(turn, turns)
  alone = accountant.get_epsilon(plan.accounted_delta(_DELTA))
  accountant.compose(dpa.GaussianDpEvent(4.0 if relation == _REPLACE else 8.0), 2)
  expected = accountant.get_epsilon(plan.accounted_delta(_DELTA))
  assert plan.epsilon() == pytest.approx(expected, rel=2e-3)
  assert plan.epsilon() > 1.005 * alone
  assert plan.epsilon_curve([20])[0] == pytest.approx(plan.epsilon(), rel=1e-4)
  steps = [plan.epsilon(steps=t) for t in (0, 1, 10, 11, 20)]
  assert steps[0] > 0 and steps == sorted(steps)
  first = dpa.ComposedDpEvent([plan.statistics.event(relation), plan.sum_event(0)])
  given = dict(delta=plan.accounted_delta(_DELTA), accountant=by)
  given["neighboring_relation"] = relation
  assert steps[1] == pytest.approx(accounting.epsilon(first, **given), rel=1e-4)


def test_p25_dp_ftrl_is_calibrated_with_them():
  given = dict(
    epsilon=2.0, delta=_DELTA, sampler=_CYCLIC, num_steps=20, l2_clip_norm=0.1,
    normalize_by=100, neighboring_relation=_ZERO,
    noise_shape=NoiseShape(correlation=_BANDS),
  )  # fmt: skip
  plan = Plan.calibrated(statistics=_statistics(_ZERO), **given)
  assert 1.99 < plan.epsilon() <= 2.0
  mu = lambda plan: (2 * _COLUMN) ** 0.5 / plan.noise_multiplier
  alone = Plan.calibrated(**given)
  assert mu(plan) ** 2 + 2 / 8**2 == pytest.approx(mu(alone) ** 2, rel=1e-3)


def test_a_users_rows_have_no_statistics():
  sampler = sampling.BoundedContributionSampler(0.1, _N + 1, max_contribution=2)
  with refuses("sampler"):
    _plan(sampler)
  with refuses("unit"):
    _plan(_POISSON, unit="user")


def test_statistics_of_another_relation_are_refused():
  with refuses("neighboring_relation"):
    _plan(_POISSON, statistics=_statistics(_REPLACE))


def test_what_is_no_such_mechanism_is_one_line():
  with refuses("statistics"):
    _plan(_POISSON, statistics=True)


def test_a_plan_without_a_proof_stays_without_one():
  shuffled = sampling.ShuffledSampler(batch_size=100)
  assert not _plan(shuffled).is_private
  assert not _plan(_POISSON, noise_multiplier=0.0).is_private


class _Cheap(mechanisms.ChannelStatistics):
  """Of somebody else, who says that they cost next to nothing."""

  def event(self, neighboring_relation=_ADD):
    return dpa.GaussianDpEvent(1e6)


def test_statistics_of_somebody_elses_are_claimed_not_proved():
  theirs = _Cheap(noise_multiplier=8.0, clip_norms=(1.0, 1.0), normalize_by=_N)
  assert not _plan(_POISSON).assumptions
  plan = _plan(_POISSON, statistics=theirs)
  assert plan.assumptions == ("_Cheap: its event is its author's word",)
  assert guarantee.of_plan(plan, plan.accountant).kind == "claimed"


class _OwnShape(NoiseShape):
  """Says that its noise, which is white, is worth more."""

  strategy = property(lambda self: correlated.Independent())


class _OwnClip(Clip):
  """Says what it bounds."""

  l2_bound = property(lambda self: 1e-9)


@pytest.mark.cases(long=[1])
@pytest.mark.parametrize(
  "given", [{"noise_shape": _OwnShape()}, {"l2_clip_norm": _OwnClip(1.0)}]
)
def test_a_shape_and_a_clip_of_somebody_elses_are_claimed_not_proved(given):
  plan = _plan(_POISSON, statistics=None, **given)
  (name,) = (type(part).__name__ for part in given.values())
  assert plan.assumptions == (f"{name}: its event is its author's word",)
  assert guarantee.of_plan(plan, plan.accountant).kind == "claimed"

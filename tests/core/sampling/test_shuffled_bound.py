"""What a shuffled epoch costs: an upper bound, held against exact divergences."""

import itertools
import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import stats

from dpjax import accounting, sampling
from tests.refuses import refuses


def _events(sampler, steps, z=2.0):
  inner = dpa.GaussianDpEvent(z)
  return dpa.ComposedDpEvent([sampler.event_at(step, inner) for step in range(steps)])


def _densities(values, batch_size, z, y):
  """Density of the epoch's noisy sums [y, y], over all permutations of the data."""
  batches = len(values) // batch_size
  assert batches == 2
  total = np.zeros((y.size, y.size))
  orders = list(itertools.permutations(values))
  for order in orders:
    sums = [sum(order[b * batch_size : (b + 1) * batch_size]) for b in range(batches)]
    total += np.outer(*(stats.norm.pdf(y, mean, z) for mean in sums))
  return total / len(orders)


@pytest.mark.cases(long=["replace_one-1.0--1.0-others0", "replace_special-1.0-0.0-others0"])
@pytest.mark.parametrize("others", [(1.0, 1.0, 1.0), (-1.0, -1.0, -1.0), (1.0, -1.0, 1.0)])
@pytest.mark.parametrize(
  ("relation", "mine", "theirs"),
  [("replace_one", 1.0, -1.0), ("replace_special", 1.0, 0.0)],
)
def test_an_epoch_is_never_below_its_exact_divergence(others, relation, mine, theirs):
  z = 0.8
  y = np.linspace(-9, 9, 500)
  here = _densities((*others, mine), 2, z, y)
  there = _densities((*others, theirs), 2, z, y)
  sampler = sampling.ShuffledSampler(batch_size=2, num_examples=4)
  event = _events(sampler, 2, z)
  for eps in (0.0, 0.5, 1.5):
    claimed = accounting.delta(event, epsilon=eps, neighboring_relation=relation)
    for p, q in ((here, there), (there, here)):
      exact = np.maximum(p - math.exp(eps) * q, 0).sum() * (y[1] - y[0]) ** 2
      assert exact <= claimed + 1e-6


def test_p13_charged_as_poisson_a_shuffled_epoch_would_be_a_false_promise():
  """Two batches, the others all at -1: exactly, against a Poisson sample at rate 1/2."""
  z, y = 0.8, np.linspace(-9, 9, 500)
  here = _densities((-1.0, -1.0, -1.0, 1.0), 2, z, y)
  there = _densities((-1.0, -1.0, -1.0, 0.0), 2, z, y)
  step = accounting.poisson_sampled_event(accounting.gaussian_event(z), sampling_prob=0.5)
  poisson = accounting.compose(step, 2)
  eps = 3.0
  exact = max(
    np.maximum(p - math.exp(eps) * q, 0).sum() * (y[1] - y[0]) ** 2
    for p, q in ((here, there), (there, here))
  )
  assert exact > 1.02 * accounting.delta(poisson, epsilon=eps)


def test_an_unfinished_epoch_costs_a_whole_one_and_the_remainder_is_dropped():
  sampler = sampling.ShuffledSampler(batch_size=3, num_examples=11)  # 3 steps an epoch
  assert sampler.steps_per_epoch == 3
  cost = lambda steps: accounting.epsilon(
    _events(sampler, steps), delta=1e-5, neighboring_relation="replace_special"
  )
  whole = [
    accounting.epsilon(dpa.GaussianDpEvent(2.0 / math.sqrt(e)), delta=1e-5) for e in (1, 2)
  ]
  np.testing.assert_allclose([cost(1), cost(2), cost(3)], whole[0], rtol=1e-9)
  np.testing.assert_allclose([cost(4), cost(6)], whole[1], rtol=1e-9)
  replaced = accounting.epsilon(
    _events(sampler, 3), delta=1e-5, neighboring_relation="replace_one"
  )
  assert replaced == pytest.approx(accounting.epsilon(dpa.GaussianDpEvent(1.0), delta=1e-5))
  alone = accounting.compose(sampler.event(dpa.GaussianDpEvent(2.0)), 3)
  options = {"delta": 1e-5, "neighboring_relation": "replace_special"}
  assert accounting.epsilon(alone, **options) > cost(3)  # step by step is true, but loose


def test_the_sampler_does_what_the_bound_assumes():
  """Within an epoch no example comes twice, and who comes when depends on no data."""
  sampler = sampling.ShuffledSampler(batch_size=3, num_examples=11)
  for epoch in range(20):
    drawn = [sampler.draw(11, seed=5, step=3 * epoch + t) for t in range(3)]
    assert np.unique(np.concatenate(drawn)).size == 9


def test_without_a_public_size_there_is_no_event():
  sampler = sampling.ShuffledSampler(batch_size=3)
  assert sampler.proved_under == () and sampler.event(dpa.GaussianDpEvent(1.0)) is None
  assert sampler.event_at(0, dpa.GaussianDpEvent(1.0)) is None
  with refuses("num_examples", value=None):
    _ = sampler.steps_per_epoch
  assert "add_or_remove_one" not in sampling.ShuffledSampler.relations


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: sampling.ShuffledSampler(10, 9), "batch_size"),
    (lambda: sampling.ShuffledSampler(3, 9).draw(10, seed=0, step=0), "num_examples"),
    (lambda: sampling.ShuffledSampler(3, 9).event_at(-1, None), "step"),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field):
    make()

"""k out of t steps: never below every set written out; the sampler draws all sets alike."""

import concurrent.futures
import itertools
import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import special

import dpjax
from dpjax import accounting, sampling
from dpjax.accounting.epsilon import delta_curve, zcdp
from dpjax.accounting.event_kinds import elements
from dpjax.accounting.event_kinds.kind import event_from_json, event_to_json
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from tests import pages
from tests.refuses import refuses


def _event(steps, selected, z=1.0):
  noise = accounting.gaussian_event(z)
  return accounting.k_out_of_t_event(noise, num_steps=steps, num_selected=selected)


def _divergences(sets, z, epsilon, points=181):
  """Hockey-stick divergences of both directions, every set of steps written out.

  The last step is integrated in closed form: the ratio is affine in its lognormal. The others by
  the trapezoid rule, in float64.
  """
  steps = 1 + max(max(chosen) for chosen in sets)
  shift = 1 / z
  grid = np.linspace(-9, 9, points)
  weight = np.exp(-(grid**2) / 2)
  weight /= weight.sum()
  ratio = np.exp(shift * grid - shift**2 / 2)
  axes = np.meshgrid(*[ratio] * (steps - 1), indexing="ij")
  mass = _product(np.meshgrid(*[weight] * (steps - 1), indexing="ij"))
  level = np.zeros_like(mass)
  slope = np.zeros_like(mass)
  for chosen in sets:
    term = _product([axes[i] for i in chosen if i < steps - 1], mass)
    if steps - 1 in chosen:
      slope += term / len(sets)
    else:
      level += term / len(sets)

  def over(limit):
    """E (level + slope X - limit)_+ over the last lognormal X of mean 1."""
    short = np.maximum(limit - level, 0)
    with np.errstate(divide="ignore"):
      at = np.log(short / slope) / shift + shift / 2
    return slope * special.ndtr(shift - at) + (level - limit) * special.ndtr(-at)

  bound = math.exp(epsilon)
  removed = (mass * over(bound)).sum()
  # E (1 - a L)_+ = a E (1 / a - L)_+ = a (E (L - 1 / a)_+ + 1 / a - 1), as E L = 1.
  added = 1 - bound + bound * (mass * over(1 / bound)).sum()
  return removed, added


def _product(arrays, like=None):
  total = np.ones_like(like if like is not None else arrays[0])
  for array in arrays:
    total = total * array
  return total


def _all_sets(steps, selected):
  return list(itertools.combinations(range(steps), selected))


@pytest.mark.parametrize(
  "steps, selected, z",
  [
    (4, 3, 1.5),
    pytest.param(3, 2, 0.8, marks=pytest.mark.long),
  ],
)
def test_delta_is_at_least_that_of_every_set_written_out(steps, selected, z):
  points = 181 if steps == 3 else 61
  epsilons = [0.0, 0.5, 1.5]
  deltas = delta_curve(_event(steps, selected, z), epsilons)
  for epsilon, found in zip(epsilons, deltas, strict=True):
    exact = _divergences(_all_sets(steps, selected), z, epsilon, points)
    assert max(exact) * (1 - 1e-6) <= found <= 2.5 * max(exact) + 1e-3
    # The oracle itself is no empty number: all steps together are one Gaussian of z / sqrt(t).
    whole = _divergences(_all_sets(steps, steps), z, epsilon, points)
    mu = steps**0.5 / z
    gaussian = special.ndtr(mu / 2 - epsilon / mu)
    gaussian -= math.exp(epsilon) * special.ndtr(-mu / 2 - epsilon / mu)
    assert whole == pytest.approx((gaussian, gaussian), rel=1e-3, abs=1e-6)


def _simulated(ratios, selected, epsilon):
  """Monte Carlo of both divergences from lognormals [samples, steps] without the record, each
  with three standard errors: (removed - 3 s, added - 3 s)."""
  # The mean over all sets is an elementary symmetric polynomial, by the usual recursion.
  sums = np.zeros((selected + 1, len(ratios)))
  sums[0] = 1
  for step in ratios.T:
    sums[1:] += sums[:-1] * step
  ratio = sums[selected] / math.comb(ratios.shape[1], selected)
  bounds = []
  for terms in (ratio - math.exp(epsilon), 1 - math.exp(epsilon) * ratio):
    lost = np.maximum(terms, 0)
    bounds.append(lost.mean() - 3 * lost.std() / math.sqrt(len(lost)))
  return bounds


@pytest.mark.slow
def test_a_simulated_run_loses_no_more_and_tells_fewer_steps():
  """Twelve steps, of which nobody could write out all sets."""
  normals = np.random.default_rng(4).normal(size=(60_000, 12))
  z = 2.0
  ratios = np.exp(normals / z - 1 / (2 * z**2))
  for epsilon in (0.2, 0.6):
    seen = _simulated(ratios, 5, epsilon)
    (accounted,) = delta_curve(_event(12, 5, z), [epsilon])
    assert max(seen) <= accounted <= 1.2 * max(seen) + 2e-3
    (of_fewer,) = delta_curve(_event(12, 4, z), [epsilon])
    assert of_fewer < max(seen)


def test_blocks_of_any_size_are_what_the_proof_says():
  """The mean over random orders of one step of each block is the mean over all sets, and each
  single order is further from 1."""
  sets = _all_sets(3, 2)
  one_order = [(0, 2), (1, 2)]  # blocks {0, 1} and {2}
  epsilons = [0.0, 0.7]
  accounted = delta_curve(_event(3, 2), epsilons)
  for epsilon, found in zip(epsilons, accounted, strict=True):
    mixed = _divergences(sets, 1.0, epsilon)
    alone = _divergences(one_order, 1.0, epsilon)
    assert alone[0] > mixed[0] and alone[1] > mixed[1]
    assert max(alone) * (1 - 1e-6) <= found <= 1.01 * max(alone)


def test_k_equal_to_one_is_random_allocation_exactly():
  noise = accounting.gaussian_event(2.0)
  once = random_allocation_event(noise, num_steps=6)
  assert _event(6, 1, 2.0) == once
  ours = sampling.KOutOfTSampler(steps_per_pass=6, num_selected=1, capacity=50)
  theirs = sampling.RandomAllocationSampler(steps_per_pass=6, capacity=50)
  for step in range(12):
    np.testing.assert_array_equal(
      ours.draw(40, seed=3, step=step), theirs.draw(40, seed=3, step=step)
    )
    assert ours.event_at(step, noise) == theirs.event_at(step, noise)


def test_it_is_accounted_as_passes_of_unequal_length():
  noise = accounting.gaussian_event(2.0)
  parts = [
    accounting.compose(random_allocation_event(noise, num_steps=size), times)
    for size, times in ((3, 2), (4, 1))
  ]
  # The reduction stands before the choice of the accountant, so one suffices.
  for relation in ("add_or_remove_one", "replace_special", "replace_one"):
    counting = {"delta": 1e-4, "neighboring_relation": relation, "accountant": "rdp"}
    passes = accounting.epsilon(dpa.ComposedDpEvent(parts), **counting)
    assert accounting.epsilon(_event(10, 3, 2.0), **counting) == passes
  # All steps: no amplification is left.
  every = accounting.epsilon(_event(4, 4, 4.0), delta=1e-5)
  assert every == pytest.approx(
    accounting.epsilon(dpa.GaussianDpEvent(2.0), delta=1e-5), rel=1e-3
  )
  assert zcdp(_event(10, 3, 2.0)) == pytest.approx(3 / 8)
  best = repeat_and_select_event(_event(10, 3, 2.0), mean_trials=2.0, shape=1.0)
  assert accounting.epsilon(best, delta=1e-4, accountant="rdp") > accounting.epsilon(
    _event(10, 3, 2.0), delta=1e-4, accountant="rdp"
  )


def test_every_set_is_equally_likely_and_examples_are_independent():
  steps, selected, n = 5, 2, 20_000
  sampler = sampling.KOutOfTSampler(steps, selected, capacity=n)
  joined = np.zeros((2, n, steps), bool)
  for turn in range(2):
    for step in range(steps):
      joined[turn, sampler.draw(n, seed=1, step=turn * steps + step), step] = True
  assert (joined.sum(axis=2) == selected).all()
  names = joined @ 2 ** np.arange(steps)
  _, places = np.unique(names, return_inverse=True)
  places = places.reshape(2, n)
  count = math.comb(steps, selected)
  assert places.max() == count - 1
  for first, second in [(places[0], places[1]), (places[0, 1:], places[0, :-1])]:
    table = np.histogram2d(first, second, bins=count)[0]
    expected = len(first) / count**2
    chi = ((table - expected) ** 2 / expected).sum()
    assert (
      50 < chi < 165
    )  # 99 degrees of freedom; a law of 1.2 : 1 has several hundred more
  # The same step again, and out of order, is the same draw.
  np.testing.assert_array_equal(
    sampler.draw(n, seed=1, step=3), np.flatnonzero(joined[0, :, 3])
  )
  assert not np.array_equal(
    sampler.draw(n, seed=2, step=3), sampler.draw(n, seed=1, step=3)
  )


def test_steps_in_any_order_and_of_two_threads_are_the_same_draws():
  sampler = sampling.KOutOfTSampler(steps_per_pass=40, num_selected=3, capacity=300)
  alone = [sampler.draw(300, seed=5, step=step) for step in range(80)]
  alone[7][:] = 0  # the caller's own array
  backwards = [sampler.draw(300, seed=5, step=step) for step in reversed(range(80))][::-1]
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    both = list(
      pool.map(lambda step: sampler.draw(300, seed=5, step=step // 2), range(160))
    )
  for step in range(80):
    for drawn in both[2 * step : 2 * step + 2]:
      np.testing.assert_array_equal(drawn, backwards[step])
    assert step == 7 or np.array_equal(alone[step], backwards[step])
  # A pass far longer than its run costs no more than the steps that are drawn.
  endless = sampling.KOutOfTSampler(
    steps_per_pass=10**12, num_selected=10**11, capacity=300
  )
  assert 5 < endless.draw(300, seed=0, step=3).size < 80


def test_a_plan_pays_for_a_pass_at_its_first_step_and_says_so():
  plan = dpjax.Plan(
    sampler=dpjax.KOutOfTSampler(steps_per_pass=10, num_selected=3, capacity=64),
    noise_multiplier=2.0, l2_clip_norm=1.0, normalize_by=30.0, num_steps=15, delta=1e-3,
    accountant="rdp",
  )  # fmt: skip
  assert elements.parts(plan.event()) == {_event(10, 3, 2.0): 2}
  assert elements.parts(plan.event(1)) == elements.parts(plan.event(10))
  said = accounting.privacy_statement(plan.event(), delta=1e-3, epsilons={"rdp": 1.0})
  assert "in 3 steps of the pass, drawn uniformly" in " ".join(said.split())
  event = plan.step_event(0)
  assert event_from_json(event_to_json(event)) == event


def _rows_of_page():
  rows = pages.tables().entries("accounting/k_out_of_t.csv")
  return [[float(cell.replace(",", "")) for cell in row.values()] for row in rows]


@pytest.mark.parametrize("row", _rows_of_page()[-1:])
def test_the_table_of_the_page_is_that_of_the_library(row):
  _check_row(row)


@pytest.mark.long
@pytest.mark.parametrize("row", _rows_of_page()[:-1])
def test_all_rows_of_the_page_are_those_of_the_library(row):
  _check_row(row)


def _check_row(row):
  steps, selected = int(row[0]), int(row[1])
  noise = accounting.gaussian_event(1.0)
  sampled = accounting.poisson_sampled_event(noise, sampling_prob=selected / steps)
  runs = (
    _event(steps, selected),
    accounting.compose(sampled, steps),
    accounting.compose(noise, selected),
  )
  for told, event in zip(row[2:], runs, strict=True):
    # Rounded up, as every epsilon.
    assert 0 <= told - accounting.epsilon(event, delta=1e-5) < 1.001e-3


@pytest.mark.parametrize(
  "make, field",
  [
    (lambda: _event(3, 4), "num_selected"),
    (lambda: _event(3, 0), "num_selected"),
    (lambda: _event(0, 1), "num_steps"),
    (lambda: sampling.KOutOfTSampler(3, 4, 8), "num_selected"),
    (lambda: sampling.KOutOfTSampler(3, 2, 1).draw(99, seed=0, step=0), "capacity"),
    (
      lambda: accounting.k_out_of_t_event(
        dpa.LaplaceDpEvent(1.0), num_steps=3, num_selected=2
      ),
      "event",
    ),
  ],
)
def test_numbers_out_of_their_range_are_one_line(make, field):
  with refuses(field):
    make()

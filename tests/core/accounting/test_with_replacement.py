"""Batches with replacement against every sequence of draws written out, under both relations."""

import collections
import functools
import itertools
import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import dpjax
from dpjax import accounting, data, sampling
from dpjax.accounting import exchanged_copies
from dpjax.accounting.epsilon import delta_curve
from dpjax.accounting.event_kinds.kind import event_from_json, event_to_json
from dpjax.accounting.exchanged_copies import copies, copies_profile
from dpjax.accounting.mixture_pld import removed_deltas
from dpjax.validate import UserError
from tests.core.accounting.quadrature import COARSE, EPSILONS, GRID, at_ratios, deltas
from tests.refuses import refuses

_ADD = "add_or_remove_one"
_REPLACE = "replace_one"


def _density(contributions, batch_size, z):
  """Density of the noisy sum over b draws: every sequence of draws, one by one."""
  sums = collections.Counter(
    round(sum(draws), 9) for draws in itertools.product(contributions, repeat=batch_size)
  )
  total = sum(sums.values())
  return sum(
    times / total * stats.norm.pdf(GRID, place, z) for place, times in sums.items()
  )


def _event(n, b, z):
  noise = accounting.gaussian_event(z)
  return accounting.with_replacement_event(noise, num_examples=n, batch_size=b)


def _proved(n, b, z, relation):
  return delta_curve(_event(n, b, z), EPSILONS, neighboring_relation=relation)


# Others' gradients, those of the record and of its successor, draws, noise.
_DATA = [
  ((-1.0, -1.0, -1.0), 1.0, -1.0, 2, 1.0),
  ((-1.0, -1.0), 1.0, 0.0, 3, 1.5),
  ((0.3, -0.8, 1.0, 0.2), -1.0, 0.9, 3, 0.8),
  ((0.0, 0.0), 1.0, -1.0, 3, 2.0),
  ((1.0, -1.0, 0.5), 0.7, -0.2, 4, 0.7),
]


@pytest.mark.parametrize("others, x, y, b, z", _DATA)
def test_no_two_neighbours_are_farther_apart_than_proved(others, x, y, b, z):
  n = len(others) + 1
  joint = [x, *others]
  exchanged = deltas(_density(joint, b, z), _density([y, *others], b, z))
  # The profile is read without a grid of losses, and covers a joining record as well.
  profile = copies_profile(EPSILONS, num_examples=n, batch_size=b, noise_multiplier=z)
  joined = deltas(_density(joint, b, z), _density(others, b, z))
  assert (exchanged <= profile + COARSE).all()
  assert (joined <= profile + COARSE).all()


def test_a_joining_record_against_a_crowd_reaches_the_bound():
  n, b, z = 4, 3, 2.0
  crowd = [-1.0] * (n - 1)
  seen = deltas(_density([1.0, *crowd], b, z), _density(crowd, b, z))
  bound = _proved(n, b, z, _ADD)
  assert (seen <= bound + COARSE).all()
  np.testing.assert_allclose(seen, bound, rtol=2e-3, atol=COARSE)
  # A batch without replacement of the same size claims less than is seen: copies count.
  fixed = accounting.fixed_size_event(
    accounting.gaussian_event(z), num_examples=n, batch_size=b
  )
  assert delta_curve(fixed, [2.5])[0] < seen[-1]
  # So would one copy at most, with the chance to be in the batch.
  once = accounting.poisson_sampled_event(
    accounting.gaussian_event(z / 2), sampling_prob=1 - (1 - 1 / n) ** b
  )
  assert (delta_curve(once, EPSILONS)[2:] < seen[2:]).all()


def test_an_exchanged_record_is_near_the_bound_and_above_a_joining_one():
  n, b, z = 4, 2, 1.5
  crowd = [-1.0] * (n - 1)
  seen = deltas(_density([1.0, *crowd], b, z), _density([-1.0, *crowd], b, z))
  bound = _proved(n, b, z, _REPLACE)
  assert (seen <= bound + COARSE).all() and (bound <= 1.25 * seen + 2e-3).all()
  np.testing.assert_allclose(
    bound,
    copies_profile(EPSILONS, num_examples=n, batch_size=b, noise_multiplier=z),
    rtol=1e-3,
    atol=1e-6,
  )
  joined = deltas(_density([1.0, *crowd], b, z), _density(crowd, b, z))
  assert (bound >= joined - COARSE).all()


def test_the_profile_is_convex_falling_and_that_of_a_pair():
  for n, b, z in ((1000, 20, 0.7), (10, 10, 2.0), (1, 1, 1.0)):
    ratios = np.linspace(0.01, 5, 4000)
    half = functools.partial(
      copies_profile, num_examples=n, batch_size=b, noise_multiplier=z
    )
    values = at_ratios(half, ratios)
    slopes = np.diff(values) / np.diff(ratios)
    assert (slopes <= 1e-12).all() and (np.diff(slopes) >= -1e-8).all()
    assert (values >= np.maximum(1 - ratios, 0) - 1e-12).all() and (values <= 1).all()


def test_copies_are_counted_to_the_last_and_one_draw_is_a_fixed_size_batch():
  numbers, chances, beyond = copies(60_000, 600)
  law = stats.binom(600, 1 / 60_000)
  np.testing.assert_allclose(chances, law.pmf(numbers), rtol=1e-12)
  assert beyond == pytest.approx(law.sf(numbers[-1]), rel=1e-9) and beyond < 1e-20
  fixed = accounting.fixed_size_event(
    accounting.gaussian_event(2.0), num_examples=9, batch_size=1
  )
  once = delta_curve(fixed, EPSILONS, neighboring_relation=_REPLACE)
  np.testing.assert_allclose(_proved(9, 1, 2.0, _REPLACE), once, rtol=1e-4, atol=1e-9)


def test_more_records_cost_no_more():
  curves = [
    copies_profile(EPSILONS, num_examples=n, batch_size=4, noise_multiplier=1.0)
    for n in (8, 12, 1000)
  ]
  assert (np.diff(curves, axis=0) < 0).all()


def test_draws_are_uniform_independent_and_repeat():
  n, b, steps = 6, 4, 4000
  sampler = sampling.WithReplacementSampler(b, n)
  counts = np.array([
    np.bincount(sampler.draw(n, seed=1, step=step), minlength=n) for step in range(steps)
  ])  # fmt: skip
  assert (counts.sum(axis=1) == b).all()
  law = stats.binom(b, 1 / n)
  for member in range(n):
    seen = np.bincount(counts[:, member], minlength=b + 1)
    expected = steps * law.pmf(np.arange(b + 1))
    seen = np.append(seen[:3], seen[3:].sum())
    expected = np.append(expected[:3], expected[3:].sum())
    # 3 degrees of freedom; draws without replacement have no second copy: over 500.
    assert ((seen - expected) ** 2 / expected).sum() < 25
  # Copies of two members: covariance -b / n^2.
  covariance = np.cov(counts[:, 0], counts[:, 1])[0, 1]
  assert covariance == pytest.approx(-b / n**2, abs=0.04)
  assert np.corrcoef(counts[1:, 0], counts[:-1, 0])[0, 1] < 0.06
  np.testing.assert_array_equal(
    sampler.draw(n, seed=1, step=3), sampler.draw(n, seed=1, step=3)
  )


def test_a_plan_reads_every_copy_and_says_what_it_assumes():
  plan = dpjax.Plan(
    sampler=dpjax.WithReplacementSampler(batch_size=6, num_examples=8), noise_multiplier=4.0,
    l2_clip_norm=1.0, normalize_by=6.0, num_steps=2, delta=1e-3,
  )  # fmt: skip
  (first, _) = plan.batches(np.arange(8.0), rng=2)
  drawn = plan.sampler.draw(8, seed=2, step=0)
  assert len(set(drawn.tolist())) < 6
  np.testing.assert_array_equal(first.examples, drawn.astype(float))
  assert first.mask.all() and plan.neighboring_relation == _REPLACE
  said = accounting.privacy_statement(plan.event(), delta=1e-3, epsilons={"pld": 1.0})
  assert "every copy clipped by itself" in " ".join(said.split())
  event = plan.step_event()
  assert event_from_json(event_to_json(event)) == event


@pytest.mark.slow
def test_a_step_in_slices_from_files_sums_every_copy_once():
  """Against a loop over the draws, by the plan's own clipping, accumulation and transform."""

  class Source:
    def __len__(self):
      return 8

    def read(self, places):
      assert (np.diff(places) > 0).all()  # each row is read once, and copied afterwards
      return np.float32(places[:, None] + 1)

  plan = dpjax.Plan(
    sampler=dpjax.WithReplacementSampler(batch_size=7, num_examples=8), noise_multiplier=1e-6,
    l2_clip_norm=2.5, normalize_by=1.0, num_steps=4, delta=1e-3, slices=3,
  )  # fmt: skip
  in_files = data.in_files(Source(), np.zeros(8, np.int32), num_classes=2)
  tx = plan.accumulated(optax.chain(plan.transform(jax.random.key(0)), optax.sgd(1.0)))
  clipped_grad = plan.clipped_grad(lambda w, example: jnp.vdot(w, example.x))
  weights = jnp.zeros(1)
  state = tx.init(weights)
  for batch in plan.batches(in_files, rng=4):
    grads = clipped_grad(weights, batch.examples, mask=batch.mask)
    updates, state = tx.update(grads, state, weights)
    weights = optax.apply_updates(weights, updates)
  draws = [plan.sampler.draw(8, seed=4, step=step) for step in range(4)]
  assert sum(len(set(drawn.tolist())) < 6 for drawn in draws) > 1
  expected = -sum(min(place + 1, 2.5) for drawn in draws for place in drawn.tolist())
  assert float(weights[0]) == pytest.approx(expected, rel=1e-4)


def test_copies_are_allowed_to_dpjaxs_own_sampler_alone():
  class Mine(sampling.WithReplacementSampler):
    pass

  numbers = {"batch_size": 6, "num_examples": 8}
  plan = dpjax.Plan(
    sampler=Mine(**numbers), noise_multiplier=4.0, l2_clip_norm=1.0, normalize_by=6.0,
    num_steps=2, delta=1e-3,
  )  # fmt: skip
  assert plan.assumptions
  with pytest.raises(UserError, match="must return a vector of distinct integers"):
    next(plan.batches(np.arange(8.0), rng=2))


def _sampler(batch_size=4, num_examples=9, **options):
  return sampling.WithReplacementSampler(batch_size, num_examples, **options)


@pytest.mark.parametrize(
  "make, field",
  [
    (lambda: _event(3, 4, 1.0), "batch_size"),
    (lambda: _event(0, 1, 1.0), "num_examples"),
    (lambda: _sampler(10), "batch_size"),
    (lambda: _sampler().draw(8, seed=0, step=0), "num_examples"),
    (lambda: _sampler(size_is_public=False).draw(7, seed=0, step=0), "num_examples"),
    (
      lambda: accounting.epsilon(
        _event(9, 4, 1.0), delta=1e-5, neighboring_relation="replace_special"
      ),
      "event",
    ),
    (
      lambda: accounting.epsilon(_event(9, 4, 1.0), delta=1e-5, accountant="rdp"),
      "event",
    ),
    (
      lambda: accounting.epsilon(
        accounting.with_replacement_event(
          dpa.LaplaceDpEvent(1.0), num_examples=9, batch_size=2
        ),
        delta=1e-5,
      ),
      "event",
    ),
  ],
)  # fmt: skip
def test_what_is_not_proved_is_one_line(make, field):
  with refuses(field):
    make()


def test_extreme_noise_gives_a_bound():
  for relation in (_ADD, _REPLACE):
    by = {"delta": 1e-5, "neighboring_relation": relation}
    assert accounting.epsilon(_event(9, 4, 1e-3), **by) > 100
    assert accounting.epsilon(_event(9, 4, 1e-120), **by) == math.inf
    assert 0 <= accounting.epsilon(_event(10**12, 4, 1e4), **by) < 1e-3


def test_large_batches_have_a_bound_under_both_relations():
  noise = accounting.gaussian_event(8.0)
  event = accounting.with_replacement_event(noise, num_examples=10**6, batch_size=1000)
  for relation in (_ADD, _REPLACE):
    assert 0 < accounting.delta(event, epsilon=0.1, neighboring_relation=relation) < 1e-3


@pytest.mark.parametrize(
  "n, b, z, steps, relation, delta, before",
  [
    # Epsilons of the slower search for thresholds, which this accounting used before.
    (60_000, 600, 1.0, 1000, _REPLACE, 1e-5, 18.48023494962465),
    (1000, 1000, 8.0, 100, _REPLACE, 1e-6, 19.93821802529424),
    (10, 4, 2.0, 3, _ADD, 1e-4, 7.398479216860903),
    (9, 4, 0.1, 1, _REPLACE, 1e-5, 3314.035281951219),
  ],
)
def test_epsilon_is_what_it_was_at_the_same_noise(n, b, z, steps, relation, delta, before):
  event = accounting.compose(_event(n, b, z), steps)
  now = accounting.epsilon(event, delta=delta, neighboring_relation=relation)
  # Rounding of masses on the finest grids scatters by 1e-7.
  assert now == pytest.approx(before, rel=1e-7)


def test_a_long_grid_has_the_deltas_of_single_losses():
  numbers, chances, _ = copies(5000, 50)
  pair = {
    "chances": np.append(1 - chances.sum(), chances),
    "shifts": np.append(0.0, 2 * numbers / 1.5),
  }
  losses = np.linspace(0.0, 12.0, 3000)
  together = removed_deltas(losses, **pair)
  for place in range(0, 3000, 251):
    alone = removed_deltas(losses[place : place + 1], **pair)
    np.testing.assert_allclose(together[place], alone, rtol=1e-9, atol=1e-18)


@pytest.mark.slow
def test_noise_is_found_by_few_costs_on_the_fine_grid(monkeypatch):
  points = []

  def counted(epsilons, **numbers):
    points.append(len(epsilons))
    return copies_profile(epsilons, **numbers)

  monkeypatch.setattr(exchanged_copies, "copies_profile", counted)
  target = {"epsilon": 1.0, "delta": 1e-5, "neighboring_relation": _REPLACE}
  noise = accounting.calibrate_noise_multiplier(
    lambda z: accounting.compose(_event(1000, 50, z), 100), **target
  )
  # A search from 1 on fine grids alone asks for 1.5 million deltas.
  assert sum(points) < 500_000
  event = accounting.compose(_event(1000, 50, noise), 100)
  cost = accounting.epsilon(event, delta=1e-5, neighboring_relation=_REPLACE)
  assert 1 - 1e-4 <= cost <= 1

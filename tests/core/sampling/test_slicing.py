"""Slices of one draw: nothing lost, nothing twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpjax
from dpjax.sampling import batches as batches_lib
from dpjax.sampling.batches import rows_of_slice
from dpjax.validate import UserError
from tests.refuses import refuses


@given(slots=st.integers(1, 60), count=st.integers(1, 9), share=st.floats(1e-9, 1))
def test_p15_every_drawn_example_is_in_exactly_one_slice(slots, count, share):
  sampler = dpjax.PoissonSampler(sampling_prob=share, capacity=slots)
  draws = batches_lib.Draws(1, 0)
  parts = list(
    batches_lib.batches(
      sampler, lambda rows: rows, slots, draws=draws, steps=range(2, 3), count=count
    )
  )
  assert [int(part.step[0]) for part in parts] == list(range(2 * count, 3 * count))
  assert {len(part.examples) for part in parts} == {rows_of_slice(slots, count)}
  taken = np.concatenate([part.examples[part.mask] for part in parts])
  np.testing.assert_array_equal(taken, sampler.draw(slots, seed=1, step=2))


class _Ids:
  """Data whose examples are their own indices."""

  def __len__(self):
    return 500

  def __getitem__(self, indices):
    return np.asarray(indices)


def test_p15_in_a_plans_trace_no_example_appears_twice_in_a_logical_step():
  options = dict(noise_multiplier=1.0, l2_clip_norm=1.0, normalize_by=100, delta=1e-5)
  sampler = dpjax.PoissonSampler(sampling_prob=0.2, capacity=200)
  whole = dpjax.Plan(sampler=sampler, num_steps=6, **options)
  sliced = dpjax.Plan(sampler=sampler, num_steps=6, slices=4, **options)
  batches = list(sliced.batches(_Ids(), rng=1))
  assert len(batches) == 6 * 4
  for step, logical in enumerate(whole.batches(_Ids(), rng=1)):
    parts = batches[4 * step : 4 * step + 4]
    taken = np.concatenate([part.examples[part.mask] for part in parts])
    assert np.bincount(taken).max() == 1
    np.testing.assert_array_equal(np.sort(taken), logical.examples[logical.mask])
  # A run resumes also within a step, as its state does.
  for start in (16, 18, 23, 24):
    resumed = list(sliced.batches(_Ids(), rng=1, start=start))
    assert len(resumed) == 24 - start
    for one, other in zip(resumed, batches[start:]):
      np.testing.assert_array_equal(one.examples, other.examples)
  with refuses("start", value=25):
    sliced.batches(_Ids(), rng=1, start=25)
  independent = [next(iter(whole.batches(_Ids(), rng=r))) for r in range(4)]
  drawn_alone = np.concatenate([b.examples[b.mask] for b in independent])
  assert np.bincount(drawn_alone).max() > 1  # what the slices must not be


@pytest.mark.cases(quick=["0"], long=...)
@pytest.mark.parametrize("slices", [0, -1, 1.5, True])
def test_wrong_numbers_of_slices_are_refused(slices):
  with refuses("slices"):
    rows_of_slice(10, slices)


def test_steps_drawn_ahead_are_those_of_single_draws_and_a_users_sampler_is_asked_in_turn():
  sampler = dpjax.sampling.FixedSizeSampler(batch_size=3, num_examples=500)
  many = list(
    batches_lib.batches(
      sampler, lambda rows: rows, 500, draws=batches_lib.Draws(7, 0), steps=range(5, 60)
    )
  )
  assert [int(batch.step[0]) for batch in many] == list(range(5, 60))
  for step, batch in zip(range(5, 60), many):
    alone = sampler.draw(500, seed=7, step=step)
    np.testing.assert_array_equal(batch.examples, alone)
    assert batch.mask.all()

  asked = []

  class Own(dpjax.sampling.FixedSizeSampler):
    def draw(self, num_examples, *, seed, step):
      asked.append(step)
      return super().draw(num_examples, seed=seed, step=step)

  own = Own(batch_size=3, num_examples=500)
  next(
    batches_lib.batches(
      own, lambda rows: rows, 500, draws=batches_lib.Draws(7, 0), steps=range(9)
    )
  )
  assert asked == [0]


def test_a_draw_above_the_capacity_aborts_at_its_own_step():
  # What an abort costs is charged to the steps that ran: none may come from a step after them.
  sampler = dpjax.PoissonSampler(sampling_prob=0.2, capacity=28)

  def overflows(step):
    try:
      sampler.draw(100, seed=3, step=step)
    except UserError:
      return True
    return False

  first = next(step for step in range(400) if overflows(step))
  # It lies within a block of draws, not at its beginning.
  assert first % 16
  draws = batches_lib.Draws(3, 0)
  drawn = batches_lib.batches(
    sampler, lambda rows: rows, 100, draws=draws, steps=range(400)
  )
  taken = [int(next(drawn).step[0]) for _ in range(first)]
  assert taken == list(range(first))
  with refuses("capacity"):
    next(drawn)

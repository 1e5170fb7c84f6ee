"""Who takes part, and which batches a client trains on."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax import data, sampling
from dpjax.federated import LocalWork, cohorts
from dpjax.federated.cohort import bucket, cohort_of
from dpjax.plan import Plan
from tests import plans
from tests.refuses import refuses


def _federation(sizes=(4, 0, 3, 5)):
  ends = np.cumsum(sizes)
  x = np.arange(2.0 * ends[-1]).reshape(-1, 2)
  dataset = data.from_arrays(x, np.zeros(ends[-1], int), num_classes=2)
  rows = np.split(np.arange(ends[-1]), ends[:-1])
  return data.Federation(
    dataset, rows, client_ids=["ann", "bob", "cy", "dee"][: len(sizes)]
  )


_plan = functools.partial(plans.of, num_steps=6, normalize_by=2.0, delta=1e-3)


@given(st.integers(0, 10**6))
def test_a_bucket_is_never_smaller_and_wastes_at_most_a_quarter(n):
  assert n <= bucket(n) <= max(n, 1.25 * n)
  assert bucket(bucket(n)) == bucket(n)


def test_buckets_are_few():
  assert len({bucket(n) for n in range(1, 10_001)}) <= 4 * 12 + 4


@given(
  st.integers(0, 40), st.integers(1, 9) | st.none(), st.integers(1, 3),
  st.integers(1, 50) | st.none(), st.integers(0, 5),
)  # fmt: skip
def test_every_epoch_holds_each_example_once(n, batch_size, epochs, most, seed):
  work = LocalWork(batch_size=batch_size, epochs=epochs, max_examples=most)
  batches = work.rows(n, np.random.default_rng(seed))
  assert len(batches.mask) == work.num_steps(n)
  assert batches.mask.any(axis=1).all()  # no step of padding alone
  per_epoch = np.split(np.arange(len(batches.mask)), epochs) if n else []
  for steps in per_epoch:
    taken = batches.examples[steps][batches.mask[steps]]
    assert len(taken) == len(set(taken.tolist())) == min(n, most or n)


def test_an_emptied_client_is_one_without_examples():
  """Under replace_special a client is exchanged for an empty one, whose message must be zero."""
  federation = _federation()
  present = np.ones(12, bool)
  present[[1, 7, 8, 9, 10, 11]] = False  # a row of ann, all of dee
  emptied = dataclasses.replace(federation.dataset, present=present)
  federation = dataclasses.replace(federation, dataset=emptied)
  cohort = cohort_of(federation, ["ann", "dee"], LocalWork(2), seed=0, round=3)
  assert cohort.num_examples.tolist() == [3, 0]
  ann, dee = cohort.batches
  assert sorted(ann.examples[ann.mask].tolist()) == [0, 2, 3] and not len(dee.mask)


def test_a_client_trains_on_its_own_rows_only():
  federation = _federation()
  cohort = cohort_of(federation, ["dee", "bob", "ann"], LocalWork(2), seed=0, round=3)
  assert cohort.ids.tolist() == [3, 1, 0] and cohort.num_examples.tolist() == [5, 0, 4]
  for place, batches in zip(cohort.ids, cohort.batches):
    assert set(batches.examples[batches.mask].tolist()) == set(federation.indices[place])
  assert cohort.batches[1].mask.shape == (0, 2)


def test_a_clients_order_depends_on_nobody_else():
  federation, work = _federation(), LocalWork(2)
  alone = cohort_of(federation, [3], work, seed=1, round=2).batches[0]
  with_others = cohort_of(federation, [0, 3], work, seed=1, round=2).batches[1]
  np.testing.assert_array_equal(alone.examples, with_others.examples)
  later = cohort_of(federation, [3], work, seed=1, round=3).batches[0]
  assert (alone.examples != later.examples).any()


def test_p46_another_seed_is_another_sequence_of_cohorts():
  draw = lambda seed: [
    c.ids.tolist()
    for c in cohorts(_plan(num_steps=12), _federation(), LocalWork(2), rng=seed)
  ]
  assert draw(0) == draw(0)
  assert draw(0) != draw(1)
  assert len(set(map(tuple, draw(0)))) > 3  # and rounds differ from each other


def test_p16_cohorts_go_on_where_a_run_stopped():
  args = (_plan(), _federation(), LocalWork(2))
  whole = list(cohorts(*args, rng=7))
  rest = list(cohorts(*args, rng=7, start=4))
  assert len(whole) == 6 and len(rest) == 2
  for a, b in zip(whole[4:], rest):
    np.testing.assert_array_equal(a.ids, b.ids)
    for one, other in itertools.zip_longest(a.batches, b.batches):
      np.testing.assert_array_equal(one.examples, other.examples)


def test_p8_a_round_without_clients_is_a_round():
  empty = list(cohorts(_plan(prob=1e-6), _federation(), LocalWork(2), rng=0))
  assert len(empty) == 6 and all(cohort.size == 0 for cohort in empty)


@pytest.mark.parametrize(
  ("clients", "field"),
  [
    ([4], "client"),
    ([-1], "client"),
    (["anne"], "client"),
    ([1, 1], "clients"),
  ],
)
def test_an_unknown_client_is_one_line(clients, field):
  with refuses(field) as caught:
    cohort_of(_federation(), clients, LocalWork(2), seed=0, round=0)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "options", [{"batch_size": 0}, {"epochs": 0}, {"max_examples": 0}, {"epochs": 1.5}]
)
def test_wrong_work_is_named(options):
  ((field, value),) = options.items()
  with refuses(field, value=value):
    LocalWork(**options)


def test_a_capacity_that_would_overflow_is_refused():
  plan = _plan(prob=0.9)
  plan = Plan(
    **{**vars(plan), "sampler": sampling.PoissonSampler(sampling_prob=0.9, capacity=2)}
  )
  with refuses("num_examples"):
    cohorts(plan, _federation(), LocalWork(2), rng=0)

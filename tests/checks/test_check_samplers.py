"""launch.check on truncated Poisson samples and shuffled epochs: sound ones pass, planted
bugs are found."""

import dataclasses

import numpy as np
import pytest

from configs import quickstart
from dpjax import sampling
from dpjax.checks import batches
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.sampling import draws
from tests.checks import second_accountant


def _subject(sampler, relation):
  config = quickstart.get_config()
  changes = {
    "model.name": "linear",
    "model.options": {},
    "data.limit": 400,
    "num_steps": 20,
    "privacy.sampler": {"name": sampler, "capacity": 75}
    if sampler == "truncated_poisson"
    else sampler,
    "privacy.neighboring_relation": relation,
  }
  return of_config.subject(fields.replace_all(config, changes))


@pytest.fixture(scope="module")
def truncated():
  return _subject("truncated_poisson", "replace_special")


@pytest.fixture(scope="module")
def shuffled():
  return _subject("shuffled", "replace_one")


@pytest.mark.long
def test_sound_samplers_pass(truncated, shuffled):
  for subject in (truncated, shuffled):
    assert batches.sampler_law(subject).passed
    assert second_accountant.agrees(subject.plan)


@pytest.mark.long
def test_p12_keeping_the_first_of_a_batch_that_is_too_large_is_found(truncated):
  """Not a random subset: whoever comes late in the data takes part less often."""
  sampler = truncated.plan.sampler
  whole = sampling.PoissonSampler(sampling_prob=sampler.sampling_prob, capacity=400)
  first = lambda n, **at: whole.draw(n, **at)[: sampler.capacity]
  assert not batches.sampler_law(dataclasses.replace(truncated, draw=first)).passed


@pytest.mark.slow
def test_p12_a_batch_that_is_not_cut_is_found(truncated):
  whole = sampling.PoissonSampler(
    sampling_prob=truncated.plan.sampler.sampling_prob, capacity=400
  )
  assert not batches.sampler_law(dataclasses.replace(truncated, draw=whole.draw)).passed


def test_p13_a_fresh_shuffle_at_every_step_is_found(shuffled):
  """Then an example comes back within the epoch, which was charged for one visit."""
  size = shuffled.plan.sampler.batch_size

  def draw(n, *, seed, step):
    return np.sort(draws.generator(seed, step).permutation(n)[:size])

  assert not batches.sampler_law(dataclasses.replace(shuffled, draw=draw)).passed

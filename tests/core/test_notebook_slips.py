"""Slips of notebooks that once gave a late error, a wrong one, or none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import Batch, Example, Plan, data, training
from dpjax.gradients import arguments
from tests.refuses import refuses


def _plan(rows, **options):
  given = dict(batch_size=50, epochs=2, epsilon=2.0, delta=1e-5, l2_clip_norm=1.0)
  return Plan.for_data(rows, **given | options)


def _rows(size):
  labels = np.zeros(size, int)
  return data.from_arrays(np.zeros((size, 2)), labels, num_classes=2, nominal_size=size)


def test_a_choice_of_no_parameter_is_refused_before_a_step():
  params = {"head": jnp.ones(2), "body": jnp.ones(2)}
  loss, tx = training.of_part(
    lambda p, x: jnp.sum(p["head"] * x), optax.sgd(0.1), lambda name: name.startswith("no")
  )
  with refuses("trained"):
    jax.grad(loss)(params, 1.0)
  with refuses("trained"):
    tx.update(params, tx.init(params))


@pytest.mark.slow
def test_a_slice_or_a_number_is_no_data_set():
  part = _rows(100)[:50]
  mask = np.ones(50, bool)
  for wrong in (part, Batch(part, mask), 60_000):
    with refuses("data"):
      _plan(wrong, num_examples=100)
  assert (
    _plan(_rows(100).subset(slice(60)), num_examples=60).sampler.sampling_prob == 50 / 60
  )


@pytest.mark.slow
def test_a_declared_number_that_is_too_small_is_named_and_the_true_one_is_not():
  rows = _rows(3000)
  plan = _plan(rows, num_examples=1000)
  with refuses("num_examples", value=1000) as error:
    next(plan.batches(rows, rng=0))
  assert "3000" not in str(error.value)


def test_labels_in_place_of_a_mask_are_told_apart():
  x = Example(jnp.zeros((3, 2)), jnp.zeros(3, int))
  with refuses("mask.dtype"):
    arguments.checked_mask(x.y, 3)

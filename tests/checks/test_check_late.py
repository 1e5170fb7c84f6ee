"""Bugs that show late, seldom, or only across leaves: launch.check finds them on a small
model and on one of 100,000 parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import quickstart
from dpjax import trees
from dpjax.checks import (
  batches,
  charges,
  influence,
  noise_distributions,
  noise_record,
  whole_step,
)
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.transforms import guard
from dpjax.transforms.inputs import arrays_of
from tests.checks import plants, test_check

_STEPS = 600
_MODELS = {
  "650": {"model.name": "linear", "model.options": {}},
  "100k": {"model.name": "mlp", "model.options": {"features": (1400,)}},
}


def _subject(**changes):
  config = quickstart.get_config()
  base = {"data.limit": 400, "num_steps": _STEPS, "privacy.sampling_prob": 0.1}
  return of_config.subject(fields.replace_all(fields.replace_all(config, base), changes))


@pytest.fixture(scope="module")
def small():
  return _subject(**_MODELS["650"])


@pytest.fixture(scope="module")
def large():
  return _subject(**_MODELS["100k"])


def _with_update(subject, change, init=lambda params: ()):
  """The transform with a state of its own: change(update, memory, step, total)."""

  def transform(key):
    base = subject.transform(key)

    def begin(params):
      return base.init(params), init(params), jnp.int32(0)

    def update(updates, state, params=None, *, mask=None, **_):
      inner, memory, step = state
      out, inner = base.update(updates, inner, params, mask=mask)
      total = getattr(updates, "total", None)
      out, memory = change(out, memory, step, total)
      return out, (inner, memory, step + 1)

    return optax.GradientTransformationExtraArgs(begin, update)

  return dataclasses.replace(subject, transform=transform)


def _scaled(tree, factor):
  return jax.tree.map(lambda leaf: leaf * factor, tree)


# --- noise ------------------------------------------------------------------------------


def noise_fades_late(subject):
  def change(out, memory, step, total):
    return _scaled(out, jnp.where(step < 0.9 * _STEPS, 1.0, 0.8)), memory

  return _with_update(subject, change)


def _again_after(subject, period):
  """The draw of step t + period is that of step t."""

  def transform(key):
    base = subject.transform(key)

    def update(updates, state, params=None, *, mask=None, **_):
      out, state = base.update(updates, state, params, mask=mask)
      # With the mark of the plan in its checksum, or the next draw would be NaN.
      back = lambda inner: inner._replace(draws=inner.draws % period)
      return out, guard.exchange(state, back)

    return optax.GradientTransformationExtraArgs(base.init, update)

  return dataclasses.replace(subject, transform=transform)


def noise_with_a_long_period(subject):
  return _again_after(subject, 577)


def _from_leaf_to_leaf(subject, derive):
  """The noise of the last leaf is made of another's: derive(donor, leaf) -> leaf."""

  def change(out, memory, step, total):
    leaves, treedef = jax.tree.flatten(out)
    order = sorted(range(len(leaves)), key=lambda i: leaves[i].size)
    small, large = order[0], order[-1]
    leaves[small] = derive(leaves[large], leaves[small])
    return jax.tree.unflatten(treedef, leaves), memory

  return _with_update(subject, change)


def leaf_is_the_end_of_another(subject):
  return _from_leaf_to_leaf(subject, lambda a, b: -a.ravel()[-b.size :].reshape(b.shape))


def leaf_is_another_in_some_order(subject):
  def derive(a, b):
    places = np.random.default_rng(5).choice(a.size, b.size, replace=False)
    return a.ravel()[places].reshape(b.shape)

  return _from_leaf_to_leaf(subject, derive)


def leaf_is_the_sum_of_another_s_rows(subject):
  def derive(a, b):
    summed = a.sum(axis=0) / a.shape[0] ** 0.5
    return jnp.resize(summed, b.shape) if summed.size >= b.size else b * 0 + summed[0]

  return _from_leaf_to_leaf(subject, derive)


# --- sums ---------------------------------------------------------------------------------


def nan_becomes_a_number(subject):
  def clipped_grad(params, batch, mask):
    fixed = jax.tree.map(
      lambda leaf: jnp.nan_to_num(leaf) if leaf.dtype.kind == "f" else leaf, batch
    )
    return subject.clipped_grad(params, fixed, mask)

  return dataclasses.replace(subject, clipped_grad=clipped_grad)


def nan_goes_through(subject):
  def clipped_grad(params, batch, mask):
    summed = subject.clipped_grad(params, batch, mask)
    bad = jnp.where(jnp.all(jnp.isfinite(summed.norms)), 0.0, jnp.nan)
    total = jax.tree.map(lambda leaf: leaf + bad, summed.total)
    return summed.__class__(total, summed.norms, summed.losses, summed.l2_bound)

  return dataclasses.replace(subject, clipped_grad=clipped_grad)


def nan_kept_in_stacked_gradients(subject):
  """As one library does: a NaN norm gets the factor 1."""

  def transform(key):
    base = subject.transform(key)

    def update(updates, state, params=None, *, mask=None, **_):
      out, after = base.update(updates, state, params, mask=mask)
      if hasattr(updates, "total"):
        return out, after
      spoilt = [
        jnp.where(jnp.isnan(leaf), leaf, 0).sum()
        for leaf in jax.tree.leaves(arrays_of(updates))
      ]
      return jax.tree.map(lambda leaf: leaf + sum(spoilt), out), after

    return optax.GradientTransformationExtraArgs(base.init, update)

  return dataclasses.replace(subject, transform=transform)


def _with_noise(subject, change):
  """change(noise alone, step, total, mask) -> noise, in units of the update; 1-to-1 sums."""

  def transform(key):
    base, each = subject.transform(key), subject.plan.normalize_by

    def update(updates, state, params=None, *, mask=None, **_):
      inner, step = state
      out, inner = base.update(updates, inner, params, mask=mask)
      total = getattr(updates, "total", None)
      if total is not None:
        own = _scaled(total, 1 / each)
        noise = change(jax.tree.map(jnp.subtract, out, own), step, total, mask)
        out = jax.tree.map(jnp.add, noise, own)
      return out, (inner, step + 1)

    begin = lambda params: (base.init(params), jnp.int32(0))
    return optax.GradientTransformationExtraArgs(begin, update)

  return dataclasses.replace(subject, transform=transform)


def sums_longer_late(subject):
  def change(out, memory, step, total):
    more = 0 if total is None else jnp.where(step > _STEPS / 2, 1 / 100, 0.0)
    return jax.tree.map(
      lambda a, b: a + more * b, out, out if total is None else total
    ), memory

  return _with_update(subject, change)


def error_feedback_late(subject):
  def change(out, memory, step, total):
    scale = jnp.where(step > _STEPS / 2, 1.0 / subject.plan.normalize_by, 0.0)
    return jax.tree.map(lambda a, b: a + scale * b, out, memory), total

  return _with_update(subject, change, lambda p: jax.tree.map(jnp.zeros_like, p))


def realised_batch_as_divisor_late(subject):
  def transform(key):
    base = subject.transform(key)

    def update(updates, state, params=None, *, mask=None, **_):
      inner, step = state
      out, inner = base.update(updates, inner, params, mask=mask)
      late = (step > _STEPS / 2) & (mask.sum() > 1)
      wrong = subject.plan.normalize_by / jnp.maximum(mask.sum(), 1)
      return _scaled(out, jnp.where(late, wrong, 1.0)), (inner, step + 1)

    begin = lambda params: (base.init(params), jnp.int32(0))
    return optax.GradientTransformationExtraArgs(begin, update)

  return dataclasses.replace(subject, transform=transform)


def few_coordinates_without_noise_late(subject):
  """One in a hundred, in the middle of each leaf, where no sample is sure to look."""

  def change(noise, step, total, mask):
    def quiet(leaf):
      place = jnp.arange(leaf.size)
      few = (place % 97 == 50) & (place > leaf.size // 3) & (step > _STEPS // 2)
      return leaf * jnp.where(few, 0.02, 1.0).reshape(leaf.shape)

    return jax.tree.map(quiet, noise)

  return _with_noise(subject, change)


# --- batches ------------------------------------------------------------------------------


def high_bits_of_the_seed_ignored(subject):
  draw = lambda n, seed, step: subject.draw(n, seed=seed % 2**32, step=step)
  return dataclasses.replace(subject, draw=draw)


def batches_with_a_long_period(subject):
  draw = lambda n, seed, step: subject.draw(n, seed=seed, step=step % 577)
  return dataclasses.replace(subject, draw=draw)


def late_batches_from_one_half(subject):
  def draw(n, seed, step):
    drawn = subject.draw(n, seed=seed, step=step)
    return drawn if step < 0.8 * _STEPS else np.unique(drawn // 2)

  return dataclasses.replace(subject, draw=draw)


def a_batch_much_like_an_earlier_one(subject):
  def draw(n, seed, step):
    drawn = subject.draw(n, seed=seed, step=step)
    if step != _STEPS - 1:
      return drawn
    old = subject.draw(n, seed=seed, step=3)
    # Three quarters of the earlier one: half is at the edge of what one pair of batches can show.
    kept = np.delete(old, np.s_[::4])
    return np.unique([*kept, *drawn[: drawn.size // 4]])

  return dataclasses.replace(subject, draw=draw)


def late_seed_ignored(subject):
  def draw(n, seed, step):
    return subject.draw(n, seed=seed if step < 0.2 * _STEPS else 3, step=step)

  return dataclasses.replace(subject, draw=draw)


def bits_within_the_seed_ignored(subject):
  some = ~(((1 << 20) - 1) << 45)
  draw = lambda n, seed, step: subject.draw(n, seed=seed & some, step=step)
  return dataclasses.replace(subject, draw=draw)


def a_row_at_twice_its_rate(subject):
  def draw(n, seed, step):
    drawn = subject.draw(n, seed=seed, step=step)
    again = 7 in subject.draw(n, seed=seed + 99_991, step=step)
    return np.union1d(drawn, [7]) if again else drawn

  return dataclasses.replace(subject, draw=draw)


def rows_that_come_in_pairs(subject):
  def draw(n, seed, step):
    taken = np.isin(np.arange(n), subject.draw(n, seed=seed, step=step))
    taken[1:20:2] = taken[0:20:2]
    return np.flatnonzero(taken)

  return dataclasses.replace(subject, draw=draw)


def one_step_takes_many(subject):
  def draw(n, seed, step):
    drawn = subject.draw(n, seed=seed, step=step)
    return np.union1d(drawn, np.arange(n // 2)) if step == _STEPS // 2 else drawn

  return dataclasses.replace(subject, draw=draw)


_BUGS = {
  noise_distributions.noise_std: (noise_fades_late, few_coordinates_without_noise_late),
  noise_distributions.noise_independence: (
    noise_with_a_long_period, leaf_is_the_end_of_another, leaf_is_another_in_some_order,
    leaf_is_the_sum_of_another_s_rows,
  ),
  charges.own_sum: (sums_longer_late, error_feedback_late, realised_batch_as_divisor_late),
  influence.dropped: (
    nan_becomes_a_number, nan_goes_through, nan_kept_in_stacked_gradients,
  ),
  batches.sampler_seed: (
    high_bits_of_the_seed_ignored, batches_with_a_long_period, late_seed_ignored,
    bits_within_the_seed_ignored,
  ),
  batches.sampler_law: (
    late_batches_from_one_half, a_batch_much_like_an_earlier_one, a_row_at_twice_its_rate,
    rows_that_come_in_pairs, one_step_takes_many,
  ),
}  # fmt: skip
_ON_LARGE = (
  noise_fades_late, noise_with_a_long_period, error_feedback_late,
  few_coordinates_without_noise_late,
)  # fmt: skip


_PAIRS = [
  pytest.param(one, bug, id=f"{one.__name__}-{bug.__name__}")
  for one, bugs in _BUGS.items()
  for bug in bugs
]


@pytest.mark.cases(
  quick=[
    "sampler_seed-bits_within_the_seed_ignored",
    "sampler_law-a_batch_much_like_an_earlier_one",
  ],
  slow=["sampler_seed-late_seed_ignored"],
  long=...,
)
@pytest.mark.parametrize(("one", "bug"), _PAIRS)
def test_planted_bug_is_found(small, one, bug):
  row = one(bug(small))
  assert row.passed is False, row


@pytest.mark.long
@pytest.mark.parametrize(
  ("one", "bug"), [pair for pair in _PAIRS if pair.values[1] in _ON_LARGE]
)
def test_planted_bug_is_found_in_100_000_parameters(large, one, bug):
  row = one(bug(large))
  assert row.passed is False, row


@pytest.mark.cases(slow=["sampler_seed"], long=...)
@pytest.mark.parametrize("one", _BUGS)
def test_sound_runs_pass(small, large, one):
  assert one(small).passed is True, one(small)
  assert one(large).passed is True, one(large)


def test_every_check_has_a_bug_to_find():
  modules = (influence, whole_step, noise_distributions, batches, charges, of_config)
  planted = {plant.row for plant in plants.PLANTS.values()}
  # Bugs of tests/runs/test_number_of_records.py.
  planted.add(of_config.size_of_data)
  assert {*_BUGS, *test_check._BUGS, *planted} == {
    one for module in modules for one in module.CHECKS.values()
  }


@pytest.mark.long
def test_steps_are_skipped_where_the_model_is_too_large_to_draw_them_all(monkeypatch):
  monkeypatch.setattr(noise_record, "_WORK", 100_000)
  subject = _subject(**_MODELS["650"], num_steps=5000)
  assert noise_distributions.noise_std(subject).passed
  assert noise_distributions.noise_independence(subject).passed
  assert "skipped" in noise_distributions.noise_std(subject).detail
  assert not noise_distributions.noise_independence(_again_after(subject, 4001)).passed


def test_every_lag_is_among_the_steps_that_are_kept():
  steps = noise_record._covering(1000)
  lags = {int(b - a) for a in steps for b in steps if b > a}
  assert lags == set(range(1, 1000)) and len(steps) < 80


def test_the_models_are_of_the_size_that_they_are_called():
  sizes = {
    name: trees.size(_subject(**options).params) for name, options in _MODELS.items()
  }
  assert sizes["650"] == 650 and sizes["100k"] > 95_000

"""Slack clipping: the room that short gradients leave holds what the clip norm follows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpjax import gradients, transforms
from dpjax.transforms import SlackClipping, adaptive_clip_and_noise
from dpjax.types import ClippedSum
from dpjax.validate import UserError
from tests import plans
from tests.refuses import refuses

_FLAT = {"noise_multiplier": 0.0, "normalize_by": 4.0}


def _summed(norms, bound, mask=None):
  empty = jnp.zeros(0)
  norms = jnp.asarray(norms, jnp.float32)
  mask = jnp.ones(norms.shape, bool) if mask is None else jnp.asarray(mask)
  return ClippedSum(empty, norms, norms, bound, (bound,), mask=mask, shortened=True)


def _slack(norm, bound, slots):
  """The slack coordinates of one gradient as the paper fills them, one after the other."""
  width = bound / math.sqrt(slots)
  unused = math.sqrt(slots) * max(0.0, bound - norm)
  filled = []
  for _ in range(slots):
    filled.append(min(width, unused))
    unused -= filled[-1]
  return np.array(filled)


def test_one_slot_takes_all_that_is_left_of_the_bound():
  found = SlackClipping(num_slots=1).query(_summed([0.7], 1.0))
  np.testing.assert_allclose(found, [0.3], atol=1e-4)


def test_the_published_example():
  found = SlackClipping(num_slots=10).query(_summed([0.75], 1.0))
  wanted = [0.316227, 0.316227, 0.158114, *[0.0] * 7]
  np.testing.assert_allclose(found, wanted, atol=1e-4)
  np.testing.assert_allclose(found, _slack(0.75, 1.0, 10), atol=1e-4)


@pytest.mark.slow
@settings(max_examples=40)
@given(
  share=st.floats(0, 3), bound=st.floats(1e-3, 1e3), slots=st.integers(1, 64),
  rounding=st.floats(-1e-6, 1e-6),
)  # fmt: skip
def test_gradient_and_slack_together_are_no_longer_than_the_clip_norm(
  share, bound, slots, rounding
):
  true = share * bound
  # What a float32 norm of the same gradient may be.
  seen = true * (1 + rounding)
  slack = np.asarray(SlackClipping(num_slots=slots).query(_summed([seen], bound)), float)
  assert math.hypot(min(true, bound), np.linalg.norm(slack)) <= bound * (1 + 1e-9)
  np.testing.assert_allclose(slack, _slack(true, bound, slots), atol=2e-4 * bound)


def test_a_slack_without_its_own_width_would_pass_the_bound():
  """The wrong scale: coordinates as wide as the bins of the norm times sqrt(K) too many."""
  wide = 2 * _slack(0.5, 1.0, 4)
  assert math.hypot(0.5, np.linalg.norm(wide)) > 1.0


@pytest.mark.slow
def test_rows_that_are_padding_or_not_finite_add_nothing_and_parts_add_up():
  rule = SlackClipping(num_slots=3)
  whole = rule.query(_summed([0.1, 0.9, 0.4, 2.0], 1.0))
  parts = rule.query(_summed([0.1, 0.9], 1.0)) + rule.query(_summed([0.4, 2.0], 1.0))
  np.testing.assert_allclose(whole, parts, rtol=1e-6)
  strange = [0.1, math.nan, 0.9, math.inf, 0.4, 0.0, 2.0]
  there = [True, True, True, True, True, False, True]
  np.testing.assert_allclose(rule.query(_summed(strange, 1.0, there)), whole, rtol=1e-6)
  assert not rule.query(_summed([5.0, math.nan], 1.0)).any()


@dataclasses.dataclass(frozen=True)
class _Doubling(gradients.Flat):
  """Flat clipping whose finished sum is multiplied by 2."""

  def top(self, bound):
    return bound / 2


@pytest.mark.parametrize(
  ("clip", "unit"),
  [
    (gradients.Clip(1.0, "automatic"), False),
    (gradients.Clip(1.0, _Doubling()), False),
    (0.01, True),
  ],
)
def test_terms_longer_than_their_norms_leave_no_slack_to_fill(clip, unit):
  """Gradient and slack of one example would be 1.11 and 1.41 clip norms long."""
  loss_fn = lambda w, x: jnp.sum(w * x)
  grad_fn = gradients.clipped_grad(loss_fn, l2_clip_norm=clip, rescale_to_unit_norm=unit)
  summed = grad_fn(jnp.zeros(2), jnp.array([[0.01, 0.0]]), mask=True)
  tx = adaptive_clip_and_noise(
    l2_clip_norm=gradients.Clip(1.0, SlackClipping()), key=jax.random.key(0), **_FLAT
  )
  with refuses("updates"):
    tx.update(summed, tx.init(jnp.zeros(2)))


def _moved(shares, clip_norm, **numbers):
  rule = SlackClipping(num_slots=len(shares), **numbers)
  noisy = jnp.asarray(shares) * clip_norm / math.sqrt(len(shares))
  clip = gradients.Clip(clip_norm, rule)
  return clip_norm * float(rule.next_scale(jnp.float32(1.0), noisy, clip))


def test_the_norm_moves_as_published():
  target = 1 - 0.5 * (1 - 0.4 / 2.0)
  wanted = 2.0 * math.exp(0.5 * (target - 0.2))
  assert _moved([0.2, 0.4], 2.0, learning_rate=0.5) == pytest.approx(wanted, rel=1e-6)
  # Most norms below C: down. Most above: up. All near zero: it stays.
  assert _moved([0.9, 0.0], 1.0) < 1.0 < _moved([0.1, 0.0], 1.0)
  assert _moved([1.0, 1.0], 1.0) == pytest.approx(1.0)
  assert _moved([9.0, 0.0], 1.0, learning_rate=99.0, min_factor=0.5) == 0.5


def test_a_step_is_that_of_flat_clipping_at_the_present_norm():
  rule = SlackClipping(num_slots=2, learning_rate=0.5)
  clip = gradients.Clip(2.0, rule)
  tx = adaptive_clip_and_noise(l2_clip_norm=clip, key=jax.random.key(0), **_FLAT)
  rows = jnp.array([[3.0, 4.0], [0.5, 0.0], [0.0, 1.0], [0.0, 0.0]])
  mask = jnp.ones(4, bool)
  state = tx.init(jnp.zeros(2))
  norm = 2.0
  for _ in range(3):
    flat = transforms.clip_and_noise(l2_clip_norm=norm, key=jax.random.key(1), **_FLAT)
    wanted, _ = flat.update(gradients.wrap_grads(rows), flat.init(jnp.zeros(2)), mask=mask)
    found, state = tx.update(gradients.wrap_grads(rows), state, mask=mask)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    shares = sum(_slack(float(n), norm, 2) for n in jnp.linalg.norm(rows, axis=1)) / (
      4 * norm / math.sqrt(2)
    )
    target = 1 - 0.5 * (1 - min(1.0, shares[-1] / norm))
    norm = norm * math.exp(0.5 * (target - shares[0]))
    assert 2.0 * float(state.inner.scale) == pytest.approx(norm, rel=1e-3)


@pytest.mark.slow
def test_slack_gets_the_noise_of_the_sum():
  """The log of the norm moves by -eta times a normal of std z sqrt(K) / B; half of it is seen."""
  slots, z, batch = 1, 2.0, 50.0
  rule = SlackClipping(
    num_slots=slots,
    learning_rate=1.0,
    clipped_share=0.999999,
    max_factor=1e6,
    min_factor=1e-6,
  )
  clip = gradients.Clip(1.0, rule)

  @jax.jit
  @jax.vmap
  def moved(key):
    tx = adaptive_clip_and_noise(
      l2_clip_norm=clip, noise_multiplier=z, normalize_by=batch, key=key
    )
    rows = gradients.wrap_grads(jnp.full((1, 1), 9.0))  # all clipped: no slack but noise
    _, state = tx.update(rows, tx.init(jnp.zeros(1)), mask=jnp.ones(1, bool))
    return jnp.log(state.inner.scale)

  logs = np.asarray(moved(jax.random.split(jax.random.key(3), 4000)), float)
  # With one slot s[0] = s[-1] = x: log = target - x, target = max(0, x) about: -x or 0.
  negative = np.sort(logs[logs > 1e-4])
  distribution = stats.halfnorm(scale=z * math.sqrt(slots) / batch)
  assert stats.kstest(negative, distribution.cdf).pvalue > 1e-3
  assert (
    stats.kstest(negative, stats.halfnorm(scale=0.5 * distribution.std()).cdf).pvalue < 1e-9
  )


def _plan(rule, **changes):
  numbers = dict(noise_multiplier=1.5, normalize_by=100.0, num_steps=20, **changes)
  return plans.of(400, prob=0.1, l2_clip_norm=gradients.Clip(1.0, rule), **numbers)


def test_it_costs_what_a_constant_norm_costs_and_says_so():
  plan = _plan(SlackClipping())
  assert plan.epsilon() == _plan(gradients.Flat()).epsilon()
  assert plan.epsilon() < _plan(transforms.AdaptiveClipping()).epsilon()
  words = " ".join(plan.statement().split())
  assert "Slack clipping" in words and "multiplier 1.5" in words and not plan.assumptions
  assert SlackClipping.slots_for(128, 1.0) == 8
  assert SlackClipping.slots_for(1, 100.0) == 1


@pytest.mark.parametrize(
  ("numbers", "field"),
  [
    ({"num_slots": 0}, "num_slots"),
    ({"clipped_share": 1.0}, "clipped_share"),
    ({"learning_rate": -1.0}, "learning_rate"),
    ({"expected_batch_size": 0.0}, "expected_batch_size"),
    ({"min_factor": 2.0}, "min_factor"),
    ({"max_factor": 0.5}, "max_factor"),
  ],
)
def test_wrong_numbers_are_named(numbers, field):
  with refuses(field):
    SlackClipping(**numbers)


@pytest.mark.parametrize(
  ("norms", "changes"), [(1.0, {"slices": 2}), ({"a": 1.0, "b": 2.0}, {})]
)
def test_what_is_not_proved_beside_it_is_refused(norms, changes):
  with pytest.raises(UserError):
    _plan(None, l2_clip_norm=gradients.Clip(norms, SlackClipping()), **changes)


def test_a_transform_takes_no_other_rule():
  with refuses("l2_clip_norm"):
    adaptive_clip_and_noise(
      l2_clip_norm=gradients.Clip(1.0), key=jax.random.key(0), **_FLAT
    )

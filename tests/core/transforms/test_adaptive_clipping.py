"""Adaptive clipping: the quantile it finds, the noise it adds, what it is charged for."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dpjax
from dpjax import transforms
from dpjax.gradients import Clip
from dpjax.transforms import adaptive_clipping, guard
from dpjax.transforms.adaptive_clipping import AdaptiveClipping
from dpjax.transforms.slack_clipping import SlackClipping
from dpjax.types import ClippedSum
from tests.refuses import refuses

_NORMS = np.random.default_rng(0).lognormal(1.0, 0.7, 400)


def _tx(adaptive=None, **changes):
  options = dict(noise_multiplier=0.0, normalize_by=400, key=jax.random.key(0))
  norms = changes.pop("l2_clip_norm", 1.0)
  clip = norms if adaptive is None else Clip(norms, adaptive)
  return transforms.adaptive_clip_and_noise(l2_clip_norm=clip, **{**options, **changes})


def _final_clip_norm(quantile, steps=150):
  """With the noise of a real run: z = 1 on the sum, 1/20 of the batch on the count."""
  tx = _tx(AdaptiveClipping(target_quantile=quantile), noise_multiplier=1.0)
  grads = dpjax.wrap_grads(jnp.asarray(_NORMS, jnp.float32)[:, None])
  mask = jnp.ones(400, bool)

  @jax.jit
  def run(state):
    step = lambda state, _: (tx.update(grads, state, mask=mask)[1], state.inner.scale)
    return jax.lax.scan(step, state, None, length=steps)[1]

  return float(np.mean(run(tx.init(jnp.zeros(1)))[-50:]))


def _finds_the_quantile(quantile):
  share = float(np.mean(_final_clip_norm(quantile) >= _NORMS))
  return abs(share - quantile) < 0.04


def test_the_statement_rounds_noise_down_so_that_it_promises_no_more():
  adaptive = AdaptiveClipping(count_noise_std=2.00000099)
  words = adaptive.statement(1.23456789, 100.0)
  assert "noise multiplier 1.23456 and" in words and "deviation 2 and" in words
  combined = adaptive.combined_noise_multiplier(1.23456789, 100.0)
  shown = float(words.split("noise multiplier ")[2].split(" ")[0].rstrip("."))
  assert combined * (1 - 1e-5) <= shown <= combined


@pytest.mark.cases(slow=["0.5"], long=...)
@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
def test_p22_the_clip_norm_converges_to_the_true_quantile(quantile):
  assert _finds_the_quantile(quantile)


_WRONG_COUNTS = {
  "wrong sign": lambda inside, mask: -jnp.sum(jnp.where(mask, inside - 0.5, 0)),
  "bit is 'clipped'": lambda inside, mask: jnp.sum(jnp.where(mask, 0.5 - inside, 0)),
  "no -1/2": lambda inside, mask: jnp.sum(jnp.where(mask, 1.0 * inside, 0)),
  "-1/2 once, not per example": lambda inside, mask: (
    jnp.sum(jnp.where(mask, 1.0 * inside, 0)) - 0.5
  ),
}


@pytest.mark.cases(quick=[3], long=...)
@pytest.mark.parametrize("wrong", sorted(_WRONG_COUNTS))
def test_p22_wrong_indicators_are_rejected_by_the_same_test(wrong, monkeypatch):
  count = lambda summed, mask: _WRONG_COUNTS[wrong](summed.norms <= summed.l2_bound, mask)
  monkeypatch.setattr(adaptive_clipping, "_count", count)
  assert not _finds_the_quantile(0.3)


def _hand(scale, norms, n, rate, quantile, variant=""):
  """One update of the clip norm, in the words of the paper, without noise."""
  bits = (np.asarray(norms) <= scale).astype(float)
  size = len(norms) if variant == "realised n" else n
  share = np.sum(bits - 0.5) / size + 0.5
  if variant == "uncentred":
    share = np.sum(bits) / size
  return scale * math.exp(-rate * (share - quantile))


@pytest.mark.parametrize(("within", "taking_part"), [(3, 4), (0, 4), (8, 8)])
def test_p22_the_rule_moves_the_clip_norm_as_the_paper_says(within, taking_part):
  """C exp(-rate (share - quantile)): up where too many are clipped, down where too few are."""
  rule = AdaptiveClipping(target_quantile=0.7, learning_rate=0.5)
  norms = [0.5] * within + [3.0] * (taking_part - within)
  centred = sum(0.5 if norm <= 2.0 else -0.5 for norm in norms)
  found = float(rule.next_scale(np.float32(2.0), np.float32(centred / 8), None))
  assert found == pytest.approx(_hand(2.0, norms, 8, 0.5, 0.7), rel=1e-6)


def test_p22_the_query_counts_half_for_each_example_within_and_minus_half_beyond():
  norms = np.array([0.2, 1.0, 5.0, np.nan, 0.1], np.float32)
  mask = np.array([True, True, True, True, False])
  summed = ClippedSum(np.zeros(3, np.float32), norms, norms, 1.0, (1.0,), mask=mask)
  assert float(AdaptiveClipping().query(summed)) == 2 * 0.5 - 2 * 0.5
  assert float(AdaptiveClipping().query(summed, mask & (np.arange(5) != 2))) == 0.5


@pytest.mark.slow
def test_p22_one_update_by_hand_with_the_expected_batch_size():
  tx = _tx(AdaptiveClipping(target_quantile=0.7, learning_rate=0.5), normalize_by=8)
  grads = dpjax.wrap_grads(jnp.array([[0.2], [0.9], [1.0], [5.0], [0.1]]))
  mask = jnp.array([True, True, True, True, False])  # four took part, eight were expected
  state = tx.update(grads, tx.init(jnp.zeros(1)), mask=mask)[1]
  norms = [0.2, 0.9, 1.0, 5.0]
  assert float(state.inner.scale) == pytest.approx(_hand(1.0, norms, 8, 0.5, 0.7), rel=1e-6)
  for variant in ("realised n", "uncentred"):
    wrong = _hand(1.0, norms, 8, 0.5, 0.7, variant)
    assert float(state.inner.scale) != pytest.approx(wrong, rel=1e-2)


def test_p22_the_noise_has_the_clip_norm_that_clipped():
  adaptive = AdaptiveClipping(target_quantile=0.9, count_noise_std=1.0)
  tx = _tx(adaptive, noise_multiplier=2.0)
  grads = dpjax.wrap_grads(jnp.zeros((1, 20_000)))
  update_fn = jax.jit(lambda state: tx.update(grads, state, mask=jnp.zeros(1, bool)))
  state = tx.init(None)
  for _ in range(3):
    before = float(state.inner.scale)
    update, state = update_fn(state)
    after = float(state.inner.scale)
    sample = np.asarray(update) * 400 / 2.0
    assert abs(math.log(after / before)) > 0.03
    assert stats.kstest(sample / before, "norm").pvalue > 1e-3
    assert stats.kstest(sample / after, "norm").pvalue < 1e-3


def test_the_count_gets_its_own_noise():
  adaptive = AdaptiveClipping(learning_rate=1.0, count_noise_std=7.0)
  mask, grads = jnp.zeros(2, bool), dpjax.wrap_grads(jnp.zeros((2, 1)))

  def count(key):
    tx = _tx(adaptive, noise_multiplier=0.3, key=key)
    return -jnp.log(tx.update(grads, tx.init(None), mask=mask)[1].inner.scale) * 400

  keys = jax.random.split(jax.random.key(3), 3000)
  drawn = np.asarray(jax.jit(jax.vmap(count))(keys))
  assert stats.kstest(drawn / 7.0, "norm").pvalue > 1e-3
  assert stats.kstest(drawn / (7.0 * 0.8), "norm").pvalue < 1e-4


_ENTRY = st.one_of(
  st.floats(width=32, allow_nan=True, allow_infinity=True), st.floats(-2, 2, width=32)
)


@functools.cache
def _jitted():
  adaptive = AdaptiveClipping(learning_rate=1.0, count_noise_std=3.0)
  tx = _tx(adaptive, noise_multiplier=1.5, normalize_by=5.0)

  @jax.jit
  def step(grads, mask, scale):
    state = guard.exchange(tx.init(None), lambda inner: inner._replace(scale=scale))
    update, after = tx.update(dpjax.wrap_grads(grads), state, mask=mask)
    return update / scale * 5.0, -jnp.log(after.inner.scale / scale) * 5.0

  return adaptive, step


@pytest.mark.slow
@settings(max_examples=60)
@given(
  row=st.lists(_ENTRY, min_size=4, max_size=4),
  other=st.lists(_ENTRY, min_size=4, max_size=4),
  scale=st.floats(0.01, 100.0),
)
def test_p9_one_example_moves_sum_and_count_by_at_most_what_is_charged(row, other, scale):
  """Both queries, each divided by its noise: at most 1 / z, and 2 / z when exchanged."""
  adaptive, step = _jitted()
  z = adaptive.combined_noise_multiplier(1.5, 5.0)
  outputs = []
  for first, taken in ((row, True), (row, False), (other, True)):
    grads = jnp.asarray([first, [0.3, 0.1, 0.0, 0.2]], jnp.float32)
    outputs.append(step(grads, jnp.array([taken, True]), jnp.float32(scale)))
  for (a, b), sensitivity in (((0, 1), 1.0), ((0, 2), 2.0)):
    total = np.linalg.norm(np.asarray(outputs[a][0] - outputs[b][0], np.float64)) / 1.5
    count = float(outputs[a][1] - outputs[b][1]) / 3.0
    assert math.hypot(total, count) <= sensitivity / z + 1e-4


def test_the_combined_noise_multiplier_is_the_papers_and_is_attained():
  adaptive = AdaptiveClipping(count_noise_std=3.0)
  z = adaptive.combined_noise_multiplier(1.5, 1.0)
  assert z**-2 == pytest.approx(1.5**-2 + (2 * 3.0) ** -2)
  assert AdaptiveClipping().count_std(100) == 5.0
  assert AdaptiveClipping(expected_batch_size=40).count_std(100) == 2.0
  assert adaptive.combined_noise_multiplier(0.0, 1.0) == 0.0


@pytest.mark.parametrize("multiplier", [0.5, 1.5, 20.0])
@pytest.mark.parametrize(
  "rule",
  [
    AdaptiveClipping(),
    AdaptiveClipping(count_noise_std=0.75),
    AdaptiveClipping(expected_batch_size=40),
    SlackClipping(),
  ],
)
def test_the_noise_of_the_sum_comes_back_from_what_both_are_charged(rule, multiplier):
  combined = rule.combined_noise_multiplier(multiplier, 100.0)
  assert rule.sum_noise_multiplier(combined, 100.0) == pytest.approx(multiplier)


def test_p8_empty_batches_move_by_noise_alone_and_stay_finite():
  tx = _tx(noise_multiplier=1.0)
  state, grads = tx.init(None), dpjax.wrap_grads(jnp.full((3, 2), jnp.nan))
  update_fn = jax.jit(lambda s: tx.update(grads, s, mask=jnp.zeros(3, bool)))
  for _ in range(5):
    update, state = update_fn(state)
    assert np.isfinite(update).all() and np.abs(update).max() > 0
  assert int(state.inner.inner.draws) == int(state.inner.steps) == 5
  assert 0.5 < float(state.inner.scale) < 2


@pytest.mark.slow
def test_the_limits_hold_whatever_the_noise():
  adaptive = AdaptiveClipping(
    learning_rate=1e6, count_noise_std=1e6, min_factor=0.25, max_factor=8.0
  )
  tx, seen = _tx(adaptive, noise_multiplier=1.0), set()
  state = tx.init(None)
  for _ in range(12):
    _, state = tx.update(dpjax.wrap_grads(jnp.ones((3, 2))), state, mask=jnp.ones(3, bool))
    seen.add(float(state.inner.scale))
  assert seen == {0.25, 8.0}


@pytest.mark.slow
def test_without_learning_it_is_clip_and_noise():
  rows = np.random.default_rng(1).normal(size=(6, 5))
  grads = dpjax.wrap_grads(jnp.asarray(rows, jnp.float32))
  mask = jnp.arange(6) < 5
  tx = _tx(AdaptiveClipping(learning_rate=0.0), normalize_by=3)
  plain = transforms.clip_and_noise(
    l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=3, key=jax.random.key(0)
  )
  update, state = tx.update(grads, tx.init(None), mask=mask)
  expected, _ = plain.update(grads, plain.init(None), mask=mask)
  np.testing.assert_array_equal(update, expected)
  assert float(state.inner.scale) == 1.0


@pytest.mark.cases(long=[6, 7])
@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: AdaptiveClipping(target_quantile=1.0), "target_quantile"),
    (lambda: AdaptiveClipping(learning_rate=float("nan")), "learning_rate"),
    (lambda: AdaptiveClipping(count_noise_std=0.0), "count_noise_std"),
    (lambda: AdaptiveClipping(min_factor=2.0), "min_factor"),
    (lambda: AdaptiveClipping(max_factor=1e308), "max_factor"),
    (lambda: AdaptiveClipping(max_factor=1e9), "max_factor"),
    (lambda: _tx(l2_clip_norm={"w": 1.0}), "l2_clip_norm"),
    (lambda: _tx(key=0), "key"),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field):
    make()


@pytest.mark.parametrize("rule", [AdaptiveClipping(), SlackClipping()])
@pytest.mark.parametrize("wide", [False, True])
def test_no_rule_counts_on_promotion(rule, wide):
  grads = np.ones((4, 1), np.float32)

  def scale():
    tx = _tx(rule, normalize_by=4)
    _, state = tx.update(
      dpjax.wrap_grads(grads), tx.init(jnp.zeros(1, "float32")), mask=True
    )
    return state.inner.scale

  with jax.enable_x64(wide):
    free = scale()
    with jax.numpy_dtype_promotion("strict"):
      np.testing.assert_array_equal(scale(), free)

"""DP-SGD with each way of clipping, by hand; what each plan charges; slices of a step."""

import functools

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting.pld import PLDAccountant

import dpjax
from dpjax import gradients, sampling, training
from dpjax.gradients import Automatic, Clip
from dpjax.noise import NoiseShape, source
from dpjax.training.dp_sgd import clip_scale, noise_state
from dpjax.transforms import AdaptiveClipping
from dpjax.transforms.clip_scale import scheduled_scales
from dpjax.types import Batch, Example
from tests import plans
from tests.refuses import refuses

_PARAMS = {"w": jnp.ones(3) / 3, "b": jnp.zeros(())}
_KEY = jax.random.key(0)


_plan = functools.partial(
  plans.of, 32, prob=0.3, l2_clip_norm=0.5, normalize_by=6, num_steps=6
)


def _loss(params, example):
  return (example.x @ params["w"] + params["b"] - example.y) ** 2


def _batches(count, size=8):
  rng = np.random.default_rng(1)
  for _ in range(count):
    x = jnp.asarray(rng.normal(size=(size, 3)), jnp.float32)
    yield Batch(Example(x, jnp.ones(size)), jnp.asarray(rng.random(size) < 0.7))


def _run(plan, batches, tx=None, **options):
  algorithm = training.dp_sgd(_loss, plan, tx or optax.sgd(0.3), noise_key=_KEY, **options)
  step, state, states = jax.jit(algorithm.step), algorithm.init(_PARAMS), []
  for batch in batches:
    state, info = step(state, batch)
    states.append((state, info))
  return states


def _hand(scales, batches):
  """Clip norm and noise C s_t at step t, written out; returns every iterate."""
  params, seen = jax.tree.map(np.asarray, _PARAMS), []
  for t, (scale, batch) in enumerate(zip(scales, batches)):
    total = jax.tree.map(np.zeros_like, params)
    for i in np.flatnonzero(batch.mask):
      grads = jax.grad(_loss)(params, jax.tree.map(lambda leaf: leaf[i], batch.examples))
      norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
      factor = min(1.0, 0.5 * scale / norm)
      total = jax.tree.map(lambda a, g: a + factor * np.asarray(g), total, grads)
    drawn = source.gaussian(jax.random.fold_in(_KEY, t), _PARAMS, 1.0)
    params = jax.tree.map(
      lambda p, a, n: p - 0.3 * (a + 0.5 * scale * np.asarray(n)) / 6,
      params,
      total,
      drawn,
    )
    seen.append(params)
  return seen


@pytest.mark.long
@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_a_clip_schedule_is_a_hand_loop_and_costs_nothing(method):
  scales = scheduled_scales("exponential", 6, 0.1)
  plan = _plan(l2_clip_norm=Clip(0.5, schedule=scales))
  states = _run(plan, _batches(6), method=method)
  for (state, _), expected in zip(states, _hand(scales, _batches(6))):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), state.params, expected
    )
  constant = _hand([1.0] * 6, _batches(6))[-1]
  assert np.abs(states[-1][0].params["w"] - constant["w"]).max() > 1e-2
  assert plan.event() == _plan().event() and plan.epsilon() == _plan().epsilon()
  assert clip_scale(states[0][0]) == pytest.approx(scales[1])
  plain = _run(_plan(), _batches(1))[0][1]
  for name in ("train_loss", "mean_norm"):  # diagnostics in the loss's own units
    assert float(getattr(states[0][1], name)) == pytest.approx(getattr(plain, name))
  second = _run(_plan(l2_clip_norm=Clip(0.5, schedule=(0.1, *scales[1:]))), _batches(1))[0][
    1
  ]
  assert float(second.mean_norm) == pytest.approx(float(plain.mean_norm), rel=1e-5)
  assert float(second.clip_fraction) >= float(plain.clip_fraction)


@pytest.mark.slow
def test_p22_adaptive_dp_sgd_is_the_transform_on_stacked_gradients():
  adaptive = AdaptiveClipping(learning_rate=1.0, count_noise_std=1.0)
  plan = _plan(l2_clip_norm=Clip(0.5, adaptive))
  states = _run(plan, _batches(6))
  tx = plan.transform(_KEY)
  params, state = _PARAMS, tx.init(_PARAMS)
  for (fast, _), batch in zip(states, _batches(6)):
    grads = dpjax.per_example_grads(_loss)(params, batch.examples)[1]
    update, state = tx.update(grads, state, params, mask=batch.mask)
    params = jax.tree.map(lambda p, u: p - 0.3 * u, params, update)
    assert clip_scale(fast) == pytest.approx(float(state.inner.scale), rel=1e-5)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), fast.params, params
    )
  assert float(state.inner.scale) != 1.0 and int(noise_state(fast).draws) == 6


@pytest.mark.slow
def test_p22_the_plan_charges_sum_and_count_as_one_gaussian():
  adaptive = AdaptiveClipping(count_noise_std=0.8)
  plan = _plan(l2_clip_norm=Clip(0.5, adaptive), num_steps=100)
  combined = (1.0**-2 + 1.6**-2) ** -0.5
  event = dp_accounting.PoissonSampledDpEvent(0.3, dp_accounting.GaussianDpEvent(combined))
  expected = PLDAccountant().compose(event, 100).get_epsilon(0.95e-5)
  assert plan.epsilon() == pytest.approx(expected, rel=1e-3)
  assert plan.epsilon() > 1.3 * _plan(num_steps=100).epsilon()  # the count is not free
  words = " ".join(plan.statement().split())
  assert "count with noise of standard deviation 0.8 and sensitivity 1/2" in words
  fixed = dpjax.FixedSizeSampler(batch_size=6, num_examples=20)
  exchanged = _plan(sampler=fixed, l2_clip_norm=Clip(0.5, adaptive))
  inner = dp_accounting.GaussianDpEvent(combined)
  assert exchanged.step_event().event == inner  # both sensitivities double together


@pytest.mark.slow
def test_p25_a_calibrated_adaptive_plan_stays_within_its_target():
  options = dict(
    epsilon=2.0,
    delta=1e-5,
    sampler=dpjax.PoissonSampler(sampling_prob=0.1, capacity=100),
    num_steps=50,
    normalize_by=60,
  )
  clip = Clip(1.0, AdaptiveClipping())
  plan = dpjax.Plan.calibrated(**options, l2_clip_norm=clip)
  flat = dpjax.Plan.calibrated(**options, l2_clip_norm=1.0)
  assert 1.99 <= plan.epsilon() <= 2.0
  assert plan.noise_multiplier > flat.noise_multiplier
  assert plan.step_event().event.noise_multiplier == pytest.approx(
    flat.noise_multiplier, rel=1e-3
  )


@pytest.mark.cases(slow=[2], long=...)
@pytest.mark.parametrize(
  "changes",
  [
    {"l2_clip_norm": Clip(0.5, Automatic(0.1))},
    {
      "l2_clip_norm": {"w": 0.3, "b": 0.4},
      "noise_shape": NoiseShape(shares={"w": 1.0, "b": 2.0}),
    },
    {"l2_clip_norm": {"w": 0.0, "b": 0.5}},
  ],
)
def test_both_routes_of_every_plan_agree_and_cost_the_same(changes):
  plan = _plan(**changes)
  assert plan.event() == _plan().event()
  (fast, _), batch = _run(plan, _batches(1))[0], next(_batches(1))
  tx = plan.transform(_KEY)
  grads = dpjax.per_example_grads(_loss)(_PARAMS, batch.examples)[1]
  update, _ = tx.update(grads, tx.init(_PARAMS), _PARAMS, mask=batch.mask)
  expected = jax.tree.map(lambda p, u: p - 0.3 * u, _PARAMS, update)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), fast.params, expected
  )
  if 0.0 in jax.tree.leaves(plan.l2_clip_norm.norms):
    np.testing.assert_array_equal(fast.params["w"], _PARAMS["w"])


def _slices(batch, count):
  rows = -(-batch.mask.shape[0] // count)
  for part in range(count):
    yield jax.tree.map(lambda leaf: leaf[part * rows : (part + 1) * rows], batch)


@pytest.mark.slow
def test_p15_p27_slices_are_one_step_of_noise_optimizer_average_and_count():
  sampler = dpjax.PoissonSampler(sampling_prob=0.3, capacity=8)
  tx = lambda: optax.adam(0.1)
  whole = _run(_plan(sampler=sampler), _batches(3), tx(), ema_decay=0.5)
  sliced = [part for batch in _batches(3) for part in _slices(batch, 4)]
  plan = _plan(sampler=sampler, slices=4)
  states = _run(plan, sliced, tx(), ema_decay=0.5)
  for step in range(3):
    expected, got = whole[step][0], states[4 * step + 3][0]
    for a, b in ((got.params, expected.params), (got.ema, expected.ema)):
      jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a, b)
    before = states[4 * step + 2][0]  # three of four slices: nothing has moved
    assert int(before.step) == step and int(got.step) == step + 1
    assert int(noise_state(before).draws) == step
  assert int(noise_state(states[-1][0]).draws) == 3
  with refuses("updates"):
    _run(plan, _batches(1))


@pytest.mark.slow
def test_each_slice_has_keys_of_its_own():
  seen = lambda p, e: p["b"] * jax.random.normal(e.key)
  plan = _plan(sampler=dpjax.PoissonSampler(sampling_prob=0.3, capacity=8), slices=2)
  algorithm = training.dp_sgd(
    seen, plan, optax.sgd(1.0), noise_key=_KEY, example_key=jax.random.key(1)
  )
  state, norms = algorithm.init(_PARAMS), set()
  part = next(_slices(next(_batches(1)), 2))
  step = jax.jit(algorithm.step)
  for _ in range(4):
    state, info = step(state, part._replace(mask=jnp.ones(4, bool)))
    norms.add(float(info.mean_norm))
  assert len(norms) == 4


_ONES = (1.0,) * 6


def _adaptive(norms=0.5, **changes):
  return {"l2_clip_norm": Clip(norms, AdaptiveClipping()), **changes}


def test_mean_noise_std_is_that_of_the_private_mean_gradient():
  assert _plan().mean_noise_std == pytest.approx(1.0 * 0.5 / 6)
  bounds = {"w": 0.3, "b": 0.4}
  assert _plan(l2_clip_norm=bounds).mean_noise_std == pytest.approx(0.5 / 6)
  by_group = _plan(
    l2_clip_norm=bounds, noise_shape=NoiseShape(shares={"w": 1, "b": 1})
  ).mean_noise_std
  assert by_group == pytest.approx({"w": 0.3 * 2**0.5 / 6, "b": 0.4 * 2**0.5 / 6})
  assert _plan(noise_multiplier=0.0, l2_clip_norm=float("inf")).mean_noise_std == 0


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    (lambda: {"l2_clip_norm": Clip(0.5, "median")}, "rule"),
    (lambda: _adaptive({"w": 1.0, "b": 1.0}), "l2_clip_norm"),
    (lambda: _adaptive(float("inf")), "norms"),
    (lambda: _adaptive(slices=2), "slices"),
    (lambda: {"l2_clip_norm": Clip(0.5, AdaptiveClipping(), _ONES)}, "clip_schedule"),
    (lambda: {"l2_clip_norm": Clip(0.5, schedule=(1.0,))}, "clip_schedule"),
    (lambda: {"l2_clip_norm": Clip(0.5, "automatic", _ONES)}, "clipping"),
    (
      lambda: {"noise_shape": NoiseShape(shares={"w": 1.0})},
      "noise_shares",
    ),
    (lambda: {"slices": 0}, "slices"),
    (
      lambda: _adaptive(noise_shape=NoiseShape(_ONES)),
      "noise_schedule",
    ),
    (
      lambda: {"l2_clip_norm": {"w": 0.0, "b": 1.0}, "noise_shape": NoiseShape(_ONES)},
      "l2_clip_norm",
    ),
    (
      lambda: _adaptive(sampler=sampling.CyclicSampler(steps_per_pass=4, num_examples=8)),
      "sampler",
    ),
    (lambda: {"noise_shape": NoiseShape((1e-46,) * 6)}, "schedule[0]"),
    (lambda: {"noise_shape": NoiseShape((1e39,) * 6)}, "schedule[0]"),
  ],
)
def test_what_has_no_analysis_is_refused_in_one_line(changes, field):
  with refuses(field) as caught:
    _plan(**changes())
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("clip", "field"),
  [
    (Clip(0.5, AdaptiveClipping()), "clipping"),
    (Clip(0.5, schedule=(1.0,) * 6), "clip_schedule"),
  ],
)
def test_mean_noise_std_is_refused_where_it_changes_by_step(clip, field):
  with refuses(field):
    _ = _plan(l2_clip_norm=clip).mean_noise_std


@pytest.mark.slow
def test_p4_the_divided_loss_never_exceeds_the_bound_at_the_limits_of_the_scale():
  loss = lambda p, x: jnp.sum(p * x)
  for scale in (1e-6, 1e6):
    divided = functools.partial(lambda s, p, x: loss(p, x) / s, jnp.float32(scale))
    for method in ("vmap", "ghost"):
      grad_fn = gradients.clipped_grad(divided, l2_clip_norm=1.0, method=method)
      for size in (1e-38, 1e-3, 1.0, 1e30, 3e38, float("inf"), float("nan")):
        total = grad_fn(jnp.ones(3), jnp.full((1, 3), size, jnp.float32), True).total
        assert float(np.linalg.norm(np.asarray(total, np.float64))) <= 1 + 1e-6


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"l2_clip_norm": float("inf")}, "l2_clip_norm"),
    ({"l2_clip_norm": {"w": float("inf"), "b": 1.0}}, "l2_clip_norm"),
    ({"l2_clip_norm": 5e-324, "noise_multiplier": 0.4}, "l2_clip_norm"),
  ],
)
def test_a_plan_whose_noise_is_none_in_floats_promises_no_epsilon(changes, field):
  """Each had a finite epsilon, "proved": unbounded examples, or noise that float32 loses."""
  with refuses(field):
    _plan(**changes)


@pytest.mark.slow
def test_fewer_steps_of_a_plan_without_a_finite_epsilon_still_pay_for_overflow():
  plan = _plan(
    sampler=dpjax.PoissonSampler(sampling_prob=1e-3, capacity=64),
    noise_multiplier=0.03,
    num_steps=200_000,
  )
  assert plan.epsilon() == float("inf")
  with refuses("delta"):
    plan.epsilon(steps=1)  # (1 + e^625) times the chance of an abort is more than delta

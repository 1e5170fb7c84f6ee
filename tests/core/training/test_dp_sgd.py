"""DP-SGD as (init, step): limits, exact resume, averages, augmentation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import training
from dpjax.training.augment import AUGMENTATIONS
from dpjax.training.dp_sgd import StepInfo, join, noise_state
from dpjax.types import Batch, Example
from dpjax.validate import Verbatim
from tests import plans
from tests.refuses import refuses

_plan = functools.partial(
  plans.of, 32, prob=0.3, l2_clip_norm=0.5, normalize_by=6, num_steps=8
)


def _loss(params, example):
  return jnp.sum((example.x @ params["w"] - example.y) ** 2)


def _data(size=20):
  rng = np.random.default_rng(0)
  return dpjax.data.from_arrays(
    rng.random((size, 4, 4, 1)), rng.integers(0, 3, size), num_classes=3
  )


_PARAMS = {"w": jnp.ones((3,)) / 3}


def _batches(count, size=8):
  rng = np.random.default_rng(1)
  for _ in range(count):
    x = jnp.asarray(rng.normal(size=(size, 3)), jnp.float32)
    yield Batch(Example(x, jnp.ones(size)), jnp.asarray(rng.random(size) < 0.7))


def _algorithm(plan=None, tx=None, **options):
  options = {"noise_key": jax.random.key(0), **options}
  return training.dp_sgd(
    _loss, plan or _plan(), tx or optax.sgd(0.1, momentum=0.9), **options
  )


def _run(algorithm, state, batches, jit=jax.jit):
  step = jit(algorithm.step)
  for batch in batches:
    state, info = step(state, batch)
  return state, info


def test_without_noise_and_clipping_it_is_sgd_on_the_masked_sum():
  plan = _plan(noise_multiplier=0.0, l2_clip_norm=float("inf"))
  state, _ = _run(_algorithm(plan), _algorithm(plan).init(_PARAMS), _batches(5))
  tx = optax.sgd(0.1, momentum=0.9)
  params, opt_state = _PARAMS, tx.init(_PARAMS)
  for batch in _batches(5):
    total = lambda p: (
      jnp.sum(jax.vmap(_loss, (None, 0))(p, batch.examples) * batch.mask) / 6
    )
    updates, opt_state = tx.update(jax.grad(total)(params), opt_state, params)
    params = optax.apply_updates(params, updates)
  np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)


@pytest.mark.slow
def test_p16_interrupted_equals_uninterrupted_bit_for_bit():
  algorithm = _algorithm(ema_decay=0.9, example_key=jax.random.key(5))
  whole, _ = _run(algorithm, algorithm.init(_PARAMS), _batches(8))
  half, _ = _run(algorithm, algorithm.init(_PARAMS), list(_batches(8))[:3])
  saved = jax.tree.map(np.asarray, half._replace(opt_state=None))  # to disk and back
  resumed = _algorithm(ema_decay=0.9, example_key=jax.random.key(5))
  state = half._replace(params=saved.params, ema=saved.ema, step=saved.step)
  rest, _ = _run(resumed, state, list(_batches(8))[3:])
  assert dpjax.trees.sha256(whole.params) == dpjax.trees.sha256(rest.params)
  assert dpjax.trees.sha256(whole.ema) == dpjax.trees.sha256(rest.ema)
  assert int(rest.step) == int(noise_state(rest).draws) == 8


@pytest.mark.parametrize(
  ("slices", "dtype"), [(1, None), (2, None), (1, "float32"), (1, "float64")]
)
def test_types_are_never_promoted_by_themselves(slices, dtype):
  def two_steps():
    algorithm = _algorithm(_plan(slices=slices), ema_decay=0.9)
    rows, params = jax.tree.map(
      lambda leaf: jnp.asarray(leaf, leaf.dtype if leaf.dtype == bool else dtype),
      (list(_batches(2 * slices, 32 // slices)), _PARAMS),
    )
    state, info = _run(algorithm, algorithm.init(params), rows)
    return state.ema["w"], join(info, info)

  with jax.enable_x64(dtype is not None):
    free = two_steps()
    with jax.numpy_dtype_promotion("strict"):
      jax.tree.map(np.testing.assert_array_equal, two_steps(), free)


def test_a_step_keeps_the_types_of_its_state():
  """The average of bfloat16 parameters became float32 in the first step, which lax.scan refuses."""
  algorithm = _algorithm(ema_decay=0.9)
  state = algorithm.init(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _PARAMS))
  after, _ = jax.eval_shape(algorithm.step, state, next(iter(_batches(1))))
  assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(
    lambda leaf: leaf.dtype, state
  )


def test_p17_each_step_draws_other_noise():
  algorithm = _algorithm(tx=optax.sgd(1.0))
  empty = Batch(Example(jnp.ones((8, 3)), jnp.ones(8)), jnp.zeros(8, bool))
  state, moves = algorithm.init(_PARAMS), []
  for _ in range(3):
    before = state.params["w"]
    state, _ = jax.jit(algorithm.step)(state, empty)
    moves.append(np.asarray(state.params["w"] - before))
  assert not np.allclose(moves[0], moves[1]) and not np.allclose(moves[1], moves[2])


@pytest.mark.slow
def test_p33_one_compilation_for_all_steps_and_p35_donation():
  algorithm, traces = _algorithm(), []

  def counted(state, batch):
    traces.append(None)
    return algorithm.step(state, batch)

  donate = functools.partial(jax.jit, donate_argnums=0)
  algorithm_counted = algorithm._replace(step=counted)
  state, _ = _run(algorithm_counted, algorithm.init(_PARAMS), _batches(6), donate)
  plain, _ = _run(algorithm, algorithm.init(_PARAMS), _batches(6))
  assert len(traces) == 1
  np.testing.assert_array_equal(state.params["w"], plain.params["w"])


def test_the_average_warms_up_and_then_decays():
  algorithm = _algorithm(_plan(noise_multiplier=0.0), ema_decay=0.5)
  state, seen = algorithm.init(_PARAMS), []
  ema = np.asarray(_PARAMS["w"])
  for t, batch in enumerate(_batches(6)):
    state, _ = jax.jit(algorithm.step)(state, batch)
    rate = min(0.5, (1 + t) / (10 + t))
    ema = rate * ema + (1 - rate) * np.asarray(state.params["w"])
    seen.append(np.abs(ema - state.ema["w"]).max())
  assert max(seen) < 1e-6
  assert training.eval_params(state) is state.ema
  with refuses("ema_decay", value=1.0):
    _algorithm(ema_decay=1.0)


def test_p32_info_is_named_and_kept_out_of_the_state():
  algorithm = _algorithm()
  state, info = _run(algorithm, algorithm.init(_PARAMS), _batches(1))
  batch = next(_batches(1))
  assert int(info.batch_size) == int(batch.mask.sum())
  assert not set(info._fields) & set(state._fields)
  assert "NOT private" in StepInfo.__doc__


@pytest.mark.slow
def test_augmentation_averages_before_clipping_so_sensitivity_stays():
  key = jax.random.key(0)
  loss = lambda p, e: jnp.sum(p["w"] * jnp.sum(e.x))
  augment = lambda key, x: x * jax.random.normal(key)
  averaged = training.augment(loss, augment, augmult=64)
  example = Example(jnp.full((2, 2, 1), 100.0), 0, key)
  grad_fn = dpjax.clipped_grad(averaged, l2_clip_norm=1.0)
  batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], example)
  total = grad_fn(_PARAMS, batch, True).total["w"]
  assert float(jnp.linalg.norm(total)) == pytest.approx(1.0, rel=1e-5)
  scales = jax.vmap(jax.random.normal)(jax.random.split(key, 64))
  expected = 400.0 * float(scales.mean())  # the mean gradient, not the mean of clipped ones
  grads = dpjax.per_example_grads(averaged)(_PARAMS, batch)[1].arrays["w"]
  np.testing.assert_allclose(grads[0], expected, rtol=1e-4)


@pytest.mark.long
def test_augmentations_keep_shape_and_range_and_one_copy_is_the_loss_itself():
  x = jnp.asarray(np.random.default_rng(0).random((8, 8, 3)), jnp.float32)
  for augment in AUGMENTATIONS.values():
    out = augment(jax.random.key(1), x)
    assert out.shape == x.shape and float(out.min()) >= float(x.min())
  flips = [AUGMENTATIONS["flip_shift"](jax.random.key(i), x, pixels=0) for i in range(20)]
  mirrored = [bool(jnp.array_equal(f, x[:, ::-1])) for f in flips]
  assert 0 < sum(mirrored) < 20 and all(
    m or jnp.array_equal(f, x) for m, f in zip(mirrored, flips)
  )
  identity = training.augment(_loss, lambda key, x: x, augmult=1)
  example = Example(jnp.ones(3), 1.0, jax.random.key(0))
  assert float(identity(_PARAMS, example)) == float(_loss(_PARAMS, example))
  with refuses("example.key"):
    identity(_PARAMS, example._replace(key=None))


@pytest.mark.slow
def test_each_example_of_each_step_gets_its_own_key():
  seen = lambda p, e: p["w"][0] * jax.random.normal(e.key)
  plan = _plan(noise_multiplier=0.0, l2_clip_norm=float("inf"))
  algorithm = training.dp_sgd(
    seen, plan, optax.sgd(1.0), noise_key=jax.random.key(0), example_key=jax.random.key(1)
  )
  batch = next(_batches(1))
  state, infos = algorithm.init(_PARAMS), []
  for _ in range(2):
    state, info = algorithm.step(state, batch)
    infos.append(float(info.mean_norm))
  assert infos[0] != infos[1]


@pytest.mark.parametrize(
  ("arguments", "field", "value"),
  [
    ((_plan(), _loss, optax.sgd(0.1)), "plan", "function"),
    ((_loss, None, optax.sgd(0.1)), "plan", "NoneType"),
    ((_loss, _plan(), 0.1), "tx", "float"),
    ((_loss, _plan(), optax.sgd), "tx", "function"),
  ],
)
def test_swapped_arguments_and_a_rate_for_an_optimizer_are_named(arguments, field, value):
  with refuses(field, value=Verbatim(value)):
    training.dp_sgd(*arguments, noise_key=jax.random.key(0))


def test_p41_the_loop_touches_each_batch_once():
  """One clipped sum per step: a second use of the batch would double the sensitivity."""
  calls = []

  def loss(params, example):
    calls.append(None)
    return _loss(params, example)

  algorithm = training.dp_sgd(loss, _plan(), optax.sgd(0.1), noise_key=jax.random.key(0))
  text = str(jax.make_jaxpr(algorithm.step)(algorithm.init(_PARAMS), next(_batches(1))))
  assert text.count("random_bits") == 1  # one draw of noise for the single leaf


@pytest.mark.slow
def test_training_learns_and_the_plan_pays_for_what_ran():
  data, plan = _data(), _plan(noise_multiplier=1.0, num_steps=8)
  model = dpjax.zoo.networks.build("linear", num_classes=3)
  params = model.init(jax.random.key(0), data.x[:1])
  loss = dpjax.losses.softmax_cross_entropy(model.apply)
  algorithm = training.dp_sgd(loss, plan, optax.sgd(0.1), noise_key=jax.random.key(0))
  state, count = algorithm.init(params), 0
  for batch in plan.batches(data, rng=0):
    state, _ = jax.jit(algorithm.step)(state, batch)
    count += 1
  assert count == int(state.step) == int(noise_state(state).draws) == plan.num_steps


def test_examples_do_not_get_the_keys_of_the_noise():
  with refuses("example_key"):
    training.dp_sgd(
      _loss,
      _plan(),
      optax.sgd(0.1),
      noise_key=jax.random.key(3),
      example_key=jax.random.key(3),
    )

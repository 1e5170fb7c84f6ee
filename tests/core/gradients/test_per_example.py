"""The vmap route against a loop of batch size 1 in float64, and against jax-privacy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback, pallas

import dpjax
from dpjax import gradients, losses, models, sampling
from dpjax.gradients import loss_checks, microbatch
from dpjax.parallel import made_for, targets
from dpjax.types import Example
from dpjax.validate import UserError
from dpjax.zoo import networks
from tests import quick_compile
from tests.refuses import refuses


def _loop_of_one(loss_fn, params, batch, mask, clip_norm):
  """The oracle: one example at a time, clipped by the textbook formula in float64."""
  total = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float64), params)
  grad_fn = jax.jit(jax.grad(loss_fn))
  for i in np.flatnonzero(mask):
    grads = grad_fn(params, jax.tree.map(lambda leaf: leaf[i], batch))
    grads = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), grads)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
    factor = min(1.0, clip_norm / norm) if norm else 0.0
    total = jax.tree.map(lambda t, g: t + factor * g, total, grads)
  return total


class BatchNormNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(x.reshape(x.shape[0], -1)))


_MODELS = {
  "linear": (models.Linear, (8, 8, 1)),
  "mlp": (functools.partial(models.Mlp, features=(16,)), (8, 8, 1)),
  "cnn": (models.Cnn, (28, 28, 1)),
  "cifar_cnn": (models.CifarCnn, (16, 16, 3)),
  "radp_cnn": (models.RadpCnn.mnist, (28, 28, 1)),
  "scatter_linear": (networks.ScatterLinear, (7, 7, 81)),
  "scatter_cnn": (networks.ScatterCnn, (7, 7, 81)),
  "wide_resnet": (
    functools.partial(networks.WideResNet, depth=10, width=1, num_groups=4),
    (8, 8, 3),
  ),
}


def _setup(name, size=5, seed=0):
  make, shape = _MODELS[name]
  rng = np.random.default_rng(seed)
  x = rng.random((size, *shape))
  model = make(num_classes=3)
  params = model.init(jax.random.key(seed), jnp.asarray(x[:1], jnp.float32))
  batch = Example(x, rng.integers(0, 3, size))
  return losses.softmax_cross_entropy(model.apply), params, batch


def _language(size=5):
  model = networks.Transformer(
    vocab_size=7, num_layers=1, num_heads=2, features=8, max_length=6
  )
  tokens = np.random.default_rng(0).integers(1, 7, (size, 6))
  params = model.init(jax.random.key(0), jnp.asarray(tokens[:1]))
  return losses.next_token(model.apply), params, Example(tokens, np.zeros(size, int))


@pytest.mark.long
@pytest.mark.parametrize("name", [*sorted(_MODELS), "transformer"])
def test_clipped_sum_equals_a_float64_loop_of_batch_size_one(name, x64):
  loss_fn, params, batch = _language() if name == "transformer" else _setup(name)
  params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
  mask = np.array([True, True, False, True, True])
  clip_norm = 0.7
  expected = _loop_of_one(loss_fn, params, batch, mask, clip_norm)
  summed = jax.jit(gradients.clipped_grad(loss_fn, l2_clip_norm=clip_norm, method="vmap"))(
    params, batch, mask
  )
  scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * scale), summed.total, expected
  )


@pytest.mark.cases(long=["cnn"], slow=...)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_clipped_sum_equals_jax_privacy(name):
  clipping = pytest.importorskip("jax_privacy.clipping")
  loss_fn, params, batch = _setup(name)
  batch = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), batch)
  batch = batch._replace(y=batch.y.astype(jnp.int32))
  theirs = clipping.clipped_grad(loss_fn, l2_clip_norm=0.7, keep_batch_dim=False)
  ours = gradients.clipped_grad(loss_fn, l2_clip_norm=0.7, method="vmap")
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-5),
    ours(params, batch, True).total,
    theirs(params, batch),
  )


def _toy():
  params = {"w": jnp.arange(6.0).reshape(3, 2) / 7, "b": jnp.ones(2)}
  rng = np.random.default_rng(0)
  batch = (
    jnp.asarray(rng.normal(size=(8, 3)) * 3, jnp.float32),
    jnp.asarray(rng.normal(size=(8, 2)), jnp.float32),
  )
  loss_fn = lambda p, e: jnp.sum((e[0] @ p["w"] + p["b"] - e[1]) ** 2)
  return loss_fn, params, batch


@pytest.mark.slow
def test_p7_padding_changes_nothing_even_where_its_gradient_is_not_finite():
  params = jnp.ones(3)
  loss_fn = lambda w, x: jnp.sqrt(jnp.sum((w * x) ** 2))  # gradient NaN at x = 0
  real = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
  padded = jnp.concatenate([real, jnp.zeros((3, 3))])
  mask = jnp.arange(7) < 4
  grad_fn = gradients.clipped_grad(loss_fn, l2_clip_norm=0.5)
  np.testing.assert_allclose(
    grad_fn(params, padded, mask).total, grad_fn(params, real, True).total, rtol=1e-6
  )


@pytest.mark.cases(slow=["100"], long=...)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
def test_p11_microbatches_never_change_the_result(size):
  loss_fn, params, batch = _toy()
  mask = jnp.arange(8) != 3
  whole = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0)(params, batch, mask)
  parts = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, microbatch_size=size)
  got = jax.jit(parts)(params, batch, mask)
  # A microbatch without examples is skipped, so its rows have no norms and losses.
  found = ((one.total, one.norms[mask], one.losses[mask]) for one in (got, whole))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5), *found)
  assert parts.sensitivity("replace_one") == 2.0  # per example, not per microbatch


def test_a_microbatch_of_padding_alone_is_skipped_and_no_bit_changes():
  loss_fn, params, batch = _toy()
  grad_fn = jax.jit(gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, microbatch_size=2))
  got = grad_fn(params, batch, jnp.arange(8) < 3)
  # A computed row has a norm, of padding as well.
  assert got.norms[:4].all() and not got.norms[4:].any() and not got.losses[4:].any()
  alone = grad_fn(params, jax.tree.map(lambda leaf: leaf[:4], batch), jnp.arange(4) < 3)
  jax.tree.map(np.testing.assert_array_equal, got.total, alone.total)
  # Rows may stand anywhere.
  apart = grad_fn(params, batch, jnp.arange(8) % 5 == 2)
  assert (
    apart.norms.astype(bool).tolist() == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2
  )


def _at_each_position(positions):
  params = {"w": jnp.eye(64) / 2}
  loss_fn = lambda params, x: jnp.sum(jnp.tanh(x @ params["w"]))
  return loss_fn, params, jnp.ones((88, positions, 64)) / 3


@pytest.mark.parametrize(("positions", "is_cut"), [(64, True), (1, False)])
def test_padded_batches_of_a_plan_are_cut_where_that_is_faster(positions, is_cut):
  sampler = sampling.PoissonSampler(sampling_prob=0.01, capacity=88)
  plan = dpjax.Plan(sampler, 1.0, 1.0, normalize_by=32, num_steps=9, delta=1e-5)
  loss_fn, params, batch = _at_each_position(positions)
  mask = jnp.arange(88) < 30
  cut = jax.jit(plan.clipped_grad(loss_fn))(params, batch, mask)
  assert bool(cut.norms[-1] == 0) == is_cut
  # Outside of jit, where a loop would be compiled at each call, it is one piece.
  models = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
  mapped = jax.vmap(lambda params: plan.clipped_grad(loss_fn)(params, batch, mask).norms)
  assert mapped(models)[:, -1].all()
  whole = jax.jit(plan.clipped_grad(loss_fn, microbatch_size=88))(params, batch, mask)
  assert whole.norms.all()
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5), cut.total, whole.total
  )


def test_multiplications_of_products_convolutions_loops_and_branches():
  count = lambda fn, *args: microbatch.multiplications(jax.make_jaxpr(fn)(*args))
  kernel, image = jnp.ones((3, 3, 2, 5)), jnp.ones((1, 8, 8, 2))
  axes = ("NHWC", "HWIO", "NHWC")
  convolved = lambda k, x: lax.conv_general_dilated(
    x, k, (1, 1), "SAME", dimension_numbers=axes
  )
  assert count(convolved, kernel, image) == 8 * 8 * 5 * 9 * 2
  w = jnp.ones((4, 4))
  assert count(lambda w, x: w @ x, w, jnp.ones(4)) == 16
  turned = lambda w, x: lax.scan(lambda x, _: (w @ x, None), x, length=7)[0]
  assert count(turned, w, jnp.ones(4)) == 7 * 16
  either = lambda w, x: lax.cond(x[0] > 0, lambda: w @ x, lambda: x)
  assert count(either, w, jnp.ones(4)) == 16


def test_microbatches_for_speed_are_those_of_a_cpu():
  loss_fn, params, batch = _at_each_position(64)
  closed = jax.make_jaxpr(loss_fn)(params, batch[0])
  size = microbatch.faster_size(closed, params, 88, 0.4)
  assert size is not None and size < 44
  # Rows that are all examples gain nothing.
  assert microbatch.faster_size(closed, params, 88, 1.0) is None
  with made_for.compiling_for(targets.parse("gpu:h100:1")):
    assert microbatch.faster_size(closed, params, 88, 0.4) is None


@pytest.mark.long
def test_microbatches_carry_keys():
  loss_fn = lambda w, e: w * jax.random.normal(e.key) * e.x
  size = 37
  batch = Example(
    jnp.ones(size), jnp.zeros(size, int), jax.random.split(jax.random.key(0), size)
  )
  whole = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0)(jnp.float32(1), batch, True)
  parts = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, microbatch_size=2)
  np.testing.assert_allclose(
    parts(jnp.float32(1), batch, True).total, whole.total, rtol=1e-5
  )


@pytest.mark.slow
def test_microbatches_bound_the_memory():
  loss_fn = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)
  # Large beside the sum and what its roundings left out, which microbatches carry.
  params, batch = jnp.ones((64, 256)), jnp.ones((2048, 64))

  def peak(size):
    grad_fn = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, microbatch_size=size)
    compiled = jax.jit(grad_fn).lower(params, batch, True).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert peak(16) < peak(None) / 4


@pytest.mark.slow
def test_losses_and_norms_are_per_example():
  loss_fn, params, batch = _toy()
  summed = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0)(params, batch, True)
  stacked_losses, grads = gradients.per_example_grads(loss_fn)(params, batch)
  assert summed.losses.shape == summed.norms.shape == (8,)
  np.testing.assert_allclose(summed.losses, stacked_losses, rtol=1e-6)
  flat = np.concatenate(
    [np.reshape(leaf, (8, -1)) for leaf in grads.arrays.values()], axis=1
  )
  np.testing.assert_allclose(summed.norms, np.linalg.norm(flat, axis=1), rtol=1e-5)


def test_no_clipping_is_the_ordinary_gradient_of_the_sum():
  loss_fn, params, batch = _toy()
  summed_loss = lambda p: jnp.sum(jax.vmap(loss_fn, (None, 0))(p, batch))
  clipped = gradients.clipped_grad(loss_fn, l2_clip_norm=float("inf"))
  with quick_compile.quickly():
    ordinary = jax.jit(jax.grad(summed_loss))(params)
    summed = jax.jit(clipped)(params, batch, True)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
    summed.total,
    ordinary,
  )


@pytest.mark.slow
def test_p28_no_parameter_is_dropped_even_if_unused():
  params = {"used": jnp.ones(2), "unused": jnp.ones(3)}
  loss_fn = lambda p, x: jnp.sum(p["used"] * x)
  total = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0)(
    params, jnp.ones((4, 2)), True
  ).total
  assert set(total) == {"used", "unused"}
  np.testing.assert_array_equal(total["unused"], 0)


@pytest.mark.slow
def test_p29_batch_norm_is_refused_for_it_would_mix_the_batch():
  model = BatchNormNet()
  x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
  variables = model.init(jax.random.key(0), x)

  def loss_fn(params, example):
    out, _ = model.apply(
      {**variables, "params": params}, example[None], mutable=["batch_stats"]
    )
    return jnp.sum(out**2)

  with refuses("loss_fn"):
    gradients.per_example_grads(loss_fn)(variables["params"], x)
  # the reason: the same network applied to the whole batch does mix
  whole = lambda x: model.apply(variables, x, mutable=["batch_stats"])[0]
  assert not np.allclose(whole(x)[1:], whole(x.at[0].set(99.0))[1:])


_BATCH = (jnp.ones((2, 4)), jnp.zeros(2, jnp.int32))
_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def _with_batch_axis(w, example):
  x, y = example
  return -jax.nn.log_softmax(x @ w)[jnp.arange(len(y)), y].mean()


def _centred(w, example):
  return jnp.sum((example[0] - lax.pmean(example[0], "batch")) @ w)


def _counting(ordered):
  def loss(w, example):
    seen = io_callback(lambda x: np.float32(0), _SCALAR, example[0][0], ordered=ordered)
    return jnp.sum(example[0] @ w) + seen

  return loss


_SEEN = jax.new_ref(jnp.zeros(()))


def _remembering(w, example):
  _SEEN[...] = _SEEN[...] + jnp.sum(example[0])
  return jnp.sum(example[0] @ w) * _SEEN[...]


def _in_a_kernel(w, example):
  def double(x, out):
    out[...] = 2 * x[...]

  like = jax.ShapeDtypeStruct(example[0].shape, example[0].dtype)
  return jnp.sum(pallas.pallas_call(double, out_shape=like)(example[0]) @ w)


def _while(w, example):
  grow = lambda x: x + jnp.abs(x @ w @ w.T) + 1
  return jnp.sum(lax.while_loop(lambda x: jnp.sum(x) < 10, grow, example[0]))


def _callback(w, example):
  shape = jax.ShapeDtypeStruct((3,), jnp.float32)
  return jnp.sum(jax.pure_callback(np.asarray, shape, example[0] @ w))


def _shifted(x):
  return lax.ppermute(x, "d", [(0, 1), (1, 0)])


def _backward(of_cotangent):
  """The identity, whose derivative rule computes something of the cotangent."""

  @jax.custom_vjp
  def same(x):
    return x

  same.defvjp(lambda x: (x, None), lambda _, g: (of_cotangent(g),))
  return lambda w, x: jnp.sum(same(w * x) ** 2)


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize(
  "loss_fn",
  [
    lambda w, x: jnp.sum(w * (x - _shifted(x))),
    _backward(_shifted),
    _backward(lambda g: lax.psum(g, "d")),
    _backward(lambda g: lax.all_gather(g, "d").sum(0)),
    _backward(lambda g: g + io_callback(lambda: np.float32(0), _SCALAR)),
  ],
  ids=["shifted", "shifted_back", "summed_back", "gathered_back", "called_back"],
)
def test_p29_no_example_reaches_another_over_an_axis_that_the_user_mapped(loss_fn, method):
  grad_fn = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, method=method)
  total = lambda x: grad_fn(jnp.ones(1), x, True).total
  rows = jnp.arange(4.0).reshape(2, 2, 1)
  with refuses("loss_fn"):
    jax.vmap(total, axis_name="d")(rows)
  mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  over = jax.sharding.PartitionSpec("d")
  # With check_vma, JAX itself refuses some of them.
  mapped = jax.shard_map(total, mesh=mesh, in_specs=over, out_specs=over, check_vma=False)
  with refuses("loss_fn"):
    jax.jit(mapped)(rows[0])


def test_a_number_of_each_device_in_a_loss_with_a_derivative_of_its_own_is_no_collective():
  """JAX would add gradients of unmarked parameters up over devices; dpjax marks them."""
  mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  over = jax.sharding.PartitionSpec("d")

  def total(scale, x):
    loss_fn = lambda w, x: jnp.sum(jax.nn.relu(w * x)) * scale[0]
    return gradients.clipped_grad(loss_fn, l2_clip_norm=1.0)(jnp.ones(1), x, True).total

  mapped = jax.shard_map(total, mesh=mesh, in_specs=(over, over), out_specs=over)
  assert jax.jit(mapped)(jnp.ones(1), jnp.full((2, 1), 0.25)).tolist() == [0.5]


def _over_its_own_rows(w, x):
  def row(a, b):
    shifted = lax.ppermute(b, "rows", [(0, 1), (1, 0)])
    return lax.psum(a * b, "rows") + lax.all_gather(b, "rows").sum() + shifted

  rows = jax.vmap(row, axis_name="rows")(jnp.stack([w[0], w[0] + 1]), jnp.stack([x, 2 * x]))
  return jnp.sum(rows**2)


def _checked(w, x):
  def inner(w):
    checkify.check(w[0] > 0, "must be positive")
    return jnp.sum(w * x)

  return checkify.checkify(inner)(w)[1]


def _printing(w, x):
  @jax.custom_vjp
  def same(w):
    return w

  def back(_, g):
    jax.debug.callback(lambda g: None, g)
    return (g,)

  same.defvjp(lambda w: (w, None), back)
  jax.debug.print("{}", x, ordered=True)
  return jnp.sum(jax.checkpoint(same)(w) * x)


@pytest.mark.parametrize("loss_fn", [_over_its_own_rows, _checked, _printing])
def test_what_stays_within_one_example_is_no_side_effect(loss_fn):
  loss_checks.check_loss(loss_fn, jnp.ones(1), jnp.ones((2, 1)))


def test_an_error_of_the_loss_itself_says_what_it_was_called_with():
  def unpacks(w, example):
    _, _, third = example
    return third @ w

  grad_fn = gradients.clipped_grad(unpacks, l2_clip_norm=1.0)
  with pytest.raises(ValueError) as caught:
    grad_fn(jnp.ones(3), (jnp.ones((2, 3)), jnp.ones(2, jnp.int32)), True)
  assert any("[0]: float32[3], [1]: int32[]" in note for note in caught.value.__notes__)


@pytest.mark.cases(long=[14])
@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize(
  ("loss_fn", "match"),
  [
    (_with_batch_axis, "fails on ONE example but runs on a batch.*reads batches"),
    (lambda w, example: example[0] @ w, r"returned \(3,\): must be a scalar"),
    (_centred, "unbound axis name: batch: a collective would mix examples"),
    (_counting(ordered=True), "'io_callback' has a side effect.*pure_callback"),
    (_counting(ordered=False), "'io_callback' has a side effect"),
    (jax.jit(_counting(ordered=False)), "'io_callback' has a side effect"),
    (_remembering, "'get' reads or writes a Ref, .*, through which one example"),
    (_in_a_kernel, "'get' reads or writes a Ref, as a Pallas kernel does"),
    (_while, "'while' has no reverse-mode derivative; write it with lax.scan"),
    (_callback, "'pure_callback' has no reverse-mode derivative"),
  ],
)
def test_bad_losses_are_one_line_that_names_the_primitive_and_the_way_out(
  loss_fn, match, method
):
  grad_fn = gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, method=method)
  with pytest.raises(UserError, match=match) as caught:
    grad_fn(jnp.ones((4, 3)), _BATCH, True)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "seen", [lambda x: x * lax.axis_index("i"), lambda x: lax.psum(x, "i")]
)
def test_an_axis_around_the_loss_is_named_as_one(seen):
  grad_fn = gradients.clipped_grad(lambda w, x: w * seen(x), l2_clip_norm=1.0)
  total = lambda x: grad_fn(jnp.ones(()), x, True).total
  with pytest.raises(UserError, match="runs along an axis"):
    jax.vmap(total, axis_name="i")(jnp.ones((2, 3)))


@pytest.mark.slow
def test_harmless_effects_and_stopped_gradients_are_no_mistake(capfd):
  def loss(w, example):
    jax.debug.print("seen {}", jnp.sum(example[0]))
    scale = lax.stop_gradient(_while(w, example))
    return jnp.sum(example[0] @ w) * scale

  for method in ("auto", "vmap"):
    grad_fn = gradients.clipped_grad(loss, l2_clip_norm=1.0, method=method)
    assert np.isfinite(grad_fn(jnp.ones((4, 3)), _BATCH, True).norms).all()
  jax.effects_barrier()
  assert "seen 4.0" in capfd.readouterr().out


def test_an_error_of_the_loss_itself_is_left_alone():
  def loss(w, example):
    raise ValueError("my own mistake")

  with pytest.raises(ValueError, match="my own mistake"):
    gradients.clipped_grad(loss, l2_clip_norm=1.0)(jnp.ones((4, 3)), _BATCH, True)


def test_wrong_options_name_themselves():
  loss_fn = lambda w, x: w * x
  with refuses("microbatch_size", value=0):
    gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, microbatch_size=0)
  with refuses("method"):
    gradients.clipped_grad(loss_fn, l2_clip_norm=1.0, method="vmapp")

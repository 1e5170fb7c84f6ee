"""Standardised kernels on the fast route: norms and sums without per-example gradients."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import gradients, standard_kernels
from dpjax.gradients.ghost import precision, tapped
from dpjax.gradients.ghost.units import Rule, Sum, sum_of
from dpjax.parallel import targets
from tests import quick_compile
from tests.core.gradients import ghost_oracle as oracle

_EPSILON = 1e-4


def _conv(x, kernel, stride=1, **options):
  numbers = ("NHWC", "HWIO", "NHWC")
  strides = (stride, stride)
  return lax.conv_general_dilated(
    x[None], kernel, strides, "SAME", dimension_numbers=numbers, **options
  )[0]


def _loss(params, example, *, stride=1):
  kernel = standard_kernels.standardize_kernel(params["kernel"], params["gain"], _EPSILON)
  hidden = _conv(example, kernel, stride)
  return jnp.sum(jnp.sin(hidden) * params["weight"])


def _strided(params, example):
  return _loss(params, example, stride=2)


def _problem(size=3, *, side=6, channels=16, features=24, stride=1, seed=0, batch=5):
  rng = np.random.default_rng(seed)
  out = -(-side // stride)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
  params = {
    "kernel": normal(size, size, channels, features) / np.sqrt(size * size * channels),
    "gain": 1 + 0.3 * normal(features),
    "weight": normal(out, out, features),
  }
  # Images of mean 1: their mean is most of what the kernel's gradient does not have.
  return params, 1 + normal(batch, side, side, channels)


# Sizes at which a rule is chosen on all machines.
_BY_RULE = {
  Rule.GRAM: {"side": 4, "channels": 64, "features": 32},
  Rule.PRODUCT: {"side": 20, "channels": 32, "features": 64, "batch": 3},
}


_MACHINES = ("", "gpu:h100:1", "tpu:v5e:1x1")
_RULES = [(Rule.GRAM, target) for target in _MACHINES]
# A GPU frees no products (`standardized`).
_RULES += [(Rule.PRODUCT, target) for target in _MACHINES if "gpu" not in target]


def _machine(target):
  if not target:
    return contextlib.nullcontext()
  return targets.compiling_for(targets.parse(target))


def _unit(loss, params, batch, *, clip_norm=0.5, platform=None):
  shapes = jax.eval_shape(lambda tree: tree, params)
  planned = oracle.plan(loss, shapes, oracle.first_of(batch), clip_norm, platform)
  place = sorted(params).index("kernel")
  return next(unit for unit in planned.units if place in unit.leaves)


def _single(tree):
  return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


@functools.cache
def _both(clip_norm):
  """Both routes at any values."""
  return oracle.compiled(_loss, clip_norm=clip_norm)


@functools.cache
def _grads_of(loss):
  return jax.jit(jax.vmap(jax.grad(loss), (None, 0)))


def _exact_norms(loss, params, batch):
  """Norms [B] of the gradients as JAX forms them."""
  with quick_compile.quickly():
    grads = _grads_of(loss)(params, batch)
  squares = [np.square(g).reshape(len(batch), -1).sum(1) for g in jax.tree.leaves(grads)]
  return np.sqrt(sum(squares))


_UNUSUAL = [
  lambda p: {**p, "gain": -p["gain"]},
  lambda p: {**p, "gain": p["gain"].at[3].set(0.0)},
  lambda p: {**p, "gain": p["gain"].at[3].set(1e-30)},
  lambda p: {**p, "gain": p["gain"] * 1e-5},
  lambda p: {**p, "gain": p["gain"] * 1e9},
  # Columns shorter than the square root of epsilon, whose size does not follow them.
  lambda p: {**p, "kernel": 1e-3 * p["kernel"]},
  lambda p: {**p, "kernel": 0 * p["kernel"]},
  lambda p: {**p, "kernel": p["kernel"].at[..., 5].set(0.3)},
  lambda p: {**p, "kernel": 1e6 * p["kernel"]},
  # Columns of a large mean.
  lambda p: {**p, "kernel": 0.5 + p["kernel"]},
  lambda p: {**p, "kernel": 2 + p["kernel"], "gain": 0.05 * p["gain"]},
  lambda p: {**p, "kernel": 1e5 + p["kernel"]},
]


@pytest.mark.usefixtures("quick_x64")
class TestInDouble:
  """In float64 both routes agree to ten digits."""

  @pytest.mark.cases(
    slow=["_loss-options0", "_strided-options3", "_loss-options2", "_loss-options4"]
  )
  @pytest.mark.parametrize(
    "loss, options",
    [
      (_loss, {}),
      (_loss, {"size": 1, "side": 3, "channels": 96, "features": 64}),
      (_loss, {"size": 2, "side": 5, "channels": 24}),
      (_strided, {"stride": 2}),
      (_loss, {"side": 3, "batch": 1}),
    ],
  )
  def test_agrees_with_stacked_gradients(self, loss, options):
    params, batch = _problem(**options)
    unit = _unit(loss, params, batch)
    assert (unit.rule, sum_of(unit)) == (Rule.GRAM, Sum.TRANSPOSE)
    assert unit.layer is not None
    oracle.check(loss, params, batch)

  @pytest.mark.cases(slow=["gram-tpu:v5e:1x1", "gram-gpu:h100:1", "gram-", "product-"])
  @pytest.mark.parametrize(("rule", "target"), _RULES)
  def test_agrees_by_each_rule_on_each_machine(self, rule, target):
    params, batch = _problem(**_BY_RULE[rule])
    with _machine(target):
      unit = _unit(_loss, params, batch)
      assert (unit.rule, sum_of(unit)) == (rule, Sum.TRANSPOSE)
      assert unit.layer is not None
      oracle.check(_loss, params, batch)

  @pytest.mark.cases(slow=["<lambda>1", "<lambda>9", "<lambda>0"])
  @pytest.mark.parametrize("change", _UNUSUAL)
  def test_agrees_at_unusual_values(self, change):
    params, batch = _problem()
    oracle.check(_loss, change(params), batch, bound=1e-8, run=_both(0.5))

  @pytest.mark.slow
  def test_agrees_where_the_size_equals_epsilon(self):
    params, batch = _problem(size=1, side=3, channels=64, features=64)
    column = jnp.tile(jnp.array([1.0, -1.0]), 32) / 8  # of length 1
    params["kernel"] = jnp.broadcast_to(column[:, None], (64, 64))[None, None]

    def loss(params, example):
      kernel = standard_kernels.standardize_kernel(params["kernel"], params["gain"], 1.0)
      return jnp.sum(jnp.sin(_conv(example, kernel)) * params["weight"])

    assert _unit(loss, params, batch).layer is not None
    oracle.check(loss, params, batch)

  @pytest.mark.slow
  def test_drops_masked_and_broken_examples(self):
    params, batch = _problem()
    mask = jnp.array([True, False, True, True, True])
    oracle.check(_loss, params, batch, mask=mask)
    for broken in (jnp.nan, jnp.inf, 1e300):
      slow, fast = oracle.both(_loss, params, batch.at[2, 0, 0, 0].set(broken))
      assert oracle.relative_error(slow.total, fast.total) < 1e-8

  @pytest.mark.cases(slow=["options0"])
  @pytest.mark.parametrize("options", [{"microbatch_size": 2}, {"clip_norm": 1e9}])
  def test_agrees_with_options(self, options):
    params, batch = _problem()
    oracle.check(_loss, params, batch, **options)

  @pytest.mark.slow
  def test_a_gain_with_a_clip_norm_of_its_own_agrees(self):
    params, batch = _problem()
    apart = {"kernel": 0.3, "gain": 0.2, "weight": 0.1}
    assert _unit(_loss, params, batch, clip_norm=apart).layer is None
    oracle.check(_loss, params, batch, clip_norm=apart)


def _standard(params):
  return standard_kernels.standardize_kernel(params["kernel"], params["gain"])


def _twice(params, example):
  both = _conv(example, _standard(params)) + _conv(jnp.flip(example), _standard(params))
  return jnp.sum(jnp.sin(both) * params["weight"])


def _scaled(params, example):
  kernel = standard_kernels.standardize_kernel(2 * params["kernel"], params["gain"])
  return jnp.sum(_conv(example, kernel) * params["weight"])


def _gain_again(params, example):
  return jnp.sum(_conv(example, _standard(params)) * params["weight"]) * params["gain"][0]


def _half(params, example):
  out = _conv(example.astype(jnp.bfloat16), _standard(params).astype(jnp.bfloat16))
  return jnp.sum(jnp.sin(out.astype(jnp.float32)) * params["weight"])


def _coarse(params, example):
  out = _conv(example, _standard(params), precision="BF16_BF16_F32")
  return jnp.sum(jnp.sin(out) * params["weight"])


@jax.jit
def _standardize(kernel, gain, epsilon):
  """A function of the same name as that of the library."""
  return kernel * gain[None, None, None] + epsilon


def _impostor(params, example):
  kernel = _standardize(params["kernel"], params["gain"], _EPSILON)
  return jnp.sum(_conv(example, kernel) * params["weight"])


@pytest.mark.parametrize("loss", [_twice, _scaled, _gain_again, _half, _coarse, _impostor])
def test_other_uses_take_the_general_rule(loss):
  params, batch = _single(_problem())
  assert _unit(_loss, params, batch).layer is not None
  assert _unit(loss, params, batch).layer is None


def test_no_gradient_of_an_example_is_formed():
  params, batch = _single(_problem(channels=32, features=40, side=4, batch=7))
  with targets.compiling_for(targets.parse("gpu:h100:1")):
    clipped = gradients.clipped_grad(_loss, l2_clip_norm=1.0)
    text = str(jax.make_jaxpr(clipped)(params, batch, True))
  assert "7,288,40" not in text
  assert "7,3,3,32,40" not in text


@pytest.mark.cases(slow=["gram-gpu:h100:1", "product-tpu:v5e:1x1", "gram-", "product-"])
@pytest.mark.parametrize(("rule", "target"), _RULES)
def test_norms_bound_the_gradient_and_are_near_it(rule, target, x64):
  del x64
  clipped = gradients.clipped_grad(_loss, l2_clip_norm=1.0)
  norms = jax.jit(lambda params, batch: clipped(params, batch, True).norms)
  # By the growth of a rounded product, up to the square root of the number of rows.
  allowed = {"": 0.004, "gpu:h100:1": 0.1, "tpu:v5e:1x1": 0.05}[target]
  for seed in range(3):
    params, batch = _problem(**_BY_RULE[rule], seed=seed)
    exact = _exact_norms(_loss, params, batch)
    single = _single((params, batch))
    with _machine(target):
      assert _unit(_loss, *single).rule is rule
      seen = np.float64(norms(*single))
    assert (seen >= exact * (1 - 1e-7)).all()
    assert (seen <= exact * (1 + allowed)).all()


@pytest.mark.slow
@pytest.mark.parametrize("change", _UNUSUAL)
def test_unusual_norms_bound_the_gradient_in_float32(change, x64):
  """Beside the other route: a gain of 1e9 under a sine is chaos, so double has another gradient."""
  del x64
  params, batch = _problem(side=4, channels=64, features=32)
  single = _single((change(params), batch))
  assert _unit(_loss, *single).layer is not None
  slow, fast = oracle.both(_loss, *single, run=_both(1.0))
  ratio = np.float64(fast.norms) / np.float64(slow.norms)
  assert ratio.min() >= 1 - 1e-5 and ratio.max() <= 1.01
  assert oracle.relative_error(slow.total, fast.total) < 0.01


@pytest.mark.cases(slow=["0.0009765625"])
@pytest.mark.parametrize("rounding", [2.0**-10, -(2.0**-10)])
def test_rounded_results_of_the_forward_pass_do_not_shorten_a_norm(rounding, x64):
  """The card's TF32 rounds the convolution's result, from which the gains' gradients come."""
  del x64
  params, batch = _problem(side=2, channels=32, features=16, batch=3)
  # One row that lies along the kernel: there the gain has nearly the whole gradient.
  params["gain"] = 0.05 + 0 * params["gain"]
  along = jnp.sign(_standard(params)[1, 1]).mean(-1)
  batch = jnp.broadcast_to(along, batch.shape)
  linear = lambda p, e: jnp.sum(_conv(e, _standard(p)) * p["weight"])
  exact = _exact_norms(linear, params, batch)
  single = _single((params, batch))
  with targets.compiling_for(targets.parse("gpu:h100:1")):
    share = precision.forward_growth(jnp.float32)
    assert share >= abs(rounding)
    unit = _unit(linear, *single)
    assert unit.layer is not None
    run = tapped.run

    def rounded(program, args, taps, keeping):
      outs, seen = run(program, args, taps, keeping)
      grown = {
        i: (*each[:-1], each[-1] * (1 + rounding)) if i in keeping else each
        for i, each in seen.items()
      }
      return outs, grown

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(tapped, "run", rounded)
      clipped = gradients.clipped_grad(linear, l2_clip_norm=1.0)
      # The sum is not compiled.
      norms = jax.jit(lambda params, batch: clipped(params, batch, True).norms)(*single)
  assert (np.asarray(norms) >= exact * (1 - 1e-6)).all()


def _one_place(params, example):
  """One place, with another leaf that may carry most of the norm."""
  kernel = standard_kernels.standardize_kernel(params["kernel"], params["gain"])
  numbers = ("NHWC", "HWIO", "NHWC")
  image = example["image"][None]
  out = lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=numbers)
  beside = jnp.sum(params["weight"] * example["beside"])
  return jnp.sum(out[0] * example["cotangent"]) + beside


@pytest.mark.cases(
  slow=[
    "2e-06-2e-29-1.5e+18-1e-11",
    "0.0001-1e-32-1e+18-1e-14",
    "2e-06-2e-30-1.5e+18-2e-12",
    "1e-12-2e-23-1.5e+19-1.1e-06",
  ]
)
@pytest.mark.parametrize(
  "gain, length, cotangent, clip_norm",
  [
    (1e-12, 2e-23, 1.5e19, 1.1e-6),
    (1e-12, 2e-23, 1.5e19, 1e-5),
    (2e-6, 2e-29, 1.5e18, 1e-11),
    (2e-6, 2e-30, 1.5e18, 2e-12),
    (1e-4, 1e-32, 1e18, 1e-14),
  ],
)
def test_results_that_underflow_shorten_no_norm(gain, length, cotangent, clip_norm):
  """The convolution's result is 0 in floats, and the gain's gradient is not: 545 times too short
  before the products in the result were counted."""
  signs = np.where(np.arange(9 * 256) % 2, 1.0, -1.0) / 48
  kernel = 1e4 * np.repeat(signs[:, None], 16, axis=1).reshape(3, 3, 256, 16)
  params = {
    "kernel": jnp.asarray(kernel, jnp.float32),
    "gain": jnp.full(16, gain, jnp.float32),
    "weight": jnp.zeros(1, jnp.float32),
  }
  batch = {
    "image": jnp.asarray(length * signs.reshape(1, 3, 3, 256), jnp.float32),
    "cotangent": jnp.zeros((1, 1, 1, 16), jnp.float32).at[..., 0].set(cotangent),
    "beside": jnp.full((1, 1), clip_norm / 2, jnp.float32),
  }
  assert _unit(_one_place, params, batch, clip_norm=clip_norm).layer is not None
  clipped = gradients.clipped_grad(_one_place, l2_clip_norm=clip_norm, method="ghost")
  total = jax.jit(clipped)(params, batch, True).total
  flat = np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(total)])
  assert np.linalg.norm(flat) <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize(
  "cast",
  [
    lambda kernel, gain: (kernel, gain.astype(jnp.bfloat16).astype(jnp.float32)),
    lambda kernel, gain: (kernel.astype(jnp.bfloat16).astype(jnp.float32), gain),
    lambda kernel, gain: (kernel.astype(jnp.bfloat16), gain.astype(jnp.bfloat16)),
  ],
)
def test_rounded_parameters_take_the_general_rule(cast):
  """The results belong to rounded values, and the formula would read the unrounded ones."""

  def loss(params, example):
    kernel = standard_kernels.standardize_kernel(*cast(params["kernel"], params["gain"]))
    return jnp.sum(jnp.sin(_conv(example, kernel.astype(jnp.float32))) * params["weight"])

  def rounded_result(params, example):
    kernel = _standard(params).astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.sum(jnp.sin(_conv(example, kernel)) * params["weight"])

  single = _single(_problem())
  assert _unit(loss, *single).layer is None
  assert _unit(rounded_result, *single).layer is None


@pytest.mark.slow
def test_a_gain_or_kernel_that_is_broadcast_takes_the_general_rule():
  params, batch = _single(_problem())
  one_gain = params | {"gain": jnp.ones(1)}
  one_column = params | {"kernel": params["kernel"][..., :1]}
  for broadcast in (one_gain, one_column):
    assert _unit(_loss, broadcast, batch).layer is None
    slow, fast = oracle.both(_loss, broadcast, batch)
    assert jax.tree.map(jnp.shape, slow.total) == jax.tree.map(jnp.shape, fast.total)
    assert oracle.relative_error(slow.total, fast.total) < 1e-3

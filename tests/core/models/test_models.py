"""Every model: parameter counts, shapes, gradients, and no example touches another."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import models, trees
from dpjax.zoo import networks
from dpjax.zoo.networks import registry
from tests.refuses import refuses

KEY = jax.random.key(0)
IMAGE, FEATURES = (8, 8, 1), (4, 4, 27)

# Every registered name at a size that compiles quickly; the WRN is its small sibling.
SMALL = {
  "linear": (dict(), IMAGE),
  "mlp": (dict(features=(5, 4)), IMAGE),
  "cnn": (dict(features=(4, 4), kernel_sizes=(3, 3), strides=(1, 1), hidden=8), IMAGE),
  "convnet": (dict(filters=(4,), pool_after=(1,), dense_sizes=(8,)), IMAGE),
  "cifar_cnn": (dict(filters=(4, 4), pool_after=(2,), dense_sizes=(8,)), IMAGE),
  "equivariant_cnn": (dict(filters=(4, 4), strides=(2, 1), pool_after=()), IMAGE),
  "radp_mnist": (dict(filters=(2, 2, 2)), IMAGE),
  "radp_fashion_mnist": (dict(filters=(2, 2, 2), dense_sizes=(8,)), IMAGE),
  "radp_cifar10": (dict(filters=(2, 2, 2, 2, 2), dense_sizes=(8,)), IMAGE),
  "scatter_linear": (dict(), FEATURES),
  "scatter_cnn": (dict(filters=(4, 4)), FEATURES),
  "scatter_cnn_cifar10": (dict(filters=(4, 4)), FEATURES),
  "patches_linear": (dict(), (6,)),
  "vgg16_linear": (dict(), (6,)),
  "vgg16_96_linear": (dict(), (6,)),
  "alexnet_linear": (dict(), (6,)),
  "minilm_linear": (dict(), (6,)),
  "vit": (
    dict(image_size=8, patch_size=4, num_layers=1, num_heads=2, features=8),
    IMAGE,
  ),
  "resnet": (dict(depths=(1, 1), features=4, image_size=16), IMAGE),
  "bert": (dict(vocab_size=7, num_layers=1, features=8, max_length=6), (5,)),
  "transformer": (dict(num_layers=1, num_heads=2, features=8, max_length=6), (5,)),
  "wrn": (dict(depth=10, width=1), IMAGE),
}


def _model(name: str, **options) -> nn.Module:
  options = SMALL[name][0] | options
  if name == "wrn":
    return networks.WideResNet(num_classes=7, **options)
  return networks.build(name, num_classes=7, **options)


def _inputs(name: str) -> jax.Array:
  shape = (3, *SMALL[name][1])
  if name in ("transformer", "bert"):
    return jax.random.randint(KEY, shape, 0, 7)
  return jax.random.uniform(KEY, shape)


def _loss(model, params, x):
  """Cross-entropy of ONE example with class 0."""
  return -jax.nn.log_softmax(model.apply(params, x[None]))[..., 0].sum()


@functools.lru_cache
def _params(name: str):
  """Random parameters drawn in NumPy: compiling every initialiser would take longer."""
  shapes = jax.eval_shape(_model(name).init, KEY, _inputs(name)[:1])
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda s: 0.3 * rng.normal(size=s.shape).astype(s.dtype), shapes)


def _influence(apply, x: jax.Array) -> tuple[float, float]:
  """Largest change of the other outputs, and of its own, when example 1 is replaced."""
  changed = x.at[1].set((5 * x[1][::-1] + 3) % 7)
  change = np.abs(np.asarray(apply(x)) - np.asarray(apply(changed)))
  return float(change[[0, 2]].max()), float(change[1].max())


def test_small_covers_every_name():
  assert set(registry.MODELS) - set(SMALL) == {"wrn_16_4", "wrn_40_4"}


@pytest.mark.cases(
  quick=["patches_linear", "vgg16_96_linear", "alexnet_linear", "minilm_linear"],
  slow=["convnet", "vgg16_linear", "vit", "resnet", "bert"],
  long=...,
)
@pytest.mark.parametrize("name", SMALL)
def test_p29_no_example_influences_another(name):
  apply = jax.jit(functools.partial(_model(name).apply, _params(name)))
  others, own = _influence(apply, _inputs(name))
  assert others <= 1e-6 and own > 1e-3


@pytest.mark.slow
def test_p29_the_influence_test_finds_batch_norm():
  class WithBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.BatchNorm(use_running_average=False)(x.reshape(len(x), -1))
      return nn.Dense(3)(x)

  model, x = WithBatchNorm(), _inputs("linear")
  variables = jax.jit(model.init)(KEY, x)
  apply = jax.jit(lambda x: model.apply(variables, x, mutable=["batch_stats"])[0])
  assert _influence(apply, x)[0] > 1e-2


@pytest.mark.cases(
  slow=["scatter_cnn_cifar10"], long=["scatter_linear", "scatter_cnn", "transformer", "wrn"]
)
@pytest.mark.parametrize("name", SMALL)
def test_logits_have_one_row_per_example(name):
  apply = _model(name).apply
  logits = jax.eval_shape(apply, _params(name), _inputs(name))
  lead = (3, 5) if name == "transformer" else (3,)
  assert logits.shape == (*lead, 7) and logits.dtype == jnp.float32


# One of each module; the other names differ in sizes only.
@pytest.mark.cases(quick=["mlp"], long=...)
@pytest.mark.parametrize("name", ["mlp", "cnn", "scatter_cnn", "transformer", "wrn"])
def test_per_example_gradients_are_finite_and_reach_every_parameter(name):
  params, x = _params(name), _inputs(name)
  grads = jax.vmap(jax.grad(functools.partial(_loss, _model(name))), in_axes=(None, 0))
  leaves = jax.tree.leaves(jax.jit(grads)(params, x))
  for param, grad in zip(jax.tree.leaves(params), leaves):
    assert grad.shape == (3, *param.shape)
    assert np.isfinite(grad).all() and np.abs(grad).max() > 0


@pytest.mark.cases(quick=["scatter_linear"], long=...)
@pytest.mark.parametrize("name", ["cnn", "scatter_linear", "transformer"])
def test_bfloat16_keeps_float32_parameters_and_logits(name):
  params, x = _params(name), _inputs(name)
  full, half = _model(name), _model(name, dtype=jnp.bfloat16)
  both = jax.jit(lambda p: (full.apply(p, x), half.apply(p, x)))
  grad = jax.jit(jax.grad(lambda p: _loss(half, p, x[0])))(params)
  exact, logits = both(params)
  assert logits.dtype == np.float32 and 0 < np.abs(logits - exact).max() < 0.1
  for leaf in jax.tree.leaves(grad):
    assert leaf.dtype == np.float32 and np.isfinite(leaf).all()


@pytest.mark.slow
def test_float64_stays_float64(x64):
  model, x = models.Mlp(num_classes=3), jnp.ones((2, 4), jnp.float64)
  params = jax.tree.map(lambda p: p.astype(jnp.float64), model.init(KEY, x))
  assert model.apply(params, x).dtype == jnp.float64


@pytest.mark.cases(long=["wrn_16_4-shape10-2753818"])
@pytest.mark.parametrize(
  ("name", "shape", "count"),
  [
    ("linear", (28, 28, 1), 7_850),
    ("cnn", (28, 28, 1), 26_010),  # Papernot et al. 2021
    ("cifar_cnn", (32, 32, 3), 550_570),  # Papernot et al. 2021
    # lifting 36*3*8+8, conv 9*64*8+8 and 9*64*16+16, head 170
    ("equivariant_cnn", (32, 32, 3), 14_890),
    ("radp_mnist", (28, 28, 1), 10_058),
    ("radp_fashion_mnist", (28, 28, 1), 155_786),
    ("radp_cifar10", (32, 32, 3), 657_114),
    ("scatter_linear", (7, 7, 81), 39_700),
    # conv 9*81*16+16, conv 9*16*32+32, dense 512*32+32, head 330
    ("scatter_cnn", (7, 7, 81), 33_066),
    # conv 9*243*64+64, conv 9*64*64+64, head 1024*10+10
    ("scatter_cnn_cifar10", (8, 8, 243), 187_210),
    ("wrn_16_4", (32, 32, 3), 2_753_818),
  ],
)
def test_parameter_counts(name, shape, count):
  model = networks.build(name, num_classes=10)
  shapes = jax.eval_shape(model.init, KEY, jnp.zeros((1, *shape)))
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def test_cnn_fits_digits_with_smaller_kernels():
  x = jnp.zeros((2, 8, 8, 1))
  model = models.Cnn(num_classes=10, kernel_sizes=(3, 3), strides=(1, 1))
  logits, params = jax.eval_shape(model.init_with_output, KEY, x)
  assert logits.shape == (2, 10)
  assert trees.size(params) == 160 + 4640 + (4 * 4 * 32 + 1) * 32 + 330


@pytest.mark.parametrize("size", [8, 12])
def test_cnn_refuses_images_too_small_for_its_kernels(size):
  with refuses("x.shape"):
    models.Cnn(num_classes=10).init(KEY, jnp.zeros((1, size, size, 1)))


@pytest.mark.parametrize("name", ["cnn", "radp_mnist", "scatter_linear", "wrn_16_4"])
def test_a_missing_channel_axis_is_named(name):
  with refuses("x.shape"):
    networks.build(name, num_classes=10).init(KEY, jnp.zeros((2, 28, 28)))


@pytest.mark.cases(long=[4, 7, 8])
@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: models.Cnn(num_classes=0), "num_classes"),
    (lambda: models.Cnn(num_classes=2, features=(4,)), "features"),
    (lambda: models.Cnn(num_classes=2, activation="rely"), "activation"),
    (lambda: models.Mlp(num_classes=2, features=(0,)), "features[0]"),
    (lambda: models.ConvNet(num_classes=2, filters=(4,), pool_after=(2,)), "pool_after"),
    (lambda: models.ConvNet(num_classes=2, filters=(4,), strides=(1, 1)), "strides"),
    (lambda: networks.WideResNet(num_classes=2, depth=15), "depth"),
    (lambda: networks.WideResNet(num_classes=2, num_groups=5), "num_groups"),
    (lambda: networks.Transformer(9, features=10, num_heads=4), "features"),
  ],
)
def test_wrong_fields_are_refused_when_the_model_is_made(make, field):
  with refuses(field):
    make()

"""Activations, pooling, per-example standardisation, standardised kernels."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import models
from dpjax.zoo.networks.scatter_heads import group_standardize, standardized_features
from dpjax.zoo.networks.wide_resnet import WsConv, standardize_kernel
from tests.refuses import refuses

KEY = jax.random.key(0)


@pytest.mark.slow
def test_tempered_sigmoid_is_tanh_by_default():
  x = jnp.linspace(-8, 8, 101)
  np.testing.assert_array_equal(models.tempered_sigmoid(x), jnp.tanh(x))


@settings(max_examples=30)
@given(st.floats(0.1, 4), st.floats(0.1, 4), st.floats(-2, 2), st.floats(-6, 6))
def test_tempered_sigmoid_is_its_formula(scale, inverse_temp, offset, x):
  formula = scale / (1 + np.exp(-inverse_temp * x)) - offset
  ours = models.tempered_sigmoid(jnp.float32(x), scale, inverse_temp, offset)
  np.testing.assert_allclose(ours, formula, atol=2e-6)


@pytest.mark.slow
def test_activation_with_parameters_reaches_the_model():
  x = jnp.linspace(0.1, 1, 12).reshape(2, 6)
  apply = lambda activation: models.Mlp(num_classes=2, activation=activation)
  params = jax.jit(apply("tanh").init)(KEY, x)
  same = apply(["tempered_sigmoid", 2.0, 2.0, 1.0]).apply(params, x)
  other = apply(("tempered_sigmoid", 1.5, 3.0, 0.5)).apply(params, x)
  np.testing.assert_array_equal(same, apply("tanh").apply(params, x))
  assert float(jnp.abs(same - other).max()) > 1e-2


@pytest.mark.cases(slow=["1-VALID-7"], long=...)
@pytest.mark.parametrize(
  ("stride", "padding", "size"),
  [(2, "SAME", 7), (1, "VALID", 7), (2, "SAME", 1)],
)
def test_max_pool_equals_reduce_window(stride, padding, size):
  x = jax.random.normal(KEY, (2, size, size + 1, 3))
  ours = lambda x: models.max_pool(x, stride=stride)
  theirs = lambda x: nn.max_pool(x, (2, 2), (stride, stride), padding)

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_grad(pool, x):
    out, pull = jax.vjp(pool, x)
    return out, *pull(jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

  (value, grad), (expected, expected_grad) = (
    value_and_grad(pool, x) for pool in (ours, theirs)
  )
  np.testing.assert_array_equal(value, expected)
  np.testing.assert_allclose(grad, expected_grad, atol=1e-6)


@pytest.mark.slow
def test_max_pool_shares_the_gradient_of_a_tie():
  grad = jax.grad(lambda x: models.max_pool(x).sum())(jnp.zeros((1, 2, 2, 1)))
  np.testing.assert_allclose(grad, 0.25)


@pytest.mark.long
def test_group_standardize_equals_flax_group_norm_without_scale():
  x = 3 + jax.random.normal(KEY, (2, 4, 5, 12))
  norm = nn.GroupNorm(4, epsilon=1e-5, use_bias=False, use_scale=False)
  ours = group_standardize(x, 4)
  expected = jax.jit(norm.apply)({}, x)
  np.testing.assert_allclose(ours, expected, atol=1e-4)
  groups = np.asarray(ours).reshape(2, 20, 4, 3)
  np.testing.assert_allclose(groups.mean(axis=(1, 3)), 0, atol=1e-5)
  np.testing.assert_allclose(groups.std(axis=(1, 3)), 1, atol=1e-4)


def test_group_standardize_none_is_identity_and_a_bad_divisor_is_named():
  x = jnp.ones((1, 2, 2, 6))
  assert group_standardize(x, None) is x
  with refuses("num_groups", value=4):
    group_standardize(x, 4)


def test_a_whole_data_set_is_standardised_beside_or_in_place():
  x = np.random.default_rng(3).random((5, 2, 2, 4), np.float32)
  before, wanted = x.copy(), np.asarray(group_standardize(x, 2))
  beside = standardized_features(x, 2, batch_size=2)
  np.testing.assert_allclose(beside, wanted, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(x, before)
  assert standardized_features(x, 2, batch_size=2, in_place=True) is x
  np.testing.assert_array_equal(x, beside)


@pytest.mark.slow
def test_group_standardize_of_a_constant_is_zero_with_finite_gradient():
  x = jnp.full((1, 2, 2, 4), 5.0)
  assert float(jnp.abs(group_standardize(x, 2)).max()) == 0
  grad = jax.grad(lambda x: group_standardize(x, 2)[0, 0, 0, 0])(x)
  assert jnp.isfinite(grad).all()


@pytest.mark.long
def test_standardized_kernel_has_zero_mean_and_the_gain_as_norm():
  kernel = 2 + 5 * jax.random.normal(KEY, (3, 3, 4, 6))
  gain = jnp.arange(1.0, 7.0)
  standard = np.asarray(standardize_kernel(kernel, gain))
  np.testing.assert_allclose(standard.mean(axis=(0, 1, 2)), 0, atol=1e-6)
  fan_in = 3 * 3 * 4
  np.testing.assert_allclose(fan_in * standard.var(axis=(0, 1, 2)), gain**2, rtol=1e-4)
  shifted = standardize_kernel(7 * kernel - 3, gain)
  np.testing.assert_allclose(shifted, standard, atol=1e-5)


@pytest.mark.slow
def test_a_constant_kernel_gives_zero_and_a_finite_gradient():
  kernel = jnp.ones((1, 1, 3, 2))
  loss = lambda kernel: standardize_kernel(kernel, jnp.ones(2))[0, 0, 0, 0]
  assert float(loss(kernel)) == 0
  assert jnp.isfinite(jax.grad(loss)(kernel)).all()


@pytest.mark.long
def test_ws_conv_is_a_convolution_with_the_standardized_kernel():
  x = jax.random.normal(KEY, (2, 5, 5, 3))
  layer = WsConv(4, stride=2)
  params = jax.jit(layer.init)(KEY, x)["params"]
  params = params | {"gain": jnp.arange(1.0, 5.0), "bias": jnp.arange(4.0)}
  kernel = standardize_kernel(params["kernel"], params["gain"])
  plain = nn.Conv(4, (3, 3), (2, 2))
  expected = plain.apply({"params": {"kernel": kernel, "bias": params["bias"]}}, x)
  np.testing.assert_allclose(layer.apply({"params": params}, x), expected, atol=1e-5)

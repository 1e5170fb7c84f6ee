"""An example that is not finite takes nobody with it, however its convolutions are computed.

XLA's CPU backend computes some convolutions in groups as one, by a kernel with zeros between the
groups. NaN times zero is NaN, in the gradients of all other examples.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpjax import gradients

_LAYOUT = ("NHWC", "HWIO", "NHWC")


def _convolve(x, w, groups=1, strides=(1, 1)):
  return lax.conv_general_dilated(
    x, w, strides, "SAME", dimension_numbers=_LAYOUT, feature_group_count=groups
  )


def _depthwise(w, x):
  return jnp.sum(jnp.sin(_convolve(x[None], w, groups=4)))


def _in_two_groups(w, x):
  y = _convolve(x[None], w.reshape(3, 3, 2, 4), groups=2, strides=(2, 2))
  return jnp.sum(jnp.sin(y))


def _plain(w, x):
  return jnp.sum(jnp.sin(_convolve(x[None], w.reshape(3, 3, 4, 2))))


def _by_a_kernel_of_the_data(w, x):
  kernel = w * jnp.mean(x)
  return jnp.sum(jnp.sin(_convolve(x[None], kernel, groups=4)))


def _after_a_constant_kernel(w, x):
  blurred = _convolve(x[None], jnp.full((3, 3, 1, 4), 1 / 9, jnp.float32), groups=4)
  return jnp.sum(jnp.sin(blurred.sum(axis=(1, 2)) @ w.reshape(4, 18)))


def _in_a_branch(w, x):
  branches = (lambda: _depthwise(w, x), lambda: jnp.sum(w) * 0.1)
  return lax.cond(jnp.nansum(x) > -1e9, *branches)


_LOSSES = {
  "depthwise": (_depthwise, jnp.float32),
  "groups, strides": (_in_two_groups, jnp.float32),
  "double": (_plain, jnp.float64),
  "constant kernel": (_after_a_constant_kernel, jnp.float32),
  "kernel of the data": (_by_a_kernel_of_the_data, jnp.float32),
  "branch": (_in_a_branch, jnp.float32),
}


def _case(name):
  loss, dtype = _LOSSES[name]
  rng = np.random.default_rng(0)
  w = jnp.asarray(rng.normal(size=(3, 3, 1, 8)), dtype)
  x = jnp.asarray(rng.normal(size=(4, 6, 6, 4)), dtype)
  return loss, w, x


@pytest.mark.slow
@pytest.mark.parametrize("name", _LOSSES)
@pytest.mark.usefixtures("quick_x64")
def test_an_example_that_is_not_finite_takes_nobody_with_it(name):
  loss, w, x = _case(name)
  damaged = x.at[1, 2, 2, 1].set(jnp.nan)
  others = jnp.asarray([0, 2, 3])
  for method in ("vmap", "ghost"):
    grad_fn = gradients.clipped_grad(loss, l2_clip_norm=0.7, method=method)
    total = jax.jit(lambda w, x, fn=grad_fn: fn(w, x, True).total)
    with jax.numpy_rank_promotion("allow"):
      np.testing.assert_allclose(total(w, damaged), total(w, x[others]), atol=1e-5)
  _, rows = jax.jit(gradients.per_example_grads(loss))(w, damaged)
  finite = np.isfinite(np.asarray(rows.arrays)).all(axis=(1, 2, 3, 4))
  assert finite[np.asarray(others)].all()


def _window(x, w):
  return lax.conv_general_dilated(x[None], w, (1, 1), "VALID", dimension_numbers=_LAYOUT)


def _with_rule_of_a_convolution(kind):
  """Returns a loss whose function has no convolution, but whose derivative has one."""
  plain = lambda x, w: jnp.einsum("hwc,hwco->o", x, w)
  convolved = lambda x, w: _window(x, w)[0, 0, 0]
  if kind == "vjp":
    f = jax.custom_vjp(plain)
    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda s, g: jax.vjp(convolved, *s)[1](g))
  else:
    f = jax.custom_jvp(plain)
    f.defjvp(lambda at, by: (f(*at), jax.jvp(convolved, at, by)[1]))
  return lambda w, x: jnp.sum(jnp.sin(f(x, w)))


def _damage(loss, features):
  """Returns how far NaN in one example moves the sum of the others, largest of both routes."""
  rng = np.random.default_rng(0)
  w = jnp.asarray(rng.normal(size=(3, 3, 16, features)))
  x = jnp.asarray(rng.normal(size=(6, 3, 3, 16)))
  others = jnp.asarray([0, 2, 3, 4, 5])
  moved = []
  for method in ("vmap", "ghost"):
    fn = gradients.clipped_grad(loss, l2_clip_norm=1.0, method=method)
    total = jax.jit(lambda x, fn=fn: fn(w, x, True).total)
    wanted = total(x[others])
    assert float(jnp.linalg.norm(wanted)) > 1
    moved.append(float(jnp.max(jnp.abs(total(x.at[1].set(jnp.nan)) - wanted))))
  return max(moved)


@pytest.mark.parametrize("kind", ["vjp", "jvp"])
@pytest.mark.parametrize("features", [4, 64])
@pytest.mark.usefixtures("quick_x64")
def test_a_convolution_of_a_custom_derivative_takes_nobody_with_it(kind, features):
  """An attack: with 64 features gradients are formed again for the sum, several at once."""
  assert _damage(_with_rule_of_a_convolution(kind), features) < 1e-12


_AROUND = {
  "scan": lambda f, w, x: lax.scan(lambda c, k: (c + f(w, x * k), None), 0.0, jnp.ones(3))[
    0
  ],
  "branch": lambda f, w, x: lax.cond(
    jnp.nansum(x) > -1e9, f, lambda w, x: jnp.sum(w), w, x
  ),
  "checkpoint": lambda f, w, x: jax.checkpoint(f)(w, x),
  "vmap": lambda f, w, x: jnp.sum(jax.vmap(f, (None, 0))(w, jnp.stack([x, 2 * x]))),
  "changed kernel": lambda f, w, x: f(w * jnp.tanh(w), x),
  "loop": lambda f, w, x: lax.fori_loop(0, 3, lambda i, c: c + f(w, x), 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _AROUND)
@pytest.mark.usefixtures("quick_x64")
def test_a_custom_derivative_inside_of_another_equation_takes_nobody_with_it(name):
  inner = _with_rule_of_a_convolution("vjp")
  assert _damage(lambda w, x: _AROUND[name](inner, w, x), 64) < 1e-12


@pytest.mark.cases(slow=[0])
@pytest.mark.parametrize("name", ["groups, strides", "kernel of the data"])
@pytest.mark.usefixtures("quick_x64")
def test_gradients_are_those_of_single_examples(name):
  loss, w, x = _case(name)
  _, rows = jax.jit(gradients.per_example_grads(loss))(w, x)
  one_by_one = jnp.stack([jax.grad(loss)(w, row) for row in x])
  np.testing.assert_allclose(rows.arrays, one_by_one, atol=1e-5)


def test_only_what_may_mix_is_taken_one_by_one():
  text = str(
    jax.make_jaxpr(gradients.per_example_grads(_by_a_kernel_of_the_data))(
      jnp.ones((3, 3, 1, 8)), jnp.ones((4, 6, 6, 4))
    )
  )
  assert "scan[" in text
  for loss in (_depthwise, _plain, _after_a_constant_kernel):
    text = str(
      jax.make_jaxpr(gradients.per_example_grads(loss))(
        jnp.ones((3, 3, 1, 8)), jnp.ones((4, 6, 6, 4))
      )
    )
    assert "scan[" not in text

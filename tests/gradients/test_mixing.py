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


@pytest.mark.parametrize("name", _LOSSES)
@pytest.mark.usefixtures("x64")
def test_an_example_that_is_not_finite_takes_nobody_with_it(name):
  loss, w, x = _case(name)
  damaged = x.at[1, 2, 2, 1].set(jnp.nan)
  others = jnp.asarray([0, 2, 3])
  # The fast route has rows for the first three, and takes what vmap does for the others.
  fast = ("depthwise", "double", "constant kernel")
  methods = ("vmap", "ghost") if name in fast else ("vmap",)
  for method in methods:
    grad_fn = gradients.clipped_grad(loss, l2_clip_norm=0.7, method=method)
    total = jax.jit(lambda w, x, fn=grad_fn: fn(w, x, True).total)
    with jax.numpy_rank_promotion("allow"):
      np.testing.assert_allclose(total(w, damaged), total(w, x[others]), atol=1e-5)
  _, rows = jax.jit(gradients.per_example_grads(loss))(w, damaged)
  finite = np.isfinite(np.asarray(rows.arrays)).all(axis=(1, 2, 3, 4))
  assert finite[np.asarray(others)].all()


@pytest.mark.parametrize("name", ["groups, strides", "kernel of the data"])
@pytest.mark.usefixtures("x64")
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

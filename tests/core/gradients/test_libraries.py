"""Losses written with other libraries: the fast route needs no change to the user's model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dpjax import gradients, losses
from dpjax.types import Example
from tests.core.gradients import ghost_oracle as oracle
from tests.refuses import refuses

pytestmark = pytest.mark.usefixtures("quick_x64")


def _images():
  x = np.random.default_rng(0).normal(size=(4, 6, 6, 1))
  return Example(jnp.asarray(x), jnp.arange(4) % 3)


class _Nnx(nnx.Module):
  def __init__(self, rngs):
    self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
    self.norm = nnx.LayerNorm(4, rngs=rngs)
    self.head = nnx.Linear(36, 3, rngs=rngs)

  def __call__(self, x):
    x = jnp.tanh(self.norm(self.conv(x)))[:, ::2, ::2]
    return self.head(x.reshape(len(x), -1))


def _nnx():
  graph, params = nnx.split(_Nnx(nnx.Rngs(0)), nnx.Param)
  return lambda params, x: nnx.merge(graph, params)(x), params


def _equinox():
  eqx = pytest.importorskip("equinox")
  first, second = jax.random.split(jax.random.key(0))
  layers = [
    eqx.nn.Conv2d(1, 4, 3, stride=2, key=first),
    eqx.nn.Lambda(jax.nn.gelu),
    eqx.nn.Lambda(jnp.ravel),
    eqx.nn.Linear(16, 3, key=second),
  ]
  params, static = eqx.partition(eqx.nn.Sequential(layers), eqx.is_array)

  def apply(params, x):
    return jax.vmap(eqx.combine(params, static))(jnp.moveaxis(x, -1, 1))

  return apply, params


def _haiku():
  hk = pytest.importorskip("haiku")

  def net(x):
    x = jnp.tanh(hk.Conv2D(4, 3, stride=2)(x))
    x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    return hk.Linear(3)(hk.Flatten()(x))

  model = hk.without_apply_rng(hk.transform(net))
  return model.apply, model.init(jax.random.key(0), _images().x)


_LIBRARIES = {"nnx": _nnx, "equinox": _equinox, "haiku": _haiku}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(_LIBRARIES))
def test_other_libraries(name):
  apply, params = _LIBRARIES[name]()
  loss = losses.softmax_cross_entropy(apply)
  oracle.check(loss, oracle.as_float64(params), _images())


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(_LIBRARIES))
def test_matrices_and_kernels_of_other_libraries_have_rules(name):
  apply, params = _LIBRARIES[name]()
  example = jax.tree.map(lambda leaf: leaf[0], _images())
  table = gradients.explain(losses.softmax_cross_entropy(apply), params, example)
  assert sum(len(row.params) for row in table.rows) == len(jax.tree.leaves(params))
  weights = [row for row in table.rows if max(row.shapes, key=np.prod) in _weights(params)]
  assert len(weights) == 2 and not any(row.reason for row in weights), str(table)


def _weights(params):
  return [leaf.shape for leaf in jax.tree.leaves(params) if np.prod(leaf.shape) > 10]


def test_a_function_among_the_parameters_is_one_line_that_says_what_to_do():
  eqx = pytest.importorskip("equinox")
  model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
  grad_fn = gradients.clipped_grad(lambda model, x: model(x).sum(), l2_clip_norm=1.0)
  with refuses("params.activation") as refused:
    grad_fn(model, jnp.ones((2, 3)), True)
  assert "\n" not in str(refused.value) and len(str(refused.value)) < 300

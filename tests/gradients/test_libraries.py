"""Losses written with other libraries: the fast route needs no change to the user's model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dpjax
from dpjax import gradients, losses
from dpjax.types import Example
from dpjax.validate import UserError
from tests.gradients import ghost_oracle as oracle
from tests.refuses import refuses

pytestmark = pytest.mark.usefixtures("x64")


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


class _Block(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(8, 8, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(jnp.tanh(self.linear(x)))


class _Existing(nnx.Module):
  """A model that was written without a thought of privacy: scan over layers, RNN, Dropout."""

  def __init__(self, rngs):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def blocks(rngs):
      return _Block(rngs)

    self.blocks = blocks(rngs)
    self.recurrent = nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs), rngs=rngs)
    self.head = nnx.Linear(8, 2, rngs=rngs)

  def __call__(self, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, block):
      return block(x)

    return self.head(self.recurrent(forward(x, self.blocks)[None, None])[0, -1])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rngs", "name"),
  [
    ({"default": 0}, "default"),
    ({"params": 0, "dropout": 1}, "dropout"),
  ],
)
def test_an_existing_nnx_model_is_trained_with_no_line_changed(rngs, name):
  model = _Existing(nnx.Rngs(**rngs))
  model.train()
  graph, params, rest = nnx.split(model, nnx.Param, ...)

  def loss(params, example):
    merged = nnx.merge(graph, params, rest, copy=True)
    nnx.reseed(merged, policy="match_shape", **{name: example["key"]})
    return jnp.sum(merged(example["x"]) ** 2)

  keys = jax.random.split(jax.random.key(5), 4)
  batch = {"x": jnp.linspace(0, 1, 32).reshape(4, 8), "key": keys}
  found = dpjax.per_example_grads(loss)(params, batch).arrays
  for place in range(4):
    row = jax.tree.map(lambda leaf: leaf[place], batch)
    alone = jax.grad(loss)(params, row)
    for one, all_rows in zip(jax.tree.leaves(alone), jax.tree.leaves(found), strict=True):
      np.testing.assert_allclose(one, all_rows[place], atol=1e-5)
  masks = {float(loss(params, {"x": batch["x"][0], "key": key})) for key in keys}
  assert len(masks) == 4

  shared = lambda params, example: jnp.sum(nnx.merge(graph, params, rest)(example) ** 2)
  with pytest.raises(UserError, match="copy=True"):
    dpjax.per_example_grads(shared)(params, batch["x"])


def test_nnx_optimizer_is_told_what_to_call():
  module = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
  graph, params = nnx.split(module, nnx.Param)
  plan = dpjax.Plan(
    sampler=dpjax.PoissonSampler(prob=0.5, capacity=8),
    noise_multiplier=1.0,
    l2_clip_norm=1.0,
    normalize_by=4,
    num_steps=4,
    delta=1e-5,
  )
  optimizer = nnx.Optimizer(module, plan.transform(dpjax.new_key()), wrt=nnx.Param)
  loss = lambda params, x: jnp.sum(nnx.merge(graph, params)(x))
  with pytest.raises(UserError, match="tx.update") as caught:
    optimizer.update(module, plan.clipped_grad(loss)(params, jnp.ones((8, 4)), True))
  assert caught.value.field == "updates"


def test_a_frozen_nnx_batch_norm_is_taken():
  module = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
  module.eval()
  graph, params, rest = nnx.split(module, nnx.Param, ...)
  loss = lambda params, x: jnp.sum(nnx.merge(graph, params, rest, copy=True)(x[None]))
  found = dpjax.per_example_grads(loss)(params, jnp.ones((3, 4)))
  assert jax.tree.leaves(found.arrays)[0].shape == (3, 4)

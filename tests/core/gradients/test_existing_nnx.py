"""Models of nnx that were written without a thought of privacy: no line of them changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dpjax
from dpjax.gradients import loss_checks
from dpjax.types import Example
from dpjax.validate import UserError
from tests import plans
from tests.refuses import refuses


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
    ({"params": 0, "dropout": 1, "carry": 2}, "dropout"),
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
  found = dpjax.per_example_grads(loss)(params, batch)[1].arrays
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


@pytest.mark.slow
def test_nnx_optimizer_is_told_what_to_call():
  module = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
  graph, params = nnx.split(module, nnx.Param)
  plan = plans.of()
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
  found = dpjax.per_example_grads(loss)(params, jnp.ones((3, 4)))[1]
  assert jax.tree.leaves(found.arrays)[0].shape == (3, 4)


def test_a_dropout_of_nnx_without_its_key_is_told_of_the_key():
  model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

  def loss(w, example):
    nnx.reseed(nnx.clone(model), default=example.key, dropout=example.key)
    return jnp.sum(w * example.x)

  batch = Example(jnp.ones((2, 2)), jnp.zeros(2, int))
  with refuses("loss_fn") as error:
    loss_checks.check_loss(loss, jnp.ones(2), batch)
  assert "example_key" in str(error.value) and "BatchNorm" not in str(error.value)

"""A callback that gets the whole batch in one call could mix examples, so its loss is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.gradients import clipped_grad, per_example_grads
from tests.refuses import refuses

_ROWS = jnp.arange(12.0).reshape(4, 3)


def _loss(method):
  def mean(x):
    return np.broadcast_to(x.mean(0), x.shape).astype(np.float32)

  def loss_fn(params, example):
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    return jnp.sum(jax.pure_callback(mean, shape, example, vmap_method=method) * params)

  return loss_fn


@pytest.mark.parametrize("method", ["expand_dims", "broadcast_all", "legacy_vectorized"])
def test_a_callback_of_the_whole_batch_is_refused(method):
  loss_fn = _loss(method)
  with refuses("loss_fn"):
    clipped_grad(loss_fn, l2_clip_norm=1.0)(jnp.ones(3), _ROWS, True)
  with refuses("loss_fn"):
    per_example_grads(loss_fn)(jnp.ones(3), _ROWS)


@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled"])
def test_a_callback_of_one_example_is_accepted(method):
  rows = per_example_grads(_loss(method))(jnp.ones(3), _ROWS)[1].arrays
  assert np.array_equal(rows, np.repeat(_ROWS.mean(1)[:, None], 3, axis=1))

"""A loss of one example that reads its batch would let one record move all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import Batch
from dpjax.gradients import clipped_grad, per_example_grads
from tests.refuses import refuses

_W = jnp.ones(2)
_X = np.arange(8.0, dtype=np.float32).reshape(4, 2)


def _batch(x):
  return Batch(x, x[:, 0] >= 0)


def _centred(batch):
  return lambda w, x: jnp.sum(w * (x - jnp.mean(batch.examples, axis=0)))


def _contrastive(batch):
  return lambda w, x: jax.nn.logsumexp(batch.examples @ (w * x)) - jnp.sum(w * x * x)


def _by_number(batch):
  return lambda w, x: jnp.sum(w * x) / jnp.sum(batch.mask)


@pytest.mark.parametrize("make", [_centred, _contrastive, _by_number])
def test_a_loss_that_reads_its_batch_is_refused(make):
  def clipped(batch):
    return clipped_grad(make(batch), l2_clip_norm=1.0)(_W, batch).total

  def stacked(batch):
    return per_example_grads(make(batch))(_W, batch)[1].arrays

  for x in (_X, jnp.asarray(_X)):
    for run in (clipped, stacked, jax.jit(clipped)):
      if run is stacked and make is _by_number:
        continue
      with refuses("loss_fn"):
        run(_batch(x))


def test_what_does_not_come_from_the_batch_may_be_closed_over():
  @jax.jit
  def step(frozen, key, batch):
    scale = jnp.exp(frozen) * jax.random.normal(key)
    size = batch.mask.shape[0]
    loss = lambda w, x: jnp.sum(w * x * scale) / size * (1 + batch.step[0])
    return clipped_grad(loss, l2_clip_norm=1.0)(_W, batch).total

  batch = _batch(_X)._replace(origin=np.zeros((4, 4), np.int32))
  assert np.isfinite(step(jnp.ones(2), jax.random.key(0), batch)).all()

"""A view is what the federation's own executors send, and the gradient that a step takes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import attacks, federated
from dpjax.attacks.views import gradient_view
from dpjax.federated.client import Received
from dpjax.federated.cohort import Cohort, LocalBatches
from dpjax.federated.execution.context import Context
from dpjax.types import Example
from tests.refuses import refuses


def _same(a, b, **tolerance):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def _clients(net):
  base = federated.local_training(net.loss, optax.sgd(0.2, momentum=0.9))
  yield "noisy", federated.client_noise(base, l2_clip_norm=0.1, noise_multiplier=1.0)
  yield "top_k", federated.compressed(base, federated.top_k(0.1))


@pytest.mark.long
def test_a_client_sends_what_its_view_says(net):
  """Local steps, clipping, noise and compression, from a cohort as the executor runs it."""
  truth, work = net.records(5), federated.LocalWork(batch_size=2, epochs=2)
  batches = work.rows(5, np.random.default_rng(0))
  cohort = Cohort(np.array([3]), np.array([5]), (batches,), data=truth)
  key = jax.random.key(11)
  for name, client in _clients(net):
    context = Context(Received(net.params), truth, None, key, None)
    sent = federated.loop_clients()(client, None)(context, cohort).sent
    own = jax.random.fold_in(key, 3)
    seen = attacks.client_view(client, net.params, batches, key=own)(truth)
    _same(jax.tree.map(lambda leaf: leaf[0], sent.message), seen, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_one_full_step_of_sgd_is_the_gradient(net):
  truth = net.records(3)
  client = federated.local_training(net.loss, optax.sgd(0.5))
  sent = attacks.client_view(client, net.params, attacks.all_at_once(3))(truth)
  gradient = gradient_view(net.loss, net.params)(truth)
  _same(attacks.as_gradient(sent["delta"], learning_rate=0.5), gradient, atol=1e-6)


def test_soft_labels_of_one_class_are_that_label(net):
  truth = net.records(4)
  soft = truth._replace(y=jax.nn.one_hot(truth.y, net.classes))
  view = gradient_view(net.loss, net.params)
  _same(view(soft), view(truth), atol=1e-6)


@pytest.mark.long
def test_each_example_is_clipped_as_training_clips_it(net):
  truth = net.records(4)
  view = gradient_view(net.loss, net.params, l2_clip_norm=0.5)
  summed = dpjax.clipped_grad(net.loss, l2_clip_norm=0.5)(net.params, truth, True)
  _same(view(truth), jax.tree.map(lambda leaf: leaf / 4, summed.total), atol=1e-6)
  free = gradient_view(net.loss, net.params)(truth)
  largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(free))
  assert largest > max(
    float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(view(truth))
  )


def test_bad_batches_are_one_line(net):
  client = federated.local_training(net.loss, optax.sgd(0.1))
  view = lambda rows, mask: attacks.client_view(
    client, net.params, LocalBatches(np.array(rows), np.array(mask))
  )
  with refuses("batches"):
    view([0, 1], [True, True])
  with refuses("batches"):
    view([[0]], [[False]])
  with refuses("batches"):
    view([[4]], [[True]])(Example(jnp.zeros((2, *net.shape)), jnp.zeros(2, jnp.int32)))
  with refuses("count", value=0):
    attacks.all_at_once(0)

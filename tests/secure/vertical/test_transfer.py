"""Transfer through shared entities: the exact gradient, and a gain on real digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import data
from dpjax.secure.vertical import transfer
from dpjax.training import part
from dpjax.types import Example
from tests.refuses import refuses


def encode(params, x):
  hidden = jnp.tanh(x @ params["body"]["w"] + params["body"]["b"])
  return hidden @ params["head"]["w"] + params["head"]["b"]


ENCODERS = (encode, encode)


def encoder_params(seed, *, inputs=32, hidden=64, outputs=16):
  first, second = jax.random.split(jax.random.key(seed))
  return {
    "body": {
      "w": jax.random.normal(first, (inputs, hidden)) * 1.5 / inputs**0.5,
      "b": jnp.zeros((1, hidden)),
    },
    "head": {
      "w": jax.random.normal(second, (hidden, outputs)) / hidden**0.5,
      "b": jnp.zeros((1, outputs)),
    },
  }


def small_batch():
  random = np.random.default_rng(0)
  return transfer.TransferBatch(
    source_x=jnp.asarray(random.normal(size=(9, 3))),
    source_y=jnp.asarray(random.integers(0, 3, 9)),
    source_shared=jnp.array([0, 4, 7, 2]),
    target_shared_x=jnp.asarray(random.normal(size=(4, 2))),
    target_x=jnp.asarray(random.normal(size=(5, 2))),
    target_y=jnp.asarray(random.integers(0, 3, 5)),
  )


def small_params():
  sizes = dict(hidden=4, outputs=3)
  params = transfer.TransferParams(
    encoder_params(0, inputs=3, **sizes), encoder_params(1, inputs=2, **sizes)
  )
  return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)


def joint_loss(params, batch, *, num_classes, alignment):
  """The sum of both losses, as one function of all parameters: what is minimised."""
  own, message = transfer.source_part(encode, params.source, batch, num_classes)
  return own + transfer.target_part(encode, params.target, message, batch, alignment)


@pytest.mark.long
def test_messages_give_the_joint_gradient(x64):
  params, batch = small_params(), small_batch()
  options = dict(num_classes=3, alignment=0.7)
  by_messages = functools.partial(transfer.transfer_gradient, ENCODERS, **options)
  gradients, info = jax.jit(by_messages)(params, batch)
  joint = jax.value_and_grad(functools.partial(joint_loss, **options))
  loss, expected = jax.jit(joint)(params, batch)
  for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected)):
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
  np.testing.assert_allclose(info.source_loss + info.target_loss, loss)
  assert info.bytes_each_way == 8 * (4 * 3 + 3 * 3)  # shared rows, and Phi


@pytest.mark.slow
def test_the_message_depends_on_the_targets_data_not_at_all(x64):
  params, batch = small_params(), small_batch()
  other = batch._replace(target_x=batch.target_x + 1, target_y=batch.target_y * 0)
  for one, two in zip(
    transfer.source_part(encode, params.source, batch, 3)[1],
    transfer.source_part(encode, params.source, other, 3)[1],
  ):
    np.testing.assert_array_equal(one, two)


def test_shared_rows_must_pair_up(x64):
  init, step = transfer.transfer_learning(ENCODERS, optax.sgd(0.1), num_classes=3)
  batch = small_batch()._replace(source_shared=jnp.array([0, 1]))
  with refuses("batch"):
    step(init(small_params()), batch)
  with refuses("alignment", value=-1):
    transfer.transfer_learning(ENCODERS, optax.sgd(0.1), num_classes=3, alignment=-1)


# --- digits: the source sees left halves, the target right halves


@pytest.fixture(scope="module")
def views():
  train, test = data.load("digits")
  left = lambda x: x[:, :, :4].reshape(-1, 32)
  right = lambda x: x[:, :, 4:].reshape(-1, 32)
  return left(train.x), right(train.x), train.y, right(test.x), test.y


def views_batch(views, *, seed, num_shared, num_labelled):
  """900 source rows; the target holds `num_shared` of them and knows a few labels."""
  left, right, y, _, _ = views
  rows = np.random.RandomState(seed).permutation(len(y))[:900]
  shared, labelled = rows[:num_shared], rows[:num_labelled]
  return transfer.TransferBatch(
    left[rows], y[rows], np.arange(num_shared), right[shared], right[labelled], y[labelled]
  )


TX = optax.adamw(0.01, weight_decay=1e-3)


@functools.partial(jax.jit, static_argnames="num_steps")
def train_transfer(params, batch, num_steps=300):
  init, step = transfer.transfer_learning(ENCODERS, TX, num_classes=10)
  body = lambda _, state: step(state, batch)[0]
  return jax.lax.fori_loop(0, num_steps, body, init(params)).params


@functools.partial(jax.jit, static_argnames=("num_steps", "frozen"))
def train_local(params, x, y, num_steps=300, frozen=()):

  def loss(params, example=None):
    losses = optax.softmax_cross_entropy_with_integer_labels(encode(params, x), y)
    return losses.mean()

  tx = TX
  if frozen:
    loss, tx = part.of_part(loss, TX, lambda name: name.partition("/")[0] not in frozen)

  def body(_, carry):
    params, opt_state = carry
    updates, opt_state = tx.update(jax.grad(loss)(params, None), opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return jax.lax.fori_loop(0, num_steps, body, (params, tx.init(params)))[0]


def accuracy(logits, y):
  return float(np.mean(np.argmax(logits, axis=1) == y))


@pytest.mark.long
def test_transfer_beats_local_only_on_digits_over_seeds(views):
  """20 labels of its own, 200 shared entities: .507 alone, .792 (mean of 5 seeds)."""
  _, _, _, test_x, test_y = views
  gains = []
  for seed in range(3):
    batch = views_batch(views, seed=seed, num_shared=200, num_labelled=20)
    params = transfer.TransferParams(encoder_params(seed), encoder_params(seed + 100))
    params = train_transfer(params, batch)
    logits = transfer.target_logits(ENCODERS, params, batch, test_x, num_classes=10)
    local = train_local(encoder_params(seed, outputs=10), batch.target_x, batch.target_y)
    gains.append(accuracy(logits, test_y) - accuracy(encode(local, test_x), test_y))
  assert min(gains) > 0.1


@pytest.mark.long
def test_warm_start_with_a_frozen_body_beats_local_only(views):
  """Another domain of the same features: the images shifted by one pixel."""
  train, test = data.load("digits")
  flat = lambda x: x.reshape(len(x), -1)
  shifted = lambda x: flat(np.roll(x, 1, axis=2))
  source = train_local(encoder_params(0, inputs=64, outputs=10), flat(train.x), train.y)
  gains = []
  for seed in range(2):
    rows = np.random.RandomState(seed).permutation(len(train))[:20]
    target = Example(shifted(train.x[rows]), train.y[rows])
    local = train_local(encoder_params(seed + 1, inputs=64, outputs=10), target.x, target.y)
    warm = train_local(source, target.x, target.y, frozen=("body",))
    np.testing.assert_array_equal(warm["body"]["w"], source["body"]["w"])
    assert not np.array_equal(warm["head"]["w"], source["head"]["w"])
    score = lambda params: accuracy(encode(params, shifted(test.x)), test.y)
    gains.append(score(warm) - score(local))
  assert min(gains) > 0

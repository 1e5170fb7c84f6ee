"""Inversions reach the records of small networks, and what noise and errors do to them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import attacks, federated, trees
from dpjax.attacks import gradient_inversion, reconstructions
from dpjax.attacks.gradient_inversion import total_variation
from dpjax.attacks.line_search import descend
from dpjax.attacks.views import gradient_view
from dpjax.types import Example
from dpjax.validate import UserError

KEY = jax.random.key(0)
_DLG = attacks.Dlg(steps=300)


def _attack(net, view, batch=1, **settings):
  settings = {"method": _DLG, "restarts": 2} | settings
  return attacks.Inversion(view, (batch, *net.shape), num_classes=net.classes, **settings)


def _exact(truth, found):
  order = reconstructions.match(truth.x, found.x)
  return attacks.success(attacks.fidelity(truth.x, found.x[order]))[0]


@pytest.fixture(scope="module")
def gradient(net):
  """The view of a central gradient, and the attack on it, compiled once."""
  view = gradient_view(net.loss, net.params)
  return view, _attack(net, view)


@pytest.mark.long
def test_dlg_finds_input_and_label_together(net, gradient):
  view, attack = gradient
  for seed in range(3):
    truth = net.records(1, seed)
    found = attack(view(truth), key=KEY)
    assert (
      reconstructions.mse(truth.x, found.x)[0] < 1e-3
      and found.labels.tolist() == truth.y.tolist()
    )
    assert found.objective == found.objectives.min() < 1e-8


@pytest.mark.long
def test_dlg_with_the_label_that_idlg_infers(net, gradient):
  view, attack = gradient
  truth = net.records(1, 5)
  seen = view(truth)
  labels = attacks.infer_labels(seen, batch_size=1)
  found = attack(seen, labels, key=KEY)
  assert (
    _exact(truth, found).recovered.count == 1 and found.labels.tolist() == truth.y.tolist()
  )
  again = attack(seen, labels, key=KEY)
  np.testing.assert_array_equal(again.x, found.x)


@pytest.mark.long
def test_only_the_best_of_a_trial_go_on(net):
  """What the finalists find does not depend on who else was tried, and costs no more."""
  truth, view = net.records(1, 3), gradient_view(net.loss, net.params)
  method = attacks.CosineAdam(steps=60, total_variation=0.0)
  settings = dict(method=method, restarts=4)
  every = _attack(net, view, **settings)(view(truth), truth.y, key=KEY)
  some = _attack(net, view, **settings, trial=20, finalists=2)(
    view(truth), truth.y, key=KEY
  )
  went_on = np.isclose(some.objectives, every.objectives, rtol=1e-3)
  assert went_on.sum() == 2 and np.all(
    some.objectives[~went_on] > every.objectives[~went_on]
  )
  assert some.objective == some.objectives.min()


@pytest.mark.long
def test_a_batch_comes_back_in_some_order(net):
  truth = net.records(3)
  view = gradient_view(net.loss, net.params)
  found = _attack(net, view, batch=3, method=attacks.Dlg(steps=1500), restarts=3)(
    view(truth), truth.y, key=KEY
  )
  assert _exact(truth, found).recovered.count == 3


@pytest.mark.long
def test_noise_of_a_known_size_ends_it(net, gradient):
  """Both sides: relative noise of 1e-5 changes nothing, as much noise as gradient everything."""
  view, attack = gradient
  truths = [net.records(1, seed) for seed in range(4)]

  def count(share):
    total = 0
    for place, truth in enumerate(truths):
      seen = view(truth)
      scale = share * optax.global_norm(seen) / np.sqrt(trees.size(seen))
      keys = jax.random.split(jax.random.key(place), 4)
      leaves, treedef = jax.tree.flatten(seen)
      noisy = [x + scale * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]
      found = attack(jax.tree.unflatten(treedef, noisy), truth.y, key=KEY)
      total += _exact(truth, found).recovered.count
    return total

  assert count(1e-5) == 4 and count(1.0) == 0


@pytest.mark.long
def test_several_local_steps_are_unrolled(net):
  """FedAvg: two epochs of two batches each, and what the server gets is one difference."""
  truth, work = net.records(2), federated.LocalWork(batch_size=1, epochs=2)
  batches = work.rows(2, np.random.default_rng(0))
  soft = federated.local_training(attacks.soft_labels(net.loss), optax.sgd(0.3))
  real = federated.local_training(net.loss, optax.sgd(0.3))
  sent = attacks.client_view(real, net.params, batches)(truth)
  method = attacks.CosineAdam(steps=500, total_variation=0.0)
  found = _attack(
    net, attacks.client_view(soft, net.params, batches), batch=2, method=method
  )(sent, truth.y, key=KEY)
  assert _exact(truth, found).recovered.count == 2
  # Read as one gradient of both, the same message gives nothing exact.
  view = gradient_view(net.loss, net.params)
  seen = attacks.as_gradient(sent["delta"], learning_rate=0.3, num_steps=4)
  naive = _attack(net, view, batch=2, method=method)(seen, truth.y, key=KEY)
  assert _exact(truth, naive).recovered.count == 0


@pytest.mark.long
def test_clipping_alone_fails(net):
  """The zero-noise defence: the adversary simulates the clip, and is not slowed down."""
  base = federated.local_training(net.loss, optax.sgd(1.0))
  client = federated.client_noise(base, l2_clip_norm=0.01, noise_multiplier=0.0)
  view = attacks.client_view(client, net.params, attacks.all_at_once(1))
  truth = net.records(1, 2)
  found = _attack(net, view, restarts=6)(view(truth), truth.y, key=KEY)
  assert _exact(truth, found).verdict.startswith("FAILS: 1 of 1")


@pytest.mark.long
def test_cosine_needs_no_scale_and_keeps_to_its_box(net):
  view = gradient_view(net.loss, net.params)
  truth = net.records(1, 1)
  seen = jax.tree.map(lambda leaf: 37.0 * leaf, view(truth))
  method = attacks.CosineAdam(steps=600, total_variation=0.0)
  found = _attack(net, view, method=method)(seen, truth.y, key=KEY)
  assert attacks.psnr(truth.x, found.x)[0] > 20 and found.objective < 1e-3
  assert found.x.min() >= 0 and found.x.max() <= 1 and found.x.dtype == np.float32
  assert found.objectives.min() >= 0 and found.objectives.max() < 1e-3


@pytest.mark.long
def test_total_variation_smooths(net):
  view = gradient_view(net.loss, net.params)
  truth = net.records(1)
  rough, smooth = (
    _attack(net, view, method=attacks.CosineAdam(steps=200, total_variation=weight))(
      view(truth), truth.y, key=KEY
    ).x
    for weight in (0.0, 10.0)
  )
  assert total_variation(smooth) < 0.1 * total_variation(rough)


@pytest.mark.long
def test_relu_is_warned_of_under_dlg_alone(net):
  loss, params = net.smooth(activation="relu")
  view, truth = gradient_view(loss, params), net.records(1)
  with pytest.warns(UserWarning, match="ReLU"):
    _attack(net, view, method=attacks.Dlg(steps=1))(view(truth), truth.y, key=KEY)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    method = attacks.CosineAdam(steps=1, total_variation=0.0)
    _attack(net, view, method=method)(view(truth), truth.y, key=KEY)


def _setting_errors(net):
  view = gradient_view(net.loss, net.params)
  make = lambda shape, **more: attacks.Inversion(
    view, shape, num_classes=net.classes, **more
  )
  yield lambda: make((0, *net.shape)), r"shape\[0\]=0"
  yield lambda: make(()), "must be .batch"
  yield lambda: make((1, *net.shape), restarts=0), "restarts=0"
  yield lambda: make((1, *net.shape), finalists=0), "finalists=0"
  yield lambda: make((1, 5, 5, 1)), "takes no examples of that shape"
  yield (
    lambda: make((1, 16), method=attacks.CosineAdam()),
    "total_variation=0.1: needs images",
  )
  yield lambda: attacks.Dlg(steps=0), "steps=0"
  yield lambda: attacks.Dlg(line_search=1), "line_search=1: must be True or False"
  yield lambda: attacks.CosineAdam(bounds=(1.0, 0.0)), "must be .low, high"


def _message_errors(net, seen, attack):
  broken = lambda value: jax.tree.map(lambda leaf: leaf.at[..., 0].set(value), seen)
  yield lambda: attack(broken(jnp.nan), [0], key=KEY), "must be finite"
  yield lambda: attack(jax.tree.map(lambda x: x + 0j, seen), [0], key=KEY), "must be real"
  yield lambda: attack(jax.tree.map(jnp.zeros_like, seen), key=KEY), "is 0"
  yield lambda: attack({"delta": seen}, [0], key=KEY), "must have the structure"
  wrong = jax.tree.map(lambda x: x[..., :2], seen)
  yield lambda: attack(wrong, [0], key=KEY), "must have shape"
  yield lambda: attack(seen, [3], key=KEY), r"labels: must be in 0..2 .*got 3"
  yield lambda: attack(seen, [-1], key=KEY), "labels: must be in 0..2"
  yield lambda: attack(seen, [0, 1], key=KEY), "labels: must be 1 integers"
  yield lambda: attack(seen, [0.5], key=KEY), "labels: must be 1 integers"
  yield lambda: attack(seen, [0], key=0), "must be a typed key"


@pytest.mark.long
def test_errors_are_one_line(net, gradient):
  view, attack = gradient
  cases = [*_setting_errors(net), *_message_errors(net, view(net.records(1)), attack)]
  for call, words in cases:
    with pytest.raises(UserError, match=words) as caught:
      call()
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_line_search_finds_what_steps_of_a_fixed_length_miss(net):
  loss, params = net.smooth(activation="tanh")
  params = jax.tree.map(lambda leaf: 2.0 * leaf, params)  # so that the units saturate
  view, exact = gradient_view(loss, params), []
  for searching in (True, False):
    method = attacks.Dlg(steps=300, line_search=searching)
    attack = _attack(net, view, method=method)
    truths = [net.records(1, seed) for seed in range(1, 5)]
    found = [(truth, attack(view(truth), truth.y, key=KEY)) for truth in truths]
    exact.append(sum(_exact(*one).recovered.count for one in found))
  assert exact == [4, 0]


def test_a_descent_ends_where_the_minimum_is_known():
  """Rosenbrock's valley, whose minimum 0 is at (1, 1); and what is never finite."""

  def valley(x):
    bend = x[1] - x[0] ** 2
    slope = [-2 * (1 - x[0]) - 400 * x[0] * bend, 200 * bend]
    return float((1 - x[0]) ** 2 + 100 * bend**2), np.array(slope)

  options = dict(memory=10, tolerance=1e-14)
  found = descend(valley, np.array([-1.2, 1.0]), steps=200, **options)
  np.testing.assert_allclose(found.x, [1, 1], atol=1e-5)
  assert found.value <= 1e-14 and found.num_steps < 60
  short = descend(valley, np.array([-1.2, 1.0]), steps=7, **options)
  assert short.num_steps == 7 and short.value == valley(short.x)[0] < valley([-1.2, 1.0])[0]
  lost = descend(lambda x: (np.nan, x), np.ones(2), steps=9, **options)
  assert lost.value == np.inf and lost.num_steps == 1


_KINKED = {
  "maximum": lambda z: jnp.maximum(z, 0.0),
  "where": lambda z: jnp.where(z > 0, z, 0.1 * z),
  "clip": lambda z: jnp.clip(z, 0.0, 6.0),
  "absolute": lambda z: (z + jnp.abs(z)) / 2,
}
_SMOOTH = {"softplus": jax.nn.softplus, "gelu": jax.nn.gelu, "soft_sign": jax.nn.soft_sign}


@pytest.mark.parametrize("name", [*_KINKED, *_SMOOTH])
def test_a_relu_is_known_by_what_it_does_and_not_by_its_name(name):
  activation = (_KINKED | _SMOOTH)[name]

  def loss(params, example):
    logits = activation(example.x @ params["a"]) @ params["b"]
    return -jnp.sum(jax.nn.log_softmax(logits) * (jnp.arange(3) == example.y))

  draw = lambda *shape: jnp.asarray(np.random.default_rng(1).normal(size=shape))
  params = {"a": draw(6, 8), "b": draw(8, 3)}
  shapes = Example(jax.ShapeDtypeStruct((2, 6), float), jax.ShapeDtypeStruct((2,), int))
  found = gradient_inversion.jumps(gradient_view(loss, params), shapes)
  assert found == (name in _KINKED)

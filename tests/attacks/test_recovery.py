"""What a gradient gives away without a search: labels, and inputs of a dense first layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import attacks, federated
from dpjax.attacks import reconstructions
from dpjax.attacks.views import gradient_view
from dpjax.zoo import networks
from tests.refuses import refuses


def _gradients(net, count, batch=1):
  view = jax.jit(gradient_view(net.loss, net.params))
  for seed in range(count):
    batch_of = net.records(batch, seed)
    yield batch_of, view(batch_of)


def test_the_input_of_a_dense_layer_is_its_gradients_ratio(net):
  for truth, seen in _gradients(net, 8):
    np.testing.assert_allclose(attacks.first_dense(seen), np.ravel(truth.x), atol=1e-5)


def test_a_larger_batch_gives_a_mixture(net):
  for truth, seen in _gradients(net, 4, batch=4):
    mixed = attacks.first_dense(seen)
    assert (
      np.min(reconstructions.mse(truth.x, np.tile(mixed, (4, 1)).reshape(truth.x.shape)))
      > 1e-3
    )


@pytest.mark.cases(quick=["-10000.0"], long=...)
@pytest.mark.parametrize("scale", [1.0, 1e-6, -1e4])
def test_no_common_factor_hides_input_or_label(net, scale):
  """Clipping is a common factor, a learning rate another."""
  for truth, seen in _gradients(net, 4):
    scaled = jax.tree.map(lambda leaf: leaf * scale, seen)
    np.testing.assert_allclose(attacks.first_dense(scaled), np.ravel(truth.x), atol=1e-5)
    positive = jax.tree.map(lambda leaf: leaf * abs(scale), seen)
    assert attacks.infer_labels(positive, batch_size=1).tolist() == truth.y.tolist()


def test_every_label_of_a_batch_of_one(net):
  pairs = [
    (attacks.infer_labels(seen, batch_size=1)[0], truth.y[0])
    for truth, seen in _gradients(net, 20)
  ]
  assert all(found == true for found, true in pairs)
  assert len({int(true) for _, true in pairs}) == net.classes  # no constant would pass


@pytest.mark.slow
def test_labels_of_a_batch_by_the_models_own_probabilities(net):
  """With the true mean probabilities the counts are exact."""
  model = networks.build(
    "mlp", num_classes=net.classes, features=(24,), activation="sigmoid"
  )
  for truth, seen in _gradients(net, 8, batch=8):
    chances = np.mean(jax.nn.softmax(model.apply(net.params, truth.x)), axis=0)
    found = attacks.infer_labels(seen, batch_size=8, probabilities=chances)
    assert found.tolist() == sorted(truth.y.tolist())


def test_without_a_bias_the_rows_sums_tell_the_label(net):
  for truth, seen in _gradients(net, 8):
    kernel = seen["params"]["head"]["kernel"]
    found = attacks.infer_labels({"head": {"kernel": kernel}}, batch_size=1)
    assert found.tolist() == truth.y.tolist()  # sigmoid features are positive


@pytest.mark.cases(long=["3"], slow=...)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_client_with_clipping_gives_its_record_away(net, steps):
  """A defence that fails: clipping without noise, whatever the number of local steps."""
  client = federated.local_training(net.loss, optax.sgd(0.1, momentum=0.9))
  clipped = federated.client_noise(client, l2_clip_norm=1e-3, noise_multiplier=0.0)
  truth = net.records(1)
  batches = attacks.all_at_once(1, num_steps=steps)
  sent = attacks.client_view(clipped, net.params, batches)(truth)
  found = attacks.first_dense(sent).reshape(truth.x.shape)
  exact = attacks.success(attacks.fidelity(truth.x, found))[0]
  assert exact.recovered.count == 1 and exact.verdict.startswith("FAILS")


@pytest.mark.long
def test_noise_ends_it(net):
  """The other side: the same message with noise of a known size."""
  client = federated.local_training(net.loss, optax.sgd(0.1))
  private = federated.client_noise(client, l2_clip_norm=1.0, noise_multiplier=1.0)
  view = attacks.client_view(
    private, net.params, attacks.all_at_once(1), key=jax.random.key(7)
  )
  truths = [net.records(1, seed) for seed in range(8)]
  found = [attacks.first_dense(view(truth)).reshape(net.shape) for truth in truths]
  x = np.concatenate([truth.x for truth in truths])
  exact = attacks.success(attacks.fidelity(x, np.stack(found)))[0]
  assert exact.recovered.count == 0 and exact.verdict.startswith("not shown to fail")


def test_errors_are_one_line(net):
  (_, seen), *_ = _gradients(net, 1)
  cases = [
    (lambda: attacks.first_dense(seen, "dense_7"), "layer"),
    (lambda: attacks.first_dense({"a": {"kernel": np.ones((2, 2))}}, "a"), "layer"),
    (
      lambda: attacks.first_dense(
        {"a": {"kernel": np.ones((2, 1)), "bias": np.zeros(1)}}, "a"
      ),
      "layer",
    ),
    (
      lambda: attacks.first_dense(
        {"a": {"kernel": np.ones((1, 2, 1)), "bias": np.ones(1)}}, "a"
      ),
      "layer",
    ),
    (lambda: attacks.infer_labels(seen, batch_size=0), "batch_size"),
    (lambda: attacks.infer_labels(seen, batch_size=1, layer="tail"), "layer"),
    (
      lambda: attacks.infer_labels(seen, batch_size=2, probabilities=[1.0]),
      "probabilities",
    ),
    (lambda: attacks.first_dense({"a": jnp.ones(2, jnp.complex64)}), "seen['a']"),
    (lambda: attacks.first_dense({"a": jnp.array([1, 2])}), "seen['a']"),
    (lambda: attacks.first_dense({}), "seen"),
    (lambda: attacks.as_gradient(seen, learning_rate=0.0), "learning_rate"),
  ]
  for call, field in cases:
    with refuses(field) as caught:
      call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "features", [np.tanh, np.abs, lambda z: -np.abs(z)], ids=["tanh", "abs", "negative"]
)
@pytest.mark.parametrize("scale", [1.0, 1e-120, 1e120])
def test_the_label_of_one_example_without_a_bias(features, scale):
  """Exact for features of any sign and any scale; also if most classes have probability 0."""
  rng = np.random.default_rng(0)
  for classes, impossible in ((3, 0), (10, 0), (10, 7)):
    for y in range(classes - impossible):
      f = features(rng.normal(size=20))
      p = np.exp(f @ rng.normal(0, 0.3, (20, classes)))
      p[classes - impossible :] = 0
      slope = p / p.sum() - (np.arange(classes) == y)
      kernel = scale * np.outer(f, slope)
      found = attacks.infer_labels({"head": {"kernel": kernel}}, batch_size=1)
      assert found.tolist() == [y]


def test_of_two_classes_the_sign_of_the_features_decides():
  f = np.abs(np.random.default_rng(0).normal(size=20))
  for y in range(2):
    kernel = np.outer(f, 0.3 * (1 - 2 * (np.arange(2) == y)))
    assert attacks.infer_labels({"head": {"kernel": kernel}}, batch_size=1).tolist() == [y]

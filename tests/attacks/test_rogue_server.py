"""A server whose model is made to leak: a whole batch is read from one gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import attacks, losses
from dpjax.attacks.rogue_server import read_imprint
from dpjax.attacks.views import gradient_view
from dpjax.types import Example
from dpjax.zoo import networks
from tests.refuses import refuses

_UNITS = 128
_BATCH = 16


def _examples(count, seed):
  rng = np.random.default_rng(seed)
  x = rng.random((count, 4, 4, 1)).astype(np.float32)
  return Example(jnp.asarray(x), jnp.asarray(rng.integers(0, 3, count), jnp.int32))


@pytest.fixture(scope="module")
def network():
  model = networks.build("mlp", num_classes=3, features=(_UNITS,), activation="relu")
  params = model.init(jax.random.key(0), jnp.zeros((1, 4, 4, 1)))
  loss = losses.softmax_cross_entropy(model.apply)
  return loss, params


@pytest.fixture(scope="module")
def trap(network):
  _, params = network
  return attacks.imprint(params, _examples(2000, seed=9).x)


@pytest.fixture(scope="module")
def views(network, trap):
  """What a client sends of the trap: plain, and with each example clipped."""
  loss, _ = network
  return {
    None: gradient_view(loss, trap),
    0.01: gradient_view(loss, trap, l2_clip_norm=0.01),
  }


def _exact(examples, seen, batch=_BATCH):
  """Share of the examples that come back to four digits."""
  guesses = read_imprint(seen, batch_size=batch)
  inputs = np.reshape(examples.x, (len(examples.x), -1))
  errors = np.abs(inputs[:, None] - guesses[None]).max(axis=2)
  return np.mean(errors.min(axis=1) < 1e-4)


@pytest.mark.cases(long=["0.01"], slow=...)
@pytest.mark.parametrize("l2_clip_norm", [None, 0.01])
def test_as_many_come_back_as_are_alone_in_their_bins(views, l2_clip_norm):
  """Of B inputs in k bins of equal chance, (1 - 1/k)^(B - 1) of them are."""
  shares = [
    _exact(examples, views[l2_clip_norm](examples))
    for examples in (_examples(_BATCH, seed) for seed in range(20))
  ]
  alone = (1 - 1 / _UNITS) ** (_BATCH - 1)
  assert np.mean(shares) == pytest.approx(alone, abs=0.07)


def test_an_honest_model_gives_none(network):
  loss, params = network
  view = gradient_view(loss, params)
  shares = [
    _exact(examples, view(examples))
    for examples in (_examples(_BATCH, seed) for seed in range(5))
  ]
  assert max(shares) == 0


def test_a_sum_of_clients_gives_all_of_them(views):
  """What a secure sum hides is who sent what; the bins add up like everything else."""
  clients = [_examples(4, seed) for seed in range(4)]
  padded = [
    jax.tree.map(lambda leaf: jnp.tile(leaf, (4, *[1] * (leaf.ndim - 1))), one)
    for one in clients
  ]
  total = jax.tree.map(lambda *leaves: sum(leaves), *map(views[None], padded))
  everyone = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *clients)
  assert _exact(everyone, total) > 0.7


@pytest.mark.parametrize("factor", [-0.1, 1e-6, 3e4])
def test_no_common_factor_hides_it(views, factor):
  examples = _examples(_BATCH, seed=3)
  seen = views[None](examples)
  scaled = jax.tree.map(lambda leaf: factor * leaf, seen)
  assert _exact(examples, scaled) == _exact(examples, seen) > 0.7


@pytest.mark.slow
def test_noise_of_the_client_hides_it(views):
  examples = _examples(_BATCH, seed=3)
  leaves, treedef = jax.tree.flatten(views[0.01](examples))
  keys = jax.random.split(jax.random.key(1), len(leaves))
  # Noise multiplier 1 on a mean of the batch, each example clipped to .01.
  noisy = [
    leaf + 0.01 / _BATCH * jax.random.normal(key, leaf.shape)
    for leaf, key in zip(leaves, keys)
  ]
  assert _exact(examples, jax.tree.unflatten(treedef, noisy)) == 0


@pytest.mark.parametrize("clients", [1, 4])
def test_fishing_shows_the_records_of_one_class_and_no_other(network, trap, clients):
  """Of a batch of 64, and of a sum over clients, whose batches only become one."""
  loss, _ = network
  fished = attacks.fish(trap, 2)
  view = gradient_view(loss, fished)
  batches = [_examples(64, seed) for seed in range(clients)]
  total = jax.tree.map(lambda *leaves: sum(leaves), *map(view, batches))
  everyone = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)
  guesses = read_imprint(total, batch_size=64 * clients)
  inputs = np.asarray(everyone.x).reshape(64 * clients, -1)
  exact = np.abs(inputs[:, None] - guesses[None]).max(axis=2).min(axis=1) < 1e-3
  of_class = np.asarray(everyone.y) == 2
  # Bins that are counted from the weights: which records are alone in theirs, in their class.
  first = fished["params"]["dense_0"]
  bins = np.sum(
    inputs @ np.asarray(first["kernel"]) + np.asarray(first["bias"]) > 0, axis=1
  )
  counts = np.bincount(bins[of_class], minlength=_UNITS + 1)
  alone = of_class & (counts[bins] == 1)
  assert exact.tolist() == alone.tolist() and alone.sum() > 10
  # Without fishing the bins are shared by all.
  assert np.mean(np.bincount(bins)[bins[of_class]] == 1) < alone[of_class].mean() - 0.15


@pytest.mark.slow
def test_a_record_alone_in_its_class_is_read_by_one_division(network):
  """A batch of 64 under an honest first layer, whose mixture is otherwise of 64."""
  loss, params = network
  examples = _examples(64, seed=0)
  examples = examples._replace(y=jnp.where(jnp.arange(64) == 11, 2, examples.y % 2))
  fished = gradient_view(loss, attacks.fish(params, 2))(examples)
  np.testing.assert_allclose(
    attacks.first_dense(fished), np.ravel(examples.x[11]), atol=1e-5
  )
  honest = attacks.first_dense(gradient_view(loss, params)(examples))
  assert np.abs(honest - np.ravel(examples.x[11])).max() > 0.1


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"label": 3}, "label"),
    ({"label": -1}, "label"),
    ({"strength": 0.0}, "strength"),
    ({"layer": "tail"}, "layer"),
  ],
)
def test_what_cannot_be_fished_for_is_one_line(network, changes, field):
  with refuses(field):
    attacks.fish(network[1], **{"label": 0, **changes})


def test_a_class_without_weights_passes_no_gradient_and_is_refused():
  head = {"kernel": np.zeros((2, 3)), "bias": np.zeros(3)}
  with refuses("layer"):
    attacks.fish({"head": head}, 1)
  with refuses("layer"):
    attacks.fish({"head": {"kernel": np.ones((2, 3))}}, 1)


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), batch=st.integers(1, 40))
def test_what_is_read_has_the_shape_and_is_finite(views, seed, batch):
  examples = _examples(_BATCH, seed)
  guesses = read_imprint(views[None](examples), batch_size=batch)
  assert guesses.shape == (batch, 16)
  assert np.isfinite(guesses).all()


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"layer": "dense_9"}, "layer"),
    (
      {"public": np.zeros((3, 5))},
      "public",
    ),
    ({"public": np.zeros((0, 16))}, "public"),
    ({"public": np.full((2, 16), np.nan)}, "public"),
    ({"gain": 0.0}, "gain"),
    ({"layer": "head", "public": np.zeros((3, 128))}, "layer"),
  ],
)
def test_wrong_arguments_are_one_line(network, changes, field):
  _, params = network
  arguments = {"public": np.zeros((3, 16)), **changes}
  with refuses(field):
    attacks.imprint(params, **arguments)

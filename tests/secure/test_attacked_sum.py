"""Inversion against a secure sum: one masked update is noise, and the sum is the sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.attack import quickstart
from dpjax import attacks
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import Attack, AttackConfig
from dpjax.experiments.run import loop, run_keys
from dpjax.experiments.sweeps.sweep import Runs
from dpjax.secure.encoding import Encoding, from_vector, to_vector
from tests.refuses import refuses


def _config(**changes):
  federate = quickstart.get_config().federate
  config = AttackConfig(target=federate, attack="dense_first")
  return fields.replace_all(config, changes)


def _ran(folder, **changes):
  (point,) = Runs(None, _config(**changes)).points
  return loop.train(point.config, folder)


def _gradient(x):
  """What a first dense layer of two units sends of one example: exactly invertible."""
  return {
    "dense_0": {
      "kernel": jnp.outer(x, jnp.array([1.0, -2.0])),
      "bias": jnp.array([1.0, -2.0]),
    }
  }


@pytest.mark.slow
def test_one_masked_update_is_noise_and_their_sum_is_the_sum():
  encoding, rng = Encoding(2, largest_value=4.0), np.random.default_rng(0)
  truths = rng.random((2, 64)).astype(np.float32)
  messages = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(_gradient, truths))
  sent = encoding.encode(messages, jnp.ones(2), jnp.ones(2, bool))
  rows = [jax.tree.map(lambda leaf: leaf[i], sent) for i in range(2)]
  mask = rng.integers(0, 2**32, 64 * 2 + 3, dtype=np.uint32)
  masked = [to_vector(rows[0], 32) + mask, to_vector(rows[1], 32) - mask]

  def inverted(vector):
    vector = np.append(vector[:-1], rows[0].weight)  # it knows that clients weigh 1
    mean = encoding.mean(from_vector(vector, rows[0]))
    return np.asarray(attacks.first_dense(mean, "dense_0"))

  unmasked = inverted(to_vector(rows[0], 32))
  np.testing.assert_allclose(unmasked, truths[0], atol=1e-5)
  for vector, truth in zip(masked, truths):
    assert abs(np.corrcoef(inverted(vector), truth)[0, 1]) < 0.4
  seen = inverted(masked[0] + masked[1])  # the sum alone is what a server gets
  np.testing.assert_allclose(seen, truths.mean(axis=0), atol=1e-5)


@pytest.mark.long
def test_a_secure_sum_is_a_defence_of_the_table(tmp_path):
  """Without one, tests/runs/test_attack.py finds all eight."""
  result = _ran(tmp_path, **{"target.secure_sum": "secagg"})
  assert result["success"]["exact"]["count"] == 0 and result["num_records"] == 8
  assert result["num_messages"] == 4 and result["clients_per_message"] == 2


def _prepared(**changes):
  (point,) = Runs(None, _config(**changes)).points
  loaded = Attack(point.config).data()
  return point.config.attack.prepare(point.config, loaded, run_keys.draw(0, noise_seed=0))


@pytest.mark.long
def test_noise_inside_the_sum_is_promised_against_the_server():
  changes = {"target.secure_sum": "secagg", "target.privacy": "distributed"}
  changes |= {"target.privacy.epsilon": None}
  changes |= {"target.privacy.noise_multiplier": 2.0, "target.privacy.delta": 1e-3}
  attacked = _prepared(**changes)
  assert attacked.guarantee.kind == "proved" and attacked.note == ""
  seen, guessed = attacked.send(1), attacked.guess(attacked.truths[1])
  gap = jax.tree.map(lambda one, two: np.std(np.asarray(one) - two), seen, guessed)
  assert max(jax.tree.leaves(gap)) > 0.5  # 2 * clip norm / 2 clients, in every number


@pytest.mark.long
def test_the_adversary_simulates_the_mean_of_as_many_clients():
  """At the true examples its view is what the server gets, to the grid."""
  attacked = _prepared(**{"target.secure_sum": "secagg"})
  seen, guessed = attacked.send(1), attacked.guess(attacked.truths[1])
  for one, two in zip(jax.tree.leaves(seen), jax.tree.leaves(guessed)):
    np.testing.assert_allclose(one, two, atol=1e-6)


def test_clients_that_are_in_no_sum_are_refused(tmp_path):
  changes = {"target.secure_sum": "secagg", "target.clients_per_round": 3.0}
  with refuses("target.clients_per_round"):
    _ran(tmp_path, **changes)


@pytest.mark.slow
def test_a_rogue_server_reads_every_client_of_a_sum(tmp_path):
  """Gradients add up, and so do the bins: hiding who sent what does not hide what was sent."""
  result = _ran(
    tmp_path / "run",
    **{
      "attack": "imprint",
      "target.model.options": {"features": (128,), "activation": "relu"},
      "target.secure_sum": "additive_sharing",
      "target.clients_per_round": 4,
    },
  )
  assert result["clients_per_message"] == 4
  shares = [row["count"] / row["total"] for row in result["success"].values()]
  assert max(shares) > 0.7

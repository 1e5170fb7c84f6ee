"""Compressed messages: expectation, error, and bits that are counted as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.federated import (
  compressed,
  drive,
  fed_avg,
  from_batches,
  loop_clients,
  quantize,
  rotated,
  top_k,
)
from dpjax.federated.compression import error_memory, hadamard
from tests.federated import problems
from tests.refuses import refuses

_X = {
  "a": jnp.asarray(np.random.default_rng(0).normal(size=(5, 7)), jnp.float32),
  "b": jnp.asarray([100.0, -1.0, 0.5], jnp.float32),
}


def _coded(compressor, seed=0, x=_X):
  key = jax.random.key(seed)
  codes = jax.jit(compressor.encode)(key, x)
  return codes, jax.jit(compressor.decode)(key, codes, x)


@pytest.mark.cases(long=["rotated"])
@pytest.mark.parametrize("compressor", [quantize(2), rotated(2)], ids=["even", "rotated"])
def test_rounding_is_right_on_average(compressor):
  one = jax.jit(lambda key: compressor.decode(key, compressor.encode(key, _X), _X))
  many = jax.vmap(one)(jax.random.split(jax.random.key(1), 4000))
  for found, x in zip(jax.tree.leaves(many), jax.tree.leaves(_X)):
    error = np.std(found, axis=0) / np.sqrt(4000)
    assert (np.abs(np.mean(found, axis=0) - x) <= 5 * error + 1e-4).all()
    assert np.std(found, axis=0).max() > 0  # it does round


@pytest.mark.long
def test_codes_fit_the_bits_that_are_counted():
  for bits in (1, 8):
    codes, _ = _coded(quantize(bits))
    assert quantize(bits).bits(_X) == bits * 38 + 2 * 64
    for code in codes:
      assert int(code.index.min()) >= 0 and int(code.index.max()) < 2**bits
  codes, _ = _coded(rotated(4))
  assert [code.index.size for code in codes] == [64, 4]
  assert rotated(4).bits(_X) == 4 * (64 + 4) + 2 * 64
  codes, _ = _coded(drive())
  assert drive().bits(_X) == sum(code.positive.size for code in codes) + 2 * 32
  codes, _ = _coded(top_k(0.2))
  assert [code.value.size for code in codes] == [7, 1]
  assert top_k(0.2).bits(_X) == 7 * (32 + 6) + 1 * (32 + 2)
  assert all(int(code.place.max()) < 35 for code in codes)


def test_top_k_keeps_the_largest():
  _, found = _coded(top_k(0.34))
  np.testing.assert_array_equal(found["b"], [100.0, 0.0, 0.0])
  kept = np.flatnonzero(found["a"].ravel())
  smallest = np.abs(np.asarray(_X["a"]).ravel()[kept]).min()
  left_out = np.delete(np.abs(np.asarray(_X["a"]).ravel()), kept)
  assert len(kept) == 11 and smallest >= left_out.max()


@pytest.mark.slow
def test_hadamard_is_its_own_inverse_and_keeps_lengths():
  x = jnp.asarray(np.random.default_rng(2).normal(size=64), jnp.float32)
  np.testing.assert_allclose(hadamard(hadamard(x)), x, atol=1e-5)
  assert float(jnp.linalg.norm(hadamard(x))) == pytest.approx(
    float(jnp.linalg.norm(x)), rel=1e-5
  )


def test_drive_has_the_error_of_its_paper():
  """1 - 2 / pi of the squared norm for a vector of any shape; signs alone would be far off."""
  x = {"w": jnp.zeros(1024).at[3].set(5.0).at[100].set(-1.0).at[7].set(0.3)}
  errors, compressor = [], drive()
  both = jax.jit(lambda key, x: compressor.decode(key, compressor.encode(key, x), x))
  for seed in range(20):
    found = both(jax.random.key(seed), x)
    errors.append(float(jnp.sum((found["w"] - x["w"]) ** 2) / jnp.sum(x["w"] ** 2)))
  x = {"w": jnp.asarray(np.random.default_rng(3).normal(size=1024), jnp.float32)}
  found = both(jax.random.key(0), x)
  dense = float(jnp.sum((found["w"] - x["w"]) ** 2) / jnp.sum(x["w"] ** 2))
  assert 0.30 < dense < 0.42
  assert max(errors) < 0.5


def test_error_feedback_sends_in_the_end_what_was_left_out():
  """The sum of what was sent is the sum of what was meant, less the last remainder."""
  target = np.asarray([[4.0, 2.0, 1.0, 0.5]], np.float32)
  cohort = from_batches([target])
  algorithm = fed_avg(
    lambda w, x: -jnp.sum(w * x),  # the difference of each round is `target`
    optax.sgd(1.0),
    map_clients=loop_clients(),
    key=jax.random.key(0),
    wrap=lambda client: compressed(client, top_k(0.25), error_feedback=True),
    memory=lambda params: error_memory(None, {"delta": params}),
  )
  state = algorithm.init(jnp.zeros(4), num_clients=1)
  for rounds in range(1, 13):
    state, info = algorithm.round(state, cohort)
    left_out = state.memories.all()["left_out"]["delta"][0]
    np.testing.assert_allclose(state.params + left_out, rounds * target[0], rtol=1e-5)
  assert (np.asarray(state.params) > 0).all()  # top_k alone would never send the last two
  assert int(info.upload_bits) == 32 + 2


def test_a_client_without_examples_sends_nothing_however_it_rounds():
  algorithm = fed_avg(
    problems.quadratic,
    optax.sgd(0.5),
    map_clients=loop_clients(),
    key=jax.random.key(0),
    wrap=lambda client: compressed(client, drive()),
  )
  state = algorithm.init({"w": jnp.ones(3)})
  after, _ = algorithm.round(state, from_batches([np.zeros((0, 3), np.float32)]))
  np.testing.assert_array_equal(after.params["w"], 1.0)


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: quantize(0), "bits"),
    (lambda: rotated(17), "bits"),
    (lambda: top_k(0.0), "share"),
    (lambda: top_k(1.5), "share"),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field):
    make()

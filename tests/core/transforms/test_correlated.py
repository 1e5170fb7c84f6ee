"""clip_and_correlated_noise: an Optax transformation like any other; DP-SGD as its limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax import transforms
from dpjax.gradients import Clip
from dpjax.noise import NoiseShape, correlated
from tests.refuses import refuses

_PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
_MASK = jnp.array([True, True, False, True])
_BANDED = correlated.BandedToeplitz((1.0, 0.6, 0.3))


def _tx(**changes):
  options = dict(
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    normalize_by=3.0,
    key=jax.random.key(0),
    noise_shape=NoiseShape(correlation=_BANDED),
    num_steps=6,
  )
  return transforms.clip_and_correlated_noise(**{**options, **changes})


def _grads(seed=0, size=4):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.normal(size=(size, *shape)), jnp.float32)
  return dpjax.wrap_grads({"w": draw(3, 2), "b": draw(2)})


@pytest.mark.slow
def test_the_identity_is_clip_and_noise_bit_for_bit():
  identity = _tx(noise_shape=NoiseShape())
  plain = dpjax.clip_and_noise(
    l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=3.0, key=jax.random.key(0)
  )
  state, other = identity.init(_PARAMS), plain.init(_PARAMS)
  update_identity, update_plain = jax.jit(identity.update), jax.jit(plain.update)
  for i in range(3):
    found, state = update_identity(_grads(i), state, _PARAMS, mask=_MASK)
    expected, other = update_plain(_grads(i), other, _PARAMS, mask=_MASK)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_the_noise_is_the_dense_inverse_of_the_plain_noise_and_the_sum_is_untouched():
  plain = _tx(noise_shape=NoiseShape())
  tx, noises, whites = _tx(), [], []
  clean = _tx(noise_multiplier=0.0)
  state, other, start = tx.init(_PARAMS), plain.init(_PARAMS), clean.init(_PARAMS)
  updates = [jax.jit(one.update) for one in (clean, tx, plain)]
  for i in range(6):
    quiet, _ = updates[0](_grads(i), start, _PARAMS, mask=_MASK)
    noisy, state = updates[1](_grads(i), state, _PARAMS, mask=_MASK)
    white, other = updates[2](_grads(i), other, _PARAMS, mask=_MASK)
    noises.append(np.asarray(noisy["w"] - quiet["w"]).ravel())
    whites.append(np.asarray(white["w"] - quiet["w"]).ravel())
  expected = np.linalg.solve(correlated.matrix(_BANDED, 6), np.array(whites))
  np.testing.assert_allclose(np.array(noises), expected, atol=1e-6)
  assert np.abs(np.array(noises) - np.array(whites)).max() > 0.05


@pytest.mark.cases(long=[6, 7, 8])
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"l2_clip_norm": -1.0}, "l2_clip_norm"),
    ({"noise_multiplier": float("nan")}, "noise_multiplier"),
    ({"normalize_by": 0}, "normalize_by"),
    ({"key": 0}, "key"),
    ({"num_steps": 0}, "num_steps"),
    ({"l2_clip_norm": {"w": 1.0, "b": 0.0}}, "l2_clip_norm"),
    ({"noise_shape": NoiseShape((1.0, 2.0))}, "noise_schedule"),
    ({"l2_clip_norm": Clip(1.0, "automatic")}, "clipping"),
    (
      {"noise_shape": NoiseShape(shares=1.0)},
      "noise_shares",
    ),
  ],
)
def test_wrong_arguments_are_named(changes, field):
  with refuses(field):
    _tx(**changes)

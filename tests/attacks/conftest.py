"""A small smooth network and its loss, whose gradients give everything away."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import losses
from dpjax.types import Example
from dpjax.zoo import networks

SHAPE, CLASSES = (4, 4, 1), 3


def smooth(seed=0, activation="sigmoid"):
  """(loss, params) of a net of 16 inputs, 24 units and 3 classes, weights U(-.5, .5)."""
  model = networks.build("mlp", num_classes=CLASSES, features=(24,), activation=activation)
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *SHAPE)))
  leaves, treedef = jax.tree.flatten(shapes)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  drawn = [
    jax.random.uniform(k, s.shape, minval=-0.5, maxval=0.5) for k, s in zip(keys, leaves)
  ]
  return losses.softmax_cross_entropy(model.apply), jax.tree.unflatten(treedef, drawn)


def records(count, seed=0):
  """Images in [0, 1] and labels."""
  rng = np.random.default_rng(seed)
  x = rng.random((count, *SHAPE)).astype(np.float32)
  return Example(jnp.asarray(x), jnp.asarray(rng.integers(0, CLASSES, count), jnp.int32))


@pytest.fixture(scope="session")
def net():
  loss, params = smooth()
  return types.SimpleNamespace(
    loss=loss, params=params, smooth=smooth, records=records, shape=SHAPE, classes=CLASSES
  )

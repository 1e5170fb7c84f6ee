"""Activations by name, and the tempered sigmoid that suits clipped gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from dpjax import validate

Activation = str | Sequence | Callable[[jax.Array], jax.Array]


def tempered_sigmoid(
  x: jax.Array, scale: float = 2.0, inverse_temp: float = 2.0, offset: float = 1.0
) -> jax.Array:
  """Returns scale * sigmoid(inverse_temp * x) - offset; the default is tanh.

  Bounded activations keep per-example gradients small, so that clipping removes less of them
  (Papernot et al. 2021, "Tempered sigmoid activations for deep learning with
  differential privacy"). The value is computed from tanh, so the default is tanh exactly.

  >>> tempered_sigmoid(jnp.array(0.0), scale=2.0, inverse_temp=3.0, offset=0.25).item()
  0.75
  """
  half = scale / 2
  shifted = half - offset
  wave = half * jnp.tanh(x * (inverse_temp / 2))
  return wave + shifted if shifted else wave


ACTIVATIONS = {
  "elu": nn.elu,
  "gelu": nn.gelu,
  "leaky_relu": nn.leaky_relu,
  "relu": nn.relu,
  "sigmoid": nn.sigmoid,
  "silu": nn.silu,
  "softplus": nn.softplus,
  "square": jnp.square,  # the only one that can be computed on ciphertexts
  "tanh": jnp.tanh,
  "tempered_sigmoid": tempered_sigmoid,
}


def activation_fn(activation: Activation) -> Callable[[jax.Array], jax.Array]:
  """Returns the function that the value of an `activation=` field stands for.

  Args:
    activation: a name; a function; or a name followed by its parameters, as in
      ("tempered_sigmoid", 1.58, 3.0, 0.71) or ("leaky_relu", 0.1).

  Raises:
    UserError: the name is unknown.

  >>> activation_fn("relu")(jnp.array([-1.0, 2.0])).tolist()
  [0.0, 2.0]
  >>> activation_fn(("leaky_relu", 0.5))(jnp.array([-1.0, 2.0])).tolist()
  [-0.5, 2.0]
  """
  if callable(activation):
    return activation
  name, *parameters = (activation,) if isinstance(activation, str) else activation
  validate.one_of(ACTIVATIONS, activation=name)
  function = ACTIVATIONS[name]
  return (
    functools.partial(_with_parameters, function, tuple(parameters))
    if parameters
    else function
  )


def _with_parameters(function, parameters, x):
  return function(x, *parameters)

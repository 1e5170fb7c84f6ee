"""The training of `secureml` in float64, as the reference for training on shares.

>>> x, y = np.array([[-2.0], [-1.0], [1.0], [2.0]]), np.array([[0.0], [0.0], [1.0], [1.0]])
>>> recipe = Recipe(learning_rate=1.0)
>>> start = [Dense(np.zeros((1, 1)), np.zeros(1))]  # no hidden layer: logistic regression
>>> network = train(start, x, y, [[0, 1, 2, 3]] * 20, recipe)
>>> predict(network, x, recipe)
array([0, 0, 1, 1])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dpjax.secure.mpc.secureml import Dense, Network, Recipe

_OUTPUTS = {
  "sigmoid": lambda z: np.clip(z + 0.5, 0, 1),
  "normalized_relu": lambda z: (
    np.maximum(z, 0) / (np.maximum(z, 0).sum(axis=1, keepdims=True) + 2**-6)
  ),
  "linear": lambda z: z,
}


class _Pass(NamedTuple):
  scores: np.ndarray  # [n, d_out]
  inputs: list[np.ndarray]  # of each layer, [n, d_in]
  slopes: list[np.ndarray]  # of each hidden layer


def _forward(network: Network, x: np.ndarray, activation: str) -> _Pass:
  inputs = [x]
  slopes = []
  for kernel, bias in network[:-1]:
    z = inputs[-1] @ kernel + bias
    inputs.append(np.maximum(z, 0) if activation == "relu" else z * z)
    slopes.append(z >= 0 if activation == "relu" else 2 * z)
  return _Pass(inputs[-1] @ network[-1].kernel + network[-1].bias, inputs, slopes)


def train(
  network: Network,
  x: np.ndarray,
  y: np.ndarray,
  batches: Iterable[Sequence[int] | np.ndarray],
  recipe: Recipe,
) -> list[Dense]:
  """Returns the network trained as by `secureml.train`, but without rounding and truncation.

  Args:
    x: [n, d_in].
    y: [n, d_out], 0 or 1.
    batches: [steps, B] indices below n.
  """
  network = list(network)
  for batch in batches:
    scores, inputs, slopes = _forward(network, x[batch], recipe.activation)
    error = _OUTPUTS[recipe.output](scores) - y[batch]  # [B, d_out]
    rate = recipe.learning_rate / len(batch)
    for place in reversed(range(len(network))):
      kernel, bias = network[place]
      steps = rate * inputs[place].T @ error, rate * error.sum(0)
      network[place] = Dense(kernel - steps[0], bias - steps[1])
      error = (error @ kernel.T) * slopes[place - 1] if place else error
  return network


def predict(network: Network, x: np.ndarray, recipe: Recipe) -> np.ndarray:
  """Returns the class of each row of x, [n], as `secureml.predict` does; 0 or 1 for a single
  output."""
  scores = _forward(network, x, recipe.activation).scores
  several = scores.shape[1] > 1
  return scores.argmax(1) if several else (scores[:, 0] >= recipe.middle).astype(int)

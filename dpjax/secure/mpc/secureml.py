"""SecureML (Mohassel and Zhang 2017): logistic regression and networks trained on shares.

The model, every activation and every gradient stay shared; batches, sizes, learning rate and the
number of steps are public. `train` and `predict` are programs (`party`):

>>> x = np.array([[-2.0], [-1.0], [1.0], [2.0]])
>>> y = np.array([[0.0], [0.0], [1.0], [1.0]])
>>> network = initial((1, 1), seed=0)  # no hidden layer: logistic regression
>>> zero, one = private_values.split((network, x, y), seed=0)
>>> batches = np.tile(np.arange(4), (20, 1))
>>> def program(party, network, x, y):
...   network = train(party, network, x, y, batches, Recipe(learning_rate=1.0))
...   return predict(party, network, x, Recipe(), to=0)
>>> from dpjax.secure.mpc import session
>>> session.run(program, zero, one, seed=0).outputs
(array([0., 0., 1., 1.]), None)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dpjax import validate
from dpjax.secure.mpc import comparison, private_values
from dpjax.secure.mpc.party import Party
from dpjax.secure.mpc.products import Shares, constant, matmul, multiply
from dpjax.validate import UserError, Verbatim

_HIDDEN = ("relu", "square")
_OUTPUTS = {
  "sigmoid": comparison.sigmoid,
  "normalized_relu": comparison.normalized_relu,
  "linear": lambda party, scores: scores,
}


class Dense(NamedTuple):
  """A layer: plain numbers, or one party's shares of them."""

  kernel: np.ndarray  # [d_in, d_out]
  bias: np.ndarray  # [d_out]


Network = Sequence[Dense]


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Training settings of a network; public.

  Attributes:
    activation: "relu", or "square" (z^2, which needs no comparison); of hidden layers.
    output: function of the scores z. The gradient of the loss by z is output(z) - y. "sigmoid" is
      SecureML's, of three pieces, for logistic regression and one-against-the-rest.
      "normalized_relu" is SecureML's softmax, and "linear" is for squared error.
    learning_rate: rate for the mean over a batch. Divided by the batch size it must be a power of
      two, since steps are truncations.
  """

  activation: str = "relu"
  output: str = "sigmoid"
  learning_rate: float = 0.125

  def __post_init__(self):
    validate.one_of(_HIDDEN, activation=self.activation)
    validate.one_of(_OUTPUTS, output=self.output)
    validate.positive(learning_rate=self.learning_rate)

  @property
  def middle(self) -> float:
    """Smallest score of a single output that means class 1."""
    return 0.5 if self.output == "linear" else 0.0

  def shift(self, batch_size: int) -> int:
    """Returns s with learning_rate / batch_size = 2^-s.

    Raises UserError unless s is an integer in [0, 24].
    """
    validate.integer_at_least(1, batch_size=batch_size)
    exponent = math.log2(batch_size / self.learning_rate)
    if exponent != round(exponent) or not 0 <= exponent <= 24:
      nearest = batch_size * 2.0 ** -min(max(round(exponent), 0), 24)
      raise UserError(
        f"over the batch size, {batch_size}, must be a power of two in [2^-24, "
        f"1], as {nearest:g} is: steps are truncations",
        field="learning_rate",
        value=Verbatim(f"{self.learning_rate:g}"),
      )
    return int(exponent)


def initial(sizes: Sequence[int], *, seed: int) -> tuple[Dense, ...]:
  """Returns a public initial network: normal kernels of variance 2 / d_in, biases 0.

  Args:
    sizes: sizes of the input, the hidden layers and the output; one output for two classes.
  """
  if len(sizes) < 2:
    raise UserError(
      "must be at least those of input and output", field="sizes", value=tuple(sizes)
    )
  validate.integer_at_least(1, **validate.entries(sizes=sizes))
  validate.integer_at_least(0, seed=seed)
  rng = np.random.default_rng(seed)
  pairs = itertools.pairwise(sizes)
  return tuple(
    Dense(rng.normal(size=(d, k)) * math.sqrt(2 / d), np.zeros(k)) for d, k in pairs
  )


class _Pass(NamedTuple):
  scores: Shares  # [n, d_out]
  inputs: list[Shares]  # of each layer, [n, d_in]
  # For each hidden layer, a function that multiplies an error by the derivative.
  slopes: list[Callable[[Shares], Shares]]


def _forward(party: Party, network: Network, x: Shares, activation: str) -> _Pass:
  inputs = [x]
  slopes = []
  for layer in network[:-1]:
    z = matmul(party, inputs[-1], layer.kernel, bias=layer.bias)  # [n, d_out]
    output, slope = _relu(party, z) if activation == "relu" else _square(party, z)
    inputs.append(output)
    slopes.append(slope)
  return _Pass(
    matmul(party, inputs[-1], network[-1].kernel, bias=network[-1].bias), inputs, slopes
  )


def _relu(party: Party, z: Shares) -> tuple[Shares, Callable]:
  compared = comparison.signs(party, z)
  return compared.part, lambda error: multiply(party, error, compared.bit, truncated=False)


def _square(party: Party, z: Shares) -> tuple[Shares, Callable]:
  return multiply(party, z, z), lambda error: multiply(party, error, z + z)


def error_of(party: Party, scores: Shares, y: Shares, recipe: Recipe) -> Shares:
  """Returns B times the gradient of the batch's mean loss by the scores, [B, d_out]."""
  return _OUTPUTS[recipe.output](party, scores) - y


def update_layer(
  party: Party, layer: Dense, inputs: Shares, error: Shares, shift: int
) -> Dense:
  """Returns the layer after a step by (inputs^T error) / 2^shift.

  Args:
    inputs: [B, d_in] shares of the layer's inputs.
    error: [B, d_out] shares of `error_of`, passed back to the layer's outputs.
  """
  # With a column of ones, the same product also gives the step of the bias.
  ones = np.full((len(inputs), 1), constant(party, 1.0))
  columns = np.concatenate([inputs, ones], axis=1).T  # [d_in + 1, B]
  # The rate over the batch size is 2^-shift, so the truncation also multiplies by it.
  step = matmul(party, columns, error, surplus=party.frac_bits + shift)
  return Dense(layer.kernel - step[:-1], layer.bias - step[-1])


def train(
  party: Party,
  network: Network,
  x: Shares,
  y: Shares,
  batches: np.ndarray,
  recipe: Recipe,
) -> tuple[Dense, ...]:
  """Trains by gradient descent on shares; one step per row of `batches`.

  Reveals nothing to either party (honest but curious, not colluding with the dealer).

  Args:
    network: shares of the network to start from.
    x: [n, d_in] shares.
    y: [n, d_out] shares: 0 or 1, one column per class, or one column for two classes.
    batches: [steps, B] public indices below n.

  Returns:
    Shares of the trained network. A party may keep them and go on from them in another
    session, with the batches that are left.
  """
  batches = np.asarray(batches)
  _check(network, x, y, batches)
  shift = recipe.shift(batches.shape[1])
  for batch in batches:
    network = _step(party, network, x[batch], y[batch], shift, recipe)
  return tuple(network)


def _check(network: Network, x: Shares, y: Shares, batches: np.ndarray) -> None:
  if not network:
    raise UserError("must have at least one layer", field="network")
  sizes = [*(layer.kernel.shape[0] for layer in network), network[-1].kernel.shape[1]]
  if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
    raise UserError(
      f"must be [n, d_in] and [n, d_out], with y.shape={y.shape}",
      field="x.shape",
      value=x.shape,
    )
  if (x.shape[1], y.shape[1]) != (sizes[0], sizes[-1]):
    raise UserError(f"is {sizes}, for x {x.shape} and y {y.shape}", field="network")
  if batches.ndim != 2 or batches.dtype.kind not in "iu":
    raise UserError(f"must be [steps, B] integers, not {batches.shape}", field="batches")
  if batches.size and not 0 <= batches.min() <= batches.max() < len(x):
    raise UserError(f"hold {batches.max()}, must be in [0, {len(x)})", field="batches")


def _step(
  party: Party, network: Network, x: Shares, y: Shares, shift: int, recipe: Recipe
) -> list[Dense]:
  seen = _forward(party, network, x, recipe.activation)
  error = error_of(party, seen.scores, y, recipe)  # [B, d_out]
  updated = []
  for place in reversed(range(len(network))):
    updated.append(update_layer(party, network[place], seen.inputs[place], error, shift))
    # The error passes back through the weights as they were before this step.
    if place:
      error = seen.slopes[place - 1](matmul(party, error, network[place].kernel.T))
  return updated[::-1]


def scores(party: Party, network: Network, x: Shares, recipe: Recipe) -> Shares:
  """Returns [n, d_out] shares of the last layer's results, before `recipe.output`."""
  return _forward(party, network, x, recipe.activation).scores


def predict(
  party: Party, network: Network, x: Shares, recipe: Recipe, *, to: int | None = None
) -> np.ndarray | None:
  """Reveals only the class of each row of x, to the party `to` or to both.

  Args:
    network: shares.
    x: [n, d_in] shares.
    to: party that learns the classes, 0 or 1; None: both.

  Returns:
    [n] classes, 0 or 1 for a single output; None for a party that does not learn them.
  """
  outputs = scores(party, network, x, recipe)  # [n, d_out]
  if outputs.shape[1] > 1:
    place = comparison.argmax(party, outputs)
  else:
    place = comparison.signs(party, outputs[:, 0] - constant(party, recipe.middle)).bit
  return private_values.reveal(party, place, to=to, frac_bits=0)

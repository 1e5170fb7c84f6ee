"""Trains models on two parties' columns of the same entities. All is computed on shares, so
neither party sees the other's columns.

Party 0 has columns, party 1 other columns and the labels; rows are aligned first, by private
set intersection (`secure.vertical.alignment`). Columns, labels, weights, activations and
gradients are split into shares (`mpc`). Plain data stay in place, and products are on shares:

>>> from dpjax.secure import mpc
>>> x_a, x_b = np.array([[-2.0], [-1.0], [1.0], [2.0]]), np.zeros((4, 1))
>>> y = np.array([[0.0], [0.0], [1.0], [1.0]])
>>> def program(party, x_a, x_b, y):
...   rows = shared_rows(party, x_a, x_b, y)
...   batches = np.tile(np.arange(4), (20, 1))
...   weights = train_logistic(party, rows, batches, Recipe(learning_rate=1.0))
...   return own_weights(party, weights, rows), classes(party, weights, rows, to=1)
>>> shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
>>> ran = mpc.run(program, (x_a, shape(x_b), shape(y)), (shape(x_a), x_b, y), seed=0)
>>> (weights_a, nothing), (weights_b, classes_at_b) = ran.outputs
>>> weights_a.shape, weights_b.shape, nothing, classes_at_b
((1,), (2,), None, array([0., 0., 1., 1.]))

What each party learns, if it follows the protocol and does not collude with the dealer:

| by                                | party 0 (columns)        | party 1 (columns, labels)    |
| --------------------------------- | ------------------------ | ---------------------------- |
| `align`                           | the ids in common; how   | the ids in common; how       |
|                                   | many ids party 1 has     | many ids party 0 has         |
| `shared_rows`, `train_*`          | shapes: no number at all | shapes: no number at all     |
| `own_weights`                     | its weights at the end   | its weights at the end, bias |
| `classes(to=1)`                   | nothing                  | the classes of the rows      |
| `secure.vertical`'s encrypted     | its gradient in the      | its gradient in the clear    |
| `two_party_logistic` (no dealer,  | clear at every step: up  | at every step                |
| but a coordinator with the key)   | to a quarter of the bits |                              |
|                                   | of the labels, then it   |                              |
|                                   | refuses                  |                              |
| `split_learning` (plain)          | cotangents, which tell   | all activations of the other |
|                                   | labels                   |                              |

What is revealed follows from all data: weights may tell about the other party's columns and
the labels. No differential privacy is claimed.
Source: Mohassel and Zhang 2017, SecureML, section II (vertically partitioned data) and IV.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from dpjax import validate
from dpjax.secure.mpc import comparison, private_values, secureml
from dpjax.secure.mpc.party import Party
from dpjax.secure.mpc.products import Shares, constant, matmul, multiply
from dpjax.secure.mpc.secureml import Dense, Recipe
from dpjax.validate import UserError


class SharedRows(NamedTuple):
  """A party's shares of aligned rows."""

  x_a: Shares  # [n, f_a]
  x_b: Shares  # [n, f_b]
  y: Shares  # [n, k]

  @property
  def x(self) -> Shares:
    """Shares of the columns of both parties, [n, f_a + f_b]."""
    return np.concatenate([self.x_a, self.x_b], axis=1)


class SplitNetwork(NamedTuple):
  """A hidden layer for each party's columns, and one layer over both: plain numbers, or
  shares."""

  bottom_a: Dense  # [f_a, h_a]
  bottom_b: Dense  # [f_b, h_b]
  top: Dense  # [h_a + h_b, k]


Columns = np.ndarray | jax.ShapeDtypeStruct  # own values, or the other's shape


def shared_rows(party: Party, x_a: Columns, x_b: Columns, y: Columns) -> SharedRows:
  """Returns shares of both parties' columns and of the labels. Parties send masked numbers only.

  Args:
    x_a: [n, f_a] of party 0; party 1 gives its shape.
    x_b: [n, f_b] of party 1, which also has the labels; party 0 gives their shapes.
    y: [n, k] in {0, 1}: k columns for k classes, one column for two.

  Raises UserError for rows that differ in number, arrays of other ranks, labels other than 0 and 1.
  """
  shapes = [tuple(part.shape) for part in (x_a, x_b, y)]
  if {len(shape) for shape in shapes} != {2} or len({shape[0] for shape in shapes}) > 1:
    raise UserError(
      f"must be [n, f_a], beside x_b [n, f_b] and y [n, k], of shapes {shapes[1:]}",
      field="x_a.shape",
      value=shapes[0],
    )
  if not isinstance(y, jax.ShapeDtypeStruct) and not np.isin(y, (0, 1)).all():
    raise UserError("labels must be 0 or 1, one column for each class", field="y")
  share = lambda part, owner: private_values.share(party, part, owner=owner)
  return SharedRows(share(x_a, 0), share(x_b, 1), share(y, 1))


# --- logistic regression


def train_logistic(
  party: Party, rows: SharedRows, batches: np.ndarray, recipe: Recipe
) -> tuple[Dense, ...]:
  """Returns shares of the weights [f_a + f_b, k] and biases [k] after one step for each batch.

  Uses SecureML's three-piece sigmoid, and starts from weights of 0. Reveals nothing.

  Args:
    batches: [steps, B] public indices of rows.
    recipe: training settings; `output` must be sigmoid.
  """
  if recipe.output != "sigmoid":
    raise UserError("must be sigmoid", field="recipe.output", value=recipe.output)
  width = rows.x.shape[1]
  outputs = rows.y.shape[1]
  zero = np.zeros((width, outputs), np.uint64), np.zeros(outputs, np.uint64)
  return secureml.train(party, [Dense(*zero)], rows.x, rows.y, batches, recipe)


def own_weights(
  party: Party, weights: tuple[Dense, ...], rows: SharedRows
) -> np.ndarray | None:
  """Returns the weights of the party's own columns, as `two_party_scores` uses them.

  These are [f_a] for party 0 and [f_b + 1], the bias last, for party 1. Each party learns the
  weights of its own columns and no others. There must be two classes.
  """
  (layer,) = weights
  width = rows.x_a.shape[1]
  if layer.bias.shape != (1,):
    raise UserError(f"of {layer.bias.shape[0]} outputs; must be of one", field="weights")
  last = np.concatenate([layer.kernel[width:, 0], layer.bias])
  for_a = private_values.reveal(party, layer.kernel[:width, 0], to=0)
  for_b = private_values.reveal(party, last, to=1)
  return for_a if party.number == 0 else for_b


# --- split network


def initial_split(
  num_features: tuple[int, int], *, hidden: int, classes: int, seed: int
) -> SplitNetwork:
  """Returns a public initial network, with `hidden` units for each party."""
  validate.integer_at_least(1, hidden=hidden, classes=classes)
  sizes = ((num_features[0], hidden), (num_features[1], hidden), (2 * hidden, classes))
  networks = [secureml.initial(size, seed=seed + i)[0] for i, size in enumerate(sizes)]
  return SplitNetwork(*networks)


def train_split(
  party: Party,
  start: SplitNetwork,
  rows: SharedRows,
  batches: np.ndarray,
  recipe: Recipe,
) -> SplitNetwork:
  """Returns shares of the network after one gradient step for each batch. Reveals nothing.

  Args:
    start: public initial network.
    batches: [steps, B] public indices of rows.
    recipe: `activation` must be relu, `output` normalized_relu or sigmoid (one class against all).
  """
  if recipe.activation != "relu" or recipe.output == "linear":
    kind = recipe.activation, recipe.output
    raise UserError(
      f"{kind}; must be relu, and one of sigmoid, normalized_relu", field="recipe"
    )
  shift = recipe.shift(np.shape(batches)[1])
  network = jax.tree.map(lambda numbers: constant(party, numbers), start)
  for batch in np.asarray(batches):
    drawn = SharedRows(*(part[batch] for part in rows))
    network = _step(party, network, drawn, shift, recipe)
  return network


def _hidden_layers(
  party: Party, network: SplitNetwork, rows: SharedRows
) -> comparison.Signs:
  """Returns signs and ReLU [n, h_a + h_b] of both bottom layers, in one comparison."""
  sums = [
    matmul(party, x, bottom.kernel, bias=bottom.bias)
    for x, bottom in ((rows.x_a, network.bottom_a), (rows.x_b, network.bottom_b))
  ]
  # One comparison of both layers takes as many rounds as a comparison of one layer.
  return comparison.signs(party, np.concatenate(sums, axis=1))


def _step(
  party: Party, network: SplitNetwork, rows: SharedRows, shift: int, recipe: Recipe
) -> SplitNetwork:
  hidden = _hidden_layers(party, network, rows)
  top = network.top
  scores = matmul(party, hidden.part, top.kernel, bias=top.bias)  # [B, k]
  error = secureml.error_of(party, scores, rows.y, recipe)
  back = matmul(party, error, top.kernel.T)  # [B, h_a + h_b]
  # The bit is a whole number, so the product has the scale of `back`, and needs no truncation.
  back = multiply(party, back, hidden.bit, truncated=False)
  width = network.bottom_a.bias.shape[0]

  parts = (
    (network.bottom_a, rows.x_a, back[:, :width]),
    (network.bottom_b, rows.x_b, back[:, width:]),
    (top, hidden.part, error),
  )
  return SplitNetwork(*(secureml.update_layer(party, *part, shift) for part in parts))


# --- prediction


def classes(
  party: Party, model: SplitNetwork | tuple[Dense, ...], rows: SharedRows, *, to: int
) -> np.ndarray | None:
  """Returns the classes [n] of shared rows to party `to`, and None to the other party.

  Nothing else is revealed.

  Args:
    model: shares, of `train_logistic` or `train_split`.
    rows: rows of the entities asked about; their labels are not read.
  """
  if not isinstance(model, SplitNetwork):
    return secureml.predict(party, model, rows.x, Recipe(), to=to)
  hidden = _hidden_layers(party, model, rows).part
  return secureml.predict(party, [model.top], hidden, Recipe(), to=to)

"""A server that sends a leaking model: it obtains the inputs of a whole batch, one from each bin.

Fowl et al. 2022, "Robbing the Fed" (arXiv:2110.13057), section 3, with the model's own first layer
in place of an added one. Every unit of that layer computes the same number of an input: its product
with one random direction. Unit i is active where the product exceeds the threshold c_i. Later
layers treat all units alike. So the kernel gradient of unit i is a weighted sum of the inputs above
c_i. Its bias gradient is the sum of the weights. The difference of two neighbouring units
contains only the inputs between their thresholds, a bin. If a bin has one input, the server divides
the difference of the kernel gradients by that of the bias gradients, and gets the input.

| circumstances                  | what the server reads                                     |
| ------------------------------ | --------------------------------------------------------- |
| one client, or a secure sum    | the inputs: gradients add up, and so do the bins          |
| clipping of the sum or of each | the inputs: a ratio, which no common factor changes       |
| noise of the client            | nothing: a bin of one input is smaller than the noise     |
| several local steps            | mixtures, as the units move apart                         |
"""

from __future__ import annotations

import jax
import numpy as np

from dpjax import trees, validate
from dpjax.attacks import recovery
from dpjax.types import ArrayTree, HostArray, Params
from dpjax.validate import UserError

# A bin counts as empty if its bias difference is below this share of the largest one: so small a
# difference is rounding.
_EMPTY = 1e-5


def imprint(
  params: Params,
  public: HostArray,
  *,
  layer: str = "dense_0",
  gain: float = 1.0,
  seed: int = 0,
) -> Params:
  """Returns parameters whose gradient shows the inputs of a batch; see the module.

  Args:
    params: parameters of a model that begins with a dense layer of k units, a bias and a ReLU.
    public: [N, ...], inputs that are like the clients' inputs. The thresholds are quantiles of the
      products of these inputs with the direction, so that k bins are equally likely.
    layer: name of the first layer.
    gain: scale of the next kernel. The gradients of all bins grow with it.
    seed: seed of the random direction, along which few inputs are equal.

  Raises:
    UserError: no such layer, a layer without a bias, inputs of another size or not finite, or no
      later kernel with k rows.

  >>> kernel, bias = np.ones((4, 2)), np.zeros(2)
  >>> params = {"dense_0": {"kernel": kernel, "bias": bias}, "head": {"kernel": kernel.T}}
  >>> public = np.array([[0.0] * 4, [1.0] * 4, [2.0] * 4])
  >>> trap = imprint(params, public)
  >>> active = public @ trap["dense_0"]["kernel"] + trap["dense_0"]["bias"] > 0
  >>> active.sum(axis=0).tolist()  # the first unit is active for all, the second for fewer
  [3, 1]
  """
  validate.positive(gain=gain)
  validate.integer_at_least(0, seed=seed)
  first = recovery.dense_layer(params, layer, bias="which is the threshold")
  size, units = first["kernel"].shape
  direction = np.random.default_rng(seed).normal(size=size) / np.sqrt(size)
  measured = _inputs(public, size) @ direction  # [N]
  thresholds = np.quantile(measured, np.arange(units) / units)
  # The lowest bin begins below the products of all public inputs, since that of a client's input
  # may be smaller.
  thresholds[0] -= np.ptp(measured)
  kernel = np.broadcast_to(direction[:, None], (size, units))
  leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  changed = []
  num_alike = 0
  for path, leaf in leaves:
    name = "/".join(["", *trees.path_parts(path)])
    value = leaf
    if name.endswith(f"/{layer}/kernel"):
      value = np.asarray(kernel, leaf.dtype)
    elif name.endswith(f"/{layer}/bias"):
      value = np.asarray(-thresholds, leaf.dtype)
    elif name.endswith("/kernel") and np.shape(leaf)[:-1] == (units,):
      num_alike += 1
      # Equal rows give all active units the same gradient. The division by the number of units
      # keeps many active units from saturating the next layer.
      row = np.asarray(leaf, np.float64)[0]
      row = row / max(float(np.max(np.abs(row))), 1e-30)
      value = np.broadcast_to((gain * row / units).astype(leaf.dtype), np.shape(leaf))
    changed.append(value)
  if not num_alike:
    raise UserError(
      f"must be followed by a kernel of {units} rows", field="layer", value=layer
    )
  return jax.tree.unflatten(treedef, changed)


def _inputs(public: HostArray, size: int) -> np.ndarray:
  """Returns the public inputs as float64 [N, size]. Raises UserError if they have another size or
  are not finite."""
  shape = np.shape(public)
  if not shape or not shape[0] or np.size(public) != shape[0] * size:
    raise UserError(f"must be inputs of {size} numbers, got shape {shape}", field="public")
  inputs = np.asarray(public, np.float64).reshape(-1, size)
  if not np.isfinite(inputs).all():
    raise UserError("must be finite", field="public")
  return inputs


def read_imprint(seen: ArrayTree, *, batch_size: int, layer: str = "dense_0") -> np.ndarray:
  """Returns the inputs in the bins of `imprint`: [B, d], with rows of 0 if fewer bins are full.

  Args:
    seen: the gradient of a batch under the parameters of `imprint`, a client's message of one step,
      or a sum of many messages. A common factor does not matter.
    batch_size: number B of bins to read, those with the largest bias difference first.

  Raises:
    UserError: batch_size < 1, no such layer, or a layer without a bias.

  >>> kernel = np.array([[4.0, 3.0], [6.0, 3.0]])  # both inputs, and the second alone
  >>> seen = {"dense_0": {"kernel": kernel, "bias": np.array([2.0, 1.0])}}
  >>> read_imprint(seen, batch_size=2).tolist()
  [[1.0, 3.0], [3.0, 3.0]]
  """
  validate.integer_at_least(1, batch_size=batch_size)
  first = recovery.dense_layer(seen, layer, bias="by whose gradient is divided")
  # The last unit has no neighbour above: its bin covers everything above its threshold.
  kernels = -np.diff(first["kernel"], axis=1, append=0.0)  # [d, k]
  biases = -np.diff(first["bias"], append=0.0)
  largest = np.max(np.abs(biases))
  inputs = np.zeros((batch_size, kernels.shape[0]))
  full = np.flatnonzero(np.abs(biases) > _EMPTY * largest)
  fullest = full[np.argsort(-np.abs(biases[full]), kind="stable")][:batch_size]
  inputs[: len(fullest)] = (kernels[:, fullest] / biases[fullest]).T
  return inputs

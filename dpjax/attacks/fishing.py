"""A server that fishes for one class: other records of a batch lose their gradient.

Wen et al. 2022, "Fishing for User Data" (arXiv:2202.00580), section 3.2. The server changes the
last layer alone. It pushes the logit of the fished class c down, and only the weights w_c of that
class are not 0. So the gradient of the features is w_c (p_c - [y = c]): nearly 0 for records of
other classes, and nearly -w_c for those of class c. The gradient of every layer below then comes
from these few records, however large the batch is.

| with                                    | what is read                                     |
| --------------------------------------- | ------------------------------------------------ |
| `first_dense`                           | the record that is alone in its class, exactly   |
| `imprint` first (`fish(imprint(...))`)  | nearly all records of the class, exactly         |
| any inversion                           | a batch as small as the class                    |

Gradients add up, so a secure sum only makes the batch larger. Noise of the client hides the class.
Wen et al.'s second step, which separates records of one class by a feature, is left out: the bins
of `imprint` do the same.
"""

from __future__ import annotations

import jax
import numpy as np

from dpjax import trees, validate
from dpjax.attacks import recovery
from dpjax.types import Params
from dpjax.validate import UserError


def fish(
  params: Params, label: int, *, layer: str = "head", strength: float = 30.0
) -> Params:
  """Returns parameters with which one class makes nearly all the gradient of layers before `layer`.

  Args:
    params: parameters of a model that ends in a dense layer with a bias, for a cross-entropy loss.
    label: class that is fished for.
    layer: name of the last layer.
    strength: number by which the logit of the class is pushed down. Gradients of other classes'
      records are about e^-strength times those of the class. They underflow in float32 for a
      strength above about 80.

  Raises:
    UserError: no such layer or label, a layer without a bias, weights of the class that are all
      0, or a strength that is not above 0.

  >>> head = {"kernel": np.ones((2, 3)), "bias": np.zeros(3)}
  >>> fished = fish({"head": head}, 1)["head"]
  >>> fished["kernel"].tolist(), fished["bias"].tolist()
  ([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]], [0.0, -30.0, 0.0])
  """
  validate.positive(strength=strength)
  last = recovery.dense_layer(params, layer, bias="which is pushed down")
  validate.integer_in(0, last["kernel"].shape[1] - 1, label=label)
  if not np.any(last["kernel"][:, label]):
    # Weights of 0 would let no gradient at all pass.
    raise UserError(
      "must have weights for the class that are not 0", field="layer", value=layer
    )

  def changed(path, leaf):
    name = "/".join(["", *trees.path_parts(path)])
    if name.endswith(f"/{layer}/kernel"):
      kernel = np.zeros_like(np.asarray(leaf))
      kernel[:, label] = np.asarray(leaf)[:, label]
      return kernel
    if name.endswith(f"/{layer}/bias"):
      bias = np.zeros_like(np.asarray(leaf))
      bias[label] = -strength
      return bias
    return leaf

  return jax.tree_util.tree_map_with_path(changed, params)

"""Property inference: a fact about the training set as a whole, which no single record shows.

The attacker trains models on data with the property and without it, by the target's own pipeline
(`train_shadows`). A meta-classifier learns to tell these models apart (Ateniese et al. 2015; Ganju
et al. 2018). Two kinds of features describe a model:

| features           | access    | what                                                     |
| ------------------ | --------- | -------------------------------------------------------- |
| `answers_on`       | black box | log odds of inputs that the attacker chose               |
| `sorted_weights`   | white box | all weights, with hidden units in a canonical order      |

Record-level differential privacy guarantees nothing here: a property of many records does not
change with one record. Only group privacy of all these records would bound the attack.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dpjax import optional, validate
from dpjax.attacks import signals
from dpjax.attacks.signals import Signal
from dpjax.metrics import Apply
from dpjax.types import HostArray, Labelled, Params
from dpjax.validate import UserError

# Features of this size or more are refused, so that sums of squares stay within float64.
_HUGE = 1e100


class Populations(NamedTuple):
  """Training sets for `train_shadows`, and which of them have the property."""

  included: np.ndarray  # [S, n] bool, the records of each training set
  truth: np.ndarray  # [S] bool, whether each set has the property


def populations(
  marked: HostArray,
  *,
  num_models: int,
  size: int,
  shares: tuple[float, float],
  seed: int,
  among: HostArray | None = None,
) -> Populations:
  """Draws training sets of `size` records. The property is the share of marked records.

  Every second set has the property, with share `shares[1]`; the rest have share `shares[0]`.

  Args:
    marked: bool [n], records of the kind whose share is the property (a class, a group).
    among: bool [n], the records to draw from; None: all. For targets and shadows of disjoint
      records, call this function twice.

  Raises UserError for too few records of either kind, or shares that are equal at this size.

  >>> marked = np.arange(40) < 20
  >>> drawn = populations(marked, num_models=4, size=10, shares=(0.5, 0.8), seed=0)
  >>> (drawn.included & marked).sum(axis=1).tolist(), drawn.truth.tolist()
  ([5, 8, 5, 8], [False, True, False, True])
  """
  validate.integer_at_least(1, num_models=num_models, size=size)
  validate.integer_at_least(0, seed=seed)
  kind = np.asarray(marked)
  chosen = np.ones(kind.shape, bool) if among is None else np.asarray(among)
  wrong = "marked" if kind.ndim != 1 or kind.dtype != bool else ""
  if wrong or chosen.dtype != bool:
    raise UserError("must be bool [n], one for each record", field=wrong or "among")
  if chosen.shape != kind.shape:
    raise UserError(
      f"must be of {len(kind)} records, as marked, got {chosen.shape}", field="among"
    )
  counts = [round(share * size) for share in validate.several(shares=shares)]
  if len(counts) != 2 or counts[0] == counts[1]:
    raise UserError(
      f"must be two, which differ among {size} records", field="shares", value=shares
    )
  sides = [np.flatnonzero(chosen & ~kind), np.flatnonzero(chosen & kind)]
  for name, side, most in zip(
    ("without", "with"), sides, (size - min(counts), max(counts))
  ):
    if not 0 <= most <= len(side) or min(counts) < 0 or max(counts) > size:
      raise UserError(
        f"need {most} records {name} the mark, there are {len(side)}",
        field="shares",
        value=shares,
      )
  rng = np.random.default_rng([seed, 0x9809])
  rows = np.zeros((num_models, len(kind)), bool)
  for index, row in enumerate(rows):
    count = counts[index % 2]
    for side, number in zip(sides, (size - count, count)):
      row[rng.choice(side, number, replace=False)] = True
  return Populations(rows, np.arange(num_models) % 2 == 1)


def answers_on(apply: Apply, probes: Labelled) -> Signal:
  """Returns a signal for `train_shadows` with num_scores=len(probes.y).

  It gives the model's log odds for the attacker's own inputs and labels. The records are not read.

  >>> from dpjax.types import Example
  >>> signal = answers_on(lambda w, x: x * w, Example(np.array([[3.0, 1.0]]), np.array([0])))
  >>> signal(1.0, None).tolist()
  [2.0]
  """
  if len(np.asarray(probes.y)) == 0:
    raise UserError("must hold at least one input", field="probes")
  asked = signals.log_odds_of_model(apply)
  return lambda params, records: asked(params, probes)


def sorted_weights(params: Params) -> np.ndarray:
  """Returns all weights [d] of a `models.Mlp` or `Linear`, in a canonical order of hidden units.

  The units of each hidden layer are sorted by the sum of their incoming weights and bias (after
  Ganju et al. 2018). Without sorting, networks that differ only in the order of units would have
  different features. Use it in `train_shadows` as `lambda params, records: sorted_weights(params)`.

  Raises UserError for a network of other layers.

  >>> layer = lambda kernel, bias: {"kernel": np.array(kernel), "bias": np.array(bias)}
  >>> head = layer([[5.0], [6.0]], [0.0])
  >>> net = {"params": {"dense_0": layer([[2.0, 1.0]], [0.5, 0.25]), "head": head}}
  >>> sorted_weights(net).tolist()  # units 1, 0
  [1.0, 2.0, 0.25, 0.5, 6.0, 5.0, 0.0]
  """
  layers = params.get("params", {}) if isinstance(params, dict) else {}
  names = [f"dense_{i}" for i in range(len(layers) - 1)] + ["head"]
  if not layers or set(layers) != set(names):
    raise UserError(
      f"has the layers {sorted(layers)}: must be those of models.Mlp, dense_0, ... head",
      field="params",
    )
  features: list[np.ndarray] = []
  order: Any = slice(None)
  for name in names:
    kernel = np.asarray(layers[name]["kernel"], np.float64)[order]  # [in, out]
    bias = np.asarray(layers[name]["bias"], np.float64)
    # The next layer's rows follow the order of these units.
    order = slice(None) if name == "head" else np.argsort(kernel.sum(axis=0) + bias)
    features += [kernel[:, order].ravel(), bias[order]]
  return np.concatenate(features)


def infer_property(
  shadows: HostArray, truth: HostArray, targets: HostArray, *, l2: float = 1.0
) -> np.ndarray:
  """Returns scores [T], larger for targets whose data more likely have the property.

  They come from a logistic regression on features that are standardised over the shadows.
  `attacks.measure(scores, truth of the targets)` compares them with the truth.

  Args:
    shadows: features [S, d] from `train_shadows`.
    truth: bool [S], whether a shadow's data have the property.
    targets: features [T, d] of the attacked models.
    l2: strength of the penalty on the weights.

  Raises UserError for fewer than two shadows of either kind, or features of another length.

  >>> scores = infer_property([[0.0], [0.1], [1.0], [1.1]], [False, False, True, True],
  ...                         [[0.0], [1.0]])
  >>> bool(scores[0] < 0 < scores[1])
  True
  """
  # Imported here, since scikit-learn is slow to import.
  with optional.require_extra():
    from sklearn import linear_model

  validate.positive(l2=l2)
  known = signals.numbers("shadows", shadows)
  asked = signals.numbers("targets", targets)
  kinds = np.asarray(truth)
  if known.ndim != 2 or kinds.shape != (len(known),) or kinds.dtype != bool:
    raise UserError(
      f"must be bool, one for each of shadows [S, d], got {kinds.dtype} of "
      f"shape {kinds.shape} beside {known.shape}",
      field="truth",
    )
  if min(kinds.sum(), (~kinds).sum()) < 2:
    raise UserError(
      f"holds {kinds.sum()} shadows with the property and {(~kinds).sum()} "
      "without: must be at least 2 of each",
      field="truth",
    )
  if asked.ndim != 2 or asked.shape[1] != known.shape[1] or not len(asked):
    raise UserError(
      f"have the shape {asked.shape}: must be [T, {known.shape[1]}], the "
      "features of the shadows (was the target trained elsewhere?)",
      field="targets",
    )
  for name, features in (("shadows", known), ("targets", asked)):
    if not (np.abs(features) < _HUGE).all():
      raise UserError(f"must be finite features, below {_HUGE:g}", field=name)
  center = known.mean(axis=0)
  scale = known.std(axis=0)
  # A feature without spread carries no information, and its scale must not be 0.
  scale = np.where(scale > 0, scale, 1.0)
  meta = linear_model.LogisticRegression(C=1 / l2, max_iter=5000)
  meta.fit((known - center) / scale, kinds)
  return meta.decision_function((asked - center) / scale)

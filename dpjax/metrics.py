"""Metrics of a model on a data set, such as accuracy, mean loss and confusion counts.

No noise is added, so a metric reveals something about the data it is computed on. Evaluate a
private run on a test split that is public, or whose owners consent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special, stats

from dpjax import columns, trees, validate
from dpjax.types import Array, Labelled, Params
from dpjax.validate import UserError, shape_of_rows

Apply = Callable[[Params, Any], Array]  # (params, x [B, ...]) -> logits [B, K]


# The cache is bounded, so that a long session frees old models.
@functools.lru_cache(maxsize=64)
def _compile(apply: Apply, padding_id: int | None) -> Callable[..., Array]:
  """Returns a jitted function of one batch -> [hits, sum of cross-entropies, number of answers].

  It is cached for each `apply`, so repeated evaluation traces once for each batch shape. With
  `padding_id` the model answers with the next token after each token of x, and y is unused."""

  @jax.jit
  def totals(params: Params, x: Array, y: Array, mask: Array) -> Array:
    if padding_id is not None:
      # An example's mask applies to all of its sequences.
      mask = jnp.repeat(mask, x.size // x.shape[-1] // len(x))
      # Every sequence becomes a row, also where an example holds several sequences.
      x = x.reshape(-1, x.shape[-1])
      y = x[:, 1:]
      x = x[:, :-1]
      mask = mask[:, None] & (y != padding_id)
    logits = apply(params, x)
    if jnp.shape(logits)[:-1] != y.shape:
      wanted = ", ".join(map(str, y.shape))
      raise UserError(
        f"must return logits [{wanted}, K] for x of shape {trees.shapes(x)}, got "
        f"{jnp.shape(logits)}",
        field="apply",
      )
    logits = trees.at_least_float32(logits)
    picked = jnp.take_along_axis(logits, y[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    # A NaN logit is a failure of the model, and counts as a wrong answer.
    hits = mask & (jnp.argmax(logits, axis=-1) == y) & ~jnp.isnan(logits).any(axis=-1)
    sums = (jnp.sum(hits), jnp.sum(jnp.where(mask, losses, 0)), jnp.sum(mask))
    return jnp.stack([total.astype(losses.dtype) for total in sums])

  return totals


def _batches(x: Any, y: Any, size: int) -> Iterator[tuple[Any, Any, Any]]:
  """Yields (x, y, mask) of `size` rows each. Rows beyond the data are zero, and masked."""

  def filled(rows: np.ndarray) -> np.ndarray:
    if len(rows) == size:
      return rows
    zeros = np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)
    return np.concatenate([rows, zeros])

  for start in range(0, len(y), size):
    part = slice(start, start + size)
    mask = np.arange(start, start + size) < len(y)
    yield *jax.tree.map(filled, (x[part], y[part])), mask


def _arrays(dataset: Any) -> tuple[Any, np.ndarray]:
  if not (hasattr(dataset, "x") and hasattr(dataset, "y")):
    raise UserError(
      f"must have arrays x and y, as a dpjax.data.Dataset or dpjax.Example(x, y), got "
      f"{type(dataset).__name__}",
      field="dataset",
    )
  x = columns.by_place(dataset.x, "dataset.x")
  y = np.asarray(dataset.y)
  # Only JAX arrays and lists are copied to NumPy at once. Others are read a batch at a time.
  if isinstance(x, jax.Array) or not hasattr(x, "shape"):
    x = np.asarray(x)
  if y.ndim != 1 or y.dtype.kind not in "iu" or len(y) == 0:
    raise UserError(
      f"must be integer labels [n] with n >= 1, got {y.dtype} {shape_of_rows(y.shape)}",
      field="dataset.y",
    )
  if x.ndim == 0 or len(x) != len(y):
    raise UserError(
      f"must begin with {len(y)}, as dataset.y", field="dataset.x.shape", value=x.shape
    )
  return x, y


def evaluate(
  apply: Apply, params: Params, dataset: Labelled, *, batch_size: int = 500
) -> dict[str, float]:
  """Returns {"accuracy", "loss"} over a data set: the share of right answers, and the mean
  cross-entropy in nats.

  `dataset` is anything with arrays `.x` [n, ...] and `.y` [n] integer labels. The last batch is
  padded and masked, so each (apply, batch_size) is compiled once, whatever n is. Pass an `apply`
  that compares equal each time, as `model.apply` does: another one is compiled again. What `apply`
  reads beside its arguments, such as weights in a field of its object, is read at the first call
  alone, as by `jax.jit`: give what changes as `params`.

  Raises:
    UserError: no examples, unequal lengths, non-integer labels, or outputs not [B, K].

  >>> from dpjax.types import Example
  >>> data = Example(x=jnp.log(jnp.array([[3.0, 1.0], [3.0, 1.0]])), y=jnp.array([0, 1]))
  >>> result = evaluate(lambda params, x: x * params, jnp.float32(1), data)
  >>> result["accuracy"], round(result["loss"], 4)  # (-log(3/4) - log(1/4)) / 2
  (0.5, 0.837)
  """
  right, nats, count = _sums(apply, params, dataset, batch_size)
  return {"accuracy": right / count, "loss": nats / count}


def _sums(
  apply: Apply,
  params: Params,
  dataset: Labelled,
  size: int,
  padding_id: int | None = None,
) -> list[float]:
  """Returns [hits, sum of cross-entropies, number of answers] over a data set."""
  validate.integer_at_least(1, batch_size=size)
  validate.apply_function(apply=apply)
  if not isinstance(apply, Hashable):
    raise UserError(
      "must be hashable: a function, or a bound method as model.apply", field="apply"
    )
  totals = _compile(apply, padding_id)
  parts = [totals(params, *batch) for batch in _batches(*_arrays(dataset), size)]
  # Sums are in float64, since counts in float32 stop growing at 2^24.
  return np.sum(np.asarray(parts, np.float64), axis=0).tolist()


def accuracy(
  apply: Apply, params: Params, dataset: Labelled, *, batch_size: int = 500
) -> float:
  """Returns the share of examples whose largest logit is that of their label; see `evaluate`.

  >>> from dpjax.types import Example
  >>> data = Example(x=jnp.eye(4), y=jnp.array([0, 1, 2, 0]))
  >>> accuracy(lambda params, x: x @ params, jnp.eye(4), data)
  0.75
  """
  return evaluate(apply, params, dataset, batch_size=batch_size)["accuracy"]


# The cache is bounded, so that a long session frees old models.
@functools.lru_cache(maxsize=64)
def _jit(apply: Apply) -> Callable[..., Array]:
  return jax.jit(lambda params, x: trees.at_least_float32(apply(params, x)))


def _all_outputs(apply: Apply, params: Params, dataset: Any, size: int) -> np.ndarray:
  """Returns outputs [n, K] of all examples, in float64."""
  validate.integer_at_least(1, batch_size=size)
  validate.apply_function(apply=apply)
  y = np.asarray(dataset.y)
  if not len(y):
    raise UserError("must hold at least one example", field="dataset.y")
  outputs = []
  # The last batch is padded, so that one compilation serves all batches.
  for x, _, mask in _batches(dataset.x, y, size):
    outputs.append(np.asarray(_jit(apply)(params, x), np.float64)[mask])
  stacked = np.concatenate(outputs)
  width = y.shape[1] if y.ndim == 2 else 1
  if stacked.shape != (len(y), width):
    got = shape_of_rows(stacked.shape)
    raise UserError(f"must return [n, {width}] for n rows, got {got}", field="apply")
  return stacked


def evaluate_regression(
  apply: Apply, params: Params, dataset: Any, *, batch_size: int = 500
) -> dict[str, float]:
  """Returns {"rmse", "r2", "loss"} of a model that predicts one number for each example.

  Args:
    apply: (params, x [B, ...]) -> [B, 1], on the scale [-1, 1] of `dataset.y`.
    dataset: a `dpjax.data.Dataset` whose target is an `Interval`.

  Returns:
    "rmse": root of the mean squared error, in the units of the data. "r2": 1 minus mean squared
    error / variance of the targets; NaN if all targets are equal. "loss": the mean squared error
    on the scale [-1, 1], which training minimises.

  >>> from dpjax import data
  >>> rows = data.from_arrays([[1.0], [-1.0]], [30.0, 10.0], target=data.Interval(0, 40))
  >>> scores = evaluate_regression(lambda params, x: x * params, jnp.float32(0.0), rows)
  >>> scores["rmse"], scores["r2"], scores["loss"]  # it says 20 of 30 and of 10
  (10.0, 0.0, 0.25)
  """
  scaled = _all_outputs(apply, params, dataset, batch_size)[:, 0]
  truth = np.asarray(dataset.y, np.float64)
  loss = float(np.mean((scaled - truth) ** 2))
  variance = float(np.var(truth))
  return {
    "rmse": float(np.sqrt(loss) * dataset.target.half_width),
    "r2": 1 - loss / variance if variance > 0 else float("nan"),
    "loss": loss,
  }


def evaluate_labels(
  apply: Apply, params: Params, dataset: Any, *, batch_size: int = 500
) -> dict[str, float]:
  """Returns {"accuracy", "exact_match", "loss"} of a model with one logit for each of K labels.

  Args:
    apply: (params, x [B, ...]) -> logits [B, K]; a logit above 0 predicts that the label is 1.
    dataset: anything with arrays `.x` [n, ...] and `.y` [n, K] of 0 and 1.

  Returns:
    "accuracy": the share of labels that are right, over examples and labels. "exact_match":
    the share of examples with all labels right. "loss": mean binary cross-entropy, in nats.

  >>> from dpjax.types import Example
  >>> rows = Example(x=jnp.array([[9.0, 9.0], [9.0, -9.0]]), y=jnp.array([[1, 0], [1, 0]]))
  >>> scores = evaluate_labels(lambda params, x: x * params, jnp.float32(1), rows)
  >>> scores["accuracy"], scores["exact_match"]
  (0.75, 0.5)
  """
  logits = _all_outputs(apply, params, dataset, batch_size)
  labels = np.asarray(dataset.y)
  # A NaN logit is a failure of the model. Comparisons with NaN are False, so it counts as wrong.
  right = np.where(labels == 1, logits > 0, logits <= 0)
  # The loss is log(1 + exp(-z)): z is the logit if the label is 1, else its negative. `logaddexp`
  # does not overflow.
  with np.errstate(invalid="ignore"):
    losses = np.logaddexp(0, np.where(labels == 1, -logits, logits))
  return {
    "accuracy": float(right.mean()),
    "exact_match": float(right.all(axis=1).mean()),
    "loss": float(losses.mean()),
  }


class Confusion(NamedTuple):
  """Counts of a classifier's answers by class, and the Brier score of its probabilities."""

  counts: np.ndarray  # [K, K]: rows are true classes, columns are answers
  unanswered: np.ndarray  # [K]: examples of a class whose logits hold NaN
  squared_error: float  # mean over examples of sum_k (p_k - [k is the label])^2

  def one_against_rest(self) -> np.ndarray:
    """Returns [K, 4]: for each class the true positives, true negatives, false positives and
    false negatives."""
    hits = np.diag(self.counts)
    false_positives = self.counts.sum(axis=0) - hits
    false_negatives = self.counts.sum(axis=1) + self.unanswered - hits
    total = self.counts.sum() + self.unanswered.sum()
    true_negatives = total - hits - false_positives - false_negatives
    return np.stack([hits, true_negatives, false_positives, false_negatives], axis=1)


def confusion(
  apply: Apply, params: Params, dataset: Labelled, *, batch_size: int = 500
) -> Confusion:
  """Counts the answers of a classifier by class; see `evaluate` for the arguments.

  The squared error is that of the softmax of the logits (the Brier score): 0 is perfect, 2 is
  certain and wrong. An example whose logits hold NaN counts 2.

  >>> from dpjax.types import Example
  >>> data = Example(x=100 * jnp.eye(3)[jnp.array([0, 1, 2, 0])], y=jnp.array([0, 1, 1, 0]))
  >>> counted = confusion(lambda params, x: x @ params, jnp.eye(3), data)
  >>> counted.counts.tolist(), counted.squared_error
  ([[2, 0, 0], [0, 1, 1], [0, 0, 0]], 0.5)
  >>> counted.one_against_rest()[1].tolist()  # class 1: TP, TN, FP, FN
  [1, 2, 0, 1]
  """
  return _count(*_logits(apply, params, dataset, batch_size))


def _logits(
  apply: Apply, params: Params, dataset: Labelled, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (logits [n, K], labels [n]) of all examples."""
  validate.integer_at_least(1, batch_size=batch_size)
  validate.apply_function(apply=apply)
  x, y = _arrays(dataset)
  outputs = []
  for rows, _, mask in _batches(x, y, batch_size):
    outputs.append(np.asarray(apply(params, rows), np.float32)[mask])
  logits = np.concatenate(outputs)  # [n, K]
  if logits.ndim != 2 or len(logits) != len(y):
    got = shape_of_rows(logits.shape)
    raise UserError(f"must return logits [n, K] for n rows, got {got}", field="apply")
  if y.min() < 0 or y.max() >= logits.shape[1]:
    raise UserError(
      f"must be in [0, {logits.shape[1]}), the number of logits, got {y.min()} "
      f"to {y.max()}",
      field="dataset.y",
    )
  return logits, y


def _count(logits: np.ndarray, y: np.ndarray) -> Confusion:
  answered = ~np.isnan(logits).any(axis=1)
  num_classes = logits.shape[1]
  counts = np.zeros((num_classes, num_classes), np.int64)
  np.add.at(counts, (y[answered], np.argmax(logits[answered], axis=1)), 1)
  unanswered = np.bincount(y[~answered], minlength=num_classes)
  shares = np.asarray(jax.nn.softmax(jnp.asarray(logits[answered]), axis=1), np.float64)
  errors = np.sum((shares - np.eye(num_classes)[y[answered]]) ** 2, axis=1)
  total = np.sum(errors) + 2.0 * np.sum(unanswered)
  return Confusion(counts, unanswered, float(total / len(y)))


def evaluate_classes(
  apply: Apply, params: Params, dataset: Labelled, *, batch_size: int = 500
) -> dict[str, Any]:
  """Returns scores that do not hide a rare class; see `evaluate` for the arguments.

  Returns:
    "auroc", "average_precision": of class 1 if there are two classes, else the means over the
    classes of one against the rest. "auroc_interval": see that function. "balanced_accuracy": the
    mean of "recall_by_class", which is the share of each class that is recognised.
    "calibration_error": see that function. "loss": the mean cross-entropy. "largest_class": its
    share of the examples, which is the accuracy of answering it always. "class_shares_loss": the
    log loss of always answering the classes' shares. "confusion": counts [K, K], rows are true
    classes, columns are answers. A class without examples is left out of means, and its recall is
    NaN. A logit that is NaN makes the first two, the calibration error and the loss NaN, and the
    interval [0, 1].

  >>> from dpjax.types import Example
  >>> data = Example(x=jnp.array([[0.0], [1.0], [2.0], [3.0]]), y=jnp.array([0, 0, 1, 0]))
  >>> scores = evaluate_classes(lambda w, x: jnp.concatenate([-w * x, w * x], 1), 0.1, data)
  >>> scores["largest_class"], scores["confusion"], round(scores["auroc"], 3)
  (0.75, [[1, 2], [0, 1]], 0.667)
  """
  logits, y = _logits(apply, params, dataset, batch_size)
  counted = _count(logits, y)
  num_classes = logits.shape[1]
  sizes = np.bincount(y, minlength=num_classes)
  shares = special.softmax(logits.astype(np.float64), axis=1)
  log_shares = special.log_softmax(logits.astype(np.float64), axis=1)
  with np.errstate(invalid="ignore"):
    recalls = np.diag(counted.counts) / sizes
  held = np.flatnonzero(sizes)
  asked = [1] if num_classes == 2 else held
  mean = lambda score: float(np.mean([score(shares[:, k], y == k) for k in asked]))
  return {
    "auroc": mean(auroc),
    "auroc_interval": _auroc_interval([(shares[:, k], y == k) for k in asked]),
    "average_precision": mean(average_precision),
    "balanced_accuracy": float(np.mean(recalls[held])),
    "recall_by_class": recalls.tolist(),
    "calibration_error": calibration_error(shares, y),
    "loss": float(-log_shares[np.arange(len(y)), y].mean()),
    "largest_class": float(sizes.max() / len(y)),
    "class_shares_loss": float(stats.entropy(sizes)),
    "confusion": counted.counts.tolist(),
  }


def auroc(scores: Any, positive: Any) -> float:
  """Returns the area under the ROC curve: the chance that a positive example scores higher than a
  negative one, where a tie counts half. NaN if one of the two is missing, or a score is NaN.

  Args:
    scores: [n].
    positive: [n] of True and False.

  >>> auroc([0.1, 0.4, 0.35, 0.8], [False, False, True, True])
  0.75
  """
  scores, positive = _check_scores(scores, positive)
  count = int(positive.sum())
  if count in (0, len(positive)) or np.isnan(scores).any():
    return float("nan")
  ranks = stats.rankdata(scores)[positive].sum() - count * (count + 1) / 2
  return float(ranks / (count * (len(positive) - count)))


def auroc_interval(scores: Any, positive: Any) -> list[float]:
  """Returns [low, high], where the AUROC of this model on all examples of this kind lies with 95 %:
  by the variance of DeLong et al. 1988, symmetric on the logit scale.

  That variance is an estimate, and a poor one from few examples: with five positives and a normal
  quantile, the interval would miss the AUROC in up to 18 % of cases. So the quantile is that of
  Student's t with one degree of freedom less than positives or negatives, the fewer of the two. And
  the interval is never shorter than it would be if all pairs of a positive and a negative had
  compared alike: pairs without a common example then give that of a share (Clopper and Pearson
  1934). It is [0, 1] where fewer than two are positive or negative, or a score is NaN. See `auroc`
  for the arguments.

  >>> scores, positive = [0.1, 0.4, 0.35, 0.6, 0.8], [False, False, True, True, True]
  >>> [round(end, 3) for end in auroc_interval(scores, positive)]
  [0.0, 1.0]
  """
  return _auroc_interval([_check_scores(scores, positive)])


def _auroc_interval(columns: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[float]:
  """Returns the interval of the mean AUROC of several (scores, positive) of the same examples."""
  fewest = min(min(positive.sum(), (~positive).sum()) for _, positive in columns)
  if fewest < 2 or any(np.isnan(scores).any() for scores, _ in columns):
    return [0.0, 1.0]
  area = float(np.mean([auroc(*column) for column in columns]))
  parts = np.mean([_auroc_parts(*column) for column in columns], axis=0)
  # A share p of all pairs compares as these do, unless a chance of p ** fewest came true.
  alike = (0.025 / len(columns)) ** (1 / fewest)
  ends = np.array([alike * area, 1 - alike * (1 - area)])
  if std := np.sqrt(np.sum(parts**2)):
    half = stats.t.ppf(0.975, fewest - 1) * std / (area * (1 - area))
    around = special.expit(special.logit(area) + np.array([-half, half]))
    # Over several columns the variance is a mean, which no single pair of examples decides.
    widest = np.array([min(ends[0], around[0]), max(ends[1], around[1])])
    ends = widest if len(columns) == 1 else around
  return ends.tolist()


def _auroc_parts(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
  """Returns each example's part of the error of an AUROC: their squares sum to its variance."""
  ranks = stats.rankdata(scores)
  parts = np.empty(len(scores))
  for rows in (positive, ~positive):
    count = rows.sum()
    # The share of the other kind that lies below each of these.
    below = (ranks[rows] - stats.rankdata(scores[rows])) / (len(scores) - count)
    # A mean of `count` values: a deviation's square, over count - 1, over count.
    parts[rows] = (below - below.mean()) / np.sqrt(count * (count - 1))
  return parts * np.where(positive, 1, -1)


def average_precision(scores: Any, positive: Any) -> float:
  """Returns the mean precision over the positive examples, each at the threshold that just finds
  it: the area under the precision-recall curve, without interpolation. NaN as for `auroc`.

  >>> round(average_precision([0.1, 0.4, 0.35, 0.8], [False, False, True, True]), 4)
  0.8333
  """
  scores, positive = _check_scores(scores, positive)
  if not positive.any() or np.isnan(scores).any():
    return float("nan")
  order = np.argsort(-scores, kind="stable")
  hits = np.cumsum(positive[order])
  # Equal scores share a threshold, so only the last of them counts.
  ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
  found = np.diff(hits[ends], prepend=0) / hits[-1]
  return float(np.sum(found * hits[ends] / (ends + 1)))


def _check_scores(scores: Any, positive: Any) -> tuple[np.ndarray, np.ndarray]:
  scores = np.asarray(scores, np.float64)
  positive = np.asarray(positive, bool)
  if scores.ndim != 1 or scores.shape != positive.shape or not len(scores):
    raise UserError(
      f"must be [n] with n >= 1, as positive, got {scores.shape}, {positive.shape}",
      field="scores",
    )
  return scores, positive


def calibration_error(shares: Any, labels: Any, *, num_bins: int = 15) -> float:
  """Returns the expected calibration error: how far the probability of the likeliest class is from
  the share of right answers, averaged over equally wide bins of that probability.

  Args:
    shares: [n, K] probabilities of the classes. NaN among them gives NaN.
    labels: [n].

  >>> round(calibration_error([[0.8, 0.2], [0.8, 0.2]], [0, 1]), 2)  # sure to .8, right in half
  0.3
  """
  shares = np.asarray(shares, np.float64)
  labels = np.asarray(labels)
  if shares.ndim != 2 or not len(shares) or labels.shape != shares.shape[:1]:
    raise UserError(
      f"must be [n, K] with n >= 1 and labels [n], got {shares.shape}, {labels.shape}",
      field="shares",
    )
  validate.integer_at_least(1, num_bins=num_bins)
  if np.isnan(shares).any():
    return float("nan")
  sure = shares.max(axis=1)
  right = shares.argmax(axis=1) == labels
  places = np.clip((sure * num_bins).astype(int), 0, num_bins - 1)
  # The number of examples in a bin cancels: it is the weight, and divides both means.
  gaps = np.bincount(places, weights=right - sure, minlength=num_bins)
  return float(np.sum(np.abs(gaps)) / len(labels))


def nearest_neighbour_accuracy(points: Any, labels: Any, *, batch_size: int = 500) -> float:
  """Returns the share of points whose nearest OTHER point has the same label.

  Distances are Euclidean. Among equally near points the first one counts. With classes that an
  embedding was not trained on, the share measures how well the embedding separates them.

  Args:
    points: [n, D], n >= 2.
    labels: [n].

  >>> nearest_neighbour_accuracy([[0.0], [0.1], [5.0], [5.2], [1.0]], [0, 0, 1, 1, 2])
  0.8
  """
  points = np.asarray(points, np.float64)
  labels = np.asarray(labels)
  if points.ndim != 2 or len(points) < 2 or labels.shape != points.shape[:1]:
    raise UserError(
      f"must be [n, D] with n >= 2 and labels [n], got {points.shape}, {labels.shape}",
      field="points",
    )
  validate.integer_at_least(1, batch_size=batch_size)
  lengths = np.sum(points * points, axis=1)
  hits = 0
  for start in range(0, len(points), batch_size):
    rows = np.arange(start, min(start + batch_size, len(points)))
    # The squared length of each row is left out of its squared distances. It is the same for all
    # points, so it does not change which point is nearest.
    distances = lengths - 2 * points[rows] @ points.T
    # A point is not its own neighbour.
    distances[rows - start, rows] = np.inf
    hits += np.sum(labels[np.argmin(distances, axis=1)] == labels[rows])
  return float(hits / len(points))


def evaluate_next_token(
  apply: Apply,
  params: Params,
  dataset: Labelled,
  *,
  padding_id: int = 0,
  batch_size: int = 50,
) -> dict[str, float]:
  """Returns {"accuracy", "loss", "perplexity"} of predicting each token from those before it.

  `dataset.x` is tokens [n, T], or [n, m, T] where an example is several sequences; apply maps
  [B, T - 1] to logits [B, T - 1, V]. Means are over all predicted tokens but `padding_id`, so an
  example with more tokens weighs more. Perplexity is exp of the mean loss, which is in nats.

  >>> from dpjax.types import Example
  >>> data = Example(x=np.array([[1, 2, 1, 0]]), y=np.array([0]))
  >>> uniform = lambda params, tokens: jnp.zeros((*tokens.shape, 4)).at[..., 2].add(params)
  >>> round(evaluate_next_token(uniform, jnp.float32(0), data)["perplexity"], 3)
  4.0
  """
  right, nats, count = _sums(apply, params, dataset, batch_size, padding_id)
  mean = nats / max(count, 1)
  return {
    "accuracy": right / max(count, 1),
    "loss": mean,
    "perplexity": float(np.exp(mean)),
  }

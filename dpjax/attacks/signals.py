"""Signals of membership: one number for each record, from one query. It is larger for a record
whose label the model is surer of.

Membership attacks use log odds, log(p / (1 - p)) for the probability p that a model gives to the
record's own label. Carlini et al. (2022) found them nearly Gaussian over models. Confidence and
loss can be computed from log odds without loss of digits. For p near 1, log odds that come from
confidences lose digits; those that this module computes from losses or logits do not. Where p is 0
or 1 in floating point, log odds are about +-103.6, as in the code of Carlini et al.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from dpjax import trees, validate
from dpjax.metrics import Apply
from dpjax.types import Array, HostArray, Labelled, Params
from dpjax.validate import UserError

# Floor of probabilities, as in the code of Carlini et al.
_TINY = 1e-45
LARGEST = -math.log(_TINY)

Signal = Callable[[Params, Labelled], np.ndarray]  # (params, n records) -> [n]


def numbers(name: str, values: HostArray) -> np.ndarray:
  """Returns the values as a float64 array. Raises UserError if they are no numbers, or hold NaN.

  >>> numbers("scores", [1.0, float("nan")])
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: scores: 1 of 2 are NaN
  """
  try:
    array = np.asarray(values, np.float64)
  # NumPy raises these errors for words, or for rows of unequal length.
  except (TypeError, ValueError) as error:
    raise UserError(f"must be an array of numbers ({error})", field=name) from error
  if np.isnan(array).any():
    raise UserError(f"{np.isnan(array).sum()} of {array.size} are NaN", field=name)
  return array


def probabilities(name: str, values: HostArray) -> np.ndarray:
  """Returns a model's answers as float64 [n, K]. Raises UserError if they are no probabilities of
  K >= 2 classes.

  >>> probabilities("answers", [[0.25, 0.75]]).shape
  (1, 2)
  """
  p = numbers(name, values)
  if p.ndim != 2 or p.shape[1] < 2 or not len(p) or ((p < 0) | (p > 1)).any():
    raise UserError(
      f"must be probabilities in [0, 1], [n, K] with K >= 2, got {p.shape}", field=name
    )
  return p


def log_odds(confidences: HostArray) -> np.ndarray:
  """Returns the log odds [...] of the probabilities [...] that models give to a record's label.

  Raises UserError for a value that is no probability.

  >>> log_odds([0.5, 0.75, 1.0]).round(4)  # log 1, log 3, the end
  array([  0.    ,   1.0986, 103.6163])
  """
  p = numbers("confidences", confidences)
  if ((p < 0) | (p > 1)).any():
    raise UserError(
      f"run from {p.min()} to {p.max()}: must lie in [0, 1]", field="confidences"
    )
  # The floor keeps both logarithms finite at p = 0 and p = 1.
  return np.log(p + _TINY) - np.log(1 - p + _TINY)


def log_odds_of_losses(losses: HostArray) -> np.ndarray:
  """Returns the log odds [...] of cross-entropies -log p [...] in nats, accurate for p near 1, too.

  >>> log_odds_of_losses([np.log(2), 1e-20, 0.0]).round(4)
  array([  0.    ,  46.0517, 103.6163])
  """
  loss = numbers("losses", losses)
  if (loss < 0).any():
    raise UserError(
      f"the least is {loss.min()}: a cross-entropy must be >= 0", field="losses"
    )
  with np.errstate(over="ignore", divide="ignore"):
    # Adding 0 turns -0.0 into 0.
    return np.clip(-np.log(np.expm1(loss)), -LARGEST, LARGEST) + 0.0


def log_odds_of_logits(logits: HostArray, labels: HostArray) -> np.ndarray:
  """Returns log odds [..., n] from logits [..., n, K] of n records and integer labels [n].

  >>> log_odds_of_logits([[np.log(3.0), 0.0, 0.0]], [0]).round(4)  # log(3 / 2)
  array([0.4055])
  """
  scores, is_label = _pick_labels(numbers("logits", logits), labels)
  # With -inf in its place, the record's own label adds nothing to the sum over other labels.
  others = np.where(is_label, -np.inf, scores)
  gap = scores[is_label].reshape(scores.shape[:-1]) - special.logsumexp(others, axis=-1)
  return np.clip(gap, -LARGEST, LARGEST)


def _pick_labels(logits: np.ndarray, labels: HostArray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the logits, and a mask of the records' own labels: [..., n, K] bool."""
  y = np.asarray(labels)
  if logits.ndim < 2 or logits.shape[-1] < 2 or y.shape != logits.shape[-2:-1]:
    raise UserError(
      f"must be [..., n, K] with K >= 2 beside labels [n], got {logits.shape} "
      f"and {y.shape}",
      field="logits",
    )
  if y.dtype.kind not in "iu" or (
    y.size and not 0 <= y.min() <= y.max() < logits.shape[-1]
  ):
    raise UserError(f"must be integers in [0, {logits.shape[-1]})", field="labels")
  return logits, np.broadcast_to(np.arange(logits.shape[-1]) == y[:, None], logits.shape)


def top_confidences(logits: HostArray) -> np.ndarray:
  """Returns the largest probability of any label: logits [..., K] -> [...].

  >>> top_confidences([[np.log(3.0), 0.0]])
  array([0.75])
  """
  return special.softmax(numbers("logits", logits), axis=-1).max(axis=-1)


def soft_margin_taylor(
  logits: HostArray,
  labels: HostArray,
  *,
  temperature: float = 2.0,
  margin: float = 0.6,
  order: int = 4,
) -> np.ndarray:
  """Returns the confidences [..., n] with which RMIA's authors attack images.

  They come from logits [..., n, K] and labels [n] (Zarifzadeh et al. 2024). The first `order` terms
  of the exponential's series replace the exponential in the softmax. All logits are divided by
  `temperature`; then `margin` is subtracted from that of the record's label. With an even
  `order`, the series of a negative logit may be negative, and so may a confidence. Such a
  confidence is raised to 1e-45.

  >>> soft_margin_taylor([[0.0, 0.0]], [0], margin=0.0)
  array([0.5])
  """
  validate.positive(temperature=temperature)
  validate.non_negative(margin=margin)
  validate.integer_at_least(1, order=order)
  scores, is_label = _pick_labels(numbers("logits", logits) / temperature, labels)
  series = lambda x: sum(x**i / math.factorial(i) for i in range(order))
  mine = series(scores[is_label].reshape(scores.shape[:-1]) - margin)
  others = np.sum(np.where(is_label, 0.0, series(scores)), axis=-1)
  # Infinity divided by infinity is NaN, which is made 0 and then raised to the floor.
  with np.errstate(divide="ignore", invalid="ignore"):
    return np.clip(np.nan_to_num(mine / (mine + others)), _TINY, 1.0)


def log_odds_of_model(apply: Apply, *, batch_size: int = 500) -> Signal:
  """Returns a signal: the log odds of each record, from `apply(params, x [B, ...]) -> [B, K]`.

  It is compiled once for each shape of parameters and records. A label outside [0, K) gives NaN.

  Raises UserError, while tracing, for logits that are not [B, K] with K >= 2.

  >>> from dpjax.types import Example
  >>> signal = log_odds_of_model(lambda params, x: x * params)
  >>> signal(2.0, Example(np.array([[0.5, 0.0], [0.0, 1.0]]), np.array([0, 1]))).tolist()
  [1.0, 2.0]
  """
  validate.integer_at_least(1, batch_size=batch_size)

  @jax.jit
  def ask(params, x, y):
    logits = trees.at_least_float32(apply(params, x))  # [B, K]
    if logits.ndim != 2 or logits.shape[0] != x.shape[0] or logits.shape[1] < 2:
      raise UserError(
        f"must return logits [{x.shape[0]}, K] with K >= 2, got {logits.shape}",
        field="apply",
      )
    is_label = jnp.arange(logits.shape[1])[None] == y[:, None]
    # With -inf in its place, the record's own label adds nothing to the sum over other labels.
    others = jax.nn.logsumexp(jnp.where(is_label, -jnp.inf, logits), axis=1)
    gap = jnp.sum(jnp.where(is_label, logits, 0), axis=1) - others
    return jnp.where(is_label.any(axis=1), gap, jnp.nan)

  def signal(params: Params, records: Labelled) -> np.ndarray:
    x = np.asarray(records.x)
    y = np.asarray(records.y)
    gaps = by_parts(lambda part: ask(params, x[part], y[part]), len(y), batch_size)
    return np.clip(gaps, -LARGEST, LARGEST)

  return signal


def by_parts(ask: Callable[[np.ndarray], Array], count: int, batch_size: int) -> np.ndarray:
  """Calls `ask(places)` for rows 0 .. count - 1 in parts, and returns float64 [count, ...].

  All parts have one size, so that `ask` is compiled once: the last row is repeated where needed.
  """
  spare = -count % min(batch_size, max(count, 1))
  places = np.minimum(np.arange(count + spare), count - 1)
  parts = np.split(places, range(batch_size, len(places), batch_size))
  return np.concatenate([np.asarray(ask(part), np.float64) for part in parts])[:count]


def num_classes(apply: Apply, params: Params, shape: Sequence[int]) -> int:
  """Returns the number K of classes of a model, from shapes alone: the model is not run.

  The model is `apply(params, x [B, *shape]) -> logits [B, K]`.

  Raises UserError if the model takes no such input, or returns something else.

  >>> num_classes(lambda params, x: x @ params, np.zeros((4, 3)), (4,))
  3
  """
  try:
    logits = jax.eval_shape(apply, params, jnp.zeros((1, *shape)))
  except Exception as error:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise UserError(
      f"the model takes no such input ({first})", field="shape", value=tuple(shape)
    ) from error
  if logits.ndim != 2 or logits.shape[1] < 2:
    raise UserError(
      f"must return logits [1, K] with K >= 2, got {logits.shape}", field="apply"
    )
  return logits.shape[1]

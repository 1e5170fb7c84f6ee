"""Attribute inference: recovers a missing attribute of a record from the model's answers
about the rest.

The attacker knows a record and its label, except for one attribute, and tries every value of it.
The guess is the value with the largest product of two numbers: the frequency of the value, and the
probability that the model then gives to the label (Fredrikson et al. 2014; Yeom et al. 2018).

A model that has learned about a population also yields right guesses about persons that it has
never seen. That is no leak of a record. What counts is the ADVANTAGE: the rate of right guesses on
records that the model was trained on, minus the rate on other records (ibid.).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpjax import validate
from dpjax.attacks import signals
from dpjax.attacks.roc import Interval, exact_interval
from dpjax.attacks.signals import Signal
from dpjax.metrics import Apply
from dpjax.types import Example, HostArray, Labelled, Params
from dpjax.validate import UserError


def guessed_attribute(
  apply: Apply,
  columns: Sequence[int],
  values: HostArray,
  *,
  prior: HostArray | None = None,
) -> Signal:
  """Returns a signal for `train_shadows`: the index [n] of each record's likeliest value.

  It is an index into `values`.

  Args:
    columns: places of the attribute in a flattened record: several if several numbers encode
      it, as a one-hot code does. The numbers in these places are never read.
    values: [V, len(columns)], the possible values of the attribute (or [V] for one column).
    prior: [V], the frequency of each value; None: all are equally frequent.

  Raises UserError for fewer than two values, or a prior that is no distribution or holds a 0. The
  signal raises it for columns that a record does not have.

  >>> guess = guessed_attribute(lambda w, x: x @ w, [0], [0.0, 1.0])
  >>> records = Example(np.array([[9.0, 0.0], [9.0, 0.0]]), np.array([0, 1]))
  >>> guess(np.array([[0.0, 2.0], [0.0, 0.0]]), records).tolist()  # 1 speaks for class 1
  [0.0, 1.0]
  """
  places = np.asarray(columns)
  options = signals.numbers("values", values)
  options = options[:, None] if options.ndim == 1 else options
  if places.ndim != 1 or not places.size or places.dtype.kind not in "iu":
    raise UserError("must be places of a record's numbers", field="columns", value=columns)
  if options.ndim != 2 or len(options) < 2 or options.shape[1] != len(places):
    raise UserError(
      f"must be [V, {len(places)}] with V >= 2, one number for each column, got "
      f"{options.shape}",
      field="values",
    )
  chance = np.full(len(options), 1 / len(options)) if prior is None else np.asarray(prior)
  right = chance.shape == (len(options),) and np.isclose(chance.sum(), 1)
  if not right or (chance <= 0).any():
    raise UserError(f"must be {len(options)} shares > 0 that sum to 1", field="prior")
  ask = signals.log_odds_of_model(apply)

  def signal(params: Params, records: Labelled) -> np.ndarray:
    x = np.asarray(records.x)
    # A copy. An integer type is kept only if it can hold `values`, since it cuts fractions.
    exact = x.dtype.kind not in "biu" or np.array_equal(options.astype(x.dtype), options)
    x = np.array(x, x.dtype if exact else np.result_type(x, options))
    y = np.asarray(records.y)
    flat = x.reshape(len(x), -1)
    if not 0 <= places.min() <= places.max() < flat.shape[1]:
      raise UserError(
        f"must lie in [0, {flat.shape[1]}), the numbers of a record", field="columns"
      )
    likely = []
    for value, share in zip(options, chance):
      # `flat` is a view of the copy, so the original records stay unchanged.
      flat[:, places] = value
      odds = ask(params, Example(flat.reshape(x.shape), y))
      # This is log share + log p(y | x), with p(y | x) from the log odds.
      likely.append(np.log(share) - np.logaddexp(0, -odds))
    return np.argmax(likely, axis=0).astype(np.float64)

  return signal


class AttributeAdvantage(NamedTuple):
  """Rates of right guesses for records that were trained on, and for other records."""

  right_with: int
  num_with: int
  right_without: int
  num_without: int
  interval: Interval  # of the advantage, exact (Bonferroni over both rates)
  baseline: float  # rate of right guesses if the most frequent value is guessed

  @property
  def with_record(self) -> float:
    return self.right_with / self.num_with

  @property
  def without_record(self) -> float:
    return self.right_without / self.num_without

  @property
  def advantage(self) -> float:
    return self.with_record - self.without_record


def attribute_advantage(
  guesses: HostArray, included: HostArray, truth: HostArray, *, confidence: float = 0.95
) -> AttributeAdvantage:
  """Measures how much more often guesses [S, n] of S models are right for records that the models
  held than for other records.

  Each record is judged by ONE model that held it and by one that did not; the models rotate over
  the records. So each record counts once in either rate. Both rates have exact intervals at
  (1 + confidence) / 2, which together give the interval of the difference. With
  `random_halves(2 k, n, ...)` every record has models of both kinds.

  Args:
    included: bool [S, n], which model was trained on which record.
    truth: integers [n], index of each record's true value among the possible values.

  Raises UserError for shapes that do not match, or a record that all models held or none did.

  >>> result = attribute_advantage([[1, 0], [0, 0]], np.eye(2, dtype=bool), [1, 0])
  >>> result.with_record, result.without_record, result.advantage
  (1.0, 0.5, 0.5)
  """
  validate.open_unit(confidence=confidence)
  guess = np.atleast_2d(signals.numbers("guesses", guesses))
  held = np.asarray(included)
  true = np.asarray(truth)
  if held.dtype != bool or held.shape != guess.shape:
    raise UserError(
      f"must be bool {guess.shape}, as guesses, got {held.shape}", field="included"
    )
  if true.shape != guess.shape[1:] or true.dtype.kind not in "iu" or not true.size:
    raise UserError(
      f"must be integers [{guess.shape[1]}], one for each record", field="truth"
    )
  both = held.any(axis=0) & ~held.all(axis=0)
  if not both.all():
    raise UserError(
      f"record {np.argmin(both)} is held by all models or by none: must be by some",
      field="included",
    )
  right = guess == true[None]  # [S, n]
  counts = [int(right[_turn(side), np.arange(true.size)].sum()) for side in (held, ~held)]
  level = (1 + confidence) / 2
  n = true.size
  ends = [exact_interval(count, n, level) for count in counts]
  # The smallest advantage is the lower end of one rate minus the upper end of the other.
  interval = (ends[0][0] - ends[1][1], ends[0][1] - ends[1][0])
  baseline = np.unique(true, return_counts=True)[1].max() / n
  return AttributeAdvantage(counts[0], n, counts[1], n, interval, float(baseline))


def _turn(side: np.ndarray) -> np.ndarray:
  """Returns [n]: one of the models that `side` [S, n] marks for each record, in rotation."""
  turn = np.arange(side.shape[1]) % side.sum(axis=0)
  return np.argmax(side & (np.cumsum(side, axis=0) == turn + 1), axis=0)

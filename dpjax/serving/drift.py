"""Drift of inputs and answers: histograms over public bins, and their distance from a reference.

The population stability index of two histograms with shares p and q is
`sum_i (p_i - q_i) ln(p_i / q_i)`, the sum of both Kullback-Leibler divergences. In practice an
index below .1 counts as no change, and one above .25 as a large change. Source: Siddiqi 2006,
"Credit Risk Scorecards".

Bins are public: they follow from a declaration or from a flag, never from rows. The counts in the
bins need not be public. A histogram of training rows is a query on these rows. `noisy_counts`
answers it under noise, at a separate cost (`dpjax.mechanisms.Histogram`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpjax import data, mechanisms, noise, validate
from dpjax.data import table_declaration
from dpjax.experiments.run.model_inputs import ModelInputs
from dpjax.validate import UserError

WARNING = 0.1
ALARM = 0.25
# Number that is added to every count, so that the share of an empty bin has a logarithm.
PSEUDO_COUNT = 0.5
_PARTS = 10
# Number of random splits of `by_chance`. A window that exceeds all of them raises an alarm. Half of
# the promised 1/1000 is left for the approximation under noise.
_SPLITS = 1999
# NumPy splits fewer rows than this.
_MOST_SPLIT = 10**9
# Number of rows that are counted at a time.
PART = 5000
CLASSES = "predicted"
MEAN = "mean"


def pseudo_count_of(*scales: float) -> float:
  """Returns the number that is added to every count, given the scales of the Laplace noise.

  If noise empties a small bin, the logarithm of its share would dominate the PSI. Adding the
  largest scale to each count, and at least 0.5, prevents that.

  >>> pseudo_count_of(0.0, 0.0), pseudo_count_of(0.0, 8.0)
  (0.5, 8.0)
  """
  return max(PSEUDO_COUNT, *scales)


def shares(counts: Any, *, pseudo_count: float = PSEUDO_COUNT) -> np.ndarray:
  """Returns the share of each bin. With a positive `pseudo_count` it is positive, even if noise has
  made the count negative.

  Counts are [..., k] for k bins, and shares sum to 1 along the last axis.

  >>> shares([0, 9], pseudo_count=0.5).tolist()
  [0.05, 0.95]
  """
  raised = np.maximum(np.asarray(counts, np.float64), 0) + pseudo_count
  return raised / raised.sum(axis=-1, keepdims=True)


def psi(counts: Any, reference: Any, *, pseudo_count: float = PSEUDO_COUNT) -> float:
  """Returns the population stability index of two histograms over the same bins.

  Args:
    counts, reference: [k] counts, exact or noisy. A negative count is taken as 0.
    pseudo_count: number that is added to every count; > 0 if a count is 0 or negative.

  >>> round(psi([50, 50], [90, 10], pseudo_count=0), 4)  # .4 ln(5) - .4 ln(5/9)
  0.8789
  >>> psi([10, 20], [100, 200], pseudo_count=0)
  0.0
  """
  now = np.asarray(counts, np.float64)
  before = np.asarray(reference, np.float64)
  if now.shape != before.shape or now.ndim != 1 or not now.size:
    raise UserError(f"must be of shape {before.shape}, got {now.shape}", field="counts")
  if not (np.isfinite(now).all() and np.isfinite(before).all()):
    raise UserError("must be finite", field="counts")
  if pseudo_count <= 0 and (now.min() <= 0 or before.min() <= 0):
    raise UserError("must be > 0 where a bin is empty", field="pseudo_count", value=0)
  p = shares(now, pseudo_count=pseudo_count)
  q = shares(before, pseudo_count=pseudo_count)
  return float(np.sum((p - q) * np.log(p / q)))


def by_chance(
  counts: Any,
  reference: Any,
  *,
  num_rows: int,
  reference_scale: float = 0.0,
  window_scale: float = 0.0,
  seed: int = 0,
) -> float:
  """Returns a PSI that a window without drift exceeds with probability 1/2000 at most.

  A small window differs from its reference by chance, and by the noise of window and reference.
  Without drift, each split of all rows into a window and a reference is equally likely. So the
  largest PSI of 1,999 random splits is exceeded with probability 1/2000 at most, whatever the law
  of the rows is: a permutation test (Phipson and Smyth 2010). The probability is over window and
  reference: a reference that is unlucky is exceeded more often. Under noise the splits are not
  known. Then both histograms are drawn from the shares of all rows, which is an approximation.

  The simulation reads only the given counts, so it costs no epsilon beyond theirs.

  Args:
    counts, reference: [k] counts of the window and of the reference, exact or noisy.
    num_rows: number of rows of the window.
    reference_scale, window_scale: scale of the Laplace noise on the counts of the reference, and
      on those of the window; 0: no noise.
    seed: seed of the simulation, such as the number of the window.

  >>> by_chance([5, 5], [5, 5], num_rows=10) > by_chance([500, 500], [500, 500], num_rows=1000)
  True
  """
  validate.integer_at_least(1, num_rows=num_rows)
  rng = np.random.default_rng(seed)
  before = np.asarray(reference, np.float64)
  rows = np.maximum(before + np.asarray(counts, np.float64), 0)
  if not reference_scale and not window_scale and rows.sum() < _MOST_SPLIT:
    pool = np.rint(rows).astype(np.int64)
    window = rng.multivariate_hypergeometric(pool, num_rows, _SPLITS, method="marginals")
    drawn = [window, pool - window]
  else:
    size = max(1, round(float(before.sum())))
    drawn = [
      rng.multinomial(count, shares(rows, pseudo_count=1e-9), _SPLITS)
      + rng.laplace(0.0, scale, (_SPLITS, len(rows)))
      for count, scale in ((num_rows, window_scale), (size, reference_scale))
    ]
  added = pseudo_count_of(reference_scale, window_scale)
  now, then = (shares(each, pseudo_count=added) for each in drawn)
  return float(np.max(np.sum((now - then) * np.log(now / then), axis=1)))


@dataclasses.dataclass(frozen=True)
class Bins:
  """Public bins of one number or category of each row.

  Args:
    name: name of what is counted: "predicted", "mean", a column of a table, or an input such as
      "x[3,0]"; with the edges, if a flag gave them, as counts over other edges are of other bins.
    edges: increasing inner edges of the bins of a number. There are len(edges) + 1 bins.
    places: columns of the inputs that hold a category, one column for each value of the category;
      () for a number.
    place: index of the input that holds a number; None for "predicted" and "mean".
    lower, upper: bounds of a column before its scaling to [0, 1], in the units of the edges.
    num_classes: number of classes that are bins; 0 for a number or a category.
  """

  name: str
  edges: tuple[float, ...] = ()
  places: tuple[int, ...] = ()
  place: tuple[int, ...] | None = None
  lower: float = 0.0
  upper: float = 1.0
  num_classes: int = 0

  @property
  def size(self) -> int:
    """Number of bins."""
    return self.num_classes or len(self.places) or len(self.edges) + 1

  def of(self, x: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Returns the bin of each row, int64 [n].

    Args:
      x: inputs [n, ...] as `Predictor.raw` returned them.
      answers: result of `Predictor.classes`.
    """
    if self.num_classes:
      return np.asarray(answers, np.int64)
    if self.places:
      return np.argmax(x[:, list(self.places)], axis=1)
    if self.place is not None:
      values = x[(slice(None), *self.place)].astype(np.float64)
    elif self.name == CLASSES:
      # The answers of a regression are numbers in the units of the data, as the edges are.
      values = np.asarray(answers, np.float64)
    else:
      values = x.reshape(len(x), -1).mean(axis=1, dtype=np.float64)
    scaled = self.lower + values * (self.upper - self.lower) if self.place else values
    return np.searchsorted(self.edges, scaled, side="right")


def fits(counts: Mapping[str, Sequence[Any]], bins: Sequence[Bins]) -> bool:
  """Returns whether `counts` has exactly the names of `bins`, and one count for each bin."""
  held = {name: len(each) for name, each in counts.items()}
  return held == {each.name: each.size for each in bins}


def predicted_bins(inputs: ModelInputs) -> Bins:
  """Returns the bins of a model's answers: its classes, or ten equal parts between the bounds of a
  predicted number. Raises UserError for several labels."""
  if inputs.target is None:
    return Bins(CLASSES, num_classes=inputs.num_classes)
  if isinstance(inputs.target, data.Interval):
    bounds = inputs.target
    return Bins(CLASSES, edges=_equal_parts(bounds.lower, bounds.upper))
  raise UserError("must have one answer for each row, not several labels", field="drift")


def bins_of(text: str, inputs: ModelInputs) -> Bins:
  """Makes bins from the value of a flag: `NAME`, or `NAME:EDGE,EDGE,...`.

  Args:
    text: value of the flag. NAME is a column of a table. If the inputs are an array, NAME is "mean"
      (the mean of each row, over all of its numbers), or a place in the array: "x[3]", "x[3,0]",
      ... for one number of an array.
    inputs: facts about the model's inputs.

  Raises:
    UserError: the input does not exist; the edges do not increase; there are neither edges nor
      public bounds; a category has edges.
  """
  name, colon, listed = text.partition(":")
  edges = _edges(listed) if colon else ()
  bounds = (0.0, 1.0) if inputs.unit_range else None
  place: tuple[int, ...] | None = None
  if inputs.declaration is not None:
    kind, first = _column(name, text, inputs.declaration)
    if isinstance(kind, table_declaration.Category):
      if colon:
        raise UserError("a category has no edges", field="drift_inputs", value=text)
      return Bins(name, places=tuple(range(first, first + len(kind.values))))
    bounds = (kind.bounds.lower, kind.bounds.upper)
    place = (first,)
  elif name != MEAN:
    place = _place(name, text, inputs.shape)
  if not edges:
    if bounds is None:
      raise UserError(
        "must have edges (NAME:EDGE,EDGE): its bounds are not public",
        field="drift_inputs",
        value=text,
      )
    edges = _equal_parts(*bounds)
  lower, upper = bounds if inputs.declaration is not None and bounds else (0.0, 1.0)
  return Bins(text, edges=edges, place=place, lower=lower, upper=upper)


def _column(name: str, text: str, declaration: Any) -> tuple[Any, int]:
  """Returns (a declared column of numbers or categories, the index of its first input). Raises
  UserError for an unknown column and for a column of texts."""
  columns = table_declaration.parse(declaration).columns
  if name not in columns:
    hint = validate.did_you_mean(name, list(columns))
    raise UserError(f"must name a column{hint}", field="drift_inputs", value=text)
  if isinstance(columns[name], table_declaration.Text):
    raise UserError(
      "is a column of texts, whose tokens have no order", field="drift_inputs", value=text
    )
  before = list(columns.values())[: list(columns).index(name)]
  is_category = table_declaration.Category
  first = sum(len(each.values) if isinstance(each, is_category) else 1 for each in before)
  return columns[name], first


def _equal_parts(lower: float, upper: float) -> tuple[float, ...]:
  inner = np.linspace(lower, upper, _PARTS + 1)[1:-1]
  return tuple(map(float, inner))


def _edges(listed: str) -> tuple[float, ...]:
  try:
    edges = tuple(float(edge) for edge in listed.split(","))
  except ValueError:
    edges = (math.nan,)
  if not all(map(math.isfinite, edges)) or list(edges) != sorted(set(edges)):
    raise UserError("edges must be increasing numbers", field="drift_inputs", value=listed)
  return edges


def _place(name: str, text: str, shape: Sequence[int]) -> tuple[int, ...]:
  inside = name[2:-1] if name.startswith("x[") and name.endswith("]") else ""
  parts = [part.strip() for part in inside.split(",")]
  place = tuple(int(part) if part.isdecimal() else -1 for part in parts)
  fits = len(place) == len(shape) and all(0 <= i < size for i, size in zip(place, shape))
  if not fits:
    raise UserError(
      f"must be '{MEAN}' or 'x[...]' with {len(shape)} places in {tuple(shape)}",
      field="drift_inputs",
      value=text,
    )
  return place


def exact_counts(
  bins: Sequence[Bins], x: np.ndarray, answers: np.ndarray
) -> dict[str, np.ndarray]:
  """Counts the rows in each bin exactly: {name of bins: counts}. NOT private."""
  return {
    each.name: np.bincount(each.of(x, answers), minlength=each.size)[: each.size]
    for each in bins
  }


def mechanism(
  epsilon: float, bins: Bins, relation: str, parts: int
) -> mechanisms.Histogram:
  """Returns the mechanism of one histogram, among several histograms of the same rows.

  Args:
    epsilon: epsilon of all histograms together.
    bins: bins of this histogram.
    relation: neighbouring relation of the guarantee.
    parts: number of histograms. A row counts in each of them.
  """
  return mechanisms.Histogram(epsilon / parts, bins.size, neighboring_relation=relation)


def noisy_counts(
  counts: Mapping[str, Any], bins: Sequence[Bins], *, epsilon: float, relation: str
) -> tuple[dict[str, list[float]], float]:
  """Returns ({name: noisy counts}, scale of their Laplace noise).

  Guarantee: epsilon-DP for one row under `relation`, by sequential composition of one histogram
  for each of `bins` (Dwork and Roth 2014, example 3.2 and theorem 3.16). The key of the noise comes
  from the operating system, and is not kept.
  """
  noisy = {}
  scale = 0.0
  for each in bins:
    histogram = mechanism(epsilon, each, relation, len(bins))
    laplace = histogram.noise
    assert isinstance(laplace, mechanisms.Laplace)
    scale = float(laplace.scale)
    # The counts are integers, so that none is rounded before the noise is added.
    exact: Any = np.asarray(counts[each.name], np.int64)
    noisy[each.name] = np.asarray(laplace(noise.new_key(), exact), np.float64).tolist()
  return noisy, scale

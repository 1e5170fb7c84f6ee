"""Sensitivity of queries: the largest change by one record, to which noise is scaled.

| query                         | add or remove | replace_special | replace_one    |
| ----------------------------- | ------------- | --------------- | -------------- |
| count                         | 1             | 1               | 1              |
| sum of x in [lo, hi]          | max(|lo|,|hi|)| max(|lo|,|hi|)  | hi - lo        |
| mean of n such x, n public    | refused       | max(|lo|,|hi|)/n| (hi - lo) / n  |
| histogram, L1 / L2            | 1 / 1         | 1 / 1           | 2 / sqrt(2)    |
| sum of vectors, norm <= C     | C             | C               | 2 C            |

The L1 and L2 sensitivity of a scalar are equal. Under add_or_remove_one the number n of records is
private. The scale of noise on a mean follows from n, so it would reveal n. Release a noisy sum and
a noisy count instead, as `BoundedMean` does.

Source: Dwork and Roth 2014, "The Algorithmic Foundations of Differential Privacy", ch. 3.
"""

from __future__ import annotations

import math

from dpjax import validate
from dpjax.mechanisms import stated
from dpjax.validate import UserError

ORDERS = ("l1", "l2")


def count_sensitivity(neighboring_relation: str = "add_or_remove_one") -> float:
  """Returns the sensitivity of a count of records: 1 under every relation.

  >>> count_sensitivity("replace_one")
  1.0
  """
  validate.one_of(stated.RELATIONS, neighboring_relation=neighboring_relation)
  return 1.0


def sum_sensitivity(
  lower: float, upper: float, *, neighboring_relation: str = "add_or_remove_one"
) -> float:
  """Returns the sensitivity of a sum of numbers, each clipped into [lower, upper].

  >>> sum_sensitivity(10, 30), sum_sensitivity(10, 30, neighboring_relation="replace_one")
  (30.0, 20.0)
  """
  validate.one_of(stated.RELATIONS, neighboring_relation=neighboring_relation)
  stated.interval(lower, upper)
  lower = float(lower)
  upper = float(upper)
  if neighboring_relation == "replace_one":
    return upper - lower
  return max(abs(lower), abs(upper))


def mean_sensitivity(
  lower: float,
  upper: float,
  *,
  num_records: int,
  neighboring_relation: str = "replace_one",
) -> float:
  """Returns the sensitivity of the mean of n = `num_records` (public) numbers in [lower, upper].

  Under replace_one it is (upper - lower) / n, not 1 / n: an age in [0, 100] moves a mean by up to
  100 / n. Raises UserError for add_or_remove_one, under which n is not public.

  >>> mean_sensitivity(0, 100, num_records=1000)
  0.1
  """
  validate.integer_at_least(1, num_records=num_records)
  validate.one_of(stated.RELATIONS, neighboring_relation=neighboring_relation)
  if neighboring_relation == "add_or_remove_one":
    raise UserError(
      "num_records is private there; release a noisy sum and a noisy count, or "
      "use replace_one",
      field="neighboring_relation",
      value="add_or_remove_one",
    )
  total = sum_sensitivity(lower, upper, neighboring_relation=neighboring_relation)
  if num_records > 1e300:
    raise UserError("must be a finite float64 number", field="num_records")
  return total / int(num_records)


def histogram_sensitivity(
  order: str = "l1", *, neighboring_relation: str = "add_or_remove_one"
) -> float:
  """Returns the sensitivity of all counts at once; a record falls into at most one bin.

  >>> histogram_sensitivity(), histogram_sensitivity(neighboring_relation="replace_one")
  (1.0, 2.0)
  >>> round(histogram_sensitivity("l2", neighboring_relation="replace_one"), 3)
  1.414
  """
  validate.one_of(ORDERS, order=order)
  validate.one_of(stated.RELATIONS, neighboring_relation=neighboring_relation)
  if neighboring_relation != "replace_one":
    return 1.0
  return 2.0 if order == "l1" else math.sqrt(2)


def vector_sum_sensitivity(
  norm_bound: float, *, neighboring_relation: str = "add_or_remove_one"
) -> float:
  """Returns the sensitivity of a sum of vectors of norm <= `norm_bound`, in the same norm.

  >>> vector_sum_sensitivity(1.5), vector_sum_sensitivity(
  ...   1.5, neighboring_relation="replace_one")
  (1.5, 3.0)
  """
  stated.positive(norm_bound=norm_bound)
  validate.one_of(stated.RELATIONS, neighboring_relation=neighboring_relation)
  return float(norm_bound) * (2 if neighboring_relation == "replace_one" else 1)

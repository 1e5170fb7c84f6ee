"""Privacy amplification by shuffling, for LOCAL randomisers: hiding among the clones.

n users each run an epsilon_0-locally private randomiser on their own record. A shuffler hides
who sent which report, and the reports are published. Together they are (epsilon, delta)-private
for one user exchanged for any other (replace_one). For many users epsilon is far below epsilon_0
(Feldman, McMillan and Talwar 2021, arXiv:2012.12803). The randomisers may differ, and may depend
on earlier reports.

This is NOT about shuffled mini-batches of DP-SGD, since the sum of a batch is no local
randomiser. For those `sampling.ShuffledSampler` claims no amplification.

| bound                | by                                         | when                         |
| -------------------- | ------------------------------------------ | ---------------------------- |
| `amplified_epsilon`  | theorem 3.1, closed form                   | eps_0 <= ln(n/(16 ln(2/d)))  |
| `amplified_delta`    | theorem 3.2, the clones' masses added up   | always; n at most 10^6       |
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from dpjax import validate
from dpjax.accounting.noise_profiles import UNIT
from dpjax.validate import UserError

# Largest number of reports for `amplified_delta`. For more reports its sum takes too long;
# `amplified_epsilon` has a closed form.
MAX_REPORTS = 1_000_000
# Mass that is left out at each tail of a distribution. It is added to delta.
_TAIL = 1e-14
# Allowance for the relative error of SciPy's chances of two binomials.
_CHANCE_ERROR = 2e-11
# Largest number of reports, which must fit into a signed integer of 64 bits.
_MOST_REPORTS = 2**63 - 1


def amplified_epsilon(*, local_epsilon: float, num_reports: int, delta: float) -> float:
  """Returns an upper bound on epsilon of `num_reports` shuffled reports, in closed form.

  Raises UserError for local_epsilon > ln(n / (16 ln(2 / delta))), which the theorem excludes.

  >>> round(amplified_epsilon(local_epsilon=1.0, num_reports=100_000, delta=1e-6), 3)
  0.073
  """
  _check(local_epsilon, num_reports)
  validate.open_unit(delta=delta)
  largest = math.log(num_reports / (16 * math.log(2 / delta)))
  if local_epsilon > largest:
    raise UserError(
      f"must be <= ln(n / (16 ln(2 / delta))) = {largest:.4g} for num_reports={num_reports}; "
      "give more reports, or use amplified_delta, which has no such condition",
      field="local_epsilon",
      value=local_epsilon,
    )
  grown = math.exp(local_epsilon)
  few = 8 * math.sqrt(grown * math.log(4 / delta) / num_reports) + 8 * grown / num_reports
  return min(local_epsilon, math.log1p((grown - 1) / (grown + 1) * few))


def amplified_delta(*, local_epsilon: float, num_reports: int, epsilon: float) -> float:
  """Returns an upper bound on delta at `epsilon` of `num_reports` shuffled reports, by a sum.

  One user has one of two inputs, and reports like this input with probability
  e^eps_0 / (1 + e^eps_0), else like the other input. C ~ Bin(n - 1, e^-eps_0) other users are
  clones: A ~ Bin(C, 1/2) of them report like the first input, and C - A like the second. The counts
  of both kinds of reports dominate every protocol of shuffled reports.

  Raises UserError for more than `MAX_REPORTS` reports.

  >>> amplified_delta(local_epsilon=1.0, num_reports=1, epsilon=1.0) < 1e-12
  True
  """
  _check(local_epsilon, num_reports)
  validate.non_negative(epsilon=epsilon)
  if num_reports > MAX_REPORTS:
    raise UserError(
      f"must be <= {MAX_REPORTS}; use the closed form",
      field="num_reports",
      value=num_reports,
    )
  clones: Any = stats.binom(num_reports - 1, math.exp(-local_epsilon))
  low = int(clones.ppf(_TAIL))
  high = int(clones.isf(_TAIL))
  # Two tails of the number of clones are left out, and two tails of their counts: four in all.
  counts = np.arange(low, high + 1)
  each = [_divergence(int(count), local_epsilon, epsilon) for count in counts]
  total = float(clones.pmf(counts) @ np.array(each)) * (1 + _CHANCE_ERROR)
  return min(1.0, total + 4 * _TAIL)


def _divergence(clones: int, local_epsilon: float, epsilon: float) -> float:
  """Returns the hockey-stick divergence between the counts under the two inputs, given `clones`."""
  half: Any = stats.binom(clones, 0.5)
  low = int(half.ppf(_TAIL))
  high = int(half.isf(_TAIL)) + 1
  # Reports of the first input's value. Without any of them, the first input is the less likely.
  first = np.arange(max(low, 1), high + 1)
  kept = 1 / (1 + math.exp(-local_epsilon))
  # The difference 1 - kept would lose digits, which e^epsilon makes large.
  other = math.exp(-local_epsilon) * kept
  # Chance of `first` clones like the first input, in multiples of that of one clone less. The
  # difference of the chances themselves would lose digits.
  ratio = (clones + 1 - first) / first
  here = kept + other * ratio
  there = other + kept * ratio
  # Delta falls with epsilon, so a smaller epsilon, whose exponential is finite, is sound.
  gain = here * (1 + 16 * UNIT) - math.exp(min(epsilon, 700.0)) * there
  return float(half.pmf(first - 1) @ np.maximum(gain, 0.0))


def _check(local_epsilon: float, num_reports: int) -> None:
  validate.positive(local_epsilon=local_epsilon)
  validate.integer_in(1, _MOST_REPORTS, num_reports=num_reports)

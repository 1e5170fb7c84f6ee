"""Counts what each party of two-party regression could solve for, and refuses unsafe steps.

Each party has a matrix X [B, d] of the B rows of a step. That of b also has the column of ones. In
the step a party learns X^T r: d linear equations for the B residuals r. A residual must stay
secret, since it tells labels to a and scores to b. All rules but that on labels hold for a and b.
They count ALL steps that one `Disclosure` has seen, whichever run or state these belonged to:

| rule                                         | what would happen without it                 |
| -------------------------------------------- | -------------------------------------------- |
| B > d, counted in different rows             | d equations for B residuals: solved          |
| no row of X is (nearly) alone: leverage      | a column that only row i has gives r_i away, |
| h_i <= 0.9, h the diagonal of X (X^T X)^+ X^T| though B > d                                 |
| a row is in one batch only; a batch may come | the difference of two batches with all but   |
| again                                        | one row in common is that row's residual     |
| steps on a batch * d < numbers that the      | residuals change with the weights: new       |
| other party holds in it                      | equations, until its features are determined |
| bits of a's equations <= B / 4, over all     | one sum over the labels tells as many of     |
| steps on a batch, whatever b's weights are   | them as it has bits; b's scores hide none    |
| the same for the other's columns of few      | a column of 0 and 1 has no more bits than    |
| values, which hold `discrete_bits` bits      | a column of labels                           |

The rule on labels is a theorem. Let everything but b's labels be known to a. The coordinator
rounds each sum to multiples of 2^-20, so a step's equation has one of 1 + 2^20 R values, where
R is the width of its range. R is at most 2 rho sum_i |x_ij|, with rho the largest residual.
The power of two above rho costs 11 bits more. All views of a batch together are then a prefix
code of at most B / 4 bits, so the entropy of uniform labels stays >= 3 B / 4. By Fano's
inequality and concavity, a guess errs at >= .2145 of the labels on average: a reads at most
78.6 % of them, where blind guesses read 50 %. This is an average over rows, not a bound for one
row.

That rule needs large batches: a column takes about 28 bits in each step, for a few hundred rows
with entries near 1. If the rule admits too few steps, train on shares, where no party sees a
gradient (`dpjax.secure.vertical_models.train_logistic`). With `Disclosure(secret_labels=False)`
both parties agree that a may know the labels.

X^T r fixes r up to the null space of X^T, which holds the share 1 - h_i of the unit vector e_i. So
X^T r alone determines the residual r_i exactly where h_i = 1. The k features that the other party
holds in a batch can be learnt at most up to a rotation: these are B k - k (k - 1) / 2 numbers. b
also holds B labels.

These rules hold for parties that follow the protocol; a party that lies about its own matrix
is not caught. None of this is differential privacy: what a party learns is exact.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from dpjax.validate import UserError, flag

MAX_LEVERAGE = 0.9
# Singular values below this fraction of the largest one count as 0, since nothing can be learnt
# from them. The bound is capped at _STEP, the step of the masks' lattice: small columns may occur
# beside large ones. Only rounding errors (_ROUNDING) may raise it above _STEP.
_RANK = 1e-9
_STEP = 2.0**-28
# Rounding error of the singular values, relative to the largest one.
_ROUNDING = 1e-14
# Fraction bits of a sum that the coordinator reveals, of a column within +-1. The noise of CKKS is
# far below such a step: it would tell about the key.
SUM_BITS = 20
# Largest share of the bits of labels, or of all columns of few values, that the other party may
# learn.
MAX_SHARE = 0.25
# Most bits that a step's power of two above the residuals reveals: a float64's exponent.
_EXPONENT_BITS = 11
_SHARES = "dpjax.secure.vertical_models.train_logistic"


def leverages(matrix: np.ndarray) -> np.ndarray:
  """Returns the leverage [B] in [0, 1] of each row i: how much matrix^T r tells of residual r_i.

  >>> leverages(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 5.0]])).round(6)
  array([0.5, 0.5, 1. ])
  """
  left, values, _ = np.linalg.svd(matrix, full_matrices=False)
  largest = max(values.max(initial=0.0), np.finfo(float).tiny)
  kept = values > max(_ROUNDING * largest, min(_RANK * largest, _STEP))
  return np.sum(left[:, kept] ** 2, axis=1)


def numbers_held(num_rows: int, num_features: int, *, labels: bool) -> int:
  """Returns how many numbers a party holds in its rows, with features only up to a rotation.

  >>> numbers_held(10, 3, labels=False), numbers_held(10, 3, labels=True)
  (27, 37)
  """
  features = num_rows * num_features - num_features * (num_features - 1) // 2
  return features + num_rows * labels


def equation_bits(matrix: np.ndarray, largest_residual: float) -> float:
  """Returns the most bits that the sums matrix^T r tell about the residuals r.

  The sums are rounded to multiples of 2^-SUM_BITS.

  Args:
    matrix: [B, d] of one party.
    largest_residual: bound on the absolute residuals; 1/2 if all weights are 0.

  >>> round(equation_bits(np.ones((8, 2)), 0.5), 3)  # two sums in a range of 8
  57.0
  """
  if not matrix.shape[1]:
    return 0.0
  # The bound is rounded up to a power of two. So the range of a sum reveals only its exponent.
  power = math.ceil(math.log2(max(largest_residual, 0.5)))
  with np.errstate(divide="ignore"):
    # The logarithm is -inf for a column of zeros, which reveals nothing.
    log_sums = np.log2(np.abs(matrix).sum(axis=0))
  # Logarithms are added, since a residual near 2^1023 would make the width itself overflow.
  bits = np.logaddexp2(0.0, log_sums + (power + 1 + SUM_BITS))
  return float(np.sum(bits)) + _EXPONENT_BITS


def discrete_bits(matrix: np.ndarray) -> float:
  """Returns the bits in columns of few values, by the entropy of their content.

  A column has few values if it has at most two, or if a value comes twice or more on average. The
  other party may then know the list of values.

  >>> discrete_bits(np.array([[0.0, 0.1], [1.0, 0.2], [0.0, 0.3], [1.0, 0.4]]))
  4.0
  """
  total = 0.0
  for column in matrix.T:
    _, counts = np.unique(column, return_counts=True)
    if len(counts) <= max(2, len(column) // 2):
      total += float(np.sum(counts * np.log2(len(column) / counts)))
  return total


class Disclosure:
  """Counts for both parties what all steps so far have revealed, and refuses a step that
  reveals too much.

  It is the parties' memory of the protocol, not part of a step's state: a run that starts again
  from an old state is counted again. Give the same object to every `two_party_logistic` over the
  same entities.

  Args:
    secret_labels: True: party a must not read b's labels. False: both agree that a may know
      them, so only features are guarded, and many more steps are admitted.

  >>> rng = np.random.default_rng(0)
  >>> x_a, x_b, y = rng.normal(size=(9, 2)), rng.normal(size=(9, 1)), np.arange(9) % 2
  >>> x_b = np.column_stack([x_b, np.ones(9)])
  >>> Disclosure().admit(x_a, x_b, y)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: batch: step 1 on these rows would give party a 56 bits; must be ...
  >>> seen = Disclosure(secret_labels=False)
  >>> for _ in range(4):  # a: 2 equations a step, for b's 9 features
  ...   seen.admit(x_a, x_b, y)
  >>> seen.admit(x_a, x_b, y)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: batch: step 5 on these rows would give party a 10 equations; ...
  """

  def __init__(self, *, secret_labels: bool = True):
    flag(secret_labels=secret_labels)
    self._secret_labels = secret_labels
    self._seen: set[bytes] = set()  # rows of all batches
    self._steps: dict[bytes, int] = {}  # batch -> steps on it
    self._bits: dict[bytes, dict[str, float]] = {}  # batch -> party -> bits told to it

  def admit(
    self,
    x_a: np.ndarray,
    x_b: np.ndarray,
    y: np.ndarray,
    largest_residual: float = 0.5,
  ) -> None:
    """Counts one step, or refuses it.

    Args:
      x_a, x_b: [B, f_a], and [B, f_b + 1] with the column of ones last.
      y: [B] labels, which b holds.
      largest_residual: the largest absolute residual of the step; 1/2 at weights of 0.

    Raises:
      UserError: a rule of this module is broken, or a residual is not finite. Nothing is counted.
    """
    if not largest_residual < math.inf:
      raise UserError(
        f"has a residual of {largest_residual}; must be finite", field="batch"
      )
    # Adding 0.0 turns -0 into 0: both are one number, and must have one fingerprint.
    parts = [
      np.ascontiguousarray(array + 0.0).reshape(len(array), -1)
      for array in (x_a, x_b, np.asarray(y, np.float64))
    ]
    bytes_of = lambda row: b"".join(part.tobytes() for part in row)
    rows = [hashlib.sha256(bytes_of(row)).digest() for row in zip(*parts)]
    # Equal rows count once, since a repeated row has the same residual: it is no new unknown.
    first = list({row: i for i, row in enumerate(rows)}.values())
    # A batch is identified by its rows, in any order.
    batch = hashlib.sha256(b"".join(sorted(rows))).digest()
    if batch not in self._steps:
      self._check_batch(rows)
      matrices = {"a": x_a[first], "b": x_b[first]}
      for check in (_check_rows, _check_leverages):
        for party, matrix in matrices.items():
          check(party, matrix)
    self._check_steps(batch, len(first), x_a.shape[1], x_b.shape[1])
    bits = self._bits.get(batch, {"a": 0.0, "b": 0.0})
    bits = {
      "a": bits["a"] + equation_bits(x_a, largest_residual),
      "b": bits["b"] + equation_bits(x_b, largest_residual),
    }
    self._check_bits(self._steps.get(batch, 0) + 1, bits, x_a[first], x_b[first, :-1])
    # All checks have passed; a refused step is not counted.
    self._bits[batch] = bits
    self._steps[batch] = self._steps.get(batch, 0) + 1
    self._seen.update(rows)

  def _check_batch(self, rows: list[bytes]) -> None:
    if not self._seen.isdisjoint(rows):
      raise UserError(
        "holds a row of another batch; a row must be in one batch only (the "
        "difference of two batches would tell residuals of single rows)",
        field="batch",
      )

  def _check_steps(self, batch: bytes, num_rows: int, width_a: int, width_b: int) -> None:
    step = self._steps.get(batch, 0) + 1
    held = {
      # Party a could solve for the numbers of b, and party b for those of a.
      "a": numbers_held(num_rows, width_b - 1, labels=self._secret_labels),
      "b": numbers_held(num_rows, width_a, labels=False),
    }
    for party, width in {"a": width_a, "b": width_b}.items():
      if held[party] and step * width >= held[party]:
        raise UserError(
          f"step {step} on these rows would give party {party} {step * width} "
          f"equations; must be fewer than the {held[party]} numbers that the other "
          "holds",
          field="batch",
        )

  def _check_bits(
    self, step: int, bits: dict[str, float], x_a: np.ndarray, x_b: np.ndarray
  ) -> None:
    """Refuses a step after which too few bits of labels, or of columns of few values, stay hidden.

    Args:
      bits: bits that all steps on these rows, with this one, tell each party.
      x_a, x_b: [B, f_a], [B, f_b] different rows.
    """
    # Each secret is counted alone, as if the party knew all the others.
    secrets = [("a", "columns of few values", discrete_bits(x_b))]
    secrets += [("b", "columns of few values", discrete_bits(x_a))]
    if self._secret_labels:
      secrets.insert(0, ("a", "labels", float(len(x_a))))
    for party, name, held in secrets:
      most = MAX_SHARE * held
      # Columns with a single value contain no information.
      if (held or name == "labels") and bits[party] > most:
        raise UserError(
          f"step {step} on these rows would give party {party} {bits[party]:.0f} "
          f"bits; must be <= {most:.0f}, {MAX_SHARE:g} of what the other's {name} "
          f"hold: take more rows, or train on shares ({_SHARES})",
          field="batch",
        )


def _check_rows(party: str, matrix: np.ndarray) -> None:
  num_rows, width = matrix.shape
  if num_rows <= width:
    raise UserError(
      f"{num_rows} different rows; must be more than the {width} columns of "
      f"party {party} (its gradient would tell every residual)",
      field="batch",
    )


def _check_leverages(party: str, matrix: np.ndarray) -> None:
  highest = leverages(matrix).max()
  if highest > MAX_LEVERAGE:
    raise UserError(
      f"party {party} has a row of leverage {highest:.3f}; must be <= "
      f"{MAX_LEVERAGE} (its gradient would tell that row's residual)",
      field="batch",
    )

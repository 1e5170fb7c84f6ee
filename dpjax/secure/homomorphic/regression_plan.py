"""Cost and accuracy of a regression on ciphertexts, from public numbers alone."""

from __future__ import annotations

import dataclasses
import math

from dpjax import validate
from dpjax.secure.homomorphic.ckks import Chain, rotations_of
from dpjax.validate import UserError

# Largest planned error of a standardised weight.
MOST_ERROR = 1e-4
# Number of successive products before the first doubling: X^T X, and its scaling.
GRAM = 2
# This chain uses 435 of the 438 bits of its degree.
_CHAIN = Chain(levels=7, scale_bits=45, end_bits=60)


@dataclasses.dataclass(frozen=True)
class RegressionPlan:
  """Public terms that are agreed before anything is encrypted.

  Args:
    num_rows, num_features: shape of X.
    ridge: penalty on standardised weights. With the number of columns it bounds the condition
      number, which nobody can look up in a ciphertext.
    tolerance: largest distance of the weights to the closed form after the last step, apart from
      the errors of CKKS.
    chain: parameters of CKKS.
    most_refreshes: largest number of rounds in which the owner encrypts again.

  Raises:
    UserError: too many columns; more refreshes than allowed; errors beyond 1e-4.

  >>> plan = RegressionPlan(num_rows=442, num_features=10)
  >>> plan.width, plan.rows_each, plan.num_steps, plan.depth, plan.refreshes
  (16, 512, 2048, 14, 1)
  >>> RegressionPlan(num_rows=442, num_features=10, most_refreshes=0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: most_refreshes=0: 14 products in a row need 1 with levels=7; ...
  """

  num_rows: int
  num_features: int
  ridge: float = 0.1
  tolerance: float = 1e-5
  chain: Chain = _CHAIN
  most_refreshes: int = 2

  def __post_init__(self) -> None:
    validate.integer_in(2, 2 ** (self.chain.end_bits - 1), num_rows=self.num_rows)
    validate.integer_in(1, 64, num_features=self.num_features)
    # Far beyond these numbers, float64 has no number of steps.
    validate.number_in(1e-6, 1e6, ridge=self.ridge)
    # Half of what a weight may be off by.
    validate.number_in(1e-12, MOST_ERROR / 2, tolerance=self.tolerance)
    validate.integer_at_least(0, most_refreshes=self.most_refreshes)
    if self.chain.levels < GRAM + 1:
      raise UserError(
        f"must be at least {GRAM + 1}: two products make the matrix, one squares it",
        field="levels",
        value=self.chain.levels,
      )
    if self.refreshes > self.most_refreshes:
      raise UserError(
        f"{self.depth} products in a row need {self.refreshes} with levels={self.chain.levels}; "
        "allow them, or a larger ridge",
        field="most_refreshes",
        value=self.most_refreshes,
      )
    if self.planned_error > MOST_ERROR:
      raise UserError(
        f"the weights would be off by {self.planned_error:.1e}, more than "
        f"{MOST_ERROR:g}; take more bits or a larger ridge",
        field="scale_bits",
        value=self.chain.scale_bits,
      )

  @property
  def width(self) -> int:
    """Number of columns with padding, a power of two."""
    return max(2, 1 << (self.num_features - 1).bit_length())

  @property
  def rows_each(self) -> int:
    """Number of rows in a ciphertext."""
    return self.chain.slots // self.width

  @property
  def step_size(self) -> float:
    """Step size eta <= 1 / (largest eigenvalue of A), where A = X^T X / n + ridge I. Columns are
    standardised, so the trace of X^T X / n is num_features."""
    return 1 / (self.num_features + self.ridge)

  @property
  def largest(self) -> float:
    """Bound on |w| for ridge regression on a target of variance 1."""
    return 1 / (2 * math.sqrt(self.ridge))

  @property
  def num_steps(self) -> int:
    """Number of gradient steps that `tolerance` needs in the worst case, rounded up to a power of
    two."""
    # log1p keeps the digits that 1 - eta ridge would lose.
    shrinks = -math.log1p(-self.step_size * self.ridge)
    steps = max(2.0, math.log(self.largest / self.tolerance) / shrinks)
    return 1 << math.ceil(math.log2(steps))

  @property
  def doublings(self) -> int:
    return self.num_steps.bit_length() - 1

  @property
  def depth(self) -> int:
    """Number of successive products from E(X) to E(y_hat)."""
    return GRAM + self.doublings + 1

  @property
  def refreshes(self) -> int:
    """Number of rounds in which the owner encrypts again."""
    return -(-self.depth // self.chain.levels) - 1

  @property
  def planned_error(self) -> float:
    """Estimated error of the weights against the closed form, from unfinished descent and noise.

    Let M = I - eta A (see `step_size`). An error E of M^t moves the limit by (I - M^t)^-1 E w. The
    entries of E come from rounding products, and from rounding the factor of the sums over rows.
    Eigenvalues of M are at most 1 - eta * ridge.
    """
    slowest = 1 / (self.step_size * self.ridge)
    # A bound on the sum over t = 1, 2, 4, ... of 1 / (1 - l^t), with l = 1 - eta * ridge.
    moved = 2 * slowest + self.doublings
    entry = self.chain.error + self.num_rows * self.chain.encoding_error
    norm = 2 * entry * math.sqrt(self.num_features)
    return self.tolerance + norm * self.largest * moved

  @property
  def rotations(self) -> list[int]:
    """Returns the rotations that the server needs."""
    return rotations_of([1, self.rows_each], [self.rows_each, 2])

"""Runs logistic regression of two parties with different columns of the same users.

Party a holds labels and the first columns, party b the other columns. Each party also holds users
whom the other party does not know. The parties align their rows by private set intersection. On the
rows of shared users they train like `noisy_model`, and open the weights with noise, at the same
proved epsilon.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np

from dpjax.experiments.config import common, rules
from dpjax.experiments.config.naming import within
from dpjax.experiments.kinds.secure.noisy_model import NoisyModelTask
from dpjax.experiments.kinds.secure.task import LabelledRows, Measuring
from dpjax.experiments.run.run_keys import RunKeys
from dpjax.secure.mpc import output_noise
from dpjax.secure.sums import primitives
from dpjax.secure.vertical import alignment
from dpjax.validate import UserError

_WHO = (
  "Each party clips its own columns, so that no whole row is longer than the norm below. NOT "
  "covered: each party learns which people both of them hold, and how many the other one holds. "
  "The number of shared people is public."
)

# Each party's bound is multiplied by this factor, so that rounded rows stay within `feature_norm`.
_INSIDE = 1 - 1e-8


class Aligned(NamedTuple):
  """Holds the rows of users whom both parties hold, and the cost of finding these users."""

  rows: LabelledRows  # shared users in the order of their ids; party a's columns first
  held: tuple[int, int]  # number of users of party a, of party b
  num_bytes: int  # bytes of the alignment, both directions


def clip_apart(
  parts: Sequence[np.ndarray], feature_norm: float, *, frac_bits: int
) -> np.ndarray:
  """Returns whole rows of norm at most `feature_norm`. Each party clips only its part of a row.

  No party knows the norm of a whole row. So a party clips its m of M columns to
  feature_norm sqrt(m / M). The squares of these bounds add up to feature_norm^2.

  Raises:
    UserError: `feature_norm` is so small that rounding would leave only zeros in a party's part.

  >>> parts = [np.array([[30.0]]), np.array([[0.0, 0.125]])]
  >>> clip_apart(parts, 3.0, frac_bits=3).tolist()
  [[1.625, 0.0, 0.125]]
  """
  num_columns = sum(part.shape[1] for part in parts)
  shortened = []
  for part in parts:
    # The margin of `_INSIDE` exceeds the rounding of a sum of squares. So `OutputNoise.rows`, which
    # clips whole rows, changes no row. It must not, since no party knows the norm of a whole row.
    bound = _INSIDE * feature_norm * math.sqrt(part.shape[1] / num_columns)
    # A bound that equals one step is refused, too, since `bounded_rows` clips to slightly less.
    if bound <= 2.0**-frac_bits:
      raise UserError(
        f"leaves {bound:.3g} to a party with {part.shape[1]} of {num_columns} columns; must "
        f"leave more than {2.0**-frac_bits:g}, a step of fixed point",
        field="feature_norm",
        value=feature_norm,
      )
    shortened.append(output_noise.bounded_rows(part, bound, frac_bits=frac_bits))
  return np.concatenate(shortened, axis=1)


def _people(num_rows: int, shared: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns (indices of party a's rows, indices of party b's rows), each in random order.

  The division is simulated, and the same for every seed.

  Raises:
    UserError: `shared` is so small that both parties hold no common user.
  """
  num_shared = math.floor(shared * num_rows)
  if not num_shared:
    raise UserError(
      f"must be at least 1 / {num_rows}, or nobody is held by both",
      field="task.shared",
      value=shared,
    )
  rng = np.random.default_rng(0)
  order = rng.permutation(num_rows)
  of_both = order[:num_shared]
  alone = np.array_split(order[num_shared:], 2)
  of_a, of_b = (rng.permutation(np.concatenate([of_both, own])) for own in alone)
  return of_a, of_b


@dataclasses.dataclass(frozen=True)
class ColumnsTask(NoisyModelTask):
  """`noisy_model` of two parties with different columns of the same users. Party a also holds the
  labels. The parties find their shared users by private set intersection."""

  first_columns: Annotated[
    int, rules.between(1, 2**16), "columns of party a; party b holds the others"
  ] = 10
  shared: Annotated[
    float, rules.OPEN_UNIT, "share of the training rows whose people both parties hold"
  ] = 0.8
  needs = (primitives.library, alignment.library)
  note = _WHO

  def load(self) -> Aligned:
    """Loads the data set, divides it between two parties, and aligns their rows.

    Raises:
      UserError: no column is left for party b, no user is held by both, or `task.feature_norm` is
        too small (see `clip_apart`).
    """
    rows = super().load()
    num_rows, num_columns = rows.x.shape
    why = f": party b holds others of the {num_columns} columns of {self.dataset!r}"
    with within("task"):
      common.at_most(self, "first_columns", num_columns - 1, why)
    of_a, of_b = _people(num_rows, self.shared)
    names = [f"person {place}" for place in range(num_rows)]
    found = alignment.align([names[i] for i in of_a], [names[i] for i in of_b])
    # Row i of both parts is one user. Each party reads only its own rows.
    first = rows.x[of_a][found.rows_a, : self.first_columns]  # [n, first_columns]
    second = rows.x[of_b][found.rows_b, self.first_columns :]  # [n, others]
    labels = rows.y[of_a][found.rows_a]
    tests = np.split(rows.test_x, [self.first_columns], axis=1)
    clip = functools.partial(
      clip_apart, feature_norm=self.feature_norm, frac_bits=self.frac_bits
    )
    with within("task"):
      whole = clip([first, second])
    return Aligned(
      LabelledRows(whole, labels, clip(tests), rows.test_labels),
      held=(len(of_a), len(of_b)),
      num_bytes=found.bytes_a + found.bytes_b,
    )

  def digest(self, loaded: Aligned) -> bytes:
    """Returns the digest of the aligned training data."""
    return super().digest(loaded.rows)

  def execute(self, loaded: Aligned, random: RunKeys, seed: int) -> Measuring:
    """Returns the outcome: trains on shares of the aligned rows, and opens the weights once. The
    guarantee says what the alignment reveals.

    Raises:
      UserError: nothing is proved for these rows and settings.
    """
    rows, held, num_bytes = loaded
    found = yield from super().execute(rows, random, seed)
    num_shared, num_columns = rows.x.shape
    first = self.first_columns
    return found._replace(
      protocol="private set intersection, then two parties and a dealer, noise on the output",
      sizes=f"{held[0]} and {held[1]} people, {found.sizes}",
      num_bytes=found.num_bytes + num_bytes,
      hides="columns and labels from each party and from the dealer, who do not collude; who is "
      "held by both is known to both",
      more={
        **found.more,
        "columns": [first, num_columns - first],
        "people": list(held),
        "shared_people": num_shared,
        "bytes_of_alignment": num_bytes,
      },
    )

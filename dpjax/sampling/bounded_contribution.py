"""Poisson sampling of examples with a guarantee for users, who own several examples each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.bounded_contribution import (
  BoundedContributionKind,
  bounded_contribution_event,
)
from dpjax.sampling.poisson import PoissonSampler
from dpjax.sampling.samplers import DpEvent

if TYPE_CHECKING:
  from dpjax.sampling.registry import Sizing


@dataclasses.dataclass(frozen=True)
class BoundedContributionSampler(PoissonSampler):
  """Each EXAMPLE joins a step independently; the guarantee is for a USER with all their examples.

  Each example's gradient is clipped separately. An example may have several owners, such as a
  message with a sender and receivers. Call `bound_contributions` first, which limits the number of
  examples of each user.

  Args:
    sampling_prob: sampling probability of an example, in (0, 1].
    capacity: padded batch size, in examples.
    max_contribution: largest number of examples that one user owns in the data.

  Guarantee: it holds under replace_special, where all examples of a user become empty records and
  keep their places. Who owns which example is public (Ganesh et al. 2025, arXiv:2503.03622,
  fixed-graph adjacency).

  >>> BoundedContributionSampler(sampling_prob=0.1, capacity=8, max_contribution=3).unit
  'user'
  """

  name: ClassVar[str] = "bounded_contribution"
  relations: ClassVar[tuple[str, ...]] = BoundedContributionKind.relations
  unit: ClassVar[str] = "user"
  small: ClassVar[Any] = ({"sampling_prob": 0.4, "capacity": 6, "max_contribution": 2},)

  max_contribution: int

  def __post_init__(self):
    super().__post_init__()
    validate.integer_at_least(1, max_contribution=self.max_contribution)

  @classmethod
  def sized(cls, size: Sizing) -> Any:
    # No number of a run says how many examples a user owns.
    return super(PoissonSampler, cls).sized(size)

  @property
  def rows_of_record(self) -> int:
    return self.max_contribution

  def event(self, inner: DpEvent) -> DpEvent:
    return bounded_contribution_event(
      inner, sampling_prob=self.sampling_prob, max_contribution=self.max_contribution
    )


def bound_contributions(
  owners: Sequence[Iterable[str | bytes | int]], *, max_contribution: int, seed: int = 0
) -> np.ndarray:
  """Chooses examples greedily so that nobody owns more than `max_contribution` of them.

  Examples with fewer owners are visited first, and examples with equally many owners in a random
  order. An example is kept if none of its owners has `max_contribution` examples yet. So no example
  that is left out could be added (Ganesh et al. 2025, arXiv:2503.03622, section 4). If each example
  has one owner, the largest possible number of examples is kept.

  Args:
    owners: users who own each example, as n collections; an example without owners is kept.
    max_contribution: largest number of examples of one user.
    seed: public seed of the random order. The choice uses only the owners and this seed. So it is
      public if the owners are.

  Returns:
    Row numbers of the kept examples, rising, [m] int64.

  Raises:
    UserError: max_contribution < 1, or owners of an example that are no collection of text or
      integers; one that is empty or missing.

  >>> bound_contributions([("ann", "bob"), ("ann",), ("bob",), ("ann",)], max_contribution=1)
  array([2, 3])
  """
  validate.integer_at_least(1, max_contribution=max_contribution)
  validate.integer_at_least(0, seed=seed)
  each = [_of_one(row, names) for row, names in enumerate(owners)]
  order = np.random.default_rng([seed, 0x0117]).permutation(len(each))
  # An example with many owners uses up a place of each of them, so it comes late.
  order = order[np.argsort([len(each[row]) for row in order], kind="stable")]
  taken: Counter[str] = Counter()
  kept = []
  for row in order:
    if all(taken[name] < max_contribution for name in each[row]):
      taken.update(each[row])
      kept.append(row)
  return np.sort(np.asarray(kept, np.int64))


def _of_one(row: int, names: Any) -> frozenset[str]:
  # A string is one user's name, not a collection of letters.
  several = [names] if isinstance(names, str | bytes) else names
  return frozenset(validate.owner_ids(**{f"owners[{row}]": several}))

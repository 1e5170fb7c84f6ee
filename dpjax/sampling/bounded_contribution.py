"""Poisson sampling of examples with a guarantee for users, who own several examples each."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from dpjax import validate
from dpjax.accounting.event_kinds.bounded_contribution import (
  BoundedContributionKind,
  bounded_contribution_event,
)
from dpjax.sampling.poisson import PoissonSampler
from dpjax.sampling.samplers import DpEvent


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

  @property
  def rows_of_record(self) -> int:
    return self.max_contribution

  def event(self, inner: DpEvent) -> DpEvent:
    return bounded_contribution_event(
      inner, sampling_prob=self.sampling_prob, max_contribution=self.max_contribution
    )
